"""Where the programs of an ablation come from: the compiler, or a recorded landscape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiledsched.build.cubin import Artifact
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.measure.runner import Candidate, Measurement
from tiledsched.store.exchange import TableFile
from tiledsched.tuning.builder import Builder

NOT_RECORDED = "not recorded"


class CompiledPrograms:
    """Builds programs with the compiler; needs no GPU. What was built before is not built again."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def find(self, schedules: Sequence[Schedule], problem: Problem) -> dict[Schedule, Candidate | str]:
        """For each schedule a program that the runner can time, or why there is none."""
        self._builder.build(schedules, problem)
        return {schedule: self._program(schedule, problem) for schedule in schedules}

    def _program(self, schedule: Schedule, problem: Problem) -> Candidate | str:
        record = self._builder.record(schedule, problem)
        if record is None or record.failure is not None:
            return said(record.failure) if record else "not built"
        artifact = self._builder.artifacts.get(self._builder.arch, record.fingerprint)
        damaged = f"{FailureKind.ARTIFACT_CORRUPT}: run again to build it anew"
        return damaged if artifact is None else Candidate(schedule=schedule, artifact=artifact)


class RecordedPrograms:
    """Finds programs in a landscape file. Nothing is built.

    Args:
        table: the file's contents; measurements of one problem, device and regime.
        space: names the knobs that the record lacks.

    Raises:
        MeasureError: it holds no measurement.
    """

    def __init__(self, table: TableFile, space: SearchSpace) -> None:
        if not table.measurements:
            raise MeasureError("a replay needs a recorded landscape, and the file holds no measurement; choose another")
        measured = [stored.measurement for stored in table.measurements]
        self.measurements = [replace(one, schedule=space.complete(one.schedule)) for one in measured]
        self.problem, self.regime = measured[0].problem, measured[0].regime
        self._facts = {artifact.fingerprint: artifact.facts for artifact in table.artifacts}
        self._by_schedule = {one.schedule: one for one in self.measurements}

    @property
    def best(self) -> Measurement:
        """The fastest measurement whose output was checked.

        Raises:
            MeasureError: nothing was checked.
        """
        checked = [one for one in self.measurements if one.accuracy is not None]
        if not checked:
            raise MeasureError(f"no program of {self.problem} passed the accuracy check; record it again")
        return min(checked, key=lambda one: (one.median_us, one.schedule.id))

    def holds(self, schedule: Schedule) -> bool:
        """Whether the schedule is recorded."""
        return schedule in self._by_schedule

    def find(self, schedules: Sequence[Schedule], problem: Problem) -> dict[Schedule, Candidate | str]:
        """For each schedule a program that the runner can time, or why there is none."""
        return {schedule: self._program(schedule, problem) for schedule in schedules}

    def _program(self, schedule: Schedule, problem: Problem) -> Candidate | str:
        one = self._by_schedule.get(schedule) if problem == self.problem else None
        facts = self._facts.get(one.fingerprint) if one else None
        if one is None or facts is None:
            return NOT_RECORDED
        artifact = Artifact(arch=one.device.arch, fingerprint=one.fingerprint, facts=facts, cubin=b"")
        return Candidate(schedule=schedule, artifact=artifact)


def said(found: object) -> str:
    """A failure as the status of a row; empty for what is none."""
    return f"{found.kind}: {found.message}" if isinstance(found, Failure) else ""
