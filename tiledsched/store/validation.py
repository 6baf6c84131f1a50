"""Checks of names, ids and numbers from files, which become paths, columns and text of reports."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from tiledsched.core.errors import DatabaseError
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import REGIMES

_HEX = (re.compile(r"[0-9a-f]{0,64}"), "hex digits, lower case")
_KERNEL = (re.compile(r"\w[\w .:+@()-]{0,199}"), "up to 200 letters, digits, spaces and any of _.:+@()-")
_DEVICE = (
    re.compile(r"(?!\.)[\w .,:;+#@®™()\[\]'-]{0,128}"),
    "up to 128 letters, digits, spaces and any of _.,:;+#@()[]'-",
)
_REGIME = (re.compile(f"({'|'.join(REGIMES)})?"), f"one of {', '.join(REGIMES)}")
_ARCH = (re.compile(r"sm_\d{2,3}[a-z]?"), "sm_ and a number, as sm_90")
_WORD = (re.compile(r"[\w.-]{0,16}"), "up to 16 letters, digits and any of _.-")
PROVENANCES = ("measured", "transferred", "modelled", "default")
"""Provenances, the strongest first. An entry never replaces one of stronger provenance."""
PATTERNS = {
    "provenance": (re.compile("|".join(PROVENANCES)), f"one of {', '.join(PROVENANCES)}"),
    "arch": _ARCH,
    "fingerprint": _HEX,
    "uid": (re.compile(r"[0-9a-f]{24}"), "24 hex digits, lower case"),
    "source_hash": _HEX,
    "RivalTime.name": (re.compile(r"[\w.+-]{1,64}"), "up to 64 letters, digits and any of _.+-"),
    "kernel": _KERNEL,
    "device_name": _DEVICE,
    "Device.name": _DEVICE,
    "regime": _REGIME,
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
LARGEST = 2**63 - 1
"""The largest integer that databases take."""
SMALL = 2**31
"""Integers below this need no further check."""


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
    return found


def _check_pattern(pattern: re.Pattern[str], about: str, value: Any, where: str) -> None:
    if isinstance(value, str) and not pattern.fullmatch(value):
        raise DatabaseError(f"{where}: {value!r} is not allowed here, only {about}; correct the value")


def _check_positive(value: Any, where: str) -> None:
    least = min(value, default=1.0) if isinstance(value, tuple) else value
    if least is not None and least <= 0:
        raise DatabaseError(f"{where}: expected a number above 0, got {least}; measure it again")


def check_number(value: float, where: str) -> None:
    """Refuse a number that a database or a reader of JSON does not take.

    Raises:
        DatabaseError: the number is an integer beyond 64 bits, infinite or not a number.
    """
    if isinstance(value, int):
        if not -LARGEST - 1 <= value <= LARGEST:
            raise DatabaseError(f"{where}: the integer takes more than 64 bits; correct the value")
    elif not math.isfinite(value):
        raise DatabaseError(f"{where}: expected a finite number, got {value}; correct the value")


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
    times = isinstance(samples, (list, tuple)) and all(
        (type(each) is float and 0 < each < math.inf) or _is_time(each) for each in samples
    )
    if not times or not samples:
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
