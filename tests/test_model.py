"""The static model: sane directions, exact placement of blocks, no say for knobs without a trace, and speed."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest

from tiledsched.core.device import ARCHS, ResourceFacts, arch_spec, grid_blocks
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention, model
from tiledsched.kernels.attention.model import busy_steps, estimate_us, pieces_of, tile_steps
from tiledsched.kernels.attention.scheduler import SWIZZLE_PAIRS

PLAIN = Schedule(
    tile_m=64,
    tile_n=64,
    occupancy=2,
    num_worker_warps=4,
    num_ctas=1,
    latency_k=0,
    latency_v=0,
    opt_level=3,
    accum_mode="fp32",
    loop_split=False,
    block_order="natural",
    persistent="no",
    kv_direction="forward",
    q_subtiles=1,
    kv_subtiles=1,
    qk_ahead=False,
    tma_loads=True,
    tma_store=True,
    check_bounds=True,
    division="approximate",
    lazy_rescale=False,
)
FACTS = ResourceFacts(
    registers=128, threads=256, shared_bytes=42000, spill_bytes=0, num_ctas=1, code_bytes=16000, ctas_per_sm=2
)
PROBLEM = Attention.standard(seq_len=2048, head_dim=64)
REGISTERS = {(4, 1): 255, (4, 2): 128, (4, 3): 80, (4, 4): 64, (8, 1): 168, (8, 2): 80, (8, 3): 56, (8, 4): 40}
"""What the compiler allots on sm_90 by (worker warps, occupancy hint)."""


def modelled(problem=PROBLEM, facts=FACTS, arch="sm_90", **knobs):
    return estimate_us(problem, PLAIN.replace(**knobs), facts, arch_spec(arch))


CAUSAL = PROBLEM.replace(causal=True)
FEW = Attention.problem(seq_q=1, seq_k=8192, head_dim=64, heads=2, kv_heads=2)
GROUPED = Attention.problem(seq_q=1, seq_k=4096, head_dim=64, batch=64, heads=32, kv_heads=4)
TILES = [{"facts": replace(FACTS, registers=255, shared_bytes=8192 * tiles)} for tiles in (9, 6, 4, 3, 2)]
SPILLS = [{"facts": replace(FACTS, spill_bytes=spill)} for spill in (0, 128, 512)]
QUICKER = {
    "shorter sequences": (1, {}, {"problem": PROBLEM.replace(seq_q=4096, seq_k=4096)}),
    "fewer sequences": (1, {}, {"problem": PROBLEM.replace(batch=2 * PROBLEM.batch)}),
    "fewer heads": (1, {}, {"problem": PROBLEM.replace(heads=64, kv_heads=64)}),
    "narrower heads": (1, {}, {"problem": PROBLEM.replace(head_dim=128)}),
    "fewer keys": (1, {"problem": PROBLEM.replace(seq_k=1024)}, {}),
    "a mask": (1, {"problem": CAUSAL}, {}),
    "a mask on the diagonal alone": (1, {"problem": CAUSAL, "loop_split": True}, {"problem": CAUSAL}),
    "a second block on an SM": (1, {}, {"facts": replace(FACTS, registers=255)}),
    "no spills": (1, *SPILLS[:2]),
    "few spills": (1, *SPILLS[1:]),
}
"""What is modelled as quicker than what, and at least how many times."""
NEWER = ("sm_90", "sm_100", "sm_121")
ALSO_QUICKER = {
    "more tiles in flight": (1.02, TILES[0], TILES[-1]),
    "loads by the copy unit": (1.3, {}, {"tma_loads": False}),
    "an eager rescaling": (1, {}, {"lazy_rescale": True}),
    "an approximate division": (1, {}, {"division": "ieee"}),
    "split keys where blocks are few": (1.4, {"problem": FEW, "kv_splits": 8}, {"problem": FEW}),
    "whole keys where blocks are many": (1, {}, {"kv_splits": 8}),
    "packed heads": (1.4, {"problem": GROUPED, "pack_gqa": True}, {"problem": GROUPED}),
}
"""The same of knobs that only newer GPUs tell apart."""


@pytest.mark.parametrize("arch", ARCHS)
class TestDirections:
    def test_less_work_is_quicker(self, arch):
        for name, (times, less, more) in (QUICKER | (ALSO_QUICKER if arch in NEWER else {})).items():
            assert 0 < times * modelled(arch=arch, **less) < modelled(arch=arch, **more), name
        times = [modelled(arch=arch, **each) for each in TILES]
        assert times == sorted(times)
        assert modelled(arch=arch) == modelled(arch=arch, facts=replace(FACTS, spill_bytes=16))

    def test_causal_is_dearer_than_half(self, arch):
        assert 0.5 * modelled(arch=arch) < modelled(CAUSAL, arch=arch, loop_split=True)

    def test_warps_without_rows_of_their_own_cost(self, arch):
        movers = 32 * arch_spec(arch).producer_warps
        four, eight = (replace(FACTS, threads=movers + 32 * warps, registers=80) for warps in (4, 8))
        assert modelled(facts=eight, arch=arch) > modelled(facts=four, arch=arch)

    def test_nothing_beats_the_peak_rates(self, arch):
        spec, problem = arch_spec(arch), Attention.standard(seq_len=8192, head_dim=128)
        peak = spec.sm_count * spec.clock_ghz * 1e3
        floor_us = max(problem.flops / (spec.tensor_flops * peak), problem.flops / 4 / 128 / (spec.exp2_ops * peak))
        assert modelled(problem, arch=arch) > floor_us


@pytest.mark.parametrize("arch", NEWER)
def test_a_division_that_rounds_costs_by_the_block(arch):
    short, long = PROBLEM.replace(seq_q=512, seq_k=512), PROBLEM.replace(seq_q=8192, seq_k=8192)
    ratios = [modelled(one, arch=arch, division="ieee") / modelled(one, arch=arch) for one in (short, long)]
    assert ratios[0] > ratios[1] > 1.0


@pytest.mark.parametrize(
    ("arch", "name", "tflops"),
    [
        ("sm_120", "NVIDIA GeForce RTX 5090", 209.5),  # fp32 accumulators, dense: NVIDIA's RTX Blackwell white paper
        ("sm_120", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 500.5),
        ("sm_120", "", 500.5),
        ("sm_121", "NVIDIA GeForce RTX 5090", 118.9),  # no such GPU: the arch decides
        ("sm_90", "NVIDIA H100 80GB HBM3", 1070.5),
    ],
)
def test_a_gpu_that_its_arch_misrepresents_has_numbers_of_its_own(arch, name, tflops):
    spec = arch_spec(arch, name)
    assert spec.sm_count * spec.tensor_flops * spec.clock_ghz / 1e3 == pytest.approx(tflops, rel=0.003)
    assert spec.arch == arch


def test_whole_turns_of_steps_are_taken() -> None:
    """Five steps in turns of two are six, and the last is masked."""
    odd, even = (PROBLEM.replace(seq_k=keys) for keys in (5 * 64, 6 * 64))
    assert modelled(odd, unroll=2) > modelled(even)
    assert modelled(even, unroll=2) == modelled(even, flat_steps=2) == modelled(even)
    shares = busy_steps(
        rows=64,
        step_n=64,
        seq_q=64,
        seq_k=10 * 64,
        causal=False,
        heads=1,
        order="natural",
        grid=0,
        sms=4,
        resident=1,
        extra=0.0,
        splits=2,
        turn=2,
    )
    assert shares[:, 1:].sum(axis=1).max() == 6  # five each, in three turns


@pytest.mark.parametrize(
    ("knobs", "blocks"),
    [
        ({"tile_m": 16, "tile_n": 128, "occupancy": 3}, 3),
        ({"tile_m": 64, "tile_n": 64, "occupancy": 3}, 3),
        ({"tile_m": 64, "tile_n": 128, "occupancy": 3}, 2),  # 96 registers of scores and output, where 80 are left
        ({"tile_m": 128, "tile_n": 128, "num_worker_warps": 8, "occupancy": 2}, 1),
        ({"tile_m": 128, "tile_n": 64, "num_worker_warps": 4, "occupancy": 3}, 3),  # two products, one after the other
    ],
)
def test_what_does_not_fit_in_registers_leaves_fewer_blocks_to_an_sm(knobs, blocks) -> None:
    """As the compiler builds most programs for sm_90 (docs/model.md); where accumulators have a memory of their own, as asked."""
    schedule = PLAIN.replace(**knobs)
    assert Attention.cost.expected(PROBLEM, schedule, arch_spec("sm_90")).ctas_per_sm == blocks
    warps, occupancy = schedule.number("num_worker_warps"), schedule.number("occupancy")
    facts = Attention.cost.expected(PROBLEM, schedule, arch_spec("sm_100"))
    assert facts.registers == min(255, 65536 // (facts.threads * occupancy) // 8 * 8)
    assert Attention.cost.expected(PROBLEM, schedule, arch_spec("sm_90")).registers == REGISTERS[warps, blocks]


def test_what_the_flush_wrote_is_written_back_meanwhile() -> None:
    """Of what a decoding step reads, as much as the L2 cache holds: 134 MB take as long as 184 at the memory's rate."""
    spec = arch_spec("sm_90")
    reads = Attention.problem(seq_q=1, seq_k=4096, head_dim=128, dtype="bfloat16", batch=8, heads=32, kv_heads=8)
    us = (
        modelled(reads, tile_n=128, pack_gqa=True, kv_splits=4, kv_combine="launch")
        - model.LAUNCH_US
        - model.COMBINE_US
    )
    least = (reads.min_bytes + spec.l2_bytes) / (model.DRAM_EFFICIENCY * spec.dram_gbps * 1e3)
    assert least < us < 1.2 * least


