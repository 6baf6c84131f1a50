"""Programs compiled in processes of their own, for calls that do not wait for them.

A thread hands a process one program after the other. A process that dies, or does not answer in time, is started once more for
the same program. Processes end when nothing was asked of them for a while, and with the process that started them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiledsched.build.compiler import DEFAULT_TIMEOUT_S
from tiledsched.core.errors import Failure, MeasureError, TiledschedError
from tiledsched.core.processes import python_command
from tiledsched.serve.programs import BuildRequest, StoredProgram

WORKER_COMMAND = python_command("tiledsched.serve.build_worker")
START_S = 60.0
"""How long a process may take to start."""
ANSWER_S = 2 * DEFAULT_TIMEOUT_S
"""How long it may take to answer: another process may be compiling the same program, and is waited for."""
IDLE_S = 30.0
"""Seconds without work after which a process ends."""
PROCESSES = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Processes that compile at a time: each takes a CPU for seconds, which the program that serves may need."""
ENDING = "this process is ending"
TRIES = 2
"""How often a program is given to a process that dies or hangs."""


class Build:
    """A program that is being compiled."""

    def __init__(self, request: BuildRequest | None = None) -> None:
        self.request = request
        self.program: StoredProgram | None = None
        """The program, or what the compiler said against it; None while it is compiled, and where no process can."""
        self.failure = ""
        """Why no process can compile it."""
        self._ended = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether there is a program, or none will come."""
        return self._ended.is_set()

    def end(self, outcome: StoredProgram | str) -> None:
        """Note what became of it: a program, or why there is none."""
        if isinstance(outcome, StoredProgram):
            self.program = outcome
        else:
            self.failure = outcome
        self._ended.set()

    def wait(self) -> None:
        """Wait until it is done."""
        self._ended.wait()

    def abandon(self) -> None:
        """As :meth:`end`, in a process that was forked: nobody there is at work on it."""
        self._ended = threading.Event()
        self.end("the process was forked while its program was compiled")


class BackgroundBuilder:
    """Compiles programs in the background. Any thread may use it, and so may processes that are forked.

    Args:
        command: starts a process.
        processes: how many there are at most.
        idle_s: seconds without work after which a process ends.
    """

    def __init__(
        self, command: Sequence[str] = WORKER_COMMAND, processes: int = PROCESSES, idle_s: float = IDLE_S
    ) -> None:
        self._command, self._processes, self._idle_s = command, processes, idle_s
        self.builds: dict[Path, Build] = {}
        """Builds by the file of their program, until their program was taken."""
        self._workers: list[Any] = []
        self._reset()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def submit(self, request: BuildRequest) -> Build:
        """Have a program compiled; the build of it that is under way, if there is one."""
        with self._lock:
            known = self.builds.get(request.path)
            if known is not None:
                return known
            build = self.builds[request.path] = Build(request)
            if self._closed:
                build.end(ENDING)
                return build
            self._queue.put(build)
            self._unfinished += 1
            wanted = self._threads < min(self._processes, self._unfinished)
            self._threads += wanted
        if wanted:
            try:
                threading.Thread(target=self._serve, name="tiledsched-build", daemon=True).start()
            except RuntimeError as error:  # no more threads, or the interpreter is ending
                with self._lock:
                    self._threads -= 1
                if not self._threads:
                    self._end(build, str(error))
        return build

    def close(self) -> None:
        """End all processes now. Nothing is compiled afterwards."""
        with self._lock:
            self._closed = True
        for _ in range(self._threads):
            self._queue.put(None)
        for worker in list(self._workers):
            self._stop(worker)
        for build in list(self.builds.values()):
            if not build.is_done:
                build.end(ENDING)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Build | None] = queue.SimpleQueue()
        self._threads = self._unfinished = 0
        self._closed = False

    def _forget(self) -> None:
        """In a forked process: its parent's threads and processes are not there."""
        for worker in self._workers:
            with contextlib.suppress(OSError):
                worker.connection.close()
        for build in self.builds.values():
            if not build.is_done:
                build.abandon()
        self._workers.clear()
        self.builds.clear()
        self._reset()

    def _serve(self) -> None:
        """Compile what is in the queue, in one process, until there was nothing for a while."""
        worker = None
        try:
            while not self._closed:
                try:
                    build = self._queue.get(timeout=self._idle_s)
                except queue.Empty:
                    with self._lock:
                        if self._queue.empty():
                            self._threads -= 1
                            return
                    continue
                if build is not None:
                    worker = self._compile(build, worker)
        finally:
            if worker is not None:
                self._stop(worker)

    def _compile(self, build: Build, worker: Any) -> Any:
        """Have a process compile one program; returns the process, or None where it is gone."""
        outcome: StoredProgram | str = ""
        for _ in range(TRIES):
            if self._closed:
                break
            try:
                worker = worker or self._started()
                outcome = worker.ask(ANSWER_S, "build", build.request)
                if not isinstance(outcome, Failure):
                    break
                raise MeasureError(outcome.message)
            except Exception as error:  # whoever waits for the build must hear of it
                outcome = str(error)
                if worker is not None:
                    self._stop(worker)
                worker = None
        self._end(build, ENDING if self._closed else outcome)
        return worker

    def _end(self, build: Build, outcome: StoredProgram | str) -> None:
        with self._lock:
            self._unfinished -= 1
        build.end(outcome)

    def _started(self) -> Any:
        from tiledsched.measure.gpu import WorkerProcess

        worker = WorkerProcess(self._command)
        self._workers.append(worker)
        answer = worker.answer(START_S, "start")
        if isinstance(answer, Failure):
            self._stop(worker)
            raise MeasureError(answer.message)
        return worker

    def _stop(self, worker: Any) -> None:
        """End a process and the compiler that it started, which are a group of their own."""
        with contextlib.suppress(ValueError):
            self._workers.remove(worker)
        if worker.process.poll() is None:  # else its number may be another's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        with contextlib.suppress(TiledschedError, OSError):
            worker.kill()


BUILDER = BackgroundBuilder()
"""Compiles for all operators of this process."""
