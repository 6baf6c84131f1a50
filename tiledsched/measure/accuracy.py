"""How far an output is from its reference, tile by tile, and how far it may be.

One limit serves the random and every kind of adversarial inputs (:mod:`tiledsched.kernels.attention.inputs`). A NumPy model of the
kernel (P and the output rounded to the type of the arrays, sums in float32; `simulated` in
tests/test_measure_accuracy.py) stays below 3.3e-4 in float16 and 2.6e-3 in bfloat16 on each kind, at 256 to 16384 keys
and head_dim 16 to 256, causal or not: a tenth of the limit, and an eighth. A float32 reference adds 4e-5 at most.

With float16 accumulators the model comes to 1.3e-2, a quarter of the limit. Two kinds are not asked of them: on
`large` they overflow, and on `cancelling` they err by 0.1, both by the nature of the type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from tiledsched.errors import Failure, FailureKind
from tiledsched.kernels.attention.inputs import KINDS
from tiledsched.measure.runner import Accuracy
from tiledsched.schedule import Schedule

LARGEST_ERROR = {("float16", "fp32"): 4e-3, ("bfloat16", "fp32"): 2e-2, ("float16", "fp16"): 5e-2}
"""Largest relative Frobenius error of a tile that passes, by (dtype, accum_mode).

On normal inputs, rounding alone makes 3e-4 in float16 and 2.3e-3 in bfloat16 at any length; one key left out of 1024
makes 2.8e-2, and 32 left out of 16384 make 4e-2 (docs/measuring.md).
"""
LARGEST_LSE_ERROR = {"fp32": 2e-3, "fp16": 1e-1}
"""Largest absolute error of a log-sum-exp that passes, by accum_mode. It is a sum of float32 scores and a logarithm: what
rounding makes is far below (tests/test_measure_accuracy.py), and one key left out of 500 equal ones is as much.
"""
BEYOND_FP16_SUMS = ("large", "cancelling")
"""Kinds of inputs that a kernel with float16 accumulators need not get right."""


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What is asked of a result."""

    largest_error: float
    """Largest relative Frobenius error of a tile that passes."""
    kinds: tuple[str, ...] = KINDS
    """Kinds of adversarial inputs on which it is asked."""
    largest_lse_error: float = LARGEST_LSE_ERROR["fp32"]
    """Largest absolute error of a row's log-sum-exp that passes."""


def tolerance(dtype: str, schedule: Schedule) -> Tolerance:
    """The gate for outputs of `schedule` on arrays of `dtype`."""
    mode = str(schedule["accum_mode"])
    kinds = KINDS if mode == "fp32" else tuple(kind for kind in KINDS if kind not in BEYOND_FP16_SUMS)
    return Tolerance(largest_error=LARGEST_ERROR[dtype, mode], kinds=kinds, largest_lse_error=LARGEST_LSE_ERROR[mode])


