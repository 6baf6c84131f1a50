"""Matrix products by others: a function takes A `[m, k]` and B `[k, n]`, and returns C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Method, Variants, called
from tiledsched.kernels.torch_rivals import compiled


def raced(p: Problem) -> Variants:
    """cuBLAS, through torch: a tune times it, and it may serve."""
    import torch

    return {"torch": torch.mm}


def into_one_output(p: Problem) -> Function:
    """`torch.mm`, every call of which writes into the same output."""
    import torch

    outputs: list[Any] = []

    def call(A: Any, B: Any) -> Any:
        if not outputs:
            outputs.append(torch.mm(A, B))
        return torch.mm(A, B, out=outputs[0])

    return call


def by_inductor(p: Problem) -> Function:
    """The product as `torch.compile` has it."""
    import torch

    def multiply(A: Any, B: Any) -> Any:
        return torch.mm(A, B)

    return compiled(multiply, mode="default")


def tilegym(p: Problem) -> Variants:
    """`tilegym.ops.matmul`, persistent and plain. A column-major operand is passed as its transpose, as it lies in memory."""
    from tilegym.ops import matmul

    def variant(*, persistent: bool) -> Callable[..., Any]:
        def call(A: Any, B: Any) -> Any:
            turned = {"trans_a": not A.is_contiguous(), "trans_b": not B.is_contiguous()}
            stored = (x if x.is_contiguous() else x.t() for x in (A, B))
            return matmul(*stored, **turned, static_persistent=persistent)

        return call

    return {"persistent": variant(persistent=True), "plain": variant(persistent=False)}


METHODS = (
    Method(name="torch", make=called(into_one_output)),
    Method(name="torch_compile", make=called(by_inductor)),
    Method(name="tilegym", make=called(tilegym), package="tilegym"),
)
