"""The declaration of the matrix product: sizes, arrays, knobs, and which launches a schedule comes to.

What runs on the GPU is in `tiles` beside it; cuTile is imported where a launch is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.arrays import ALIGNMENT
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.matmul.rivals import raced
from tiledsched.kernels.product_schedules import (
    ELEMENT_BYTES,
    MODELS,
    OVERLAP,
    Launch,
    Product,
    ProductCost,
    ProductSimilarity,
    combine_constants,
    product_launches,
    row_bytes,
)

PAD_TILE = 64
"""Sides of the tiles in which operands are copied; the copies' sizes are multiples of it."""

TOKENS = (16, 512, 4096, 16384)
DTYPES = ("bfloat16", "float16")
ODD = (
    (3000, 5000, 4096),
    (4097, 4097, 4097),
    (1000, 1000, 1000),
    (2047, 2049, 2048),
    (777, 7777, 1111),
    (4096, 4096, 4100),
    (33, 4096, 4096),
    (100, 50257, 768),
    (5120, 13824, 5120),
    (1, 4096, 4096),
)
"""(m, n, k) of products whose sizes no tile divides."""

Values = dict[str, Any]


def _linear(shapes: tuple[tuple[int, int], ...]) -> list[Values]:
    """Tokens times weights that lie as `torch.nn.Linear` keeps them: `[n, k]`, which is B column-major."""
    return [
        {"m": m, "n": n, "k": k, "b_layout": "column", "dtype": dtype}
        for dtype in DTYPES
        for n, k in shapes
        for m in TOKENS
    ]


SUITES = {
    **{name: _linear(shapes) for name, shapes in MODELS.items()},
    "squares": [
        {"m": n, "n": n, "k": n, "dtype": dtype} for dtype in DTYPES for n in (1024, 2048, 3072, 4096, 6144, 8192)
    ],
    "odd": [{"m": m, "n": n, "k": k, "dtype": dtype} for dtype in DTYPES for m, n, k in ODD],
}


