"""Computes what each value of a knob costs, from matched pairs: programs of one problem that differ in that knob alone.

These are pure functions: no database is read. A value that was only tried beside few other programs, or beside slow ones,
is untried: comparing its best time with the best of everything would call a knob costly that changes nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from tiledsched.core.groups import grouped
from tiledsched.core.schedule import HINT_KNOBS, KnobValue, Schedule, named_tile
from tiledsched.report.analysis import WITHIN, neighbours
from tiledsched.report.records import AS_GOOD, MODELLED, KnobVerdict, ProblemReport, ValueEffect
from tiledsched.report.rules import best_by_value

LEAST_PAIRS = 4
"""Fewer pairs conclude nothing. Half of a 95% interval is 1.6 standard deviations of the pairs with four of them, 2.5 with
three and 9 with two.
"""
CONFIDENCE = 0.95
FEWEST_PROBLEMS = 4
"""From fewer problems follows no advice, but a statement about them."""
MOST_OTHERS = 0.1
"""Where more than this share of the winners of searches have another value, a knob is not to be left at one: perhaps that value
wins together with other knobs, which pairs of programs that differ in one knob alone do not show.
"""

K = TypeVar("K", bound=Hashable)
_Key = tuple[type, KnobValue]
"""A value with its type, because True is not 1."""
_Ratios = dict[tuple[_Key, _Key], list[float]]
"""(value, value compared with) -> log ratio of the times for each matched pair."""
_known: WeakKeyDictionary[ProblemReport, dict[str, _Ratios]] = WeakKeyDictionary()
"""The matched pairs of each problem, by knob: a report asks for them several times."""


def value_effects(one: ProblemReport) -> tuple[ValueEffect, ...]:
    """What each value of each knob costs in one problem, compared with the best schedule's value of that knob.

    Every other value that was timed is there, untried where it has too few pairs. The knob whose worst value costs most
    comes first, and within a knob the values from small to large.
    """
    ratios = _matched_ratios(one)
    best = one.leader.schedule
    found = {
        knob: _effects_against(
            knob, _key(one.leader.schedule, knob), values, [ratios.get(knob, {})], one.provenance == MODELLED
        )
        for knob, values in _values([one]).items()
        if knob in best
    }
    return tuple(
        effect for knob in sorted(found, key=lambda knob: (-_cost(found[knob]), knob)) for effect in found[knob]
    )


def joined_effects(problems: Sequence[ProblemReport]) -> tuple[KnobVerdict, ...]:
    """What to do about each knob, over several problems; the knob whose worst value costs most comes first.

    A value's effect is the geometric mean over problems of each problem's own geometric mean, so that every problem counts
    once however many pairs it has. From four problems on, the interval is over the problems; below, over the pairs within
    them.
    """
    return _joined_effects(tuple(problems))


@lru_cache(maxsize=4)
def _joined_effects(problems: tuple[ProblemReport, ...]) -> tuple[KnobVerdict, ...]:
    """`joined_effects`, computed once for all parts of a report that use it."""
    tables = [_matched_ratios(one) for one in problems]
    near = [({*_values([one])}, [timed for timed in one.timed if timed.relative <= 1 + AS_GOOD]) for one in problems]
    estimated, found = any(one.provenance == MODELLED for one in problems), _values(problems)
    known = None if estimated else _Known(tables, found)
    verdicts = []
    for knob, values in found.items():
        usual = Counter(_key(one.leader.schedule, knob) for one in problems if knob in one.leader.schedule)
        values = sorted(values, key=lambda value: -usual[value])
        if known is None:
            parts = [table[knob] for table in tables if knob in table]
            verdicts.append(_estimated(knob, values, parts, problems))
            continue
        reached = [
            {_key(timed.schedule, knob) for timed in close if knob in timed.schedule}
            for varying, close in near
            if knob in varying
        ]
        winners = Counter(_key(each, knob) for each in problems[0].winners if knob in each)
        verdicts.append(_verdict(knob, values, known, reached, winners))
    return tuple(sorted(verdicts, key=lambda each: (-_cost(each.effects), each.knob)))


def tile_knobs(problems: Sequence[ProblemReport]) -> tuple[str, ...]:
    """The two knobs over which heat maps are drawn; none where fewer than two knobs are integers, or none of them varies.

    Knobs that are named like a tile's rows and columns come first; otherwise the two knobs whose values cost most, constants
    of the kernel before compiler hints.
    """
    timed = [one.schedule for report in problems for one in report.timed]
    integers = dict.fromkeys(name for schedule in timed for name, value in schedule.items() if type(value) is int)
    if named := named_tile(integers):
        return named
    place = {verdict.knob: place for place, verdict in enumerate(joined_effects(problems))}
    ranked = sorted(integers, key=lambda knob: (knob not in place, knob in HINT_KNOBS, place.get(knob, 0), knob))
    return (ranked[0], ranked[1]) if len(ranked) > 1 and ranked[0] in place else ()


class _Known:
    """Which comparisons of values are sure, of all that the problems of a report allow: each by a one-sided test, and together
    corrected for their number.

    Args:
        tables: the matched pairs of each problem, by knob.
        values: the values of each knob.
    """

    def __init__(self, tables: Sequence[dict[str, _Ratios]], values: dict[str, list[_Key]]) -> None:
        self.tables = tables
        pairs = [(knob, *two) for knob, each in values.items() for two in itertools.permutations(each, 2)]
        single = {
            (place, *pair): tested
            for place, table in enumerate(tables)
            for pair in pairs
            if (tested := _tested([table.get(pair[0], {}).get(pair[1:], [])]))
        }
        self.slower = _surely_above(math.log1p(AS_GOOD), single)
        """(place of the problem, knob, value, other value): the value is more than `AS_GOOD` slower there."""
        self.means = {each: tested[0] for each, tested in single.items()}
        """The mean log ratio of each comparison that was tested in one problem."""
        joined = {
            pair: tested
            for pair in pairs
            if (tested := _tested([table.get(pair[0], {}).get(pair[1:], []) for table in tables]))
        }
        self.no_faster = _surely_above(-math.log1p(AS_GOOD), joined)
        """(knob, value, other value): over all problems together the value is at most `AS_GOOD` faster."""

    def favourite(self, place: int, knob: str, values: Sequence[_Key]) -> _Key | None:
        """The value that one problem prefers: no value compared with it is faster, and at least one is surely slower."""
        for value in values:
            others = [each for each in values if (place, knob, each, value) in self.means]
            if any((place, knob, each, value) in self.slower for each in others) and all(
                self.means[place, knob, each, value] >= 0 for each in others
            ):
                return value
        return None


def _surely_above(least: float, tested: Mapping[K, tuple[float, float, int]]) -> set[K]:
    """The comparisons whose mean log ratio is surely above `least`: those that Benjamini and Hochberg's procedure picks from the
    one-sided t-tests of all of them, so that few of those picked are wrong.
    """
    from scipy.special import stdtr

    if not tested:
        return set()
    mean, error, freedom = np.array([*tested.values()]).T
    with np.errstate(divide="ignore", invalid="ignore"):  # equal ratios have no error, and are sure
        chance = stdtr(freedom, (least - mean) / error)
    order = np.argsort(chance, kind="stable")
    passed = np.flatnonzero(chance[order] <= (1 - CONFIDENCE) / 2 * np.arange(1, len(order) + 1) / len(order))
    keys = [*tested]
    return {keys[place] for place in order[: passed[-1] + 1]} if passed.size else set()


def _verdict(
    knob: str, values: Sequence[_Key], known: _Known, reached: Sequence[Collection[_Key]], winners: Counter[_Key]
) -> KnobVerdict:
    """The verdict on one knob.

    Args:
        knob: its name.
        values: every value that was timed, the most frequent value of best schedules first.
        known: which comparisons are sure.
        reached: for each problem in which the knob varies, the values of all programs within the tolerance of its best.
        winners: how often each value is that of a search's winner.
    """
    favourites = [known.favourite(place, knob, values) for place in range(len(known.tables))]
    preferred = Counter(each for each in favourites if each)
    order = [*dict.fromkeys([*(value for value, _ in preferred.most_common()), *values])]
    joined = {
        value: _effects_against(knob, value, values, [table.get(knob, {}) for table in known.tables]) for value in order
    }
    compared = {value: [each for each in joined[value] if each.ratio is not None] for value in order}

    def others(value: _Key) -> list[_Key]:
        return [(type(each.value), each.value) for each in compared[value]]

    def good(value: _Key) -> bool:
        """Whether every problem has a program with this value that is within the tolerance of its best, no value that it was
        compared with is more than the tolerance faster over all problems, and none is surely faster in one of them.
        """
        return (
            bool(compared[value])
            and all(value in each for each in reached)
            and all((knob, each, value) in known.no_faster for each in others(value))
            and not any(
                (place, knob, value, each) in known.slower for place in range(len(known.tables)) for each in values
            )
        )

    fine = sorted(filter(good, order), key=lambda value: (-len(compared[value]), order.index(value)))
    value = (*fine, *order)[0]
    few = min((each.problems for each in compared[value]), default=0)
    same = bool(fine) and all((knob, value, each) in known.no_faster for each in others(value))
    rest = winners.total() - winners[value]
    contradicted = any(
        (here, knob, other, mine) in known.slower and (there, knob, mine, other) in known.slower
        for here, mine in enumerate(favourites)
        for there, other in enumerate(favourites)
        if mine and other and mine != other
    )
    if fine and few < FEWEST_PROBLEMS:
        advice = "few"
    elif fine and rest <= MOST_OTHERS * winners.total():
        advice = "leave"
    elif same:
        advice = "same"
    else:
        advice = "choose" if contradicted else "unclear" if any(compared.values()) else "untried"
    return KnobVerdict(
        knob=knob,
        advice=advice,
        value=value[1],
        effects=tuple(sorted(joined[value], key=lambda each: _rank((type(each.value), each.value)))),
        preferred=tuple((favourite[1], number) for favourite, number in preferred.most_common()),
        problems=few,
        winners=tuple((each[1], number) for each, number in winners.most_common()),
    )


def _estimated(
    knob: str, values: Sequence[_Key], parts: Sequence[_Ratios], problems: Sequence[ProblemReport]
) -> KnobVerdict:
    """The verdict on one knob from estimates, of which only differences beyond the model's error count."""
    compared = [(one, times) for one in problems if len(times := best_by_value(one, (knob,))) > 1]
    good = [{each for (each,), time in times.items() if time <= 1 + one.tolerance} for one, times in compared]
    preferred = Counter(next(iter(each)) for each in good if len(each) == 1)
    value = preferred.most_common(1)[0][0] if preferred else values[0][1]
    fine = 2 * preferred[value] > len(good) and all(value in each for each in good)
    return KnobVerdict(
        knob=knob,
        advice="choose" if len(preferred) > 1 else "leave" if fine else "unclear",
        value=value,
        effects=tuple(_effects_against(knob, (type(value), value), values, parts, True)),
        preferred=tuple(preferred.most_common()),
    )


