"""A decision tree over what is known of a problem before a launch, whose leaves are schedules."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

NEVER = 1e3
"""The loss of a schedule that cannot run, which no sum of real losses reaches."""
WHOLE = 8
"""It is also asked whether this divides a size: rows of 16-bit elements then start where TMA loads."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tree:
    """A leaf, or a question with a tree for either answer."""

    best: int
    """Number of the schedule that loses least in all on the problems that come here."""
    alone: float
    """What that schedule loses on them, summed."""
    rows: tuple[int, ...]
    """The numbers of these problems."""
    loss: float
    """What the leaves lose, summed."""
    question: str = ""
    """An expression over names of the problem, such as `m * n <= 4096`; empty for a leaf."""
    sides: tuple[Tree, ...] = ()
    """The trees for yes and for no."""

    def nodes(self) -> list[Tree]:
        """This tree and those in it, from the first leaf to the last."""
        return [self, *itertools.chain(*(side.nodes() for side in self.sides))]

    def leaves(self) -> list[Tree]:
        """The leaves, from the first."""
        return [each for each in self.nodes() if not each.sides]


def grow(problems: Sequence[Mapping[str, Any]], losses: Any, most: int | None = None) -> Tree:
    """The tree that loses least of those with at most `most` leaves into which one large tree can be pruned.

    Args:
        problems: by names, which are expressions, the numbers, flags and words of each problem.
        losses: what each schedule (columns) loses on each problem (rows): :data:`NEVER` where it cannot run.
        most: None for as many leaves as it takes to lose nothing.
    """
    tree = _grown(numpy.arange(len(losses)), _columns(problems, products=most is not None), losses)
    return tree if most is None else _pruned(tree, most)


def _columns(problems: Sequence[Mapping[str, Any]], *, products: bool) -> dict[str, Any]:
    """By an expression, a number for each problem. Where it is a question these are -1 for yes and 0 for no."""
    sizes = {name: [each[name] for each in problems] for name, value in problems[0].items() if type(value) is int}
    found = dict(sizes)
    for name in problems[0].keys() - sizes.keys():
        for value in {each[name] for each in problems} - {False}:
            text = name if value is True else f"{name} == {value!r}"
            found[text] = [-int(each[name] == value) for each in problems]
    found |= {
        f"{name} % {WHOLE} == 0": [-int(value % WHOLE == 0) for value in values] for name, values in sizes.items()
    }
    for (one, left), (other, right) in itertools.combinations(sizes.items(), 2) if products else ():
        found[f"{one} * {other}"] = [a * b for a, b in zip(left, right, strict=True)]
    return {text: numpy.array(found[text], float) for text in sorted(found, key=lambda each: (len(each), each))}


def _grown(rows: Any, columns: Mapping[str, Any], losses: Any) -> Tree:
    total = losses[rows].sum(0)
    alone, splits = float(total.min()), []
    for text, column in columns.items() if alone else ():
        order = rows[numpy.argsort(column[rows], kind="stable")]
        values = column[order]
        ends = numpy.nonzero(values[1:] != values[:-1])[0]
        if len(ends):
            lost = losses[order].cumsum(0)
            both = (lost[ends].min(1) + (lost[-1] - lost[ends]).min(1)).round(9)
            place = int(both.argmin())
            splits.append((float(both[place]), text, int(values[ends[place]]), int(values[ends[place] + 1])))
    leaf = Tree(best=int(total.argmin()), alone=alone, rows=tuple(rows.tolist()), loss=alone)
    if not splits:
        return leaf
    _, text, low, high = min(splits, key=lambda each: each[0])
    yes = columns[text][rows] <= low
    sides = tuple(_grown(some, columns, losses) for some in (rows[yes], rows[~yes]))
    question = text if low < 0 else f"{text} <= {between(low, high)}"
    return replace(leaf, loss=sum(side.loss for side in sides), question=question, sides=sides)


def between(low: int, high: int) -> int:
    """A whole number from `low` up to below `high`: a power of two if there is one, else the geometric mean."""
    middle = max(1, low * high) ** 0.5
    powers = [1 << step for step in range(64) if low <= 1 << step < high]
    return min(powers, key=lambda power: abs(math.log(power / middle)), default=max(low, min(int(middle), high - 1)))


@functools.cache
def _pruned(tree: Tree, most: int) -> Tree:
    """The best of the trees that remain where branches of a tree become leaves, with at most `most` leaves."""
    firsts = range(1, most) if tree.sides else ()
    cut = [tuple(map(_pruned, tree.sides, (first, most - first))) for first in firsts]
    kept = [replace(tree, loss=sides[0].loss + sides[1].loss, sides=sides) for sides in cut]
    return min([replace(tree, loss=tree.alone, question="", sides=()), *kept], key=lambda each: each.loss)
