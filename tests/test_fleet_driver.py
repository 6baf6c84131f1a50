"""The driver of a fleet on Ray, with a Ray of made-up actors: which GPUs it holds, and when."""

from __future__ import annotations

import types

import fleet_jobs
import pytest

from tiledsched.core.errors import ConfigError
from tiledsched.fleet import on_ray
from tiledsched.fleet.campaign import CampaignPlan, Outcome
from tiledsched.fleet.leases import Leases
from tiledsched.store.db import TuningDB

NODES = ("n0", "n1", "n2")


class RayError(Exception): ...


class Call:
    """A call of an actor's method, which is made when its answer is asked for."""

    def __init__(self, actor: Actor, name: str) -> None:
        self.actor, self.name = actor, name


class Actor:
    """One GPU's, on one node."""

    def __init__(self, ray: MadeUpRay, node: str) -> None:
        self.ray, self.node = ray, node
        for name in ("hello", "step", "stop"):
            setattr(self, name, types.SimpleNamespace(remote=lambda name=name: Call(self, name)))

    def _hello(self) -> dict[str, str]:
        gpu = f"GPU-{self.node}"
        self.worker = self.ray.leases.join(
            self.ray.campaign.id, hostname=self.node, pid=1, gpu=gpu, device_name="", arch="sm_90"
        )
        return {"worker": self.worker, "gpu": gpu, "name": "", "arch": "sm_90", "host": self.node}

    def _step(self) -> dict[str, object]:
        """Do one problem; the first host that has one dies of it."""
        leases, campaign = self.ray.leases, self.ray.campaign
        lease = leases.take(campaign, self.worker, ["sm_90"])
        if len(self.ray.alive) == len(NODES):
            self.ray.alive.remove(self.node)
            raise RayError("its node died")
        if lease is not None:
            leases.finish(lease, Outcome.DONE, result={})
        goes_on = "sm_90" in leases.open_archs(campaign.id)
        return {"goes_on": goes_on, "note": "", "said": ["did one"]}


