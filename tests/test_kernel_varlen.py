"""Packed sequences and keys in pages: every schedule in the interpreter, against a float64 reference.

That these checks notice what is wrong is shown in tests/test_kernel_mutations.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kernel_checks import SPACES, check, make_inputs, more_inputs, schedule_for
from test_kernel_features import STRUCTURES

from tiledsched.core.device import arch_spec
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.inputs import SHORT, offsets

PACKED = Attention.problem(seq_q=200, seq_k=200, head_dim=16, causal=True, heads=4, kv_heads=2, packed=5, lse=True)
PAGED = Attention.problem(
    seq_q=5,
    seq_k=192,
    head_dim=16,
    causal=True,
    alignment="bottom_right",
    batch=3,
    heads=4,
    kv_heads=2,
    lengths=True,
    page=64,
    lse=True,
)
PROBLEMS = [
    PACKED,
    PACKED.replace(seq_q=90, alignment="bottom_right", window=20, sinks=True),
    PACKED.replace(causal=False, seq_k=130, packed=9, softcap=True),
    PAGED,
    PAGED.replace(page=16, window=30, sinks=True),
    PAGED.replace(causal=False, page=48, softcap=True),
    PAGED.replace(seq_q=100, batch=1, packed=4, page=32),
]


def valid(problem, knobs):
    """The structures that packed sequences and pages have."""
    left_out = {"flat_steps", "qk_ahead"} | ({"store_late"} if problem.packed else set())
    return not left_out & set(knobs)


@pytest.mark.parametrize("knobs", STRUCTURES, ids=str)
def test_every_structure(knobs):
    for problem in PROBLEMS[STRUCTURES.index(knobs) % 3 :: 3]:
        if not valid(problem, knobs) or ("loop_split" in knobs and "backward" in knobs.values() and not problem.causal):
            with pytest.raises(AssertionError):
                schedule_for(problem, forced=True, tile_m=64, tile_n=32, **knobs)
            continue
        if problem.causal or not {"snake", "reversed", "backward"} & {str(each) for each in knobs.values()}:
            check(problem, schedule_for(problem, forced=True, tile_m=64, tile_n=32, **knobs), sm_count=1)


@pytest.mark.parametrize(
    "lengths", [[64, 64], [63, 65], [1, 128, 0], [0, 0, 128, 1], [32] * 8, [129], [0, 40], [5] * 12], ids=str
)
def test_packed_lengths_around_the_tile(lengths):
    """Empty sequences, of one row, as long as a tile and one more or less, at the beginning, between and at the end."""
    ends = np.array([0, *np.cumsum(lengths)], np.int32)
    problem = PACKED.replace(seq_q=sum(lengths), seq_k=sum(lengths), packed=len(lengths))
    for causal in (True, False):
        own = problem.replace(causal=causal)
        split = {"kv_splits": 2, "tma_loads": False}
        two_steps = sum(lengths) > 32 * len(lengths)  # of keys, on average: shares are a step at least
        for knobs in [split] * (not causal and two_steps) + [{"persistent": "strided", "q_subtiles": 2}]:
            check(
                own,
                schedule_for(own, forced=True, tile_m=64, tile_n=32, **knobs),
                more={"CuQ": ends, "CuK": ends},
                sm_count=1,
            )


def test_rows_of_no_sequence_are_left_alone():
    """Those beyond the last, in a buffer that is larger than what it holds; and offsets beyond the arrays are cut."""
    problem = PACKED.replace(causal=False, packed=3)
    q, k, v = make_inputs(problem)
    k[:, :, 150:] = v[:, :, 150:] = np.nan
    ends, beyond = np.array([0, 70, 70, 150], np.int32), np.array([0, 70, 200, 999], np.int32)
    from attention_runs import run_problem

    out = run_problem(Attention, schedule_for(problem), problem, q, k, v, more={"CuQ": ends, "CuK": ends})
    assert np.isfinite(out[:, :, :150].astype(np.float64)).all()
    check(problem, schedule_for(problem), more={"CuQ": np.minimum(beyond, 200), "CuK": np.minimum(beyond, 200)})


@pytest.mark.parametrize(
    ("length", "page"), [(0, 16), (1, 64), (15, 16), (16, 16), (17, 16), (63, 64), (64, 64), (65, 64), (192, 16)]
)
def test_pages_around_the_tile(length, page):
    more = more_inputs(PAGED.replace(page=page))
    entries = PAGED.replace(page=page).key_entries
    more["Lengths"] = np.array([length, 192, 1], np.int32)
    more["Table"] = np.random.default_rng(0).permutation(entries).reshape(3, -1).astype(np.int32)
    thin = {"page_lookup": "scalar"} if page < 32 else {}
    for problem in (
        PAGED.replace(page=page),
        PAGED.replace(page=page, seq_q=1),
        PAGED.replace(page=page, causal=False),
    ):
        for knobs in ({"kv_splits": 2, "tma_loads": False}, {"pack_gqa": True, "kv_subtiles": 2}, thin):
            check(problem, schedule_for(problem, forced=True, tile_m=64, tile_n=32, **knobs), more=more)


def test_pages_of_others_are_not_read():
    """Those that a sequence has no keys in may hold anything; tables beyond its keys, too, as `more_inputs` makes them."""
    problem = PAGED.replace(page=16)
    more = more_inputs(problem, 5)
    q, k, v = make_inputs(problem)
    used = {
        int(page)
        for row, length in zip(more["Table"], more["Lengths"], strict=True)
        for page in row[: -(-int(length) // 16)]
    }
    others = sorted(set(range(problem.key_entries)) - used)
    assert others
    k[others] = v[others] = np.nan
    more["Table"][more["Table"] == 2**31 - 1] = -1
    more["Lengths"][-1], more["Table"][-1] = 0, others[0]  # a sequence without a key
    for knobs in (
        {},
        {"page_lookup": "scalar"},
        {"tile_n": 16, "kv_direction": "backward"},
        {"kv_splits": 2, "kv_combine": "launch", "tile_m": 16},
    ):
        schedule = schedule_for(problem, forced=True, **{"tile_n": 32, **knobs})
        check(problem, schedule, (q, k, v), more=more)


def test_drawn_lengths():
    rng = np.random.default_rng(0)
    for total, sequences in ((10, 40), (1000, 7), (64, 1), (5000, 5000)):
        for uneven in (False, True):
            ends = offsets(rng, total, sequences, uneven=uneven)
            assert (len(ends), ends[0], ends[-1]) == (sequences + 1, 0, total)
            assert (np.diff(ends) >= 0).all()
    assert set(SHORT[:6]) <= set(np.diff(offsets(rng, 1000, 12, uneven=True)))


def test_the_model_takes_sequences_as_equally_long():
    """Packed sequences cost what the same ones cost in a batch; so do their FLOPs."""
    spec = arch_spec("sm_90")
    packed = Attention.problem(seq_q=8 * 1024, seq_k=8 * 1024, head_dim=64, heads=16, causal=True, packed=8)
    batch = packed.replace(seq_q=1024, seq_k=1024, packed=0, batch=8)
    schedule = SPACES["sm_90"].default(batch)
    facts = dataclasses.replace(Attention.cost.expected(batch, schedule, spec))
    assert (packed.flops, packed.visible_pairs) == (batch.flops, 8 * batch.visible_pairs)
    assert Attention.cost.model(packed, schedule, facts, spec) == pytest.approx(
        Attention.cost.model(batch, schedule, facts, spec), rel=0.02
    )
