"""Records to rows: the rows made of records, and the statements that write them.

Rows that others refer to are inserted first, and only where they are missing: their ids are hashes of their contents.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import import_module
from typing import Any

from sqlalchemy import literal_column, select, update
from sqlalchemy.orm import Session

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import DatabaseError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import of_one_kernel, place_part, source_part
from tiledsched.measure.clocks import describe_throttling
from tiledsched.measure.runner import Device
from tiledsched.store.codec import encode
from tiledsched.store.evidence import standing
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
from tiledsched.store.reading import rows_of, select_measurements
from tiledsched.store.records import PROVENANCES, ArtifactRecord, BuildRecord, Entry, StoredMeasurement, Toolchain
from tiledsched.store.rows import NAMESAKE, where

BUILD_KEY = ("kernel", "source_hash", "toolchain_id", "arch", "schedule_id", "problem_class_id")
ENTRY_KEY = ("kernel", "arch", "problem_id", "device_name", "regime", "accum_mode", "compiler")
AT_ONCE = 2_000
"""Records that are written at once."""


def now() -> datetime:
    """The current time, UTC."""
    return datetime.now(timezone.utc)


def insert_missing(session: Session, model: type[Base], rows: list[dict[str, Any]]) -> None:
    """Insert the `rows` whose key no row has yet."""
    if rows:
        session.execute(_insert_missing(_dialect(session), model).inline(), rows)


def upsert(session: Session, model: type[Base], rows: list[dict[str, Any]], key: tuple[str, ...]) -> None:
    """Insert `rows`. Each replaces the row with the same `key`."""
    if rows:
        session.execute(_upsert(_dialect(session), model, tuple(rows[0]), key), rows)


def insert_row(session: Session, model: type[Base], row: dict[str, Any]) -> Any:
    """Insert a row, and return its number; None where another row has its key."""
    statement = _insert_missing(_dialect(session), model)
    if _dialect(session) == "postgresql":  # where the count of rows is not known if a key is made
        return session.scalar(statement.returning(literal_column("id")), row)
    result: Any = session.execute(statement.inline(), row)  # SQLite knows RETURNING since 3.35, and RHEL 9 has 3.34
    return result.lastrowid if result.rowcount == 1 else None


def _dialect(session: Session) -> str:
    return session.get_bind().dialect.name


# SQLAlchemy takes about 2 ms to make such a statement, so each is made once.
@cache
def _insert_missing(dialect: str, model: type[Base]) -> Any:
    return _insert(dialect, model).on_conflict_do_nothing()


@cache
def _upsert(dialect: str, model: type[Base], names: tuple[str, ...], key: tuple[str, ...]) -> Any:
    statement = _insert(dialect, model)
    changed = {name: statement.excluded[name] for name in names if name not in key}
    return statement.on_conflict_do_update(index_elements=key, set_=changed).inline()


def _insert(dialect: str, model: type[Base]) -> Any:
    """An insert statement of the dialect: SQLite and PostgreSQL have ON CONFLICT, SQLAlchemy's own statement has not."""
    return import_module(f"sqlalchemy.dialects.{dialect}").insert(model.__table__)


class Parents:
    """Rows that other rows refer to. They are collected, so that each is made once and inserted before the others."""

    def __init__(self) -> None:
        self._rows: dict[type[Base], dict[Any, dict[str, Any]]] = defaultdict(dict)
        self._ids: dict[Any, str] = {}
        self._artifacts: set[tuple[str, str]] = set()

    def add(self, value: Problem | Schedule | Toolchain | Device) -> str:
        """Add the row of a value, and return its id."""
        if value not in self._ids:
            model, row = _row_of(value)
            self._ids[value] = row["id"]
            self._rows[model][row["id"]] = row
        return self._ids[value]

    def artifact(self, arch: str, fingerprint: str) -> str:
        """Add an artifact without facts, unless it is known, and return its fingerprint."""
        if (arch, fingerprint) not in self._artifacts:
            self._artifacts.add((arch, fingerprint))
            row = {"arch": arch, "fingerprint": fingerprint, "facts": None, "cubin_bytes": 0}
            self._rows[ArtifactRow][arch, fingerprint] = row
        return fingerprint

    def insert(self, session: Session) -> None:
        """Insert the rows that are missing, of those that were added since the last time."""
        for model in sorted(self._rows, key=lambda each: each.__table__.name):
            # Every writer inserts in this order, so that no two wait for each other.
            insert_missing(session, model, [row for _, row in sorted(self._rows[model].items())])
        self._rows.clear()


