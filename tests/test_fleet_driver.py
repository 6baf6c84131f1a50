"""The driver of a fleet on Ray, with a Ray of made-up actors: which GPUs it holds, and when."""

from __future__ import annotations

import socket
import types

import fleet_jobs
import pytest

from tiledsched.core.errors import ConfigError
from tiledsched.fleet import on_ray
from tiledsched.fleet.campaign import CampaignPlan, Lease, Outcome
from tiledsched.fleet.leases import Leases
from tiledsched.fleet.on_ray import Driver
from tiledsched.store.db import TuningDB


class RayError(Exception): ...


class Actor:
    """One GPU's, on one node: it does at once what it takes, except while that is held."""

    def __init__(self, ray: MadeUpRay, node: str) -> None:
        self.ray, self.node, self.lease = ray, node, None
        for name in ("hello", "step", "end", "stop"):
            setattr(self, name, types.SimpleNamespace(remote=lambda name=name: Call(self, name)))

    def _hello(self) -> dict[str, str]:
        leases, campaign = self.ray.leases, self.ray.campaign
        self.worker = leases.join(
            campaign.id, hostname=self.node, pid=1, gpu=f"GPU-{self.node}", device_name="", arch="sm_90"
        )
        return {"worker": self.worker, "gpu": f"GPU-{self.node}", "name": "", "arch": "sm_90", "host": self.node}

    def _step(self) -> dict[str, object]:
        leases, campaign = self.ray.leases, self.ray.campaign
        lease, self.lease = self.lease or leases.take(campaign, self.worker, ["sm_90"]), None
        outcome = leases.finish(lease, Outcome.DONE, result={}) if lease else None
        finished = lease is None and "sm_90" not in leases.open_archs(campaign.id)
        return {"outcome": outcome and str(outcome), "note": "", "finished": finished, "said": []}

    def _end(self) -> None:
        self.ray.leases.leave(self.worker)

    def _stop(self) -> None: ...


class Call:
    def __init__(self, actor: Actor, name: str) -> None:
        self.actor, self.name = actor, name

    def ready(self) -> bool:
        """Not while its actor does the problem that is held."""
        actor, ray = self.actor, self.actor.ray
        if self.name == "step" and ray.holds is None and actor.node in ray.alive and not ray.had:
            actor.lease = ray.holds = ray.leases.take(ray.campaign, actor.worker, ["sm_90"])
            ray.holder = actor
        return actor.node not in ray.alive or self.name != "step" or actor is not ray.holder


