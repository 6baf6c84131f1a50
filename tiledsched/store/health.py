"""Is the database sound? Reads everything once; changes nothing."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy import select
from sqlalchemy.orm import Session

from tiledsched.problem import stable_id
from tiledsched.store.models import ArtifactRow, DeviceRow, EntryRow, MeasurementRow, ProblemRow, ScheduleRow
from tiledsched.store.records import PROVENANCES


def problems_found(session: Session) -> list[str]:
    """One line for each thing that is wrong; empty when all is well."""
    try:
        return [*_file(session), *_contents(session), *_entries(session)]
    except sa.exc.DatabaseError as error:
        return [f"cannot be read to its end: {error.orig}; restore a copy"]


def _file(session: Session) -> list[str]:
    if session.get_bind().dialect.name != "sqlite":
        return []  # PostgreSQL looks after its own files and enforces references
    found = [str(line) for line in session.scalars(sa.text("PRAGMA integrity_check")) if line != "ok"]
    for table, row, parent, _ in session.execute(sa.text("PRAGMA foreign_key_check")):
        found.append(f"{table} row {row} points at a row of {parent} that is not there")
    return found


def _contents(session: Session) -> list[str]:
    """Ids are hashes of contents: whatever was changed behind the program's back shows."""
    found = []
    for schedule in session.scalars(select(ScheduleRow)):
        if stable_id(schedule.knobs) != schedule.id:
            found.append(f"schedule {schedule.id} does not hold the knobs its id stands for")
    for problem in session.scalars(select(ProblemRow)):
        if stable_id({"kernel": problem.kernel, **problem.dims}) != problem.id:
            found.append(f"problem {problem.id} does not hold the values its id stands for")
    for device in session.scalars(select(DeviceRow)):
        if stable_id(device.device) != device.id:
            found.append(f"device {device.id} ({device.name}) does not hold the facts its id stands for")
    return found


def _entries(session: Session) -> list[str]:
    wanted = (
        select(EntryRow, ProblemRow.id, ScheduleRow.id, MeasurementRow, ArtifactRow.fingerprint)
        .outerjoin(ProblemRow, ProblemRow.id == EntryRow.problem_id)
        .outerjoin(ScheduleRow, ScheduleRow.id == EntryRow.schedule_id)
        .outerjoin(MeasurementRow, MeasurementRow.id == EntryRow.measurement_id)
        .outerjoin(ArtifactRow, (ArtifactRow.arch == EntryRow.arch) & (ArtifactRow.fingerprint == EntryRow.fingerprint))
    )
    found = []
    for entry, problem, schedule, measurement, artifact in session.execute(wanted):
        for wrong in _entry(entry, problem, schedule, measurement, artifact):
            found.append(f"entry {entry.id} ({entry.kernel}, {entry.arch}, problem {entry.problem_id}): {wrong}")
    return found


def _entry(
    entry: EntryRow, problem: Any, schedule: Any, measurement: MeasurementRow | None, artifact: Any
) -> list[str]:
    wrong = []
    if problem is None:
        wrong.append("its problem is missing")
    if schedule is None:
        wrong.append("its schedule is missing")
    if entry.fingerprint is not None and artifact is None:
        wrong.append(f"its artifact {entry.fingerprint} is missing")
    if entry.provenance not in PROVENANCES:
        wrong.append(f"unknown provenance {entry.provenance!r}")
    if entry.measurement_id is not None and measurement is None:
        wrong.append(f"its measurement {entry.measurement_id} is missing")
    elif entry.provenance == "measured" and measurement is None:
        wrong.append("measured, but without a measurement")
    elif entry.provenance == "measured" and measurement is not None:
        for name in ("arch", "problem_id", "fingerprint"):
            if getattr(measurement, name) != getattr(entry, name):
                wrong.append(f"its measurement {measurement.id} is of another {name.removesuffix('_id')}")
    return wrong
