"""That a row of attention has the same bits whatever is computed beside it, under each schedule that claims so.

The interpreter shows what the algorithm does. That compiled programs do the same is shown on a GPU, by
`python -m docs.studies.batch_invariance`.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from attention_runs import run_problem
from kernel_checks import SPACES, check, make_inputs, schedule_for
from test_kernel_mutations import mutated

import tiledsched.core.fields as ts
from tiledsched.kernels.attention import Attention

KEYS, ROW, PAGE = 150, 100, 16
PROMPT = Attention.problem(seq_q=KEYS, seq_k=KEYS, head_dim=32, heads=2, kv_heads=1, causal=True)
WINDOW = PROMPT.replace(window=50)
SPANS = {"kv_splits": 2, "kv_combine": "in_order", "tile_m": 16, "tile_n": 16}
STRUCTURES = {
    "shares": SPANS,
    "shares, heads packed, masks apart": SPANS | {"pack_gqa": True, "loop_split": True},
    "longer shares": SPANS | {"kv_splits": 4, "kv_subtiles": 2},
    "no shares": {"tile_m": 16, "tile_n": 32},
    "no shares, two steps a turn": {"tile_m": 64, "tile_n": 32, "unroll": 2, "loop_split": True},
    "a flat loop": {"tile_m": 64, "tile_n": 32, "persistent": "strided", "flat_steps": 1},
}


@cache
def precise(kernel=Attention):
    """The kernel with outputs in float32, in which no rounding hides that sums were made in another order."""

    class Precise(kernel):
        name = f"{kernel.name} in float32"
        suites, default_suite = {}, ""
        Out = ts.out("batch heads seq_q value_columns", dtype="float32")

    return Precise


def row_of(problem, knobs, arrays, row, kernel=Attention, **more):
    """One row, of all heads, of the first sequence of a problem."""
    found = run_problem(precise(kernel), schedule_for(problem, forced=True, **knobs), problem, *arrays, **more)
    assert found.dtype == np.float32
    return found[0][:, row]


def one_row(whole, knobs, kernel=Attention):
    """Row ROW of a prompt, computed in ways that differ in everything but this row and the keys that it sees."""
    q, k, v = make_inputs(whole, amplitude=3.0)
    yield row_of(whole, knobs, (q, k, v), ROW, kernel)
    both = [np.concatenate(each) for each in zip((q, k, v), make_inputs(whole, 1), strict=True)]
    yield row_of(whole.replace(batch=2), knobs, both, ROW, kernel)
    for first, end in ((ROW, ROW + 1), (ROW - 10, ROW + 10), (ROW - 37, ROW + 40), (ROW, KEYS)):
        part = whole.replace(seq_q=end - first, seq_k=end, alignment="bottom_right")
        seen = [each[:, :, :end] for each in (k, v)]
        yield row_of(part, knobs, (q[:, :, first:end], *seen), ROW - first, kernel)
    if "flat_steps" in knobs or whole.window:  # a flat loop takes no padded batch
        return
    for room in (ROW + 10, 4 * KEYS):  # of which the other sequence uses a part only
        part = whole.replace(seq_q=1, seq_k=room, batch=2, causal=False, lengths=True)
        padded = [np.full((2, 1, room, 32), np.nan, k.dtype) for _ in "kv"]
        for array, mine in zip(padded, (k, v), strict=True):
            array[0, :, : ROW + 1], array[1, :, :9] = mine[0, :, : ROW + 1], 1
        queries = np.concatenate([q[:, :, ROW : ROW + 1]] * 2)
        lengths = {"Lengths": np.array([ROW + 1, 9], np.int32)}
        yield row_of(part, knobs, (queries, *padded), 0, kernel, more=lengths)


def all_equal(found):
    first, *others = found
    return all(np.array_equal(first, each) for each in others)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("whole", [PROMPT, WINDOW], ids=["causal", "window"])
def test_a_row_has_the_same_bits_whatever_is_computed_beside_it(whole, structure):
    """In a batch, alone, in chunks of a prompt, in decoding, with room for more keys."""
    knobs = STRUCTURES[structure]
    found = list(one_row(whole, knobs))
    assert len(found) >= 6
    assert all_equal(found)
    schedule = schedule_for(whole, forced=True, **knobs)
    assert Attention.reduction_order(whole, schedule) is not None
    check(whole, schedule)


def in_pages(array, table):
    """Keys or values of one sequence in pages, which lie where the table says; NaN behind them."""
    room = np.full((1, len(table) * PAGE, 32), np.nan, array.dtype)
    room[:, : array.shape[2]] = array[0]
    found = np.empty((len(table), 1, PAGE, 32), array.dtype)
    found[table] = room.reshape(1, -1, PAGE, 32).swapaxes(0, 1)
    return found


@pytest.mark.parametrize("keys", [16, 32, 150])
def test_keys_in_pages_have_the_bits_of_those_in_one_piece(keys):
    """Whatever the order of the pages, and however many there may be."""
    whole = PROMPT.replace(seq_q=1, seq_k=keys, causal=False)
    q, *both = make_inputs(whole)
    for pages in (10, 40):
        paged = whole.replace(seq_k=pages * PAGE, lengths=True, page=PAGE)
        table = np.random.default_rng(pages).permutation(pages).astype(np.int32)
        more = {"Lengths": np.array([keys], np.int32), "Table": table[None]}
        found = row_of(paged, SPANS, (q, *(in_pages(each, table) for each in both)), 0, more=more)
        np.testing.assert_array_equal(found, row_of(whole, SPANS, (q, *both), 0))


@pytest.mark.parametrize(
    "knobs",
    [
        {"kv_splits": 4, "kv_combine": "launch"},
        {"kv_direction": "sawtooth"},
        {"kv_direction": "backward"},
        {"lazy_rescale": True},
    ],
    ids=str,
)
def test_what_claims_no_order_has_none(knobs):
    """These tests notice it; and the schedule most like it that has an order is of another kind in these knobs alone."""
    knobs = {"tile_m": 64, "tile_n": 16} | knobs
    schedule = schedule_for(PROMPT, forced=True, **knobs)
    assert Attention.reduction_order(PROMPT, schedule) is None
    if knobs.get("kv_direction") != "backward":  # which goes from a row's own key, whatever is beside it
        assert not all_equal(one_row(PROMPT, knobs))
    changed = Attention.ordered(PROMPT, schedule)
    assert Attention.reduction_order(PROMPT, changed) is not None
    assert {name for name in changed if changed[name] != schedule[name]} <= {*knobs, "kv_splits", "kv_combine"}


MISTAKES = {
    "as many shares as ever": ("if const.KV_SPAN:", "if False:", PROMPT),
    "shares counted from the window": ("span.first if const.WINDOW else 0", "0", WINDOW),
    "shares of a tile's own steps": (
        "begin, end = split * const.KV_SPAN -",
        "begin, end = steps * split // 8 -",
        PROMPT,
    ),
    "sums of each share's own maximum": (
        "row_sum + own_sum.reshape((const.TILE_M, 1)) * share_weight",
        "row_sum",
        PROMPT,
    ),
    "the second half of the shares first": (
        "slot = place * const.KV_SPLITS + group * count + each",
        "slot = place * const.KV_SPLITS + (group * count + each + const.KV_SPLITS // 2) % const.KV_SPLITS",
        PROMPT,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_tile_code_are_noticed(mistake):
    old, new, whole = MISTAKES[mistake]
    knobs = STRUCTURES["shares"]
    with np.errstate(all="ignore"):
        found = list(one_row(whole, knobs, mutated(old, new)))
    right = next(one_row(whole, knobs))
    near = np.allclose(found[0].astype(float), right.astype(float), atol=1e-2)
    assert not (near and all_equal(found))


@pytest.mark.parametrize("arch", ["sm_90", "sm_121"])
def test_a_schedule_with_an_order_works_for_all_sizes(arch):
    """So that the one that stands for a family of problems serves all of them."""
    decoding = PROMPT.replace(seq_q=1, seq_k=4096, causal=False)
    families = {
        PROMPT.replace(seq_q=2048, seq_k=2048): [
            {"seq_q": 33, "seq_k": 2000, "alignment": "bottom_right"},
            {"seq_q": 501, "seq_k": 501, "batch": 7},
        ],
        decoding: [{"seq_k": 100}, {"seq_k": 9000, "batch": 64}],
        decoding.replace(page=64, lengths=True): [{"seq_k": 64, "batch": 3}],
        PROMPT.replace(seq_q=600, seq_k=600, packed=3): [{"seq_q": 90, "seq_k": 90, "packed": 9}],
    }
    orders, rng, workable = set(), random.Random(0), replace(SPACES[arch], constraints=SPACES[arch].needed)
    for problem, sizes in families.items():
        for _ in range(8):
            schedule = Attention.ordered(problem, workable.sample(problem, rng))
            assert SPACES[arch].unworkable(schedule, problem) == []
            assert Attention.ordered(problem, schedule) == schedule
            for size in sizes:
                other = problem.replace(**size)
                assert Attention.representative(other) == Attention.representative(problem)
                if not schedule["loop_split"]:  # which needs a mask, and a family has some problems without
                    assert SPACES[arch].unworkable(schedule, other) == []
                assert Attention.reduction_order(other, schedule) == Attention.reduction_order(problem, schedule)
            orders.add(Attention.reduction_order(problem, schedule))
    assert None not in orders
    assert len(orders) > 4


def test_chunks_and_prompts_are_of_one_family_and_single_rows_of_another():
    chunk, row = (PROMPT.replace(seq_q=rows, alignment="bottom_right") for rows in (20, 1))
    prompt, *others = (Attention.representative(each) for each in (PROMPT.replace(batch=5), row, WINDOW))
    assert Attention.representative(chunk) == prompt
    assert prompt not in others
    assert (Attention.row_dims(chunk), Attention.row_dims(PROMPT)) == (("batch",), ("batch", "seq_q", "seq_k"))
