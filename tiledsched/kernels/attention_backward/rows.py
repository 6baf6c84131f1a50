"""The launches of attention's gradients that go over rows once: before the products, and after them."""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import math

import cuda.tile as ct

from tiledsched.kernels.attention.mods import rows_around

LOG2_E = 1.0 / math.log(2.0)


def place_of(row_tiles, heads):
    """(tile of rows, head, batch) of the current block."""
    return ct.bid(0) % row_tiles, ct.bid(0) // row_tiles % heads, ct.bid(0) // row_tiles // heads


def prepare_rows(Out, dOut, Lse, dLse, CuQ, LseLog2, Delta, dQSum, ROWS, TILE_V, TILE_DQ, ADDS):
    """Delta and LseLog2 of ROWS rows, and with ADDS zeros in dQSum. `dLse` and `CuQ` may be None.

    Rows that do not exist, see nothing or lie behind the last packed sequence have infinite LseLog2, so that their probabilities
    are 0.
    """
    row, head, batch = place_of(LseLog2.shape[2] // ROWS, Out.shape[1])
    if row * ROWS < Out.shape[2]:
        block, index = (1, 1, ROWS, TILE_V), (batch, head, row, 0)
        out = ct.load(Out, index, block, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        gradient = ct.load(dOut, index, block, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        products = out.astype(ct.float32) * gradient.astype(ct.float32)
        delta = ct.sum(products.reshape((ROWS, TILE_V)), axis=1)
        lse = ct.load(Lse, (batch, head, row), (1, 1, ROWS), padding_mode=ct.PaddingMode.NEG_INF, allow_tma=False)
        delta = delta.reshape((1, 1, ROWS))
        if dLse is not None:
            index = (batch, head, row)
            delta = delta - ct.load(dLse, index, (1, 1, ROWS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
        seen = lse > -math.inf
        if CuQ is not None:
            rows = row * ROWS + ct.arange(ROWS, dtype=ct.int32)[None, None, :]
            seen = seen & (rows < ct.gather(CuQ, (CuQ.shape[0] - 1,), check_bounds=False))
        delta = ct.where(seen, delta, 0.0)
        lse = ct.where(seen, lse * LOG2_E, math.inf)
        ct.store(Delta, (batch, head, row), delta, allow_tma=False)
        ct.store(LseLog2, (batch, head, row), lse, allow_tma=False)
    else:
        ct.store(Delta, (batch, head, row), ct.zeros((1, 1, ROWS), ct.float32), allow_tma=False)
        ct.store(LseLog2, (batch, head, row), ct.full((1, 1, ROWS), math.inf, ct.float32), allow_tma=False)
    if ADDS:
        # A launch that stores by the TMA unit has warps for that, and an SM holds one block of it (13.5 on sm_90).
        zeros = ct.zeros((1, 1, ROWS, TILE_DQ), ct.float32)
        ct.store(dQSum, (batch, head, row, 0), zeros, allow_tma=False)


def store_spans(Blocks, Spans):
    """The blocks of rows that may see a block of keys: the first, and the one after the last."""
    block, head, batch = place_of(Spans.shape[2], Spans.shape[1])
    first, end = rows_around(head, batch, block, Blocks)
    ct.scatter(Spans, (batch, head, block, 0), first, check_bounds=False)
    ct.scatter(Spans, (batch, head, block, 1), end, check_bounds=False)


def store_queries(dQSum, dQ, scale, ROWS, TILE_DQ):
    """ROWS rows of dQ, scaled and rounded, from their sums."""
    row, head, batch = place_of(ct.cdiv(dQ.shape[2], ROWS), dQ.shape[1])
    total = ct.zeros((1, 1, ROWS, TILE_DQ), ct.float32)  # so that -0 becomes 0
    total = total + ct.load(dQSum, (batch, head, row, 0), (1, 1, ROWS, TILE_DQ), check_bounds=False)
    ct.store(dQ, (batch, head, row, 0), (total * scale).astype(dQ.dtype))


def sum_groups(dKParts, dVParts, dK, dV, ROWS, TILE_D, TILE_V, GROUP):
    """ROWS rows of dK and dV from the sums of each query head, added up in the order of the heads."""
    row, head, batch = place_of(ct.cdiv(dK.shape[2], ROWS), dK.shape[1])
    dk = ct.zeros((1, 1, ROWS, TILE_D), ct.float32)
    dv = ct.zeros((1, 1, ROWS, TILE_V), ct.float32)
    for member in range(GROUP):
        index = (batch, head * GROUP + member, row, 0)
        dk = dk + ct.load(dKParts, index, (1, 1, ROWS, TILE_D), padding_mode=ct.PaddingMode.ZERO)
        dv = dv + ct.load(dVParts, index, (1, 1, ROWS, TILE_V), padding_mode=ct.PaddingMode.ZERO)
    ct.store(dK, (batch, head, row, 0), dk.astype(dK.dtype))
    ct.store(dV, (batch, head, row, 0), dv.astype(dV.dtype))


def sum_sinks(LseLog2, Delta, Sinks, dSinks, ROWS):
    """The gradient of one head's sink: minus the sum over all rows of the sink's probability times delta, in a fixed order."""
    head = ct.bid(0)
    sink = ct.load(Sinks, (head,), (1,)).astype(ct.float32).reshape((1, 1, 1)) * LOG2_E
    total = ct.zeros((1, 1, ROWS), ct.float32)
    for batch in range(Delta.shape[0]):
        for row in range(ct.cdiv(Delta.shape[2], ROWS)):
            index = (batch, head, row)
            # Beyond the last row the log-sum-exp read is infinite, so that the probability of any sink is 0.
            lse = ct.load(LseLog2, index, (1, 1, ROWS), padding_mode=ct.PaddingMode.POS_INF, allow_tma=False)
            delta = ct.load(Delta, index, (1, 1, ROWS), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
            total = total + ct.exp2(sink - lse) * delta
    ct.store(dSinks, (head,), -ct.sum(total, axis=2).reshape((1,)))
