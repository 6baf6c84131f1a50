"""Which schedule is served for a problem, and why.

The first of these that exists is served:

1. the schedule that was measured for this very problem on this device;
2. the one measured for it on another device of the same arch, or of one whose machine code is the same;
3. the one measured for a problem of its bucket: of about its lengths, and equal in all else;
4. a schedule that won on the nearest measured problems of the same kind (see `tiledsched.serve.transfer`), if one of them is in
   the neighbourhood or nearer than what the performance model chose for;
5. the entry that the performance model chose for this problem or the nearest one of its kind;
6. a schedule that won on problems of the same kind, however far, or else of other kinds;
7. the kernel's own choice where nothing was measured, else its default.

The kernel declares what a kind is. The model predicts a problem better than winners of another kind do.

An entry that was measured with another compiler is served and called stale: this compiler may make other machine code of the
schedule, which takes another time. Without a compiler it is stale where bundles hold programs, but not the one measured.

Of choices that were not measured the first is served whose program is not known to spill registers, nor to fail to build
(:mod:`tiledsched.store.spills`). Nothing that a launch finds changes a choice, so that all processes make the same one.

A problem that was not measured in the requested regime or accuracy class is served by its measurement in the other regime, or in
the exact class, and the reason says so. A less exact class never takes the place of the exact one.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiledsched.core.device import SAME_CODE
from tiledsched.core.errors import SpaceError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.serve.arch_table import ArchTable
from tiledsched.serve.chain import AT_LAST, EXACT, GUESSES, SHARED, LinkStep, Question, Served, find, refined
from tiledsched.serve.transfer import Nearby, nearby
from tiledsched.store.evidence import clocks_of
from tiledsched.store.records import Entry
from tiledsched.store.spills import Spills, joined

NOT_MEASURED = (LinkStep(link="Exact"),)
"""The way of a problem that was not measured so far."""
MAX_ANSWERS = 4096
"""Answers for problems that were not measured which a table remembers."""


class LookupTable:
    """The entries of one kernel, ready for lookup. A table never changes: load a new one to see new entries.

    Args:
        entries: every entry that may be served; those of other kernels are ignored.
        kernel: the kernel.
        spaces: search spaces to use in place of the kernel's own.
        near: gives those near a problem of further entries (:class:`tiledsched.serve.entries.Near`).
        options: what else decides, by the names of the fields of :class:`ArchTable`.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        kernel: KernelClass,
        *,
        spaces: Sequence[SearchSpace] = (),
        near: Any = None,
        **options: Any,
    ) -> None:
        self.kernel, self._options, self._near = kernel, options, near
        self._spaces = {space.arch: space for space in spaces}
        self._seen_mhz = clocks_of(entries, near.seen_mhz if near else {})
        self._by_arch: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.kernel == kernel.name:
                self._by_arch[entry.arch].append(entry)
        self._tables: dict[str, ArchTable] = {}
        self._answers: dict[tuple[Problem, str, str], Served] = {}

    def device_names(self, arch: str) -> list[str]:
        """The GPUs of an arch on which something was measured."""
        names = {entry.device_name for entry in self._by_arch.get(arch, ()) if entry.device_name}
        return sorted(names | (self._near.device_names(arch) if self._near else set()))

    def known_arch(self, arch: str) -> bool:
        """Whether the kernel has a search space for `arch`."""
        try:
            self._of_arch(arch)
        except SpaceError:
            return False
        return True

    def knowing(self, arch: str, spills: Spills) -> LookupTable:
        """This table, with more known of programs of an arch that spill registers or do not build."""
        other, of_arch = copy.copy(self), copy.copy(self._of_arch(arch))
        of_arch.spills = joined(of_arch.spills, spills)
        other._tables, other._answers = self._tables | {arch: of_arch}, {}
        return other

    def without(self, problem: Problem, arch: str) -> LookupTable:
        """This table, as if neither the problem nor another one that is the same work had been measured."""
        other = copy.copy(self)
        other._tables, other._answers = self._tables | {arch: self._around(problem, arch).without(problem)}, {}
        other._near = None
        return other

    def spills(self, arch: str) -> Spills:
        """What is known of programs of an arch that spill registers or do not build."""
        return joined(self._of_arch(arch).spills)

    def resolve(self, problem: Problem, arch: str, device_name: str = "") -> Served:
        """What is served for a problem.

        Args:
            problem: what is to be computed.
            arch: of the device.
            device_name: the driver's name for the device; empty where only the arch is known.

        Raises:
            SpaceError: the arch has no search space.
            ConfigError: a forced knob makes the schedule invalid.
        """
        question = Question(problem=problem, table=self._around(problem, arch, alone=True), device_name=device_name)
        served = find(EXACT, question)
        if self._near and (served is None or self._near.raced):
            question.table = self._around(problem, arch)
            served = find(EXACT, question)
        served = served or self._shared(question) or find(GUESSES, question, NOT_MEASURED)
        assert served is not None, "there always is a default"
        return refined(AT_LAST, question, served)

    def nearby(self, problem: Problem, arch: str) -> Nearby | None:
        """What was measured on an arch near a problem, and on it, says about schedules for it; None where that is nothing."""
        table = self._around(problem, arch)
        spec = table.spec
        return nearby(problem, table.alike(problem), table.space, spec, table.policy) if spec else None

    def fallback_for(self, served: Served, problem: Problem, arch: str) -> Served | None:
        """What is served in place of a schedule that does not compile for the layouts of a call: its next alternative, and after
        the last one the default. None where the default failed, or the schedule is forced.
        """
        refused, laid = served.schedule.short(), "does not compile for arrays laid out like these"
        if served.alternatives:
            following, *rest = served.alternatives
            step = LinkStep(link="NextChoice", said=f"{refused} {laid}; the next choice: ", leads=True)
            steps = (*(each for each in served.steps if each.link != step.link), step)
            return replace(served, schedule=following, alternatives=tuple(rest), steps=steps)
        default = self._of_arch(arch).default(problem)
        if served.forced or served.schedule == default:
            return None
        step = LinkStep(link="Default", said=f"{refused} ({served.provenance}) {laid}")
        return Served(schedule=default, provenance="default", steps=(step,))

    def _shared(self, question: Question) -> Served | None:
        """The answer that all problems of about this size share; None where its schedule is not valid for this one.

        A problem that has entries has an answer of its own, which rests on them.
        """
        if question.problem in question.table.problems:
            return find(SHARED, question, NOT_MEASURED)
        about = self.kernel.similarity.bucketed(question.problem)
        key = (about, question.table.arch, question.device_name)
        if key not in self._answers:
            if len(self._answers) >= MAX_ANSWERS:
                self._answers.clear()
            of_all = find(SHARED, replace(question, problem=about, shared=True), NOT_MEASURED)
            assert of_all is not None
            self._answers[key] = of_all
        served = self._answers[key]
        return None if question.table.space.unworkable(served.schedule, question.problem) else served

    def _around(self, problem: Problem, arch: str, *, alone: bool = False) -> ArchTable:
        """What is known on an arch, with the further entries near a problem, or only its own."""
        table = self._of_arch(arch)
        if self._near is None:
            return table
        found = self._near.entries(problem, same_code(arch), alone=alone)
        return table.over(found) if found else table

    def _of_arch(self, arch: str) -> ArchTable:
        """What is known on an arch.

        Raises:
            SpaceError: it has no search space.
        """
        if arch not in self._tables:
            self._tables[arch] = ArchTable(
                kernel=self.kernel,
                space=self._spaces.get(arch) or space_for(arch, self.kernel),
                entries=[each for of in same_code(arch) for each in self._by_arch.get(of, ())],
                seen_mhz=self._seen_mhz,
                **self._options,
            )
        return self._tables[arch]


def same_code(arch: str) -> tuple[str, ...]:
    """An arch, and the one whose machine code it runs as well."""
    return (arch, SAME_CODE[arch]) if arch in SAME_CODE else (arch,)
