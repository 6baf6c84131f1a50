"""What is known of one kernel on one arch, arranged so that the links of the lookup's chain find it quickly."""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tiledsched.build.toolchain import takes_hints
from tiledsched.core.config import EXACT, INVARIANT
from tiledsched.core.device import ARCHS, arch_spec
from tiledsched.core.errors import SpaceError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import command_word
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace, accuracy_class
from tiledsched.measure.runner import GRAPHS, LAUNCHED, REGIMES
from tiledsched.rivals.forecast import TimedProblems, timed_problems
from tiledsched.serve.transfer import NEAR_KIND, TransferParameters, distance_of, log_us
from tiledsched.store.evidence import for_compiler, precedence
from tiledsched.store.records import Entry
from tiledsched.store.spills import Spills

MEASURED_PROVENANCES = ("measured", "transferred")
"""Provenances of entries that were measured on some device."""


@dataclass(kw_only=True, eq=False)
class ArchTable:
    """The entries of one kernel that may be served on one arch, what else is known there, and the requests of settings."""

    kernel: KernelClass
    """The kernel."""
    space: SearchSpace
    """Its search space on the arch."""
    entries: Iterable[Entry]
    """All entries of the arch, and of one whose machine code is the same."""
    seen_mhz: Mapping[str, int]
    """By the name of each GPU, the highest clock at which something was measured."""
    regime: str = "burst"
    """The requested regime: burst, sustained, graph or graph-cold."""
    accum_mode: str = "fp32"
    """The requested accuracy class."""
    forced: Mapping[str, KnobValue] = field(default_factory=dict)
    """Values of knobs that settings force."""
    rivals: bool = False
    """Whether faster rivals may be served."""
    compiler: str = ""
    """Version of the installed compiler; empty where none is installed."""
    at_hand: Callable[[], Collection[str]] = frozenset
    """Gives the fingerprints of machine code that needs no compiler; called for entries of another compiler, or where none is
    installed."""
    spills_of: Callable[[str], Spills] = lambda arch: {}
    """Gives what is known, for an arch, of programs that spill registers or do not build."""
    policy: TransferParameters = NEAR_KIND
    """How problems that were not measured are served from others of their kind."""

    base: ArchTable | None = None
    """The table over which this one lies; see :meth:`over`."""

    def __post_init__(self) -> None:
        self.arch = self.space.arch
        self.spec = arch_spec(self.arch) if self.arch in ARCHS else None
        self.invariant = [each for each in self.entries if each.accum_mode == INVARIANT and each.group]
        """Entries of schedules whose bits do not depend on the batch, each in its group."""
        self.modelled: list[Entry] = []
        """Entries that no device measured."""
        self.measured: list[Entry] = []
        """All other entries."""
        self.problems: set[Problem] = set()
        """The problems of all entries."""
        self._by_problem: dict[Problem, list[Entry]] = defaultdict(list)
        self._by_kind: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
        self._gated: dict[Schedule, list[Problem]] = defaultdict(list)
        for entry in self._usable():
            self.problems.add(entry.problem)
            if entry.provenance not in MEASURED_PROVENANCES:
                self.modelled.append(entry)
                continue
            self.measured.append(entry)
            self._by_problem[entry.problem].append(entry)
            self._by_kind[entry.problem.declaration.similarity.kind(entry.problem)].append(entry)
            own = entry.kernel == self.kernel.name  # another kernel's machine code is other code
            if own and entry.measurement is not None and entry.measurement.accuracy is not None:
                for schedule in dict.fromkeys((entry.schedule, *entry.ties)):
                    self._gated[schedule].append(entry.problem)

    def _usable(self) -> Iterator[Entry]:
        """The entries that the installed compiler can build, with complete schedules: those of the requested regime and accuracy
        class, and for each problem and device where nothing was measured in these, what is nearest to them: to a regime of graphs
        the other one."""
        others = (*GRAPHS, *LAUNCHED) if self.regime in GRAPHS else REGIMES
        order = list(dict.fromkeys((self.regime, *others)))

        def mismatch(entry: Entry) -> int:
            apart = order.index(entry.regime) if entry.regime else 0
            return apart + len(order) * (entry.accum_mode != self.accum_mode)

        mine = [
            each for each in for_compiler(self.entries, self.compiler) if each.accum_mode in (self.accum_mode, EXACT)
        ]
        covered = set()
        for entry in sorted(mine, key=lambda entry: (entry.arch != self.arch, mismatch(entry))):
            place, measured = (entry.arch, entry.problem, entry.device_name), entry.provenance in MEASURED_PROVENANCES
            if mismatch(entry) and not (measured and place not in covered):
                continue
            if measured:
                covered.add(place)
            if not takes_hints(self.compiler, entry.schedule):
                continue
            ours, second = entry.arch == self.arch, entry.runner_up
            changed: dict[str, Any] = {} if ours else {"provenance": "transferred"}
            if second is not None and not takes_hints(self.compiler, second):
                changed["runner_up"] = None
            if (whole := self.space.complete(entry.schedule)) != entry.schedule:
                changed["schedule"] = whole
            if ours or measured:
                yield entry.replace(**changed) if changed else entry

    def measured_for(self, problem: Problem, device_name: str) -> Entry | None:
        """What was measured for this very problem, on the device of this name if possible; None where nothing was."""
        entries = self._by_problem.get(problem, ())
        return min(
            (entry for entry in entries if not self.space.unworkable(entry.schedule, problem)),
            key=lambda entry: (entry.device_name != device_name, *precedence(entry, self.seen_mhz), entry.device_name),
            default=None,
        )

    def without(self, problem: Problem) -> ArchTable:
        """This table, as if neither the problem nor another one that is the same work had been measured."""
        similarity, spills = self.kernel.similarity, self.spills
        kind = similarity.kind(problem)
        equal = {problem} | {entry.problem for entry in self.alike(problem) if distance_of(entry, problem) == 0}
        other = copy.copy(self)
        other.spills, other.problems = spills, (self.problems - equal) | {entry.problem for entry in self.modelled}
        other.measured = [entry for entry in self.measured if entry.problem not in equal]
        other._by_kind = self._by_kind | {kind: [entry for entry in self.alike(problem) if entry.problem not in equal]}
        other._by_problem = {each: of for each, of in self._by_problem.items() if each not in equal}
        return other

    def over(self, entries: Sequence[Entry]) -> ArchTable:
        """This table with other entries for the problems of these."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        other = ArchTable(**{**own, "entries": entries, "base": self})
        there = {entry.problem for entry in entries}
        other.problems |= self.problems - there
        other.modelled += [entry for entry in self.modelled if entry.problem not in there]
        other.measured += [entry for entry in self.measured if entry.problem not in there]
        other._by_problem = {**self._by_problem, **{each: [] for each in there}, **other._by_problem}
        for kind, alike in self._by_kind.items():
            other._by_kind[kind] += [entry for entry in alike if entry.problem not in there]
        for schedule, problems in self._gated.items():
            other._gated[schedule] += problems
        return other

    def alike(self, problem: Problem) -> Sequence[Entry]:
        """The entries that were measured for problems of the same kind."""
        return self._by_kind.get(self.kernel.similarity.kind(problem), ())

    def gated(self, schedule: Schedule) -> tuple[Problem, ...]:
        """The problems on which the accuracy gate passed a schedule."""
        return tuple(self._gated.get(schedule, ()))

    def default(self, problem: Problem) -> Schedule:
        """The default schedule, in the requested accuracy class where the problem has it (bfloat16 has no fp16 accumulators)."""
        try:
            return self.space.default(problem, pinned=accuracy_class(self.space, self.accum_mode))
        except SpaceError:
            return self.space.default(problem)

    @functools.cached_property
    def spills(self) -> Spills:
        """What is known of programs that spill registers or do not build."""
        return self.base.spills if self.base else self.spills_of(self.arch)

    @functools.cached_property
    def timed(self) -> TimedProblems | None:
        """The problems on which rivals were timed; None where no such times are known."""
        if self.base and not any(entry.rivals for entry in self.entries):
            return self.base.timed
        return timed_problems(self.kernel, self.arch, self.measured, self.modelled_us) if self.spec else None

    def modelled_us(self, problem: Problem, schedule: Schedule | None = None) -> float:
        """What the performance model gives, on an arch that it knows; for the default schedule where none is named."""
        assert self.spec is not None
        return math.exp(log_us(problem, schedule or self.default(problem), self.spec))

    def where(self, entry: Entry) -> str:
        """Where an entry was measured, in words."""
        where = entry.device_name or entry.arch
        return where if entry.arch == self.arch else f"{where} ({entry.arch}, whose machine code is the same)"

    def stale(self, entry: Entry) -> str:
        """Why machine code made here may be another than what was measured; empty where it is the same, or that is not known."""
        if entry.provenance != "measured" or entry.compiler in ("", self.compiler):
            return ""
        at_hand = self.at_hand()
        if entry.fingerprint in at_hand:
            return ""
        if self.compiler:
            return (
                f"tileiras {entry.compiler} built what was measured, and here is {self.compiler}: its machine code may be "
                f"another, and its time, too; run: tiledsched refresh {command_word(self.kernel)} --arch {entry.arch}"
            )
        if not entry.fingerprint or not at_hand:  # unknown, or nothing runs, and a call says so
            return ""
        return (
            "no bundle here holds the machine code that was measured, and there is no compiler: another program of this "
            "schedule may be served, which takes another time; make the bundle again: tiledsched warmup -o FILE"
        )
