"""The tables of the database. Ids of problems, schedules, toolchains and devices are hashes of their contents.

The schema is created by the migrations in `tuning_db/migrations`; a test holds them equal to what is declared here.
Types are those SQLite and PostgreSQL share. A column whose type is a record holds it as JSON. Artifacts are keyed by
(arch, fingerprint); their cubins are files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from datetime import datetime, timezone
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from sqlalchemy import (
    JSON,
    CheckConstraint,
    Column,
    ColumnElement,
    DateTime,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    or_,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.orm.decl_api import DeclarativeAttributeIntercept

from tiledsched.core.errors import FailureKind
from tiledsched.measure.runner import Conditions
from tiledsched.store.codec import REMEMBERED, decode, encode
from tiledsched.store.rows import NAMESAKE, TABLES, in_utc, types_of

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


LENGTHS = {
    "id": 12,
    "problem_class_id": 12,
    "uid": 24,
    "kernel": 200,
    "fleet_campaigns.kernel": 400,
    "job": 200,
    "hostname": 255,
    "name": 128,
    "device_name": 128,
    "kernel_views.name": 63,
    **dict.fromkeys(
        ("arch", "regime", "runner", "accum_mode", "provenance", "status", "stage", "state", "outcome"), 16
    ),
    **dict.fromkeys(("kind", "failure_kind"), 32),
    **dict.fromkeys(("fingerprint", "source_hash", "compiler", "gpu", "cuda_tile", "tileiras", "ptxas", "nvvm"), 64),
}
"""The most characters of columns of words, by their names, or for one table by its name and theirs. Others hold any number."""
REFERENCES = {
    "schedule_id": "schedules.id",
    "runner_up_id": "schedules.id",
    "problem_id": "problems.id",
    "device_id": "devices.id",
    "toolchain_id": "toolchains.id",
    "measurement_id": "measurements.id",
    "run_id": "runs.id",
    "campaign_id": "fleet_campaigns.id",
    "worker_id": "fleet_workers.id",
    "lease_id": "fleet_leases.id",
}
"""What the columns of these names refer to."""


class _Columns(DeclarativeAttributeIntercept):
    """The class of the models. Which columns, and so which attributes, a model has, its table says."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A column."""


class Base(DeclarativeBase, metaclass=_Columns):
    """Base class of the models."""

    metadata = MetaData(naming_convention=NAMING)

    if TYPE_CHECKING:
        __table__: ClassVar[Table]

        def __getattr__(self, name: str) -> Any:
            """The value of a column."""

        def __setattr__(self, name: str, value: Any) -> None:
            """Change the value of a column."""


def _table(name: str, *more: Any, keys: Collection[str] = ("id",)) -> Table:
    """A table with the columns of :data:`tiledsched.store.rows.TABLES`, with constraints and indices, and its primary key."""
    columns = (_column(name, column, kind, column in keys) for column, kind in TABLES[name].items())
    return Table(name, Base.metadata, *columns, *more)


def _column(table: str, name: str, kind: Any, is_key: bool) -> Column[Any]:
    own, plain, optional = types_of(kind)
    if name in REFERENCES:
        return Column(name, ForeignKey(REFERENCES[name]), nullable=optional)
    length = LENGTHS.get(f"{table}.{name}", LENGTHS.get(name))
    text = String(length) if length else Text()
    types: dict[Any, Any] = {
        int: Integer(),
        float: Float(),
        str: text,
        FailureKind: text,
        datetime: UtcDateTime(),
        **dict.fromkeys((dict, list), JSON(none_as_null=True)),
    }
    return Column(name, types.get(plain) or Record(own, name), primary_key=is_key, nullable=optional)


class DeviceRow(Base):
    """A GPU with its driver. The same GPU under another driver is another row."""

    __table__ = _table("devices", Index(None, "name"))


class ToolchainRow(Base):
    """The versions of the compiler's parts."""

    __table__ = _table("toolchains")


