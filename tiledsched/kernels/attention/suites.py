"""Named sets of problems: what to tune and bench when the question is how good the kernel is, not one shape.

docs/bench.md lists them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from tiledsched.kernels.attention.models import (
    BRAIN,
    CHUNK,
    HALF,
    HALF_MASKED,
    MASKED,
    MODELS,
    UNSEEN,
    Values,
    head_sizes,
    problems_in,
)
from tiledsched.kernels.attention.options import DTYPES
from tiledsched.kernels.attention.problem import standard

SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = (False, True)
ALL_MODELS = "models"
"""The suite that others make up."""
STANDARD = "standard"
"""The suite that is meant where no problem is named."""
LLAMA = {"head_dim": 128, "dtype": "bfloat16", "heads": 32, "kv_heads": 8}
"""The layers of Llama 3 8B."""
BERT = {"head_dim": 64, "dtype": "float16", "heads": 12, "kv_heads": 12}
"""The layers of BERT base."""


def _serving() -> list[Values]:
    """Problems of inference servers, for `sdpa_varlen` and `sdpa_paged`: prompts and texts end to end, and keys in pages.

    Llama 3 8B (32 query heads over 8) and Qwen2.5 7B (28 over 4) in bfloat16, and BERT base; 16 is vLLM's page on a GPU, and 64
    FlashMLA's.
    """
    llama = {**LLAMA, "causal": True}
    prompts = [dict(seq_q=tokens, seq_k=tokens, packed=8, **llama) for tokens in (8192, 32768)]
    qwen = dict(seq_q=16384, seq_k=16384, packed=8, **{**llama, "heads": 28, "kv_heads": 4})
    texts = dict(seq_q=8192, seq_k=8192, packed=32, **BERT)
    paged = {**llama, "alignment": "bottom_right", "lengths": True}
    tokens = [
        dict(seq_q=1, seq_k=4096, batch=batch, page=page, **paged)
        for batch, page in ((8, 16), (32, 16), (32, 64), (128, 16))
    ]
    return [*prompts, qwen, texts, *tokens, dict(seq_q=1024, seq_k=8192, page=16, **paged)]


def _masks() -> list[Values]:
    """Windows, sinks and softcaps of real models, and padded batches. All are bfloat16 except BERT.

    Windows of Mistral 7B, Gemma 3 (4B and 27B) and GPT-OSS, with its sinks; the softcap of Gemma 2 9B; prompts padded at
    the right and, as transformers generates, at the left; a token after the latter; and texts.
    """
    gemma = {"head_dim": 256, "dtype": "bfloat16", "heads": 16, "kv_heads": 8, "causal": True}
    oss = {"head_dim": 64, "dtype": "bfloat16", "heads": 64, "kv_heads": 8, "causal": True, "sinks": True}
    prompt, padded = {"seq_q": 8192, "seq_k": 8192}, {"seq_q": 1024, "seq_k": 1024, "batch": 16}
    return [
        dict(**prompt, **LLAMA, causal=True, window=4096),
        dict(**prompt, **{**gemma, "heads": 8, "kv_heads": 4}, window=1024),
        dict(**prompt, **{**LLAMA, "kv_heads": 16}, causal=True, window=1024),
        dict(**prompt, **oss, window=128),
        dict(**prompt, **oss),
        dict(seq_q=4096, seq_k=4096, **gemma, softcap=True),
        dict(**prompt, **gemma, softcap=True, window=4096),
        dict(**padded, **LLAMA, causal=True, lengths=True),
        dict(**padded, **LLAMA, causal=True, starts=True),
        dict(seq_q=1, seq_k=4096, batch=16, **LLAMA, starts=True),
        {
            "seq_q": 384,
            "seq_k": 384,
            "batch": 64,
            "head_dim": 64,
            "dtype": "float16",
            "heads": 12,
            "kv_heads": 12,
            "lengths": True,
        },
    ]


COVERAGE = (
    (
        HALF,
        head_sizes(16, 16, 64),
        (2, 96, 96),
        (64, 96, 96),
        (2, 160, 160),
        (64, 160, 160),
        (2, 256, 256),
        (64, 256, 256),
        (2, 320, 320),
        (64, 320, 320),
        (2, 640, 640),
        (64, 640, 640),
        (2, 1280, 1280),
        (64, 1280, 1280),
    ),
    (HALF, head_sizes(8, 8, 32), (256, 64, 64), (64, 256, 256), (2, 2048, 2048)),
    (HALF, head_sizes(12, 12, 40), (32, 256, 256)),
    (HALF, head_sizes(8, 8, 40), (4, 2048, 2048), (2, 2048, 100)),
    (HALF, head_sizes(16, 16, 72), (2, 4096, 256)),
    (HALF, head_sizes(16, 16, 80), (16, 256, 256), (2, 2048, 100)),
    (BRAIN, head_sizes(32, 32, 64), (1, 12288, 12288), (1, 24576, 24576)),
    (
        HALF,
        head_sizes(16, 16, 64),
        (2, 1024, 100),
        (2, 1024, 256),
        (2, 4096, 64),
        (2, 4096, 128),
        (2, 4096, 256),
        (1, 16384, 128),
    ),
    (BRAIN, head_sizes(32, 32, 128), (1, 4096, 128), (1, 4096, 512), (1, 16384, 256), (1, 16384, 512)),
    (
        BRAIN,
        head_sizes(32, 32, 128),
        (32, 256, 256),
        (32, 640, 640),
        (1, 640, 640),
        (1, 3072, 3072),
        (1, 24576, 24576),
        (1, 49152, 49152),
    ),
    (MASKED, head_sizes(48, 8, 128), (1, 1024, 1024)),
    (MASKED, head_sizes(80, 8, 128), (1, 1024, 1024)),
    (MASKED, head_sizes(128, 8, 128), (1, 1024, 1024)),
    (MASKED, head_sizes(64, 8, 128), (1, 512, 512), (1, 2048, 2048)),
    (MASKED, head_sizes(48, 8, 64), (1, 1024, 1024), (1, 2048, 2048)),
    (MASKED, head_sizes(32, 32, 80), (4, 512, 512), (1, 2048, 2048)),
    (MASKED, head_sizes(32, 32, 96), (1, 1024, 1024)),
    (MASKED, head_sizes(32, 32, 192, value_dim=128), (4, 2048, 2048)),
    (MASKED, head_sizes(64, 64, 192, value_dim=128), (1, 2048, 2048)),
    (MASKED, head_sizes(64, 64, 192, value_dim=128), (8, 1024, 1024)),
    (MASKED, head_sizes(16, 8, 256), (4, 2048, 2048), (8, 512, 512)),
    (CHUNK, head_sizes(16, 8, 256), (1, 512, 4096)),
    (MASKED, head_sizes(128, 128, 192, value_dim=128), (1, 768, 768)),
    (MASKED, head_sizes(96, 96, 192, value_dim=128), (1, 1536, 1536)),
    (MASKED, head_sizes(32, 32, 96, value_dim=64), (2, 1024, 1024), (4, 2048, 2048)),
    (HALF, head_sizes(16, 16, 64), (1, 1, 512), (8, 1, 1024), (32, 1, 512), (1, 1, 1024), (2, 1, 2048), (16, 1, 2048)),
    (HALF, head_sizes(32, 32, 128), (4, 1, 1024), (1, 1, 768)),
    (BRAIN, head_sizes(32, 4, 128), (24, 1, 1024), (4, 1, 2048)),
    (HALF, head_sizes(32, 32, 80), (4, 1, 1024)),
    (HALF, head_sizes(32, 32, 96), (1, 1, 4096)),
    (HALF, head_sizes(32, 32, 128), (1, 1, 2048), (16, 1, 1024)),
    (BRAIN, head_sizes(8, 4, 256), (2, 1, 4096), (16, 1, 2048)),
    # Lengths that end within a tile: nearly all that a text takes while it grows, and most of what is no text.
    (HALF, head_sizes(16, 16, 64), (16, 1, 1000), (32, 1, 300), (8, 1, 600), (2, 1, 1300)),
    (BRAIN, head_sizes(32, 8, 64), (8, 1, 3000), (32, 1, 1500)),
    (BRAIN, head_sizes(32, 8, 128), (1, 1, 5000), (4, 1, 3000), (16, 1, 1500), (64, 1, 1100)),
    (BRAIN, head_sizes(32, 4, 128), (8, 1, 3500), (2, 1, 1000)),
    (HALF, head_sizes(32, 32, 128), (2, 1, 900), (16, 1, 1500)),
    (BRAIN, head_sizes(8, 4, 256), (4, 1, 3000)),
    (HALF, head_sizes(16, 16, 64), (2, 4096, 100), (1, 16384, 90)),
    (BRAIN, head_sizes(32, 32, 128), (1, 12000, 12000), (1, 30000, 30000)),
    (BRAIN, head_sizes(32, 32, 64), (1, 20000, 20000)),
    (MASKED, head_sizes(32, 8, 128), (2, 1500, 1500), (1, 5000, 5000)),
    (MASKED, head_sizes(16, 8, 256), (2, 1500, 1500)),
    (HALF, head_sizes(16, 16, 72), (8, 700, 700), (1, 1000, 1000)),
    (HALF, head_sizes(16, 16, 80), (1, 6000, 6000), (4, 1300, 1300), (64, 210, 210)),
    (MASKED, head_sizes(32, 32, 80), (1, 5000, 5000), (8, 700, 700)),
    (MASKED, head_sizes(32, 32, 96), (2, 3000, 3000), (8, 700, 700)),
    (HALF, head_sizes(16, 16, 96), (4, 1400, 1400)),
    (HALF, head_sizes(8, 8, 160), (2, 256, 256), (2, 256, 100)),
    (HALF, head_sizes(16, 16, 128), (1, 5000, 5000)),
    (BRAIN, head_sizes(12, 12, 256), (8, 1100, 1100)),
    (MASKED, head_sizes(8, 4, 256), (2, 700, 700), (1, 11000, 11000)),
    (HALF, head_sizes(16, 16, 64), (16, 900, 900), (2, 700, 700), (1, 3000, 3000)),
    (MASKED, head_sizes(32, 8, 128), (1, 700, 700), (8, 1100, 1100)),
    (MASKED, head_sizes(32, 8, 64), (4, 700, 700), (1, 6000, 6000)),
    (CHUNK, head_sizes(32, 8, 128), (1, 400, 3000), (1, 2000, 9000)),
    (CHUNK, head_sizes(32, 4, 128), (4, 100, 1500)),
    (CHUNK, head_sizes(32, 8, 64), (1, 600, 5000)),
    (BRAIN, head_sizes(32, 8, 128), (1, 5, 3000), (16, 4, 1500)),
    (BRAIN, head_sizes(32, 32, 80), (8, 1, 1500), (1, 1, 3000)),
    (BRAIN, head_sizes(32, 32, 96), (8, 1, 2500)),
    # Few keys in wide heads, and many short texts in the widest.
    (BRAIN, head_sizes(24, 24, 128), (2, 2048, 77), (1, 9000, 77)),
    (BRAIN, head_sizes(32, 32, 128), (1, 8192, 40)),
    (BRAIN, head_sizes(16, 16, 128), (2, 1024, 200)),
    (HALF, head_sizes(16, 16, 96), (2, 4096, 100)),
    (HALF, head_sizes(16, 16, 80), (1, 4096, 77)),
    (HALF_MASKED, head_sizes(32, 8, 256), (32, 256, 256)),
    # Chunks, texts and encoders in heads of other widths than 64 and 128, whose rivals have programs of their own.
    (BRAIN, head_sizes(12, 12, 96), (1, 12000, 12000), (4, 4500, 4500), (16, 400, 400)),
    (MASKED, head_sizes(32, 8, 96), (1, 9000, 9000)),
    (CHUNK, head_sizes(32, 8, 96), (1, 300, 700), (1, 1500, 9000)),
    (MASKED, head_sizes(16, 8, 256), (1, 5000, 5000), (16, 300, 300)),
    (CHUNK, head_sizes(32, 8, 256), (1, 256, 640), (1, 1000, 6000)),
    (HALF, head_sizes(16, 16, 256), (2, 3000, 3000), (4, 500, 64)),
    (MASKED, head_sizes(32, 8, 72), (2, 2000, 2000)),
    (CHUNK, head_sizes(32, 8, 72), (1, 700, 4000)),
    (CHUNK, head_sizes(32, 8, 80), (1, 128, 6144)),
    (CHUNK, head_sizes(8, 8, 80), (1, 64, 1280)),
    (HALF, head_sizes(16, 16, 128), (16, 1200, 1200), (2, 7000, 7000)),
    (BRAIN, head_sizes(16, 16, 128), (2, 1300, 1300), (8, 180, 180)),
    (MASKED, head_sizes(32, 8, 128), (32, 200, 200)),
    (CHUNK, head_sizes(28, 4, 128), (1, 1000, 2000), (1, 200, 800)),
    (HALF, head_sizes(16, 16, 64), (8, 300, 300), (8, 1700, 1700)),
    (BRAIN, head_sizes(40, 8, 64), (16, 1, 300)),
    (BRAIN, head_sizes(64, 8, 128), (4, 1, 2500), (6, 1, 3500)),
    (BRAIN, head_sizes(40, 8, 128), (48, 1, 1100)),
    (BRAIN, head_sizes(32, 16, 128), (1, 1, 6000)),
)
"""(options, heads, cases of (batch, queries, keys)) of sizes between those of the models.