class MadeUpRay:
    """As much of Ray as the driver asks for."""

    util = types.SimpleNamespace(
        scheduling_strategies=types.SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node_id, soft: node_id)
    )
    exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=type("RayTaskError", (RayError,), {}))

    def __init__(self, leases: Leases, campaign) -> None:
        self.leases, self.campaign, self.alive = leases, campaign, [*NODES]
        self.actors: list[Actor] = []
        self.started: list[str] = []
        self.given: list[tuple[object, ...]] = []

    def nodes(self) -> list[dict[str, object]]:
        return [{"NodeID": node, "Alive": node in self.alive, "Resources": {"GPU": 1.0}} for node in NODES]

    def remote(self, kind: type) -> types.SimpleNamespace:
        def start(node: str, arguments: tuple[object, ...]) -> Actor:
            self.started.append(node)
            self.given.append(arguments)
            self.actors.append(Actor(self, node))
            return self.actors[-1]

        return types.SimpleNamespace(
            options=lambda scheduling_strategy, **given: types.SimpleNamespace(
                remote=lambda *arguments: start(scheduling_strategy, arguments)
            )
        )

    def wait(self, calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        self.leases.clock.wait(timeout, None)
        return calls[:1], []

    def get(self, call: Call) -> object:
        return getattr(call.actor, f"_{call.name}")()

    def kill(self, actor: Actor) -> None:
        self.actors.remove(actor)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Make a Ray and a driver of a campaign of so many problems."""
    moved = fleet_jobs.MovedClock()
    with TuningDB.open(tmp_path / "x.db") as db:
        leases = Leases(db, clock=moved.clock)

        def make(count, **more):
            problems = {"sm_90": fleet_jobs.problems(count)}
            ray = MadeUpRay(leases, leases.open(CampaignPlan(job="j:j", kernel="attention", problems=problems)))
            monkeypatch.setattr(on_ray, "ray_module", lambda: ray)
            return ray, on_ray.Driver(db.url, leases, ray.campaign, **more)

        yield make


def test_what_a_lost_host_had_is_done_by_the_others_which_then_give_their_gpus_back(start) -> None:
    said: list[str] = []
    ray, driver = start(5, say=said.append)
    worked = driver.run()
    assert ray.leases.counts(ray.campaign.id) == {"waiting": 0, "leased": 0, "done": 5, "failed": 0}
    assert sorted(ray.started) == [*NODES]
    assert len(ray.alive) == 2
    assert (ray.actors, worked.gpus, worked.notes) == ([], 3, ())
    assert said.count("did one") >= 5
    assert any(line.endswith("its actor was lost (RayError)") for line in said)


def test_an_actor_that_cannot_begin_says_why(start) -> None:
    ray, driver = start(1, nobody_s=0.0)

    def get(call: Call) -> object:
        raise RayError("an error raised in its creation task, x\nTraceback:\n  at y\nConfigError: no GPU 0 here\n")

    ray.get = get
    worked = driver.run()
    assert worked.notes
    assert all("ConfigError: no GPU 0 here, 4 times" in note for note in worked.notes)
    assert "ConfigError: no GPU 0 here" in ray.leases.failures(ray.campaign.id)[0].message


def test_a_gpu_that_answers_may_be_lost_any_number_of_times_and_one_that_is_ill_takes_no_more_part(start) -> None:
    ray, driver = start(1, nobody_s=0.0)
    lives, ray.alive = 6, ["n0"]
    works = {"goes_on": True, "note": "", "said": []}
    ill = {"goes_on": False, "note": "cannot run the control program", "said": []}
    answers = [*[works, RayError("its process was killed")] * lives, ill]

    def get(call: Call) -> object:
        answer = call.actor._hello() if call.name == "hello" else answers.pop(0)
        if isinstance(answer, RayError):
            raise answer
        return answer

    ray.get = get
    (note,) = driver.run().notes
    assert note.endswith(ill["note"])
    assert len(ray.started) == lives + 1
    assert ray.actors == []


@pytest.mark.parametrize(("jobs", "each"), [(None, 3), (5, 5)])
def test_actors_of_one_host_share_its_cpus_unless_told_how_many_to_use(start, monkeypatch, jobs, each) -> None:
    ray, driver = start(4, jobs=jobs)
    ray.alive = ["n0"]
    ray.nodes = lambda: [{"NodeID": "n0", "Alive": True, "Resources": {"GPU": 3.0}}]
    driver.run()
    workers: list[int] = []
    monkeypatch.setattr(on_ray, "default_jobs", lambda: 9)
    monkeypatch.setattr(on_ray, "_own_gpu", lambda job, slot: None)
    monkeypatch.setattr(on_ray, "Worker", lambda *given, jobs, **more: workers.append(jobs))
    monkeypatch.setattr(on_ray, "Heart", lambda *given: types.SimpleNamespace(start=lambda: None))
    for arguments in ray.given:
        on_ray.GpuActor(*arguments)
    assert workers == [each] * 3


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RayError("no token was found. Ensure that"), "lets nobody in: no token was found;"),
        (ConnectionError("failed to connect"), "no Ray cluster answers at head:6379: failed to connect"),
    ],
)
def test_a_cluster_that_lets_nobody_in_ends_with_what_to_do(monkeypatch, error, said) -> None:
    """Ray tells a token that is missing as an error of its own, and one that is wrong, or not sent, as no answer."""

    def init(**given: object) -> None:
        raise error

    ray = types.SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=MadeUpRay.exceptions)
    monkeypatch.setattr(on_ray, "ray_module", lambda: ray)
    with pytest.raises(ConfigError, match=f"{said}.*RAY_AUTH_MODE=token"):
        on_ray.run_on_ray("x.db", "c", address="head:6379")
