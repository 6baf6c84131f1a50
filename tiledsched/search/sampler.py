"""Which schedule to try next, over one search space and problem: ask for schedules, build them, choose, measure, tell."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiledsched.build.cubin import ResourceFacts
from tiledsched.errors import ConfigError
from tiledsched.problem import Problem
from tiledsched.schedule import KnobValue, Schedule
from tiledsched.search.surrogate import CUT, Encoder, Known, Surrogate, losses
from tiledsched.space import SearchSpace

SAMPLERS = ("surrogate", "tpe", "random", "exhaustive")
Estimate = Callable[[Schedule, ResourceFacts | None], float]
"""Modelled microseconds of a schedule; the facts are None before it is built."""
Mask = NDArray[np.bool_]


class Strategy(Protocol):
    """What tells the samplers apart. Schedules are known by their number among the valid ones."""

    def propose(self, unseen: Mask, count: int) -> list[int]:
        """Between 1 and `count` of the `unseen` `[valid]`, of which there is at least one."""
        ...

    def choose(self, waiting: Sequence[int], count: int) -> list[int]:
        """Up to `count` of those built and waiting to be measured."""
        ...

    def built(self, index: int, facts: ResourceFacts) -> None:
        """It builds, and this is what its machine code tells."""
        ...

    def tell(self, index: int, median_us: float | None) -> None:
        """Its time, or None where it failed."""
        ...

    def widen(self, more: Sequence[Schedule]) -> None:
        """`more` are valid from now on, numbered on from the last."""
        ...


class ScheduleSampler:
    """Proposes schedules never proposed before and learns from their times.

    `ask` says what to build. What was built is reported with `built`, and `choose` says what of it to measure now; what
    it leaves may be chosen later. Every outcome is reported with `tell`. The state lives in memory and is rebuilt by
    telling it what the store knows; the store is the truth.

    Args:
        space: where schedules come from.
        problem: what they are for.
        pinned: knobs held at one value, such as the accumulator mode.
        name: surrogate (a Gaussian process over schedules, see `tiledsched.search.surrogate`), tpe (see
            `tiledsched.search.tpe`), random, or exhaustive (enumeration order).
        seed: the same seed proposes the same schedules.
        first: schedules proposed and chosen before any of the sampler's own, such as the default one.
        estimate: the static model; None where there is none. Only the surrogate asks it.
        elsewhere: what is known of other problems. Only the surrogate learns from it.

    Raises:
        ConfigError: unknown sampler name.
    """

    def __init__(self, space: SearchSpace, problem: Problem, *, pinned: dict[str, KnobValue], name: str = "surrogate",
                 seed: int = 0, first: Sequence[Schedule] = (), estimate: Estimate | None = None,
                 elsewhere: Sequence[Known] = ()) -> None:  # fmt: skip
        if name not in SAMPLERS:
            raise ConfigError(f"unknown sampler {name!r}; known are {', '.join(SAMPLERS)}")
        self._valid = list(space.schedules(problem, pinned=pinned))
        rng = random.Random(seed)
        if name == "random":
            rng.shuffle(self._valid)
        elif name == "surrogate":  # equal promise goes to the schedule closest to the plain kernel, then to chance
            rng.shuffle(self._valid)
            self._valid.sort(key=lambda schedule: departures(space, schedule))
        self._index = {schedule: index for index, schedule in enumerate(self._valid)}
        self._unseen = np.ones(len(self._valid), dtype=bool)
        self._first = [self._index[schedule] for schedule in dict.fromkeys(first) if schedule in self._index]
        self._waiting: dict[int, None] = {}
        self._outside: dict[Schedule, float | None] = {}
        self._strategy: Strategy
        if name == "surrogate":
            self._strategy = SurrogateStrategy(space, problem, self._valid, estimate, elsewhere)
        elif name == "tpe":
            from tiledsched.search.tpe import TpeStrategy

            self._strategy = TpeStrategy(space, self._valid, pinned, seed)
        else:
            self._strategy = InOrder()

    def widen(self, more: Iterable[Schedule]) -> None:
        """From now on these schedules are valid, too, whatever the space says."""
        new = [schedule for schedule in dict.fromkeys(more) if schedule not in self._index]
        self._index |= {schedule: index for index, schedule in enumerate(new, start=len(self._valid))}
        self._valid += new
        self._unseen = np.concatenate([self._unseen, np.ones(len(new), dtype=bool)])
        self._strategy.widen(new)
        self.known((schedule, self._outside[schedule]) for schedule in new if schedule in self._outside)

    @property
    def size(self) -> int:
        """Valid schedules in all."""
        return len(self._valid)

    def ask(self, count: int) -> list[Schedule]:
        """Up to `count` schedules not proposed before; fewer only when the space is used up."""
        proposed = [index for index in self._first if self._unseen[index]][:count]
        self._unseen[proposed] = False
        while len(proposed) < count and self._unseen.any():
            more = self._strategy.propose(self._unseen, count - len(proposed))
            self._unseen[more] = False
            proposed += more
        return [self._valid[index] for index in proposed]

    def built(self, schedule: Schedule, facts: ResourceFacts) -> None:
        """A schedule of this space was built: from now on it may be chosen."""
        if schedule in self._index:
            index = self._index[schedule]
            self._unseen[index] = False
            self._waiting[index] = None
            self._strategy.built(index, facts)

    def choose(self, count: int) -> list[Schedule]:
        """Up to `count` of those built and not told: what to measure now, the most promising first."""
        chosen = [index for index in self._first if index in self._waiting][:count]
        others = [index for index in self._waiting if index not in chosen]
        if others and len(chosen) < count:
            chosen += self._strategy.choose(others, count - len(chosen))
        return [self._valid[index] for index in chosen]

    def known(self, times: Iterable[tuple[Schedule, float | None]]) -> None:
        """Tell it of schedules tried earlier: microseconds, or None for a failure. They are not proposed again."""
        for schedule, median_us in times:
            self.tell(schedule, median_us)

    def tell(self, schedule: Schedule, median_us: float | None) -> None:
        """The outcome of a schedule: its time, or None where it failed. One that is not valid teaches nothing until it is."""
        if schedule not in self._index:
            self._outside[schedule] = median_us
        else:
            index = self._index[schedule]
            self._unseen[index] = False
            self._waiting.pop(index, None)
            self._strategy.tell(index, median_us)

    def expected_gain(self) -> float:
        """What the best candidate left promises, as a part of the best time; infinite where the sampler cannot tell."""
        if not isinstance(self._strategy, SurrogateStrategy):
            return math.inf
        left = np.flatnonzero(self._unseen) if self._unseen.any() else np.array(list(self._waiting), dtype=np.int64)
        return self._strategy.expected_gain(left) if len(left) else 0.0


def departures(space: SearchSpace, schedule: Schedule) -> int:
    """How many knobs that only a measurement can judge are off their default."""
    return sum(schedule[name] != value for name, value in space.modelled_pins().items())


class InOrder:
    """The valid schedules one after the other."""

    def propose(self, unseen: Mask, count: int) -> list[int]:
        """The next ones."""
        return [int(index) for index in np.flatnonzero(unseen)[:count]]

    def choose(self, waiting: Sequence[int], count: int) -> list[int]:
        """The first."""
        return list(waiting[:count])

    def built(self, index: int, facts: ResourceFacts) -> None:
        """Nothing to learn."""

    def tell(self, index: int, median_us: float | None) -> None:
        """Nothing to learn."""

    def widen(self, more: Sequence[Schedule]) -> None:
        """Nothing to prepare."""


class SurrogateStrategy:
    """What promises the largest expected improvement, after all that is known here and elsewhere."""

    def __init__(self, space: SearchSpace, problem: Problem, valid: Sequence[Schedule], estimate: Estimate | None,
                 elsewhere: Sequence[Known]) -> None:  # fmt: skip
        self._problem, self._valid, self._estimate, self._elsewhere = problem, list(valid), estimate, elsewhere
        self._encoder = Encoder(space)
        self._codes = self._encoder.encode(valid)
        modelled_us = self._modelled_us(valid)
        self._least_us = min(modelled_us, default=1.0)
        self._modelled = losses(modelled_us)
        self._here: dict[int, float | None] = {}
        self._latest: Surrogate | None = None

    def _modelled_us(self, schedules: Sequence[Schedule]) -> list[float]:
        return [self._estimate(schedule, None) if self._estimate else 1.0 for schedule in schedules]

    def _modelled_loss(self, modelled_us: float) -> float:
        """Against the least modelled at the start; see `losses`."""
        return min(CUT, math.log(modelled_us / self._least_us))

    def _judge(self, candidates: Sequence[int] | NDArray[np.intp]) -> Surrogate:
        return Surrogate(self._encoder, self._problem, self._codes, self._modelled, self._here, self._elsewhere,
                         np.asarray(candidates, dtype=np.int64))  # fmt: skip

    def expected_gain(self, left: NDArray[np.intp]) -> float:
        """Of the best of `left`."""
        self._latest = self._judge(left)
        return float(self._latest.improvement().max())

    def propose(self, unseen: Mask, count: int) -> list[int]:
        """The most promising. Right after `expected_gain` was asked of the same, its judgement is used again."""
        judged, self._latest = self._latest or self._judge(np.flatnonzero(unseen)), None
        return judged.choose(count, unseen)

    def choose(self, waiting: Sequence[int], count: int) -> list[int]:
        """The most promising, now that their machine code is known."""
        return self._judge(waiting).choose(count)

    def built(self, index: int, facts: ResourceFacts) -> None:
        """The static model is asked again."""
        self._latest = None
        if self._estimate:
            self._modelled[index] = self._modelled_loss(self._estimate(self._valid[index], facts))

    def tell(self, index: int, median_us: float | None) -> None:
        """Learn it."""
        self._latest = None
        self._here[index] = median_us

    def widen(self, more: Sequence[Schedule]) -> None:
        """The static model judges them as it judged the others."""
        self._latest = None
        self._valid += more
        self._codes = np.concatenate([self._codes, self._encoder.encode(more)])
        modelled = [self._modelled_loss(us) for us in self._modelled_us(more)]
        self._modelled = np.concatenate([self._modelled, modelled])
