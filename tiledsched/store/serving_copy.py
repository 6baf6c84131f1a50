"""Serving copies of shipped tables: their entries alone, which a process's first call reads in a tenth of the time.

A table file is written for people, holds every raw sample, and is checked value by value when it is read. Its serving
copy holds what serving needs: the entries with the estimates behind them. Each distinct problem and schedule is written
once, and entries refer to it by its number. A copy is read only where its hash is the one that was noted down when it was
made of the table beside it (:mod:`tiledsched.store.shipped`), so that its values need no second check.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tiledsched.core.errors import ConfigError, ProblemError
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.store.codec import encode
from tiledsched.store.records import Entry

_line = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class _Copy(msgspec.Struct):
    """A serving copy as it stands in its file."""

    problems: list[tuple[str, dict[str, Any], frozenset[str]]]
    """The distinct problems: kernel, values, and the fields whose values are left out where a problem is written."""
    schedules: list[dict[str, Any]]
    """The distinct schedules."""
    entries: msgspec.Raw
    """Entries, with numbers in place of problems and schedules."""


def write_copy(entries: Sequence[Entry], layer: str) -> str:
    """The text of a serving copy: a line for each problem, schedule and entry. Entries are given the name of their layer."""
    problems: dict[Problem, int] = {}
    schedules: dict[Schedule, int] = {}

    def number(schedule: Schedule) -> int:
        return schedules.setdefault(schedule, len(schedules))

    rows = []
    for entry in entries:
        row = encode(entry.replace(layer=layer))
        row["problem"] = problems.setdefault(entry.problem, len(problems))
        row["schedule"] = number(entry.schedule)
        row["runner_up"] = None if entry.runner_up is None else number(entry.runner_up)
        row["ties"] = [number(tie) for tie in entry.ties]
        rows.append(row)
    parts = {"problems": [_values(each) for each in problems], "schedules": [encode(each) for each in schedules]}
    lists = (
        f'"{name}": [\n' + ",\n".join(map(_line, part)) + "\n]" for name, part in {**parts, "entries": rows}.items()
    )
    return "{\n" + ",\n".join(lists) + "\n}\n"


def _values(problem: Problem) -> tuple[str, dict[str, Any], list[str]]:
    return problem.kernel, dict(problem.values), sorted(problem.omitted)


def _problem(kernel: str, values: dict[str, Any], omitted: frozenset[str]) -> Problem:
    """A problem; of no kernel known here where its kernel has other fields by now, or requires what it does not meet."""
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        declared = kernel_named(kernel)
        if plain.keys() == declared.fields.keys():
            found = Problem(declared, plain, omitted=omitted)
            declared.check_requirements(found)
            return found
    except (ConfigError, ProblemError):
        pass
    return Problem(kernel, plain, omitted=omitted)


def read_copy(data: bytes) -> list[Entry]:
    """The entries that :func:`write_copy` wrote."""
    copy = msgspec.json.decode(data, type=_Copy)
    known: dict[type, list[Any]] = {
        Problem: [_problem(*each) for each in copy.problems],
        Schedule: [Schedule.of_checked(each) for each in copy.schedules],
    }
    return msgspec.json.decode(copy.entries, type=list[Entry], dec_hook=lambda kind, number: known[kind][number])
