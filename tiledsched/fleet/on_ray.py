"""Workers on a Ray cluster: Ray says where they run, the leases say what they do.

- One actor for each GPU. It opens no GPU itself: its worker's child does, and dies with it, so that no dead actor keeps a
  GPU's memory (ray#59872); the GPU is named by UUID and locked, whatever numbers CUDA_VISIBLE_DEVICES holds (ray#44821).
- No time limit of Ray's is used: those count the time in a queue (ray#18916), and a task that hangs is killed by nobody
  (ray#57152). A lease's deadline kills the child, and the actor lives on.
- An actor for whose arch nothing is left gives its GPU back.
- The driver keeps nothing that matters. It may die, and the same command goes on.
- Each host compiles with its own CPUs, which its GPUs share. What one cache folder holds is built once for all that see it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tiledsched.build.pool import default_jobs
from tiledsched.core import extras, registry
from tiledsched.core.errors import ConfigError, MeasureError
from tiledsched.fleet.campaign import Campaign
from tiledsched.fleet.clock import RETRY_S, retry_while_unavailable
from tiledsched.fleet.gpus import Gpu, gpus_of_driver, visible
from tiledsched.fleet.jobs import find_job
from tiledsched.fleet.leases import Leases
from tiledsched.fleet.local import Worked
from tiledsched.fleet.worker import POLL_S, STOP_S, Heart, Worker
from tiledsched.store.db import TuningDB

LOOK_EVERY_S = 2.0
"""Between two looks at the nodes and at the campaign."""
MOST_RESTARTS = 3
"""Restarts of the actor of one GPU, at most, without an answer of it between them."""
NOBODY_S = 600.0
"""How long problems wait for a GPU of their arch to come, e.g. from an autoscaler."""
TOKEN = (
    "where it wants a token (Ray 2.52 and later), set RAY_AUTH_MODE=token, and have its token, the same on all hosts, in "
    "~/.ray/auth_token or where RAY_AUTH_TOKEN_PATH says"
)
"""What Ray does not do by itself for an address that is given, and what it does not tell apart from no answer."""


def ray_module() -> Any:
    """Ray.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            f"a fleet on Ray needs Ray ({error}); run: {extras.installing('fleet')}, or use the GPUs of this host without "
            "--ray-address"
        ) from None
    return ray