def _effects_against(
    knob: str, against: _Key, values: Sequence[_Key], parts: Sequence[_Ratios], estimated: bool = False
) -> list[ValueEffect]:
    """The effect of every other value, compared with `against`."""
    return [
        _effect(knob, value, against, [part.get((value, against), []) for part in parts], estimated)
        for value in values
        if value != against
    ]


def _values(problems: Sequence[ProblemReport]) -> dict[str, list[_Key]]:
    """The values of each knob that has several within one problem: numbers by size, words by the alphabet."""
    found: dict[str, set[_Key]] = defaultdict(set)
    for one in problems:
        own = grouped((knob, (type(value), value)) for timed in one.timed for knob, value in timed.schedule.items())
        for knob, values in own.items():
            if len({*values}) > 1:
                found[knob] |= {*values}
    return {knob: sorted(found[knob], key=_rank) for knob in sorted(found)}


def _rank(value: _Key) -> tuple[str, float, str]:
    return value[0].__name__, 0.0 if isinstance(value[1], str) else float(value[1]), str(value[1])


def _matched_ratios(one: ProblemReport) -> dict[str, _Ratios]:
    """The log ratios of all matched pairs of one problem, by knob.

    A pair counts if its faster program takes at most `WITHIN` times the best time: what is slower never wins. This rule
    treats both programs alike. Each two programs count once, however many schedules build them. Two schedules that build one
    program are a pair with a ratio of exactly 1, for the knob changes nothing there; of each program this counts once.
    """
    if one in _known:
        return _known[one]
    found: dict[str, _Ratios] = defaultdict(lambda: defaultdict(list))
    seen = set()
    items = [(timed.schedule, timed) for timed in one.timed]
    for knob, first, second in neighbours(items, [timed.relative <= WITHIN for timed in one.timed]):
        keys, programs = (_key(first.schedule, knob), _key(second.schedule, knob)), (first.program, second.program)
        if (knob, *keys, *programs) not in seen:
            seen |= {(knob, *keys, *programs), (knob, *keys[::-1], *programs[::-1])}
            ratio = math.log(first.us / second.us)
            found[knob][keys].append(ratio)
            found[knob][keys[::-1]].append(-ratio)
    return _known.setdefault(one, {knob: dict(ratios) for knob, ratios in found.items()})


