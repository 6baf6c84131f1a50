"""The tuning database: one object that writes and reads all that tuning produces.

Every method is one short transaction, which is committed when the method returns. A `TuningDB` may be used by several
threads, but not across a fork. Times are UTC. All methods raise DatabaseError where the database cannot be read or written.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.engine import CursorResult
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import DatabaseError, Failure
from tiledsched.core.problem import VERSIONED, KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Device, Measurement
from tiledsched.store import host
from tiledsched.store.codec import encode
from tiledsched.store.database import Database
from tiledsched.store.engine import IMPORT_LOCK, one_at_a_time
from tiledsched.store.evidence import contradictions, distinct
from tiledsched.store.models import BuildRow, DeviceRow, EntryRow, FailureRow, MeasurementRow, ProblemRow, RunRow
from tiledsched.store.queries import Comparable, TimedRows
from tiledsched.store.reading import (
    UNDISTURBED,
    Choose,
    WithoutSamples,
    ids_of,
    matching,
    of_known_kernels,
    plain_texts,
    select_landscapes,
    select_latest,
    select_measurements,
)
from tiledsched.store.records import (
    RUN_STATUSES,
    STAGES,
    ArtifactRecord,
    BuildRecord,
    Entry,
    FailureRecord,
    LandscapeSummary,
    MergeResult,
    StoredMeasurement,
    Toolchain,
)
from tiledsched.store.rows import AT_ONCE, artifact_of, kernel_condition, quoted, where
from tiledsched.store.writing import Parents, insert_row, now, put_artifacts, put_builds, put_entry, put_measurements


def new_measurement(
    run_id: int | None, kernel: str, source_hash: str, toolchain: Toolchain, measurement: Measurement
) -> StoredMeasurement:
    """A measurement as it is stored for the first time, now."""
    created = now()
    content = [kernel, source_hash, encode(toolchain), encode(measurement), encode(created)]
    return StoredMeasurement(
        id=0,
        uid=stable_id(content, 24),
        run_id=run_id,
        kernel=kernel,
        source_hash=source_hash,
        toolchain=toolchain,
        measurement=measurement,
        created_at=created,
    )


class TuningDB(Database):
    """An open tuning database. :meth:`open` makes one; use it in a `with` statement, or call :meth:`close`."""

    # Builds

    def record_builds(self, records: Sequence[BuildRecord]) -> None:
        """Store builds in one transaction. An earlier build with the same key is replaced."""
        self.write(lambda session: put_builds(session, records))

    def find_builds(
        self, kernel: str, source_hash: str, toolchain: Toolchain, arch: str
    ) -> dict[tuple[str, str], BuildRecord]:
        """Every build of one source of a kernel by one toolchain for `arch`, by (schedule id, problem class id)."""
        words = {"kernel": kernel, "source_hash": source_hash, "toolchain_id": toolchain.id, "arch": arch}
        with self.rows() as (_, rows):
            return {build.key: build for build in rows.builds(words, where(words))}

    def artifacts(self, arch: str | None = None) -> dict[tuple[str, str], ArtifactRecord]:
        """Every artifact, by (arch, fingerprint)."""
        words = {} if arch is None else {"arch": arch}
        with self.rows() as (_, rows):
            made = rows.make("artifacts", rows.read("artifacts", words, where(words)), artifact_of)
            return {(each.arch, each.fingerprint): each for each in made}

    # Runs

    def start_run(self, command: dict[str, Any], arch: str, facts: dict[str, Any] | None = None) -> int:
        """Store that a run has begun. Runs of this host whose process is gone become `interrupted`.

        Args:
            command: arguments of the command.
            arch: the arch that is tuned for.
            facts: facts about the host, which are stored with its name, pid and platform.

        Returns:
            The run's number.
        """
        here = host.facts()
        with self.writing() as session:
            for row in session.scalars(select(RunRow).where(RunRow.status == "running")):
                if row.hostname == here["hostname"] and not host.is_alive(row.pid, row.host.get("pid_started")):
                    row.status, row.finished_at = "interrupted", now()
            values = {
                "status": "running",
                "command": command,
                "arch": arch,
                "hostname": here["hostname"],
                "pid": here["pid"],
                "host": {**(facts or {}), **here},
                "started_at": now(),
                "finished_at": None,
            }
            return insert_row(session, RunRow, values)

    def finish_run(self, run_id: int, status: str = "done") -> None:
        """Store that a run has ended, as done, interrupted or failed."""
        if status not in RUN_STATUSES[1:]:
            raise DatabaseError(f"a run ends as one of {', '.join(RUN_STATUSES[1:])}, not {status!r}; pass one of them")
        with self.writing() as session:
            session.execute(update(RunRow).where(RunRow.id == run_id).values(status=status, finished_at=now()))

    # Measurements

    def record_measurement(
        self, run_id: int | None, kernel: str, source_hash: str, toolchain: Toolchain, measurement: Measurement
    ) -> int:
        """Store one measurement, and return its number, which an entry takes as `measurement_id`."""
        record = new_measurement(run_id, kernel, source_hash, toolchain, measurement)

        def put(session: Session) -> int:
            put_measurements(session, [record])
            return session.scalars(select(MeasurementRow.id).where(MeasurementRow.uid == record.uid)).one()

        return self.write(put, kernel)

    def measurements(
        self,
        problem: Problem | None = None,
        arch: str | None = None,
        device_name: str | None = None,
        regime: str | None = None,
        fingerprint: str | None = None,
        *,
        kernel: str | KernelClass | None = None,
        runner: str | None = None,
        run_id: int | None = None,
        latest: bool = False,
        disturbed: bool = False,
        served: bool = False,
    ) -> list[StoredMeasurement]:
        """The measurements that match all arguments that are not None, the newest first.

        A measurement holds for its fingerprint: where another source or compiler gives the same machine code, it need not be
        measured again.

        Args:
            problem: the problem.
            arch: the GPU's arch.
            device_name: the GPU's name.
            regime: burst or sustained.
            fingerprint: of the machine code.
            kernel: the kernel, or its name. Measurements of another one of that name, such as one in a file of the same name, do
                not match, nor do they match a problem.
            runner: gpu or replay.
            run_id: the run that took the measurement.
            latest: only the newest for each (problem, artifact, schedule, device name, regime). The schedule counts because
                schedules with the same machine code may launch different grids.
            disturbed: also those that decide nothing, because other processes ran on the GPU meanwhile, or because they are of
                another kernel of the same name.
            served: only those behind entries.
        """
        of = problem.declaration if problem and problem.known else None if isinstance(kernel, str) else kernel
        wanted = matching(
            {
                MeasurementRow.arch: arch,
                DeviceRow.name: device_name,
                MeasurementRow.regime: regime,
                MeasurementRow.fingerprint: fingerprint,
                MeasurementRow.kernel: kernel.name if isinstance(kernel, type) else kernel,
                MeasurementRow.runner: runner,
                MeasurementRow.run_id: run_id,
            }
        )
        if not disturbed:
            wanted.append(UNDISTURBED)
        if served:
            wanted.append(MeasurementRow.id.in_(select(EntryRow.measurement_id)))
        with self.rows() as (session, rows):
            if problem:
                wanted.append(MeasurementRow.problem_id.in_(ids_of(rows, session, problem)))
            if not disturbed:
                wanted.append(of_known_kernels(session, wanted, of))
            known = 0
            while True:
                chosen = [MeasurementRow.id.in_(select_latest(wanted))] if latest else wanted
                found = list(rows.measurements(session.execute(select_measurements().where(*chosen))))
                damaged = [
                    int(number) for table, number in rows.skipped if table == "measurements" and number.isdigit()
                ]
                if not latest or not damaged or len(damaged) == known:
                    return found
                known = len(damaged)  # before each of these there may be one that is not damaged
                wanted.append(MeasurementRow.id.not_in(damaged))

    def measured_problems(self, arch: str, kernel: KernelClass) -> dict[Problem, int]:
        """The problems of a kernel that were measured on an arch, with at least as many measurements as count of each."""
        with self.rows() as (session, rows):
            found = WithoutSamples(rows, session, arch, kernel).problems
            return {problem: count for problem, (_, count) in found.items()}

    def measurements_by_problem(
        self,
        arch: str,
        kernel: KernelClass,
        choose: Choose | None = None,
        *,
        above: int = 0,
        only: Collection[Problem] | None = None,
    ) -> Iterator[tuple[Problem, list[StoredMeasurement]]]:
        """Each problem of a kernel that was measured on an arch, with what :meth:`measurements` finds of it, without samples:
        of those only the number is read. A report on a million measurements holds those of one problem at a time.

        Args:
            arch: e.g. sm_90.
            kernel: the kernel.
            choose: which measurements are read of a problem with more than `above` of them; None for all.
            above: up to so many are all read.
            only: the problems that are read; None for all.
        """
        with self.rows() as (session, rows):
            reader = WithoutSamples(rows, session, arch, kernel)
        for problem, (_, size) in reader.problems.items():
            if only is not None and problem not in only:
                continue
            with self.rows() as (session, rows):
                reader.rows.run = rows.run

                def read(
                    session: Session = session, problem: Problem = problem, size: int = size
                ) -> list[StoredMeasurement]:
                    ids = choose(problem, reader.plain_rows(session, problem)) if choose and size > above else None
                    return reader.read(session, problem, ids)

                try:
                    with plain_texts(session):
                        found = read()
                except OperationalError:  # a text that is none
                    found = read()
            if found:
                yield problem, found
        reader.rows.warn()

    @contextmanager
    def timed_rows(self, kernel: str = "", arch: str = "", regime: str = "") -> Iterator[TimedRows]:
        """A reader of the times of many problems, some at a time; an empty argument matches everything."""
        with self.rows() as (session, rows):
            yield TimedRows(rows, session, kernel, arch, regime)

    def every_measurement(self) -> Iterator[StoredMeasurement]:
        """All measurements, also those that decide nothing, in the order of their numbers. Few are in memory at a time."""
        wanted = select_measurements().order_by(None).order_by(MeasurementRow.id)
        with self.rows() as (session, rows):
            for some in session.connection().execute(wanted, execution_options={"yield_per": AT_ONCE}).partitions():
                yield from rows.measurements(some)

    def landscape(self, problem: Problem, device_name: str, regime: str) -> list[StoredMeasurement]:
        """The newest measurement of every candidate of one problem on one device, the fastest first."""
        found = self.measurements(problem, device_name=device_name, regime=regime, latest=True)
        return sorted(found, key=lambda stored: (stored.measurement.median_us, stored.measurement.schedule.id))

    def landscapes(self, arch: str | None = None, kernel: str | None = None) -> list[LandscapeSummary]:
        """How much is measured, for each problem, device and regime."""
        wanted = [UNDISTURBED, *matching({DeviceRow.arch: arch, ProblemRow.kernel: kernel})]
        with self.rows() as (session, rows):
            wanted.append(of_known_kernels(session, wanted))
            found = session.execute(select_landscapes().where(*wanted)).all()
            problems = rows.parents("problems", (row[0] for row in found))
            lines = [
                LandscapeSummary(
                    problem=problems[number],
                    device_name=name,
                    arch=arch,
                    regime=regime,
                    distinct_programs=programs,
                    measurements=count,
                )
                for number, name, arch, regime, programs, count in found
                if number in problems and all(isinstance(each, str) for each in (name, arch, regime))
            ]
            return sorted(lines, key=lambda line: (line.arch, line.device_name, line.regime, line.problem))

    # Failures

    def record_failure(
        self,
        run_id: int | None,
        kernel: str,
        arch: str,
        stage: str,
        schedule: Schedule,
        failure: Failure,
        *,
        problem: Problem | None = None,
        fingerprint: str = "",
        device: Device | None = None,
    ) -> None:
        """Store a candidate's failure in the stage build or measure."""
        if stage not in STAGES:
            raise DatabaseError(f"a failure's stage is one of {', '.join(STAGES)}, not {stage!r}; pass one of them")
        parents = Parents()
        values = {
            "run_id": run_id,
            "kernel": kernel,
            "arch": arch,
            "stage": stage,
            "problem_id": parents.add(problem) if problem else None,
            "schedule_id": parents.add(schedule),
            "fingerprint": fingerprint or None,
            "device_id": parents.add(device) if device else None,
            "kind": str(failure.kind),
            "message": failure.message,
            "created_at": now(),
        }

        def put(session: Session) -> None:
            parents.insert(session)
            insert_row(session, FailureRow, values)

        self.write(put)

    def failures(
        self,
        arch: str | None = None,
        problem: Problem | None = None,
        *,
        stage: str | None = None,
        run_id: int | None = None,
    ) -> list[FailureRecord]:
        """The failures that match all arguments that are not None, the newest first."""
        given = {"arch": arch, "stage": stage, "run_id": run_id}
        words = {name: value for name, value in given.items() if value is not None}
        with self.rows() as (session, rows):
            ids = ids_of(rows, session, problem) if problem else []
            some = [f"r.problem_id IN ({quoted(ids)})"] if problem else []
            return list(rows.failures(words, f"{where(words, *some)} ORDER BY r.id DESC"))

    def forget_failures(self, arch: str | None = None, kernel: str | None = None, kind: str | None = None) -> int:
        """Delete the failures of builds and measurements that match all arguments that are not None, and return how many.

        The candidates are tried again by the next tune.
        """
        failed = [
            BuildRow.failure_kind.is_not(None),
            *matching({BuildRow.arch: arch, BuildRow.kernel: kernel, BuildRow.failure_kind: kind}),
        ]
        measured = matching({FailureRow.arch: arch, FailureRow.kernel: kernel, FailureRow.kind: kind})

        def forget(session: Session) -> int:
            gone = [
                session.execute(delete(BuildRow).where(*failed)),
                session.execute(delete(FailureRow).where(*measured)),
            ]
            return sum(result.rowcount for result in gone if isinstance(result, CursorResult))

        return self.write(forget)

    # Entries

    def put_entry(self, record: Entry) -> bool:
        """Serve `record` for its key from now on, unless the entry that is stored has a stronger provenance.

        Returns:
            Whether `record` was stored.

        Raises:
            DatabaseError: the provenance is unknown, or is `measured` and there is no measurement.
        """
        return self.write(lambda session: put_entry(session, record, merging=False), record.kernel) != "kept"

    def entries(
        self,
        arch: str | None = None,
        kernel: str | None = None,
        *,
        problem: Problem | None = None,
        device_name: str | None = None,
        regime: str | None = None,
        accum_mode: str | None = None,
        provenance: str | None = None,
    ) -> list[Entry]:
        """The entries that match all arguments that are not None, sorted by kernel, arch, problem, device, regime,
        accumulator mode and compiler.
        """
        given = {
            "arch": arch,
            "device_name": device_name,
            "regime": regime,
            "accum_mode": accum_mode,
            "provenance": provenance,
        }
        wanted = {name: value for name, value in given.items() if value is not None}
        condition, words = kernel_condition(kernel or "")
        with self.rows() as (session, rows):
            some = [f"r.problem_id IN ({quoted(ids_of(rows, session, problem))})"] if problem else []
            return distinct(rows.entries({**wanted, **words}, where(wanted, condition, *some)))

    def versions(self) -> dict[str, dict[str, int]]:
        """Kernels whose name ends in a hash of their code, as that of an author's own attention does: what stands before the hash
        -> each of the names, with its number of entries."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        with self.rows() as (session, _):
            for name, count in session.execute(select(EntryRow.kernel, func.count()).group_by(EntryRow.kernel)):
                if versioned := VERSIONED.fullmatch(name):
                    found[versioned[1]][name] = count
        return dict(found)

    def merge(
        self,
        measurements: Iterable[StoredMeasurement],
        entries: Iterable[Entry],
        artifacts: Sequence[ArtifactRecord] = (),
    ) -> MergeResult:
        """Add what another database or file holds, in one transaction.

        Measurements are pooled. Of two entries with one key the one of stronger provenance stays, and among equals the one
        that is faster by its own measurement or the model. The outcome does not depend on the order in which databases are
        merged, nor on how often they are. Where pooled measurements contradict what is served, the result says so.

        Args:
            measurements: the other database's measurements. Some are in memory at a time, if this is no list.
            entries: its entries, read after the measurements. Each names its measurement by the uid, stored here or
                among `measurements`.
            artifacts: facts of its machine code.
        """

        kernels, keys = set[str](), set[tuple[str, ...]]()

        def taken() -> Iterator[StoredMeasurement]:
            for stored in measurements:
                kernels.add(stored.kernel)
                yield replace(stored, run_id=None)  # the numbers of another database's runs mean nothing here

        def take(session: Session) -> MergeResult:
            one_at_a_time(session.connection(), IMPORT_LOCK)  # what two have in common is counted once
            done: Counter[str] = Counter()
            put_artifacts(session, artifacts)
            added, known = put_measurements(session, taken())
            done.update(measurements_added=added, measurements_kept=known)
            parents = Parents()
            for entry in sorted(entries, key=lambda each: each.key):
                kernels.add(entry.kernel)
                keys.add(entry.key)
                elsewhere = entry.replace(measurement_id=None, run_id=None)
                done["entries_" + put_entry(session, elsewhere, merging=True, parents=parents)] += 1
            return MergeResult(**dict(done))  # type: ignore[arg-type]  # what is counted are counts

        done = self.write(take)
        self.show(*kernels)
        if not done.entries_kept and not done.entries_replaced:
            return done
        served = [each for each in self.entries(provenance="measured") if each.key in keys and each.measurement]
        with self.rows() as (session, rows):
            found = contradictions(served, Comparable(rows, session).measurements)
            return replace(done, contradictions=tuple(found))
