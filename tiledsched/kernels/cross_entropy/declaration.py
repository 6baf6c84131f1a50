"""The declaration of cross entropy. What runs on the GPU is in `tiles` beside it and `kernels.rows`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy

import tiledsched.core.fields as ts
from tiledsched.core.arrays import Tolerance
from tiledsched.core.cost import LAUNCH_US
from tiledsched.core.device import ArchSpec, ResourceFacts
from tiledsched.core.fields import ITEM_BYTES
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.cross_entropy.rivals import in_torch
from tiledsched.kernels.row_schedules import LOADS, RowSimilarity, StreamingCost, TileDemand

IGNORED = -100
"""torch's label of rows that do not count."""
COMBINE_ROWS = 128
"""Rows of a block that combines the parts of rows."""
FP32_PER_ELEMENT = 9.0
"""Instructions per logit: a conversion, a maximum, a difference, a product, a sum, and an exponential that counts as several."""
FP32_PER_RESCALE = 8.0
"""Instructions per lane and group of tiles: a running sum is rescaled."""


class CrossEntropyCost(StreamingCost):
    """The time of a kernel that streams rows of logits, in groups of tiles."""

    def work(self, p: Problem, s: Schedule) -> TileDemand:
        """A block waits for each group, and holds it in the type of the logits beside the lanes."""
        lanes = s.number("TILE_ROWS") * s.number("TILE_COLUMNS")
        share = s.number("TILE_ROWS") * p.columns / s.number("SPLITS")
        group = lanes * min(float(s.number("GROUP")), -(-share // lanes))
        return TileDemand(
            count=-(-p.rows // s.number("TILE_ROWS")) * s.number("SPLITS"),
            bytes=group * ITEM_BYTES[p.dtype],
            instructions=share * (FP32_PER_ELEMENT + FP32_PER_RESCALE / s.number("GROUP")),
            live=group * ITEM_BYTES[p.dtype] / 4.0 + 2.0 * lanes,
        )

    def model(self, p: Problem, s: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
        """Estimated time in microseconds; of two launches where blocks share rows."""
        return super().model(p, s, facts, spec) + LAUNCH_US * (s.number("SPLITS") > 1)


class CrossEntropy(Kernel):
    """Loss = Lse - Logits[Label] by rows, where Lse is the logarithm of the sum of exponentials of a row's logits.

    With `smoothed`, labels have the share 1 - smoothing of a target, and all columns alike have the rest. The loss of a row whose
    label is `ignore_index` is 0.
    """

    name = "cross_entropy"
    rows = ts.dim()
    columns = ts.dim(constant=True, most=1 << 20)
    dtype = ts.dtype("bfloat16", "float16", "float32")
    label_dtype = ts.dtype("int64", "int32")
    smoothed = ts.flag()
    Logits = ts.array("rows columns")
    Labels = ts.array("rows", dtype="label_dtype", below="columns", sentinel=IGNORED)
    Loss = ts.out("rows", dtype="float32")
    Lse = ts.out("rows", dtype="float32")
    Highest = ts.workspace("SPLITS rows")
    Total = ts.workspace("SPLITS rows")
    Near = ts.workspace("SPLITS rows")
    Sum = ts.workspace("SPLITS rows")
    ignore_index = ts.scalar(IGNORED)
    smoothing = ts.scalar(lambda p: 0.1 if p.smoothed else 0.0)

    knobs = {
        "TILE_ROWS": ts.knob((1, 2, 4, 8), about="rows of a tile", weight=0.4),
        "TILE_COLUMNS": ts.knob((1024, 256, 512, 2048), about="columns of a tile", weight=0.4),
        "GROUP": ts.knob((4, 1, 2, 8), about="tiles that are read before any of them is used", weight=0.4),
        "SPLITS": ts.knob((1, 2, 4, 8, 16), about="blocks that share a row", weight=1.0),
        "loads": ts.knob(LOADS, about="how rows move", weight=1.0),
        "num_worker_warps": ts.knob((4, 1, 2, 8), about="warps that compute", weight=0.4),
        "occupancy": ts.knob(
            (8, 0, 4, 16, 32), about="blocks an SM should hold; 0 leaves it to the compiler", weight=0.4
        ),
    }
    constraints = {
        "SPLITS * GROUP * TILE_COLUMNS <= columns or SPLITS == 1": "every part of a row has a group of its own"
    }
    exploring = {
        "TILE_COLUMNS < 2 * columns or TILE_COLUMNS == 256": "less than half of the tile would be used",
        "GROUP == 1 or GROUP * TILE_COLUMNS < 2 * columns": "less than half of the group would be used",
        "TILE_ROWS * TILE_COLUMNS == 256 * num_worker_warps or loads != 'plain' or rows <= 1024": "a thread has 8 lanes",
        "TILE_ROWS * TILE_COLUMNS <= 512 * num_worker_warps": "a lane has a maximum and a sum in registers",
        "TILE_ROWS * TILE_COLUMNS >= 256 * num_worker_warps or columns <= 256": "threads would load less than 16 bytes",
        "TILE_ROWS == 1 or columns <= 16384": "several rows are for rows that are short",
        "GROUP >= 4 or columns <= 8192 or (smoothed and GROUP == 2)": "more bytes under way",
        "GROUP < 8 or loads == 'tma'": "registers hold no more, beside as many blocks",
        "GROUP < 4 or loads == 'tma' or not smoothed": "a lane also has a sum of logits in registers",
        "SPLITS == 1 or (rows <= 1024 and TILE_ROWS == 1)": "enough rows without a split",
        "SPLITS == 1 or (loads == 'plain' and num_worker_warps == 4)": "how rows move was found without a split",
        "num_worker_warps >= 4 or loads != 'tma'": "TMA takes warps of its own",
        "occupancy * num_worker_warps <= 32": "registers of an SM hold no more groups",
        "occupancy * num_worker_warps >= 16 or (occupancy == 0 and rows <= 1024)": "more bytes under way",
        "occupancy * num_worker_warps == 32 or loads != 'plain' or rows <= 1024": "more blocks were faster on the H200",
        "occupancy * num_worker_warps == 16 or loads == 'plain'": "gathers and TMA take more registers",
    }
    axes = ("columns", "rows", "dtype")
    plain = {"SPLITS": 1}
    suites = {
        "models": [
            *({"rows": 4096, "columns": columns} for columns in (50304, 128256, 151936, 256000)),
            *({"rows": rows, "columns": columns} for rows, columns in ((512, 128256), (8192, 32000), (16384, 50304))),
        ]
    }
    """Vocabularies of Llama 2, GPT-2 (padded), Llama 3, Qwen2.5 and Gemma 2."""

    cost = CrossEntropyCost()
    similarity = RowSimilarity()

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """Parameters that are called like no knob."""
        return {"LOADS": LOADS.index(str(s["loads"])), "COMBINE_ROWS": COMBINE_ROWS}

    @staticmethod
    def tolerance(p: Problem, s: Schedule) -> Tolerance:
        """That of the types. Losses near 0 are judged as if they were 0.01: they are the logarithm of a sum near 1, which float32
        holds to a step of 1e-7."""
        return replace(Tolerance.of_types(["float32"], [p.dtype]), floor=1e-2)

    @staticmethod
    def launches(p: Problem, s: Schedule, device: Any) -> list[Any]:
        """One launch, or one for the parts of rows and one that combines them."""
        from tiledsched.kernels.cross_entropy import tiles

        row_tiles = -(-p.rows // s.number("TILE_ROWS"))
        if s["SPLITS"] == 1:
            return [(tiles.cross_entropy, (row_tiles,))]
        return [
            (tiles.cross_entropy_part, (row_tiles * s.number("SPLITS"),)),
            (tiles.cross_entropy_combine, (-(-p.rows // COMBINE_ROWS),)),
        ]

    @staticmethod
    def reference(xp: Any, Logits: Any, Labels: Any, ignore_index: int, smoothing: float) -> Any:
        """The losses, and the logarithms of the sums of exponentials."""
        if not Logits.shape[1]:  # the sum of nothing, and labels that are no column
            return xp.full(len(Logits), xp.nan), xp.full(len(Logits), -xp.inf)
        highest, labels = Logits.max(-1), Labels.astype("int64")
        known = (labels >= 0) & (labels < Logits.shape[1])
        with numpy.errstate(invalid="ignore"):  # of rows whose largest logit is infinite
            above = Logits - highest[:, None]
            log_total = xp.log(xp.exp(above).sum(-1))
            target = xp.take_along_axis(above, xp.where(known, labels, 0)[:, None], 1)[:, 0]
            loss = log_total - (1.0 - smoothing) * target
        if smoothing:
            loss = loss - smoothing * above.mean(-1)
        lse = xp.where(xp.isinf(highest), highest, highest + log_total)
        return xp.where(labels == ignore_index, 0.0, xp.where(known, loss, xp.nan)), lse

    stand_in = staticmethod(in_torch)

    @staticmethod
    def small() -> list[Problem]:
        """Rows that no tile divides, short and long, some of which begin anywhere; plain and smoothed."""
        return [
            CrossEntropy.problem(rows=rows, columns=columns, smoothed=smoothed, dtype=dtype, label_dtype=label_dtype)
            for dtype, smoothed, label_dtype in (
                ("bfloat16", False, "int64"),
                ("float16", True, "int32"),
                ("float32", False, "int64"),
            )
            for rows, columns in ((5, 1000), (3, 9000), (9, 4103), (1, 24))
        ]
