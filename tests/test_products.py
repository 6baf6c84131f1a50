"""Matrix products and kernels over rows: what is special about each. What they have in common is tested in `test_kernels`."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from test_tile_mutations import NARROW, schedule
from tile_checks import check, make_inputs, run_schedule

import tiledsched as ts
from tiledsched.build.compiler import compile_schedule
from tiledsched.core.arrays import LARGEST, to_storage
from tiledsched.core.errors import ProblemError
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.epilogues import erfc
from tiledsched.kernels.grouped_matmul import GroupedMatmul
from tiledsched.kernels.grouped_matmul.declaration import OFFSET_KINDS, group_ends, most_tiles
from tiledsched.kernels.matmul import Matmul
from tiledsched.kernels.product_schedules import combine_tile
from tiledsched.kernels.rms_norm import RmsNorm
from tiledsched.kernels.rms_norm_backward import RmsNormBackward
from tiledsched.kernels.rope import Rope
from tiledsched.kernels.scaled_matmul import ScaledMatmul
from tiledsched.kernels.scaled_matmul.declaration import scale_shapes

GROUPED = ({}, NARROW, {"STORE": "view", "PERSISTENT": False})
"""How groups are computed: by rows, by narrow tiles, and by views that end where a group does."""


def untouched(kernel, **pinned):
    """The default of each knob, but for what is pinned."""
    return Schedule({name: each.default for name, each in kernel.knob_fields().items()} | pinned)


def test_every_tile_is_computed_once_whatever_the_order():
    p = Matmul.problem(m=500, n=300, k=40)
    for group in (1, 4, 8, 16):
        for order in ("forward", "reversed"):
            check(Matmul, p, schedule(Matmul, GROUP_M=group, PERSISTENT=True), order=order)


def test_more_shares_than_steps_are_right():
    check(Matmul, Matmul.problem(m=70, n=64, k=33), schedule(Matmul, SPLIT_K=8))


def test_results_do_not_depend_on_the_order_of_blocks():
    p = Matmul.problem(m=70, n=130, k=500)
    s, inputs = schedule(Matmul, SPLIT_K=8), make_inputs(Matmul, p)
    first, second = (run_schedule(Matmul, p, s, inputs, order)["C"] for order in ("forward", "reversed"))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    ("m", "n", "even"), [(4096, 4096, True), (16, 6144, True), (777, 7777, False), (1, 4096, True)]
)
def test_tiles_of_the_last_sum_divide_the_product_where_they_can(m, n, even):
    rows, columns, said = combine_tile(Matmul.problem(m=m, n=n, k=8))
    assert said == even
    assert not even or (m % rows == 0 and n % columns == 0)


@pytest.mark.slow
@pytest.mark.compiler
def test_main_loop_keeps_three_steps_in_shared_memory_on_hopper():
    p = Matmul.problem(m=4096, n=4096, k=4096, a_layout="column")
    for pinned in (
        {"TILE_N": 256},
        {"TILE_M": 256, "TILE_N": 256, "num_ctas": 2, "PERSISTENT": True},
        {"TILE_N": 128, "REST_N": 64},
    ):
        s = untouched(Matmul, **pinned)
        facts = compile_schedule(Matmul, p, s, "sm_90").facts
        step = (128 + s.number("TILE_N") + s.number("REST_N")) * s.number("TILE_K") * 2
        assert facts.threads == 384
        assert facts.spill_bytes == 0
        assert facts.num_ctas == s.number("num_ctas")
        assert facts.shared_bytes >= 3 * step


def test_rows_that_tma_cannot_load_are_refused_by_name():
    with pytest.raises(ProblemError, match=r"pad B with zeros: n % 16 == 0 is false for n=100"):
        ScaledMatmul.problem(m=3, n=100, k=64)


@pytest.mark.parametrize("fast", [False, True])
def test_sums_of_products_of_one_sign_are_judged_only_where_they_are_kept(fast):
    tolerance = ScaledMatmul.tolerance(
        ScaledMatmul.problem(m=16, n=16, k=16384, fast_accum=fast), schedule(ScaledMatmul)
    )
    assert tolerance.relative == pytest.approx(0.008 + fast * 128 / 32768)
    assert tolerance.except_kinds == ("offset",) * fast


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_numbers_are_rounded_to_eight_bits_as_ml_dtypes_rounds_them(dtype):
    kind, rng = getattr(ml_dtypes, dtype), np.random.default_rng(0)
    every = np.arange(256, dtype=np.uint8).view(kind).astype(np.float32)
    finite = np.sort(every[np.isfinite(every)])
    halfway = (finite[1:] + finite[:-1]) / 2
    near = [np.nextafter(halfway, np.float32(side)) for side in (-np.inf, np.inf)]
    drawn = rng.standard_normal(10000) * 10.0 ** rng.uniform(-8, 4, 10000)
    values = np.concatenate([finite, halfway, *near, drawn, [-0.0, 1e30, -np.inf]]).astype(np.float32)
    wanted = values.clip(-LARGEST[dtype], LARGEST[dtype]).astype(kind).view(np.uint8)
    np.testing.assert_array_equal(to_storage(np, values, dtype), wanted)
    assert np.isnan(to_storage(np, np.array([np.nan]), dtype).view(kind).astype(np.float32))


def test_scales_are_those_of_their_rows_whatever_their_size():
    p = ScaledMatmul.problem(m=40, n=80, k=64)
    inputs = make_inputs(ScaledMatmul, p)
    inputs["ScaleA"] = (1e-3 * 1e6 ** (np.arange(p.m) % 2)).astype(np.float32)
    inputs["ScaleB"] = (1e3 * 1e-6 ** (np.arange(p.n) % 2)).astype(np.float32)
    for s in (schedule(ScaledMatmul, **NARROW), schedule(ScaledMatmul, SPLIT_K=2, TILE_K=64)):
        check(ScaledMatmul, p, s, inputs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("by_row", [False, True])
def test_the_scaled_function_takes_what_torchs_takes(launches, quiet, by_row, dtype):
    torch = pytest.importorskip("torch")
    kind, generator = getattr(torch, dtype), torch.Generator().manual_seed(0)
    a, w = (torch.randn(size, 48, generator=generator).to(torch.float8_e4m3fn) for size in (20, 32))
    scales = (torch.rand(20, 1), torch.rand(1, 32)) if by_row else (torch.tensor(0.3), torch.tensor([0.2]))
    for bias in (None, torch.randn(32, generator=generator).to(kind)):
        wanted = (a.float() @ w.float().t()) * scales[0] * scales[1] + (0.0 if bias is None else bias.float())
        out = ts.scaled_matmul(a, w.t(), *scales, bias, out_dtype=kind)
        assert out.dtype == kind
        torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-2)
        assert torch.equal(
            ts.scaled_matmul(a[:0], w.t(), *((scales[0][:0], scales[1]) if by_row else scales)),
            out.new_empty(0, 32).bfloat16(),
        )
    with pytest.raises(ProblemError, match="bias must be of the output's type"):
        ts.scaled_matmul(a, w.t(), *scales, torch.randn(32), out_dtype=kind)
    if by_row:
        flat = ts.scaled_matmul(a, w.t(), *(each.flatten() for each in scales), out_dtype=kind)
        assert torch.equal(flat, ts.scaled_matmul(a, w.t(), *scales, out_dtype=kind))


def test_scales_of_other_shapes_are_refused(launches, quiet):
    """Also where there are as many of them: one for each row where one for each column belongs, and blocks of both operands or
    with their axes exchanged."""
    torch = pytest.importorskip("torch")
    a, w = (torch.randn(32, 192).to(torch.float8_e4m3fn) for _ in range(2))
    rows, columns, one = torch.rand(32, 1), torch.rand(1, 32), torch.rand(1, 1)
    for given in (
        (columns, rows),
        (rows, rows),
        (columns, columns),
        (rows[:7], columns),
        (torch.rand(8, 4), columns),
        (rows, one),
        (one, columns),
        (rows[None], columns[None]),
        (torch.rand(2, 32), torch.rand(2, 1)),
        (torch.rand(32, 2), torch.rand(1, 2)),
        (torch.rand(1, 2), torch.rand(2, 1)),
        (torch.rand(32, 2), torch.rand(2, 32)),
    ):
        with pytest.raises(
            ProblemError, match=r"a row of a, \(32, 2\), and one for 128 x 128 of b, \(2, 1\); got .*eshape"
        ):
            ts.scaled_matmul(a, w.t(), *given)
    with pytest.raises(ProblemError, match="A must have 2 axes"):
        ts.scaled_matmul(a[None], w.t(), rows, columns)


@pytest.mark.parametrize(("m", "n", "k"), [(40, 272, 320), (20, 32, 48), (1, 16, 272)])
def test_the_scaled_function_takes_scales_of_blocks_however_they_lie(launches, quiet, m, n, k):
    """Those of `a` with the rows or with k next to each other, those of `b` as DeepSeek's checkpoints hold them, transposed."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    a, w = (torch.randn(size, k, generator=generator).to(torch.float8_e4m3fn) for size in (m, n))
    scale_a = torch.rand(m, -(-k // 128), generator=generator) + 0.5
    inverse = torch.rand(-(-n // 128), -(-k // 128), generator=generator) + 0.5
    wide = inverse.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    wanted = (a.float() * scale_a.repeat_interleave(128, 1)[:, :k]) @ (w.float() * wide).t()
    padded = torch.zeros(scale_a.shape[1], m + 3).t()[:m].copy_(scale_a)  # as the TMA unit may want them
    for lying in (scale_a, scale_a.t().contiguous().t(), padded):
        for fast in (False, True):
            out = ts.scaled_matmul(a, w.t(), lying, inverse.t(), out_dtype=torch.float32, use_fast_accum=fast)
            torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-3)
    empty = ts.scaled_matmul(a[:0], w.t(), scale_a[:0], inverse.t())
    assert torch.equal(empty, a.new_empty(0, n).bfloat16())


def test_scales_of_blocks_are_those_of_their_blocks_whatever_their_size():
    """A block's scale is a thousand times its neighbours', along rows, columns and k, so that one taken from beside shows."""
    p = ScaledMatmul.problem(m=70, n=400, k=304, scales="block")
    inputs = make_inputs(ScaledMatmul, p)
    for name, (rows, columns) in zip(("ScaleA", "ScaleB"), scale_shapes(p), strict=True):
        inputs[name] = (1e3 ** ((np.arange(rows)[:, None] + np.arange(columns)) % 2)).astype(np.float32)
    for pinned in (NARROW, {"TILE_N": 128, "TILE_K": 64}, {"SPLIT_K": 2, "TILE_K": 128}):
        check(ScaledMatmul, p, schedule(ScaledMatmul, **pinned), inputs)


@pytest.mark.parametrize(("bits", "error"), [(12, 3.1e-4), (13, 1.2e-4), (14, 4.8e-5)])
def test_sums_of_13_bits_have_the_error_that_was_measured(bits, error):
    """On an H200 it was 1.3e-4 for k = 512, float32. Each instruction aligns 32 products and the sum so far to the largest of
    them and cuts off what is so many bits below it; sums of 128 products are added without error."""
    rng = np.random.default_rng(0)
    for k in (128, 2048):
        a, b = (rng.standard_normal((800, k)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) for _ in range(2))
        total = np.zeros(800)
        for begin in range(0, k, 128):
            part = np.zeros(800)
            for step in range(begin, begin + 128, 32):
                addends = np.column_stack([part, (a * b)[:, step : step + 32]])
                unit = 2.0 ** (np.floor(np.log2(np.abs(addends).max(1))) - bits)
                part = np.trunc(addends / unit[:, None]).sum(1) * unit
            total += part
        exact = (a * b).sum(1)
        assert np.linalg.norm(total - exact) / np.linalg.norm(exact) == pytest.approx(error, rel=0.1)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("values", "pinned"),
    [
        ({"fast_accum": True}, {}),
        ({}, {"TILE_N": 128}),
        ({}, {"TILE_N": 128, "REST_N": 64}),
        ({"scales": "block"}, {"TILE_N": 128, "TILE_K": 64}),
        ({"scales": "block"}, {"TILE_N": 128}),
    ],
    ids=["fast", "float32", "two parts", "blocks", "blocks in one step"],
)
def test_hopper_multiplies_eight_bits_and_spills_nothing(values, pinned):
    p, s = ScaledMatmul.problem(m=4096, n=4096, k=4096, **values), untouched(ScaledMatmul, **pinned)
    facts = compile_schedule(ScaledMatmul, p, s, "sm_90").facts
    assert (facts.threads, facts.spill_bytes) == (384, 0)
    columns = s.number("TILE_N") + s.number("REST_N")
    assert facts.shared_bytes >= 4 * 128 * (128 + columns)  # operands that were converted would take twice that


@pytest.mark.parametrize("kind", OFFSET_KINDS)
@pytest.mark.parametrize("pinned", GROUPED, ids=["rows", "narrow", "view"])
def test_groups_may_be_empty_and_may_have_all_rows(kind, pinned):
    p = GroupedMatmul.problem(tokens=150, experts=6, n=72, k=80, b_layout="column")
    check(
        GroupedMatmul,
        p,
        schedule(GroupedMatmul, **pinned),
        make_inputs(GroupedMatmul, p) | {"Offsets": group_ends(kind, p.tokens, p.experts)},
    )


@pytest.mark.parametrize(("tokens", "experts"), [(1, 1), (7, 40), (200, 3), (64, 64)])
@pytest.mark.parametrize("tile", [16, 128])
def test_the_list_of_tiles_is_as_long_as_any_offsets_make_it(tokens, experts, tile):
    p, s = GroupedMatmul.problem(tokens=tokens, experts=experts, n=8, k=8), schedule(GroupedMatmul, TILE_M=tile)
    rng, most = np.random.default_rng(tokens), 0
    for _ in range(200):
        ends = np.sort(rng.integers(0, tokens + 1, experts - 1))
        rows = np.diff(np.concatenate([[0], ends, [tokens]]))
        most = max(most, int((-(-rows // tile)).sum()))
    groups = min(tokens, experts)  # the worst: one row for each group but the last
    worst = groups - 1 + -(-(tokens - groups + 1) // tile)
    assert most <= worst <= most_tiles(p, s) <= worst + 1


def test_rows_behind_the_last_group_are_left_alone():
    p = GroupedMatmul.problem(tokens=100, experts=3, n=64, k=64)
    inputs = make_inputs(GroupedMatmul, p) | {"Offsets": np.array([10, 10, 70], np.int32)}
    for pinned in GROUPED:
        out = run_schedule(GroupedMatmul, p, schedule(GroupedMatmul, **pinned), inputs)["C"].astype(np.float32)
        assert np.isfinite(out[:70]).all()
        assert np.isnan(out[70:]).all()


@pytest.mark.parametrize("ends", [[50, 900, 2000], [90, 10, 10], [-70, 20, 64], [0, 100, -5]], ids=str)
def test_no_offsets_make_it_touch_what_is_not_there(ends):
    """The interpreter refuses accesses beyond the arrays; blocks in both orders see the same list."""
    p = GroupedMatmul.problem(tokens=100, experts=3, n=64, k=64)
    inputs = make_inputs(GroupedMatmul, p) | {"Offsets": np.array(ends, np.int32)}
    for pinned in GROUPED[1:]:
        run_schedule(GroupedMatmul, p, schedule(GroupedMatmul, **pinned), inputs)


@pytest.mark.parametrize("column", [False, True])
def test_the_grouped_function_takes_what_torchs_takes(launches, quiet, column):
    torch = pytest.importorskip("torch")
    a, w = torch.randn(70, 48).bfloat16(), torch.randn(3, 48, 32).bfloat16()
    b = w.transpose(1, 2).contiguous().transpose(1, 2) if column else w
    offsets = torch.tensor([20, 20, 70], dtype=torch.int32)
    wanted = torch.cat([a[:20].float() @ w[0].float(), a[20:].float() @ w[2].float()])
    torch.testing.assert_close(ts.grouped_matmul(a, b, offsets).float(), wanted, rtol=2e-2, atol=2e-1)
    assert ts.grouped_matmul(a[:0], b, offsets * 0).shape == (0, 32)
    with pytest.raises(ProblemError, match="Offsets must be int32, got int64"):
        ts.grouped_matmul(a, b, offsets.long())


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize(("store", "persistent"), [("view", True), ("rows", False)])
def test_hopper_spills_nothing(store, persistent):
    p = GroupedMatmul.problem(tokens=8192, experts=8, n=4096, k=4096, b_layout="column")
    facts = compile_schedule(
        GroupedMatmul, p, untouched(GroupedMatmul, STORE=store, PERSISTENT=persistent), "sm_90"
    ).facts
    assert (facts.threads, facts.spill_bytes) == (384, 0)


# Kernels over rows


ONE_TILE = Schedule({name: each.default for name, each in RmsNorm.knob_fields().items()} | {"TILE_COLUMNS": 512})


def test_the_sum_is_normalised_before_it_is_rounded():
    """A residual of a thousand and elements of a thousandth: rounded, the sums would all be equal."""
    p = RmsNorm.problem(rows=4, columns=256, residual=True, dtype="float16")
    inputs = make_inputs(RmsNorm, p)
    inputs["X"] = (inputs["X"] * 100).astype(np.float16)
    inputs["R"] = (-inputs["X"].astype(np.float32) + 1e-3 * inputs["R"].astype(np.float32)).astype(np.float16)
    check(RmsNorm, p, ONE_TILE, inputs)


def test_rows_of_zeros_stay_zero():
    p = RmsNorm.problem(rows=3, columns=100)
    inputs = make_inputs(RmsNorm, p)
    inputs["X"][1] = 0
    out = run_schedule(RmsNorm, p, ONE_TILE, inputs)["Out"]
    assert np.isfinite(out.astype(np.float32)).all()
    assert not out[1].astype(np.float32).any()


@pytest.mark.parametrize(
    "walk",
    [
        {"TILE_COLUMNS": 1024, "HOLD": True, "AHEAD": True},
        {"TILE_COLUMNS": 512, "HOLD": False, "AHEAD": False, "loads": "tma"},
    ],
    ids=str,
)
def test_the_gradient_of_the_weight_has_the_same_bits_in_any_order_of_blocks(walk):
    """It is summed up in float32, which has the half that is left of 300 ones."""
    p = RmsNormBackward.problem(rows=301, columns=24, dtype="float16")
    s = Schedule({"TILE_ROWS": 2, "loads": "plain", "num_worker_warps": 4, "occupancy": 1, "BLOCKS": 16} | walk)
    inputs = make_inputs(RmsNormBackward, p)
    found = [run_schedule(RmsNormBackward, p, s, inputs, order)["dW"] for order in ("forward", "reverse")]
    assert np.array_equal(*found)
    ones = {"X": np.ones((301, 24)), "dOut": np.ones((301, 24)), "W": np.ones(24)}
    ones["dOut"][-1] = -299.5
    halves = {name: each.astype(np.float16) for name, each in ones.items()}
    np.testing.assert_allclose(run_schedule(RmsNormBackward, p, s, halves)["dW"], 0.5, atol=2e-3)


def test_the_complementary_error_function_is_that_of_the_standard_library():
    x = np.concatenate([np.linspace(-9, 9, 1001), [0.125, 0.25, 1e-9, 0.0, 30.0]])
    np.testing.assert_allclose(erfc(np, x), [math.erfc(each) for each in x], rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tables": 2}, "all sequences have the same angles, or each has its own"),
        ({"parts": 1, "width": 7}, "a head is pairs of elements"),
    ],
    ids=["tables", "width"],
)
def test_angles_that_fit_no_sequence_or_head_are_refused(more, words):
    with pytest.raises(ProblemError, match=words):
        Rope.problem(batch=3, seq=5, q_heads=2, k_heads=1, **more)
