"""Turns records into plain JSON values and back, and checks these against the records' annotations.

JSON columns of the database and the files of :mod:`tiledsched.store.exchange` are read by the same rules, so that an error
names the key in both. Names, ids and numbers are checked as well, because they become paths, columns and text of reports.
"""

from __future__ import annotations

import math
import re
import statistics
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import datetime
from functools import cache, partial
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tiledsched.build.toolchain import Toolchain
from tiledsched.core.errors import DatabaseError, TiledschedError
from tiledsched.core.problem import Problem, ProblemClass
from tiledsched.core.registry import problem_from_json
from tiledsched.core.schedule import Schedule
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import REGIMES, Device

T = TypeVar("T")
Decoder = Callable[[Any, str], Any]
"""Takes plain data and its path, and gives the value. Raises DatabaseError where the data are wrong."""

REMEMBERED = 10_000
"""The most values of one class that are remembered."""
PLAIN = {str, int, float, bool, type(None)}

_HEX = (re.compile(r"[0-9a-f]{0,64}"), "hex digits, lower case")
_DEVICE = (
    re.compile(r"(?!\.)[\w .,:;+#@®™()\[\]'-]{0,128}"),
    "up to 128 letters, digits, spaces and any of _.,:;+#@()[]'-",
)
_WORD = (re.compile(r"[\w.-]{0,16}"), "up to 16 letters, digits and any of _.-")
PROVENANCES = ("measured", "transferred", "modelled", "default")
"""Provenances, the strongest first. An entry never replaces one of stronger provenance."""
PATTERNS = {
    "provenance": (re.compile("|".join(PROVENANCES)), f"one of {', '.join(PROVENANCES)}"),
    "arch": (re.compile(r"sm_\d{2,3}[a-z]?"), "sm_ and a number, as sm_90"),
    "fingerprint": _HEX,
    "uid": (re.compile(r"[0-9a-f]{24}"), "24 hex digits, lower case"),
    "source_hash": _HEX,
    "RivalTime.name": (re.compile(r"[\w.+-]{1,64}"), "up to 64 letters, digits and any of _.+-"),
    "kernel": (re.compile(r"\w[\w .:+@()-]{0,199}"), "up to 200 letters, digits, spaces and any of _.:+@()-"),
    "device_name": _DEVICE,
    "Device.name": _DEVICE,
    "regime": (re.compile(f"({'|'.join(REGIMES)})?"), f"one of {', '.join(REGIMES)}"),
    "accum_mode": _WORD,
    "runner": _WORD,
}
"""A field's name, or class and name where other fields have the same name -> the pattern, and the pattern in words."""
POSITIVE = (
    "median_us",
    "ci_low_us",
    "ci_high_us",
    "samples_us",
    "model_us",
    "ours_us",
    "ratio",
    "ratio_low",
    "ratio_high",
)
"""Fields that hold times or ratios, which are above 0."""
MOST_US = 1e12
"""Times are below this many microseconds, which are eleven days."""
LARGEST_FLOAT = 1e300
"""The largest number of a row that is no time."""
COUNTS = ("candidates", "cubin_bytes")
"""Fields that hold counts, which are 0 or more."""
LARGEST = 2**63 - 1
"""The largest integer that databases take."""
SMALL = 2**31
"""Integers below this need no further check."""


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
        return decoder(data, "")
    except DatabaseError:  # decode again, this time with paths, which take time
        return decoder(data, where)


@cache
def _decoder(kind: Any) -> Decoder:
    """The decoder of an annotation. A table holds tens of thousands of values and a few dozen annotations."""
    origin, arms = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        inner = _decoder(next(arm for arm in arms if arm is not type(None)))
        optional = type(None) in arms
        return lambda data, where: None if data is None and optional else inner(data, where)
    if origin is Annotated:
        return _decoder(arms[0])
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
    if time.tzinfo is None or not 1 < time.year < 9999:  # which has a place in every time zone
        raise DatabaseError(f"{where}: {data!r} has no time zone, or a year that is none; write it with +00:00")
    return time


def _record_decoder(cls: Any) -> Decoder:
    hints, fields_by_key = get_type_hints(cls), _fields(cls)
    names = {key: name for key, (name, *_) in fields_by_key.items()}
    known = {key: _decoder(hints[name]) for key, name in names.items()}
    required = {key for key, (_, default, _) in fields_by_key.items() if default is MISSING}
    checks = field_checks(cls.__name__, known)

    def decode_record(data: Any, where: str) -> Any:
        _require(dict, data, where)
        if not required <= data.keys() <= known.keys():
            unknown = [f"{where}.{key}: unknown key; known are {', '.join(known)}" for key in data if key not in known]
            missing = [f"{where}.{key}: missing; add it" for key in known if key in required and key not in data]
            raise DatabaseError((unknown + missing)[0])
        values = {names[key]: known[key](item, where and f"{where}.{key}") for key, item in data.items()}
        for key, check in checks:
            if key in data:
                check(values[names[key]], where and f"{where}.{key}")
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


