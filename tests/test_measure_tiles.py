"""Errors per tile against numbers worked out by hand, and what is said of them."""

from __future__ import annotations

import math
from typing import ClassVar

import cuda.tile as ct
import numpy as np
import pytest

import tiledsched as ts
from tiledsched.checking.errors import OutputErrors, case_errors, output_errors, summary, wrong_result
from tiledsched.checking.inputs import make_cases
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core.arrays import ArraySpec, Tolerance, poison, storage_type, to_float, to_storage
from tiledsched.core.cases import Case
from tiledsched.core.errors import DeclarationError
from tiledsched.core.schedule import Schedule

GATE = Tolerance(relative=0.5, absolute=0.1)


def spec_of(array, dtype="float64", **more):
    return ArraySpec(name="Out", role="out", dtype=dtype, shapes=(array.shape,), **more)


def errors_of(out, expected, tile, dtype="float64", **more):
    return output_errors(np, spec_of(out, dtype, **more), out, expected, GATE, tile)


def compare(out, expected, tile_m):
    return summary([errors_of(out, expected, (tile_m, out.shape[-1]))], repeatable=True)


@pytest.mark.parametrize("where", [(0, 0, 0), (1, 2, 3), (0, 1, 2), (1, 0, 1)])
@pytest.mark.parametrize("value", [7.0, math.nan, math.inf, -math.inf])
def test_the_worst_tile_is_found(where, value):
    batch, head, tile = where
    expected = np.random.default_rng(0).standard_normal((2, 3, 14, 8))  # tiles of 4, 4, 4 and 2 rows
    out = expected + 1e-6
    out[batch, head, tile * 4 + 1, 5] = value
    found = compare(out, expected, 4)
    assert found.worst_tile == where
    if math.isfinite(value):
        assert 0.1 < found.worst_tile_error < 10
    else:
        assert found.worst_tile_error == found.max_abs_error == math.inf


