"""A sampler for Optuna that knows what to expect: a Gaussian process over a finite set of candidates, with a prior estimate of
each, and with what is known of other tasks.

    sampler = SurrogateSampler(candidates, choices=choices, expected=[estimate(each) for each in candidates])
    study = optuna.create_study(sampler=sampler)
    trial = study.ask({name: CategoricalDistribution(values) for name, values in choices.items()})

A candidate is one value for each parameter. The objective is positive and minimised, as a time is; what is predicted is the
*loss* of a candidate, log(value / best value of the task). Its expectation is the prior estimate's, and a covariance says how
far the truth may be from that, and how much two candidates have in common:

    cov = alike(p, q) * (SLOPE * m(x) * m(y) + UNEVEN * exp(-sum of the weights of the parameters in which x and y differ))

for candidate x of task p and y of q, where m is the estimate's loss and alike(p, q) falls from 1 as tasks differ. SLOPE lets
the values say how much the estimate exaggerates; UNEVEN is what it does not see. Each task has a level of its own, of which
nothing is assumed. Whoever is far from the best needs no exact prediction: losses are cut off at `CUT`, and noise grows with
the loss.

What to try next is what promises the largest expected improvement (Mockus 1974; Jones, Schonlau and Welch 1998). Trials that
run together are chosen one after the other, each as if those before it had come out as expected (Ginsbourger, Le Riche and
Carraro 2010). Sharing values between tasks through a product of covariances follows Bonilla, Chai and Williams, "Multi-task
Gaussian process prediction" (2007).

The constants were fitted by marginal likelihood to times of GPU programs and rounded; docs/results/search.md says how little the
result depends on them. The module needs NumPy, SciPy and Optuna, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

OTHER_WEIGHT = 0.1
"""How much of what two candidates share is lost where they differ in a parameter of which nothing is said."""
SLOPE = 0.28
"""Variance of the factor between the estimated losses and the true ones, about 1."""
UNEVEN = 0.05
"""Variance of the loss that the estimate does not explain."""
LEVEL = 4.0
"""Variance of each task's own level: large, so that it is learnt and not assumed."""
NOISE = 1e-5
"""Variance of an observed loss near the best: 0.3%."""
COARSENESS = 0.015
"""Further variance of a loss, times its square."""
CUT = 1.0
"""Losses above this count as this: 2.7 times the best, or a failure."""

CHUNK = 4096
"""Candidates handled at once, for the sake of memory."""
SHORTLIST = 4096
"""Candidates of which more than the mean is worked out: those with the least."""

Array = NDArray[np.float64]


Candidate = Mapping[str, Any]
"""A value for each parameter."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of one task: candidates, what was expected of them, and the times they took."""

    task: Any
    """Which one, as `similarity` takes it."""
    candidates: tuple[Candidate, ...]
    """Tried, or failed."""
    expected: tuple[float, ...]
    """The prior estimate of each; equal numbers where there is none."""
    values: tuple[float | None, ...]
    """None for a failure."""


class Encoder:
    """Turns candidates into vectors whose products say how much the candidates have in common."""

    def __init__(self, choices: Mapping[str, Sequence[Any]], weights: Mapping[str, float]) -> None:
        places = [(name, choice) for name, each in choices.items() for choice in each]
        self._column = {(name, type(choice), choice): column for column, (name, choice) in enumerate(places)}
        self._root = np.sqrt([weights[name] for name, _ in places])
        self.total = sum(weights[name] for name in choices)

    def encode(self, candidates: Sequence[Candidate]) -> Array:
        """`[candidates, choices]`: two rows' product is the sum of the weights of the parameters they have in common."""
        rows = np.zeros((len(candidates), len(self._root)))
        for row, candidate in enumerate(candidates):
            columns = [self._column.get((name, type(value), value)) for name, value in candidate.items()]
            known = [column for column in columns if column is not None]  # other tasks may have had other choices
            rows[row, known] = self._root[known]
        return rows


