"""The runner that measures: it owns a worker process, times every request, and replaces the worker when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tiledsched.core.canonical import stable_id
from tiledsched.core.config import log
from tiledsched.core.errors import Failure, FailureKind, MeasureError, first_line
from tiledsched.core.files import OwnFolder
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.processes import child_environment, python_command
from tiledsched.measure.arrays import Launch, launch_of, scratch_bytes
from tiledsched.measure.lock import GpuLock, hold
from tiledsched.measure.nvml import expected_name
from tiledsched.measure.runner import REGIMES, Batch, Candidate, Checked, Device, GapTrial
from tiledsched.measure.timing import (
    BURST_GAP_S,
    GRAPH_BELOW_US,
    GRAPH_LAUNCHES,
    SHORT_US,
    launches_in_graph,
    steady_gap,
)

WORKER_COMMAND = python_command("tiledsched.measure.worker")
END_TIMEOUT_S = 60.0
"""How long a killed worker may take to go: the driver first tears its context down."""
UNKNOWN_US = 1e4
"""Assumed time of a candidate that was never looked at, for the time limits of what follows."""
SLOWEST_FLOPS = 1e11
"""Floating-point operations per second of a candidate so slow that it may be taken for hung. The worst schedule that
finished on an H200 made 6e12.
"""
SLOWEST_BYTES = 1e9
"""Bytes per second below which a candidate may be taken for hung, for kernels that state no operations."""
CHECK_LAUNCHES = 3
CALIBRATION_LAUNCHES = 200
"""How many times its own time the calibration of a long kernel may take, at most: it takes a third of that."""
DEFAULT_GAP_MS = BURST_GAP_S * 1e3
SHORT_GAP_MS = 2.0
"""Distance of launches below `SHORT_US`: they leave the GPU at rest anyway, and spread too much to calibrate by."""

CRASHES = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
"""How a process ends by a fault of its own, and not by somebody's SIGKILL or exit."""
ADVICE = {
    ("begin", FailureKind.OUT_OF_MEMORY): "try smaller sizes",
    ("begin", FailureKind.LAUNCH_FAILURE): "correct what the kernel declares",
}
"""What to do where a problem cannot be prepared, by request and kind of failure."""


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds to wait for each answer before the worker is taken for hung."""

    start_s: float = 120.0
    """From the worker's start until it has opened the GPU: on a cold machine, importing CuPy alone takes many seconds."""
    begin_s: float = 300.0
    """Inputs and reference of one problem."""
    load_s: float = 30.0
    """Loading one candidate."""
    probe_s: float = 5.0
    """Its first launches, in addition to the time the problem takes at `SLOWEST_FLOPS` or `SLOWEST_BYTES`."""
    check_s: float = 20.0
    """Checking it, in addition to what its launches take."""
    sample_s: float = 20.0
    """One run of samples, in addition to what its samples take..."""
    each_sample_s: float = 0.05
    """...pacing, flushing and launching one sample..."""
    slack: float = 10.0
    """...and this many times the candidate's own time at first look, for every launch."""


