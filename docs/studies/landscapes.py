"""Reads recorded landscapes: their distinct programs with resource facts, measured times and modelled times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tiledsched.core.device import ResourceFacts, arch_spec
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.measure.runner import Measurement
from tiledsched.store.exchange import read_table

Grids = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class MeasuredProgram:
    """One distinct program: machine code and launch grid."""

    schedule: Schedule
    """A schedule that builds to it."""
    fingerprint: str
    """Fingerprint of its machine code."""
    grids: Grids
    """Blocks of each launch."""
    facts: ResourceFacts
    """Resources that the machine code takes."""
    median_us: float
    """Measured time; where it was measured more than once, the median of the medians."""
    checked: bool
    """Whether its output was compared with the reference. Programs that were not checked are far from the best."""


@dataclass(frozen=True)  # compared by identity: a landscape is large
class Landscape:
    """All programs of one problem on one device in one regime."""

    problem: Problem
    """The problem."""
    arch: str
    """The device's arch."""
    regime: str
    """burst or sustained."""
    programs: tuple[MeasuredProgram, ...]
    """The programs, in the order of the file."""

    @cached_property
    def measured_us(self) -> NDArray[np.float64]:
        """Measured time of each program, in microseconds."""
        return np.array([program.median_us for program in self.programs])

    @cached_property
    def modelled_us(self) -> NDArray[np.float64]:
        """Estimate of the static model for each program, in microseconds."""
        spec, kernel = arch_spec(self.arch), self.problem.declaration
        return np.array([kernel.cost.model(self.problem, p.schedule, p.facts, spec) for p in self.programs])

    @property
    def best_us(self) -> float:
        """Time of the fastest checked program, in microseconds."""
        return min(program.median_us for program in self.programs if program.checked)


GIVES_AWAY = ("dtype", "batch", "heads", "kv_heads", "alignment", "value_dim", "lse")
"""Fields in which a problem may differ from a held-out one and still reveal its winner."""


def shape_of(problem: Problem) -> tuple[object, ...]:
    """What two problems have in common if one reveals the other's winner: for attention the lengths, head dimension and
    mask.
    """
    return problem.kernel, *(value for name, value in problem.values.items() if name not in GIVES_AWAY)


def read_landscape(path: str | os.PathLike[str]) -> Landscape:
    """The landscape in a file that `tiledsched record` or `tiledsched db export` wrote.

    Raises:
        DatabaseError: the file cannot be read or is wrong.
        ConfigError: it holds no measurements, or measurements of more than one problem, device or regime.
    """
    table = read_table(path)
    facts = {artifact.fingerprint: artifact.facts for artifact in table.artifacts}
    measurements = [stored.measurement for stored in table.measurements]
    kinds = {(one.problem, one.device.name, one.regime) for one in measurements}
    if len(kinds) != 1:
        raise ConfigError(
            f"{os.fspath(path)} holds {len(kinds)} landscapes; give a file with the programs of one problem"
        )
    return landscape_of(measurements, facts)


def landscape_of(measurements: Sequence[Measurement], facts: dict[str, ResourceFacts | None]) -> Landscape:
    """The landscape that measurements of one problem, device and regime make. Programs without resource facts are left
    out.
    """
    first = measurements[0]
    kernel = first.problem.declaration
    spec, space = arch_spec(first.device.arch), space_for(first.device.arch, kernel)
    times: dict[tuple[str, Grids], list[Measurement]] = {}
    for one in measurements:
        if facts.get(one.fingerprint) is not None:
            grids = kernel.grids(one.problem, space.complete(one.schedule), spec)
            times.setdefault((one.fingerprint, grids), []).append(one)
    programs = []
    for (fingerprint, grids), same in times.items():
        known = facts[fingerprint]
        assert known is not None
        programs.append(
            MeasuredProgram(
                schedule=space.complete(same[0].schedule),
                fingerprint=fingerprint,
                grids=grids,
                facts=known,
                median_us=float(np.median([one.median_us for one in same])),
                checked=any(one.accuracy is not None for one in same),
            )
        )
    return Landscape(problem=first.problem, arch=spec.arch, regime=first.regime, programs=tuple(programs))
