"""Named sets of grouped products: the expert layers of mixture-of-experts models."""

from __future__ import annotations

from typing import Any

TOKENS = (64, 1024, 4096)
"""Tokens before each goes to several experts."""
MODELS = {
    "mixtral_8x7b": (8, 2, ((28672, 4096), (4096, 14336))),
    "qwen3_30b": (128, 8, ((1536, 2048), (2048, 768))),
    "deepseek_v3": (32, 1, ((4096, 7168), (7168, 2048))),
    "gpt_oss_20b": (32, 4, ((5760, 2880), (2880, 2880))),
    "llama4_scout": (16, 1, ((16384, 5120), (5120, 8192))),
}
"""Model -> experts, experts of each token, and (n, k) of the two halves of an expert's feed-forward network, gate and up
together; from the models' published configurations. DeepSeek-V3's 256 experts, eight for each token, are spread over eight GPUs.
"""

SUITES: dict[str, list[dict[str, Any]]] = {
    name: [
        {"tokens": tokens * chosen, "experts": experts, "n": n, "k": k, "b_layout": "column"}
        for n, k in shapes
        for tokens in TOKENS
    ]
    for name, (experts, chosen, shapes) in MODELS.items()
}
"""Tokens times weights that lie as `torch.nn.Linear` keeps them: `[experts, n, k]`, which is B column-major."""