def field_checks(owner: str, names: Iterable[str]) -> list[tuple[str, Callable[[Any, str], None]]]:
    """The checks of a class's fields.

    Args:
        owner: the class's name.
        names: names of its fields.

    Returns:
        Pairs of a field's name and a check. A check takes a value and the value's path, and raises DatabaseError where the
        value is wrong. A field may have none, one or two checks.
    """
    found: list[tuple[str, Callable[[Any, str], None]]] = []
    for name in names:
        pattern = PATTERNS.get(f"{owner}.{name}") or PATTERNS.get(name)
        if pattern:
            found.append((name, partial(_check_pattern, *pattern)))
        if name in POSITIVE:
            found.append((name, _check_positive))
        if name in COUNTS:
            found.append((name, _check_count))
    return found


def _check_pattern(pattern: re.Pattern[str], about: str, value: Any, where: str) -> None:
    if isinstance(value, str) and not pattern.fullmatch(value):
        raise DatabaseError(f"{where}: {value!r} is not allowed here, only {about}; correct the value")


def _check_positive(value: Any, where: str) -> None:
    for each in (min(value, default=1.0), max(value, default=1.0)) if isinstance(value, tuple) else (value,):
        if each is not None and not 0 < each < MOST_US:
            raise DatabaseError(
                f"{where}: expected a number above 0 and below {MOST_US:g}, got {each}; measure it again"
            )


def _check_count(value: int, where: str) -> None:
    if value < 0:
        raise DatabaseError(f"{where}: expected a count, got {value}; correct the value")


def check_number(value: float, where: str) -> None:
    """Refuse a number that a database or a reader of JSON does not take.

    Raises:
        DatabaseError: the number is an integer beyond 64 bits, or beyond 1e300, infinite or not a number.
    """
    if isinstance(value, int):
        if not -LARGEST - 1 <= value <= LARGEST:
            raise DatabaseError(f"{where}: the integer takes more than 64 bits; correct the value")
    elif not abs(value) <= LARGEST_FLOAT:
        raise DatabaseError(
            f"{where}: expected a finite number up to {LARGEST_FLOAT:g}, got {value}; correct the value"
        )


def check_values(values: Mapping[str, Any], where: str) -> None:
    """Check the values of a schedule's knobs or of a problem's fields, and their names.

    Raises:
        DatabaseError: a name, a number or text is not allowed; the message names it.
    """
    for name, value in values.items():
        if not name.isidentifier():
            raise DatabaseError(f"{where}: {name!r} is not a name: allowed are letters, digits and _; correct it")
        kind = type(value)
        if kind is str and not value.isprintable():
            raise DatabaseError(f"{where}.{name}: {value!r} is text that cannot be printed; correct the value")
        if kind is bool or (kind is int and -SMALL < value < SMALL) or (kind is str and name != "kernel"):
            continue  # nearly all of them, and tables hold tens of thousands
        if name == "kernel":
            _check_pattern(*PATTERNS["kernel"], value, f"{where}.{name}")
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, (int, float)):
                check_number(each, f"{where}.{name}")


def untrue_estimates(timing: Timing, samples: Any, count: Any) -> list[str]:
    """What is wrong with a measurement's estimate, given its samples: one line for each thing; empty where nothing is.

    The median must be that of the samples, the ends of the interval must be among them, and their count must be as stated.
    """
    listed = isinstance(samples, (list, tuple)) and bool(samples)
    # Of a million measurements there are a hundred million samples: the sum of floats is finite where all are.
    plain = listed and {*map(type, samples)} == {float} and min(samples) > 0 and math.isfinite(sum(samples))
    if not plain and not (listed and all(map(_is_time, samples))):
        return ["its samples are not times"]
    wrong = [] if count == len(samples) else [f"it has {len(samples)} samples, not the {count} it states"]
    if not _same(timing.median_us, statistics.median(samples)):
        wrong.append(f"its median {timing.median_us} is not that of its samples, {statistics.median(samples)}")
    ends = timing.ci_low_us, timing.ci_high_us
    if not all(end in samples or any(_same(end, sample) for sample in samples) for end in ends):
        wrong.append(f"its interval [{ends[0]}, {ends[1]}] is not one of its samples")
    return wrong


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _same(one: Any, other: float) -> bool:
    return _is_time(one) and math.isclose(one, other, rel_tol=1e-9)
