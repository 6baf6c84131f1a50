"""Which (sequence, head) pairs of an attention output are compared with float64, and their reference."""

from __future__ import annotations

import random
from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.kernels.attention.scales import DEFAULT_CAP, default_scale

MOST_SCORES = 1 << 30
"""Scores of the reference, at most: four heads of 16384 x 16384, which take some tens of milliseconds in float64 on an
H200.
"""
MOST_PAIRS = 64
"""(sequence, head) pairs, at most, since each costs a few launches."""

Pair = tuple[int, int]
"""(sequence, query head). Without packing, each entry of the batch is a sequence."""


def compared_pairs(problem: Problem) -> list[Pair]:
    """The pairs whose output is compared: the first, the last, and others drawn with the problem's id as seed.

    As many as `MOST_SCORES` and `MOST_PAIRS` allow, two at least, all where they allow it. So every run of a problem
    compares the same pairs.
    """
    total = problem.sequences * problem.heads
    count = min(total, MOST_PAIRS, max(2, MOST_SCORES // (problem.mean_rows * problem.mean_keys)))
    numbers = {0, total - 1}
    others = random.Random(problem.id).sample(range(1, max(1, total - 1)), max(0, count - len(numbers)))
    return [divmod(number, problem.heads) for number in sorted(numbers.union(others))]


def reference_of_pair(xp: Any, problem: Problem, q: Any, k: Any, v: Any, **features: Any) -> Any:
    """The float64 output of one (sequence, head) pair, `[seq_q, value_dim]`.

    Args:
        xp: numpy or cupy.
        problem: mask and scale.
        q: `[seq_q, head_dim]` of that head, of a type that `xp` knows and float64 holds.
        k: `[seq_k, head_dim]` of its key head; v, `[seq_k, value_dim]`, likewise.
        features: sinks, starts and lengths, `[1]` each, of that head and sequence, where the problem has them.
    """
    out, _ = attention_and_lse(
        xp,
        q[None, None],
        k[None, None],
        v[None, None],
        causal=problem.causal,
        scale=default_scale(problem),
        alignment=problem.alignment,
        window=problem.window,
        window_right=problem.window_right,
        cap=DEFAULT_CAP if problem.softcap else 0.0,
        **features,
    )
    return out[0, 0]
