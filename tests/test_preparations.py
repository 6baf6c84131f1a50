"""What a declaration has done before its kernel runs: outputs set to zero, and copies of inputs in another type or layout."""

# A declaration is data, and its functions take no self.

from __future__ import annotations

import cuda.tile as ct
import numpy as np
import pytest

import tiledsched as ts
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import DeclarationError
from tiledsched.core.launches import steps

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