def test_the_swizzle_is_the_kernels() -> None:
    assert model.SWIZZLE_PAIRS == SWIZZLE_PAIRS


def test_keys_that_overflow_the_cache_cost_where_every_head_is_in_flight():
    large, small = Attention.standard(seq_len=4096, head_dim=64), PROBLEM.replace(batch=1, heads=8, kv_heads=8)
    assert modelled(large, block_order="heads_fastest") > 1.05 * modelled(large)
    assert modelled(small, block_order="heads_fastest") == modelled(small)


def test_small_rows_lose_the_warpgroup_products():
    facts = replace(FACTS, num_ctas=2)  # 32 rows for each CTA of the cluster
    assert modelled(facts=facts, num_ctas=2) > 5 * modelled()


class TestIdenticalPrograms:
    """Same machine code and same grid: same estimate, whatever the schedule said."""

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("persistent", ["no", "strided"])
    def test_knobs_that_left_no_trace(self, causal, persistent):
        problem = PROBLEM.replace(causal=causal)
        inert = {"latency_k": 2, "latency_v": 4, "opt_level": 2, "num_worker_warps": 8}
        assert modelled(problem, persistent=persistent, **inert) == modelled(problem, persistent=persistent)

    def test_occupancy_speaks_only_through_the_grid(self):
        assert modelled(occupancy=1) == modelled(occupancy=3)
        assert modelled(persistent="strided", occupancy=2) < modelled(persistent="strided", occupancy=3)
        few = PROBLEM.replace(batch=1, heads=2, kv_heads=2)  # 64 tiles: every grid is the same
        assert modelled(few, persistent="strided", occupancy=2) == modelled(few, persistent="strided", occupancy=3)

    def test_order_and_split_do_not_matter_without_a_mask(self):
        assert modelled(block_order="reversed") == modelled() == modelled(loop_split=True)

    @pytest.mark.parametrize(
        "knobs",
        [
            {},
            {"persistent": "strided"},
            {"persistent": "strided", "num_ctas": 2, "occupancy": 3},
            {"q_subtiles": 2},
            {"kv_splits": 4},
        ],
    )
    def test_the_grid_is_the_kernels(self, knobs):
        for problem in (PROBLEM, PROBLEM.replace(batch=1, heads=1, kv_heads=1)):
            schedule = PLAIN.replace(**knobs)
            spec, persistent = arch_spec("sm_90"), schedule["persistent"] != "no"
            blocks = grid_blocks(pieces_of(problem, schedule), schedule, spec, persistent=persistent)
            assert Attention.grids(problem, schedule, spec) == ((blocks, 1, 1),)


