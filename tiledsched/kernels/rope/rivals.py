"""Rotary position embedding by torch: a function takes Q, K, Cos and Sin, and returns new tensors, queries and keys rotated.

The kernel that works in place has the same rivals: new tensors move as many bytes.
"""

from __future__ import annotations

from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Numbers
from tiledsched.kernels.rope.reference import rotated
from tiledsched.kernels.torch_rivals import torch_methods


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """Products and sums of torch in float32, rounded once; it stands in while the kernel is compiled."""
    import torch

    def call(Q: Any, K: Any, Cos: Any, Sin: Any) -> Any:
        found = (rotated(torch.stack, each.float(), Cos.float(), Sin.float()) for each in (Q, K))
        return tuple(out.to(Q.dtype) for out in found)

    return call


METHODS = torch_methods(in_torch)
