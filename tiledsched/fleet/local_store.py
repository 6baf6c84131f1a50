"""Where one problem is worked on: a database of its own on the worker's host, brought home in one piece.

A tune stores what it finds hundreds of times. Sent to one server by a thousand workers, that is what would break first; and a
server that is away for a minute would end every tune. So a worker begins with a copy of what is known of its problem, and sends
home what is new when it is done, or when it is told to stop. What a killed worker left is brought home by the next on its host.
"""

from __future__ import annotations

import re
import shutil
import socket
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tiledsched.core import canonical, errors, files
from tiledsched.core.problem import Problem
from tiledsched.store import host, writing
from tiledsched.store.db import TuningDB
from tiledsched.store.models import EntryRow, MeasurementRow, of_name
from tiledsched.store.reading import select_measurements
from tiledsched.store.records import BuildRecord, Entry, FailureRecord, StoredMeasurement

Content = tuple[object, ...]
"""What an entry says, with its key."""
MOST_ALIKE = 64
"""Newest winners of other problems that go along: they say where to look first."""


_NAMED = re.compile(r".+-(\d+(?:\.\d*)?)\.db")
"""Names of these databases, with the word for the process that made one."""


class LocalStore:
    """The folder of local databases of one process.

    Args:
        folder: the cache.
        home: URL of the database that they are brought home to; others' lie beside them and are left alone.

    Raises:
        DatabaseError: there is no room.
    """

    def __init__(self, folder: Path, home: str) -> None:
        self._folder = folder / "fleet" / f"{socket.gethostname()}-{canonical.stable_id(home)}"
        self._own = files.OwnFolder()
        self._template = Path(self._own.path) / "template.db"
        self._brought: dict[Path, set[Content]] = {}
        self._tried: set[Path] = set()
        with _here(self._folder):
            files.make_private(self._folder)
            with TuningDB.open(self._template):  # once: making the schema takes longer than a small tune
                pass

    def database(self, home: TuningDB, problem: Problem, arch: str, name: str) -> Path:
        """A database that knows what `home` does of a problem: the caller's to bring home and to remove.

        Raises:
            DatabaseError: `home` cannot be read, or there is no room here.
        """
        path = self._folder / f"{name}-{host.own_word()}.db"
        known, entries = what_is_known(home, problem, arch)
        failures = home.failures(arch, problem)
        with _here(self._folder):
            shutil.copyfile(self._template, path)
            with TuningDB.open(path) as local:
                local.merge(known, entries)
                record_failures(local, failures)
        self._brought[path] = {_content(entry) for entry in entries}
        return path

    def bring_home(self, path: Path, home: TuningDB, *, replaces: bool) -> dict[str, int]:
        """Send what is new in one of these databases, see :func:`bring_home`, and remove it."""
        done = bring_home(path, home, replaces=replaces, known=self._brought.get(path, set()))
        self._brought.pop(path, None)
        remove(path)
        return done

    def left_behind(self) -> list[Path]:
        """Databases of processes of this host that are gone, each once."""
        found = [
            path
            for path in sorted(self._folder.glob("*.db"))
            if path not in self._tried and (named := _NAMED.fullmatch(path.name)) and not host.lives(named[1])
        ]
        self._tried.update(found)
        return found

    def close(self) -> None:
        """Remove the template. Safe to call twice."""
        self._own.close()


