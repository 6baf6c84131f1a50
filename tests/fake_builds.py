"""Compile processes and a store of machine code in one, for tests that need machine code to have a name but nothing to run it."""

from __future__ import annotations

from store_samples import artifact

from tiledsched.build.compiler import Built
from tiledsched.build.cubin import Artifact
from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import Failure
from tiledsched.core.schedule import Schedule


def print_of(schedule: Schedule) -> str:
    """The fingerprint of a schedule's made-up machine code."""
    return stable_id(schedule.to_json(), 24)


class FakeBuilds:
    """`outcome` says what becomes of a schedule: a program of its own, unless a test says otherwise. All machine code is at hand."""

    jobs = 4

    def __init__(self) -> None:
        self.schedules: list[Schedule] = []
        """What was compiled, in that order."""
        self.changed: set[Schedule] = set()
        """Schedules with other machine code than before."""
        self.started = 0

    @property
    def compiled(self) -> int:
        return len(self.schedules)

    def outcome(self, schedule: Schedule) -> Artifact | Failure:
        return artifact("0" * 24 if schedule in self.changed else print_of(schedule))

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

    def get(self, arch, fingerprint) -> Artifact:
        return artifact(fingerprint)

    def __enter__(self):
        return self

    def put(self, *given) -> None: ...

    ready = cancel = close = __exit__ = put