class MatmulSimilarity(ProductSimilarity):
    """How matrix products compare."""

    def rival_kind(self, p: Any) -> tuple[int, ...]:
        """The alignment of rows of A, B and C, in elements from 1 to 8. Below 8, cuBLAS may take several times as long."""
        runs = p.m if p.a_layout == "column" else p.k, p.k if p.b_layout == "column" else p.n, p.n
        return tuple(min(run & -run, ALIGNMENT // ELEMENT_BYTES) for run in runs)

    def loss_group(self, p: Any) -> str:
        """The group of problems for which the loss of a transferred schedule was measured."""
        return "odd rows" if min(self.rival_kind(p)) < ALIGNMENT // ELEMENT_BYTES else "aligned rows"

    def timing_features(self, p: Any) -> tuple[float, ...]:
        """Octaves of the sizes and of C, four and six to one; the layouts; and the alignment of rows, two octaves to one."""
        sizes = math.log2(p.m) / 4, math.log2(p.n) / 4, math.log2(p.k) / 4, math.log2(p.m * p.n) / 6
        layouts = 0.3 * (p.a_layout == "column"), 0.3 * (p.b_layout == "column")
        return (*sizes, *layouts, *(math.log2(run) / 2 for run in self.rival_kind(p)))


class Matmul(Product, Kernel):
    """C `[m, n]` = A `[m, k]` @ B `[k, n]`, accumulated in float32 and rounded once; C is row-major."""

    name = "matmul"
    dtype = ts.dtype("bfloat16", "float16")
    a_layout = ts.choice("row", "column")
    b_layout = ts.choice("row", "column")
    derived = {
        "odd": lambda p: (
            row_bytes(p.m if p.a_layout == "column" else p.k) or row_bytes(p.k if p.b_layout == "column" else p.n)
        ),
        "large": lambda p: p.m * p.n >= 2048 * 2048,
        "padded_m": lambda p: padded(p.m),
        "padded_n": lambda p: padded(p.n),
        "padded_k": lambda p: padded(p.k),
    }

    A = ts.array("m k", layout="a_layout")
    B = ts.array("k n", layout="b_layout")
    C = ts.out("m n")
    Partial = ts.workspace("SPLIT_K m n", aligned=True)
    PaddedA = ts.workspace(lambda p, s: (p.padded_m, p.padded_k), dtype="dtype", aligned=True)
    PaddedB = ts.workspace(lambda p, s: (p.padded_k, p.padded_n), dtype="dtype", aligned=True)

    knobs = {
        "TILE_M": ts.knob((128, 64, 256, 16), about="rows of a work tile", weight=1.0),
        "TILE_N": ts.knob((256, 128, 64, 32), about="columns of a work tile", weight=1.0),
        "REST_N": ts.knob((0, 64, 32), about="columns of a second part of a work tile; 0 for none", weight=0.4),
        "TILE_K": ts.knob((64, 32, 128, 256), about="columns of A that a step of the main loop takes", weight=0.4),
        "num_worker_warps": ts.knob((8, 4), about="warps that multiply", weight=1.0),
        "num_ctas": ts.knob((1, 2), about="blocks of a cluster, which share their operands", weight=1.0),
        "GROUP_M": ts.knob((8, 4, 16), about="rows of work tiles that are taken together", weight=0.1),
        "PERSISTENT": ts.knob((False, True), about="whether a block takes several work tiles"),
        "SPLIT_K": ts.knob(
            (1, 2, 4, 8, -2, -4, -8),
            about="blocks that share the walk over k of a work tile; below 0, shares that one block sums each for itself",
            weight=1.0,
        ),
        "PAD": ts.knob((False, True), about="copy operands first, so that TMA can load them", weight=5.0),
        "pdl": OVERLAP,
        "occupancy": ts.knob((0, 2), about="blocks an SM should hold; 0 leaves it to the compiler", weight=0.4),
        "LATENCY": ts.knob((0, 6), about="latency hint of the main loop's loads", measured_only=True),
    }
    constraints = {
        "TILE_M * TILE_N <= 32768 * num_ctas": "two groups of warps hold 128 x 256 sums in registers, and no more",
        "TILE_M >= 32 * num_ctas or num_ctas == 1": "a cluster divides the rows of a tile",
        "num_ctas == 1 or shared_memory_bytes > 200000": "clusters share loads on the data-center archs since sm_90",
        "REST_N == 0 or TILE_N in (2 * REST_N, 4 * REST_N)": "the second part of a work tile is a half or a quarter of the first",
        "REST_N == 0 or SPLIT_K == 1": "partial products are of one part",
        "not PAD or odd": "operands that TMA can load need no copy",
        "not PAD or SPLIT_K == 1": "partial products are made of the operands themselves",
        "pdl == 0 or (compute_capability >= 90 and SPLIT_K > 1)": (
            "it is for the sum behind shares, and programmatic dependent launch begins with sm_90"
        ),
        "SPLIT_K > 0 or TILE_M * TILE_N <= 2048 * num_worker_warps * num_ctas": "registers hold the sums of a share and of all",
    }
    exploring = {
        "TILE_M * TILE_N <= 16384 * num_ctas or num_worker_warps == 8": "one group of warps spills more than 128 x 128 sums",
        "TILE_M * TILE_N >= 16384 or num_worker_warps == 4": "small tiles leave a second group of warps no work",
        "TILE_M <= 128 or TILE_N >= 128": "tall and narrow tiles read more than they multiply",
        "TILE_M < 128 or TILE_N >= 64": "tall and narrow tiles read more than they multiply",
        "TILE_M <= 128 or num_ctas == 2 or TILE_N == 128": "beyond what registers hold",
        "not large or TILE_M * TILE_N >= 16384": "small tiles read their operands too often",
        "m <= 256 or TILE_M * TILE_N >= 4096": "small tiles read their operands too often",
        "m <= 32 or TILE_M >= 64": "tensor cores take 64 rows at a time",
        "m > 64 or TILE_M <= 64": "rows beyond the last are multiplied for nothing",
        "m > 128 or TILE_M <= 128": "rows beyond the last are multiplied for nothing",
        "REST_N == 0 or not PERSISTENT": "the compiler (13.4 on sm_90) waits for each of two parts' products in such loops",
        "REST_N == 0 or TILE_K == 64 or TILE_M < 64": "longer steps are tried on one part",
        "pdl == 0": "only the fastest schedules are raced with overlapping launches",
        "SPLIT_K > 0": "shares of one block only have the bits of shares of several, for numerics invariant",
        "SPLIT_K == 1 or (k >= 1024 and m * n * SPLIT_K <= 512 * TILE_M * TILE_N)": "enough work tiles without a split",
        "SPLIT_K == 1 or not PERSISTENT": "a split makes as many blocks as fit, or few more",
        "TILE_K > 32 or shared_memory_bytes <= 166912": "short steps are for little shared memory",
        "TILE_K <= 64 or TILE_M * TILE_N <= 16384": "long steps leave room for two of them, where tiles are large",
        "TILE_K <= 128 or TILE_M * TILE_N <= 1024": "long steps leave room for two of them, where tiles are large",
        "num_ctas == 1 or (TILE_M >= 128 and SPLIT_K == 1 and TILE_K == 64)": "clusters are for large work tiles",
        "not PERSISTENT or (TILE_M * TILE_N >= 16384 and num_worker_warps == 8)": "short work tiles were slower so on the H200",
        "GROUP_M == 8 or (m > 1024 and TILE_M * TILE_N >= 32768)": "the order is tried on large tiles",
        "occupancy == 0 or (TILE_M * TILE_N <= 16384 and num_worker_warps == 4)": "of larger tiles an SM holds one in any case",
        "LATENCY == 0 or TILE_M * TILE_N >= 16384": "the hint is tried on large tiles",
    }
    suites = SUITES
    cost = ProductCost()
    similarity = MatmulSimilarity()
    axes = ("m", "n", "k", "dtype")
    plain = {"LATENCY": 0, "PAD": False, "REST_N": 0, "SPLIT_K": 1}

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """The tiles of the copies and of the last sum, and the shares that one block sums."""
        shares = max(1, -s.number("SPLIT_K"))
        return {"PAD_ROWS": PAD_TILE, "PAD_COLUMNS": PAD_TILE, "SHARES": shares, **combine_constants(p)}

    @staticmethod
    def launches(p: Problem, s: Schedule, device: Any) -> list[Launch]:
        """The product, with copies before it or a sum behind it where the schedule has them."""
        from tiledsched.kernels.matmul import tiles

        if not s["PAD"]:
            whole = tiles.matmul if s.number("SPLIT_K") > 0 else tiles.matmul_in_shares
            return product_launches(p, s, device, whole, tiles.matmul_partial, tiles.combine)
        return [
            (tiles.pad_a, (p.padded_m // PAD_TILE, p.padded_k // PAD_TILE)),
            (tiles.pad_b, (p.padded_k // PAD_TILE, p.padded_n // PAD_TILE)),
            *product_launches(p, s, device, tiles.matmul_padded, tiles.matmul_partial, tiles.combine),
        ]

    @staticmethod
    def reference(xp: Any, A: Any, B: Any) -> Any:
        """The product."""
        return A @ B

    rivals = staticmethod(raced)

    @staticmethod
    def small() -> list[Problem]:
        """Sizes that no tile divides, every layout, and rows that TMA cannot load."""
        layouts = [(a, b) for a in ("row", "column") for b in ("row", "column")]
        sizes = ((150, 130, 100), (64, 128, 64), (3, 5, 1), (130, 72, 200))
        made = (Matmul.problem(m=m, n=n, k=k, a_layout=a, b_layout=b) for m, n, k in sizes for a, b in layouts)
        return list(dict.fromkeys(made))


def padded(size: int) -> int:
    """`size` rounded up to whole tiles of a copy."""
    return -(-size // PAD_TILE) * PAD_TILE
