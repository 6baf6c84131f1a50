"""The race, on a runner made of arithmetic: given times, noise, drift and failures."""

from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import replace

import pytest
from store_samples import DEVICE, PROBLEM, artifact

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Batch, Candidate, Checked, Conditions, Failed, Measurement
from tiledsched.measure.statistics import median_interval
from tiledsched.tuning.race import RULES, Rules, near, race, settle

ACCURACY = Accuracy(max_abs_error=1e-3, worst_tile_error=5e-4, worst_tile=(0, 0, 0), repeatable=True)
HANG = Failure(kind=FailureKind.HANG, message="no answer")


class SyntheticRunner:
    """Times are `true_us` times a drift that grows with every sample taken, times noise.

    `failing`: name -> "probe", "check", or the number of samples after which it fails. `looks_us`: looks that mislead.
    """

    name = "gpu"
    device = DEVICE
    device_name = DEVICE.name

    def __init__(self, true_us, *, noise=0.0, drift=0.0, seed=0, failing=None, interrupt_after=math.inf, looks_us=None):
        self.looks_us = looks_us or {}
        self.looked, self.checked = [], []
        self.true_us, self.noise, self.drift = true_us, noise, drift
        self.failing = failing or {}
        self.interrupt_after = interrupt_after
        self.rng = random.Random(seed)
        self.taken = 0
        self.samples = dict.fromkeys(true_us, 0)
        self.calls = []

    def begin(self, problem): ...

    def close(self): ...

    def time_of(self, name):
        if self.taken >= self.interrupt_after:
            raise KeyboardInterrupt
        self.taken += 1
        return self.true_us[name] * (1 + self.drift * self.taken) * math.exp(self.rng.gauss(0, self.noise))

    def probe(self, candidate):
        name = candidate.schedule["name"]
        self.looked.append(name)
        if self.failing.get(name) == "probe":
            return HANG
        return self.looks_us.pop(name, None) or self.time_of(name)

    def check(self, candidate):
        name = candidate.schedule["name"]
        self.checked.append(name)
        if self.failing.get(name) == "check":
            return HANG
        return Checked(accuracy=ACCURACY, first_look_us=self.time_of(name))

    def sample(self, candidates, *, rounds, regime):
        names = [candidate.schedule["name"] for candidate in candidates]
        self.calls.append((tuple(names), rounds))
        times = {name: [] for name in names}
        for _ in range(rounds):
            order = names[:]
            self.rng.shuffle(order)
            for name in order:
                times[name].append(self.time_of(name))
        for name in names:
            self.samples[name] += rounds
        conditions = Conditions(sm_clock_mhz=1980)
        limits = {name: limit for name, limit in self.failing.items() if not isinstance(limit, str)}
        return [
            HANG
            if self.samples[name] > limits.get(name, math.inf)
            else Batch(samples_us=tuple(times[name]), conditions=conditions)
            for name in names
        ]


def candidate(name):
    return Candidate(schedule=Schedule(name=name), artifact=artifact(stable_id(name, 24)))


def run(runner, order=None, **more):
    """The race's result and what it reported, by name."""
    reported = []
    candidates = [candidate(name) for name in order or runner.true_us]
    result = race(runner, PROBLEM, candidates, on_outcome=reported.append, **more)
    names = [outcome.schedule["name"] for outcome in reported]
    assert len(names) == len(set(names)), "reported twice"
    assert set(reported) == set(result.outcomes)
    return result, dict(zip(names, reported, strict=True))


def name_of(schedule_or_measurement):
    return getattr(schedule_or_measurement, "schedule", schedule_or_measurement)["name"]


@pytest.mark.parametrize("seed", range(10))
def test_the_fastest_wins_through_noise_and_drift(seed):
    times = {f"c{i}": 100 * 1.015**i for i in range(40)}
    order = list(times)
    random.Random(seed).shuffle(order)
    runner = SyntheticRunner(times, noise=0.005, drift=2e-5, seed=seed)
    result, reported = run(runner, order)
    assert name_of(result.winner) == "c0"
    assert name_of(result.runner_up) == "c1"
    assert result.margin == pytest.approx(0.015, abs=0.005)
    assert not result.ties
    assert set(reported) == set(times)
    assert sum(runner.samples.values()) < 40 * 15
    assert 13 <= runner.samples["c0"] <= Rules().most_rounds
    assert max(runner.samples.values()) == runner.samples["c0"]


