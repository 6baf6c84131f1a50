"""Tuned tables as reviewable JSON, and merging one database into another.

A table holds entries, the measurements behind them with their raw samples, and the facts of the artifacts. Its text is
a function of its contents alone: keys sorted, rows in a fixed order, what fits on a line on one line. Two exports of
the same state are the same bytes, and a change of one entry is a change of a few lines. A file whose name ends in `.xz`
is compressed: recorded landscapes are twenty times smaller that way.
"""

from __future__ import annotations

import json
import lzma
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from tiledsched.core.errors import DatabaseError
from tiledsched.core.fields import Value
from tiledsched.core.files import read_bounded, unpacked, write_whole
from tiledsched.core.problem import Problem
from tiledsched.measure.runner import Measurement
from tiledsched.store.codec import decode, encode
from tiledsched.store.foreign import of_csv, of_json, to_csv
from tiledsched.store.manifest import check_shipped
from tiledsched.store.records import PROVENANCES, ArtifactRecord, Entry, MergeResult, StoredMeasurement, Toolchain
from tiledsched.store.validation import untrue_estimates

if TYPE_CHECKING:
    from tiledsched.store.db import TuningDB

SCHEMA_VERSION = 2
"""Of table and landscape files; docs/landscapes.md says what each version holds."""
LINE = 118
"""Characters a list or object may take to stay on one line."""
LONGEST_STEM = 200
"""Characters of a file's name without its ending."""
LISTS = ("artifacts", "entries", "measurements")
Made = TypeVar("Made")
LOCAL = ("measurement_id", "run_id", "layer")
"""What means something in one database, or one process, only."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The contents of a table file, checked."""

    entries: tuple[Entry, ...]
    """With the summary of their measurement filled in."""
    measurements: tuple[StoredMeasurement, ...]
    """Those behind the entries, and any others the file holds (a recorded landscape)."""
    artifacts: tuple[ArtifactRecord, ...]
    """What is known of their machine code."""


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    """A measurement as a file holds it."""

    uid: str
    kernel: str
    source_hash: str
    toolchain: Toolchain
    measurement: Measurement
    created_at: datetime


def export_table(
    db: TuningDB, target: str | os.PathLike[str] | IO[str], arch: str | None = None, kernel: str | None = None
) -> int:
    """Write the entries of `arch` and `kernel` (or all) with the measurements behind them to a path or an open text file.

    Returns:
        How many entries were written.
    """
    entries = db.entries(arch, kernel)
    uids = {entry.measurement.uid for entry in entries if entry.measurement}
    evidence = [stored for stored in db.measurements(arch=arch, served=True) if stored.uid in uids]
    _write(target, entries, evidence, db.artifacts(arch))
    return len(entries)


def export_landscape(
    db: TuningDB,
    target: str | os.PathLike[str] | IO[str],
    problem: Problem,
    device_name: str,
    regime: str,
    *,
    full: bool = False,
) -> int:
    """Write the newest measurement of every program of one problem on one device, in the same format, no entries; as CSV where
    the path ends so. `full`: every measurement there ever was, those that decide nothing included.

    Returns:
        How many measurements were written.
    """
    evidence = db.measurements(problem, device_name=device_name, regime=regime, latest=not full, disturbed=full)
    _write(target, [], evidence, db.artifacts())
    return len(evidence)


def landscape_file_name(problem: Problem, device_name: str, regime: str, ending: str = ".json.xz") -> str:
    """What a landscape's file is called: device, regime, kernel and values, or what the kernel says instead of those.

    `h200_burst_norms-RmsNorm_rows4096_columns8192_float16.json.xz`; a name that would be too long ends in the problem's id.
    """
    told = problem.declaration.file_words if problem.known else None
    words = told(problem) if told is not None else "_".join([problem.kernel, *map(_file_word, problem.values.items())])
    device = device_name.removeprefix("NVIDIA ").replace(" ", "-").lower()
    stem = re.sub(r"[^\w.-]+", "-", f"{device}_{regime}_{words}", flags=re.ASCII).lstrip(".-")
    return (stem if len(stem) <= LONGEST_STEM else f"{stem[: LONGEST_STEM - 13]}_{problem.id}") + ending


