"""What is baked: problems, what the table chooses for each, and what other schedules would lose there."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.core.config import Settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.report.sources import WithShipped
from tiledsched.serve.arch_table import MEASURED_PROVENANCES
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_entries, load_table
from tiledsched.store.db import TuningDB
from tiledsched.store.evidence import timed_alike
from tiledsched.store.location import database_exists
from tiledsched.store.records import StoredMeasurement

MOST_CANDIDATES = 64
"""Schedules that may become leaves where leaves are few: those that are chosen, or lose little, on the most problems."""
NEAR_BEST = 0.01
"""So much is little."""
ARRAY = re.compile(r"(\w+)\[([\dx]+)[^\]]*\]")
"""An array among the values of a remembered search: its type, its sizes, and maybe strides."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem on an arch, and what schedules cost there."""

    problem: Problem
    """The problem."""
    arch: str
    """The arch, e.g. sm_90."""
    served: Served
    """What the table chooses."""
    losses: Mapping[Schedule, float]
    """The log of a schedule's time over that of the table's choice. Schedules that cannot run here are missing."""
    measured: frozenset[Schedule]
    """Those of them that were timed on this problem; what the others lose is estimated."""

    def names(self, *, with_arch: bool) -> dict[str, Any]:
        """By an expression of a launch, what it is here: numbers, flags and words."""
        found: dict[str, Any] = {"arch": self.arch} if with_arch else {}
        for name, value in self.problem.values.items():
            array = ARRAY.fullmatch(value) if self.problem.declaration.is_called and isinstance(value, str) else None
            if array:
                found[f"str({name}.dtype)[6:]"] = array[1]
                found |= {f"{name}.shape[{axis}]": int(size) for axis, size in enumerate(array[2].split("x"))}
            elif isinstance(value, (bool, int, str)) and name != "call":
                found[name] = value
        return found


def choices(
    kernel: KernelClass, archs: Iterable[str], problems: Sequence[Problem], settings: Settings, *, losses: bool
) -> list[Case]:
    """What the table chooses on each arch, for all problems that were measured there or for those named.

    Args:
        kernel: the kernel.
        archs: the archs.
        problems: the problems; none for all that were measured.
        settings: where entries are read.
        losses: whether it matters what other schedules lose.

    Raises:
        ConfigError: no problem is named, and none was measured.
    """
    found: list[Case] = []
    for arch in archs:
        entries, table = load_entries(settings, {arch}, kernel), load_table(settings, kernel=kernel, archs={arch})
        measured = {each.problem for each in entries if each.arch == arch and each.provenance in MEASURED_PROVENANCES}
        served = {problem: table.resolve(problem, arch) for problem in problems or sorted(measured)}
        if not served:
            raise ConfigError(
                f"nothing was measured of {kernel.name} on {arch}; tune it first, or name problems with -p or --suite"
            )
        space, known = space_for(arch, kernel), {problem: _of_entry(problem, each) for problem, each in served.items()}
        there = database_exists(settings.db)
        if losses:
            with TuningDB.open(settings.db, read_only=True) if there else TuningDB.open(":memory:") as db:
                _add_times(
                    known,
                    served,
                    WithShipped(db, kernel, arch, entries, set(served)).measurements_by_problem(arch, kernel),
                )
        near_best = (one for mine in known.values() for one, loss in mine.items() if loss < NEAR_BEST)
        most = Counter(near_best).most_common(MOST_CANDIDATES)
        for problem, each in served.items():
            near = table.nearby(problem, arch) if losses else None
            base = near.mean_loss(each.schedule) if near and not each.is_own else 0.0
            able = [one for one, _ in most if near and not space.unworkable(one, problem)]
            estimated = {one: max(0.0, near.mean_loss(one) - base) for one in able if near}
            mine = known[problem]
            case = Case(
                problem=problem,
                arch=arch,
                served=each,
                losses={**estimated, **mine},
                measured=frozenset(mine if each.is_own else ()),
            )
            found.append(case)
    return found


def _of_entry(problem: Problem, served: Served) -> dict[Schedule, float]:
    """What is known of schedules beside the choice by its entry."""
    entry, found = served.entry, {served.schedule: 0.0}
    if entry is not None and (entry.problem, entry.schedule) == (problem, served.schedule):
        found |= dict.fromkeys(entry.ties, 0.0)
        if entry.runner_up is not None:
            found.setdefault(entry.runner_up, math.log1p(max(0.0, entry.margin or 0.0)))
    return found


def _add_times(
    known: Mapping[Problem, dict[Schedule, float]],
    served: Mapping[Problem, Served],
    measured: Iterable[tuple[Problem, Sequence[StoredMeasurement]]],
) -> None:
    """Add the schedules that were timed as the choice for a problem was: on the same GPU, by its compiler and regime."""
    for problem, rows in measured:
        entry = served[problem].entry if problem in served else None
        if entry is not None and entry.problem == problem:
            where = (entry.device_name, entry.regime, entry.compiler)
            like = [
                each
                for each in timed_alike(rows)
                if (each.measurement.device.name, each.measurement.regime, each.toolchain.tileiras) == where
            ]
            times = {each.measurement.schedule: each.measurement.median_us for each in reversed(like)}
            chosen = times.get(served[problem].schedule)
            known[problem].update({each: math.log(us / chosen) for each, us in times.items()} if chosen else {})
