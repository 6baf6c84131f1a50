"""Records to rows: what a record becomes when written, and the statements that write it.

Rows that others point at are inserted first and only where missing: their ids are hashes of their contents.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import import_module
from typing import Any

from sqlalchemy import Table, insert, literal, select, update
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import Session

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import DatabaseError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Conditions, Device
from tiledsched.store.codec import encode
from tiledsched.store.models import (
    ArtifactRow,
    Base,
    BuildRow,
    DeviceRow,
    EntryRow,
    MeasurementRow,
    ProblemRow,
    ScheduleRow,
    ToolchainRow,
)
from tiledsched.store.reading import Reader, select_entries
from tiledsched.store.records import PROVENANCES, ArtifactRecord, BuildRecord, Entry, StoredMeasurement, Toolchain

BUILD_KEY = ("kernel", "source_hash", "toolchain_id", "arch", "schedule_id", "problem_class_id")
ENTRY_KEY = ("kernel", "arch", "problem_id", "device_name", "regime", "accum_mode", "compiler")


AT_ONCE = 10_000
"""Values of one question: SQLite takes 32766."""


def now() -> datetime:
    """The current time, UTC."""
    return datetime.now(timezone.utc)


def insert_missing(session: Session, model: type[Base], rows: list[dict[str, Any]]) -> None:
    """Insert those of `rows` whose key is not taken."""
    if rows:
        session.execute(_insert(session, model).on_conflict_do_nothing().inline(), rows)


def upsert(session: Session, model: type[Base], rows: list[dict[str, Any]], key: tuple[str, ...]) -> None:
    """Insert `rows`, each in place of what has the same `key`."""
    if rows:
        statement = _insert(session, model)
        changed = {name: statement.excluded[name] for name in rows[0] if name not in key}
        session.execute(statement.on_conflict_do_update(index_elements=key, set_=changed).inline(), rows)


def _insert(session: Session, model: type[Base]) -> Any:
    """SQLite and PostgreSQL share ON CONFLICT; SQLAlchemy has it in the dialects only, of which one is imported."""
    dialect = import_module(f"sqlalchemy.dialects.{session.get_bind().dialect.name}")
    return dialect.insert(model.__table__)


def _insert_new(session: Session, model: type[Base], row: dict[str, Any]) -> bool:
    """Insert a row unless its key is taken; whether it was inserted."""
    statement = _insert(session, model).on_conflict_do_nothing()
    if session.get_bind().dialect.name == "postgresql":  # which tells no count where a key is made
        return session.execute(statement.returning(literal(1)), row).first() is not None
    result = session.execute(statement.inline(), row)
    assert isinstance(result, CursorResult)
    return result.rowcount == 1


def insert_row(session: Session, model: type[Base], row: dict[str, Any]) -> int:
    """Insert one row; its number."""
    assert isinstance(model.__table__, Table)
    result = session.execute(insert(model.__table__), row)
    assert isinstance(result, CursorResult)
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])


class Parents:
    """Rows that others point at, collected so that each is made and inserted once, before them."""

    def __init__(self) -> None:
        self.rows: dict[type[Base], dict[Any, dict[str, Any]]] = {}
        self._ids: dict[Any, str] = {}
        self._conditions: dict[Conditions, dict[str, Any]] = {}

    def _put(self, model: type[Base], key: Any, values: dict[str, Any]) -> None:
        self.rows.setdefault(model, {})[key] = values

    def _once(self, model: type[Base], value: Problem | Schedule | Toolchain | Device, make: Callable[[], Any]) -> str:
        if value not in self._ids:
            values = make()
            self._ids[value] = values["id"]
            self._put(model, values["id"], values)
        return self._ids[value]

    def problem(self, problem: Problem) -> str:
        """Its id."""

        def make() -> dict[str, Any]:
            dims = {name: value for name, value in problem.to_json().items() if name != "kernel"}
            return {"id": problem.id, "kernel": problem.kernel, "dims": dims}

        return self._once(ProblemRow, problem, make)

    def schedule(self, schedule: Schedule) -> str:
        """Its id."""
        return self._once(ScheduleRow, schedule, lambda: {"id": schedule.id, "knobs": schedule.to_json()})

    def toolchain(self, toolchain: Toolchain) -> str:
        """Its id."""
        return self._once(ToolchainRow, toolchain, lambda: {"id": toolchain.id, **toolchain.to_json()})

    def device(self, device: Device) -> str:
        """Its id."""
        return self._once(
            DeviceRow,
            device,
            lambda: {"id": device_id(device), "name": device.name, "arch": device.arch, "device": device.to_json()},
        )

    def artifact(self, arch: str, fingerprint: str) -> str:
        """Its fingerprint; a row without facts, unless the artifact is already known."""
        known = {"arch": arch, "fingerprint": fingerprint, "facts": None, "cubin_bytes": 0}
        self._put(ArtifactRow, (arch, fingerprint), known)
        return fingerprint

    def conditions(self, conditions: Conditions) -> dict[str, Any]:
        """Conditions as they are stored; what is timed together shares them."""
        if conditions not in self._conditions:
            self._conditions[conditions] = encode(conditions)
        return self._conditions[conditions]

    def insert(self, session: Session) -> None:
        """Insert what is missing."""
        for model in sorted(self.rows, key=lambda each: each.__tablename__):
            # In one order for everyone, so that no two writers wait for each other.
            insert_missing(session, model, [row for _, row in sorted(self.rows[model].items())])


def device_id(device: Device) -> str:
    """Stable id; the driver is part of it."""
    return stable_id(device.to_json())


def put_artifacts(session: Session, records: Iterable[ArtifactRecord]) -> None:
    """Store what is known of artifacts, also where so far only the fingerprint was."""
    rows = {
        (record.arch, record.fingerprint): {
            "arch": record.arch,
            "fingerprint": record.fingerprint,
            "facts": record.facts.to_json(),
            "cubin_bytes": record.cubin_bytes,
        }
        for record in records
        if record.facts is not None
    }
    upsert(session, ArtifactRow, [row for _, row in sorted(rows.items())], ("arch", "fingerprint"))


def put_builds(session: Session, records: Sequence[BuildRecord]) -> None:
    """Store builds, each in place of an earlier one of the same key."""
    parents = Parents()
    rows = [build_values(record, parents) for record in records]
    parents.insert(session)
    put_artifacts(session, (record.artifact for record in records if record.failure is None))
    upsert(session, BuildRow, rows, BUILD_KEY)


def put_measurements(session: Session, records: Sequence[StoredMeasurement]) -> int:
    """Store those measurements whose uid is not there; how many are new."""
    uids = sorted({record.uid for record in records})
    known: set[str] = set()
    for start in range(0, len(uids), AT_ONCE):
        known.update(
            session.scalars(select(MeasurementRow.uid).where(MeasurementRow.uid.in_(uids[start : start + AT_ONCE])))
        )
    parents = Parents()
    # In one order for everyone, so that no two writers wait for each other.
    new = sorted(
        {record.uid: record for record in records if record.uid not in known}.values(), key=lambda each: each.uid
    )
    rows = [measurement_values(record, parents) for record in new]
    parents.insert(session)
    insert_missing(session, MeasurementRow, rows)
    return len(rows)


def put_entry(session: Session, record: Entry, *, merging: bool) -> str:
    """Store an entry unless what is there is stronger; with `merging`, unless its evidence is as good.

    Returns:
        `added`, `replaced` or `kept`.
    """
    if record.provenance not in PROVENANCES:
        raise DatabaseError(
            f"provenance is one of {', '.join(PROVENANCES)}, not {record.provenance!r}; pass one of them"
        )
    measurement_id = _measurement_id(session, record)
    if record.provenance == "measured" and measurement_id is None:
        raise DatabaseError(f"the entry for {record.problem} says measured and names no measurement; record that first")
    if record.updated_at is None:
        record = record.replace(updated_at=now())
    parents = Parents()
    row = entry_values(record, measurement_id, parents)
    parents.insert(session)
    # Whoever inserts the same key beside us is waited for; after that the row is there and held until we commit.
    if _insert_new(session, EntryRow, row):
        return "added"
    same = [getattr(EntryRow, name) == row[name] for name in ENTRY_KEY]
    if merging:
        there = Reader().entry(*session.execute(select_entries().where(*same).with_for_update(of=EntryRow)).one())
        keep = standing(there) <= standing(record)
    else:
        provenance = session.scalars(select(EntryRow.provenance).where(*same).with_for_update()).one()
        keep = PROVENANCES.index(provenance) < record.rank
    if keep:
        return "kept"
    session.execute(update(EntryRow).where(*same).values(row))
    return "replaced"


def standing(record: Entry) -> tuple[int, float, str, float]:
    """Of two entries with one key, from whatever databases and in whatever order, the one with the lesser standing is served.

    The stronger provenance comes first, then the lesser time, measured or modelled; of equal times the contents decide, and
    dates only between equal contents.
    """
    us = record.median_us if record.median_us is not None else record.model_us
    contents = {
        key: value
        for key, value in record.to_json().items()
        if key not in ("measurement_id", "run_id", "updated_at", "measurement", "layer")
    }
    contents["measurement"] = record.measurement.uid if record.measurement else None
    date = record.updated_at.timestamp() if record.updated_at else 0.0
    return record.rank, math.inf if us is None else us, json.dumps(contents, sort_keys=True), -date


def _measurement_id(session: Session, record: Entry) -> int | None:
    """By number where given, else by the uid of the summary: an imported entry knows only that."""
    if record.measurement_id is not None or record.measurement is None:
        return record.measurement_id
    return session.scalars(select(MeasurementRow.id).where(MeasurementRow.uid == record.measurement.uid)).first()


def _row(model: type[Base], source: Any, **other: Any) -> dict[str, Any]:
    """A row whose columns are filled by what is called the same in `source`, but for `other`; its number comes by itself."""
    other.update((name, getattr(source, name)) for name in _columns(model) if name not in other)
    return other


@cache
def _columns(model: type[Base]) -> tuple[str, ...]:
    return tuple(name for name in model.__table__.columns.keys() if name != "id")  # noqa: SIM118


def build_values(record: BuildRecord, parents: Parents) -> dict[str, Any]:
    """The row of a build."""
    return _row(
        BuildRow,
        record,
        toolchain_id=parents.toolchain(record.toolchain),
        schedule_id=parents.schedule(record.schedule),
        problem_class_id=record.problem_class.id,
        problem_class=record.problem_class.to_json(),
        fingerprint=record.fingerprint or None,
        failure_kind=str(record.failure.kind) if record.failure else None,
        failure_message=record.failure.message if record.failure else None,
        created_at=now(),
    )


def measurement_values(record: StoredMeasurement, parents: Parents) -> dict[str, Any]:
    """The row of a measurement."""
    taken = record.measurement
    return _row(
        MeasurementRow,
        taken,
        uid=record.uid,
        run_id=record.run_id,
        kernel=record.kernel,
        source_hash=record.source_hash,
        toolchain_id=parents.toolchain(record.toolchain),
        problem_id=parents.problem(taken.problem),
        schedule_id=parents.schedule(taken.schedule),
        device_id=parents.device(taken.device),
        arch=taken.device.arch,
        fingerprint=parents.artifact(taken.device.arch, taken.fingerprint),
        samples_us=list(taken.samples_us),
        sample_count=len(taken.samples_us),
        accuracy=encode(taken.accuracy),
        conditions=parents.conditions(taken.conditions),
        created_at=record.created_at,
    )


def entry_values(record: Entry, measurement_id: int | None, parents: Parents) -> dict[str, Any]:
    """The row of an entry."""
    return _row(
        EntryRow,
        record,
        problem_id=parents.problem(record.problem),
        schedule_id=parents.schedule(record.schedule),
        fingerprint=parents.artifact(record.arch, record.fingerprint) if record.fingerprint else None,
        measurement_id=measurement_id,
        runner_up_id=parents.schedule(record.runner_up) if record.runner_up is not None else None,
        ties=[{"id": schedule.id, "schedule": schedule.to_json()} for schedule in record.ties],
        rivals=encode(record.rivals),
        toolchain_id=parents.toolchain(record.toolchain) if record.toolchain else None,
    )
