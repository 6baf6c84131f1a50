"""Sums in shapes, integers of which the values are declared, and what is prepared before a kernel runs."""

# A declaration is data, and its functions take no self.

from __future__ import annotations

import cuda.tile as ct
import numpy as np
import pytest
from store_samples import entry

import tiledsched as ts
from tiledsched.checking.inputs import make_cases
from tiledsched.checking.interpreted import check_schedule
from tiledsched.cli.problems import read_problems
from tiledsched.core import registry
from tiledsched.core.cases import random_inputs, shrunk
from tiledsched.core.config import Settings
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import DeclarationError, ProblemError
from tiledsched.core.launches import steps
from tiledsched.core.problem import Requirement
from tiledsched.core.shapes import is_solvable, read_shape, shape_names, solve, split_shape
from tiledsched.kernels.attention_backward import AttentionBackward
from tiledsched.serve.entries import load_entries
from tiledsched.serve.schema import OpSchema
from tiledsched.store.db import TuningDB
from tiledsched.store.evidence import of_kernel
from tiledsched.store.shipped import read_copy, write_copy

SIZES = {"rows": 7, "columns": 48, "experts": 5}


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("experts+1", (6,)),
        ("experts + 1", (6,)),
        ("rows 2*columns", (7, 96)),
        ("columns//2 rows/2 rows//2", (24, 4, 3)),
        ("rows*columns/5", (68,)),
        ("(rows + columns)*2 experts-1", (110, 4)),
        ("( rows+1 )//2 3", (4, 3)),
        ("rows-1-2", (4,)),
        ("1", (1,)),
    ],
)
def test_sizes_are_sums_products_and_quotients(shape, sizes) -> None:
    assert read_shape(shape, SIZES.__getitem__) == sizes
    assert shape_names(shape) <= set(SIZES)


@pytest.mark.parametrize("shape", ["rows, columns", "rows**2", "rows+", "f(rows)", "rows%2", "[rows]", "1.5", "-rows"])
def test_what_is_no_size_is_told(shape) -> None:
    with pytest.raises(ValueError, match=r"is no size; axes are parted by spaces"):
        shape_names(shape)


@pytest.mark.parametrize(
    "word", ["experts+1", "2*experts", "(experts+3)*4-rows", "9-experts", "experts//1", "experts*rows/7"]
)
def test_a_size_is_solved_for_its_one_unknown(word) -> None:
    (size,) = read_shape(word, SIZES.__getitem__)
    assert is_solvable(word, "experts")
    assert solve(word, "experts", size, {"rows": 7}.__getitem__) == 5


def test_what_cannot_be_solved() -> None:
    assert not is_solvable("rows*rows", "rows")
    assert not is_solvable("8/rows", "rows")
    assert solve("columns/2", "columns", 24, SIZES.__getitem__) == 48
    with pytest.raises(ValueError, match=r"must be 2\*columns, and no columns makes that 7"):
        solve("2*columns", "columns", 7, SIZES.__getitem__)
    assert split_shape("a + 1 b") == ("a+1", "b")


