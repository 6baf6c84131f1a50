"""The same arithmetic by torch: a function takes X, perhaps R, W and perhaps Given, and returns Out, Scale and perhaps Sum."""

from __future__ import annotations

from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Numbers
from tiledsched.kernels.quantization import torch_quantized
from tiledsched.kernels.torch_rivals import torch_methods


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """torch's functions in float32; it stands in while the kernel is compiled."""

    def call(X: Any, *given: Any) -> Any:
        total = X.float() + given[0].float() if p.residual else X.float()
        scale = (total.square().mean(-1, keepdim=True) + numbers["eps"]).rsqrt()
        made = torch_quantized(total * scale * given[int(p.residual)].float(), given[-1] if p.static else None)
        return (*made, total.to(X.dtype)) if p.residual else made

    return call


METHODS = torch_methods(in_torch)