def test_a_measurement_holds_its_evidence():
    result, _ = run(SyntheticRunner({"a": 100.0, "b": 110.0}, noise=0.01), regime="sustained")
    winner = result.winner
    assert (winner.problem, winner.device, winner.regime, winner.runner) == (PROBLEM, DEVICE, "sustained", "gpu")
    assert winner.fingerprint == stable_id("a", 24)
    assert winner.median_us == statistics.median(winner.samples_us)
    assert (winner.ci_low_us, winner.ci_high_us) == median_interval(winner.samples_us, 0.95)
    assert winner.ci_low_us <= winner.median_us <= winner.ci_high_us
    assert winner.accuracy == ACCURACY
    assert winner.conditions.sm_clock_mhz == 1980


def test_drift_alone_does_not_decide():
    """A clock that falls by a third during the race, and the slower candidates all tried first."""
    times = {f"c{i}": 100.0 + 3 * i for i in range(10)}
    runner = SyntheticRunner(times, noise=0.001, drift=1e-3)
    result, _ = run(runner, sorted(times, reverse=True))
    assert name_of(result.winner) == "c0"
    assert name_of(result.runner_up) == "c1"
    assert result.margin == pytest.approx(0.03, abs=0.01)


def test_the_runner_up_is_who_stayed_longest():
    """With a falling clock, one eliminated early has the better median: its samples are from better days."""
    times = {"a": 100.0, "b": 106.0, "early": 115.0}
    result, reported = run(SyntheticRunner(times, drift=2e-2, noise=0.003))
    assert reported["early"].median_us < reported["b"].median_us
    assert (name_of(result.winner), name_of(result.runner_up)) == ("a", "b")
    assert result.margin == pytest.approx(0.06, abs=0.03)


def test_heats_end_when_the_interval_is_small():
    """Samples follow the noise: none more than needed where there is none, all that are allowed where there is much."""
    for noise, least, most in ((0.0, 8, 8), (0.0015, 13, 45), (0.05, 58, 60)):
        runner = SyntheticRunner({"a": 100.0, "b": 100.0}, noise=noise)
        result, _ = run(runner)
        assert least <= runner.samples["a"] <= most, noise
        assert runner.samples["a"] == runner.samples["b"]
        assert len(result.ties) == 1
        if runner.samples["a"] < 55:
            winner = result.winner
            assert winner.ci_high_us - winner.ci_low_us <= 2 * Rules().precision * winner.median_us


def test_a_lone_winner_is_still_measured_precisely():
    runner = SyntheticRunner({"a": 100.0, "b": 115.0}, noise=0.01)
    result, _ = run(runner)
    assert runner.samples["b"] == 3
    assert runner.samples["a"] > 20
    assert result.winner.ci_high_us - result.winner.ci_low_us < 1.5


def test_the_beaten_leave_as_soon_as_the_test_is_sure():
    runner = SyntheticRunner({"a": 100.0, "b": 103.0, "c": 101.0}, noise=0.005)
    run(runner)
    assert 8 <= runner.samples["b"] <= 13
    assert runner.samples["b"] <= runner.samples["c"] <= runner.samples["a"]


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_each_regime_has_its_rules(regime):
    runner = SyntheticRunner({"a": 100.0}, noise=0.001)
    run(runner, regime=regime)
    assert runner.calls[0][1] == RULES[regime].opening_rounds


def test_short_ones_take_more_rounds():
    """Paced launches of a few microseconds spread by several percent: 2% are found all the same."""
    short, long = ({"a": us, "b": us * 1.02} for us in (10.0, 100.0))
    for times, factor in ((short, 4), (long, 1)):
        runner = SyntheticRunner(times, noise=0.04, seed=3)
        run(runner)
        assert runner.calls[0][1] == factor * RULES["burst"].opening_rounds
        assert factor * 50 < runner.samples["a"] <= factor * RULES["burst"].most_rounds
    won = [name_of(run(SyntheticRunner(short, noise=0.04, seed=seed))[0].winner) for seed in range(10)]
    assert won == ["a"] * 10
    runner = SyntheticRunner(short, noise=0.04)
    run(runner, regime="sustained")
    assert runner.calls[0][1] == RULES["sustained"].opening_rounds


