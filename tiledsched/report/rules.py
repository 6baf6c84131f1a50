"""Finds for which problems each value of a knob is good: rules of at most three parts over the fields of problems.

A value is good for a problem if a program with it is within a tolerance of the problem's best time, or cannot be told apart from
what is served. Rules are judged on problems that they were not made from. These are pure functions: no database is read.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiledsched.core.schedule import KnobValue
from tiledsched.core.text import code, labels_of, show
from tiledsched.report.analysis import broad
from tiledsched.report.records import AS_GOOD, ProblemReport

FOLDS = 5
"""A rule is made as often, each time without a part of the problems, on which it is then trees."""
FEWEST_PROBLEMS = 8
"""Of fewer problems no rule is made."""
FEWEST_OF_PART = 3
"""A part of a rule holds for at least as many problems."""
MOST_THRESHOLDS = 8
"""Thresholds of one field that are tried, at most."""
WORTH = 0.02
"""A third part must make a rule right for at least this share of the problems more."""
CHANCE = 0.05
"""How likely chance alone may give any of the knobs a rule that is so often right where one value for all problems is not."""
NEAR = 0.75
"""A part names another value that is good for at least this share of the problems for which the first is."""
MOST_VALUES = 3
"""Values that a part names, at most."""
MOST_LOSS = 0.2
"""A greater loss counts as this one, so that no single problem decides."""

Bits = NDArray[np.bool_]
Numbers = NDArray[np.float32]
Leaf = tuple[str, Bits]
"""A condition in words, and for which problems it holds."""
Knob = tuple[str, ...]
"""One knob, or the knobs of a tile, whose values are judged together."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which values of a knob are good for which problems."""

    knob: Knob
    """The knob, or the knobs of a tile."""
    parts: tuple[tuple[str, tuple[str, ...], int], ...]
    """The condition of each part, the values that are good where it holds, the best first, and the number of problems there."""
    problems: int
    """Problems that the rule was made from."""
    right: int
    """For how many of them a rule that was made without them names a good value."""
    constant_right: int
    """For how many of them the one value is good that is good for most."""
    saved: float | None
    """What the rule saves where it and one value for all name different values that both have a time: the difference of the two
    times over the problem's best, a mean over problems left out. None where there are too few such problems.
    """
    holds: tuple[frozenset[ProblemReport], ...]
    """The problems for which the condition of each part holds."""
    misses: frozenset[ProblemReport]
    """The problems for which the first value that it names is not good."""

    @property
    def text(self) -> str:
        """The rule in words, such as `TILE`: 64 where `columns` ≤ 512; 128 where `columns` ≥ 1024."""
        return self._text(MOST_VALUES)

    def brief(self, one: ProblemReport) -> str:
        """The rule in words, with the first value of each part alone, and a mark at the one for a problem."""
        return self._text(1, one)

    def _text(self, most: int, here: ProblemReport | None = None) -> str:
        conditions: dict[str, list[str]] = {}
        own = {values[0] for (_, values, _), held in zip(self.parts, self.holds, strict=True) if here in held}
        for condition, values, _ in self.parts:
            mark = " (here)" if values[0] in own else ""
            conditions.setdefault(" or ".join(values[:most]) + mark, []).append(condition)
        alone = [f"{values} where {each[0]}" for values, each in conditions.items() if len(each) == 1]
        rest = [f"{values} elsewhere" for values, each in conditions.items() if len(each) > 1]
        return f"{' x '.join(map(code, self.knob))}: {'; '.join([*alone, *rest])}"

    @property
    def score(self) -> str:
        """How often the rule is right, in words."""
        return f"right for {self.right} of {self.problems} problems left out; one value for all: {self.constant_right}"

    @property
    def shares(self) -> str:
        """How often the rule, and one value for all, are right, as shares of the problems."""
        own, constant = (f"{number / self.problems:.0%}" for number in (self.right, self.constant_right))
        return f"right for {own}, one value for all for {constant}"


