"""Reads the two sides of `tiledsched compare`: databases, tables, landscapes, reports, devices, compilers and dates."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from tiledsched.core import data_files, registry
from tiledsched.core.device import arch_named
from tiledsched.core.errors import ConfigError, DatabaseError, TiledschedError
from tiledsched.core.files import check_plain, from_csv_cell, read_bounded
from tiledsched.core.labels import format_problem
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.estimate import Timing
from tiledsched.report.compare import KnownTime, Side, side_of
from tiledsched.store.evidence import for_compiler, of_one_compiler, timed_alike
from tiledsched.store.exchange import read_table
from tiledsched.store.location import database_exists
from tiledsched.store.records import Entry, MeasurementSummary, StoredMeasurement

SHIPPED = "shipped"
TABLES = (".json", ".json.xz")
DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2})?)?")
BEFORE, AFTER = "before", "after"
"""Selectors of what was known before the last run of a database began, and of all that is known since."""
NEEDED = ("arch", "device", "regime", "provenance", "problem_id", "schedule_id", "median_us", "ci_low_us", "ci_high_us")
"""Columns of a report's schedules.csv."""
VERSION = re.compile(r"\d+\.\d+(\.\d+)*")
ACCEPTED = (
    "a database, a table or landscape file, a folder of them, a report's folder, `shipped`, or of your database a device, "
    "a compiler version, a date (2026-11-22, or with a time 2026-11-22T14:30, UTC), or `before` and `after` its last tune"
)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which problems are compared."""

    kernel: str = ""
    """Name of the only kernel; empty for all kernels."""
    arch: str = ""
    """The only arch; empty for all archs."""
    regime: str = ""
    """burst or sustained; empty for both."""

    def holds(self, kernel: str, arch: str, regime: str) -> bool:
        """Whether a time belongs to the problems wanted. `kernel` is empty for a report, whose files do not name it, and
        `regime` for an estimate, which stands for both.
        """
        return (
            kernel in ("", self.kernel or kernel)
            and arch == (self.arch or arch)
            and regime in ("", self.regime or regime)
        )


Evidence = tuple[list[Entry], list[StoredMeasurement]]


def read_side(word: str, db: str | None, wanted: Wanted) -> Side:
    """Read one side of a comparison.

    Args:
        word: a SOURCE, a SELECTOR of the user's database over what ships, or SOURCE@SELECTOR. A source is a database (file or
            URL), a table or landscape file, a folder of them, a report's folder, or `shipped`. A selector is a compiler version
            (or its beginning), a date or time (what was known at its end), `before` or `after` the last run of the database,
            an arch, or a part of a device's name.
        db: the user's database, as for `TuningDB.open`.
        wanted: which problems.

    Raises:
        ConfigError: it is none of these, or nothing is measured there.
        DatabaseError: it cannot be read.
    """
    source, selector = _split(word)
    files = [each for each in (Path(source), Path(source) / "schedules.csv") if each.name.endswith("schedules.csv")]
    schedules = next((each for each in files if each.is_file()), None) if source else None
    if schedules is not None:
        if selector:
            raise ConfigError(f"{word}: a report is taken whole; compare a database instead, or leave out @{selector}")
        found = [one for one in _of_report(schedules) if wanted.holds(one.kernel, one.arch, one.regime)]
        measured = [one for one in found if not one.modelled]
        side = side_of(word, [], measured, [one for one in found if one.modelled])
    else:
        entries, measurements = _evidence(source, db, wanted)
        entries = [one for one in entries if wanted.holds(one.kernel, one.arch, one.regime)]
        measurements = [
            one
            for one in timed_alike(measurements)
            if wanted.holds(one.kernel, one.measurement.device.arch, one.measurement.regime)
        ]
        compilers = sorted({one.toolchain.tileiras for one in measurements})
        devices = sorted({one.measurement.device.name for one in measurements})
        entries, measurements = _selected(entries, measurements, selector)
        side = side_of(
            word,
            map(_of_entry, for_compiler((one for one in entries if one.measurement), "")),
            map(_of_stored, sorted(measurements, key=lambda one: (one.created_at, one.uid), reverse=True)),
            [_of_entry(one) for one in entries if one.measurement is None and one.model_us],
        )
        if not _usable(side) and selector:
            raise ConfigError(
                f"{word}: nothing of {selector!r} is measured there; it has the compilers {_some(compilers)} and "
                f"the devices {_some(devices)}"
            )
    if not _usable(side):
        raise ConfigError(f"{word}: nothing is measured there that was asked for; give {ACCEPTED}")
    return side


def _usable(side: Side) -> bool:
    """Whether a side can be compared: something is measured on it, or it is estimated for one arch."""
    return bool(side.best) or len({one.arch for one in side.estimates.values()}) == 1


def _split(word: str) -> tuple[str, str]:
    """The source and the selector of a word; either may be empty."""
    source, at, selector = word.rpartition("@")
    if at and source and "/" not in selector:
        return source, selector
    if word == SHIPPED or "://" in word or os.path.exists(os.path.expanduser(word)):
        return word, ""
    if "/" in word or word.endswith((".db", *TABLES)):
        raise ConfigError(f"there is no {word}; give {ACCEPTED}")
    return "", word


def _evidence(source: str, db: str | None, wanted: Wanted) -> Evidence:
    """The evidence of a source; without one that of the user's database over what ships."""
    if source in ("", SHIPPED):
        tables = sorted((data_files.tuning_db() / "tables").glob("*/*.json"))
        shipped = _read(
            path for path in tables if wanted.kernel in ("", path.parent.name) and wanted.arch in ("", path.stem)
        )
        own = _stored(db, wanted) if not source and database_exists(db) else ([], [])
        return [*own[0], *shipped[0]], [*own[1], *shipped[1]]
    path = Path(os.path.expanduser(source))
    if "://" not in source and (os.path.isdir(path) or source.endswith(TABLES)):
        found = (
            sorted(each for each in path.rglob("*") if each.name.endswith(TABLES)) if os.path.isdir(path) else [path]
        )
        if not found:
            raise ConfigError(f"{path} holds no table and no landscape; give {ACCEPTED}")
        return _read(found)
    if not database_exists(source):
        raise ConfigError(f"there is no database at {source}; give {ACCEPTED}")
    return _stored(source, wanted)


