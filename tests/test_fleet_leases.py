"""Leases: who has what until when, on both kinds of database, whoever dies, comes late or asks at once."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import fleet_jobs
import pytest
import sqlalchemy as sa
from store_samples import BACKENDS, PROBLEM, new_url

from tiledsched.core.errors import ConfigError, DatabaseError
from tiledsched.fleet.calibration import Control, is_outlier, spread_of
from tiledsched.fleet.campaign import MISSED, CampaignPlan, Outcome
from tiledsched.fleet.clock import retry_while_unavailable
from tiledsched.fleet.gpus import Gpu, illness, visible
from tiledsched.fleet.jobs import JOBS, find_job
from tiledsched.fleet.leases import Leases, expected
from tiledsched.fleet.status import read_status
from tiledsched.store.db import TuningDB
from tiledsched.store.models import AttemptRow, LeaseRow, WorkerRow

LEASE_S = 60.0


def problems(count):
    return [PROBLEM.replace(heads=number, kv_heads=number) for number in range(1, count + 1)]


def plan(count=3, archs=("sm_90",), **more) -> CampaignPlan:
    given = {"lease_s": LEASE_S, "most_attempts": 3, **more}
    return CampaignPlan(job="tune", kernel="attention", problems={arch: problems(count) for arch in archs}, **given)


@pytest.fixture
def db(request, tmp_path):
    """SQLite; of tests marked so both, each with a database of its own, which takes PostgreSQL half a second."""
    with new_url(getattr(request, "param", "file"), tmp_path) as url, TuningDB.open(url) as opened:
        yield opened


on_both = pytest.mark.parametrize("db", BACKENDS, indirect=True)


@pytest.fixture
def clock():
    return fleet_jobs.MovedClock()


@pytest.fixture
def leases(db, clock):
    return Leases(db, clock=clock.clock, retry_s=0.0)


def join(leases, campaign, name="GPU-1", arch="sm_90"):
    return leases.join(campaign.id, hostname="host", pid=1, gpu=name, device_name="NVIDIA Sample", arch=arch)


def opened(leases, *given, **more):
    """A campaign, and a worker that has joined it."""
    campaign = leases.open(plan(*given, **more))
    return campaign, join(leases, campaign)


def attempts(db):
    with db.reading() as session:
        rows = session.execute(
            sa.select(AttemptRow.lease_id, AttemptRow.number, AttemptRow.outcome).order_by(AttemptRow.id)
        )
        return [tuple(row) for row in rows]


def test_an_arch_is_done_where_it_is(leases) -> None:
    campaign, hopper = opened(leases, 2, archs=("sm_90", "sm_100"))
    for _ in range(2):
        lease = leases.take(campaign, hopper, ["sm_90"])
        assert lease.arch == "sm_90"
        leases.finish(lease, Outcome.DONE)
    assert (leases.take(campaign, hopper, ["sm_90"]), leases.open_archs(campaign.id)) == (None, {"sm_100"})
    assert leases.end(campaign.id, why="no GPU of sm_100 came", archs=["sm_100"]) == "done"
    failed = {(each.arch, each.message, each.attempts) for each in leases.failures(campaign.id)}
    assert failed == {("sm_100", "no GPU of sm_100 came", 0)}


@on_both
def test_a_lease_that_runs_out_is_taken_by_another_and_the_late_result_is_evidence(leases, db, clock) -> None:
    campaign = leases.open(plan(1))
    slow, quick = join(leases, campaign, "GPU-1"), join(leases, campaign, "GPU-2")
    first = leases.take(campaign, slow, ["sm_90"])
    clock.pass_s(MISSED * LEASE_S - 1)
    assert leases.take(campaign, quick, ["sm_90"]) is None
    clock.pass_s(2)
    second = leases.take(campaign, quick, ["sm_90"])
    assert (second.id, second.attempt) == (first.id, 2)
    assert leases.finish(first, Outcome.DONE, result={"us": 2.0}) is Outcome.LATE
    assert leases.counts(campaign.id)["leased"] == 1  # whoever has it goes on
    assert leases.finish(second, Outcome.DONE, result={"us": 1.0}) is Outcome.DONE
    assert leases.results(campaign.id) == [(second.problem, "sm_90", {"us": 1.0}, quick)]
    with db.reading() as session:
        rows = session.execute(sa.select(AttemptRow.outcome, AttemptRow.result).order_by(AttemptRow.id))
        assert [tuple(row) for row in rows] == [("late", {"us": 2.0}), ("done", None)]


def test_who_misses_renewals_is_taken_over_only_by_who_has_nothing_else_to_do(leases, clock) -> None:
    campaign = leases.open(plan(3, most_attempts=2))
    workers = [join(leases, campaign, f"GPU-{number}") for number in range(3)]
    silent, _ = (leases.take(campaign, worker, ["sm_90"]) for worker in workers[:2])
    clock.pass_s(MISSED * LEASE_S + 1)
    leases.renew(campaign, {workers[1]: {}})
    other, again = (leases.take(campaign, workers[2], ["sm_90"]) for _ in range(2))
    assert (other.problem, other.attempt) == (problems(3)[2], 1)
    assert (again.id, again.attempt, again.last) == (silent.id, 2, True)
    clock.pass_s(MISSED * LEASE_S + 1)
    leases.renew(campaign, {worker: {} for worker in workers[:2]})
    leases.finish(other, Outcome.DONE)
    assert leases.take(campaign, workers[0], ["sm_90"]) is None  # it was the last attempt, which has its whole lease
    assert leases.end(campaign.id) == "running"


def test_a_late_result_of_what_nobody_has_is_as_good_as_any(leases, clock) -> None:
    campaign, worker = opened(leases, 1, most_attempts=1)
    lease = leases.take(campaign, worker, ["sm_90"])
    clock.pass_s(LEASE_S + 1)
    assert leases.end(campaign.id) == "done"
    assert ["not heard of" in each.message for each in leases.failures(campaign.id)] == [True]
    assert leases.finish(lease, Outcome.DONE, result={"us": 1.0}) is Outcome.DONE
    assert leases.failures(campaign.id) == []


def test_a_renewed_lease_does_not_run_out(leases, clock) -> None:
    campaign = leases.open(plan(2))
    workers = [join(leases, campaign, f"GPU-{number}") for number in range(2)]
    held = {leases.take(campaign, worker, ["sm_90"]).id for worker in workers}
    for _ in range(5):
        clock.pass_s(LEASE_S / 2)
        assert leases.renew(campaign, {worker: {"temperature_c": 60} for worker in workers}) == held
    assert leases.take(campaign, join(leases, campaign, "GPU-3"), ["sm_90"]) is None
    assert read_status(leases, campaign.id).workers[0].temperature_c == 60


def test_the_control_program_is_of_middling_work_and_the_same_for_all(leases) -> None:
    campaign = leases.open(plan(5, archs=("sm_90", "sm_100")))
    leases.finish(leases.take(campaign, join(leases, campaign), ["sm_90"]), Outcome.DONE)
    for arch in ("sm_90", "sm_100"):
        assert leases.control_problem(campaign.id, arch) == problems(5)[2]
    assert leases.control_problem(campaign.id, "sm_80") is None


@pytest.mark.parametrize(
    ("outcome", "ends"),
    [
        (Outcome.ERROR, ["error", "error", "failed"]),
        (Outcome.HUNG, ["hung", "hung", "failed"]),
        (Outcome.FAILED, ["failed"]),  # the problem's own fault is not tried again
    ],
)
def test_attempts_are_bounded_and_the_reason_is_kept(leases, outcome, ends) -> None:
    campaign, worker = opened(leases, 1)
    found = []
    while lease := leases.take(campaign, worker, ["sm_90"]):
        found.append(leases.finish(lease, outcome, message=f"attempt {lease.attempt} went wrong"))
    assert found == ends
    assert leases.end(campaign.id) == "done"
    (failure,) = leases.failures(campaign.id)
    assert (failure.attempts, failure.message) == (len(ends), f"attempt {len(ends)} went wrong")


def test_what_is_given_back_was_no_attempt(leases) -> None:
    campaign, worker = opened(leases, 1, most_attempts=1)
    for _ in range(4):
        lease = leases.take(campaign, worker, ["sm_90"])
        assert (lease.attempt, lease.last) == (1, True)
        assert leases.finish(lease, Outcome.RELEASED) is Outcome.RELEASED
    assert leases.counts(campaign.id)["waiting"] == 1


@on_both
def test_a_worker_that_leaves_gives_up_what_it_held_at_once(leases, db) -> None:
    campaign = leases.open(plan(1, most_attempts=2))
    for left in (1, 0):
        worker = join(leases, campaign)
        assert leases.take(campaign, worker, ["sm_90"])
        leases.leave(worker, "its GPU fell off the bus")
        assert leases.end(campaign.id) == ("running" if left else "done")
    (failure,) = leases.failures(campaign.id)
    assert failure.message == "its GPU fell off the bus"
    with db.reading() as session:
        assert set(session.scalars(sa.select(WorkerRow.state))) == {"ended"}


@on_both
def test_the_same_plan_goes_on_where_it_stopped(leases) -> None:
    campaign, worker = opened(leases, 3)
    leases.finish(leases.take(campaign, worker, ["sm_90"]), Outcome.DONE)
    leases.finish(leases.take(campaign, worker, ["sm_90"]), Outcome.FAILED, message="no")
    leases.stop(campaign.id)
    assert leases.take(campaign, worker, ["sm_90"]) is None
    again = leases.open(plan(3, lease_s=5.0))  # how patient it is, is no part of what it is
    assert (again.id, again.status, again.lease_s) == (campaign.id, "running", 5.0)
    assert leases.counts(campaign.id) == {"waiting": 2, "leased": 0, "done": 1, "failed": 0}
    assert leases.open(plan(3, options={"effort": "quick"})).id != campaign.id == leases.campaign(campaign.id[:6]).id
    for wrong, why in (
        (lambda: leases.campaign("nonsense"), "fleet status"),
        (lambda: leases.open(plan(0)), "no problem"),
    ):
        with pytest.raises(ConfigError, match=why):
            wrong()


@on_both
@pytest.mark.parametrize("end", ["budget", "nobody"])
def test_what_the_dead_hold_ends_with_a_campaign_that_nobody_goes_on_with(leases, db, clock, end) -> None:
    campaign = leases.open(plan(2, budget_s=100.0 if end == "budget" else None))
    assert leases.take(campaign, join(leases, campaign), ["sm_90"]).attempt == 1
    why = {} if end == "budget" else {"why": "no GPU of sm_90 came", "archs": ["sm_90"]}
    leases.end(campaign.id, **why)
    clock.pass_s(LEASE_S - 1)
    assert leases.end(campaign.id, **why) == "running"
    clock.pass_s(101)
    assert leases.take(campaign, join(leases, campaign), ["sm_100" if why else "sm_90"]) is None
    assert leases.end(campaign.id, **why) == "done"
    spent = why.get("why", "the budget was spent before its turn")
    assert [each.message for each in leases.failures(campaign.id)] == [spent, spent]
    assert [outcome for *_, outcome in attempts(db)] == ["expired"]


@on_both
def test_an_answer_that_is_lost_on_the_way_costs_nothing(leases, db, monkeypatch) -> None:
    """A transaction that was made, and of which nobody heard, is made again: no lease may be held by who does not know of it."""
    patient, write = Leases(db, retry_s=5.0, clock=fleet_jobs.MovedClock().clock), db.write
    lost = itertools.cycle((True, False))  # the first of every two, and then it is made again

    def lossy(work, *kernels):
        done = write(work, *kernels)
        if next(lost):
            raise away("server closed the connection unexpectedly")
        return done

    campaign = patient.open(plan(2))
    monkeypatch.setattr(db, "write", lossy)
    first = patient.take(campaign, join(patient, campaign), ["sm_90"])
    assert patient.counts(campaign.id)["leased"] == 1
    patient.finish(first, Outcome.RELEASED)
    again = patient.take(campaign, join(patient, campaign, "GPU-2"), ["sm_90"])
    assert (again.id, again.attempt) == (first.id, 1)
    patient.finish(first, Outcome.RELEASED)  # late, of the same number: it says nothing of the other's
    patient.finish(again, Outcome.DONE)
    assert [outcome for *_, outcome in attempts(db)] == ["released", "done"]
    assert patient.counts(campaign.id) == {"waiting": 1, "leased": 0, "done": 1, "failed": 0}


@on_both
def test_workers_that_ask_at_once_get_different_problems(db) -> None:
    """The time is the database's here."""
    leases, count = Leases(db), 40
    campaign = leases.open(plan(count))
    taken = Counter()

    def work(name: str) -> None:
        worker = join(leases, campaign, name)
        while lease := leases.take(campaign, worker, ["sm_90"]):
            taken[lease.problem] += 1
            assert leases.finish(lease, Outcome.DONE, result={"us": 1.0}) is Outcome.DONE

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, [f"GPU-{number}" for number in range(6)]))
    assert dict(taken) == dict.fromkeys(problems(count), 1)
    assert leases.end(campaign.id) == "done"
    assert leases.counts(campaign.id) == {"waiting": 0, "leased": 0, "done": count, "failed": 0}
    assert [row[:3] for row in leases.results(campaign.id)] == [
        (each, "sm_90", {"us": 1.0}) for each in problems(count)
    ]
    assert db.check() == []


