"""Builds that a fleet shares: nothing is compiled twice by workers that see one folder.

The outcome of a build lies in the store of programs, next to the machine code that it names. Who builds claims the outcome's file
meanwhile. On a host the folder is shared by all its GPUs; on a shared file system, by all hosts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from tiledsched.build.compiler import BuildTask, Built, build_key
from tiledsched.build.pool import BuildPool
from tiledsched.build.sealed import read_sealed, write_sealed
from tiledsched.build.store import Claims, ProgramStore
from tiledsched.core.errors import ConfigError, DatabaseError, Failure, FailureKind

POLL_S = 0.1
OF_THE_DAY = (FailureKind.COMPILER_KILLED, FailureKind.COMPILE_TIMEOUT)
"""Failures whose cause is more likely the host than the program: they are not shared with other workers."""


class BuildNote(msgspec.Struct, kw_only=True):
    """What a file of the store says about one build."""

    seconds: float
    """Wall time of the compile."""
    fingerprint: str = ""
    """Fingerprint of the machine code; empty where the build failed."""
    failure: Failure | None = None
    """Why the build failed; None where it succeeded."""


class SharedBuilds(BuildPool):
    """A pool that looks into the store first, and waits for what another process builds just now.

    Args:
        jobs: compile processes for what nobody has built; None for one per CPU.
        folder: the cache folder.
    """

    def __init__(self, jobs: int | None, folder: Path) -> None:
        super().__init__(jobs)
        self._cache = folder
        self._claims = Claims(folder / "programs")

    def build(self, tasks: Iterable[BuildTask], *, leave: int = 0) -> Iterator[Built]:
        """Every outcome as it is known: what is there at once, then what is built here, then what others build."""
        missing = list(tasks)
        while missing:
            here, elsewhere = [], []
            for task in missing:
                known = self._known(task)
                if known is not None:
                    yield known
                elif self._claims.claim(self._note(task)):
                    here.append(task)
                else:
                    elsewhere.append(task)
            for built in super().build(here, leave=leave):
                self._publish(built)
                yield built
            missing = elsewhere
            time.sleep(POLL_S if missing else 0.0)

    def close(self) -> None:
        """Stop the processes; what was not built may be built by others."""
        super().close()
        self._claims.close()

    def cancel(self) -> None:
        """Give up what is unfinished: a claim on which nobody works would be waited for."""
        if self._claims.paths:
            self.close()

    def _store(self, task: BuildTask) -> ProgramStore:
        return ProgramStore(self._cache, task.host_arch)

    def _note(self, task: BuildTask) -> Path:
        return self._store(task).path(task.arch, build_key(task))

    def _known(self, task: BuildTask) -> Built | None:
        """What became of it, if that is known here and its machine code is at hand."""
        found = read_sealed(self._note(task), BuildNote)
        if found is None:
            return None
        note, artifact = found[0], None
        with suppress(DatabaseError):
            artifact = self._store(task).get(task.arch, note.fingerprint)
        if artifact is None and note.failure is None:
            return None
        return Built(task=task, artifact=artifact, failure=note.failure, seconds=note.seconds)

    def _publish(self, built: Built) -> None:
        note = BuildNote(seconds=built.seconds, failure=built.failure)
        with suppress(ConfigError):  # a full disk: who needs it builds it
            if built.artifact is not None:
                self._store(built.task).put(built.artifact)  # a note must not point at nothing
                note.fingerprint = built.artifact.fingerprint
            if built.failure is None or built.failure.kind not in OF_THE_DAY:
                write_sealed(self._note(built.task), note, b"")
        self._claims.release(self._note(built.task))
