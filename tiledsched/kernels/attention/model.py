"""Estimated time of a program that was never run. Only the order of its estimates is meant to be used.

From the inside out:

1. One step of one block (`kv_subtiles` key tiles) has a tensor-core part (two products), a special-function part (one
   exp2 per score) and an fp32 part (the rest of the softmax). Alone, a group of four warps does them one after the
   other, and waits for keys and values where the shared memory holds too few tiles ahead. With more groups on the SM,
   some of one part hides behind another's, down to a floor that the slowest part sets.
2. Blocks are placed on the SMs as the hardware places them, or as a persistent grid deals them out, and the last SM to
   finish decides. Causal blocks differ in length, so the placement is simulated rather than averaged.
3. Device memory is a second limit, which matters where few rows are computed or the keys in flight overflow the L2 cache.
   What is read drives out as much of what was written before, up to the L2 cache: a paced launch follows a flush that writes.

Inputs are the problem, the tile, the order, the grid and what the machine code says of itself. Knobs that leave no
trace in any of these cannot change the estimate: `docs.studies.model_residual` has measured factors for them. Constants
are calibrated on the H200; docs/model.md says on what and how well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiledsched.core.cost import EFFICIENCY, LAUNCH_US, WARPGROUP_ROWS, WARPS_PER_GROUP, Cost, PublishedTime, smooth_max
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
from tiledsched.kernels.attention.problem import hidden_keys, padding_keys
from tiledsched.kernels.attention.published import published_device, published_rivals
from tiledsched.kernels.attention.similarity import skips_keys
from tiledsched.kernels.attention.tiling import (
    ROWS_PER_WARP,
    combines_later,
    pack_width,
    packs,
    splits,
    step_keys,
    steps_per_turn,
)

# Counted or published.
FP32_PER_SCORE = 4.0
"""fp32 instructions per score: maximum, scale and subtract, sum, and two for a pair's conversion at half rate."""
FP32_PER_MASKED_SCORE = 4.0
"""Further fp32 instructions per score of a masked step: column index, comparison at half rate, select."""
FP32_PER_FUNCTION = 4.0
"""fp32 instructions per score of an author's function, about as many as a mask takes. A guess, never measured."""
FP32_PER_ACCUMULATOR = 1.0
"""Rescaling of the output accumulator, per element and step."""
DRAM_EFFICIENCY = 0.92
"""Share of the peak memory rate that reads and write-backs reach together, from the H200's decoding kernels of 2 MB to 2 GB."""
SINGLE_WARP_RATE = 0.125
"""Share of the tensor rate that products of single warps reach, from the H200's decoding kernels of 16 rows."""
LAST_WAVE = 0.25
"""Exponent of the factor by which a partly filled last wave lengthens the memory time, from the H200's decoding kernels."""
SWIZZLE_PAIRS = 8
"""(batch, head) pairs that a swizzled order takes together, as in the kernel."""

