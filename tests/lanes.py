"""A kernel with a mistake that only fused multiply-adds bring out: cross entropy as this project shipped it until November 2026."""

from __future__ import annotations

import math

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]
LOG2_E = 1.0 / math.log(2.0)
LN_2 = math.log(2.0)
LOWEST = -1e38


@ct.kernel
def lanes_cross_entropy(Logits, Labels, Loss, columns: Int, TILE: Int):
    row = ct.bid(0)
    highest = ct.full((1, TILE), LOWEST, ct.float32)
    total = ct.zeros((1, TILE), ct.float32)
    for step in range((columns + TILE - 1) // TILE):
        x = ct.load(Logits, (row, step), (1, TILE), padding_mode=ct.PaddingMode.NEG_INF).astype(ct.float32)
        higher = ct.maximum(highest, x)
        scaled = higher * LOG2_E
        total = total * ct.exp2(highest * LOG2_E - scaled, flush_to_zero=True)
        total = total + ct.exp2(x * LOG2_E - scaled, flush_to_zero=True)
        highest = higher
    row_max = ct.max(highest, axis=1, keepdims=True)
    total = ct.sum(total * ct.exp2((highest - row_max) * LOG2_E, flush_to_zero=True), axis=1)
    lse = row_max.reshape((1,)) + ct.log2(total) * LN_2
    ct.store(Loss, (row,), lse - ct.gather(Logits, (row, ct.gather(Labels, row))).astype(ct.float32).reshape((1,)))


class LanesCrossEntropy(ts.Kernel):
    function = lanes_cross_entropy
    rows, columns = ts.dim(), ts.dim(constant=True)
    dtype = ts.dtype("bfloat16", "float16", "float32")
    Logits = ts.array("rows columns")
    Labels = ts.array("rows", dtype="int32", below="columns")
    Loss = ts.out("rows", dtype="float32")
    knobs = {"TILE": [1024]}

    def grid(p, s, device):
        return (p.rows,)

    def reference(xp, Logits, Labels):
        top = Logits.max(1)
        total = xp.exp(Logits - top[:, None]).sum(1)
        return top + xp.log(total) - Logits[xp.arange(len(Labels)), Labels]
