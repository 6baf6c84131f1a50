"""Optuna's tree-structured Parzen estimator as a sampler of valid schedules (multivariate: Bergstra et al. 2011).

It knows no constraints, so that most of what it proposes is invalid or known: then the nearest new schedule is taken.
Every other proposal is one nearest to the best known.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tiledsched.build.cubin import ResourceFacts
from tiledsched.schedule import KnobValue, Schedule
from tiledsched.space import SearchSpace

if TYPE_CHECKING:
    import optuna

STARTUP = 16
"""Outcomes before TPE proposes; until then valid schedules are drawn evenly."""
PROPOSALS = 2
"""What TPE may propose per schedule asked for. Asking again until it hits a new schedule takes some 80 proposals, each
slower than the last.
"""


class TpeStrategy:
    """See the module; schedules are known by their number among the valid ones."""

    def __init__(
        self, space: SearchSpace, valid: Sequence[Schedule], pinned: Mapping[str, KnobValue], seed: int
    ) -> None:
        self._valid = list(valid)
        self._rng = random.Random(seed)
        self._index = {schedule: index for index, schedule in enumerate(valid)}
        self._choices = {name: {choice: code for code, choice in enumerate(knob.choices)}
                         for name, knob in space.knobs.items()}  # fmt: skip
        self._codes = np.array([self._encoded(schedule) for schedule in valid], dtype=np.int8)
        self._told = self._turn = 0
        self._best: tuple[float, Schedule] | None = None
        self._study = _Study(space, pinned, seed)

    def _encoded(self, schedule: Schedule) -> list[int]:
        return [codes[schedule[name]] for name, codes in self._choices.items()]

    def propose(self, unseen: NDArray[np.bool_], count: int) -> list[int]:
        """One: the next depends on it."""
        index = self._next(unseen)
        self._study.pending(self._valid[index])
        return [index]

    def _next(self, unseen: NDArray[np.bool_]) -> int:
        if self._told < STARTUP:
            return self._any_of(unseen)
        self._turn += 1
        if self._best is not None and self._turn % 2:
            return self._near(self._best[1], unseen)
        for _ in range(PROPOSALS):
            wanted = self._study.propose()
            index = self._index.get(wanted, -1)
            if index >= 0 and unseen[index]:
                return index
        return self._near(wanted, unseen)

    def _near(self, wanted: Schedule, unseen: NDArray[np.bool_]) -> int:
        """One of the new schedules that differ from `wanted` in the fewest knobs."""
        differences = (self._codes != np.array(self._encoded(wanted), dtype=np.int8)).sum(axis=1)
        return self._any_of(unseen & (differences == differences[unseen].min()))

    def _any_of(self, mask: NDArray[np.bool_]) -> int:
        return int(self._rng.choice(np.flatnonzero(mask)))

    def choose(self, waiting: Sequence[int], count: int) -> list[int]:
        """In the order they were built."""
        return list(waiting[:count])

    def built(self, index: int, facts: ResourceFacts) -> None:
        """Nothing to learn."""

    def tell(self, index: int, median_us: float | None) -> None:
        """Learn the outcome."""
        schedule = self._valid[index]
        self._told += 1
        self._study.tell(schedule, median_us)
        if median_us is not None and (self._best is None or median_us < self._best[0]):
            self._best = median_us, schedule

    def widen(self, more: Sequence[Schedule]) -> None:
        """They may be proposed."""
        self._index |= {schedule: index for index, schedule in enumerate(more, start=len(self._valid))}
        self._valid += more
        codes = np.array([self._encoded(schedule) for schedule in more], dtype=np.int8)
        self._codes = np.concatenate([self._codes, codes.reshape(len(more), len(self._choices))])


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
