"""The race, on a runner made of arithmetic: given times, noise, drift, failures and other processes."""

from __future__ import annotations

import math
import random
import statistics
import time

import pytest
from store_samples import DEVICE, PROBLEM, artifact

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.schedule import Schedule
from tiledsched.measure.estimate import median_interval
from tiledsched.measure.runner import Batch, Candidate, Checked, Conditions, Failed, Measurement
from tiledsched.tuning.race import MOST_NEAR, RULES, Rules, near, race, settle

ACCURACY = Accuracy(max_abs_error=1e-3, worst_tile_error=5e-4, worst_tile=(0, 0, 0), repeatable=True)
HANG = Failure(kind=FailureKind.HANG, message="no answer")


class SyntheticRunner:
    """Times are `true_us` times a drift that grows with every sample taken, times noise.

    Args:
        true_us: microseconds by name.
        failing: name -> "probe", "check", or the number of samples after which it fails.
        looks_us: looks that mislead, by name.
        interrupts: number of launches -> what is raised at that launch and later.
        disturbed: whether another process runs, by the place among the calls of `sample`.
    """

    name, device = "gpu", DEVICE

    def __init__(
        self, true_us, *, noise=0.0, drift=0.0, seed=0, failing=None, looks_us=None, interrupts=None, disturbed=None
    ):
        self.true_us, self.noise, self.drift, self.failing = true_us, noise, drift, failing or {}
        self.looks_us, self.interrupts, self.disturbed = dict(looks_us or {}), interrupts or {}, disturbed
        self.rng, self.taken, self.samples = random.Random(seed), 0, dict.fromkeys(true_us, 0)
        self.looked, self.checked, self.calls, self.reported = [], [], [], []

    def time_of(self, name):
        for after, error in self.interrupts.items():
            if self.taken >= after:
                raise error
        self.taken += 1
        return self.true_us[name] * (1 + self.drift * self.taken) * math.exp(self.rng.gauss(0, self.noise))

    def probe(self, candidate):
        name = candidate.schedule["name"]
        self.looked.append(name)
        return HANG if self.failing.get(name) == "probe" else self.looks_us.pop(name, None) or self.time_of(name)

    def check(self, candidate):
        name = candidate.schedule["name"]
        self.checked.append(name)
        if self.failing.get(name) == "check":
            return HANG
        return Checked(accuracy=ACCURACY, first_look_us=self.time_of(name))

    def sample(self, candidates, *, rounds, regime):
        names = [candidate.schedule["name"] for candidate in candidates]
        beside = (4711,) if self.disturbed and self.disturbed(len(self.calls)) else ()
        self.calls.append((tuple(names), rounds))
        times = {name: [] for name in names}
        for _ in range(rounds):
            order = names[:]
            self.rng.shuffle(order)
            for name in order:
                times[name].append(self.time_of(name))
        batches = []
        for name in names:
            self.samples[name] += rounds
            limit = self.failing.get(name)
            failed = isinstance(limit, int) and self.samples[name] > limit
            conditions = Conditions(sm_clock_mhz=1980, concurrent_pids=beside)
            batches.append(HANG if failed else Batch(samples_us=tuple(times[name]), conditions=conditions))
        return batches


def run(runner, order=None, **more):
    """The race's result and what it reported, by name; a race that nobody disturbed reports each candidate once."""
    candidates = [
        Candidate(schedule=Schedule(name=name), artifact=artifact(stable_id(name, 24)))
        for name in order or runner.true_us
    ]
    result = race(runner, PROBLEM, candidates, on_outcome=runner.reported.append, **more)
    names = [name_of(outcome) for outcome in runner.reported]
    assert runner.disturbed or (len(names) == len(set(names)) and set(runner.reported) == set(result.outcomes))
    return result, dict(zip(names, runner.reported, strict=True))


def name_of(schedule_or_measurement):
    return schedule_or_measurement and getattr(schedule_or_measurement, "schedule", schedule_or_measurement)["name"]


