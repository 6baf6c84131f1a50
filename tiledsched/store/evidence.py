"""Chooses between entries of several compilers, and finds measurements that contradict what is served."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tiledsched.core.groups import grouped, largest
from tiledsched.core.problem import KernelClass
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import is_shipped, of_one_kernel, source_part
from tiledsched.measure.clocks import describe_throttling
from tiledsched.measure.runner import Conditions, Measurement
from tiledsched.store.records import Contradiction, Entry, MeasurementSummary, Place, StoredMeasurement

SPREAD = 0.035
"""How much the times of one program may differ between two GPUs of one model: 0.7 to 3.5% on H200s."""


def for_compiler(entries: Iterable[Entry], compiler: str) -> list[Entry]:
    """One entry for each place: that of the strongest provenance, and among equals one whose clock was not held down, and then
    that of the nearest compiler.

    Args:
        entries: entries of any kernels and archs.
        compiler: the installed version, e.g. 13.5.37; empty where there is none: then the newest is taken.
    """

    entries = list(entries)
    seen_mhz = clocks_of(entries)

    def order(entry: Entry) -> tuple[Any, ...]:
        return *precedence(entry, seen_mhz), _distance(entry.compiler, compiler)

    found: dict[Place, Entry] = {}
    for entry in entries:
        known = found.get(entry.place)
        found[entry.place] = entry if known is None else min(known, entry, key=order)
    return list(found.values())


def standing(record: Entry) -> tuple[int, bool, float, str, float]:
    """A sort key: of two entries with one key, the one that sorts first is served, from whatever databases they come.

    The stronger provenance comes first, then what was measured at a clock that its maker gives, then the shorter time, measured
    or modelled. Between equal times the contents decide, and between equal contents the date.
    """
    us = record.median_us if record.median_us is not None else record.model_us
    contents = {
        key: value
        for key, value in record.to_json().items()
        if key not in ("measurement_id", "run_id", "updated_at", "measurement", "layer")
    }
    contents["measurement"] = record.measurement.uid if record.measurement else None
    date = record.updated_at.timestamp() if record.updated_at else 0.0
    return *precedence(record, {}), math.inf if us is None else us, json.dumps(contents, sort_keys=True), -date


def distinct(entries: Iterable[Entry]) -> list[Entry]:
    """Stored entries sorted by their keys, of which each stands once."""
    found: dict[tuple[Any, ...], Entry] = {}
    for entry in entries:
        key = entry.key
        if key in found:  # their problems had two names once
            entry = min(found[key], entry, key=standing)
        found[key] = entry
    return sorted(found.values(), key=lambda each: (each.place, each.compiler))


def clocks_of(entries: Iterable[Entry], known: Mapping[str, int] = MappingProxyType({})) -> dict[str, int]:
    """By the name of each GPU, the highest clock at which it was measured, in MHz; also of what is `known` of other entries."""
    measured = (entry.measurement for entry in entries if entry.measurement is not None)
    return largest([*known.items(), *((each.device.name, each.conditions.sm_clock_mhz) for each in measured)])


def throttled(entry: Entry, seen_mhz: Mapping[str, int]) -> str:
    """In words how far below its clock the GPU was held while an entry was measured; empty where it was not.

    Args:
        entry: the entry.
        seen_mhz: what :func:`clocks_of` gives for the entries that are known.
    """
    taken = entry.measurement
    if taken is None:
        return ""
    return describe_throttling(taken.conditions, taken.device, entry.regime, seen_mhz.get(taken.device.name, 0))


def precedence(entry: Entry, seen_mhz: Mapping[str, int]) -> tuple[int, bool]:
    """A sort key: of two entries for one problem and device, the one that sorts first is served. The arguments are those of
    :func:`throttled`.
    """
    return entry.rank, bool(throttled(entry, seen_mhz))


LANDSCAPE = 20
"""So many measured schedules of a problem show what other schedules cost."""


def of_one_compiler(
    measurements: Sequence[StoredMeasurement], compiler: str, *, fullest: bool = False
) -> list[StoredMeasurement]:
    """The measurements of one compiler for each problem on each GPU: times under two compilers are not one landscape.

    Args:
        measurements: measurements under any compilers.
        compiler: the wanted version, e.g. 13.5.37, or empty for the newest. Where it measured nothing the nearest is taken.
        fullest: take the nearest of the compilers that measured a landscape: the one with the most schedules, or one with at
            least `LANDSCAPE` of them and a third as many. After a refresh the installed compiler has measured a few leaders,
            and the one before it the landscape.
    """

    def place(stored: StoredMeasurement) -> tuple[Any, ...]:
        return stored.measurement.problem, stored.measurement.device.name

    if len({stored.toolchain.tileiras for stored in measurements}) < 2:
        return list(measurements)
    known = grouped(
        (place(stored), (stored.toolchain.tileiras, stored.measurement.schedule)) for stored in measurements
    )
    taken = {
        where: nearest_compiler(Counter(version for version, _ in {*of}), compiler, fullest=fullest)
        for where, of in known.items()
    }
    return [stored for stored in measurements if stored.toolchain.tileiras == taken[place(stored)]]


def nearest_compiler(schedules: Mapping[str, int], compiler: str, *, fullest: bool) -> str:
    """Which compiler's measurements count, given how many schedules each measured; see :func:`of_one_compiler`."""
    most = max(schedules.values())
    enough = {
        version for version, number in schedules.items() if not fullest or number >= min(most, max(LANDSCAPE, most / 3))
    }
    return min(enough, key=lambda version: _distance(version, compiler))


