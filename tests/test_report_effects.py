"""What the values of a knob cost: matched pairs against brute force, on small landscapes that are made up."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings, strategies as st
from report_samples import problem_of
from scipy.stats import ttest_1samp

from tiledsched.core.schedule import Schedule
from tiledsched.report.effects import LEAST_PAIRS, joined_effects, value_effects

GRID = [dict(zip("abc", values, strict=True)) for values in itertools.product((0, 1, 2), (True, False), ("x", "y"))]


def grid(us, **knobs):
    """A problem with a program for every combination of the knobs' values, timed by a function of the combination."""
    schedules = [dict(zip(knobs, values, strict=True)) for values in itertools.product(*knobs.values())]
    return problem_of({Schedule(each): us(**each) for each in schedules})


def brute_force(one, knob, value, against):
    """The log ratios of every two schedules that differ in the knob alone, by comparing all with all."""
    found = {}
    for first, second in itertools.permutations(one.timed, 2):
        a, b = dict(first.schedule), dict(second.schedule)
        wanted = (a.pop(knob), b.pop(knob)) == (value, against)
        if wanted and a == b and min(first.us, second.us) <= 1.3 * one.timed[0].us:
            programs = first.same_program_as or first.schedule, second.same_program_as or second.schedule
            found[programs] = math.log(first.us / second.us)
    return list(found.values())


def of(verdicts, knob):
    return next(each for each in verdicts if each.knob == knob)


@settings(max_examples=40, deadline=None)
@given(
    times=st.lists(st.sampled_from([100.0, 101.0, 110.0, 125.0, 135.0, 400.0]), min_size=len(GRID), max_size=len(GRID)),
    kept=st.lists(st.booleans(), min_size=len(GRID), max_size=len(GRID)),
    same=st.dictionaries(st.integers(1, len(GRID) - 1), st.integers(0, 3), max_size=4),
)
def test_every_effect_equals_brute_force(times, kept, same) -> None:
    schedules = [Schedule(each) for each in GRID]
    codes = {schedules[place]: schedules[other % place] for place, other in same.items()}
    chosen = {schedule: us for schedule, us, keep in zip(schedules, times, kept, strict=True) if keep}
    if not chosen:
        return
    one = problem_of(chosen, {a: b for a, b in codes.items() if a in chosen and b in chosen and b not in codes})
    for effect in value_effects(one):
        logs = brute_force(one, effect.knob, effect.value, effect.against)
        assert effect.against == one.best.schedule[effect.knob]
        assert (effect.pairs, effect.problems) == (len(logs), bool(logs))
        if len(logs) < LEAST_PAIRS:
            assert (effect.ratio, effect.ci_low, effect.ci_high) == (None, None, None)
        elif len(set(logs)) == 1:
            assert effect.ci_low == effect.ratio == effect.ci_high == pytest.approx(math.exp(logs[0]))
        else:
            expected = [math.exp(each) for each in ttest_1samp(logs, 0).confidence_interval(0.95)]
            assert [effect.ci_low, effect.ci_high] == pytest.approx(expected)
            assert effect.ratio == pytest.approx(math.exp(sum(logs) / len(logs)))


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([None, 100.0, 100.6, 104.0, 110.0, 135.0]), min_size=len(GRID), max_size=len(GRID)),
        min_size=1,
        max_size=6,
    )
)
def test_joined_effects_equal_brute_force(tables) -> None:
    """Over problems, each counts once; a value that is advised has a program near the best of every problem."""
    landscapes = [{Schedule(g): us for g, us in zip(GRID, row, strict=True) if us} for row in tables]
    problems = [problem_of(each) for each in landscapes if each]
    for verdict in joined_effects(problems):
        for effect in verdict.effects:
            logs = [brute_force(one, effect.knob, effect.value, effect.against) for one in problems]
            means = [sum(each) / len(each) for each in logs if each]
            assert (effect.pairs, effect.problems) == (sum(map(len, logs)), len(means))
            if len(means) >= LEAST_PAIRS:
                half = ttest_1samp(means, 0).confidence_interval(0.95) if len(set(means)) > 1 else (means[0], means[0])
                assert [effect.ci_low, effect.ci_high] == pytest.approx([math.exp(each) for each in half])
            if effect.ratio is None:
                assert effect.pairs - effect.problems < LEAST_PAIRS - 1
            else:
                assert effect.ratio == pytest.approx(math.exp(sum(means) / len(means)))
        if verdict.advice == "leave":
            assert any(effect.ratio is not None for effect in verdict.effects)
            for one in problems:
                if len({timed.schedule[verdict.knob] for timed in one.timed}) > 1:
                    near = [
                        t for t in one.timed if t.us <= 1.01 * one.best.us and t.schedule[verdict.knob] == verdict.value
                    ]
                    assert near