class WorkerProcess:
    """A child process, the pipe to it and the folder it may write to.

    A fresh interpreter, not a `multiprocessing` child: that one would import the main program first, and with it
    whatever torch or compiler the main program holds. The child's end of the pipe is inherited, so its death closes it; and
    so is the lock of the GPU, which nobody else may have before the child is gone.
    """

    def __init__(self, command: Sequence[str] = WORKER_COMMAND, lock: GpuLock | None = None) -> None:
        self._folder = OwnFolder()
        self._errors = Path(self._folder.path) / "stderr.txt"
        self.connection, theirs = Pipe()
        with theirs, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), self._folder.path, str(os.getpid())],
                pass_fds=[theirs.fileno(), *([lock.descriptor] if lock else [])],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=child_environment(),
            )
        self.loaded: set[str] = set()

    def ask(self, timeout_s: float, verb: str, *arguments: Any) -> Any:
        """Send one request and wait for its answer, which is a Failure where the worker reports one, or died."""
        return self.send(verb, *arguments) or self.answer(timeout_s, verb)

    def send(self, verb: str, *arguments: Any) -> Failure | None:
        """Send one request, whose answer is to be waited for before the next one; a Failure where the worker has ended."""
        try:
            self.connection.send((verb, *arguments))
        except OSError:
            return self._ended(f"before {verb}")
        return None

    def answer(self, timeout_s: float, verb: str) -> Any:
        """The answer to the request sent last, or, first of all, to "start". It is a Failure where the worker reports one, where
        it ended, and where `timeout_s` passed and it was killed.
        """
        try:
            if self.connection.poll(timeout_s):
                value, lost = self.connection.recv()
                if lost:
                    self.kill()
                return value
        except (EOFError, OSError):
            return self._ended(f"during {verb}")
        except BaseException:  # Ctrl-C: an answer nobody waited for must not be taken for the next one
            self.kill()
            raise
        self.kill()
        message = f"no answer to {verb} within {timeout_s:g} s; measuring process killed"
        return Failure(kind=FailureKind.HANG, message=message)

    def alive(self) -> bool:
        """Whether it can take a request. Between requests there is nothing to read, unless it ended."""
        return not self.connection.closed and not self.connection.poll()

    def _ended(self, when: str) -> Failure:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        code = self.process.poll()
        lines = self._errors.read_text(errors="replace").split("\n") if self._errors.exists() else []
        last_words = next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")
        self.kill()
        message = f"measuring process ended with code {code} {when}{last_words}"
        return Failure(kind=FailureKind.WORKER_KILLED, message=message[:500])

    def kill(self) -> None:
        """End it now. Safe to call twice.

        Raises:
            MeasureError: it cannot be ended.
        """
        self.connection.close()
        self.process.kill()
        try:
            self.process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise MeasureError(
                "the measuring process cannot be killed: the GPU is stuck; reset it or restart the "
                "machine, then run: tiledsched doctor"
            ) from None
        self._folder.close()


