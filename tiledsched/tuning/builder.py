"""From schedules to distinct programs: build what is missing, reuse what was built before, merge what is the same.

Two schedules are the same program on a problem when their machine code has one fingerprint and they launch the same
grids. Only one of them is ever measured.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.build.compiler import DEFAULT_TIMEOUT_S, BuildTask
from tiledsched.build.cubin import Artifact
from tiledsched.build.pool import BuildPool
from tiledsched.build.store import ProgramStore
from tiledsched.build.toolchain import Toolchain
from tiledsched.core.device import ResourceFacts, arch_spec
from tiledsched.core.errors import CompilerError, Failure, FailureKind
from tiledsched.core.problem import KernelClass, Problem, ProblemClass
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.measure.runner import Candidate, Device, Failed, Measurement
from tiledsched.store.db import TuningDB
from tiledsched.store.records import BuildRecord

Key = tuple[str, tuple[tuple[int, int, int], ...]]
"""(fingerprint, grids): what makes a program distinct."""
RETRIED = (FailureKind.WORKER_KILLED, FailureKind.GPU_LOST, FailureKind.OUT_OF_MEMORY, FailureKind.OTHER_NUMBERS)
"""Failures by which no program is judged, because they have causes outside it, as what is served is: it is tried again."""
ALL_FAIL = 8
"""A run ends when this many builds have failed, all of them alike and none succeeded."""
Progress = Callable[[int, BuildRecord], None]
"""Called after each build with the number of builds done and the record of the last."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One distinct program and every schedule that turned out to be it."""

    fingerprint: str
    """Fingerprint of its machine code."""
    grids: tuple[tuple[int, int, int], ...]
    """Grid of each of its launches for the problem."""
    facts: ResourceFacts
    """Registers, shared memory and other resources that it takes."""
    schedules: tuple[Schedule, ...]
    """Equivalent schedules; the first is the representative."""

    @property
    def schedule(self) -> Schedule:
        """The schedule it is known by: the first of those that build to it."""
        return self.schedules[0]

    @property
    def key(self) -> Key:
        """Its fingerprint and grids, which no other program shares."""
        return self.fingerprint, self.grids


