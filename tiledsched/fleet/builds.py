"""Builds that a fleet shares: nothing is compiled twice by workers that see one folder, or one Ray cluster.

A build is known by kernel, its source, the toolchain, the arch, the schedule and the class of problems. Its outcome lies in
the cache folder, next to the machine code, which is known by its fingerprint; a file that only one process can make says who is
building. On a host the folder is shared by all its GPUs; on a shared file system, by all hosts.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from tiledsched.build.artifacts import ArtifactStore, default_cache_folder
from tiledsched.build.compiler import BuildTask, Built
from tiledsched.build.pool import GRACE_S, BuildPool
from tiledsched.build.toolchain import installed_toolchain
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ConfigError, Failure, FailureKind
from tiledsched.core.files import write_whole
from tiledsched.core.launch import problem_class
from tiledsched.core.registry import load_kernel
from tiledsched.store.host import lives, own_word

POLL_S = 0.1
RENEW_S = 10.0
"""Between two renewals of claims."""
OF_THE_DAY = (FailureKind.COMPILER_KILLED, FailureKind.COMPILE_TIMEOUT)
"""Failures whose cause is more likely the host than the program: they are not shared with other workers."""


class Pool(Protocol):
    """What builds: the compile processes here, or those of a whole cluster."""

    jobs: int

    def build(self, tasks: Iterable[BuildTask], *, leave: int = 0) -> Iterator[Built]:
        """See :meth:`BuildPool.build`."""
        ...

    def start(self) -> None:
        """Be ready soon."""
        ...

    def close(self) -> None:
        """End what is running."""
        ...


class SharedBuilds(BuildPool):
    """A pool that asks the folder first, and waits for what another process builds just now.

    Args:
        inner: builds what nobody has built.
        folder: the cache folder; the user's unless given.
    """

    def __init__(self, inner: Pool, folder: Path | None = None) -> None:
        super().__init__(inner.jobs)
        self._inner = inner
        self._records = (folder or default_cache_folder()) / "builds"
        self._artifacts = ArtifactStore(folder)
        self._ours: dict[Path, None] = {}
        self._renewed_s = 0.0
        self._ahead_s, self._compared_s = 0.0, -RENEW_S

    def build(self, tasks: Iterable[BuildTask], *, leave: int = 0) -> Iterator[Built]:
        """Every outcome as it is known: what is there at once, then what is built here, then what others build."""
        mine, theirs = [], []
        for task in tasks:
            path = self._path(task)
            if path in self._ours:
                mine.append(task)
                continue
            known = self._known(task)
            if known is not None:
                yield known
            elif self._claim(path, task):
                mine.append(task)
            else:
                theirs.append(task)
        if mine:
            yield from self._build_here(mine, leave)
        while theirs:
            for task in list(theirs):
                known = self._known(task)
                if known is not None:
                    theirs.remove(task)
                    yield known
                elif self._claim(self._path(task), task):  # whoever was building it is gone
                    theirs.remove(task)
                    yield from self._build_here([task], 0)
            time.sleep(POLL_S if theirs else 0.0)

    def _build_here(self, tasks: list[BuildTask], leave: int) -> Iterator[Built]:
        for built in self._inner.build(tasks, leave=leave):
            self._publish(built)
            self._renew()
            yield built

    def _renew(self) -> None:
        """Claims are made of many builds at once, whose turn may come later than one build may take."""
        if time.monotonic() - self._renewed_s > RENEW_S:
            self._renewed_s = time.monotonic()
            for path in self._ours:
                with suppress(OSError):
                    os.utime(_lock(path))

    def start(self) -> None:
        """Start the compile processes."""
        self._inner.start()

    def close(self) -> None:
        """End them; what was not built may be built by others."""
        self._inner.close()
        for path in self._ours:
            _lock(path).unlink(missing_ok=True)
        self._ours.clear()

    def cancel(self) -> None:
        """Give up what is unfinished: a claim on which nobody works would be waited for."""
        if self._ours:
            self.close()

    def _path(self, task: BuildTask) -> Path:
        return self._records / f"{build_key(task)}.json"

    def _known(self, task: BuildTask) -> Built | None:
        """What became of it, if that is known here and its machine code is at hand."""
        try:
            told: dict[str, Any] = json.loads(self._path(task).read_bytes())
            if told.get("failure"):
                failure = Failure(kind=FailureKind(told["failure"]["kind"]), message=str(told["failure"]["message"]))
                return Built(task=task, artifact=None, failure=failure, seconds=float(told["seconds"]))
            artifact = self._artifacts.get(task.arch, str(told["fingerprint"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return Built(task=task, artifact=artifact, failure=None, seconds=float(told["seconds"])) if artifact else None

    def _claim(self, path: Path, task: BuildTask) -> bool:
        """Whether this process is the one to build it. A claim that is older than a build may take is another's no more."""
        lock = _lock(path)
        with suppress(OSError):
            if self._time_there() - lock.stat().st_mtime > task.timeout_s + 2 * GRACE_S or _is_gone(lock.read_text()):
                lock.unlink(missing_ok=True)
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644), "w") as file:
                file.write(f"{socket.gethostname()} {own_word()}")
        except FileExistsError:
            return False
        except OSError:  # a folder that cannot be written to: each builds for itself
            pass
        self._ours[path] = None
        return True

    def _time_there(self) -> float:
        """The time as the folder's files have it: on a shared file system that is its server's, and clocks of hosts differ."""
        if time.monotonic() - self._compared_s > RENEW_S:
            self._compared_s = time.monotonic()
            with suppress(OSError), tempfile.NamedTemporaryFile(dir=self._records) as file:
                self._ahead_s = os.stat(file.name).st_mtime - time.time()
        return time.time() + self._ahead_s

    def _publish(self, built: Built) -> None:
        path = self._path(built.task)
        told: dict[str, Any] = {"seconds": built.seconds}
        with suppress(OSError, ConfigError):  # a full disk: who needs it builds it
            if built.artifact is not None:
                self._artifacts.put(built.artifact)  # first: a record must not point at nothing
                write_whole(path, json.dumps({**told, "fingerprint": built.artifact.fingerprint}))
            elif built.failure is not None and built.failure.kind not in OF_THE_DAY:
                said = {"kind": str(built.failure.kind), "message": built.failure.message}
                write_whole(path, json.dumps({**told, "failure": said}))
        _lock(path).unlink(missing_ok=True)
        self._ours.pop(path, None)


@functools.lru_cache(maxsize=4096)
def build_key(task: BuildTask) -> str:
    """What a build is known by, as a path: toolchain, arch, the kernel's source, schedule and class of problems."""
    kernel = load_kernel(task.kernel)
    known = problem_class(kernel, task.problem, task.schedule, arch_spec(task.arch)).id
    return f"{installed_toolchain().id}/{task.arch}/{kernel.source_hash()[:16]}-{task.schedule.id}-{known}"


def _lock(path: Path) -> Path:
    return path.with_suffix(".building")


def _is_gone(owner: str) -> bool:
    """Whether the process that a claim names is of this host and ended."""
    host, _, word = owner.partition(" ")
    return host == socket.gethostname() and bool(word) and not lives(word)
