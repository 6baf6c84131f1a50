"""Stands in for `compile_task` in the pool's processes: does what the task's schedule says."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

from store_samples import artifact

from tiledsched.build.compiler import BuildTask, Built, no_room
from tiledsched.core.errors import Failure, FailureKind


class Awaited:
    """Stands in for a problem: a process that reads it waits until another one reads one, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return awaited, (self.folder, os.getpid())


def awaited(folder: Path, sender: int) -> Awaited:
    """Read an :class:`Awaited`; where it was sent from, at once."""
    (folder / str(sender)).mkdir(parents=True, exist_ok=True)
    if not (folder / str(os.getpid())).exists():
        (folder / f"reads {os.getpid()}").touch()
        end = time.monotonic() + 20.0
        while len(list(folder.glob("reads *"))) < 2:
            assert time.monotonic() < end, "no other process reads its task"
            time.sleep(0.01)
    return Awaited(folder)


def compile_task(task: BuildTask) -> Built:
    """`do` is fine, error, full, sleep, exit or kill."""
    what = task.schedule["do"]
    if what == "sleep":
        time.sleep(600)
    elif what == "exit":
        os._exit(7)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "error":
        failure = Failure(kind=FailureKind.COMPILE_ERROR, message="no")
        return Built(task=task, artifact=None, failure=failure, seconds=0.1)
    elif what == "full":
        raise no_room(tempfile.gettempdir(), "No space left on device")
    elif what == "slow":
        time.sleep(0.3)
    made = artifact(task.schedule.id * 2, task.arch)
    return Built(task=task, artifact=made, failure=None, seconds=os.getpid())  # seconds tells which process it was
