"""Race candidates until one is known to be the fastest, or several are declared a tie.

One launch of each candidate shows which are hopeless; the rest run in interleaved heats. After each heat the candidates that
are clearly slower than the leader drop out; those that stay in must pass the accuracy check. Heats go on until one is left, or
until those left are known so precisely that more samples would not tell them apart. Samples are paired by round, so a drift
of clocks affects every racer alike. This is successive elimination after Maron and Moore, "Hoeffding Races" (1994), with a
paired signed-rank test in place of Hoeffding's bound, as Birattari et al. use a paired rank test in F-Race (2002).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.config import log
from tiledsched.core.errors import Failure
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.estimate import Timing, probability_not_slower, relative_uncertainty
from tiledsched.measure.runner import GRAPHS, Batch, Candidate, Conditions, Failed, Measurement, Runner
from tiledsched.measure.timing import SHORT_US

NEAR = 0.02
"""How much longer than the burst winner a schedule may take in the burst regime and still be served in its place, because it is
faster by more than that at the power cap. Schedules that tie in the burst regime differ by up to 15% there
(docs/results/h200.md)."""
MOST_NEAR = 8
"""Programs that race in both regimes."""
Outcome = Measurement | Failed
Requirement = Callable[[Candidate, Accuracy], "Failure | None"]
"""Says of a candidate that computes right why it must not win all the same; None where it may."""
CHEAP_LOOK_US = 1000.0
"""A candidate whose first launch took less than this is launched a second time before it counts as hopeless: a delay of 0.1 ms
makes a short kernel seem hopeless, and a second launch costs nothing."""

PATIENCE_S = 60.0
"""How long a race is repeated while other processes run on the GPU..."""
PAUSE_S = 2.0
"""...and the pause before each repeat: NVML reports the last second."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a race is run. The defaults decide among tens of candidates in a few seconds."""

    hopeless_ratio: float = 1.5
    """A look this many times slower than the best right one is the end of it; below the square of it, or below
    `CHEAP_LOOK_US`, a second look.
    """
    check_all: bool = False
    """Whether everyone who is not hopeless is checked, or only who stays in after the opening."""
    group: int = 32
    """Candidates interleaved at once in the opening heat."""
    opening_rounds: int = 3
    """Samples of everyone who is not hopeless."""
    opening_ratio: float = 1.10
    """After the opening and each heat, those within this ratio of the leader's median stay in."""
    heat_rounds: int = 5
    """Samples of everyone still in, per heat."""
    most_rounds: int = 60
    """Samples of one candidate, at most."""
    short_factor: int = 1
    """How many times as many rounds where the fastest takes less than `SHORT_US`, in openings, heats and at most."""
    precision: float = 0.002
    """Heats end when the interval of everyone's median reaches no farther than this part of it to either side."""
    confidence: float = 0.95
    """Confidence of every interval. One minus it, divided by the number of racers still in, is the level of the test that
    drops one.
    """
    same: float = 0.003
    """A relative difference that does not matter: medians so close are a tie even when they can be told apart, and of a
    tie only those so close to the fastest may be chosen.
    """

    def of_short(self) -> Rules:
        """The rules where the fastest takes less than `SHORT_US`."""
        return replace(
            self,
            opening_rounds=self.short_factor * self.opening_rounds,
            heat_rounds=self.short_factor * self.heat_rounds,
            most_rounds=self.short_factor * self.most_rounds,
        )


RULES = {
    "sustained": Rules(opening_rounds=20, heat_rounds=40, most_rounds=400),
    **dict.fromkeys(("burst", *GRAPHS), Rules(short_factor=4)),
}
"""Rules of each regime: at the power cap samples follow each other at once, and spread more; paced ones do where they are
short.
"""


@dataclass(eq=False)
class Racer:
    """A candidate in a race, and what is known of it so far."""

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
        """Median of all samples; infinite without any."""
        return statistics.median(self.samples_us) if self.samples_us else math.inf


