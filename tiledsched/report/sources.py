"""What a report reads: a database, and below it the tables, landscapes and builds that ship for the kernel and arch; and what
`explain` serves for its problems, found by the same lookup.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tiledsched.core import data_files
from tiledsched.core.config import Settings, log
from tiledsched.core.device import ResourceFacts
from tiledsched.core.errors import ConfigError, DatabaseError, NoValidScheduleError, SpaceError, or_none
from tiledsched.core.groups import grouped, largest, nested
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_table
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.build_files import BuildFile, read_builds
from tiledsched.store.evidence import LANDSCAPE
from tiledsched.store.exchange import read_table
from tiledsched.store.manifest import listed_files, manifest_path
from tiledsched.store.reading import Choose, PlainRow
from tiledsched.store.records import ArtifactRecord, BuildRecord, Entry, StoredMeasurement

if TYPE_CHECKING:
    from tiledsched.store.db import TuningDB

T = TypeVar("T")
MOST_PROBLEMS, MOST_MEASUREMENTS = 300, 30_000
"""Problems beside those that ship that a report is on, at most, and their measurements, unless it is told which problems."""


class WithShipped:
    """A database together with the tables and landscapes that ship for one kernel and arch, with the database's reading
    methods.

    Args:
        db: one's own; its failures and runs are the only ones there are.
        kernel: what is reported.
        arch: e.g. sm_90.
        entries: what is served, of every layer.
        only: the problems that are reported; None for all.
    """

    def __init__(
        self,
        db: TuningDB,
        kernel: KernelClass,
        arch: str,
        entries: Iterable[Entry],
        only: Collection[Problem] | None = None,
    ) -> None:
        self._db, self._kernel, self._arch, self._only = db, kernel, arch, only
        mine = (entry for entry in entries if (entry.kernel, entry.arch) == (kernel.name, arch))
        self._entries = [entry for entry in mine if self._is_reported(entry.problem)]
        folder = data_files.tuning_db()
        recorded = sorted((folder / "landscapes" / kernel.name).rglob("*.json.xz"))
        archs = _archs_of_landscapes()
        tables = [
            *(folder / "tables" / kernel.name).glob(f"{arch}.json"),
            *(path for path in recorded if archs.get(path, arch) == arch),
        ]
        known: dict[tuple[Problem, str, str, str], dict[str, StoredMeasurement]] = defaultdict(dict)
        self._artifacts: dict[tuple[str, str], ArtifactRecord] = {}
        for table in _read_each(read_table, tables):
            found = nested(
                (_conditions_of(stored), stored.uid, stored)
                for stored in table.measurements
                if stored.measurement.device.arch == arch and self._is_reported(stored.measurement.problem)
            )
            for conditions, members in found.items():
                # Times of two runs, often on two GPUs of one name, differ by several percent, and a landscape's leaders were
                # timed in turn: what an earlier file has of its problems under its compiler is left out.
                known[conditions] = members if len(members) >= LANDSCAPE else known[conditions] | members
            self._artifacts |= {(each.arch, each.fingerprint): each for each in table.artifacts if each.arch == arch}
        self._shipped = {uid: stored for members in known.values() for uid, stored in members.items()}
        self._measured = Counter(stored.measurement.problem for stored in self._shipped.values())
        self._measured += Counter(
            {each: n for each, n in db.measured_problems(arch, kernel).items() if self._is_reported(each)}
        )
        ship = {stored.measurement.problem for stored in self._shipped.values()}
        ship |= {entry.problem for entry in self._entries if entry.layer == "shipped"}
        own = {*self._measured, *(entry.problem for entry in self._entries)} - ship
        chosen = own if only is not None else _newest_of(own, self._entries, self._measured)
        self.left_out = len(own) - len(chosen)
        """The number of problems that are known and not reported."""
        if self.left_out:
            self._only = ship | chosen
            self._entries = [entry for entry in self._entries if entry.problem in self._only]
            self._shipped = {uid: one for uid, one in self._shipped.items() if one.measurement.problem in self._only}
            self._measured = Counter({each: n for each, n in self._measured.items() if each in self._only})

    def _is_reported(self, problem: Problem) -> bool:
        return self._only is None or problem in self._only

    def entries(self, **wanted: Any) -> list[Entry]:
        """What is served on the arch for the kernel, from every layer."""
        return list(self._entries)

    def measured_problems(self, arch: str, kernel: KernelClass) -> dict[Problem, int]:
        """The problems that were measured, with at least as many measurements as there are of each."""
        return self._measured

    def measurements_by_problem(
        self, arch: str, kernel: KernelClass, choose: Choose | None = None, *, above: int = 0
    ) -> Iterator[tuple[Problem, list[StoredMeasurement]]]:
        """Each problem that was measured, with the measurements of the database, without samples, and those that ship, newest
        first, each once. All are read of a problem of which some ship; of others `choose` tells which.
        """
        shipped = grouped((stored.measurement.problem, stored) for stored in self._shipped.values())

        def choose_own(problem: Problem, rows: Iterable[PlainRow]) -> Collection[int] | None:
            return choose(problem, rows) if choose and problem not in shipped else None

        for problem, own in self._db.measurements_by_problem(arch, kernel, choose_own, above=above, only=self._only):
            every = {stored.uid: stored for stored in (*shipped.pop(problem, ()), *own)}
            yield problem, _newest_first(every.values())
        for problem, found in shipped.items():
            yield problem, _newest_first(found)

    def artifacts(self, arch: str | None = None) -> dict[tuple[str, str], ArtifactRecord]:
        """What is known of machine code, by arch and fingerprint."""
        return self._artifacts | self._db.artifacts(arch)

    @cached_property
    def _build_files(self) -> list[BuildFile]:
        folder = data_files.tuning_db() / "model" / self._kernel.name
        return [*_read_each(read_builds, sorted(folder.glob("programs_*.json.xz")))]

    def shipped_builds(self, problem: Problem) -> list[BuildRecord]:
        """The builds that ship and can serve a problem on the arch; see `BuildFile.builds_for`."""
        found = (build for file in self._build_files for build in file.builds_for(problem, self._arch))
        return [replace(each, schedule=self._of_today(each.schedule)) for each in found]

    def shipped_times(self, problem: Problem) -> dict[Schedule, tuple[ResourceFacts | None, float]]:
        """The model's estimates that ship for a problem: resources and microseconds, by schedule."""
        known = (item for file in self._build_files for item in file.times_for(problem, self._arch).items())
        return {self._of_today(schedule): each for schedule, each in known}

    def find_builds(self, *of: Any) -> dict[tuple[str, str], BuildRecord]:
        """The builds of the database; see :meth:`TuningDB.find_builds`."""
        found = self._db.find_builds(*of)
        return {key: replace(each, schedule=self._of_today(each.schedule)) for key, each in found.items()}

    def _of_today(self, schedule: Schedule) -> Schedule:
        """A schedule that was written before the search space had all of its knobs, with those."""
        return self._space.complete(schedule) if self._space else schedule

    @cached_property
    def _space(self) -> SearchSpace | None:
        return or_none(space_for, self._arch, self._kernel)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._db, name)


