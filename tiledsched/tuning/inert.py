"""Which changes of knobs leave the program as it is, learnt from builds as they come in.

A hint may be without effect for one tile and not for another. So what is known of a change (a knob going from one value to
another) is weighed by how much of the rest of the schedule it was seen with is as it is here. Schedules that are likely to be a
program already built are worth building last.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiledsched.core.schedule import Schedule

DECAY = 0.7
"""What a change seen with one other knob different counts, of what it would count here; that squared for two, and so on."""
DOUBT = 0.25
"""Weight of the assumption, before any observation, that a change has an effect; in observed changes."""
SURE = 0.7
"""Probability from which a schedule counts as a program already built; see docs/results/search.md."""
MOST_CHANGES = 2
"""Knobs in which two schedules differ at most where they are taken for one program."""
MOST_TAUGHT = 3
"""Knobs in which two schedules that were seen to be one program differ at most, for each of the changes to count as without
effect.
"""

Codes = NDArray[np.int32]
_Seen = tuple[Codes, tuple[int, int], bool]
"""The schedule a change was seen with, its two values, and whether it left the program as it was."""


class InertChanges:
    """Learns from the builds of one kernel for one arch; problems share what they teach.

    Args:
        knobs: names, the same for all schedules.
    """

    def __init__(self, knobs: Iterable[str]) -> None:
        self._knobs = tuple(knobs)
        self._values: dict[Hashable, int] = {}
        self._seen: dict[int, list[_Seen]] = defaultdict(list)
        self._stacked: dict[int, tuple[Codes, Codes, NDArray[np.bool_]]] = {}
        self._built: dict[Any, dict[Schedule, Hashable]] = {}
        self._codes: dict[Any, Codes] = {}
        self._tried: dict[Any, dict[Schedule, Codes]] = {}

    def learn(self, problem: Hashable, schedule: Schedule, key: Hashable, *, tried: bool = True) -> None:
        """`schedule` was built for `problem`, and is the program `key`. Where it was not `tried`, others of the same program
        are still new.
        """
        code = self._code(problem, schedule)
        if tried:
            self._tried.setdefault(problem, {})[schedule] = code
        built = self._built.setdefault(problem, {})
        if schedule in built:
            return
        codes = self._codes.get(problem, code[None][:0])
        keys = list(built.values())
        for place in np.flatnonzero((codes != code).sum(axis=1) <= MOST_TAUGHT):
            other, same = codes[place], keys[place] == key
            changed = np.flatnonzero(other != code)
            if same or len(changed) == 1:  # of several changes any may be the one that made the difference
                for knob in map(int, changed):  # seen with the rest of either
                    pair = _pair(knob, code, other)
                    self._seen[knob] += [(code, pair, same), (other, pair, same)]
        built[schedule] = key
        self._codes[problem] = np.concatenate([codes, code[None]])

    def equal(self, problem: Hashable, schedule: Schedule) -> float:
        """The probability that `schedule` is a program tried for `problem` already."""
        tried = self._tried.get(problem)
        if not tried:
            return 0.0
        code = self._code(problem, schedule)
        codes = np.stack(list(tried.values()))
        close = codes[(codes != code).sum(axis=1) <= MOST_CHANGES]
        return max(
            (
                math.prod(
                    (self._without_effect(int(knob), code, other) for knob in np.flatnonzero(other != code)), start=1.0
                )
                for other in close
            ),
            default=0.0,
        )

    def put_off(self, problem: Hashable, schedules: Sequence[Schedule], count: int) -> list[Schedule]:
        """The first `count` of `schedules` that are new programs as far as is known; where they are too few, others, too."""
        new: list[Schedule] = []
        old: list[Schedule] = []
        for schedule in schedules:
            if len(new) == count:
                break
            (old if self.equal(problem, schedule) >= SURE else new).append(schedule)
        return [*new, *old][:count]

    def _code(self, problem: Hashable, schedule: Schedule) -> Codes:
        """A number for each value, and one for the problem."""
        values = [*((name, type(schedule.get(name)), schedule.get(name)) for name in self._knobs), problem]
        return np.array([self._values.setdefault(value, len(self._values)) for value in values], dtype=np.int32)

    def _without_effect(self, knob: int, code: Codes, other: Codes) -> float:
        seen = self._seen.get(knob)
        if not seen:
            return 0.0
        if knob not in self._stacked or len(self._stacked[knob][2]) < len(seen):
            self._stacked[knob] = (
                np.stack([context for context, _, _ in seen]),
                np.array([pair for _, pair, _ in seen]),
                np.array([same for _, _, same in seen]),
            )
        contexts, pairs, same = self._stacked[knob]
        apart = (contexts != code).sum(axis=1) - (contexts[:, knob] != code[knob])
        apart += (pairs != np.array(_pair(knob, code, other))).sum(axis=1)
        weights = DECAY**apart
        return float((weights * same).sum() / (weights.sum() + DOUBT))


def _pair(knob: int, one: Codes, other: Codes) -> tuple[int, int]:
    low, high = sorted((int(one[knob]), int(other[knob])))
    return low, high
