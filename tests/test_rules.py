"""Rules over problems: made-up problems whose rule is known, and what must have none."""

from __future__ import annotations

import itertools
import random

import pytest
from report_samples import plain, problem_of

from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention import Attention
from tiledsched.report.rules import best_by_value, rules
from tiledsched.store.model_error import ModelError

PROBLEMS = [
    Attention.standard(seq_len=seq, head_dim=dim, causal=causal, batch=2, heads=8)
    for seq, dim, causal in itertools.product((512, 1024, 2048, 4096, 8192), (64, 128), (False, True))
]


def timed(problem, best, *, loss=0.1, knob="block_order", values=("natural", "swizzled", "reversed"), **more):
    """A problem with 24 programs, of which those with one of the best values are fastest."""
    times = {
        plain(64, 64, **{knob: value, "latency_k": k, "latency_v": v}): 100 * (1 if value in best else 1 + loss)
        + k
        + 3 * v
        for value, k, v in itertools.product(values, (0, 1, 2, 4), (0, 4))
    }
    return problem_of(times, problem=problem, **more)


def rule_of(problems, knob="block_order"):
    return next((rule for rule in rules(problems, [(knob,), ("latency_k",)]) if rule.knob == (knob,)), None)


def test_a_rule_says_for_which_problems_a_value_is_good():
    rule = rule_of([timed(p, ("swizzled", "reversed") if p.causal else ("natural",)) for p in PROBLEMS])
    assert rule.text == "`block_order`: swizzled or reversed where `causal`; natural where not `causal`"
    assert (rule.problems, rule.right, rule.saved) == (20, 20, pytest.approx(0.1))
    assert rule.constant_right == 10
    assert rule.score == "right for 20 of 20 problems left out; one value for all: 10"


def test_a_rule_has_a_third_part_where_one_is_needed():
    best = {p: "natural" if not p.causal else "swizzled" if p.seq_q <= 1024 else "reversed" for p in PROBLEMS}
    rule = rule_of([timed(p, (best[p],)) for p in PROBLEMS])
    assert rule.text == (
        "`block_order`: natural where not `causal`; swizzled where `causal` and `S` ≤ 1024; "
        "reversed where `causal` and `S` ≥ 2048"
    )
    assert rule.right == 20


@pytest.mark.parametrize(
    "problems",
    [
        [timed(p, ("natural",)) for p in PROBLEMS],  # one value is best
        [timed(p, (random.Random(p.id).choice(("natural", "swizzled")),)) for p in PROBLEMS],  # by chance
        [timed(p, ("natural",) if p.causal else ("swizzled",), loss=0.005) for p in PROBLEMS],  # noise
        [timed(p, ("natural",) if p.causal else ("swizzled",)) for p in PROBLEMS[:6]],  # too few
        [
            timed(p, ("natural",) if p.causal else ("swizzled",), provenance="modelled") for p in PROBLEMS
        ],  # error unknown
        [
            timed(
                p,
                ("natural",) if p.causal else ("swizzled",),
                provenance="modelled",
                error=ModelError(mean=0.12, worst=0.2, figures=9, source="figures"),
            )
            for p in PROBLEMS
        ],
        [],
    ],
)
def test_what_is_not_known_has_no_rule(problems):
    assert rules(problems, [("block_order",), ("latency_k",)]) == []


def test_winners_alone_make_a_rule_of_any_kernel():
    """Of a kernel with dims of its own, each problem with nothing but its winner, and the knobs of a tile together."""
    matmul = kernel_named("matmul")
    sizes = itertools.product((16, 64, 1024, 4096), (1024, 4096), (512, 2048))
    problems = [
        problem_of({Schedule(TILE_M=16 if m <= 64 else 128, TILE_N=32, w=4 if k == 512 else 8): 5.0}, problem=one)
        for m, n, k in sizes
        for one in [matmul.problem(m=m, n=n, k=k, dtype="float16")]
    ]
    found = {rule.text: (rule.right, rule.saved) for rule in rules(problems, [("TILE_M", "TILE_N"), ("w",)])}
    assert found == {
        "`TILE_M` x `TILE_N`: 16x32 where `m` ≤ 64; 128x32 where `m` ≥ 1024": (16, None),
        "`w`: 4 where `k` ≤ 512; 8 where `k` ≥ 2048": (16, None),
    }


def test_what_ties_with_the_best_is_as_good():
    times = {Schedule(a=1): 100.0, Schedule(a=2): 101.5, Schedule(a=3): 130.0}
    one = problem_of(times, ties=frozenset({Schedule(a=2)}))
    assert best_by_value(one, ("a",)) == {(1,): 1.0, (2,): 1.0, (3,): 1.3}
    assert best_by_value(one, ("b",)) == {}


def test_a_rule_names_a_range_and_marks_the_value_of_a_problem():
    sizes = (16, 32, 64, 128, 256, 512)
    matmul = kernel_named("matmul")
    problems = [
        problem_of(
            {Schedule(w=2 if m in (64, 128) else 1): 5.0},
            problem=matmul.problem(m=m, n=1024, k=512 * k, dtype="float16"),
        )
        for m, k in itertools.product(sizes, range(1, 7))
    ]
    (rule,) = rules(problems, [("w",)])
    assert rule.text == "`w`: 2 where 64 ≤ `m` ≤ 128; 1 elsewhere"
    assert rule.brief(problems[0]) == "`w`: 2 where 64 ≤ `m` ≤ 128; 1 (here) elsewhere"
    assert rule.brief(problems[23]) == "`w`: 2 (here) where 64 ≤ `m` ≤ 128; 1 elsewhere" == rule.brief(problems[12])
    assert rule.shares == "right for 100%, one value for all for 67%"
