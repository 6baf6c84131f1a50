"""The attention problems of real models, by suite: prefill, chunked prefill and decoding, encoders, image and video.

Heads, key heads and head dimensions are those of the models' published configurations (`config.json` of each, named below);
lengths and batches are what such models are run at. Windows and sinks are left out: a layer is here by its whole mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Values = dict[str, Any]
"""The values of a problem, by field."""
Sizes = Mapping[str, int]
DECODED = ((1, 1, 8192), (8, 1, 4096), (32, 1, 4096), (128, 1, 2048))
"""(batch, queries, keys) of a decoding step."""
ENCODED = ((1, 1024, 1024), (16, 1024, 1024), (1, 8192, 8192))
"""(batch, queries, keys) of a prompt."""


HALF, BRAIN = {"dtype": "float16"}, {"dtype": "bfloat16"}
HALF_MASKED, MASKED = {**HALF, "causal": True}, {**BRAIN, "causal": True}
CHUNK = {**MASKED, "alignment": "bottom_right"}


def head_sizes(heads: int, kv_heads: int, head_dim: int, **more: int) -> Sizes:
    """Numbers of query heads and key heads, and the columns of a head, by the names of the fields."""
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, **more}


def problems_in(table: Iterable[tuple[Any, ...]]) -> list[Values]:
    """The problems of a table whose rows are (options, heads, cases of (batch, queries, keys))."""
    return [
        {"batch": batch, "seq_q": rows, "seq_k": keys, **options, **sizes}
        for options, sizes, *cases in table
        for batch, rows, keys in cases
    ]


def _decoder(*layers: Sizes) -> list[Values]:
    """The problems of each layer: prompts, the last 1024 tokens of a prompt of 8192, and one new token for each sequence."""
    return problems_in(
        row
        for sizes in layers
        for row in ((MASKED, sizes, *ENCODED), (CHUNK, sizes, (1, 1024, 8192)), (BRAIN, sizes, *DECODED))
    )


MODELS: Mapping[str, list[Values]] = {
    # Llama 3.1 8B and 70B, 3.2 1B and 3B
    "llama": _decoder(head_sizes(32, 8, 128), head_sizes(64, 8, 128), head_sizes(32, 8, 64), head_sizes(24, 8, 128)),
    # Qwen2.5 7B, 14B and 32B, Qwen3 0.6B and 14B (Qwen3 8B has the heads of Llama 3.1 8B)
    "qwen": _decoder(head_sizes(28, 4, 128), head_sizes(40, 8, 128), head_sizes(16, 8, 128)),
    # Gemma 3 4B and 12B, whose global layers have heads of 256 columns, and 27B
    "gemma": _decoder(head_sizes(8, 4, 256), head_sizes(16, 8, 256), head_sizes(32, 16, 128)),
    # Mistral Large 2 and Small 3 (Mistral 7B has the heads of Llama 3.1 8B)
    "mistral": _decoder(head_sizes(96, 8, 128), head_sizes(32, 8, 128)),
    # GPT-OSS 20B and 120B: the layers that see all keys
    "gpt-oss": _decoder(head_sizes(64, 8, 64)),
    # Multi-head latent attention of DeepSeek V3 and V2 Lite as it is computed in prefill: 192 columns, values of 128
    "deepseek": problems_in(
        [
            (MASKED, head_sizes(128, 128, 192, value_dim=128), *ENCODED),
            (MASKED, head_sizes(16, 16, 192, value_dim=128), *ENCODED),
        ]
    ),
    # BERT base and large at 128, 384 and 512 tokens
    "bert": problems_in(
        (HALF, sizes, (64, 128, 128), (64, 384, 384), (32, 512, 512), (1, 512, 512))
        for sizes in (head_sizes(12, 12, 64), head_sizes(16, 16, 64))
    ),
    # ViT B/16 at 224 pixels (197 tokens) and L/16 at 384 (577)
    "vit": problems_in(
        [
            (BRAIN, head_sizes(12, 12, 64), (64, 197, 197), (1, 197, 197)),
            (BRAIN, head_sizes(16, 16, 64), (32, 577, 577), (1, 577, 577)),
        ]
    ),
    # Whisper large: the encoder's 1500 frames, and what the decoder reads of them and of itself
    "whisper": problems_in(
        [
            (
                HALF,
                head_sizes(20, 20, 64),
                (1, 1500, 1500),
                (16, 1500, 1500),
                (1, 1, 1500),
                (16, 1, 1500),
                (16, 1, 448),
            ),
            (HALF_MASKED, head_sizes(20, 20, 64), (16, 224, 224)),
        ]
    ),
    # Stable Diffusion XL at 1024 pixels, with guidance: two levels, among themselves and against 77 words
    "sdxl": problems_in(
        [
            (HALF, head_sizes(10, 10, 64), (2, 4096, 4096), (2, 4096, 77)),
            (HALF, head_sizes(20, 20, 64), (2, 1024, 1024), (2, 1024, 77)),
        ]
    ),
    # FLUX.1 at 512 and 1024 pixels: 1024 and 4096 image tokens and 512 words, together
    "flux": problems_in([(BRAIN, head_sizes(24, 24, 128), (1, 1536, 1536), (1, 4608, 4608))]),
    # CogVideoX 5B (17,776 tokens) and Wan 2.1 14B at 480p and 720p (32,760 and 75,600), and its 512 words
    "video": problems_in(
        [
            (BRAIN, head_sizes(48, 48, 64), (2, 17776, 17776)),
            (BRAIN, head_sizes(40, 40, 128), (1, 32760, 32760), (1, 75600, 75600), (1, 32760, 512)),
        ]
    ),
}
"""Suite -> the problems of its models."""
UNSEEN = (
    (HALF_MASKED, head_sizes(12, 12, 64), (64, 77, 77)),  # CLIP's text
    (HALF, head_sizes(16, 16, 80), (32, 257, 257), (1, 4096, 4096)),  # ViT-H/14; Segment Anything
    (BRAIN, head_sizes(24, 24, 64), (8, 1370, 1370), (2, 4250, 4250)),  # DINOv2 giant; Stable Diffusion 3
    (HALF, head_sizes(8, 8, 40), (2, 4096, 4096), (2, 4096, 77)),  # Stable Diffusion 1.5
    (HALF, head_sizes(8, 8, 80), (2, 1024, 77)),
    (HALF, head_sizes(16, 16, 72), (2, 4096, 120)),  # PixArt
    (BRAIN, head_sizes(12, 12, 64), (32, 512, 512)),  # T5
    (HALF, head_sizes(6, 6, 32), (1024, 49, 49)),  # Swin
    (HALF, head_sizes(12, 12, 64), (8, 1500, 1500), (8, 1, 224)),  # Whisper small
    (HALF, head_sizes(16, 16, 64), (8, 749, 749), (4, 300, 300)),  # wav2vec 2.0
    (BRAIN, head_sizes(24, 24, 128), (1, 29440, 29440)),  # HunyuanVideo
    (MASKED, head_sizes(71, 1, 64), (1, 2048, 2048)),  # Falcon 7B
    (MASKED, head_sizes(32, 32, 80), (1, 1900, 1900)),  # Phi-2
    (MASKED, head_sizes(32, 32, 96), (2, 4096, 4096)),  # Phi-3
    (MASKED, head_sizes(16, 16, 256), (4, 700, 700)),  # GPT-J
    (HALF, head_sizes(16, 16, 256), (12, 1, 900)),
    (MASKED, head_sizes(56, 8, 128), (1, 3000, 3000)),  # Yi 34B
    (CHUNK, head_sizes(56, 8, 128), (1, 512, 6000)),
    (BRAIN, head_sizes(56, 8, 128), (5, 1, 3000)),
    (MASKED, head_sizes(36, 4, 128), (6, 1500, 1500)),  # StarCoder2
    (BRAIN, head_sizes(36, 4, 128), (20, 1, 1500)),
    (MASKED, head_sizes(128, 8, 128), (1, 4096, 4096)),  # Llama 3.1 405B
    (BRAIN, head_sizes(128, 8, 128), (1, 1, 20000)),
    (MASKED, head_sizes(40, 40, 96, value_dim=64), (4, 1500, 1500)),  # MiniCPM3
    (BRAIN, head_sizes(32, 8, 128), (4, 4, 2500)),  # four tokens at once, as speculative decoding checks them
    (HALF, head_sizes(16, 16, 64), (128, 257, 257), (6, 1, 410)),  # CLIP L/14; BART, reading its source
    (HALF, head_sizes(16, 16, 72), (16, 729, 729)),  # SigLIP
    (BRAIN, head_sizes(12, 12, 64), (2, 8192, 8192)),  # ModernBERT
    (HALF, head_sizes(8, 8, 128), (16, 1250, 1250)),  # Conformer
    (BRAIN, head_sizes(16, 16, 80), (1, 5476, 5476)),  # Qwen2-VL's pictures
    (BRAIN, head_sizes(24, 24, 128), (1, 44520, 44520)),  # Mochi
    (BRAIN, head_sizes(32, 32, 64), (1, 5400, 128)),  # LTX-Video
    (HALF, head_sizes(10, 10, 64), (2, 2304, 77)),  # SDXL at 768 pixels
    (BRAIN, head_sizes(12, 12, 256), (1, 4352, 4352)),  # AuraFlow
    (MASKED, head_sizes(32, 32, 128), (1, 3300, 3300)),  # Llama 2
    (BRAIN, head_sizes(32, 32, 128), (24, 1, 700)),
    (BRAIN, head_sizes(40, 40, 128), (8, 1, 1600)),  # OLMo 2 13B
    (MASKED, head_sizes(48, 8, 128), (1, 2500, 2500)),  # DBRX
    (BRAIN, head_sizes(48, 8, 128), (3, 1, 7000), (48, 1, 900)),
    (BRAIN, head_sizes(32, 32, 96), (4, 1, 1777)),
    (MASKED, head_sizes(128, 8, 64), (2, 1500, 1500)),  # Falcon 40B
    (BRAIN, head_sizes(128, 8, 64), (16, 1, 2100)),
)
"""(options, heads, cases of (batch, queries, keys)) of models that no tuned suite holds: problems off the table are judged on
these.
"""
