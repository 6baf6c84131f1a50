"""Estimated time of a program that was never run. Only the order of its estimates is meant to be used.

From the inside out:

1. One key tile of one block, its *step*, has a tensor-core part (two products), a special-function part (one exp2 per
   score) and an fp32 part (the rest of the softmax). Alone, a group of four warps does them one after the other. With
   more groups on the SM, some of one part hides behind another's, down to a floor that the slowest part sets.
2. Blocks are placed on the SMs as the hardware places them, or as a persistent grid deals them out, and the last SM to
   finish decides. Causal blocks differ in length, so the placement is simulated rather than averaged.
3. Device memory is a second limit, which matters where the keys in flight overflow the L2 cache.

Inputs are the problem, the tile, the order, the grid and what the machine code says of itself. Knobs that leave no
trace in any of these cannot change the estimate. Constants are calibrated on the H200; docs/model.md says on what and
how well.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tiledsched.build.cubin import ResourceFacts, ctas_per_sm
from tiledsched.device import ArchSpec
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule

# Counted or published.
TENSOR_EFFICIENCY = 0.8
"""Of the peak tensor rate: 800 of the published 989 TFLOP/s in a large bf16 matrix product on the H200."""
FP32_PER_SCORE = 4.0
"""fp32 instructions per score: maximum, scale and subtract, sum, and two for a pair's conversion at half rate."""
FP32_PER_MASKED_SCORE = 4.0
"""More of them in a masked step: column index, comparison at half rate, select."""
FP32_PER_ACCUMULATOR = 1.0
"""Rescaling of the output accumulator, per element and step."""
WARPS_PER_GROUP = 4
"""One warp per SM partition: what wgmma and tcgen05 call a warpgroup."""
ROWS_PER_WARP = 16
"""Rows of a tensor-core product that one warp holds, on every arch."""

WARPGROUP_ROWS = 64
"""Fewest rows for which the compiler uses wgmma or tcgen05."""

# Calibrated.
FP32_PER_ROW = 250.0
"""fp32-equivalent instructions per query row and step: shuffles of the row maximum and sum, rescaling factors."""
EXPOSED = 0.5
"""Share of the faster parts' work that no other group of warps hides, however many there are."""
STEP_LATENCY = 100.0
"""Cycles of barriers and dependent waits in a step, hidden by other groups."""
SPLIT_STEP = 650.0
"""Cycles of a step lost to exchange between groups that share rows, because there are fewer rows than they need."""
BLOCK_LATENCY = 3000.0
"""Cycles from a block's start to its first step, and from its last to its end."""
BLOCK_CYCLES_PER_ELEMENT = 0.1
"""Cycles of query load and epilogue per element of the output tile."""
PERSISTENT_SHARE = 0.65
"""Of the two above, what remains when a persistent block goes on to its next tile."""
FREE_SPILL_BYTES = 32
"""Spilled bytes per thread that sit outside the loop and cost nothing."""
SPILL_BYTES_PER_CYCLE = 32.0
"""Local-memory traffic of an SM, bytes per clock, with every further spilled byte stored and loaded once per step."""

# Chosen, not fitted.
SHARPNESS = 4.0
"""Exponent of the smooth maximum of a group's own pace and the SM's."""
OVERLAP_SHARPNESS = 3.0
"""Exponent of the smooth maximum of computation and device-memory time."""
LAUNCH_US = 3.0
"""Start and end of a kernel, microseconds."""
EXACT_BLOCKS = 32768
"""Up to this many blocks of unequal length are placed one by one; beyond it the load is taken as level."""


