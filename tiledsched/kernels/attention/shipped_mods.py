"""Functions of scores that ship: mask tensors, as torch's `scaled_dot_product_attention` takes them.

A mask is `[batch or 1, heads or 1, seq_q, seq_k]`, or `[batch or 1, heads or 1, seq_k]` where it is the same for all rows. Its
first two sizes are read at run time, so that one program serves a mask of each sequence or head, and a mask of all of them.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import math

import cuda.tile as ct

from tiledsched.kernels.attention.loads import load_tile

FLOOR = -2.3e38
"""Scores below this are raised to it: times log2(e) it is above the running maximum before the first key. Nothing that a score is
without the mask is left in numbers so low, so that torch's scores of such keys are equal, too, as far as the mask is the same."""


def mask_at(mask, b, h, q_idx, kv_idx):
    """The part of a mask for the rows and keys of a tile: `[rows, keys]`, or `[keys, rows]` where the tile lies that way; with
    one row where the mask is the same for all.
    """
    batch, head = ct.minimum(b, mask.shape[0] - 1), ct.minimum(h, mask.shape[1] - 1)
    if mask.ndim == 4:
        return load_tile(mask, (batch, head, q_idx, kv_idx))
    if head.ndim == 0:
        return ct.gather(mask, (batch, head, kv_idx))
    if mask.shape[1] == 1:  # rows of several heads, for which each number is read once
        found = ct.broadcast_to(ct.gather(mask, (batch, 0, kv_idx)), (head.shape[0], kv_idx.shape[1]))
    else:
        found = ct.gather(mask, (batch, head, kv_idx))
    return found


def boolean_mask(b, h, q_idx, kv_idx, mask, *others):
    """The mask_mod of a boolean mask, as bytes, which the TMA unit loads: not 0 where a row sees a key."""
    return mask_at(mask, b, h, q_idx, kv_idx) != 0


def causal_mask(b, h, q_idx, kv_idx, *others):
    """The mask_mod of a causal mask that is aligned at the top left."""
    return kv_idx <= q_idx


def additive_mask(score, b, h, q_idx, kv_idx, mask, *others):
    """The score_mod of a mask of numbers, which are added to the scaled scores in float32; minus infinity hides a key. NaN, in a
    score or in the mask, stays NaN."""
    added = mask_at(mask, b, h, q_idx, kv_idx).astype(ct.float32)
    return ct.where(added == -math.inf, -math.inf, ct.maximum(score + added, FLOOR, propagate_nan=True))