# Calibrated.
FP32_PER_ROW = 250.0
"""fp32-equivalent instructions per query row and step: shuffles of the row maximum and sum, rescaling factors."""
CAPPED_EXP2 = 3.0
"""Operations of the exponential unit per score that is capped: an exponential and a reciprocal more."""
EXPOSED = 0.5
"""Share of the faster parts' work that no other group of warps hides, however many there are."""
STEP_LATENCY = 100.0
"""Cycles of barriers and dependent waits in a step, hidden by other groups."""
SPLIT_STEP = 650.0
"""Cycles lost per key tile to exchange between groups that share rows, because there are fewer rows than they need."""
LAZY_STEP = 300.0
"""Cycles of a step lost to the vote and the branch of a lazy rescaling."""
LOAD_LATENCY = 800.0
"""Cycles from the request of a tile to its first byte, from the L2 cache."""
LOAD_BYTES_PER_CYCLE = 64.0
"""Bytes per clock that an SM loads after the first byte."""
COPIED_BYTES_PER_CYCLE = 8.0
"""Bytes per clock of one SM where threads load keys and values because the TMA unit may not: they wait for each."""
BLOCK_LATENCY = 3000.0
"""Cycles from a block's start to its first step, and from its last to its end."""
BLOCK_CYCLES_PER_ELEMENT = 0.1
"""Cycles of query load and epilogue per element of the output tile."""
IEEE_CYCLES_PER_ELEMENT = 0.15
"""Further cycles per element where the last division is rounded correctly."""
PARTIAL_CYCLES_PER_ELEMENT = 0.3
"""Further cycles per element where blocks share the keys of a tile and combine their results. A guess, never measured."""
PERSISTENT_SHARE = 0.65
"""Share of a block's cycles outside its steps that remains when a persistent block goes on to its next tile."""
FREE_SPILL_BYTES = 32
"""Spilled bytes per thread that sit outside the loop and cost nothing."""
SPILL_BYTES_PER_CYCLE = 32.0
"""Local-memory traffic of an SM, bytes per clock, with every further spilled byte stored and loaded once per step."""

MOST_REGISTERS = 255
TILES_IN_FLIGHT = 4
"""Key and value tiles in shared memory, where they fit: what most programs on the H200 hold."""

# Chosen, not fitted.
CONVERTED = 0.03
"""Cycles of an SM for a number of 8 bits of keys and values: a shift, a permutation of bytes and a conversion for every two."""
TRANSPOSED = 0.25
"""Cycles more for a number of values where products of 64 rows read it from shared memory, to which it is written alone."""
COMBINE_US = 5.0
"""Microseconds of a second launch that combines shares, from the H200's times with and without one."""
LAST_BLOCK_US = 12.0
"""Microseconds lost where the last block combines the shares, because other blocks' loads wait; from six problems on the H200."""
EXACT_BLOCKS = 32768
"""Up to this many blocks of unequal length are placed one by one; beyond it the load is taken as level."""