@ct.kernel
def group_sums(X, Offsets, Out, TILE: ct.Constant[int]):
    """The sum of the rows of each group."""
    group, column = ct.bid(0), ct.bid(1)
    first, last = ct.gather(Offsets, group), ct.gather(Offsets, group + 1)
    total = ct.zeros((1, TILE), ct.float32)
    for row in range(first, last):
        total += ct.load(X, (row, column), (1, TILE), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    ct.store(Out, (group, column), total.astype(Out.dtype))


class GroupSums(ts.Kernel):
    """Offsets rise from 0 to the number of rows; neighbours are equal where a group is empty."""

    function = group_sums
    rows, columns, groups = ts.dim(), ts.dim(), ts.dim()
    X = ts.array("rows columns", dtype="float32")
    Offsets = ts.array("groups+1", dtype="int32", sorted=True, first=0, last="rows")
    Out = ts.out("groups columns", dtype="float32")
    knobs = {"TILE": [16, 32]}
    suites = {"small": [{"rows": 9, "columns": 20, "groups": 4}]}

    def grid(p, s, device):
        return p.groups, -(-p.columns // s["TILE"])

    def reference(xp, X, Offsets, groups):
        return xp.stack([X[Offsets[g] : Offsets[g + 1]].sum(0) for g in range(groups)])


@ct.kernel
def label_losses(X, Labels, Out, columns: ct.Constant[int], TILE: ct.Constant[int], IGNORED: ct.Constant[int]):
    row = ct.bid(0)
    x = ct.load(X, (row, 0), (1, TILE), padding_mode=ct.PaddingMode.NEG_INF)
    top = ct.max(x)
    total = ct.log(ct.sum(ct.exp(x - top))) + top
    label = ct.gather(Labels, row)
    loss = total - ct.gather(X, (row, ct.maximum(label, 0)))
    ct.scatter(Out, row, ct.where(label == IGNORED, 0.0, loss))


class LabelLosses(ts.Kernel):
    """Cross entropy of each row; labels of -100 are ignored."""

    function = label_losses
    rows, columns = ts.dim(), ts.dim(constant=True)
    X = ts.array("rows columns", dtype="float32")
    Labels = ts.array("rows", dtype="int64", below="columns", sentinel=-100)
    Out = ts.out("rows", dtype="float32")
    knobs = {"TILE": [64]}
    constraints = {"TILE >= columns": "a row is one tile"}
    suites = {"small": [{"rows": 30, "columns": 50}]}

    def constants(p, s):
        return {"IGNORED": -100}

    def grid(p, s, device):
        return p.rows

    def reference(xp, X, Labels):
        total = xp.log(xp.exp(X - X.max(1, keepdims=True)).sum(1)) + X.max(1)
        return xp.where(Labels == -100, 0, total - X[xp.arange(len(X)), xp.maximum(Labels, 0)])


@ct.kernel
def gather_pages(Cache, Table, Out, TILE: ct.Constant[int], NONE: ct.Constant[int]):
    row, place = ct.bid(0), ct.bid(1)
    page = ct.gather(Table, (row, place))
    found = ct.load(Cache, (ct.maximum(page, 0), 0), (1, TILE), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Out, (row, place, 0), ct.where(page == NONE, 0.0, found).reshape((1, 1, TILE)))


class GatherPages(ts.Kernel):
    """The pages of each sequence; -1 is no page."""

    function = gather_pages
    batch, places, blocks, columns = ts.dim(), ts.dim(), ts.dim(), ts.dim()
    Cache = ts.array("blocks columns", dtype="float32")
    Table = ts.array("batch places", dtype="int32", below="blocks", sentinel=-1)
    Out = ts.out("batch places columns", dtype="float32")
    knobs = {"TILE": [32]}
    suites = {"small": [{"batch": 3, "places": 5, "blocks": 4, "columns": 20}]}

    def constants(p, s):
        return {"NONE": -1}

    def grid(p, s, device):
        return p.batch, p.places

    def reference(xp, Cache, Table):
        return xp.where(Table[..., None] < 0, 0, Cache[xp.maximum(Table, 0)])


class GatherPagesWithoutSentinels(GatherPages):
    """A page of -1 is taken to be the first."""

    def constants(p, s):
        return {"NONE": -2}


class LabelLossesIgnoringNothing(LabelLosses):
    """A label of -100 is taken to be 0."""

    def constants(p, s):
        return {"IGNORED": -1}


def checked(kernel):
    (p,) = kernel.suite("small")
    return check_schedule(kernel, p, ts.Schedule({name: each[0] for name, each in kernel.knobs.items()}))


def test_kernels_are_checked_on_sentinels_and_offsets() -> None:
    assert checked(GroupSums)[0], checked(GroupSums)
    for kernel in (LabelLosses, GatherPages):
        assert checked(kernel)[0], checked(kernel)
    for kernel in (LabelLossesIgnoringNothing, GatherPagesWithoutSentinels):
        passed, _, message = checked(kernel)
        assert not passed
        assert "Out" in message


def test_every_kind_of_integers_is_among_the_inputs() -> None:
    def labels(kernel, name):
        (p,) = kernel.suite("small")
        cases = make_cases(kernel, np, np.random.default_rng(0), p)
        return {case.kinds: case.inputs[name].tolist() for case in cases}

    found = labels(GroupSums, "Offsets")
    assert found["smallest"] == [0, 0, 0, 0, 9]
    assert found["largest"] == [0, 9, 9, 9, 9]
    assert "sentinel" not in found
    assert found["random"] == sorted(found["random"])
    assert (found["random"][0], found["random"][-1]) == (0, 9)
    found = labels(LabelLosses, "Labels")
    assert set(found["smallest"]) == {0}
    assert set(found["largest"]) == {49}
    assert set(found["sentinel"]) == {-100}
    assert -100 in found["random"]
    assert set(found["random"]) <= {-100, *range(50)}
    assert len(set(found["random"])) > 5


def declared(shape="count", **said):
    fields = {
        "function": group_sums,
        "count": ts.dim(),
        "X": ts.array(shape, **{"dtype": "int32", **said}),
        "Out": ts.out("count", dtype="float32"),
        "__module__": __name__,
    }
    return type("Declared", (ts.Kernel,), fields)


@pytest.mark.parametrize(
    ("said", "right"),
    [
        ({"below": "count"}, lambda x: x.min() >= 0 and x.max() < 400),
        ({"least": -3, "below": 4}, lambda x: set(x.tolist()) == set(range(-3, 4))),
        ({"sentinel": (-1, -2), "below": 5}, lambda x: set(x.tolist()) == set(range(-2, 5))),
        ({"distinct": True, "below": "count"}, lambda x: sorted(x.tolist()) == list(range(400)) != x.tolist()),
        ({"distinct": True, "below": "count*count", "sorted": True}, lambda x: (np.diff(x) > 0).all()),
        ({"sorted": True, "last": "count+3", "least": 2}, lambda x: (np.diff(x) >= 0).all() and x[-1] == 403),
        ({"dtype": "bool_"}, lambda x: x.dtype == bool),
        ({"dtype": "uint8", "below": 256}, lambda x: x.max() > 200),
    ],
)
def test_random_integers_are_as_declared(said, right) -> None:
    kernel = declared(**said)
    x = random_inputs(kernel, np, np.random.default_rng(1), kernel.problem(count=400))["X"]
    assert x.shape == (400,)
    assert right(x)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"shape": "count, 2"}, "X: 'count,' is no size; axes are parted by spaces"),
        (
            {"sentinel": -1, "dtype": "float32"},
            "X: least, below, sentinel, sorted, distinct, first and last are said of",
        ),
        ({"last": "rows"}, "X: last = 'rows' is no field"),
        ({"below": "count+"}, "X: 'count+' is no size"),
        ({"sorted": True, "sentinel": -1}, "X: sorted values have no sentinels"),
    ],
)
def test_what_is_said_wrongly_is_refused(said, words) -> None:
    with pytest.raises(DeclarationError) as caught:
        declared(**said)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"distinct": True, "below": 9}, "X: 400 elements cannot be distinct where 9 values are allowed"),
        ({"dtype": "int8", "below": "count"}, "X: int8 does not hold 399; declare a wider type"),
        ({"dtype": "uint8", "sentinel": -1}, "X: uint8 does not hold -1"),
        ({"least": 3, "below": 3}, "X: no value is at least 3 and below 3"),
    ],
)
def test_values_that_no_array_can_hold_are_refused(said, words) -> None:
    kernel = declared(**said)
    with pytest.raises(ProblemError) as caught:
        random_inputs(kernel, np, np.random.default_rng(1), kernel.problem(count=400))
    assert words in str(caught.value)