@on_both
def test_whatever_workers_do_every_problem_ends_once(leases, db, clock) -> None:
    """Random takes, ends, deaths, renewals and lapses of time, against what must always hold."""
    rng, count = random.Random(db.url[:8]), 12
    campaign = leases.open(plan(count))
    held: list = []
    workers = {}
    for _ in range(150):
        move = rng.random()
        if move < 0.45:
            name = f"GPU-{rng.randrange(5)}"
            if name not in workers:
                workers[name] = join(leases, campaign, name)
            lease = leases.take(campaign, workers[name], ["sm_90"])
            held += [lease] if lease else []
        elif move < 0.75 and held:
            lease = held.pop(rng.randrange(len(held)))
            leases.finish(
                lease,
                rng.choice([Outcome.DONE, Outcome.DONE, Outcome.ERROR, Outcome.RELEASED]),
                result={},
                message="so",
            )
        elif move < 0.85 and workers:
            leases.renew(campaign, {workers[rng.choice(list(workers))]: {}})
        elif move < 0.9 and workers:
            leases.leave(workers.pop(rng.choice(list(workers))), "killed")
        else:
            clock.pass_s(rng.uniform(0, LEASE_S))
        counts = leases.counts(campaign.id)
        assert sum(counts.values()) == count
    clock.pass_s(10 * LEASE_S)
    last = join(leases, campaign, "GPU-last")
    while leases.end(campaign.id) == "running":
        lease = leases.take(campaign, last, ["sm_90"])
        leases.finish(lease, Outcome.DONE, result={})
    counts = leases.counts(campaign.id)
    assert counts["done"] + counts["failed"] == count
    with db.reading() as session:
        done = set(session.scalars(sa.select(LeaseRow.id).where(LeaseRow.state == "done")))
    assert {lease for lease, _, outcome in attempts(db) if outcome == "done"} == done
    assert max(Counter(lease for lease, _, outcome in attempts(db) if outcome == "done").values()) == 1


