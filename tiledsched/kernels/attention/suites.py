"""Named sets of problems: what to tune and bench when the question is how good the kernel is, not one shape."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.kernels.attention.models import MODELS, all_models, unseen
from tiledsched.kernels.attention.problem import DTYPES, standard

SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
MASKS = (False, True)
ALL_MODELS = "models"
"""The suite that others make up."""
STANDARD = "standard"
"""The suite that is meant where no problem is named."""
Make = Callable[..., Problem]


def _attention(make: Make) -> list[Problem]:
    """16k tokens of 2048 columns, and one sequence of eight heads, which leaves most of a large GPU idle when short."""
    return [
        standard(make, seq_len=seq_len, head_dim=head_dim, dtype=dtype, causal=causal, batch=batch, heads=heads)
        for batch, heads in ((None, None), (1, 8))
        for dtype in DTYPES
        for head_dim in (64, 128)
        for causal in MASKS
        for seq_len in SEQ_LENS
    ]


def _standard(make: Make) -> list[Problem]:
    """A short and a long sequence with the usual head dimensions, with and without a causal mask, at 16k tokens."""
    return [
        standard(make, seq_len=seq_len, head_dim=head_dim, causal=causal)
        for head_dim in (64, 128)
        for causal in MASKS
        for seq_len in (1024, 4096)
    ]


def _gqa(make: Make) -> list[Problem]:
    """32 query heads over 8, 4 and 1 key heads, as in Llama 3, in smaller models of its family, and multi-query."""
    return [
        standard(
            make, seq_len=seq_len, head_dim=128, dtype="bfloat16", causal=True, batch=batch, heads=32, kv_heads=kv_heads
        )
        for kv_heads in (8, 4, 1)
        for batch, seq_len in ((8, 1024), (4, 4096), (1, 8192), (1, 16384))
    ]


def _decode(make: Make) -> list[Problem]:
    """One new token, or eight, against a long cache: 32 query heads over 8 key heads and over 32."""
    return [
        make(seq_q=seq_q, seq_k=seq_k, head_dim=128, dtype="bfloat16", batch=batch, heads=32, kv_heads=kv_heads)
        for kv_heads in (8, 32)
        for seq_q in (1, 8)
        for batch, seq_k in ((1, 4096), (1, 32768), (16, 4096), (64, 4096))
    ]


def _odd_head_dims(make: Make) -> list[Problem]:
    """Head dimensions of models that are no power of two, and the largest one served."""
    return [
        standard(make, seq_len=seq_len, head_dim=head_dim, causal=causal, batch=4, heads=16)
        for head_dim in (40, 72, 80, 96, 112, 160, 192, 256)
        for causal in MASKS
        for seq_len in (1024, 4096)
    ]


def _serving(make: Make) -> list[Problem]:
    """What servers ask for, as `sdpa_varlen` and `sdpa_paged` pose it: prompts and texts end to end, and keys in pages.

    Llama 3 8B (32 query heads over 8) and Qwen2.5 7B (28 over 4) in bfloat16, and BERT base; 16 is vLLM's page on a GPU, and 64
    FlashMLA's.
    """
    llama = {"head_dim": 128, "dtype": "bfloat16", "causal": True, "heads": 32, "kv_heads": 8}
    prompts = [make(seq_q=tokens, seq_k=tokens, packed=8, **llama) for tokens in (8192, 32768)]
    qwen = make(seq_q=16384, seq_k=16384, packed=8, **{**llama, "heads": 28, "kv_heads": 4})
    texts = make(seq_q=8192, seq_k=8192, packed=32, head_dim=64, dtype="float16", heads=12, kv_heads=12)
    paged = {**llama, "alignment": "bottom_right", "lengths": True}
    tokens = [
        make(seq_q=1, seq_k=4096, batch=batch, page=page, **paged)
        for batch, page in ((8, 16), (32, 16), (32, 64), (128, 16))
    ]
    return [*prompts, qwen, texts, *tokens, make(seq_q=1024, seq_k=8192, page=16, **paged)]


def _masks(make: Make) -> list[Problem]:
    """What layers of real models hide, add or cap, and padded batches; bfloat16 but BERT.

    Windows of Mistral 7B, Gemma 3 (4B and 27B) and GPT-OSS, with its sinks; the softcap of Gemma 2 9B; prompts padded at
    the right and, as transformers generates, at the left; a token after the latter; and texts.
    """
    llama = {"head_dim": 128, "dtype": "bfloat16", "heads": 32, "kv_heads": 8}
    gemma = {"head_dim": 256, "dtype": "bfloat16", "heads": 16, "kv_heads": 8, "causal": True}
    oss = {"head_dim": 64, "dtype": "bfloat16", "heads": 64, "kv_heads": 8, "causal": True, "sinks": True}
    prompt, padded = {"seq_q": 8192, "seq_k": 8192}, {"seq_q": 1024, "seq_k": 1024, "batch": 16}
    return [
        make(**prompt, **llama, causal=True, window=4096),
        make(**prompt, **{**gemma, "heads": 8, "kv_heads": 4}, window=1024),
        make(**prompt, **{**llama, "kv_heads": 16}, causal=True, window=1024),
        make(**prompt, **oss, window=128),
        make(**prompt, **oss),
        make(seq_q=4096, seq_k=4096, **gemma, softcap=True),
        make(**prompt, **gemma, softcap=True, window=4096),
        make(**padded, **llama, causal=True, lengths=True),
        make(**padded, **llama, causal=True, starts=True),
        make(seq_q=1, seq_k=4096, batch=16, **llama, starts=True),
        make(seq_q=384, seq_k=384, batch=64, head_dim=64, dtype="float16", heads=12, kv_heads=12, lengths=True),
    ]


def _coverage(make: Make) -> list[Problem]:
    """Sizes between those of the models, so that whatever is asked has a measured problem near it: few keys, keys of another
    length than the queries, heads that fill the GPU in part, and wide heads."""
    found: list[Problem] = []

    def add(cases: Iterable[tuple[int, int, int]], heads: int, head_dim: int, kv_heads: int = 0, **more: Any) -> None:
        found.extend(
            make(
                batch=batch, seq_q=rows, seq_k=keys, heads=heads, kv_heads=kv_heads or heads, head_dim=head_dim, **more
            )
            for batch, rows, keys in cases
        )

    half: dict[str, Any] = {"dtype": "float16"}
    brain: dict[str, Any] = {"dtype": "bfloat16"}
    lengths = (96, 160, 256, 320, 640, 1280)
    add(((batch, length, length) for length in lengths for batch in (2, 64)), 16, 64, **half)
    add(((256, 64, 64), (64, 256, 256), (2, 2048, 2048)), 8, 32, **half)
    add(((32, 256, 256),), 12, 40, **half)
    add(((4, 2048, 2048), (2, 2048, 100)), 8, 40, **half)
    add(((2, 4096, 256),), 16, 72, **half)
    add(((16, 256, 256), (2, 2048, 100)), 16, 80, **half)
    add(((1, 12288, 12288), (1, 24576, 24576)), 32, 64, **brain)
    add(
        ((2, 1024, 100), (2, 1024, 256), (2, 4096, 64), (2, 4096, 128), (2, 4096, 256), (1, 16384, 128)), 16, 64, **half
    )
    add(((1, 4096, 128), (1, 4096, 512), (1, 16384, 256), (1, 16384, 512)), 32, 128, **brain)
    add(
        ((32, 256, 256), (32, 640, 640), (1, 640, 640), (1, 3072, 3072), (1, 24576, 24576), (1, 49152, 49152)),
        32,
        128,
        **brain,
    )
    masked: dict[str, Any] = {**brain, "causal": True}
    chunk: dict[str, Any] = {**masked, "alignment": "bottom_right"}
    for heads in (48, 80, 128):
        add(((1, 1024, 1024),), heads, 128, 8, **masked)
    add(((1, 512, 512), (1, 2048, 2048)), 64, 128, 8, **masked)
    add(((1, 1024, 1024), (1, 2048, 2048)), 48, 64, 8, **masked)
    add(((4, 512, 512), (1, 2048, 2048)), 32, 80, **masked)
    add(((1, 1024, 1024),), 32, 96, **masked)
    for batch, heads, rows in ((4, 32, 2048), (1, 64, 2048), (8, 64, 1024)):
        add(((batch, rows, rows),), heads, 192, value_dim=128, **masked)
    add(((4, 2048, 2048), (8, 512, 512)), 16, 256, 8, **masked)
    add(((1, 512, 4096),), 16, 256, 8, **chunk)
    for batch, heads, rows in ((1, 128, 768), (1, 96, 1536)):
        add(((batch, rows, rows),), heads, 192, value_dim=128, **masked)
    add(((2, 1024, 1024), (4, 2048, 2048)), 32, 96, value_dim=64, **masked)
    add(((1, 1, 512), (8, 1, 1024), (32, 1, 512), (1, 1, 1024), (2, 1, 2048), (16, 1, 2048)), 16, 64, **half)
    add(((4, 1, 1024), (1, 1, 768)), 32, 128, **half)
    add(((24, 1, 1024), (4, 1, 2048)), 32, 128, 4, **brain)
    add(((4, 1, 1024),), 32, 80, **half)
    add(((1, 1, 4096),), 32, 96, **half)
    add(((1, 1, 2048), (16, 1, 1024)), 32, 128, **half)
    add(((2, 1, 4096), (16, 1, 2048)), 8, 256, 4, **brain)
    # Lengths that end within a tile: nearly all that a text takes while it grows, and most of what is no text.
    add(((16, 1, 1000), (32, 1, 300), (8, 1, 600), (2, 1, 1300)), 16, 64, **half)
    add(((8, 1, 3000), (32, 1, 1500)), 32, 64, 8, **brain)
    add(((1, 1, 5000), (4, 1, 3000), (16, 1, 1500), (64, 1, 1100)), 32, 128, 8, **brain)
    add(((8, 1, 3500), (2, 1, 1000)), 32, 128, 4, **brain)
    add(((2, 1, 900), (16, 1, 1500)), 32, 128, **half)
    add(((4, 1, 3000),), 8, 256, 4, **brain)
    add(((2, 4096, 100), (1, 16384, 90)), 16, 64, **half)
    add(((1, 12000, 12000), (1, 30000, 30000)), 32, 128, **brain)
    add(((1, 20000, 20000),), 32, 64, **brain)
    add(((2, 1500, 1500), (1, 5000, 5000)), 32, 128, 8, **masked)
    add(((2, 1500, 1500),), 16, 256, 8, **masked)
    add(((8, 700, 700), (1, 1000, 1000)), 16, 72, **half)
    add(((1, 6000, 6000), (4, 1300, 1300), (64, 210, 210)), 16, 80, **half)
    add(((1, 5000, 5000), (8, 700, 700)), 32, 80, **masked)
    add(((2, 3000, 3000), (8, 700, 700)), 32, 96, **masked)
    add(((4, 1400, 1400),), 16, 96, **half)
    add(((2, 256, 256), (2, 256, 100)), 8, 160, **half)
    add(((1, 5000, 5000),), 16, 128, **half)
    add(((8, 1100, 1100),), 12, 256, **brain)
    add(((2, 700, 700), (1, 11000, 11000)), 8, 256, 4, **masked)
    add(((16, 900, 900), (2, 700, 700), (1, 3000, 3000)), 16, 64, **half)
    add(((1, 700, 700), (8, 1100, 1100)), 32, 128, 8, **masked)
    add(((4, 700, 700), (1, 6000, 6000)), 32, 64, 8, **masked)
    add(((1, 400, 3000), (1, 2000, 9000)), 32, 128, 8, **chunk)
    add(((4, 100, 1500),), 32, 128, 4, **chunk)
    add(((1, 600, 5000),), 32, 64, 8, **chunk)
    add(((1, 5, 3000), (16, 4, 1500)), 32, 128, 8, **brain)
    add(((8, 1, 1500), (1, 1, 3000)), 32, 80, **brain)
    add(((8, 1, 2500),), 32, 96, **brain)
    # Few keys in wide heads, and many short texts in the widest.
    add(((2, 2048, 77), (1, 9000, 77)), 24, 128, **brain)
    add(((1, 8192, 40),), 32, 128, **brain)
    add(((2, 1024, 200),), 16, 128, **brain)
    add(((2, 4096, 100),), 16, 96, **half)
    add(((1, 4096, 77),), 16, 80, **half)
    add(((32, 256, 256),), 32, 256, 8, **half, causal=True)
    # Chunks, texts and encoders in heads of other widths than 64 and 128, whose rivals have programs of their own.
    add(((1, 12000, 12000), (4, 4500, 4500), (16, 400, 400)), 12, 96, **brain)
    add(((1, 9000, 9000),), 32, 96, 8, **masked)
    add(((1, 300, 700), (1, 1500, 9000)), 32, 96, 8, **chunk)
    add(((1, 5000, 5000), (16, 300, 300)), 16, 256, 8, **masked)
    add(((1, 256, 640), (1, 1000, 6000)), 32, 256, 8, **chunk)
    add(((2, 3000, 3000), (4, 500, 64)), 16, 256, **half)
    add(((2, 2000, 2000),), 32, 72, 8, **masked)
    add(((1, 700, 4000),), 32, 72, 8, **chunk)
    add(((1, 128, 6144),), 32, 80, 8, **chunk)
    add(((1, 64, 1280),), 8, 80, **chunk)
    add(((16, 1200, 1200), (2, 7000, 7000)), 16, 128, **half)
    add(((2, 1300, 1300), (8, 180, 180)), 16, 128, **brain)
    add(((32, 200, 200),), 32, 128, 8, **masked)
    add(((1, 1000, 2000), (1, 200, 800)), 28, 128, 4, **chunk)
    add(((8, 300, 300), (8, 1700, 1700)), 16, 64, **half)
    add(((16, 1, 300),), 40, 64, 8, **brain)
    add(((4, 1, 2500), (6, 1, 3500)), 64, 128, 8, **brain)
    add(((48, 1, 1100),), 40, 128, 8, **brain)
    add(((1, 1, 6000),), 32, 128, 16, **brain)
    return found


def drawn(make: Make, seed: int = 23) -> list[Problem]:
    """40 problems drawn at random: prompts, chunks of them, single tokens, encoders and reading another text, eight each.

    Lengths and batches are uniform in their logarithm. Nothing is tuned or fitted to those of the seed of the suite: a policy is
    judged on these, and chosen on others.
    """
    chance = random.Random(seed)

    def about(low: int, high: int) -> int:
        return round(math.exp(chance.uniform(math.log(low), math.log(high))))

    def draw(task: str) -> Problem:
        head_dim = chance.choice((64, 64, 72, 80, 96, 128, 128, 128, 128, 256))
        dtype = chance.choice(DTYPES)
        kv_heads, group = chance.choice((4, 8, 8, 12, 16)), chance.choice((1, 1, 2, 3, 4, 5, 7, 8))
        if task in ("encoder", "context"):
            kv_heads, group = chance.choice((8, 12, 16, 20, 24, 32)), 1
        sizes = {"head_dim": head_dim, "dtype": dtype, "heads": kv_heads * group, "kv_heads": kv_heads}
        if task == "token":
            keys = about(256, 16384)
            return make(seq_q=1, seq_k=keys, batch=about(1, min(128, 2**18 // keys)), **sizes)
        rows = about(64, 16384)
        batch = about(1, min(64, 2**15 // rows))
        if task == "chunk":
            rows = about(64, 2048)
            keys = rows + about(256, 16384)
            return make(seq_q=rows, seq_k=keys, causal=True, alignment="bottom_right", **sizes)
        keys = about(32, 512) if task == "context" else rows
        return make(seq_q=rows, seq_k=keys, batch=batch, causal=task == "prompt", **sizes)

    return [draw(task) for task in ("prompt", "chunk", "token", "encoder", "context") for _ in range(8)]


SUITES: Mapping[str, tuple[str, Any]] = {
    "attention": (
        "S 512 to 16384, D 64 and 128, causal and full, both dtypes, at 16k tokens and at B=1 H=8",
        _attention,
    ),
    STANDARD: ("S 1024 and 4096, D 64 and 128, causal and full, float16, at 16k tokens", _standard),
    "gqa": ("32 query heads over 8, 4 and 1 key heads, causal", _gqa),
    "decode": ("1 and 8 query rows against 4k to 32k keys", _decode),
    "odd-head-dims": ("D 40 to 256, no power of two but the last", _odd_head_dims),
    "masks": ("windows, sinks, softcap and padded batches of real models", _masks),
    "serving": ("packed prompts and texts, and decoding and a chunk of a prompt over keys in pages", _serving),
    **MODELS,
    ALL_MODELS: ("all of the models above", all_models),
    "coverage": ("sizes between those of the models, for problems off the table to go by", _coverage),
    "unseen": ("models that nobody tunes: what problems off the table get", unseen),
    "drawn": ("40 problems drawn at random, to judge what problems off the table get", drawn),
}
"""Name -> one line for people, and what makes the problems in the order they are tuned and benched."""
