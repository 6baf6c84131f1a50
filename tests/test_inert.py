"""Which changes of knobs leave the program as it is: learnt from builds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings, strategies

from tiledsched.core.schedule import Schedule
from tiledsched.tuning.inert import MOST_CHANGES, SURE, InertChanges

CHOICES = {"tile": [32, 64, 128], "hint": [0, 2, 4], "other_hint": [0, 4], "flag": [False, True]}
ALL = [Schedule(dict(zip(CHOICES, each, strict=True))) for each in itertools.product(*CHOICES.values())]


def program(schedule: Schedule) -> tuple[object, ...]:
    """One hint never matters, the other only for large tiles."""
    return schedule["tile"], schedule["flag"], schedule["hint"] if schedule["tile"] == 128 else None


@pytest.fixture
def inert():
    return InertChanges(CHOICES)


def test_what_was_built_is_built_and_nothing_is_said_before(inert) -> None:
    assert inert.equal("p", ALL[0]) == 0
    assert inert.put_off("p", ALL, 5) == ALL[:5]
    inert.learn("p", ALL[0], program(ALL[0]))
    assert (inert.equal("p", ALL[0]), inert.equal("q", ALL[0])) == (1, 0)
    far = [each for each in ALL if sum(each[name] != ALL[0][name] for name in CHOICES) > MOST_CHANGES]
    assert not any(inert.equal("p", each) for each in far)


def test_what_was_built_and_not_tried_only_teaches(inert) -> None:
    for schedule in ALL[:8]:
        inert.learn("p", schedule, program(schedule), tried=False)
    assert not any(inert.equal("p", schedule) for schedule in ALL)
    inert.learn("p", ALL[0], program(ALL[0]))
    assert [inert.equal("p", schedule) >= SURE for schedule in ALL[:4]] == [True, False, True, False]


def built_in_turn(problem: str, inert: InertChanges, batch: int = 6) -> list[Schedule]:
    """Every schedule, those last that are likely to be built."""
    left, order = list(ALL), []
    while left:
        for schedule in inert.put_off(problem, left, batch):
            left.remove(schedule)
            order.append(schedule)
            inert.learn(problem, schedule, program(schedule))
    return order


def test_equal_programs_are_built_last(inert) -> None:
    order, distinct = built_in_turn("p", inert), len(set(map(program, ALL)))  # 10 of 36
    assert sorted(order, key=ALL.index) == ALL
    first, as_written = (len(set(map(program, each[: 2 * distinct]))) for each in (order, ALL))
    assert (first, as_written, distinct) == (8, 4, 10)


def test_one_problem_teaches_another(inert) -> None:
    alone = InertChanges(CHOICES)
    built_in_turn("p", inert)
    twin = ALL[0].replace(other_hint=4)
    for learner in (inert, alone):
        learner.learn("q", ALL[0], program(ALL[0]))
    assert inert.equal("q", twin) >= SURE > alone.equal("q", twin)


def test_a_change_that_made_a_difference_here_counts_more_than_one_that_made_none_elsewhere(inert) -> None:
    for schedule in ALL:
        if schedule["tile"] == 32:
            inert.learn("p", schedule, program(schedule))
    before, after, new = (Schedule(tile=128, hint=hint, other_hint=0, flag=True) for hint in (0, 2, 4))
    inert.learn("p", before, program(before))
    doubted = inert.equal("p", after)
    assert doubted > SURE
    inert.learn("p", after, program(after))
    assert inert.equal("p", new) < doubted


@settings(max_examples=30, deadline=None)
@given(strategies.permutations(ALL), strategies.integers(1, 12))
def test_nothing_is_lost_and_nothing_twice(order, count) -> None:
    inert = InertChanges(CHOICES)
    for schedule in order[:9]:
        inert.learn("p", schedule, program(schedule))
    chosen = inert.put_off("p", order, count)
    assert len(chosen) == len(set(chosen)) == count
    sure = [each for each in order if inert.equal("p", each) < SURE]
    assert chosen[: len(sure)] == sure[:count]


def test_true_is_not_one() -> None:
    inert = InertChanges(["knob"])
    inert.learn("p", Schedule(knob=1), "one")
    assert inert.equal("p", Schedule(knob=True)) == 0
