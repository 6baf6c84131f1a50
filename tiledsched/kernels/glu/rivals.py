"""Gated linear units by others: a function takes Gate and Up, and returns the gated elements.

Of rows that are rounded to 8-bit floats, it also takes their scale where that is given, and returns each row's scale, too.
"""

from __future__ import annotations

from functools import partial

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Method, Numbers, called
from tiledsched.kernels.epilogues import ACTIVATIONS
from tiledsched.kernels.row_schedules import torch_quantized
from tiledsched.kernels.torch_rivals import torch_methods


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """torch's activation, and a product, which stand in while the kernel is compiled."""
    from torch.nn import functional

    unit = partial(ACTIVATIONS[p.activation].torch, functional)
    if p.kernel == "glu":
        return lambda Gate, Up: unit(Gate) * Up
    return lambda Gate, Up, Given=None: torch_quantized(unit(Gate.float()) * Up.float(), Given)


def liger(p: Problem) -> Function:
    """Liger's SwiGLU, or its GeGLU with the approximation by tanh."""
    if p.activation == "silu":
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Unit
    else:
        from liger_kernel.ops.geglu import LigerGELUMulFunction as Unit
    return Unit.apply


def tilegym(p: Problem) -> Function:
    """TileGym's SwiGLU."""
    from tilegym.ops import get_swiglu

    return get_swiglu()


METHODS = (
    *torch_methods(in_torch),
    Method(
        name="liger",
        make=called(liger),
        package="liger_kernel",
        knows=lambda p: p.kernel == "glu" and p.activation != "gelu",
    ),
    Method(
        name="tilegym",
        make=called(tilegym),
        package="tilegym",
        knows=lambda p: p.kernel == "glu" and p.activation == "silu",
    ),
)
