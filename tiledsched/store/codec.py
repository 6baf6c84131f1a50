"""Turns records into plain JSON values and back, and checks these against the records' annotations.

JSON columns of the database and the files of :mod:`tiledsched.store.exchange` are read by the same rules, so that an error
names the key in both. :mod:`tiledsched.store.validation` checks names and numbers.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tiledsched.build.toolchain import Toolchain
from tiledsched.core.errors import DatabaseError, TiledschedError
from tiledsched.core.problem import Problem, ProblemClass
from tiledsched.core.registry import problem_from_json
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Device
from tiledsched.store.validation import LARGEST, check_number, check_values, field_checks

T = TypeVar("T")
Decoder = Callable[[Any, str], Any]
"""Takes plain data and its path, and gives the value. Raises DatabaseError where the data are wrong."""

REMEMBERED = 10_000
"""The most values of one class that are remembered."""
PLAIN = {str, int, float, bool, type(None)}


def encode(value: Any) -> Any:
    """`value` as dicts, lists, strings, numbers, booleans and None. Times become ISO 8601 text."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, (Schedule, Problem, ProblemClass)):
        return value.to_json()
    if is_dataclass(value):
        return {
            key: encode(item)
            for key, (name, default, omit_default) in _fields(type(value)).items()  # type: ignore[arg-type]  # hashable
            if (item := getattr(value, name)) != default or not omit_default
        }
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


@cache
def _fields(cls: Any) -> dict[str, tuple[str, Any, bool]]:
    """The fields of a dataclass by key: the name, the default, and whether a field is left out at its default."""
    return {
        each.metadata.get("key", each.name): (each.name, each.default, bool(each.metadata.get("omit_default")))
        for each in fields(cls)
    }


def decode(cls: type[T], data: Any, where: str) -> T:
    """The record of class `cls` that :func:`encode` wrote. Keys with defaults may be absent.

    Args:
        cls: a dataclass.
        data: plain JSON values.
        where: where the data stand, for errors.

    Raises:
        DatabaseError: a key is missing or unknown, or a value is wrong; the message starts with its path under `where`.
    """
    decoder = _decoder(cls)  # type: ignore[arg-type]  # a class is hashable
    try:
        value: T = decoder(data, "")
    except DatabaseError:  # decode again, this time with paths, which take time
        value = decoder(data, where)
    return value


@cache
def _decoder(kind: Any) -> Decoder:
    """The decoder of an annotation. A table holds tens of thousands of values and a few dozen annotations."""
    origin, arms = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = _decoder(next(arm for arm in arms if arm is not type(None)))
        optional = type(None) in arms
        return lambda data, where: None if data is None and optional else inner(data, where)
    if origin is tuple:
        return _tuple_decoder(arms)
    if kind in (Schedule, Problem, ProblemClass):
        read = problem_from_json if kind is Problem else kind.from_json
        return _once(lambda data, where: _call(read, _values(data, where), where))
    if is_dataclass(kind):
        decoder = _record_decoder(kind)
        return _once(decoder) if kind in (Device, Toolchain) else decoder
    if kind is datetime:
        return _time
    if kind in (float, int):  # any between these bounds is finite, and takes no more than 64 bits
        return lambda data, where: (
            data if type(data) is kind and -LARGEST < data < LARGEST else _require(kind, data, where)
        )
    return lambda data, where: data if type(data) is kind else _require(kind, data, where)


def _once(decoder: Decoder) -> Decoder:
    """Decodes equal data once: ten thousand rows share a few problems, schedules and devices."""
    made: dict[str, Any] = {}

    def decode_once(data: Any, where: str) -> Any:
        try:
            written = repr(data)
        except RecursionError:  # so deeply nested data are wrong, and the decoder says so
            return decoder(data, where)
        if written not in made:
            value = decoder(data, where)
            if len(made) >= REMEMBERED:
                made.clear()
            made[written] = value
        return made[written]

    return decode_once


def _values(data: Any, where: str) -> dict[str, Any]:
    values: dict[str, Any] = _require(dict, data, where)
    check_values(values, where)
    return values


def _time(data: Any, where: str) -> datetime:
    time: datetime = _call(datetime.fromisoformat, _require(str, data, where), where)
    if time.tzinfo is None:
        raise DatabaseError(f"{where}: {data!r} has no time zone; write it with +00:00")
    return time


def _record_decoder(cls: Any) -> Decoder:
    hints = get_type_hints(cls)
    names = {key: name for key, (name, *_) in _fields(cls).items()}
    renamed = {key: name for key, name in names.items() if key != name}
    known = {key: _decoder(hints[name]) for key, name in names.items()}
    required = {key for key, (_, default, _) in _fields(cls).items() if default is MISSING}
    checks = field_checks(cls.__name__, known)

    def decode_record(data: Any, where: str) -> Any:
        _require(dict, data, where)
        if not required <= data.keys() <= known.keys():
            unknown = [f"{where}.{key}: unknown key; known are {', '.join(known)}" for key in data if key not in known]
            missing = [f"{where}.{key}: missing; add it" for key in known if key in required and key not in data]
            raise DatabaseError((unknown + missing)[0])
        values = {key: known[key](item, where and f"{where}.{key}") for key, item in data.items()}
        for key, check in checks:
            if key in values:
                check(values[key], where and f"{where}.{key}")
        for key in renamed.keys() & values.keys():
            values[renamed[key]] = values.pop(key)
        try:
            return cls(**values)
        except (TiledschedError, ValueError) as error:
            raise DatabaseError(f"{where}: {error}; correct the value") from error

    return decode_record


def _tuple_decoder(arms: tuple[Any, ...]) -> Decoder:
    many = len(arms) == 2 and arms[1] is Ellipsis
    floats = arms == (float, Ellipsis)
    decoders = [_decoder(arm) for arm in arms if arm is not Ellipsis]

    def decode_tuple(data: Any, where: str) -> tuple[Any, ...]:
        _require(list, data, where)
        # Samples: the sum of tens of thousands is finite where all are.
        if floats and all(type(item) is float for item in data) and math.isfinite(sum(data)):
            return tuple(data)
        wanted = decoders * len(data) if many else decoders
        if len(wanted) != len(data):
            raise DatabaseError(f"{where}: expected {len(wanted)} values, got {len(data)}; correct the list")
        return tuple(
            one(item, where and f"{where}[{i}]") for i, (one, item) in enumerate(zip(wanted, data, strict=True))
        )

    return decode_tuple


def _require(kind: type, data: Any, where: str) -> Any:
    if type(data) in (int, float):
        check_number(data, where)
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