@dataclass(frozen=True, kw_only=True)
class RaceResult:
    """What a race decided. Everything measured or failed was already handed to `on_outcome`."""

    winner: Measurement | None
    """The schedule to serve; None when every candidate failed, or others ran on the GPU meanwhile."""
    ties: tuple[Schedule, ...] = ()
    """Other schedules that cannot be told apart from the winner."""
    runner_up: Measurement | None = None
    """The fastest candidate that is known to be slower than the winner."""
    margin: float | None = None
    """How much longer the runner-up takes: the median over their common rounds of its time / the winner's - 1."""
    outcomes: tuple[Outcome, ...]
    """One for each candidate reached before the deadline; those of times that decide nothing are not among them."""
    disturbance: str = ""
    """The other processes that ran on the GPU every time, in words, so that nothing was decided; empty where the race decided."""


def race(
    runner: Runner,
    problem: Problem,
    candidates: Sequence[Candidate],
    *,
    preference: Sequence[Schedule] = (),
    rules: Rules | None = None,
    regime: str = "burst",
    known_us: float = math.inf,
    deadline_s: float = math.inf,
    on_outcome: Callable[[Outcome], None] | None = None,
    requires: Requirement | None = None,
) -> RaceResult:
    """Find the fastest of `candidates` for the problem `runner.begin` was given.

    Where other processes ran on the GPU meanwhile, what was measured is reported and decides nothing: all who did not fail race
    again, for `PATIENCE_S` or until the deadline.

    Args:
        runner: what measures.
        problem: recorded with each outcome.
        candidates: distinct programs.
        preference: schedules preferred within a tie, first first; others follow by id. So a tie resolves the same
            way every time.
        rules: how long to look; None for those of the regime.
        regime: burst, sustained, graph or graph-cold.
        known_us: time of the fastest program known already; what is hopeless against it is not raced.
        deadline_s: `time.monotonic()` after which no new work starts. The default schedule should come first.
        on_outcome: called once per candidate and race as its outcome is final, also when the race is interrupted.
        requires: why a candidate that computes right must not win; it then counts as failed. None where any may win.
    """
    report, failed = on_outcome or (lambda outcome: None), list[Outcome]()
    patient_until = min(time.monotonic() + PATIENCE_S, deadline_s)
    while True:
        state = RaceState(runner, problem, rules or RULES[regime], regime, report, deadline_s, requires)
        state.race(candidates, known_us)
        if not state.disturbance:
            return _decide(state, preference, failed)
        again = f"; again for up to {left_s:.0f} s" if (left_s := patient_until - time.monotonic()) > PAUSE_S else ""
        log.warning("%s: timed %s, which decides nothing%s", problem, state.disturbance, again)
        failed += [outcome for outcome in state.outcomes if isinstance(outcome, Failed)]
        if not again:
            return RaceResult(winner=None, outcomes=tuple(failed), disturbance=state.disturbance)
        broken = {outcome.schedule for outcome in failed}
        candidates = [candidate for candidate in candidates if candidate.schedule not in broken]
        time.sleep(PAUSE_S)


