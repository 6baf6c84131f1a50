"""The search of one problem as an Optuna study: ask for schedules, build them, choose, measure, tell.

Whatever the sampler, what it proposes is taken to the nearest schedule that is valid and was not tried, in number of knobs that
differ, chance deciding among equals; the trial holds that schedule, so that nothing is told that is not true. The study lives in
memory and is rebuilt from the store by telling it what that knows; the store is the truth.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial

from tiledsched.core.device import ResourceFacts
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.measure.runner import Measurement
from tiledsched.tuning.builder import Builder, Key, Program
from tiledsched.tuning.inert import InertChanges
from tiledsched.tuning.race import Outcome
from tiledsched.tuning.samplers import IN_ORDER, NUMBERS_ONLY, OURS, SAMPLERS, make_sampler
from tiledsched.tuning.surrogate import OTHER_WEIGHT, Known, SurrogateSampler

Estimate = Callable[[Schedule, "ResourceFacts | None"], float]
"""Modelled microseconds of a schedule; the facts are None before it is built."""


class ScheduleStudy:
    """Proposes schedules never proposed before and learns from their times.

    `ask` says what to build. What was built is reported with `built`, and `choose` says what of it to measure now; what
    it leaves may be chosen later. Every outcome is reported with `tell`.

    Args:
        space: where schedules come from.
        problem: what they are for.
        pinned: knobs held at one value, such as the accumulator mode.
        sampler: surrogate, tpe, gp, cmaes, qmc, random, exhaustive, or module:Class; see `tiledsched.tuning.samplers`.
        seed: the same seed proposes the same schedules.
        first: schedules proposed and chosen before any of the sampler's own, such as the default one.
        estimate: the static model; None where there is none. Only the surrogate asks it.
        elsewhere: what is known of other problems. Only the surrogate learns from it.
        among: the valid schedules that are searched; None for all of the space, or some of a large one.
        repeats: whether a schedule is likely to be a program that was built already: those are proposed when nothing else is
            left.

    Raises:
        ConfigError: no such sampler, or a package that it needs is not installed.
    """

    def __init__(
        self,
        space: SearchSpace,
        problem: Problem,
        *,
        pinned: Mapping[str, KnobValue],
        sampler: str = OURS,
        seed: int = 0,
        first: Sequence[Schedule] = (),
        estimate: Estimate | None = None,
        elsewhere: Sequence[Known] = (),
        among: Iterable[Schedule] | None = None,
        repeats: Callable[[Schedule], bool] | None = None,
    ) -> None:
        self.space, self._problem, self._estimate, self._repeats = space, problem, estimate, repeats
        self._valid = list(space.listed(problem, pinned=pinned)[0] if among is None else dict.fromkeys(among))
        self._rng = random.Random(seed)
        inner = make_sampler(sampler, seed)
        self._in_order = sampler in IN_ORDER
        if sampler in (OURS, "random"):
            self._rng.shuffle(self._valid)
        if sampler == OURS:  # equal promise goes to the schedule closest to the plain kernel, then to chance
            self._valid.sort(key=lambda schedule: departures(space, schedule))
        self._index = {schedule: index for index, schedule in enumerate(self._valid)}
        self._unseen = np.ones(len(self._valid), dtype=bool)
        self._first = [self._index[schedule] for schedule in dict.fromkeys(first) if schedule in self._index]
        self._later: dict[int, None] = {}
        self._waiting: dict[int, None] = {}
        self._running: dict[int, int] = {}
        self._outside: dict[Schedule, float | None] = {}
        self._codes: NDArray[np.int16] | None = None
        # What was recorded from an older space may have other values.
        self._choices = {
            name: tuple(dict.fromkeys([*knob.choices, *(each[name] for each in self._valid)]))
            for name, knob in space.knobs.items()
        }
        self._guide: SurrogateSampler | None = None
        if sampler == OURS:
            declared = problem.declaration
            self._guide = inner = SurrogateSampler(
                self._valid,
                choices=self._choices,
                weights=knob_weights(space),
                expected=self._expected(self._valid),
                task=problem,
                elsewhere=elsewhere,
                similarity=declared.similarity.weight,
            )
        self._numbers = any(base.__name__ in NUMBERS_ONLY for base in type(inner).__mro__)
        self._distributions: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(each) - 1)
            if self._numbers
            else CategoricalDistribution([pinned[name]] if name in pinned else each)
            for name, each in self._choices.items()
        }
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study: Study = optuna.create_study(
            direction="minimize", sampler=OnlyValid(inner or RandomSampler(seed), self._distributions, self._take)
        )

    def widen(self, more: Iterable[Schedule]) -> None:
        """Add schedules to the valid ones, whatever the space says."""
        new = [schedule for schedule in dict.fromkeys(more) if schedule not in self._index]
        self._index |= {schedule: index for index, schedule in enumerate(new, start=len(self._valid))}
        self._valid += new
        self._unseen, self._codes = np.concatenate([self._unseen, np.ones(len(new), dtype=bool)]), None
        if self._guide is not None and new:
            self._guide.widen(new, self._expected(new))
        for schedule in new:
            if schedule in self._outside:
                self.tell(schedule, self._outside[schedule])

    @property
    def size(self) -> int:
        """Valid schedules in all."""
        return len(self._valid)

    def ask(self, count: int) -> list[Schedule]:
        """Up to `count` schedules not proposed before; fewer only when the space is used up."""
        proposed: list[Schedule] = []
        while len(proposed) < count and self._unseen.any():
            trial = self.study.ask(self._distributions)
            index = self._index[self._schedule(trial.params)]
            self._unseen[index] = False
            self._running[index] = trial.number
            proposed.append(self._valid[index])
        return proposed

    def built(self, schedule: Schedule, facts: ResourceFacts) -> None:
        """A schedule of this space was built: from now on it may be chosen."""
        if schedule not in self._index:
            return
        index = self._index[schedule]
        self._waiting[index] = None
        if self._unseen[index]:
            self._unseen[index] = False
            self._add(index, state=TrialState.RUNNING)
            self._running[index] = self.study.get_trials(deepcopy=False)[-1].number
        if self._guide is not None and self._estimate is not None:
            self._guide.revise(schedule, self._estimate(schedule, facts))

    def choose(self, count: int) -> list[Schedule]:
        """Up to `count` of those built and not yet measured: what to measure now, the most promising first."""
        chosen = [index for index in self._first if index in self._waiting][:count]
        others = [index for index in self._waiting if index not in chosen]
        left = count - len(chosen)
        if others and left > 0:
            if self._guide is not None:
                others = [
                    others[place]
                    for place in self._guide.choose(self.study, [self._valid[index] for index in others], left)
                ]
            chosen += others[:left]
        return [self._valid[index] for index in chosen]

    def tell(self, schedule: Schedule, median_us: float | None) -> None:
        """The outcome of a schedule, of this search or an earlier one: its time, or None where it failed. It is not proposed
        again.

        The outcome of a schedule that is not valid teaches nothing until `widen` makes it so.
        """
        if schedule in self._index:
            self._close(self._index[schedule], TrialState.FAIL if median_us is None else TrialState.COMPLETE, median_us)
        else:
            self._outside[schedule] = median_us

    def leave(self, schedule: Schedule) -> None:
        """Note a schedule that was proposed and not tried: nothing is learnt from it, and it is not proposed again."""
        if schedule in self._index:
            self._close(self._index[schedule], TrialState.PRUNED, None)

    def expected_gain(self) -> float:
        """What the best candidate left promises, as a part of the best time; infinite where the sampler cannot tell."""
        return math.inf if self._guide is None else self._guide.expected_gain(self.study)

    def _close(self, index: int, state: TrialState, value: float | None) -> None:
        self._waiting.pop(index, None)
        if index in self._running:
            self.study.tell(self._running.pop(index), value, state=state)
        elif self._unseen[index]:
            self._unseen[index] = False
            self._add(index, state=state, value=value)

    def _add(self, index: int, **more: Any) -> None:
        """Add a trial that the sampler did not propose."""
        params = self._params(self._valid[index])
        self.study.add_trial(create_trial(params=params, distributions=self._distributions, **more))

    def _expected(self, schedules: Iterable[Schedule]) -> list[float]:
        return [self._estimate(schedule, None) if self._estimate else 1.0 for schedule in schedules]

    def _params(self, schedule: Schedule) -> dict[str, Any]:
        """The schedule as parameters of a trial: values, or their places among the choices where the sampler searches numbers."""
        if self._numbers:
            return {name: each.index(schedule[name]) for name, each in self._choices.items()}
        return dict(schedule)

    def _schedule(self, params: Mapping[str, Any]) -> Schedule:
        if self._numbers:
            return Schedule({name: each[params[name]] for name, each in self._choices.items()})
        return Schedule({name: params[name] for name in self._choices})

    def _take(self, proposal: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """What is tried: the first of all first, then what is proposed, or else the nearest to it that was not tried."""
        first = next((index for index in self._first if self._unseen[index]), None)
        if first is not None:
            return self._params(self._valid[first])
        now = self._unseen.copy()
        now[list(self._later)] = False
        wanted: Schedule | None = None
        while now.any():
            if not self._in_order and (wanted is None or self._guide is not None):
                wanted = self._schedule(proposal())
            index = int(np.argmax(now)) if wanted is None else self._nearest(wanted, now)
            if self._repeats is None or not self._repeats(self._valid[index]):
                return self._params(self._valid[index])
            self._later[index], now[index] = None, False
        return self._params(self._valid[next(index for index in self._later if self._unseen[index])])

    def _nearest(self, wanted: Schedule, among: NDArray[np.bool_]) -> int:
        index = self._index.get(wanted, -1)
        if index >= 0 and among[index]:
            return index
        if self._codes is None:
            self._codes = self._coded(self._valid)
        differences = (self._codes != self._coded([wanted])).sum(axis=1)
        nearest = np.flatnonzero(among & (differences == differences[among].min()))
        return int(self._rng.choice(nearest.tolist()))

    def _coded(self, schedules: Sequence[Schedule]) -> NDArray[np.int16]:
        """The place of each value among its knob's choices `[schedules, knobs]`."""
        rows = [[each.index(schedule[name]) for name, each in self._choices.items()] for schedule in schedules]
        return np.array(rows, dtype=np.int16)


