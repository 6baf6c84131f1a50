"""Compile processes and a store of machine code in one, for a `Builder` that compiles nothing."""

from __future__ import annotations

from tiledsched.build.compiler import Built
from tiledsched.build.cubin import Artifact
from tiledsched.core.errors import Failure
from tiledsched.core.schedule import Schedule


class FakeBuilds:
    """`outcome` says what becomes of a schedule; all machine code is at hand."""

    jobs = 4

    def __init__(self) -> None:
        self.schedules: list[Schedule] = []
        """What was compiled, in that order."""
        self.started = 0

    @property
    def compiled(self) -> int:
        return len(self.schedules)

    def outcome(self, schedule: Schedule) -> Artifact | Failure:
        raise NotImplementedError

    def build(self, tasks, *, leave=0):
        for task in tasks:
            self.schedules.append(task.schedule)
            made = self.outcome(task.schedule)
            artifact, failure = (None, made) if isinstance(made, Failure) else (made, None)
            yield Built(task=task, artifact=artifact, failure=failure, seconds=1.0)

    def start(self) -> None:
        self.started += 1

    def has(self, arch, fingerprint) -> bool:
        return True

    def put(self, artifact) -> None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...