def timed_as_now(regime: str, conditions: Conditions) -> bool:
    """Whether something was timed in the way in which it is timed today.

    In the burst regime each launch is timed by itself, with a cold cache. Short launches used to be timed in CUDA graphs, and
    some of the recorded landscapes still are.
    """
    return regime != "burst" or conditions.graph_launches == 0


def timed_alike(measurements: Sequence[StoredMeasurement]) -> list[StoredMeasurement]:
    """The measurements of each problem, GPU and regime that were timed as today, or all where none was.

    Where some were timed in graphs, those with a single sample are left out as well: one launch was enough to see that they
    are far slower than the ones in graphs.
    """

    def place(stored: StoredMeasurement) -> tuple[Any, ...]:
        return stored.measurement.problem, stored.measurement.device.name, stored.measurement.regime

    as_now = {
        stored.uid: timed_as_now(stored.measurement.regime, stored.measurement.conditions) for stored in measurements
    }
    if all(as_now.values()):
        return list(measurements)
    mixed = {place(stored) for stored in measurements if not as_now[stored.uid]}
    alike = [
        stored
        for stored in measurements
        if as_now[stored.uid] and (place(stored) not in mixed or len(stored.measurement.samples_us) > 1)
    ]
    covered = {place(stored) for stored in alike}
    return [*alike, *(stored for stored in measurements if place(stored) not in covered)]


def _distance(version: str, compiler: str) -> tuple[Any, ...]:
    """Sorts versions by their distance to `compiler`, or the newest first where that is empty. Without a version: last."""
    its, wanted = _numbers(version), _numbers(compiler)
    gaps = [abs(a - b) for a, b in zip(its, wanted, strict=False)]
    return version != compiler, not its, gaps, [-number for number in its], version


def stale(entry: Entry, compiler: str) -> bool:
    """Whether an entry was measured under another compiler than `compiler`, or its kernel's source has changed since. False
    where these are not known.
    """
    measured = entry.provenance == "measured" and bool(entry.compiler) and compiler not in ("", entry.compiler)
    return measured or (entry.problem.known and edited(entry, entry.problem.declaration))


def stale_by_cause(entries: Iterable[Entry], compiler: str) -> tuple[list[Entry], list[Entry]]:
    """The stale ones of some entries: those whose kernel's source has changed, and those that another compiler built."""
    found: tuple[list[Entry], list[Entry]] = [], []
    for entry in entries:
        if stale(entry, compiler):
            found[not (entry.problem.known and edited(entry, entry.problem.declaration))].append(entry)
    return found


