"""Race candidates until the winner stands apart or is declared a tie.

A cheap first look rejects the hopeless; the rest run in interleaved heats, each heat keeping those that may still win.
Samples are paired by round, so a drift of clocks hits every survivor alike. Successive elimination after
Maron and Moore, "Hoeffding Races" (1994), with order-statistic intervals instead of Hoeffding's bound.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiledsched.errors import Failure
from tiledsched.measure.runner import Accuracy, Candidate, Conditions, Failed, Measurement, Runner
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule

Outcome = Measurement | Failed


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a race is run. The defaults spend about 10 s of device time on 100 candidates."""

    hopeless_ratio: float = 3.0
    """A first look this many times slower than the best first look is not raced further."""
    group: int = 32
    """Candidates interleaved at once in the opening heat."""
    opening_rounds: int = 3
    """Samples of everyone who is not hopeless."""
    heats: tuple[tuple[float, int], ...] = ((1.10, 6), (1.05, 8), (1.03, 12), (1.02, 20), (1.02, 30))
    """(keep those within this ratio of the leader's median, rounds to run them)."""
    confidence: float = 0.95
    """Of every interval."""
    same: float = 0.001
    """Medians closer than this relative difference are a tie even when they can be told apart."""


@dataclass(eq=False)
class Racer:
    """A candidate under way."""

    candidate: Candidate
    first_look_us: float = math.inf
    accuracy: Accuracy | None = None
    samples_us: list[float] = field(default_factory=list)
    """Sample i was taken in the same round as sample i of every other racer (of another group, near it)."""
    conditions: Conditions = field(default_factory=Conditions)
    failure: Failure | None = None
    finished: bool = False

    @property
    def median_us(self) -> float:
        """Of all samples; infinite without any."""
        return statistics.median(self.samples_us) if self.samples_us else math.inf


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """What a race decided. Everything measured or failed was already handed to `on_outcome`."""

    winner: Measurement | None
    """The schedule to serve; None when every candidate failed."""
    ties: tuple[Schedule, ...]
    """Other schedules that cannot be told apart from the winner."""
    runner_up: Measurement | None
    """The fastest that can."""
    margin: float | None
    """How much longer the runner-up takes: the median over their common rounds of its time / the winner's - 1."""
    outcomes: tuple[Outcome, ...]
    """One for each candidate reached before the deadline."""


def race(runner: Runner, problem: Problem, candidates: Sequence[Candidate], *, preference: Sequence[Schedule] = (),
         rules: Rules | None = None, regime: str = "burst", deadline_s: float | None = None,
         on_outcome: Callable[[Outcome], None] | None = None) -> RaceResult:  # fmt: skip
    """Find the fastest of `candidates` for the problem `runner.begin` was given.

    Args:
        runner: what measures.
        problem: recorded with each outcome.
        candidates: distinct programs.
        preference: schedules preferred within a tie, first first; others follow by id. So a tie always resolves
            the same way.
        rules: how long to look.
        regime: burst or sustained.
        deadline_s: `time.monotonic()` after which no new work starts. The default schedule should come first.
        on_outcome: called once per candidate as its outcome is final, also when the race is interrupted.
    """
    rules = rules or Rules()
    report = on_outcome or (lambda outcome: None)
    outcomes: list[Outcome] = []

    def finish(racer: Racer) -> None:
        if racer.finished:
            return
        racer.finished = True
        outcome = _outcome(runner, problem, regime, racer, rules.confidence)
        if outcome is not None:
            outcomes.append(outcome)
            report(outcome)

    def late() -> bool:
        return deadline_s is not None and time.monotonic() > deadline_s

    racers: list[Racer] = []
    try:
        for candidate in candidates:
            if late() and racers:
                break
            checked = runner.check(candidate)
            if isinstance(checked, Failure):
                finish(Racer(candidate, failure=checked))
            else:
                racers.append(Racer(candidate, checked.first_look_us, checked.accuracy))
        limit_us = rules.hopeless_ratio * min((racer.first_look_us for racer in racers), default=math.inf)
        alive = [racer for racer in racers if racer.first_look_us <= limit_us]
        hopeless = [racer for racer in racers if racer.first_look_us > limit_us]
        for field_of, rounds in ((alive, rules.opening_rounds), (hopeless, 1)):
            for start in range(0, len(field_of), rules.group):
                if late() and (start or field_of is hopeless):
                    break
                _run(runner, field_of[start : start + rules.group], rounds, regime)
        for racer in hopeless:
            finish(racer)
        for ratio, rounds in rules.heats:
            leader_us = min((racer.median_us for racer in alive if racer.failure is None), default=math.inf)
            keep = [racer for racer in alive if racer.failure is None and racer.median_us <= ratio * leader_us]
            for racer in alive:
                if racer not in keep:
                    finish(racer)
            alive = keep
            if len(alive) <= 1 or late():
                break
            _run(runner, alive, rounds, regime)
    finally:
        for racer in racers:
            finish(racer)
    return _decide(alive, racers, outcomes, preference, rules)


