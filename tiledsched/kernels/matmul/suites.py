"""Named sets of matrix products: the projections of language models, squares, and odd sizes."""

from __future__ import annotations

from typing import Any

from tiledsched.kernels.product_schedules import MODELS

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
