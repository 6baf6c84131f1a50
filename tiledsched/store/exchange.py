"""Tuned tables as JSON that people can review, and merging one database into another.

A table holds entries, the measurements behind them with their raw samples, and the facts of the artifacts. Its text depends
on its contents alone: keys are sorted, rows have a fixed order, and a value that fits on a line stands on one. So two
exports of the same state are the same bytes, and a changed entry changes a few lines. A file whose name ends in `.xz` is
compressed, which makes a recorded landscape twenty times smaller.
"""

from __future__ import annotations

import json
import lzma
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import msgspec

from tiledsched.core.errors import DatabaseError
from tiledsched.core.fields import Value
from tiledsched.core.files import XZ, check_plain, read_bounded, unpacked, write_whole
from tiledsched.core.problem import Problem
from tiledsched.store.codec import decode, encode, untrue_estimates
from tiledsched.store.evidence import standing
from tiledsched.store.foreign import OTHER_FILE, of_json
from tiledsched.store.manifest import check_shipped
from tiledsched.store.reading import unread
from tiledsched.store.records import ArtifactRecord, Entry, MergeResult, StoredMeasurement

if TYPE_CHECKING:
    from tiledsched.store.db import TuningDB

SCHEMA_VERSION = 2
"""Version of the format of table and landscape files, which docs/database.md describes."""
LINE = 118
"""The most characters of a list or an object that stands on one line."""
LONGEST_STEM = 200
"""The most characters of a file's name without its ending."""
LISTS = ("artifacts", "entries", "measurements")
"""The lists of a table file."""
LOCAL = ("id", "measurement_id", "run_id", "layer")
"""Fields that mean something in one database or one process only, and are not written to files."""
Record = TypeVar("Record")


@dataclass(frozen=True, kw_only=True)
class TableFile:
    """The contents of a table file, checked."""

    entries: tuple[Entry, ...]
    """The entries, each with the summary of its measurement."""
    measurements: tuple[StoredMeasurement, ...]
    """The measurements behind the entries, and any others that the file holds (those of a recorded landscape)."""
    artifacts: tuple[ArtifactRecord, ...]
    """What is known of the measurements' machine code."""


def export_table(
    db: TuningDB, target: str | os.PathLike[str] | IO[str], arch: str | None = None, kernel: str | None = None
) -> int:
    """Write the entries of `arch` and `kernel`, or all entries, and the measurements behind them.

    Args:
        db: the database to export from.
        target: a path or an open text file.
        arch: None for every arch.
        kernel: None for every kernel.

    Returns:
        How many entries were written.
    """
    entries = db.entries(arch, kernel)
    uids = {entry.measurement.uid for entry in entries if entry.measurement}
    evidence = [stored for stored in db.measurements(arch=arch, served=True, disturbed=True) if stored.uid in uids]
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
    """Write the newest measurement of every program of one problem on one device as a table file without entries.

    Args:
        db: the database to export from.
        target: a path or an open text file.
        problem: the problem.
        device_name: the device.
        regime: burst or sustained.
        full: write every measurement there ever was, also those that were disturbed.

    Returns:
        How many measurements were written.
    """
    evidence = db.measurements(problem, device_name=device_name, regime=regime, latest=not full, disturbed=full)
    _write(target, [], evidence, db.artifacts())
    return len(evidence)


def landscape_file_name(problem: Problem, device_name: str, regime: str) -> str:
    """The name of a landscape's file: device, regime, and the kernel's own words for the problem, or its name and values.

    An example is `h200_burst_norms-RmsNorm_rows4096_columns8192_float16.json.xz`. A name that would be too long is cut, and
    ends in the problem's id.
    """
    own_words = problem.declaration.file_words if problem.known else None
    words = (
        own_words(problem)
        if own_words is not None
        else "_".join([problem.kernel, *map(_file_word, problem.values.items())])
    )
    device = device_name.removeprefix("NVIDIA ").replace(" ", "-").lower()
    stem = re.sub(r"[^\w.-]+", "-", f"{device}_{regime}_{words}", flags=re.ASCII).lstrip(".-")
    return (stem if len(stem) <= LONGEST_STEM else f"{stem[: LONGEST_STEM - 13]}_{problem.id}") + ".json.xz"


