"""The table of what each `ct.*` function does here, filled by the modules that implement them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import cuda.tile as ct

F = TypeVar("F", bound=Callable[..., Any])

IMPLEMENTATIONS: dict[Any, Callable[..., Any]] = {}
"""cuTile's function, without its wrappers -> our function, which takes the same arguments."""
KEYWORDS: dict[Any, frozenset[str]] = {}
"""Parameter names of each function in cuTile itself, so that a misspelt one is refused here as there."""


@lru_cache(maxsize=1024)
def innermost(function: Any) -> Any:
    """`function` without its decorators: cuTile dispatches some functions under one wrapper and some under two."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def implements(*names: str) -> Callable[[F], F]:
    """Register the decorated function for `ct.<name>`; a name this cuda-tile lacks is passed over."""

    def register(function: F) -> F:
        for name in names:
            add(name, function)
        return function

    return register


def add(name: str, function: Callable[..., Any]) -> None:
    """Register `function` for `ct.<name>`, where name may be dotted."""
    target: Any = ct
    for part in name.split("."):
        target = getattr(target, part, None)
    if target is not None:
        target = innermost(target)
        IMPLEMENTATIONS[target] = function
        KEYWORDS[target] = frozenset(inspect.signature(target).parameters)