class Trials:
    """Keeps the study informed of one problem: of equal programs only one waits to be measured, and all get its time.

    Args:
        builder: what builds; it knows which schedules are one program.
        problem: what is tuned.
        device: on which grids depend.
        study: who is told.
        times: what the store knows: microseconds, or None for a failure.
        inert: who learns which changes of knobs leave the program as it is.
    """

    def __init__(
        self,
        builder: Builder,
        problem: Problem,
        device: Any,
        study: ScheduleStudy,
        times: Mapping[Schedule, float | None],
        inert: InertChanges,
    ) -> None:
        self._builder, self._problem, self._device, self._study = builder, problem, device, study
        self._inert = inert
        self.times = dict(times)
        self._known = {
            program.key: self.times[program.schedule] for program in builder.programs(list(times), problem, device)
        }
        learn(inert, problem, builder.programs(builder.built(problem, study.space), problem, device), tried=self.times)
        self._waiting: dict[Key, list[Schedule]] = {}
        for schedule, median_us in times.items():
            study.tell(schedule, median_us)

    @property
    def programs(self) -> int:
        """Distinct programs whose outcome is known."""
        return len(self._known)

    @property
    def ranked(self) -> dict[Schedule, float]:
        """The schedules that worked and their microseconds, the fastest first, and of equals the one that was known first."""
        worked = {schedule: us for schedule, us in self.times.items() if us is not None}
        return dict(sorted(worked.items(), key=lambda item: item[1]))

    @property
    def best(self) -> tuple[Schedule | None, float]:
        """The fastest schedule so far and its microseconds; None and infinity where nothing worked."""
        return next(iter(self.ranked.items()), (None, math.inf))

    def measured(self) -> list[tuple[Schedule, ResourceFacts | None, float]]:
        """Each distinct program that worked: its schedule, its facts, its microseconds."""
        worked = {schedule: us for schedule, us in self.times.items() if us is not None}
        programs = self._builder.programs(list(worked), self._problem, self._device)
        return [(program.schedule, program.facts, worked[program.schedule]) for program in programs]

    def note_builds(self, proposed: Sequence[Schedule]) -> int:
        """Take down what became of builds; how many of them failed. A schedule not reached before a deadline is left."""
        failed = 0
        for schedule in proposed:
            record = self._builder.record(schedule, self._problem)
            if record is not None and record.failure is not None:
                failed += 1
                self._study.tell(schedule, None)
        programs = self._builder.programs(proposed, self._problem, self._device)
        learn(self._inert, self._problem, programs)
        for program in programs:
            if program.key in self._known:
                self._note(program.schedules, self._known[program.key])
            elif program.key in self._waiting:
                self._waiting[program.key] += program.schedules
            else:
                self._waiting[program.key] = list(program.schedules)
                self._study.built(program.schedule, program.facts)
        return failed

    def note_outcomes(self, chosen: Sequence[Schedule], outcomes: Iterable[Outcome]) -> None:
        """Note the outcomes of a batch. A schedule that was chosen and not reached counts as tried, and nothing is learnt from
        it.
        """
        found = {
            outcome.schedule: outcome.median_us if isinstance(outcome, Measurement) else None for outcome in outcomes
        }
        for program in self._builder.programs(chosen, self._problem, self._device):
            waiting = self._waiting.pop(program.key, list(program.schedules))
            if program.schedule in found:
                self._known[program.key] = found[program.schedule]
                self._note(waiting, found[program.schedule])
            else:
                for schedule in waiting:
                    self._study.leave(schedule)

    def _note(self, schedules: Iterable[Schedule], median_us: float | None) -> None:
        for schedule in schedules:
            self.times.setdefault(schedule, median_us)
            self._study.tell(schedule, self.times[schedule])


