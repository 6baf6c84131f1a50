"""Declaring a kernel: a wrong declaration fails where it is made, and everything else follows from a right one."""

# A declaration is data, and its functions take no self.

from __future__ import annotations

import json
import re

import cuda.tile as ct
import numpy as np
import pytest

import tiledsched as ts
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core import launches, registry
from tiledsched.core.arrays import strides_of
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ConfigError, DeclarationError, ProblemError
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import run_schedule

DEVICE = arch_spec("sm_90")


@pytest.fixture(autouse=True)
def own_names():
    """What a test declares is known to that test alone."""
    before = dict(registry._known)
    yield
    registry._known.clear()
    registry._known.update(before)


def scale_rows(X, Out, factor: float, columns, TILE: ct.Constant[int]):
    x = ct.load(X, (ct.bid(0), 0), (1, TILE), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Out, (ct.bid(0), 0), (x * factor).astype(Out.dtype))


def right(**changes):
    """The fields of a right declaration, some changed; those that are None are left out."""
    fields = {
        "function": scale_rows,
        "rows": ts.dim(),
        "columns": ts.dim(constant=True),
        "dtype": ts.dtype("float32", "float16"),
        "X": ts.array("rows columns"),
        "Out": ts.out("rows columns"),
        "factor": ts.scalar(2.0),
        "knobs": {"TILE": [64, 128], "occupancy": [1, 2]},
        "constraints": {"TILE >= columns": "a row is one tile"},
        "suites": {"all": [{"rows": 5, "columns": 40}]},
        "grid": lambda p, s, device: (p.rows,),
        "reference": lambda xp, X, factor: X * factor,
        "__module__": __name__,
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def declare(base=ts.Kernel, **changes):
    return type("Declared", (base,), right(**changes))


def steps_of(kernel, p, s):
    return launches.steps(kernel, p, s, DEVICE)


def kinds(step):
    return {each.name: each.kind for each in step.arguments}


# ---- what is wrong is said where it is made --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"constraints": {"TILE >= colums": "x"}},
            "constraints[0].require = 'TILE >= colums' reads unknown name 'colums'; known are TILE, col",
        ),
        ({"exploring": {"open(1)": "x"}}, ".require = 'open(1)' uses Call; only names, numbers"),
        ({"constraints": {"TILE >": "x"}}, "constraints[0].require = 'TILE >' is not an expression"),
        (
            {"knobs": {"TILE": [64], "STAGES": [1, 2]}},
            "knobs['STAGES']: neither a parameter of scale_rows nor a hint (num_ctas",
        ),
        ({"knobs": {"TILE": []}}, "knobs.TILE.choices must be a list with at least one value"),
        (
            {"knobs": {"TILE": [64, "wide"]}},
            "knobs.TILE.choices must all be of one kind (integers, true/false or strings)",
        ),
        ({"knobs": {"TILE": [64.0]}}, "knobs.TILE.choices must all be of one kind"),
        (
            {"knobs": {"TILE": ts.knob([64, 128], default=96)}},
            "knobs.TILE.default = 96 is not one of its choices [64, 128]",
        ),
        (
            {"knobs": {"TILE": [64], "occupancy": [1, 33]}},
            "knobs['occupancy']: 33 is no such hint; allowed are 0 to 32",
        ),
        ({"knobs": {"TILE": [64], "opt_level": [-1]}}, "knobs['opt_level']: -1 is no such hint; allowed are 0 to 3"),
        ({"knobs": {"TILE": [64], "num_ctas": ["two"]}}, "knobs['num_ctas']: 'two' is no such hint"),
        ({"knobs": {"TILE": [64], "rows": [1]}}, "knobs['rows']: there is a field of that name"),
        ({"grid": lambda p, s, device: (p.rows / 2,)}, "grid: must be 1 to 3 positive integers, got (2.5,)"),
        ({"grid": lambda p, s, device: (1, 1, 1, 1)}, "grid: must be 1 to 3 positive integers, got (1, 1, 1, 1)"),
        ({"grid": lambda p, s, device: (p.rows, 0)}, "grid: must be 1 to 3 positive integers, got (5, 0)"),
        ({"grid": lambda p, s, device: None}, "grid: must be 1 to 3 positive integers, got None"),
        ({"grid": lambda p, s, device: (p.lines,)}, "it raises AttributeError"),
        ({"grid": None}, "a kernel needs grid(p, s, device)"),
        (
            {"function": None},
            "function: there is none; name the cuTile kernel, or give entry(p, s) or launches(p, s, device)",
        ),
        (
            {"function": "scale_rows"},
            "expected a cuTile kernel or a function, got 'scale_rows'; decorate one with @ct.kernel",
        ),
        ({"cost": ts.Cost}, "cost: must be an object of a subclass of ts.Cost, as in cost = MyCost()"),
        ({"similarity": 2}, "similarity: must be an object of a subclass of ts.Similarity"),
        ({"reference": None}, "reference: missing; declare reference(xp, ...)"),
        ({"reference": lambda xp, X: X[:, :1]}, "reference: returns Out of shape"),
        ({"reference": lambda xp, X: ()}, "reference: returns 0 arrays; the outputs are Out"),
        (
            {"reference": lambda xp, Y: Y},
            "reference: its parameter 'Y' is called like nothing declared; known are factor, X",
        ),
        ({"reference": lambda xp, X: X @ X @ X}, "reference: for"),
        ({"X": ts.array("lines columns")}, "X: 'lines' is no size; known are columns, dtype, rows and numbers"),
        ({"X": ts.array("")}, "X: the shape is empty"),
        ({"X": ts.array("rows TILE")}, "X: 'TILE' is no size"),
        ({"X": ts.array("rows columns", dtype="float17")}, "X: its type 'float17' is neither a dtype field nor a type"),
        ({"dtype": None}, "X: its type 'dtype' is neither"),
        (
            {"X": ts.array("rows columns", layout="diagonal")},
            "X: layout 'diagonal' is neither row, column nor a choice",
        ),
        (
            {"order": ts.choice("nn", "nt"), "X": ts.array("rows columns", layout="order")},
            "X: layout 'order' is neither",
        ),
        ({"X": ts.array("rows columns", when="scaled")}, "X: when = 'scaled' is no flag; declare it with ts.flag()"),
        ({"X": ts.array("rows columns", when="rows")}, "X: when = 'rows' is no flag"),
        ({"X": ts.array("rows columns", below="lines")}, "X: below = 'lines' is no field"),
        (
            {"Out": ts.array("rows columns")},
            "function: no array is an output; declare one with ts.out(...) or ts.inout(...)",
        ),
        (
            {"Out": None, "Result": ts.out("rows columns")},
            "parameter 'Out' of scale_rows is called like nothing declared",
        ),
        (
            {"factor": None},
            "parameter 'factor' of scale_rows is called like nothing declared (X, Out, TILE, occupancy, rows",
        ),
        ({"suites": {"all": [{"rows": 5}]}}, "suites['all']: a problem of"),
        ({"suites": {"all": [{"rows": 0, "columns": 40}]}}, "suites['all']: rows must be a positive integer, got 0"),
        (
            {"suites": {"all": [{"rows": 5, "columns": 40, "lines": 1}]}},
            "suites['all']: unknown problem keys ['lines']",
        ),
        ({"values": ts.dim(1)}, "values: the name is taken"),
        ({"p": ts.dim(1)}, "p: the name is taken"),
        ({"label": ts.dim(1)}, "label"),
        ({"_hidden": ts.dim(1)}, "_hidden: the name is taken"),
        ({"derived": {"rows": lambda p: 1}}, "derived['rows']: there is a field of that name"),
        ({"label": {"R": "lines"}}, "label['R']: 'lines' is no field; known are"),
        ({"axes": ("lines",)}, "axes: 'lines' is no field; known are"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_wrong_declaration_names_the_field_and_what_is_allowed(changes, words):
    with pytest.raises(DeclarationError, match=re.escape(words)):
        declare(**changes)


@pytest.mark.parametrize(
    ("field", "given", "words"),
    [
        (ts.dtype, (), "name one or more of float16, bfloat16"),
        (ts.dtype, ("float16", "half"), "name one or more of float16"),
        (ts.choice, (), "name the words to choose from"),
    ],
)
def test_a_wrong_field_is_refused_at_once(field, given, words):
    with pytest.raises(DeclarationError, match=words):
        field(*given)


@pytest.mark.parametrize(
    "read", [lambda s: s["PART"], lambda s: s.PART, lambda s: s.get("PART", 1), lambda s: s.number("PART")]
)
def test_a_knob_that_only_the_grid_reads_is_right_however_it_is_read(read):
    knobs = {"TILE": [64, 128], "PART": [1, 2]}
    assert declare(knobs=knobs, grid=lambda p, s, device: (p.rows * read(s),)).knobs == knobs


def test_a_wrong_declaration_is_not_known():
    with pytest.raises(DeclarationError):
        declare(name="wrong", axes=("lines",))
    with pytest.raises(ConfigError, match=r"'wrong' is not known here.*; name the file or module"):
        registry.kernel_named("wrong")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rows": 5}, "needs columns"),
        ({"rows": 5, "columns": 8, "dtype": "int8"}, "dtype must be one of float32, float16, got 'int8'"),
        ({"rows": True, "columns": 8}, "rows must be a positive integer, got True"),
        ({"rows": 5, "columns": 8, "groups": []}, "groups must be a list of positive integers, got []"),
        ({"rows": 5, "columns": 8, "groups": [3, 0]}, "groups must be a list of positive integers, got [3, 0]"),
        ({"rows": 9, "columns": 8}, "rows must be at most 8, got 9"),
    ],
)
def test_a_wrong_problem_names_the_field_and_what_is_allowed(values, words):
    kernel = declare(rows=ts.dim(most=8), groups=ts.sizes((1,)))
    with pytest.raises(ProblemError, match=re.escape(words)):
        kernel.problem(**values)


