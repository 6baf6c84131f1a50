"""Finds changes of one knob whose effect depends on the rest of the schedule, from matched pairs: programs that differ in that
knob only. `docs.studies.knobs` prints them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiledsched.core.schedule import KnobValue, Schedule, named_tile
from tiledsched.core.text import change
from tiledsched.report.analysis import WITHIN, neighbours
from tiledsched.report.axes import show
from tiledsched.report.document import Table


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """A change of one knob whose effect depends on the rest of the schedule."""

    knob: str
    """Name of the knob."""
    before: KnobValue
    """Its value before the change."""
    after: KnobValue
    """Its value after the change."""
    circumstance: str
    """Under which circumstance the effect differs, e.g. `persistent=strided`."""
    effect_with: float
    """Time after the change over time before, minus 1, under the circumstance: geometric mean over the pairs."""
    pairs_with: int
    """Number of these pairs."""
    effect_without: float
    """Time after the change over time before, minus 1, where the circumstance does not hold."""
    pairs_without: int
    """Number of pairs behind that ratio."""


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
_Change = tuple[str, KnobValue, KnobValue]
"""A knob, its value before, and its value after."""


def interactions(problems: Sequence[Times], *, most: int = 12) -> tuple[Interaction, ...]:
    """Changes of one knob whose effect depends on the rest of the schedule, the largest difference first.

    For every change of one knob from one value to another, and for every circumstance (the value of another knob, the
    tile, the tile of a persistent kernel), the mean log ratio of times with it is compared with the mean without it. Of
    one change the circumstance with the largest difference is given.
    """
    changes: dict[_Change, list[float]] = defaultdict(list)
    holds: dict[_Change, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    tile = named_tile(dict.fromkeys(knob for times in problems for schedule, _ in times for knob in schedule)) or ()
    for times in problems:
        best = min((us for _, us in times), default=math.inf)
        close = [us <= WITHIN * best for _, us in times]
        known: dict[Schedule, list[tuple[str, Sequence[str]]]] = {}
        for knob, first, second in neighbours([(schedule, (schedule, us)) for schedule, us in times], close):
            (before, before_us), (after, after_us) = sorted((first, second), key=lambda one: _rank(one[0][knob]))
            if before not in known:
                known[before] = list(_circumstances(before, tile))
            change = knob, before[knob], after[knob]
            for circumstance, names in known[before]:
                if knob not in names:
                    holds[change][circumstance].append(len(changes[change]))
            changes[change].append(math.log(after_us / before_us))
    found = [one for change, all_of in changes.items() if (one := _largest(change, np.array(all_of), holds[change]))]
    return tuple(sorted(found, key=lambda one: (-abs(one.effect_with - one.effect_without), one.knob)))[:most]


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


def _largest(change: _Change, effects: NDArray[np.float64], holds: Mapping[str, list[int]]) -> Interaction | None:
    """The circumstance under which a change has an effect that differs most from its effect elsewhere; None where no
    difference is certain.

    Args:
        change: the knob, its value before, and its value after.
        effects: log ratio of the times for each pair.
        holds: circumstance -> the places of the pairs under it.
    """
    best: Interaction | None = None
    for circumstance, places in sorted(holds.items()):
        inside, outside = effects[places], np.delete(effects, places)
        if min(inside.size, outside.size) < FEWEST_PAIRS:
            continue
        error = math.sqrt(inside.var(ddof=1) / inside.size + outside.var(ddof=1) / outside.size)
        if abs(inside.mean() - outside.mean()) < max(LEAST_DIFFERENCE, FEWEST_ERRORS * error):
            continue
        one = Interaction(
            knob=change[0],
            before=change[1],
            after=change[2],
            circumstance=circumstance,
            effect_with=math.expm1(inside.mean()),
            pairs_with=inside.size,
            effect_without=math.expm1(outside.mean()),
            pairs_without=outside.size,
        )
        if best is None or abs(one.effect_with - one.effect_without) > EQUAL * abs(
            best.effect_with - best.effect_without
        ):
            best = one
    return best


def interactions_table(found: Sequence[Interaction]) -> Table:
    """The interactions of knobs, as a table with one change to a row."""
    return Table(
        head=("change", "circumstance", "time with it", "pairs", "time elsewhere", "pairs"),
        rows=tuple(
            (
                f"`{one.knob}`: {show(one.before)} to {show(one.after)}",
                f"`{one.circumstance}`",
                change(one.effect_with),
                str(one.pairs_with),
                change(one.effect_without),
                str(one.pairs_without),
            )
            for one in found
        ),
    )