@pytest.mark.parametrize("seed", range(5))
def test_ties_resolve_by_preference_then_id(seed):
    times = {"a": 100.0, "b": 100.01, "c": 100.02, "slow": 105.0}
    noise = 0.002
    tied = [Schedule(name=name) for name in "abc"]
    for preferred in tied:
        result, _ = run(SyntheticRunner(times, noise=noise, seed=seed), preference=(preferred,))
        assert result.winner.schedule == preferred
        assert set(result.ties) == set(tied) - {preferred}
        assert name_of(result.runner_up) == "slow"
        assert result.margin == pytest.approx(0.05, abs=0.02)
    result, _ = run(SyntheticRunner(times, noise=noise, seed=seed), ["c", "slow", "b", "a"])
    assert [result.winner.schedule, *result.ties] == sorted(tied, key=lambda schedule: schedule.id)


def test_closer_than_matters_is_a_tie_even_without_noise():
    result, _ = run(SyntheticRunner({"a": 100.0, "b": 100.05}), preference=(Schedule(name="b"),))
    assert (name_of(result.winner), list(map(name_of, result.ties))) == ("b", ["a"])
    assert result.runner_up is None
    assert result.margin is None
    result, _ = run(SyntheticRunner({"a": 100.0, "b": 100.4}), preference=(Schedule(name="b"),))
    assert (name_of(result.winner), name_of(result.runner_up), result.ties) == ("a", "b", ())
    assert result.margin == pytest.approx(0.004)


def test_the_hopeless_cost_one_look():
    runner = SyntheticRunner({"good": 100.0, "bad": 250.0, "worse": 5000.0, "fair": 140.0})
    result, reported = run(runner)
    assert (runner.samples["bad"], runner.samples["worse"], runner.samples["fair"]) == (0, 0, 3)
    assert runner.looked == ["good", "bad", "worse", "fair", "bad"]
    assert runner.checked == ["good"]  # what loses the opening need not be right
    assert reported["worse"].samples_us == (5000.0,)
    assert (reported["worse"].ci_low_us, reported["worse"].ci_high_us) == (5000.0, 5000.0)
    assert reported["worse"].accuracy is reported["fair"].accuracy is None
    assert name_of(result.runner_up) == "fair"


def test_a_doubtful_look_is_repeated():
    """The first launch of a program may hit a hiccup; only what is far off and long is not asked again."""
    for scale, hiccup_us, again in ((100.0, 18_000.0, ["best"]), (0.1, 98.0, ["far", "best"])):
        times = {"a": 100.0 * scale, "best": 90.0 * scale, "far": 300.0 * scale}
        runner = SyntheticRunner(times, looks_us={"best": hiccup_us})
        result, _ = run(runner)
        assert runner.looked == ["a", "best", "far", *again]
        assert name_of(result.winner) == "best"


def test_check_all_checks_everyone_who_is_not_hopeless():
    runner = SyntheticRunner({"good": 100.0, "fair": 140.0, "bad": 900.0})
    _, reported = run(runner, rules=Rules(check_all=True))
    assert runner.checked == ["good", "fair"]
    assert reported["fair"].accuracy == ACCURACY


def test_what_is_wrong_makes_nobody_hopeless():
    """A kernel that returns at once is fast, and wrong."""
    times = {"wrong": 1.0, "good": 100.0, "fair": 140.0, "wrong too": 80.0}
    runner = SyntheticRunner(times, failing={"wrong": "check", "wrong too": "check"}, looks_us={"wrong too": 120.0})
    result, reported = run(runner)
    assert (name_of(result.winner), runner.samples["fair"]) == ("good", 3)
    assert isinstance(reported["wrong"], Failed)
    assert isinstance(reported["wrong too"], Failed)  # looked slow, led the opening, and was checked then
    assert runner.samples["wrong too"] == 3


def test_hopeless_against_what_is_known_already():
    runner = SyntheticRunner({"a": 100.0, "b": 90.0})
    result, reported = run(runner, known_us=20.0)
    assert result.winner is None
    assert not runner.checked
    assert [reported[name].samples_us for name in "ab"] == [(100.0,), (90.0,)]


def test_not_beaten_is_a_tie_but_only_the_close_may_win():
    """Three noisy samples prove nothing: all are tied, and the preferred one is still not taken for 5% more."""
    rules = Rules(most_rounds=3)
    runner = SyntheticRunner({"a": 100.0, "b": 105.0}, noise=0.003)
    result, _ = run(runner, preference=(Schedule(name="b"),), rules=rules)
    assert (name_of(result.winner), list(map(name_of, result.ties)), result.runner_up) == ("a", ["b"], None)


