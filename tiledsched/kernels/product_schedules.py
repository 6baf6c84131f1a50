"""What the declarations of matrix products share: how work is divided, the shapes of models' linear layers, and the estimated
time of a product that was never run. Only the order of the estimates is meant to be used.

An estimate goes from the inside out: a step of the main loop takes as long as the slowest of its parts, tensor cores, operands
read from shared memory, and operands on their way from the L2 cache; blocks fill the SMs in waves, of which the last decides;
device memory is a second limit, in which the order of the work tiles shows. What machine code says of itself enters by registers
spilled, blocks resident, and tiles that shared memory holds ahead. Knobs that leave no trace in any of these cannot change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import tiledsched.core.fields as ts
from tiledsched.core.cost import (
    COPY_SHARE,
    EFFICIENCY,
    LAUNCH_US,
    NEXT_LAUNCH_US,
    WARPGROUP_ROWS,
    WARPS_PER_GROUP,
    Cost,
    smooth_max,
)
from tiledsched.core.device import ArchSpec, ResourceFacts, grid_blocks
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.similarity import Similarity, about

ELEMENT_BYTES = 2
PARTIAL_BYTES = 4

# Counted or published.
WARP_PRODUCT_SHARE = 0.88
"""Share of the tensor rate that products of single warps reach on archs that have larger products."""
LOAD_LATENCY = 970.0
"""Cycles from the request of a tile to its first byte, from the L2 cache."""

# Calibrated.
L2_BYTES_PER_CYCLE = 62.0
"""Bytes per cycle that one SM loads from the L2 cache while all SMs load."""
COPIED_BYTES_PER_CYCLE = 6.0
"""Bytes per cycle that one SM loads where threads load single elements because the TMA unit may not."""
STEP_CYCLES = 90.0
"""Cycles of barriers in each step of the main loop."""
BLOCK_CYCLES = 3250.0
"""From a block's start to its first product, and from its last store to its end."""
STORE_BYTES_PER_CYCLE = 24.0
"""Bytes per cycle that an epilogue stores."""
AHEAD_SHARE = 0.45
"""Share of a block's start and end that remains when a persistent block goes on, because loads of its next tile are under way."""
FREE_SPILL_BYTES = 32
SPILL_BYTES_PER_CYCLE = 95.0