def _key(schedule: Schedule, knob: str) -> _Key:
    return type(schedule[knob]), schedule[knob]


def _tested(parts: Sequence[Sequence[float]]) -> tuple[float, float, int] | None:
    """The mean of the log ratios of each problem's pairs, its standard error, and its degrees of freedom; None where too few
    pairs were timed.
    """
    known = [part for part in parts if part]
    over_problems = len(known) >= LEAST_PAIRS
    freedom = len(known) - 1 if over_problems else sum(map(len, known)) - len(known)
    if freedom < LEAST_PAIRS - 1:
        return None
    means = [statistics.fmean(part) for part in known]
    if over_problems:
        variance = statistics.variance(means) * len(known)
    else:  # of few problems the deviations within them are pooled
        within = sum(float(np.var(part)) * len(part) for part in known) / freedom
        variance = within * sum(1 / len(part) for part in known)
    return statistics.fmean(means), math.sqrt(variance) / len(known), freedom


def _effect(
    knob: str, value: _Key, against: _Key, parts: Sequence[Sequence[float]], estimated: bool = False
) -> ValueEffect:
    """The effect of a value from the log ratios of each problem's pairs; of estimates with their range, else with an interval."""
    from scipy.special import stdtrit

    known = [part for part in parts if part]
    ratio = low = high = None
    if tested := _tested(parts):
        middle, error, freedom = tested
        half = error * float(stdtrit(freedom, (1 + CONFIDENCE) / 2))  # Student's quantile
        ratio, low, high = math.exp(middle), math.exp(middle - half), math.exp(middle + half)
        if estimated:
            low, high = (math.exp(end(map(end, known))) for end in (min, max))
    return ValueEffect(
        knob=knob,
        value=value[1],
        against=against[1],
        ratio=ratio,
        ci_low=low,
        ci_high=high,
        pairs=sum(map(len, known)),
        problems=len(known),
        estimated=estimated,
    )


def _cost(effects: Iterable[ValueEffect]) -> float:
    return max((effect.ratio for effect in effects if effect.ratio is not None), default=0.0)
