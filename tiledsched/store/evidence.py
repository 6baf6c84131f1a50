"""What stored evidence says: which compiler's entry answers, and where pooled measurements contradict what is served."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Conditions, Measurement
from tiledsched.store.records import Contradiction, Entry, MeasurementSummary, Place, StoredMeasurement

SPREAD = 0.035
"""What the same program's times may differ by between two GPUs of one kind: 0.7 to 3.5% on H200s."""


def for_compiler(entries: Iterable[Entry], compiler: str) -> list[Entry]:
    """Of entries that differ in their compiler alone, the strongest, then that of the compiler nearest to `compiler`.

    Args:
        entries: of any kernels and archs.
        compiler: version at hand, e.g. 13.5.37; empty where there is none, and the newest is taken.
    """

    def order(entry: Entry) -> tuple[Any, ...]:
        return entry.rank, _apart(entry.compiler, compiler)

    found: dict[Place, Entry] = {}
    for entry in entries:
        known = found.get(entry.place)
        found[entry.place] = entry if known is None else min(known, entry, key=order)
    return list(found.values())


def of_one_compiler(
    measurements: Sequence[StoredMeasurement], compiler: str, *, fullest: bool = False
) -> list[StoredMeasurement]:
    """Of each problem on each GPU what one compiler built: times of different ones are no landscape.

    Args:
        measurements: of any compilers.
        compiler: the one wanted, e.g. 13.5.37; the nearest is taken. Empty for the newest.
        fullest: take the one that the most schedules were measured with, and the nearest of those that are equal: after a
            refresh the compiler at hand has built a few leaders, and the one before it the landscape.
    """

    def place(stored: StoredMeasurement) -> tuple[Any, ...]:
        return stored.measurement.problem, stored.measurement.device.name

    known: dict[tuple[Any, ...], dict[str, set[Schedule]]] = defaultdict(lambda: defaultdict(set))
    for stored in measurements:
        known[place(stored)][stored.toolchain.tileiras].add(stored.measurement.schedule)

    def order(version: str, schedules: set[Schedule]) -> tuple[Any, ...]:
        return -len(schedules) if fullest else 0, _apart(version, compiler)

    taken = {
        where: min(versions, key=lambda version: order(version, versions[version])) for where, versions in known.items()
    }
    return [stored for stored in measurements if stored.toolchain.tileiras == taken[place(stored)]]


def timed_as_now(regime: str, conditions: Conditions) -> bool:
    """Whether it is the time of a launch out of a cold cache, if paced: short ones were timed in graphs once, and some of the
    recorded landscapes are.
    """
    return regime != "burst" or conditions.graph_launches == 0


def timed_alike(measurements: Sequence[StoredMeasurement]) -> list[StoredMeasurement]:
    """Of each problem on each GPU in a regime what was timed as it is now; where nothing was, all of it.

    Where some were timed in graphs, what has a single sample is left out, too: a look, by which it was hopeless beside those.
    """

    def place(stored: StoredMeasurement) -> tuple[Any, ...]:
        return stored.measurement.problem, stored.measurement.device.name, stored.measurement.regime

    as_now = {
        stored.uid: timed_as_now(stored.measurement.regime, stored.measurement.conditions) for stored in measurements
    }
    mixed = {place(stored) for stored in measurements if not as_now[stored.uid]}
    kept = [
        stored
        for stored in measurements
        if as_now[stored.uid] and (place(stored) not in mixed or len(stored.measurement.samples_us) > 1)
    ]
    told = {place(stored) for stored in kept}
    return [*kept, *(stored for stored in measurements if place(stored) not in told)]


def _apart(version: str, compiler: str) -> tuple[Any, ...]:
    """Sorts the versions nearest to `compiler` first, and where there is none, the newest; what has no version last."""
    its, wanted = _numbers(version), _numbers(compiler)
    gaps = [abs(a - b) for a, b in zip(its, wanted, strict=False)]
    return version != compiler, not its, gaps, [-number for number in its], version


def stale(entry: Entry, compiler: str) -> bool:
    """Whether it was measured on machine code of another compiler than the one at hand; False where either is not known."""
    return entry.provenance == "measured" and bool(entry.compiler) and compiler not in ("", entry.compiler)


def leaders(entry: Entry) -> list[Schedule]:
    """What an entry says was fastest: its schedule, those that tied with it, and the runner-up."""
    return list(dict.fromkeys([entry.schedule, *entry.ties, *([entry.runner_up] if entry.runner_up else [])]))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isascii() and part.isdigit())


def contradictions(
    entries: Iterable[Entry], measurements_of: Callable[[Entry], Iterable[StoredMeasurement]]
) -> Iterator[Contradiction]:
    """For each measured entry the measurement that contradicts it most, by more than `SPREAD` and with intervals apart.

    Times of one program are pooled as their median. The answer depends on what is stored, not on the order in which it
    was stored.

    Args:
        entries: entries that are measured.
        measurements_of: gives what is measured of an entry's problem on its device and in its regime.
    """
    for entry in entries:
        mine = entry.measurement
        assert mine is not None  # they are measured
        programs: dict[tuple[str, Schedule], list[Measurement]] = defaultdict(list)
        for stored in measurements_of(entry):
            if _comparable(stored, entry, mine):
                programs[stored.measurement.fingerprint, stored.measurement.schedule].append(stored.measurement)
        found = {
            schedule: us
            for (fingerprint, schedule), taken in sorted(programs.items(), key=lambda each: each[0][1].id)
            if (us := _contradicts(entry, mine, fingerprint, schedule, taken)) is not None
        }
        if found:
            worst = max(found, key=lambda schedule: (abs(found[schedule] - mine.median_us), schedule.id))
            yield Contradiction(entry=entry, schedule=worst, median_us=found[worst])


def _comparable(stored: StoredMeasurement, entry: Entry, mine: MeasurementSummary) -> bool:
    """What the entry's compiler builds, timed in the same way, in the same accuracy class, and checked: what was never
    checked cannot win.
    """
    taken = stored.measurement
    built = taken.fingerprint == entry.fingerprint or stored.toolchain.tileiras == entry.compiler
    return (
        built
        and taken.accuracy is not None
        and taken.schedule.get("accum_mode", entry.accum_mode) == entry.accum_mode
        and bool(taken.conditions.graph_launches) == bool(mine.conditions.graph_launches)
    )


def _contradicts(
    entry: Entry, mine: MeasurementSummary, fingerprint: str, schedule: Schedule, taken: list[Measurement]
) -> float | None:
    """The pooled time of a program that contradicts the entry, whose measurement is `mine`."""
    us = statistics.median(each.median_us for each in taken)
    if (fingerprint, schedule) == (entry.fingerprint, entry.schedule):
        apart = [each for each in taken if each.ci_low_us > mine.ci_high_us or each.ci_high_us < mine.ci_low_us]
        furthest = max(apart, key=lambda each: (abs(each.median_us / mine.median_us - 1), each.median_us), default=None)
        return furthest.median_us if furthest and abs(furthest.median_us / mine.median_us - 1) > SPREAD else None
    faster = all(each.ci_high_us < mine.ci_low_us for each in taken) and mine.median_us / us - 1 > SPREAD
    return us if faster else None
