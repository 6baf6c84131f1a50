"""What follows from the fields of a problem of attention's gradients, and how much one problem says about another."""

from __future__ import annotations

import math
from typing import Any

from tiledsched.core.fields import Value
from tiledsched.core.problem import Problem
from tiledsched.core.similarity import Similarity, about
from tiledsched.kernels.attention import problem as forward
from tiledsched.kernels.attention.scales import default_scale, scales
from tiledsched.kernels.attention.similarity import copies_rows, feature_distance, octaves_apart

TILE = 128
"""Rows or keys of the largest tiles: lengths that this divides need no masks at their ends."""
DERIVED = forward.DERIVED | {
    "page": lambda p: 0,
    "kv8": lambda p: "",
    "q8": lambda p: False,
    "numbers": lambda p: 1,
    "lse": lambda p: False,
}
"""As of attention forward, without pages and with a log-sum-exp that is not asked for."""


def canonical(values: dict[str, Value]) -> dict[str, Value]:
    """The values that stand for all equivalent ways to state a problem; see :func:`attention.problem.canonical`.

    Raises:
        ProblemError: fields contradict each other.
    """
    return {name: value for name, value in forward.canonical({**values, "page": 0}).items() if name != "page"}


def flops(p: Any) -> float:
    """Floating-point operations of the five products, 2.5 times those of forward; causal counts half."""
    return float(2.0 * p.batch * p.heads * p.visible_pairs * (3 * p.head_dim + 2 * p.value_columns))


def usual_gradient(p: Any) -> float:
    """Root mean square of the elements of dQ, or those of dK and dV if they are smaller, for normal inputs: n probabilities of
    1 / n weigh numbers of size 1.
    """
    keys, rows = (
        max(1.0, p.visible_pairs / size) for size in (p.seq_q, p.seq_k)
    )  # that a row sees, and that see a key
    return min(keys**-0.5, rows**0.5 / keys)


def describe(p: Any) -> str:
    """The problem in one line, as that of forward."""
    return forward.describe(p) + " +dlse" * p.dlse + " deterministic" * p.deterministic


def file_words(p: Any) -> str:
    """The problem in the name of a file, as that of forward."""
    return forward.file_words(p) + "_dlse" * p.dlse + "_deterministic" * p.deterministic


def gradient_scales(p: Problem, scale: float | None = None, cap: float | None = None) -> tuple[float, float, float]:
    """The scalars of a launch: `scale_log2` and `cap_scale` of forward (:func:`attention.scales.scales`), and the softmax scale.

    Args:
        p: the problem.
        scale: the softmax scale; 1 / sqrt(head_dim) if not given.
        cap: the cap of the scores; 50 if not given.

    Raises:
        ProblemError: a scale or cap that is not positive or not a normal float32.
    """
    return *scales(p, scale, cap), default_scale(p) if scale is None else float(scale)


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