@dataclass(frozen=True, kw_only=True)
class _Points:
    """Candidates of tasks, ready for the covariance."""

    codes: Array
    """`[points, choices]`, from the encoder."""
    expected: Array
    """The prior estimate's loss `[points]`."""
    task: NDArray[np.int64]
    """Which task each is of `[points]`; 0 is the one at hand."""

    def at(self, places: NDArray[np.int64]) -> _Points:
        """The points at some places, in that order."""
        return _Points(codes=self.codes[places], expected=self.expected[places], task=self.task[places])

    def part(self, start: int, count: int = CHUNK) -> _Points:
        """At most `count` consecutive points from `start`."""
        return self.at(np.arange(start, min(start + count, len(self.task))))


def losses(values: Sequence[float | None]) -> Array:
    """log(value / least value), at most `CUT`; `CUT` for failures."""
    best = min((value for value in values if value is not None), default=1.0)
    return np.array([CUT if value is None else min(CUT, math.log(value / best)) for value in values])


class Surrogate:
    """The state of knowledge about some candidates of one task.

    Args:
        total: sum of all weights.
        codes: of all candidates `[candidates]`, from the encoder.
        expected: the prior estimate's loss of each `[candidates]`; equal numbers where there is none.
        here: which of them were tried, and their values (None for a failure).
        others: points of other tasks, and their losses.
        alike: of the tasks with each other `[1 + others, 1 + others]`; the first is the one at hand.
        judged: the numbers of those to be judged.
    """

    def __init__(
        self,
        total: float,
        codes: Array,
        expected: Array,
        here: Mapping[int, float | None],
        others: tuple[_Points, Array],
        alike: Array,
        judged: NDArray[np.int64],
    ) -> None:
        self._total, self._candidates, self._alike = total, judged, alike
        self._judged = _Points(
            codes=codes[judged], expected=expected[judged], task=np.zeros(len(judged), dtype=np.int64)
        )
        tried = np.array(list(here), dtype=np.int64)
        points, truth = others
        seen = _Points(
            codes=np.concatenate([codes[tried], points.codes]),
            expected=np.concatenate([expected[tried], points.expected]),
            task=np.concatenate([np.zeros(len(here), dtype=np.int64), points.task]),
        )
        # Before the first value here nothing but differences matter: the level is left out.
        self._levels = np.array([LEVEL if here else 0.0, *[LEVEL] * (len(alike) - 1)])
        self._learn(seen, np.concatenate([losses(list(here.values())), truth]))
        worked = any(value is not None for value in here.values())
        self._best = 0.0 if worked else float(self._mean.min(initial=math.inf))

    def _covariance(self, first: _Points, second: _Points) -> Array:
        apart = self._total - first.codes @ second.codes.T
        shared = UNEVEN * np.exp(-apart) + SLOPE * np.outer(first.expected, second.expected)
        shared *= self._alike[np.ix_(first.task, second.task)]
        same = first.task[:, None] == second.task[None, :]
        return np.asarray(shared + same * self._levels[first.task][:, None])

    def _learn(self, seen: _Points, truth: Array) -> None:
        """Means of all candidates; of those with the least, the shortlist, also what is uncertain."""
        from scipy.linalg import cholesky, solve_triangular

        lower = cholesky(self._covariance(seen, seen) + np.diag(NOISE + COARSENESS * truth**2), lower=True)
        weights = solve_triangular(lower, truth - seen.expected, lower=True)
        pull = solve_triangular(lower, weights, lower=True, trans="T")
        parts = [self._judged.part(start) for start in range(0, len(self._candidates), CHUNK)]
        mean = np.concatenate([part.expected + pull @ self._covariance(seen, part) for part in parts])
        shortlist = np.sort(np.argsort(mean, kind="stable")[:SHORTLIST])  # in their order: the first of equals wins
        self._candidates, self._judged = self._candidates[shortlist], self._judged.at(shortlist)
        self._mean = mean[shortlist]
        # The covariance of the candidates is their prior one less the products of these rows with themselves.
        self._rows = solve_triangular(lower, self._covariance(seen, self._judged), lower=True)
        prior = SLOPE * self._judged.expected**2 + UNEVEN + self._levels[0]
        self._variance = prior - np.einsum("ij,ij->j", self._rows, self._rows)
        self._rows_expected: list[Array] = []
        self._left = np.ones(len(self._candidates), dtype=bool)
        self._latest: int | None = None

    def improvement(self) -> Array:
        """The expected improvement of each candidate on the best, as a part of the best value `[judged]`."""
        from scipy.special import ndtr

        spread = np.sqrt(np.maximum(self._variance, 1e-12))
        ahead = (self._best - self._mean) / spread
        return np.asarray(spread * (ahead * ndtr(ahead) + np.exp(-0.5 * ahead**2) / math.sqrt(2.0 * math.pi)))

    def choose(self, count: int, allowed: NDArray[np.bool_] | None = None) -> list[int]:
        """Up to `count` of the judged by number, the most promising first, and none that was chosen before: each is taken to come
        out as expected before the next is chosen. `allowed` `[candidates]` leaves some of them out.
        """
        chosen: list[int] = []
        if allowed is not None:
            self._left &= allowed[self._candidates]
        while len(chosen) < count and self._left.any():
            if self._latest is not None:
                self._expect(self._latest)
            self._latest = int(np.argmax(np.where(self._left, self.improvement(), -np.inf)))
            self._left[self._latest] = False
            chosen.append(int(self._candidates[self._latest]))
        return chosen

    def _expect(self, place: int) -> None:
        """Update the variances as if that candidate had been measured and had taken what is expected; the means stay."""
        column = self._covariance(self._judged, self._judged.part(place, 1))[:, 0] - self._rows[:, place] @ self._rows
        for row in self._rows_expected:
            column = column - row * row[place]
        row = column / math.sqrt(max(column[place], 1e-12) + NOISE)
        self._variance = self._variance - row**2
        self._rows_expected.append(row)