def learn(
    inert: InertChanges, problem: Problem, programs: Iterable[Program], *, tried: Container[Schedule] | None = None
) -> None:
    """Which of the built schedules of `problem` are one program; all of them were tried, unless it is said which."""
    for program in programs:
        for schedule in program.schedules:
            inert.learn(problem, schedule, program.key, tried=tried is None or schedule in tried)


class OnlyValid(BaseSampler):
    """Any sampler, held to what can be tried.

    Args:
        inner: what proposes.
        distributions: of all parameters.
        take: makes of a proposal the parameters of the trial. It asks for the proposal only if it needs one.
    """

    def __init__(
        self,
        inner: BaseSampler,
        distributions: Mapping[str, BaseDistribution],
        take: Callable[[Callable[[], Mapping[str, Any]]], dict[str, Any]],
    ) -> None:
        self._inner, self._distributions, self._take = inner, distributions, take

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters: they are chosen together."""
        return dict(self._distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """What is tried."""
        return self._take(lambda: self._proposal(study, trial))

    def _proposal(self, study: Study, trial: FrozenTrial) -> dict[str, Any]:
        inner = self._inner
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what is experimental
                together = inner.infer_relative_search_space(study, trial)
                found = dict(inner.sample_relative(study, trial, together))
                for name, distribution in self._distributions.items():
                    if name not in found:
                        found[name] = inner.sample_independent(study, trial, name, distribution)
        except (ValueError, RuntimeError, ImportError, NotImplementedError) as error:
            raise ConfigError(
                f"sampler {type(inner).__name__} cannot search schedules: {error}; take another --sampler: "
                f"{', '.join(SAMPLERS)}"
            ) from error
        return found

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never called: all parameters are chosen together."""
        raise AssertionError(param_name)

    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        """Pass the call on to the wrapped sampler."""
        self._inner.before_trial(study, trial)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        """Pass the call on to the wrapped sampler."""
        self._inner.after_trial(study, trial, state, values)


