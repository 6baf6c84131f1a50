"""How far an output is from its reference, tile by tile."""

from __future__ import annotations

from typing import Any

from tiledsched.measure.runner import Accuracy
from tiledsched.schedule import Schedule

TOLERANCE = {("float16", "fp32"): 4e-3, ("bfloat16", "fp32"): 2e-2, ("float16", "fp16"): 5e-2}
"""Largest relative Frobenius error of a tile that passes, by (dtype, accum_mode).

On normal inputs, rounding alone makes 3e-4 in float16 and 2.3e-3 in bfloat16 at any length; one key left out of 1024
makes 2.8e-2, and 32 left out of 16384 make 4e-2 (docs/measuring.md).
"""


def tolerance(dtype: str, schedule: Schedule) -> float:
    """The gate for outputs of `schedule` on arrays of `dtype`."""
    return TOLERANCE[dtype, str(schedule["accum_mode"])]


def compare(xp: Any, out: Any, reference: Any, *, tile_m: int, repeatable: bool) -> Accuracy:
    """Errors of `out` against `reference`, both `[batch, heads, rows, columns]`, in tiles of `tile_m` rows.

    NaN anywhere, such as an element nothing wrote, makes the tile's error infinite. `xp` is numpy or cupy.
    """
    batch, heads, rows, _ = out.shape
    tiles = -(-rows // tile_m)
    worst, where, largest = -1.0, (0, 0, 0), 0.0
    for b in range(batch):  # one batch entry at a time bounds the memory this takes
        difference = out[b].astype(reference.dtype) - reference[b]
        largest_here = xp.abs(difference).max()
        error_squared = xp.zeros((heads, tiles * tile_m), dtype=reference.dtype)
        norm_squared = xp.zeros((heads, tiles * tile_m), dtype=reference.dtype)
        error_squared[:, :rows] = (difference * difference).sum(axis=-1)
        norm_squared[:, :rows] = (reference[b] * reference[b]).sum(axis=-1)
        error = error_squared.reshape(heads, tiles, tile_m).sum(axis=-1)
        norm = norm_squared.reshape(heads, tiles, tile_m).sum(axis=-1)
        relative = xp.sqrt(error / xp.maximum(norm, 1e-30))
        relative = xp.where(xp.isfinite(relative), relative, xp.inf)
        index = int(relative.argmax())
        value = float(relative.reshape(-1)[index])
        if value > worst:
            worst, where = value, (b, index // tiles, index % tiles)
        largest = max(largest, float(largest_here) if bool(xp.isfinite(largest_here)) else float("inf"))
    return Accuracy(max_abs_error=largest, worst_tile_error=worst, worst_tile=where, repeatable=repeatable)