@pytest.mark.parametrize("right", [True, False])
def test_an_unchecked_candidate_never_wins(right):
    """The only one that was checked breaks down; the other, which was not worth checking, is checked now."""
    failing = {"a": 3} if right else {"a": 3, "hopeless": "check"}
    runner = SyntheticRunner({"a": 100.0, "hopeless": 900.0}, failing=failing)
    result, reported = run(runner)
    assert isinstance(reported["a"], Failed)
    assert isinstance(reported["hopeless"], Measurement if right else Failed)
    assert runner.checked == ["a", "hopeless"]
    if right:
        assert name_of(result.winner) == "hopeless"
        assert result.winner.accuracy == ACCURACY
    else:
        assert result.winner is None


def test_many_candidates_open_in_groups():
    runner = SyntheticRunner({f"c{i:02}": 100.0 + i / 2 for i in range(70)})
    run(runner)
    assert [(len(names), rounds) for names, rounds in runner.calls[:3]] == [(32, 3), (32, 3), (6, 3)]


@pytest.mark.parametrize("when", ["probe", "check", 0, 3, 9])
def test_failures_at_every_stage(when):
    times = {"doomed": 99.9, "a": 100.0, "b": 101.0, "c": 104.0}
    result, reported = run(SyntheticRunner(times, noise=0.003, failing={"doomed": when}))
    assert isinstance(reported["doomed"], Failed)
    assert reported["doomed"].failure == HANG
    assert reported["doomed"].fingerprint == stable_id("doomed", 24)
    assert name_of(result.winner) == "a"
    assert set(reported) == set(times)


def test_when_every_finalist_breaks_down_the_rest_still_have_a_winner():
    times = {"a": 80.0, "b": 80.5, "good": 100.0, "slow": 120.0}
    result, reported = run(SyntheticRunner(times, noise=0.02, failing={"a": 20, "b": 20}))
    assert {name for name, outcome in reported.items() if isinstance(outcome, Failed)} == {"a", "b"}
    assert (name_of(result.winner), name_of(result.runner_up)) == ("good", "slow")


@pytest.mark.parametrize("when", ["probe", "check", 0, 5])
def test_all_fail(when):
    result, reported = run(SyntheticRunner({"a": 1.0, "b": 1.0}, failing={"a": when, "b": when}))
    assert (result.winner, result.runner_up, result.ties, result.margin) == (None, None, (), None)
    assert all(isinstance(outcome, Failed) for outcome in reported.values())
    assert len(reported) == 2


def test_one_candidate_and_none():
    result, reported = run(SyntheticRunner({"only": 5.0}))
    assert name_of(result.winner) == "only"
    assert (result.ties, result.runner_up, result.margin, len(reported)) == ((), None, None, 1)
    assert race(SyntheticRunner({}), PROBLEM, []).outcomes == ()


def test_a_deadline_in_the_past_still_times_one_candidate():
    runner = SyntheticRunner({"default": 100.0, "better": 50.0}, failing={"broken": "probe"})
    runner.true_us["broken"] = 1.0
    result, reported = run(runner, ["broken", "default", "better"], deadline_s=time.monotonic() - 1)
    assert name_of(result.winner) == "default"
    assert set(reported) == {"broken", "default"}
    assert runner.samples["default"] == 3


def test_a_deadline_in_the_middle_starts_nothing_new(monkeypatch):
    """Time is the number of launches. 69 looks, one check, then two of three opening groups, and it is late."""
    times = {f"c{i:02}": 100.0 + i / 2 for i in range(68)} | {"hopeless": 900.0}
    runner = SyntheticRunner(times)
    monkeypatch.setattr("tiledsched.tuning.race.time.monotonic", lambda: runner.taken)
    result, reported = run(runner, deadline_s=69 + 1 + 32 * 3 + 1)
    assert len(reported) == 65
    assert len(runner.calls) == 2
    assert name_of(result.winner) == "c00"


def settled(burst, capped, **more):
    """The verdict over both regimes, of programs with these times in each; those with none fail at the power cap."""
    order = sorted(burst, key=burst.get)
    result, _ = run(SyntheticRunner(burst, noise=1e-4, **more))
    close = [name_of(each) for each in near(result)]
    failing = {name: "probe" for name in close if name not in capped}
    runner = SyntheticRunner({name: capped.get(name, 1.0) for name in close}, noise=1e-4, failing=failing)
    under, _ = run(runner, regime="sustained")
    return order[0], close, settle(result, under)


