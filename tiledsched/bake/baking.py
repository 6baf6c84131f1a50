"""From what a table says of a kernel to the tree, and to the source, that say the same."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from tiledsched.bake.text import clauses, conjunction, names_in, source
from tiledsched.bake.tree import NEVER, Tree, grow
from tiledsched.core.config import Settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.core.text import joined, plural
from tiledsched.report.sources import WithShipped
from tiledsched.serve.arch_table import MEASURED_PROVENANCES
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_entries, load_table
from tiledsched.store.db import TuningDB
from tiledsched.store.evidence import timed_alike
from tiledsched.store.location import database_exists

MOST_CANDIDATES, NEAR_BEST = 64, 0.01
"""So many schedules may become leaves where leaves are few: those that lose no more than this on the most problems."""
MODEL = 0.5
"""Share of the performance model's correction in the estimates. With all of it, which finds the best candidate, schedules of
products seem to lose three times what they do; with half of it, 1.6 times, and those of attention 0.6 times (docs/bake.md)."""
DOUBT = 0.05
"""What is added to the estimate for a schedule that no problem near by names: the lowest of many estimates is too low."""
ERROR = 0.12
"""Standard error of an estimate: 0.11 to 0.14 over 912 pairs of problem and schedule (`docs.studies.bake_bounds --estimates`)."""
ARRAY = re.compile(r"(\w+)\[([\dx]+)[^\]]*\]")
"""An array among the values of a remembered search: its type, its sizes, and maybe strides."""


@dataclass(frozen=True, kw_only=True)
class TableChoice:
    """A problem on an arch, and what schedules cost there."""

    problem: Problem
    """The problem."""
    arch: str
    """The arch, e.g. sm_90."""
    served: Served
    """What the table chooses."""
    measured: Mapping[Schedule, float]
    """The log of a schedule's time over that of the table's choice, where both were measured on this problem."""
    estimated: Mapping[Schedule, float]
    """The same by the estimate that serves untuned problems. Schedules that cannot run here are in neither."""

    def loss(self, schedule: Schedule) -> float:
        """What is known of a schedule, 0 or more."""
        same = schedule == self.served.schedule
        return 0.0 if same else max(0.0, self.measured.get(schedule, self.estimated.get(schedule, NEVER)))

    def risk(self, schedule: Schedule) -> float:
        """The loss to expect where an estimate is as wrong as estimates are; that of a measured schedule is known."""
        loss = self.loss(schedule)
        if schedule == self.served.schedule or schedule in self.measured or loss >= NEVER:
            return loss
        errors = statistics.NormalDist(0.0, ERROR)
        return loss * errors.cdf(loss) + ERROR**2 * errors.pdf(loss)

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
    kernel: KernelClass, archs: Sequence[str], problems: Sequence[Problem], settings: Settings, *, losses: bool
) -> list[TableChoice]:
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
    found: list[TableChoice] = []
    for arch in archs:
        entries, table = load_entries(settings, {arch}, kernel), load_table(settings, kernel=kernel, archs={arch})
        tuned = {each.problem for each in entries if each.arch == arch and each.provenance in MEASURED_PROVENANCES}
        served = {problem: table.resolve(problem, arch) for problem in problems or sorted(tuned)}
        if not served:
            raise ConfigError(f"nothing was measured of {kernel.name} on {arch}; tune it, or name problems with -p")
        near = {problem: table.nearby(problem, arch, model=MODEL) if losses else None for problem in served}
        known = {
            problem: dict(next((own for entry, own in (each.namers if each else ()) if entry.problem == problem), {}))
            for problem, each in near.items()
        }
        there = database_exists(settings.db)
        with TuningDB.open(settings.db, read_only=True) if there else TuningDB.open(":memory:") as db:
            both = WithShipped(db, kernel, arch, entries, set(served)) if losses else None
            for problem, rows in both.measurements_by_problem(arch, kernel) if both else ():
                known[problem] |= _measured_losses(served[problem], problem, rows)
        good = [
            {each.schedule, *(one for one, loss in known[of].items() if loss < NEAR_BEST)}
            for of, each in served.items()
        ]
        counts = Counter(one for some in good for one in sorted(some, key=lambda each: each.id))
        most, space = [one for one, _ in counts.most_common(MOST_CANDIDATES)], space_for(arch, kernel)
        for problem, each in served.items():
            judge, able = near[problem], [one for one in most if not space.unworkable(one, problem)]
            base = judge.mean_loss(each.schedule) if judge and not each.is_own else 0.0
            named = {one for _, some in (judge.namers if judge else ()) for one in some}
            estimated = {one: judge.mean_loss(one) - base + DOUBT * (one not in named) for one in able} if judge else {}
            measured = known[problem] if each.is_own else {}
            found.append(TableChoice(problem=problem, arch=arch, served=each, measured=measured, estimated=estimated))
    return found


def _measured_losses(served: Served, problem: Problem, rows: Sequence[Any]) -> dict[Schedule, float]:
    """What schedules lose that were timed as the choice was: on the same GPU, by its compiler and regime."""
    entry, times = served.entry, dict[Schedule, float]()
    if entry is None or entry.problem != problem:
        return {}
    for row in reversed(timed_alike(rows)):
        taken = row.measurement
        where = taken.device.name, taken.regime, row.toolchain.tileiras
        if where == (entry.device_name, entry.regime, entry.compiler):
            times[taken.schedule] = taken.median_us
    best = times.get(served.schedule)
    return {each: math.log(us / best) for each, us in times.items()} if best else {}


class Baking:
    """What is baked of a kernel.

    Args:
        kernel: the kernel.
        cases: the problems, with what schedules lose there.
        command: the words that bake it again.
        max_leaves: None for the table's choice in every case.

    Raises:
        ConfigError: so many leaves are too few.
    """

    def __init__(
        self, kernel: KernelClass, cases: Sequence[TableChoice], command: str, max_leaves: int | None = None
    ) -> None:
        self.kernel, self.cases, self._command, self._exact = kernel, cases, command, max_leaves is None
        self.archs = sorted({each.arch for each in cases})
        self.names = [each.names(with_arch=len(self.archs) > 1) for each in cases]
        """By an expression, what is known of each problem before a launch."""
        self.facts = names_in(*self.names[0])
        """The variables of these expressions."""
        served = {each.served.schedule for each in cases}
        others = {one for each in cases for one in each.estimated if not self._exact}
        self.schedules = sorted(served | others, key=lambda each: each.id)
        lost = [[each.risk(one) for one in self.schedules] for each in cases]
        wrong = [[float(one != each.served.schedule) for one in self.schedules] for each in cases]
        self.tree: Tree = grow(self.names, numpy.array(wrong if self._exact else lost), max_leaves)
        if self.tree.loss >= (1.0 if self._exact else NEVER):
            raise ConfigError(
                "some leaf has problems with no schedule in common, or that sizes and words do not tell apart; allow more "
                "leaves, or name fewer problems with -p"
            )
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kernel.name.rpartition(":")[2])
        self.name = re.sub(r"\W", "_", words).lower().strip("_")
        """What the names of the source begin with."""

    def losses(self, leaf: Tree) -> list[float]:
        """By how much longer each problem of a leaf takes than with the table's choice, as a share."""
        return [math.expm1(self.cases[row].loss(self.schedules[leaf.best])) for row in leaf.rows]

    @property
    def said(self) -> str:
        """How large it is and what it costs, in words."""
        leaves, counts = self.tree.leaves(), len(self.cases)
        different = plural(len({each.best for each in leaves}), "schedule")
        size = f"{plural(len(leaves), 'leaf', 'leaves')}, {different}, {plural(counts, 'problem')}"
        if self._exact:
            return f"{size}: for each of them what the table chooses"
        lost = [each for leaf in leaves for each in self.losses(leaf)]
        timed = sum(self.schedules[leaf.best] in self.cases[row].measured for leaf in leaves for row in leaf.rows)
        return (
            f"{size}. A problem takes {mean_of(lost):.1%} longer than with the table's choice (geometric mean), at worst "
            f"{max(lost):.1%}; {timed / counts:.0%} of these ratios are measured, the others estimated"
        )

    @functools.cached_property
    def _needs(self) -> dict[int, set[frozenset[str]]]:
        """What each schedule needs of a problem, as clauses."""
        found: dict[int, set[frozenset[str]]] = {leaf.best: set() for leaf in self.tree.leaves()}
        for best, arch in itertools.product(found, self.archs):
            space = space_for(arch, self.kernel)
            known = {**space.limits, **self.schedules[best]}
            found[best].update(*(clauses(ast.parse(each.require, mode="eval").body, known) for each in space.needed))
        return found

    @functools.cached_property
    def checked(self) -> dict[int, str]:
        """That part of it which a launch can check, as an expression."""
        found = {
            best: conjunction([each for each in needs if names_in(*each) <= self.facts])
            for best, needs in self._needs.items()
        }
        return {best: text for best, text in found.items() if text}

    @property
    def needed_facts(self) -> set[str]:
        """The facts of a problem on which the choice depends."""
        return names_in(*(each.question for each in self.tree.nodes()), *self.checked.values())

    def source(self, kernel: str = "") -> str:
        """The source by itself; see :func:`tiledsched.bake.text.source`."""
        own = [each.served.entry for each in self.cases if each.served.is_own]
        entries = [each for each in own if each and each.measurement]
        days = sorted(f"{each.measurement.created_at:%Y-%m-%d}" for each in entries if each.measurement)
        where = {f"{each.device_name} ({each.arch}), tileiras {each.compiler}, {each.regime}" for each in entries}
        when = " to ".join(sorted({*days[:1], *days[-1:]}))
        same = [
            f"{name}={value}"
            for name, value in self.names[0].items()
            if all(each[name] == value for each in self.names)
        ]
        unchecked = sum(not names_in(*each) <= self.facts for each in set().union(*self._needs.values()))
        comment = [
            self._command,
            f"Measured on {joined(sorted(where))}, {when}." if days else "Nothing was measured.",
            f"{len(entries)} of {plural(len(self.cases), 'problem')} were measured."
            if len(entries) < len(self.cases)
            else "",
            f"{self.said}.",
            f"All of these problems have {joined(same)}." if same else "",
            f"For other problems {plural(unchecked, 'condition')} of the kernel cannot be checked here."
            if unchecked
            else "",
            "Do not edit this: run the command again. With --check it says whether this is what the table says today.",
        ]
        return source(self.name, self.tree, self.schedules, self.checked, self.facts, comment, kernel)


def mean_of(shares: Sequence[float]) -> float:
    """The geometric mean of ratios, all given and returned as what they are above 1."""
    return math.expm1(sum(map(math.log1p, shares)) / len(shares))