def verdict(result):
    """Names of the winner, of its ties and of the runner-up."""
    return name_of(result.winner), list(map(name_of, result.ties)), name_of(result.runner_up)


@pytest.mark.parametrize("seed", range(4))
def test_the_fastest_wins_through_noise_and_drift(seed):
    times = {f"c{i}": 100 * 1.015**i for i in range(40)}
    runner = SyntheticRunner(times, noise=0.005, drift=2e-5, seed=seed)
    result, reported = run(runner, random.Random(seed).sample(list(times), 40))
    assert verdict(result) == ("c0", [], "c1")
    assert result.margin == pytest.approx(0.015, abs=0.007)
    assert set(reported) == set(times)
    assert sum(runner.samples.values()) < 40 * 15
    assert 13 <= runner.samples["c0"] == max(runner.samples.values()) <= Rules().most_rounds


PREFER_B = {"preference": (Schedule(name="b"),)}
VERDICTS = {
    "a clock that falls by a third, the slower ones first": (
        {f"c{i}": 127.0 - 3 * i for i in range(10)},
        {"noise": 0.001, "drift": 1e-3},
        {},
        ("c9", [], "c8"),
        0.03,
    ),
    "of a falling clock who left early has the better median, and is not the runner-up": (
        {"a": 100.0, "b": 106.0, "early": 115.0},
        {"drift": 2e-2, "noise": 0.003},
        {},
        ("a", [], "b"),
        0.06,
    ),
    "closer than matters is a tie": ({"a": 100.0, "b": 100.05}, {}, PREFER_B, ("b", ["a"], None), None),
    "farther than that is none": ({"a": 100.0, "b": 100.4}, {}, PREFER_B, ("a", [], "b"), 0.004),
    "three noisy samples prove nothing, and 5% more is not preferred": (
        {"a": 100.0, "b": 105.0},
        {"noise": 0.003},
        {**PREFER_B, "rules": Rules(most_rounds=3)},
        ("a", ["b"], None),
        None,
    ),
    "one alone": ({"only": 5.0}, {}, {}, ("only", [], None), None),
    "every finalist breaks down, and the rest has a winner": (
        {"a": 80.0, "b": 80.5, "good": 100.0, "slow": 120.0},
        {"noise": 0.02, "failing": {"a": 20, "b": 20}},
        {},
        ("good", [], "slow"),
        0.2,
    ),
    **{
        f"all fail, {when}": ({"a": 1.0, "b": 1.0}, {"failing": {"a": when, "b": when}}, {}, (None, [], None), None)
        for when in ("probe", "check", 0, 5)
    },
    **{
        f"one fails, {when}": (
            {"doomed": 99.9, "a": 100.0, "b": 101.0, "c": 104.0},
            {"noise": 0.003, "failing": {"doomed": when}},
            {},
            ("a", [], "b"),
            0.01,
        )
        for when in ("probe", "check", 0, 3, 9)
    },
}


@pytest.mark.parametrize("case", VERDICTS)
def test_a_verdict(case):
    times, how, more, expected, margin = VERDICTS[case]
    runner = SyntheticRunner(times, **how)
    result, reported = run(runner, **more)
    assert verdict(result) == expected
    assert result.margin == (margin and pytest.approx(margin, rel=0.5))
    assert set(reported) == set(times)
    failed = {name: each for name, each in reported.items() if isinstance(each, Failed)}
    assert set(failed) == set(runner.failing)
    assert all((each.failure, each.fingerprint) == (HANG, stable_id(name, 24)) for name, each in failed.items())


def test_a_measurement_holds_its_evidence():
    winner = run(SyntheticRunner({"a": 100.0, "b": 110.0}, noise=0.01), regime="sustained")[0].winner
    assert (winner.problem, winner.device, winner.regime, winner.runner) == (PROBLEM, DEVICE, "sustained", "gpu")
    assert (winner.fingerprint, winner.accuracy, winner.conditions.sm_clock_mhz) == (stable_id("a", 24), ACCURACY, 1980)
    assert winner.median_us == statistics.median(winner.samples_us)
    assert (winner.conditions.sm_clock_mhz, winner.conditions.concurrent_pids) == (1980, ())
    assert (winner.ci_low_us, winner.ci_high_us) == median_interval(winner.samples_us, 0.95)


