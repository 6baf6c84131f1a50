"""Rows to records: the statements that read, and the records made of their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import JSON, ColumnElement, Select, Text, bindparam, cast, func, select, type_coerce
from sqlalchemy.orm import Session, aliased, defer

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import DIGITS, is_shipped
from tiledsched.measure.runner import Conditions, Device, Measurement
from tiledsched.store.codec import REMEMBERED, decode
from tiledsched.store.evidence import may_be_of
from tiledsched.store.models import (
    NAMESAKE,
    ArtifactRow,
    BuildRow,
    DeviceRow,
    EntryRow,
    FailureRow,
    MeasurementRow,
    ProblemRow,
    ScheduleRow,
    ToolchainRow,
)
from tiledsched.store.records import BuildRecord, Entry, MeasurementSummary, StoredMeasurement, Toolchain, record_of

Made = TypeVar("Made")
AT_ONCE = 500
"""Values that a statement names at once."""
UNDISTURBED = type_coerce(MeasurementRow.conditions, JSON)["beside"].as_string().is_(None)
"""No other process is known to have run on the GPU during the measurement."""


_ids_now: dict[str, str] = {}
"""The id that a stored problem has today, by the id that it is stored under."""


def matching(wanted: Mapping[Any, Any]) -> list[ColumnElement[bool]]:
    """A condition for each column whose wanted value is not None."""
    return [column == value for column, value in wanted.items() if value is not None]


def ids_of(session: Session, problem: Problem) -> list[str]:
    """The ids under which a problem is stored: its own, and those that it had when equal problems had several names."""
    stored = session.scalars(select(ProblemRow.id).where(ProblemRow.kernel == problem.kernel)).all()
    new = [each for each in stored if each not in _ids_now]
    for start in range(0, len(new), AT_ONCE):
        for row in session.scalars(select(ProblemRow).where(ProblemRow.id.in_(new[start : start + AT_ONCE]))):
            _ids_now[row.id] = row.problem.id
    return [problem.id, *(each for each in stored if each != problem.id and _ids_now.get(each) == problem.id)]


def select_builds() -> Select:
    """Selects builds with their schedule and artifact, as :func:`build_of` takes them."""
    return (
        select(BuildRow, ScheduleRow, ArtifactRow)
        .join(ScheduleRow, ScheduleRow.id == BuildRow.schedule_id)
        .outerjoin(ArtifactRow, (ArtifactRow.arch == BuildRow.arch) & (ArtifactRow.fingerprint == BuildRow.fingerprint))
    )


def select_measurements() -> Select:
    """Selects measurements, the newest first, as :func:`measurement_of` takes them."""
    return (
        select(MeasurementRow, ProblemRow, ScheduleRow, DeviceRow, ToolchainRow)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .join(ScheduleRow, ScheduleRow.id == MeasurementRow.schedule_id)
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .join(ToolchainRow, ToolchainRow.id == MeasurementRow.toolchain_id)
        .order_by(MeasurementRow.created_at.desc(), MeasurementRow.id.desc())
    )


class UnreadSamples(tuple[float, ...]):
    """Stands for samples that were left in the database: it has their number, and reading one is an error."""

    def __iter__(self) -> Iterator[float]:
        raise ValueError("these samples were not read; ask for `measurements`")

    def __getitem__(self, place: Any) -> Any:
        return next(iter(self))


class Circumstances(NamedTuple):
    """What the measurements of one run share."""

    conditions: Conditions
    device: Device
    toolchain: Toolchain
    source_hash: str
    runner: str
    regime: str


class PlainRow(NamedTuple):
    """The part of a measurement that decides whether the whole of it is read."""

    id: int
    run_id: int | None
    schedule: Schedule
    circumstances: Circumstances
    fingerprint: str
    median_us: float
    samples: int


Choose = Callable[[Problem, Iterable[PlainRow]], "Collection[int] | None"]
"""From the measurements of one problem, newest first, to the ids of those that are read whole; None for all."""


class WithoutSamples:
    """Reads the measurements of one kernel on one arch, a problem at a time and without their samples.

    Records are made without the checks of :func:`record_of`, which take most of the time where there are a million.
    """

    def __init__(self, session: Session, arch: str, kernel: KernelClass) -> None:
        self._wanted = [MeasurementRow.arch == arch, MeasurementRow.kernel == kernel.name, UNDISTURBED]
        if not is_shipped(kernel):  # of one that ships there is no other, and telling takes a look at every row
            self._wanted.append(of_known_kernels(session, self._wanted, kernel))
        # An index has the answer to this; which arch they are of is only in the rows.
        of_kernel = select(ProblemRow.id).where(ProblemRow.kernel == kernel.name)
        counted = select(MeasurementRow.problem_id, func.count()).where(MeasurementRow.problem_id.in_(of_kernel))
        counts = {row[0]: row[1] for row in session.execute(counted.group_by(MeasurementRow.problem_id))}
        self.problems: dict[Problem, tuple[list[str], int]] = {}
        """The problems that were measured: the ids of each, and the number of measurements, also on other archs."""
        for row in session.scalars(select(ProblemRow)):
            if row.id in counts:
                numbers, count = self.problems.get(row.problem, ([], 0))
                self.problems[row.problem] = [*numbers, row.id], count + counts[row.id]
        self._kernel = kernel
        self._devices = {row.id: row.device for row in session.scalars(select(DeviceRow))}
        self._toolchains = {row.id: row.toolchain for row in session.scalars(select(ToolchainRow))}
        self._schedules: dict[str, Schedule] = {}
        self._samples: dict[int, UnreadSamples] = {}
        self._shared = lru_cache(maxsize=REMEMBERED)(self._circumstances)

    def read(self, session: Session, problem: Problem, ids: Collection[int] | None = None) -> list[StoredMeasurement]:
        """The measurements of one problem, or those of it with some ids, the newest first."""
        if ids is None:
            rows = list(session.execute(self._whole().where(*self._of(problem))))
        else:
            numbers, rows = sorted(ids), []
            for start in range(0, len(numbers), AT_ONCE):
                some = MeasurementRow.id.in_(numbers[start : start + AT_ONCE])
                rows += session.execute(self._whole().where(some))
            rows.sort(key=lambda row: (row.created_at, row.id), reverse=True)
        self._read_schedules(session, {row.schedule_id for row in rows})
        return [self._measurement(problem, *row) for row in rows]

    def plain_rows(self, session: Session, problem: Problem) -> Iterator[PlainRow]:
        """The measurements of one problem as far as a choice between them asks, the newest first.

        A row takes a fifth of the time of a whole measurement, and few are held at a time.
        """
        row = MeasurementRow
        shared = cast(row.conditions, Text), row.device_id, row.toolchain_id, row.source_hash, row.runner, row.regime
        query = (
            select(row.id, row.run_id, row.schedule_id, row.fingerprint, row.median_us, row.sample_count, *shared)
            .where(*self._of(problem))
            .order_by(row.created_at.desc(), row.id.desc())
        )
        schedules, shared_by = self._schedules, self._shared
        # The connection itself gives rows in half of the time that the session takes.
        result = session.connection().execute(query, execution_options={"yield_per": AT_ONCE})
        for some in result.partitions():
            self._read_schedules(session, {found[2] for found in some})
            for found in some:
                number, run_id, schedule_id, fingerprint, median_us, samples = found[:6]
                if type(median_us) is not float:
                    _check_times(median_us)
                alike = shared_by(*found[6:])
                yield PlainRow(number, run_id, schedules[schedule_id], alike, fingerprint, median_us, samples)

    def _circumstances(self, conditions: str, device_id: str, toolchain_id: str, *others: str) -> Circumstances:
        return Circumstances(_conditions(conditions), self._devices[device_id], self._toolchains[toolchain_id], *others)

    def _of(self, problem: Problem) -> list[ColumnElement[bool]]:
        return [MeasurementRow.problem_id.in_(self.problems[problem][0]), *self._wanted]

    def _read_schedules(self, session: Session, ids: set[str]) -> None:
        unknown = list(ids - self._schedules.keys())
        for start in range(0, len(unknown), AT_ONCE):
            some = select(ScheduleRow).where(ScheduleRow.id.in_(unknown[start : start + AT_ONCE]))
            self._schedules |= {row.id: row.knobs for row in session.scalars(some)}

    def _whole(self) -> Select:
        row = MeasurementRow
        return select(
            *(row.id, row.uid, row.run_id, row.source_hash, row.toolchain_id, row.schedule_id, row.device_id),
            *(row.fingerprint, row.regime, row.runner, row.median_us, row.ci_low_us, row.ci_high_us, row.sample_count),
            *(cast(row.accuracy, Text), cast(row.conditions, Text), row.created_at),
        ).order_by(row.created_at.desc(), row.id.desc())

    def _measurement(
        self,
        problem: Problem,
        number: int,
        uid: str,
        run_id: int | None,
        source_hash: str,
        toolchain_id: str,
        schedule_id: str,
        device_id: str,
        fingerprint: str,
        regime: str,
        runner: str,
        median_us: float,
        ci_low_us: float,
        ci_high_us: float,
        sample_count: int,
        accuracy: str | None,
        conditions: str,
        created_at: datetime,
    ) -> StoredMeasurement:
        _check_times(median_us, ci_low_us, ci_high_us)
        taken = _made(
            Measurement,
            problem=problem,
            schedule=self._schedules[schedule_id],
            fingerprint=fingerprint,
            device=self._devices[device_id],
            regime=regime,
            median_us=median_us,
            ci_low_us=ci_low_us,
            ci_high_us=ci_high_us,
            samples_us=self._samples.get(sample_count)
            or self._samples.setdefault(sample_count, UnreadSamples((0.0,) * sample_count)),
            accuracy=None if accuracy is None else _accuracy(accuracy),
            conditions=_conditions(conditions),
            runner=runner,
        )
        return _made(
            StoredMeasurement,
            id=number,
            uid=uid,
            run_id=run_id,
            kernel=self._kernel.name,
            source_hash=source_hash,
            toolchain=self._toolchains[toolchain_id],
            measurement=taken,
            created_at=created_at,
        )


def _check_times(*times: object) -> None:
    """Refuse what is no number: SQLite takes anything in any column."""
    for us in times:
        if type(us) not in (float, int):
            raise TypeError(f"a time is {us!r}")


def _made(kind: type[Made], **values: Any) -> Made:
    """A frozen record of values that need no check: its own constructor takes three times as long."""
    made = object.__new__(kind)
    made.__dict__.update(values)
    return made


@lru_cache(maxsize=REMEMBERED)
def _conditions(text: str) -> Conditions:
    """The conditions that stand in a row. The measurements of one run share them."""
    return decode(Conditions, json.loads(text), "conditions")


def _accuracy(text: str) -> Accuracy:
    try:
        return _READ_ACCURACY.decode(text)
    except msgspec.MsgspecError:
        return decode(Accuracy, json.loads(text), "accuracy")  # which says what is wrong


_READ_ACCURACY = msgspec.json.Decoder(Accuracy)


def of_known_kernels(
    session: Session, conditions: list[ColumnElement[bool]], kernel: KernelClass | None = None
) -> ColumnElement[bool]:
    """A condition that leaves out measurements of other kernels that have the names of kernels known here, such as one in a file
    of the same name.

    Args:
        session: an open session.
        conditions: the conditions of a query.
        kernel: the kernel whose measurements these are; None for the kernels that this process knows by their names.
    """
    sources = (
        select(MeasurementRow.kernel, MeasurementRow.source_hash)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .where(func.length(MeasurementRow.source_hash) == 2 * DIGITS, *conditions)
        .distinct()
    )
    others = []
    for name, note in session.execute(sources):
        try:
            mine = may_be_of(note, kernel or kernel_named(name))
        except ConfigError:  # nobody here can tell
            continue
        if not mine:
            others.append(note)
    return MeasurementRow.source_hash.not_in(others)


def select_latest(conditions: list[ColumnElement[bool]]) -> Select:
    """Selects the id of the newest measurement of each (problem, artifact, schedule, device name, regime)."""
    one = (
        MeasurementRow.problem_id,
        MeasurementRow.arch,
        MeasurementRow.fingerprint,
        MeasurementRow.schedule_id,
        DeviceRow.name,
        MeasurementRow.regime,
    )
    newest = (MeasurementRow.created_at.desc(), MeasurementRow.id.desc())
    ranked = (
        select(MeasurementRow.id, func.row_number().over(partition_by=one, order_by=newest).label("place"))
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .where(*conditions)
        .subquery()
    )
    return select(ranked.c.id).where(ranked.c.place == 1)


def select_landscapes() -> Select:
    """Selects (problem, device name, arch, regime, distinct programs, measurements).

    Schedules count programs, because only one of several schedules that give equal programs is measured. Fingerprints would
    not do: two launch grids of one machine code are two programs.
    """
    keys = (ProblemRow, DeviceRow.name, DeviceRow.arch, MeasurementRow.regime)
    return (
        select(*keys, func.count(MeasurementRow.schedule_id.distinct()), func.count(MeasurementRow.id))
        .select_from(MeasurementRow)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .group_by(ProblemRow.id, *keys[1:])
    )


def select_failures() -> Select:
    """Selects (failure, schedule, problem or None, device name or None), the newest first."""
    return (
        select(FailureRow, ScheduleRow, ProblemRow, DeviceRow.name)
        .join(ScheduleRow, ScheduleRow.id == FailureRow.schedule_id)
        .outerjoin(ProblemRow, ProblemRow.id == FailureRow.problem_id)
        .outerjoin(DeviceRow, DeviceRow.id == FailureRow.device_id)
        .order_by(FailureRow.id.desc())
    )


@cache
def select_entries(*columns: str) -> Select:
    """Selects entries as :func:`entry_of` takes them, with the measurement but not its samples.

    The values of `columns` are given by name when the statement is executed. Statements are remembered, because making one
    takes longer than SQLite takes to run it.
    """
    runner_up, measured_by = aliased(ScheduleRow), aliased(ToolchainRow)
    return (
        select(EntryRow, ProblemRow, ScheduleRow, runner_up, ToolchainRow, MeasurementRow, DeviceRow, measured_by)
        .join(ProblemRow, ProblemRow.id == EntryRow.problem_id)
        .join(ScheduleRow, ScheduleRow.id == EntryRow.schedule_id)
        .outerjoin(runner_up, runner_up.id == EntryRow.runner_up_id)
        .outerjoin(ToolchainRow, ToolchainRow.id == EntryRow.toolchain_id)
        .outerjoin(MeasurementRow, MeasurementRow.id == EntryRow.measurement_id)
        .outerjoin(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .outerjoin(measured_by, measured_by.id == MeasurementRow.toolchain_id)
        .options(defer(MeasurementRow.samples_us))
        .where(*(getattr(EntryRow, name) == bindparam(name) for name in columns))
    )


def measurement_of(
    row: MeasurementRow, problem: ProblemRow, schedule: ScheduleRow, device: DeviceRow, toolchain: ToolchainRow
) -> StoredMeasurement:
    """The measurement of rows that :func:`select_measurements` returned."""
    taken = record_of(Measurement, row, problem=problem.problem, schedule=schedule.knobs, device=device.device)
    return record_of(StoredMeasurement, row, toolchain=toolchain.toolchain, measurement=taken)


def entry_of(
    row: EntryRow,
    problem: ProblemRow,
    schedule: ScheduleRow,
    runner_up: ScheduleRow | None,
    toolchain: ToolchainRow | None,
    measurement: MeasurementRow | None,
    device: DeviceRow | None,
    measured_by: ToolchainRow | None,
) -> Entry:
    """The entry of rows that :func:`select_entries` returned."""
    summary = None
    if measurement and device and measured_by:
        summary = record_of(
            MeasurementSummary,
            measurement,
            samples=measurement.sample_count,
            device=device.device,
            toolchain=measured_by.toolchain,
        )
    return record_of(
        Entry,
        row,
        kernel=row.kernel.partition(NAMESAKE)[0],
        problem=problem.problem,
        schedule=schedule.knobs,
        fingerprint=row.fingerprint or "",
        measurement=summary,
        runner_up=runner_up.knobs if runner_up else None,
        ties=tuple(decode(Schedule, tie["schedule"], f"entries[{row.id}].ties") for tie in row.ties),
        toolchain=toolchain.toolchain if toolchain else None,
        layer="",
    )


def build_of(
    row: BuildRow, schedule: ScheduleRow, artifact: ArtifactRow | None, *, toolchain: Toolchain
) -> BuildRecord:
    """The build of rows that :func:`select_builds` returned."""
    return record_of(
        BuildRecord,
        row,
        toolchain=toolchain,
        schedule=schedule.knobs,
        fingerprint=row.fingerprint or "",
        facts=artifact.facts if artifact else None,
        cubin_bytes=artifact.cubin_bytes if artifact else 0,
        failure=read_failure(row.failure_kind, row.failure_message) if row.failure_kind else None,
    )


def read_failure(kind: str, message: str | None) -> Failure:
    """The failure of the two columns that hold one."""
    return Failure(kind=FailureKind(kind), message=message or "")
