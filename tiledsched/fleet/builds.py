"""Builds that a fleet shares: nothing is compiled twice by workers that see one folder.

A build is known by kernel, its source, the toolchain, the arch, the schedule and the class of problems. Its outcome lies in
the cache folder, next to the machine code, which is known by its fingerprint; a file that only one process can make says who is
building. On a host the folder is shared by all its GPUs; on a shared file system, by all hosts.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from tiledsched.build.artifacts import ArtifactStore
from tiledsched.build.compiler import BuildTask, Built
from tiledsched.build.host_code import host_folder
from tiledsched.build.pool import GRACE_S, BuildPool
from tiledsched.build.toolchain import installed_toolchain
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ConfigError, DatabaseError, Failure, FailureKind
from tiledsched.core.files import write_whole
from tiledsched.core.launch import problem_class
from tiledsched.core.registry import load_kernel
from tiledsched.store.host import lives, own_word

POLL_S = 0.1
OF_THE_DAY = (FailureKind.COMPILER_KILLED, FailureKind.COMPILE_TIMEOUT)
"""Failures whose cause is more likely the host than the program: they are not shared with other workers."""


class BuildNote(msgspec.Struct, kw_only=True):
    """What a file of the folder says about one build."""

    seconds: float
    """Wall time of the compile."""
    fingerprint: str = ""
    """Fingerprint of the machine code; empty where the build failed."""
    failure: Failure | None = None
    """Why the build failed; None where it succeeded."""


class SharedBuilds(BuildPool):
    """A pool that asks the folder first, and waits for what another process builds just now.

    Args:
        jobs: compile processes for what nobody has built; None for one per CPU.
        folder: the cache folder.
    """

    def __init__(self, jobs: int | None, folder: Path) -> None:
        super().__init__(jobs)
        self._notes = folder / "builds"
        self._artifacts = ArtifactStore(folder)
        self._claims: set[Path] = set()
        self._seen_s: dict[tuple[Path, str], float] = {}

    def build(self, tasks: Iterable[BuildTask], *, leave: int = 0) -> Iterator[Built]:
        """Every outcome as it is known: what is there at once, then what is built here, then what others build."""
        missing = list(tasks)
        while missing:
            here, elsewhere = [], []
            for task in missing:
                known = self._known(task)
                if known is not None:
                    yield known
                elif self._claim(task):
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
        for claim in self._claims:
            claim.unlink(missing_ok=True)
        self._claims.clear()

    def cancel(self) -> None:
        """Give up what is unfinished: a claim on which nobody works would be waited for."""
        if self._claims:
            self.close()

    def _note(self, task: BuildTask) -> Path:
        return self._notes / f"{build_key(task)}.json"

    def _known(self, task: BuildTask) -> Built | None:
        """What became of it, if that is known here and its machine code is at hand."""
        try:
            note = msgspec.json.decode(self._note(task).read_bytes(), type=BuildNote)
            artifacts = self._artifacts.for_host(task.host_arch)
            artifact = artifacts.get(task.arch, note.fingerprint) if note.fingerprint else None
        except (OSError, msgspec.MsgspecError, DatabaseError):
            return None
        if artifact is None and note.failure is None:
            return None
        return Built(task=task, artifact=artifact, failure=note.failure, seconds=note.seconds)

    def _claim(self, task: BuildTask) -> bool:
        """Whether this process is the one to build it."""
        claim = self._note(task).with_suffix(".building")
        if claim in self._claims:
            return True
        with suppress(OSError):
            if self._is_abandoned(claim, task):
                claim.unlink()
        try:
            claim.parent.mkdir(parents=True, exist_ok=True)
            with claim.open("x") as file:
                file.write(f"{socket.gethostname()} {own_word()}")
        except FileExistsError:
            return False
        except OSError:  # a folder that cannot be written to: each builds for itself
            pass
        self._claims.add(claim)
        return True

    def _is_abandoned(self, claim: Path, task: BuildTask) -> bool:
        """Whether a claim is of a process of this host that is gone, or of another host and older than a build may take.

        How old it is this process's own clock tells, from when it first met the claim: hosts' clocks differ.
        """
        owner = claim.read_text()
        host, _, word = owner.partition(" ")
        if host == socket.gethostname() and word:
            return not lives(word)
        now = time.monotonic()
        return now - self._seen_s.setdefault((claim, owner), now) > task.timeout_s + 2 * GRACE_S

    def _publish(self, built: Built) -> None:
        note = self._note(built.task)
        with suppress(OSError, ConfigError):  # a full disk: who needs it builds it
            fingerprint = ""
            if built.artifact is not None:
                self._artifacts.for_host(built.task.host_arch).put(built.artifact)  # a note must not point at nothing
                fingerprint = built.artifact.fingerprint
            if built.failure is None or built.failure.kind not in OF_THE_DAY:
                said = BuildNote(seconds=built.seconds, fingerprint=fingerprint, failure=built.failure)
                write_whole(note, msgspec.json.encode(said))
        claim = note.with_suffix(".building")
        claim.unlink(missing_ok=True)
        self._claims.discard(claim)


@functools.lru_cache(maxsize=4096)
def build_key(task: BuildTask) -> str:
    """What a build is known by, as a path: toolchain, hosts, arch, the kernel's source, schedule and class of problems."""
    kernel = load_kernel(task.kernel)
    known = problem_class(kernel, task.problem, task.schedule, arch_spec(task.arch)).id
    target = host_folder(Path(installed_toolchain().id), task.host_arch) / task.arch
    return f"{target}/{kernel.source_hash()[:16]}-{task.schedule.id}-{known}"