def test_of_what_is_near_the_winner_the_least_product_of_both_regimes_wins():
    burst = {"fast": 100.0, "steady": 101.0, "slow": 101.5, "far": 103.0}
    first, close, result = settled(burst, {"fast": 90.0, "steady": 80.0, "slow": 85.0})
    assert (first, close) == ("fast", ["fast", "steady", "slow"])
    assert name_of(result.winner) == "steady"
    assert result.winner.median_us == pytest.approx(101.0, rel=0.002), "its time is that of the burst regime"
    assert (result.ties, name_of(result.runner_up)) == ((), "slow")
    assert result.margin == pytest.approx(math.sqrt(101.5 / 101.0 * 85 / 80) - 1, abs=1e-3)


def test_what_gains_less_at_the_power_cap_than_it_loses_changes_nothing():
    _, _, result = settled({"fast": 100.0, "steady": 101.5}, {"fast": 80.0, "steady": 79.5})
    assert (name_of(result.winner), name_of(result.runner_up)) == ("fast", "steady")
    _, _, result = settled({"fast": 100.0, "level": 101.0, "far": 104.0}, {"fast": 80.8, "level": 80.0})
    assert (name_of(result.winner), [name_of(tie) for tie in result.ties]) == ("fast", ["level"])
    assert name_of(result.runner_up) == "far"
    assert result.margin == pytest.approx(0.04, abs=2e-3)


def test_what_fails_at_the_power_cap_is_not_served_for_being_near():
    _, _, result = settled({"fast": 100.0, "steady": 101.0}, {"fast": 90.0})
    assert (name_of(result.winner), result.ties) == ("fast", ())
    _, _, result = settled({"fast": 100.0, "steady": 101.0, "slow": 101.5}, {"steady": 90.0, "slow": 99.0})
    assert name_of(result.winner) == "steady"
    burst, _ = run(SyntheticRunner({"fast": 100.0, "steady": 101.0}, noise=1e-4))
    nothing, _ = run(SyntheticRunner({"fast": 1.0, "steady": 1.0}, failing={"fast": "probe", "steady": "probe"}))
    assert settle(burst, nothing) is burst
    assert near(nothing) == []


def test_a_tie_that_time_ran_out_for_is_one_still():
    burst, _ = run(SyntheticRunner({"fast": 100.0, "level": 100.05, "far": 104.0}, noise=1e-4))
    assert len(burst.ties) == 1
    alone, _ = run(SyntheticRunner({name_of(burst.winner): 90.0}, noise=1e-4), regime="sustained")
    result = settle(burst, alone)
    assert (result.winner, result.ties, result.runner_up, result.margin) == (
        burst.winner,
        burst.ties,
        burst.runner_up,
        pytest.approx(burst.margin),
    )
    other, _ = run(SyntheticRunner({name_of(burst.ties[0]): 90.0}, noise=1e-4), regime="sustained")
    assert settle(burst, other) is burst, "nor does it win for having raced alone"


def test_few_race_in_both_regimes():
    close = near(run(SyntheticRunner({f"c{i:02}": 100.0 + i / 100 for i in range(30)}, noise=1e-4))[0])
    assert len(close) == 8


@pytest.mark.parametrize("after", [0, 3, 10, 21, 30, 60, 100])
def test_ctrl_c_reports_what_is_known_once(after):
    times = {"a": 100.0, "b": 100.5, "c": 101.0, "slow": 140.0, "bad": 900.0, "doomed": 1.0}
    runner = SyntheticRunner(times, failing={"doomed": "check"}, interrupt_after=after, noise=0.02)
    reported = []
    with pytest.raises(KeyboardInterrupt):
        race(runner, PROBLEM, [candidate(name) for name in times], on_outcome=reported.append)
    names = [name_of(outcome) for outcome in reported]
    assert len(names) == len(set(names))
    sampled = {name for name, count in runner.samples.items() if count}
    looked_at_all, checked_all = after >= len(times), after >= len(times) + 4
    assert set(names) == sampled | ({"doomed"} if looked_at_all else set()) | ({"bad"} if checked_all else set())


def test_ctrl_c_inside_the_report_does_not_report_twice():
    reported = []

    def store(outcome):
        reported.append(name_of(outcome))
        if len(reported) == 2:
            raise KeyboardInterrupt

    names = ["a", "slow", "slower", "slowest"]
    runner = SyntheticRunner(dict(zip(names, (100.0, 140.0, 150.0, 160.0), strict=True)))
    with pytest.raises(KeyboardInterrupt):
        race(runner, PROBLEM, [candidate(name) for name in names], on_outcome=store)
    assert sorted(reported) == sorted(names)