HINT_WEIGHTS: Mapping[str, float] = {"num_ctas": 5.0, "num_worker_warps": 1.0, "occupancy": 0.4}
"""Weights of hints: the similarity of two schedules that differ in a hint is multiplied by exp(-weight)."""
SIZE_WEIGHT = 0.5
"""Weight of a knob whose choices are powers of two, as tile sizes are, for each doubling; every other knob has `OTHER_WEIGHT`.
Weights that a kernel declares replace all of these."""


def knob_weights(space: SearchSpace) -> dict[str, float]:
    """How much of what two schedules share is lost where they differ in a knob, by the kernel's own weights or its kind."""
    from tiledsched.core.registry import kernel_named

    own = kernel_named(space.kernel).weights
    weights = {}
    for name, knob in space.knobs.items():
        sizes = all(type(each) is int and each > 8 and each & (each - 1) == 0 for each in knob.choices)
        usual = HINT_WEIGHTS.get(name, SIZE_WEIGHT if sizes and not own else OTHER_WEIGHT)
        weights[name] = own.get(name, usual)
    return weights


def departures(space: SearchSpace, schedule: Schedule) -> int:
    """How many knobs that only a measurement can judge are off their default."""
    return sum(schedule[name] != value for name, value in space.modelled_pins().items())
