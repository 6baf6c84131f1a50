"""The declaration of grouped products with an epilogue: that of the plain product, with the fields of `kernels.epilogues`.

What runs on the GPU is in `tiles` beside it; cuTile is imported where a launch is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.epilogues import (
    CONSTRAINTS,
    DERIVED,
    E4M3,
    Epilogue,
    EpilogueCost,
    EpilogueSimilarity,
    arrays_of,
)
from tiledsched.kernels.grouped_matmul.declaration import (
    MODELS,
    TOKENS,
    GroupedMatmul,
    GroupedMatmulCost,
    GroupedMatmulSimilarity,
)

LAYERS: dict[str, tuple[tuple[int, dict[str, Any]], ...]] = {
    "mixtral_8x7b": ((2, {"gate": True, "activation": "silu"}), (1, {})),
    "qwen3_30b": ((2, {"gate": True, "activation": "silu"}), (1, {})),
    "gpt_oss_20b": ((1, {"bias": True}), (1, {"bias": True})),
}
"""Model -> by how much the columns of the plain product are divided, and the epilogue, of its experts' two layers. GPT-OSS has a
gate that no activation of ours is."""


class GroupedMatmulEpilogueCost(EpilogueCost, GroupedMatmulCost):
    """The time of a grouped product, or of two."""


class GroupedMatmulEpilogueSimilarity(EpilogueSimilarity, GroupedMatmulSimilarity):
    """How grouped products with epilogues compare."""


class GroupedMatmulEpilogue(Epilogue, GroupedMatmul, Kernel):  # type: ignore[misc]  # its reference has more arrays
    """C = activation(A @ B[g] + Bias[g]) + Residual for the rows of group g, or activation(A @ Gate[g]) * (A @ B[g] + Bias[g]) +
    Residual, and perhaps divided by Scale and rounded to 8 bits.

    A is `[tokens, k]`, B and Gate are `[experts, k, n]`, Bias `[experts, n]`, Residual and C `[tokens, n]`; Offsets as in
    :class:`GroupedMatmul`. Each part but the product may be missing. All is computed in float32 and rounded once.
    """

    name = "grouped_matmul_epilogue"
    product = GroupedMatmul
    space = GroupedMatmul.name
    derived = GroupedMatmul.derived | DERIVED

    # The size of a result is that of a field, so that any number of rows is traced once.
    C = ts.out("tokens n", dtype="out_dtype")
    Bias = ts.array("experts n", when="bias")
    Gate = ts.array("experts k n", layout="b_layout", when="gate")

    knobs = GroupedMatmul.knobs | {
        "TILE_N": ts.knob((128, 256, 64), about="columns of a work tile", weight=1.0),
        "PERSISTENT": ts.knob((False, True), about="whether a block takes several work tiles", weight=0.4),
    }
    constraints = (
        GroupedMatmul.constraints
        | CONSTRAINTS
        | {
            "compute_capability != 90 or not PERSISTENT or SWAP or not (gate or residual)": (
                "the compiler (13.5) refuses such loops over work tiles, spills, or waits for every single product"
            )
        }
    )
    suites = {
        name: [
            {
                "tokens": tokens * MODELS[name][1],
                "experts": MODELS[name][0],
                "n": n // parts,
                "k": k,
                "b_layout": "column",
            }
            | more
            for (n, k), (parts, more) in zip(MODELS[name][2], layers, strict=True)
            for tokens in TOKENS
        ]
        for name, layers in LAYERS.items()
    }
    cost = GroupedMatmulEpilogueCost()
    similarity = GroupedMatmulEpilogueSimilarity()

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, Any]:
        """Those of the plain product. Rows of 8 bits start at multiples of 16 bytes where they are whole groups of 16."""
        return {**GroupedMatmul.constants(p, s), **({"ALIGNED": p.whole_rows} if p.quantised else {})}

    @staticmethod
    def launches(p: Problem, s: Schedule, device: Any) -> list[Any]:
        """Those of the plain product, with the product's kernel in its place."""
        from tiledsched.kernels.epilogue_tiles import entry_of
        from tiledsched.kernels.grouped_matmul_epilogue import tiles

        (first, (_, grid)), kernel = GroupedMatmul.launches(p, s, device), p.declaration
        product = entry_of(tiles, GroupedMatmulEpilogue.name, kernel, p.activation, arrays_of(p))  # type: ignore[arg-type]  # a class is hashable
        return [first, (product, grid)]

    @staticmethod
    def small() -> list[Problem]:
        """Sizes that no tile divides, both layouts, rows that TMA cannot load, and every part of an epilogue."""
        made: list[dict[str, Any]] = [
            {"tokens": 200, "experts": 5, "n": 136, "k": 72, "bias": True, "activation": "gelu", "residual": True},
            {"tokens": 30, "experts": 40, "n": 80, "k": 136, "b_layout": "column", "gate": True, "activation": "silu"},
            {"tokens": 130, "experts": 3, "n": 75, "k": 101, "gate": True, "bias": True, "residual": True},
            {"tokens": 70, "experts": 2, "n": 80, "k": 64, "activation": "squared_relu", "out_dtype": E4M3},
            {"tokens": 1, "experts": 1, "n": 8, "k": 8, "b_layout": "column", "bias": True},
            {"tokens": 90, "experts": 3, "n": 75, "k": 64, "bias": True, "out_dtype": E4M3, "out_scales": "row"},
        ]
        return [GroupedMatmulEpilogue.problem(**values) for values in made]
