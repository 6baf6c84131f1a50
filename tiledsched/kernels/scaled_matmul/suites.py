"""Named sets of products of 8-bit floats: the projections of language models."""

from __future__ import annotations

from typing import Any

from tiledsched.kernels.product_schedules import MODELS

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
"""Tokens with a scale each times weights with a scale for each output, and one scale for each operand."""
