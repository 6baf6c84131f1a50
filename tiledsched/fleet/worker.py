"""A worker: it takes one lease after another for one GPU, lets a child process do the problem, and outlives whatever that does.

It opens no GPU and loads no kernel itself, so that it can always renew its lease, note what happened, and kill: a hung GPU takes
down the child alone. That is also why no timeout of a scheduler is needed, which would count the time in a queue.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from tiledsched.core import processes, registry
from tiledsched.core.config import log
from tiledsched.core.errors import DatabaseError, MeasureError
from tiledsched.core.problem import Problem
from tiledsched.fleet import calibration, status
from tiledsched.fleet.campaign import Answer, Campaign, Outcome, Setup
from tiledsched.fleet.clock import Clock
from tiledsched.fleet.gpus import ANSWER_S, Gpu, GpuState, illness
from tiledsched.fleet.leases import Leases
from tiledsched.measure.gpu import END_TIMEOUT_S
from tiledsched.measure.nvml import LABEL_VARIABLE

START_S = 120.0
"""How long a child may take until it is ready: its imports, on a cold file system."""
STOP_S = 7.0
"""How long a child may take to end its job and bring home what it found, once it is told to stop; then it is killed."""
POLL_S = FIRST_IDLE_S = 0.2
MOST_FAULTS = 2
"""Attempts in a row that end by the GPU's or the host's fault, after which it has to prove itself by the control program."""
CONTROL_EVERY = 20
"""Problems between two timings of the control program."""
COOLING_S = 60.0
"""How long a GPU that is throttled by heat is left to cool before it goes on."""
ROOM_S = 60.0
"""How long, in all, a worker waits for room on a full disk before that counts as a fault."""


class ChildLostError(Exception):
    """The child was not ready in time, or ended as it started."""


class Worker:
    """Works with one GPU.

    Args:
        leases: what to ask for work; shared by the threads of a process.
        db: URL of the same database, for the child.
        campaign: what to work on.
        gpu: with what.
        jobs: compile processes.
        stop: ends it, within ten seconds.
        say: told what happens, a line each.
        start: starts a child, given its setup, what its environment has besides, and the clock.
    """

    def __init__(
        self,
        leases: Leases,
        db: str,
        campaign: Campaign,
        gpu: Gpu,
        *,
        jobs: int,
        stop: threading.Event,
        say: Callable[[str], None] = lambda line: None,
        start: Callable[[Setup, Mapping[str, str], Clock], _Process] | None = None,
    ) -> None:
        self.gpu, self.campaign, self.note, self.ended = gpu, campaign, "", False
        self.gpu_state = GpuState(gpu, leases.clock)
        self._leases, self._stop, self._say, self._start = leases, stop, say, start or _Process
        self._setup = Setup(db=db, campaign=campaign, jobs=jobs, allowed=registry.allowed_places())
        self._child: _Process | None = None
        self._label, self._faults, self._since_control = "", 0, CONTROL_EVERY
        self._doing = self._fault = ""
        self._waited_s, self._idle_s = 0.0, FIRST_IDLE_S
        self._middle: Problem | None = None
        self._archs = gpu.archs(leases.open_archs(campaign.id))
        self.id = leases.join(
            campaign.id,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            gpu=gpu.uuid,
            device_name=gpu.name,
            arch=gpu.arch,
        )

    def state(self, within_s: float) -> dict[str, Any]:
        """What is stored with each renewal of its lease; the state of its GPU is waited for at most `within_s`."""
        return {**self.gpu_state.read(within_s), "doing": self._doing, "label": self._label}

    def run(self) -> None:
        """Work until nothing is left to do, the campaign is stopped, or this GPU cannot go on."""
        try:
            while self.step():
                pass
        finally:
            self.end()

    def step(self) -> bool:
        """Do one problem, or wait a little where there is none now. Returns whether there may be more to do."""
        if self.one() is not None:
            self._idle_s = FIRST_IDLE_S
        elif self._stop.is_set() or self.note or self.finished():
            return False
        else:
            self._leases.clock.wait(self._idle_s, self._stop)
            self._idle_s = min(2 * self._idle_s, self.campaign.lease_s / 4, 10.0)
        return not self._stop.is_set()

    def finished(self) -> bool:
        """Whether there is nothing to wait for: all is done, or what is left is of other archs."""
        if self._leases.end(self.campaign.id) != "running":
            return True
        self._archs = self.gpu.archs(self._leases.open_archs(self.campaign.id))
        return not self._archs

    def one(self) -> Outcome | None:
        """Take one problem and do it; how it ended, or None where there was none, or the GPU cannot go on (`note` says why)."""
        self._cool_down()
        if self._stop.is_set() or not self._ready():
            return None
        lease = self._leases.take(self.campaign, self.id, self._archs)
        if lease is None:
            return None
        clock = self._leases.clock
        began = clock.monotonic()
        what = f"{lease.problem} ({lease.arch}, attempt {lease.attempt})"
        outcome, result, message = self._ask(what, "work", lease, self._share_s())
        waits = outcome is Outcome.FULL and self._waited_s < ROOM_S
        if outcome is Outcome.FULL:
            outcome = Outcome.RELEASED if waits else Outcome.ERROR
        elif outcome is Outcome.DONE:
            self._waited_s = 0.0
        self._faults = self._faults + 1 if outcome in (Outcome.ERROR, Outcome.HUNG) else 0
        self._fault = message
        outcome = self._leases.finish(lease, outcome, result=result, message=message)
        self._say(
            f"{lease.problem} on {self.gpu.name or self.gpu.uuid}: {outcome}, {clock.monotonic() - began:.1f} s"
            + (f": {message}" if message else "")
        )
        if waits:
            self._wait_for_room(message)
        self._since_control += 1
        return outcome

    def _wait_for_room(self, message: str) -> None:
        """A pause, twice as long each time, after which the disk may have room again; meanwhile others have its problem."""
        pause_s = min(max(1.0, self._waited_s), 10.0, ROOM_S)
        self._doing = f"waits for room on its disk: {message}"
        self._say(f"{self.gpu.name or self.gpu.uuid} {self._doing}")
        self._leases.clock.wait(pause_s, self._stop)
        self._waited_s += pause_s
        self._doing = ""

    def _share_s(self) -> float | None:
        """How long the next problem may take where the campaign has a budget: an even share of what is left; None without a
        budget.
        """
        if self.campaign.ends_at is None:
            return None
        left_s = (self.campaign.ends_at - self._leases.time()).total_seconds()
        counts = self._leases.counts(self.campaign.id)
        workers = max(1, counts["leased"])
        return max(1.0, min(left_s, left_s * workers / max(1, counts["waiting"] + counts["leased"])))

    def _cool_down(self) -> None:
        """Wait while the GPU is throttled by heat: what it measured so would be worth little."""
        clock = self._leases.clock
        gives_up = clock.monotonic() + COOLING_S
        while (ill := illness(self.gpu_state.read())) and clock.monotonic() < gives_up:
            self._doing = f"cooling: {ill}"
            if clock.wait(1.0, self._stop):
                break
        self._doing = ""

    def _ready(self) -> bool:
        """Whether a child is there, and this GPU has shown what it is; `note` says why not."""
        if self._child is None:
            try:
                label = {LABEL_VARIABLE: self._label} if self._label else {}
                self._child = self._start(self._setup, {**self.gpu.environment(), **label}, self._leases.clock)
            except ChildLostError as error:
                self._faults += 1
                if self._faults > MOST_FAULTS:
                    self.note = str(error)
                return False
            if self._child.wrong:
                self.note = self._child.wrong
                return False
        if self.gpu.arch and (self._since_control >= CONTROL_EVERY or self._faults >= MOST_FAULTS):
            return self._control()
        if self._faults > MOST_FAULTS:
            self.note = f"{self._faults} attempts in a row failed here, the last: {self._fault}"
        return not self.note

    def _control(self) -> bool:
        """Time the control program. A GPU that cannot run it takes no work; the evidence of one that differs from the others of
        its arch is stored under another name.
        """
        problem = self._middle = self._middle or self._leases.control_problem(self.campaign.id, self.gpu.arch)
        self._since_control = 0
        if problem is None:
            return True
        outcome, timed, message = self._ask("control program", "control", problem, self.gpu.arch)
        if timed is None:
            if outcome is Outcome.FULL and self._waited_s < ROOM_S:
                self._since_control = CONTROL_EVERY
                self._wait_for_room(message)
            elif outcome is not Outcome.RELEASED:
                self.note = f"cannot run the control program: {message}"
            return False
        self._faults = 0
        self._leases.note_control(self.campaign.id, self.id, self.gpu.uuid, self.gpu.arch, timed)
        label = (
            self.gpu.uuid[:12]
            if calibration.is_outlier(status.controls_of(self._leases.db, self.campaign.id), self.gpu.uuid)
            else ""
        )
        if label != self._label:
            self._label = label
            self._say(
                f"{self.gpu.name} {self.gpu.uuid} differs from its like: its evidence is kept apart"
                if label
                else f"{self.gpu.name} {self.gpu.uuid} is as its like again"
            )
            if self._child is not None:
                self._child.kill()
                self._child = None  # a new one names its GPU so
            return self._ready()
        return True

    def _ask(self, what: str, verb: str, *arguments: Any) -> Answer:
        """The child's answer, or what stands for it where the child ends first; meanwhile `what` is what this worker does."""
        assert self._child is not None

        def hear(stage: str) -> None:
            self._doing = f"{what}: {stage}"

        self._doing = what
        answer = self._child.ask(
            (verb, *arguments), deadline_s=self.campaign.deadline_s, stop=self._stop, on_stage=hear
        )
        self._doing = ""
        if self._child.lost:
            self._child = None
        return answer

    def end(self) -> None:
        """End the child and leave the campaign. Safe to call twice.

        Raises:
            MeasureError: the child cannot be ended. What it held is given back all the same.
        """
        self.ended, child, self._child = True, self._child, None
        try:
            if child is not None:
                child.end()
        except MeasureError as error:
            self.note = self.note or str(error)
            raise
        finally:
            with suppress(DatabaseError):  # who does not hear it learns it from the lease
                self._leases.leave(self.id, self.note)


