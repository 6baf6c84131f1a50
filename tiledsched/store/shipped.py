"""The tables that ship: read from their serving copies, and listed in the manifest with these.

A table file is written for people, holds every raw sample, and is checked value by value when it is read. Its serving copy
holds what serving needs: the entries with the estimates behind them, which a process's first call reads in a tenth of the
time. Each distinct problem and schedule is written once, and entries refer to it by its number. A copy is read only where
its hash is the one that was noted down when it was made of the table, so that its values need no second check.

After a shipped file was changed on purpose, ``python -m tiledsched.store.shipped`` checks every table and landscape,
writes the serving copies and writes the manifest anew.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tiledsched.core import data_files
from tiledsched.core.errors import ConfigError, ProblemError
from tiledsched.core.files import write_whole
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.store.codec import encode
from tiledsched.store.manifest import LISTED, SCHEMA_VERSION, listed_files, manifest_path, sha256
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
    parts = {
        "problems": [(each.kernel, dict(each.values), sorted(each.omitted)) for each in problems],
        "schedules": [encode(each) for each in schedules],
    }
    lists = (
        f'"{name}": [\n' + ",\n".join(map(_line, part)) + "\n]" for name, part in {**parts, "entries": rows}.items()
    )
    return "{\n" + ",\n".join(lists) + "\n}\n"


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


def copy_path(table: Path) -> Path:
    """The file of a table's serving copy, beside the table."""
    return table.with_suffix(".serving")


def read_shipped_entries(table: Path) -> list[Entry]:
    """The entries of a table that ships, with the name of their layer.

    They come from the serving copy where the copy is the one that was made of this table, else from the table itself.

    Raises:
        DatabaseError: the table is not the file that shipped.
    """
    name = table.relative_to(data_files.tuning_db()).as_posix()
    listed: Mapping[str, Any] = listed_files(manifest_path()).get(name, {})
    try:
        copy = copy_path(table).read_bytes()
        sound = sha256(copy) == listed.get("serving") and _is_listed(table, listed)
    except OSError:
        sound = False
    if sound:
        return read_copy(copy)
    from tiledsched.store.exchange import read_table  # which serving needs for tables of other layers only

    return [entry.replace(layer="shipped") for entry in read_table(table).entries]


def _is_listed(table: Path, listed: Mapping[str, Any]) -> bool:
    """Whether a table is the listed file. Its five megabytes are only read where it is younger than its copy."""
    is_, copy = table.stat(), copy_path(table).stat()
    if is_.st_size != listed.get("bytes"):
        return False
    if is_.st_mtime_ns <= copy.st_mtime_ns:
        return True
    with table.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return sha256(data) == listed["sha256"]


def write_manifest() -> int:
    """Write the serving copy of every table, and the manifest of all that is in the folder of shipped data.

    Returns:
        How many files are listed.

    Raises:
        DatabaseError: a table or a landscape is wrong.
    """
    from tiledsched.store.exchange import parse_table, text_of

    folder = data_files.tuning_db()
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for part in LISTED for path in (folder / part).rglob("*.json*")):
        data = path.read_bytes()
        name = path.relative_to(folder).as_posix()
        files[name] = {"sha256": sha256(data)}
        if name.startswith("tables/"):
            text = write_copy(parse_table(text_of(path, data), path.name).entries, layer="shipped")
            write_whole(copy_path(path), text)
            files[name] |= {"bytes": len(data), "serving": sha256(text.encode())}
        if name.startswith("landscapes/"):
            taken = parse_table(text_of(path, data), path.name).measurements[0].measurement
            files[name] |= {"arch": taken.device.arch, "regime": taken.regime, "problem": taken.problem.to_json()}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(listed)}" for name, listed in sorted(files.items()))
    text = f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "files": {{\n{lines}\n  }}\n}}\n'
    write_whole(manifest_path(), text)
    listed_files.cache_clear()
    return len(files)


if __name__ == "__main__":
    print(f"{write_manifest()} files")
