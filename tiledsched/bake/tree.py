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
WIDTH, CUTS = 4, 3
"""So many questions are tried where little is to be decided, of each expression at most so many."""
FEW, SMALL = 8, 1 << 14
"""That is where so many leaves are to come, and the problems times the schedules are so many, at most."""

Question = tuple[str, tuple[int, ...], tuple[int, ...]]
"""An expression, and the numbers of the problems for yes and for no."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tree:
    """A leaf, or a question with a tree for either answer."""

    best: int
    """Number of the schedule that loses least in all on the problems that come here."""
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
    """The tree with at most `most` leaves that loses least of those that are tried.

    Each of the :data:`WIDTH` questions is tried that lose least with two leaves, with every way to share the leaves between the
    answers; only the first question where that would take long.

    Args:
        problems: by names, which are expressions, the numbers, flags and words of each problem.
        losses: what each schedule (columns) loses on each problem (rows): :data:`NEVER` where it cannot run.
        most: None for as many leaves as it takes to lose nothing.
    """
    columns, few = _columns(problems, products=most is not None), FEW if most else 0
    common = losses[:, (losses < NEVER).sum(0) > 1]
    ranking = common if common.size and common.min(1).max() < NEVER else losses

    questions = functools.cache(lambda rows: _questions(numpy.array(rows), columns, ranking))

    @functools.cache
    def best(rows: tuple[int, ...], most: int) -> Tree:
        total = losses[list(rows)].sum(0)
        leaf = Tree(best=int(total.argmin()), rows=rows, loss=float(total.min()))
        tree = best(rows, few) if most > few > 0 else leaf
        wide = most <= few and len(rows) * ranking.shape[1] <= SMALL
        for text, yes, no in questions(rows)[: WIDTH if wide else 1] if most > 1 and tree.loss else ():
            for first in range(max(1, most - len(no)), min(most - 1, len(yes)) + 1):
                left = best(yes, first)
                if left.loss >= tree.loss:
                    continue
                right = best(no, most - first)
                if left.loss + right.loss < tree.loss:
                    tree = replace(leaf, loss=left.loss + right.loss, question=text, sides=(left, right))
        return tree

    return best(tuple(range(len(losses))), min(most or len(losses), len(losses)))


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
    different: dict[bytes, tuple[str, Any]] = {}  # by how they order the problems
    for text in sorted(found, key=lambda each: (len(each), each)):
        column = numpy.array(found[text], float)
        different.setdefault(numpy.unique(column, return_inverse=True)[1].tobytes(), (text, column))
    return dict(different.values())


def _questions(rows: Any, columns: Mapping[str, Any], losses: Any) -> list[Question]:
    """The questions that tell these problems apart; the first loses least with two leaves."""
    found: dict[tuple[int, ...], tuple[float, str, tuple[int, ...]]] = {}
    for text, column in columns.items():
        order = rows[numpy.argsort(column[rows], kind="stable")]
        values = column[order]
        ends = numpy.nonzero(values[1:] != values[:-1])[0]
        if not len(ends):
            continue
        lost = losses[order].cumsum(0)
        both = (lost[ends].min(1) + (lost[-1] - lost[ends]).min(1)).round(9)
        for place in both.argsort(kind="stable")[:CUTS]:
            low, high = int(values[ends[place]]), int(values[ends[place] + 1])
            yes = column[rows] <= low
            question = text if low < 0 else f"{text} <= {between(low, high)}"
            found.setdefault(tuple(rows[yes].tolist()), (float(both[place]), question, tuple(rows[~yes].tolist())))
    ranked = sorted(found.items(), key=lambda each: each[1][0])
    return [(question, yes, no) for yes, (_, question, no) in ranked]


def between(low: int, high: int) -> int:
    """A whole number from `low` up to below `high`: a power of two if there is one, else the geometric mean."""
    middle = max(1, low * high) ** 0.5
    powers = [1 << step for step in range(64) if low <= 1 << step < high]
    return min(powers, key=lambda power: abs(math.log(power / middle)), default=max(low, min(int(middle), high - 1)))