@pytest.mark.parametrize(
    ("times", "noise", "least", "most"),
    [
        ({"a": 100.0, "b": 100.0}, 0.0, {"a": 8, "b": 8}, {"a": 8, "b": 8}),
        ({"a": 100.0, "b": 100.0}, 0.0015, {"a": 13, "b": 13}, {"a": 45, "b": 45}),
        ({"a": 100.0, "b": 100.0}, 0.05, {"a": 58, "b": 58}, {"a": 60, "b": 60}),
        ({"a": 100.0, "b": 115.0}, 0.01, {"a": 21, "b": 3}, {"a": 60, "b": 3}),  # a lone winner is measured precisely
        ({"a": 100.0, "b": 103.0, "c": 101.0}, 0.005, {"b": 8}, {"b": 13}),  # the beaten leave as the test is sure
    ],
)
def test_samples_follow_the_noise(times, noise, least, most):
    runner = SyntheticRunner(times, noise=noise)
    winner = run(runner)[0].winner
    assert all(least[name] <= runner.samples[name] <= most[name] for name in least), runner.samples
    half_width = (winner.ci_high_us - winner.ci_low_us) / 2
    assert runner.samples["a"] > 55 or half_width <= Rules().precision * winner.median_us


def test_each_regime_and_short_programs_have_their_rules():
    """Paced launches of a few microseconds spread by several percent: 2% are found all the same."""
    for us, regime, factor in (
        (100.0, "burst", 1),
        (100.0, "sustained", 1),
        (10.0, "burst", 4),
        (10.0, "sustained", 1),
    ):
        runner = SyntheticRunner({"a": us, "b": us * 1.02}, noise=0.04, seed=3)
        run(runner, regime=regime)
        assert runner.calls[0][1] == factor * RULES[regime].opening_rounds
        assert factor * 50 < runner.samples["a"] <= factor * RULES[regime].most_rounds
    short = {"a": 10.0, "b": 10.2}
    assert {name_of(run(SyntheticRunner(short, noise=0.04, seed=seed))[0].winner) for seed in range(6)} == {"a"}


@pytest.mark.parametrize("seed", range(2))
def test_ties_resolve_by_preference_then_id(seed):
    times = {"a": 100.0, "b": 100.01, "c": 100.02, "slow": 105.0}
    tied = [Schedule(name=name) for name in "abc"]
    for preferred in tied:
        result, _ = run(SyntheticRunner(times, noise=0.002, seed=seed), preference=(preferred,))
        assert (result.winner.schedule, set(result.ties)) == (preferred, set(tied) - {preferred})
        assert (name_of(result.runner_up), result.margin) == ("slow", pytest.approx(0.05, abs=0.02))
    result, _ = run(SyntheticRunner(times, noise=0.002, seed=seed), ["c", "slow", "b", "a"])
    assert [result.winner.schedule, *result.ties] == sorted(tied, key=lambda schedule: schedule.id)


def test_the_hopeless_cost_one_look_and_what_loses_the_opening_is_not_checked():
    runner = SyntheticRunner({"good": 100.0, "bad": 250.0, "worse": 5000.0, "fair": 140.0})
    result, reported = run(runner)
    worse = reported["worse"]
    assert (runner.samples["bad"], runner.samples["worse"], runner.samples["fair"]) == (0, 0, 3)
    assert (runner.looked, runner.checked) == (["good", "bad", "worse", "fair", "bad"], ["good"])
    assert (worse.samples_us, worse.ci_low_us, worse.ci_high_us, worse.accuracy) == ((5000.0,), 5000.0, 5000.0, None)
    assert (verdict(result), reported["fair"].accuracy) == (("good", [], "fair"), None)
    runner = SyntheticRunner({"good": 100.0, "fair": 140.0, "bad": 900.0})
    _, reported = run(runner, rules=Rules(check_all=True))
    assert (runner.checked, reported["fair"].accuracy) == (["good", "fair"], ACCURACY)
    runner = SyntheticRunner({"a": 100.0, "b": 90.0})
    result, reported = run(runner, known_us=20.0)  # against what is known already
    assert (result.winner, runner.checked) == (None, [])
    assert [reported[name].samples_us for name in "ab"] == [(100.0,), (90.0,)]


