"""The attention kernel against a float64 reference, over problems and schedules drawn from the shipped search spaces.

The kernel runs unmodified in the interpreter, so what is shown here is that the algorithm is right for every schedule:
not that the compiler compiles it, which tests/test_build.py shows, nor that a GPU agrees, which measuring checks. That
these checks notice what is wrong is shown in tests/test_kernel_mutations.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import random
import zlib
from functools import partial

import numpy as np
import pytest
from attention_runs import run_problem
from hypothesis import given, settings, strategies
from kernel_checks import (
    ARCHS,
    DRAWN,
    SPACES,
    cases,
    check,
    decoding_problems,
    feature_problems,
    make_inputs,
    more_inputs,
    one_hot_inputs,
    placed_problems,
    problems,
    schedule_for,
)
from test_kernel_features import STRUCTURES

from tiledsched.core import launches
from tiledsched.core.device import arch_spec
from tiledsched.interpreter import SmallDevice
from tiledsched.kernels.attention import Attention, entries
from tiledsched.kernels.attention.declaration import BLOCK_ORDERS
from tiledsched.kernels.attention.scheduler import SWIZZLE_PAIRS, coordinates, snake
from tiledsched.kernels.attention.tiles import Constants
from tiledsched.kernels.attention.tiling import rows_per_tile

# ---- drawn problems and schedules ------------------------------------------------------------------------------------


ORDERS = strategies.one_of(strategies.sampled_from(["forward", "reversed"]), strategies.integers(0, 100))
ALL_KINDS = {
    "plain": problems,
    "few rows": decoding_problems,
    "features": feature_problems,
    "features, few rows": partial(feature_problems, of=decoding_problems),
    "packed or paged": placed_problems,
    "packed or paged, few rows": partial(placed_problems, of=decoding_problems),
}
"""Few rows and many keys are where split keys, packed heads and small tiles are used."""


@pytest.mark.parametrize("kind", ALL_KINDS)
@settings(DRAWN, max_examples=18)
@given(data=strategies.data(), seed=strategies.integers(0, 1000), sm_count=strategies.integers(1, 8), order=ORDERS)
def test_output_matches_the_reference(kind, data, seed, sm_count, order):
    """Blocks run in whatever order."""
    problem, schedule = data.draw(cases(ALL_KINDS[kind]))
    inputs, more = make_inputs(problem, seed), more_inputs(problem, seed)
    check(problem, schedule, inputs, sm_count=sm_count, order=order, more=more)


@pytest.mark.parametrize("kind", ["plain", "features"])
@settings(DRAWN, max_examples=6)
@given(
    data=strategies.data(),
    kv_splits=strategies.sampled_from([2, 4, 8]),
    kv_combine=strategies.sampled_from(["last_block", "launch", "in_order"]),
    order=ORDERS,
)
def test_split_keys_under_any_structure(kind, data, kv_splits, kv_combine, order):
    """Splitting is explored on the plain kernel, and yet right on every other one it is allowed with."""
    problem, schedule = data.draw(cases(ALL_KINDS[kind]))
    plain = {"persistent": "no", "qk_ahead": False, "num_ctas": 1, "unroll": 1, "flat_steps": 0, "store_late": False}
    plain |= {"kv_direction": "forward", "column_parts": 1} if kv_combine == "in_order" else {}
    schedule = schedule.replace(kv_splits=kv_splits, kv_combine=kv_combine, **plain)
    forward = check(problem, schedule)
    np.testing.assert_array_equal(check(problem, schedule, order=order), forward)


@pytest.mark.parametrize("of", [problems, decoding_problems])
@settings(DRAWN, max_examples=20)
@given(data=strategies.data(), arch=strategies.sampled_from(ARCHS), seed=strategies.integers(0, 2**32 - 1))
def test_what_is_not_explored_is_right_where_it_can_work(of, data, arch, seed):
    """Where a search by neighbours may go: from the default schedule by one knob after the other."""
    problem, space, rng = data.draw(of()), SPACES[arch], random.Random(seed)
    schedule = space.default(problem)
    for name in rng.sample(list(space.knobs), len(space.knobs)):
        changed = schedule.replace(**{name: rng.choice(space.knobs[name].choices)})
        if not space.unworkable(changed, problem):
            schedule = changed
    check(problem, schedule)


@settings(DRAWN, max_examples=20)
@given(case=cases(batch=1, heads=2, kv_heads=1), log_scale=strategies.floats(-30, 2))
def test_any_positive_scale(case, log_scale):
    problem, schedule = case
    check(problem, schedule.replace(accum_mode="fp32"), scale=10.0**log_scale)


@settings(DRAWN, max_examples=20)
@given(case=cases(), seed=strategies.integers(0, 1000))
def test_which_knobs_change_the_result(case, seed):
    """Tiles, accumulator, direction, subtiles and shares of the keys, division, parts of the columns and lazy rescaling
    change what is added and in what order.

    Every other knob decides where and when the same sums are done: it may not change one bit.
    """
    problem, schedule = case
    inputs = make_inputs(problem, seed)
    sawtooth = "sawtooth" in schedule["kv_direction"]  # some blocks turn round, so that their rows matter
    plain = schedule.replace(
        occupancy=1,
        num_worker_warps=4,
        num_ctas=1,
        latency_k=0,
        latency_v=0,
        opt_level=3,
        loop_split=False,
        block_order="natural",
        persistent="no",
        qk_ahead=False,
        q_subtiles=schedule["q_subtiles"] if sawtooth else 1,
        tma_loads=True,
        tma_store=True,
        check_bounds=True,
    )
    outputs = [run_problem(Attention, each, problem, *inputs, sm_count=1) for each in (schedule, plain)]
    np.testing.assert_array_equal(*outputs)


# ---- every value of every knob ---------------------------------------------------------------------------------------

SWEPT = [
    Attention.problem(seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, dtype=dtype, causal=causal, heads=2, kv_heads=1)
    for (seq_q, seq_k), head_dim, dtype, causal in itertools.product(
        [(100, 130), (130, 100), (256, 128)], (64, 40), ("float16", "bfloat16"), (True, False)
    )
]
SWEPT += [
    Attention.problem(
        seq_q=seq_q, seq_k=seq_k, head_dim=96, causal=causal, alignment="bottom_right", heads=2, kv_heads=1
    )
    for (seq_q, seq_k), causal in itertools.product(((1, 4200), (5, 2100)), (True, False))
]
SWEPT += [
    Attention.problem(
        seq_q=70, seq_k=192, head_dim=40, causal=True, heads=2, kv_heads=1, batch=2, lengths=True, page=16
    )
]


@pytest.mark.slow
def test_every_value_of_every_knob():
    """Each is taken by some schedule of each arch's space, and is right where it is first met: which arch a schedule is for makes
    no difference here. One drawn schedule stands for many values.
    """
    right = set()
    for arch, space in SPACES.items():
        rng = random.Random(zlib.crc32(arch.encode()))
        missing = {(name, value) for name, knob in space.knobs.items() for value in knob.choices}
        # What no search explores; tests/test_kernel_order.py and tests/test_overlapping_schedules.py run it.
        missing -= {("kv_combine", "in_order"), ("pdl", 1), ("pdl", 2)}
        pinned = (({name: value}, problem) for name, value in sorted(missing, key=str) for problem in SWEPT)
        for pins, problem in [*(({}, problem) for problem in rng.sample(SWEPT, 12) for _ in range(4)), *pinned]:
            if pins and not pins.items() & missing:
                continue
            schedule = next(space.schedules(problem, pinned=pins, rng=rng), None)
            found = missing & set(schedule.items()) if schedule is not None else set()
            if found - right:
                check(problem, schedule)
            right |= found
            missing -= found
        assert not missing, f"no schedule of {arch} has these; the choices are dead"


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", BLOCK_ORDERS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (8, 1)])
@pytest.mark.parametrize("mode", ["strided", "snake"])
def test_persistent_blocks_cover_the_work(order, heads, kv_heads, mode):
    problem = Attention.problem(seq_q=130, seq_k=70, head_dim=16, causal=True, batch=2, heads=heads, kv_heads=kv_heads)
    schedule = schedule_for(problem, tile_m=64, persistent=mode, block_order=order)
    for sm_count in (1, 3, 100):
        blocks = Attention.grid(problem, schedule, SmallDevice(sm_count=sm_count))[0]
        assert blocks == min(3 * heads * 2, sm_count * schedule.number("occupancy"))
        check(problem, schedule, sm_count=sm_count)


def order_of(order, *, causal, work_tiles, heads, batches):
    """(query tile, head, batch) of every work tile, in order."""
    problem = Attention.problem(seq_q=64, seq_k=64, head_dim=16, causal=causal)
    schedule = schedule_for(problem, block_order="natural").replace(block_order=order)
    const = Constants(**Attention.constants(problem, schedule))
    return [coordinates(work, work_tiles, heads, batches, const) for work in range(work_tiles * heads * batches)]


@pytest.mark.parametrize("order", BLOCK_ORDERS)
def test_every_order_takes_every_tile_once(order):
    for causal, (heads, batches) in itertools.product([False, True], [(1, 1), (8, 1), (3, 5), (8, 2), (5, 4)]):
        taken = order_of(order, causal=causal, work_tiles=3, heads=heads, batches=batches)
        assert sorted(taken) == list(itertools.product(range(3), range(heads), range(batches)))


def test_a_swizzled_order_stays_with_eight_heads_and_takes_the_longest_tiles_first():
    taken = order_of("swizzled", causal=True, work_tiles=3, heads=5, batches=2)
    first, rest = taken[: 3 * SWIZZLE_PAIRS], taken[3 * SWIZZLE_PAIRS :]
    assert {(batch, head) for _, head, batch in first} == {(0, head) for head in range(5)} | {(1, 0), (1, 1), (1, 2)}
    assert [tile for tile, _, _ in first] == [2] * 8 + [1] * 8 + [0] * 8
    assert [tile for tile, _, _ in rest] == [2, 2, 1, 1, 0, 0]
    assert order_of("swizzled", causal=False, work_tiles=3, heads=5, batches=2)[0] == (0, 0, 0)


def test_a_snake_turns_round_after_each_lap():
    assert [[snake(block, 4, lap) for block in range(4)] for lap in range(3)] == [
        [0, 1, 2, 3],
        [3, 2, 1, 0],
        [0, 1, 2, 3],
    ]


def test_strided_and_shared_inputs():
    """Arrays as frameworks hand them over: heads inside rows, keys expanded from one, a slice of a larger cache."""
    problem = Attention.problem(seq_q=70, seq_k=90, head_dim=40, batch=2, heads=2, kv_heads=2)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 70, 2, 40)).astype(np.float16).transpose(0, 2, 1, 3)
    k = np.broadcast_to(rng.standard_normal((1, 1, 90, 40)).astype(np.float16), (2, 2, 90, 40))
    v = rng.standard_normal((2, 2, 128, 64)).astype(np.float16)[:, :, 10:100, 24:]
    check(problem, schedule_for(problem), (q, k, v))


def test_a_wide_sawtooth_turns_round_after_four_tiles():
    problem = Attention.problem(seq_q=600, seq_k=200, head_dim=16)
    forward, sawtooth, wide = (
        check(problem, schedule_for(problem, forced=True, tile_m=64, tile_n=32, kv_direction=direction))
        for direction in ("forward", "sawtooth", "wide_sawtooth")
    )
    for tile in range(10):
        rows = slice(tile * 64, tile * 64 + 64)
        assert (wide[:, :, rows] == forward[:, :, rows]).all() == (tile not in (4, 5, 6, 7))
        if tile in (5, 7):  # where the narrow one walks backward, too
            np.testing.assert_array_equal(wide[:, :, rows], sawtooth[:, :, rows])


# ---- other problems --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", STRUCTURES, ids=str)
def test_a_mask_aligned_at_the_bottom_right(knobs):
    for seq_q, seq_k in [(70, 190), (190, 70), (129, 64), (64, 129), (1, 100), (100, 1)]:
        problem = Attention.problem(
            seq_q=seq_q, seq_k=seq_k, head_dim=24, causal=True, alignment="bottom_right", heads=4, kv_heads=2, lse=True
        )
        if knobs.get("kv_splits", 1) * 32 <= seq_k:
            check(problem, schedule_for(problem, forced=True, tile_m=64, tile_n=32, **knobs))


@pytest.mark.parametrize(
    ("seq_q", "group", "tile_m"),
    [(1, 8, 16), (3, 4, 16), (5, 2, 32), (20, 8, 64), (16, 16, 64), (1, 7, 16), (5, 3, 16), (20, 5, 64), (2, 71, 128)],
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kv_splits", "kv_combine"), [(1, "last_block"), (4, "last_block"), (4, "launch")])
def test_packed_heads(seq_q, group, tile_m, causal, kv_splits, kv_combine):
    problem = Attention.problem(
        seq_q=seq_q,
        seq_k=170,
        head_dim=32,
        causal=causal,
        alignment="bottom_right",
        batch=2,
        lse=True,
        heads=2 * group,
        kv_heads=2,
    )
    schedule = schedule_for(
        problem,
        forced=True,
        tile_m=tile_m,
        tile_n=32,
        pack_gqa=True,
        kv_splits=kv_splits,
        kv_combine=kv_combine,
        tma_loads=kv_splits == 1 or kv_combine == "launch",
    )
    rows = rows_per_tile(problem, schedule)
    assert rows == tile_m // problem.group_rows  # a group of 7 takes rows for 8
    assert Attention.grid(problem, schedule, SmallDevice(sm_count=8))[0] == -(-seq_q // rows) * 4 * kv_splits
    check(problem, schedule)


def scratch_of(problem, schedule):
    """The arrays of a launch beside the problem's own, by name."""
    device = arch_spec("sm_90")
    found = launches.scratch(Attention, problem, schedule, launches.steps(Attention, problem, schedule, device))
    return {spec.name: spec for spec in found}