# ---- what follows from a right one -----------------------------------------------------------------------------------


def test_parameters_get_arguments_by_their_names():
    kernel = declare()
    (step,) = steps_of(kernel, kernel.problem(rows=5, columns=40), Schedule(TILE=64, occupancy=2))
    assert kinds(step) == {"X": "array", "Out": "array", "factor": "scalar", "columns": "scalar", "TILE": "constant"}
    assert (step.tail, step.grid) == ((2.0, 40, 64), (5, 1, 1))
    assert [each.dtype for each in step.arguments] == ["", "", "float32", "int32", ""]


def test_annotations_tell_constants_from_scalars():
    def function(X, Out, factor: ct.Constant[float], rows, columns: ct.Constant[int], turned, mode, TILE, MORE):
        pass

    function.__annotations__ = {"factor": ct.Constant[float], "columns": ct.Constant[int]}
    kernel = declare(
        function=function,
        turned=ts.flag(),
        mode=ts.choice("a", "b"),
        derived={"MORE": lambda p: p.rows * 2},
        constants=lambda p, s: {"mode": ("b", "a").index(p.mode)},
    )
    (step,) = steps_of(kernel, kernel.problem(rows=5, columns=40), Schedule(TILE=64, occupancy=1))
    constants = dict.fromkeys(("factor", "columns", "turned", "mode", "TILE"), "constant")
    assert kinds(step) == {"X": "array", "Out": "array", "rows": "scalar", "MORE": "scalar", **constants}
    assert step.tail == (2.0, 5, 40, False, 1, 64, 10)


