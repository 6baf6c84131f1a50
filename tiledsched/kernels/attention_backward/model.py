"""Estimated time of a backward pass that was never run. Only the order of its estimates is meant to be used.

The gradients take five matrix products for each tile of scores: the scores again, dP = dO V^T, and what is added to dV, dK and
dQ. One pass over the keys makes all five, and adds dQ to memory, in any order (atomically). Two passes make
seven, because each makes the scores and dP for itself, and need no such sums.

A pass is modelled as forward's is (`tiledsched.kernels.attention.model`): a step of a block has a part on the tensor cores, one
in the units for exponentials and one of fp32 arithmetic, of which groups of warps hide some from each other. Blocks of unequal
length are placed one by one, and the SM that finishes last decides. Two further limits are device memory and, where dQ is added
to memory, the rate at which the L2 cache adds. What machine code says of itself enters by the blocks that an SM holds and by
spilled registers. docs/model.md says how well this orders measured programs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiledsched.core.cost import LAUNCH_US, NEXT_LAUNCH_US, WARPGROUP_ROWS, WARPS_PER_GROUP, Cost, smooth_max
from tiledsched.core.device import (
    REGISTERS_PER_SM,
    SHARED_KIB_PER_SM,
    ArchSpec,
    ResourceFacts,
    ctas_per_sm,
    grid_blocks,
)
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention.model import (
    CAPPED_EXP2,
    DRAM_EFFICIENCY,
    FP32_PER_MASKED_SCORE,
    FREE_SPILL_BYTES,
    PERSISTENT_SHARE,
    SINGLE_WARP_RATE,
    SPILL_BYTES_PER_CYCLE,
    SWIZZLE_PAIRS,
    busy_steps,
)
from tiledsched.kernels.attention.tiling import ROWS_PER_WARP

SUM_BYTES = 4
"""Bytes of an element of the float32 sums."""

# Counted or published.
MOST_REGISTERS = 240
"""Registers of a thread that multiplies: 255 less what addresses and row values take."""
OTHER_REGISTERS = 8
"""Registers of a thread beside those of its tiles and sums, at least."""
TENSOR_MEMORY_ROWS = 128
"""Rows of the products of archs whose accumulators lie in tensor memory, not in registers."""

# Calibrated on the H200, with programs of each pass alone.
FP32_PER_SCORE = 12.0
"""fp32 instructions per score. Counted are 6: to scale it and subtract the log-sum-exp, to subtract the row's sum from dP, to
multiply, and to convert two numbers, a pair at a time at half rate."""
TENSOR_SHARE = 0.62
"""Share of the peak rate that the products reach: of five in a step, most wait for the one before."""
EXPOSED = 0.1
"""Share of the faster parts' work that no other group of warps hides."""
STEP_LATENCY = 50.0
"""Cycles of barriers in a step, hidden by other groups and blocks."""
L2_SUM_BYTES_PER_CYCLE = 20.0
"""Bytes of float32 sums per clock and SM that the L2 cache adds."""
SUM_STEP = 700.0
"""Cycles of a step that wait for what is added to dQ, beside its product."""
SPLIT_LOOP = 1.03
"""Factor of every step where those that mask have a loop of their own: two loops leave each less room for tiles ahead."""

# Chosen, not fitted.
BLOCK_CYCLES = 4000.0
"""Cycles from a block's start to its first step, and from its last to its end."""
STORE_CYCLES_PER_ELEMENT = 0.1
"""Cycles of the epilogue per element that a block stores."""
ORDERS = {(True, "natural"): "reversed", (True, "reversed"): "natural"}
"""(whether blocks are tiles of keys, order) -> forward's order in which blocks have these lengths, where that is another: the
first keys are seen by most rows, and the first rows see fewest keys."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One launch over tiles of scores: blocks of one side's rows, each of which steps over the other side's."""

    block: int
    """Rows of a block: keys where dK and dV are made, query rows where only dQ is."""
    step: int
    """Rows of the other side that a step takes."""
    over_keys: bool
    """Whether blocks are tiles of keys."""
    products: float
    """Columns of all matrix products together: a tile of scores takes `2 * block * step * products` operations."""
    held: int
    """Columns of the accumulators that a block keeps over its steps."""
    summed: int
    """Columns of dQ that each step adds to memory; 0 where none are."""


def passes_of(p: Problem, s: Schedule) -> list[Pass]:
    """The launches of a schedule that go over tiles of scores."""
    d, v = p.tile_d, p.tile_v
    block, step = s.number("tile_n"), s.number("tile_m")
    if s["structure"] != "two_pass":
        return [Pass(block=block, step=step, over_keys=True, products=3 * d + 2 * v, held=d + v, summed=d)]
    rows, keys = s.number("tile_m_dq"), s.number("tile_n_dq")
    return [
        Pass(block=block, step=step, over_keys=True, products=2 * d + 2 * v, held=d + v, summed=0),
        Pass(block=rows, step=keys, over_keys=False, products=2 * d + v, held=d, summed=0),
    ]


