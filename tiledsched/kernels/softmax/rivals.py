"""Softmax over rows by others: a function takes X and returns the softmax of its rows."""

from __future__ import annotations

from functools import partial

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Method, Numbers, Variants, called
from tiledsched.kernels.torch_rivals import torch_methods

TILEGYM_VARIANTS = {
    "plain": {},
    "tma": {"use_tma": True},
    "chunked": {"use_chunked": True},
    "multi_wave": {"use_multi_wave": True},
}


def in_torch(p: Problem, numbers: Numbers) -> Function:
    """torch's softmax, which stands in while the kernel is compiled."""
    import torch

    return lambda X: torch.softmax(X, -1)


def tilegym(p: Problem) -> Variants:
    """TileGym's softmax in each of its ways."""
    from tilegym.ops import softmax

    return {name: partial(softmax, **options) for name, options in TILEGYM_VARIANTS.items()}


METHODS = (*torch_methods(in_torch), Method(name="tilegym", make=called(tilegym), package="tilegym"))
