"""The declaration of the gradients of root-mean-square normalisation. What runs on the GPU is in `tiles` beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.arrays import Tolerance
from tiledsched.core.device import ResourceFacts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.rms_norm import RmsNorm
from tiledsched.kernels.rms_norm_backward.rivals import in_torch
from tiledsched.kernels.row_schedules import (
    LATENCY_CYCLES,
    SPILL_COST,
    RowFields,
    RowKernel,
    RowSimilarity,
    StreamingCost,
    TileDemand,
    row_coverage,
)

SUM_ROWS, SUM_COLUMNS = 64, 32
"""The tile of a block that adds the parts of dW: a line of memory of each part. Of larger tiles registers spill."""
# Read off 128 programs of five widths on an H200 (2026-11-27).
FP32_PER_ELEMENT = 8.0
"""Instructions per element: conversions, products, and three sums."""
AHEAD = 2.0
"""How many rows a block has under way that reads the next one ahead."""
ENOUGH = 4.0
"""What all blocks of an SM should have asked of memory, in what memory answers within a latency: they pause for each row."""
FEW_BYTES_COST = 0.2
"""Share by which the time grows for each time that what is under way would fit once more into enough."""
LIVE_PER_ELEMENT = 3.5
"""Float32 values in registers for each element of a row: X, dOut and W in 16 bits, the sum of dW, and one on its way."""


class RmsNormBackwardCost(StreamingCost):
    """The time of blocks that read rows, write rows, and add up columns."""

    def work(self, p: Problem, s: Schedule) -> TileDemand:
        """A row that is not held is read again, and the part of dW with it, from the L2 cache for the most part."""
        rows, tile = s.number("TILE_ROWS"), s.number("TILE_COLUMNS")
        covered, held = row_coverage(p, s)
        parts = 8.0 * blocks(p, s) * p.columns
        return TileDemand(
            count=-(-p.rows // rows),
            bytes=(AHEAD if reads_ahead(s) else 1.0) * 4.0 * rows * min(covered if held else tile, p.columns),
            instructions=rows * covered * FP32_PER_ELEMENT * (1.0 if held else 1.6),
            live=rows * (covered if held else tile) * (LIVE_PER_ELEMENT + bool(s["AHEAD"])),
            again=0.5 * parts if held else 0.5 * (parts + 6.0 * p.rows * p.columns),
        )

    launches = 2

    def slowdown(self, s: Schedule, work: TileDemand, facts: ResourceFacts, resident: int, answered: float) -> float:
        """Few bytes under way lengthen the stream, and so do registers that spill."""
        staged = facts.shared_bytes if s["loads"] == "tma" else 0  # known of code that is built
        lack = FEW_BYTES_COST * max(0.0, ENOUGH * answered / (resident * (staged or work.bytes)) - 1.0)
        return 1.0 + lack + SPILL_COST * facts.spill_bytes

    def turns(self, p: Problem, s: Schedule, work: TileDemand, slots: int) -> float:
        """The tiles that a block takes, as often as blocks follow one another."""
        return -(-blocks(p, s) // slots) * -(-work.count // blocks(p, s))

    def latency(self, s: Schedule) -> float:
        """A block that reads ahead waits for its first rows only."""
        return 0.0 if reads_ahead(s) else LATENCY_CYCLES


class RmsNormBackward(RowFields, Kernel):
    """The gradients dX and dW of Out = X / sqrt(mean(X * X) + eps) * W, from dOut.

    With `residual`, X is the sum that RmsNorm returns beside Out, dSum is the gradient of that sum, and dX is that of both its
    terms. dW is summed up in float32, always in the same order.
    """

    name = "rms_norm_backward"
    residual = ts.flag()
    dOut = ts.array("rows columns")
    X = ts.array("rows columns")
    W = ts.array("columns")
    dSum = ts.array("rows columns", when="residual")
    dX = ts.out("rows columns")
    dW = ts.out("columns")
    Parts = ts.workspace(lambda p, s: (blocks(p, s), p.columns), aligned=True)
    eps = ts.scalar(1e-5)

    knobs = {
        "TILE_ROWS": ts.knob((1, 2, 4), about="rows of a tile", weight=0.4),
        "TILE_COLUMNS": ts.knob((4096, 512, 1024, 2048, 8192, 16384), about="columns of a tile", weight=0.4),
        "HOLD": ts.knob((True, False), about="whether a row and its part of dW stay in registers"),
        "AHEAD": ts.knob((False, True), about="whether a block reads its next row before it works on one"),
        "loads": ts.knob(("tma", "plain", "gather"), about="how rows move", weight=1.0),
        "num_worker_warps": ts.knob((4, 8, 16), about="warps that compute", weight=0.4),
        "occupancy": ts.knob((2, 3, 1, 4, 6), about="blocks an SM should hold", weight=0.4),
        "BLOCKS": ts.knob(
            (264, 396, 132, 528, 792, 16, 32, 64), about="most blocks, each of which has a part of dW", weight=0.4
        ),
    }
    exploring = {
        "TILE_COLUMNS < 2 * columns or TILE_COLUMNS == 512": "less than half of the tile would be used",
        "HOLD or TILE_COLUMNS < columns": "a row of one tile is held in any case",
        "TILE_COLUMNS >= columns or columns < width or width > 8192": "a row of a power of two is one tile",
        "TILE_COLUMNS >= columns or 8 * TILE_COLUMNS >= columns": "more tiles of a row were not faster on the H200",
        "HOLD or width > 32768": "of shorter rows registers hold all, or spill and are faster nevertheless",
        "HOLD or loads != 'tma'": "rows that are read twice were slower by TMA on the H200",
        "not HOLD or width <= 32768": "registers hold no more of a row",
        "TILE_ROWS == 1 or width <= 2048": "several rows are for rows that are short",
        "AHEAD or loads == 'tma' or not HOLD or rows < 2 * BLOCKS": "a block would wait for each row",
        "not AHEAD or (loads != 'tma' and HOLD)": "TMA reads ahead by itself, and rows that are read twice are not read ahead",
        "TILE_ROWS * width >= 256 * num_worker_warps or width <= 512": "threads would load less than 16 bytes",
        "num_worker_warps < 16 or width > 4096": "not enough elements for so many warps",
        "TILE_ROWS * width <= 1024 * num_worker_warps or num_worker_warps >= 8": "a thread holds no more of a row",
        "HOLD or (num_worker_warps == 8 and occupancy == 2)": "rows that are read twice wait for the L2 cache",
        "not HOLD or occupancy * (4 * TILE_ROWS * width + 1280 * num_worker_warps) <= 80000 or occupancy == 1": (
            "registers hold no more"
        ),
        "not HOLD or occupancy * (4 * TILE_ROWS * width + 1280 * num_worker_warps) >= 30000 or rows < 16 * BLOCKS": (
            "more bytes under way"
        ),
        "BLOCKS <= sm_count * occupancy or BLOCKS == 16": "all blocks run at once",
        "2 * BLOCKS > sm_count * occupancy or 2 * TILE_ROWS * BLOCKS > rows": "SMs would be idle",
        "TILE_ROWS * BLOCKS <= rows or BLOCKS == 16": "blocks without rows",
    }
    axes = RmsNorm.axes
    plain = {"HOLD": True, "AHEAD": False}
    suites = RmsNorm.suites
    cost = RmsNormBackwardCost()
    similarity = RowSimilarity()

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """Parameters that are called like no knob."""
        return {**RowKernel.constants(p, s), "SUM_ROWS": SUM_ROWS, "SUM_COLUMNS": SUM_COLUMNS}

    @classmethod
    def tolerance(cls, p: Problem, s: Schedule) -> Tolerance:
        """That of the types. Gradients of rows of one column are judged as if they had a tenth of the usual size: they are what
        `eps` leaves of the difference of equal numbers, which float32 rounds."""
        return replace(super().tolerance(p, s), floor=0.1 if p.columns == 1 else 0.0)

    @staticmethod
    def launches(p: Problem, s: Schedule, device: Any) -> list[Any]:
        """Rows, and the sum of each block's part of dW."""
        from tiledsched.kernels.rms_norm_backward import tiles

        return [(tiles.rms_norm_backward, (blocks(p, s),)), (tiles.sum_parts, (-(-p.columns // SUM_COLUMNS),))]

    @staticmethod
    def reference(xp: Any, dOut: Any, X: Any, W: Any, dSum: Any, eps: float) -> Any:
        """The gradients of X and W."""
        scale = 1.0 / xp.sqrt((X * X).mean(-1, keepdims=True) + eps)
        gradient = dOut * W
        dx = scale * (gradient - X * scale**2 * (gradient * X).mean(-1, keepdims=True))
        return dx if dSum is None else dx + dSum, (dOut * X * scale).sum(0)

    stand_in = staticmethod(in_torch)

    @staticmethod
    def small() -> list[Problem]:
        """Rows that no tile divides, narrow and wide, and more rows than blocks."""
        return [
            RmsNormBackward.problem(rows=rows, columns=columns, residual=residual, dtype=dtype)
            for dtype in ("bfloat16", "float16")
            for residual in (False, True)
            for rows, columns in ((37, 1000), (7, 512), (3, 5120), (1, 24))
        ]


def reads_ahead(s: Schedule) -> bool:
    """Whether a block has its next row under way while it works on one."""
    return bool(s["AHEAD"]) or s["loads"] == "tma"


def blocks(p: Problem, s: Schedule) -> int:
    """Blocks of the launch over rows: no more than there are tiles of rows."""
    return min(s.number("BLOCKS"), -(-p.rows // s.number("TILE_ROWS")))