def test_what_is_launched_takes_what_is_said():
    """The parameters of every entry: q, k, v, out, the extra arrays by name, a scale, the constants."""
    plain = Attention.problem(seq_q=8, seq_k=512, head_dim=64)
    large = plain.replace(seq_q=1 << 20, seq_k=1 << 20, batch=64)
    asked = ["Sinks", "Starts", "Lengths"]
    placed = [*asked, "CuQ", "CuK", "Table"]
    for problem, knobs, extras in (
        (plain, {}, []),
        (plain.replace(lse=True), {}, ["Lse"]),
        (large, {}, []),
        (plain, {"kv_splits": 4, "tile_m": 16}, ["Lse", "Partial", "State", "Counters"]),
        (large.replace(lse=True), {}, ["Lse"]),
        (plain.replace(sinks=True), {}, asked),
        (plain.replace(lengths=True, lse=True), {}, ["Lse", *asked]),
        (
            plain.replace(starts=True),
            {"kv_splits": 4, "tile_m": 16, "tma_loads": False},
            ["Lse", "Partial", "State", "Counters", *asked],
        ),
        (plain.replace(packed=3), {}, placed),
        (plain.replace(lengths=True, page=64), {}, placed),
    ):
        schedule = schedule_for(problem, **knobs)
        (step,) = launches.steps(Attention, problem, schedule, arch_spec("sm_90"))
        every = [field.name for field in dataclasses.fields(Constants)]
        every = every[: every.index("KV_SPAN")]  # what follows is of other kernels
        constants, scalars = (
            [each for each in every if each not in ("KV8", "Q8")],
            ["scale_log2", "cap_scale", "window", "window_right"],
        )
        if not problem.has_features:
            constants, scalars = every[: every.index("WINDOW")], ["scale_log2"]
        elif not problem.is_varlen:
            constants = [each for each in constants if each not in ("PACKED", "PAGE", "PAGE_BY_PAGE")]
        assert [each.name for each in step.arguments] == ["Q", "K", "V", "Out", *extras, *scalars, *constants]
        assert list(inspect.signature(step.function).parameters) == [each.name for each in step.arguments]
        assert sorted(Attention.constants(problem, schedule)) == sorted(every)
        assert {each.kind for each in step.arguments if each.name in constants} == {"constant"}