def _row_of(value: Problem | Schedule | Toolchain | Device) -> tuple[type[Base], dict[str, Any]]:
    """The table and the row of a value, whose id is a hash of its contents."""
    if isinstance(value, Problem):
        dims = {name: each for name, each in value.to_json().items() if name != "kernel"}
        return ProblemRow, {"id": value.id, "kernel": value.kernel, "dims": dims}
    if isinstance(value, Schedule):
        return ScheduleRow, {"id": value.id, "knobs": value}
    if isinstance(value, Toolchain):
        return ToolchainRow, {"id": value.id, **encode(value)}
    identity = stable_id(encode(value))  # of which the driver is a part
    return DeviceRow, {"id": identity, "name": value.name, "arch": value.arch, "device": value}


def put_artifacts(session: Session, records: Iterable[ArtifactRecord]) -> None:
    """Store the facts of artifacts, also of those of which only the fingerprint is stored."""
    rows = {
        (record.arch, record.fingerprint): {
            "arch": record.arch,
            "fingerprint": record.fingerprint,
            "facts": record.facts,
            "cubin_bytes": record.cubin_bytes,
        }
        for record in records
        if record.facts is not None
    }
    upsert(session, ArtifactRow, [row for _, row in sorted(rows.items())], ("arch", "fingerprint"))


def put_builds(session: Session, records: Sequence[BuildRecord]) -> None:
    """Store builds. Each replaces an earlier one with the same key."""
    parents = Parents()
    rows = [
        _row(
            BuildRow,
            record,
            toolchain_id=parents.add(record.toolchain),
            schedule_id=parents.add(record.schedule),
            problem_class_id=record.problem_class.id,
            fingerprint=record.fingerprint or None,
            failure_kind=str(record.failure.kind) if record.failure else None,
            failure_message=record.failure.message if record.failure else None,
            created_at=now(),
        )
        for record in records
    ]
    parents.insert(session)
    put_artifacts(session, (record.artifact for record in records if record.failure is None))
    upsert(session, BuildRow, rows, BUILD_KEY)


def put_measurements(session: Session, records: Iterable[StoredMeasurement]) -> tuple[int, int]:
    """Store the measurements whose uid is not stored, some at a time; returns the numbers of those and of the others."""
    parents, added, kept = Parents(), 0, 0
    records = iter(records)
    while taken_now := list(itertools.islice(records, AT_ONCE)):
        some = {record.uid: record for record in taken_now}
        known = set(session.scalars(select(MeasurementRow.uid).where(MeasurementRow.uid.in_(some))))
        # Every writer inserts in this order, so that no two wait for each other.
        new = [some[uid] for uid in sorted(some.keys() - known)]
        rows = [
            _row(
                MeasurementRow,
                taken,
                uid=record.uid,
                run_id=record.run_id,
                kernel=record.kernel,
                source_hash=record.source_hash,
                toolchain_id=parents.add(record.toolchain),
                problem_id=parents.add(taken.problem),
                schedule_id=parents.add(taken.schedule),
                device_id=parents.add(taken.device),
                arch=taken.device.arch,
                fingerprint=parents.artifact(taken.device.arch, taken.fingerprint),
                sample_count=len(taken.samples_us),
                created_at=record.created_at,
            )
            for record, taken in ((each, each.measurement) for each in new)
        ]
        parents.insert(session)
        insert_missing(session, MeasurementRow, rows)
        added += len(rows)
        kept += len(taken_now) - len(rows)
    return added, kept


