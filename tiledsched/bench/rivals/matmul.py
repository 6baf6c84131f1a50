"""Rivals of the matrix product: cuBLAS through torch, Inductor's templates, and TileGym's kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from tiledsched.bench.rivals import Rivals, compiled, fastest, into
from tiledsched.core.problem import Problem


def rivals(p: Problem) -> Rivals:
    """Each takes A `[m, k]` and B `[k, n]` and returns C."""
    import torch

    def multiply(A: Any, B: Any) -> Any:
        return torch.mm(A, B)

    found: dict[str, Callable[..., Any]] = {
        "torch": into(torch.mm),
        "torch_compile": compiled(multiply, mode="default"),
    }
    if importlib.util.find_spec("tilegym") is not None:
        found["tilegym"] = fastest({"persistent": _tilegym(persistent=True), "plain": _tilegym(persistent=False)})
    return found


def _tilegym(*, persistent: bool) -> Callable[..., Any]:
    """`tilegym.ops.matmul`. A column-major operand is passed as its transpose, which is how it lies in memory."""

    def call(A: Any, B: Any) -> Any:
        from tilegym.ops import matmul

        turned = {"trans_a": not A.is_contiguous(), "trans_b": not B.is_contiguous()}
        stored = (x if x.is_contiguous() else x.t() for x in (A, B))
        return matmul(*stored, **turned, static_persistent=persistent)

    return call