# A database that is away


def away(message="connection refused"):
    error = DatabaseError(message)
    error.__cause__ = sa.exc.OperationalError("SELECT", None, Exception(message))
    return error


@pytest.mark.parametrize(
    ("error", "answers_after", "stopped", "least_s", "most_s", "most_tries"),
    [
        (away(), 30.0, False, 30.0, 40.0, 20),
        (away(), 90.0, False, 59.99, 60.01, 80),
        (DatabaseError("it was opened read-only; no"), 30.0, False, 0.0, 0.0, 1),
        (away(), 30.0, True, 0.0, 0.0, 1),
    ],
    ids=["answers in time", "answers too late", "refuses", "told to stop"],
)
def test_a_database_that_is_away_is_waited_for_and_one_that_refuses_is_not(
    error, answers_after, stopped, least_s, most_s, most_tries
) -> None:
    """For as long as it may be away, in pauses that grow; and no longer where a worker is told to stop."""
    moved, stop, tries = fleet_jobs.MovedClock(), threading.Event(), []
    if stopped:
        stop.set()

    def ask():
        tries.append(moved.seconds)
        if moved.seconds < answers_after:
            raise error

    with contextlib.suppress(DatabaseError):
        retry_while_unavailable(ask, retry_s=60.0, stop=stop, clock=moved.clock)
        assert answers_after <= moved.seconds
    assert least_s <= moved.seconds <= most_s
    assert len(tries) <= most_tries