def test_an_inert_knob_that_only_plain_programs_tried_is_untried() -> None:
    """Its best time is 23% above the best of everything, because the good programs never tried it."""
    times = {Schedule(tile=tile, inert=0): us for tile, us in ((256, 100.0), (128, 105.0), (64, 123.0), (32, 400.0))}
    times |= {Schedule(tile=tile, inert=value): us for tile, us in ((64, 123.0), (32, 400.0)) for value in (1, 2)}
    found = [each for each in value_effects(problem_of(times)) if each.knob == "inert"]
    assert [(each.value, each.ratio, each.pairs) for each in found] == [(1, None, 1), (2, None, 1)]
    assert of(joined_effects([problem_of(times)]), "inert").advice == "untried"


def flipping(best, n=6):
    return grid(
        lambda n, k, s: (100.0 + n) * (1 if k == best else 1.2) * (1.3 if s else 1), n=range(n), k=(0, 1, 2), s=(0, 1)
    )


@pytest.mark.parametrize(
    ("bests", "advice", "value", "preferred"),
    [((1, 1, 1, 1), "leave", 1, ((1, 4),)), ((1, 1, 2, 1), "choose", 1, ((1, 3), (2, 1))), ((0,), "few", 0, ((0, 1),))],
)
def test_advice(bests, advice, value, preferred) -> None:
    found = joined_effects([flipping(best) for best in bests])
    k, s = of(found, "k"), of(found, "s")
    assert (k.advice, k.value, k.preferred) == (advice, value, preferred)
    assert (s.advice, s.value, s.problems) == ("leave" if len(bests) > 1 else "few", 0, len(bests))
    assert [each.value for each in k.effects] == [each for each in (0, 1, 2) if each != value]
    assert [each.knob for each in found][:2] == ["s", "k"]  # what costs most is first


@pytest.mark.parametrize(("others", "advice"), [(0, "leave"), (2, "leave"), (8, "unclear")])
def test_winners_of_searches_may_contradict_the_pairs(others, advice) -> None:
    """The pairs of four problems say that `1` is faster; of 22 winners so many have another value."""
    winners = (*[Schedule(k=1)] * (22 - others), *[Schedule(k=2)] * others)
    problems = [dataclasses.replace(flipping(1), winners=winners) for _ in range(4)]
    found = of(joined_effects(problems), "k")
    assert (found.advice, found.value, found.problems) == (advice, 1, 4)
    assert dict(found.winners) == {1: 22 - others} | ({2: others} if others else {})
    inert = [grid(lambda n, k: 100.0 + n, n=range(6), k=(1, 2)) for _ in range(4)]  # which wins is chance
    same = of(joined_effects([dataclasses.replace(one, winners=winners) for one in inert]), "k")
    assert same.advice == ("leave" if advice == "leave" else "same")


def test_chance_among_many_comparisons_is_no_preference() -> None:
    """Times are noise of 8%: of 240 comparisons some would be sure if each were judged alone."""
    rng, alone = random.Random(1), 0
    problems = []
    for _ in range(60):
        noise = {(k, n): rng.gauss(0, 0.08) for k in range(5) for n in range(6)}
        problems.append(grid(lambda n, k, noise=noise: (100 + n) * math.exp(noise[k, n]), n=range(6), k=range(5)))
        alone += any((effect.ci_low or 0) > 1.01 for effect in value_effects(problems[-1]) if effect.knob == "k")
    assert alone > 3
    assert of(joined_effects(problems), "k").preferred == ()


def test_a_value_that_one_problem_did_not_try_is_not_advised() -> None:
    """Four problems lose 20% without `2`, the fifth never tried it: where to leave the knob is not known."""
    problems = [flipping(2) for _ in range(4)]
    problems.append(grid(lambda n, k, s: (100.0 + n) * (1.1 if k else 1), n=range(6), k=(0, 1), s=(0,)))
    assert of(joined_effects(problems), "k").advice == "unclear"


def test_a_value_without_a_program_near_the_best_is_not_advised() -> None:
    """Pairs say that `1` is faster; the winner has `0`, and nothing with `1` comes near it."""
    one = grid(lambda n, k: 120.0 - 5 * k, n=range(6), k=(0, 1))
    times = {each.schedule: each.us for each in one.timed} | {Schedule(n=99, k=0): 100.0}
    assert of(joined_effects([problem_of(times)]), "k").advice == "unclear"


def test_nothing_is_said_of_a_knob_with_one_value_or_of_no_problem() -> None:
    assert joined_effects([]) == ()
    assert value_effects(problem_of({Schedule(a=1): 5.0})) == joined_effects([problem_of({Schedule(a=1): 5.0})]) == ()


def test_true_is_not_one() -> None:
    one = problem_of({Schedule(n=n, k=k): 100.0 + n + k * 10 for n in range(5) for k in (1, 2)})
    mixed = {each.schedule: each.us for each in one.timed} | {Schedule(n=n, k=True): 150.0 + n for n in range(5)}
    values = [(each.value, each.pairs) for each in value_effects(problem_of(mixed)) if each.knob == "k"]
    assert values == [(True, 5), (2, 5)]
