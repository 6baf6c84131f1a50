"""The declaration of products of 8-bit floats: sizes, scales, knobs, and which launches a schedule comes to.

What runs on the GPU is in `tiles` beside it; cuTile is imported where a launch is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy

import tiledsched.core.fields as ts
from tiledsched.core.arrays import RELATIVE_ERRORS, Tolerance
from tiledsched.core.cost import WARPS_PER_GROUP
from tiledsched.core.device import ArchSpec, ResourceFacts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.similarity import FAR
from tiledsched.kernels.product_schedules import (
    MODELS,
    OVERLAP,
    Launch,
    Product,
    ProductCost,
    ProductSimilarity,
    combine_constants,
    instruction,
    product_launches,
    share_bounds,
    step_cycles,
    tile_columns,
)
from tiledsched.kernels.scaled_matmul.rivals import raced

SCALE_DECADES = 1.5
"""Scales of the test inputs are powers of ten between minus and plus this, so that neighbours differ by up to a thousand."""
FAST_SUM_ERROR = 2.0**-15
"""Relative error of sums of k random products in the tensor cores of sm_90, over the square root of k. On an H200 that of cuBLAS
was 2**-15.2 for k = 28672, and ours 2**-17.1.
"""
SUMMED_ALIKE = "offset"
"""The kind of test inputs whose products all have one sign."""
CONVERTED_SPEEDUP = 0.5
"""Rate, as a share of that of 16-bit products, where warps convert 8-bit operands because the tile is too narrow for wgmma."""
BLOCK = 128
"""Elements of k, and columns of B, that share a scale where blocks have scales."""
PROMOTED_K = 128
"""Elements of k after which sums of products are added to float32 ones: four wgmma instructions (QGMMA and FADD in the code)."""
MOST_SUMS = 64 * 128
"""Sums of a group of four warps, beyond which those in float32 and those in the tensor cores together spill registers."""
SPILLED_SUMS = 2.5
"""How many times as long a step takes where they do: 128 x 256 sums against 128 x 128 on an H200."""

FEW_ROWS = 256
"""With at most this many rows, tiles are so small that registers hold sums in two places, too."""
TOKENS = (16, 512, 2048, 8192)
SHAPES = {
    **{name: MODELS[name] for name in ("llama_8b", "llama_70b", "qwen_7b")},
    "qwen_32b": ((7168, 5120), (5120, 5120), (55296, 5120), (5120, 27648)),
}
"""(n, k) of the projections of each model; those of Qwen 2.5 32B are from its published configuration."""

SUITES: dict[str, list[dict[str, Any]]] = {
    name: [
        {"m": m, "n": n, "k": k, "scales": scales, "fast_accum": True}
        for scales in ("row", "tensor")
        for n, k in shapes
        for m in TOKENS
    ]
    for name, shapes in SHAPES.items()
}
SUITES["deepseek_v3"] = [
    {"m": m, "n": n, "k": k, "scales": "block"}
    for n, k in ((2112, 7168), (7168, 16384), (4096, 7168), (7168, 2048))
    for m in TOKENS
]
"""Tokens with a scale each times weights with a scale for each output, and one scale for each operand. Of DeepSeek-V3, from its
published configuration, with scales of blocks: the projections into the latent space, of the attention's output, and an expert's.
"""


class ScaledMatmulCost(ProductCost):
    """The time of a product of 8-bit floats."""

    item_bytes = 1

    def step_cycles(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec, resident: int) -> float:
        """Cycles of a step. Exchanged operands exchange the sides of the tile; sums in float32 take additions of their own."""
        groups_of_rows = spec.product_rows > 16
        converted = groups_of_rows and not s["SWAP"] and s.number("TILE_M") < 64
        turned = s.replace(TILE_M=s["TILE_N"], TILE_N=s["TILE_M"]) if s["SWAP"] else s
        cycles = step_cycles(
            turned,
            facts,
            spec,
            resident,
            by_tma=spec.producer_warps > 0,
            item_bytes=self.item_bytes,
            speedup=CONVERTED_SPEEDUP if converted else spec.fp8_speedup,
        )
        if groups_of_rows and not p.fast_accum:
            sums = s.number("TILE_M") * tile_columns(s) / max(1, facts.num_ctas)
            cycles += sums / spec.fp32_ops * s.number("TILE_K") / PROMOTED_K
            cycles *= SPILLED_SUMS if sums > MOST_SUMS * s.number("num_worker_warps") / WARPS_PER_GROUP else 1.0
        return cycles


class ScaledMatmulSimilarity(ProductSimilarity):
    """How products of 8-bit floats compare."""

    def kind(self, p: Any) -> tuple[Any, ...]:
        """Whether scales are of blocks; and for many rows where sums are added, which decides how large tiles may be."""
        return p.blocks, p.fast_accum or p.m <= FEW_ROWS

    def rival_kind(self, p: Any) -> tuple[Any, ...]:
        """Where products are summed and what scales are of: torch calls other programs for others."""
        return p.scales, p.fast_accum

    def timing_features(self, p: Any) -> tuple[float, ...]:
        """Octaves of the sizes and of C, four and six to one; and where products are summed. With scales of blocks, for which
        others have programs of their own, a place far from all without."""
        sizes = math.log2(p.m) / 4, math.log2(p.n) / 4, math.log2(p.k) / 4, math.log2(p.m * p.n) / 6
        return (*sizes, float(p.fast_accum), 0.3 * (p.scales == "row"), FAR * p.blocks)


class ScaledMatmul(Product, Kernel):
    """C `[m, n]` = (A `[m, k]` @ B `[k, n]`) * scales + bias, for 8-bit floats A, row-major, and B, column-major.

    Each operand has one scale (`tensor`); or each row of A and each column of B (`row`); or 128 elements of a row of A, and
    128 x 128 elements of B (`block`), as in DeepSeek-V3: then the sums of 128 products are scaled and added in float32.
    The conventions are those of `torch._scaled_mm`. With `fast_accum`, sums stay in the tensor cores, which on sm_90 keep fewer
    bits than float32; without, sums of 128 products are added in float32. Other archs make no difference.
    """

    name = "scaled_matmul"
    dtype = ts.dtype("float8_e4m3fn", "float8_e5m2")
    out_dtype = ts.dtype("bfloat16", "float16", "float32")
    scales = ts.choice("row", "tensor", "block")
    fast_accum = ts.flag()
    bias = ts.flag()
    derived = {"blocks": lambda p: p.scales == "block", "large": lambda p: p.m * p.n >= 2048 * 2048}

    A = ts.array("m k")
    B = ts.array("k n", layout="column")
    ScaleA = ts.array(lambda p: scale_shapes(p)[0], dtype="float32")
    ScaleB = ts.array(lambda p: scale_shapes(p)[1], dtype="float32")
    Bias = ts.array("n", dtype="out_dtype", when="bias")
    C = ts.out("m n", dtype="out_dtype")
    Partial = ts.workspace("SPLIT_K m n", aligned=True)

    knobs = {
        "TILE_M": ts.knob((128, 64, 256, 16, 32), about="rows of a work tile", weight=1.0),
        "TILE_N": ts.knob((256, 128, 64), about="columns of a work tile", weight=1.0),
        "REST_N": ts.knob((0, 64), about="columns of a second part of a work tile; 0 for none", weight=0.4),
        "TILE_K": ts.knob((128, 256, 64), about="columns of A that a step of the main loop takes", weight=0.4),
        "SWAP": ts.knob(
            (False, True), about="whether columns of B take the rows of the tensor core's tile", weight=1.0
        ),
        "num_worker_warps": ts.knob((8, 4), about="warps that multiply", weight=1.0),
        "num_ctas": ts.knob((1, 2), about="blocks of a cluster, which share their operands", weight=1.0),
        "GROUP_M": ts.knob((8, 4, 16), about="rows of work tiles that are taken together", weight=0.1),
        "PERSISTENT": ts.knob((True, False), about="whether a block takes several work tiles", weight=0.4),
        "SPLIT_K": ts.knob((1, 2, 4, 8), about="blocks that share the walk over k of a work tile", weight=1.0),
        "occupancy": ts.knob((0, 2), about="blocks an SM should hold; 0 leaves it to the compiler", weight=0.4),
        "pdl": OVERLAP,
        "LATENCY": ts.knob((6, 0), about="latency hint of the main loop's loads", measured_only=True),
    }
    requires = {
        "n % 16 == 0": "rows of C are stored 16 elements at a time, as torch._scaled_mm wants it, too; pad B with zeros",
        "k % 16 == 0": "rows of A and columns of B start at multiples of 16 bytes; pad both with zeros",
        "not (blocks and fast_accum)": "products of 128 are scaled and added in float32; leave fast_accum out",
    }
    constraints = {
        "TILE_M * TILE_N <= 32768 * num_ctas": "two groups of warps hold 128 x 256 sums in registers, and no more",
        "TILE_M >= 64 * num_ctas or num_ctas == 1": "a cluster divides the rows of a tile",
        "num_ctas == 1 or shared_memory_bytes > 200000": "clusters share loads on the data-center archs since sm_90",
        "REST_N == 0 or TILE_N in (REST_N, 2 * REST_N, 4 * REST_N)": "the second part divides the first",
        "REST_N == 0 or (SPLIT_K == 1 and not SWAP)": "shares and exchanged operands are of one part",
        "REST_N == 0 or fast_accum or TILE_K <= 128": "products of a step are summed before they are added in float32",
        "not blocks or (TILE_K <= 128 and TILE_N + REST_N <= 128)": "a tile lies in one block of columns, and a step in one of k",
        "not blocks or TILE_K < 128 or (TILE_M * TILE_N <= 2048 * num_worker_warps and TILE_M <= 16 * num_worker_warps)": (
            "with fewer warps, the compiler (13.5 on sm_90) loads one step at a time"
        ),
        "not blocks or TILE_K < 128 or occupancy == 0 or TILE_M * TILE_N <= 2048": "two blocks on an SM load one step at a time",
        "not blocks or LATENCY > 0": "without the hint, more products are under way than registers hold",
        "SPLIT_K == 1 or not PERSISTENT": "a split makes as many blocks as fit, or few more",
        "pdl == 0 or (compute_capability >= 90 and SPLIT_K > 1)": (
            "it is for the sum behind shares, and programmatic dependent launch begins with sm_90"
        ),
    }
    exploring = {
        "SWAP or TILE_M >= 64": "narrower tiles are converted to 16 bits first",
        "not SWAP or (TILE_M <= 64 and num_ctas == 1)": "tiles of 128 rows fill the tensor core's tile",
        "TILE_M * TILE_N <= 16384 * num_ctas or num_worker_warps == 8": "one group of warps spills more than 128 x 128 sums",
        "TILE_M * TILE_N >= 16384 or num_worker_warps == 4": "small tiles leave a second group of warps no work",
        "TILE_M <= 128 or TILE_N >= 128": "tall and narrow tiles read more than they multiply",
        "TILE_M < 128 or TILE_N >= 128": "tall and narrow tiles read more than they multiply",
        "TILE_M <= 128 or num_ctas == 2 or TILE_N == 128": "beyond what registers hold",
        "fast_accum or TILE_M * TILE_N <= 2048 * num_worker_warps * num_ctas": "sums in two places spill",
        "not large or TILE_M * TILE_N >= 16384": "small tiles read their operands too often",
        "m <= 256 or TILE_M >= 64": "small tiles read their operands too often",
        "m > 16 or TILE_M <= 16": "rows beyond the last are multiplied for nothing",
        "m > 32 or TILE_M <= 32": "rows beyond the last are multiplied for nothing",
        "m > 64 or TILE_M <= 64": "rows beyond the last are multiplied for nothing",
        "m > 128 or TILE_M <= 128": "rows beyond the last are multiplied for nothing",
        "SPLIT_K == 1 or (k >= 1024 and m * n * SPLIT_K <= 512 * TILE_M * TILE_N)": "enough work tiles without a split",
        "blocks or TILE_K >= 128 or shared_memory_bytes <= 166912": "short steps are for little shared memory",
        "TILE_K <= 128 or TILE_M * TILE_N <= 16384": "long steps leave room for two of them, where tiles are large",
        "num_ctas == 1 or (TILE_M >= 128 and SPLIT_K == 1 and TILE_K == 128)": "clusters are for large work tiles",
        "GROUP_M == 8 or (m > 1024 and TILE_M * TILE_N >= 16384)": "the order is tried on large tiles",
        "occupancy == 0 or (TILE_M * TILE_N <= 16384 and num_worker_warps == 4)": "of larger tiles an SM holds one in any case",
        "LATENCY == 6 or TILE_M * TILE_N >= 16384": "without the hint large tiles are tried",
        "REST_N == 0 or (TILE_M == 128 and TILE_N == 128 and TILE_K == 128)": "two parts are for large tiles",
        "REST_N == 0 or (GROUP_M == 8 and LATENCY == 6 and num_worker_warps == 8)": "two parts are tried once",
        "REST_N == 0 or compute_capability == 90": "two parts are for wgmma, which has few registers beside its sums",
        "pdl == 0": "only the fastest schedules are raced with overlapping launches",
    }
    suites = SUITES
    cost = ScaledMatmulCost()
    similarity = ScaledMatmulSimilarity()
    axes = ("m", "n", "k", "scales", "fast_accum", "dtype")
    plain = {"LATENCY": 0, "SPLIT_K": 1, "SWAP": False}

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """Whether rows have scales, and the tiles of the last sum."""
        return {
            "ROW_SCALES": p.scales == "row",
            "BLOCK_SCALES": p.blocks,
            "WHOLE": p.k % BLOCK == 0,
            **combine_constants(p),
        }

    @staticmethod
    def launches(p: Problem, s: Schedule, device: Any) -> list[Launch]:
        """The product, with a sum behind it where blocks share the walk over k."""
        from tiledsched.kernels.scaled_matmul import tiles

        partial = tiles.scaled_blocks_partial if p.blocks else tiles.scaled_matmul_partial
        return product_launches(p, s, device, tiles.scaled_matmul, partial, tiles.combine_scaled)

    @staticmethod
    def inputs(xp: Any, rng: Any, p: Problem) -> Mapping[str, Any]:
        """Scales that differ by up to a thousand from one row to the next."""
        return {
            name: 10.0 ** (SCALE_DECADES * (2.0 * rng.random(shape, dtype=numpy.float32) - 1.0))
            for name, shape in zip(("ScaleA", "ScaleB"), scale_shapes(p), strict=True)
        }

    @staticmethod
    def reference(xp: Any, A: Any, B: Any, ScaleA: Any, ScaleB: Any, Bias: Any) -> Any:
        """The scaled product."""
        if ScaleA.ndim == 1:
            product = (A @ B) * ScaleA[:, None] * ScaleB[None, :]
        else:
            product = sum(
                (A[:, begin : begin + BLOCK] @ B[begin : begin + BLOCK])
                * ScaleA[step][:, None]
                * xp.repeat(ScaleB[:, step], BLOCK)[None, : B.shape[1]]
                for step, begin in enumerate(range(0, A.shape[1], BLOCK))
            )
        return product if Bias is None else product + Bias

    @staticmethod
    def reduction_order(p: Problem, s: Schedule) -> tuple[Any, ...]:
        """The shares of k, the instruction, and without `fast_accum` the steps after which sums move to float32."""
        steps = s.replace(TILE_K=BLOCK) if p.blocks else s
        return share_bounds(p.k, steps), instruction(s), s["SWAP"], 0 if p.fast_accum else steps["TILE_K"]

    @staticmethod
    def tolerance(p: Problem, s: Schedule) -> Tolerance:
        """That of the output's type, and with `fast_accum` what the tensor cores cut off.

        Each product loses what is below the last bit of the sum so far. That sum grows as sqrt(k) where products are random, and
        as k where they have one sign. In the second case the losses add up, too: 4% of the result for k = 28672 on an H200, 42%
        with cuBLAS. Such inputs are not judged.
        """
        relative = RELATIVE_ERRORS[str(p.out_dtype)]
        if not p.fast_accum:
            return Tolerance(relative=relative)
        return Tolerance(relative=relative + math.sqrt(p.k) * FAST_SUM_ERROR, except_kinds=(SUMMED_ALIKE,))

    rivals = staticmethod(raced)

    @staticmethod
    def small() -> list[Problem]:
        """Sizes that no tile divides, both kinds of scales, sums and outputs, with and without a bias."""
        made: list[dict[str, Any]] = [
            {"m": 150, "n": 144, "k": 304},
            {"m": 5, "n": 80, "k": 1040, "bias": True},
            {"m": 1, "n": 16, "k": 16, "out_dtype": "float16"},
            {"m": 70, "n": 272, "k": 160, "scales": "tensor", "bias": True, "out_dtype": "float32"},
            {"m": 33, "n": 128, "k": 144, "scales": "tensor", "dtype": "float8_e5m2", "fast_accum": True},
            {"m": 70, "n": 272, "k": 304, "scales": "block", "bias": True},
            {"m": 2, "n": 16, "k": 16, "scales": "block", "out_dtype": "float32"},
        ]
        return [ScaledMatmul.problem(**values) for values in made]


def scale_shapes(p: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the scales of A and of B. Those of blocks lie with the rows of A, and with k of B, next to each other."""
    if p.scales == "block":
        steps = -(-p.k // BLOCK)
        return (steps, p.m), (-(-p.n // BLOCK), steps)
    return ((p.m,), (p.n,)) if p.scales == "row" else ((1,), (1,))