def _file_word(value: tuple[str, Value]) -> str:
    name, is_ = value
    if isinstance(is_, bool):
        return name if is_ else f"no-{name}"
    if isinstance(is_, str):
        return is_
    return f"{name}{is_}" if isinstance(is_, int) else f"{name}{'-'.join(map(str, is_))}"


def import_table(db: TuningDB, path: str | os.PathLike[str]) -> MergeResult:
    """Merge a table file into `db`; nothing is stored unless all of it is sound.

    Raises:
        DatabaseError: the file cannot be read or is wrong; the message names the key.
    """
    table = read_table(path)
    _check_estimates(table.measurements, os.path.basename(os.fspath(path)))
    return db.merge(table.measurements, table.entries, table.artifacts)


def merge_database(db: TuningDB, other_url: str | os.PathLike[str]) -> MergeResult:
    """Merge the measurements and entries of another database. Its builds, runs and failures stay its own.

    Raises:
        DatabaseError: the other database is missing, unreadable, of another schema, or holds what no file may.
    """
    from tiledsched.store.db import TuningDB

    with TuningDB.open(other_url, read_only=True) as other:
        measurements = _held(other.measurements(disturbed=True), other.url)
        entries = _held(other.entries(), other.url)
        artifacts = _held(other.artifacts().values(), other.url)
    _check_estimates(measurements, other.url)
    return db.merge(measurements, entries, artifacts)


def _check_estimates(measurements: Iterable[StoredMeasurement], where: str) -> None:
    """Raise where a median or interval is not that of its samples: it would be served, and `db check` would find it."""
    for stored in measurements:
        taken = stored.measurement
        samples = list(taken.samples_us)
        for wrong in untrue_estimates(taken.median_us, taken.ci_low_us, taken.ci_high_us, samples, len(samples)):
            raise DatabaseError(f"{where}: measurement {stored.uid}: {wrong}; measure it again")


def _held(records: Iterable[Made], url: str) -> list[Made]:
    """The records of a database, held to the form that they have in a file."""
    return [decode(type(record), encode(record), f"{url}: {type(record).__name__}") for record in records]


def read_table(path: str | os.PathLike[str]) -> Table:
    """The contents of a table file, without a database.

    Raises:
        DatabaseError: the file cannot be read or is wrong; the message names the key.
    """
    name = os.path.basename(os.fspath(path))
    return _table(_load(path, name), name)


def parse_table(text: str, name: str) -> Table:
    """The contents of a table file from its text.

    Raises:
        DatabaseError: it is wrong; the message names the key.
    """
    return _table(_parsed(text, name), name)


def _table(data: dict[str, Any], name: str) -> Table:
    artifacts = _rows(ArtifactRecord, data["artifacts"], f"{name}: artifacts")
    stored, entries = _evidence_and_entries(data, name)
    return Table(entries=tuple(entries), measurements=tuple(stored.values()), artifacts=tuple(artifacts))


def read_entries(path: str | os.PathLike[str]) -> list[Entry]:
    """The entries of a table file alone: who only serves or lists them does not wait for the facts of machine code.

    Raises:
        DatabaseError: as for the whole table, but for what is wrong with artifacts.
    """
    name = os.path.basename(os.fspath(path))
    return _evidence_and_entries(_load(path, name), name)[1]


