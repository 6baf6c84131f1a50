"""Rivals of cross entropy. Liger's is none: it computes the gradient in the same pass, over the logits."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tiledsched.bench.rivals import Rivals, compiled
from tiledsched.core.problem import Problem
from tiledsched.kernels.cross_entropy.declaration import of_torch


def rivals(p: Problem) -> Rivals:
    """Each takes Logits and Labels and returns the losses and the logarithms of the sums of exponentials."""
    numbers = p.declaration.scalar_values(p)
    ignored, smoothing = int(numbers["ignore_index"]), float(numbers["smoothing"])
    call = of_torch(ignored, smoothing)
    found: dict[str, Callable[..., Any]] = {"torch": call, "torch_compile": compiled(call)}
    if not smoothing and importlib.util.find_spec("quack") is not None:
        found["quack"] = lambda Logits, Labels: _quack(Logits, Labels, ignored)
    return found


def _quack(logits: Any, labels: Any, ignored: int) -> Any:
    from quack.cross_entropy import cross_entropy_fwd

    return cross_entropy_fwd(logits, labels, ignore_index=ignored, return_lse=True)
