"""The declarations of gated linear units: rounded to the type of their inputs, and to 8-bit floats with scales. What runs on the
GPU is in `tiles` beside it and `kernels.rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.device import grid_blocks
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.epilogues import ACTIVATIONS as EPILOGUES
from tiledsched.kernels.glu.rivals import in_torch
from tiledsched.kernels.row_schedules import (
    LOADS,
    OneFunction,
    QuantizedRows,
    RowSimilarity,
    StreamingCost,
    TileDemand,
    WholeRowCost,
    reference_quantized,
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""The kernel sees the index."""
FP32_PER_ELEMENT = 24.0
"""Instructions per element: conversions, an exponential and an inverse, which count as several, and the products."""


class GluCost(StreamingCost):
    """The time of a kernel that reads two tiles and writes one."""

    def work(self, p: Problem, s: Schedule) -> TileDemand:
        """Gate and Up are asked for together."""
        elements = s.number("TILE_ROWS") * s.number("TILE_COLUMNS")
        return TileDemand(
            count=tiles_of(p, s), bytes=4.0 * elements, instructions=elements * FP32_PER_ELEMENT, live=2.0 * elements
        )


class Glu(OneFunction, Kernel):
    """Out = activation(Gate) * Up, element by element."""

    name = "glu"
    rows = ts.dim()
    columns = ts.dim(constant=True)
    dtype = ts.dtype("bfloat16", "float16")
    activation = ts.choice(*ACTIVATIONS)
    Gate = ts.array("rows columns")
    Up = ts.array("rows columns")
    Out = ts.out("rows columns")

    knobs = {
        "TILE_ROWS": ts.knob((1, 2, 4, 8, 16), about="rows of a tile", weight=0.4),
        "TILE_COLUMNS": ts.knob((1024, 256, 512, 2048, 4096), about="columns of a tile", weight=0.4),
        "PERSISTENT": ts.knob((False, True), about="whether a block takes every so many tiles"),
        "loads": ts.knob(LOADS, about="how tiles move", weight=1.0),
        "num_worker_warps": ts.knob((4, 8), about="warps that compute", weight=0.4),
        "occupancy": ts.knob((0, 4, 8, 16), about="blocks an SM should hold; 0 leaves it to the compiler", weight=0.4),
    }
    exploring = {
        "TILE_COLUMNS < 2 * columns or TILE_COLUMNS == 256": "less than half of the tile would be used",
        "TILE_ROWS * TILE_COLUMNS <= 8192": "registers hold no more elements of two arrays",
        "TILE_ROWS * TILE_COLUMNS >= 1024 or rows < 4 * TILE_ROWS": "threads would load less than 16 bytes of each array",
        "TILE_ROWS == 1 or TILE_COLUMNS <= 1024": "several rows are for tiles that are short",
        "num_worker_warps == 4 or TILE_ROWS * TILE_COLUMNS >= 2048": "not enough elements for eight warps",
        "PERSISTENT or occupancy == 0 or loads == 'tma'": "a plain grid fills the SMs",
        "not PERSISTENT or occupancy > 0": "the compiler's choice is one block on an SM",
        "not PERSISTENT or loads != 'gather'": "gathers are tried in a plain grid",
    }
    axes = ("columns", "rows", "activation", "dtype")
    plain = {"PERSISTENT": False}
    suites = {
        "models": [
            *({"rows": tokens, "columns": 14336} for tokens in (512, 4096, 16384)),
            *({"rows": 4096, "columns": columns} for columns in (18944, 28672)),
            {"rows": 16384, "columns": 768},
            {"rows": 4096, "columns": 14336, "activation": "gelu_tanh"},
        ]
    }
    """Llama 3 8B; Qwen2.5 7B and Llama 3 70B; an expert of Qwen3 30B-A3B; Gemma 2 9B."""

    cost = GluCost()
    similarity = RowSimilarity()

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """Parameters that are called like no knob."""
        return {"LOADS": LOADS.index(str(s["loads"])), "ACTIVATION": ACTIVATIONS.index(p.activation)}

    @staticmethod
    def grid(p: Problem, s: Schedule, device: Any) -> tuple[int]:
        """One block per tile; as many as fit at once where blocks are persistent."""
        return (grid_blocks(tiles_of(p, s), s, device, persistent=bool(s["PERSISTENT"])),)

    @staticmethod
    def reference(xp: Any, Gate: Any, Up: Any, activation: str) -> Any:
        """The gated elements."""
        return EPILOGUES[activation].exact(xp, Gate) * Up

    stand_in = staticmethod(in_torch)

    @staticmethod
    def small() -> list[Problem]:
        """Rows that no tile divides, narrow and wide, with every activation."""
        return [
            Glu.problem(rows=rows, columns=columns, activation=activation, dtype=dtype)
            for dtype, activation in (("bfloat16", "silu"), ("float16", "gelu"), ("float16", "gelu_tanh"))
            for rows, columns in ((5, 1000), (7, 512), (3, 5120), (1, 24))
        ]


class GluQuantized(QuantizedRows, Glu):  # type: ignore[misc]  # its knobs are those of whole rows
    """Out * Scale = the elements that `Glu` makes, where Out is float8_e4m3fn and each row has a scale. With `static`, all rows
    have the scale `Given`.
    """

    name = "glu_quantized"
    axes = ("columns", "rows", "activation", "static", "dtype")  # type: ignore[assignment]
    suites = {"models": [{**each, "static": static} for static in (False, True) for each in Glu.suites["models"]]}
    cost = WholeRowCost(arrays=2, instructions=FP32_PER_ELEMENT, live=0.9)  # type: ignore[assignment]
    constants = Glu.constants

    @staticmethod
    def reference(xp: Any, Gate: Any, Up: Any, Given: Any, activation: str) -> Any:  # type: ignore[override]
        """The gated rows over their scales, and the scales."""
        return reference_quantized(xp, Glu.reference(xp, Gate, Up, activation), Given)


def tiles_of(p: Problem, s: Schedule) -> int:
    """Tiles that cover the output."""
    return -(-p.rows // s.number("TILE_ROWS")) * -(-p.columns // s.number("TILE_COLUMNS"))
