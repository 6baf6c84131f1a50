"""The declarations of rotary position embedding: into new arrays, and in place. What runs on the GPU is in `tiles` beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.rope.reference import rotated
from tiledsched.kernels.rope.rivals import in_torch
from tiledsched.kernels.row_schedules import OneFunction, RowSimilarity, StreamingCost, TileDemand

FP32_PER_ELEMENT = 8.0
"""Instructions per element: conversions, and two products."""
LLAMA = {"q_heads": 32, "k_heads": 8, "width": 64}
"""Llama 3 8B: the heads of queries and of keys, and half of a head's elements."""
OTHERS = (
    {"q_heads": 28, "k_heads": 4, "width": 64},
    {"q_heads": 64, "k_heads": 8, "width": 64},
    {"q_heads": 16, "k_heads": 8, "width": 128},
)
"""Qwen2.5 7B, Llama 3 70B and Gemma 2 9B."""


class RopeCost(StreamingCost):
    """The time of a kernel that reads and writes some heads of some positions in each block."""

    def work(self, p: Problem, s: Schedule) -> TileDemand:
        """Heads are asked for together; angles come from a cache."""
        elements = s.number("TILE_SEQ") * (s.number("TILE_HEADS") + tile_keys(p, s)) * 2.0 * tile_half(p)
        share = p.half / tile_half(p)  # of the tile that a head fills
        return TileDemand(
            count=blocks_of(p, s),
            bytes=2.0 * elements * share,
            instructions=elements * FP32_PER_ELEMENT,
            live=2.0 * elements,
        )


class Rope(OneFunction, Kernel):
    """Queries and keys, each pair of elements of a head rotated by the angle of its position."""

    name = "rope"
    batch = ts.dim(most=65535)
    seq = ts.dim()
    q_heads = ts.dim(constant=True, most=65536)
    k_heads = ts.dim(constant=True, most=65536)
    parts = ts.dim(2, constant=True, most=2)
    """2: the elements of a pair are half a head apart. 1: they are neighbours."""
    width = ts.dim(64, constant=True, most=1024)
    """Elements of a part. A head has parts * width elements."""
    tables = ts.dim(1)
    """1 where all sequences have the same angles; else the batch."""
    dtype = ts.dtype("bfloat16", "float16")
    angle_dtype = ts.dtype("bfloat16", "float16", "float32")
    requires = {
        "parts * width % 2 == 0": "a head is pairs of elements",
        "tables in (1, batch)": "all sequences have the same angles, or each has its own",
    }
    derived = {"half": lambda p: p.parts * p.width // 2}
    Q = ts.array("batch seq q_heads parts width")
    K = ts.array("batch seq k_heads parts width")
    Cos = ts.array("tables seq parts*width/2", dtype="angle_dtype")
    Sin = ts.array("tables seq parts*width/2", dtype="angle_dtype")
    OutQ = ts.out("batch seq q_heads parts width")
    OutK = ts.out("batch seq k_heads parts width")

    knobs = {
        "TILE_SEQ": ts.knob((1, 2, 4, 8), about="positions of a tile", weight=0.4),
        "TILE_HEADS": ts.knob((32, 8, 4, 16, 64), about="heads of queries in a tile", weight=0.4),
        "num_worker_warps": ts.knob((4, 8, 2), about="warps that compute", weight=0.4),
    }
    exploring = {
        "TILE_SEQ * TILE_HEADS * half <= 8192": "registers hold no more pairs",
        "TILE_SEQ * TILE_HEADS * half >= 256 or half < 8": "threads would load less than 16 bytes",
        "TILE_HEADS < 2 * q_heads or TILE_HEADS == 4": "less than half of the tile would be used",
        "num_worker_warps == 4 or TILE_SEQ * TILE_HEADS * half >= 1024": "not enough pairs for eight warps",
    }
    axes = ("seq", "batch", "q_heads", "dtype")
    label = {"B": "batch", "S": "seq"}
    suites = {
        "models": [
            *({"batch": batch, "seq": seq} | LLAMA for batch, seq in ((16, 1), (1, 4096), (4, 4096))),
            *({"batch": 1, "seq": 4096} | heads for heads in OTHERS),
        ],
        "interleaved": [{"batch": 1, "seq": 4096, "q_heads": 16, "k_heads": 16, "parts": 1, "width": 64}],
    }
    cost = RopeCost()
    similarity = RowSimilarity()

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """Parameters that are called like no knob."""
        return {"TILE_HALF": tile_half(p), "TILE_K": tile_keys(p, s)}

    @staticmethod
    def grid(p: Problem, s: Schedule, device: Any) -> tuple[int, int]:
        """One block per tile: those of a sequence along the first axis."""
        return blocks_of(p, s) // p.batch, p.batch

    @staticmethod
    def reference(xp: Any, Q: Any, K: Any, Cos: Any, Sin: Any) -> Any:
        """The rotated queries and keys."""
        return tuple(rotated(xp.stack, each, Cos, Sin) for each in (Q, K))

    @staticmethod
    def inputs(xp: Any, rng: Any, p: Problem) -> Mapping[str, Any]:
        """Cosines and sines of angles all around the circle."""
        angle = rng.uniform(0.0, 6.283185307179586, (p.tables, p.seq, p.half))
        return {"Cos": xp.cos(angle), "Sin": xp.sin(angle)}

    stand_in = staticmethod(in_torch)

    @staticmethod
    def small() -> list[Problem]:
        """Positions and heads that no tile divides, halves that are no power of two, and angles for each sequence."""
        sizes = {"batch": 2, "seq": 5, "q_heads": 6, "k_heads": 2}
        return [
            Rope.problem(**sizes | more, parts=parts, dtype=dtype)
            for dtype, parts in (("bfloat16", 2), ("float16", 1))
            for more in (
                {"width": 32, "angle_dtype": "float32"},
                {"width": 40, "tables": 2},
                {"batch": 1, "seq": 1, "q_heads": 1, "k_heads": 1, "angle_dtype": dtype},
            )
        ]


class RopeInPlace(Rope):
    """Queries and keys as `Rope` rotates them, written where they lie."""

    name = "rope_in_place"
    Q = ts.inout("batch seq q_heads parts width")
    K = ts.inout("batch seq k_heads parts width")
    OutQ = OutK = None
    suites = {"models": [{"batch": batch, "seq": seq} | LLAMA for batch, seq in ((1, 4096), (4, 4096))]}

    @staticmethod
    def small() -> list[Problem]:
        """Those of :class:`Rope`."""
        return [RopeInPlace.problem(**p.values) for p in Rope.small()]


def tile_half(p: Problem) -> int:
    """Pairs of a head, rounded up to a power of two."""
    return 1 << (p.half - 1).bit_length()


def head_tiles(p: Problem, s: Schedule) -> int:
    """Tiles that cover the heads of queries."""
    return -(-p.q_heads // s.number("TILE_HEADS"))


def tile_keys(p: Problem, s: Schedule) -> int:
    """Heads of keys in a tile: their share, rounded up to a power of two."""
    return 1 << (-(-p.k_heads // head_tiles(p, s)) - 1).bit_length()


def blocks_of(p: Problem, s: Schedule) -> int:
    """Tiles that cover queries and keys."""
    return int(p.batch) * -(-p.seq // s.number("TILE_SEQ")) * head_tiles(p, s)