def _read(paths: Iterable[Path]) -> Evidence:
    entries: list[Entry] = []
    measurements: dict[str, StoredMeasurement] = {}
    for path in paths:
        table = read_table(path)
        entries += table.entries
        measurements |= {one.uid: one for one in table.measurements}
    return entries, list(measurements.values())


def _stored(url: str | None, wanted: Wanted) -> Evidence:
    from tiledsched.store.db import TuningDB

    with TuningDB.open(url, read_only=True) as db:
        return db.entries(arch=wanted.arch or None, kernel=wanted.kernel or None), db.measurements(
            arch=wanted.arch or None, kernel=wanted.kernel or None, regime=wanted.regime or None
        )


def _selected(
    entries: Sequence[Entry], measurements: Sequence[StoredMeasurement], selector: str
) -> tuple[list[Entry], list[StoredMeasurement]]:
    """The evidence that a selector picks. Where it names no compiler, each problem and GPU is taken with its newest one."""
    end = _end(measurements, selector)
    if end is not None:
        # What was served then is not kept: the fastest of what was measured by then stands for it.
        return [one for one in entries if one.measurement is None], of_one_compiler(
            [one for one in measurements if one.created_at < end], ""
        )
    if VERSION.fullmatch(selector):
        fits = re.compile(rf"{re.escape(selector)}(\..*)?").fullmatch
        left = [one for one in measurements if fits(one.toolchain.tileiras)]
        return [one for one in entries if fits(one.compiler)], left
    if not selector:
        return list(entries), of_one_compiler(measurements, "")
    word, arch = selector.lower(), arch_named(selector)
    left = [one for one in measurements if word in one.measurement.device.name.lower()]
    served = [one for one in entries if one.measurement is not None and word in one.measurement.device.name.lower()]
    if not left and not served:  # it names an arch, or a GPU of which only estimates are known
        left = [one for one in measurements if one.measurement.device.arch == selector.lower()]
        served = [one for one in entries if one.arch == (selector.lower() if one.measurement else arch)]
    return served, of_one_compiler(left, "")


def _end(measurements: Sequence[StoredMeasurement], selector: str) -> datetime | None:
    """The moment up to which a selector takes measurements; None for one that names no moment."""
    if DATE.fullmatch(selector):
        try:
            moment = datetime.fromisoformat(selector).replace(tzinfo=timezone.utc)
        except ValueError:
            raise ConfigError(f"{selector} is no date; write e.g. 2026-11-22, or 2026-11-22T14:30 (UTC)") from None
        return moment if len(selector) > len("2026-11-22") else moment + timedelta(days=1)
    if selector not in (BEFORE, AFTER):
        return None
    newest = max(
        (one for one in measurements if one.run_id), key=lambda one: (one.created_at, one.run_id), default=None
    )
    if newest is None:
        raise ConfigError(
            f"{selector!r} asks for the last tune, and no tune has measured anything there; give {ACCEPTED}"
        )
    if selector == AFTER:
        return datetime.max.replace(tzinfo=timezone.utc)
    return min(one.created_at for one in measurements if one.run_id == newest.run_id)


def _of_stored(stored: StoredMeasurement) -> KnownTime:
    one = stored.measurement
    return _known(one, stored.summary, compiler=stored.toolchain.tileiras, regime=one.regime)