class TestPlacement:
    """`busy_steps` against a simulation that ticks."""

    @staticmethod
    def ticking(jobs, sms, resident):
        waiting, slots, busy = list(jobs), [0] * (sms * resident), np.zeros((sms, resident + 1))
        while waiting or any(slots):
            for slot, left in enumerate(slots):
                if not left and waiting:
                    slots[slot] = waiting.pop(0)
            for sm in range(sms):
                busy[sm, sum(left > 0 for left in slots[sm::sms])] += 1
            slots = [max(0, left - 1) for left in slots]
        busy[:, 0] = 0
        return busy

    @pytest.mark.parametrize(("seq", "heads", "sms", "resident"), [(256, 7, 3, 2), (512, 3, 4, 1), (128, 2, 5, 3)])
    def test_matches(self, seq, heads, sms, resident):
        for order, causal, (grid, snake) in itertools.product(
            ["natural", "reversed", "heads_fastest", "swizzled"],
            [False, True],
            [(0, False), (5, False), (6, True), (8, False), (10, True), (1000, False)],
        ):
            self.matches(order, causal, grid, snake, seq, heads, sms, resident)

    def matches(self, order, causal, grid, snake, seq, heads, sms, resident):
        tiles = seq // 32
        tile_of = {
            "natural": lambda work: work % tiles,
            "reversed": lambda work: tiles - 1 - work % tiles,
            "heads_fastest": lambda work: tiles - 1 - work // heads,
            "swizzled": lambda work: tiles - 1 - work // heads,  # fewer heads than a swizzle takes together
        }[order]
        steps = [-(-(tile_of(work) + 1) * 32 // 16) if causal else seq // 16 for work in range(tiles * heads)]
        blocks = min(grid, len(steps))
        jobs = [sum(steps[block::blocks]) for block in range(blocks)] if grid else steps
        if snake:
            jobs = [0] * blocks
            for work, length in enumerate(steps):
                lap, place = divmod(work, blocks)
                jobs[blocks - 1 - place if lap % 2 else place] += length
        found = busy_steps(
            rows=32,
            step_n=16,
            seq_q=seq,
            seq_k=seq,
            causal=causal,
            heads=heads,
            order=order,
            grid=blocks,
            sms=sms,
            resident=resident,
            extra=0.0,
            snake=snake,
        )
        expected = self.ticking(jobs, sms, resident)
        assert (found @ np.arange(resident + 1)).max() <= sum(jobs)
        # The order of SMs among equals is not promised, the busiest SM is.
        np.testing.assert_allclose(found, np.unique(expected, axis=0))

    def test_a_grid_in_step_with_the_tiles_is_uneven(self):
        causal = Attention.standard(seq_len=4096, head_dim=64, causal=True)
        facts = replace(FACTS, threads=384, registers=80)
        plain, persistent = (modelled(causal, facts, tile_m=128, persistent=mode) for mode in ("no", "strided"))
        assert persistent > 1.05 * plain  # 264 blocks over 32 tiles a head: block w always gets tiles w mod 8

    def test_level_load_beyond_the_exact_limit(self, monkeypatch):
        arguments = {
            "rows": 64,
            "step_n": 64,
            "seq_q": 2048,
            "seq_k": 2048,
            "causal": True,
            "heads": 64,
            "order": "natural",
            "grid": 0,
            "sms": 16,
            "resident": 2,
            "extra": 1.0,
        }
        exact = busy_steps(**arguments)[:, 1:].sum(axis=1).max()
        monkeypatch.setattr(model, "EXACT_BLOCKS", 100)
        level = busy_steps.__wrapped__(**arguments)[:, 1:].sum(axis=1).max()
        assert level == pytest.approx(exact, rel=0.05)

    @pytest.mark.parametrize(
        ("given", "steps"),
        [
            ((64, 64, 128, 64, True, 1, "natural"), [1, 1]),
            ((64, 32, 128, 100, True, 1, "reversed"), [4, 2]),
            ((64, 64, 65, 65, False, 1, "natural"), [2, 2]),
            ((64, 64, 128, 256, True, 1, "natural", 128), [3, 4]),  # a diagonal that ends at the bottom right
            ((64, 64, 256, 128, True, 1, "natural", -128), [0, 0, 1, 2]),
            ((64, 64, 128, 128, True, 10, "swizzled"), [2] * 8 + [1] * 8 + [2] * 2 + [1] * 2),  # eight heads at a time
        ],
    )
    def test_steps_of_tiles(self, given, steps):
        assert tile_steps(*given).tolist() == steps

    def test_blocks_that_share_the_keys_of_a_tile(self):
        arguments = {
            "rows": 64,
            "step_n": 64,
            "seq_q": 64,
            "seq_k": 640,
            "causal": False,
            "heads": 2,
            "order": "natural",
            "grid": 0,
            "sms": 8,
            "resident": 1,
            "extra": 0.0,
        }
        assert busy_steps(**arguments)[:, 1].max() == 10
        assert busy_steps(**arguments, splits=4)[:, 1].max() == 3


@pytest.mark.parametrize(
    ("arch", "changes", "blocks"),
    [
        ("sm_90", {}, 2),  # 65536 registers / (128 * 256)
        ("sm_90", {"registers": 80}, 3),
        # From sm_90 on the cubin counts the driver's 1 KiB: 2 * 116 736 bytes are all of 228 KiB.
        ("sm_90", {"shared_bytes": 116736}, 2),
        ("sm_90", {"shared_bytes": 116737}, 1),
        ("sm_80", {"threads": 128, "shared_bytes": 83968}, 1),
        ("sm_80", {"threads": 128, "shared_bytes": 82944}, 2),
    ],
    ids=str,
)
def test_resident_blocks_follow_the_occupancy_rules(arch, changes, blocks):
    assert replace(FACTS, **changes).resident(arch) == blocks


@pytest.mark.slow
def test_a_whole_space_is_estimated_in_seconds():
    busy_steps.cache_clear()
    space = space_for("sm_90", Attention)
    count, started = 0, time.process_time()
    for seq_len in (512, 4096):
        problem = Attention.standard(seq_len=seq_len, head_dim=64, causal=True)
        for schedule in space.schedules(problem, pinned=space.modelled_pins()):
            warps, occupancy = schedule.number("num_worker_warps"), schedule.number("occupancy")
            facts = replace(
                FACTS,
                threads=128 + 32 * warps,
                registers=REGISTERS[warps, occupancy],
                num_ctas=schedule.number("num_ctas"),
            )
            estimate_us(problem, schedule, facts, arch_spec("sm_90"))
            count += 1
    assert count > 1000
    assert (time.process_time() - started) / count < 5e-3