class GpuActor:
    """Runs one worker on the GPU that Ray gave this actor, a problem a call.

    Args:
        db: URL of the database.
        campaign_id: what to work on.
        slot: place on its node, for work that needs no GPU; None where it has one.
        jobs: compile processes; None for an even share of one per CPU of its host.
        actors: so many actors share the CPUs of its host, this one included.
        allowed: code that the campaign may name, because the driver's user did.
    """

    def __init__(
        self, db: str, campaign_id: str, slot: int | None, jobs: int | None, actors: int, allowed: tuple[str, ...] = ()
    ) -> None:
        registry.allow(*allowed)
        self._stop = threading.Event()
        leases = Leases(retry_while_unavailable(lambda: TuningDB.open(db), stop=self._stop), stop=self._stop)
        campaign = leases.campaign(campaign_id)
        gpu, self._said = _own_gpu(campaign.job, slot), list[str]()
        jobs = jobs or max(1, default_jobs() // actors)
        self._worker = Worker(leases, db, campaign, gpu, jobs=jobs, stop=self._stop, say=self._said.append)
        Heart(leases, campaign, [self._worker]).start()

    def hello(self) -> dict[str, Any]:
        """The worker's id, its GPU and its host."""
        gpu, host = self._worker.gpu, socket.gethostname()
        return {"worker": self._worker.id, "gpu": gpu.uuid, "name": gpu.name, "arch": gpu.arch, "host": host}

    def step(self) -> dict[str, Any]:
        """Do one problem, or wait a little: what happened, whether to go on, and if not, why. At the end it leaves."""
        self._said.clear()
        goes_on = self._worker.step()
        if not goes_on:
            with suppress(MeasureError):  # of a GPU that is stuck the note says so
                self._worker.end()
        return {"said": list(self._said), "goes_on": goes_on, "note": self._worker.note}

    def stop(self) -> None:
        """Stop what is going on, and give its lease back."""
        self._stop.set()


def _own_gpu(job: str, slot: int | None) -> Gpu:
    """The GPU that Ray gave to this actor."""
    context = ray_module().get_runtime_context()
    if slot is not None:
        return Gpu(uuid=f"{socket.gethostname()}-{context.get_node_id()[:8]}-{slot}", name="", arch="")
    given = [str(each) for each in context.get_accelerator_ids().get("GPU", [])]
    listed = (find_job(job).gpus or gpus_of_driver)()  # its numbers are of all, whatever CUDA_VISIBLE_DEVICES says
    found = visible(listed, {"CUDA_VISIBLE_DEVICES": ",".join(given)})
    if len(found) != 1:
        raise ConfigError(
            f"Ray gave GPU {', '.join(given) or 'none'} to this actor, and the driver of {socket.gethostname()} does not "
            "list it; run there: tiledsched doctor"
        )
    return found[0]


@dataclass
class _Seat:
    """One GPU of the cluster, as the driver knows it."""

    node: str
    """Id of its node."""
    slot: int
    """Its number on that node."""
    actor: Any = None
    """Handle of its actor; None before the first and after the last."""
    call: Any = None
    """The call that its actor has not answered yet."""
    worker: str = ""
    """Id of its worker, once it has said it."""
    arch: str | None = None
    """Its arch; empty where any will do, None while it is not known, or no actor serves it."""
    restarts: int = 0
    """How often its actor was started again since one last answered."""
    closed: bool = False
    """Whether it takes no more part in the campaign."""


class Driver:
    """Keeps an actor on every GPU of a cluster until a campaign ends.

    Args:
        db: URL of the database, as every node reaches it.
        leases: the same database.
        campaign: what is to be done.
        without_gpu: so many workers on each node that need no GPU, in place of those that do.
        jobs: compile processes of each actor; None for one per CPU of each host, shared evenly by its actors.
        say: told what happens, a line each.
        nobody_s: how long problems wait for a GPU of their arch.
    """

    def __init__(
        self,
        db: str,
        leases: Leases,
        campaign: Campaign,
        *,
        without_gpu: int = 0,
        jobs: int | None = None,
        say: Callable[[str], None] = lambda line: None,
        nobody_s: float = NOBODY_S,
    ) -> None:
        self._ray = ray_module()
        self._db, self._leases, self._campaign = db, leases, campaign
        self._without_gpu, self._jobs, self._say, self._nobody_s = without_gpu, jobs, say, nobody_s
        self._seats: dict[tuple[str, int], _Seat] = {}
        self._notes: list[str] = []
        self._missing_s: dict[str, float] = {}

    def run(self) -> Worked:
        """Run until the campaign ends, and replace every actor that dies meanwhile."""
        clock, look_at = self._leases.clock, 0.0
        try:
            while clock.monotonic() < look_at or not self._hopeless():
                if clock.monotonic() >= look_at:
                    look_at = clock.monotonic() + LOOK_EVERY_S
                    self._look_at_nodes()
                calls = {seat.call: seat for seat in self._seats.values() if seat.actor is not None}
                if not calls:
                    clock.wait(POLL_S, None)
                    continue
                ready, _ = self._ray.wait(list(calls), num_returns=1, timeout=1.0)
                for call in ready:
                    self._answered(calls[call])
        finally:
            self._end()
        return Worked(campaigns=(self._campaign.id,), gpus=len(self._seats), notes=tuple(self._notes))

    def _look_at_nodes(self) -> None:
        """A seat, with an actor, for every GPU of every node that is alive."""
        for node in self._ray.nodes():
            count = self._without_gpu or int(node["Resources"].get("GPU", 0))
            for slot in range(count if node["Alive"] else 0):
                seat = self._seats.setdefault((node["NodeID"], slot), _Seat(node["NodeID"], slot))
                if seat.actor is None and not seat.closed:
                    self._start(seat, count)

    def _start(self, seat: _Seat, actors: int) -> None:
        gpu = {} if self._without_gpu else {"num_gpus": 1}
        options = {"num_cpus": 0, "max_concurrency": 2, "max_restarts": 0, "max_task_retries": 0, **gpu}
        there = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=seat.node, soft=False)
        remote = self._ray.remote(GpuActor).options(**options, scheduling_strategy=there)
        seat.actor = remote.remote(
            self._db,
            self._campaign.id,
            seat.slot if self._without_gpu else None,
            self._jobs,
            actors,
            registry.allowed_places(),
        )
        seat.call = seat.actor.hello.remote()

    def _answered(self, seat: _Seat) -> None:
        try:
            answer = self._ray.get(seat.call)
        except self._ray.exceptions.RayError as error:
            self._lost(seat, error)
            return
        if "worker" in answer:
            seat.worker, seat.arch = answer["worker"], answer["arch"]
            self._say(f"{answer['name'] or 'a worker'} {answer['gpu']} on {answer['host']} takes part")
        else:
            seat.restarts = 0  # it works: what killed it before is not this GPU
            for line in answer["said"]:
                self._say(line)
            if answer["note"]:
                self._notes.append(f"{seat.worker}: {answer['note']}")
                self._say(self._notes[-1])
            if not answer["goes_on"]:
                seat.closed = True
                self._let_go(seat)
                return
        seat.call = seat.actor.step.remote()

    def _lost(self, seat: _Seat, error: Exception) -> None:
        """The actor or its host is lost: give back what its worker had leased, and let another actor start."""
        if isinstance(error, self._ray.exceptions.RayTaskError):  # it lives, and says why it cannot
            why = str(error.cause)
        elif "creation task" in str(error):  # it never began, and its traceback says why
            why = str(error).strip().splitlines()[-1]
        else:
            why = f"its actor was lost ({type(error).__name__})"
        self._say(f"{seat.worker or 'a worker'}: {why}")
        if seat.worker:
            self._leases.leave(seat.worker, why)
        self._let_go(seat)
        seat.restarts += 1
        if seat.restarts > MOST_RESTARTS:
            seat.closed = True
            self._notes.append(f"GPU {seat.slot} of node {seat.node[:8]}: {why}, {seat.restarts} times")

    def _let_go(self, seat: _Seat) -> None:
        with suppress(Exception):
            self._ray.kill(seat.actor)
        seat.actor, seat.worker, seat.arch = None, "", None

    def _hopeless(self) -> bool:
        """Give up on what no GPU is there for, for long enough; whether nothing else is left."""
        now, open_archs = self._leases.clock.monotonic(), self._leases.open_archs(self._campaign.id)
        archs = {seat.arch for seat in self._seats.values() if seat.actor is not None}
        for arch in open_archs:
            if archs & {arch, "", None}:  # what is not known yet may be it
                self._missing_s.pop(arch, None)
            elif now - self._missing_s.setdefault(arch, now) > self._nobody_s:
                said = f"; the last that was heard: {self._notes[-1]}" if self._notes else ""
                self._leases.end(
                    self._campaign.id, why=f"no GPU of {arch} took part for {self._nobody_s:g} s{said}", archs=[arch]
                )
        return self._leases.end(self._campaign.id) != "running"

    def _end(self) -> None:
        """Let every actor stop what it does and leave, for as long as that may take; then end it."""
        seats = [seat for seat in self._seats.values() if seat.actor is not None]
        stopping = []
        for seat in seats:
            with suppress(Exception):
                stopping.append(seat.actor.stop.remote())  # its answer is not waited for, and not dropped either
        if seats:
            with suppress(Exception):
                self._ray.wait([seat.call for seat in seats], num_returns=len(seats), timeout=STOP_S + 2.0)
        for seat in seats:
            with suppress(Exception):
                self._ray.kill(seat.actor)


