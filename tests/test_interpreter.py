"""The interpreter's own semantics, held against cuTile's documentation and, for types and shapes, its front end."""

from __future__ import annotations

import importlib
import inspect
import io
import itertools
import re
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import cuda.tile as ct
import ml_dtypes
import numpy as np
import pytest
from attention_runs import run_outputs, run_problem

from tiledsched import interpreter
from tiledsched.core.errors import CompilerError, ProblemError, TiledschedError
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import InterpreterError, private, run, values
from tiledsched.interpreter.builtins_in_tiles import BUILTINS
from tiledsched.kernels.attention import Attention

Int = ct.Constant[int]
BFLOAT16 = ml_dtypes.bfloat16
DOCS = Path(__file__).parents[1] / "docs" / "check.md"


def type_rules(halves, brains, floats, integers, bytes_, scale: float, count: int, SIZE: Int):
    """Every assertion here holds in cuTile's compiler too: test_compiler_agrees_with_the_types compiles it."""
    h, b, f, i, s = (
        ct.load(halves, (0, 0), (4, SIZE)),
        ct.load(brains, (0, 0), (4, SIZE)),
        ct.load(floats, (0, 0), (4, SIZE)),
        ct.load(integers, (0, 0), (4, SIZE)),
        ct.load(bytes_, (0, 0), (4, SIZE)),
    )
    flag, turned, spread = h < f, h.transpose(), ct.arange(8, dtype=ct.int32)[:, None]
    rules = (
        ("a half times a number", h * 2.0, ct.float16, (4, 8)),
        ("a number less a half", 2 - h, ct.float16, (4, 8)),
        ("a half times a scalar", h * scale, ct.float32, (4, 8)),
        ("a half times a float", h * f, ct.float32, (4, 8)),
        ("a bfloat16 and a float", b + f, ct.float32, (4, 8)),
        ("a float times a number", f * 0.5, ct.float32, (4, 8)),
        ("a half and an integer", h + i, ct.float16, (4, 8)),
        ("an integer times one", i * 2, ct.int32, (4, 8)),
        ("an integer times a fraction", i * 2.5, ct.float32, (4, 8)),
        ("a quotient of integers", i / 2, ct.float32, (4, 8)),
        ("a quotient rounded down", i // 2, ct.int32, (4, 8)),
        ("a byte and a number", s + 1, ct.int8, (4, 8)),
        ("a byte and a scalar", s + count, ct.int32, (4, 8)),
        ("a byte times a flag", s * True, ct.int8, (4, 8)),
        ("both flags", flag & (i > 2), ct.bool_, (4, 8)),
        ("a negative", -i, ct.int32, (4, 8)),
        ("a flag turned", ~flag, ct.bool_, (4, 8)),
        ("the larger", max(h, f), ct.float32, (4, 8)),
        ("the smaller of tile and scalar", min(i, count), ct.int32, (4, 8)),
        ("a choice", ct.where(flag, h, -float("inf")), ct.float16, (4, 8)),
        ("a power of an integer", ct.exp2(i), ct.float32, (4, 8)),
        ("a root", ct.sqrt(h), ct.float16, (4, 8)),
        ("a sum of rows", ct.sum(h, axis=-1), ct.float16, (4,)),
        ("a count of flags", ct.sum(flag), ct.int32, ()),
        ("maxima of rows, kept", ct.max(f, axis=1, keepdims=True), ct.float32, (4, 1)),
        ("places of maxima", ct.argmax(h, axis=0), ct.int32, (8,)),
        ("running sums", ct.cumsum(i, 1), ct.int32, (4, 8)),
        ("transposed", turned, ct.float16, (8, 4)),
        ("a product of halves", h @ turned, ct.float16, (4, 4)),
        ("a product added to floats", ct.mma(h, turned, ct.zeros((4, 4), ct.float32)), ct.float32, (4, 4)),
        ("a product of bytes", ct.mma(s, s.transpose(), ct.zeros((4, 4), ct.int32)), ct.int32, (4, 4)),
        ("a column of places", spread, ct.int32, (8, 1)),
        ("two tiles as one", ct.cat((h, h), 0), ct.float16, (8, 8)),
        ("a part", ct.extract(h, (0, 1), (2, 4)), ct.float16, (2, 4)),
        ("axes moved", h.reshape((2, 2, 8)).permute((2, 0, 1)), ct.float16, (8, 2, 2)),
        ("repeated", ct.broadcast_to(spread, (8, 4)), ct.int32, (8, 4)),
        ("the same bits", ct.bitcast(f, ct.int32), ct.int32, (4, 8)),
        ("a quotient of scalars rounded up", ct.cdiv(count, 4), ct.int32, ()),
        ("a size", floats.shape[0], ct.int32, ()),
    )
    for place in ct.static_iter(range(len(rules))):
        ct.static_assert(rules[place][1].dtype == rules[place][2], rules[place][0])
        ct.static_assert(rules[place][1].shape == rules[place][3], rules[place][0])
    for j in range(count):
        ct.static_assert(j.dtype == ct.int32)
    ct.store(floats, (0, 0), f + h)


TYPED_ARRAYS = (np.float16, BFLOAT16, np.float32, np.int32, np.int8)


def test_types_and_shapes_follow_the_rules():
    arrays = [np.ones((4, 8), dtype) for dtype in TYPED_ARRAYS]
    run(type_rules, 1, (*arrays, 0.5, 3, 8))
    assert np.all(arrays[2] == 2)


@pytest.mark.compiler
def test_compiler_agrees_with_the_types():
    from cuda.tile import compilation

    types_ = (ct.float16, ct.bfloat16, ct.float32, ct.int32, ct.int8)
    arrays = [
        compilation.ArrayConstraint(
            dtype,
            2,
            index_dtype=ct.int32,
            stride_lower_bound_incl=0,
            alias_groups=(),
            may_alias_internally=False,
            stride_constant=(None, 1),
        )
        for dtype in types_
    ]
    signature = compilation.KernelSignature(
        [*arrays, compilation.ScalarConstraint(ct.float32), compilation.ScalarConstraint(ct.int32), 8],
        compilation.CallingConvention.cutile_python_v2(),
        symbol="type_rules",
    )
    compilation.export_kernel(
        ct.kernel(type_rules), [signature], io.BytesIO(), gpu_code="sm_90", output_format="tileir_bytecode"
    )


def test_promotion_table_is_cutiles():
    theirs = importlib.import_module("cuda.tile._datatype").promote_dtypes  # the rule itself has no public name
    for first, second in itertools.product(values.STORAGE, repeat=2):
        try:
            expected = theirs(first, second)
        except ct.TileTypeError:
            with pytest.raises(InterpreterError):
                values.promote_dtypes(first, second)
        else:
            assert values.promote_dtypes(first, second) == expected, (first, second)


# ---- loads and stores ------------------------------------------------------------------------------------------------


def copy_tile(source, target, INDEX: ct.Constant, SHAPE: ct.Constant, ORDER: ct.Constant, PADDING: ct.Constant):
    ct.store(target, (0, 0), ct.load(source, INDEX, SHAPE, order=ORDER, padding_mode=PADDING))


def copied(source, index, shape, order="C", padding=ct.PaddingMode.UNDETERMINED):
    target = np.zeros(shape, source.dtype)
    run(copy_tile, 1, (source, target, index, shape, order, padding))
    return target


SOURCE = np.arange(8 * 16, dtype=np.float32).reshape(8, 16)


@pytest.mark.parametrize(
    ("source", "index", "order", "found"),
    [
        (SOURCE, (1, 2), "C", SOURCE[4:8, 8:12]),
        (SOURCE, (2, 1), (1, 0), SOURCE.T[8:12, 4:8]),
        (SOURCE, (2, 1), "F", SOURCE.T[8:12, 4:8]),
        (SOURCE.T, (2, 1), "C", SOURCE.T[8:12, 4:8]),
    ],
    ids=["rows first", "columns first", "columns first by its name", "any strides"],
)
def test_load_counts_in_tiles_and_follows_order(source, index, order, found):
    assert np.array_equal(copied(source, index, (4, 4), order), found)


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("ZERO", 0.0),
        ("NEG_ZERO", -0.0),
        ("POS_INF", np.inf),
        ("NEG_INF", -np.inf),
        ("NAN", np.nan),
        ("UNDETERMINED", np.nan),
    ],
)
@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32])
def test_padding(mode, value, dtype):
    source = np.ones((3, 5), dtype)
    tile = copied(source, (0, 1), (4, 4), padding=ct.PaddingMode[mode]).astype(np.float64)
    assert np.all(tile[:3, 0] == 1)
    np.testing.assert_array_equal(tile[3:], value)
    np.testing.assert_array_equal(tile[:, 1:], value)
    assert np.all(np.signbit(tile[3:]) == np.signbit(value))