def test_a_launch_that_combines_takes_the_shares_alone():
    """Of heads and rows that there are: a tile of 16 rows has one of each of seven heads, in decoding."""
    problem = Attention.problem(seq_q=1, seq_k=512, head_dim=96, batch=3, heads=14, kv_heads=2, lse=True)
    schedule = schedule_for(
        problem, forced=True, tile_m=16, pack_gqa=True, kv_splits=8, kv_combine="launch", column_parts=2
    )
    share, combine = launches.steps(Attention, problem, schedule, arch_spec("sm_90"))
    arrays = [[each.name for each in step.arguments if each.kind == "array"] for step in (share, combine)]
    assert arrays == [["Q", "K", "V", "Shares", "State"], ["Out", "Lse", "Shares", "State"]]
    assert (share.grid[0], combine.grid[0]) == (3 * 2 * 8, 3 * 14)
    found = scratch_of(problem, schedule)
    assert {name: spec.shape for name, spec in found.items()} == {"Shares": (6 * 8, 7, 1, 96), "State": (6 * 8, 2, 16)}
    many = problem.replace(seq_q=100, heads=2)
    assert scratch_of(many, schedule.replace(tile_m=32, pack_gqa=False))["Shares"].shape == (4 * 3 * 2 * 8, 1, 32, 96)