def run_on_ray(
    db: str,
    campaign_id: str,
    *,
    address: str | None,
    without_gpu: int = 0,
    jobs: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    retry_s: float = RETRY_S,
    nobody_s: float = NOBODY_S,
) -> Worked:
    """Work on a campaign with every GPU of a Ray cluster, until it ends.

    Args:
        db: URL of the database, as every node reaches it.
        campaign_id: which.
        address: of the cluster: `auto`, `HOST:PORT` or `ray://...`; `local` starts one on this machine.
        without_gpu: so many workers on each node that need no GPU.
        jobs: compile processes of each actor; None for one per CPU of each host, shared evenly by its actors.
        say: told what happens, a line each.
        retry_s: how long the database may be away.
        nobody_s: how long problems wait for a GPU of their arch to come.

    Raises:
        ConfigError: Ray is not installed, there is no cluster, or the database is a file on a cluster of several hosts.
        KeyboardInterrupt: after Ctrl-C, once everything is ended.
    """
    ray = ray_module()
    ours = not ray.is_initialized()
    if ours:
        try:
            local = {"include_dashboard": False} if address == "local" else {}
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **local)
        except ray.exceptions.RayError as error:
            said = str(error).partition(". ")[0]
            raise ConfigError(f"the Ray cluster at {address} lets nobody in: {said}; {TOKEN}") from error
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {address}: {error}; start one with: ray start --head; {TOKEN}"
            ) from error
    try:
        hosts = {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
        with retry_while_unavailable(lambda: TuningDB.open(db), retry_s=retry_s) as opened:
            if len(hosts) > 1 and opened.url.startswith("sqlite"):
                raise ConfigError(
                    f"the database is a file, and the cluster has {len(hosts)} hosts, which would each have their own; "
                    "pass --db postgresql://HOST/NAME"
                )
            leases = Leases(opened, retry_s=retry_s)
            driver = Driver(
                db, leases, leases.campaign(campaign_id), without_gpu=without_gpu, jobs=jobs, say=say, nobody_s=nobody_s
            )
            return driver.run()
    finally:
        if ours:
            ray.shutdown()
