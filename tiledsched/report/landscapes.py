"""Reads what is measured, one problem at a time, and keeps of it what a report is made of; and the highest rates measured.

A database may hold a million measurements. Samples are left in it; of a schedule only the newest measurement is kept; and
where there are more programs than a report can list, those that decide something.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiledsched.core.groups import firsts
from tiledsched.core.problem import KernelClass, Problem, unit_of
from tiledsched.core.schedule import Schedule, named_tile
from tiledsched.core.sources import source_part
from tiledsched.measure.clocks import summarise_states
from tiledsched.report.records import MEASURED, Ceiling, DeviceConditions
from tiledsched.store.evidence import nearest_compiler, of_one_compiler, timed_alike, timed_as_now
from tiledsched.store.queries import RegimeComparison, compare_regimes
from tiledsched.store.reading import Circumstances, PlainRow
from tiledsched.store.records import Entry, StoredMeasurement, Toolchain

if TYPE_CHECKING:
    from tiledsched.report.sources import WithShipped
    from tiledsched.store.db import TuningDB

MOST_LISTED = 20_000
"""Where more programs than this were measured, a report lists a choice of each problem's."""
LandscapeKey = tuple[Problem, str, str]
"""(problem, device name, accumulator mode): only times that agree in all three are compared."""


def accum_mode(schedule: Schedule) -> str:
    """The accumulators of a schedule: fp32 or fp16."""
    return str(schedule.get("accum_mode", "fp32"))


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """What is measured of one problem on one device."""

    newest: list[StoredMeasurement]
    """The newest measurement of each schedule, the newest first; where there are too many, of those that are listed."""
    schedules: int
    """Schedules that were measured."""
    median_us: float
    """Median of the newest measurement of each schedule."""
    trace_us: tuple[float, ...]
    """Time of each program of the newest run, in the order in which they were first measured."""


@dataclass(kw_only=True)
class Reading:
    """What is measured of a kernel on an arch, in one regime and on the devices of a report."""

    landscapes: dict[LandscapeKey, Landscape] = field(default_factory=dict)
    """What is measured of each problem."""
    found: int = 0
    """Measurements of the kernel on the arch."""
    taken: int = 0
    """Measurements that the landscapes are made of."""
    compilers: dict[Problem, str] = field(default_factory=dict)
    """The compiler whose times are shown of each problem."""
    sources: dict[tuple[str, str], Toolchain] = field(default_factory=dict)
    """The compilers, by the hash of the kernel's source and their own id."""
    regimes: list[RegimeComparison] = field(default_factory=list)
    """Problems that were measured in both regimes."""
    conditions: tuple[DeviceConditions, ...] = ()
    """Conditions of measurement, for each device."""


def read_measured(
    db: TuningDB | WithShipped,
    arch: str,
    kernel: KernelClass,
    *,
    regime: str,
    device_name: str | None,
    compiler: str,
    listed: Iterable[tuple[Problem, Schedule]],
) -> Reading:
    """Read all measurements of a kernel on an arch.

    Args:
        db: an open database.
        arch: e.g. sm_121.
        kernel: the kernel.
        regime: burst or sustained.
        device_name: one device; None for all.
        compiler: the version of the installed compiler.
        listed: schedules that are kept in any case.
    """
    reading, states, always = Reading(), defaultdict[str, _States](_States), defaultdict[Problem, set[Schedule]](set)
    for problem, schedule in listed:
        always[problem].add(schedule)
    most = _most_each(db.measured_problems(arch, kernel).values(), MOST_LISTED)
    counted: dict[Problem, _Counted] = {}

    def choose(problem: Problem, rows: Iterable[PlainRow]) -> Collection[int] | None:
        """Which measurements are read whole; all where they are not of one regime and one way of timing."""
        found = _Counted(rows, device_name)
        if not (found.members and found.alike(regime)):
            return None
        found.keep_one_compiler(compiler)
        found.list_programs(most, always[problem])
        counted[problem] = found
        return found.wanted()

    for problem, existing in db.measurements_by_problem(arch, kernel, choose, above=most):
        found = counted.pop(problem, None)
        if found is not None:
            whole = {stored.id: stored for stored in existing}
            reading.found += found.rows
        else:
            alike = [
                stored for stored in timed_alike(existing) if device_name in (None, stored.measurement.device.name)
            ]
            reading.regimes += compare_regimes(alike)
            taken = of_one_compiler(
                [stored for stored in alike if stored.measurement.regime == regime], compiler, fullest=True
            )
            whole = dict(enumerate(taken))
            found = _Counted((_plain(number, stored) for number, stored in whole.items()), None)
            found.list_programs(most, always[problem])
            reading.found += len(existing)
        for (name, _, mode), members in found.members.items():
            reading.taken += sum(tally.count for tally in members.tallies)
            reading.landscapes[problem, name, mode] = members.landscape(whole)
            states[name].add(members.tallies, whole[members.newest.id], whole[members.oldest.id])
        if found.members:
            oldest = [whole[members.oldest.id] for members in found.members.values()]
            reading.compilers[problem] = min(oldest, key=lambda one: one.created_at).toolchain.tileiras
    reading.regimes.sort(key=lambda one: (one.device_name, one.problem, one.accum_mode))
    reading.conditions = tuple(states[name].conditions() for name in sorted(states))
    for each in (state for of in states.values() for state in of.states.values()):
        reading.sources[source_part(each.shared.source_hash), each.shared.toolchain.id] = each.shared.toolchain
    return reading


