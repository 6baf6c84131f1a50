"""The tables of the database. Ids of problems, schedules, toolchains and devices are hashes of their contents.

The schema is created by the migrations in `tuning_db/migrations`; a test holds them equal to what is declared here.
Types are those SQLite and PostgreSQL share. A column whose type is a record holds it as JSON. Artifacts are keyed by
(arch, fingerprint); their cubins are files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import (
    JSON,
    CheckConstraint,
    ColumnElement,
    DateTime,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    or_,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tiledsched.build.cubin import ResourceFacts
from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.problem import ProblemClass
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Conditions, Device, RivalTime
from tiledsched.store.codec import REMEMBERED, decode, encode
from tiledsched.store.rows import NAMESAKE, in_utc

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
"""Every constraint has a name, so that a later migration can drop it on any backend."""


class UtcDateTime(TypeDecorator[datetime]):
    """A time in UTC. It has its time zone in Python on every backend, though SQLite stores none."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert a time to UTC. A time without a zone is refused."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; use datetime.now(timezone.utc)")
        return value.astimezone(timezone.utc)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Give a stored time its zone, UTC."""
        return None if value is None else in_utc(value)


class Record(TypeDecorator[Any]):
    """A record that is stored as JSON, and checked when it is read as a record of a file is."""

    impl = JSON
    cache_ok = True

    def __init__(self, kind: Any, column: str) -> None:
        super().__init__(none_as_null=True)
        self.kind = kind
        self.column = column

    def bind_processor(self, dialect: Dialect) -> Any:
        """What gives the JSON of a record: of each column one function, since an import writes hundreds of thousands."""
        return _written

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        """The record of some JSON.

        Raises:
            DatabaseError: the JSON is not that of such a record.
        """
        return None if value is None else decode(self.kind, value, self.column)


def _written(value: Any) -> str | None:
    """A record as JSON."""
    if type(value) is tuple and {*map(type, value)} == {float} and math.isfinite(sum(value)):
        return msgspec.json.encode(value).decode()
    if type(value) is Conditions:
        return _written_once(value)
    return None if value is None else json.dumps(encode(value))


@lru_cache(maxsize=REMEMBERED)
def _written_once(value: Any) -> str:
    """A record that many rows share, as JSON."""
    return json.dumps(encode(value))


RECORDS: Mapping[Any, str] = {
    Accuracy: "accuracy",
    Conditions: "conditions",
    Device: "device",
    ProblemClass: "problem_class",
    ResourceFacts: "facts",
    Schedule: "knobs",
    tuple[RivalTime, ...]: "rivals",
    tuple[float, ...]: "samples_us",
}
"""The types of columns that hold records, and what these columns are called."""


class Base(DeclarativeBase):
    """Base class of the models."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012
        dict[str, Any]: JSON,
        list[Any]: JSON,
        float: Float(),
        datetime: UtcDateTime,
        **{kind: Record(kind, column) for kind, column in RECORDS.items()},
    }


class Numbered:
    """Rows that have a number in their database."""

    id: Mapped[int] = mapped_column(primary_key=True)


class OfProgram(Numbered):
    """Rows about one schedule of a kernel on an arch."""

    kernel: Mapped[str] = mapped_column(String(200))
    arch: Mapped[str] = mapped_column(String(16))
    schedule_id: Mapped[str] = mapped_column(ForeignKey("schedules.id"))


class TimeColumns(Numbered):
    """Rows that hold a timing of machine code."""

    fingerprint: Mapped[str] = mapped_column(String(64))
    median_us: Mapped[float]
    ci_low_us: Mapped[float]
    ci_high_us: Mapped[float]


class DeviceRow(Base):
    """A GPU with its driver. The same GPU under another driver is another row."""

    __tablename__ = "devices"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    name: Mapped[str] = mapped_column(String(128), index=True)
    arch: Mapped[str] = mapped_column(String(16))
    device: Mapped[Device]


class ToolchainRow(Base):
    """The versions of the compiler's parts."""

    __tablename__ = "toolchains"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    cuda_tile: Mapped[str] = mapped_column(String(64))
    tileiras: Mapped[str] = mapped_column(String(64))
    ptxas: Mapped[str] = mapped_column(String(64))
    nvvm: Mapped[str] = mapped_column(String(64))


class ProblemRow(Base):
    """A problem: its kernel, and a value for each of the kernel's fields. Views have the fields as columns."""

    __tablename__ = "problems"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    kernel: Mapped[str] = mapped_column(String(200), index=True)
    dims: Mapped[dict[str, Any]]