def _file_word(item: tuple[str, Value]) -> str:
    name, value = item
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    if isinstance(value, str):
        return value
    return f"{name}{value}" if isinstance(value, int) else f"{name}{'-'.join(map(str, value))}"


def import_table(db: TuningDB, path: str | os.PathLike[str]) -> MergeResult:
    """Merge a table file into `db`. Nothing is stored unless the whole file is sound. Of its rows, few are in memory at a time.

    Raises:
        DatabaseError: the file cannot be read or is wrong; the message names the key.
    """
    name, data = _contents(path)
    rows = _Rows(_lists(data, name), name)
    return db.merge(_Again(rows.measured), _Again(rows.entries), rows.artifacts())


def merge_database(db: TuningDB, other_url: str | os.PathLike[str]) -> MergeResult:
    """Merge the measurements and entries of another database. Its builds, runs and failures are not merged. Of its measurements,
    few are in memory at a time.

    Raises:
        DatabaseError: the other database is missing or unreadable, has another schema, or holds a value that files may not.
    """
    from tiledsched.store.db import TuningDB

    with TuningDB.open(other_url, read_only=True) as other:
        entries = list(validated(other.entries(), other.url))
        named = {entry.measurement.uid for entry in entries if entry.measurement}
        evidence: dict[str, StoredMeasurement] = {}

        def measured() -> Iterator[StoredMeasurement]:
            for stored in validated(other.every_measurement(), other.url):
                if stored.uid in named:
                    evidence[stored.uid] = _without_samples(stored)
                yield stored

        def supported() -> Iterator[Entry]:
            for entry in entries:
                own = evidence.get(entry.measurement.uid) if entry.measurement else None
                _check_evidence(entry, own, f"{other.url}: the entry of {entry.problem} on {entry.arch}")
                yield entry

        artifacts = list(validated(other.artifacts().values(), other.url))
        return db.merge(_Again(lambda: checked(measured(), other.url)), _Again(supported), artifacts)