def test_a_doubtful_look_is_repeated():
    """The first launch of a program may hit a hiccup; only what is far off and long is not asked again."""
    for scale, hiccup_us, again in ((100.0, 18_000.0, ["best"]), (0.1, 98.0, ["far", "best"])):
        times = {"a": 100.0 * scale, "best": 90.0 * scale, "far": 300.0 * scale}
        runner = SyntheticRunner(times, looks_us={"best": hiccup_us})
        assert name_of(run(runner)[0].winner) == "best"
        assert runner.looked == ["a", "best", "far", *again]


def test_what_is_wrong_makes_nobody_hopeless():
    """A kernel that returns at once is fast, and wrong; one that looked slow leads the opening, and is checked then."""
    times = {"wrong": 1.0, "good": 100.0, "fair": 140.0, "wrong too": 80.0}
    runner = SyntheticRunner(times, failing={"wrong": "check", "wrong too": "check"}, looks_us={"wrong too": 120.0})
    result, reported = run(runner)
    assert (name_of(result.winner), runner.samples["fair"], runner.samples["wrong too"]) == ("good", 3, 3)
    assert {name for name, each in reported.items() if isinstance(each, Failed)} == {"wrong", "wrong too"}


@pytest.mark.parametrize("right", [True, False])
def test_an_unchecked_candidate_never_wins(right):
    """The only one that was checked breaks down; the other, which was not worth checking, is checked now."""
    failing = {"a": 3} if right else {"a": 3, "hopeless": "check"}
    runner = SyntheticRunner({"a": 100.0, "hopeless": 900.0}, failing=failing)
    result, reported = run(runner)
    assert isinstance(reported["a"], Failed)
    assert isinstance(reported["hopeless"], Measurement if right else Failed)
    assert runner.checked == ["a", "hopeless"]
    assert (result.winner and result.winner.accuracy) == (ACCURACY if right else None)


def test_many_candidates_open_in_groups_until_a_deadline(monkeypatch):
    """Time is the number of launches: 69 looks, one check, then two of three opening groups, and it is late."""
    times = {f"c{i:02}": 100.0 + i / 2 for i in range(68)} | {"hopeless": 900.0}
    runner = SyntheticRunner(times)
    run(runner)
    assert [(len(names), rounds) for names, rounds in runner.calls[:3]] == [(32, 3), (32, 3), (4, 3)]
    runner = SyntheticRunner(times)
    monkeypatch.setattr("tiledsched.tuning.race.time.monotonic", lambda: runner.taken)
    result, reported = run(runner, deadline_s=69 + 1 + 32 * 3 + 1)
    assert (len(reported), len(runner.calls), name_of(result.winner)) == (65, 2, "c00")


def test_a_deadline_in_the_past_still_times_one_candidate():
    runner = SyntheticRunner({"broken": 1.0, "default": 100.0, "better": 50.0}, failing={"broken": "probe"})
    result, reported = run(runner, deadline_s=time.monotonic() - 1)
    assert (name_of(result.winner), set(reported)) == ("default", {"broken", "default"})
    assert runner.samples["default"] == 3
    assert race(SyntheticRunner({}), PROBLEM, []).outcomes == ()


# Both regimes


