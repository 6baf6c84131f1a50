"""`ts.op` in processes that compile or measure, which keep torch from being imported because that takes seconds."""

from __future__ import annotations

from typing import Any

from tiledsched.core.problem import KernelClass
from tiledsched.core.registry import release_torch


class LaterOperator:
    """An operator that registers with torch when it is first used.

    A process that compiles or measures imports a file for the kernels in it, and uses none of the operators made of them.
    """

    def __init__(self, name: str, kernel: KernelClass, pinned: dict[str, Any]) -> None:
        self._arguments = name, kernel, pinned

    def _operator(self) -> Any:
        name, kernel, pinned = self._arguments
        release_torch()
        from tiledsched.serve.op import op

        return op(name, kernel, **pinned)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """The outputs, as of the operator."""
        return self._operator()(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._operator(), name)


def op(name: str, kernel: KernelClass, **pinned: Any) -> LaterOperator:
    """The operator that :func:`tiledsched.serve.op.op` makes, made when it is first used."""
    return LaterOperator(name, kernel, pinned)
