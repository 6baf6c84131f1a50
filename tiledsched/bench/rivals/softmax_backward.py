"""Rivals of the gradient of softmax over rows."""

from __future__ import annotations

from typing import Any

from tiledsched.bench.rivals import Rivals, compiled
from tiledsched.core.problem import Problem


def rivals(p: Problem) -> Rivals:
    """Each takes dOut and Out, and returns dX."""
    import torch

    def differentiate(dOut: Any, Out: Any) -> Any:
        return torch._softmax_backward_data(dOut, Out, -1, Out.dtype)

    return {"torch": differentiate, "torch_compile": compiled(differentiate)}
