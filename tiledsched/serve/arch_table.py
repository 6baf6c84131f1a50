"""What is known of one kernel on one arch, arranged so that the links of the lookup's chain find it quickly."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiledsched.build.toolchain import takes_hints
from tiledsched.core.device import ARCHS, arch_spec
from tiledsched.core.errors import SpaceError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace, accuracy_class
from tiledsched.serve.forecast import TimedProblems, timed_problems
from tiledsched.serve.transfer import NEAR_KIND, TransferParameters, log_us
from tiledsched.store.evidence import precedence
from tiledsched.store.records import Entry
from tiledsched.store.spills import Spills

MEASURED_PROVENANCES = ("measured", "transferred")
"""Provenances of entries that were measured on some device."""


@dataclass(frozen=True, kw_only=True)
class LookupOptions:
    """What decides, beside the entries of a table, what is served."""

    regime: str = "burst"
    """The requested regime, burst or sustained."""
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
    spills: Callable[[str], Spills] = lambda arch: {}
    """Gives what is known, for an arch, of programs that spill registers or do not build."""
    policy: TransferParameters = NEAR_KIND
    """How problems that were not measured are served from others of their kind."""

    def mismatch(self, entry: Entry) -> int:
        """0 for an entry of the requested regime and accuracy class, and more the worse it is in place of such an entry."""
        return (entry.regime not in ("", self.regime)) + 2 * (entry.accum_mode != self.accum_mode)


class ArchTable:
    """The entries of one kernel that may be served on one arch, and what else is known there.

    Args:
        kernel: the kernel.
        space: its search space on the arch.
        entries: of the arch, and of one whose machine code is the same. Those that the installed compiler cannot build are left
            out, and schedules are completed with the space's defaults.
        seen_mhz: by the name of each GPU, the highest clock at which something was measured.
        options: what else decides.
    """

    def __init__(
        self,
        kernel: KernelClass,
        space: SearchSpace,
        entries: Iterable[Entry],
        seen_mhz: Mapping[str, int],
        options: LookupOptions,
    ) -> None:
        self.kernel, self.space, self.seen_mhz, self.options = kernel, space, seen_mhz, options
        self.arch = space.arch
        self.spec = arch_spec(self.arch) if self.arch in ARCHS else None
        self.modelled: list[Entry] = []
        """Entries that no device measured."""
        self.measured: list[Entry] = []
        """All other entries."""
        self._by_problem: dict[Problem, list[Entry]] = defaultdict(list)
        self._by_kind: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
        self._gated: dict[Schedule, list[Problem]] = defaultdict(list)
        for entry in entries:
            if takes_hints(options.compiler, entry.schedule):
                second = entry.runner_up
                usable = second if second is not None and takes_hints(options.compiler, second) else None
                self._add(entry.replace(schedule=space.complete(entry.schedule), runner_up=usable))

    def _add(self, entry: Entry) -> None:
        if entry.provenance not in MEASURED_PROVENANCES:
            self.modelled.append(entry)
            return
        self.measured.append(entry)
        self._by_problem[entry.problem].append(entry)
        self._by_kind[entry.problem.declaration.similarity.kind(entry.problem)].append(entry)
        if entry.measurement is not None and entry.measurement.accuracy is not None:
            for schedule in dict.fromkeys((entry.schedule, *entry.ties)):
                self._gated[schedule].append(entry.problem)

    def measured_for(self, problem: Problem, device_name: str) -> Entry | None:
        """What was measured for this very problem, on the device of this name if possible; None where nothing was."""
        entries = self._by_problem.get(problem, ())
        return min(
            (entry for entry in entries if not self.space.unworkable(entry.schedule, problem)),
            key=lambda entry: (entry.device_name != device_name, *precedence(entry, self.seen_mhz), entry.device_name),
            default=None,
        )

    def alike(self, problem: Problem) -> Sequence[Entry]:
        """The entries that were measured for problems of the same kind."""
        return self._by_kind.get(self.kernel.similarity.kind(problem), ())

    def gated(self, schedule: Schedule) -> tuple[Problem, ...]:
        """The problems on which the accuracy gate passed a schedule."""
        return tuple(self._gated.get(schedule, ()))

    def default(self, problem: Problem) -> Schedule:
        """The default schedule, in the requested accuracy class where the problem has it (bfloat16 has no fp16 accumulators)."""
        try:
            return self.space.default(problem, pinned=accuracy_class(self.space, self.options.accum_mode))
        except SpaceError:
            return self.space.default(problem)

    @functools.cached_property
    def spills(self) -> Spills:
        """What is known of programs that spill registers or do not build."""
        return self.options.spills(self.arch)

    @functools.cached_property
    def timed(self) -> TimedProblems | None:
        """The problems on which rivals were timed; None where no such times ship."""
        return timed_problems(self.kernel, self.arch, self.measured, lambda p: self.modelled_us(p, self.default(p)))

    def modelled_us(self, problem: Problem, schedule: Schedule) -> float:
        """What the performance model gives, on an arch that it knows."""
        assert self.spec is not None
        return math.exp(log_us(problem, schedule, self.spec))

    def where(self, entry: Entry) -> str:
        """Where an entry was measured, in words."""
        where = entry.device_name or entry.arch
        return where if entry.arch == self.arch else f"{where} ({entry.arch}, whose machine code is the same)"

    def stale(self, entry: Entry) -> str:
        """Why machine code made here may be another than what was measured; empty where it is the same, or that is not known."""
        compiler = self.options.compiler
        if entry.provenance != "measured" or entry.compiler in ("", compiler):
            return ""
        at_hand = self.options.at_hand()
        if entry.fingerprint in at_hand:
            return ""
        if compiler:
            return (
                f"tileiras {entry.compiler} built what was measured, and here is {compiler}: its machine code may be "
                f"another, and its time, too; run: tiledsched refresh {self.kernel.name} --arch {entry.arch}"
            )
        if not entry.fingerprint or not at_hand:  # unknown, or nothing runs, and a call says so
            return ""
        return (
            "no bundle here holds the machine code that was measured, and there is no compiler: another program of this "
            "schedule may be served, which takes another time; make the bundle again: tiledsched warmup -o FILE"
        )