def test_hints_of_a_decorated_kernel_stay_unless_they_are_knobs():
    kernel = declare(
        function=ct.kernel(occupancy=2, num_ctas=4)(scale_rows), knobs={"TILE": [64], "num_ctas": [1, 2, 0]}
    )
    p = kernel.problem(rows=5, columns=40)
    (step,) = steps_of(kernel, p, Schedule(TILE=64, num_ctas=2))
    assert step.function is scale_rows
    assert (step.hints["occupancy"], step.hints["num_ctas"]) == (2, 4)
    for asked, got in ((2, 2), (0, None)):
        (made,) = launches.tile_kernels(kernel, {"sm_90": Schedule(TILE=64, num_ctas=asked)}, p, DEVICE)
        options = made._compiler_options
        assert (options.occupancy, options.num_ctas) == (2, ct.ByTarget(default=got, sm_90=got))


def halve(X, Out, TILE: ct.Constant[int]):
    ct.store(Out, (ct.bid(0), 0), (ct.load(X, (ct.bid(0), 0), (1, TILE)) * 0.5).astype(Out.dtype))


def test_an_entry_is_chosen_by_problem_and_schedule():
    kernel = declare(
        half=ts.flag(),
        entry=lambda p, s: halve if p.half else scale_rows,
        reference=lambda xp, X, factor, half: X * (0.5 if half else factor),
    )
    s = Schedule(TILE=64, occupancy=1)
    for half in (False, True):
        p = kernel.problem(rows=5, columns=40, half=half)
        (step,) = steps_of(kernel, p, s)
        assert step.function is (halve if half else scale_rows)
        padded = kernel.problem(rows=5, columns=64, half=half)
        x = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
        np.testing.assert_array_equal(run_schedule(kernel, padded, s, {"X": x})["Out"], x * (0.5 if half else 2.0))


def add_parts(X, Parts, TILE: ct.Constant[int], SPLITS: ct.Constant[int]):
    total = ct.sum(ct.load(X, (ct.bid(0), ct.bid(1)), (1, TILE), padding_mode=ct.PaddingMode.ZERO))
    ct.store(Parts, (ct.bid(1), ct.bid(0)), total.reshape((1, 1)))