def test_losing_the_gpu_reports_what_is_known():
    runner = SyntheticRunner({"a": 100.0, "b": 100.0})
    sample, reported = runner.sample, []

    def lost_later(candidates, **how):
        if runner.calls:
            raise MeasureError("the GPU is gone")
        return sample(candidates, **how)

    runner.sample = lost_later
    with pytest.raises(MeasureError):
        race(runner, PROBLEM, [candidate("a"), candidate("b")], on_outcome=reported.append)
    assert [type(outcome) for outcome in reported] == [Measurement, Measurement]


class Disturbed(SyntheticRunner):
    """Another process runs while some of the samples are taken, by their place among the calls of `sample`."""

    def __init__(self, *given, disturbed, **more):
        super().__init__(*given, **more)
        self.disturbed = disturbed

    def sample(self, candidates, *, rounds, regime):
        beside = (4711,) if self.disturbed(len(self.calls)) else ()
        return [
            batch
            if isinstance(batch, Failure)
            else replace(batch, conditions=replace(batch.conditions, concurrent_pids=beside))
            for batch in super().sample(candidates, rounds=rounds, regime=regime)
        ]


@pytest.fixture
def impatient(monkeypatch):
    """Races follow each other at once."""
    monkeypatch.setattr("tiledsched.tuning.race.PAUSE_S", 0.0)


def raced(runner, **more):
    reported = []
    result = race(runner, PROBLEM, list(map(candidate, runner.true_us)), on_outcome=reported.append, **more)
    return result, reported


@pytest.mark.parametrize("call", [0, 1, 3])
def test_what_is_timed_beside_others_is_told_and_raced_again(call, impatient, caplog):
    times = {"a": 100.0, "b": 101.0, "slow": 140.0, "hopeless": 900.0, "bad": 50.0}
    runner = Disturbed(times, noise=0.01, disturbed=lambda index: index == call, failing={"bad": "check"})
    result, reported = raced(runner)
    assert name_of(result.winner) == "a"
    assert result.disturbance == ""
    assert {name_of(outcome) for outcome in result.outcomes} == set(times)
    measured = [outcome for outcome in reported if isinstance(outcome, Measurement)]
    assert {name_of(each) for each in measured if each.conditions.concurrent_pids == (4711,)} >= {"a", "hopeless"}
    assert all(
        not outcome.conditions.concurrent_pids for outcome in result.outcomes if isinstance(outcome, Measurement)
    )
    assert [name_of(outcome) for outcome in reported].count("bad") == 1
    assert runner.checked.count("bad") == 1  # what is wrong is wrong in any company
    assert "timed beside process 4711 on the GPU, which decides nothing" in caplog.text


def test_who_was_beaten_before_is_out_by_a_time_that_counts(impatient):
    runner = Disturbed({"a": 100.0, "beaten": 108.0}, noise=0.002, disturbed=lambda index: index == 2)
    _, reported = raced(runner)
    assert [(name_of(each), each.conditions.concurrent_pids) for each in reported][:2] == [
        ("beaten", ()),
        ("a", (4711,)),
    ]


@pytest.mark.parametrize("deadline_s", [math.inf, 0.0])
def test_a_gpu_that_is_never_alone_decides_nothing(deadline_s, impatient, monkeypatch):
    if deadline_s:
        monkeypatch.setattr("tiledsched.tuning.race.PATIENCE_S", 0.05)
    runner = Disturbed({"a": 100.0, "b": 101.0, "bad": 50.0}, disturbed=lambda index: True, failing={"bad": "check"})
    result, reported = raced(runner, deadline_s=deadline_s)
    assert (result.winner, result.runner_up, result.ties) == (None, None, ())
    assert result.disturbance == "beside process 4711 on the GPU"
    assert [type(outcome) for outcome in result.outcomes] in ([Failed], [])
    assert all(isinstance(each, Failed) or each.conditions.concurrent_pids for each in reported)
    assert len(reported) > 4 if deadline_s else len(reported) == 1


def test_looks_alone_are_asked_about_too(impatient):
    """All are hopeless against what is known: nothing is sampled, and who else ran is asked for by itself."""
    runner = Disturbed({"a": 400.0, "b": 500.0}, disturbed=lambda index: index == 0)
    result, reported = raced(runner, known_us=100.0)
    assert [rounds for _, rounds in runner.calls] == [0, 0]
    assert [each.conditions.concurrent_pids for each in reported] == [(4711,)] * 2 + [()] * 2
    assert len(result.outcomes) == 2