class _Process:
    """A child process, which ends with this process however this ends, and the pipe to it."""

    def __init__(self, setup: Setup, environment: Mapping[str, str], clock: Clock) -> None:
        self._clock = clock
        self._pipe, theirs = Pipe()
        whole = {**processes.child_environment(), "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **environment}
        command = [*processes.python_command("tiledsched.fleet.child"), str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=whole,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.lost = False
        try:
            self._pipe.send(setup)
            if self._pipe.poll(START_S):
                self.wrong: str = self._pipe.recv()[1]
                return
            why = f"was not ready within {START_S:g} s"
        except (EOFError, OSError):
            why = f"ended with code {self._wait(5.0)} as it started"
        self.kill()
        raise ChildLostError(f"the working process {why}")

    def ask(
        self, request: Sequence[Any], *, deadline_s: float, stop: threading.Event, on_stage: Callable[[str], None]
    ) -> Answer:
        """The child's answer to one request; what it says meanwhile is passed on.

        A child that ends, is past its deadline, or does not stop in time is killed, and `lost` then.
        """
        deadline, stopping = self._clock.monotonic() + deadline_s, None
        try:
            self._pipe.send(request)
            while True:
                if self._pipe.poll(POLL_S):
                    verb, *values = self._pipe.recv()
                    if verb == "answer":
                        return values[0], values[1], values[2]
                    on_stage(*values)
                    continue
                now = self._clock.monotonic()
                if stop.is_set() and stopping is None:
                    stopping = now + STOP_S
                    self._process.send_signal(signal.SIGTERM)
                if stopping is not None and now > stopping:
                    return self._lost(Outcome.RELEASED, "stopped, and killed because it did not end in time")
                if now > deadline:
                    why = f"no answer within its deadline of {deadline_s:g} s; its process was killed"
                    return self._lost(Outcome.HUNG, why)
        except (EOFError, OSError):
            code = self._wait(5.0)
            if stop.is_set():
                return self._lost(Outcome.RELEASED, "")
            return self._lost(Outcome.ERROR, f"the working process ended with code {code}")

    def _lost(self, outcome: Outcome, why: str) -> Answer:
        self.lost = True
        self.kill()
        return outcome, None, why

    def _wait(self, seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self) -> None:
        """Let it end by itself, and see to it that it does."""
        with suppress(OSError):
            self._pipe.send(("end",))
        self._wait(2.0)
        self.kill()

    def kill(self) -> None:
        """End it and its group now. Safe to call twice.

        Raises:
            MeasureError: it cannot be ended: the driver is stuck.
        """
        self._pipe.close()
        if self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._wait(END_TIMEOUT_S) is None:
            raise MeasureError(
                "a working process cannot be killed: its GPU is stuck; reset it or restart the machine, then run: "
                "tiledsched doctor"
            )


class Heart(threading.Thread):
    """Renews the leases of all workers of a process, four times as often as they run out.

    Args:
        leases: what to renew with.
        campaign: whose leases.
        workers: whose; the list may grow.
    """

    def __init__(self, leases: Leases, campaign: Campaign, workers: list[Worker]) -> None:
        super().__init__(daemon=True)
        self._leases, self._campaign, self._workers = leases, campaign, workers
        self._ended = threading.Event()

    def run(self) -> None:
        """Renew the leases of all workers until `end` is called."""
        within_s = min(self._campaign.lease_s / 8, ANSWER_S)
        while not self._leases.clock.wait(min(self._campaign.lease_s / 4, 30.0), self._ended):
            # What a worker that ended could not give back must run out.
            workers = [worker for worker in list(self._workers) if not worker.ended]
            if not workers:
                continue
            alive = {worker.id: worker.state(within_s) for worker in workers}
            try:
                self._leases.renew(self._campaign, alive)
            except DatabaseError as error:  # it was away for longer than anybody waits; workers will meet that, too
                log.warning("leases could not be renewed: %s", error)

    def end(self) -> None:
        """Renew no more."""
        self._ended.set()
