"""The methods that a kernel names beside our own, and the names of ours, which `tiledsched.ops.bench` makes."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any

from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import SHIPPED
from tiledsched.core.rivals import Arrays, Call, Function, Method, called

OURS = "tiledsched"
"""The method that always runs our kernel."""
SERVED = "served"
"""The method that runs whatever is served: our kernel, or a rival that was measured to be faster."""
LEFT_OUT = "left_out"
"""The method that runs what would be served if nobody had tuned the suites that hold the problem."""
DETERMINISTIC = "deterministic"
"""The method that runs our kernel with a fixed order of sums, where a kernel may be asked for that."""
FLASH_4 = "flash_attention_4"
"""FlashAttention-4, which torch can be told to use: a summary counts it among torch's methods."""
MATMUL = "matmul"
MATMUL_SIZE = 8192
"""Rows and columns of the square matrices whose product is the practical ceiling of arithmetic."""


def rivals_module(kernel: KernelClass) -> Any:
    """The file `rivals.py` in the folder of a kernel that ships; None for any other kernel."""
    folder = SHIPPED.get(kernel.name, "").partition(":")[0]
    if kernel.__module__ != f"{folder}.declaration" or importlib.util.find_spec(f"{folder}.rivals") is None:
        return None
    return importlib.import_module(f"{folder}.rivals")


def methods_beside(kernel: KernelClass, problems: Sequence[Problem]) -> list[Method]:
    """The methods beside our own: those that the kernel's folder lists and that know one of the problems, where some are named;
    of a kernel that does not ship, the rivals that it names for one of them.
    """
    module = rivals_module(kernel)
    if module is not None:
        return [each for each in module.METHODS if not problems or any(map(each.knows, problems))]
    names = dict.fromkeys(name for problem in problems for name in kernel.rivals(problem))
    return [Method(name=name, make=called(partial(_named_rival, name))) for name in names]


def _named_rival(name: str, p: Problem) -> Function:
    rivals = p.declaration.rivals(p)
    if name not in rivals:
        raise UnsupportedError(f"the kernel names no {name} for this problem")
    return rivals[name]


def _matmul(arrays: Arrays) -> Call:
    """One large matrix product through torch: the rate that this GPU's tensor cores reach in practice."""
    torch, first = arrays.torch, arrays.tensors[0]
    dtype = (first[0] if isinstance(first, list) else first).dtype
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").to(dtype) for _ in range(2))
    return partial(torch.matmul, left, right)


CEILING = Method(name=MATMUL, make=_matmul, by_name=True, flops=2.0 * MATMUL_SIZE**3)
"""The product whose rate is the ceiling of the other methods' rates."""