def what_is_known(home: TuningDB, problem: Problem, arch: str) -> tuple[list[StoredMeasurement], list[Entry]]:
    """The evidence on a problem, what it is served, and the newest winners of other problems of its kernel."""
    with home.rows() as (session, rows):
        newest = (
            sa.select(EntryRow.id)
            .where(of_name(problem.kernel), EntryRow.arch == arch, EntryRow.provenance == "measured")
            .order_by(EntryRow.id.desc())
            .limit(MOST_ALIKE)
        )
        alike = ", ".join(str(number) for number in session.scalars(newest) if isinstance(number, int))
        words = {"problem": problem.id, "arch": arch}
        entries = rows.entries(
            words, f"WHERE r.id IN ({alike or 'NULL'}) OR r.problem_id = :problem AND r.arch = :arch"
        )
        behind = MeasurementRow.uid.in_(sorted({entry.measurement.uid for entry in entries if entry.measurement}))
        of_problem = sa.and_(MeasurementRow.problem_id == problem.id, MeasurementRow.arch == arch)
        found = session.execute(select_measurements().where(sa.or_(of_problem, behind)))
        return list(rows.measurements(found)), entries


def bring_home(path: Path, home: TuningDB, *, replaces: bool, known: Collection[Content] = ()) -> dict[str, int]:
    """Send what a local database found to the one it was copied from; doing it twice changes nothing.

    Args:
        path: of the local database.
        home: where to.
        replaces: whether the lease is still its worker's: then what was found replaces what is served, as it would in a single
            command. Else it is evidence, and what is served changes only if that is stronger.
        known: what was copied there from `home`.
    """
    with _here(path.parent), TuningDB.open(path) as local:
        measurements, entries = local.measurements(disturbed=True), local.entries()
        artifacts, builds, failures = list(local.artifacts().values()), builds_of(local), local.failures()
    new = [entry.replace(measurement_id=None, run_id=None) for entry in entries if _content(entry) not in known]
    done = home.merge(measurements, [] if replaces else new, artifacts)
    if replaces and new:

        def put(session: Session) -> None:
            for entry in sorted(new, key=lambda each: each.key):
                writing.put_entry(session, entry, merging=False)

        home.write(put, *{entry.kernel for entry in new})
    home.record_builds(builds)
    there = {
        _what_failed(each) for problem in {each.problem for each in failures} for each in home.failures(problem=problem)
    }
    fresh = [each for each in failures if _what_failed(each) not in there]
    record_failures(home, fresh)
    return {"measurements": done.measurements_added, "builds": len(builds), "failures": len(fresh)}


@contextmanager
def _here(folder: Path) -> Iterator[None]:
    """What fails in the block fails at once: unlike a database that is away, a full disk of this host is not waited for."""
    try:
        yield
    except OSError as error:
        raise errors.DatabaseError(
            f"cannot use {folder}: {error.strerror or error}; free some space there, or name another folder "
            "with TILEDSCHED_CACHE"
        ) from error
    except errors.DatabaseError as error:
        raise errors.DatabaseError(str(error)) from None


def _content(entry: Entry) -> Content:
    uid = entry.measurement.uid if entry.measurement else None
    return entry.key, entry.schedule, entry.provenance, uid, entry.source_hash, entry.fingerprint


def builds_of(db: TuningDB) -> list[BuildRecord]:
    """Every build."""
    with db.rows() as (_, rows):
        return list(rows.builds({}, ""))


def record_failures(db: TuningDB, failures: Sequence[FailureRecord]) -> None:
    """Store candidates that gave no usable measurement elsewhere."""
    for failed in failures:
        db.record_failure(
            None,
            failed.kernel,
            failed.arch,
            failed.stage,
            failed.schedule,
            failed.failure,
            problem=failed.problem,
            fingerprint=failed.fingerprint,
            device=failed.device,
        )


def _what_failed(each: FailureRecord) -> tuple[object, ...]:
    return each.problem, each.schedule, each.fingerprint, each.device_name, each.failure


def remove(path: Path) -> None:
    """Remove an SQLite database and the files that SQLite keeps next to it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with suppress(OSError):
            Path(f"{path}{suffix}").unlink(missing_ok=True)


def whole(path: Path) -> bool:
    """Whether a database that a killed process left can be read."""
    try:
        with closing(sqlite3.connect(path)) as connection:
            return bool(connection.execute("PRAGMA quick_check").fetchone() == ("ok",))
    except sqlite3.Error:
        return False