class RaceState:
    """One race: the racers, those still in, and the outcomes reported so far."""

    def __init__(
        self,
        runner: Runner,
        problem: Problem,
        rules: Rules,
        regime: str,
        report: Callable[[Outcome], None],
        deadline_s: float,
        requires: Requirement | None = None,
    ) -> None:
        self.runner, self.problem, self.rules, self.regime = runner, problem, rules, regime
        self._rules_of_short = rules.of_short()
        self._report, self._deadline_s, self._requires = report, deadline_s, requires
        self.racers: list[Racer] = []
        self.alive: list[Racer] = []
        self.outcomes: list[Outcome] = []
        self.concurrent_pids: tuple[int, ...] = ()
        """Numbers of the other processes that ran on the GPU during this race."""
        self._watched = False

    @property
    def disturbance(self) -> str:
        """Those processes in words; empty where there were none."""
        return Conditions(concurrent_pids=self.concurrent_pids).disturbance

    def race(self, candidates: Sequence[Candidate], known_us: float) -> None:
        """Run the whole race, from the first launch of each candidate to the last heat."""
        try:
            self.probe(candidates)
            self.admit(known_us)
            while self.alive:
                self.open()
                while self.go_on():
                    self.run(self.alive, self.rules.heat_rounds)
                if self.alive or self.late() or self.concurrent_pids:
                    break
                self.admit(math.inf)  # all who stayed in broke down: the rest races again
            self.watch()
        finally:
            for racer in self.racers:
                self.finish(racer)

    def late(self) -> bool:
        """Whether nothing new may start."""
        return time.monotonic() > self._deadline_s

    def probe(self, candidates: Sequence[Candidate]) -> None:
        """Time one launch of every candidate."""
        for candidate in candidates:
            if self.racers and self.late():
                break
            seen = self.runner.probe(candidate)
            if isinstance(seen, Failure):
                self.finish(Racer(candidate, failure=seen))
            else:
                self.racers.append(Racer(candidate, seen))

    def admit(self, known_us: float) -> None:
        """Let in every racer that is not hopeless, compared with the fastest whose results are correct.

        The first look at a hopeless racer is its only sample.
        """
        ratio = self.rules.hopeless_ratio
        left = sorted((racer for racer in self.racers if racer.failure is None), key=lambda racer: racer.first_look_us)
        while left and left[0].first_look_us <= ratio * known_us and not self.check(left[0]):
            left.pop(0)
        best_us = min([known_us, *(racer.first_look_us for racer in left[:1])])
        if best_us < SHORT_US:
            self.rules = self._rules_of_short
        limit_us = ratio * best_us
        self.alive = []
        for racer in left:
            if limit_us < racer.first_look_us <= max(ratio * limit_us, CHEAP_LOOK_US) and not self.late():
                seen = self.runner.probe(racer.candidate)
                if not isinstance(seen, Failure):
                    racer.first_look_us = min(seen, racer.first_look_us)
            if racer.first_look_us > limit_us:
                racer.samples_us = racer.samples_us or [racer.first_look_us]
            elif not self.rules.check_all or self.check(racer):
                racer.samples_us = []
                self.alive.append(racer)

    def check(self, racer: Racer) -> bool:
        """Whether it passes the accuracy gate; it is checked once, and a racer that fails is out."""
        if racer.accuracy is None and racer.failure is None:
            checked = self.runner.check(racer.candidate)
            if isinstance(checked, Failure):
                racer.failure = checked
            else:
                racer.accuracy = checked.accuracy
                if self._requires and checked.accuracy is not None:
                    racer.failure = self._requires(racer.candidate, checked.accuracy)
            if racer.failure is not None:
                self.finish(racer)
        return racer.failure is None

    def open(self) -> None:
        """First samples of all still in, in groups."""
        field_of = self.alive
        for start in range(0, len(field_of), self.rules.group):
            if start and (self.late() or self.concurrent_pids):
                break
            self.run(field_of[start : start + self.rules.group], self.rules.opening_rounds)

    def run(self, racers: Sequence[Racer], rounds: int) -> None:
        """One heat; a racer that fails in it keeps its failure."""
        batches = self.runner.sample([racer.candidate for racer in racers], rounds=rounds, regime=self.regime)
        self._watched = True
        for racer, batch in zip(racers, batches, strict=True):
            if isinstance(batch, Failure):
                racer.failure = batch
                continue
            racer.samples_us.extend(batch.samples_us)
            racer.conditions = batch.conditions
            self.concurrent_pids = batch.conditions.concurrent_pids or self.concurrent_pids

    def watch(self) -> None:
        """Ask who else ran where there was nothing but looks: samples tell by themselves."""
        looked = [racer for racer in self.racers if racer.failure is None and racer.samples_us]
        if looked and not self._watched:
            (batch,) = self.runner.sample([looked[0].candidate], rounds=0, regime=self.regime)
            if isinstance(batch, Batch):
                self.concurrent_pids = batch.conditions.concurrent_pids or ()

    def go_on(self) -> bool:
        """Drop who is beaten or wrong; whether another heat would tell more."""
        if self.concurrent_pids:
            return False
        rules = self.rules
        healthy = [racer for racer in self.alive if racer.failure is None and racer.samples_us]
        healthy.sort(key=_by_time)
        while healthy and not self.check(healthy[0]):  # only what is right may lead
            healthy.pop(0)
        keep = [racer for racer in healthy if not _beaten(racer, healthy[0], rules, len(healthy)) and self.check(racer)]
        for racer in self.alive:
            if racer not in keep:
                self.finish(racer)
        self.alive = keep
        rounds = max((len(racer.samples_us) for racer in keep), default=0)
        if not keep or self.late() or rounds + rules.heat_rounds > rules.most_rounds:
            return False
        return any(relative_uncertainty(racer.samples_us, rules.confidence) > rules.precision for racer in keep)

    def finish(self, racer: Racer) -> None:
        """Report a racer's outcome, once; nothing of one that was interrupted before its first sample."""
        if racer.finished or (racer.failure is None and not racer.samples_us):
            return
        racer.finished = True
        outcome: Outcome = (
            self.measurement(racer)
            if racer.failure is None
            else Failed(
                schedule=racer.candidate.schedule,
                fingerprint=racer.candidate.artifact.fingerprint,
                failure=racer.failure,
            )
        )
        self.outcomes.append(outcome)
        self._report(outcome)

    def measurement(self, racer: Racer) -> Measurement:
        """What is known of a racer that has samples."""
        concurrent = self.concurrent_pids or racer.conditions.concurrent_pids
        return Measurement(
            problem=self.problem,
            schedule=racer.candidate.schedule,
            fingerprint=racer.candidate.artifact.fingerprint,
            device=self.runner.device,
            regime=self.regime,
            **vars(Timing.of(racer.samples_us, self.rules.confidence)),
            samples_us=tuple(racer.samples_us),
            accuracy=racer.accuracy,
            conditions=replace(racer.conditions, concurrent_pids=concurrent),
            runner=self.runner.name,
        )


