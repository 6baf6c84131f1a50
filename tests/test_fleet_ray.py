"""A Ray cluster of several nodes on this machine, with PostgreSQL: workers, nodes and connections are killed, and nothing is lost.

`FLEET_PROBLEMS=500 FLEET_KILLS_S=3 python -m pytest -n 0 --timeout 3600 tests/test_fleet_ray.py -s` is the whole of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import fleet_jobs
import pytest
import sqlalchemy as sa
from postgres import server
from store_samples import new_url
from test_fleet import children, gone

from tiledsched.fleet.campaign import CampaignPlan
from tiledsched.fleet.leases import Leases
from tiledsched.fleet.local import work
from tiledsched.fleet.status import read_status
from tiledsched.store.db import TuningDB
from tiledsched.store.models import AttemptRow

DRIVER = "import sys; from tiledsched.fleet.on_ray import run_on_ray; run_on_ray(*sys.argv[1:3], address=sys.argv[3], say=print)"
PROBLEMS = int(os.environ.get("FLEET_PROBLEMS", "6"))
KILLS_S = float(os.environ.get("FLEET_KILLS_S", "0"))
"""Between two kills, at random; 0 for one of each kind."""
NODES = (("n0", "sm_90", 1), ("n1", "sm_100", 1), ("n2", "sm_90", 1))[: 3 if KILLS_S else 2]
"""Name, arch and GPUs of each node beside the head."""
TESTS = str(Path(__file__).parent)


pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path, monkeypatch):
    server()  # before: what is of this fleet is told by its environment
    for name, value in {
        "TILEDSCHED_FLEET_JOBS": "fleet_jobs",
        "FLEET_FOLDER": str(tmp_path),
        "TILEDSCHED_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), TESTS]),
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "4",
        "RAY_USAGE_STATS_ENABLED": "0",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


class Killer:
    """Kills what belongs to a fleet, and notes what it killed."""

    def __init__(self, cluster, folder, db: TuningDB, seed: int) -> None:
        self.cluster, self.folder, self.db, self.rng = cluster, folder, db, random.Random(seed)
        self.nodes = {}
        self.killed: Counter[str] = Counter()

    def add(self, name: str, arch: str, gpus: int) -> None:
        told = {"FLEET_HOST": name, "FLEET_GPUS": f"{arch}:{gpus}"}
        self.nodes[name] = (
            self.cluster.add_node(num_cpus=1, num_gpus=gpus, object_store_memory=10**8, env_vars=told),
            arch,
            gpus,
        )

    def child(self) -> None:
        """The process that does a problem."""
        self._kill("child", lambda line: b"tiledsched.fleet.child" in line)

    def actor(self) -> None:
        """The process that holds a GPU's worker."""
        self._kill("actor", lambda line: line.startswith(b"ray::GpuActor"))

    def _kill(self, what: str, mine) -> None:
        found = []
        for pid in children(self.folder):
            with contextlib.suppress(OSError):
                if mine(Path(f"/proc/{pid}/cmdline").read_bytes()):
                    found.append(pid)
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.rng.choice(found), signal.SIGKILL)
                self.killed[what] += 1

    def node(self) -> None:
        """A node, without a word; another one like it comes."""
        name = self.rng.choice(list(self.nodes))
        node, arch, gpus = self.nodes.pop(name)
        self.cluster.remove_node(node, allow_graceful=False)
        self.killed["node"] += 1
        self.add(f"{name}+", arch, gpus)

    def connections(self) -> None:
        """Everybody's connection to the database."""
        asked = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        with self.db.reading() as session:
            session.execute(sa.text(asked)).all()
        self.killed["connections"] += 1

    def driver(self) -> None:
        """The process that keeps the actors: all of them die with it, and the same command goes on."""
        self.process.kill()
        self.process.wait()
        self.killed["driver"] += 1
        self.drive()

    def drive(self) -> None:
        """Start it."""
        command = [sys.executable, "-c", DRIVER, self.url, self.campaign_id, self.cluster.address]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, url: str, campaign_id: str, under_way) -> str:
        """Drive a campaign to its end; meanwhile kill one of each, or one at random now and then. What the last driver said."""
        self.url, self.campaign_id = url, campaign_id
        self.drive()
        kinds = [self.child, self.connections, self.actor, self.driver, self.node]
        at_random = [self.child] * 5 + [self.connections] * 4 + [self.actor] * 3 + [self.node] * 2 + [self.driver]
        due_s = math.inf
        while self.process.poll() is None:
            if due_s == math.inf and under_way():
                due_s = 0.0
            if time.monotonic() > due_s and (kinds or KILLS_S):
                self.rng.choice(at_random)() if KILLS_S else kinds.pop(0)()
                due_s = time.monotonic() + self.rng.uniform(0.5, 1.5) * (KILLS_S or 1.0)
            time.sleep(0.1)
        return self.process.communicate()[0]


