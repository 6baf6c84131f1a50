"""Reads the two sides of `tiledsched compare`: databases, tables, landscapes, reports, devices, compilers and dates."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, cast

from tiledsched.core import data_files, registry
from tiledsched.core.device import arch_named
from tiledsched.core.errors import ConfigError, DatabaseError, TiledschedError
from tiledsched.core.files import from_csv_cell, plain_text, read_bounded
from tiledsched.core.groups import grouped
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.text import format_problem
from tiledsched.measure.estimate import Timing
from tiledsched.report.compare import (
    ON_ANY_GPU,
    THRESHOLD,
    Comparison,
    ComparisonTerms,
    Key,
    KnownTime,
    ProgramTime,
    Side,
    compare_parts,
    joined_parts,
    side_of,
)
from tiledsched.store.evidence import for_compiler, of_one_compiler, timed_alike, timed_as_now
from tiledsched.store.exchange import read_table
from tiledsched.store.location import TABLES, database_exists
from tiledsched.store.queries import TimedRow, TimedRows
from tiledsched.store.reading import Circumstances
from tiledsched.store.records import Entry, StoredMeasurement

SHIPPED = "shipped"
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


LEAST_SAMPLES = 6
"""Fewer samples have no 95% interval of their median."""
MOST_AT_ONCE = 20_000
"""About so many measurements of each side are in memory at a time."""


def compare_sources(a: str, b: str, db: str | None, wanted: Wanted, threshold: float = THRESHOLD) -> Comparison:
    """Compare two sources, some problems at a time, because there may be a million measurements on each side.

    Args:
        a: a SOURCE, a SELECTOR of the user's database over what ships, or SOURCE@SELECTOR. A source is a database (file or
            URL), a table or landscape file, a folder of them, a report's folder, or `shipped`. A selector is a compiler version
            (or its beginning), a date or time (what was known at its end), `before` or `after` the last run of the database,
            an arch, or a part of a device's name.
        b: the same.
        db: the user's database, as for `TuningDB.open`.
        wanted: which problems.
        threshold: differences up to this share of the time count as none.

    Raises:
        ConfigError: a word is none of these, or nothing is measured there.
        DatabaseError: a source cannot be read.
    """
    with contextlib.ExitStack() as opened:
        sources = functools.cache(lambda source: _source(source, db, wanted, opened))
        sides = [_Evidence(word, sources, wanted) for word in (a, b)]
        terms = None
        while True:
            said = sides[0].seen, sides[1].seen = _Seen(), _Seen()
            parts, meant = [], terms
            for problems in _parts(*(side.counts() for side in sides)):
                known = [side.read(problems) for side in sides]
                meant = meant or ComparisonTerms.of([each.measured for each in said], [each.estimated for each in said])
                nothing = [Side(name=side.name, best={}, programs={}) for side in sides]
                for problem in problems:
                    one, other = (of.get(problem, none) for of, none in zip(known, nothing, strict=True))
                    parts.append(compare_parts(one, other, meant, threshold))
            for side in sides:
                side.check()
            terms = ComparisonTerms.of([each.measured for each in said], [each.estimated for each in said])
            if terms == meant:  # what the first problems tell holds for all
                return joined_parts(parts, a, b, threshold)


def _parts(*counts: Mapping[str, int]) -> Iterator[list[str]]:
    """The problems of some sides, by their ids, as many at a time as may be in memory."""
    part: list[str] = []
    size = 0
    for problem in dict.fromkeys(itertools.chain(*counts)):
        part.append(problem)
        size += max(each.get(problem, 0) for each in counts)
        if size >= MOST_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


class _Seen:
    """What was read of a side so far."""

    def __init__(self) -> None:
        self.measured: set[Key] = set()
        self.estimated: set[Key] = set()
        self.compilers: set[str] = set()
        self.devices: set[str] = set()


class _Source:
    """Entries and measurements, by the id of their problem. Of measurements in a database, those of some problems are read at a
    time, once for both sides.
    """

    def __init__(
        self, entries: Iterable[Entry], measurements: Iterable[StoredMeasurement], stored: TimedRows | None = None
    ) -> None:
        self.entries = grouped((entry.problem.id, entry) for entry in entries)
        self._rows = grouped((each.measurement.problem, TimedRow.of(each)) for each in measurements)
        self._stored = stored
        self.problems = {each.id: each for each in (*(stored.problems if stored else ()), *self._rows)}
        """The problems that are measured, by their ids."""
        self.rows = functools.lru_cache(maxsize=1)(self._read)

    def counts(self) -> dict[str, int]:
        """At least the number of measurements of each problem that is known."""
        stored = self._stored.problems if self._stored else {}
        sizes = {
            each: stored.get(problem, ((), 0))[1] + len(self._rows.get(problem, ()))
            for each, problem in self.problems.items()
        }
        return dict.fromkeys(self.entries, 0) | sizes

    def began(self) -> datetime | None:
        """When the last run began; None where no run is known."""
        return self._stored.last_run_began() if self._stored else None

    def devices(self) -> set[str]:
        """The names of the GPUs on which something was measured, in lower case."""
        served = (one.measurement.device.name for of in self.entries.values() for one in of if one.measurement)
        stored = self._stored.devices() if self._stored else ()
        rows = (row.shared.device.name for of in self._rows.values() for row in of)
        return {name.lower() for name in (*served, *stored, *rows)}

    def _read(self, ids: tuple[str, ...]) -> dict[str, list[TimedRow]]:
        problems = [self.problems[each] for each in ids if each in self.problems]
        stored = self._stored.read(problems) if self._stored else {}
        rows = {each.id: [*stored.get(each, ()), *self._rows.get(each, ())] for each in problems}
        return {each: sorted(of, key=lambda row: (row.created_at, row.uid), reverse=True) for each, of in rows.items()}


class _Evidence:
    """One side: what a word picks of a source."""

    def __init__(self, word: str, source_of: Callable[[str], _Source], wanted: Wanted) -> None:
        self.name, self._wanted, self.seen = word, wanted, _Seen()
        source, self._selector = _split(word)
        files = [each for each in (Path(source), Path(source) / "schedules.csv") if each.name.endswith("schedules.csv")]
        schedules = next((each for each in files if each.is_file()), None) if source else None
        self._report: dict[str, Side] = {}
        self._source = _Source((), ())
        if schedules is None:
            self._source = source_of(source)
            self._end = _end(self._source.began, self._selector)
            names = self._source.devices()
            self._of_device = any(self._selector.lower() in name for name in names)
            return
        if self._selector:
            raise ConfigError(
                f"{word}: a report is taken whole; compare a database instead, or leave out @{self._selector}"
            )
        found = [one for one in _of_report(schedules) if wanted.holds(one.kernel, one.arch, one.regime)]
        measured = [one for one in found if not one.modelled]
        self._report = side_of(word, [], measured, [one for one in found if one.modelled]).by_problem()

    def counts(self) -> dict[str, int]:
        """At least the number of measurements of each problem that is known."""
        return dict.fromkeys(self._report, 0) | self._source.counts()

    def read(self, problems: Sequence[str]) -> dict[str, Side]:
        """What is known of some problems, by their ids."""
        rows = self._source.rows(tuple(problems))
        found = {each: self._report[each] for each in problems if each in self._report}
        for each in problems:
            if each in rows or each in self._source.entries:
                found[each] = self._side(
                    self._source.problems.get(each), self._source.entries.get(each, ()), rows.get(each, ())
                )
        for side in found.values():
            self.seen.measured.update(side.best)
            self.seen.estimated.update(side.estimates)
        return found

    def check(self) -> None:
        """Raise ConfigError where nothing was read that can be compared: measured, or estimated for one arch."""
        seen = self.seen
        if seen.measured or len({key[ON_ANY_GPU] for key in seen.estimated}) == 1:
            return
        if self._selector:
            raise ConfigError(
                f"{self.name}: nothing of {self._selector!r} is measured there; it has the compilers "
                f"{_some(sorted(seen.compilers))} and the devices {_some(sorted(seen.devices))}"
            )
        raise ConfigError(f"{self.name}: nothing is measured there that was asked for; give {ACCEPTED}")

    def _side(self, problem: Problem | None, entries: Sequence[Entry], rows: Sequence[Any]) -> Side:
        """What is known of one problem."""
        shared = {id(row.shared): row.shared for row in rows}.values()
        holds = self._wanted.holds
        entries = [one for one in entries if holds(one.kernel, one.arch, one.regime)]
        if not all(timed_as_now(each.regime, each.conditions) for each in shared):
            rows = timed_alike(cast(Any, rows))
        self.seen.compilers.update(each.toolchain.tileiras for each in shared)
        self.seen.devices.update(each.device.name for each in shared)
        entries, rows = self._selected(entries, rows)
        served = map(_of_entry, for_compiler((one for one in entries if one.measurement), ""))
        side = side_of(
            self.name, served, (), [_of_entry(one) for one in entries if one.measurement is None and one.model_us]
        )
        best, programs = dict(side.best), dict[Key, dict[str, ProgramTime]]()
        fastest: dict[Key, TimedRow] = {}
        keys: dict[tuple[int, str], Key] = {}
        for row in rows:
            mode, words, number = _said(row.schedule)
            key = keys.get((id(row.shared), mode))
            if key is None:
                assert problem is not None  # it is measured
                key = keys[id(row.shared), mode] = _key_of(problem, row.shared, mode)
            program = row.fingerprint or number
            of = programs.setdefault(key, {})
            if program not in of:
                us, low, high = row.timing
                of[program] = ProgramTime(words, row.fingerprint, us, low, high, row.uid)
                if key not in fastest or row.timing[0] < fastest[key].timing[0]:
                    fastest[key] = row
        for key, row in fastest.items():
            if key not in best and problem is not None:
                best[key] = _of_row(problem, row)
        for key, one in best.items():
            runs = {
                row.run_id: ProgramTime._make((one.schedule, row.fingerprint, *row.timing, row.uid))
                for row in reversed(rows)  # of one run the newest counts
                if row.fingerprint == one.fingerprint
                and row.samples >= LEAST_SAMPLES
                and keys.get((id(row.shared), one.accum_mode)) == key
                and _said(row.schedule)[1] == one.schedule
            }
            best[key] = replace(one, runs=tuple(runs.values()))
        return replace(side, best=best, programs=programs)

    def _selected(self, entries: Sequence[Entry], rows: Sequence[TimedRow]) -> tuple[list[Entry], Sequence[Any]]:
        """The evidence that the selector picks. Where it names no compiler, each problem and GPU is taken with its newest one."""
        selector = self._selector
        if self._end is not None:
            # What was served then is not kept: the fastest of what was measured by then stands for it.
            known_then = [row for row in rows if row.created_at < self._end]
            return [one for one in entries if one.measurement is None], of_one_compiler(cast(Any, known_then), "")
        if VERSION.fullmatch(selector):
            fits = re.compile(rf"{re.escape(selector)}(\..*)?").fullmatch
            left = [row for row in rows if fits(row.shared.toolchain.tileiras)]
            return [one for one in entries if fits(one.compiler)], left
        if not selector:
            return list(entries), of_one_compiler(cast(Any, rows), "")
        word, arch = selector.lower(), arch_named(selector)
        if self._of_device:
            served = [one for one in entries if one.measurement and word in one.measurement.device.name.lower()]
            left = [row for row in rows if word in row.shared.device.name.lower()]
        else:  # it names an arch, or a GPU of which only estimates are known
            served = [one for one in entries if one.arch == (word if one.measurement else arch)]
            left = [row for row in rows if row.shared.device.arch == word]
        return served, of_one_compiler(cast(Any, left), "")


def _key_of(problem: Problem, shared: Circumstances, accum_mode: str) -> Key:
    """The key of :func:`key_of` for what was timed under some circumstances."""
    timed = "" if timed_as_now(shared.regime, shared.conditions) else "graphs"
    return problem.id, accum_mode, shared.regime, timed, shared.device.arch, shared.device.name


@functools.cache
def _said(schedule: Schedule) -> tuple[str, str, str]:
    """The accumulators of a schedule, the schedule as people read it, and its id."""
    return str(schedule.get("accum_mode", "fp32")), schedule.short(), schedule.id


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


def _source(source: str, db: str | None, wanted: Wanted, opened: contextlib.ExitStack) -> _Source:
    """The evidence of a source; without one that of the user's database over what ships. Databases are left open."""
    if source in ("", SHIPPED):
        tables = sorted((data_files.tuning_db() / "tables").glob("*/*.json"))
        shipped = _read(
            (path for path in tables if wanted.kernel in ("", path.parent.name) and wanted.arch in ("", path.stem)),
            wanted,
        )
        own = _stored(db, wanted, opened) if not source and database_exists(db) else ((), None)
        return _Source([*own[0], *shipped[0]], shipped[1], own[1])
    path = Path(os.path.expanduser(source))
    if "://" not in source and (os.path.isdir(path) or source.endswith(TABLES)):
        found = (
            sorted(each for each in path.rglob("*") if each.name.endswith(TABLES)) if os.path.isdir(path) else [path]
        )
        if not found:
            raise ConfigError(f"{path} holds no table and no landscape; give {ACCEPTED}")
        return _Source(*_read(found, wanted))
    if not database_exists(source):
        raise ConfigError(f"there is no database at {source}; give {ACCEPTED}")
    entries, stored = _stored(source, wanted, opened)
    return _Source(entries, (), stored)