def _run(runner: Runner, racers: Sequence[Racer], rounds: int, regime: str) -> None:
    """One heat; a racer that fails in it keeps its failure."""
    batches = runner.sample([racer.candidate for racer in racers], rounds=rounds, regime=regime)
    for racer, batch in zip(racers, batches, strict=True):
        if isinstance(batch, Failure):
            racer.failure = batch
            continue
        racer.samples_us.extend(batch.samples_us)
        racer.conditions = batch.conditions


def _decide(alive: Sequence[Racer], racers: Sequence[Racer], outcomes: Sequence[Outcome],
            preference: Sequence[Schedule], rules: Rules) -> RaceResult:  # fmt: skip
    measured = {o.schedule: o for o in outcomes if isinstance(o, Measurement)}
    finishers = [racer for racer in racers if racer.candidate.schedule in measured]
    finalists = [racer for racer in finishers if racer in alive] or finishers  # the rest, where all the best broke down
    if not finalists:
        return RaceResult(winner=None, ties=(), runner_up=None, margin=None, outcomes=tuple(outcomes))
    leader = min(finalists, key=lambda racer: (racer.median_us, racer.candidate.schedule.id))
    tied = [racer for racer in finalists if racer is leader or _indistinct(racer, leader, rules)]
    rank = {schedule: index for index, schedule in enumerate(preference)}
    tied.sort(key=lambda racer: (rank.get(racer.candidate.schedule, len(rank)), racer.candidate.schedule.id))
    winner = tied[0]
    # Those that ran longest are the closest: medians of racers eliminated at different times do not compare.
    others = [racer for racer in finishers if racer not in tied]
    others.sort(key=lambda racer: (-len(racer.samples_us), racer.median_us, racer.candidate.schedule.id))
    runner_up = others[0] if others else None
    return RaceResult(
        winner=measured[winner.candidate.schedule],
        ties=tuple(racer.candidate.schedule for racer in tied[1:]),
        runner_up=measured[runner_up.candidate.schedule] if runner_up else None,
        margin=statistics.median(_ratios(runner_up, winner)) - 1.0 if runner_up else None,
        outcomes=tuple(outcomes),
    )


def _ratios(racer: Racer, other: Racer) -> list[float]:
    """Their times against each other, round by round, over the rounds they have in common."""
    return [mine / theirs for mine, theirs in zip(racer.samples_us, other.samples_us, strict=False)]


def _indistinct(racer: Racer, leader: Racer, rules: Rules) -> bool:
    """Whether the ratio of two finalists may be 1, or is too close to 1 to matter."""
    ratios = _ratios(racer, leader)
    low, high = median_interval(ratios, rules.confidence)
    return low <= 1.0 <= high or statistics.median(ratios) < 1 + rules.same


def median_interval(samples: Sequence[float], confidence: float) -> tuple[float, float]:
    """Distribution-free confidence interval of the median, from order statistics.

    The number of samples below the true median is binomial(n, 1/2); the interval runs between the order statistics
    that leave at most (1 - confidence) / 2 outside on each side (Conover, Practical Nonparametric Statistics, ch. 3).
    With fewer than six samples no such pair exists at 95%, and the range is returned.
    """
    ordered = sorted(samples)
    count = len(ordered)
    outside = (1.0 - confidence) / 2
    below = 0.0
    rank = 0
    for k in range(count // 2):
        below += math.comb(count, k) / 2**count
        if below > outside:
            break
        rank = k + 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[count - rank]


def _outcome(runner: Runner, problem: Problem, regime: str, racer: Racer, confidence: float) -> Outcome | None:
    candidate = racer.candidate
    if racer.failure is not None:
        return Failed(schedule=candidate.schedule, fingerprint=candidate.artifact.fingerprint, failure=racer.failure)
    if not racer.samples_us:
        return None  # interrupted before its first sample: nothing is known
    low, high = median_interval(racer.samples_us, confidence)
    return Measurement(problem=problem, schedule=candidate.schedule, fingerprint=candidate.artifact.fingerprint,
                       device=runner.device, regime=regime, median_us=racer.median_us, ci_low_us=low, ci_high_us=high,
                       samples_us=tuple(racer.samples_us), accuracy=racer.accuracy, conditions=racer.conditions,
                       runner=runner.name)  # fmt: skip
