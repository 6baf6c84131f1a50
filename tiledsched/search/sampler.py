"""Which schedule to try next: Optuna's ask and tell over one search space and problem."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tiledsched.errors import ConfigError
from tiledsched.problem import Problem
from tiledsched.schedule import KnobValue, Schedule
from tiledsched.space import SearchSpace

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "random", "exhaustive")
STARTUP = 16
"""Outcomes before TPE proposes; until then valid schedules are drawn evenly."""
PROPOSALS = 2
"""What TPE may propose per schedule asked for. It knows no constraints, so that most of it is invalid or known; then
the nearest new schedule is taken. Asking again until it hits takes some 80 proposals, each slower than the last.
"""


class ScheduleSampler:
    """Proposes schedules never proposed before and learns from their times.

    The study lives in memory and is rebuilt by telling it what the store knows; the store is the truth.

    Args:
        space: where schedules come from.
        problem: what they are for.
        pinned: knobs held at one value, such as the accumulator mode.
        name: tpe (multivariate, constant-liar: Bergstra et al. 2011; taken to the nearest new schedule, and by turns
            with one nearest to the best known), random, or exhaustive (enumeration order).
        seed: the same seed proposes the same schedules.
        first: schedules proposed before any of the sampler's own, such as the default one.

    Raises:
        ConfigError: unknown sampler name.
    """

    def __init__(self, space: SearchSpace, problem: Problem, *, pinned: dict[str, KnobValue], name: str = "tpe",
                 seed: int = 0, first: Sequence[Schedule] = ()) -> None:  # fmt: skip
        if name not in SAMPLERS:
            raise ConfigError(f"unknown sampler {name!r}; known are {', '.join(SAMPLERS)}")
        self._valid = list(space.schedules(problem, pinned=pinned))
        self._rng = random.Random(seed)
        if name == "random":
            self._rng.shuffle(self._valid)
        self._index = {schedule: index for index, schedule in enumerate(self._valid)}
        self._choices = {name: {choice: code for code, choice in enumerate(knob.choices)}
                         for name, knob in space.knobs.items()}  # fmt: skip
        self._codes = np.array([self._encoded(schedule) for schedule in self._valid], dtype=np.int8)
        self._unseen = np.ones(len(self._valid), dtype=bool)
        self._left = len(self._valid)
        self._next = 0
        self._queue = [schedule for schedule in first if schedule in self._index]
        self._told = self._turn = 0
        self._best: tuple[float, Schedule] | None = None
        self._study = _Study(space, pinned, seed) if name == "tpe" else None

    @property
    def size(self) -> int:
        """Valid schedules in all."""
        return len(self._valid)

    def _encoded(self, schedule: Schedule) -> list[int]:
        return [codes[schedule[name]] for name, codes in self._choices.items()]

    def ask(self, count: int) -> list[Schedule]:
        """Up to `count` schedules not proposed before; fewer only when the space is used up."""
        proposed: list[Schedule] = []
        while len(proposed) < count and self._left:
            index = self._propose()
            self._mark_seen(index)
            schedule = self._valid[index]
            if self._study is not None:
                self._study.pending(schedule)
            proposed.append(schedule)
        return proposed

    def _mark_seen(self, index: int) -> None:
        self._left -= int(self._unseen[index])
        self._unseen[index] = False

    def _propose(self) -> int:
        while self._queue:
            index = self._index[self._queue.pop(0)]
            if self._unseen[index]:
                return index
        if self._study is None:
            while not self._unseen[self._next]:
                self._next += 1
            return self._next
        if self._told < STARTUP:
            return self._any_of(self._unseen)
        self._turn += 1
        if self._best is not None and self._turn % 2:
            return self._near(self._best[1])
        for _ in range(PROPOSALS):
            wanted = self._study.propose()
            index = self._index.get(wanted, -1)
            if index >= 0 and self._unseen[index]:
                return index
        return self._near(wanted)

    def _near(self, wanted: Schedule) -> int:
        """One of the new schedules that differ from `wanted` in the fewest knobs."""
        differences = (self._codes != np.array(self._encoded(wanted), dtype=np.int8)).sum(axis=1)
        return self._any_of(self._unseen & (differences == differences[self._unseen].min()))

    def _any_of(self, mask: np.ndarray) -> int:
        return int(self._rng.choice(np.flatnonzero(mask)))

    def known(self, times: Iterable[tuple[Schedule, float | None]]) -> None:
        """Tell it of schedules tried earlier: microseconds, or None for a failure. They are not proposed again."""
        for schedule, median_us in times:
            if schedule in self._index:
                self._mark_seen(self._index[schedule])
            self.tell(schedule, median_us)

    def tell(self, schedule: Schedule, median_us: float | None) -> None:
        """The outcome of a schedule: its time, or None where it failed. Schedules outside the space teach nothing."""
        if self._study is not None and schedule in self._index:
            self._told += 1
            self._study.tell(schedule, median_us)
            if median_us is not None and (self._best is None or median_us < self._best[0]):
                self._best = median_us, schedule


class _Study:
    """An Optuna study in memory whose trials are schedules."""

    def __init__(self, space: SearchSpace, pinned: Mapping[str, KnobValue], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # multivariate and constant_liar are marked experimental in some releases
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=1)
        self._study = optuna.create_study(direction="minimize", sampler=sampler)
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution([pinned[name]] if name in pinned else knob.choices)
            for name, knob in space.knobs.items()
        }
        self._numbers: dict[Schedule, int] = {}

    def propose(self) -> Schedule:
        """What TPE would try next, valid or not; nothing is noted."""
        import optuna

        trial = self._study.ask(self._distributions)
        self._study.tell(trial, state=optuna.trial.TrialState.FAIL)  # TPE takes no notice of failed trials
        return Schedule(trial.params)

    def pending(self, schedule: Schedule) -> None:
        """Note that `schedule` is being tried, so that what is proposed meanwhile keeps away from it."""
        import optuna

        self._add(schedule, state=optuna.trial.TrialState.RUNNING)
        self._numbers[schedule] = self._study.get_trials(deepcopy=False)[-1].number

    def tell(self, schedule: Schedule, value: float | None) -> None:
        """The outcome; of a schedule that was not pending, too."""
        import optuna

        number = self._numbers.pop(schedule, None)
        if number is not None:
            state = optuna.trial.TrialState.FAIL if value is None else optuna.trial.TrialState.COMPLETE
            self._study.tell(number, value, state=state)
        elif value is not None:
            self._add(schedule, value=value)

    def _add(self, schedule: Schedule, **more: Any) -> None:
        import optuna

        trial = optuna.trial.create_trial(params=dict(schedule), distributions=self._distributions, **more)
        self._study.add_trial(trial)