def needed_registers(each: Pass, p: Problem, spec: ArchSpec, warps: int) -> float:
    """Registers of a thread that a step's tiles and the sums of a block take, without addresses and values of rows."""
    elements = 2.0 * each.block * each.step
    if spec.product_rows < TENSOR_MEMORY_ROWS:
        elements += each.block * each.held
    if (
        spec.product_rows <= ROWS_PER_WARP
    ):  # the block's own tiles stay in registers, of every warp that multiplies their rows
        copies = max(1.0, ROWS_PER_WARP * warps / each.block)
        elements += each.step * each.summed + copies * each.block * (p.tile_d + p.tile_v) * p.element_bytes / SUM_BYTES
    return elements / (32 * warps)


class AttentionBackwardCost(Cost):
    """A model of pipes, placement of blocks, sums in the L2 cache and memory."""

    def expected(self, p: Problem, s: Schedule, spec: ArchSpec) -> ResourceFacts:
        """Facts of a program that takes the registers its occupancy leaves it, and spills what does not fit in them.

        The accumulators of a block and two tiles of scores are in registers, except where tensor memory holds them.
        """
        warps = s.number("num_worker_warps") or WARPS_PER_GROUP
        threads = 32 * (warps + spec.producer_warps)
        passes = passes_of(p, s)
        held = max(needed_registers(each, p, spec, warps) for each in passes)
        occupancy = max(1, s.number("occupancy"))
        registers = min(255, REGISTERS_PER_SM // (threads * occupancy) // 8 * 8)
        own = registers
        if spec.product_rows > ROWS_PER_WARP:  # warps that only move data give most of theirs to those that multiply
            own = min(MOST_REGISTERS, REGISTERS_PER_SM // (32 * warps * occupancy) - 16)
        spilled = 4 * math.ceil(max(0.0, held + OTHER_REGISTERS - own))
        columns = (p.tile_d + p.tile_v) * p.element_bytes
        wanted = max(each.block * columns + 2 * each.step * columns for each in passes)
        shared_bytes = min(wanted, (SHARED_KIB_PER_SM.get(spec.arch, 228) << 10) // occupancy)
        return ResourceFacts(
            registers=registers,
            threads=threads,
            shared_bytes=shared_bytes,
            spill_bytes=spilled,
            num_ctas=1,
            code_bytes=0,
            ctas_per_sm=ctas_per_sm(spec.arch, registers, threads, shared_bytes),
        )

    def model(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
        """Estimated time of all launches in microseconds. Only the order of estimates counts."""
        rows, keys = p.batch * p.heads * p.seq_q, p.batch * p.heads * p.seq_k
        rate = DRAM_EFFICIENCY * spec.dram_gbps * 1e3
        total = LAUNCH_US + 2 * rows * p.value_columns * p.element_bytes / rate  # the row sums of dOut * Out
        for each in passes_of(p, s):
            total += NEXT_LAUNCH_US + _pass_us(p, s, each, facts, spec, rate)
            if each.summed:  # zeros before the sums, and what rounds them
                moved = rows * each.summed * (2 * SUM_BYTES + p.element_bytes)
                total += NEXT_LAUNCH_US + moved / rate
        if s["group_heads"] == "apart":  # sums for every query head are written and read again
            total += NEXT_LAUNCH_US + 2 * SUM_BYTES * keys * (p.tile_d + p.tile_v) / rate
        return total


def _pass_us(p: Problem, s: Schedule, each: Pass, facts: ResourceFacts, spec: ArchSpec, rate: float) -> float:
    """Microseconds of one launch; `rate` is that of device memory in bytes a microsecond."""
    resident = facts.resident(spec.arch)
    masked, split = bool(p.causal or p.spanned or p.seq_k % s.number("tile_n")), bool(s["loop_split"])
    cycles = [step_cycles(p, s, each, facts, spec, k, masked=masked and not split) for k in range(resident + 1)]
    if masked and split:
        cycles = [SPLIT_LOOP * one for one in cycles]
    epilogue = BLOCK_CYCLES + STORE_CYCLES_PER_ELEMENT * each.block * each.held
    if s["persistent"]:
        epilogue *= PERSISTENT_SHARE
    # A block of keys goes over the rows of all query heads that share its key head.
    turns = p.group if each.over_keys and s["group_heads"] == "together" else 1
    heads = p.sequences * p.heads // turns
    extra = epilogue / cycles[resident] / turns
    if masked and split:  # the steps on the diagonal, in a loop of their own
        dear = SPLIT_LOOP * step_cycles(p, s, each, facts, spec, resident, masked=True)
        extra += max(1, each.block // each.step) * (2 if p.window else 1) * (dear / cycles[resident] - 1.0)
    first_key = p.window_right + (p.mean_keys - p.mean_rows if p.alignment == "bottom_right" else 0)
    blocks = -(-(p.mean_keys if each.over_keys else p.mean_rows) // each.block) * heads
    order = str(s["block_order"])
    grid = grid_blocks(blocks, s, spec, persistent=True) if s["persistent"] else 0
    placed: dict[str, Any] = {
        "rows": each.block,
        "step_n": each.step,
        "seq_q": p.mean_keys if each.over_keys else p.mean_rows,
        "seq_k": p.mean_rows if each.over_keys else p.mean_keys,
        "causal": p.causal,
        # Counted from the last key, the rows that see a tile of keys grow as the keys that a tile of rows sees.
        "first_key": first_key + (p.mean_rows - p.mean_keys if each.over_keys else 0),
        "heads": heads,
        "order": ORDERS.get((each.over_keys, order), order),
        "window": p.window + p.window_right if p.window else 0,
    }
    busy = busy_steps(**placed, grid=grid, sms=spec.sm_count, resident=resident, extra=round(4.0 * extra) / 4.0)
    compute_us = turns * float((busy @ np.array(cycles)).max()) / (spec.clock_ghz * 1e3)
    visits = p.batch * p.heads * p.visible_pairs / each.block  # rows of dQ that are added to
    sums_us = visits * each.summed * SUM_BYTES / (L2_SUM_BYTES_PER_CYCLE * spec.sm_count * spec.clock_ghz * 1e3)
    sums = 2 * SUM_BYTES * each.summed * p.batch * p.heads * p.seq_q
    if sums > spec.l2_bytes:  # a row of dQ goes to memory and back, unless blocks that run at once add to it
        together = min(_tiles_at_once(order, blocks // heads, heads, spec.sm_count * resident), visits)
        sums = max(sums, 2 * SUM_BYTES * each.summed * visits / together)
    moved = p.min_bytes + sums
    return smooth_max(smooth_max(compute_us, sums_us), moved / rate)


def _tiles_at_once(order: str, tiles: int, heads: int, slots: int) -> float:
    """Tiles of one head that run at once, of the `tiles` of each of so many heads."""
    taken = {"heads_fastest": heads, "swizzled": min(heads, SWIZZLE_PAIRS)}.get(order, 1)
    return min(tiles, max(1.0, slots / taken))


def step_cycles(
    p: Problem, s: Schedule, each: Pass, facts: ResourceFacts, spec: ArchSpec, resident: int, *, masked: bool
) -> float:
    """Cycles in which each of `resident` blocks on an SM gets through one step."""
    warps = facts.threads // 32
    if warps > spec.producer_warps:  # a group of warps only moves data
        warps -= spec.producer_warps
    groups = max(1, warps // WARPS_PER_GROUP)
    if spec.product_rows > ROWS_PER_WARP:  # groups that share rows wait for each other
        groups = min(groups, max(1, each.block // WARPGROUP_ROWS))
    scores = each.block * each.step

    rate = float(spec.tensor_flops) * TENSOR_SHARE
    if spec.product_rows > ROWS_PER_WARP and each.block < WARPGROUP_ROWS:  # products of single warps
        rate *= SINGLE_WARP_RATE
    elif each.block < spec.product_rows:  # instructions half empty
        rate *= each.block / spec.product_rows
    # Every product reads a tile of the step's side from shared memory, once for each row of instructions; two tiles of scores are
    # written there and read again, and what is added to dQ passes through it.
    operands = (
        each.products * each.step * p.element_bytes * max(1.0, each.block / max(WARPGROUP_ROWS, spec.product_rows))
    )
    operands += 4 * scores * p.element_bytes + 2 * each.step * each.summed * SUM_BYTES
    tensor = max(2.0 * scores * each.products / rate, operands / spec.shared_bytes)
    exp2 = scores * (CAPPED_EXP2 if p.softcap else 1.0) / spec.exp2_ops
    fp32 = scores * (FP32_PER_SCORE + (FP32_PER_MASKED_SCORE if masked else 0.0)) / spec.fp32_ops

    lost = 2.0 * max(0, facts.spill_bytes - FREE_SPILL_BYTES) * warps * 32 / SPILL_BYTES_PER_CYCLE
    if each.summed:
        lost += SUM_STEP
    total, slowest = tensor + exp2 + fp32, max(tensor, exp2, fp32)
    alone = (total + lost) / groups + STEP_LATENCY
    shared = resident * (slowest + EXPOSED * (total - slowest) + lost)
    return smooth_max(alone, shared)
