"""Compile many schedules at once, in processes that can be timed and killed.

Threads would not help (cuTile holds a global lock while it compiles), and a compiler that hangs or crashes must cost
one candidate.
"""

from __future__ import annotations

import concurrent.futures.process
import contextlib
import importlib
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from pebble import ProcessExpired, ProcessPool

from tiledsched.build.compiler import BuildTask, Built, compile_task, no_room, prepare_process
from tiledsched.core.errors import CompilerError, Failure, FailureKind, NoRoomError, first_line
from tiledsched.core.files import OwnFolder, has_room, is_full
from tiledsched.core.processes import SafeSpawnContext, end_with_parent

GRACE_S = 20.0
"""Time beyond a task's own limit before its whole process is killed: the compiler's limit fires first."""


def start_process(folder: str, parent: int) -> None:
    """Set up a compile process. It leads a group of its own, so that ending it ends the compiler it started, too.

    Args:
        folder: for what the process and the compiler write meanwhile.
        parent: id of the process that started this one. When that is gone, this process ends, even if the compiler hangs.
    """
    os.setpgrp()
    end_with_parent(parent)
    named = os.environ.get("CUDA_TILE_TEMP_DIR")
    tempfile.tempdir = os.environ["TMPDIR"] = os.environ["CUDA_TILE_TEMP_DIR"] = folder
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    prepare_process()
    # cuTile imports torch, where it is installed, for its dtypes. A compile needs none of them, and torch takes seconds.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: not to be imported
    with contextlib.suppress(ImportError):  # whoever compiles finds out
        importlib.import_module("cuda.tile.compilation")  # takes as long as many a compile
        # Where a script, which these processes import first, imported cuTile, that has made a folder of its own by now.
        config = importlib.import_module("cuda.tile._cext").default_tile_context.config
        before, config.temp_dir = config.temp_dir, folder
        if not named and before != folder:
            with contextlib.suppress(OSError):  # unless there is anything in it, and it is the script's own
                os.rmdir(before)


def run_sent(sent: bytes) -> Any:
    """Call a function with a task, of both of which this is the pickle.

    Reading it imports the module of the task's kernel, which may take seconds. The processes take what is sent to them one after
    another, so that without this each would wait for the imports of those before it.
    """
    function, task = pickle.loads(sent)
    return function(task)


def default_jobs() -> int:
    """Processes to compile with: one per CPU this process may use."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1))


class BuildPool:
    """Compile processes that start with the first task and stay until closed: starting one takes about a second."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or default_jobs()
        self._pool: ProcessPool | None = None
        self._folder: OwnFolder | None = None
        self._running: dict[BuildTask, concurrent.futures.Future[Built]] = {}

    def build(self, tasks: Iterable[BuildTask], *, leave: int = 0) -> Iterator[Built]:
        """Compile every task; yield each outcome as it is known, in no particular order.

        Args:
            tasks: what to compile; one that is running already is not started again.
            leave: end when no more than so many of `tasks` are unfinished. They go on, and later calls yield them, too.

        Leaving the loop early (or Ctrl-C) stops the processes; what was yielded stays valid.

        Raises:
            CompilerError: the processes end before they compile anything.
            NoRoomError: there is no room for what compilers write meanwhile.
        """
        unfinished, ended = set(), False
        for task in tasks:
            unfinished.add(task)
            if task not in self._running:
                self._running[task] = self.submit(task)
        try:
            while len(unfinished) > leave:
                done, _ = concurrent.futures.wait(
                    self._running.values(), return_when=concurrent.futures.FIRST_COMPLETED
                )
                for task in [task for task, future in self._running.items() if future in done]:
                    unfinished.discard(task)
                    yield self.outcome(task, self._running.pop(task))
            ended = True
        finally:
            if not ended:
                self.close()

    def submit(self, task: BuildTask) -> concurrent.futures.Future[Built]:
        """Start one build, without waiting in :meth:`build`. Any thread may call it; :meth:`outcome` says what became of it."""
        sent = pickle.dumps((compile_task, task))
        return self._schedule(run_sent, args=(sent,), timeout=task.timeout_s + GRACE_S)

    def start(self) -> None:
        """Start the processes in the background, ahead of the first task. Safe to call again."""
        if self._pool is None:
            self._schedule(os.getpid)  # a task is what starts them all

    def _schedule(self, function: Any, **more: Any) -> concurrent.futures.Future[Any]:
        """Have one of the processes call a function."""
        try:
            return self._started().schedule(function, **more)
        except concurrent.futures.process.BrokenProcessPool as error:
            why = f": {error.__cause__}" if error.__cause__ else ""
            raise CompilerError(
                f"cannot start compile processes{why}; the current folder must still be there, and limits allow {self.jobs} more"
            ) from error

    def _started(self) -> ProcessPool:
        if self._pool is None:
            try:
                self._folder = OwnFolder()
            except OSError as error:
                if is_full(error) or isinstance(error, FileNotFoundError):  # Python tried all the folders that it knows
                    raise no_room(os.environ.get("TMPDIR", "/tmp"), str(error)) from error
                raise CompilerError(
                    f"no temporary folder to compile in: {error}; TMPDIR must name a folder with space"
                ) from error
            self._pool = ProcessPool(
                max_workers=self.jobs,
                initializer=start_process,
                initargs=[self._folder.path, os.getpid()],
                context=SafeSpawnContext(),
            )
        return self._pool

    def close(self) -> None:
        """Stop the processes now. Safe to call twice; the next task starts new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None
            self._running.clear()
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def cancel(self) -> None:
        """Give up builds that are unfinished, so that nobody gets them with a later :meth:`build`. Idle processes stay."""
        if self._running:
            self.close()

    def outcome(self, task: BuildTask, future: concurrent.futures.Future[Built]) -> Built:
        """What became of a build; waits for it.

        Raises:
            CompilerError: the process ended before it compiled anything.
            NoRoomError: there is no room for what compilers write meanwhile.
        """
        try:
            return future.result()
        except concurrent.futures.TimeoutError:
            failure = Failure(kind=FailureKind.COMPILE_TIMEOUT, message=f"worker killed {GRACE_S:g} s past its limit")
            return Built(task=task, artifact=None, failure=failure, seconds=task.timeout_s + GRACE_S)
        except NoRoomError:
            raise
        except ProcessExpired as error:
            # Who writes a file by way of memory is killed where there is no room for it.
            if self._folder is not None and not has_room(self._folder.path):
                raise no_room(self._folder.path, str(error)) from error
            failure = Failure(
                kind=FailureKind.COMPILER_KILLED, message=f"compile process ended with code {error.exitcode}"
            )
            return Built(task=task, artifact=None, failure=failure, seconds=0.0)
        except concurrent.futures.process.BrokenProcessPool as error:
            raise CompilerError(
                "the compile processes end as they start. In a script, which each of them imports, put what tunes under: "
                "if __name__ == '__main__':; elsewhere, run: tiledsched doctor"
            ) from error
        except Exception as error:  # the result could not be sent back, say
            failure = Failure(kind=FailureKind.COMPILE_ERROR, message=first_line(error))
            return Built(task=task, artifact=None, failure=failure, seconds=0.0)

    def __enter__(self) -> BuildPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