def estimate_us(problem: Problem, schedule: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
    """Modelled microseconds of `schedule` on `problem`, on the GPU that `spec` describes."""
    tile_m, tile_n = schedule.number("tile_m"), schedule.number("tile_n")
    resident = resident_blocks(facts, spec)
    masked = problem.causal or problem.seq_k % tile_n != 0
    split = bool(schedule["loop_split"])
    # cycles[k]: a step of every block while k blocks share an SM.
    cycles = [step_cycles(problem, schedule, facts, spec, k, masked=masked and not split) for k in range(resident + 1)]
    overhead = BLOCK_LATENCY + BLOCK_CYCLES_PER_ELEMENT * tile_m * problem.tile_d / facts.num_ctas
    overhead *= PERSISTENT_SHARE if schedule["persistent"] != "no" else 1.0
    extra = overhead / cycles[resident]
    if masked and split:  # the steps on the diagonal, in a loop of their own
        dear = step_cycles(problem, schedule, facts, spec, resident, masked=True)
        extra += max(1, tile_m // tile_n) * (dear / cycles[resident] - 1.0)
    busy = busy_steps(
        tile_m=tile_m, tile_n=tile_n, seq_q=problem.seq_q, seq_k=problem.seq_k, causal=problem.causal,
        heads=problem.batch * problem.heads, order=str(schedule["block_order"]),
        grid=grid_blocks(problem, schedule, spec) if schedule["persistent"] != "no" else 0,
        sms=max(1, spec.sm_count // facts.num_ctas), resident=resident, extra=round(extra * 4.0) / 4.0,
    )  # fmt: skip
    compute_us = float((busy @ np.array(cycles)).max()) / (spec.clock_ghz * 1e3)
    memory_us = _dram_bytes(problem, schedule, spec, resident) / (spec.dram_gbps * 1e3)
    return LAUNCH_US + _smooth_max(compute_us, memory_us, OVERLAP_SHARPNESS)


def resident_blocks(facts: ResourceFacts, spec: ArchSpec) -> int:
    """Blocks that one SM holds at once. Worked out anew: facts stored by older versions counted shared memory twice."""
    return ctas_per_sm(spec.arch, facts.registers, facts.threads, facts.shared_bytes)


def grid_blocks(problem: Problem, schedule: Schedule, spec: ArchSpec) -> int:
    """Blocks launched, as the template launches them with `q_subtiles` 1 (clusters count once)."""
    tiles = -(-problem.seq_q // schedule.number("tile_m")) * problem.batch * problem.heads
    if schedule["persistent"] == "no":
        return tiles
    return min(tiles, max(1, spec.sm_count * max(1, schedule.number("occupancy")) // schedule.number("num_ctas")))


def step_cycles(problem: Problem, schedule: Schedule, facts: ResourceFacts, spec: ArchSpec, resident: int, *,
                masked: bool) -> float:  # fmt: skip
    """Cycles in which each of `resident` blocks on an SM gets through one key tile."""
    rows, tile_n, tile_d = schedule.number("tile_m") / facts.num_ctas, schedule.number("tile_n"), problem.tile_d
    warps = facts.threads // 32
    if warps > spec.producer_warps:  # warp-specialized: a group of warps only moves data
        warps -= spec.producer_warps
    groups = max(1, warps // WARPS_PER_GROUP)
    scores = rows * tile_n

    rate = float(spec.tensor_flops * (spec.fp16_accumulate_speedup if schedule["accum_mode"] == "fp16" else 1))
    if spec.product_rows > ROWS_PER_WARP and rows < WARPGROUP_ROWS:  # the compiler falls back to fp32 multiply-adds
        rate = 2.0 * spec.fp32_ops
    elif rows < spec.product_rows:  # instructions half empty
        rate = rate * rows / spec.product_rows
    # Operands come from shared memory, once per instruction: k and v, and q too unless warps keep it in registers.
    chunk = max(spec.product_rows, rows / warps)
    operands = (2 * tile_n + (chunk if spec.product_rows > ROWS_PER_WARP else 0)) * tile_d * problem.element_bytes
    operands *= max(1.0, rows / chunk)
    tensor = max(4.0 * scores * tile_d / (rate * TENSOR_EFFICIENCY), operands / spec.shared_bytes)
    exp2 = scores / spec.exp2_ops
    fp32 = (scores * (FP32_PER_SCORE + (FP32_PER_MASKED_SCORE if masked else 0.0)) + rows * FP32_PER_ROW
            + rows * tile_d * FP32_PER_ACCUMULATOR) / spec.fp32_ops  # fmt: skip

    spilled = max(0, facts.spill_bytes - FREE_SPILL_BYTES) * warps * 32
    lost = 2.0 * spilled / SPILL_BYTES_PER_CYCLE + (SPLIT_STEP if rows < ROWS_PER_WARP * warps else 0.0)
    total, slowest = tensor + exp2 + fp32, max(tensor, exp2, fp32)
    alone = (total + lost) / groups + STEP_LATENCY
    shared = resident * (slowest + EXPOSED * (total - slowest) + lost)
    return _smooth_max(alone, shared, SHARPNESS)


@lru_cache(maxsize=4096)
def busy_steps(*, tile_m: int, tile_n: int, seq_q: int, seq_k: int, causal: bool, heads: int, order: str, grid: int,
               sms: int, resident: int, extra: float) -> NDArray[np.float64]:  # fmt: skip
    """How long each SM is how busy: `[sm, k]` is the number of steps SM `sm` makes while it runs k blocks.

    A block of j key tiles counts j + `extra` steps. `grid` is that of a persistent launch, whose block w takes tiles w,
    w + grid, ...; 0 is a plain launch, one block per tile. Blocks start in order, each in the slot that is free first;
    SMs that would be equally busy appear once.
    """
    jobs = tile_steps(tile_m, tile_n, seq_q, seq_k, causal, heads, order) + extra
    if grid:
        jobs = np.bincount(np.arange(len(jobs)) % grid, weights=jobs, minlength=grid).astype(np.float64)
    ends = np.zeros(sms * resident)
    if len(jobs) <= len(ends):
        ends[: len(jobs)] = jobs
    elif jobs.min() == jobs.max():
        ends[:] = jobs[0] * (len(jobs) // len(ends))
        ends[: len(jobs) % len(ends)] += jobs[0]
    elif len(jobs) > EXACT_BLOCKS:
        ends[:] = jobs.sum() / len(ends)
    else:
        free = [(0.0, slot) for slot in range(len(ends))]
        for job in jobs.tolist():
            now, slot = free[0]
            heapq.heapreplace(free, (now + job, slot))
        for end, slot in free:
            ends[slot] = end
    per_sm = np.sort(ends.reshape(resident, sms).T, axis=1)  # slots fill breadth first: slot s is on SM s % sms
    busy = np.zeros((sms, resident + 1))
    busy[:, 1:] = np.diff(per_sm, axis=1, prepend=0.0)[:, ::-1]
    return np.unique(busy, axis=0)


def tile_steps(tile_m: int, tile_n: int, seq_q: int, seq_k: int, causal: bool, heads: int,
               order: str) -> NDArray[np.float64]:  # fmt: skip
    """Key tiles of every query tile, in the order in which the kernel takes them (its `coordinates`).

    A swizzled order is taken as reversed, and a snake as strided: their order within a group of heads or a round is not
    modelled.
    """
    tiles = -(-seq_q // tile_m)
    work = np.arange(tiles * heads)
    tile = work // heads if order == "heads_fastest" else work % tiles
    if order != "natural":
        tile = tiles - 1 - tile
    visible = np.minimum((tile + 1) * tile_m, seq_k) if causal else np.full(len(work), seq_k)
    return np.ceil(visible / tile_n)


def _dram_bytes(problem: Problem, schedule: Schedule, spec: ArchSpec, resident: int) -> float:
    """Device-memory traffic. Keys and values in flight are read once if the L2 cache holds them.

    Otherwise blocks of one head share only some of their reads, as they drift apart: taken as the square root of their
    number.
    """
    tiles = -(-problem.seq_q // schedule.number("tile_m"))
    heads = problem.batch * problem.heads
    slots = min(tiles * heads, spec.sm_count * resident)
    in_flight = heads if schedule["block_order"] == "heads_fastest" else -(-slots // tiles)
    per_head = 2 * problem.seq_k * problem.head_dim * problem.element_bytes
    if min(in_flight, heads) / problem.group * per_head <= spec.l2_bytes:
        return float(problem.min_bytes)
    reads = tiles / math.sqrt(max(1.0, slots * problem.group / in_flight))
    reads *= problem.visible_pairs / (problem.seq_q * problem.seq_k)
    return problem.min_bytes + max(0.0, reads - 1.0) * per_head * problem.batch * problem.kv_heads


def _smooth_max(first: float, second: float, sharpness: float) -> float:
    """The p-norm: the larger where they differ, somewhat more where they are close."""
    largest = max(first, second)
    return largest * ((first / largest) ** sharpness + (second / largest) ** sharpness) ** (1.0 / sharpness)