def test_a_workspace_is_as_large_as_the_shares_need():
    problem = Attention.problem(seq_q=5, seq_k=512, head_dim=96, batch=3, heads=8, kv_heads=2)
    schedule = schedule_for(
        problem, forced=True, tile_m=16, pack_gqa=True, kv_splits=4, column_parts=2, tma_loads=False
    )
    found = scratch_of(problem, schedule)
    assert list(found) == ["Lse", "Partial", "State", "Counters"]
    lse, partial, state, counters = found.values()
    work_tiles = 2 * 3 * 2  # two tiles of four rows, three batch entries, two packs of heads
    assert (lse.shape, lse.role) == ((3, 8, 5, 1), "workspace")
    assert (partial.shape, partial.zeroed) == ((work_tiles * 4, 16, 64 + 32), False)
    assert state.shape == (work_tiles * 4, 2, 16)
    assert (counters.shape, counters.dtype, counters.zeroed) == ((work_tiles, 1), "int32", True)
    assert scratch_of(problem, schedule.replace(kv_splits=1)) == {}
    asked = problem.replace(lse=True)
    assert list(scratch_of(asked, schedule)) == ["Partial", "State", "Counters"]
    assert [each.name for each in Attention.arrays(asked)] == ["Q", "K", "V", "Out", "Lse"]
    lse = Attention.array_spec("Lse", asked)
    assert (lse.shape, lse.dtype, lse.role, lse.zeroed) == ((3, 8, 5, 1), "float32", "out", False)


def test_wide_indices():
    """The entry for arrays beyond 32-bit indices, here on small ones."""

    class Wide(Attention):
        name = "attention of wide indices"

        def entry(p, s):
            return getattr(entries, f"{Attention.entry(p, s).__name__}_wide")

    problem = Attention.problem(seq_q=70, seq_k=130, head_dim=40, causal=True, heads=4, kv_heads=2, lse=True)
    for knobs in (
        {},
        {"block_order": "swizzled", "persistent": "snake"},
        {"q_subtiles": 2, "kv_subtiles": 2},
        {"loop_split": True, "block_order": "reversed"},
        {"kv_splits": 2, "tma_loads": False},
    ):
        check(problem, schedule_for(problem, **knobs), kernel=Wide)


# ---- adversarial inputs ----------------------------------------------------------------------------------------------


@settings(DRAWN, max_examples=20)
@given(case=cases(head_dim=128), seed=strategies.integers(0, 1000))
def test_one_hot_rows_give_that_row_exactly(case, seed):
    problem, schedule = case
    inputs, expected = one_hot_inputs(problem, seed)
    out = run_problem(Attention, schedule, problem, *inputs, 1.0, sm_count=2)
    np.testing.assert_array_equal(out, expected)