def best_by_value(one: ProblemReport, knob: Knob) -> dict[tuple[KnobValue, ...], float]:
    """The least time of a problem with each value of a knob, or of several together, over the problem's best time. What cannot
    be told apart from the best counts as the best.
    """
    found: dict[tuple[KnobValue, ...], float] = {}
    for schedule, relative in one.known_times:
        value = tuple([schedule[name] for name in knob if name in schedule])
        if len(value) == len(knob) and relative < found.get(value, math.inf):
            found[value] = relative
    return found


@lru_cache(maxsize=4)
def rules_of(problems: tuple[ProblemReport, ...], tile: Knob) -> tuple[Rule, ...]:
    """The rules of the tile, if its knobs are given, and of every other knob: found once for all parts of a report."""
    others = dict.fromkeys(knob for one in problems for knob in one.best.schedule if knob not in tile)
    return tuple(rules(problems, [*([tile] if tile else []), *((knob,) for knob in others)]))


def rules(problems: Sequence[ProblemReport], knobs: Sequence[Knob]) -> list[Rule]:
    """The rules that hold on problems left out, first the one that is most often right where one value for all is not.

    A knob has none where one value is good for nearly all problems, where its values differ by no more than noise, and where
    chance may have made the rule.

    Args:
        problems: all problems of which at least the best schedule is known.
        knobs: the knobs.
    """
    conditions = list(_conditions(problems)) if len(problems) >= FEWEST_PROBLEMS else []
    trees = _Trees(problems, conditions) if conditions else None
    made = [_rule(knob, problems, trees, CHANCE / (2 * len(knobs))) for knob in knobs] if trees else []
    return sorted(filter(None, made), key=lambda rule: (rule.constant_right - rule.right, rule.knob))


def _conditions(problems: Sequence[ProblemReport]) -> Iterator[tuple[str, str, Bits]]:
    """Every condition on one field that divides the problems, its opposite, and for which problems it holds."""
    seen: set[bytes] = set()
    for name in dict.fromkeys(name for one in problems for name in one.problem.values):
        values: list[Any] = [one.problem.values.get(name) for one in problems]
        called = code(_called(name, problems))
        numbers = all(isinstance(value, (int, float)) for value in values)
        distinct = sorted({*values}, key=lambda value: (value if numbers else 0, str(value)))
        if all(isinstance(value, bool) for value in values):
            tried = [(called, f"not {called}", [bool(value) for value in values])]
        elif numbers:
            steps = list(itertools.pairwise(distinct))
            tried = [
                (f"{called} ≤ {low}", f"{called} ≥ {high}", [bool(each <= low) for each in values])
                for low, high in steps[:: math.ceil(len(steps) / MOST_THRESHOLDS) or 1]
            ]
        else:
            tried = [
                (f"{called} is {show(each)}", f"{called} is not {show(each)}", [value == each for value in values])
                for each in distinct
            ]
        for words, opposite, held in tried:
            bits = np.array(held)
            if {bits.tobytes(), (~bits).tobytes()}.isdisjoint(seen) and 0 < bits.sum() < bits.size:
                seen.add(bits.tobytes())
                yield words, opposite, bits


def _called(name: str, problems: Sequence[ProblemReport]) -> str:
    """What commands call a field: by its short name, where that stands for it in all of these problems."""
    kernel = problems[0].problem.declaration
    for short, fields in labels_of(kernel).items():
        if name in fields and all(len({one.problem.values[each] for each in fields}) == 1 for one in problems):
            return short
    return next((short for short, field in kernel.written.items() if field == name), name)


