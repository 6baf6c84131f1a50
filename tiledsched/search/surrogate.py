"""What a program that was not measured may take: a Gaussian process over schedules, here and on neighbouring problems.

It predicts the *loss* of a schedule, log(time / best time of the problem). The expectation is the static model's, and a
covariance says how far the truth may be from it, and how much two programs have in common:

    cov = alike(p, q) * (SLOPE * m(x) * m(y) + UNEVEN * exp(-sum of the weights of the knobs in which x and y differ))

for schedule x on problem p and y on q, where m is the static model's loss and alike(p, q) falls from 1 as problems differ.
SLOPE lets the measurements say how much the model exaggerates; UNEVEN is what it does not see. Each problem has a level of
its own, of which nothing is assumed. Whoever is far from the best needs no exact prediction: losses are cut off at
`CUT`, and noise grows with the loss.

What to try next is what promises the largest expected improvement (Mockus 1974; Jones, Schonlau and Welch 1998). The
members of a batch are chosen one after the other, each as if those before it had come out as expected (Ginsbourger, Le
Riche and Carraro 2010). Sharing measurements between problems through a product of covariances follows Bonilla, Chai and
Williams, "Multi-task Gaussian process prediction" (2007).

The constants were fitted by marginal likelihood to the landscapes in `tuning_db/landscapes` and rounded;
docs/results/search.md says how little the result depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiledsched.kernel_names import kernel_named
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule
from tiledsched.space import Knob, SearchSpace

HINT_WEIGHTS: Mapping[str, float] = {"num_ctas": 5.0, "num_worker_warps": 1.0, "occupancy": 0.4}
"""How much of what two programs share is lost where they differ in a hint: exp(-weight) is left."""
SIZE_WEIGHT = 0.5
"""The same of knobs whose choices are powers of two, as tile sizes are."""
OTHER_WEIGHT = 0.1
"""Of every other knob. A kernel's own `weights` come before all of these."""
SLOPE = 0.28
"""Variance of the factor between the static model's losses and the true ones, about 1."""
UNEVEN = 0.05
"""Variance of the loss that the static model does not explain."""
LEVEL = 4.0
"""Variance of each problem's own level: large, so that it is learnt and not assumed."""
NOISE = 1e-5
"""Variance of a measured loss near the best: 0.3%."""
COARSENESS = 0.015
"""Further variance of a loss, times its square."""
CUT = 1.0
"""Losses above this count as this: 2.7 times the best, or a failure."""

CHUNK = 4096
"""Candidates handled at once, for the sake of memory."""
SHORTLIST = 4096
"""Candidates of which more than the mean is worked out: those with the least."""

Array = NDArray[np.float64]


def weight_of(knob: Knob, own: Mapping[str, float]) -> float:
    """How much of what two programs share is lost where they differ in `knob`, by the kernel's `own` weights or its kind."""
    sizes = all(type(each) is int and each > 8 and each & (each - 1) == 0 for each in knob.choices)
    return own.get(knob.name, HINT_WEIGHTS.get(knob.name, SIZE_WEIGHT if sizes and not own else OTHER_WEIGHT))


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of one problem: schedules, what the static model says of them, and how long they took."""

    problem: Problem
    """What was computed."""
    schedules: tuple[Schedule, ...]
    """Measured, or failed."""
    modelled_us: tuple[float, ...]
    """The static model's estimate of each; equal numbers where there is no model."""
    times_us: tuple[float | None, ...]
    """Microseconds; None for a failure."""


class Encoder:
    """Turns schedules into vectors whose products say how much the schedules have in common."""

    def __init__(self, space: SearchSpace) -> None:
        own = kernel_named(space.kernel).weights
        weights = {name: weight_of(knob, own) for name, knob in space.knobs.items()}
        places = [(name, choice) for name, knob in space.knobs.items() for choice in knob.choices]
        self._column = {(name, type(choice), choice): column for column, (name, choice) in enumerate(places)}
        self._root = np.sqrt([weights[name] for name, _ in places])
        self.total = sum(weights.values())

    def encode(self, schedules: Sequence[Schedule]) -> Array:
        """`[schedules, choices]`: two rows' product is the sum of the weights of the knobs they have in common."""
        rows = np.zeros((len(schedules), len(self._root)))
        for row, schedule in enumerate(schedules):
            columns = [self._column.get((name, type(value), value)) for name, value in schedule.items()]
            known = [column for column in columns if column is not None]  # an older space may have had other choices
            rows[row, known] = self._root[known]
        return rows


@dataclass(frozen=True, kw_only=True)
class _Points:
    """Schedules on problems, ready for the covariance."""

    codes: Array
    """`[points, choices]`, from the encoder."""
    modelled: Array
    """The static model's loss `[points]`."""
    problem: NDArray[np.int64]
    """Which problem each is of `[points]`."""

    def at(self, places: NDArray[np.int64]) -> _Points:
        """Those in some places."""
        return _Points(codes=self.codes[places], modelled=self.modelled[places], problem=self.problem[places])

    def part(self, start: int, count: int = CHUNK) -> _Points:
        """Some that follow each other."""
        return self.at(np.arange(start, min(start + count, len(self.problem))))


def losses(times_us: Sequence[float | None]) -> Array:
    """log(time / least time), at most `CUT`; `CUT` for failures."""
    best = min((us for us in times_us if us is not None), default=1.0)
    return np.array([CUT if us is None else min(CUT, math.log(us / best)) for us in times_us])


