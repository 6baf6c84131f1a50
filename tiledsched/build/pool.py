"""Compile many schedules at once, in processes that can be timed and killed.

Threads would not help (cuTile holds a global lock while it compiles), and a compiler that hangs or crashes must cost
one candidate.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator

from pebble import ProcessExpired, ProcessPool

from tiledsched.build.compiler import BuildTask, Built, compile_task, prepare_process
from tiledsched.errors import Failure, FailureKind

GRACE_S = 20.0
"""Time beyond a task's own limit before its whole process is killed: the compiler's limit fires first."""


def start_process() -> None:
    """Set up a compile process: a group of its own, so that ending it ends the compiler it started, too."""
    os.setpgrp()
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    prepare_process()


def default_jobs() -> int:
    """Processes to compile with: one per CPU this process may use."""
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1))


class BuildPool:
    """Compile processes that start with the first task and stay until closed: starting one takes about a second."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs or default_jobs()
        self._pool: ProcessPool | None = None

    def build(self, tasks: Iterable[BuildTask]) -> Iterator[Built]:
        """Compile every task; yield each outcome as it is known, in no particular order.

        Leaving the loop early (or Ctrl-C) stops the processes; what was yielded stays valid.
        """
        tasks = list(tasks)
        if not tasks:
            return
        pool = self._started()
        pending: dict[concurrent.futures.Future[Built], BuildTask] = {
            pool.schedule(compile_task, args=(task,), timeout=task.timeout_s + GRACE_S): task for task in tasks
        }
        try:
            while pending:
                done, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    yield _outcome(pending.pop(future), future)
        finally:
            if pending:
                self.close()

    def _started(self) -> ProcessPool:
        if self._pool is None:
            self._pool = ProcessPool(max_workers=self.jobs, initializer=start_process,
                                     context=multiprocessing.get_context("spawn"))  # fmt: skip
        return self._pool

    def close(self) -> None:
        """Stop the processes now. Safe to call twice; the next task starts new ones."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def __enter__(self) -> BuildPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _outcome(task: BuildTask, future: concurrent.futures.Future[Built]) -> Built:
    try:
        return future.result()
    except concurrent.futures.TimeoutError:
        failure = Failure(kind=FailureKind.COMPILE_TIMEOUT, message=f"worker killed {GRACE_S:g} s past its limit")
        return Built(task=task, artifact=None, failure=failure, seconds=task.timeout_s + GRACE_S)
    except ProcessExpired as error:
        failure = Failure(kind=FailureKind.COMPILER_KILLED, message=f"compile process ended with code {error.exitcode}")
        return Built(task=task, artifact=None, failure=failure, seconds=0.0)
    except Exception as error:  # the result could not be sent back, say
        failure = Failure(kind=FailureKind.COMPILE_ERROR, message=f"{type(error).__name__}: {error}"[:500])
        return Built(task=task, artifact=None, failure=failure, seconds=0.0)
