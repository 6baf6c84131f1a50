"""The study of how few schedules can serve a set of problems."""

from __future__ import annotations

import itertools
import math

import numpy
import pytest

from docs.studies import bake_bounds
from docs.studies.bake_regret import SETS, Set
from tiledsched.bake.tree import NEVER, grow


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_few_that_lose_least_are_found(count):
    losses = numpy.random.default_rng(count).random((12, 7))
    found = bake_bounds.best_few(losses, count)
    least = min(losses[:, list(each)].min(1).sum() for each in itertools.combinations(range(7), count))
    assert len(found) == count
    assert losses[:, found].min(1).sum() == pytest.approx(least)


def test_names_lead_to_the_leaf_of_their_problem():
    problems = [{"m": m, "word": word} for m in (1, 5, 9) for word in "ab"]
    losses = numpy.random.default_rng(1).random((6, 6))
    tree = grow(problems, losses, 5)
    leaves = {row: leaf.best for leaf in tree.leaves() for row in leaf.rows}
    assert [bake_bounds.leaf_of(tree, each) for each in problems] == [leaves[row] for row in range(6)]
    assert bake_bounds.mean_loss([0.0, math.log(1.21), NEVER]) == "10.0% (1 have none)"


def test_bounds_and_estimates_are_told(monkeypatch):
    draw = SETS["matmul, all measured"].draw
    monkeypatch.setitem(SETS, "few", Set("matmul", lambda kernel: kernel.suite("llama_8b")[:8], draw))
    one, all_of_them = bake_bounds.bounds("few", 3, 1, (1, 8))
    assert one.startswith("|few|1|")
    assert all_of_them.startswith("|few|8|0.0%|0.0%|")


@pytest.mark.slow
def test_estimates_stand_beside_times():
    lines = [line.split("|")[2:8] for line in bake_bounds.estimates("matmul")]
    assert [line[:2] for line in lines[4:6]] == [["named near by", "0.0"], ["others", "1.0"]]
    numbers = [[float(cell) for cell in line[2:]] for line in lines[:5]]
    estimated = [row[1] for row in numbers]
    assert estimated == sorted(
        estimated, reverse=True
    )  # the model says more of what a schedule loses than neighbours do
    assert len({(pairs, true) for pairs, _, true, _ in numbers}) == 1  # the same pairs for every share
