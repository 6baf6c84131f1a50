"""Frozen dataclasses to plain JSON values and back, checked against their annotations.

The same few rules serve the JSON columns of the database and the files of :mod:`tiledsched.store.exchange`, so a wrong
value is reported by its key in both.
"""

from __future__ import annotations

import types
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tiledsched.errors import DatabaseError, TiledschedError
from tiledsched.kernels.template import ProblemClass
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule

T = TypeVar("T")


def encode(value: Any) -> Any:
    """`value` as dicts, lists, strings, numbers, booleans and None; times become ISO 8601 text."""
    if isinstance(value, (Schedule, Problem, ProblemClass)):
        return value.to_json()
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    return value


def decode(cls: type[T], data: Any, where: str) -> T:
    """The `cls` that :func:`encode` wrote; keys with defaults may be absent.

    Raises:
        DatabaseError: a key is missing, unknown or of the wrong type; the message starts with its path under `where`.
    """
    value: T = _decode(cls, data, where)
    return value


@cache
def _annotations(cls: type) -> dict[str, tuple[Any, bool]]:
    hints = get_type_hints(cls)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(cls)
    }


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in get_args(kind):
            return None
        return _decode(next(arm for arm in get_args(kind) if arm is not type(None)), data, where)
    if origin is tuple:
        return _tuple(get_args(kind), _require(list, data, where), where)
    if origin is dict:
        return _require(dict, data, where)
    if is_dataclass(kind):
        return _dataclass(kind, _require(dict, data, where), where)  # type: ignore[arg-type]
    if kind is Schedule:
        return _call(Schedule.from_json, _require(dict, data, where), where)
    if kind is datetime:
        time = _call(datetime.fromisoformat, _require(str, data, where), where)
        if time.tzinfo is None:
            raise DatabaseError(f"{where}: {data!r} has no time zone; write it with +00:00")
        return time
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _call(kind, _require(str, data, where), where)
    return _require(kind, data, where)


def _dataclass(cls: type, data: dict[str, Any], where: str) -> Any:
    known = _annotations(cls)
    for key in data:
        if key not in known:
            raise DatabaseError(f"{where}.{key}: unknown key; known are {', '.join(known)}")
    for key, (_, required) in known.items():
        if required and key not in data:
            raise DatabaseError(f"{where}.{key}: missing; add it")
    values = {key: _decode(known[key][0], item, f"{where}.{key}") for key, item in data.items()}
    return _call(lambda keywords: cls(**keywords), values, where)


def _tuple(arms: tuple[Any, ...], data: list[Any], where: str) -> tuple[Any, ...]:
    if len(arms) == 2 and arms[1] is Ellipsis:
        arms = (arms[0],) * len(data)
    if len(arms) != len(data):
        raise DatabaseError(f"{where}: expected {len(arms)} values, got {len(data)}; correct the list")
    return tuple(_decode(arm, item, f"{where}[{i}]") for i, (arm, item) in enumerate(zip(arms, data, strict=True)))


def _require(kind: type, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise DatabaseError(f"{where}: expected {kind.__name__}, got {data!r}; correct the value")
    return data


def _call(make: Any, data: Any, where: str) -> Any:
    try:
        return make(data)
    except (TiledschedError, ValueError) as error:
        raise DatabaseError(f"{where}: {error}; correct the value") from error
