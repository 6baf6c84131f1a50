"""What the tuner asks of an author's own attention: its problems, what may be measured beside it, and how rates are stated."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention.declaration import Attention
from tiledsched.kernels.attention.models import Values
from tiledsched.kernels.attention.options import FIELDS
from tiledsched.kernels.attention.similarity import FEW_ROWS
from tiledsched.kernels.attention.suites import STANDARD, SUITES

MASKS = ("causal", "alignment", *FIELDS)
"""Fields of attention that an author's functions say in a problem's place."""


def tuning_traits(score_mod: Any, mask_mod: Any) -> dict[str, Any]:
    """What the class of an author's own attention has in its body for the tuner.

    Other implementations of attention cannot be given functions in cuTile's words, so that none is a rival. A function that hides
    keys makes the order of a row's sums depend on other rows: blocks that all 128 rows see come last. So no order of sums serves
    every batch there.
    """
    return {
        "space": Attention.name,
        "suites": unmasked_suites(),
        "default_suite": STANDARD,
        "rivals": staticmethod(lambda p: {}),
        "planning_rivals": (),
        "compiled_rivals": (),
        "batch_dims": () if mask_mod else Attention.batch_dims,
        "unordered": "takes the blocks that all their rows see last",
        "counted_work": "of all pairs" if mask_mod else "",
        "adapts": True,
        "adapted": classmethod(adapted),
    }


def adapted(kernel: Any, p: Any, s: Schedule, arch: str) -> Schedule:
    """The schedule that serves an attention of an author's own, until it is tuned, where `s` won for plain attention.

    On sm_90, for heads up to 128 wide, tiles have at most 64 x 128 scores and an SM has two blocks: that leaves registers for the
    functions, and one block multiplies while the other one computes scores. In 24 tunes of the gallery of variants (4096 keys,
    one H200, 2026-11-28) the best such schedule was the winner or lost at most 4%.

    Where a function only hides keys and reads no arrays, it is tried at a few places. One that shows many of more than 4096 keys
    keeps blocks of 128 x 128 that won: a causal mask takes 0.91 of the time of small tiles at 16384 keys of 128 columns, and a
    window of 512 keys 1.11. One that shows few of at least 4096 keys of up to 64 columns gets small tiles, three to an SM: a
    window of 512 keys takes 0.97 of the time of other tiles (one H200, 2026-11-29; docs/results/attention_variants.md).

    Where a function hides keys, blocks that take one work tile each begin with the last rows of a few heads, which most masks
    show the most keys: a launch that ends with such rows leaves most of the GPU without work meanwhile.
    """
    score_mod, mask_mod = kernel.mods[:2]
    if mask_mod is not None and p.seq_q > FEW_ROWS and s["persistent"] == "no":
        s = s.replace(block_order="swizzled")
    if arch != "sm_90" or p.head_dim > 128:
        return s
    rows, keys, blocks = int(s["tile_m"]), int(s["tile_n"]), s["occupancy"]
    share = None
    if score_mod is None and not kernel.mod_arrays and min(p.seq_q, p.seq_k) >= LONG:
        share = share_seen(mask_mod, p.seq_q, p.seq_k)
    large = (
        share is not None
        and share >= MANY
        and p.head_dim > 64
        and p.seq_k > LONG
        and blocks == 1
        and rows == keys == 128
    )
    small = large or (blocks == 2 and rows * keys <= 64 * 128)
    if share is not None and share <= FEW and p.head_dim <= 64:
        return s.replace(tile_m=64, tile_n=64, num_worker_warps=4, **SMALL | THREE)
    if small and rows * int(s["q_subtiles"]) <= 128 and not s["qk_ahead"]:
        return s
    m, n, warps = (64, 128, 4) if p.head_dim > 64 else (128, 64, 8)
    return s.replace(tile_m=m, tile_n=n, num_worker_warps=warps, **SMALL)


LONG = 4096
MANY, FEW = 0.4, 0.2
"""Shares of all pairs of rows and keys that a causal mask shows, and that windows show, of at least so many keys."""


@functools.cache
def share_seen(mask_mod: Any, rows: int, keys: int) -> float | None:
    """About the share of pairs of a row and a key that a mask without arrays shows, of some sequences and heads; None where it
    fails in NumPy, as a division by zero does, of which a GPU says nothing."""
    from tiledsched.interpreter import InterpreterError, evaluate

    drawn = np.random.default_rng(0)  # even steps would meet a pattern of even steps
    b, h, q_idx, kv_idx = (drawn.integers(size, size=64, dtype=np.int32) for size in (4, 16, rows, keys))
    try:
        return float(evaluate(mask_mod, b[:, None], h[:, None], q_idx[:, None], kv_idx[None]).mean())
    except InterpreterError:
        return None


SMALL: dict[str, Any] = {
    "occupancy": 2,
    "num_ctas": 1,
    "q_subtiles": 1,
    "kv_subtiles": 1,
    "unroll": 1,
    "q_in_registers": False,
}
SMALL |= {"qk_ahead": False, "store_late": False, "reload_q": False, "q_ahead": False}
"""The knobs of :func:`adapted` that take registers."""
THREE = {
    "occupancy": 3,
    "persistent": "no",
    "block_order": "swizzled",
    "loop_split": True,
    "latency_k": 2,
    "latency_v": 0,
}
THREE |= {"flat_steps": 0, "kv_direction": "forward"}
"""Those of small tiles, three to an SM."""


@functools.cache
def unmasked_suites() -> Mapping[str, Sequence[Values]]:
    """The suites of attention without masks, which the author's functions say, and without problems that have other features."""
    found = {
        name: [
            {field: value for field, value in each.items() if field not in MASKS}
            for each in problems
            if FIELDS.keys().isdisjoint(each)
        ]
        for name, problems in SUITES.items()
    }
    return {name: problems for name, problems in found.items() if problems}
