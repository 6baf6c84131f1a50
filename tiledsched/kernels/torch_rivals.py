"""What rivals of several kernels share: a function of torch, also compiled, and gradients alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Method, Numbers, called

TUNED = "max-autotune-no-cudagraphs"
"""The mode of `torch.compile` that tries every autotuning choice."""


def torch_methods(
    in_torch: Callable[[Problem, Numbers], Function],
    mode: str = TUNED,
    knows: Callable[[Problem], bool] = lambda p: True,
) -> tuple[Method, Method]:
    """The methods `torch` and `torch_compile` of a kernel.

    Args:
        in_torch: makes the function for a problem and the kernel's scalars by name, as `Kernel.stand_in` does.
        mode: of `torch.compile`.
        knows: whether torch has a function for a problem.
    """

    def make(p: Problem) -> Function:
        return in_torch(p, p.declaration.scalar_values(p))

    return (
        Method(name="torch", make=called(make), knows=knows),
        Method(name="torch_compile", make=called(lambda p: compiled(make(p), mode)), knows=knows),
    )


def compiled(function: Any, mode: str = TUNED, *, serves: bool = False) -> Function:
    """The function under `torch.compile`, for exactly the shapes of the first call.

    torch gives up on code that it has compiled for eight problems. So it is made to forget all that it compiled; or, where the
    function `serves` in a user's process, it compiles a copy with code of its own.
    """
    made: list[Function] = []
    if serves:
        code = function.__code__.replace()
        function = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)

    def call(*tensors: Any) -> Any:
        if not made:
            import torch

            if not serves:
                torch.compiler.reset()
            made.append(torch.compile(function, dynamic=False, mode=mode))
        return made[0](*tensors)

    return call


def gradients_of(function: Function) -> Function:
    """What computes the gradients of a function's tensors, and nothing else, from those of its outputs.

    A call takes the latter in a tuple, then the tensors. The function itself runs only where these are others than before.
    """
    graph: list[Any] = []

    def call(gradients: tuple[Any, ...], *tensors: Any) -> Any:
        import torch
        from torch._functorch import config

        key = [(each.data_ptr(), each._version) for each in tensors]
        new = graph[:1] != [key]
        # Compiled code may otherwise use up what it saved, and then takes gradients once only.
        with config.patch(donated_buffer=False) if new else nullcontext():
            if new:
                with torch.enable_grad():
                    leaves = [each.detach().requires_grad_() for each in tensors]
                    made = function(*leaves)
                graph[:] = key, leaves, made if isinstance(made, tuple) else (made,)
            return torch.autograd.grad(graph[2], graph[1], gradients, retain_graph=True)

    return call