class Surrogate:
    """The state of knowledge about some candidates of one problem.

    Args:
        encoder: of the space.
        problem: what the schedules are for.
        codes: of all valid schedules `[valid, choices]`.
        modelled: the static model's loss of each `[valid]`; equal numbers where there is no model.
        here: which of them are measured, and their times in microseconds (None for a failure).
        elsewhere: what is known of other problems.
        candidates: the numbers of those to be judged `[candidates]`.
    """

    def __init__(self, encoder: Encoder, problem: Problem, codes: Array, modelled: Array, here: Mapping[int, float | None],
                 elsewhere: Sequence[Known], candidates: NDArray[np.int64]) -> None:  # fmt: skip
        self._total, self._candidates = encoder.total, candidates
        likeness = problem.declaration.likeness
        problems = [problem, *(known.problem for known in elsewhere)]
        self._alike = np.array([[likeness(one, other) for other in problems] for one in problems])
        self._judged = _Points(codes=codes[candidates], modelled=modelled[candidates],
                               problem=np.zeros(len(candidates), dtype=np.int64))  # fmt: skip
        measured = np.array(list(here), dtype=np.int64)
        seen = _Points(
            codes=np.concatenate([codes[measured], *(encoder.encode(known.schedules) for known in elsewhere)]),
            modelled=np.concatenate([modelled[measured], *(losses(known.modelled_us) for known in elsewhere)]),
            problem=np.repeat(np.arange(len(problems)), [len(here), *(len(known.schedules) for known in elsewhere)]),
        )  # fmt: skip
        truth = np.concatenate([losses(list(here.values())), *(losses(known.times_us) for known in elsewhere)])
        # Before the first measurement here nothing but differences matter: the level is left out.
        self._levels = np.full(len(problems), LEVEL)
        self._levels[0] = LEVEL if here else 0.0
        self._learn(seen, truth)
        worked = any(us is not None for us in here.values())
        self._best = 0.0 if worked else float(self._mean.min(initial=math.inf))

    def _covariance(self, first: _Points, second: _Points) -> Array:
        apart = self._total - first.codes @ second.codes.T
        shared = UNEVEN * np.exp(-apart) + SLOPE * np.outer(first.modelled, second.modelled)
        shared *= self._alike[np.ix_(first.problem, second.problem)]
        same = first.problem[:, None] == second.problem[None, :]
        return np.asarray(shared + same * self._levels[first.problem][:, None])

    def _learn(self, seen: _Points, truth: Array) -> None:
        """Means of all candidates; of those with the least, the shortlist, also what is uncertain."""
        from scipy.linalg import cholesky, solve_triangular

        lower = cholesky(self._covariance(seen, seen) + np.diag(NOISE + COARSENESS * truth**2), lower=True)
        weights = solve_triangular(lower, truth - seen.modelled, lower=True)
        pull = solve_triangular(lower, weights, lower=True, trans="T")
        parts = [self._judged.part(start) for start in range(0, len(self._candidates), CHUNK)]
        mean = np.concatenate([part.modelled + pull @ self._covariance(seen, part) for part in parts])
        shortlist = np.sort(np.argsort(mean, kind="stable")[:SHORTLIST])  # in their order: the first of equals wins
        self._candidates, self._judged = self._candidates[shortlist], self._judged.at(shortlist)
        self._mean = mean[shortlist]
        # The covariance of the candidates is their prior one less the products of these rows with themselves.
        self._rows = solve_triangular(lower, self._covariance(seen, self._judged), lower=True)
        prior = SLOPE * self._judged.modelled**2 + UNEVEN + self._levels[0]
        self._variance = prior - np.einsum("ij,ij->j", self._rows, self._rows)
        self._expected: list[Array] = []

    def improvement(self) -> Array:
        """The expected improvement of each candidate on the best, as a part of the best time `[candidates]`."""
        from scipy.special import ndtr

        spread = np.sqrt(np.maximum(self._variance, 1e-12))
        ahead = (self._best - self._mean) / spread
        return np.asarray(spread * (ahead * ndtr(ahead) + np.exp(-0.5 * ahead**2) / math.sqrt(2.0 * math.pi)))

    def choose(self, count: int, allowed: NDArray[np.bool_] | None = None) -> list[int]:
        """Up to `count` of the candidates by number, the most promising first. May be asked once.

        `allowed` `[valid]` leaves some of them out.
        """
        chosen: list[int] = []
        left = np.ones(len(self._candidates), dtype=bool) if allowed is None else allowed[self._candidates]
        while len(chosen) < count and left.any():
            place = int(np.argmax(np.where(left, self.improvement(), -np.inf)))
            chosen.append(int(self._candidates[place]))
            left[place] = False
            if len(chosen) < count:
                self._expect(place)
        return chosen

    def _expect(self, place: int) -> None:
        """As if that candidate had come out as expected: only what is uncertain changes."""
        column = self._covariance(self._judged, self._judged.part(place, 1))[:, 0] - self._rows[:, place] @ self._rows
        for row in self._expected:
            column = column - row * row[place]
        row = column / math.sqrt(max(column[place], 1e-12) + NOISE)
        self._variance = self._variance - row**2
        self._expected.append(row)
