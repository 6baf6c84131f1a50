"""The simulator of a fleet: its leases are the real ones, and those it models answer alike."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

from test_fleet_leases import LEASE_S, clock, join, plan, problems

from docs.studies import fleet_simulation
from docs.studies.fleet_simulation import SimulationOptions, recorded_times, simulate_fleet
from docs.studies.modelled_leases import ModelledLeases
from tiledsched.fleet.campaign import Outcome
from tiledsched.fleet.leases import Leases
from tiledsched.store.db import TuningDB

__all__ = ["clock"]


def test_the_simulator_uses_the_real_leases_and_loses_nothing(monkeypatch) -> None:
    # Each question takes a millisecond: what a busy machine makes of it would let leases run out.
    monkeypatch.setattr(fleet_simulation, "time", SimpleNamespace(perf_counter=itertools.count(step=0.001).__next__))
    given = SimulationOptions(gpus=16, problems=60, deaths=0.1, lease_s=30.0)
    found = simulate_fleet(given, recorded_times("quick", 2))
    assert (found.done, found.failed) == (60, 0)
    assert found.attempts > 60
    assert 0 < found.over_ideal < 10
    assert 0 < found.database_busy < 1
    assert set(found.questions) == {"take", "read", "send home", "finish", "renew", "end"}
    assert "first to break: the database" in str(found)
    mixed = simulate_fleet(
        SimulationOptions(gpus=16, problems=60, deaths=0.1, lease_s=30.0, real=20), recorded_times("quick", 2)
    )
    assert (mixed.done, mixed.failed) == (60, 0)


def test_modelled_leases_answer_as_real_ones_do(tmp_path, clock) -> None:
    rng = random.Random(3)
    with TuningDB.open(tmp_path / "x.db") as db:
        real = Leases(db, clock=clock.clock)
        campaign = real.open(plan(10))
        workers = [join(real, campaign, f"GPU-{number}") for number in range(3)]
        held = {workers[0]: real.take(campaign, workers[0], ["sm_90"])}
        modelled = ModelledLeases(real, campaign, {each.id: each for each in problems(10)}, clock.now)
        for _ in range(120):
            worker = rng.choice(workers)
            move = rng.random()
            if move < 0.4 and not held.get(worker):
                both = [leases.take(campaign, worker, ["sm_90"]) for leases in (real, modelled)]
                assert both[0] == both[1]
                held[worker] = both[0]
            elif move < 0.6 and held.get(worker):
                lease = held.pop(worker)
                assert real.finish(lease, Outcome.DONE) is modelled.finish(lease, Outcome.DONE)
            elif move < 0.7:
                assert real.renew(campaign, {worker: {}}) == modelled.renew(campaign, {worker: {}})
            else:
                clock.pass_s(rng.uniform(0, LEASE_S / 2))
                assert real.end(campaign.id) == modelled.end(campaign.id)
            assert real.counts(campaign.id) == modelled.counts(campaign.id)
