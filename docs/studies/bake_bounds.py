r"""How few schedules can serve a set of problems at all, and how right the estimates are that `bake --max-leaves` rests on.

    python -m docs.studies.bake_bounds
    python -m docs.studies.bake_bounds --estimates

The first prints, by these estimates, what any N schedules lose without a tree, what the tree of N leaves loses on the problems
that it was made from, and what it loses on problems of other sizes. The second takes all entries of each tuned problem away, and
compares the estimate of each schedule that the tune had timed with its time. Neither needs a GPU.
"""

from __future__ import annotations

import argparse
import csv
import lzma
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy

from docs.studies.bake_regret import SETS
from docs.studies.flags import flag, parser_with, positive
from tiledsched.bake.baking import TableChoice, choices
from tiledsched.bake.tree import NEVER, Tree, grow
from tiledsched.core.config import load_settings
from tiledsched.core.errors import TiledschedError
from tiledsched.core.problem import Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.serve.entries import load_entries, load_table

ARCH = "sm_90"
LEAVES = (4, 8, 12, 16, 24, 32)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the performance model's correction."""
CAP = 0.7
"""Losses above this, which is twice the time, count as this: only that they are large matters."""
TUNED = {"matmul": "docs/results/h200/kernels_tuned.csv.xz", "attention": "docs/results/h200/coverage_tuned.csv.xz"}
"""Times of all schedules that tunes timed."""


def best_few(losses: Any, count: int, starts: int = 20) -> list[int]:
    """The schedules (columns) with the lowest sum of what each problem (row) loses with the best of them.

    Of several local searches, each of which replaces one schedule at a time while that helps, the best.
    """
    rng, results = random.Random(0), []
    for _ in range(starts):
        chosen = rng.sample(range(losses.shape[1]), min(count, losses.shape[1]))
        found = math.inf
        while True:
            swaps = []
            for place in range(len(chosen)):
                others = losses[:, chosen[:place] + chosen[place + 1 :]].min(1, initial=NEVER)
                sums = numpy.minimum(others[:, None], losses).sum(0)
                swaps.append((float(sums.min()), place, int(sums.argmin())))
            lost, place, column = min(swaps)
            if lost >= found - 1e-9:
                break
            found, chosen[place] = lost, column
        results.append((found, sorted(chosen)))
    return min(results)[1]


def leaf_of(tree: Tree, names: Mapping[str, Any]) -> int:
    """The schedule to which a problem's names lead."""
    while tree.sides:
        tree = tree.sides[0] if eval(tree.question, {}, dict(names)) else tree.sides[1]  # a question made here
    return tree.best


def drawn(name: str, asked: Sequence[Problem], count: int, seed: int) -> list[Problem]:
    """Problems of a set with sizes between those asked."""
    rng, found = random.Random(seed), dict[Problem, None]()
    for _ in range(100 * count):
        near = rng.choice(asked)
        try:
            problem = near.replace(**SETS[name].draw(near, rng))
        except TiledschedError:
            continue
        if problem not in asked and len(found) < count:
            found[problem] = None
    return list(found)


def mean_loss(losses: Sequence[float]) -> str:
    """The geometric mean of what is lost, and how many have no schedule."""
    able = [each for each in losses if each < NEVER]
    none = len(losses) - len(able)
    return f"{math.expm1(statistics.fmean(able)):.1%}" + (f" ({none} have none)" if none else "")


def bounds(name: str, count: int, seed: int, leaves: Sequence[int] = LEAVES) -> Iterator[str]:
    """A line for each number of leaves."""
    kernel, settings = load_kernel(SETS[name].kernel), load_settings()

    def served(problems: Sequence[Problem]) -> list[TableChoice]:
        return choices(kernel, [ARCH], problems, settings, losses=True)

    cases = served(SETS[name].asked(kernel))
    asked = [each.problem for each in cases]
    schedules = sorted(
        {one for each in cases for one in (each.served.schedule, *each.estimated)}, key=lambda one: one.id
    )
    others = served([*asked, *drawn(name, asked, count, seed)])[len(asked) :]
    losses, risks = (
        numpy.array([[of(each, one) for one in schedules] for each in cases])
        for of in (TableChoice.loss, TableChoice.risk)
    )
    names = [each.names(with_arch=False) for each in cases]
    for most in leaves:
        tree = grow(names, risks, most)
        held = [each.loss(schedules[leaf_of(tree, each.names(with_arch=False))]) for each in others]
        anyhow = losses[:, best_few(losses, most)].min(1)
        fitted = [losses[row, leaf.best] for leaf in tree.leaves() for row in leaf.rows]
        yield f"|{name}|{most}|{mean_loss(list(anyhow))}|{mean_loss(fitted)}|{mean_loss(held)}|"


