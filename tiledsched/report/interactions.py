"""Finds knobs that depend on each other, in the times of one or more problems. These are pure functions: no database is read.

Interactions are read off matched pairs, programs that differ in one knob only: where the change of that knob does one thing in
one kind of kernel and another in the rest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.report.analysis import WITHIN, named_tile, neighbours
from tiledsched.report.records import Interaction

Times = Sequence[tuple[Schedule, float]]
"""The distinct programs of one problem on one device: one schedule of each, and its time in microseconds."""
FEWEST_PAIRS = 4
"""Pairs that an interaction needs on either side."""
FEWEST_ERRORS = 3.0
"""Difference that an interaction needs, in standard errors. With two, chance would produce some among the dozens
examined.
"""
LEAST_DIFFERENCE = math.log(1.03)
"""Difference that an interaction needs, in log time."""
EQUAL = 1 + 1e-9
"""Two differences within this ratio are equal: a circumstance and its opposite have the same one."""
ALWAYS = ""
"""The circumstance that always holds."""


def interactions(problems: Sequence[Times], *, most: int = 12) -> tuple[Interaction, ...]:
    """Changes of one knob whose effect depends on the rest of the schedule, the largest difference first.

    For every change of one knob from one value to another, and for every circumstance (the value of another knob, the
    tile, the tile of a persistent kernel), the mean log ratio of times with it is compared with the mean without it. Of
    one change the circumstance with the largest difference is given.
    """
    effects: dict[tuple[str, KnobValue, KnobValue], dict[str, _Sums]] = defaultdict(lambda: defaultdict(_Sums))
    tile = named_tile(dict.fromkeys(knob for times in problems for schedule, _ in times for knob in schedule)) or ()
    for times in problems:
        best = min((us for _, us in times), default=math.inf)
        close = [us <= WITHIN * best for _, us in times]
        known: dict[Schedule, list[tuple[str, Sequence[str]]]] = {}
        for knob, first, second in neighbours([(schedule, (schedule, us)) for schedule, us in times], close):
            (before, before_us), (after, after_us) = sorted((first, second), key=lambda one: _rank(one[0][knob]))
            if before not in known:
                known[before] = list(_circumstances(before, tile))
            change, seen = math.log(after_us / before_us), effects[knob, before[knob], after[knob]]
            seen[ALWAYS].add(change)
            for circumstance, names in known[before]:
                if knob not in names:
                    seen[circumstance].add(change)
    found = [one for change, seen in effects.items() if (one := _largest(change, seen)) is not None]
    return tuple(sorted(found, key=lambda one: (-abs(one.effect_with - one.effect_without), one.knob)))[:most]


@dataclass
class _Sums:
    """Of some changes their number, their sum and the sum of their squares: a large database has too many to keep."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, change: float) -> None:
        """Take one more change into account."""
        self.count += 1
        self.total += change
        self.squares += change * change

    def without(self, part: _Sums) -> _Sums:
        """The sums of the changes that are not among `part`."""
        return _Sums(self.count - part.count, self.total - part.total, self.squares - part.squares)

    @property
    def mean(self) -> float:
        """Mean of the changes."""
        return self.total / self.count

    @property
    def error(self) -> float:
        """Standard error of the mean, squared."""
        return max(0.0, self.squares - self.total * self.mean) / (self.count - 1) / self.count


def _rank(value: KnobValue) -> tuple[float, str]:
    """Sorts numbers by value and words by the alphabet; it decides in which direction a change is described."""
    return (0.0, value) if isinstance(value, str) else (float(value), "")


def _circumstances(schedule: Schedule, tile: Sequence[str]) -> Iterator[tuple[str, Sequence[str]]]:
    """What can be said of a schedule, each with the knobs that it names. `tile` names the knobs of a tile's rows and columns."""
    if tile and {*tile} <= set(schedule):
        size = f"tile={'x'.join(str(schedule[name]) for name in tile)}"
        yield size, tile
        if "persistent" in schedule:
            how = "one block per tile" if schedule["persistent"] in ("no", 0) else "persistent"
            yield f"{size}, {how}", (*tile, "persistent")
    for name, value in schedule.items():
        yield f"{name}={str(value).lower()}", (name,)


def _largest(change: tuple[str, KnobValue, KnobValue], seen: Mapping[str, _Sums]) -> Interaction | None:
    """The circumstance under which a change has an effect that differs most from its effect elsewhere; None where no
    difference is certain.
    """
    best: Interaction | None = None
    for circumstance in sorted(seen.keys() - {ALWAYS}):
        inside, outside = seen[circumstance], seen[ALWAYS].without(seen[circumstance])
        if min(inside.count, outside.count) < FEWEST_PAIRS:
            continue
        difference = inside.mean - outside.mean
        if abs(difference) < max(LEAST_DIFFERENCE, FEWEST_ERRORS * math.sqrt(inside.error + outside.error)):
            continue
        one = Interaction(
            knob=change[0],
            before=change[1],
            after=change[2],
            circumstance=circumstance,
            effect_with=math.expm1(inside.mean),
            pairs_with=inside.count,
            effect_without=math.expm1(outside.mean),
            pairs_without=outside.count,
        )
        if best is None or abs(one.effect_with - one.effect_without) > EQUAL * abs(
            best.effect_with - best.effect_without
        ):
            best = one
    return best