def _newest_of(problems: Iterable[Problem], entries: Iterable[Entry], measured: Mapping[Problem, int]) -> set[Problem]:
    """The problems that a report is on where it cannot be on all: those that were tuned last."""
    tuned = largest((entry.problem, entry.updated_at.timestamp()) for entry in entries if entry.updated_at is not None)
    newest = sorted(problems, key=lambda each: (-tuned.get(each, 0.0), each))[:MOST_PROBLEMS]
    so_far = itertools.accumulate(measured[each] for each in newest)
    return {
        each
        for place, (each, count) in enumerate(zip(newest, so_far, strict=True))
        if not place or count <= MOST_MEASUREMENTS
    }


def _read_each(read: Callable[[Path], T], paths: Iterable[Path]) -> Iterator[T]:
    """What each file holds; one that cannot be read is named in the log and left out."""
    for path in paths:
        try:
            yield read(path)
        except DatabaseError as error:
            log.warning("%s; it is left out", error)


def _newest_first(found: Iterable[StoredMeasurement]) -> list[StoredMeasurement]:
    return sorted(found, key=lambda stored: (stored.created_at, stored.uid), reverse=True)


def _archs_of_landscapes() -> dict[Path, str]:
    """The arch of each landscape that ships, as far as the manifest tells."""
    try:
        listed = listed_files(manifest_path())
    except DatabaseError:
        return {}  # of which every file complains
    return {data_files.tuning_db() / name: each["arch"] for name, each in listed.items() if "arch" in each}


def _conditions_of(stored: StoredMeasurement) -> tuple[Problem, str, str, str]:
    """What times must agree in to be of one landscape: problem, GPU, regime and compiler."""
    own = stored.measurement
    return own.problem, own.device.name, own.regime, stored.toolchain.tileiras


class Serving:
    """The lookup of one kernel on one arch.

    Args:
        arch: e.g. sm_90.
        table_of: gives the lookup table for an accuracy class, fp32 or fp16.
    """

    def __init__(self, arch: str, table_of: Callable[[str], LookupTable]) -> None:
        self.arch = arch
        self._table = functools.cache(table_of)

    @classmethod
    def by_settings(cls, settings: Settings, kernel: KernelClass, arch: str) -> Serving:
        """The lookup that commands use: over the entries of every layer, with what settings request. Rivals are left out of it,
        because they decide which function is called, and not which schedule is served.
        """
        of_mode = functools.partial(replace, settings, rivals="off")
        return cls(arch, lambda mode: load_table(of_mode(accum_mode=mode), kernel=kernel, archs={arch}))

    def served(self, problem: Problem, device_name: str, accum_mode: str, *, tuned: bool = True) -> Served | None:
        """What `explain` serves on a device; an empty name stands for any of the arch. Without `tuned`, what it would serve if
        neither the problem nor another one that is the same work had ever been tuned. None where the lookup says what is wrong
        with the settings, or the arch has no search space.
        """
        table = self._table(accum_mode)
        try:
            left = table if tuned else table.without(problem, self.arch)
            return left.resolve(problem, self.arch, device_name)
        except (ConfigError, SpaceError, NoValidScheduleError):
            return None
