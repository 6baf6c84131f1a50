"""Shapes written as text: a size for each axis, made of names, numbers and the four operations.

`"experts+1 2*columns rows/16"` has three axes. `/` rounds up and `//` rounds down. Sizes may be torch's symbolic integers.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

_OPERATION = re.compile(r"\s*(//|[-+*/])\s*")
_INSIDE = re.compile(r"(?<=\()\s+|\s+(?=\))")
_OPERATIONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: lambda one, other: one + other,
    ast.Sub: lambda one, other: one - other,
    ast.Mult: lambda one, other: one * other,
    ast.Div: lambda one, other: -(-one // other),
    ast.FloorDiv: lambda one, other: one // other,
}


@functools.lru_cache(maxsize=4096)
def split_shape(shape: str) -> tuple[str, ...]:
    """The text of each axis. Spaces around an operation do not part axes."""
    return tuple(_INSIDE.sub("", _OPERATION.sub(r"\1", shape)).split())


@functools.lru_cache(maxsize=4096)
def shape_names(shape: str) -> frozenset[str]:
    """The names that a shape reads.

    Raises:
        ValueError: an axis is no size; the message says what is allowed.
    """
    trees = map(_parse, split_shape(shape))
    return frozenset(node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name))


def read_shape(shape: str, value_of: Callable[[str], Any]) -> tuple[Any, ...]:
    """The sizes of a shape whose names have the values that `value_of` gives."""
    return tuple(read_size(word, value_of) for word in split_shape(shape))


def read_size(word: str, value_of: Callable[[str], Any]) -> Any:
    """The value of one size.

    Raises:
        ZeroDivisionError: it divides by a size of 0.
    """
    return value_of(word) if word.isidentifier() else _evaluate(_parse(word), value_of)


@functools.lru_cache(maxsize=4096)
def is_solvable(word: str, name: str) -> bool:
    """Whether the value of a size tells that of `name`, where its other names are known: it stands once, and divides nothing."""
    tree = _parse(word)
    once = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree)) == 1
    return once and not any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, (ast.Div, ast.FloorDiv))
        and any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node.right))
        for node in ast.walk(tree)
    )


def solve(word: str, name: str, size: Any, value_of: Callable[[str], Any]) -> Any:
    """The value of `name` with which a size that :func:`is_solvable` is `size`. A quotient is taken to have no remainder.

    Raises:
        ValueError: no value of `name` gives `size`.
    """
    node = _parse(word)
    value = size
    while isinstance(node, ast.BinOp):
        on_left = any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node.left))
        other = _evaluate(node.right if on_left else node.left, value_of)
        if isinstance(node.op, ast.Mult):
            if not other or (type(value) is type(other) is int and value % other):
                raise ValueError(f"must be {word}, and no {name} makes that {size}")
            value = value // other
        elif isinstance(node.op, (ast.Div, ast.FloorDiv)):
            value = value * other
        elif isinstance(node.op, ast.Add):
            value = value - other
        else:
            value = value + other if on_left else other - value
        node = node.left if on_left else node.right
    return value


@functools.lru_cache(maxsize=4096)
def _parse(word: str) -> ast.expr:
    try:
        tree = ast.parse(word, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None or not all(map(_is_allowed, ast.walk(tree))):
        raise ValueError(
            f"{word!r} is no size; axes are parted by spaces, and a size is made of names, numbers, +, -, *, "
            "/ (which rounds up), // (which rounds down) and parentheses"
        )
    return tree


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    return isinstance(node, (ast.BinOp, ast.Name, ast.Load, *_OPERATIONS))


def _evaluate(node: ast.expr, value_of: Callable[[str], Any]) -> Any:
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_evaluate(node.left, value_of), _evaluate(node.right, value_of))
    return value_of(node.id) if isinstance(node, ast.Name) else node.value  # type: ignore[attr-defined]
