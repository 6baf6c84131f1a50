"""The declaration of products of 8-bit floats with an epilogue: that of the plain product, with fields of `kernels.epilogues`.

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
    ROW_SCALES,
    WAITS,
    Epilogue,
    EpilogueCost,
    EpilogueSimilarity,
    arrays_of,
)
from tiledsched.kernels.scaled_matmul.declaration import (
    SHAPES,
    TOKENS,
    ScaledMatmul,
    ScaledMatmulCost,
    ScaledMatmulSimilarity,
    scale_shapes,
)

LAYERS: tuple[dict[str, Any], ...] = ({"residual": True}, {"gate": True, "activation": "silu"}, {"residual": True})
"""The epilogues of a model's layers behind the first: the attention's output, gate and up together, and down."""


class ScaledMatmulEpilogueCost(EpilogueCost, ScaledMatmulCost):
    """The time of a product of 8-bit floats, or of two."""

    lender = "cublas_scaled"


class ScaledMatmulEpilogueSimilarity(EpilogueSimilarity, ScaledMatmulSimilarity):
    """How products of 8-bit floats with epilogues compare."""


class ScaledMatmulEpilogue(Epilogue, ScaledMatmul, Kernel):  # type: ignore[misc]  # its reference has more arrays
    """C `[m, n]` = quantised(activation(S) + Residual), or quantised(activation(G) * S + Residual) with Gate, for the scaled
    products S = (A @ B) * scales + Bias and G = (A @ Gate) * scales of 8-bit floats.

    Scales are those of :class:`ScaledMatmul`; ScaleGate is to Gate what ScaleB is to B. Each part but the product may be missing.
    All is computed in float32 and rounded once. Bias and Residual have the type of C; bfloat16 where C has 8 bits.
    """

    name = "scaled_matmul_epilogue"
    product = ScaledMatmul
    space = timed_with = ScaledMatmul.name
    out_dtype = ts.dtype("bfloat16", "float16", "float32", E4M3)
    derived = (
        ScaledMatmul.derived | DERIVED | {"added_dtype": lambda p: "bfloat16" if p.out_dtype == E4M3 else p.out_dtype}
    )

    Bias = ts.array("n", dtype="added_dtype", when="bias")
    Gate = ts.array("k n", layout="column", when="gate")
    Residual = ts.array("m n", dtype="added_dtype", when="residual")
    ScaleGate = ts.array(lambda p: scale_shapes(p)[1], dtype="float32", when="gate")

    requires = ScaledMatmul.requires | ROW_SCALES
    knobs = ScaledMatmul.knobs | {
        "TILE_N": ts.knob((128, 256, 64), about="columns of a work tile", weight=1.0),
        "PERSISTENT": ts.knob((False, True), about="whether a block takes several work tiles", weight=0.4),
    }
    constraints = (
        ScaledMatmul.constraints
        | CONSTRAINTS
        | {
            "compute_capability != 90 or not PERSISTENT or SWAP or not (gate or (residual and not blocks))": (
                f"{WAITS}, or spills"
            ),
            "not gate or fast_accum or 2 * TILE_M * TILE_N <= 2048 * num_worker_warps * num_ctas": (
                "of sums in two places the compiler (13.5 on sm_90) spills some, or loads one step at a time"
            ),
            "not gate or (REST_N == 0 and SPLIT_K == 1)": "work tiles of two products have one part and one share",
        }
    )
    exploring = {rule.replace("TILE_N", "(1 + gate) * TILE_N"): why for rule, why in ScaledMatmul.exploring.items()}
    suites = {
        name: [
            {"m": m, "n": n // (1 + ("gate" in more)), "k": k, "scales": "row", "fast_accum": True, **more}
            for (n, k), more in zip(shapes[1:], LAYERS, strict=True)
            for m in TOKENS
        ]
        for name, shapes in SHAPES.items()
    }
    cost = ScaledMatmulEpilogueCost()
    similarity = ScaledMatmulEpilogueSimilarity()

    @staticmethod
    def launches(p: Problem, s: Schedule, device: Any) -> list[Any]:
        """Those of the plain product, the last of which finishes the sums."""
        from tiledsched.kernels.epilogue_tiles import entry_of
        from tiledsched.kernels.scaled_matmul_epilogue import tiles

        *before, (last, grid) = ScaledMatmul.launches(p, s, device)
        kernel: Any = p.declaration
        return [*before, (entry_of(tiles, f"{last.__name__}_epilogue", kernel, p.activation, arrays_of(p)), grid)]

    @classmethod
    def inputs(cls, xp: Any, rng: Any, p: Any) -> Mapping[str, Any]:
        """Scales that differ by up to four from one row to the next, with which sums are of the size of 1, where activations are
        curved; and a scale with which few results are cut."""
        found = {
            name: (2.0 ** rng.integers(-1, 2, size=scale_shapes(p)[name != "ScaleA"])).astype("float32")
            for name in ("ScaleA", "ScaleB", "ScaleGate")
        }
        return found | {"ScaleA": found["ScaleA"] * p.k**-0.5, "Scale": super().inputs(xp, rng, p)["Scale"]}

    @staticmethod
    def small() -> list[Problem]:
        """Sizes that no tile divides, all kinds of scales, sums and outputs, and every part of an epilogue."""
        made: list[dict[str, Any]] = [
            {"m": 150, "n": 144, "k": 304, "bias": True, "activation": "gelu", "residual": True},
            {"m": 70, "n": 144, "k": 160, "gate": True, "activation": "silu", "fast_accum": True},
            {"m": 33, "n": 80, "k": 144, "scales": "tensor", "gate": True, "residual": True, "out_dtype": "float32"},
            {"m": 70, "n": 272, "k": 304, "scales": "block", "gate": True, "bias": True, "out_dtype": E4M3},
            {"m": 2, "n": 16, "k": 16, "scales": "block", "residual": True, "out_dtype": "float16"},
            {"m": 65, "n": 80, "k": 64, "activation": "relu", "out_dtype": E4M3, "out_scales": "row"},
            {"m": 1, "n": 16, "k": 16, "dtype": "float8_e5m2", "activation": "gelu_tanh", "bias": True},
        ]
        return [ScaledMatmulEpilogue.problem(**values) for values in made]