def edited(entry: Entry, kernel: KernelClass) -> bool:
    """Whether the source of a kernel has changed since an entry was written. A kernel that ships changes with its tables."""
    if is_shipped(kernel) or not entry.source_hash:
        return False
    now = kernel.evidence_source()
    return bool(now) and source_part(entry.source_hash) != source_part(now)


def of_kernel(entries: Iterable[Entry], kernel: KernelClass | None = None) -> list[Entry]:
    """The entries without those of another kernel that has the same name, such as one in a file of the same name; and without
    those of problems that were stored when the kernel had other fields, or required less.

    Args:
        entries: of any kernels.
        kernel: whose entries are wanted; None for the kernel that each entry's problem is known to be of.
    """

    mine = functools.cache(may_be_of)

    def belongs(entry: Entry) -> bool:
        if kernel is not None and not entry.problem.known:
            return False
        of = kernel or (entry.problem.declaration if entry.problem.known else None)
        return of is None or of.name != entry.kernel or mine(entry.source_hash, of)  # type: ignore[arg-type]  # a class is hashable

    return [entry for entry in entries if belongs(entry)]


def may_be_of(source_hash: str, kernel: KernelClass) -> bool:
    """Whether evidence with this note of its source may be of a kernel, and not of another one of its name."""
    return is_shipped(kernel) or of_one_kernel(source_hash, kernel.evidence_source())


def leaders(entry: Entry) -> list[Schedule]:
    """The fastest schedules of an entry: its own, those that tied with it, and the runner-up."""
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
        programs = grouped(
            ((stored.measurement.fingerprint, stored.measurement.schedule), stored.measurement)
            for stored in measurements_of(entry)
            if _comparable(stored, entry, mine)
        )
        found = {
            schedule: us
            for (fingerprint, schedule), taken in sorted(programs.items(), key=lambda each: each[0][1].id)
            if (us := _contradicts(entry, mine, fingerprint, schedule, taken)) is not None
        }
        if found:
            worst = max(found, key=lambda schedule: (abs(found[schedule] - mine.median_us), schedule.id))
            yield Contradiction(entry=entry, schedule=worst, median_us=found[worst])


def _comparable(stored: StoredMeasurement, entry: Entry, mine: MeasurementSummary) -> bool:
    """Whether a measurement can contradict the entry: of the same kernel, built by the same compiler, timed in the same way and
    at no lower clock, of the same accuracy class, and with a checked output. A program that was never checked cannot win, nor one
    with other numbers where only the same could.
    """
    taken = stored.measurement
    clock = mine.conditions.sm_clock_mhz
    built = taken.fingerprint == entry.fingerprint or stored.toolchain.tileiras == entry.compiler
    return (
        built
        and of_one_kernel(stored.source_hash, entry.source_hash)
        and taken.accuracy is not None
        and not (entry.same_numbers and mine.accuracy and taken.accuracy.outputs != mine.accuracy.outputs)
        and taken.schedule.get("accum_mode", entry.accum_mode) == entry.accum_mode
        and bool(taken.conditions.graph_launches) == bool(mine.conditions.graph_launches)
        and not describe_throttling(taken.conditions, taken.device, taken.regime, clock)
    )


def _contradicts(
    entry: Entry, mine: MeasurementSummary, fingerprint: str, schedule: Schedule, taken: list[Measurement]
) -> float | None:
    """The pooled time of a program where it contradicts the entry, whose measurement is `mine`; else None."""
    us = statistics.median(each.median_us for each in taken)
    if (fingerprint, schedule) == (entry.fingerprint, entry.schedule):
        apart = [each for each in taken if each.ci_low_us > mine.ci_high_us or each.ci_high_us < mine.ci_low_us]
        furthest = max(apart, key=lambda each: (abs(each.median_us / mine.median_us - 1), each.median_us), default=None)
        return furthest.median_us if furthest and abs(furthest.median_us / mine.median_us - 1) > SPREAD else None
    faster = all(each.ci_high_us < mine.ci_low_us for each in taken) and mine.median_us / us - 1 > SPREAD
    return us if faster else None