def settled(burst, capped):
    """The verdict over both regimes, of programs with these times in each; those with none fail at the power cap."""
    result, _ = run(SyntheticRunner(burst, noise=1e-4))
    close = [name_of(each) for each in near(result)]
    failing = {name: "probe" for name in close if name not in capped}
    runner = SyntheticRunner({name: capped.get(name, 1.0) for name in close}, noise=1e-4, failing=failing)
    return close, settle(result, run(runner, regime="sustained")[0])


@pytest.mark.parametrize(
    ("burst", "capped", "expected", "margin"),
    [
        (  # the least product of both wins
            {"fast": 100.0, "steady": 101.0, "slow": 101.5, "far": 103.0},
            {"fast": 90.0, "steady": 80.0, "slow": 85.0},
            ("steady", [], "slow"),
            math.sqrt(101.5 / 101.0 * 85 / 80) - 1,
        ),
        (  # what gains less at the power cap than it loses changes nothing
            {"fast": 100.0, "steady": 101.5},
            {"fast": 80.0, "steady": 79.5},
            ("fast", [], "steady"),
            math.sqrt(1.015 * 79.5 / 80) - 1,
        ),
        (
            {"fast": 100.0, "level": 101.0, "far": 104.0},
            {"fast": 80.8, "level": 80.0},
            ("fast", ["level"], "far"),
            0.04,
        ),
        ({"fast": 100.0, "steady": 101.0}, {"fast": 90.0}, ("fast", [], "steady"), 0.01),  # what fails is not served
        (
            {"fast": 100.0, "steady": 101.0, "slow": 101.5},
            {"steady": 90.0, "slow": 99.0},
            ("steady", [], "slow"),
            math.sqrt(101.5 / 101.0 * 1.1) - 1,
        ),
    ],
)
def test_what_is_near_the_winner_is_settled_over_both_regimes(burst, capped, expected, margin):
    close, result = settled(burst, capped)
    assert close == [name for name, us in burst.items() if us <= 102.0]
    assert verdict(result) == expected
    assert result.margin == pytest.approx(margin, abs=2e-3)
    assert result.winner.median_us == pytest.approx(burst[expected[0]], rel=0.002), (
        "its time is that of the burst regime"
    )


def test_a_tie_that_time_ran_out_for_is_one_still():
    burst, _ = run(SyntheticRunner({"fast": 100.0, "level": 100.05, "far": 104.0}, noise=1e-4))
    (tie,) = burst.ties
    alone, _ = run(SyntheticRunner({name_of(burst.winner): 90.0}, noise=1e-4), regime="sustained")
    result = settle(burst, alone)
    assert (verdict(result), result.margin) == (verdict(burst), pytest.approx(burst.margin))
    other, _ = run(SyntheticRunner({name_of(tie): 90.0}, noise=1e-4), regime="sustained")
    assert settle(burst, other) is burst, "nor does it win for having raced alone"
    nothing, _ = run(SyntheticRunner({"fast": 1.0}, failing={"fast": "probe"}))
    assert settle(burst, nothing) is burst
    assert near(nothing) == []
    many, _ = run(SyntheticRunner({f"c{i:02}": 100.0 + i / 100 for i in range(30)}, noise=1e-4))
    assert len(near(many)) == MOST_NEAR == 8


# Interruptions


@pytest.mark.parametrize("after", [0, 3, 10, 21, 30, 60, 100])
def test_ctrl_c_reports_what_is_known_once(after):
    times = {"a": 100.0, "b": 100.5, "c": 101.0, "slow": 140.0, "bad": 900.0, "doomed": 1.0}
    runner = SyntheticRunner(times, failing={"doomed": "check"}, interrupts={after: KeyboardInterrupt()}, noise=0.02)
    with pytest.raises(KeyboardInterrupt):
        run(runner)
    names = [name_of(outcome) for outcome in runner.reported]
    sampled = {name for name, count in runner.samples.items() if count}
    looked_at_all, checked_all = after >= len(times), after >= len(times) + 4
    assert set(names) == sampled | ({"doomed"} if looked_at_all else set()) | ({"bad"} if checked_all else set())
    assert len(names) == len(set(names))