def put_entry(session: Session, record: Entry, *, merging: bool, parents: Parents | None = None) -> str:
    """Store an entry, unless the stored one with its key is stronger, or, with `merging`, has evidence as good. An entry that was
    measured while the GPU's clock was held down never replaces one that was not.

    Args:
        session: a session in a write transaction.
        record: the entry.
        merging: whether it is of another database or a file.
        parents: knows the rows that entries of the same transaction refer to.

    Returns:
        `added`, `replaced` or `kept`.
    """
    if record.provenance not in PROVENANCES:
        raise DatabaseError(
            f"provenance is one of {', '.join(PROVENANCES)}, not {record.provenance!r}; pass one of them"
        )
    measurement_id = record.measurement_id
    if (
        measurement_id is None and record.measurement is not None
    ):  # an imported entry names its measurement by the uid only
        named = select(MeasurementRow.id).where(MeasurementRow.uid == record.measurement.uid)
        measurement_id = session.scalars(named).first()
    if record.provenance == "measured" and measurement_id is None:
        raise DatabaseError(f"the entry for {record.problem} says measured and names no measurement; record that first")
    if record.updated_at is None:
        record = record.replace(updated_at=now())
    parents = parents or Parents()
    row = _row(
        EntryRow,
        record,
        problem_id=parents.add(record.problem),
        schedule_id=parents.add(record.schedule),
        fingerprint=parents.artifact(record.arch, record.fingerprint) if record.fingerprint else None,
        measurement_id=measurement_id,
        runner_up_id=parents.add(record.runner_up) if record.runner_up is not None else None,
        ties=[{"id": schedule.id, "schedule": schedule.to_json()} for schedule in record.ties],
        toolchain_id=parents.add(record.toolchain) if record.toolchain else None,
    )
    parents.insert(session)
    # A writer that inserts the same key at this moment is waited for. After that the row is there, and locked until the commit.
    keyed = _keyed(session, row)
    if keyed is None:
        return "added"
    row = keyed
    same = [getattr(EntryRow, name) == row[name] for name in ENTRY_KEY]
    if merging:
        words = {name: row[name] for name in ENTRY_KEY}
        there = rows_of(session, "").entries(words, where(words))  # which `_keyed` locked; none where it is damaged
        keep = bool(there) and standing(there[0]) <= standing(record)
    else:
        columns = (EntryRow.provenance, EntryRow.source_hash, EntryRow.measurement_id)
        found = session.execute(select(*columns).where(*same).with_for_update()).one()
        keep = found.provenance in PROVENANCES[: record.rank] and of_one_kernel(found.source_hash, record.source_hash)
        if found.provenance == record.provenance and source_part(found.source_hash) == source_part(record.source_hash):
            keep = _slower_clock(session, measurement_id, found.measurement_id)
    if keep:
        return "kept"
    session.execute(update(EntryRow).where(*same).values(row))
    return "replaced"


def _keyed(session: Session, row: dict[str, Any]) -> dict[str, Any] | None:
    """The row of an entry with the key under which evidence of its kernel lies; None where there was none, and it is inserted.

    The key has the kernel's name. Where that holds evidence of another kernel, one in a file of the same name, the place of
    the kernel's own file stands behind the name, so that neither takes the place of the other.
    """
    place = place_part(row["source_hash"])
    own = {**row, "kernel": f"{row['kernel']}{NAMESAKE}{place}"}

    def source_of(each: dict[str, Any]) -> str | None:
        same = [getattr(EntryRow, name) == each[name] for name in ENTRY_KEY]
        return session.scalars(select(EntryRow.source_hash).where(*same).with_for_update()).first()

    if place and source_of(own) is not None:
        return own
    if insert_row(session, EntryRow, row) is not None:
        return None
    if of_one_kernel(source_of(row) or "", row["source_hash"]):
        return row
    return None if insert_row(session, EntryRow, own) is not None else own


def _slower_clock(session: Session, new: int | None, old: int | None) -> bool:
    """Whether the clock was held down during the measurement of number `new`, and not during that of number `old`."""
    if new is None or old is None:
        return False
    found = session.execute(select_measurements().where(MeasurementRow.id.in_((new, old))))
    by_id = {stored.id: stored.measurement for stored in rows_of(session, "").measurements(found)}
    if by_id.keys() != {new, old}:  # one is damaged
        return False
    taken = [by_id[new], by_id[old]]
    seen_mhz = max(each.conditions.sm_clock_mhz for each in taken)
    slow, before = (bool(describe_throttling(each.conditions, each.device, each.regime, seen_mhz)) for each in taken)
    return slow and not before


def _row(model: type[Base], source: Any, **other: Any) -> dict[str, Any]:
    """A row whose columns have the values of the attributes of `source` with the same names, or those given in `other`."""
    other.update((name, getattr(source, name)) for name in _columns(model) if name not in other)
    return other


@cache
def _columns(model: type[Base]) -> tuple[str, ...]:
    return tuple(name for name in model.__table__.columns.keys() if name != "id")  # noqa: SIM118