class ProductCost(Cost):
    """The time of a plain product. Other products override what is different about them."""

    item_bytes = ELEMENT_BYTES
    """Bytes of an element of A and B."""

    def row_tiles(self, p: Problem, s: Schedule) -> int:
        """Tiles along the rows of C."""
        return -(-p.m // s.number("TILE_M"))

    def step_cycles(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec, resident: int) -> float:
        """Cycles in which each of `resident` blocks on an SM gets through one step of its main loop."""
        return step_cycles(s, facts, spec, resident, by_tma=spec.producer_warps > 0 and (not p.odd or bool(s["PAD"])))

    def dram_bytes(self, p: Problem, s: Schedule, spec: ArchSpec, slots: int) -> float:
        """Device-memory traffic while `slots` blocks run at once: operands once where the L2 cache holds them, or else once for
        every wave that reads them.
        """
        a, b, c = p.m * p.k, p.k * p.n, p.m * p.n
        least = float(self.item_bytes * (a + b) + ELEMENT_BYTES * c)
        if self.item_bytes * (a + b) <= spec.l2_bytes / 2:
            return least
        tile_m, tile_n = s.number("TILE_M"), tile_columns(s)
        rows, columns = -(-p.m // tile_m), -(-p.n // tile_n)
        tall = min(rows, s.number("GROUP_M"))
        wide = min(columns, max(1.0, slots / tall))
        if tall * columns < slots:  # more than one group at once
            tall, wide = min(rows, slots / columns), columns
        waves = max(1.0, rows * columns / slots)
        read = self.item_bytes * p.k * waves * (tall * tile_m + wide * tile_n)
        return max(least, read + ELEMENT_BYTES * c)

    def other_launches_us(self, p: Problem, s: Schedule, spec: ArchSpec) -> float:
        """Time of the launches beside the product: copies before it, or the sum of the shares behind it."""
        rate = spec.dram_gbps * COPY_SHARE * 1e3
        if s.get("PAD"):
            return 2.0 * NEXT_LAUNCH_US + 2.0 * ELEMENT_BYTES * p.k * (p.m + p.n) / rate
        splits = int(s.get("SPLIT_K", 1))
        if splits <= 1:
            return 0.0
        moved = 2.0 * PARTIAL_BYTES * splits * p.m * p.n
        in_cache = moved / 2 <= spec.l2_bytes / 2
        return NEXT_LAUNCH_US + moved / (rate * (2.0 if in_cache else 1.0))

    def model(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
        """Estimated time in microseconds. Only the order of estimates counts."""
        splits, ctas = max(1, int(s.get("SPLIT_K", 1))), max(1, facts.num_ctas)
        rows, columns = self.row_tiles(p, s), -(-p.n // tile_columns(s))
        steps = math.ceil(-(-p.k // s.number("TILE_K")) / splits)
        resident = facts.resident(spec.arch)
        slots = max(1, spec.sm_count * resident // ctas)
        blocks = rows * columns * splits

        full, left = divmod(blocks, slots)
        edge = block_cycles(s, facts)
        per_wave = steps * self.step_cycles(p, s, facts, spec, resident) + edge
        if s["PERSISTENT"]:
            per_wave -= edge * (1.0 - AHEAD_SHARE)
        cycles = full * per_wave
        if left:  # blocks that share no SM are faster
            alone = max(1, math.ceil(left * ctas / spec.sm_count))
            cycles += steps * self.step_cycles(p, s, facts, spec, min(alone, resident)) + edge
        compute_us = cycles / (spec.clock_ghz * 1e3)
        memory_us = self.dram_bytes(p, s, spec, slots) / (spec.dram_gbps * COPY_SHARE * 1e3)
        return LAUNCH_US + smooth_max(compute_us, memory_us) + self.other_launches_us(p, s, spec)


def step_cycles(
    s: Schedule,
    facts: ResourceFacts,
    spec: ArchSpec,
    resident: int,
    *,
    by_tma: bool,
    item_bytes: int = ELEMENT_BYTES,
    speedup: float = 1.0,
) -> float:
    """Cycles in which each of `resident` blocks on an SM gets through one step of its main loop.

    Args:
        s: the schedule.
        facts: the resources that its machine code takes.
        spec: describes the GPU.
        resident: blocks on an SM.
        by_tma: whether the TMA unit loads the operands.
        item_bytes: bytes of an element of A and B.
        speedup: how much faster such products are than those of 16-bit types.
    """
    ctas = max(1, facts.num_ctas)
    tile_m, tile_n, tile_k = s.number("TILE_M") / ctas, tile_columns(s), s.number("TILE_K")
    warps = facts.threads // 32 - (spec.producer_warps if by_tma else 0)
    groups = max(1, warps // WARPS_PER_GROUP)

    rate = float(spec.tensor_flops) * speedup
    if spec.product_rows > 16 and tile_m < min(64, spec.product_rows):
        rate *= WARP_PRODUCT_SHARE
    elif tile_m < spec.product_rows:
        rate *= tile_m / spec.product_rows
    tensor = 2.0 * tile_m * tile_n * tile_k / (rate * EFFICIENCY)
    # Each product instruction reads its rows of A and its columns of B from shared memory.
    chunks = max(1.0, tile_m / max(spec.product_rows, 16))
    wide = tile_n if tile_m >= groups * spec.product_rows else tile_n / groups
    operands = chunks * (min(tile_m, spec.product_rows) * tile_n / wide + tile_n) * tile_k * item_bytes
    loaded = (tile_m + tile_n / ctas) * tile_k * item_bytes
    arrival = loaded / (L2_BYTES_PER_CYCLE if by_tma or not spec.producer_warps else COPIED_BYTES_PER_CYCLE)
    spilled = 2.0 * max(0, facts.spill_bytes - FREE_SPILL_BYTES) * warps * 32 / SPILL_BYTES_PER_CYCLE
    busy = smooth_max(smooth_max(tensor, operands / spec.shared_bytes), arrival) + spilled
    # Shared memory holds so many tiles ahead; one that is asked for must arrive while those are used up.
    ahead = max(0.0, facts.shared_bytes / ((tile_m + tile_n) * tile_k * item_bytes) - 1.0)
    alone = busy + STEP_CYCLES
    alone += max(0.0, LOAD_LATENCY - ahead * alone) if ahead else LOAD_LATENCY
    return max(alone, resident * busy)


def block_cycles(s: Schedule, facts: ResourceFacts) -> float:
    """Cycles of a work tile outside its main loop."""
    elements = s.number("TILE_M") * tile_columns(s) / max(1, facts.num_ctas)
    item = ELEMENT_BYTES if int(s.get("SPLIT_K", 1)) <= 1 else PARTIAL_BYTES
    return BLOCK_CYCLES + elements * item / STORE_BYTES_PER_CYCLE


def tile_columns(s: Schedule) -> int:
    """Columns of a work tile, both parts."""
    return s.number("TILE_N") + int(s.get("REST_N", 0))


Launch = tuple[Callable[..., None], tuple[int, ...]]
"""A function of tile code, and its grid."""

MODELS = {
    "llama_8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama_70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "qwen_7b": ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),
}
"""(n, k) of the projections of queries, keys and values together, of the attention's output, and of the two halves of the
feed-forward network; from the models' published configurations (Llama 3.1, Qwen 2.5).
"""
OVERLAP = ts.knob(
    (0, 1, 2),
    about="when the sum behind shares may begin: after the product (0), once its blocks have ended (1), or have begun (2)",
    measured_only=True,
)
"""The knob `pdl`; :mod:`tiledsched.core.chains` says what it does."""
COMBINE_ELEMENTS = 2048
"""Elements of a tile of `combine`: 16 a thread, four loads of 16 bytes for each share."""
FEWEST_COMBINED_COLUMNS = 32
"""Fewest columns of a combining tile that divides C: a row is then 128 bytes of partial sums."""
TMA_BYTES = 16
"""Rows must start at multiples of this many bytes for the TMA unit."""


class ProductSimilarity(Similarity):
    """How products of all rows of A with one B compare."""

    def bucketed(self, p: Any) -> Any:
        """The product of about as many rows of A: the tokens of a model, whose weights have sizes of their own."""
        return p.replace(m=about(p.m))


class Product:
    """What the declarations of products of all rows of A with one B share; each is a :class:`Kernel`, too."""

    m = ts.dim()
    n = ts.dim()
    k = ts.dim()

    batch_dims: ClassVar[tuple[str, ...]] = ("m",)

    @staticmethod
    def reduction_order(p: Problem, s: Schedule) -> tuple[Any, ...]:
        """The shares of k and the products' instruction."""
        return share_bounds(p.k, s), instruction(s)

    @staticmethod
    def flops(p: Problem) -> float:
        """A multiply-add is two."""
        return 2.0 * p.m * p.n * p.k


def share_bounds(k: int, s: Schedule) -> tuple[int, ...]:
    """Where in k the shares begin whose sums are added up at the end; each share is summed from its first element to its last."""
    tile, shares = s.number("TILE_K"), abs(int(s.get("SPLIT_K", 1)))
    return tuple(-(-k // tile) * share // shares * tile for share in range(shares))


def instruction(s: Schedule) -> str:
    """Which tensor-core instructions multiply: of groups of warps (wgmma on sm_90), or where tiles have few rows, of warps."""
    rows = s["TILE_N"] if s.get("SWAP") else s["TILE_M"]
    return "warp groups" if int(rows) // s.number("num_ctas") >= WARPGROUP_ROWS else "warps"


def row_bytes(run: int) -> bool:
    """Whether rows of `run` elements of 16 bits start where TMA cannot load them."""
    return run * ELEMENT_BYTES % TMA_BYTES != 0


def work_tiles(p: Problem, s: Schedule) -> int:
    """Work tiles of a product."""
    return -(-p.m // s.number("TILE_M")) * -(-p.n // tile_columns(s)) * max(1, s.number("SPLIT_K"))


def combine_tile(p: Problem) -> tuple[int, int, bool]:
    """(rows, columns, whether they divide C) of the tiles that sum partial products."""
    columns = min(p.n & -p.n, COMBINE_ELEMENTS)
    rows = min(p.m & -p.m, COMBINE_ELEMENTS // columns)
    if columns < FEWEST_COMBINED_COLUMNS or rows * columns < COMBINE_ELEMENTS // 16:
        return 8, COMBINE_ELEMENTS // 8, False
    return rows, columns, True


def product_launches(
    p: Problem,
    s: Schedule,
    device: Any,
    product: Callable[..., None],
    partial: Callable[..., None],
    combine: Callable[..., None],
) -> list[Launch]:
    """The launch of `product`; where blocks share the walk over k, that of `partial`, and of what combines their sums."""
    blocks = grid_blocks(work_tiles(p, s), s, device, persistent=bool(s["PERSISTENT"]))
    if s.number("SPLIT_K") <= 1:
        return [(product, (blocks,))]
    rows, columns, _ = combine_tile(p)
    return [(partial, (blocks,)), (combine, (-(-p.m // rows), -(-p.n // columns)))]


def combine_constants(p: Problem) -> dict[str, Any]:
    """The constants of the tiles that sum partial products."""
    return dict(zip(("COMBINE_M", "COMBINE_N", "COMBINE_EVEN"), combine_tile(p), strict=True))