class SurrogateSampler(BaseSampler):
    """Proposes the candidate that promises most; see the module.

    In addition to what every sampler does it says what the best candidate left promises (`expected_gain`), which of some running
    trials are worth finishing first (`choose`), and takes better estimates (`revise`) and more candidates (`widen`) as they
    become known. A trial that ran and failed counts as the worst; one that was pruned teaches nothing.

    Args:
        candidates: what may be proposed; of equal promise the first is. Trials of other parameters are passed over.
        choices: the values of each parameter that occur here or in other tasks.
        weights: how much of what two candidates share is lost where they differ in a parameter, exp(-weight) being left; 0.1
            unless given.
        expected: the prior estimate of each candidate, in the objective's unit; None where there is none.
        task: the task at hand, as `similarity` takes it.
        elsewhere: what is known of other tasks.
        similarity: of two tasks, from 0 to 1; 1 for all unless given.
    """

    def __init__(
        self,
        candidates: Iterable[Candidate],
        *,
        choices: Mapping[str, Sequence[Any]],
        weights: Mapping[str, float] | None = None,
        expected: Iterable[float] | None = None,
        task: Any = None,
        elsewhere: Sequence[Known] = (),
        similarity: Callable[[Any, Any], float] | None = None,
    ) -> None:
        self._distributions = {name: CategoricalDistribution(tuple(each)) for name, each in choices.items()}
        self._encoder = Encoder(choices, weights or dict.fromkeys(choices, OTHER_WEIGHT))
        self._candidates = list(candidates)
        self._index = {self._key(each): index for index, each in enumerate(self._candidates)}
        self._codes = self._encoder.encode(self._candidates)
        estimates = list(expected) if expected is not None else [1.0] * len(self._candidates)
        self._least = min(estimates, default=1.0)
        self._expected = losses(estimates)
        tasks = [task, *(known.task for known in elsewhere)]
        alike = similarity or (lambda one, other: 1.0)
        self._alike = np.array([[alike(one, other) for other in tasks] for one in tasks])
        sizes = [len(known.candidates) for known in elsewhere]
        self._others = (
            _Points(
                codes=np.concatenate(
                    [self._codes[:0], *(self._encoder.encode(known.candidates) for known in elsewhere)]
                ),
                expected=np.concatenate([[], *(losses(known.expected) for known in elsewhere)]),
                task=np.repeat(np.arange(1, len(tasks)), sizes),
            ),
            np.concatenate([[], *(losses(known.values) for known in elsewhere)]),
        )
        self._open = np.ones(len(self._candidates), dtype=bool)
        self._here: dict[int, float | None] = {}
        self._pending: dict[int, int | None] = {}
        self._read = 0
        self._judgement: Surrogate | None = None

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All parameters."""
        return dict(self._distributions)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """The most promising candidate that no trial has yet; nothing where there is none."""
        self._catch_up(study)
        if not self._open.any():
            return {}
        self._judgement = self._judgement or self._judge(np.flatnonzero(self._open))
        (index,) = self._judgement.choose(1, self._open) or [int(np.flatnonzero(self._open)[0])]  # beyond the shortlist
        self._open[index] = False
        return dict(self._candidates[index])

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The value of the first candidate: Optuna asks only where no candidate is left."""
        return self._candidates[0][param_name]

    def expected_gain(self, study: Study) -> float:
        """What the best candidate without a trial promises, or else of those that run, as a part of the best value."""
        self._catch_up(study)
        left = np.flatnonzero(self._open)
        if len(left):
            self._judgement = self._judge(left)
            return float(self._judgement.improvement().max())
        running = np.array(sorted(index for index in self._pending.values() if index is not None), dtype=np.int64)
        return float(self._judge(running).improvement().max()) if len(running) else 0.0

    def choose(self, study: Study, running: Sequence[Candidate], count: int) -> list[int]:
        """Up to `count` of running trials' candidates, by their places: the most promising first."""
        self._catch_up(study)
        numbers = [self._index[self._key(each)] for each in running]
        return [numbers.index(number) for number in self._judge(np.array(numbers, dtype=np.int64)).choose(count)]

    def revise(self, candidate: Candidate, expected: float) -> None:
        """A better estimate of a candidate, in the objective's unit."""
        self._expected[self._index[self._key(candidate)]] = self._loss(expected)
        self._judgement = None

    def widen(self, candidates: Sequence[Candidate], expected: Sequence[float] | None = None) -> None:
        """More candidates, none of them known yet, with their estimates."""
        self._index |= {self._key(each): index for index, each in enumerate(candidates, start=len(self._candidates))}
        self._candidates += candidates
        self._codes = np.concatenate([self._codes, self._encoder.encode(candidates)])
        estimates = expected if expected is not None else [1.0] * len(candidates)
        self._expected = np.concatenate([self._expected, [self._loss(each) for each in estimates]])
        self._open = np.concatenate([self._open, np.ones(len(candidates), dtype=bool)])
        self._judgement = None

    def _key(self, candidate: Candidate) -> tuple[Any, ...]:
        return tuple([(type(candidate.get(name)), candidate.get(name)) for name in self._distributions])

    def _loss(self, expected: float) -> float:
        """Against the least expected at the start; see `losses`."""
        return min(CUT, math.log(expected / self._least))

    def _judge(self, numbers: NDArray[np.int64]) -> Surrogate:
        return Surrogate(
            self._encoder.total, self._codes, self._expected, self._here, self._others, self._alike, numbers
        )

    def _catch_up(self, study: Study) -> None:
        """Read what became of trials since the last time."""
        trials = study.get_trials(deepcopy=False)
        if self._read == 0 and study.direction != StudyDirection.MINIMIZE:
            raise ValueError("SurrogateSampler minimises; give the study direction='minimize'")
        self._pending |= dict.fromkeys(range(self._read, len(trials)))
        self._read = len(trials)
        for number, index in list(self._pending.items()):
            trial = trials[number]
            if index is None:  # not known as long as the trial's parameters are being chosen
                self._pending[number] = index = self._index.get(self._key(trial.params))
            if index is not None:
                self._open[index] = False
            if trial.state.is_finished():
                del self._pending[number]
                self._judgement = None
                if index is not None and trial.state in (TrialState.COMPLETE, TrialState.FAIL):
                    self._here[index] = trial.value