def add_up(Parts, Sum, SPLITS: ct.Constant[int]):
    ct.store(Sum, (ct.bid(0),), ct.sum(ct.load(Parts, (0, ct.bid(0)), (SPLITS, 1)), axis=0))


class RowSums(ts.Kernel):
    """Two launches in a row with a workspace between them, as large as a knob says."""

    rows, columns, dtype = ts.dim(), ts.dim(), ts.dtype("float32")
    X, Parts, Sum = ts.array("rows columns"), ts.workspace("SPLITS rows"), ts.out("rows")
    knobs = {"SPLITS": [1, 2, 4], "TILE": [16, 32]}
    constraints = {"SPLITS * TILE >= columns": "the tiles hold a row"}
    suites = {"all": [{"rows": 3, "columns": 30}]}

    def launches(p, s, device):
        return [(add_parts, (p.rows, s["SPLITS"])), (ct.kernel(add_up), p.rows)]

    def reference(xp, X):
        return X.sum(-1)


def test_launches_in_a_row_share_a_workspace():
    """As large as a constraint of knobs and sizes allows."""
    p, s = RowSums.problem(rows=7, columns=50), Schedule(SPLITS=4, TILE=16)
    found = {(each["SPLITS"], each["TILE"]) for each in space_for("sm_90", RowSums).schedules(p)}
    assert found == {(2, 32), (4, 16), (4, 32)}
    first, second = steps_of(RowSums, p, s)
    assert (first.function, first.grid, second.function, second.grid) == (add_parts, (7, 4, 1), add_up, (7, 1, 1))
    assert RowSums.grids(p, s, DEVICE) == (first.grid, second.grid)
    (parts,) = launches.scratch(RowSums, p, s, (first, second))
    assert (parts.name, parts.shape, parts.dtype, parts.zeroed) == ("Parts", (4, 7), "float32", False)
    assert [each.name for each in RowSums.arrays(p)] == ["X", "Sum"]
    assert p.min_bytes == 4 * (7 * 50 + 7)
    assert check_schedule(RowSums, p, s) == (True, pytest.approx(0, abs=1e-5), "")
    x = np.random.default_rng(0).standard_normal((7, 50)).astype(np.float32)
    np.testing.assert_allclose(run_schedule(RowSums, p, s, {"X": x})["Sum"], x.sum(-1), rtol=1e-5)


def test_a_column_layout_swaps_the_last_two_axes_in_memory():
    kernel = declare(order=ts.choice("row", "column"), X=ts.array("rows columns", layout="order"))
    s = Schedule(TILE=64, occupancy=1)
    for order, strides, unit in (("row", (48, 1), 1), ("column", (1, 32), 0)):
        p = kernel.problem(rows=32, columns=48, order=order)
        spec = kernel.array_spec("X", p)
        assert (spec.column, strides_of(spec.shape, spec.column)) == (order == "column", strides)
        (step,) = steps_of(kernel, p, s)
        x, out = launches.signature(kernel, p, s, step).parameters[:2]
        assert (x.stride_constant[unit], x.stride_constant[1 - unit], out.stride_constant[1]) == (1, None, 1)
        assert x.stride_divisible_by[1 - unit] == 4  # 16 bytes
        assert check_schedule(kernel, p, s)[0]
    two = [
        launches.problem_class(kernel, kernel.problem(rows=32, columns=48, order=order), s, DEVICE).id
        for order in ("row", "column")
    ]
    assert two[0] != two[1]


def test_problem_classes_differ_in_what_machine_code_depends_on():
    kernel, s = declare(), Schedule(TILE=64, occupancy=1)
    p = kernel.problem(rows=5, columns=40)

    def class_of(p):
        return launches.problem_class(kernel, p, s, DEVICE)

    assert class_of(p.replace(rows=500)) == class_of(p)
    assert class_of(p).to_json()["columns"] == 40
    for changes in ({"columns": 44}, {"columns": 41}, {"dtype": "float16"}, {"rows": 1 << 31}):
        assert class_of(p.replace(**changes)).id != class_of(p).id
    assert type(class_of(p)).from_json(json.loads(json.dumps(class_of(p).to_json()))) == class_of(p)


def add_bias(X, Bias, Out, Rest, biased, TILE: ct.Constant[int]):
    x = ct.load(X, (ct.bid(0), 0), (1, TILE))
    if biased:
        total = x + ct.load(Bias, (0,), (TILE,))
        ct.store(Rest, (ct.bid(0), 0), x - total)
        x = total
    ct.store(Out, (ct.bid(0), 0), x)


