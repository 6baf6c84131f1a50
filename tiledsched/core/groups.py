"""Values by key: what code that sorts rows into groups would otherwise write out as a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

K = TypeVar("K")
L = TypeVar("L")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in the order of the pairs; keys are in the order in which they first came."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def firsts(pairs: Iterable[tuple[K, V]]) -> dict[K, V]:
    """The first value of each key."""
    found: dict[K, V] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found


def largest(pairs: Iterable[tuple[K, V]], key: Callable[[V], Any] | None = None) -> dict[K, V]:
    """The largest value of each key, of equal ones the first; where `key` is given, by what it says of each value."""
    return {each: max(values, key=key) for each, values in grouped(pairs).items()}  # type: ignore[type-var, arg-type]


def smallest(pairs: Iterable[tuple[K, V]], key: Callable[[V], Any] | None = None) -> dict[K, V]:
    """The smallest value of each key; see :func:`largest`."""
    return {each: min(values, key=key) for each, values in grouped(pairs).items()}  # type: ignore[type-var, arg-type]


def nested(cells: Iterable[tuple[K, L, V]]) -> dict[K, dict[L, V]]:
    """The last value of each two keys, by the first and then by the second."""
    found: dict[K, dict[L, V]] = {}
    for key, inner, value in cells:
        found.setdefault(key, {})[inner] = value
    return found


def values_by_name(rows: Iterable[Mapping[str, V]]) -> dict[str, list[V]]:
    """By name, the different values that mappings have, sorted by their types' names and then by themselves."""
    found = nested((name, (type(value).__name__, value), value) for row in rows for name, value in row.items())
    return {name: [values[key] for key in sorted(values)] for name, values in sorted(found.items())}