class ProblemRow(Base):
    """A problem: its kernel, and a value for each of the kernel's fields. Views have the fields as columns."""

    __table__ = _table("problems", Index(None, "kernel"))


class ViewRow(Base):
    """The SQL view of one kernel's entries, which :mod:`tiledsched.store.views` makes."""

    __table__ = _table("kernel_views", UniqueConstraint("kernel"), keys=("name",))


class ScheduleRow(Base):
    """A schedule. Its knobs are JSON, because kernels have different ones."""

    __table__ = _table("schedules")


class ArtifactRow(Base):
    """Machine code. `facts` is null where only the fingerprint is known (imported evidence)."""

    __table__ = _table("artifacts", keys=("arch", "fingerprint"))


class BuildRow(Base):
    """One compile, with the artifact's fingerprint, or the kind and message of the failure."""

    __table__ = _table(
        "builds",
        UniqueConstraint(
            "kernel", "source_hash", "toolchain_id", "arch", "schedule_id", "problem_class_id", name="uq_builds_key"
        ),
        ForeignKeyConstraint(["arch", "fingerprint"], ["artifacts.arch", "artifacts.fingerprint"]),
        CheckConstraint("(fingerprint IS NULL) <> (failure_kind IS NULL)", name="outcome"),
    )


class RunRow(Base):
    """One run of `tune`."""

    __table__ = _table("runs", Index(None, "status"))


class MeasurementRow(Base):
    """A measurement: samples, estimate and conditions. `uid` is the same in every database."""

    __table__ = _table(
        "measurements",
        UniqueConstraint("uid"),
        ForeignKeyConstraint(["arch", "fingerprint"], ["artifacts.arch", "artifacts.fingerprint"]),
        Index(None, "problem_id", "device_id", "regime"),
        Index(None, "arch", "fingerprint"),
    )


class FailureRow(Base):
    """A candidate that gave no usable measurement."""

    __table__ = _table("failures", Index(None, "arch"), Index(None, "problem_id"))


def of_name(kernel: str) -> ColumnElement[bool]:
    """A condition on entries: that they are of kernels of this name, in whatever files."""
    return or_(EntryRow.kernel == kernel, EntryRow.kernel.startswith(f"{kernel}{NAMESAKE}", autoescape=True))


class EntryRow(Base):
    """An entry: what is served for one kernel, arch, problem, device, regime, accumulator mode and compiler."""

    __table__ = _table(
        "entries",
        UniqueConstraint(
            "kernel", "arch", "problem_id", "device_name", "regime", "accum_mode", "compiler", name="uq_entries_key"
        ),
        ForeignKeyConstraint(["arch", "fingerprint"], ["artifacts.arch", "artifacts.fingerprint"]),
    )


class CampaignRow(Base):
    """Problems that many GPUs work on, and how. `job` names the function, and `kernel` the kernel's declaration."""

    __table__ = _table("fleet_campaigns")


class WorkerRow(Base):
    """A process that works with one GPU of a fleet: its state, and when it was last heard of."""

    __table__ = _table("fleet_workers", Index(None, "campaign_id"))


class LeaseRow(Base):
    """One problem of a campaign: waiting, leased to a worker until a time, done or failed."""

    __table__ = _table(
        "fleet_leases",
        UniqueConstraint("campaign_id", "arch", "problem_id", name="uq_fleet_leases_key"),
        Index("ix_fleet_leases_next", "campaign_id", "state", "arch", "attempts", "number"),
        Index(None, "worker_id"),
    )


class AttemptRow(Base):
    """One worker's attempt at one problem, and how it ended. A result that came too late is stored as well."""

    __table__ = _table("fleet_attempts", Index(None, "lease_id"), Index(None, "worker_id"))


class ControlRow(Base):
    """A timing of a campaign's control program on one GPU."""

    __table__ = _table("fleet_controls", Index(None, "campaign_id"))
