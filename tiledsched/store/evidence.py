"""Where pooled measurements contradict what is served."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from tiledsched.measure.runner import Measurement
from tiledsched.schedule import Schedule
from tiledsched.store.records import Contradiction, EntryRecord

if TYPE_CHECKING:
    from tiledsched.store.db import TuningDB

SPREAD = 0.035
"""What the same program's times may differ by between two GPUs of one kind: 0.7 to 3.5% on H200s."""


def contradictions(db: TuningDB, keys: Collection[tuple[str, ...]]) -> Iterator[Contradiction]:
    """For each entry with one of `keys` what contradicts it most, by more than `SPREAD` and with intervals apart.

    Times of one program are pooled as their median. What is found depends on what is stored, not on how it came there.
    """
    for entry in db.entries(provenance="measured") if keys else ():
        mine = entry.median_us
        if entry.key not in keys or mine is None:
            continue
        programs: dict[tuple[str, Schedule], list[Measurement]] = defaultdict(list)
        for stored in db.measurements(entry.problem, entry.arch, entry.device_name, entry.regime):
            if _comparable(stored.measurement, entry):
                programs[stored.measurement.fingerprint, stored.measurement.schedule].append(stored.measurement)
        found = {schedule: us for (fingerprint, schedule), taken in sorted(programs.items(), key=lambda each: each[0][1].id)
                 if (us := _contradicts(entry, fingerprint, schedule, taken)) is not None}  # fmt: skip
        if found:
            worst = max(found, key=lambda schedule: (abs(found[schedule] - mine), schedule.id))
            yield Contradiction(entry=entry, schedule=worst, median_us=found[worst])


def _comparable(taken: Measurement, entry: EntryRecord) -> bool:
    """Timed in the same way, in the same accuracy class, and checked: what was never checked cannot win."""
    assert entry.measurement is not None
    return (taken.accuracy is not None and taken.schedule.get("accum_mode", entry.accum_mode) == entry.accum_mode
            and bool(taken.conditions.graph_launches) == bool(entry.measurement.conditions.graph_launches))  # fmt: skip


def _contradicts(entry: EntryRecord, fingerprint: str, schedule: Schedule, taken: list[Measurement]) -> float | None:
    """The pooled time of a program that contradicts the entry."""
    mine = entry.measurement
    assert mine is not None
    us = statistics.median(each.median_us for each in taken)
    if (fingerprint, schedule) == (entry.fingerprint, entry.schedule):
        apart = [each for each in taken if each.ci_low_us > mine.ci_high_us or each.ci_high_us < mine.ci_low_us]
        furthest = max(apart, key=lambda each: (abs(each.median_us / mine.median_us - 1), each.median_us), default=None)
        return furthest.median_us if furthest and abs(furthest.median_us / mine.median_us - 1) > SPREAD else None
    faster = all(each.ci_high_us < mine.ci_low_us for each in taken) and mine.median_us / us - 1 > SPREAD
    return us if faster else None
