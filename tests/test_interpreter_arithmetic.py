"""Products that are added or subtracted as a GPU computes them: which of them are fused, to what, and what mistakes that shows."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path

import cuda.tile as ct
import ml_dtypes
import numpy as np
import pytest
from lanes import LOG2_E, LanesCrossEntropy
from test_declaration import own_names  # noqa: F401  # what a test declares is known to that test alone

import tiledsched as ts
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule
from tiledsched.interpreter import InterpreterError, run

COMBINED = (
    "ct.max(top, axis=1, keepdims=True), "
    "ct.sum(total * ct.exp2((top - ct.max(top, axis=1, keepdims=True)) * LOG2_E), axis=1, keepdims=True)"
)
PLANTED = {
    "cross_entropy": (
        ("Int = ct.Constant[int]", "Int = ct.Constant[int]\nLOG2_E = 1.4426950408889634"),
        ("ct.full((1, 1), -1e30", "ct.full((1, TILE), -1e38"),
        ("ct.zeros((1, 1)", "ct.zeros((1, TILE)"),
        ("ct.max(x, axis=1, keepdims=True))", "x)"),
        ("ct.exp(top - higher)", "ct.exp2(top * LOG2_E - higher * LOG2_E)"),
        ("ct.sum(ct.exp(x - higher), axis=1, keepdims=True)", "ct.exp2(x * LOG2_E - higher * LOG2_E)"),
        ("    right = ", f"    top, total = {COMBINED}\n    right = "),
    ),
    "online_softmax": (
        ("Int = ct.Constant[int]", "Int = ct.Constant[int]\nLOG2_E = 1.4426950408889634"),
        ("ct.full((TM, 1), -1e30", "ct.full((TM, TN), -1e38"),
        ("ct.zeros((TM, 1)", "ct.zeros((TM, TN)"),
        ("ct.max(x, axis=1, keepdims=True))", "x)"),
        ("ct.exp(top - higher)", "ct.exp2(top * LOG2_E - higher * LOG2_E)"),
        ("ct.sum(ct.exp(x - higher), axis=1, keepdims=True)", "ct.exp2(x * LOG2_E - higher * LOG2_E)"),
        ("            top = higher\n", f"            top = higher\n        top, total = {COMBINED}\n"),
    ),
}
"""A kernel of `thirteen` -> the edits that keep a maximum and a sum for each column of a tile, from a finite stand-in for minus
infinity on."""
RIGHT = ("ct.exp2(top * LOG2_E - higher * LOG2_E)", "ct.exp2((top - higher) * LOG2_E)")
"""What makes the edited kernels right: the difference of two equal stand-ins is zero before it is scaled."""
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FACTOR = {"float16": 1 + 2.0**-6, "bfloat16": 1 + 2.0**-4, "float32": 1 + 2.0**-12}
"""A number of each type whose square is rounded down."""
LOST = {"float16": 2.0**-12, "bfloat16": 2.0**-8, "float32": 2.0**-24}
"""What the square loses."""
SIZE = 8


def added(x, y, z):
    return x * y + z


def subtracted(x, y, z):
    return x * y - -z


def subtracted_from(x, y, z):
    return z - -x * y


def added_in_a_function(x, y, z):
    return added(x, y, z)


def added_under_a_branch(x, y, z):
    product = x * y
    total = z
    if ct.bid(0) >= 0:
        total = product + z
    return total


def cast_to_its_own_type(x, y, z):
    return (x * y).astype(z.dtype) + z


def reshaped_to_its_own_shape(x, y, z):
    return ct.broadcast_to((x * y).reshape((SIZE,)), (SIZE,)) + z


def all_nearest_even(x, y, z):
    nearest = ct.RoundingMode.RN
    return ct.add(ct.mul(x, y, rounding_mode=nearest), z)


def with_a_constant_factor(x, y, z):
    return (x * 2.0) * (y * 0.5) + z


def negated(x, y, z):
    return -(x * y) - z


def reshaped(x, y, z):
    return ((x * y).reshape((2, SIZE // 2)) + z.reshape((2, SIZE // 2))).reshape((SIZE,))


def broadcast(x, y, z):
    one = ct.max(x, axis=0, keepdims=True) * ct.max(y, axis=0, keepdims=True)
    return one + z


def chosen(x, y, z):
    return ct.where(x > 0.0, x * y, 0.0) + z


def no_less_than_zero(x, y, z):
    return ct.maximum(x * y, 0.0) + z


def summed(x, y, z):
    return ct.sum(x * y, axis=0, keepdims=True) + z


def used_twice(x, y, z):
    product = x * y
    return ct.where(z > 0.0, product, product + z)


def carried(x, y, z):
    product, total = z, z
    for _ in range(2):
        total = ct.maximum(total, product + z)
        product = x * y
    return total


FUSED = (
    added,
    subtracted,
    subtracted_from,
    added_in_a_function,
    added_under_a_branch,
    cast_to_its_own_type,
    reshaped_to_its_own_shape,
    all_nearest_even,
    with_a_constant_factor,
)
SEPARATE = (negated, reshaped, broadcast, chosen, no_less_than_zero, summed)
ONLY_HERE = (used_twice, carried)
"""Forms that the interpreter fuses and the compiler does not."""


def kernel_of(form):
    """A kernel that computes a form of three tiles of eight elements."""

    @ct.kernel
    def computed(X, Y, Z, Out):
        ct.store(Out, (0,), form(ct.load(X, (0,), (SIZE,)), ct.load(Y, (0,), (SIZE,)), ct.load(Z, (0,), (SIZE,))))

    return computed


def computed(form, x, y, z, dtype="float32", arithmetic="fused"):
    """The form of three numbers."""
    arrays = [np.full(SIZE, value, NUMPY[dtype]) for value in (x, y, z, np.nan)]
    run(kernel_of(form), 1, arrays, arithmetic=arithmetic)
    assert np.array_equal(arrays[-1], np.full(SIZE, arrays[-1][0]), equal_nan=True)
    return float(arrays[-1][0])


def lost(form, dtype="float32", arithmetic="fused"):
    """What the form keeps of the part of a square that rounding loses."""
    x = FACTOR[dtype]
    return computed(form, x, x, -float(NUMPY[dtype](x * x)), dtype, arithmetic)


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("form", FUSED)
def test_a_product_that_is_added_or_subtracted_is_not_rounded(form, dtype):
    assert abs(lost(form, dtype)) == abs(lost(form, dtype, "flushed")) == LOST[dtype]
    assert lost(form, dtype, "rounded") == 0.0


@pytest.mark.parametrize("form", SEPARATE)
def test_a_product_that_is_changed_before_it_is_added_is_rounded(form):
    assert lost(form) == lost(form, arithmetic="fused right") == lost(form, arithmetic="rounded")


def test_a_product_that_is_used_elsewhere_is_rounded_there():
    x = FACTOR["float32"]
    assert computed(used_twice, x, x, 1.0) == float(np.float32(x * x)) != x * x
    assert lost(used_twice) == lost(carried) == LOST["float32"]


@pytest.mark.parametrize("arithmetic", ["fused", "flushed", "fused right"])
def test_of_two_products_one_is_fused(arithmetic):
    x, kept = FACTOR["float32"], LOST["float32"]
    assert computed(both, x, x, 0.0, arithmetic=arithmetic) == (-kept if arithmetic == "fused right" else kept)


def both(x, y, z):
    return x * x - y * y


def of_two_types(x, y, z):
    return (x.astype(ct.float16) * y.astype(ct.float16)) + z


def less_itself(x, y, z):
    product = x * y
    return (product - product) + 0.0 * z


@pytest.mark.parametrize("arithmetic", ["fused", "flushed"])
def test_a_product_of_another_type_is_rounded_and_less_itself_it_is_zero(arithmetic):
    x = FACTOR["float16"]
    assert computed(of_two_types, x, x, -float(np.float16(x * x)), arithmetic=arithmetic) == 0.0
    x = FACTOR["float32"]
    assert computed(less_itself, x, x, 1.0, arithmetic=arithmetic) == 0.0


def flushing_both(x, y, z):
    return ct.add(ct.mul(x, y, flush_to_zero=True), z, flush_to_zero=True)


def flushing_one(x, y, z):
    return ct.mul(x, y, flush_to_zero=True) + z


def quotient(x, y, z):
    return ct.minimum(x, 1e-3) / y * 1e-3 + z


SMALL, TINY, MOST = 2.0**-126, 2.0**-130, (2e19, 2e19)


@pytest.mark.parametrize(
    ("form", "given", "arithmetic", "found"),
    [
        # A fused product does not overflow, and NaN stays.
        (added, (*MOST, -3e38), "fused", float(np.float32(2e19)) ** 2 - float(np.float32(3e38))),
        (added, (*MOST, -3e38), "rounded", np.inf),
        (added, (np.inf, 0.0, 1.0), "fused", np.nan),
        (added, (*MOST, np.inf), "fused", np.inf),
        (subtracted, (*MOST, -np.inf), "fused", -np.inf),
        # A fused pair flushes its operands and its result, but not the product.
        (flushing_both, (2.0**-65, 2.0**-65, SMALL), "fused", SMALL + TINY),
        (flushing_both, (2.0**-65, 2.0**-65, SMALL), "rounded", SMALL),
        (flushing_both, (2.0**-64, 2.0**-64, -(2.0**-127)), "fused", 0.0),
        (flushing_both, (2.0**-127, 1.0, SMALL), "fused", SMALL),
        (flushing_one, (2.0**-65, 2.0**-65, SMALL), "fused", SMALL),  # the flags differ: two operations
        # Numbers near zero are zero where all is flushed.
        (added, (TINY, 2.0**20, 0.0), "fused", 2.0**-110),
        (added, (TINY, 2.0**20, 0.0), "flushed", 0.0),
        (added, (2.0**-65, 2.0**-65, 0.0), "flushed", 0.0),
        (added, (2.0**-65, 2.0**-65, SMALL), "flushed", SMALL + TINY),
        (quotient, (1.0, TINY, 0.0), "fused", 1e-6 / TINY),
        (quotient, (1.0, TINY, 0.0), "flushed", np.inf),
    ],
)
def test_where_products_overflow_and_near_zero(form, given, arithmetic, found):
    assert computed(form, *given, arithmetic=arithmetic) == pytest.approx(found, rel=1e-6, abs=0, nan_ok=True)


def test_an_unknown_arithmetic_is_refused():
    with pytest.raises(InterpreterError, match=r"arithmetic is one of .*, got 'fast'"):
        computed(added, 1.0, 1.0, 1.0, arithmetic="fast")


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("form", "dtype"),
    [(form, "float32") for form in (*FUSED, *SEPARATE, *ONLY_HERE, flushing_both, flushing_one)]
    + [(added, dtype) for dtype in ("float16", "bfloat16", "float64")],
)
def test_the_compiler_fuses_what_the_interpreter_fuses(form, dtype):
    from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, export_kernel

    from tiledsched.build.elf import sections

    array = ArrayConstraint(
        getattr(ct, dtype),
        1,
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=(1,),
        base_addr_divisible_by=16,
    )
    cubin = io.BytesIO()
    signature = KernelSignature([array] * 4, CallingConvention.cutile_python_v1())
    export_kernel(kernel_of(form), [signature], cubin, gpu_code="sm_90", output_format="cubin")
    (ptx,) = [each.data.decode() for each in sections(cubin.getvalue()) if each.name == ".nv_debug_ptx_txt"]
    found = re.findall(r"\b(?:fma|mul|add|sub)\.rn[.\w]*", ptx)
    print(form.__name__, dtype, *found)
    fused = "fma.rn.ftz." if form is flushing_both else "fma.rn."
    assert any(each.startswith(fused) for each in found) == (form in (*FUSED, flushing_both)), found


def verdict(kernel, **values):
    """Whether the first schedule is right on random inputs, and what is wrong."""
    p = kernel.problem(**values)
    schedule = Schedule({name: choices[0] for name, choices in kernel.knobs.items()})
    right, _, message = check_schedule(kernel, p, schedule, kinds=())
    return right, message


ONLY_FUSED = "wrong in fused arithmetic, right where each operation is rounded"


@pytest.mark.parametrize("vocabulary", [1, 24, 33, 1000])
def test_a_finite_stand_in_for_minus_infinity_is_found(vocabulary):
    right, message = verdict(LanesCrossEntropy, rows=3, columns=vocabulary, dtype="bfloat16")
    assert not right
    assert message.endswith(ONLY_FUSED)


def test_a_stand_in_that_is_never_scaled_is_right():
    assert verdict(LanesCrossEntropy, rows=3, columns=4096, dtype="bfloat16") == (True, "")


@ct.kernel
def scaled_there_and_back(X, Out, TILE: ct.Constant[int]):
    row = ct.bid(0)
    ct.store(Out, (row,), ct.load(X, (row,), (TILE,)) * 2.0**-130 * 2.0**100)


@ct.kernel
def lost_of_the_right_product(X, Out, TILE: ct.Constant[int]):
    row = ct.bid(0)
    x = ct.load(X, (row,), (TILE,))
    huge = x * 0.0 + 1e38
    ct.store(Out, (row,), x * 2.0**-30 + 0.0 * ct.exp2(huge * LOG2_E - huge * LOG2_E))


@ct.kernel
def right_where_fused(X, Out, TILE: ct.Constant[int]):
    row = ct.bid(0)
    x = ct.load(X, (row,), (TILE,))
    more = x * 0.0 + (1 + 2.0**-12)
    ct.store(Out, (row,), x * ((more * more - (1 + 2.0**-11)) * 2.0**-6))


@pytest.mark.parametrize(
    ("tile_code", "words"),
    [
        (scaled_there_and_back, "wrong in flushed arithmetic, right where each operation is rounded"),
        (lost_of_the_right_product, "wrong in fused right arithmetic, right where each operation is rounded"),
        (right_where_fused, "random inputs: .* wrong tiles of 1"),
    ],
)
def test_each_arithmetic_is_tried(tile_code, words):
    class InEachArithmetic(ts.Kernel):
        function = tile_code
        rows = ts.dim()
        X, Out = ts.array("rows", dtype="float32"), ts.out("rows", dtype="float32")
        knobs = {"TILE": [32]}

        def grid(p, s, device):
            return (-(-p.rows // s["TILE"]),)

        def reference(xp, X):
            return X * 2.0**-30

    right, _, message = check_schedule(InEachArithmetic, InEachArithmetic.problem(rows=70), Schedule(TILE=32))
    assert not right
    assert re.search(f"{words}$", message)


def edited(stem, *edits, folder):
    """A kernel of `thirteen` with edits."""
    text = (Path(__file__).parent / "thirteen" / f"{stem}.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = folder / f"{stem}.py"
    file.write_text(text)
    (name,) = re.findall(r"^class (\w+)\(ts\.Kernel\):", text, re.MULTILINE)
    return load_kernel(f"{file}:{name}")


@pytest.mark.parametrize(("stem", "size"), [("cross_entropy", "vocab"), ("online_softmax", "columns")])
def test_a_stand_in_planted_in_other_kernels_is_found(stem, size, tmp_path):
    planted = partial(edited, stem, *PLANTED[stem])
    for columns in (24, 1000):
        right, message = verdict(planted(folder=tmp_path), rows=3, **{size: columns}, dtype="bfloat16")
        assert not right
        assert message.endswith(ONLY_FUSED)


@pytest.mark.parametrize(("stem", "size"), [("cross_entropy", "vocab"), ("online_softmax", "columns")])
def test_the_same_kernels_are_right_where_the_difference_is_scaled(stem, size, tmp_path):
    for edits in ((), (*PLANTED[stem], RIGHT)):
        folder = tmp_path / str(len(edits))
        folder.mkdir()
        kernel = edited(stem, *edits, folder=folder)
        assert verdict(kernel, rows=3, **{size: 1000}, dtype="bfloat16") == (True, "")