def test_a_database_whose_disk_is_full_is_waited_for(db) -> None:
    pages = iter([1, 1, 1])  # no more than there are

    @sa.event.listens_for(db._engine, "begin")
    def fill_up(connection: sa.Connection) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {next(pages, 1 << 30)}")

    with pytest.raises(DatabaseError, match="full; free some space"):
        Leases(db, retry_s=0.0).open(plan(200))
    leases = Leases(db, retry_s=5.0, clock=fleet_jobs.MovedClock().clock)
    campaign = leases.open(plan(200))
    assert next(pages, None) is None
    assert leases.counts(campaign.id)["waiting"] == 200
    assert db.check() == []


# Jobs, GPUs, the spread


def test_a_database_does_not_choose_code(monkeypatch) -> None:
    for name, job in JOBS.items():
        assert find_job(name) is job
    for name in ("os:system", "tiledsched.fleet.jobs:control", "fleet_jobs:tune", "nonsense"):
        with pytest.raises(ConfigError, match="TILEDSCHED_FLEET_JOBS"):
            find_job(name)
    monkeypatch.setenv("TILEDSCHED_FLEET_JOBS", "other, fleet_jobs")
    assert find_job("fleet_jobs:tune").run is fleet_jobs.tune


@pytest.mark.parametrize(
    ("named", "seen"), [(None, "012"), ("2,0", "20"), ("GPU-1", "1"), ("1,7,2", "1"), ("", ""), ("GPU-0", "0")]
)
def test_gpus_are_those_that_cuda_would_see(named, seen) -> None:
    found = [Gpu(uuid=f"GPU-{place}", name="H100", arch="sm_90") for place in range(3)]
    environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    assert visible(found, environment) == [found[int(place)] for place in seen]
    assert named != "GPU-0" or found[0].environment() == environment


