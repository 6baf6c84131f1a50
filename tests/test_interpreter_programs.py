"""Whole programs in the interpreter, and the operations that strangers' kernels wanted, against NumPy."""

from __future__ import annotations

import sys
import types

import cuda.tile as ct
import cuda.tile.tune
import ml_dtypes
import numpy as np
import pytest

from tiledsched.interpreter import InterpreterError, UnsupportedOperationError, launches_on_cpu, run
from tiledsched.interpreter.programs import take_first

Int = ct.Constant[int]
FP8, FP4, E8 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
RANDOM = np.random.default_rng(0)


@ct.kernel
def add_one(source, target, SIZE: Int):
    tile = ct.load(source, (ct.bid(0),), (SIZE,))
    ct.store(target, (ct.bid(0),), (tile.astype(ct.float32) + 1).astype(target.dtype))


def test_launches_run_on_arrays_in_place_and_are_named():
    source, target = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    with launches_on_cpu() as launched:
        ct.launch(None, (2,), add_one, (source, target, 4))
        ct.launch(None, (2, 1, 1), add_one.replace_hints(occupancy=2), (target, target, 4))
    assert np.array_equal(target, source + 2)
    assert launched == ["add_one", "add_one"]


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float64"])
def test_tensors_share_their_memory(name):
    torch = pytest.importorskip("torch")
    source = torch.arange(16, dtype=torch.float32).to(getattr(torch, name))[::2]
    targets = [torch.zeros(8, dtype=getattr(torch, name), requires_grad=name == "float32")]
    with launches_on_cpu():
        ct.launch(None, (1,), in_a_list, (targets, source.view(8)))
    assert targets[0].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]


@ct.kernel
def in_a_list(targets, source):
    ct.store(targets[0], (0,), ct.load(source, (0,), (8,)))


def test_a_tensor_elsewhere_or_of_an_unknown_type_is_refused():
    torch = pytest.importorskip("torch")
    target = np.zeros(4, np.float32)
    with launches_on_cpu():
        with pytest.raises(InterpreterError, match=r"on meta; .* pass tensor\.cpu\(\)"):
            ct.launch(None, (1,), add_one, (torch.zeros(4, device="meta"), target, 4))
        with pytest.raises(InterpreterError, match="float8_e4m3fnuz"):
            ct.launch(None, (1,), add_one, (torch.zeros(4).to(torch.float8_e4m3fnuz), target, 4))


def test_names_are_replaced_everywhere_and_put_back_even_after_an_error():
    module = types.ModuleType("a_program_of_somebody")
    module.launch, module.exhaustive_search = ct.launch, cuda.tile.tune.exhaustive_search
    before = ct.launch, cuda.tile.tune.exhaustive_search
    sys.modules[module.__name__] = module
    try:
        with launches_on_cpu():
            assert module.launch is ct.launch is not before[0]
            assert module.exhaustive_search is take_first
        with pytest.raises(InterpreterError, match="entirely outside"), launches_on_cpu():
            module.launch(None, (3,), add_one, (np.zeros(8, np.float32), np.zeros(8, np.float32), 4))
        assert (module.launch, module.exhaustive_search) == before
        assert (ct.launch, cuda.tile.tune.exhaustive_search) == before
    finally:
        del sys.modules[module.__name__]


def test_a_launch_that_was_kept_refuses_to_run_later():
    with launches_on_cpu():
        kept = ct.launch
    with pytest.raises(InterpreterError, match="launches_on_cpu, which is over"):
        kept(None, (1,), add_one, (np.zeros(4, np.float32), np.zeros(4, np.float32), 4))


def test_a_search_answers_with_its_first_configuration():
    with launches_on_cpu() as launched:
        best = cuda.tile.tune.exhaustive_search([{"SIZE": 4}, {"SIZE": 8}], None, None, add_one, None).best
        with pytest.raises(InterpreterError, match="no configuration"):
            cuda.tile.tune.exhaustive_search([], None, None, add_one, None)
    assert best.config == {"SIZE": 4}
    assert best.num_samples == 0 < 1 + best.mean_us < float("inf")
    assert launched == []


@ct.kernel
def overlapping(target):
    ct.store(target, (0,), ct.full((4,), ct.bid(0), ct.int32))


def test_options_reach_the_interpreter():
    target = np.zeros(4, np.int32)
    with launches_on_cpu(), pytest.raises(InterpreterError, match="overlapping stores"):
        ct.launch(None, (3,), overlapping, (target,))
    for order, last in (("forward", 2), ("reversed", 0)):
        with launches_on_cpu(check_overlap=False, order=order):
            ct.launch(None, (3,), overlapping, (target,))
        assert target.tolist() == [last] * 4