class AttentionCost(Cost):
    """The traffic of the keys that are seen, and a model of pipes, placement of blocks and memory (docs/model.md)."""

    def bytes_moved(self, p: Problem) -> int:
        """Least device-memory traffic in bytes. Keys and values that no row sees are not read."""
        key_bytes = p.kv_heads * (p.head_dim + p.value_columns) * p.key_bytes
        unread = (hidden_keys(p) + padding_keys(p)) * p.sequences * key_bytes
        return super().bytes_moved(p) - int(unread)

    def expected(self, p: Problem, s: Schedule, spec: ArchSpec) -> ResourceFacts:
        """Facts of a program that spills nothing, holds four tiles and takes the registers its occupancy leaves it.

        Where scores and output of a product do not fit in these, wgmma's compiler leaves an SM fewer blocks than were asked for.
        """
        warps = s.number("num_worker_warps") or WARPS_PER_GROUP
        threads = 32 * (warps + spec.producer_warps)
        columns_v = p.split_v if s.get("column_parts", 1) == 2 else p.tile_v
        rows = min(block_rows(s) / max(1, warps // WARPS_PER_GROUP), WARPGROUP_ROWS)  # of a group's product
        held = rows * (columns_v + s.number("tile_n")) / (32 * WARPS_PER_GROUP)
        for occupancy in range(max(1, s.number("occupancy")), 0, -1):
            registers = min(MOST_REGISTERS, REGISTERS_PER_SM // (threads * occupancy) // 8 * 8)
            if held <= registers or spec.product_rows != WARPGROUP_ROWS:
                break
        columns = p.tile_d * p.element_bytes
        wanted = (block_rows(s) + TILES_IN_FLIGHT * s.number("tile_n")) * columns
        shared_bytes = min(wanted, (SHARED_KIB_PER_SM.get(spec.arch, 228) << 10) // occupancy)
        return ResourceFacts(
            registers=registers,
            threads=threads,
            shared_bytes=shared_bytes,
            spill_bytes=0,
            num_ctas=s.number("num_ctas"),
            code_bytes=0,
            ctas_per_sm=ctas_per_sm(spec.arch, registers, threads, shared_bytes),
        )

    def model(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
        """Estimated time in microseconds. Only the order of estimates counts."""
        return estimate_us(p, s, facts, spec)

    def published(
        self, p: Problem, s: Schedule, spec: ArchSpec, device_name: str, figures: Mapping[str, Any]
    ) -> Sequence[PublishedTime]:
        """The times of torch's backends that published figures let expect (`tiledsched.kernels.attention.published`)."""
        device = published_device(p, device_name, figures)
        if device is None:
            return ()
        clocked = replace(spec, clock_ghz=device["clock_ghz"] or spec.clock_ghz)
        ours_us = estimate_us(p, s, self.expected(p, s, spec), clocked, flushed=False) + device["host_us"]
        return [
            PublishedTime(rival=rival, us=us, ours_us=ours_us, margin=device["margin"], source=device["source"])
            for rival, us in published_rivals(p, device["times"], spec.sm_count).items()
        ]


def estimate_us(
    problem: Problem, schedule: Schedule, facts: ResourceFacts, spec: ArchSpec, *, flushed: bool = True
) -> float:
    """Modelled microseconds of `schedule` on `problem`, on the GPU that `spec` describes.

    Args:
        problem, schedule, facts, spec: as for :meth:`AttentionCost.model`.
        flushed: whether the L2 cache is emptied before the launch, as in our own measurements. Most published times are those of
            calls in a row, whose arrays stay in the cache where they fit.
    """
    rows, step_n, shares = block_rows(schedule), step_keys(schedule), splits(problem, schedule)
    resident = facts.resident(spec.arch)
    turn, pieces = steps_per_turn(schedule), pieces_of(problem, schedule)
    masked = problem.causal or problem.spanned or problem.mask_mod or problem.seq_k % (step_n * turn) != 0
    split = bool(schedule["loop_split"])
    # cycles[k]: a step of every block while k blocks share an SM.
    cycles = [step_cycles(problem, schedule, facts, spec, k, masked=masked and not split) for k in range(resident + 1)]
    extra = block_cycles(problem, schedule, facts) / cycles[resident]
    if masked and split:  # the steps on the diagonal, in a loop of their own
        dear = step_cycles(problem, schedule, facts, spec, resident, masked=True)
        extra += max(1, rows // step_n) * (2 if problem.window else 1) * (dear / cycles[resident] - 1.0)
    busy = busy_steps(
        rows=rows // pack_width(problem, schedule),
        step_n=step_n,
        seq_q=problem.mean_rows,
        seq_k=problem.mean_keys,
        causal=skips_keys(problem),
        first_key=_first_key(problem),
        heads=problem.sequences * packs(problem, schedule),
        splits=shares,
        order=str(schedule["block_order"]),
        snake=schedule["persistent"] == "snake",
        grid=0 if schedule["persistent"] == "no" else grid_blocks(pieces, schedule, spec, persistent=True),
        sms=max(1, spec.sm_count // facts.num_ctas),
        resident=resident,
        extra=round(extra * 4.0) / 4.0,
        window=problem.window + problem.window_right if problem.window else 0,
        turn=turn,
    )
    compute_us = float((busy @ np.array(cycles)).max()) / (spec.clock_ghz * 1e3)
    traffic = _dram_bytes(problem, schedule, spec, resident)
    if flushed:
        traffic += min(traffic, spec.l2_bytes)
    elif problem.min_bytes <= spec.l2_bytes:
        traffic = 0.0
    memory_us = traffic / (DRAM_EFFICIENCY * spec.dram_gbps * 1e3)
    waves = max(1.0, pieces * facts.num_ctas / (spec.sm_count * resident))
    memory_us *= (math.ceil(waves) / waves) ** LAST_WAVE  # too few blocks are left to ask for all that memory gives
    combined_us = (COMBINE_US if combines_later(problem, schedule) else LAST_BLOCK_US) if shares > 1 else 0.0
    return LAUNCH_US + combined_us + smooth_max(compute_us, memory_us)


def _first_key(problem: Problem) -> int:
    """Keys after its own that row 0 sees under a causal mask. What lists of blocks hold is not known: they count as such a mask,
    whose last row sees every key, because the winners that serve first were measured under one."""
    after = problem.mean_keys - problem.mean_rows
    if problem.listed and not problem.causal:
        return max(0, after)
    return int(problem.window_right + (after if problem.alignment == "bottom_right" else 0))


def block_rows(schedule: Schedule) -> int:
    """Rows of one piece of work; those of several heads where they are packed."""
    return schedule.number("tile_m") * schedule.number("q_subtiles")


def pieces_of(problem: Problem, schedule: Schedule) -> int:
    """Pieces of work: tiles of the rows of all heads, or of all packs of them, for each share of their keys."""
    rows = problem.mean_rows * pack_width(problem, schedule)
    tiles = -(-rows // block_rows(schedule)) * problem.sequences * packs(problem, schedule)
    return tiles * splits(problem, schedule)


def block_cycles(problem: Problem, schedule: Schedule, facts: ResourceFacts) -> float:
    """Cycles of one piece of work outside its steps: start, query load, epilogue, end."""
    per_element = BLOCK_CYCLES_PER_ELEMENT
    if schedule["division"] == "ieee":
        per_element += IEEE_CYCLES_PER_ELEMENT
    if splits(problem, schedule) > 1 and not combines_later(problem, schedule):
        per_element += PARTIAL_CYCLES_PER_ELEMENT
    cycles = BLOCK_LATENCY + per_element * block_rows(schedule) * problem.tile_v / facts.num_ctas
    return cycles * (PERSISTENT_SHARE if schedule["persistent"] != "no" else 1.0)


def step_cycles(
    problem: Problem, schedule: Schedule, facts: ResourceFacts, spec: ArchSpec, resident: int, *, masked: bool
) -> float:
    """Cycles in which each of `resident` blocks on an SM gets through one step of its keys."""
    tile_m, step_n = schedule.number("tile_m") / facts.num_ctas, step_keys(schedule)
    chains, subtiles = schedule.number("q_subtiles"), schedule.number("kv_subtiles")
    parted = schedule.get("column_parts", 1) == 2
    columns_k, columns_v = (problem.split_d, problem.split_v) if parted else (problem.tile_d, problem.tile_v)
    rows = tile_m * chains
    warps = facts.threads // 32
    if warps > spec.producer_warps:  # warp-specialized: a group of warps only moves data
        warps -= spec.producer_warps
    groups = max(1, warps // WARPS_PER_GROUP)
    scores = rows * step_n

    rate = float(spec.tensor_flops * (spec.fp16_accumulate_speedup if schedule["accum_mode"] == "fp16" else 1))
    rate *= spec.fp8_speedup if problem.q8 else 1
    if spec.product_rows > ROWS_PER_WARP and tile_m < WARPGROUP_ROWS:  # products of single warps
        rate *= SINGLE_WARP_RATE
    elif tile_m < spec.product_rows:  # instructions half empty
        rate = rate * tile_m / spec.product_rows
    # Operands come from shared memory, once per instruction: k and v, and q too unless warps keep it in registers.
    chunk = max(spec.product_rows, tile_m / warps)
    operands = step_n * (columns_k + columns_v) + (chunk * columns_k if spec.product_rows > ROWS_PER_WARP else 0)
    operands *= problem.element_bytes * max(1.0, rows / chunk)
    tensor = max(2.0 * scores * (columns_k + columns_v) / (rate * EFFICIENCY), operands / spec.shared_bytes)
    exp2 = scores * (CAPPED_EXP2 if problem.softcap else 1.0) / spec.exp2_ops
    fp32 = (
        scores * (FP32_PER_SCORE + (FP32_PER_MASKED_SCORE if masked else 0.0) + _fp32_of_functions(problem, masked))
        + rows * FP32_PER_ROW
        + rows * columns_v * FP32_PER_ACCUMULATOR
    ) / spec.fp32_ops

    lost = 2.0 * max(0, facts.spill_bytes - FREE_SPILL_BYTES) * warps * 32 / SPILL_BYTES_PER_CYCLE
    if tile_m < ROWS_PER_WARP * warps:
        lost += SPLIT_STEP * chains * subtiles
    if schedule["lazy_rescale"]:
        lost += LAZY_STEP * chains
    # Without a loop of their own for masked steps, all steps have threads read what lies in pages.
    by_threads = not schedule["tma_loads"] or (problem.page and not schedule["loop_split"])
    if spec.producer_warps and by_threads:
        lost += step_n * (columns_k + columns_v) * problem.key_bytes / COPIED_BYTES_PER_CYCLE
    if problem.kv8 and not problem.q8:
        lost += step_n * ((columns_k + columns_v) * CONVERTED + columns_v * TRANSPOSED * (tile_m >= WARPGROUP_ROWS))
    total, slowest = tensor + exp2 + fp32, max(tensor, exp2, fp32)
    alone = (total + lost) / groups + STEP_LATENCY
    if spec.producer_warps:
        alone += _waiting(
            alone / (2 * subtiles),
            rows * columns_k * problem.element_bytes,
            schedule.number("tile_n") * columns_k * problem.key_bytes,
            facts,
        )
    shared = resident * (slowest + EXPOSED * (total - slowest) + lost)
    return smooth_max(alone, shared)


def _fp32_of_functions(problem: Problem, masked: bool) -> float:
    """fp32 instructions per score that the functions of an author take in a step."""
    return FP32_PER_FUNCTION * (problem.score_mod + (problem.mask_mod and masked))


def _waiting(pace: float, query_bytes: float, tile_bytes: float, facts: ResourceFacts) -> float:
    """Cycles of a step spent waiting for loads, where a key or value tile is used up every `pace` cycles.

    Shared memory beside the queries holds tiles in flight: a tile asked for when its place falls free has until all the
    others are used up to arrive. This is where latency hints and persistent loops show: they change that number.
    """
    ahead = max(0.0, (facts.shared_bytes - query_bytes) / tile_bytes - 1.0)
    return max(0.0, LOAD_LATENCY + tile_bytes / LOAD_BYTES_PER_CYCLE - ahead * pace)


@lru_cache(maxsize=4096)
def busy_steps(
    *,
    rows: int,
    step_n: int,
    seq_q: int,
    seq_k: int,
    causal: bool,
    heads: int,
    order: str,
    grid: int,
    sms: int,
    resident: int,
    extra: float,
    snake: bool = False,
    splits: int = 1,
    first_key: int = 0,
    window: int = 0,
    turn: int = 1,
) -> NDArray[np.float64]:
    """How long each SM is how busy: `[sm, k]` is the number of steps SM `sm` makes while it runs k blocks.

    A block of j steps, in whole turns of `turn`, counts j + `extra`. `grid` is that of a persistent launch, whose block w takes
    pieces w, w + grid, ... (a snake turns round after each lap); 0 is a plain launch, one block per piece, or `splits` of them.
    Blocks start in order, each in the slot that is free first; SMs that would be equally busy appear once.
    """
    steps = tile_steps(rows, step_n, seq_q, seq_k, causal, heads, order, first_key, window)
    jobs = np.repeat(np.ceil(steps / splits / turn) * turn, splits) + extra
    if grid:
        lap, block = np.divmod(np.arange(len(jobs)), grid)
        block = np.where(lap % 2 == 1, grid - 1 - block, block) if snake else block
        jobs = np.bincount(block, weights=jobs, minlength=grid).astype(np.float64)
    slots = sms * resident
    if jobs.min() == jobs.max():
        laps, rest = divmod(len(jobs), slots)
        ends = jobs[0] * (laps + (np.arange(slots) < rest))
    elif len(jobs) > EXACT_BLOCKS:
        ends = np.full(slots, jobs.sum() / slots)
    else:
        ends = _placed(jobs, slots)
    per_sm = np.sort(ends.reshape(resident, sms).T, axis=1)  # slots fill breadth first: slot s is on SM s % sms
    busy = np.zeros((sms, resident + 1))
    busy[:, 1:] = np.diff(per_sm, axis=1, prepend=0.0)[:, ::-1]
    return np.unique(busy, axis=0)


def _placed(jobs: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """When each slot is done, where jobs start in order, each in the slot that is free first, the lowest of several.

    At once are placed as many as start before the first of them ends.
    """
    ends = np.zeros(slots)
    first = 0
    while first < len(jobs):
        order = np.argsort(ends, kind="stable")[: len(jobs) - first]
        starts = ends[order]
        done = starts + jobs[first : first + len(order)]
        waits = starts[1:] >= np.minimum.accumulate(done)[:-1]
        count = 1 + int(np.argmax(waits)) if waits.any() else len(order)
        ends[order[:count]] = done[:count]
        first += count
    return ends


def tile_steps(
    rows: int,
    step_n: int,
    seq_q: int,
    seq_k: int,
    causal: bool,
    heads: int,
    order: str,
    first_key: int = 0,
    window: int = 0,
) -> NDArray[np.float64]:
    """Steps of every piece of work, in the order in which the kernel takes them (its `coordinates`).

    Causal row i sees keys 0..i + `first_key`, the last `window` of them where that is not 0.
    """
    pieces = -(-seq_q // rows)
    work = np.arange(pieces * heads)
    if order == "heads_fastest":
        piece = work // heads
    elif order == "swizzled":
        first, within = np.divmod(work, SWIZZLE_PAIRS * pieces)
        piece = within // np.minimum(SWIZZLE_PAIRS, heads - first * SWIZZLE_PAIRS)
    else:
        piece = work % pieces
    if order != "natural":
        piece = pieces - 1 - piece
    visible = np.clip((piece + 1) * rows + first_key, 0, seq_k) if causal else np.full(len(work), seq_k)
    if not window:
        return np.ceil(visible / step_n)
    hidden = np.clip(piece * rows + first_key + 1 - window, 0, seq_k - 1) // step_n
    return np.maximum(np.ceil(visible / step_n) - hidden, 1.0)


def _dram_bytes(problem: Problem, schedule: Schedule, spec: ArchSpec, resident: int) -> float:
    """Device-memory traffic. Keys and values in flight are read once if the L2 cache holds them.

    Otherwise blocks of one head share only some of their reads, as they drift apart: taken as the square root of their
    number.
    """
    pieces = -(-problem.mean_rows // block_rows(schedule))
    heads = problem.sequences * problem.heads
    slots = min(pieces * heads, spec.sm_count * resident)
    if schedule["block_order"] == "heads_fastest":
        in_flight = heads
    elif schedule["block_order"] == "swizzled":
        in_flight = min(heads, SWIZZLE_PAIRS * -(-slots // (SWIZZLE_PAIRS * pieces)))
    else:
        in_flight = -(-slots // pieces)
    per_head = problem.mean_keys * (problem.head_dim + problem.value_columns) * problem.key_bytes
    if min(in_flight, heads) / problem.group * per_head <= spec.l2_bytes:
        return float(problem.min_bytes)
    reads = pieces / math.sqrt(max(1.0, slots * problem.group / in_flight))
    reads *= problem.visible_pairs / (problem.seq_q * problem.mean_keys)
    return problem.min_bytes + max(0.0, reads - 1.0) * per_head * problem.sequences * problem.kv_heads