class _Again(Iterable[Record]):
    """What a function yields, anew each time: a transaction that meets a conflict is tried again."""

    def __init__(self, make: Callable[[], Iterator[Record]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Record]:
        return self._make()


def checked(measurements: Iterable[StoredMeasurement], where: str) -> Iterator[StoredMeasurement]:
    """The measurements, each held to its samples.

    Raises:
        DatabaseError: a median or an interval is not that of its samples.
    """
    for stored in measurements:
        taken = stored.measurement
        for wrong in untrue_estimates(taken, taken.samples_us, len(taken.samples_us)):
            raise DatabaseError(f"{where}: measurement {stored.uid}: {wrong}; measure it again")
        yield stored


def validated(records: Iterable[Record], url: str) -> Iterator[Record]:
    """The records of a database after the checks that records of a file must pass."""
    return (decode(type(record), encode(record), f"{url}: {type(record).__name__}") for record in records)


def read_table(path: str | os.PathLike[str]) -> TableFile:
    """The contents of a table file, without a database.

    Raises:
        DatabaseError: the file cannot be read or is wrong; the message names the key.
    """
    name, data = _contents(path)
    return parse_table(data, name)


def _contents(path: str | os.PathLike[str]) -> tuple[str, bytes | bytearray]:
    """The name of a table file, and what it holds, unpacked."""
    name = os.path.basename(os.fspath(path))
    try:
        data = read_bounded(path)
        check_shipped(Path(path), data)
        return name, _unpacked(Path(path), data)
    except OSError as error:
        raise DatabaseError(f"cannot read {name}: {error.strerror}; check the path") from error
    except (lzma.LZMAError, EOFError) as error:
        raise DatabaseError(f"{name} is not JSON: {error}; {OTHER_FILE}") from error


def parse_table(text: str | bytes | bytearray, name: str) -> TableFile:
    """The contents of a table file from its text.

    Raises:
        DatabaseError: it is wrong; the message names the key.
    """
    rows = _Rows(_lists(text, name), name)
    measurements = tuple(rows.measurements())
    return TableFile(entries=tuple(rows.entries()), measurements=measurements, artifacts=tuple(rows.artifacts()))


class _Rows:
    """The rows of a table file, each of which is read when its turn comes."""

    def __init__(self, lists: dict[str, list[Any]], name: str) -> None:
        self._lists, self._name = lists, name
        self._entries = [_read(row, f"{name}: entries[{i}]") for i, row in enumerate(lists["entries"])]
        self._named = {
            row["measurement"]
            for row in self._entries
            if isinstance(row, dict) and isinstance(row.get("measurement"), str)
        }
        self._evidence: dict[str, StoredMeasurement] = {}

    def measurements(self) -> Iterator[StoredMeasurement]:
        """The measurements, in order. Those that entries name are remembered."""
        seen: set[str] = set()
        for i, one in enumerate(_rows(StoredMeasurement, self._lists["measurements"], f"{self._name}: measurements")):
            if one.uid in seen:
                raise DatabaseError(f"{self._name}: measurements[{i}].uid: {one.uid} appears twice; remove one")
            seen.add(one.uid)
            if one.uid in self._named:
                self._evidence[one.uid] = _without_samples(one)
            yield one

    def measured(self) -> Iterator[StoredMeasurement]:
        """The measurements, each held to its samples."""
        return checked(self.measurements(), self._name)

    def entries(self) -> Iterator[Entry]:
        """The entries, each with the summary of its measurement, once all measurements were read."""
        found: dict[tuple[str, ...], Entry] = {}
        named: dict[tuple[str, ...], Any] = {}
        for i, row in enumerate(self._entries):
            where = f"{self._name}: entries[{i}]"
            entry = _entry(row, self._evidence, where)
            if named.setdefault(entry.key, row["problem"]) == row["problem"] and entry.key in found:
                raise DatabaseError(f"{where}: a second entry for {entry.problem} on {entry.arch}; remove one")
            if entry.key in found:  # their problems had two names once
                entry = min(found[entry.key], entry, key=standing)
            found[entry.key] = entry
        return iter(found.values())

    def artifacts(self) -> list[ArtifactRecord]:
        """What is known of the machine code."""
        return [*_rows(ArtifactRecord, self._lists["artifacts"], f"{self._name}: artifacts")]


def _without_samples(stored: StoredMeasurement) -> StoredMeasurement:
    """A measurement of which only the number of samples is kept."""
    taken = stored.measurement
    return replace(stored, measurement=replace(taken, samples_us=unread(len(taken.samples_us))))


def _lists(text: str | bytes | bytearray, name: str) -> dict[str, list[Any]]:
    """The lists of a table file by their names: of rows that are not read yet where the file is a table as this program writes
    it, so that no more than its text is in memory.
    """
    try:
        whole = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        if whole.keys() == {*LISTS, "schema_version"} and bytes(whole["schema_version"]) == b"%d" % SCHEMA_VERSION:
            return {key: msgspec.json.decode(whole[key], type=list[msgspec.Raw]) for key in LISTS}
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    return _parsed(text, name)


def _read(row: Any, where: str) -> Any:
    """A row of a list, whose syntax was checked when the list was read."""
    try:
        return msgspec.json.decode(row) if isinstance(row, msgspec.Raw) else row
    except (UnicodeDecodeError, msgspec.DecodeError) as error:  # the latter from msgspec 0.23 on
        raise DatabaseError(f"{where} is not in UTF-8: {error}; {OTHER_FILE}") from error


def _parsed(text: str | bytes | bytearray, name: str) -> dict[str, Any]:
    """The lists of any table file by their names. Their rows are not checked yet."""
    try:
        data = json.loads(text)
        json.dumps(data, ensure_ascii=False).encode()  # halves of characters are no text
    except (ValueError, RecursionError) as error:
        raise DatabaseError(f"{name} is not JSON: {error}; {OTHER_FILE}") from error
    foreign = of_json(data, name)
    if foreign is not None:
        return foreign
    if not isinstance(data, dict) or "schema_version" not in data:
        raise DatabaseError(f"{name}: schema_version: missing; {OTHER_FILE}")
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


def _rows(cls: type[Record], rows: list[Any], where: str) -> Iterator[Record]:
    return (
        decode(cls, _portable(_read(row, f"{where}[{i}]"), f"{where}[{i}]"), f"{where}[{i}]")
        for i, row in enumerate(rows)
    )


def _portable(row: Any, where: str) -> Any:
    """A row, unless it has a field that means nothing in a file."""
    for key in LOCAL:
        if isinstance(row, dict) and key in row:
            raise DatabaseError(f"{where}.{key}: has no meaning in a file; remove it")
    return row


def _entry(row: Any, stored: dict[str, StoredMeasurement], where: str) -> Entry:
    """An entry with the summary of its measurement, which the row names by its uid."""
    if not isinstance(row, dict):
        raise DatabaseError(f"{where}: expected an object, got {row!r}; correct the list")
    uid = row.get("measurement")
    entry = decode(Entry, {**_portable(row, where), "measurement": None}, where)
    evidence = stored.get(uid) if isinstance(uid, str) else None
    if uid is not None and evidence is None:
        raise DatabaseError(f"{where}.measurement: {uid!r} is not the uid of any of measurements; add it there")
    _check_evidence(entry, evidence, where)
    if evidence and entry.provenance == "measured" and evidence.measurement.conditions.concurrent_pids:
        raise DatabaseError(
            f"{where}.measurement: {evidence.uid} was timed {evidence.measurement.conditions.disturbance}, which decides "
            "nothing; measure it again"
        )
    return entry.replace(measurement=evidence.summary if evidence else None)


def _check_evidence(entry: Entry, evidence: StoredMeasurement | None, where: str) -> None:
    """Hold a measured entry to what was measured."""
    if entry.updated_at is None:
        raise DatabaseError(f"{where}.updated_at: missing; a merge needs it to tell which entry is newer")
    if entry.provenance != "measured":
        return
    if evidence is None:
        raise DatabaseError(f"{where}.measurement: missing although the entry says measured; add the evidence")
    taken = evidence.measurement
    for key, mine, its in (
        ("arch", entry.arch, taken.device.arch),
        ("fingerprint", entry.fingerprint, taken.fingerprint),
        ("problem", entry.problem, taken.problem),
        ("schedule", entry.schedule, taken.schedule),
    ):
        if mine != its:
            raise DatabaseError(
                f"{where}.{key}: {mine} is not that of its measurement {evidence.uid}, {its}; correct one"
            )


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
        "entries": [written(entry) for entry in entries],
        "measurements": [written(stored) for stored in sorted(evidence, key=_evidence_order)],
        "artifacts": [encode(known[key]) for key in sorted(wanted & set(known))],
    }
    text = _pretty(data, "") + "\n"
    if isinstance(target, (str, os.PathLike)):
        try:
            write_text(Path(target), text)
        except OSError as error:
            raise DatabaseError(f"cannot write {os.fspath(target)}: {error.strerror}; give another path") from error
    else:
        target.write(text)


def text_of(path: Path, data: bytes) -> str:
    """The text of a file at `path` that holds `data`."""
    return _unpacked(path, data).decode("utf-8")


def _unpacked(path: Path, data: bytes) -> bytes | bytearray:
    is_packed = path.suffix == ".xz" or data.startswith(XZ)
    return unpacked(data) if is_packed else check_plain(path, data)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all. An `.xz` file is compressed."""
    data = text.encode("utf-8")
    write_whole(path, lzma.compress(data, preset=9) if path.suffix == ".xz" else data)


def written(record: Entry | StoredMeasurement) -> dict[str, Any]:
    """An entry or a measurement as files hold it. An entry names its measurement by the uid."""
    data = {key: value for key, value in encode(record).items() if key not in LOCAL}
    if isinstance(record, Entry):
        data["measurement"] = record.measurement.uid if record.measurement else None
    return data


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
    """JSON with sorted keys. A list of numbers stands on one line, and so does any value that fits."""
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
