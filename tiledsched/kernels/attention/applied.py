"""An author's functions applied to scores on a GPU, in the precision of the scores: for references, which are made of them.

In NumPy :func:`tiledsched.interpreter.evaluate` does the same. Each tile is loaded, changed and stored; no schedule is searched.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import cuda.tile as ct

from tiledsched.core.sources import compiled

TILE = 64
SOURCE = """def apply_mods({arrays}Scores: ct.Array, b: int, h: int, first: int):
    apply_to_tile(SCORE, MASK, ({names}), Scores, b, h, first)
"""


def apply_to_tile(score, mask, arrays, Scores, b, h, first):
    """Change one tile of scores, and set those to minus infinity that the mask hides; either function may be None."""
    i, j = ct.bid(0), ct.bid(1)
    found = ct.load(Scores, (i, j), (TILE, TILE), padding_mode=ct.PaddingMode.ZERO)
    rows = first + i * TILE + ct.arange(TILE, dtype=ct.int32)[:, None]
    columns = j * TILE + ct.arange(TILE, dtype=ct.int32)[None, :]
    if score is not None:
        found = score(found, b, h, rows, columns, *arrays).astype(Scores.dtype)
    if mask is not None:
        visible = mask(b, h, rows, columns, *arrays)
        found = ct.where(visible, found, ct.full((TILE, TILE), -math.inf, dtype=Scores.dtype))
    ct.store(Scores, (i, j), found)


@functools.lru_cache(maxsize=256)
def _entry_of(kernel: Any, scored: bool) -> Any:
    arrays, names = ("".join(form.format(each) for each in kernel.mod_arrays) for form in ("{}: ct.Array, ", "{}, "))
    found = {**globals(), "SCORE": kernel.mods[0] if scored else None, "MASK": kernel.mods[1]}
    text = SOURCE.format(arrays=arrays, names=names)
    return ct.kernel(compiled(f"<{kernel.name}_applied_{scored}>", text, found, "apply_mods"))


def apply_on_gpu(
    xp: Any, kernel: Any, scores: Any, arrays: Sequence[Any], b: int, h: int, first: int, *, scored: bool
) -> Any:
    """Scores `[rows, seq_k]` of a head, from row `first` on, changed and hidden in place.

    Args:
        xp: cupy.
        kernel: a variant of attention.
        scores: float32 or float64, on the GPU.
        arrays: what the functions take, on the GPU.
        b, h: numbers of the sequence and of the query head.
        first: number of the first row.
        scored: whether scores are changed, or only hidden.
    """
    grid = tuple(-(-size // TILE) for size in scores.shape)
    ct.launch(xp.cuda.get_current_stream(), grid, _entry_of(kernel, scored), (*arrays, scores, b, h, first))
    return scores
