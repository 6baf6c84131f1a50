"""What the tuner asks of an author's own attention: its problems, what may be measured beside it, and how rates are stated."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tiledsched.core.schedule import Schedule
from tiledsched.core.shapes import split_shape
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
        "adapted": classmethod(adapted),
    }


def adapted(kernel: Any, p: Any, s: Schedule, arch: str) -> Schedule:
    """The schedule that serves an attention of an author's own, until it is tuned, where `s` won for plain attention.

    On sm_90, for heads up to 128 wide, tiles have at most 64 x 128 scores and an SM has two blocks: that leaves registers for the
    functions, and one block multiplies while the other one computes scores. In 24 tunes of the gallery of variants (4096 keys,
    one H200, 2026-11-28) the best such schedule was the winner or lost at most 4%. Where a function only hides keys and
    reads no arrays, or arrays of one axis, a block of 128 x 128 leaves each thread as many registers. It stays where it won on
    more than 4096 keys: in the recordings of causal attention (`tuning_db/landscapes`) it is the best for 8192 and 16384 keys,
    and small tiles are for fewer.

    Where a function hides keys, blocks that take one work tile each begin with the last rows of a few heads, which most masks
    show the most keys: a launch that ends with such rows leaves most of the GPU without work meanwhile.
    """
    if kernel.mods[1] is not None and p.seq_q > FEW_ROWS and s["persistent"] == "no":
        s = s.replace(block_order="swizzled")
    rows, keys, blocks = int(s["tile_m"]), int(s["tile_n"]), s["occupancy"]
    small = blocks == 2 and rows * keys <= 64 * 128
    lean = kernel.mods[0] is None and all(
        len(split_shape(kernel.array_fields[each].shape)) == 1 for each in kernel.mod_arrays
    )
    if lean and p.head_dim > 64 and p.seq_k > 4096:
        small = small or (blocks == 1 and rows == keys == 128)
    if arch != "sm_90" or p.head_dim > 128 or (small and rows * int(s["q_subtiles"]) <= 128 and not s["qk_ahead"]):
        return s
    m, n, warps = (64, 128, 4) if p.head_dim > 64 else (128, 64, 8)
    return s.replace(tile_m=m, tile_n=n, num_worker_warps=warps, **SMALL)


SMALL = {"occupancy": 2, "num_ctas": 1, "q_subtiles": 1, "kv_subtiles": 1, "unroll": 1, "q_in_registers": False}
SMALL |= {"qk_ahead": False, "store_late": False, "reload_q": False, "q_ahead": False}
"""The knobs of :func:`adapted` that take registers."""


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