def _read(paths: Iterable[Path], wanted: Wanted) -> tuple[list[Entry], list[StoredMeasurement]]:
    entries: list[Entry] = []
    measurements: dict[str, StoredMeasurement] = {}
    for path in paths:
        table = read_table(path)
        entries += table.entries
        measurements |= {
            one.uid: one
            for one in table.measurements
            if wanted.holds(one.kernel, one.measurement.device.arch, one.measurement.regime)
        }
    return entries, list(measurements.values())


def _stored(url: str | None, wanted: Wanted, opened: contextlib.ExitStack) -> tuple[list[Entry], TimedRows]:
    from tiledsched.store.db import TuningDB

    db = opened.enter_context(TuningDB.open(url, read_only=True))
    entries = db.entries(arch=wanted.arch or None, kernel=wanted.kernel or None)
    return entries, opened.enter_context(db.timed_rows(wanted.kernel, wanted.arch, wanted.regime))


def _end(began: Callable[[], datetime | None], selector: str) -> datetime | None:
    """The moment up to which a selector takes measurements; None for one that names no moment.

    Args:
        began: says when the last run began.
        selector: the selector.
    """
    if DATE.fullmatch(selector):
        try:
            moment = datetime.fromisoformat(selector).replace(tzinfo=timezone.utc)
        except ValueError:
            raise ConfigError(f"{selector} is no date; write e.g. 2026-11-22, or 2026-11-22T14:30 (UTC)") from None
        return moment if len(selector) > len("2026-11-22") else moment + timedelta(days=1)
    if selector not in (BEFORE, AFTER):
        return None
    first = began()
    if first is None:
        raise ConfigError(
            f"{selector!r} asks for the last tune, and no tune has measured anything there; give {ACCEPTED}"
        )
    return first if selector == BEFORE else datetime.max.replace(tzinfo=timezone.utc)


