"""Stored answers: read in a millisecond without SQLAlchemy where the database is a file, written through the same records as
every other result.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tiledsched.build.toolchain import Toolchain
from tiledsched.core.config import Settings, warn_once
from tiledsched.core.errors import DatabaseError, Failure, FailureKind
from tiledsched.core.problem import Problem, ProblemClass
from tiledsched.core.schedule import Schedule
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import Device, Measurement
from tiledsched.remember.description import GRIDS, MARK, Call, Grid
from tiledsched.store.direct import reading
from tiledsched.store.location import database_exists, location, site_location
from tiledsched.store.records import BuildRecord, Entry
from tiledsched.store.rows import DAMAGE, RowReader, read_json

REGIME = "burst"
SPACE = "space "
"""Stands before the digest of the space in what an entry says of its source."""
WRONG = FailureKind.WRONG_RESULT
PASSING = (FailureKind.COMPILER_KILLED, FailureKind.GPU_LOST, FailureKind.WORKER_KILLED)
"""Failures that say nothing of the program, so that it is tried again."""

STORED = f"WHERE r.kernel = :kernel ORDER BY CASE WHEN CAST(r.dims AS TEXT) LIKE '%{GRIDS}%' THEN 0 ELSE 1 END, r.id"
"""First the problems that say which grids they are of: of imported ones nothing else tells it."""
BUILT_BY = "JOIN toolchains t ON t.id = r.toolchain_id WHERE t.tileiras = :compiler"
ON_DEVICE = "JOIN devices d ON d.id = r.device_id"
MEASURED = f"""
{ON_DEVICE} {BUILT_BY} AND r.problem_id = :problem AND r.kernel = :kernel AND r.source_hash = :source AND r.regime = 'burst'
AND r.arch = :arch AND d.name = :device ORDER BY r.id
"""
BUILT = f"""
{BUILT_BY} AND r.kernel = :kernel AND r.source_hash = :source AND r.arch = :arch AND r.problem_class_id IN ({{classes}})
ORDER BY r.id
"""
FAILED = f"""
{ON_DEVICE} WHERE r.problem_id = :problem AND r.kernel = :kernel AND r.arch = :arch AND d.name = :device ORDER BY r.id
"""
SERVED = """
WHERE r.problem_id = :problem AND r.kernel = :kernel AND r.arch = :arch AND r.device_name = :device
AND r.compiler = :compiler AND r.regime = 'burst' AND r.provenance = 'measured'
"""


@dataclass(frozen=True, kw_only=True)
class StoredTime(Timing):
    """A stored time of one schedule."""

    samples: int
    """Number of timed launches."""
    checked: bool
    """Whether its outputs were compared."""
    imported: bool = False
    """Whether it comes from another database, which holds the builds."""


@dataclass(kw_only=True)
class Answers:
    """What is stored for one call, by the ids of schedules."""

    problem: Problem | None = None
    """The call's problem; None where it was never stored."""
    other_grids: bool = False
    """Whether a call is stored that differs in nothing but its grids."""
    times: dict[str, StoredTime] = field(default_factory=dict)
    """Times of the schedules that were measured, and of those with the same program."""
    failures: dict[str, Failure] = field(default_factory=dict)
    """Why others gave no time."""
    programs: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The class (see `class_of`) and the fingerprint of what was built."""
    winner: str = ""
    """The schedule that is served; empty for none."""
    space: str = ""
    """Digest of the space over which it was found."""
    entry: tuple[Any, ...] = ()
    """The row of the entry, which changes with every race."""

    def unchecked(self) -> Answers:
        """What counts where outputs must have been compared."""
        times = {schedule: known for schedule, known in self.times.items() if known.checked}
        return replace(self, times=times, winner=self.winner if self.winner in times else "")

    def spread(self) -> None:
        """Give schedules that were not measured the times, or the failures, of those with the same program."""
        of_program = {self.programs[each]: known for each, known in self.times.items() if each in self.programs}
        broken = {self.programs[each]: failure for each, failure in self.failures.items() if each in self.programs}
        for schedule, program in self.programs.items():
            if program in of_program:
                self.times.setdefault(schedule, of_program[program])
            elif program in broken:
                self.failures.setdefault(schedule, broken[program])

    def covers(self, call: Call) -> bool:
        """Whether nothing need be measured to answer the call."""
        ids = call.places.keys()
        winner = self.times.get(self.winner)
        if winner is not None and winner.imported and self.winner in ids and self.space == call.space:
            return True
        return bool(ids & self.times.keys()) and ids <= self.times.keys() | self.failures.keys()


def class_of(problem: Problem, grid: Grid) -> ProblemClass:
    """What the program of a schedule depends on apart from the schedule: the problem and the grid."""
    return ProblemClass({"problem": problem.id, "grid": "x".join(map(str, grid))})


class AnswerStore:
    """The stored answers of one call on one GPU.

    Args:
        settings: name the database, and the site's beneath it.
        call: the call.
        arch: e.g. sm_90.
        device_name: the GPU's name.
        compiler: its version.
    """

    def __init__(self, settings: Settings, call: Call, arch: str, device_name: str, compiler: str) -> None:
        self._settings, self._call, self._arch, self._device_name = settings, call, arch, device_name
        self._words = {
            "kernel": call.kernel,
            "source": call.source,
            "arch": arch,
            "device": device_name,
            "compiler": compiler,
        }

    def read(self) -> Answers:
        """What is stored: in the user's database; where that has no answer, in the site's or in a bundle. Where results are to be
        measured anew, nothing counts."""
        mine = self._read_database(self._settings.db)
        if self._settings.remember == "new":
            return Answers(problem=mine.problem, other_grids=mine.other_grids, entry=mine.entry)
        if mine.covers(self._call):
            return mine
        site = site_location(self._settings.site)
        for other in (lambda: self._read_database(site) if site else Answers(), self._read_bundle):
            found = other()
            if found.covers(self._call):
                return found
        return mine

    def _read_database(self, url: str | None) -> Answers:
        try:
            return self._read_rows(url) if database_exists(url) else Answers()
        except (DatabaseError, ValueError) as error:
            warn_once(f"the stored results of {location(url)} cannot be read: {error}; they are measured again")
            return Answers()

    def _read_rows(self, url: str | None) -> Answers:
        with reading(url) as rows:
            stored = rows.read("problems", self._words, STORED)
            other_grids = False
            for problem in self._of_this_call(rows.make("problems", stored, _values_of)):
                found = self._read_problem(rows, problem)
                if found is not None:
                    return found
                other_grids = True
            return Answers(other_grids=other_grids)

    def _read_problem(self, rows: RowReader, problem: Problem) -> Answers | None:
        """What is stored of a problem; None where its launches had other grids than this call's."""
        call, found, words = self._call, Answers(problem=problem), {**self._words, "problem": problem.id}
        for served in rows.read("entries", words, SERVED):
            found.entry = (served.schedule_id, served.source, served.source_hash, served.measurement_id)
            if served.source_hash == call.source:  # else of other code: it is replaced
                found.winner, found.space = served.schedule_id, served.source.rpartition(SPACE)[2]
        for taken in rows.read("measurements", words, MEASURED, "samples_us"):
            found.times[taken.schedule_id] = StoredTime(
                median_us=taken.median_us,
                ci_low_us=taken.ci_low_us,
                ci_high_us=taken.ci_high_us,
                samples=taken.sample_count,
                checked=taken.accuracy is not None,
                imported=taken.run_id is None,
            )
        classes = {grid: class_of(problem, grid).id for grid in set(call.grids)}
        here = {each: classes[call.grids[place]] for each, place in call.places.items()}
        built = BUILT.format(classes=", ".join(f"'{each}'" for each in sorted(classes.values())))  # hex digits
        for build in rows.read("builds", words, built):
            schedule, program_class, kind = build.schedule_id, build.problem_class_id, build.failure_kind
            if here.get(schedule, program_class) != program_class:
                continue  # launched with another grid once
            if build.fingerprint:
                found.programs[schedule] = program_class, build.fingerprint
                found.failures.pop(schedule, None)
            elif kind and kind not in PASSING:
                found.failures[schedule] = Failure(kind=kind, message=build.failure_message or "")
        failures = list(rows.read("failures", words, FAILED))
        commands = rows.parents("runs", (failed.run_id for failed in failures))
        for failed in failures:
            command, schedule = commands.get(failed.run_id, {}), failed.schedule_id
            same = all(command.get(word) == words[word] for word in ("source", "compiler"))
            time = found.times.get(schedule)
            passing = failed.kind in PASSING
            if same and not passing and (time is None or (failed.kind == WRONG and not time.checked)):
                found.times.pop(schedule, None)
                found.failures[schedule] = Failure(kind=failed.kind, message=failed.message)
        others = {each for each in found.times.keys() - found.programs.keys() if not found.times[each].imported}
        if others & call.places.keys():
            return None
        for schedule in others:  # not this call's
            del found.times[schedule]
        found.spread()
        return found

    def _of_this_call(self, stored: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[Problem]:
        """The stored problems of the kernel that may be this call's."""
        for number, dims in stored:
            mark = dims.get(MARK)
            if (
                dims.get(GRIDS, self._call.all_grids) == self._call.all_grids
                and isinstance(mark, str)
                and self._call.has_mark(mark)
            ):
                values = {name: tuple(each) if isinstance(each, list) else each for name, each in sorted(dims.items())}
                with contextlib.suppress(TypeError, ValueError, RecursionError):  # no values of a problem
                    problem = Problem(self._call.kernel, values)
                    if problem.id == number:
                        yield problem

    def _read_bundle(self) -> Answers:
        """What the bundle in use says."""
        if not os.environ.get("TILEDSCHED_BUNDLE"):
            return Answers()
        from tiledsched.serve.bundle import named_bundle, read_bundle

        bundle, words = named_bundle(), self._words
        key = tuple(words[word] for word in ("kernel", "source", "arch", "device", "compiler"))
        mine = [
            each
            for each in (read_bundle(bundle).entries if bundle else ())
            if key == (each.kernel, each.source_hash, each.arch, each.device_name, each.compiler) and each.measurement
        ]
        mine.sort(key=lambda each: GRIDS not in each.problem.values)
        problem = next(self._of_this_call((each.problem.id, each.problem.values) for each in mine), None)
        found = Answers(problem=problem)
        for entry in mine:
            if entry.problem == problem and (taken := entry.measurement):
                found.winner, found.space = entry.schedule.id, entry.source.rpartition(SPACE)[2]
                known = StoredTime(
                    median_us=taken.median_us,
                    ci_low_us=taken.ci_low_us,
                    ci_high_us=taken.ci_high_us,
                    samples=taken.samples,
                    checked=taken.accuracy is not None,
                    imported=True,
                )
                found.times = {each.id: known for each in (entry.schedule, *entry.ties)}
        return found

    def write(self, found: Findings, before: Answers) -> Answers:
        """Store what a search found, and return what is stored now.

        Where another process stored an answer since `before` was read, that answer stays, and both processes give it.
        """
        try:
            self._write(found, before)
        except (DatabaseError, OSError, *DAMAGE) as error:
            warn_once(f"the results cannot be stored, and will be measured again: {error}")
            return Answers()
        return self._read_database(self._settings.db)

    def _write(self, found: Findings, before: Answers) -> None:
        from sqlalchemy import select
        from sqlalchemy.orm import Session

        from tiledsched.store.db import TuningDB, new_measurement
        from tiledsched.store.models import EntryRow
        from tiledsched.store.writing import put_builds, put_entry, put_measurements

        call, words = self._call, self._words
        command = {"command": "exhaustive_search", **{word: words[word] for word in ("kernel", "source", "compiler")}}
        with TuningDB.open(self._settings.db) as db:
            run_id = db.start_run({**command, "configurations": len(call.schedules)}, self._arch)
            stored = {
                taken.schedule: new_measurement(run_id, call.kernel, call.source, found.toolchain, taken)
                for taken in found.measured
            }
            entry = found.entry
            if entry is not None:
                entry = entry.replace(measurement=stored[entry.schedule].summary, run_id=run_id)

            def put(session: Session) -> None:
                put_builds(session, found.builds)
                put_measurements(session, list(stored.values()))
                if entry is None:
                    return
                columns = (EntryRow.schedule_id, EntryRow.source, EntryRow.source_hash, EntryRow.measurement_id)
                query = select(*columns).filter_by(
                    kernel=call.kernel,
                    arch=self._arch,
                    problem_id=found.problem.id,
                    device_name=self._device_name,
                    regime=REGIME,
                    compiler=entry.compiler,
                )
                there = session.execute(query.with_for_update()).first()
                if there is None or tuple(there) == before.entry:
                    put_entry(session, entry, merging=False)

            db.write(put, call.kernel)
            for schedule, failure in found.failed:
                db.record_failure(
                    run_id,
                    call.kernel,
                    self._arch,
                    "measure",
                    schedule,
                    failure,
                    problem=found.problem,
                    device=found.device,
                )
            db.finish_run(run_id)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a search found."""

    answers: Answers
    """What is known of the call now."""
    alone: bool
    """Whether no other process ran on the GPU meanwhile; else nothing is stored."""
    problem: Problem
    """The call's problem."""
    device: Device
    """The GPU."""
    toolchain: Toolchain
    """The compiler."""
    builds: Sequence[BuildRecord]
    """What became of each build."""
    measured: Sequence[Measurement]
    """The new measurements."""
    failed: Sequence[tuple[Schedule, Failure]]
    """What built and did not run, or computed something else."""
    entry: Entry | None
    """What is served from now on, without its measurement; None where what is served stays."""


def stored_places(settings: Settings, call: Call) -> list[tuple[str, str]]:
    """The archs and GPUs for which something is stored of a call's kernel, for processes without a GPU."""
    if not database_exists(settings.db):
        return []
    try:
        with reading(settings.db) as rows:
            found = rows.read(
                "entries", {"kernel": call.kernel}, "WHERE r.kernel = :kernel AND r.provenance = 'measured'"
            )
            return sorted({(row.arch, row.device_name) for row in found})
    except DatabaseError:
        return []


def _values_of(row: Any) -> tuple[str, dict[str, Any]]:
    """The id of a stored problem, and its values."""
    return row.id, read_json(dict, row.dims, "dims")
