"""The declaration of layer normalisation. What runs on the GPU is in `tiles` beside it and `kernels.rows`."""

from __future__ import annotations

from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.kernels.layer_norm.rivals import in_torch, raced
from tiledsched.kernels.row_schedules import ELEMENTS, KNOBS, RowKernel, RowSimilarity, WholeRowCost

WIDTHS = (768, 1024, 1280, 3072, 5120, 8192)
"""Columns of a suite: as in BERT and ViT (base and large), Whisper large, FLUX, Wan 14B, and Falcon 40B."""


class LayerNorm(RowKernel, Kernel):
    """Out = (X - mean) / sqrt(variance + eps) * W + B by rows; without `weighted` there is no W, without `biased` no B."""

    name = "layer_norm"
    weighted = ts.flag(True)
    biased = ts.flag(True)
    X = ts.array("rows columns")
    W = ts.array("columns", when="weighted")
    B = ts.array("columns", when="biased")
    Out = ts.out("rows columns")
    eps = ts.scalar(1e-5)

    knobs = KNOBS | {
        "TILE_COLUMNS": ts.knob((2048, 256, 512, 1024, 4096, 8192, 16384), about="columns of a tile", weight=0.4),
        "loads": ts.knob(("gather", "plain", "tma"), about="how rows move", weight=1.0),
        "num_worker_warps": ts.knob((4, 1, 2, 8), about="warps that compute", weight=0.4),
        "occupancy": ts.knob((0, 4, 8, 16), about="blocks an SM should hold; 0 leaves it to the compiler", weight=0.4),
    }
    exploring = {
        "TILE_COLUMNS < 2 * columns or TILE_COLUMNS == 256": "less than half of the tile would be used",
        "HOLD or TILE_COLUMNS < columns": "a row of one tile is held in any case",
        "TILE_COLUMNS >= columns or 8 * TILE_COLUMNS >= columns": "more tiles of a row were not faster on the H200",
        "not HOLD or TILE_ROWS == 1 or TILE_ROWS * width <= 8192": "registers hold no more rows",
        "HOLD or (TILE_ROWS == 1 and columns > 8192)": "of shorter rows registers hold all",
        "TILE_COLUMNS >= 256 * num_worker_warps or TILE_ROWS > 1": "threads would load less than 16 bytes",
        "not HOLD or TILE_ROWS * width <= 2048 * num_worker_warps": "registers hold no more of a row",
        "num_worker_warps >= 4 or (loads != 'tma' and columns <= 4096)": "few warps are for short rows",
        "num_worker_warps < 8 or width >= 4096": "not enough elements for eight warps",
        "PERSISTENT or occupancy == 0 or loads == 'plain'": "a plain grid fills the SMs; plain loads take too many registers",
        "not PERSISTENT or (loads == 'tma' and occupancy > 0)": "blocks stay where others load their next rows",
        "loads != 'tma' or (PERSISTENT and TILE_COLUMNS >= columns)": "TMA is tried where a row is one tile",
        "occupancy < 16 or num_worker_warps == 2": "an SM holds no more registers",
        "occupancy != 8 or num_worker_warps == 4": "of eight warps an SM holds fewer blocks, and of two more",
    }
    axes = ("columns", "rows", "dtype")
    suites = {
        "widths": [{"rows": ELEMENTS // columns, "columns": columns} for columns in WIDTHS],
        "models": [{"rows": 8192, "columns": 5000}, *({"rows": 512, "columns": columns} for columns in (768, 5120))],
    }

    cost = WholeRowCost(arrays=1, instructions=12.0, enough=5.0)
    """Conversions, sums and products. Blocks that reduce rows twice pause for long. In registers are an element, its weight and
    its bias in 16 bits."""
    similarity = RowSimilarity()

    @staticmethod
    def reference(xp: Any, X: Any, W: Any, B: Any, eps: float) -> Any:
        """The normalised rows."""
        far = X - X.mean(-1, keepdims=True)
        out = far / xp.sqrt((far * far).mean(-1, keepdims=True) + eps)
        out = out if W is None else out * W
        return out if B is None else out + B

    rivals = staticmethod(raced)

    stand_in = staticmethod(in_torch)

    @staticmethod
    def small() -> list[Problem]:
        """Rows that no tile divides, narrow and wide, with and without a weight and a bias."""
        return [
            LayerNorm.problem(rows=rows, columns=columns, weighted=weighted, biased=biased, dtype=dtype)
            for dtype, weighted, biased in (
                ("bfloat16", True, True),
                ("float16", True, False),
                ("float16", False, False),
            )
            for rows, columns in ((5, 1000), (7, 512), (3, 5120), (1, 24))
        ]