class GpuRunner:
    """Measures on the GPU through a worker that may die: each death costs the candidate that caused it.

    The worker starts, and makes a problem's inputs, in the background: the first call that needs it waits for it.

    Args:
        kernel: whose candidates are measured.
        seed: of inputs and sample orders; every `begin` and `sample` draws anew from it.
        timeouts: when the worker is taken for hung.
        gap_ms: start-to-start distance of paced launches; None to find the steady one for each problem.
        worker_command: how to start the worker; tests start one with a made-up GPU.
        gpu: UUID and name of the GPU that the worker will open, where that is known before: it is held from here on. Else
            it is held once the worker has said which it is, and only then anything runs on it.

    Raises:
        MeasureError: another process holds the GPU, and is not waited for any longer.
        MeasureError: by whatever waits for the worker: it cannot be started (no GPU, no driver, or no CuPy), or the
            problem does not fit.
    """

    name = "gpu"
    regimes = frozenset(REGIMES)

    def __init__(
        self,
        kernel: KernelClass,
        *,
        seed: int = 0,
        timeouts: Timeouts | None = None,
        gap_ms: float | None = None,
        worker_command: Sequence[str] = WORKER_COMMAND,
        gpu: tuple[str, str] | None = None,
    ) -> None:
        self._kernel = kernel
        self.seed = seed
        """Seed of the inputs and of the orders of samples."""
        self._timeouts = timeouts or Timeouts()
        self._command = tuple(worker_command)
        self._problem: Problem | None = None
        self._draws = 0
        self._expected_us: dict[str, float] = {}
        self._given_gap_ms = gap_ms
        self._gap_ms: float | None = None
        self._graph_launches: int | None = None
        self.beside_gib: float | None = None
        """GiB of device memory that are taken before a problem begins, as a served model would take them; what is measured must
        then fit into the rest. None for no limit."""
        self._workspace_bytes: int | None = None
        """What the workspaces of a candidate may take; None for no limit."""
        self.gap_trials: tuple[GapTrial, ...] = ()
        """What the last calibration saw; empty before the first."""
        self._warned = False
        self._lock = hold(*gpu) if gpu else None
        self._worker = WorkerProcess(self._command, self._lock)
        self._device: Device | None = None
        # What the worker is still to say: that it has opened the GPU, that it holds the problem.
        self._starting, self._beginning = True, False

    @property
    def device(self) -> Device:
        """The GPU, once the worker has opened it."""
        if self._device is None and not self._starting:
            self._restart()
        if self._starting:
            self._await_start()
        assert self._device is not None
        return self._device

    @property
    def device_name(self) -> str:
        """The GPU's name. Where the GPUs of this machine are of one kind, the driver names it before the worker does."""
        return (expected_name() if self._device is None else "") or self.device.name

    def _await_start(self) -> None:
        beginning, self._starting, self._beginning = self._beginning, False, False
        device, gpu = self._expect(self._timeouts.start_s, "start", "the GPU cannot be used")
        if self._lock is None:
            try:
                self._lock = hold(*gpu)
            except BaseException:
                self._worker.kill()
                raise
            if beginning:
                self._begin_on_worker()
        self._device, self._beginning = device, beginning

    def _expect(self, timeout_s: float, verb: str, problem: str) -> Any:
        """The answer to `verb`, without which nothing can be measured: a failure is an error that begins with `problem`."""
        answer = self._worker.answer(timeout_s, verb)
        if isinstance(answer, Failure):
            advice = ADVICE.get((verb, answer.kind), "run: tiledsched doctor")
            if answer.kind is FailureKind.OUT_OF_MEMORY and self.beside_gib is not None:
                advice += ", or take less beside it (--beside)"
            raise MeasureError(f"{problem}: {answer.message}; {advice}")
        return answer

    def _draw_seed(self, purpose: str) -> int:
        self._draws += 1
        return int(stable_id([self.seed, purpose, self._draws], length=8), 16)

    def begin(self, problem: Problem) -> None:
        """Let the worker make inputs and reference for `problem`, in the background."""
        if self._beginning:
            self.wait()
        self._problem = problem
        self._expected_us.clear()
        self._gap_ms, self._graph_launches = self._given_gap_ms, None
        if self._starting or self._worker.alive():
            self._begin_on_worker()
        else:
            self._restart()

    def _restart(self) -> None:
        """A new worker, brought back to the current problem."""
        self._worker.kill()
        self._worker, self._starting = WorkerProcess(self._command, self._lock), True
        if self._problem is not None:
            self._begin_on_worker()

    def _begin_on_worker(self) -> None:
        assert self._problem is not None
        self._beginning = True
        if self._starting and self._lock is None:
            return  # it does so once the GPU is held
        seed = self._draw_seed("inputs")
        self._worker.send("begin", self._kernel.locator(), self._problem, seed, self.beside_gib)

    def wait(self) -> None:
        """Wait until the worker is ready for candidates. Whoever asks something of it waits by itself."""
        if self._starting:
            self._await_start()
        if self._beginning:
            self._beginning = False
            self._workspace_bytes = self._expect(self._timeouts.begin_s, "begin", f"cannot prepare {self._problem}")

    def probe(self, candidate: Candidate) -> float | Failure:
        """Load it and time a launch."""
        assert self._problem is not None
        flops, least_bytes = self._problem.flops, self._problem.min_bytes
        timeout_s = self._timeouts.probe_s + (flops / SLOWEST_FLOPS if flops else least_bytes / SLOWEST_BYTES)
        answer: float | Failure = self.ask(timeout_s, "probe", candidates=[candidate])
        if not isinstance(answer, Failure):
            self._expected_us[candidate.artifact.fingerprint] = answer
        return answer

    def check(self, candidate: Candidate) -> Checked | Failure:
        """Load it, run it, compare everything."""
        timeout_s = self._timeouts.check_s + CHECK_LAUNCHES * self._timeouts.slack * self._expected(candidate) / 1e6
        answer: Checked | Failure = self.ask(timeout_s, "check", candidates=[candidate])
        if isinstance(answer, Checked):
            self._expected_us[candidate.artifact.fingerprint] = answer.first_look_us
        return answer

    def rows(
        self, candidate: Candidate, problem: Problem, largest: Problem, sizes: Sequence[Problem]
    ) -> list[int] | Failure:
        """Load it, run it on the first rows of the largest problem's inputs, and take digests of its first rows."""
        arguments = self._kernel.locator(), problem, largest, sizes
        return self.ask(self._timeouts.begin_s, "rows", *arguments, candidates=[candidate], problem=problem)

    def ask(
        self,
        timeout_s: float,
        verb: str,
        *arguments: Any,
        candidates: Sequence[Candidate] = (),
        problem: Problem | None = None,
    ) -> Any:
        """A living worker's answer to one request; what is wrong with a candidate, or the worker's death, is a Failure.

        Args:
            timeout_s: how long the answer is waited for.
            verb: what is asked for; see `tiledsched.measure.worker.REQUESTS`.
            arguments: go before the launches of the candidates.
            candidates: are loaded before.
            problem: what the candidates compute; None for the current problem.
        """
        self.wait()
        if not self._worker.alive():
            self._restart()
            self.wait()
        launches = [self._launch(candidate, problem) for candidate in candidates]
        failed = next((launch for launch in launches if isinstance(launch, Failure)), None)
        return failed or self._worker.ask(timeout_s, verb, *arguments, *launches)

    def sample(self, candidates: Sequence[Candidate], *, rounds: int, regime: str) -> list[Batch | Failure]:
        """Interleaved timing. If the group fails, one launch of each alone finds the culprits; the others go again."""
        if rounds:
            self._settle_timing(candidates, regime)
        answer = self._sample_together(candidates, rounds, regime)
        if not isinstance(answer, Failure):
            self._note_others(answer)
            return answer
        if len(candidates) == 1:
            return [answer]
        alone = [self._sample_together([candidate], 1, "burst") for candidate in candidates]
        healthy = [each for each, tried in zip(candidates, alone, strict=True) if not isinstance(tried, Failure)]
        if len(healthy) == len(candidates):  # nobody fails in one launch: each for itself
            return [self.sample([candidate], rounds=rounds, regime=regime)[0] for candidate in candidates]
        again = iter(self.sample(healthy, rounds=rounds, regime=regime) if healthy else [])
        return [tried if isinstance(tried, Failure) else next(again) for tried in alone]

    def _note_others(self, batches: Sequence[Batch | Failure]) -> None:
        """Find the gap again where other processes ran meanwhile; warn once where NVML does not say whether they did."""
        seen = [batch.conditions for batch in batches if isinstance(batch, Batch)]
        if any(each.concurrent_pids for each in seen):
            self._gap_ms = self._given_gap_ms
        doubtful = next((each.others for each in seen if each.concurrent_pids is None), ())
        if doubtful and not self._warned:
            self._warned = True
            log.warning(
                "process %s has the GPU open, and NVML does not tell here whether it runs: what is measured may be "
                "measured beside it",
                ", ".join(map(str, doubtful)),
            )

    def _settle_timing(self, candidates: Sequence[Candidate], regime: str) -> None:
        """Once per problem and regime: launches or graphs, and how far apart. The fastest candidate at hand decides both.

        A candidate that fails here fails again when it is sampled, and is found there.
        """
        fastest = min(candidates, key=self._expected, default=None)
        if fastest is None:
            return
        if regime in ("sustained", "graph") and self._graph_launches is None:
            assert self._problem is not None
            # A graph of several launches does not restore the arrays that they change.
            changes = any(spec.role == "inout" for spec in self._kernel.arrays(self._problem))
            us = self._expected(fastest)
            short = GRAPH_LAUNCHES if us < GRAPH_BELOW_US and not changes else 0
            self._graph_launches = launches_in_graph(us, changes) if regime == "graph" else short
        if regime != "sustained" and self._gap_ms is None:
            if self._expected(fastest) < SHORT_US:
                self._gap_ms = SHORT_GAP_MS
                return
            timeout_s = self._timeouts.sample_s + self._timeouts.each_sample_s * 100
            timeout_s += CALIBRATION_LAUNCHES * self._expected(fastest) / 1e6
            answer = self.ask(timeout_s, "calibrate", candidates=[fastest])
            if not isinstance(answer, Failure):
                self.gap_trials = tuple(answer)
                self._gap_ms = steady_gap(answer).gap_ms

    def _expected(self, candidate: Candidate) -> float:
        return self._expected_us.get(candidate.artifact.fingerprint, UNKNOWN_US)

    def _sample_together(
        self, candidates: Sequence[Candidate], rounds: int, regime: str
    ) -> list[Batch | Failure] | Failure:
        limits = self._timeouts
        settled = self._graph_launches or 0
        graph_launches = {"sustained": settled, "graph": settled or 1, "graph-cold": 1}.get(regime, 0)
        gap_ms = DEFAULT_GAP_MS if self._gap_ms is None else self._gap_ms
        expected_s = sum(map(self._expected, candidates)) / 1e6 * max(1, graph_launches)
        timeout_s = limits.sample_s + rounds * (len(candidates) * limits.each_sample_s + limits.slack * expected_s)
        order = self._draw_seed("order")
        return self.ask(timeout_s, "sample", rounds, regime, order, gap_ms, graph_launches, candidates=candidates)

    def _launch(self, candidate: Candidate, problem: Problem | None = None) -> Launch | Failure:
        """What the worker needs to run `candidate`, which is loaded first if it is not yet."""
        problem = problem or self._problem
        assert problem is not None
        artifact, worker = candidate.artifact, self._worker
        if artifact.fingerprint not in worker.loaded:
            answer = worker.ask(self._timeouts.load_s, "load", artifact.fingerprint, artifact.cubin)
            if isinstance(answer, Failure):
                # The driver does not refuse every torn file: some it reads past the end of, and crashes.
                crashed = answer.kind is FailureKind.WORKER_KILLED and worker.process.poll() in CRASHES
                return replace(answer, kind=FailureKind.ARTIFACT_CORRUPT) if crashed else answer
            worker.loaded.add(artifact.fingerprint)
        try:
            launch = launch_of(self._kernel, problem, candidate.schedule, self.device, artifact.fingerprint)
        except Exception as error:  # the author's grid, say: it costs the candidate, not the run
            return Failure(kind=FailureKind.LAUNCH_FAILURE, message=first_line(error))
        size, room = scratch_bytes(launch.scratch), self._workspace_bytes
        if room is not None and size > room:
            words = (
                f"its workspace takes {size >> 20} MiB, and {room >> 20} MiB are left beside {self.beside_gib:g} GiB"
            )
            return Failure(kind=FailureKind.OUT_OF_MEMORY, message=words)
        return launch

    def meet(self, others: frozenset[int]) -> frozenset[int]:
        """What NVML calls the worker; `others` are processes of the same run, which disturb no measurement."""
        answer = self.ask(self._timeouts.load_s, "meet", others)
        return answer if isinstance(answer, frozenset) else frozenset()

    def companion(self, worker_command: Sequence[str]) -> GpuRunner:
        """A runner of the same kernel on the same GPU, with another kind of worker, which is included in the GPU's lock."""
        gpu = (self._lock.uuid, self.device.name) if self._lock else None
        return GpuRunner(self._kernel, seed=self.seed, timeouts=self._timeouts, worker_command=worker_command, gpu=gpu)

    def close(self) -> None:
        """End the worker and give the GPU back. Safe to call twice."""
        self._worker.kill()
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
