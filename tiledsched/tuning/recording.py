"""A tune over recorded landscapes: nothing is compiled and nothing is measured, so that anybody can rehearse one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tiledsched.build.compiler import BuildTask, Built
from tiledsched.build.cubin import Artifact
from tiledsched.build.pool import BuildPool
from tiledsched.build.store import ProgramStore
from tiledsched.core.device import ResourceFacts
from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.space_files import chosen_space, space_for
from tiledsched.measure.replay import ReplayRunner
from tiledsched.store.exchange import read_table
from tiledsched.tuning.resources import Tools

NOT_RECORDED = "not recorded"
"""Why a schedule does not build."""


class ReplayedPrograms(ProgramStore):
    """Programs of which only the facts are known."""

    def __init__(self, facts: Mapping[str, ResourceFacts]) -> None:
        self._facts = facts

    def put(self, artifact: Artifact) -> None:
        """Do nothing: all of them are here."""

    def has(self, arch: str, fingerprint: str) -> bool:
        """Whether the program was recorded."""
        return fingerprint in self._facts

    def get(self, arch: str, fingerprint: str) -> Artifact:
        """The program, without machine code."""
        return Artifact(arch=arch, fingerprint=fingerprint, facts=self._facts[fingerprint], cubin=b"")


class Recording(BuildPool):
    """What landscapes hold of one kernel on one GPU. It builds what was recorded, and nothing else.

    Args:
        files: landscape files.

    Raises:
        ConfigError: they hold nothing, or not of one kernel and GPU.
        DatabaseError: one cannot be read.
    """

    def __init__(self, files: Sequence[str]) -> None:
        super().__init__(1)
        tables = [read_table(Path(file)) for file in files]
        stored = [each for table in tables for each in table.measurements]
        if len({(each.measurement.device, each.measurement.problem.kernel) for each in stored}) != 1:
            raise ConfigError("a replay needs recorded landscapes of one kernel on one GPU; give other files")
        first = stored[0].measurement
        self.kernel, self.arch, self.device_name = first.problem.declaration, first.device.arch, first.device.name
        self.toolchain = stored[0].toolchain
        complete = space_for(self.arch, self.kernel).complete  # recorded before the youngest knobs
        self.measurements = [replace(each.measurement, schedule=complete(each.measurement.schedule)) for each in stored]
        self.day = max(f"{each.created_at:%Y-%m-%d}" for each in stored)
        """The day of the last measurement."""
        self.problems = list(dict.fromkeys(each.problem for each in self.measurements))
        programs = [each for table in tables for each in table.artifacts]
        self.programs = ReplayedPrograms({each.fingerprint: each.facts for each in programs if each.facts is not None})
        self._fingerprints = {(each.problem, each.schedule): each.fingerprint for each in self.measurements}

    @property
    def tools(self) -> Tools:
        """What a session works with, in place of a compiler and a GPU: it searches what was recorded."""
        recorded = list(dict.fromkeys(each.schedule for each in self.measurements))
        device = replace(self.measurements[0].device, name=f"replay of {self.device_name}")
        measured = [replace(each, device=device) for each in self.measurements]
        return Tools(
            toolchain=lambda: self.toolchain,
            artifacts=lambda folder: self.programs,
            pool=lambda jobs: self,
            devices=lambda: [device],
            lacking=lambda: "",
            runner=lambda kernel, seed: ReplayRunner(kernel, measured, seed=seed),
            rivals=lambda kernel, runner, regime: None,
            space=lambda arch, kernel, file: chosen_space(arch, kernel, file).limited_to(recorded),
        )

    def start(self) -> None:
        """Do nothing: there is nothing to compile."""

    def build(self, tasks: Iterable[BuildTask], *, leave: int = 0) -> Iterator[Built]:
        """What was recorded of each schedule; of one that was not, a failure."""
        for task in tasks:
            found = self._fingerprints.get((task.problem, task.schedule), "")
            recorded = self.programs.has(task.arch, found)
            artifact = self.programs.get(task.arch, found) if recorded else None
            failure = None if recorded else Failure(kind=FailureKind.COMPILE_ERROR, message=NOT_RECORDED)
            yield Built(task=task, artifact=artifact, failure=failure, seconds=0.0)