def _of_row(problem: Problem, row: TimedRow) -> KnownTime:
    """The time of a measured program."""
    mode, words, number = _said(row.schedule)
    shared = row.shared
    median, low, high = row.timing
    return KnownTime(
        arch=shared.device.arch,
        device=shared.device.name,
        **_named(problem),
        schedule_id=number,
        schedule=words,
        accum_mode=mode,
        fingerprint=row.fingerprint,
        timing=Timing(median_us=median, ci_low_us=low, ci_high_us=high),
        uid=row.uid,
        when=row.created_at,
        gpu=shared.device,
        conditions=shared.conditions,
        compiler=shared.toolchain.tileiras,
        regime=shared.regime,
    )


def _of_entry(entry: Entry) -> KnownTime:
    """The time of what is served: measured, or where it is not, the model's estimate."""
    taken, us = entry.measurement, entry.model_us or 0.0
    median, low, high = (taken.median_us, taken.ci_low_us, taken.ci_high_us) if taken else (us, us, us)
    return KnownTime(
        arch=taken.device.arch if taken else entry.arch,
        device=taken.device.name if taken else "",
        regime=entry.regime if taken else "",
        **_named(entry.problem),
        schedule_id=entry.schedule.id,
        schedule=entry.schedule.short(),
        accum_mode=str(entry.schedule.get("accum_mode", "fp32")),
        fingerprint=entry.fingerprint,
        timing=Timing(median_us=median, ci_low_us=low, ci_high_us=high),
        uid=taken.uid if taken else "",
        compiler=entry.compiler,
        when=taken.created_at if taken else None,
        gpu=taken.device if taken else None,
        conditions=taken.conditions if taken else None,
        ties=frozenset(tie.id for tie in entry.ties),
        modelled=taken is None,
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
        text = io.StringIO(plain_text(path, read_bounded(path)), newline="")
        rows = [[*map(from_csv_cell, cells)] for cells in csv.reader(text)]
    except (OSError, csv.Error) as error:
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