class ViewRow(Base):
    """The SQL view of one kernel's entries, which :mod:`tiledsched.store.views` makes."""

    __tablename__ = "kernel_views"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    kernel: Mapped[str] = mapped_column(String(200), unique=True)
    definition: Mapped[str] = mapped_column(Text)


class ScheduleRow(Base):
    """A schedule. Its knobs are JSON, because kernels have different ones."""

    __tablename__ = "schedules"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    knobs: Mapped[Schedule]


class ArtifactRow(Base):
    """Machine code. `facts` is null where only the fingerprint is known (imported evidence)."""

    __tablename__ = "artifacts"

    arch: Mapped[str] = mapped_column(String(16), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64), primary_key=True)
    facts: Mapped[ResourceFacts | None]
    cubin_bytes: Mapped[int]


class BuildRow(OfProgram, Base):
    """One compile, with the artifact's fingerprint, or the kind and message of the failure."""

    __tablename__ = "builds"
    __table_args__ = (
        UniqueConstraint(
            "kernel", "source_hash", "toolchain_id", "arch", "schedule_id", "problem_class_id", name="uq_builds_key"
        ),
        ForeignKeyConstraint(["arch", "fingerprint"], ["artifacts.arch", "artifacts.fingerprint"]),
        CheckConstraint("(fingerprint IS NULL) <> (failure_kind IS NULL)", name="outcome"),
    )

    source_hash: Mapped[str] = mapped_column(String(64))
    toolchain_id: Mapped[str] = mapped_column(ForeignKey("toolchains.id"))
    problem_class_id: Mapped[str] = mapped_column(String(12))
    problem_class: Mapped[ProblemClass]
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    failure_kind: Mapped[str | None] = mapped_column(String(32))
    failure_message: Mapped[str | None] = mapped_column(Text)
    seconds: Mapped[float]
    created_at: Mapped[datetime]


class RunRow(Numbered, Base):
    """One run of `tune`."""

    __tablename__ = "runs"

    status: Mapped[str] = mapped_column(String(16), index=True)
    command: Mapped[dict[str, Any]]
    arch: Mapped[str] = mapped_column(String(16))
    hostname: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int]
    host: Mapped[dict[str, Any]]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]


class MeasurementRow(OfProgram, TimeColumns, Base):
    """A measurement: samples, estimate and conditions. `uid` is the same in every database."""

    __tablename__ = "measurements"
    __table_args__ = (
        ForeignKeyConstraint(["arch", "fingerprint"], ["artifacts.arch", "artifacts.fingerprint"]),
        Index(None, "problem_id", "device_id", "regime"),
        Index(None, "arch", "fingerprint"),
    )

    uid: Mapped[str] = mapped_column(String(24), unique=True)
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))
    source_hash: Mapped[str] = mapped_column(String(64))
    toolchain_id: Mapped[str] = mapped_column(ForeignKey("toolchains.id"))
    problem_id: Mapped[str] = mapped_column(ForeignKey("problems.id"))
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    regime: Mapped[str] = mapped_column(String(16))
    runner: Mapped[str] = mapped_column(String(16))
    samples_us: Mapped[tuple[float, ...]]
    sample_count: Mapped[int]
    accuracy: Mapped[Accuracy | None]
    conditions: Mapped[Conditions]
    created_at: Mapped[datetime]


class FailureRow(OfProgram, Base):
    """A candidate that gave no usable measurement."""

    __tablename__ = "failures"
    __table_args__ = (Index(None, "arch"),)

    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))
    stage: Mapped[str] = mapped_column(String(16))
    problem_id: Mapped[str | None] = mapped_column(ForeignKey("problems.id"), index=True)
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    device_id: Mapped[str | None] = mapped_column(ForeignKey("devices.id"))
    kind: Mapped[str] = mapped_column(String(32))
    message: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime]


def of_name(kernel: str) -> ColumnElement[bool]:
    """A condition on entries: that they are of kernels of this name, in whatever files."""
    return or_(EntryRow.kernel == kernel, EntryRow.kernel.startswith(f"{kernel}{NAMESAKE}", autoescape=True))


