"""Rows to records: the statements that read, and the records made of their rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, func, select
from sqlalchemy.orm import aliased, defer

from tiledsched.build.cubin import ResourceFacts
from tiledsched.core.errors import Failure, FailureKind, ProblemError
from tiledsched.core.problem import Problem, ProblemClass
from tiledsched.core.registry import problem_from_json
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Accuracy, Conditions, Device, Measurement, RivalTime
from tiledsched.store.codec import decode
from tiledsched.store.models import (
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

OTHER_FIELDS = " (other fields)"
"""Added to the kernel's name in a problem that was stored when the kernel had other fields. No kernel has that name."""

UNDISTURBED = MeasurementRow.conditions["beside"].as_string().is_(None)
"""No other process is known to have run on the GPU during the measurement."""


def matching(wanted: Mapping[Any, Any]) -> list[ColumnElement[bool]]:
    """A condition for each column whose wanted value is not None."""
    return [column == value for column, value in wanted.items() if value is not None]


def select_builds() -> Select:
    """Selects builds with their schedule and artifact, as :meth:`Reader.builds` takes them."""
    return (
        select(*BuildRow.__table__.columns, ScheduleRow.knobs, ArtifactRow.facts, ArtifactRow.cubin_bytes)
        .join(ScheduleRow, ScheduleRow.id == BuildRow.schedule_id)
        .outerjoin(ArtifactRow, (ArtifactRow.arch == BuildRow.arch) & (ArtifactRow.fingerprint == BuildRow.fingerprint))
    )


def select_measurements() -> Select:
    """Selects measurements, the newest first, as :meth:`Reader.stored_measurement` takes them."""
    return (
        select(MeasurementRow, ProblemRow, ScheduleRow, DeviceRow, ToolchainRow)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .join(ScheduleRow, ScheduleRow.id == MeasurementRow.schedule_id)
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .join(ToolchainRow, ToolchainRow.id == MeasurementRow.toolchain_id)
        .order_by(MeasurementRow.created_at.desc(), MeasurementRow.id.desc())
    )


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
    """Selects entries as :meth:`Reader.entry` takes them, with the measurement but not its samples.

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


class Reader:
    """Makes records of rows. Each schedule, problem, device and so on is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], Any] = {}

    def _once(self, kind: str, identity: str, make: Any) -> Any:
        key = (kind, identity)
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def schedule(self, identity: str, knobs: Mapping[str, Any]) -> Schedule:
        """The schedule of a row of `schedules`."""
        made: Schedule = self._once("schedule", identity, lambda: Schedule.from_json(knobs))
        return made

    def problem(self, row: ProblemRow) -> Problem:
        """The problem of a row of `problems`."""
        made: Problem = self._once("problem", row.id, lambda: _problem(row))
        return made

    def toolchain(self, row: ToolchainRow) -> Toolchain:
        """The toolchain of a row of `toolchains`."""
        return record_of(Toolchain, row)

    def device(self, row: DeviceRow) -> Device:
        """The device of a row of `devices`."""
        made: Device = self._once("device", row.id, lambda: decode(Device, row.device, f"devices[{row.id}]"))
        return made

    def facts(self, fingerprint: str, data: Any) -> ResourceFacts | None:
        """The resource facts of a row of `artifacts`; None where there are none."""
        if data is None:
            return None
        where = f"artifacts[{fingerprint}].facts"
        made: ResourceFacts = self._once("facts", fingerprint, lambda: decode(ResourceFacts, data, where))
        return made

    def problem_class(self, identity: str, data: Any) -> ProblemClass:
        """The problem class of a row of `builds`."""
        where = f"builds.problem_class[{identity}]"
        made: ProblemClass = self._once("class", identity, lambda: decode(ProblemClass, data, where))
        return made

    def stored_measurement(
        self,
        row: MeasurementRow,
        problem: ProblemRow,
        schedule: ScheduleRow,
        device: DeviceRow,
        toolchain: ToolchainRow,
    ) -> StoredMeasurement:
        """The measurement of a row of `measurements` and the rows that it refers to."""
        where = f"measurements[{row.id}]"
        measurement = record_of(
            Measurement,
            row,
            problem=self.problem(problem),
            schedule=self.schedule(schedule.id, schedule.knobs),
            device=self.device(device),
            samples_us=tuple(row.samples_us),
            accuracy=_accuracy(row, where),
            conditions=decode(Conditions, row.conditions, f"{where}.conditions"),
        )
        return record_of(StoredMeasurement, row, toolchain=self.toolchain(toolchain), measurement=measurement)

    def summary(self, row: MeasurementRow, device: DeviceRow, toolchain: ToolchainRow) -> MeasurementSummary:
        """The measurement of such rows without its samples."""
        where = f"measurements[{row.id}]"
        return record_of(
            MeasurementSummary,
            row,
            samples=row.sample_count,
            device=self.device(device),
            conditions=decode(Conditions, row.conditions, f"{where}.conditions"),
            accuracy=_accuracy(row, where),
            toolchain=self.toolchain(toolchain),
        )

    def entry(
        self,
        row: EntryRow,
        problem: ProblemRow,
        schedule: ScheduleRow,
        runner_up: ScheduleRow | None,
        toolchain: ToolchainRow | None,
        measurement: MeasurementRow | None,
        device: DeviceRow | None,
        measured_by: ToolchainRow | None,
    ) -> Entry:
        """The entry of a row of `entries` and the rows that it refers to."""
        summary = self.summary(measurement, device, measured_by) if measurement and device and measured_by else None
        return record_of(
            Entry,
            row,
            problem=self.problem(problem),
            schedule=self.schedule(schedule.id, schedule.knobs),
            fingerprint=row.fingerprint or "",
            measurement=summary,
            runner_up=self.schedule(runner_up.id, runner_up.knobs) if runner_up else None,
            ties=tuple(self.schedule(tie["id"], tie["schedule"]) for tie in row.ties),
            rivals=read_rivals(row.rivals),
            toolchain=self.toolchain(toolchain) if toolchain else None,
            layer="",
        )

    def builds(self, rows: Iterable[Any], toolchain: Toolchain) -> list[BuildRecord]:
        """The builds of rows that :func:`select_builds` returned."""
        return [
            record_of(
                BuildRecord,
                row,
                toolchain=toolchain,
                schedule=self.schedule(row.schedule_id, row.knobs),
                problem_class=self.problem_class(row.problem_class_id, row.problem_class),
                fingerprint=row.fingerprint or "",
                facts=self.facts(row.fingerprint, row.facts),
                cubin_bytes=row.cubin_bytes or 0,
                failure=read_failure(row.failure_kind, row.failure_message) if row.failure_kind else None,
            )
            for row in rows
        ]


def read_rivals(data: list[Any] | None) -> tuple[RivalTime, ...] | None:
    """The times of rivals from the column of an entry."""
    return None if data is None else tuple(decode(RivalTime, each, "rivals") for each in data)


def read_failure(kind: str, message: str | None) -> Failure:
    """The failure of the two columns that hold one."""
    return Failure(kind=FailureKind(kind), message=message or "")


def _problem(row: ProblemRow) -> Problem:
    try:
        return problem_from_json({"kernel": row.kernel, **row.dims})
    except ProblemError:
        return problem_from_json({"kernel": row.kernel + OTHER_FIELDS, **row.dims})


def _accuracy(row: MeasurementRow, where: str) -> Accuracy | None:
    return decode(Accuracy, row.accuracy, f"{where}.accuracy") if row.accuracy is not None else None
