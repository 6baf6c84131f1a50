"""The same arithmetic by torch: a function takes Gate, Up and perhaps Given, and returns Out and Scale."""

from __future__ import annotations

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Numbers
from tiledsched.kernels.glu import rivals
from tiledsched.kernels.quantization import torch_quantized
from tiledsched.kernels.torch_rivals import torch_methods


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """torch's functions in float32; it stands in while the kernel is compiled."""
    unit = rivals.in_torch(p, numbers)
    return lambda Gate, Up, Given=None: torch_quantized(unit(Gate.float(), Up.float()), Given)


METHODS = torch_methods(in_torch)