def plan() -> CampaignPlan:
    wanted = fleet_jobs.problems(PROBLEMS)
    problems = {"sm_90": wanted[: 3 * PROBLEMS // 4], "sm_100": wanted[3 * PROBLEMS // 4 :]}
    options = {"trials": fleet_jobs.PROGRAMS, "sampler": "exhaustive", "pause_s": 0.0 if KILLS_S else 0.3}
    return CampaignPlan(
        job="fleet_jobs:tune",
        kernel="attention",
        problems=problems,
        options=options,
        lease_s=10.0 if KILLS_S else 4.0,
        most_attempts=20,
    )


def check_done(db: TuningDB, leases: Leases, campaign_id: str) -> dict[tuple[object, str], str]:
    """That every problem was done once, and with the right winner; winners by problem and arch."""
    status = read_status(leases, campaign_id)
    assert (status.campaign.status, status.done, status.failed, status.failures) == ("done", PROBLEMS, 0, [])
    with db.reading() as session:
        done = Counter(session.scalars(sa.select(AttemptRow.lease_id).where(AttemptRow.outcome == "done")))
    assert len(done) == PROBLEMS
    assert set(done.values()) == {1}
    assert db.check() == []
    winners = fleet_jobs.winners(db)
    assert len(winners) == PROBLEMS
    return winners


def test_a_cluster_that_is_shot_at_does_everything_once(home, monkeypatch, capsys) -> None:
    """By `FLEET_KILLS_S` also that leases alone come to the same; short tests of them are in test_fleet."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with new_url("postgresql", home) as url, TuningDB.open(url) as db:
        leases = Leases(db)
        campaign = leases.open(plan())
        head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        killer = Killer(cluster, home, db, seed=PROBLEMS)
        try:
            for node in NODES:
                killer.add(*node)
            began = time.monotonic()
            said = killer.run(url, campaign.id, lambda: leases.counts(campaign.id)["leased"] > 0)
            took_s = time.monotonic() - began
            assert killer.process.returncode == 0, said
            on_ray = check_done(db, leases, campaign.id)
            status = read_status(leases, campaign.id)
        finally:
            killer.process.kill()
            cluster.shutdown()
        assert gone(home), [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(home)]
    assert set(killer.killed) == {"child", "actor", "node", "connections", "driver"}
    if not KILLS_S:
        return
    monkeypatch.setenv("FLEET_GPUS", "sm_90:1,sm_100:1")
    with new_url("postgresql", home) as url, TuningDB.open(url) as db:
        leases = Leases(db)
        began = time.monotonic()
        work(url, leases.open(plan()).id)
        alone = check_done(db, leases, campaign.id)
    same = sum(alone[key] == on_ray[key] for key in alone)
    said = f"{PROBLEMS} problems in {took_s:.0f} s; killed {dict(killer.killed)}; {status.lost} attempts made again, {status.late} late"
    with capsys.disabled():
        print(
            f"\n{said}\nleases alone: {time.monotonic() - began:.0f} s, {same} of {len(alone)} winners the same",
            flush=True,
        )
    assert len(alone) - same <= max(1, 0.1 * len(alone))  # the others are ties: both are within a percent of the best
