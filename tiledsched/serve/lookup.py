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

A kernel that has the search space of another one, such as attention with functions of its author's own, is served by what was
measured or modelled of that one until it is tuned: as by measurements of other problems, never as by one of its own.

The kernel declares what a kind is. The model predicts a problem better than winners of another kind do.

An entry that was measured with another compiler is served and called stale: this compiler may make other machine code of the
schedule, which takes another time. Without a compiler it is stale where bundles hold programs, but not the one measured.

Of choices that were not measured the first is served whose program is not known to spill registers, nor to fail to build
(:mod:`tiledsched.store.spills`). Nothing that a launch finds changes a choice, so that all processes make the same one.

A problem that was not measured in the requested regime or accuracy class is served by its measurement in another regime, or in
the exact class, and the reason says so. A less exact class never takes the place of the exact one. Calls that a CUDA graph
captures are looked up in a table of their own, in which the times of replayed graphs come first.

Where `numerics` is "invariant", the bits of a row must not depend on how many rows there are. Then the schedule of the next
larger batch is served, of one group that was proven to have equal bits. Where the problem was never tuned so, one schedule serves
every batch: the one for a size that the kernel declares. Neither rule lets the batch choose between other bits.
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiledsched.core.config import EXACT as EXACT_CLASS, INVARIANT
from tiledsched.core.device import SAME_CODE
from tiledsched.core.errors import SpaceError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.measure.runner import GRAPHS
from tiledsched.serve.arch_table import ArchTable
from tiledsched.serve.chain import (
    AT_LAST,
    EXACT,
    GUESSES,
    INVARIANT_LAST,
    SHARED,
    InOneOrder,
    LinkStep,
    Question,
    Served,
    find,
    refined,
)
from tiledsched.serve.transfer import Nearby, lent, nearby
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
        entries: every entry that may be served; those of other kernels are ignored, but of the kernel whose space this one has.
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
        self._invariant = bool(options.get("accum_mode") == INVARIANT and kernel.batch_dims)
        if options.get("accum_mode") == INVARIANT:  # a kernel without batch dims is served as usual
            options |= {"accum_mode": EXACT_CLASS}
        self.regime: str = options.get("regime", "burst")
        """The requested regime."""
        self._spaces = {space.arch: space for space in spaces}
        self._seen_mhz = clocks_of(entries, near.seen_mhz if near else {})
        self._by_arch: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            mine = entry if entry.kernel == kernel.name else lent(entry, kernel)
            if mine is not None:
                self._by_arch[entry.arch].append(mine)
        self._tables: dict[str, ArchTable] = {}
        self._answers: dict[tuple[Problem, str, str], Served] = {}

    @property
    def schedule_class(self) -> str:
        """What entries must be of to be served: an accuracy class, or `invariant`."""
        return INVARIANT if self._invariant else str(self._options.get("accum_mode", EXACT_CLASS))

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
        of_arch = copy.copy(self._of_arch(arch))
        of_arch.spills = joined(of_arch.spills, spills)
        return self._with(_tables=self._tables | {arch: of_arch})

    def without(self, problem: Problem, arch: str) -> LookupTable:
        """This table, as if neither the problem nor another one that is the same work were measured, and nothing in graphs."""
        tables = self._tables | {arch: self._around(problem, arch).without(problem)}
        return self._with(_tables=tables, _near=None, _of_graphs=None)

    def _with(self, **changes: Any) -> LookupTable:
        """This table with other attributes; answers are found anew."""
        other = copy.copy(self)
        vars(other).pop("_of_graphs", None)
        vars(other).update(changes, _answers={})
        return other

    def resolve_captured(self, problem: Problem, arch: str, device_name: str = "") -> Served | None:
        """What serves calls that a CUDA graph captures, by the times of replayed graphs; None where :meth:`resolve` says it. The
        arguments and errors are those of `resolve`."""
        served = self._of_graphs.resolve(problem, arch, device_name) if self._of_graphs else None
        return served if served and served.entry and served.entry.regime in GRAPHS else None

    @functools.cached_property
    def _of_graphs(self) -> LookupTable | None:
        """This table, with the times of replayed graphs before others; None where it holds none, and where the bits of a row must
        be the same in eager and in captured calls.
        """
        if self._invariant:
            return None
        known = any(entry.regime in GRAPHS for entries in self._by_arch.values() for entry in entries)
        return (
            self._with(_options=self._options | {"regime": GRAPHS[0]}, regime=GRAPHS[0], _tables={})
            if known or (self._near and self._near.in_graphs)
            else None
        )

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
        if self._invariant:
            return self._in_one_order(problem, arch, device_name)
        return refined(AT_LAST, *self._found(problem, arch, device_name))

    def _found(self, problem: Problem, arch: str, device_name: str) -> tuple[Question, Served]:
        """The question that a problem asks, and the answer before the last links."""
        question = Question(problem=problem, table=self._around(problem, arch, alone=True), device_name=device_name)
        served = find(EXACT, question)
        if self._near and (served is None or self._near.raced):
            question.table = self._around(problem, arch)
            served = find(EXACT, question)
        served = served or self._shared(question) or find(GUESSES, question, NOT_MEASURED)
        assert served is not None, "there always is a default"
        return question, served

    def _in_one_order(self, problem: Problem, arch: str, device_name: str) -> Served:
        """What is served where the bits of a row must not depend on the batch: what was proven, or else one schedule for all."""
        question = Question(problem=problem, table=self._of_arch(arch), device_name=device_name)
        served = InOneOrder()(question)
        if served is None:
            stands_for = self.kernel.representative(problem)
            served = self._found(stands_for, arch, device_name)[1]
            said = f"one schedule for every batch, as for {stands_for}, not proven by digests; tune with --numerics invariant: "
            step = LinkStep(link=InOneOrder.__name__, said=said, leads=True)
            schedule = self.kernel.ordered(stands_for, served.schedule)
            served = served.then(step, schedule=schedule, alternatives=(), rivals=(), is_own=False)
        return refined(INVARIANT_LAST, question, served)

    def nearby(self, problem: Problem, arch: str, **parameters: float) -> Nearby | None:
        """What was measured on an arch near a problem, and on it, says about schedules for it; None where that is nothing.

        Args:
            problem: what is to be computed.
            arch: e.g. sm_90.
            parameters: numbers of :class:`~tiledsched.serve.transfer.TransferParameters` in place of the table's own.
        """
        table = self._around(problem, arch)
        policy, spec = replace(table.policy, **parameters), table.spec  # type: ignore[arg-type]
        return nearby(problem, table.alike(problem), table.space, spec, policy) if spec else None

    def fallback_for(self, served: Served, problem: Problem, arch: str) -> Served | None:
        """What is served in place of a schedule that does not compile for the layouts of a call: its next alternative, and after
        the last one the default. None where the default failed, or the schedule is forced.
        """
        if self._invariant:  # another schedule would have other bits
            return None
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
