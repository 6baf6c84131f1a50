"""Computes which knobs matter and which depend on each other, from the times of one or more problems.

These are pure functions: no database is read.

Importance is Optuna's PED-ANOVA (Watanabe et al., arXiv:2304.10255): how differently a knob's values are spread over the
fastest tenth of the programs and over all of them. Interactions are read off matched pairs, programs that differ in one
knob only: where the change of that knob does one thing in one kind of kernel and another in the rest.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.report.analysis import WITHIN, named_tile, neighbours
from tiledsched.report.records import Interaction, KnobShare

Times = Sequence[tuple[Schedule, float]]
"""The distinct programs of one problem on one device: one schedule of each, and its time in microseconds."""
FEWEST_PROGRAMS = 20
"""A problem with fewer programs shows nothing about importance."""
FASTEST_SHARE = 0.1
"""The share of the programs that counts as good."""
FEWEST_PAIRS = 4
"""Pairs that an interaction needs on either side."""
FEWEST_ERRORS = 3.0
"""Difference that an interaction needs, in standard errors. With two, chance would produce some among the dozens
examined.
"""
LEAST_DIFFERENCE = math.log(1.03)
"""Difference that an interaction needs, in log time."""


def knob_shares(problems: Sequence[Times]) -> tuple[KnobShare, ...]:
    """Importance of each knob, as the mean over problems of its share of all importance; the most important knob first."""
    shares: dict[str, list[float]] = defaultdict(list)
    for times in problems:
        if len(times) >= FEWEST_PROGRAMS:
            for knob, share in _ped_anova(times).items():
                shares[knob].append(share)
    found = [
        KnobShare(knob=knob, share=statistics.fmean(each), largest=max(each), problems=len(each))
        for knob, each in shares.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.share, one.knob)))


def _ped_anova(times: Times) -> Mapping[str, float]:
    """The share of each knob that every schedule has and that has several values, as Optuna 5 computes it; the sum is 1."""
    limit_us = sorted(us for _, us in times)[math.ceil(FASTEST_SHARE * len(times)) - 1]
    fastest = [schedule for schedule, us in times if us <= limit_us]
    divergences = {}
    for knob in set.intersection(*(set(schedule) for schedule, _ in times)):
        all_counts = Counter(schedule[knob] for schedule, _ in times)
        if len(all_counts) > 1:
            fast = _density(Counter(schedule[knob] for schedule in fastest), all_counts)
            usual = _density(all_counts, all_counts)
            divergences[knob] = sum(local * (top / local - 1) ** 2 for top, local in zip(fast, usual, strict=True))
    total = sum(divergences.values())
    return {knob: each / total if total else 1 / len(divergences) for knob, each in divergences.items()}


def _density(counts: Mapping[KnobValue, int], values: Iterable[KnobValue]) -> list[float]:
    """Optuna's Parzen estimate of how often each value occurs: a kernel around each one observed, and a uniform prior that
    weighs as much as one observation.
    """
    values = list(values)
    observed, prior = sum(counts.values()), 1 / (len(counts) + 1)
    kernel = 1 + len(values) * prior
    return [
        ((observed * prior + counts.get(value, 0)) / kernel + 1 / len(values)) / (observed + 1) + 1e-12
        for value in values
    ]


def interactions(problems: Sequence[Times], *, most: int = 12) -> tuple[Interaction, ...]:
    """Changes of one knob whose effect depends on the rest of the schedule, the largest difference first.

    For every change of one knob from one value to another, and for every circumstance (the value of another knob, the
    tile, the tile of a persistent kernel), the mean log ratio of times with it is compared with the mean without it. Of
    one change the circumstance with the largest difference is given.
    """
    effects: dict[tuple[str, KnobValue, KnobValue], list[tuple[float, frozenset[str]]]] = defaultdict(list)
    tile = named_tile(dict.fromkeys(knob for times in problems for schedule, _ in times for knob in schedule)) or ()
    for times in problems:
        best = min((us for _, us in times), default=math.inf)
        close = [us <= WITHIN * best for _, us in times]
        for knob, first, second in neighbours([(schedule, (schedule, us)) for schedule, us in times], close):
            (before, before_us), (after, after_us) = sorted((first, second), key=lambda one: _rank(one[0][knob]))
            circumstances = frozenset(_circumstances(before, knob, tile))
            effects[knob, before[knob], after[knob]].append((math.log(after_us / before_us), circumstances))
    found = [one for change, seen in effects.items() if (one := _largest(change, seen)) is not None]
    return tuple(sorted(found, key=lambda one: (-abs(one.effect_with - one.effect_without), one.knob)))[:most]


def _rank(value: KnobValue) -> tuple[float, str]:
    """Sorts numbers by value and words by the alphabet; it decides in which direction a change is described."""
    return (0.0, value) if isinstance(value, str) else (float(value), "")


def _circumstances(schedule: Schedule, without: str, tile: Sequence[str]) -> Iterator[str]:
    """What can be said of a schedule without naming one knob. `tile` names the knobs of a tile's rows and columns."""
    if tile and {*tile} <= set(schedule) and without not in tile:
        size = f"tile={'x'.join(str(schedule[name]) for name in tile)}"
        yield size
        if "persistent" in schedule and without != "persistent":
            yield f"{size}, {'one block per tile' if schedule['persistent'] in ('no', 0) else 'persistent'}"
    for name, value in schedule.items():
        if name != without:
            yield f"{name}={str(value).lower()}"


def _largest(
    change: tuple[str, KnobValue, KnobValue], seen: Sequence[tuple[float, frozenset[str]]]
) -> Interaction | None:
    """The circumstance under which a change has an effect that differs most from its effect elsewhere; None where no
    difference is certain.
    """
    best: Interaction | None = None
    for circumstance in sorted({name for _, names in seen for name in names}):
        inside = [effect for effect, names in seen if circumstance in names]
        outside = [effect for effect, names in seen if circumstance not in names]
        if min(len(inside), len(outside)) < FEWEST_PAIRS:
            continue
        difference = statistics.fmean(inside) - statistics.fmean(outside)
        error = math.sqrt(statistics.variance(inside) / len(inside) + statistics.variance(outside) / len(outside))
        if abs(difference) < max(LEAST_DIFFERENCE, FEWEST_ERRORS * error):
            continue
        one = Interaction(
            knob=change[0],
            before=change[1],
            after=change[2],
            circumstance=circumstance,
            effect_with=math.expm1(statistics.fmean(inside)),
            pairs_with=len(inside),
            effect_without=math.expm1(statistics.fmean(outside)),
            pairs_without=len(outside),
        )
        if best is None or abs(one.effect_with - one.effect_without) > abs(best.effect_with - best.effect_without):
            best = one
    return best