def tile_errors(xp: Any, out: Any, reference: Any, *, tile_m: int,
                heads: numpy.ndarray | None = None) -> tuple[numpy.ndarray, float]:  # fmt: skip
    """Errors of `out`, `[batch, heads, rows, columns]`, in tiles of `tile_m` rows.

    NaN anywhere, such as an element nothing wrote, makes the tile's error infinite.

    Args:
        xp: numpy or cupy.
        out: any float type.
        reference: of the same shape; or, where `heads` is given, `[any, rows, columns]`.
        tile_m: rows per tile; the last may have fewer.
        heads: `[batch, heads]`, which entry of `reference` each head is compared with.

    Returns:
        Relative Frobenius errors `[batch, heads, tiles]` on the host, and the largest absolute difference.
    """
    batch, head_count, rows, _ = out.shape
    tiles = -(-rows // tile_m)
    relative = numpy.empty((batch, head_count, tiles))
    largest = 0.0

    def sum_by_tile(squares: Any) -> Any:
        padded = xp.zeros((head_count, tiles * tile_m), dtype=squares.dtype)
        padded[:, :rows] = squares.sum(axis=-1)
        return padded.reshape(head_count, tiles, tile_m).sum(axis=-1)

    for b in range(batch):  # one batch entry at a time bounds the memory this takes
        expected = reference[b] if heads is None else reference[xp.asarray(heads[b])]
        difference = out[b].astype(reference.dtype) - expected
        largest_here = float(xp.abs(difference).max())
        largest = max(largest, largest_here) if numpy.isfinite(largest_here) else float("inf")
        norm = xp.maximum(sum_by_tile(expected * expected), 1e-30)
        error = xp.sqrt(sum_by_tile(difference * difference) / norm)
        error = xp.where(xp.isfinite(error), error, xp.inf)
        relative[b] = error.get() if hasattr(error, "get") else error  # from the GPU, where it is there
    return relative, largest


def lse_errors(xp: Any, lse: Any, reference: Any, *, tile_m: int,
               heads: numpy.ndarray | None = None) -> numpy.ndarray:  # fmt: skip
    """Largest absolute errors of `lse`, `[batch, heads, rows]`, in tiles of `tile_m` rows: `[batch, heads, tiles]`.

    Where the reference is minus infinity, a row that sees no key, so must `lse` be. NaN makes the error infinite.

    Args:
        xp: numpy or cupy.
        lse: any float type.
        reference: of the same shape; or, where `heads` is given, `[any, rows]`.
        tile_m: rows per tile; the last may have fewer.
        heads: `[batch, heads]`, which entry of `reference` each head is compared with.
    """
    batch, head_count, rows = lse.shape
    tiles = -(-rows // tile_m)
    expected = reference if heads is None else reference[xp.asarray(heads)]
    finite = xp.isfinite(expected)
    error = xp.where(finite, xp.abs(lse - xp.where(finite, expected, 0.0)), xp.where(lse == expected, 0.0, xp.inf))
    error = xp.where(xp.isnan(error), xp.inf, error)
    by_row = xp.zeros((batch, head_count, tiles * tile_m))
    by_row[..., :rows] = error
    largest = by_row.reshape(batch, head_count, tiles, tile_m).max(axis=-1)
    return numpy.asarray(largest.get() if hasattr(largest, "get") else largest)


def summary(relative: numpy.ndarray, largest: float, *, repeatable: bool) -> Accuracy:
    """`tile_errors` of the random inputs in short."""
    worst = _place(relative, int(relative.argmax()))
    return Accuracy(max_abs_error=largest, worst_tile_error=float(relative[worst]), worst_tile=worst,
                    repeatable=repeatable)  # fmt: skip


def wrong_result(relative: numpy.ndarray, largest_error: float, kinds: numpy.ndarray,
                 what: str = "relative error") -> Failure | None:  # fmt: skip
    """The failure of a result whose `tile_errors` are `relative`, or None where every tile is within the limit.

    Args:
        relative: `[batch, heads, tiles]`.
        largest_error: that passes.
        kinds: `[batch, heads]`, name of each head's inputs, for the message.
        what: what `relative` is, for the message.
    """
    wrong = numpy.flatnonzero(~(relative <= largest_error))
    if not wrong.size:
        return None
    first, worst = _place(relative, int(wrong[0])), _place(relative, int(relative.argmax()))
    message = (f"{kinds[first[:2]]} inputs: {what} {relative[first]:.3g} above {largest_error:.3g} in "
               f"{_words(first)}, the first of {wrong.size} wrong tiles of {relative.size}")  # fmt: skip
    if worst != first:
        message += f"; the worst, {relative[worst]:.3g}, on {kinds[worst[:2]]} inputs in {_words(worst)}"
    return Failure(kind=FailureKind.WRONG_RESULT, message=message)


def _place(relative: numpy.ndarray, flat: int) -> tuple[int, int, int]:
    b, h, t = numpy.unravel_index(flat, relative.shape)
    return int(b), int(h), int(t)


def _words(place: tuple[int, int, int]) -> str:
    batch, head, tile = place
    return f"batch {batch}, head {head}, query tile {tile}"