def _of_entry(entry: Entry) -> KnownTime:
    """The time of what is served: measured, or where it is not, the model's estimate."""
    regime = entry.regime if entry.measurement else ""
    ties = frozenset(tie.id for tie in entry.ties)
    return _known(entry, entry.measurement, compiler=entry.compiler, regime=regime, ties=ties)


def _known(one: Any, taken: MeasurementSummary | None, **more: Any) -> KnownTime:
    """The time of a measurement or an entry: measured, or, where `taken` is None, the entry's estimate."""
    us = taken.median_us if taken else one.model_us or 0.0
    low, high = (taken.ci_low_us, taken.ci_high_us) if taken else (us, us)
    return KnownTime(
        arch=taken.device.arch if taken else one.arch,
        device=taken.device.name if taken else "",
        **_named(one.problem),
        schedule_id=one.schedule.id,
        schedule=one.schedule.short(),
        accum_mode=str(one.schedule.get("accum_mode", "fp32")),
        fingerprint=one.fingerprint,
        timing=Timing(median_us=us, ci_low_us=low, ci_high_us=high),
        uid=taken.uid if taken else "",
        when=taken.created_at if taken else None,
        gpu=taken.device if taken else None,
        conditions=taken.conditions if taken else None,
        modelled=taken is None,
        **more,
    )


@functools.lru_cache(maxsize=4096)
def _named(problem: Problem) -> dict[str, Any]:
    try:
        words = format_problem(problem)
    except TiledschedError:  # of a kernel that is not here
        words = ""
    return {"kernel": problem.kernel, "problem_id": problem.id, "problem": str(problem), "words": words}


def _of_report(path: Path) -> list[KnownTime]:
    """The rows of a report's schedules.csv, measured and modelled."""
    try:
        text = io.StringIO(check_plain(path, read_bounded(path)).decode("utf-8"), newline="")
        rows = [[*map(from_csv_cell, cells)] for cells in csv.reader(text)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatabaseError(f"cannot read {path}: {error}") from error
    head = rows[0] if rows else []
    if lacking := next((name for name in NEEDED if name not in head), ""):
        raise DatabaseError(
            f"{path} has no column {lacking}: it is no schedules.csv of a report; write it anew with "
            "`tiledsched report`"
        )
    fields = head[head.index("problem_id") + 1 : head.index("schedule_id")]
    knobs = head[head.index("schedule_id") + 1 : head.index("median_us")]
    found = []
    for number, cells in enumerate(rows[1:], 2):
        row = dict(zip(head, cells, strict=False))
        modelled = row.get("provenance") == "modelled"
        if row.get("same_program_as") or not (modelled or row.get("provenance") == "measured"):
            continue
        names = ["modelled_us"] * 3 if modelled else ["median_us", "ci_low_us", "ci_high_us"]
        try:
            us, low, high = (float(row[name]) for name in names)
        except (KeyError, ValueError):
            raise DatabaseError(f"{path}:{number}: {', '.join(dict.fromkeys(names))} must be numbers") from None
        if not 0 < low <= us <= high < float("inf"):
            raise DatabaseError(
                f"{path}:{number}: a median of {us} in an interval from {low} to {high} is no measurement"
            )
        named = _named_in(row["problem_id"], tuple((name, row[name]) for name in fields if row[name]))
        found.append(
            KnownTime(
                arch=row["arch"],
                device="" if modelled else row["device"],
                regime="" if modelled else row["regime"],
                **named,
                schedule_id=row["schedule_id"],
                schedule=Schedule(_values((name, row[name]) for name in knobs if row[name])).short(),
                accum_mode=row.get("accum_mode") or "fp32",
                fingerprint=row.get("fingerprint", ""),
                timing=Timing(median_us=us, ci_low_us=low, ci_high_us=high),
                uid="",
                modelled=modelled,
            )
        )
    return found


@functools.lru_cache(maxsize=4096)
def _named_in(problem_id: str, cells: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The names of a problem of a report, whose files do not name the kernel: it is the shipped one whose problem has this id.
    Where there is none, the values are the name.
    """
    values = _values(cells)
    for name in registry.SHIPPED:
        with contextlib.suppress(TiledschedError):
            problem = registry.problem_from_json({"kernel": name, **values})
            if problem.id == problem_id:
                return {"kernel": name, **_named(problem)}
    return {"kernel": "", "problem_id": problem_id, "problem": " ".join(map("=".join, cells)), "words": ""}


def _values(cells: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Fields or knobs from the cells of a report, under the names that are theirs."""
    return {
        name.removeprefix("knob_").removeprefix("problem_"): text == "true"
        if text in ("true", "false")
        else int(text)
        if text.isdecimal()
        else text
        for name, text in cells
    }


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "") or "none"