def test_no_size_is_negative_and_none_divides_by_zero() -> None:
    kernel = declared(shape="count-9")
    with pytest.raises(ProblemError, match=r"the shape 'count-9' is \(-4,\) for count=5; no size may be negative"):
        kernel.arrays(kernel.problem(count=5))


class Tensor:
    """As much of a tensor as a schema reads."""

    def __init__(self, *shape, dtype="float32"):
        self.shape, self.ndim, self.dtype = shape, len(shape), f"torch.{dtype}"


def test_an_operator_solves_for_the_sizes() -> None:
    schema = OpSchema(GroupSums, {})
    assert str(schema) == "(Tensor X, Tensor Offsets) -> Tensor"
    assert schema.problem([Tensor(9, 20), Tensor(5, dtype="int32")]) == GroupSums.problem(rows=9, columns=20, groups=4)
    with pytest.raises(ProblemError, match="groups must be a positive integer, got -1"):
        schema.problem([Tensor(9, 20), Tensor(0, dtype="int32")])
    doubled = OpSchema(declared(shape="2*count 3"), {})
    assert doubled.problem([Tensor(8, 3, dtype="int32")]).count == 4
    with pytest.raises(ProblemError, match=r"X, axis 0: must be 2\*count, and no count makes that 7"):
        doubled.problem([Tensor(7, 3, dtype="int32")])
    halved = OpSchema(declared(shape="count//2"), {})
    assert halved.problem([Tensor(8, dtype="int32")]).count == 16


