"""Rivals of rotary position embedding."""

from __future__ import annotations

from tiledsched.bench.rivals import Rivals, compiled
from tiledsched.core.problem import Problem
from tiledsched.kernels.rope.declaration import of_torch


def rivals(p: Problem) -> Rivals:
    """Each takes Q, K, Cos and Sin and returns the rotated queries and keys, in new tensors."""
    return {"torch": of_torch(), "torch_compile": compiled(of_torch())}
