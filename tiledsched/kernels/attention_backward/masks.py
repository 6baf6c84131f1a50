"""The kernels of the mask tensors of `sdpa`: their attention, its gradients, and the lists of their blocks.

Each becomes an attribute of this module, named after the kernel and the axes and type of the mask. By that name another process
finds it, and makes it anew.
"""

from __future__ import annotations

import re
from typing import Any

from tiledsched.kernels.attention.lists import lists_kernel
from tiledsched.kernels.attention.shipped_mods import additive_mask, boolean_mask
from tiledsched.kernels.attention.variants import variant
from tiledsched.kernels.attention_backward.variants import gradient_of


def mask_kernel(boolean: bool, rank: int, dtype: str) -> Any:
    """The kernel of attention with a mask tensor, which is made at first, with the others that belong to it.

    Args:
        boolean: whether it is a mask of bytes that hide keys, rather than of numbers that are added to scores.
        rank: axes of the mask.
        dtype: its element type.
    """
    arrays = ((rank, dtype),)
    kernel = variant(None, boolean_mask, arrays) if boolean else variant(additive_mask, None, arrays)
    if kernel.declared_in != __name__:
        kernel.declared_in = __name__
        lists = (lists_kernel(boolean_mask, arrays),) if boolean else ()
        for each in (kernel, gradient_of(kernel), *lists):  # type: ignore[arg-type]  # a class is hashable
            each.declared_in = __name__
            globals()[f"{each.name}__{rank}_{dtype}"] = each
    return kernel


def __getattr__(name: str) -> Any:
    """The kernel of an attribute that no call has made yet."""
    parts = re.fullmatch(r"\w+_(boolean|additive)_mask_\w{8}__(\d)_(\w+)", name)
    if parts is not None:
        mask_kernel(parts[1] == "boolean", int(parts[2]), parts[3])
    if name not in globals():
        raise AttributeError(name)
    return globals()[name]
