"""How much one problem of attention's backward pass says about another."""

from __future__ import annotations

import math
from typing import Any

from tiledsched.core.similarity import Similarity, about
from tiledsched.kernels.attention.similarity import copies_rows, feature_distance, octaves_apart

TILE = 128
"""Rows or keys of the largest tiles: lengths that this divides need no masks at their ends."""


class AttentionBackwardSimilarity(Similarity):
    """How problems of the backward pass compare.

    Gradients are computed for whole sequences: there are no problems of few rows, of which forward's similarity takes such care.
    """

    def kind(self, p: Any) -> tuple[Any, ...]:
        """What two problems must share so that the winner of one says much about the other.

        It is the mask; the padded widths, which say how many accumulators a block holds; whether heads are padded, and whether
        threads copy rows; and whether sums have a fixed order, where other structures win.
        """
        return p.causal, p.tile_d, p.tile_v, p.head_dim != p.tile_d, copies_rows(p), p.deterministic

    def weight(self, p: Any, q: Any) -> float:
        """How much the measurements of `q` count for the search on `p`: 1 for equal problems, less for each difference."""
        widths = abs(math.log2(p.tile_d / q.tile_d))
        kinds = (p.causal != q.causal) + 4.0 * (p.deterministic != q.deterministic)
        return math.exp(-0.2 * widths - 0.1 * kinds - 0.05 * self.distance(p, q))

    def distance(self, p: Any, q: Any) -> float:
        """How far apart two problems of one kind are: octaves of keys, and half as much for other differences.

        The work of a block follows the lengths, and the number of blocks also the key heads, which hardly change what wins, nor
        how far rivals are ahead. Element type matters least. A last tile that is cut off takes other code.
        """
        lengths = octaves_apart(p.mean_keys, q.mean_keys) + 0.5 * octaves_apart(p.mean_rows, q.mean_rows)
        blocks = 0.2 * octaves_apart(p.sequences * p.kv_heads, q.sequences * q.kv_heads)
        other = 0.1 * (p.dtype != q.dtype) + 0.2 * octaves_apart(p.group, q.group) + 0.3 * (p.head_dim != q.head_dim)
        ragged = any(
            (one % TILE == 0) != (another % TILE == 0) for one, another in ((p.seq_q, q.seq_q), (p.seq_k, q.seq_k))
        )
        return lengths + blocks + other + ragged + 0.3 * feature_distance(p, q)

    def bucketed(self, p: Any) -> Any:
        """The problem of about the lengths of `p` whose answer serves `p`, too."""
        rows, keys = about(p.seq_q), about(p.seq_k)
        packed = 1 << (p.packed - 1).bit_length() if p.packed else 0
        same = (rows, keys, packed) == (p.seq_q, p.seq_k, p.packed)
        return p if same else p.replace(seq_q=rows, seq_k=keys, packed=packed)

    def requires_same_kind(self, p: Any) -> bool:
        """Whether winners of other kinds are useless: where threads copy rows, and where sums have a fixed order."""
        return copies_rows(p) or p.deterministic
