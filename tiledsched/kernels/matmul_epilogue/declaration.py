"""The declaration of matrix products with an epilogue: that of the plain product, with the fields of `kernels.epilogues`.

What runs on the GPU is in `tiles` beside it; cuTile is imported where a launch is asked for.
"""

from __future__ import annotations

from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.epilogues import (
    CONSTRAINTS,
    DERIVED,
    E4M3,
    WAITS,
    Epilogue,
    EpilogueCost,
    EpilogueSimilarity,
    arrays_of,
)
from tiledsched.kernels.matmul.declaration import TOKENS, Matmul, MatmulSimilarity, Values
from tiledsched.kernels.product_schedules import Launch, ProductCost

SWIGLU, ADDED, BIASED = {"gate": True, "activation": "silu"}, {"residual": True}, {"bias": True}
MODELS: dict[str, tuple[tuple[int, int, Values], ...]] = {
    "llama_8b": ((14336, 4096, SWIGLU), (4096, 14336, ADDED), (4096, 4096, ADDED)),
    "llama_70b": ((28672, 8192, SWIGLU), (8192, 28672, ADDED), (8192, 8192, ADDED)),
    "qwen3_8b": ((12288, 4096, SWIGLU), (4096, 12288, ADDED), (4096, 4096, ADDED)),
    "qwen2_7b": ((4608, 3584, BIASED), (18944, 3584, SWIGLU), (3584, 18944, ADDED)),
    "gpt2_xl": ((6400, 1600, BIASED | {"activation": "gelu_tanh"}), (1600, 6400, BIASED | ADDED)),
}
"""Model -> (n, k, epilogue) of its linear layers, from published configurations (Llama 3.1, Qwen 3 and 2.5, GPT-2)."""


class MatmulEpilogueCost(EpilogueCost, ProductCost):
    """The time of a product, or of two."""


class MatmulEpilogueSimilarity(EpilogueSimilarity, MatmulSimilarity):
    """How products with epilogues compare."""


class MatmulEpilogue(Epilogue, Matmul, Kernel):  # type: ignore[misc]  # its reference has more arrays
    """C `[m, n]` = quantised(activation(A @ B + Bias) + Residual); with Gate activation(A @ Gate) * (A @ B + Bias) in its place.

    A is `[m, k]`, B and Gate are `[k, n]`. Each part but the product may be missing. All is computed in float32 and rounded once.
    """

    name = "matmul_epilogue"
    product = Matmul
    space = timed_with = Matmul.name
    fusable = True
    derived = Matmul.derived | DERIVED
    PaddedGate = ts.workspace(lambda p, s: (p.padded_k, p.padded_n), dtype="dtype", aligned=True)

    knobs = Matmul.knobs | {
        "TILE_N": ts.knob((128, 256, 64, 32), about="columns of a work tile", weight=1.0),
        "TMA_STORE": ts.knob((False, True), about="whether the TMA unit stores the result", weight=0.4),
    }
    plain = Matmul.plain | {"TMA_STORE": False}
    constraints = (
        Matmul.constraints
        | CONSTRAINTS
        | {
            "not TMA_STORE or whole_rows": "the TMA unit stores rows that are whole groups of 16 elements",
            "not TMA_STORE or SPLIT_K <= 1": "a sum behind shares has tiles of its own",
            "compute_capability != 90 or not PERSISTENT or (REST_N == 0 and TMA_STORE == (TILE_N < 256))": WAITS,
            "compute_capability != 90 or not PERSISTENT or TILE_N >= 256 or num_ctas == 1": WAITS,
            "compute_capability != 90 or not PERSISTENT or gate or not quantised": WAITS,
            "not gate or TILE_K > 32 or shared_memory_bytes <= 166912": "short steps are for little shared memory",
            "not gate or (REST_N == 0 and SPLIT_K == 1)": "work tiles of two products have one part and one share",
        }
    )
    suites = {
        name: [{"m": m, "n": n, "k": k, "b_layout": "column", **epilogue} for n, k, epilogue in shapes for m in TOKENS]
        for name, shapes in MODELS.items()
    }
    cost = MatmulEpilogueCost()
    similarity = MatmulEpilogueSimilarity()

    @staticmethod
    def launches(p: Problem, s: Schedule, device: Any) -> list[Launch]:
        """Those of the plain product, the last of which finishes the sums."""
        from tiledsched.kernels.epilogue_tiles import entry_of
        from tiledsched.kernels.matmul_epilogue import tiles

        *before, (last, grid) = Matmul.launches(p, s, device)
        name = last.__name__.replace("matmul", "matmul_epilogue").replace("combine", "combine_epilogue")
        kernel: Any = p.declaration
        gates = [(tiles.pad_gate, before[-1][1])] if p.gate and s["PAD"] else []  # it lies as B does
        return [*before, *gates, (entry_of(tiles, name, kernel, p.activation, arrays_of(p)), grid)]

    @staticmethod
    def small() -> list[Problem]:
        """Sizes that no tile divides, both layouts, rows that TMA cannot load, and every part of an epilogue."""
        small = {"m": 70, "n": 150, "k": 100, "b_layout": "column"}
        made: list[Values] = [
            {"m": 150, "n": 136, "k": 104, "bias": True, "activation": "gelu", "residual": True},
            small | {"gate": True, "activation": "silu"},
            small | {"gate": True, "activation": "squared_relu", "bias": True, "residual": True, "b_layout": "row"},
            {"m": 130, "n": 72, "k": 200, "a_layout": "column", "activation": "gelu_tanh", "out_dtype": E4M3},
            {"m": 3, "n": 5, "k": 1, "activation": "relu", "residual": True, "bias": True},
            {"m": 1, "n": 64, "k": 72, "bias": True, "dtype": "float16", "out_dtype": "float16"},
            {"m": 65, "n": 129, "k": 64, "gate": True, "residual": True, "bias": True, "out_dtype": E4M3},
            {"m": 65, "n": 80, "k": 64, "bias": True, "activation": "silu", "out_dtype": E4M3, "out_scales": "row"},
        ]
        return [MatmulEpilogue.problem(**values) for values in made]