def test_undetermined_integers_are_poisoned():
    assert copied(np.zeros((3, 4), np.int16), (0, 0), (4, 4))[3, 0] == np.iinfo(np.int16).max


def store_ones(target, AXIS0: Int, AXIS1: Int, VALUE: ct.Constant):
    ct.store(target, (AXIS0, AXIS1), ct.full((4, 4), VALUE, dtype=target.dtype))


def test_store_drops_elements_beyond_the_edge():
    memory = np.zeros((8, 8), np.float16)
    run(store_ones, 1, (memory[:6, :5], 1, 1, 1.0))
    assert memory.sum() == 2
    assert memory[4:6, 4].tolist() == [1, 1]


def store_wide(target):
    ct.store(target, (0,), ct.zeros((4,), ct.float32))


def claim_checks(source, target):
    tile = ct.load(source, (0,), (4,), check_bounds=False)
    ct.store(target, (0,), tile, check_bounds=False)


def write_at(target, STEP: Int):
    ct.store(target, (ct.bid(0) // STEP,), ct.full((4,), ct.bid(0), dtype=target.dtype))


def test_overlapping_stores_are_let_through_where_that_is_asked_for():
    memory = np.zeros(8, np.int32)
    run(write_at, 2, (memory, 2), check_overlap=False)
    assert memory.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def grid_kernel(target):
    here = ct.bid(0) + ct.num_blocks(0) * (ct.bid(1) + ct.num_blocks(1) * ct.bid(2))
    ct.store(target, (here,), here)


def test_grid_of_three_axes():
    target = np.full(24, -1, np.int32)
    run(grid_kernel, (2, 3, 4), (target,))
    assert target.tolist() == list(range(24))


# ---- gathers, scatters, atomics, views -------------------------------------------------------------------------------


def gather_rows(source, target, rows):
    index = ct.load(rows, (0,), (4,))
    columns = ct.arange(4, dtype=ct.int32)
    tile = ct.gather(source, (index[:, None], columns[None, :]), padding_value=-1.0)
    ct.scatter(target, (ct.arange(4, dtype=ct.int32)[:, None], columns[None, :]), tile, mask=index[:, None] >= 0)


def test_gather_pads_and_scatter_masks():
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    target = np.zeros((4, 4), np.float32)
    run(gather_rows, 1, (source, target, np.array([2, -1, 0, 7], np.int32)))
    assert np.array_equal(target, np.stack([source[2], np.zeros(4), source[0], -np.ones(4)]))


def histogram(source, bins, before):
    index = ct.load(source, (ct.bid(0),), (4,))
    ct.store(before, (ct.bid(0),), ct.atomic_add(bins, index, 1))
    ct.atomic_max(bins, 3, ct.bid(0))


def test_atomics_of_several_blocks():
    bins, before = np.zeros(4, np.int32), np.zeros(8, np.int32)
    run(histogram, 2, (np.array([0, 0, 1, 2, 0, 2, 2, 2], np.int32), bins, before))
    assert bins.tolist() == [3, 1, 4, 1]
    assert before.tolist() == [0, 1, 0, 0, 2, 1, 2, 3]


def views(source, target):
    rows = source.slice(0, 1, 3).tiled_view((2, 4), padding_mode=ct.PaddingMode.ZERO)
    steps = source.tiled_view((2, 4), traversal_steps=(1, 4))
    ct.static_assert(rows.num_tiles(1) == 2)
    target.tiled_view((2, 4)).store((0, 0), rows.load((0, 1)) + steps.load((1, 0)))


def test_tiled_views_and_slices():
    source = np.arange(24, dtype=np.int32).reshape(4, 6)
    target = np.zeros((2, 4), np.int32)
    run(views, 1, (source, target))
    assert np.array_equal(target, np.pad(source[1:3, 4:], ((0, 0), (0, 2))) + source[1:3, :4])


def flattened(source, target, size: ct.Constant[int]):
    flat = ct.Array.from_foreign(source.foreign_pointer, (size,), (1,))
    backwards = ct.Array.from_foreign(target.foreign_pointer, (2, 4), (4, 1))
    ct.store(backwards, (1, 0), ct.load(flat, (1,), (4,)).reshape((1, 4)))


def test_arrays_made_of_the_memory_of_others():
    """Rows of a larger array lie apart; a view of all memory from their first element on also sees what is between them."""
    memory, target = np.arange(24, dtype=np.int32).reshape(4, 6), np.zeros(8, np.int32)
    run(flattened, 1, (memory[:, :4], target, 22))
    assert target.tolist() == [0, 0, 0, 0, 4, 5, 6, 7]
    with pytest.raises(InterpreterError, match="reaches beyond its 22 elements"):
        run(flattened, 1, (memory[:, :4], target, 23))
    with pytest.raises(InterpreterError, match="overlapping stores"):
        run(flattened, 2, (memory[:, :4], target, 22))


def advanced(source, target, rows):
    index = ct.load(rows, (0,), (2,))
    tile = ct.load_advanced_indexing(source, (index, ct.Slice(2, 4)), padding_mode=ct.PaddingMode.ZERO)
    ct.store_advanced_indexing(target, (index, ct.Slice(0, 4)), tile)


def test_advanced_indexing():
    source, target = np.arange(20, dtype=np.int32).reshape(4, 5), np.zeros((4, 4), np.int32)
    run(advanced, 1, (source, target, np.array([3, 1], np.int32)))
    assert np.array_equal(target[[3, 1]], np.pad(source[[3, 1], 2:], ((0, 0), (0, 1))))


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def evaluate(expression, *arrays, dtype):
    """`expression` of tiles of whole arrays."""

    def kernel(target, sources):
        ct.store(
            target,
            (0,) * target.ndim,
            expression(*(ct.load(source, (0,) * source.ndim, SHAPES[i]) for i, source in enumerate(sources))),
        )

    SHAPES = [array.shape for array in arrays]
    shape = np.broadcast_shapes(*SHAPES)
    target = np.zeros(shape, dtype)
    run(kernel, 1, (target, list(arrays)))
    return target


INTEGERS = np.array([7, -7, 7, -7], np.int32), np.array([2, 2, -2, -2], np.int32)
TINY = np.array([1e-39, 1.0], np.float32)
WITH_NAN = np.array([np.nan, 1], np.float32), np.array([2, np.nan], np.float32)
ROWS = np.arange(32, dtype=np.float32).reshape(4, 8)
COMPUTED = {
    "a quotient rounded down": (lambda a, b: a // b, INTEGERS, [3, -4, -4, 3]),
    "a rest has the sign of the divisor": (lambda a, b: a % b, INTEGERS, [1, 1, -1, -1]),
    "a quotient rounded up": (ct.cdiv, INTEGERS, [4, -3, -3, 4]),
    "a maximum prefers numbers to NaN": (ct.maximum, WITH_NAN, [2, 1]),
    "a maximum that keeps NaN": (lambda a, b: ct.maximum(a, b, propagate_nan=True), WITH_NAN, [np.nan] * 2),
    "tiny numbers stay": (lambda a: a * 1.0, [TINY], TINY),
    "tiny numbers are flushed": (lambda a: ct.mul(a, 1.0, flush_to_zero=True), [TINY], [0, 1]),
    "an approximate quotient": (
        lambda a: ct.truediv(a, 3.0, rounding_mode=ct.RoundingMode.APPROX),
        [TINY],
        TINY / np.float32(3),
    ),
    "sums of rows": (lambda a: ct.sum(a, 1, keepdims=True) + 0 * a, [ROWS], ROWS.sum(1, keepdims=True) + 0 * ROWS),
    "a minimum of all": (lambda a: ct.min(a) + 0 * a, [ROWS + 1], 0 * ROWS + 1),
    "places of maxima": (lambda a: ct.argmax(a, 1)[:, None] + 0 * a, [ROWS], 0 * ROWS + 7),
    "running sums": (lambda a: ct.cumsum(a, 1), [ROWS], np.cumsum(ROWS, 1)),
    "running sums from the end": (
        lambda a: ct.cumsum(a, 1, reverse=True),
        [ROWS],
        np.cumsum(ROWS[:, ::-1], 1)[:, ::-1],
    ),
    "a reduction of one's own": (
        lambda a: ct.reduce(a, 0, lambda low, high: low * high, 1.0) + 0 * a,
        [ROWS + 1],
        np.prod(ROWS + 1, 0) + 0 * ROWS,
    ),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_what_is_computed(what):
    expression, arrays, found = COMPUTED[what]
    np.testing.assert_allclose(evaluate(expression, *arrays, dtype=arrays[0].dtype), np.array(found, arrays[0].dtype))


def test_product_rounds_to_the_accumulator():
    x, y = np.full((2, 16), 64, np.float16), np.full((16, 2), 64, np.float16)

    def half(a, b):
        return ct.mma(a, b, ct.full((2, 2), 1.0, ct.float16)).astype(ct.float32)

    def single(a, b):
        return ct.mma(a, b, ct.full((2, 2), 1.0, ct.float32))

    x[:, 0] = 0.5
    for product, expected in ((half, np.float32(np.float16(61473.0))), (single, np.float32(61473.0))):
        target = np.zeros((2, 2), np.float32)
        run(_product_kernel(product), 1, (x, y, target))
        assert np.all(target == expected)


def _product_kernel(product):
    def kernel(x, y, target):
        ct.store(target, (0, 0), product(ct.load(x, (0, 0), (2, 16)), ct.load(y, (0, 0), (16, 2))))

    return kernel


def test_float8_and_tfloat32():
    x = np.array([1.0, 1.06, 300.0, 1 + 2**-11], np.float32)
    eight = evaluate(lambda a: a.astype(ct.float8_e4m3fn).astype(ct.float32), x, dtype=np.float32)
    assert eight.tolist() == [1.0, 1.0, 288.0, 1.0]
    tf32 = evaluate(lambda a: a.astype(ct.tfloat32).astype(ct.float32), x, dtype=np.float32)
    assert tf32[3] == 1.0
    assert abs(tf32[1] / x[1] - 1) < 2**-11


# ---- Python in tile code ---------------------------------------------------------------------------------------------


@ct.function
def larger(a, b):
    return max(a, b)


def helper(a, count):
    for step in range(count):
        a = larger(a, step * 1.0)
    return a


def python_kernel(source, target, count: int, SKIP: ct.Constant[bool]):
    tile = ct.load(source, (0,), (4,))
    if not SKIP and count > 2:
        tile = min(helper(tile, count), 3.0)
    states = ()
    for i in ct.static_iter(range(2)):
        states += (tile + i,)
    ct.store(target, (0,), states[1])


def test_builtins_work_on_tiles_in_functions_the_kernel_calls():
    target = np.zeros(4, np.float32)
    run(ct.kernel(python_kernel), 1, (np.array([0, 1, 2, 9], np.float32), target, 3, False))
    assert target.tolist() == [3, 3, 3, 4]
    assert helper.__globals__ is globals()  # the functions themselves are untouched
    assert python_kernel.__globals__["__builtins__"] is not BUILTINS


def shape_at_run_time(source, size):
    ct.load(source, (0,), (size,))


def odd_shape(source):
    ct.load(source, (0,), (3,))


def branch_on_a_tile(source):
    if ct.load(source, (0,), (4,)) > 0:
        pass


def misspelt(source):
    ct.load(source, (0,), (4,), paddding_mode=ct.PaddingMode.ZERO)


def mixed_signs(source):
    tile = ct.load(source, (0,), (4,))
    tile.astype(ct.int32) + tile.astype(ct.uint32)


def bad_latency(source):
    ct.load(source, (0,), (4,), latency=11)


def subscript(source):
    source[0]


def accumulated_in_halves(x, y):
    ct.mma(ct.load(x, (0, 0), (2, 16)), ct.load(y, (0, 0), (16, 2)), ct.zeros((2, 2), ct.float16))


def quotient(x, y):
    ct.load(x, (0,), (4,)) // ct.load(y, (0,), (4,))


def flushed(x):
    ct.exp2(ct.load(x, (0,), (4,)), flush_to_zero=True)


def approximate(x):
    ct.truediv(ct.load(x, (0,), (4,)), 3.0, rounding_mode=ct.RoundingMode.APPROX)


FOUR, HALVES, SQUARE = np.zeros(4, np.float32), np.zeros(4, np.float16), np.zeros((8, 8), np.float32)
MATRICES = np.ones((2, 16), BFLOAT16), np.ones((16, 2), BFLOAT16)
AT, PADDING = ((4, 4), "C", ct.PaddingMode.ZERO), ((4, 4), "C", ct.PaddingMode.NAN)


@pytest.mark.parametrize(
    ("kernel", "given", "message"),
    [
        (shape_at_run_time, (FOUR, 4), "known at compile time.*ct.Constant"),
        (odd_shape, (FOUR,), "powers of two"),
        (branch_on_a_tile, (FOUR,), "where one number is needed"),
        (misspelt, (FOUR,), r"ct\.load: unknown arguments \['paddding_mode'\]"),
        (mixed_signs, (FOUR,), "int32 and uint32 have no common type"),
        (bad_latency, (FOUR,), "latency hint must be between 1 and 10"),
        (subscript, (FOUR,), r"use ct\.load or ct\.gather"),
        (quotient, (np.ones(4, np.int32), np.zeros(4, np.int32)), "division by zero"),
        (flushed, (HALVES,), "float32 only"),
        (approximate, (HALVES,), "float32 only"),
        (accumulated_in_halves, MATRICES, "bfloat16 accumulates in"),
        (copy_tile, (np.zeros((3, 4), np.int16), SQUARE, (0, 0), *PADDING), "needs a float array"),
        *(
            (copy_tile, (SQUARE, SQUARE, at, *AT), r"source.*entirely outside.*\(8, 8\)")
            for at in [(2, 0), (0, 2), (-1, 0)]
        ),
        (store_ones, (SQUARE, 0, 2, 1.0), "entirely outside"),
        (store_wide, (HALVES,), r"float32 is not cast to float16 implicitly; use \.astype"),
        (claim_checks, (np.zeros(3), np.zeros(4)), "check_bounds=False"),
    ],
)
def test_errors_name_the_kernel_the_block_and_the_cause(kernel, given, message):
    with pytest.raises(InterpreterError, match=rf"{kernel.__name__}, block \(0, 0, 0\): .*{message}") as caught:
        run(kernel, 1, given)
    assert isinstance(caught.value, TiledschedError)


@pytest.mark.parametrize(
    ("kernel", "given"),
    [
        (store_wide, (np.ones(4, np.float64),)),
        (claim_checks, (np.zeros(4), np.zeros(4))),
        (write_at, (np.zeros(8, np.int32), 1)),
    ],
)
def test_what_is_like_an_error_and_is_none_runs(kernel, given):
    run(kernel, 2 if kernel is write_at else 1, given)


@pytest.mark.parametrize(
    ("kernel", "grid", "args", "message"),
    [
        (store_wide, 0, (np.zeros(4),), "at least one block"),
        (store_wide, 1, (), r"takes 1 arguments \['target'\], got 0"),
        (store_wide, 1, ("text",), "expected a NumPy array or a number"),
        (store_wide, 1, (np.zeros(4, np.complex64),), "no type for NumPy's complex64"),
        (write_at, 2, (np.zeros(8, np.int32), 2), "overlapping stores: .*target was already written by block number 0"),
    ],
)
def test_wrong_launches(kernel, grid, args, message):
    with pytest.raises(InterpreterError, match=message):
        run(kernel, grid, args)


def test_tile_functions_still_refuse_to_run_outside_a_launch():
    run(write_at, 2, (np.zeros(8, np.int32), 1))
    with pytest.raises(RuntimeError, match="device code"):
        ct.bid(0)


def test_run_problem_refuses_arrays_of_another_problem():
    problem = Attention.problem(seq_q=8, seq_k=8, head_dim=16)
    q = np.zeros((1, 1, 8, 16), np.float16)
    schedule = space_for("sm_90", Attention).default(problem)
    with pytest.raises(ProblemError, match="V must be float16 of shape"):
        run_problem(Attention, schedule, problem, q, q, q[:, :, :4])
    with pytest.raises(ProblemError, match="K must be float16"):
        run_problem(Attention, schedule, problem, q, q.astype(BFLOAT16), q)


# ---- the order of blocks ---------------------------------------------------------------------------------------------


def note_turn(turns, counter):
    ct.scatter(turns, ct.bid(0), ct.atomic_add(counter, 0, 1))


def turns_of(order, blocks=9):
    turns, counter = np.full(blocks, -1, np.int32), np.zeros(1, np.int32)
    run(ct.kernel(note_turn), blocks, (turns, counter), order=order)
    assert sorted(turns) == list(range(blocks))
    return turns.tolist()


def test_blocks_run_in_the_order_asked_for():
    """So a result that depends on the order shows."""
    assert (turns_of("forward"), turns_of("reversed")) == ([*range(9)], [*range(9)][::-1])
    drawn = [turns_of(seed) for seed in range(5)]
    assert len({tuple(each) for each in drawn}) == 5
    assert turns_of(3) == drawn[3]


# ---- every output of a problem ---------------------------------------------------------------------------------------


def few_rows(**more):
    problem = Attention.problem(
        **{"seq_q": 3, "seq_k": 200, "head_dim": 16, "heads": 2, "kv_heads": 1, "lse": True, **more}
    )
    rng = np.random.default_rng(0)
    shapes = ((1, 2, 3, 16), (1, 1, 200, 16), (1, 1, 200, problem.value_columns))
    return problem, [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


def test_outputs_are_named_and_those_not_asked_for_left_out():
    problem, inputs = few_rows(value_dim=32)
    schedule = space_for("sm_90", Attention).default(problem).replace(kv_splits=2)
    found = run_outputs(Attention, schedule, problem, *inputs)
    assert {name: (array.shape, array.dtype.name) for name, array in found.items()} == {
        "out": ((1, 2, 3, 32), "float16"),
        "lse": ((1, 2, 3), "float32"),
    }
    without = run_outputs(Attention, schedule, problem.replace(lse=False), *inputs)
    assert list(without) == ["out"]
    np.testing.assert_array_equal(without["out"], found["out"])
    np.testing.assert_array_equal(run_problem(Attention, schedule, problem, *inputs), found["out"])


def test_a_workspace_left_dirty_is_refused():
    class Forgetful(Attention):
        name = "attention that leaves its state dirty"
        State = replace(Attention.array_fields["State"], zeroed=True)

    problem, inputs = few_rows()
    schedule = space_for("sm_90", Attention).default(problem).replace(kv_splits=2)
    with pytest.raises(InterpreterError, match=r"needs State zeroed, but leaves \d+ elements"):
        run_outputs(Forgetful, schedule, problem, *inputs)


# ---- one tile function, on arrays --------------------------------------------------------------------------------------

PLACES = np.arange(77, dtype=np.int32)[:, None], np.arange(13, dtype=np.int32)[None, :]


def added_to_zeros(row, column, table):
    place = row % ct.int32(8) + ct.zeros((row.shape[0], column.shape[1]), ct.int32)
    return min(ct.gather(table, place), column)


@dataclass(frozen=True)
class Both:
    """A tile function as a frozen dataclass, of functions."""

    functions: tuple
    most: int = 5

    def __call__(self, row, column, *arrays):
        return self.least(self.functions[0](row, column, *arrays))

    def least(self, tile):
        return min(tile, self.most)


class Inherits(Both):
    pass


def test_a_tile_function_is_evaluated_on_arrays_of_any_size():
    table = np.arange(100, 107, dtype=np.int32)
    right = np.minimum(np.array([*table, 0])[PLACES[0] % 8], PLACES[1])
    assert np.array_equal(interpreter.evaluate(added_to_zeros, *PLACES, arrays=[table]), right)
    for kind in (Both, Inherits):
        assert np.array_equal(
            interpreter.evaluate(kind((added_to_zeros,)), *PLACES, arrays=[table]), np.minimum(right, 5)
        )
    on_device = [types.SimpleNamespace(get=lambda each=each: each) for each in (*PLACES, table)]
    assert np.array_equal(interpreter.evaluate(added_to_zeros, *on_device[:2], arrays=on_device[2:]), right)


def test_of_an_evaluated_function_types_are_promoted_and_shapes_broadcast():
    assert interpreter.evaluate(lambda x: x * 2, PLACES[0].astype(np.float64)).dtype == np.float64
    assert interpreter.evaluate(lambda x, y: x * y, PLACES[0], 0.5).dtype == np.float32
    assert interpreter.evaluate(lambda row, column: True, *PLACES).tolist() == np.ones((77, 13), bool).tolist()
    assert interpreter.evaluate(lambda row, column: row < column, PLACES[0], PLACES[1][:, :0]).shape == (77, 0)
    assert interpreter.evaluate(lambda x, y: x + y, 2, 3).shape == ()
    assert interpreter.evaluate(lambda x: 12 // x, np.array([1, 2, 3])).tolist() == [12, 6, 4]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda row, column: row & 1.5, r"ct.bitwise_and takes integers .* \(test_interpreter.py, line \d+\)"),
        (lambda row, column: row.lost, r"AttributeError: .*'lost'.* \(test_interpreter.py, line \d+\)"),
        (lambda row, column: None, "expected a tile or a number, got NoneType"),
        (
            lambda row, column: ct.zeros((4, 4), ct.int32),
            r"it must return a tile that broadcasts to \(128, 16\), got \(4, 4\)",
        ),
        (lambda row: row, "takes 1 positional argument but 2 were given"),
    ],
)
def test_an_error_in_an_evaluated_function_names_it_and_the_line(function, message):
    with pytest.raises(InterpreterError, match=f"^<lambda>: .*{message}"):
        interpreter.evaluate(function, *PLACES)


# ---- the private names -----------------------------------------------------------------------------------------------


CHANGED = types.SimpleNamespace(DispatchMode=type("DispatchMode", (), {"as_current": lambda self: None}))


@pytest.mark.parametrize(
    ("module", "why"),
    [(None, r"_dispatch_mode.*1\.2 to 1\.7: pip install"), (CHANGED, r"DispatchMode\.call_tile_function_from_host")],
    ids=["a module that moved", "a class that changed"],
)
def test_private_names_that_are_others_are_explained(monkeypatch, module, why):
    monkeypatch.setitem(sys.modules, "cuda.tile._dispatch_mode", module)
    with pytest.raises(CompilerError, match=why):
        private.load_dispatch_mode()


def test_only_functions_and_kernels_are_run():
    with pytest.raises(TypeError, match="expected a cuTile kernel or a Python function, got int"):
        run(3, 1, ())


def test_private_names_of_cutile_are_imported_in_four_modules_only():
    package = Path(private.__file__).parents[1]
    sources = {path.name: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    using = {name for name, source in sources.items() if re.search(r"cuda\.tile\._", source)}
    # The pool gives the compiler a folder that it removes, `host_code` names the host to it, and `machine` compiles kernels
    # that cannot be imported elsewhere.
    assert using == {"private.py", "pool.py", "host_code.py", "machine.py"}


# ---- the documentation -----------------------------------------------------------------------------------------------


def test_the_recipe_in_the_documentation_runs(tmp_path, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    (tmp_path / "recipe.py").write_text("\n\n".join(blocks), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("recipe")


def test_the_documentation_names_what_is_not_supported():
    from tiledsched.interpreter.registry import IMPLEMENTATIONS

    text = DOCS.read_text(encoding="utf-8")
    known = {function.__qualname__ for function in IMPLEMENTATIONS} | {"bid", "num_blocks"}
    plain = {"compiler_timeout", "function", "static_exception", "static_iter"}  # run as they are, or not in tile code
    functions = {name for name, value in vars(ct).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert [name for name in sorted(functions - known - plain) if f"`{name}`" not in text] == []