def pairs(name: str) -> Iterator[tuple[float, bool, float, float]]:
    """A share, whether a neighbour names the schedule, the estimated and the true loss beside the table's choice, each capped."""
    kernel, settings = load_kernel(name), load_settings()
    table, space = load_table(settings, kernel=kernel, archs={ARCH}), space_for(ARCH, kernel)
    entries = [each for each in load_entries(settings, {ARCH}, kernel) if each.arch == ARCH]
    problems = {str(each.problem): each.problem for each in entries}
    known: dict[str, Schedule] = {}
    for each in entries:
        for one in (each.schedule, *each.ties, *filter(None, [each.runner_up])):
            known[space.complete(one).short()] = space.complete(one)
    timed: dict[Problem, dict[Schedule, float]] = defaultdict(dict)
    with lzma.open(TUNED[name], "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["kernel"] == name and row["median_us"] and row["problem"] in problems and row["schedule"] in known:
                problem, one = problems[row["problem"]], known[row["schedule"]]
                if not space.unworkable(one, problem):
                    timed[problem][one] = min(timed[problem].get(one, math.inf), float(row["median_us"]))
    for problem, times in timed.items():
        others = table.without(problem, ARCH)
        served = others.resolve(problem, ARCH).schedule
        for share in SHARES if served in times else ():
            judge = others.nearby(problem, ARCH, model=share)
            if judge is None:
                continue
            named = {one for _, some in judge.namers for one in some}
            for one in times.keys() - {served}:
                estimate = judge.mean_loss(one) - judge.mean_loss(served)
                true = math.log(times[one] / times[served])
                yield share, one in named, min(max(0.0, estimate), CAP), min(true, CAP)


def estimates(name: str) -> Iterator[str]:
    """A line for each share of the model, for schedules that neighbours name and for others."""
    groups: dict[tuple[bool, float], list[tuple[float, float]]] = defaultdict(list)
    for share, named, estimate, true in pairs(name):
        groups[named, share].append((estimate, true))
    for (named, share), found in sorted(groups.items(), reverse=True):
        of = "named near by" if named else "others"
        means = [statistics.fmean(column) for column in zip(*found, strict=True)]
        error = math.sqrt(statistics.fmean((estimate - true) ** 2 for estimate, true in found))
        yield f"|{name}|{of}|{share}|{len(found)}|{means[0]:.3f}|{means[1]:.3f}|{error:.3f}|"


def main() -> None:
    """Print one of the two tables."""
    parser = parser_with(
        flag("--estimates", action="store_true", help="compare the estimates with times"),
        flag("--sets", nargs="+", default=[*SETS][:2], choices=list(SETS), help="sets of problems"),
        flag("--count", type=positive, default=120, help="problems drawn for each set"),
        flag("--seed", type=positive, default=3, help="of the draws"),
        prog="python -m docs.studies.bake_bounds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    asked = parser.parse_args()
    if asked.estimates:
        print(
            "|kernel|schedules|model's share|pairs|estimated|true|root mean square error|",
            "|---|---|" + "---:|" * 5,
            sep="\n",
        )
        for name in TUNED:
            print(*estimates(name), sep="\n", flush=True)
        return
    print("|set|leaves|any schedules|tree, fitted|tree, held back|", "|---|" + "---:|" * 4, sep="\n")
    for name in asked.sets:
        for line in bounds(name, asked.count, asked.seed):
            print(line, flush=True)


if __name__ == "__main__":
    main()
