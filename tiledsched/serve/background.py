"""Programs compiled in processes of their own, for calls that do not wait for them.

A thread hands a process, which runs :func:`main`, one program after the other. A process that dies, or does not answer in time,
is started once more for the same program. Processes end when nothing was asked of them for a while, and with the process that
started them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tiledsched.build.compiler import DEFAULT_TIMEOUT_S, BuildTask, export, says_nothing_of_program
from tiledsched.build.store import Claims, StoredProgram, read_program, write_program
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import Failure, MeasureError, TiledschedError, first_line
from tiledsched.core.processes import python_command
from tiledsched.core.registry import load_kernel

WORKER_COMMAND = python_command("tiledsched.serve.background")
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


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """A program of one launch to compile: everything that another process needs, small enough to send to it."""

    path: Path
    """The file that keeps the program."""
    task: BuildTask
    """The schedule, and a problem whose launches are compiled by the same function."""
    wide: bool
    """Whether the problem is served by functions with 64-bit indices, which its values do not say."""
    place: int
    """The number of the launch among the launches of the schedule."""
    parameters: tuple[Any, ...]
    """What the launch tells of its arguments, with the assumptions that it is compiled on."""


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
                build._ended = threading.Event()  # the old one may be locked
                build.end("the process was forked while its program was compiled")
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
                if worker is None:
                    from tiledsched.measure.gpu import WorkerProcess

                    worker = WorkerProcess(self._command)
                    self._workers.append(worker)
                    worker.answer(START_S, "start")
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


def main(descriptor: str, folder: str, parent: str) -> None:
    """The process that compiles: say that it is ready, and then compile what is asked for, until the other side closes.

    Args:
        descriptor: of the connection.
        folder: for temporary files.
        parent: id of the process that started this one. When that is gone this process ends, and with it its compiler.
    """
    from tiledsched.build.pool import start_process  # which programs that are served do without

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when we end
    start_process(folder, int(parent))
    with Connection(int(descriptor)) as connection:
        try:
            connection.send((None, False))
            while True:
                _, request = connection.recv()
                connection.send((build(request), False))
        except (EOFError, ConnectionError):  # nobody is left to ask, or to be told
            return


def build(request: BuildRequest) -> StoredProgram | str:
    """The program of a request, from its file or compiled and kept there; or why it cannot be compiled by this process."""
    claims = Claims(request.path.parent)
    claims.claim(request.path, wait=True)
    try:
        program = read_program(request.path)
        if program is None:
            program = _compile(request)
            write_program(request.path, program)
        return program
    except Exception as error:  # whatever a compiler trips over must cost one program, not the process
        return first_line(error)
    finally:
        claims.close()


def _compile(request: BuildRequest) -> StoredProgram:
    import cuda.tile as ct
    from cuda.tile.compilation import CallingConvention, KernelSignature

    from tiledsched.core import launches

    task = request.task
    if request.wide:
        vars(task.problem)["wide"] = True
    kernel = load_kernel(task.kernel)
    objects = launches.tile_kernels(kernel, {task.arch: task.schedule}, task.problem, arch_spec(task.arch))
    symbol = launches.symbol(kernel)
    signature = KernelSignature(request.parameters, CallingConvention.cutile_python_v2(), symbol=symbol)
    try:
        with ct.compiler_timeout(task.timeout_s):
            made = export([objects[request.place]], [signature], task.arch)
    except ct.TileError as error:
        if isinstance(error, ct.TileCompilerTimeoutError) or says_nothing_of_program(error):
            raise
        return StoredProgram(error=str(error).replace("\nUnknown location", "")[:2000])
    return StoredProgram(cubin=made.cubin, symbol=symbol)
