"""Reads what is measured, one problem at a time, and keeps of it what a report is made of.

A database may hold a million measurements. Samples are left in it; of a schedule only the newest measurement is kept; and
where there are more programs than a report can list, those that decide something.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import source_part
from tiledsched.measure.clocks import summarise_states
from tiledsched.measure.runner import Conditions, Device
from tiledsched.report.analysis import named_tile
from tiledsched.report.records import DeviceConditions
from tiledsched.store.evidence import of_one_compiler, timed_alike
from tiledsched.store.queries import RegimeComparison, compare_regimes
from tiledsched.store.records import StoredMeasurement, Toolchain

if TYPE_CHECKING:
    from tiledsched.report.sources import WithShipped
    from tiledsched.store.db import TuningDB

MOST_LISTED = 40_000
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
    measurements: int
    """Measurements, repeats included."""
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
    reading, states = Reading(), defaultdict[str, _States](_States)
    always: dict[Problem, set[Schedule]] = defaultdict(set)
    for problem, schedule in listed:
        always[problem].add(schedule)
    most = _most_each(db.measured_problems(arch, kernel).values())
    for problem, existing in db.measurements_by_problem(arch, kernel):
        alike = [stored for stored in timed_alike(existing) if device_name in (None, stored.measurement.device.name)]
        reading.regimes += compare_regimes(alike)
        taken = of_one_compiler(
            [stored for stored in alike if stored.measurement.regime == regime], compiler, fullest=True
        )
        reading.found += len(existing)
        reading.taken += len(taken)
        members: dict[LandscapeKey, list[StoredMeasurement]] = defaultdict(list)
        for stored in taken:
            own = stored.measurement
            reading.compilers[problem] = stored.toolchain.tileiras
            states[own.device.name].add(stored)
            members[problem, own.device.name, accum_mode(own.schedule)].append(stored)
        for key, stored_of in members.items():
            reading.landscapes[key] = _landscape(stored_of, most, always[problem])
    reading.regimes.sort(key=lambda one: (one.device_name, one.problem, one.accum_mode))
    reading.conditions = tuple(states[name].conditions() for name in sorted(states))
    for each in (state for of in states.values() for state in of.states.values()):
        reading.sources[source_part(each.source_hash), each.toolchain.id] = each.toolchain
    return reading


def _most_each(sizes: Iterable[int]) -> int:
    """How many programs of each problem are listed, so that they are `MOST_LISTED` in all: small landscapes stay whole."""
    left, ordered = MOST_LISTED, sorted(sizes)
    for place, size in enumerate(ordered):
        share = left // (len(ordered) - place)
        if size > share:
            return share
        left -= size
    return MOST_LISTED


def _landscape(stored: Sequence[StoredMeasurement], most: int, always: Iterable[Schedule]) -> Landscape:
    """The landscape of measurements of one problem, device and accumulator mode, the newest first."""
    newest: dict[Schedule, StoredMeasurement] = {}
    for one in stored:
        newest.setdefault(one.measurement.schedule, one)
    return Landscape(
        newest=list(newest.values()) if len(newest) <= most else _listed(newest, most, always),
        schedules=len(newest),
        median_us=statistics.median(one.measurement.median_us for one in newest.values()),
        measurements=len(stored),
        trace_us=_trace(stored),
    )


def _listed(
    newest: dict[Schedule, StoredMeasurement], most: int, always: Iterable[Schedule]
) -> list[StoredMeasurement]:
    """A choice of the schedules of one landscape, in their order: the fastest, the fastest of each tile, the slowest, those that
    are wanted in any case, and of the others as many of each speed.
    """
    ranked = sorted(newest, key=lambda schedule: (newest[schedule].measurement.median_us, schedule.id))
    kept = dict.fromkeys([*ranked[: (most + 1) // 2], ranked[-1], *(each for each in always if each in newest)])
    tile = named_tile(ranked[0]) or ()
    tiles: dict[object, Schedule] = {}
    for schedule in ranked:
        tiles.setdefault(tuple(schedule[knob] for knob in tile if knob in schedule), schedule)
    kept |= dict.fromkeys(tiles.values())
    others = [schedule for schedule in ranked if schedule not in kept]
    if (room := most - len(kept)) > 0:
        kept |= dict.fromkeys(others[place * len(others) // room] for place in range(room))
    return [one for schedule, one in newest.items() if schedule in kept]


def _trace(stored: Sequence[StoredMeasurement]) -> tuple[float, ...]:
    """Time of each program of the newest run, in the order in which they were first measured."""
    newest = max((one.run_id for one in stored if one.run_id is not None), default=None)
    taken = [one for one in stored if newest is not None and one.run_id == newest]
    first: dict[str, float] = {}
    for one in sorted(taken, key=lambda each: (each.created_at, each.id)):
        first.setdefault(one.measurement.fingerprint, one.measurement.median_us)
    return tuple(first.values())


@dataclass
class _State:
    """What measurements of one run share, and how many there are."""

    conditions: Conditions
    device: Device
    toolchain: Toolchain
    source_hash: str
    runner: str
    regime: str
    count: int = 0
    samples: int = 0


class _States:
    """What is said of all measurements of one device together."""

    def __init__(self) -> None:
        self.states: dict[tuple[object, ...], _State] = {}
        self._newest: StoredMeasurement | None = None
        self._oldest: StoredMeasurement | None = None

    def add(self, stored: StoredMeasurement) -> None:
        """Take one more measurement into account."""
        taken, toolchain = stored.measurement, stored.toolchain
        shared = taken.conditions, taken.device, toolchain, stored.source_hash, taken.runner, taken.regime
        key = (*map(id, shared[:3]), *shared[3:])  # hashing conditions takes long, and those of one run are one object
        state = self.states.get(key) or self.states.setdefault(key, _State(*shared))
        state.count += 1
        state.samples += len(taken.samples_us)
        if self._newest is None or (stored.created_at, stored.id) > (self._newest.created_at, self._newest.id):
            self._newest = stored
        if self._oldest is None or stored.created_at < self._oldest.created_at:
            self._oldest = stored

    def conditions(self) -> DeviceConditions:
        """The conditions of those that were added; at least one was."""
        assert self._newest is not None
        assert self._oldest is not None
        states = [*self.states.values()]
        reasons: Counter[str] = Counter()
        for each in states:
            for reason in each.conditions.throttle_reasons:
                reasons[reason] += each.count
        return DeviceConditions(
            device=self._newest.measurement.device,
            drivers=tuple(sorted({each.device.driver for each in states} - {""})),
            compilers=tuple(sorted({each.toolchain.compiler for each in states})),
            source_hashes=tuple(sorted({source_part(each.source_hash) for each in states} - {""})),
            runners=tuple(sorted({each.runner for each in states})),
            sm_clock_mhz=_range(each.conditions.sm_clock_mhz for each in states),
            memory_clock_mhz=_range(each.conditions.memory_clock_mhz for each in states),
            power_w=max(each.conditions.power_w for each in states),
            temperature_c=max(each.conditions.temperature_c for each in states),
            held_down=summarise_states((each.conditions, each.device, each.regime, each.count) for each in states),
            throttle_reasons=tuple(sorted(reasons.items(), key=lambda item: (-item[1], item[0]))),
            first=self._oldest.created_at,
            last=self._newest.created_at,
            measurements=sum(each.count for each in states),
            samples=sum(each.samples for each in states),
        )


def _range(values: Iterable[int]) -> tuple[int, int] | None:
    told = [value for value in values if value]
    return (min(told), max(told)) if told else None