class EntryRow(OfProgram, Base):
    """An entry: what is served for one kernel, arch, problem, device, regime, accumulator mode and compiler."""

    __tablename__ = "entries"
    __table_args__ = (
        UniqueConstraint(
            "kernel", "arch", "problem_id", "device_name", "regime", "accum_mode", "compiler", name="uq_entries_key"
        ),
        ForeignKeyConstraint(["arch", "fingerprint"], ["artifacts.arch", "artifacts.fingerprint"]),
    )

    problem_id: Mapped[str] = mapped_column(ForeignKey("problems.id"))
    device_name: Mapped[str] = mapped_column(String(128))
    regime: Mapped[str] = mapped_column(String(16))
    accum_mode: Mapped[str] = mapped_column(String(16))
    compiler: Mapped[str] = mapped_column(String(64))
    provenance: Mapped[str] = mapped_column(String(16))
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    measurement_id: Mapped[int | None] = mapped_column(ForeignKey("measurements.id"))
    model_us: Mapped[float | None]
    runner_up_id: Mapped[str | None] = mapped_column(ForeignKey("schedules.id"))
    margin: Mapped[float | None]
    ties: Mapped[list[Any]]
    rivals: Mapped[tuple[RivalTime, ...] | None]
    candidates: Mapped[int]
    source: Mapped[str] = mapped_column(Text)
    toolchain_id: Mapped[str | None] = mapped_column(ForeignKey("toolchains.id"))
    source_hash: Mapped[str] = mapped_column(String(64))
    run_id: Mapped[int | None] = mapped_column(ForeignKey("runs.id"))
    updated_at: Mapped[datetime]


class CampaignRow(Base):
    """Problems that many GPUs work on, and how. `job` names the function, and `kernel` the kernel's declaration."""

    __tablename__ = "fleet_campaigns"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    job: Mapped[str] = mapped_column(String(200))
    kernel: Mapped[str] = mapped_column(String(400))
    options: Mapped[dict[str, Any]]
    compiler: Mapped[str] = mapped_column(String(64))
    source_hash: Mapped[str] = mapped_column(String(64))
    lease_s: Mapped[float]
    deadline_s: Mapped[float]
    most_attempts: Mapped[int]
    status: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[datetime]
    ends_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class WorkerRow(Base):
    """A process that works with one GPU of a fleet: its state, and when it was last heard of."""

    __tablename__ = "fleet_workers"

    id: Mapped[str] = mapped_column(String(12), primary_key=True)
    campaign_id: Mapped[str] = mapped_column(ForeignKey("fleet_campaigns.id"), index=True)
    hostname: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int]
    gpu: Mapped[str] = mapped_column(String(64))
    device_name: Mapped[str] = mapped_column(String(128))
    arch: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    note: Mapped[str] = mapped_column(Text)
    conditions: Mapped[dict[str, Any]]
    started_at: Mapped[datetime]
    seen_at: Mapped[datetime]


class LeaseRow(Numbered, Base):
    """One problem of a campaign: waiting, leased to a worker until a time, done or failed."""

    __tablename__ = "fleet_leases"
    __table_args__ = (
        UniqueConstraint("campaign_id", "arch", "problem_id", name="uq_fleet_leases_key"),
        Index("ix_fleet_leases_next", "campaign_id", "state", "arch", "attempts", "number"),
    )

    campaign_id: Mapped[str] = mapped_column(ForeignKey("fleet_campaigns.id"))
    number: Mapped[int]
    arch: Mapped[str] = mapped_column(String(16))
    problem_id: Mapped[str] = mapped_column(ForeignKey("problems.id"))
    state: Mapped[str] = mapped_column(String(16))
    attempts: Mapped[int]
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("fleet_workers.id"), index=True)
    until: Mapped[datetime | None]
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    message: Mapped[str] = mapped_column(Text)
    done_at: Mapped[datetime | None]


class AttemptRow(Numbered, Base):
    """One worker's attempt at one problem, and how it ended. A result that came too late is stored as well."""

    __tablename__ = "fleet_attempts"

    lease_id: Mapped[int] = mapped_column(ForeignKey("fleet_leases.id"), index=True)
    number: Mapped[int]
    worker_id: Mapped[str] = mapped_column(ForeignKey("fleet_workers.id"), index=True)
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    outcome: Mapped[str] = mapped_column(String(16))
    message: Mapped[str] = mapped_column(Text)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class ControlRow(TimeColumns, Base):
    """A timing of a campaign's control program on one GPU."""

    __tablename__ = "fleet_controls"

    campaign_id: Mapped[str] = mapped_column(ForeignKey("fleet_campaigns.id"), index=True)
    worker_id: Mapped[str] = mapped_column(ForeignKey("fleet_workers.id"))
    gpu: Mapped[str] = mapped_column(String(64))
    arch: Mapped[str] = mapped_column(String(16))
    conditions: Mapped[dict[str, Any]]
    taken_at: Mapped[datetime]