With them, every problem has a measured problem near it: few keys, keys of another length than the queries, heads that fill the
GPU in part, and wide heads.
"""


def drawn(seed: int = 23) -> list[Values]:
    """40 problems drawn at random: prompts, chunks of them, single tokens, encoders and reading another text, eight each.

    Lengths and batches are uniform in their logarithm. Nothing is tuned or fitted to those of the seed of the suite: a policy is
    judged on these, and chosen on others.
    """
    chance = random.Random(seed)

    def about(low: int, high: int) -> int:
        return round(math.exp(chance.uniform(math.log(low), math.log(high))))

    def draw(task: str) -> Values:
        head_dim = chance.choice((64, 64, 72, 80, 96, 128, 128, 128, 128, 256))
        dtype = chance.choice(DTYPES)
        kv_heads, group = chance.choice((4, 8, 8, 12, 16)), chance.choice((1, 1, 2, 3, 4, 5, 7, 8))
        if task in ("encoder", "context"):
            kv_heads, group = chance.choice((8, 12, 16, 20, 24, 32)), 1
        sizes = {"head_dim": head_dim, "dtype": dtype, "heads": kv_heads * group, "kv_heads": kv_heads}
        if task == "token":
            keys = about(256, 16384)
            return dict(seq_q=1, seq_k=keys, batch=about(1, min(128, 2**18 // keys)), **sizes)
        rows = about(64, 16384)
        batch = about(1, min(64, 2**15 // rows))
        if task == "chunk":
            rows = about(64, 2048)
            return dict(seq_q=rows, seq_k=rows + about(256, 16384), causal=True, alignment="bottom_right", **sizes)
        keys = about(32, 512) if task == "context" else rows
        return dict(seq_q=rows, seq_k=keys, batch=batch, causal=task == "prompt", **sizes)

    return [draw(task) for task in ("prompt", "chunk", "token", "encoder", "context") for _ in range(8)]


SUITES: Mapping[str, list[Values]] = {
    # 16k tokens of 2048 columns, and one sequence of eight heads, which leaves most of a large GPU idle when short
    "attention": [
        standard(seq_len=seq_len, head_dim=head_dim, dtype=dtype, causal=causal, batch=batch, heads=heads)
        for batch, heads in ((None, None), (1, 8))
        for dtype in DTYPES
        for head_dim in (64, 128)
        for causal in MASKS
        for seq_len in SEQ_LENS
    ],
    # a short and a long sequence with the usual head dimensions, with and without a causal mask, at 16k tokens
    STANDARD: [
        standard(seq_len=seq_len, head_dim=head_dim, causal=causal)
        for head_dim in (64, 128)
        for causal in MASKS
        for seq_len in (1024, 4096)
    ],
    # 32 query heads over 8, 4 and 1 key heads, as in Llama 3, in smaller models of its family, and multi-query
    "gqa": [
        standard(seq_len=seq_len, head_dim=128, dtype="bfloat16", causal=True, batch=batch, heads=32, kv_heads=kv_heads)
        for kv_heads in (8, 4, 1)
        for batch, seq_len in ((8, 1024), (4, 4096), (1, 8192), (1, 16384))
    ],
    # one new token, or eight, against a long cache: 32 query heads over 8 key heads and over 32
    "decode": [
        {**LLAMA, "seq_q": seq_q, "seq_k": seq_k, "batch": batch, "kv_heads": kv_heads}
        for kv_heads in (8, 32)
        for seq_q in (1, 8)
        for batch, seq_k in ((1, 4096), (1, 32768), (16, 4096), (64, 4096))
    ],
    # head dimensions of models that are no power of two, and the largest one served
    "odd-head-dims": [
        standard(seq_len=seq_len, head_dim=head_dim, causal=causal, batch=4, heads=16)
        for head_dim in (40, 72, 80, 96, 112, 160, 192, 256)
        for causal in MASKS
        for seq_len in (1024, 4096)
    ],
    "masks": _masks(),
    "serving": _serving(),
    **MODELS,
    ALL_MODELS: [problem for problems in MODELS.values() for problem in problems],
    "coverage": problems_in(COVERAGE),
    "unseen": problems_in(UNSEEN),
    "drawn": drawn(),
}
"""Suite -> its problems, in the order in which they are tuned and benched."""