def test_what_only_some_problems_have_is_there_when_they_do():
    def reference(xp, X, Bias, biased):
        return (X + Bias, -Bias * xp.ones_like(X)) if biased else X

    kernel = declare(
        function=add_bias,
        factor=None,
        biased=ts.flag(omit_default=True),
        Bias=ts.array("columns", when="biased"),
        Rest=ts.out("rows columns", when="biased"),
        reference=reference,
    )
    without = kernel.problem(rows=3, columns=64)
    both, s = without.replace(biased=True), Schedule(TILE=64, occupancy=1)
    names = [{each.name for each in kernel.arrays(p)} for p in (both, without)]
    assert names == [{"X", "Bias", "Out", "Rest"}, {"X", "Out"}]
    assert (kernel.array_spec("Bias", without).shape, kernel.array_spec("Rest", without).role) == ((1,), "workspace")
    assert both.min_bytes - without.min_bytes == 4 * (64 + 3 * 64)
    assert (without.to_json().get("biased"), both.to_json()["biased"]) == (None, True)
    for p in (without, both):
        assert check_schedule(kernel, p, s)[0]


def double_all(Xs, Outs, experts: ct.Constant[int], TILE: ct.Constant[int]):
    for each in range(len(Xs)):
        x = ct.load(Xs[each], (ct.bid(0), 0), (1, TILE), padding_mode=ct.PaddingMode.ZERO)
        ct.store(Outs[each], (ct.bid(0), 0), x * 2)


def test_lists_of_arrays_have_a_shape_for_each():
    def shapes(p):
        return [(rows, p.columns) for rows in p.groups]

    kernel = declare(
        function=double_all,
        factor=None,
        X=None,
        Out=None,
        rows=None,
        groups=ts.sizes(),
        label={"D": "columns"},
        derived={"experts": lambda p: len(p.groups)},
        Xs=ts.arrays(shapes),
        Outs=ts.outs(shapes),
        grid=lambda p, s, device: max(p.groups),
        reference=lambda xp, Xs: [x * 2 for x in Xs],
        suites={"all": [{"groups": [2, 3], "columns": 16}]},
    )
    p, s = kernel.problem(groups=[3, 7, 1], columns=40), Schedule(TILE=64, occupancy=1)
    assert (p.groups, p.experts, p.to_json()["groups"]) == ((3, 7, 1), 3, [3, 7, 1])
    assert registry.problem_from_json(json.loads(json.dumps(p.to_json()))) == p
    assert str(p) == "columns=40 float32 groups=3,7,1"
    xs, outs = kernel.arrays(p)
    assert (xs.listed, xs.shapes, outs.shapes) == (True, ((3, 40), (7, 40), (1, 40)), xs.shapes)
    assert p.min_bytes == 2 * 4 * 11 * 40
    (step,) = steps_of(kernel, p, s)
    assert kinds(step) == {"Xs": "list", "Outs": "list", "experts": "constant", "TILE": "constant"}


def test_names_follow_from_the_declaration():
    kernel = declare(
        derived={"tiles": lambda p: -(-p.rows // 4)},
        Out=ts.out("rows columns"),
        axes=("rows", "tiles"),
        label={"R": ("rows",)},
        W=ts.workspace("tiles*4 columns/3 2"),
    )
    p = kernel.problem(rows=5, columns=40)
    assert (p.tiles, p.names) == (2, {"rows": 5, "columns": 40, "dtype": "float32", "tiles": 2})
    assert kernel.array_spec("W", p, Schedule(TILE=64)).shape == (8, 14, 2)  # a quotient rounds up
    assert (kernel.name, registry.kernel_named(kernel.name)) == (f"{__name__}:Declared", kernel)
    assert kernel.suite("all") == [p]
    with pytest.raises(ConfigError, match=r"has no suite 'none'; known are all"):
        kernel.suite("none")


def test_a_subclass_inherits_what_it_does_not_say():
    base = declare(name="base")
    other = type("Other", (base,), {"name": "other", "factor": ts.scalar(3.0), "__module__": __name__})
    p, s = other.problem(rows=3, columns=40), Schedule(TILE=64, occupancy=1)
    assert (p.kernel, list(other.fields), other.scalar_values(p)) == ("other", list(base.fields), {"factor": 3.0})
    assert check_schedule(other, p, s)[0]
    assert base.scalar_values(p) == {"factor": 2.0}
