"""What calls read of a database that holds more entries of a kernel than a call can wait for: those near a problem."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tiledsched.core.config import warn_once
from tiledsched.core.errors import DatabaseError
from tiledsched.core.groups import grouped, largest
from tiledsched.core.problem import Problem
from tiledsched.store.direct import reading
from tiledsched.store.evidence import distinct
from tiledsched.store.records import Entry
from tiledsched.store.rows import RowReader, kernel_condition, quoted, read_new_json
from tiledsched.store.spills import Spills, joined, stored

MANY = 1000
"""Entries of a kernel up to which all of them are read. No more ship for any kernel and arch."""
NEAREST = 32
"""Problems of each group whose entries are read. Of these the kernel's own distance chooses half as many."""
GROUPS = (
    "SELECT DISTINCT r.arch, r.accum_mode, r.provenance IN ('measured', 'transferred'), r.problem_id FROM entries r"
)
"""Selects the groups of problems: those of one group do not take the place of those of another among the nearest."""


class SmClock(msgspec.Struct):
    """The part of a measurement's conditions that tells whether the clocks of others were held down."""

    sm_clock_mhz: int = 0


class StoredEntries:
    """The entries of one kernel in a database, of which those near a problem are read.

    What decides which are near is read when this object is made: the problems, and no more of their entries.

    Args:
        url: of the database.
        kernel: the kernel's name.
        rows: reads the database.
    """

    def __init__(self, url: str | None, kernel: str, rows: RowReader) -> None:
        self._url, self._layer = url, rows.layer
        self._condition, self._words = kernel_condition(kernel)
        counted = rows.run(f"SELECT count(*) FROM entries r WHERE {self._condition}", self._words)
        self.many = next(iter(counted))[0] > MANY
        """Whether there are so many that a call does not wait for all."""
        self.raced = self.in_graphs = False
        """Whether rivals were timed for any of them, and whether any was timed in graphs."""
        self.seen_mhz: dict[str, int] = {}
        """By the name of each GPU, the highest clock behind any of them."""
        self._known: dict[str, list[Entry]] = {}
        if self.many:
            of_kernel = f"FROM entries r WHERE {self._condition}"
            found = [
                next(iter(rows.run(f"SELECT 1 {of_kernel} AND {what} LIMIT 1", self._words)), None) is not None
                for what in ("r.rivals IS NOT NULL", "r.regime LIKE 'graph%'")
            ]
            self.raced, self.in_graphs = found
            self._read_clocks(rows)
            self._read_problems(rows)

    def _read_clocks(self, rows: RowReader) -> None:
        behind = "SELECT m.device_id, CAST(m.conditions AS TEXT) FROM entries r JOIN measurements m ON m.id = r.measurement_id"
        read, highest = msgspec.json.Decoder(SmClock).decode, dict[str, int]()
        for device, conditions in rows.run(f"{behind} WHERE {self._condition}", self._words):
            with contextlib.suppress(ValueError, TypeError):
                highest[device] = max(highest.get(device, 0), read(conditions).sm_clock_mhz)
        devices = rows.parents("devices", highest)
        self.seen_mhz = largest((device.name, highest[identity]) for identity, device in devices.items())

    def _read_problems(self, rows: RowReader) -> None:
        of_entries = f"WHERE r.id IN (SELECT r.problem_id FROM entries r WHERE {self._condition})"
        found = rows.make(
            "problems",
            rows.read("problems", self._words, of_entries),
            lambda row: (row.id, _values(read_new_json(dict, row.dims, "dims"))),
        )
        problems = dict(found)
        self.many = bool(problems)
        self._ids = dict(zip(problems, itertools.count(), strict=False))
        self._names = sorted({name for sizes in problems.values() for name in sizes})
        self._codes: dict[str, int] = {}
        places = [self._place(sizes) for sizes in problems.values()]
        self._sizes, self._words_of = (np.array([place[part] for place in places]) for part in (0, 1))
        groups = grouped(
            ((arch, accum_mode, bool(measured)), self._ids[identity])
            for arch, accum_mode, measured, identity in rows.run(f"{GROUPS} WHERE {self._condition}", self._words)
            if identity in self._ids and isinstance(arch, str)
        )
        self._groups = {group: np.array(places) for group, places in groups.items()}

    def _place(self, values: Mapping[str, int | str]) -> tuple[list[float], list[int]]:
        """Logarithms of the sizes of a problem, and a number for each of its other values."""
        sizes, words = [], []
        for value in (values.get(name, 0) for name in self._names):
            sizes.append(math.log2(max(1, value)) if isinstance(value, int) else 0.0)
            words.append(0 if isinstance(value, int) else self._codes.setdefault(value, 1 + len(self._codes)))
        return sizes, words

    def near(self, problem: Problem, archs: Sequence[str], *, alone: bool = False) -> list[Entry]:
        """The entries on some archs of the problem and, unless they are wanted alone, of those nearest to it, by octaves between
        sizes and by how many other values differ."""
        ids = [
            each
            for each in dict.fromkeys((problem.id, *([] if alone else self._nearest(problem, archs))))
            if each in self._ids
        ]
        if new := [each for each in ids if each not in self._known]:
            self._read(new)
        return [entry for each in ids for entry in self._known[each] if entry.arch in archs]

    def _nearest(self, problem: Problem, archs: Sequence[str]) -> Iterator[str]:
        sizes, words = self._place(_values(problem.to_json()))
        ids = [*self._ids]
        for (arch, *_), places in self._groups.items():
            if arch in archs:
                apart = np.abs(self._sizes[places] - sizes).sum(axis=1) + (self._words_of[places] != words).sum(axis=1)
                yield from (ids[places[place]] for place in np.argsort(apart, kind="stable")[:NEAREST])

    def _read(self, ids: Sequence[str]) -> None:
        found: dict[str, list[Entry]] = {each: [] for each in ids}
        try:
            with reading(self._url) as rows:
                rows.layer = self._layer
                archs = quoted({arch for arch, *_ in self._groups})
                condition = f"WHERE {self._condition} AND r.arch IN ({archs}) AND r.problem_id IN ({quoted(ids)})"
                for entry in distinct(rows.entries(self._words, condition)):
                    own = entry.problem.id  # it may be stored under the one that it had once
                    found[own if own in found else ids[0]].append(entry)
        except DatabaseError as error:
            warn_once(f"{error}; what it holds of near problems is left out")
        self._known.update(found)  # at once: other threads look here

    def device_names(self, arch: str) -> set[str]:
        """The GPUs of an arch on which something was measured."""
        with reading(self._url) as rows:
            words = {**self._words, "arch": arch}
            found = rows.run(
                f"SELECT DISTINCT r.device_name FROM entries r WHERE {self._condition} AND r.arch = :arch", words
            )
            return {name for (name,) in found if isinstance(name, str) and name}