def _evidence_and_entries(data: dict[str, Any], name: str) -> tuple[dict[str, StoredMeasurement], list[Entry]]:
    stored: dict[str, StoredMeasurement] = {}
    for i, one in enumerate(_rows(_Evidence, data["measurements"], f"{name}: measurements")):
        if one.uid in stored:
            raise DatabaseError(f"{name}: measurements[{i}].uid: {one.uid} appears twice; remove one")
        stored[one.uid] = StoredMeasurement(id=0, run_id=None, **vars(one))
    entries = []
    keys = set()
    for i, row in enumerate(data["entries"]):
        entry = _entry(row, stored, f"{name}: entries[{i}]")
        if entry.key in keys:
            raise DatabaseError(f"{name}: entries[{i}]: a second entry for {entry.problem} on {entry.arch}; remove one")
        keys.add(entry.key)
        entries.append(entry)
    return stored, entries


def _load(path: str | os.PathLike[str], name: str) -> dict[str, Any]:
    try:
        return _parsed(read_text(Path(path)), name)
    except OSError as error:
        raise DatabaseError(f"cannot read {name}: {error.strerror}; check the path") from error
    except (UnicodeDecodeError, lzma.LZMAError, EOFError) as error:
        raise DatabaseError(f"{name} is not JSON: {error}; give a file that `tiledsched db export` wrote") from error


def _parsed(text: str, name: str) -> dict[str, Any]:
    if name.removesuffix(".xz").endswith(".csv"):
        return of_csv(text, name)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatabaseError(f"{name} is not JSON: {error}; give a file that `tiledsched db export` wrote") from error
    foreign = of_json(data, name)
    if foreign is not None:
        return foreign
    if not isinstance(data, dict) or "schema_version" not in data:
        raise DatabaseError(f"{name}: schema_version: missing; give a file that `tiledsched db export` wrote")
    version = data["schema_version"]
    if type(version) is int and version > SCHEMA_VERSION:
        raise DatabaseError(
            f"{name}: schema_version: {version} was written by a newer tiledsched, and this one reads "
            f"{SCHEMA_VERSION}; upgrade tiledsched"
        )
    if type(version) is not int or version != SCHEMA_VERSION:
        raise DatabaseError(
            f"{name}: schema_version: {version!r} is not read, only {SCHEMA_VERSION} is; export the file again from its "
            "database, with this tiledsched"
        )
    for key in data:
        if key not in (*LISTS, "schema_version"):
            raise DatabaseError(f"{name}: {key}: unknown key; known are {', '.join(LISTS)} and schema_version")
    for key in LISTS:
        if not isinstance(data.get(key), list):
            raise DatabaseError(f"{name}: {key}: expected a list; add it, empty where there is nothing")
    return data


def _rows(cls: type[Any], rows: list[Any], where: str) -> list[Any]:
    return [decode(cls, row, f"{where}[{i}]") for i, row in enumerate(rows)]


def _entry(row: Any, stored: dict[str, StoredMeasurement], where: str) -> Entry:
    if not isinstance(row, dict):
        raise DatabaseError(f"{where}: expected an object, got {row!r}; correct the list")
    for key in LOCAL:
        if key in row:
            raise DatabaseError(f"{where}.{key}: has no meaning in a file; remove it")
    uid = row.get("measurement")
    entry = decode(Entry, {**row, "measurement": None}, where)
    if entry.provenance not in PROVENANCES:
        raise DatabaseError(f"{where}.provenance: {entry.provenance!r} is not one of {', '.join(PROVENANCES)}")
    if entry.updated_at is None:
        raise DatabaseError(f"{where}.updated_at: missing; a merge needs it to tell which entry is newer")
    if uid is None:
        if entry.provenance == "measured":
            raise DatabaseError(f"{where}.measurement: missing although the entry says measured; add the evidence")
        return entry
    evidence = stored.get(uid) if isinstance(uid, str) else None
    if evidence is None:
        raise DatabaseError(f"{where}.measurement: {uid!r} is not the uid of any of measurements; add it there")
    if entry.provenance == "measured":
        taken = evidence.measurement
        same = {
            "arch": (entry.arch, taken.device.arch),
            "fingerprint": (entry.fingerprint, taken.fingerprint),
            "problem": (entry.problem, taken.problem),
            "schedule": (entry.schedule, taken.schedule),
        }
        if taken.conditions.beside:
            raise DatabaseError(
                f"{where}.measurement: {uid} was timed {taken.conditions.disturbance}, which decides nothing; "
                "measure it again"
            )
        for key, (mine, its) in same.items():
            if mine != its:
                raise DatabaseError(f"{where}.{key}: {mine} is not that of its measurement {uid}, {its}; correct one")
    return entry.replace(measurement=evidence.summary)