def _most_each(sizes: Iterable[int], most: int) -> int:
    """How many programs of each problem are listed, so that they are `most` in all: small landscapes stay whole."""
    left, ordered = most, sorted(sizes)
    for place, size in enumerate(ordered):
        share = left // (len(ordered) - place)
        if size > share:
            return share
        left -= size
    return most


def _plain(number: int, stored: StoredMeasurement) -> PlainRow:
    """What tells about a measurement whether it is listed, under a number."""
    own = stored.measurement
    shared = Circumstances(own.conditions, own.device, stored.toolchain, stored.source_hash, own.runner, own.regime)
    return PlainRow(number, stored.run_id, own.schedule, shared, own.fingerprint, own.median_us, len(own.samples_us))


@dataclass
class _Tally:
    """What some measurements share, and how many they are."""

    shared: Circumstances
    count: int = 0
    samples: int = 0
    power_w: float = 0.0
    temperature_c: int = 0


class _Members:
    """What is counted of the measurements of one problem, device, compiler and accumulator mode; the newest comes first."""

    def __init__(self, newest: PlainRow) -> None:
        self.newest = self.oldest = newest
        self.tallies: list[_Tally] = []
        self.listed: Collection[Schedule] = ()
        self.rows: dict[Schedule, PlainRow] = {}
        """The newest measurement of each schedule, the newest first."""
        self._run: int | None = None
        self._trace: dict[str, float] = {}

    def add(self, row: PlainRow) -> None:
        """Take one more measurement into account."""
        self.oldest = row
        self.rows.setdefault(row.schedule, row)
        if row.run_id is not None and (self._run is None or row.run_id >= self._run):
            if row.run_id != self._run:
                self._run, self._trace = row.run_id, {}
            self._trace.pop(row.fingerprint, None)
            self._trace[row.fingerprint] = row.median_us

    def list_programs(self, most: int, always: Iterable[Schedule]) -> None:
        """List all schedules, or a choice of them: the fastest, the fastest of each tile, the slowest, those that are wanted in
        any case, and of the others as many of each speed.
        """
        self.listed = self.rows.keys()
        if len(self.rows) <= most:
            return
        ranked = [one[2] for one in sorted((row.median_us, each.id, each) for each, row in self.rows.items())]
        chosen = dict.fromkeys(
            [*ranked[: (most + 1) // 2], ranked[-1], *(each for each in always if each in self.rows)]
        )
        tile = named_tile(ranked[0]) or ()
        tiles = firsts((tuple(each[knob] for knob in tile if knob in each), each) for each in ranked)
        chosen |= dict.fromkeys(tiles.values())
        others = [schedule for schedule in ranked if schedule not in chosen]
        if (room := most - len(chosen)) > 0:
            chosen |= dict.fromkeys(others[place * len(others) // room] for place in range(room))
        self.listed = chosen.keys()

    def landscape(self, whole: dict[int, StoredMeasurement]) -> Landscape:
        """The landscape, given the measurements that were read whole, by their numbers."""
        return Landscape(
            newest=[whole[row.id] for schedule, row in self.rows.items() if schedule in self.listed],
            schedules=len(self.rows),
            median_us=statistics.median(row.median_us for row in self.rows.values()),
            trace_us=tuple(reversed(self._trace.values())),
        )


class _Counted:
    """What is counted of the measurements of one problem, which are given the newest first.

    Args:
        rows: the measurements.
        device_name: those of other devices are left out; None for all.
    """

    def __init__(self, rows: Iterable[PlainRow], device_name: str | None) -> None:
        self.rows = 0
        self.members: dict[tuple[str, str, str], _Members] = {}
        """(device name, compiler's version, accumulator mode) -> what is counted of these."""
        found: dict[tuple[int, str], tuple[_Members, _Tally]] = {}  # by the number of what they share
        for row in rows:
            self.rows += 1
            shared = row.circumstances
            if device_name in (None, shared.device.name):
                mode = accum_mode(row.schedule)
                known = found.get((id(shared), mode))
                if known is None:
                    key = shared.device.name, shared.toolchain.tileiras, mode
                    members = self.members.get(key) or self.members.setdefault(key, _Members(row))
                    known = found[id(shared), mode] = members, _Tally(shared)
                    members.tallies.append(known[1])
                known[0].add(row)
                known[1].count += 1
                known[1].samples += row.samples

    def alike(self, regime: str) -> bool:
        """Whether all were taken in the regime, and timed as they are today."""
        return all(
            tally.shared.regime == regime and timed_as_now(regime, tally.shared.conditions)
            for members in self.members.values()
            for tally in members.tallies
        )

    def keep_one_compiler(self, compiler: str) -> None:
        """Leave out all but one compiler's measurements of each device; see `of_one_compiler`."""
        versions: dict[str, Counter[str]] = defaultdict(Counter)
        for (name, version, _), members in self.members.items():
            versions[name][version] += len(members.rows)
        taken = {name: nearest_compiler(each, compiler, fullest=True) for name, each in versions.items()}
        self.members = {key: members for key, members in self.members.items() if taken[key[0]] == key[1]}

    def list_programs(self, most: int, always: Collection[Schedule]) -> None:
        """List all programs, or a choice that is at most so many, and a few more."""
        each = _most_each([len(members.rows) for members in self.members.values()], most)
        for members in self.members.values():
            members.list_programs(each, always)

    def wanted(self) -> set[int]:
        """The numbers of the measurements that are to be read whole."""
        return {
            number
            for members in self.members.values()
            for number in (members.newest.id, members.oldest.id, *(members.rows[each].id for each in members.listed))
        }


class _States:
    """What is said of all measurements of one device together."""

    def __init__(self) -> None:
        self.states: dict[tuple[object, ...], _Tally] = {}
        self._ends: list[StoredMeasurement] = []
        """The newest and the oldest measurement of each problem."""

    def add(self, tallies: Iterable[_Tally], newest: StoredMeasurement, oldest: StoredMeasurement) -> None:
        """Take more measurements into account."""
        for tally in tallies:
            conditions, device, toolchain, *others = tally.shared
            said = conditions.sm_clock_mhz, conditions.memory_clock_mhz, conditions.throttle_reasons
            state = self.states.setdefault((*said, id(device), id(toolchain), *others), _Tally(tally.shared))
            state.count += tally.count
            state.samples += tally.samples
            state.power_w = max(state.power_w, conditions.power_w)
            state.temperature_c = max(state.temperature_c, conditions.temperature_c)
        self._ends += [newest, oldest]

    def conditions(self) -> DeviceConditions:
        """The conditions of those that were added; at least one was."""
        states = [*self.states.values()]
        newest = max(self._ends, key=lambda one: (one.created_at, one.id))
        reasons: Counter[str] = Counter()
        for each in states:
            reasons.update(dict.fromkeys(each.shared.conditions.throttle_reasons, each.count))
        return DeviceConditions(
            device=newest.measurement.device,
            drivers=tuple(sorted({each.shared.device.driver for each in states} - {""})),
            compilers=tuple(sorted({each.shared.toolchain.compiler for each in states})),
            source_hashes=tuple(sorted({source_part(each.shared.source_hash) for each in states} - {""})),
            runners=tuple(sorted({each.shared.runner for each in states})),
            sm_clock_mhz=_range(each.shared.conditions.sm_clock_mhz for each in states),
            memory_clock_mhz=_range(each.shared.conditions.memory_clock_mhz for each in states),
            power_w=max(each.power_w for each in states),
            temperature_c=max(each.temperature_c for each in states),
            held_down=summarise_states(
                (each.shared.conditions, each.shared.device, each.shared.regime, each.count) for each in states
            ),
            throttle_reasons=tuple(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
            first=min(one.created_at for one in self._ends),
            last=newest.created_at,
            measurements=sum(each.count for each in states),
            samples=sum(each.samples for each in states),
        )


def _range(values: Iterable[int]) -> tuple[int, int] | None:
    known = [value for value in values if value]
    return (min(known), max(known)) if known else None


LEAST_CACHES = 4
"""A memory rate counts only for problems of at least this many times the L2 cache, which may keep what is written last."""


def measured_ceilings(entries: Iterable[Entry], regime: str, dtypes: Iterable[str]) -> tuple[Ceiling, ...]:
    """The highest measured rate for each GPU and unit.

    Args:
        entries: what is served, of every kernel.
        regime: burst or sustained; entries of the other are left out.
        dtypes: element types whose arithmetic counts, since narrower ones have higher peaks. Memory has one rate for all.
    """
    dtypes, found = set(dtypes), dict[tuple[str, str], Ceiling]()
    for entry in entries:
        taken = entry.measurement
        if entry.provenance != MEASURED or entry.regime != regime or taken is None or not entry.problem.known:
            continue
        problem = entry.problem
        rates = (
            {"GB/s": problem.gbps(taken.median_us)} if problem.min_bytes >= LEAST_CACHES * taken.device.l2_bytes else {}
        )
        if unit_of(problem) == "TFLOP/s" and entry.accum_mode == "fp32" and problem.values.get("dtype") in dtypes:
            rates["TFLOP/s"] = problem.tflops(taken.median_us)
        for unit, rate in rates.items():
            ceiling = Ceiling(
                device_name=entry.device_name,
                unit=unit,
                rate=rate,
                problem=problem,
                taken=taken.created_at,
                sm_clock_mhz=taken.conditions.sm_clock_mhz,
            )
            known = found.setdefault((entry.device_name, unit), ceiling)
            found[entry.device_name, unit] = max(known, ceiling, key=lambda each: each.rate)
    return tuple(found[key] for key in sorted(found))
