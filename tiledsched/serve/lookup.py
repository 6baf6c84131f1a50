"""Which schedule is served for a problem, and why.

In order: this device's measurement, another device's of the same arch, the nearest measured problem, the model's choice
for the problem, the model's for the nearest, the default. Problems are near only within one kind (causal or not, one
padded head dimension, one accuracy class): a winner of another kind says little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tiledsched.errors import ConfigError, SpaceError
from tiledsched.problem import Problem
from tiledsched.schedule import KnobValue, Schedule
from tiledsched.space import SearchSpace, space_for
from tiledsched.store.records import EntryRecord


@dataclass(frozen=True, kw_only=True)
class Served:
    """The answer for one problem."""

    schedule: Schedule
    """What is launched."""
    provenance: str
    """measured, transferred, modelled, default, or forced (by settings)."""
    reason: str
    """One sentence for people."""
    entry: EntryRecord | None
    """The evidence; None for the default."""
    forced: Mapping[str, KnobValue]
    """Knobs that settings changed."""


class Table:
    """Entries of one kernel, ready for lookup. Immutable: load a new one to see new entries."""

    def __init__(self, entries: Sequence[EntryRecord], *, kernel: str = "attention", regime: str = "burst",
                 accum_mode: str = "fp32", forced: Mapping[str, KnobValue] | None = None) -> None:  # fmt: skip
        self.kernel, self.regime, self.accum_mode = kernel, regime, accum_mode
        self.forced = dict(forced or {})
        self._by_arch: dict[str, list[EntryRecord]] = {}
        for entry in entries:
            if entry.kernel == kernel and entry.accum_mode == accum_mode and entry.regime in ("", regime):
                self._by_arch.setdefault(entry.arch, []).append(entry)
        self._spaces: dict[str, SearchSpace] = {}

    @property
    def archs(self) -> list[str]:
        """Archs that have entries."""
        return sorted(self._by_arch)

    def resolve(self, problem: Problem, arch: str, device_name: str = "") -> Served:
        """What is served for `problem` on a device of `arch`.

        Raises:
            SpaceError: the arch has no search space.
            ConfigError: a forced knob makes the schedule invalid.
        """
        space = self._space(arch)
        served = self._from_entries(problem, arch, device_name, space)
        if served is None:
            served = Served(schedule=self._default(space, problem), provenance="default", entry=None, forced={},
                            reason=f"nothing is known about {arch} for this kind of problem")  # fmt: skip
        return self._with_forced(served, problem, space) if self.forced else served

    def _default(self, space: SearchSpace, problem: Problem) -> Schedule:
        """In the accuracy class asked for, where the problem has it (bfloat16 has no fp16 accumulators)."""
        try:
            return space.default(problem, pinned={"accum_mode": self.accum_mode})
        except SpaceError:
            return space.default(problem)

    def _from_entries(self, problem: Problem, arch: str, device_name: str, space: SearchSpace) -> Served | None:
        kind = [replace(entry, schedule=space.complete(entry.schedule)) for entry in self._by_arch.get(arch, [])
                if _kind(entry.problem) == _kind(problem)]  # fmt: skip
        for provenances in (("measured", "transferred"), ("modelled", "default")):
            ranked = sorted((entry for entry in kind if entry.provenance in provenances),
                            key=lambda entry: (_distance(entry.problem, problem), entry.device_name != device_name,
                                               entry.rank, entry.problem, entry.device_name))  # fmt: skip
            for entry in ranked:
                if not space.violations(entry.schedule, problem):
                    return _served(entry, problem, device_name)
        return None

    def _with_forced(self, served: Served, problem: Problem, space: SearchSpace) -> Served:
        schedule = served.schedule.replace(**self.forced)
        for name, value in self.forced.items():
            if name not in space.knobs:
                raise ConfigError(f"forced knob {name!r} is not in {space.source}; known are {', '.join(space.knobs)}")
            choices = space.knobs[name].choices
            # Numbers may leave the list: a researcher may try a tile nobody thought of. Words may not.
            known = value in choices if isinstance(value, str) else any(type(each) is type(value) for each in choices)
            if not known:
                raise ConfigError(f"forced knob {name} = {value!r}; allowed on {space.arch}: {list(choices)}")
        # A researcher may leave the listed choices and the paths explored, but not what the constraints say cannot work.
        values = space.constraint_values(problem) | dict(schedule)
        broken = [f"{c.require} ({c.because})" for c in space.constraints
                  if not c.exploring and not c.holds(values)]  # fmt: skip
        if broken:
            raise ConfigError(
                f"forced knobs {self.forced} cannot work for {problem} on {space.arch}: {'; '.join(broken)}"
            )
        return Served(schedule=schedule, provenance="forced", entry=served.entry, forced=self.forced,
                      reason=f"settings force {self.forced}; without them: {served.reason}")  # fmt: skip

    def _space(self, arch: str) -> SearchSpace:
        if arch not in self._spaces:
            self._spaces[arch] = space_for(arch, kernel=self.kernel)
        return self._spaces[arch]

    def known_arch(self, arch: str) -> bool:
        """Whether the kernel has a search space for `arch`."""
        try:
            self._space(arch)
        except SpaceError:
            return False
        return True


def _served(entry: EntryRecord, problem: Problem, device_name: str) -> Served:
    same_problem = entry.problem == problem
    if entry.provenance == "measured" and same_problem and entry.device_name == device_name:
        return Served(schedule=entry.schedule, provenance="measured", entry=entry, forced={},
                      reason="this problem was measured on this device")  # fmt: skip
    if entry.provenance == "measured" and same_problem and not device_name:
        return Served(schedule=entry.schedule, provenance="measured", entry=entry, forced={},
                      reason=f"this problem was measured on {entry.device_name}")  # fmt: skip
    if entry.provenance in ("measured", "transferred"):
        what = "this problem" if same_problem else f"the nearest problem ({entry.problem})"
        return Served(schedule=entry.schedule, provenance="transferred", entry=entry, forced={},
                      reason=f"{what} was measured on {entry.device_name or entry.arch}")  # fmt: skip
    what = "this problem" if same_problem else f"the nearest problem ({entry.problem})"
    return Served(schedule=entry.schedule, provenance=entry.provenance, entry=entry, forced={},
                  reason=f"nothing was measured; the entry for {what} is the model's choice")  # fmt: skip


def _kind(problem: Problem) -> tuple[bool, int]:
    return problem.causal, problem.tile_d


def _distance(a: Problem, b: Problem) -> float:
    """How unlike two problems of one kind are: octaves of sequence length, and half as much for everything else.

    Work per block follows the key length, the number of blocks follows rows and heads; dtype and grouping matter least.
    """
    octaves = abs(math.log2(a.seq_k / b.seq_k)) + 0.5 * abs(math.log2(a.seq_q / b.seq_q))
    blocks = abs(math.log2(a.batch * a.heads / (b.batch * b.heads)))
    other = 0.1 * (a.dtype != b.dtype) + 0.1 * (a.group != b.group) + 0.3 * (a.head_dim != b.head_dim)
    return octaves + 0.5 * blocks + other