def _by_time(racer: Racer) -> tuple[float, str]:
    return racer.median_us, racer.candidate.schedule.id


def _ratios(racer: Racer | Measurement, other: Racer | Measurement) -> list[float]:
    """Their times against each other, round by round, over the rounds they have in common."""
    return [mine / theirs for mine, theirs in zip(racer.samples_us, other.samples_us, strict=False)]


def _beaten(racer: Racer, leader: Racer, rules: Rules, field_size: int) -> bool:
    """Whether it is slower than the leader: by far, or by more than matters and beyond doubt.

    The leader is the best of `field_size`, so that each is tested at that part of the level (Bonferroni).
    """
    if racer is leader or racer.median_us > rules.opening_ratio * leader.median_us:
        return racer is not leader
    ratios, level = _ratios(racer, leader), (1 - rules.confidence) / field_size
    return statistics.median(ratios) > 1 + rules.same and probability_not_slower(ratios) < level


def near(result: RaceResult) -> list[Measurement]:
    """The winner of a race, and the fastest of those that took at most `NEAR` longer, round by round."""
    if result.winner is None:
        return []
    winner = result.winner
    checked = [each for each in result.outcomes if isinstance(each, Measurement) and each.accuracy is not None]
    close = [each for each in checked if each.schedule != winner.schedule and time_ratio(each, winner) <= 1 + NEAR]
    close.sort(key=lambda each: (time_ratio(each, winner), each.schedule.id))
    return [winner, *close[: MOST_NEAR - 1]]