class _Trees:
    """All trees of at most three leaves over some conditions on some problems, and how they are trees."""

    def __init__(self, problems: Sequence[ProblemReport], conditions: Sequence[tuple[str, str, Bits]]) -> None:
        self.limits = np.array([one.tolerance for one in problems])
        """For each problem, what takes at most this share longer than the best is good."""
        self.searched = np.isin([id(one) for one in problems], [id(one) for one in broad(problems)])
        """Whether many of its programs have a time."""
        # What differs in words alone, such as element types, is left out together: its winners are much the same.
        sizes = [tuple(each for each in one.problem.values.values() if not isinstance(each, str)) for one in problems]
        places = {each: place for place, each in enumerate(dict.fromkeys(sizes))}
        self.folds = np.array([places[each] % FOLDS for each in sizes])
        """With which part it is left out."""
        words, opposites, bits = zip(*conditions, strict=True)
        self._half = len(words)
        self._leaves = [*zip(words, bits, strict=True), *zip(opposites, (~each for each in bits), strict=True)]
        self._single = np.array(bits, dtype=np.float32)
        self._both = (self._single[:, None] * self._single[None]).reshape(self._half**2, -1)

    def best(self, gain: Numbers, known: Bits) -> list[list[Leaf]]:
        """The best trees of one, two and three leaves, of which each takes the value with the largest gain there; a smaller one
        where there is none of that size.

        Args:
            gain: of each problem (rows) with each value (columns).
            known: the problems that count.
        """
        half = self._half
        table = np.concatenate([gain, np.ones((len(gain), 1), dtype=np.float32)], axis=1) * known[:, None]
        whole, single = table.sum(axis=0), self._single @ table
        both = (self._both @ table).reshape(half, half, -1)
        # Of the conditions and their opposites.
        single2, both2 = np.concatenate([single, whole - single]), np.concatenate([both, single - both])
        found = [[("", np.ones(len(gain), dtype=bool))]] * 3
        two, three = _sums(single, whole - single), _sums((whole - single2)[:, None], both2, single2[:, None] - both2)
        if two.max() > 0:
            place = int(two.argmax())
            found[1:] = [[self._leaves[place], self._leaves[place + half]]] * 2
        if three.max() > 0:
            first, second = (int(place) for place in np.unravel_index(three.argmax(), three.shape))
            rest, divided = self._leaves[(first + half) % (2 * half)], self._leaves[first]
            found[2] = [rest, *(_both(divided, self._leaves[place]) for place in (second, second + half))]
        return found


def _sums(*leaves: Numbers) -> Numbers:
    """What each tree gains in all; 0 where a leaf has too few problems, whose number is the last column."""
    enough = np.logical_and.reduce(np.broadcast_arrays(*(leaf[..., -1] >= FEWEST_OF_PART for leaf in leaves)))
    gained: Numbers = sum((leaf[..., :-1].max(axis=-1) for leaf in leaves), start=np.float32(0))
    return gained * enough


def _both(first: Leaf, second: Leaf) -> Leaf:
    """Where two conditions hold; the second alone says it where it implies the first. Two ends of one field are a range."""
    bits = first[1] & second[1]
    if bool(first[1][second[1]].all()):
        return second[0], bits
    low, high = sorted((first[0], second[0]), key=lambda words: " ≤ " in words)
    called, *least = low.split(" ≥ ")
    if least and high.startswith(f"{called} ≤ "):
        return f"{least[0]} ≤ {high}", bits
    return f"{first[0]} and {second[0]}", bits


