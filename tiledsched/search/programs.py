"""From schedules to distinct programs: build what is missing, reuse what is not, merge what is the same.

Two schedules are the same program on a problem when their machine code has one fingerprint and they launch the same
grid. Only one of them is ever measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tiledsched.build.artifacts import ArtifactStore
from tiledsched.build.compiler import DEFAULT_TIMEOUT_S, BuildTask
from tiledsched.build.cubin import Artifact, ResourceFacts
from tiledsched.build.pool import BuildPool
from tiledsched.build.toolchain import Toolchain
from tiledsched.errors import Failure
from tiledsched.kernels.template import KernelTemplate
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule
from tiledsched.store.db import TuningDB
from tiledsched.store.records import BuildRecord

Progress = Callable[[int, int], None]
"""Called with (done, total) after each build."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One distinct program and every schedule that turned out to be it."""

    fingerprint: str
    """Its machine code."""
    grid: tuple[int, int, int]
    """Its launch on the problem at hand."""
    facts: ResourceFacts
    """Resources it takes."""
    schedules: tuple[Schedule, ...]
    """Equivalent schedules; the first is the representative."""

    @property
    def schedule(self) -> Schedule:
        """The schedule it is known by: the one closest to what was asked first."""
        return self.schedules[0]

    @property
    def key(self) -> tuple[str, tuple[int, int, int]]:
        """What makes it distinct."""
        return self.fingerprint, self.grid


class Workshop:
    """Builds schedules of one kernel for one arch, once ever per toolchain and template source."""

    def __init__(self, db: TuningDB, artifacts: ArtifactStore, template: KernelTemplate, arch: str,
                 toolchain: Toolchain, pool: BuildPool, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:  # fmt: skip
        self.db, self.artifacts, self.template, self.arch, self.toolchain = db, artifacts, template, arch, toolchain
        self._pool, self._timeout_s = pool, timeout_s
        self._source_hash = template.source_hash
        self._builds: dict[tuple[str, str], BuildRecord] = dict(
            db.find_builds(template.name, self._source_hash, toolchain, arch)
        )

    def record(self, schedule: Schedule, problem: Problem) -> BuildRecord | None:
        """What is known of building `schedule` for `problem`'s class; None where it was never tried."""
        return self._builds.get((schedule.id, self.template.problem_class(schedule, problem).id))

    def built(self, problem: Problem) -> list[Schedule]:
        """Every schedule known to build for `problem`'s class."""
        return [record.schedule for record in self._builds.values()
                if record.facts is not None
                and record.problem_class == self.template.problem_class(record.schedule, problem)]  # fmt: skip

    def missing(self, schedules: Iterable[Schedule], problem: Problem) -> list[Schedule]:
        """Those not built yet, or whose artifact has gone from the disk; each once."""
        return [each for each in dict.fromkeys(schedules) if not self._usable(self.record(each, problem))]

    def _usable(self, record: BuildRecord | None) -> bool:
        if record is None:
            return False
        return record.failure is not None or self.artifacts.has(self.arch, record.fingerprint)

    def build(self, schedules: Iterable[Schedule], problem: Problem, *, progress: Progress | None = None,
              deadline_s: float | None = None) -> int:  # fmt: skip
        """Build what is missing; each outcome is stored as it is known. Returns how many were compiled.

        After `deadline_s` (`time.monotonic()`) the rest is left for the next run.
        """
        tasks = [BuildTask(kernel=self.template.name, schedule=schedule, problem=problem, arch=self.arch,
                           timeout_s=self._timeout_s) for schedule in self.missing(schedules, problem)]  # fmt: skip
        count = 0
        for count, built in enumerate(self._pool.build(tasks), start=1):
            outcome: Artifact | Failure | None = built.artifact or built.failure
            assert outcome is not None
            if isinstance(outcome, Artifact):
                self.artifacts.put(outcome)  # the file first: a row must never point at nothing
            record = BuildRecord.of(outcome, kernel=self.template.name, source_hash=self._source_hash,
                                    toolchain=self.toolchain, arch=self.arch, schedule=built.task.schedule,
                                    problem_class=self.template.problem_class(built.task.schedule, problem),
                                    seconds=built.seconds)  # fmt: skip
            self.db.record_build(record)
            self._builds[record.key] = record
            if progress:
                progress(count, len(tasks))
            if deadline_s is not None and time.monotonic() > deadline_s:
                break
        return count

    def programs(self, schedules: Sequence[Schedule], problem: Problem, sm_count: int) -> list[Program]:
        """The distinct programs among built schedules, in the order of their first schedule."""
        found: dict[tuple[str, tuple[int, int, int]], Program] = {}
        for schedule in schedules:
            record = self.record(schedule, problem)
            if record is None or record.facts is None:
                continue
            grid = self.template.grid(schedule, problem, sm_count)
            known = found.get((record.fingerprint, grid))
            members = (*known.schedules, schedule) if known else (schedule,)
            found[record.fingerprint, grid] = Program(fingerprint=record.fingerprint, grid=grid, facts=record.facts,
                                                      schedules=members)  # fmt: skip
        return list(found.values())