def padded(source, target, more):
    ct.store(target, (0,), ct.load(source, (0,), (8,)))
    rows = ct.load_advanced_indexing(source, (ct.arange(8, dtype=ct.int32),))
    ct.store(more, (0,), rows)


@pytest.mark.parametrize(("undetermined", "fill"), [("nan", np.nan), ("zero", 0.0)])
def test_what_undetermined_padding_holds(undetermined, fill):
    source, target, more = np.ones(5, np.float32), np.zeros(8, np.float32), np.zeros(8, np.float32)
    run(padded, 1, (source, target, more), undetermined=undetermined)
    assert np.array_equal(target, [1] * 5 + [fill] * 3, equal_nan=True)
    assert np.array_equal(more, target, equal_nan=True)
    with pytest.raises(InterpreterError, match="undetermined padding"):
        run(padded, 1, (source, target, more), undetermined="one")


def scaled_product(x, x_scale, y, y_scale, out, M: Int, N: Int, K: Int, BLOCK: Int):
    tiles = ct.load(x, (0, 0), (M, K)), ct.load(x_scale, (0, 0), (M, K // BLOCK))
    others = ct.load(y, (0, 0), (K, N)), ct.load(y_scale, (0, 0), (K // BLOCK, N))
    ct.store(out, (0, 0), ct.mma_scaled(*tiles, *others, ct.ones((M, N), ct.float32)))


@pytest.mark.parametrize(
    ("dtype", "scale_type", "block"),
    [(FP8, E8, 32), (ml_dtypes.float8_e5m2, E8, 32), (FP4, E8, 32), (FP4, E8, 16), (FP4, FP8, 16)],
)
def test_scaled_products(dtype, scale_type, block):
    x, y = RANDOM.standard_normal((4, 64)).astype(dtype), RANDOM.standard_normal((64, 8)).astype(dtype)
    scales = [2.0 ** RANDOM.integers(-3, 4, shape) for shape in ((4, 64 // block), (64 // block, 8))]
    out = np.zeros((4, 8), np.float32)
    run(scaled_product, 1, (x, scales[0].astype(scale_type), y, scales[1].astype(scale_type), out, 4, 8, 64, block))
    want = (x.astype(float) * scales[0].repeat(block, 1)) @ (y.astype(float) * scales[1].repeat(block, 0)) + 1
    assert np.allclose(out, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "scale_type", "block", "why"),
    [
        (np.float16, E8, 32, "does not take float16 scaled by float8_e8m0fnu"),
        (FP8, FP8, 32, "does not take float8_e4m3fn scaled by float8_e4m3fn"),
        (FP8, E8, 16, r"do not fit .* blocks of \(32,\)"),
    ],
)
def test_scaled_products_refuse_what_cutile_refuses(dtype, scale_type, block, why):
    shapes = ((4, 64), dtype), ((4, 64 // block), scale_type), ((64, 8), dtype), ((64 // block, 8), scale_type)
    with pytest.raises(InterpreterError, match=why):
        run(scaled_product, 1, (*(np.ones(*each) for each in shapes), np.zeros((4, 8), np.float32), 4, 8, 64, block))


def packing(source, packed, target):
    four = ct.load(source, (0,), (8,)).astype(ct.float4_e2m1fn)
    codes = ct.pack_to_bytes(four)
    ct.store(packed, (0,), codes)
    ct.store(target, (0,), ct.unpack_from_bytes(codes, ct.float4_e2m1fn).astype(ct.float32))


def test_four_bit_elements_are_packed_low_half_first():
    source = np.array([0, 0.5, 1, 1.5, 2, -3, 4, -6], np.float32)
    packed, target = np.zeros(4, np.uint8), np.zeros(8, np.float32)
    run(packing, 1, (source, packed, target))
    assert packed.tolist() == [0x10, 0x32, 0xD4, 0xF6]
    assert np.array_equal(target, source)


E4M3 = ct.float8_e4m3fn


def called_types(source, target, flags, SIZE: Int):
    eighth = ct.float16(0.125)
    ct.static_assert(eighth.dtype == ct.float16 and eighth.shape == ())
    ct.static_assert(ct.float16 == eighth.dtype and ct.float16 != ct.float32 and {ct.int8: 1}[ct.int8] == 1)
    ct.static_assert(ct.int32().dtype == ct.int32 and ct.float16.bitwidth == 16)
    tile = ct.gather(source, ct.arange(SIZE, dtype=ct.int32), padding_value=E4M3(2.0))
    ct.store(target, (0,), tile.astype(ct.float16) * eighth)
    ct.store(flags, (0,), ct.full((1,), ct.int8(source.dtype == E4M3), ct.int8))


def test_types_are_called_to_make_scalars():
    target, flags = np.zeros(4, np.float16), np.zeros(1, np.int8)
    run(called_types, 1, (np.ones(3, FP8), target, flags, 4))
    assert target.tolist() == [0.125, 0.125, 0.125, 0.25]
    assert flags.tolist() == [1]


def test_types_of_torch_and_numpy_are_types():
    torch = pytest.importorskip("torch")

    def kernel(target, first: ct.Constant, second: ct.Constant):
        ct.store(target, (0,), ct.arange(4, dtype=first).astype(torch.bool).astype(second))

    target = np.zeros(4, np.int64)
    run(kernel, 1, (target, torch.int8, np.int64))
    assert target.tolist() == [0, 1, 1, 1]
    with pytest.raises(InterpreterError, match=r"complex64.* is not a type"):
        run(kernel, 1, (target, torch.complex64, np.int64))


def added_in_tiles(source, target):
    view = target.tiled_view((4,))
    view.atomic_store_add((ct.bid(0) % 2,), ct.load(source, (ct.bid(0),), (4,)))


def combined(source, target, NAME: ct.Constant[str]):
    view = target.tiled_view((4,))
    tile = ct.load(source, (0,), (4,))
    if NAME == "max":
        view.atomic_store_max((0,), tile)
    elif NAME == "min":
        view.atomic_store_min((0,), tile)
    elif NAME == "and":
        view.atomic_store_and((0,), tile)
    elif NAME == "or":
        view.atomic_store_or((0,), tile)
    else:
        view.atomic_store_xor((0,), tile)


def test_tiles_are_added_atomically():
    source, target = np.arange(16, dtype=np.float32), np.full(6, 100, np.float64)
    run(added_in_tiles, 4, (source, target))
    assert target.tolist() == [108, 110, 112, 114, 116, 118]


@pytest.mark.parametrize(
    ("name", "change"),
    [("max", np.maximum), ("min", np.minimum), ("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)],
)
def test_tiles_are_combined_atomically(name, change):
    source, before = np.array([1, 6, 3, 12], np.int32), np.array([5, 3, 9, 10], np.int32)
    target = before.copy()
    run(combined, 1, (source, target, name))
    assert np.array_equal(target, change(before, source))
    if name in ("and", "or", "xor"):
        with pytest.raises(InterpreterError, match=f"atomic_store_{name} needs an update of int64"):
            run(combined, 1, (source, target.astype(np.int64), name))


def raw_memory(source):
    source.get_raw_memory()


def unknown_type(source):
    ct.load(source, (0,), (4,)).astype(ct.float8_e5m3fnu)


def other_rounding(source):
    ct.add(ct.load(source, (0,), (4,)), 1.0, rounding_mode=ct.RoundingMode.RZ)


@pytest.mark.parametrize(
    ("kernel", "operation"),
    [
        (raw_memory, "ct.Array.get_raw_memory"),
        (unknown_type, "ct.float8_e5m3fnu"),
        (other_rounding, f"ct.add with {ct.RoundingMode.RZ}"),
    ],
)
def test_a_lacking_operation_is_an_error_of_its_own(kernel, operation):
    with pytest.raises(UnsupportedOperationError, match=rf"{kernel.__name__}, block \(0, 0, 0\): ") as caught:
        run(kernel, 1, (np.ones(4, np.float32),))
    assert caught.value.operation == operation


def test_the_table_of_strangers_would_show_what_goes_wrong():
    pytest.importorskip("torch")
    from strangers import programs

    def outcome(kernel, want):
        def compute():
            target = np.full(4, np.nan, np.float32)
            ct.launch(None, (1,), kernel, (np.zeros(4, np.float32), target, 4)[: 3 if kernel is add_one else 1])
            yield target, want

        return programs.run(programs.Program(file="", kernels=("add_one",), compute=compute, tolerance=1e-3))

    right, wrong, unwritten, lacking = (
        outcome(add_one, np.ones(4)),
        outcome(add_one, np.full(4, 2.0)),
        outcome(add_one, np.array([1, 1, 1, np.nan])),
        outcome(ct.kernel(raw_memory), np.ones(4)),
    )
    assert (right.agrees, right.launched, right.lacking) == (True, {"add_one"}, "")
    assert (wrong.agrees, wrong.launched, wrong.error) == (False, {"add_one"}, 0.5)
    assert (unwritten.agrees, unwritten.error) == (False, float("inf"))
    assert (lacking.agrees, lacking.launched, lacking.lacking) == (False, frozenset(), "ct.Array.get_raw_memory")
