"""Named sets of problems of attention's backward pass: the sizes of the forward bench, and layers as models are trained."""

from __future__ import annotations

from collections.abc import Mapping

from tiledsched.kernels.attention.models import BRAIN, MASKED, Values, head_sizes, problems_in
from tiledsched.kernels.attention.options import DTYPES
from tiledsched.kernels.attention.problem import standard
from tiledsched.kernels.attention.suites import ALL_MODELS, MASKS, SEQ_LENS, STANDARD


def _filled(
    *, deterministic: bool = False, dtype: str = "bfloat16", batch_heads: tuple[int, int] | None = None
) -> list[Values]:
    """Problems of every usual length, width and mask, of 16k tokens of 2048 columns or of a given batch and number of heads."""
    batch, heads = batch_heads or (None, None)
    more = {"deterministic": True} if deterministic else {}
    return [
        {**standard(seq_len=seq_len, head_dim=head_dim, dtype=dtype, causal=causal, batch=batch, heads=heads), **more}
        for head_dim in (64, 128)
        for causal in MASKS
        for seq_len in SEQ_LENS
    ]


MODELS: Mapping[str, list[Values]] = {
    # Llama 3.1 8B and 70B, 3.2 1B and 3B
    "llama": problems_in(
        [
            (MASKED, head_sizes(32, 8, 128), (8, 1024, 1024), (4, 2048, 2048), (2, 4096, 4096), (1, 8192, 8192)),
            (MASKED, head_sizes(64, 8, 128), (1, 4096, 4096), (1, 8192, 8192)),
            (MASKED, head_sizes(32, 8, 64), (4, 2048, 2048), (1, 8192, 8192)),
            (MASKED, head_sizes(24, 8, 128), (4, 2048, 2048)),
        ]
    ),
    # Qwen2.5 7B and 14B, Qwen3 0.6B (Qwen3 8B has the heads of Llama 3.1 8B)
    "qwen": problems_in(
        [
            (MASKED, head_sizes(28, 4, 128), (4, 2048, 2048), (1, 8192, 8192)),
            (MASKED, head_sizes(40, 8, 128), (2, 4096, 4096)),
            (MASKED, head_sizes(16, 8, 128), (8, 2048, 2048)),
        ]
    ),
    # Gemma 3 4B, a layer that sees all keys and one with a window, and 27B; Gemma 2 9B caps its scores
    "gemma": [
        *problems_in([(MASKED, head_sizes(8, 4, 256), (2, 2048, 2048), (1, 8192, 8192))]),
        *problems_in([({**MASKED, "window": 1024}, head_sizes(8, 4, 256), (1, 8192, 8192))]),
        *problems_in([(MASKED, head_sizes(32, 16, 128), (1, 4096, 4096))]),
        *problems_in([({**MASKED, "softcap": True}, head_sizes(16, 8, 256), (1, 4096, 4096))]),
    ],
    # Mistral 7B, whose window is half of its context
    "mistral": problems_in([({**MASKED, "window": 4096}, head_sizes(32, 8, 128), (1, 8192, 8192))]),
    # GPT-OSS 20B: a layer that sees all keys and one with a window, with sinks
    "gpt-oss": problems_in(
        [
            ({**MASKED, "sinks": True}, head_sizes(64, 8, 64), (1, 4096, 4096)),
            ({**MASKED, "sinks": True, "window": 128}, head_sizes(64, 8, 64), (1, 4096, 4096)),
        ]
    ),
    # GPT-2 of 124M and 1.5B parameters
    "gpt2": problems_in(
        [(MASKED, head_sizes(12, 12, 64), (16, 1024, 1024)), (MASKED, head_sizes(25, 25, 64), (8, 1024, 1024))]
    ),
    # BERT base and large at 128 and 512 tokens
    "bert": problems_in(
        (BRAIN, sizes, (64, 128, 128), (32, 512, 512)) for sizes in (head_sizes(12, 12, 64), head_sizes(16, 16, 64))
    ),
    # ViT B/16 at 224 pixels (197 tokens) and L/16 at 384 (577)
    "vit": problems_in(
        [(BRAIN, head_sizes(12, 12, 64), (64, 197, 197)), (BRAIN, head_sizes(16, 16, 64), (32, 577, 577))]
    ),
    # Stable Diffusion 3 at 1024 pixels; FLUX.1 at 512 and 1024 pixels; Wan 2.1 14B at 480p, and its 512 words
    "diffusion": problems_in(
        [
            (BRAIN, head_sizes(24, 24, 64), (2, 4250, 4250)),
            (BRAIN, head_sizes(24, 24, 128), (1, 1536, 1536), (1, 4608, 4608)),
            (BRAIN, head_sizes(40, 40, 128), (1, 32760, 32760), (1, 32760, 512)),
        ]
    ),
}
"""Suite -> the layers of its models. Heads, key heads and head dimensions are those of the models' published configurations;
lengths and batches are what such models are trained at.
"""

SUITES: Mapping[str, list[Values]] = {
    # the sizes of forward's suite of this name: 16k tokens of 2048 columns, and one sequence of eight heads
    "attention": [
        problem
        for batch_heads in (None, (1, 8))
        for dtype in reversed(DTYPES)
        for problem in _filled(dtype=dtype, batch_heads=batch_heads)
    ],
    # a short and a long sequence with the usual head dimensions, with and without a causal mask, at 16k tokens
    STANDARD: [each for each in _filled() if each["seq_q"] in (1024, 4096)],
    # the first 24 problems of the suite attention, with sums in a fixed order
    "deterministic": _filled(deterministic=True),
    # 4 and 8 query heads for each key head, as in Llama 3 8B and 70B and in smaller models
    "gqa": [
        standard(
            seq_len=seq_len,
            head_dim=head_dim,
            dtype="bfloat16",
            causal=True,
            batch=batch,
            heads=32 * 128 // head_dim,
            kv_heads=32 * 128 // head_dim // group,
        )
        for group in (4, 8)
        for head_dim in (128, 64)
        for batch, seq_len in ((8, 1024), (2, 4096), (1, 16384))
    ],
    **MODELS,
    ALL_MODELS: [problem for problems in MODELS.values() for problem in problems],
}
"""Suite -> its problems, in the order in which they are tuned and benched."""