def settle(result: RaceResult, sustained: RaceResult, same: float = Rules.same) -> RaceResult:
    """The verdict of a burst race over what is near its winner, with their times at the power cap: the least product of both.

    The winner stays where nothing is better by more than `same`, or where time ran out before it raced. Otherwise ties are those
    that are no worse than the new one, and the runner-up's margin is the geometric mean of what it loses in both regimes, where
    it raced in both. What tied with a winner that stays is tied with it still if time ran out before it raced at the power cap.

    Args:
        result: of the burst race.
        sustained: of the race of those :func:`near` its winner.
        same: a relative difference that does not matter.
    """
    capped = {each.schedule: each for each in sustained.outcomes if isinstance(each, Measurement)}
    both = [each for each in near(result) if each.schedule in capped]
    tried = {each.schedule for each in sustained.outcomes}
    if not both or result.winner is None or result.winner.schedule not in tried:
        return result
    first = both[0]
    loss = {
        each.schedule: math.sqrt(time_ratio(each, first) * time_ratio(capped[each.schedule], capped[first.schedule]))
        for each in both
    }
    best = min(both, key=lambda each: (loss[each.schedule], each.schedule.id))
    if result.winner is first and loss[best.schedule] * (1 + same) >= 1:
        best = first
    loss = {schedule: each / loss[best.schedule] for schedule, each in loss.items()}
    rest = sorted((each for each in both if each is not best), key=lambda each: (loss[each.schedule], each.schedule.id))
    ties = [each.schedule for each in rest if loss[each.schedule] <= 1 + same]
    if best is first:
        ties += [schedule for schedule in result.ties if schedule not in tried]
    behind = next((each for each in rest if each.schedule not in ties), None)
    if behind is not None:
        margin: float | None = loss[behind.schedule] - 1
    else:
        others = [
            each for each in result.outcomes if isinstance(each, Measurement) and each.schedule not in {*loss, *ties}
        ]
        behind = min(others, key=lambda each: (-len(each.samples_us), each.median_us, each.schedule.id), default=None)
        margin = time_ratio(behind, best) - 1 if behind is not None else None
    return replace(result, winner=best, ties=tuple(ties), runner_up=behind, margin=margin)


def time_ratio(mine: Measurement, theirs: Measurement) -> float:
    """The median of their times against each other, round by round, over the rounds they have in common."""
    return statistics.median(_ratios(mine, theirs))


def _decide(state: RaceState, preference: Sequence[Schedule], failed: Sequence[Outcome]) -> RaceResult:
    outcomes = (*failed, *state.outcomes)
    finishers = [racer for racer in state.racers if racer.failure is None and racer.samples_us]
    finalists = [racer for racer in finishers if racer in state.alive]
    if not finalists:
        return RaceResult(winner=None, outcomes=outcomes)
    leader = min(finalists, key=_by_time)
    rules = state.rules
    tied = [racer for racer in finalists if not _beaten(racer, leader, rules, len(finalists))]
    rank = {schedule: index for index, schedule in enumerate(preference)}
    tied.sort(key=lambda racer: (rank.get(racer.candidate.schedule, len(rank)), racer.candidate.schedule.id))
    winner = next(racer for racer in tied if racer.median_us <= (1 + rules.same) * leader.median_us)
    tied.remove(winner)
    # Those that ran longest are the closest: medians of racers eliminated at different times do not compare.
    runner_up = min(
        (racer for racer in finishers if racer is not winner and racer not in tied),
        key=lambda racer: (-len(racer.samples_us), racer.median_us, racer.candidate.schedule.id),
        default=None,
    )
    return RaceResult(
        winner=state.measurement(winner),
        ties=tuple(racer.candidate.schedule for racer in tied),
        runner_up=state.measurement(runner_up) if runner_up else None,
        margin=statistics.median(_ratios(runner_up, winner)) - 1.0 if runner_up else None,
        outcomes=outcomes,
    )
