"""A compiler whose programs are made up, for tests that need machine code to have a name but nothing to run it."""

from __future__ import annotations

from store_samples import artifact

from tiledsched.build.compiler import Built
from tiledsched.build.cubin import Artifact
from tiledsched.core.canonical import stable_id


def print_of(schedule) -> str:
    return stable_id(schedule.to_json(), 24)


class MadeUp:
    """Compiler, pool and artifact folder of programs that are not there: every schedule is a program of its own."""

    jobs = 2

    def __init__(self) -> None:
        self.changed: set = set()
        self.compiled = 0

    def build(self, tasks, *, leave=0):
        for task in tasks:
            self.compiled += 1
            fingerprint = "0" * 24 if task.schedule in self.changed else print_of(task.schedule)
            yield Built(task=task, artifact=artifact(fingerprint), failure=None, seconds=0.1)

    def ready(self) -> None:
        pass

    def has(self, arch, fingerprint) -> bool:
        return True

    def put(self, artifact) -> None:
        pass

    def get(self, arch, fingerprint) -> Artifact:
        return artifact(fingerprint)

    def cancel(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        pass