@pytest.mark.parametrize(("reason", "ill"), [("power cap", ""), ("hardware thermal", "hardware thermal")])
def test_a_gpu_that_is_too_hot_is_ill(reason, ill) -> None:
    assert illness({"throttle_reasons": ["power cap", reason]}) == ill


def control(gpu, us, half=0.1, fingerprint="f", arch="sm_90"):
    return Control(
        gpu=gpu,
        hostname="host",
        arch=arch,
        fingerprint=fingerprint,
        median_us=us,
        ci_low_us=us - half,
        ci_high_us=us + half,
    )


def test_a_gpu_that_differs_by_more_than_noise_is_named_and_by_much_kept_apart() -> None:
    healthy = [control(f"GPU-{number}", 100.0 + 0.2 * number) for number in range(4)]
    found = spread_of([*healthy, control("GPU-slow", 102.5), control("GPU-ill", 109.0)])
    assert {(each.gpu, each.apart) for each in found if each.named} == {("GPU-slow", False), ("GPU-ill", True)}
    noisy = [control("GPU-slow", us, half=2.0) for us in (101.0, 104.0)]
    for unsure in ([*healthy, *noisy], [healthy[0], control("GPU-ill", 109.0)]):  # of two, which is odd?
        assert not any(each.named for each in spread_of(unsure))
    assert not is_outlier(
        [*healthy, control("GPU-b", 50.0, arch="sm_100"), control("GPU-c", 200.0, fingerprint="e")], "GPU-b"
    )


def test_problems_of_most_work_come_first() -> None:
    small, large = PROBLEM, PROBLEM.replace(batch=64)
    assert expected([small, large]) == [large, small]
