"""What follows from the fields of a problem of attention's gradients."""

from __future__ import annotations

from typing import Any

from tiledsched.core.fields import Value
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention import problem as forward
from tiledsched.kernels.attention.scales import default_scale, scales

DERIVED = forward.DERIVED | {"page": lambda p: 0, "lse": lambda p: False}
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
