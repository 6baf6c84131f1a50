"""`ts.op` without torch: in processes that compile or measure, which keep it from being imported because that takes seconds, and
where it is not installed."""

from __future__ import annotations

from typing import Any

from tiledsched.core.extras import required
from tiledsched.core.problem import KernelClass
from tiledsched.core.registry import release_torch


class LaterOperator:
    """The operator that :func:`tiledsched.serve.op.op` makes of the same arguments, made when it is first used.

    Where torch is not installed, that raises MissingPackageError.

    A process that compiles or measures imports a file for the kernels in it, and uses none of the operators made of them.
    """

    def __init__(self, name: str, kernel: KernelClass, **pinned: Any) -> None:
        self._arguments = name, kernel, pinned
        self._gradients: list[tuple[Any, dict[str, Any]]] = []

    def register_autograd(self, backward: Any, **more: Any) -> None:
        """Give the operator this gradient as soon as the operator is made; the arguments are those of its method."""
        self._gradients.append((backward, more))

    def _operator(self) -> Any:
        name, kernel, pinned = self._arguments
        release_torch()
        with required():
            from tiledsched.serve.op import op
        made = op(name, kernel, **pinned)
        for backward, more in self._gradients:
            made.register_autograd(backward._operator() if isinstance(backward, LaterOperator) else backward, **more)
        return made

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The outputs, as of the operator."""
        return self._operator()(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._operator(), name)
