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

MOST_CANDIDATES = 64
"""Schedules that may become leaves where leaves are few: those that win or tie on the most problems."""
NEAR_TIE = 0.01
"""The loss at which a schedule counts half as much for that as a winner."""
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
        entries = load_entries(settings, {arch}, kernel)
        mine = {each.problem for each in entries if each.arch == arch and each.provenance in MEASURED_PROVENANCES}
        wanted = list(problems) or sorted(mine)
        if not wanted:
            raise ConfigError(
                f"nothing was measured of {kernel.name} on {arch}; tune it first, or name problems with -p or --suite"
            )
        table = load_table(settings, kernel=kernel, archs={arch})
        served = {problem: table.resolve(problem, arch) for problem in wanted}
        with (
            TuningDB.open(settings.db, read_only=True)
            if database_exists(settings.db)
            else TuningDB.open(":memory:") as db
        ):
            shipped = WithShipped(db, kernel, arch, entries, set(wanted))
            timed = _timed(kernel, arch, served, shipped) if losses else {}
        known = {problem: _known(problem, served[problem], timed.get(problem, {})) for problem in wanted}
        most = Counter[Schedule]()
        for each in known.values():
            most.update({schedule: 2 ** (-loss / NEAR_TIE) for schedule, loss in each.items()})  # type: ignore[dict-item]
        candidates = sorted(most, key=lambda each: (-most[each], each.id))[:MOST_CANDIDATES] if losses else []
        for problem in wanted:
            near, space = table.nearby(problem, arch) if losses else None, space_for(arch, kernel)
            chosen = served[problem].schedule
            base = near.mean_loss(chosen) if near and not served[problem].is_own else 0.0
            estimated = {
                each: max(0.0, near.mean_loss(each) - base)
                for each in (candidates if near else ())
                if not space.unworkable(each, problem)
            }
            lost = {**estimated, **known[problem]}
            measured = frozenset(known[problem]) if served[problem].is_own else frozenset()
            found.append(Case(problem=problem, arch=arch, served=served[problem], losses=lost, measured=measured))
    return found


def _known(problem: Problem, served: Served, timed: Mapping[Schedule, float]) -> dict[Schedule, float]:
    """What is known of schedules for a problem: by the measurements beside that of the choice, and by its entry."""
    chosen, entry = served.schedule, served.entry
    found = {chosen: 0.0}
    if served.is_own and entry is not None and entry.problem == problem and entry.schedule == chosen:
        found = {each: 0.0 for each in (chosen, *entry.ties)}
        if entry.runner_up is not None:
            found.setdefault(entry.runner_up, math.log1p(max(0.0, entry.margin or 0.0)))
        if chosen in timed:
            found |= {each: math.log(us / timed[chosen]) for each, us in timed.items()}
    return found


def _timed(
    kernel: KernelClass, arch: str, served: Mapping[Problem, Served], db: WithShipped
) -> dict[Problem, dict[Schedule, float]]:
    """The times in microseconds that were measured like that of each choice: on the same GPU, by its compiler and regime."""
    found: dict[Problem, dict[Schedule, float]] = {}
    for problem, rows in db.measurements_by_problem(arch, kernel):
        entry = served[problem].entry if problem in served else None
        for row in timed_alike(rows) if entry is not None else ():
            taken = row.measurement
            if (taken.device.name, taken.regime, row.toolchain.tileiras) == (
                entry.device_name,
                entry.regime,
                entry.compiler,
            ):
                found.setdefault(problem, {}).setdefault(taken.schedule, taken.median_us)
    return found