def _values(problem: Mapping[str, Any]) -> dict[str, int | str]:
    """The values of a problem: sizes as numbers, several sizes as their sum, all others as text."""
    found: dict[str, int | str] = {}
    for name, value in problem.items():
        whole = sum(value) if type(value) is list and {*map(type, value)} == {int} else value
        found[name] = whole if type(whole) is int else repr(whole)
    return found


class StoredSpills(Mapping[str, Mapping[str, int]]):
    """What a database knows of programs that spill registers or do not build, read when it is wanted; see
    :data:`tiledsched.store.spills.Spills`.

    Args:
        url: of the database.
        compiler: the version of the compiler.
        shipped: what is known apart from the database.
        of: values of columns of builds.
    """

    def __init__(self, url: str | None, compiler: str, shipped: Spills, of: Mapping[str, str]) -> None:
        self._url, self._compiler, self._shipped, self._of = url, compiler, shipped, of
        self._known: dict[str, Spills] = {}

    def _read(self, schedules: Sequence[str] | None) -> Spills:
        try:
            with reading(self._url) as rows:
                return stored(rows, self._compiler, self._of, schedules)
        except DatabaseError:  # which a warning has said, when its entries were read
            return {}

    def __getitem__(self, schedule: str) -> Mapping[str, int]:
        if schedule not in self._known:
            self._known[schedule] = joined({schedule: self._shipped.get(schedule, {})}, self._read([schedule]))
        if not self._known[schedule][schedule]:
            raise KeyError(schedule)
        return self._known[schedule][schedule]

    @functools.cached_property
    def _all(self) -> Spills:
        found = joined(self._shipped, self._read(None))
        self._known.update((schedule, {schedule: of}) for schedule, of in found.items())
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