class Scaled(ts.Kernel):
    """Groups of columns share a scale."""

    function = group_sums
    rows, columns, group = ts.dim(), ts.dim(), ts.dim(32)
    X = ts.array("rows columns", dtype="float32")
    Scales = ts.array("rows columns/group", dtype="float32")
    Out = ts.out("rows columns", dtype="float32")
    derived = {"groups": lambda p: p.columns // p.group}
    requires = {"columns % group == 0": "a row is made of whole groups", "groups < 1000": "at most 999 groups fit"}

    def reference(xp, X, Scales, group):
        return X * xp.repeat(Scales, group, axis=1)


REFUSED = "a row is made of whole groups: columns % group == 0 is false for columns=40, group=32"


def test_what_a_kernel_requires_is_said_where_it_is_not_met() -> None:
    assert Scaled.problem(rows=3, columns=64).groups == 2
    schema = OpSchema(Scaled, {"group": 32})
    for refused in (
        lambda: Scaled.problem(rows=3, columns=40),
        lambda: Scaled.problem(rows=3, columns=64).replace(columns=40),
        lambda: read_problems(Scaled, "rows=3,columns=64:40"),
        lambda: schema.problem([Tensor(3, 40), Tensor(3, 2)]),
        lambda: schema.empty_problem([Tensor(0, 40), Tensor(0, 2)]),
    ):
        with pytest.raises(ProblemError) as caught:
            refused()
        assert str(caught.value) == REFUSED
    with pytest.raises(ProblemError, match="at most 999 groups fit: groups < 1000 is false for groups=1000"):
        Scaled.problem(rows=3, columns=32000)
    with pytest.raises(ProblemError, match=r"columns % group == 0 cannot be evaluated \(.* by zero\) for columns=32"):
        type("Any", (Scaled,), {"group": ts.dim(32, least=0), "__module__": __name__}).problem(
            rows=3, columns=32, group=0
        )
    assert schema.empty_problem([Tensor(3, 0), Tensor(3, 0)]).values == {"rows": 3, "columns": 0, "group": 32}


def test_small_problems_meet_what_a_kernel_requires() -> None:
    assert shrunk(Scaled, Scaled.problem(rows=100, columns=4096, group=128)).values == {
        "rows": 3,
        "columns": 128,
        "group": 4,
    }
    square = {"requires": {"rows == columns": "it is square"}, "__module__": __name__}
    kernel = type("Square", (Scaled,), square)
    assert shrunk(kernel, kernel.problem(rows=4096, columns=4096)).rows == 3


def test_what_a_problem_does_without_a_small_problem_does_without() -> None:
    windowed = {"seq_q": 140, "seq_k": 140, "head_dim": 16, "causal": True, "window": 30, "window_right": 40}
    small = shrunk(AttentionBackward, AttentionBackward.problem(**windowed))
    assert (small.packed, small.seq_q, small.seq_k) == (0, 3, 3)


@pytest.mark.parametrize(
    ("requires", "words"),
    [
        (
            {"columns % TILE == 0": "x"},
            "requires: 'columns % TILE == 0' reads unknown name 'TILE'; known are columns, group",
        ),
        ({"columns %": "x"}, "requires: 'columns %' is not an expression"),
        ({"columns > 1": ""}, "requires['columns > 1']: say why"),
    ],
)
def test_requirements_that_say_nothing_are_refused(requires, words) -> None:
    with pytest.raises(DeclarationError) as caught:
        type("Wrong", (Scaled,), {"requires": requires, "knobs": {"TILE": [16]}, "__module__": __name__})
    assert words in str(caught.value)


def test_what_was_stored_before_a_kernel_required_more_stops_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(registry._known, GroupSums.name, GroupSums)  # another test may have loaded this file once more
    problem = GroupSums.problem(rows=9, columns=20, groups=4)
    kept = entry("modelled", kernel=GroupSums.name, problem=problem, schedule=ts.Schedule({"TILE": 16}))
    kept = kept.replace(source_hash=GroupSums.evidence_source())
    settings = Settings(db=str(tmp_path / "x.db"), cache=str(tmp_path / "cache"))
    with TuningDB.open(settings.db) as db:
        db.put_entry(kept)
    assert [each.problem for each in load_entries(settings, {"sm_90"}, GroupSums)] == [problem]
    before = read_copy(write_copy([kept], "").encode())
    assert [each.problem for each in of_kernel(before, GroupSums)] == [problem]
    stricter = (Requirement(require="rows > 9", because="x", names=("rows",), holds=lambda rows: rows > 9),)
    monkeypatch.setattr(GroupSums, "requirements", stricter)
    assert not of_kernel(read_copy(write_copy([kept], "").encode()), GroupSums)
    for _ in range(2):  # from the database, and from its copy
        assert not [each for each in load_entries(settings, {"sm_90"}, GroupSums) if each.layer == "user"]
    assert [each.problem.known for each in load_entries(settings, {"sm_90"}) if each.layer == "user"] == [False]


# What a declaration has done before its kernel runs: outputs set to zero, and copies of inputs in another type or layout


# A declaration is data, and its functions take no self.


Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO
DEVICE = arch_spec("sm_90")


@ct.kernel
def count_values(Values, Counts, count, TILE: Int):
    place = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    values = ct.gather(Values, place, padding_value=0)
    ct.atomic_add(Counts, ct.where(place < count, values, -1), 1)


class Histogram(ts.Kernel):
    """How often each value occurs; -1 is no value."""

    function = count_values
    count, bins = ts.dim(), ts.dim()
    Values = ts.array("count", dtype="int32", below="bins", sentinel=-1)
    Counts = ts.out("bins", dtype="int32", zeroed=True)
    knobs = {"TILE": [64, 128]}
    suites = {"small": [{"count": 200, "bins": 9}]}

    def grid(p, s, device):
        return -(-p.count // s["TILE"])

    def reference(xp, Values, bins):
        return xp.bincount(Values[Values >= 0], minlength=bins)


@ct.kernel
def product_of_rows(A, Bt, C, k, TILE: Int):
    i, j = ct.bid(0), ct.bid(1)
    total = ct.zeros((TILE, TILE), ct.float32)
    for step in range(ct.cdiv(k, TILE)):
        a = ct.load(A, (i, step), (TILE, TILE), padding_mode=ZERO)
        b = ct.load(Bt, (j, step), (TILE, TILE), padding_mode=ZERO)
        total = ct.mma(a, ct.transpose(b), total)
    ct.store(C, (i, j), total.astype(C.dtype))


class ProductOfRows(ts.Kernel):
    """A product that reads a transposed copy of its second matrix, cast to the type of the first."""

    function = product_of_rows
    m, n, k = ts.dim(), ts.dim(), ts.dim()
    A = ts.array("m k", dtype="float16")
    B = ts.array("k n", dtype="float32")
    Bt = ts.workspace("n k", dtype="float16", copy_of="B", aligned=True)
    C = ts.out("m n", dtype="float32")
    knobs = {"TILE": [16, 32], "num_ctas": [1, 2]}
    suites = {"small": [{"m": 40, "n": 70, "k": 33}]}

    def grid(p, s, device):
        return -(-p.m // s["TILE"]), -(-p.n // s["TILE"])

    def reference(xp, A, B):
        return A @ B


@ct.kernel
def add_parts(X, Sums, SPLITS: Int, TILE: Int):
    row, part = ct.bid(0), ct.bid(1)
    x = ct.load(X, (row, part), (1, TILE), padding_mode=ZERO)
    if SPLITS > 1:
        ct.atomic_add(Sums, row, ct.sum(x))
    else:
        ct.scatter(Sums, row, ct.sum(x))


class SplitSums(ts.Kernel):
    """Sums of rows, whose output needs zeros only where a schedule splits them."""

    rows, columns = ts.dim(), ts.dim()
    X = ts.array("rows columns", dtype="float32")
    Sums = ts.out("rows", dtype="float32")
    knobs = {"TILE": [64, 16]}
    suites = {"small": [{"rows": 3, "columns": 50}]}

    def constants(p, s):
        return {"SPLITS": -(-p.columns // s["TILE"])}

    def launches(p, s, device):
        splits = -(-p.columns // s["TILE"])
        return [*([ts.zero("Sums")] if splits > 1 else []), (add_parts, (p.rows, splits))]

    def reference(xp, X):
        return X.sum(1)


@pytest.mark.parametrize("kernel", [Histogram, ProductOfRows, SplitSums])
def test_what_is_prepared_is_right_with_every_schedule(kernel) -> None:
    (p,) = kernel.suite("small")
    for tile in kernel.knobs["TILE"]:
        s = ts.Schedule({name: each[0] for name, each in kernel.knobs.items()} | {"TILE": tile})
        assert check_schedule(kernel, p, s)[0], check_schedule(kernel, p, s)


def test_without_zeros_the_check_fails() -> None:
    plain = {"Counts": ts.out("bins", dtype="int32"), "__module__": __name__}
    kernel = type("Unprepared", (Histogram,), plain)
    assert not check_schedule(kernel, kernel.suite("small")[0], ts.Schedule({"TILE": 64}))[0]


def test_preparations_are_launches_of_their_own() -> None:
    (p,) = ProductOfRows.suite("small")
    copied, main = steps(ProductOfRows, p, ts.Schedule({"TILE": 16, "num_ctas": 2}), DEVICE)
    assert [each.name for each in copied.arguments if each.kind == "array"] == ["B", "Bt"]
    assert (copied.grid, copied.prepares, main.prepares) == ((3 * 2, 1, 1), True, False)
    assert len(steps(SplitSums, SplitSums.suite("small")[0], ts.Schedule({"TILE": 64}), DEVICE)) == 1
    assert SplitSums.grids(SplitSums.suite("small")[0], ts.Schedule({"TILE": 16}), DEVICE) == ((1, 1, 1), (3, 4, 1))


@pytest.mark.parametrize("shape", ["rows", "rows columns", "4 rows columns"])
@pytest.mark.parametrize("how", ["same", "swapped", "column"])
@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2", "int32", "bool_"])
def test_copies_of_any_shape_type_and_layout(shape, how, dtype) -> None:
    axes = shape.split()
    target = " ".join((*axes[:-2], *axes[-2:][::-1])) if how == "swapped" else shape
    fields = {
        "rows": ts.dim(),
        "columns": ts.dim(2),
        "X": ts.array(shape, dtype=dtype),
        "Kept": ts.workspace(target, dtype=dtype, copy_of="X", layout="column" if how == "column" else "row"),
        "Out": ts.out(target, dtype=dtype),
        "launches": lambda p, s, device: [ts.copy("Kept", "Out")],
        "reference": lambda xp, X: X.swapaxes(-1, -2) if how == "swapped" and X.ndim > 1 else X,
        "__module__": __name__,
    }
    kernel = type("Copied", (ts.Kernel,), fields)
    passed, _, message = check_schedule(kernel, kernel.problem(rows=37, columns=70), ts.Schedule({}))
    assert passed, message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"Bt": ts.workspace("n k", copy_of="D")}, "Bt: copy_of = 'D' is no input; known are A, B"),
        (
            {"Bt": ts.workspace("m k", copy_of="B")},
            "Bt: a copy of B has its shape, 'k n', or its last two axes swapped",
        ),
        ({"Bt": ts.workspace("n k", copy_of="B", zeroed=True)}, "Bt: a copy is not zero"),
        ({"C": ts.out("m n", dtype="float8_e8m0fnu", zeroed=True)}, "C: float8_e8m0fnu has no 0"),
        ({"launches": lambda p, s, device: [ts.zero("D")]}, "a zero of 'D', which is no array; known are A, B, Bt, C"),
        (
            {"launches": lambda p, s, device: [ts.copy("A", "C")]},
            "C: a copy of A, (40, 33), must have its shape, got (40, 70)",
        ),
    ],
)
def test_preparations_that_cannot_be_are_refused(changes, words) -> None:
    with pytest.raises(DeclarationError) as caught:
        type("Wrong", (ProductOfRows,), {**changes, "__module__": __name__})
    assert words in str(caught.value)


def test_operators_prepare_every_call(launches) -> None:
    torch = pytest.importorskip("torch")
    histogram = ts.op("tiledsched_tests::histogram", Histogram)
    product = ts.op("tiledsched_tests::product_of_rows", ProductOfRows)
    values = torch.from_numpy(np.random.default_rng(0).integers(-1, 9, 300).astype(np.int32))
    a, b = torch.randn(20, 33).half(), torch.randn(33, 40)
    for _ in range(3):
        assert torch.equal(histogram(values, bins=9), torch.bincount(values[values >= 0], minlength=9).int())
        torch.testing.assert_close(product(a, b), a.float() @ b.half().float(), rtol=2e-3, atol=2e-3)
    assert len(launches) == 12


@pytest.mark.compiler
def test_preparations_are_built_with_their_kernel() -> None:
    from tiledsched.build.compiler import compile_schedule

    made = compile_schedule(
        ProductOfRows, ProductOfRows.suite("small")[0], ts.Schedule({"TILE": 16, "num_ctas": 1}), "sm_90"
    )
    assert made.facts.spill_bytes == 0
