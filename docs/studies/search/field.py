"""What every method searches: the distinct programs of one recorded landscape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiledsched.core.device import ResourceFacts
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.store.exchange import read_table
from tiledsched.store.records import StoredMeasurement

SAMPLES = 6
"""Paced launches that a measurement costs in addition to its first look."""

LONGEST = 100
"""Measurements after which the last regret is taken."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A landscape to search. Index i means the same program in every list."""

    name: str
    """The landscape's file name without its ending."""
    problem: Problem
    """The problem."""
    space: RecordedSpace
    """The shipped search space of the arch, restricted to the recorded schedules."""
    schedules: tuple[Schedule, ...]
    """One schedule of each distinct program, in the order of the space's knobs and choices."""
    times_us: NDArray[np.float64]
    """Recorded median time of each program in microseconds, `[programs]`."""
    device_s: NDArray[np.float64]
    """Device seconds that measuring each program takes `[programs]`; see `cost_s`."""
    facts: tuple[ResourceFacts | None, ...]
    """Resource facts of each program's machine code."""
    evidence: tuple[StoredMeasurement, ...]
    """The recorded measurements."""

    @property
    def best_us(self) -> float:
        """Time of the fastest program, in microseconds."""
        return float(self.times_us.min())

    def settled(self, measured: Sequence[int]) -> bool:
        """Whether no further measurement changes a score: `LONGEST` are made, and one of them is within 1% of the best."""
        return len(measured) >= LONGEST and self.times_us[list(measured)].min() <= 1.01 * self.best_us

    @cached_property
    def index(self) -> Mapping[Schedule, int]:
        """Schedule -> its index."""
        return {schedule: index for index, schedule in enumerate(self.schedules)}

    @cached_property
    def knobs(self) -> dict[str, tuple[KnobValue, ...]]:
        """The knobs that vary in this field, each with its recorded values in the space's order."""
        seen = {name: {schedule[name] for schedule in self.schedules} for name in self.space.knobs}
        return {
            name: tuple(choice for choice in self.space.knobs[name].choices if choice in values)
            for name, values in seen.items()
            if len(values) > 1
        }

    @cached_property
    def codes(self) -> NDArray[np.int64]:
        """The place of each schedule's value among each knob's values `[programs, knobs]`."""
        return np.array(
            [[choices.index(schedule[name]) for name, choices in self.knobs.items()] for schedule in self.schedules]
        )


class RecordedSpace(SearchSpace):
    """A search space that contains only the recorded schedules."""

    recorded: tuple[Schedule, ...]

    @classmethod
    def of(cls, space: SearchSpace, recorded: Sequence[Schedule]) -> RecordedSpace:
        """`space`, restricted to `recorded`."""
        cut = cls(**{name: getattr(space, name) for name in SearchSpace.__dataclass_fields__})
        object.__setattr__(cut, "recorded", tuple(recorded))
        return cut

    def schedules(
        self, problem: Problem, *, pinned: Mapping[str, KnobValue] | None = None, **more: Any
    ) -> Iterator[Schedule]:
        """The recorded schedules with the pinned values."""
        pins = dict(pinned or {})
        return (each for each in self.recorded if all(each[name] == value for name, value in pins.items()))


def read_field(path: Path) -> Field:
    """The field of one landscape file.

    Raises:
        DatabaseError: the file cannot be read or is wrong.
        ConfigError: it holds no measurements, or those of several problems, devices or regimes.
    """
    table = read_table(path)
    of = {(one.measurement.problem, one.measurement.device, one.measurement.regime) for one in table.measurements}
    if len(of) != 1:
        raise ConfigError(
            f"{path.name} holds {len(of)} landscapes and not one; give files written by: tiledsched record"
        )
    (problem, device, _), *_ = of
    space = space_for(device.arch, problem.declaration)
    by_schedule: dict[Schedule, StoredMeasurement] = {}
    for stored in table.measurements:
        by_schedule.setdefault(space.complete(stored.measurement.schedule), stored)
    order = {name: {choice: code for code, choice in enumerate(knob.choices)} for name, knob in space.knobs.items()}
    schedules = sorted(by_schedule, key=lambda schedule: [order[name].get(schedule[name], 99) for name in order])
    evidence = tuple(by_schedule[schedule] for schedule in schedules)
    facts = {artifact.fingerprint: artifact.facts for artifact in table.artifacts}
    return Field(
        name=path.name.removesuffix(".json.xz"),
        problem=problem,
        space=RecordedSpace.of(space, schedules),
        schedules=tuple(schedules),
        times_us=np.array([one.measurement.median_us for one in evidence]),
        device_s=np.array([cost_s(one) for one in evidence]),
        facts=tuple(facts.get(one.measurement.fingerprint) for one in evidence),
        evidence=evidence,
    )


def cost_s(stored: StoredMeasurement) -> float:
    """Device seconds that one measurement takes: a look, and unless that was hopeless, `SAMPLES` launches at the
    recorded pace.

    Recordings differ in the number of samples (leaders have more), so that number is not taken from them. The accuracy
    check and the reference are left out: they take the same time for every method's leaders.
    """
    taken: Any = stored.measurement
    look_us = taken.median_us
    if len(taken.samples_us) == 1:
        return look_us / 1e6
    return (look_us + SAMPLES * max(taken.median_us, taken.conditions.gap_ms * 1e3)) / 1e6