@pytest.mark.parametrize("at_once", [1, 13, 40, 1 << 26])
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_tiles_of_rows_and_columns(monkeypatch, at_once, dtype):
    """Against a loop, however little is compared at a time; the last tile of each axis is smaller."""
    monkeypatch.setattr("tiledsched.checking.errors.ELEMENTS_AT_ONCE", at_once)
    rng = np.random.default_rng(0)
    expected = rng.standard_normal((3, 2, 7, 10))
    out = (expected + 0.1 * rng.standard_normal(expected.shape)).astype(dtype)
    found = errors_of(out, expected, (3, 4), dtype)
    assert found.errors.shape == (6, 3, 3)
    for outer, row, column in np.ndindex(6, 3, 3):
        part = np.index_exp[outer // 2, outer % 2, row * 3 : row * 3 + 3, column * 4 : column * 4 + 4]
        error = np.linalg.norm(out[part].astype("float64") - expected[part]) / np.linalg.norm(expected[part])
        assert found.errors[outer, row, column] == pytest.approx(error)
    assert found.largest == pytest.approx(np.abs(out.astype("float64") - expected).max())
    flat = 5 * 9 + 2 * 3 + 1
    assert found.place(flat) == (2, 1, 2, 1)
    assert found.words(flat) == "Out[2, 1], row tile 2, column tile 1"


@pytest.mark.parametrize("shape", [(), (5,), (600,), (2, 600), (3, 2, 600)])
def test_any_number_of_axes(shape):
    expected = np.ones(shape)
    out = expected.copy()
    out[(-1,) * len(shape)] = 3.0
    found = errors_of(out, expected, (64, 256))
    columns = shape[-1] if shape else 1
    assert found.errors.shape == (math.prod(shape[:-2]), 1, -(-columns // 256))
    assert np.argwhere(found.errors).tolist() == [[n - 1 for n in found.errors.shape]]
    last = columns - 256 * ((columns - 1) // 256)
    assert found.errors.max() == pytest.approx(2 / math.sqrt(last * (2 if shape[-2:] == (2, 600) else 1)))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_expected_rows_that_are_zero(dtype):
    expected = np.zeros((1, 1, 4, 2), dtype=dtype)
    assert compare(expected.copy(), expected, 2).worst_tile_error == 0.0
    out = expected.copy()
    out[0, 0, 3, 0] = 1e-3
    found = compare(out, expected, 2)
    assert found.worst_tile == (0, 0, 1)
    assert found.worst_tile_error > 1e6


def test_absolute_errors():
    expected = np.zeros((1, 2, 10, 1))
    expected[0, 1, 8:] = -np.inf
    out = expected.astype(np.float32)

    def found():
        return errors_of(out, expected, (4, 1), "float32", absolute=True).errors[..., 0]

    assert not found().any()
    out[0, 0, 5] = 0.25
    assert found().tolist() == [[0, 0.25, 0], [0, 0, 0]]
    for value in (np.nan, 0.0, np.inf):  # where an infinity is expected, only the same will do
        out[0, 1, 9] = value
        assert found()[1, 2] == np.inf
    out[0, 0, 0] = -np.inf
    assert found()[0, 0] == np.inf


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_integers_must_be_equal(dtype):
    expected = np.arange(600) % 2
    out = expected.astype(dtype)
    assert wrong_result([errors_of(out, expected, (64, 256), dtype)], Case("random", {}, ())) is None
    out[[3, 299]] = 1 - out[[3, 299]].astype(int)
    found = errors_of(out, expected, (64, 256), dtype)
    assert found.errors.tolist() == [[[1, 1, 0]]]
    assert wrong_result([found], Case("random", {}, ())).message == (
        "random inputs: unequal elements 1 above 0 in Out, row tile 0, column tile 0, the first of 2 wrong tiles of 3"
    )
    assert summary([found], repeatable=True).max_abs_error == 1.0


def test_the_first_and_the_worst_wrong_tile_are_named():
    relative = np.full((6, 4, 1), 0.5)
    case = Case("abcdef", {}, ())

    def message():
        found = OutputErrors(
            output="Out", measure="relative error", limit=0.5, outer=(2, 3), errors=relative, largest=1.0
        )
        failure = wrong_result([found], case)
        return failure and failure.message

    case = Case(tuple("abcdef"), {}, ())
    assert message() is None
    relative[2, 3], relative[4, 0] = 0.6, math.inf
    assert message() == (
        "c inputs: relative error 0.6 above 0.5 in Out[0, 2], row tile 3, the first of 2 wrong tiles of 24; "
        "the worst, inf, on e inputs in Out[1, 1], row tile 0"
    )
    relative[2, 3] = math.nan  # never let through, whatever made it
    assert "in Out[0, 2]" in message()
    relative[2, 3] = 0.1
    assert message().endswith("row tile 0, the first of 1 wrong tiles of 24")


def test_several_outputs_and_lists():
    specs = [
        ArraySpec(name="A", role="out", dtype="float64", shapes=((3,),), absolute=True),
        ArraySpec(name="Bs", role="out", dtype="float64", shapes=((3,), (2, 2)), listed=True),
    ]
    expected = (np.ones(3), [np.ones(3), np.ones((2, 2))])
    case = Case("random", {}, expected)
    outputs = {"A": np.ones(3) + 0.05, "Bs": [np.ones(3), np.full((2, 2), 1.25)]}
    found = case_errors(np, specs, outputs, case, GATE, (64, 256))
    assert [(each.output, each.measure) for each in found] == [
        ("A", "error"),
        ("Bs[0]", "relative error"),
        ("Bs[1]", "relative error"),
    ]
    assert wrong_result(found, case) is None
    assert summary(found, repeatable=True).worst_tile_error == 0.25  # of outputs judged relatively
    outputs["Bs"][1][0, 0] = 9.0
    assert "in Bs[1], row tile 0" in wrong_result(case_errors(np, specs, outputs, case, GATE, (64, 256)), case).message


def test_excused_kinds():
    spec = ArraySpec(name="Out", role="out", dtype="float64", shapes=((3, 2, 2),))
    gate = Tolerance(relative=0.5, except_kinds=("large",))
    wrong = {"Out": np.full((3, 2, 2), np.inf)}
    case = Case(("edges", "large", "edges"), {}, (np.ones((3, 2, 2)),))
    (found,) = case_errors(np, [spec], wrong, case, gate, (2, 2))
    assert found.errors.reshape(3).tolist() == [math.inf, 0.0, math.inf]
    (found,) = case_errors(np, [spec], wrong, Case("large", {}, case.expected), gate, (2, 2))
    assert not found.errors.any()


def test_a_reference_of_another_shape_is_told():
    with pytest.raises(DeclarationError, match=r"the reference gives Out of shape \(1, 3\), declared is \(3,\)"):
        errors_of(np.ones(3), np.ones((1, 3)), (2, 2))


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(
    ("dtype", "out", "expected", "right"),
    [
        ("float32", [math.nan, 1.0], [math.nan, 1.0], True),
        ("float32", [math.inf, -math.inf], [math.inf, -math.inf], True),
        ("float16", [math.inf, 1.0], [1e5, 1.0], True),  # what float16 makes of 1e5
        ("float16", [-math.inf, 1.0], [1e5, 1.0], False),
        ("float32", [math.inf, 1.0], [1e5, 1.0], False),
        ("float32", [math.inf, 1.0], [-math.inf, 1.0], False),
        ("float32", [1.0, math.nan], [math.nan, 1.0], False),
        ("float32", [0.0, 1.0], [math.inf, 1.0], False),
        ("float32", [math.inf, 1.0], [math.nan, 1.0], False),
        ("float32", [math.nan, 1.0], [math.inf, 1.0], False),
        ("float32", [math.nan, 9.0], [math.nan, 1.0], False),
    ],
)
def test_what_is_not_finite_is_right_where_it_is_equal(dtype, out, expected, right, absolute):
    """And the finite elements beside it are judged as ever."""
    found = errors_of(np.array(out, dtype), np.array(expected), (1, 2), dtype, absolute=absolute)
    assert (wrong_result([found], Case("random", {}, ())) is None) is right
    assert math.isfinite(found.largest) is (right or out[1] == 9.0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_an_element_that_nothing_wrote_is_wrong_where_nan_is_right(dtype):
    out = np.zeros(4, storage_type(dtype))
    poison(out, dtype)
    assert np.isnan(to_float(np, out, dtype)).all()
    out[:3] = to_storage(np, np.full(3, np.nan), dtype)
    found = errors_of(out, np.full(4, np.nan), (1, 1), dtype)
    assert found.errors.reshape(4).tolist() == [0.0, 0.0, 0.0, math.inf]


def exponentials(X, Out, SHIFT: ct.Constant[bool], COLUMNS: ct.Constant[int]):
    x = ct.load(X, (ct.bid(0), 0), (1, COLUMNS))
    e = ct.exp(x - ct.max(x, axis=1, keepdims=True)) if SHIFT else ct.exp(x)
    ct.store(Out, (ct.bid(0), 0), e / ct.sum(e, axis=1, keepdims=True))


def logarithms(X, Out, SHIFT: ct.Constant[bool], COLUMNS: ct.Constant[int]):
    x = ct.load(X, (ct.bid(0), 0), (1, COLUMNS))
    ct.store(Out, (ct.bid(0), 0), ct.log(x if SHIFT else ct.maximum(x, 1.0)))


class Exponentials(ts.Kernel):
    function = exponentials
    rows, COLUMNS = ts.dim(), ts.dim(constant=True)
    X, Out = ts.array("rows COLUMNS", dtype="float32"), ts.out("rows COLUMNS", dtype="float32")
    knobs: ClassVar = {"SHIFT": [True, False]}

    def grid(p, s, device):
        return (p.rows,)

    def reference(xp, X):
        e = xp.exp(X)  # as most people write it: float64 holds what float32 does not
        return e / e.sum(-1, keepdims=True)


class Logarithms(Exponentials):
    function = logarithms

    def reference(xp, X):
        return xp.log(X)


@pytest.mark.parametrize("kernel", [Exponentials, Logarithms])
@pytest.mark.filterwarnings("ignore:divide", "ignore:invalid", "ignore:overflow")
@pytest.mark.parametrize("columns", [4, 64])
def test_a_right_kernel_passes_and_one_that_overflows_or_loses_nan_does_not(kernel, columns):
    """A softmax without its maximum is right until float32 overflows; half the logarithms are NaN."""
    p = kernel.problem(rows=16, COLUMNS=columns)
    passed, _, message = check_schedule(kernel, p, Schedule(SHIFT=True))
    assert passed, message
    passed, error, message = check_schedule(kernel, p, Schedule(SHIFT=False))
    assert (passed, error) == (False, math.inf)
    assert message.startswith("large inputs" if kernel is Exponentials else "random inputs")


def test_large_inputs_are_as_large_as_what_is_judged_allows():
    """Where float16 ends, or a difference is judged, they are 30 or 16 times as large as random ones, as far as that can be."""

    def scale(kernel):
        p = kernel.problem(rows=16, COLUMNS=64)
        cases = list(make_cases(kernel, np, np.random.default_rng(0), p))
        random = np.abs(cases[0].inputs["X"]).max()
        return [round(float(np.abs(case.inputs["X"]).max() / random)) for case in cases if case.kinds == "large"]

    class Squares(Exponentials):
        Out = ts.out("rows COLUMNS", dtype="float16")

        def reference(xp, X):
            return X * X

    class Sums(Exponentials):
        Out = ts.out("rows COLUMNS", dtype="float32", absolute=True)

        def reference(xp, X):
            return X * 64.0

    assert (scale(Exponentials), scale(Squares), scale(Sums)) == ([96], [30], [16])