def _write(
    target: str | os.PathLike[str] | IO[str],
    entries: list[Entry],
    evidence: list[StoredMeasurement],
    known: dict[tuple[str, str], ArtifactRecord],
) -> None:
    wanted = {(stored.measurement.device.arch, stored.measurement.fingerprint) for stored in evidence}
    wanted |= {(entry.arch, entry.fingerprint) for entry in entries}
    data: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "entries": [_entry_json(entry) for entry in entries],
        "measurements": [written(stored) for stored in sorted(evidence, key=_evidence_order)],
        "artifacts": [encode(known[key]) for key in sorted(wanted & set(known))],
    }
    as_csv = isinstance(target, (str, os.PathLike)) and Path(target).name.removesuffix(".xz").endswith(".csv")
    text = to_csv(data["measurements"], data["artifacts"]) if as_csv else _pretty(data, "") + "\n"
    if isinstance(target, (str, os.PathLike)):
        try:
            write_text(Path(target), text)
        except OSError as error:
            raise DatabaseError(f"cannot write {os.fspath(target)}: {error.strerror}; give another path") from error
    else:
        target.write(text)


def read_text(path: Path) -> str:
    """The text of a file; `.xz` files are decompressed.

    Raises:
        DatabaseError: a shipped file that is not what it was.
    """
    data = read_bounded(path)
    check_shipped(path, data)
    return text_of(path, data)


def text_of(path: Path, data: bytes) -> str:
    """The text of a file with these bytes."""
    return (unpacked(data) if path.suffix == ".xz" else data).decode("utf-8")


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all; `.xz` files are compressed."""
    data = text.encode("utf-8")
    write_whole(path, lzma.compress(data, preset=9) if path.suffix == ".xz" else data)


def _entry_json(entry: Entry) -> dict[str, Any]:
    data = {key: value for key, value in entry.to_json().items() if key not in LOCAL}
    return {**data, "measurement": entry.measurement.uid if entry.measurement else None}


def written(stored: StoredMeasurement) -> dict[str, Any]:
    """A measurement as files hold it."""
    return {key: value for key, value in encode(stored).items() if key not in ("id", "run_id")}


def _evidence_order(stored: StoredMeasurement) -> tuple[Any, ...]:
    taken = stored.measurement
    return (
        taken.device.arch,
        taken.device.name,
        taken.regime,
        taken.problem,
        taken.fingerprint,
        stored.created_at,
        stored.uid,
    )


_flat = json.JSONEncoder(ensure_ascii=False).encode


def _pretty(value: Any, indent: str) -> str:
    """JSON with sorted keys; a list of numbers, or whatever fits, on one line."""
    numbers = isinstance(value, list) and all(isinstance(item, (int, float)) for item in value)
    if not isinstance(value, (dict, list)) or not value or numbers:
        return _flat(value)
    inner = indent + "  "
    if isinstance(value, dict):
        (opening, closing), parts = "{}", [f"{_flat(key)}: {_pretty(value[key], inner)}" for key in sorted(value)]
    else:
        (opening, closing), parts = "[]", [_pretty(item, inner) for item in value]
    flat = sum(map(len, parts)) + 2 * len(parts)  # brackets, and what stands between the parts
    if flat + len(indent) <= LINE and not any("\n" in part for part in parts):
        return opening + ", ".join(parts) + closing
    lines = (inner + part for part in parts)
    return opening + "\n" + ",\n".join(lines) + f"\n{indent}{closing}"