def test_ctrl_c_inside_the_report_does_not_report_twice():
    class Store(list):
        def append(self, outcome):
            super().append(outcome)
            if len(self) == 2:
                raise KeyboardInterrupt

    runner = SyntheticRunner({"a": 100.0, "slow": 140.0, "slower": 150.0, "slowest": 160.0})
    runner.reported = Store()
    with pytest.raises(KeyboardInterrupt):
        run(runner)
    assert sorted(map(name_of, runner.reported)) == sorted(runner.true_us)


def test_losing_the_gpu_reports_what_is_known():
    runner = SyntheticRunner({"a": 100.0, "b": 100.0}, interrupts={10: MeasureError("the GPU is gone")})
    with pytest.raises(MeasureError):
        run(runner)
    assert [type(outcome) for outcome in runner.reported] == [Measurement, Measurement]


# Other processes on the GPU


@pytest.fixture
def impatient(monkeypatch):
    """Races follow each other at once."""
    monkeypatch.setattr("tiledsched.tuning.race.PAUSE_S", 0.0)


@pytest.mark.parametrize("call", [0, 1, 3])
def test_what_is_timed_beside_others_is_told_and_raced_again(call, impatient, caplog):
    times = {"a": 100.0, "b": 101.0, "slow": 140.0, "hopeless": 900.0, "bad": 50.0}
    runner = SyntheticRunner(times, noise=0.01, disturbed=lambda index: index == call, failing={"bad": "check"})
    result, _ = run(runner)
    assert (name_of(result.winner), result.disturbance) == ("a", "")
    assert {name_of(outcome) for outcome in result.outcomes} == set(times)
    beside = {name_of(each) for each in runner.reported if getattr(each, "conditions", None) and others(each)}
    assert beside >= {"a", "hopeless"}
    assert not any(others(outcome) for outcome in result.outcomes if isinstance(outcome, Measurement))
    assert [name_of(each) for each in runner.reported].count("bad") == runner.checked.count("bad") == 1
    assert "timed beside process 4711 on the GPU, which decides nothing" in caplog.text


def others(measurement):
    return measurement.conditions.concurrent_pids


def test_who_was_beaten_before_is_out_by_a_time_that_counts(impatient):
    runner = SyntheticRunner({"a": 100.0, "beaten": 108.0}, noise=0.002, disturbed=lambda index: index == 2)
    run(runner)
    assert [(name_of(each), others(each)) for each in runner.reported][:2] == [("beaten", ()), ("a", (4711,))]


@pytest.mark.parametrize("deadline_s", [math.inf, 0.0])
def test_a_gpu_that_is_never_alone_decides_nothing(deadline_s, impatient, monkeypatch):
    monkeypatch.setattr("tiledsched.tuning.race.PATIENCE_S", 0.05 if deadline_s else 60.0)
    times = {"a": 100.0, "b": 101.0, "bad": 50.0}
    runner = SyntheticRunner(times, disturbed=lambda index: True, failing={"bad": "check"})
    result, _ = run(runner, deadline_s=deadline_s)
    assert (verdict(result), result.disturbance) == ((None, [], None), "beside process 4711 on the GPU")
    assert [type(outcome) for outcome in result.outcomes] in ([Failed], [])
    assert all(isinstance(each, Failed) or others(each) for each in runner.reported)
    assert len(runner.reported) > 4 if deadline_s else len(runner.reported) == 1


def test_looks_alone_are_asked_about_too(impatient):
    """All are hopeless against what is known: nothing is sampled, and who else ran is asked for by itself."""
    runner = SyntheticRunner({"a": 400.0, "b": 500.0}, disturbed=lambda index: index == 0)
    result, _ = run(runner, known_us=100.0)
    assert [rounds for _, rounds in runner.calls] == [0, 0]
    assert [others(each) for each in runner.reported] == [(4711,)] * 2 + [()] * 2
    assert len(result.outcomes) == 2
