"""The softmax scale and the cap of the scores, as the kernel takes them."""

from __future__ import annotations

import math

from tiledsched.core.errors import ProblemError
from tiledsched.core.problem import Problem

LOG2_E = 1.0 / math.log(2.0)
DEFAULT_CAP = 50.0
"""The cap of the scores unless a call gives one: Gemma 2's. The machine code is the same for every cap, as for every scale."""
LARGEST_CAP = 1000.0
"""Above this cap, the float32 tanh of a capped score has too few digits."""
SMALLEST_NORMAL, LARGEST_FLOAT = 1.2e-38, 3.4e38


def default_scale(problem: Problem) -> float:
    """The softmax scale unless a call gives one: 1 / sqrt(head_dim), as in Vaswani et al. (arXiv:1706.03762), section 3.2.1."""
    return float(problem.head_dim) ** -0.5


def scales(p: Problem, scale: float | None = None, cap: float | None = None) -> tuple[float, float]:
    """The two arguments of a launch by which scores are multiplied: `scale_log2` and `cap_scale`.

    An author's function of scores is given `cap_scale` times the score, the softmax scale, and `scale_log2` is log2(e).

    Without softcap, `scale_log2` is the softmax scale times log2(e), and `cap_scale` is 0. With softcap, `scale_log2` is the cap
    times log2(e), and `cap_scale` is the factor by which a score is multiplied before its tanh is taken.

    Args:
        p: the problem.
        scale: the softmax scale; 1 / sqrt(head_dim) if not given.
        cap: the cap of the scores; :data:`DEFAULT_CAP` if not given.

    Raises:
        ProblemError: a scale or cap that is not positive or not a normal float32; minus infinity times it would be NaN.
    """
    softmax_scale = default_scale(p) if scale is None else scale
    value = softmax_scale * LOG2_E
    if not SMALLEST_NORMAL < value < LARGEST_FLOAT:
        raise ProblemError(f"the softmax scale must be positive and a normal float32, got {scale!r}")
    if getattr(p.declaration, "mods", (None,))[0] is not None:
        return LOG2_E, softmax_scale
    if not p.softcap:
        return value, 0.0
    limit = DEFAULT_CAP if cap is None else cap
    if not (SMALLEST_NORMAL < limit <= LARGEST_CAP and SMALLEST_NORMAL < 2.0 * value / limit < LARGEST_FLOAT):
        raise ProblemError(f"softcap must be positive and at most {LARGEST_CAP:g}, got {cap!r}")
    return limit * LOG2_E, 2.0 * value / limit