def _rule(knob: Knob, problems: Sequence[ProblemReport], trees: _Trees, chance: float) -> Rule | None:
    """The rule of one knob; None where no rule is better than one value for all problems, or chance may have made it."""
    times = [best_by_value(one, knob) for one in problems]
    values = list(dict.fromkeys(value for each in times for value in each))
    table = np.array([[each.get(value, math.inf) for value in values] for each in times]).reshape(len(times), -1)
    good = table <= 1 + trees.limits[:, None]
    known = np.any(good, axis=1)
    number, most = int(known.sum()), int(good.sum(axis=0).max())
    if number < FEWEST_PROBLEMS or _by_chance(number - most, 0) > chance:
        return None
    gain = _gain(table, good, trees.searched)

    def chosen_by(leaves: Sequence[Leaf], of: Bits) -> NDArray[np.int64]:
        """For each problem the value of its leaf, from the gains of some problems."""
        places = np.zeros(len(times), dtype=np.int64)
        for _, bits in leaves:
            places[bits] = gain[bits & of].sum(axis=0).argmax()
        return places

    def is_right(places: NDArray[np.int64]) -> Bits:
        return good[np.arange(len(times)), places] & known

    made = trees.best(gain, known)
    possible = max(int(is_right(chosen_by(leaves, known)).sum()) for leaves in made)
    if _by_chance(possible - most, 0) > chance:
        return None
    chosen = np.zeros((3, len(times)), dtype=np.int64)
    for part in range(FOLDS):
        left_out: Bits = trees.folds == part
        others: Bits = known & ~left_out
        for depth, leaves in enumerate(trees.best(gain, others)):
            chosen[depth, left_out] = chosen_by(leaves, others)[left_out]
    chosen[0] = good.sum(axis=0).argmax()
    constant, two, three = map(is_right, chosen)
    depth = 2 if three.sum() - two.sum() >= max(2, WORTH * number) else 1
    right = (constant, two, three)[depth]
    apart = np.flatnonzero(known & trees.searched & (chosen[0] != chosen[depth]))
    saved = [one - ours for i in apart for one, ours in [table[i, chosen[[0, depth], i]]] if max(one, ours) < math.inf]
    by_chance = _by_chance(int((right & ~constant).sum()), int((constant & ~right).sum()))
    gained = statistics.fmean(saved) if len(saved) >= FEWEST_OF_PART else None
    if by_chance > chance or (gained is not None and gained <= AS_GOOD):
        return None

    def those(bits: Bits) -> frozenset[ProblemReport]:
        return frozenset(one for one, each in zip(problems, bits, strict=True) if each)

    parts, missed = [], np.zeros(len(times), dtype=bool)
    for words, bits in made[depth]:
        often = good[bits & known].sum(axis=0)
        first, *rest = np.argsort(-gain[bits & known].sum(axis=0), kind="stable")
        also = [place for place in rest if often[place] >= NEAR * often[first]]
        places = [first, *also][:MOST_VALUES]
        named = ("x".join(map(show, values[place])) for place in places)
        missed |= bits & ~good[:, first]
        parts.append((words, tuple(named), int((bits & known).sum())))
    return Rule(
        knob=knob,
        parts=tuple(parts),
        problems=number,
        right=int(right.sum()),
        constant_right=int(constant.sum()),
        saved=gained,
        holds=tuple(those(bits) for _, bits in made[depth]),
        misses=those(missed),
    )


def _gain(table: NDArray[np.float64], good: Bits, searched: Bits) -> Numbers:
    """What each value gains for each problem: most where it is good, elsewhere less the more time it loses. Where a loss is not
    known, it is the mean of the value's known losses.
    """
    seen = ~good & searched[:, None] & np.isfinite(table)
    losses = np.where(seen, np.minimum(np.where(seen, table, 1.0) - 1, MOST_LOSS), 0.0)
    if seen.any(axis=1).sum() < FEWEST_OF_PART:
        return good.astype(np.float32)
    usual = np.where(seen.any(axis=0), losses.sum(axis=0) / np.maximum(1, seen.sum(axis=0)), losses[seen].mean())
    lost = np.where(good, 0.0, np.where(seen, losses, usual[None]))
    return (good + 1 - lost / lost.max()).astype(np.float32)


def _by_chance(won: int, lost: int) -> float:
    """How likely a fair coin falls this often, or more often, on the side that won."""
    from scipy.special import bdtrc

    return float(bdtrc(won - 1, won + lost, 0.5)) if won > 0 else 1.0