class Builder:
    """Builds schedules of one kernel for one arch, once ever per toolchain and kernel source."""

    def __init__(
        self,
        db: TuningDB,
        artifacts: ProgramStore,
        kernel: KernelClass,
        arch: str,
        toolchain: Toolchain,
        pool: BuildPool,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.db, self.artifacts, self.kernel, self.arch, self.toolchain = db, artifacts, kernel, arch, toolchain
        self.pool, self._timeout_s = pool, timeout_s
        self.source_hash, self.evidence_source = kernel.source_hash(), kernel.evidence_source()
        self._classes: dict[tuple[Problem, Schedule], ProblemClass] = {}
        known = db.find_builds(kernel.name, self.source_hash, toolchain, arch)
        self._builds = {key: record for key, record in known.items() if not self._of_the_day(record)}
        self._tried = {schedule for schedule, _ in self._builds}
        self._alike: Counter[Failure | None] = Counter()

    def _of_the_day(self, record: BuildRecord) -> bool:
        """Whether a failure of an earlier run may have had its cause outside the program, so that it is built again."""
        failed = record.failure
        return failed is not None and (
            failed.kind is FailureKind.COMPILER_KILLED
            or (failed.kind is FailureKind.COMPILE_TIMEOUT and record.seconds < self._timeout_s)
        )

    def problem_class(self, problem: Problem, schedule: Schedule) -> ProblemClass:
        """What of `problem` the machine code of `schedule` depends on."""
        from tiledsched.core.launches import problem_class

        key = problem, schedule
        if key not in self._classes:
            self._classes[key] = problem_class(self.kernel, problem, schedule, arch_spec(self.arch))
        return self._classes[key]

    def record(self, schedule: Schedule, problem: Problem) -> BuildRecord | None:
        """The record of building `schedule` for `problem`'s class; None where it was never tried."""
        if schedule.id not in self._tried:
            return None
        return self._builds.get((schedule.id, self.problem_class(problem, schedule).id))

    def fingerprint(self, schedule: Schedule, problem: Problem) -> str | None:
        """Fingerprint of the machine code that `schedule` has now; None where it was not built, or does not build."""
        record = self.record(schedule, problem)
        return record.fingerprint or None if record else None

    def built(self, problem: Problem, space: SearchSpace) -> list[Schedule]:
        """Every schedule of `space` known to build for `problem`'s class.

        What was built for another problem may not work for this one: its grid need not even be a number.
        """
        return [
            record.schedule
            for record in self._builds.values()
            if record.facts is not None
            and not space.unworkable(record.schedule, problem)
            and record.problem_class == self.problem_class(problem, record.schedule)
        ]

    def missing(self, schedules: Iterable[Schedule], problem: Problem) -> list[Schedule]:
        """The schedules that are not built yet, or whose machine code has gone from the disk; each once."""
        return [each for each in dict.fromkeys(schedules) if not self._usable(self.record(each, problem))]

    def _usable(self, record: BuildRecord | None) -> bool:
        return record is not None and (record.failure is not None or self.artifacts.has(self.arch, record.fingerprint))

    def build(
        self,
        schedules: Iterable[Schedule],
        problem: Problem,
        *,
        progress: Progress | None = None,
        deadline_s: float = math.inf,
        leave: int = 0,
        needed: Iterable[Schedule] = (),
    ) -> int:
        """Build for one problem what is missing; see `build_for_each`. After `deadline_s`, too, it goes on until the schedules
        that are `needed` are built.
        """
        wanted = [(schedule, problem) for schedule in schedules]
        lacking = {schedule.id for schedule in self.missing(needed, problem)}
        return self.build_for_each(wanted, progress=progress, deadline_s=deadline_s, leave=leave, lacking=lacking)

    def build_for_each(
        self,
        wanted: Iterable[tuple[Schedule, Problem]],
        *,
        progress: Progress | None = None,
        deadline_s: float = math.inf,
        leave: int = 0,
        lacking: Collection[str] = (),
    ) -> int:
        """Build what is missing; each outcome is stored as it is known. Returns how many were compiled.

        After `deadline_s` (`time.monotonic()`) the rest is left for the next run, once the schedules are built whose ids are in
        `lacking`. With `leave`, up to that many may go on being built; a later call stores them.

        Raises:
            CompilerError: all builds fail alike, with another error than the compiler's: the schedules are not the cause.
        """
        missing = {
            (schedule.id, self.problem_class(problem, schedule).id): (schedule, problem)
            for schedule, problem in wanted
            if not self._usable(self.record(schedule, problem))
        }
        tasks = [
            BuildTask(
                kernel=self.kernel.locator(),
                schedule=schedule,
                problem=problem,
                arch=self.arch,
                timeout_s=self._timeout_s,
            )
            for schedule, problem in missing.values()
        ]
        count, lacking = 0, set(lacking)
        for count, built in enumerate(self.pool.build(tasks, leave=leave), start=1):
            outcome: Artifact | Failure | None = built.artifact or built.failure
            assert outcome is not None
            if isinstance(outcome, Artifact):
                self.artifacts.put(outcome)  # the file first: a row must never point at nothing
            record = BuildRecord.of(
                outcome,
                kernel=self.kernel.name,
                source_hash=self.source_hash,
                toolchain=self.toolchain,
                arch=self.arch,
                schedule=built.task.schedule,
                problem_class=self.problem_class(built.task.problem, built.task.schedule),
                seconds=built.seconds,
            )
            self.db.record_builds([record])
            self._builds[record.key] = record
            self._tried.add(record.key[0])
            if progress:
                progress(count, record)
            self._stop_where_all_fail_alike(record)
            lacking.discard(built.task.schedule.id)
            if not lacking and time.monotonic() > deadline_s:
                break
        return count

    def _stop_where_all_fail_alike(self, record: BuildRecord) -> None:
        self._alike[record.failure] += 1
        failure, times = next(iter(self._alike.items()))
        if failure is None or failure.kind is FailureKind.COMPILE_ERROR:
            return  # what the compiler itself says of every schedule is said where no schedule is left
        if len(self._alike) == 1 and times >= ALL_FAIL:
            raise CompilerError(
                f"the first {ALL_FAIL} programs all failed to build, and alike: {failure.kind}: "
                f"{failure.message}; nothing was replaced. Look after that and run again: tiledsched doctor "
                "checks the compiler, TMPDIR must be a folder with space, --compile-timeout says how long a "
                "compile may take"
            )

    def programs(self, schedules: Sequence[Schedule], problem: Problem, device: Any) -> list[Program]:
        """The distinct programs among built schedules, in the order of their first schedule."""
        found: dict[Key, Program] = {}
        for schedule in schedules:
            record = self.record(schedule, problem)
            if record is None or record.facts is None:
                continue
            grids = self.kernel.grids(problem, schedule, device)
            known = found.get((record.fingerprint, grids))
            members = (*known.schedules, schedule) if known else (schedule,)
            found[record.fingerprint, grids] = Program(
                fingerprint=record.fingerprint, grids=grids, facts=record.facts, schedules=members
            )
        return list(found.values())

    def candidates(self, programs: Iterable[Program]) -> list[Candidate]:
        """Programs with their machine code read back; one whose file is damaged is left out and built next time."""
        candidates = []
        for program in programs:
            artifact = self.artifacts.get(self.arch, program.fingerprint)
            if artifact is not None:
                candidates.append(Candidate(schedule=program.schedule, artifact=artifact))
        return candidates

    def broken(self, problem: Problem, device_name: str) -> list[tuple[Schedule, str]]:
        """Schedules and fingerprints of what failed on a device, the latest first.

        Failures that say more of the day than of the program (a lost GPU, a killed worker, memory taken by others, other numbers
        than those served then) do not count: such programs are tried again.
        """
        return [
            (failed.schedule, failed.fingerprint)
            for failed in self.db.failures(self.arch, problem, stage="measure")
            if failed.device_name == device_name and failed.failure.kind not in RETRIED
        ]

    def keep(self, outcome: Measurement | Failed, run_id: int, problem: Problem, device: Device) -> int | None:
        """Store the measurement or failure of one program; the number of the measurement, None for a failure."""
        if isinstance(outcome, Measurement):
            noted = self.evidence_source or self.source_hash
            return self.db.record_measurement(run_id, self.kernel.name, noted, self.toolchain, outcome)
        self.db.record_failure(
            run_id,
            self.kernel.name,
            self.arch,
            "measure",
            outcome.schedule,
            outcome.failure,
            problem=problem,
            fingerprint=outcome.fingerprint,
            device=device,
        )
        return None


def deadlines(budget_s: float | None, count: int) -> Iterator[float]:
    """For each of `count` problems in turn, the `time.monotonic()` by which it should be done; infinite without a budget.

    What is left when a problem begins is shared evenly by it and those after it.
    """
    ends = math.inf if budget_s is None else time.monotonic() + budget_s
    for left in range(count, 0, -1):
        now = time.monotonic()
        yield now + max(0.0, ends - now) / left