class MadeUpRay:
    """As much of Ray as the driver asks for; the first problem that is taken is never done by the actor that has it."""

    exceptions = types.SimpleNamespace(RayError=RayError, RayTaskError=type("RayTaskError", (RayError,), {}))

    def __init__(self, leases: Leases, campaign) -> None:
        self.leases, self.campaign = leases, campaign
        self.alive = ["n0", "n1", "n2"]
        self.actors: list[Actor] = []
        self.started: list[str] = []
        self.holds: Lease | None = None
        self.holder: Actor | None = None
        self.had = False

    def nodes(self) -> list[dict[str, object]]:
        return [{"NodeID": node, "Alive": node in self.alive, "Resources": {"GPU": 1.0}} for node in ("n0", "n1", "n2")]

    def remote(self, kind: type) -> types.SimpleNamespace:
        def start(node: str) -> Actor:
            self.started.append(node)
            self.actors.append(Actor(self, node))
            return self.actors[-1]

        return types.SimpleNamespace(
            options=lambda scheduling_strategy, **given: types.SimpleNamespace(
                remote=lambda *arguments: start(scheduling_strategy)
            )
        )

    def wait(self, calls: list[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        ready = [call for call in calls if call.ready()]
        if (
            not ready and self.holder in self.actors and len(self.actors) == 1
        ):  # all others were let go: now its host dies
            self.alive.remove(self.holder.node)
            self.had = True
        return ready[:1], []

    def get(self, call: Call) -> object:
        if call.actor.node not in self.alive:
            raise RayError("its node died")
        return getattr(call.actor, f"_{call.name}")()

    def kill(self, actor: Actor) -> None:
        self.actors = [each for each in self.actors if each is not actor]


def test_an_actor_with_nothing_left_gives_its_gpu_back_and_comes_again_where_it_is_needed(
    tmp_path, monkeypatch
) -> None:
    """Two of three GPUs are idle while the third does the last problem; its host dies, and one of them is taken again."""
    monkeypatch.setattr(on_ray, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(on_ray, "on_node", lambda node: node)
    with TuningDB.open(tmp_path / "x.db") as db:
        leases = Leases(db)
        plan = CampaignPlan(
            job="tiledsched.fleet.jobs:tune", kernel="attention", problems={"sm_90": fleet_jobs.problems(5)}
        )
        ray = MadeUpRay(leases, leases.open(plan))
        monkeypatch.setattr(on_ray, "ray_module", lambda: ray)
        worked = Driver("", leases, ray.campaign, spread_builds=False).run()
        assert ray.had
        assert leases.counts(ray.campaign.id) == {"waiting": 0, "leased": 0, "done": 5, "failed": 0}
        (died,) = {"n0", "n1", "n2"} - set(ray.alive)
        assert sorted(ray.started[:3]) == ["n0", "n1", "n2"]
        assert len(ray.started) == 4
        assert ray.started[3] != died
        assert (ray.actors, worked.notes) == ([], ())


def test_an_actor_that_cannot_begin_says_why(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(on_ray, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(on_ray, "on_node", lambda node: node)
    with TuningDB.open(tmp_path / "x.db") as db:
        leases = Leases(db)
        plan = CampaignPlan(job="j:j", kernel="attention", problems={"sm_90": fleet_jobs.problems(1)})
        ray = MadeUpRay(leases, leases.open(plan))
        monkeypatch.setattr(on_ray, "ray_module", lambda: ray)

        def get(call: Call) -> object:
            raise RayError("an error raised in its creation task, x\nTraceback:\n  at y\nConfigError: no GPU 0 here\n")

        ray.get = get
        worked = Driver("", leases, ray.campaign, spread_builds=False, nobody_s=0.0).run()
        assert worked.notes
        assert all("ConfigError: no GPU 0 here, 4 times" in note for note in worked.notes)
        assert "ConfigError: no GPU 0 here" in leases.failures(ray.campaign.id)[0].message


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


def test_a_cluster_that_a_wrong_token_does_not_reach_is_not_taken_for_none(monkeypatch) -> None:
    def init(**given: object) -> None:
        raise ConnectionError(f"Failed to connect to Ray cluster at {host}:{port}")

    ray = types.SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=MadeUpRay.exceptions)
    monkeypatch.setattr(on_ray, "ray_module", lambda: ray)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with pytest.raises(ConfigError, match=r"something listens, and lets nobody in.*the same on all hosts"):
            on_ray.run_on_ray("x.db", "c", address="auto")
    with pytest.raises(ConfigError, match="no Ray cluster answers at auto"):
        on_ray.run_on_ray("x.db", "c", address="auto")


def test_what_can_be_taken_is_counted_by_arch(tmp_path) -> None:
    with TuningDB.open(tmp_path / "x.db") as db:
        leases = Leases(db)
        problems = {"sm_90": fleet_jobs.problems(2), "sm_100": fleet_jobs.problems(1)}
        campaign = leases.open(CampaignPlan(job="j:j", kernel="attention", problems=problems, most_attempts=1))
        worker = leases.join(campaign.id, hostname="h", pid=1, gpu="GPU-1", device_name="", arch="sm_90")
        assert leases.takeable(campaign) == {"sm_90": 2, "sm_100": 1}
        lease = leases.take(campaign, worker, ["sm_90"])
        assert leases.takeable(campaign) == {"sm_90": 1, "sm_100": 1}
        leases.finish(lease, Outcome.RELEASED)
        leases.take(campaign, worker, ["sm_100"])
        leases.leave(worker)  # it had its only attempt
        assert leases.takeable(campaign) == {"sm_90": 2}
