"""Where one problem is worked on: a database of its own on the worker's host, brought home in one piece.

A tune stores what it finds hundreds of times. Sent to one server by a thousand workers, that is what would break first; and a
server that is away for a minute would end every tune. So a worker begins with a copy of what is known of its problem, and sends
home what is new when it is done, or when it is told to stop. What a killed worker left is brought home by the next on its host.
"""

from __future__ import annotations

import shutil
import socket
import sqlite3
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import DatabaseError
from tiledsched.core.problem import Problem
from tiledsched.measure.runner import Device
from tiledsched.store.db import TuningDB
from tiledsched.store.host import lives, own_word
from tiledsched.store.models import BuildRow, DeviceRow, EntryRow, MeasurementRow, ToolchainRow
from tiledsched.store.reading import entry_of, measurement_of, select_entries, select_measurements
from tiledsched.store.records import Entry, StoredMeasurement, Toolchain
from tiledsched.store.writing import put_entry

Content = tuple[object, ...]
"""What an entry says, with its key."""
MOST_ALIKE = 64
"""Newest winners of other problems that go along: they say where to look first."""


class LocalStore:
    """The folder of local databases of one process.

    Args:
        folder: the cache.
        home: URL of the database that they are brought home to; others' lie beside them and are left alone.

    Raises:
        DatabaseError: there is no room.
    """

    def __init__(self, folder: Path, home: str) -> None:
        self._folder = folder / "fleet" / f"{socket.gethostname()}-{stable_id(home)}"
        self._template = self._folder / f"template-{own_word()}"
        self._brought: dict[Path, set[Content]] = {}
        self._tried: set[Path] = set()
        with _here(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.glob("template-*"):
                if not lives(path.name.split("-")[1]):
                    remove(path)
            with TuningDB.open(self._template):  # once: making the schema takes longer than a small tune
                pass

    def database(self, home: TuningDB, problem: Problem, arch: str, name: str) -> Path:
        """A database that knows what `home` does of a problem: the caller's to bring home and to remove.

        Raises:
            DatabaseError: `home` cannot be read, or there is no room here.
        """
        path = self._folder / f"{name}-{own_word()}.db"
        known, entries = what_is_known(home, problem, arch)
        failures = home.failures(arch, problem)
        devices = {failed.device_name: _device(home, failed.device_name) for failed in failures}
        with _here(self._folder):
            shutil.copyfile(self._template, path)
            with TuningDB.open(path) as local:
                local.merge(known, entries)
                for failed in failures:
                    local.record_failure(
                        None,
                        problem.kernel,
                        arch,
                        failed.stage,
                        failed.schedule,
                        failed.failure,
                        problem=problem,
                        fingerprint=failed.fingerprint,
                        device=devices[failed.device_name],
                    )
        self._brought[path] = {_content(entry) for entry in entries}
        return path

    def bring_home(self, path: Path, home: TuningDB, *, held: bool) -> dict[str, int]:
        """Send what is new in one of these databases, see :func:`bring_home`, and remove it."""
        done = bring_home(path, home, held=held, known=self._brought.get(path, set()))
        self._brought.pop(path, None)
        remove(path)
        return done

    def left_behind(self) -> list[Path]:
        """Databases of processes of this host that are gone, each once."""
        found = [
            path
            for path in sorted(self._folder.glob("*.db"))
            if path not in self._tried and not lives(path.stem.rpartition("-")[2])
        ]
        self._tried.update(found)
        return found

    def close(self) -> None:
        """Remove the template. Safe to call twice."""
        remove(self._template)


def what_is_known(home: TuningDB, problem: Problem, arch: str) -> tuple[list[StoredMeasurement], list[Entry]]:
    """The evidence on a problem, what it is served, and the newest winners of other problems of its kernel."""
    evidence = home.measurements(problem, arch, disturbed=True)
    served = home.entries(arch, problem.kernel, problem=problem)
    with home.reading() as session:
        newest = (
            sa.select(EntryRow.id)
            .where(EntryRow.kernel == problem.kernel, EntryRow.arch == arch, EntryRow.provenance == "measured")
            .order_by(EntryRow.id.desc())
            .limit(MOST_ALIKE)
        )
        numbers = list(session.scalars(newest))
        alike = [entry_of(*row) for row in session.execute(select_entries().where(EntryRow.id.in_(numbers)))]
        uids = {entry.measurement.uid for entry in [*served, *alike] if entry.measurement} - {
            each.uid for each in evidence
        }
        behind = select_measurements().where(MeasurementRow.uid.in_(sorted(uids)))
        evidence += [measurement_of(*row) for row in session.execute(behind)]
    entries = {entry.key: entry for entry in [*served, *alike]}
    return evidence, list(entries.values())


def bring_home(path: Path, home: TuningDB, *, held: bool, known: Collection[Content] = ()) -> dict[str, int]:
    """Send what a local database found to the one it was copied from; doing it twice changes nothing.

    Args:
        path: of the local database.
        home: where to.
        held: whether the lease is held: then what was found replaces what is served, as it would in a single command. Else it is
            evidence, and what is served changes only if that is stronger.
        known: what was copied there from `home`.
    """
    with _here(path.parent), TuningDB.open(path) as local:
        measurements, entries = local.measurements(disturbed=True), local.entries()
        artifacts, failures = list(local.artifacts().values()), local.failures()
        builds = [
            record
            for toolchain, kernel, source, arch in _build_keys(local)
            for record in local.find_builds(kernel, source, toolchain, arch).values()
        ]
        devices = {failed.device_name: _device(local, failed.device_name) for failed in failures}
    new = [entry.replace(measurement_id=None, run_id=None) for entry in entries if _content(entry) not in known]
    done = home.merge(measurements, [] if held else new, artifacts)
    if held and new:

        def put(session: Session) -> None:
            for entry in sorted(new, key=lambda each: each.key):
                put_entry(session, entry, merging=False)

        home.write(put, *{entry.kernel for entry in new})
    home.record_builds(builds)
    there = {
        (each.problem, each.schedule, each.fingerprint, each.device_name, each.failure)
        for problem in {each.problem for each in failures}
        for each in home.failures(problem=problem)
    }
    fresh = [
        each
        for each in failures
        if (each.problem, each.schedule, each.fingerprint, each.device_name, each.failure) not in there
    ]
    for each in fresh:
        home.record_failure(
            None,
            each.kernel,
            each.arch,
            each.stage,
            each.schedule,
            each.failure,
            problem=each.problem,
            fingerprint=each.fingerprint,
            device=devices[each.device_name],
        )
    return {"measurements": done.measurements_added, "builds": len(builds), "failures": len(fresh)}


@contextmanager
def _here(folder: Path) -> Iterator[None]:
    """What fails in the block fails at once: unlike a database that is away, a full disk of this host is not waited for."""
    try:
        yield
    except OSError as error:
        raise DatabaseError(
            f"cannot use {folder}: {error.strerror or error}; free some space there, or name another folder "
            "with TILEDSCHED_CACHE"
        ) from error
    except DatabaseError as error:
        raise DatabaseError(str(error)) from None


def _content(entry: Entry) -> Content:
    uid = entry.measurement.uid if entry.measurement else None
    return entry.key, entry.schedule, entry.provenance, uid, entry.source_hash, entry.fingerprint


def _build_keys(local: TuningDB) -> list[tuple[Toolchain, str, str, str]]:
    asked = (
        sa.select(ToolchainRow, BuildRow.kernel, BuildRow.source_hash, BuildRow.arch)
        .join(BuildRow, BuildRow.toolchain_id == ToolchainRow.id)
        .distinct()
    )
    with local.reading() as session:
        return [(row.toolchain, kernel, source, arch) for row, kernel, source, arch in session.execute(asked)]


def _device(db: TuningDB, name: str) -> Device | None:
    if not name:
        return None
    with db.reading() as session:
        return session.scalars(sa.select(DeviceRow.device).where(DeviceRow.name == name).limit(1)).first()


def remove(path: Path) -> None:
    """Remove an SQLite database and the files that SQLite keeps next to it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with suppress(OSError):
            Path(f"{path}{suffix}").unlink(missing_ok=True)


def whole(path: Path) -> bool:
    """Whether a database that a killed process left can be read."""
    try:
        connection = sqlite3.connect(path)
        with suppress(sqlite3.Error):
            return connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
        connection.close()
    except sqlite3.Error:
        pass
    return False
