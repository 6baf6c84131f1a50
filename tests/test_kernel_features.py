"""Optional features: windows, capped scores, sinks, and sequences with starts and lengths of their own.

As in tests/test_kernel_properties.py: every schedule in the interpreter, against a float64 reference, which is held to torch
in tests/test_attention_backward.py. That these checks notice what is wrong is shown in tests/test_kernel_mutations.py.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kernel_checks import check, make_inputs, schedule_for

from tiledsched.core.device import arch_spec
from tiledsched.core.registry import problem_from_json
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.model import tile_steps

CAUSAL = {"causal": True, "alignment": "bottom_right"}

STRUCTURES = [
    {},
    {"loop_split": True},
    {"block_order": "reversed"},
    {"block_order": "heads_fastest"},
    {"block_order": "swizzled", "persistent": "snake"},
    {"persistent": "strided"},
    {"kv_direction": "sawtooth"},
    {"kv_direction": "wide_sawtooth"},
    {"persistent": "strided", "store_late": True, "peel_first": False},
    {"persistent": "snake", "store_late": True, "loop_split": True},
    {"kv_direction": "backward"},
    {"kv_direction": "backward", "loop_split": True},
    {"q_subtiles": 2},
    {"q_subtiles": 2, "loop_split": True},
    {"kv_subtiles": 2, "loop_split": True},
    {"qk_ahead": True},
    {"qk_ahead": True, "loop_split": True},
    {"qk_ahead": True, "loop_split": True, "kv_direction": "backward"},
    {"lazy_rescale": True, "loop_split": True},
    {"unroll": 2},
    {"unroll": 2, "loop_split": True},
    {"unroll": 2, "loop_split": True, "kv_direction": "backward"},
    {"persistent": "strided", "flat_steps": 1},
    {"persistent": "snake", "flat_steps": 1, "loop_split": True, "q_ahead": True},
    {"persistent": "strided", "flat_steps": 2, "reload_q": True},
    {"persistent": "snake", "flat_steps": 2, "loop_split": True},
    {"q_in_registers": True, "persistent": "snake", "loop_split": True},
    {"pack_gqa": True, "loop_split": True},
    {"kv_splits": 2, "loop_split": True, "tma_loads": False},
    {"kv_splits": 2, "tma_loads": False, "pack_gqa": True},
    {"kv_splits": 2, "tma_loads": False, "kv_direction": "backward", "loop_split": True},
]
FEATURES = [
    {"window": 1},
    {"window": 40, "window_right": 30},
    {"window": 64},
    {"window": 150, "sinks": True},
    {"softcap": True},
    {"window_right": 50},
    {"sinks": True},
    {"lengths": True},
    {"starts": True},
    {"starts": True, "lengths": True, "window": 50, "window_right": 90, "softcap": True, "sinks": True},
]
SIZES = [(256, 256, "top_left"), (70, 300, "bottom_right"), (200, 70, "top_left"), (190, 130, "bottom_right")]


@pytest.mark.parametrize(
    ("features", "knobs"),
    [
        (features, knobs)
        for (i, knobs), (j, features) in itertools.product(enumerate(STRUCTURES), enumerate(FEATURES))
        if (i // 2 + j) % 2 == 0
    ],
    ids=str,
)
def test_every_structure(features, knobs):
    """Of several sequences where each has a start or a length of its own: an empty one, one cut short and a whole one.

    Each structure meets every second question, in one of the sizes: each structure and each question meets all four.
    """
    if {"starts", "lengths"} & set(features) and {"qk_ahead", "flat_steps"} & set(knobs):
        pytest.skip("not for sequences that may have no keys")
    place = STRUCTURES.index(knobs)
    turn = (place + place // 4 + FEATURES.index(features) // 2) % len(SIZES)
    seq_q, seq_k, alignment = SIZES[turn]
    kv_heads = (1, 2, 1, 1)[turn]
    problem = Attention.problem(
        seq_q=seq_q,
        seq_k=seq_k,
        head_dim=16,
        causal=True,
        alignment=alignment,
        batch=3 if {"starts", "lengths"} & set(features) else 1,
        heads=2 * kv_heads,
        kv_heads=kv_heads,
        lse=True,
        **features,
    )
    check(problem, schedule_for(problem, forced=True, tile_m=64, tile_n=32, **knobs), sm_count=1)


@pytest.mark.parametrize("edge", [0, 1, 31, 32, 33, 63, 64, 65, 127, 128])
def test_starts_and_lengths_around_the_tile(edge):
    problem = Attention.problem(seq_q=64, seq_k=128, head_dim=16, batch=3, starts=True, lengths=True, lse=True)
    more = {"Starts": np.array([0, edge, edge], np.int32), "Lengths": np.array([edge, 128, edge], np.int32)}
    for loop_split in (False, True):
        out = check(
            problem,
            schedule_for(problem, tile_m=64, tile_n=32, loop_split=loop_split, kv_direction="forward"),
            more=more,
        )
        assert not out[2].any()


@pytest.mark.parametrize("loop_split", [False, True])
def test_what_lies_before_the_window_or_behind_the_length_is_not_read(loop_split):
    """Keys that no row of a tile sees may hold anything, NaN too: their tiles are not loaded."""
    problem = Attention.problem(
        seq_q=64, seq_k=512, head_dim=16, batch=2, window=40, starts=True, lengths=True, **CAUSAL
    )
    q, k, v = make_inputs(problem)
    more = {"Starts": np.array([0, 480], np.int32), "Lengths": np.array([500, 512], np.int32)}
    exact = check(problem, schedule_for(problem, tile_m=64, tile_n=32, loop_split=loop_split), (q, k, v), more=more)
    for array in (k, v):
        array[0, :, :384], array[1, :, :480] = np.nan, np.nan
    from attention_runs import run_problem

    schedule = schedule_for(problem, tile_m=64, tile_n=32, loop_split=loop_split)
    np.testing.assert_array_equal(run_problem(Attention, schedule, problem, q, k, v, more=more), exact)


@pytest.mark.parametrize("cap", [1.0, 30.0, 50.0, 1000.0])
@pytest.mark.parametrize("amplitude", [0.01, 1.0, 30.0])
def test_any_cap(cap, amplitude):
    problem = Attention.problem(seq_q=70, seq_k=90, head_dim=64, softcap=True, lse=True, causal=True)
    for knobs in ({}, {"loop_split": True}, {"lazy_rescale": True}):
        inputs = make_inputs(problem, amplitude=amplitude)
        check(
            problem,
            schedule_for(problem, tile_m=64, tile_n=32, **knobs),
            (*inputs[:2], make_inputs(problem)[2]),
            cap=cap,
        )


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("sink", [-np.inf, -1e4, -20.0, 0.0, 5.0, 1e4])
def test_any_sink(sink, heads):
    problem = Attention.problem(
        seq_q=70, seq_k=90, head_dim=16, heads=heads, kv_heads=2, sinks=True, lse=True, **CAUSAL
    )
    more = {"Sinks": np.array([sink, 0.0, 1.0, -2.0, 3.0, sink][-heads:], np.float16)}
    for knobs in ({}, {"pack_gqa": True}, {"kv_splits": 2, "tma_loads": False}, {"lazy_rescale": True}):
        check(problem, schedule_for(problem, forced=True, tile_m=64, tile_n=32, **knobs), more=more)


def test_a_row_that_sees_no_key_has_its_sink_for_a_sum():
    problem = Attention.problem(seq_q=100, seq_k=30, head_dim=32, sinks=True, lse=True, **CAUSAL)
    out = check(problem, schedule_for(problem, tile_m=64), more={"Sinks": np.array([2.0], np.float16)})
    assert not out[:, :, :70].any()


def test_wide_indices_are_there():
    for features in ({"lse": True}, {}):
        problem = Attention.problem(
            seq_q=1 << 20, seq_k=1 << 20, head_dim=64, batch=64, causal=True, window=128, **features
        )
        entry = Attention.entry(problem, space_for("sm_90", Attention).default(problem))
        assert entry.__name__ == f"attention_features{'_lse' if features else ''}_wide"


# ---- the reference, and what is said of a problem ---------------------------------------------------------------------


PLAIN = Attention.problem(seq_q=100, seq_k=100, head_dim=64, causal=True)
CHUNK = PLAIN.replace(seq_q=10, **CAUSAL)


@pytest.mark.parametrize(
    ("problem", "asked", "found"),
    [
        (PLAIN, {"window": 100}, {}),
        (PLAIN, {"window": 99}, {"window": 99}),
        (CHUNK, {"window": 100}, {}),
        (CHUNK, {"window": 10}, {"window": 10}),
        (PLAIN, {"window_right": 99}, {"causal": False}),
        (PLAIN, {"window_right": 5000}, {"causal": False}),
        (PLAIN, {"window_right": 98}, {"window_right": 98}),
        (PLAIN, {"window": 10, "window_right": 500}, {"window": 10, "window_right": 99}),
        (CHUNK, {"window_right": 9}, {"causal": False}),
        (CHUNK, {"window_right": 8}, {"window_right": 8}),
    ],
    ids=str,
)
def test_a_window_that_hides_nothing_is_none(problem, asked, found):
    made = problem.replace(**asked)
    assert made == problem.replace(**found)
    assert [made.values[name] for name in found] == list(found.values())


@pytest.mark.parametrize(("seq_q", "seq_k", "alignment"), [*SIZES, (1, 300, "bottom_right"), (300, 1, "top_left")])
@pytest.mark.parametrize(("window", "right"), [(1, 0), (10, 30), (64, 0), (100, 100)])
def test_work_in_a_window(seq_q, seq_k, alignment, window, right):
    """Pairs as an area, within half a key per row of their number; bytes of what is seen; steps that the kernel takes."""
    problem = Attention.problem(
        seq_q=seq_q, seq_k=seq_k, head_dim=16, causal=True, alignment=alignment, window=window, window_right=right
    )
    offset = seq_k - seq_q if problem.alignment == "bottom_right" else 0
    rows, columns = np.arange(seq_q)[:, None] + offset, np.arange(seq_k)[None]
    seen = columns <= rows + (problem.window_right if problem.causal else seq_k)
    seen = seen & (columns > rows - problem.window) if problem.window else seen
    assert abs(problem.visible_pairs - seen.sum()) <= 0.5 * seq_q
    keys = seen.any(0)
    hidden = int(keys.argmax()) if keys.any() else seq_k
    total = sum(each.bytes for each in Attention.arrays(problem))
    assert problem.min_bytes == total - (hidden * 2 * 16 * 2 if problem.window else 0)
    both = problem.window + problem.window_right if problem.window else 0
    steps = tile_steps(64, 32, seq_q, seq_k, problem.causal, 1, "natural", offset + problem.window_right, both)
    for tile, taken in enumerate(steps):
        tiles = [seen[tile * 64 : tile * 64 + 64, start : start + 32].any() for start in range(0, seq_k, 32)]
        assert taken >= sum(tiles) or not problem.window


WINDOW = PLAIN.replace(window=10)
DESCRIBED = {
    "features": (
        WINDOW.replace(softcap=True, sinks=True, starts=True, lengths=True),
        "causal window=10 +softcap +sinks +starts +lengths",
        "_h1_window10_softcap_sinks_starts_lengths",
    ),
    "a window of two sides": (WINDOW.replace(window_right=5), "causal window=10 right=5", "_h1_window10_right5"),
    "packed": (PLAIN.replace(packed=5, lse=True), "packed=5 +lse", "_packed5_lse"),
    "paged": (
        CHUNK.replace(seq_k=192, page=64, lengths=True, lse=True),
        "page=64 +lengths +lse",
        "_page64_lengths_lse",
    ),
}
NAMES = {"window", "softcap", "sinks", "starts", "lengths", "packed", "page"}


@pytest.mark.parametrize("name", DESCRIBED)
def test_features_stand_in_descriptions_and_ids(name):
    problem, words, file_words = DESCRIBED[name]
    assert Attention.describe(problem).endswith(words)
    assert Attention.file_words(problem).endswith(file_words)
    assert problem_from_json(problem.to_json()) == problem
    assert Attention.similarity.weight(problem, problem) == 1.0
    assert bool(Attention.similarity.bucketed(problem.replace(seq_q=77)).is_varlen) == problem.is_varlen
    plain = problem.replace(**{each: type(problem.values[each])() for each in NAMES})
    assert not set(plain.to_json()) & NAMES
    others = [each for each, *_ in DESCRIBED.values()]
    for other in [each for each in (plain, PLAIN, WINDOW, PLAIN.replace(window=50), *others) if each != problem]:
        assert other.id != problem.id
        assert Attention.similarity.weight(problem, other) < 1.0
        assert Attention.similarity.distance(problem, other) > 0.0
    assert not (problem.is_varlen and Attention.similarity.loss_group(problem))


def test_the_model_knows_features():
    """A window costs what it leaves, a cap costs exponentials; what tells one problem from another reaches the policy."""
    spec, plain = arch_spec("sm_90"), Attention.problem(seq_q=8192, seq_k=8192, head_dim=64, heads=16, causal=True)
    schedule = space_for("sm_90", Attention).default(plain)
    facts = Attention.cost.expected(plain, schedule, spec)

    def estimate(**features):
        return Attention.cost.model(plain.replace(**features), schedule, facts, spec)

    assert estimate(window=512) < 0.5 * estimate(window=4096) < 0.5 * estimate()
    assert estimate(softcap=True) > estimate()
    assert plain.replace(window=512).flops < plain.flops / 7
    assert not Attention.similarity.loss_group(plain.replace(window=512))
