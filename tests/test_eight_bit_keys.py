"""Keys and values in 8 bits: the kernels in the interpreter against float64, faults that the same cases notice, and the front."""

from __future__ import annotations

import pytest
from kernel_checks import SPACES, schedule_for
from test_kernel_mutations import mutated

from tiledsched.checking.interpreted import check_schedule
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import ProblemError
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.similarity import Q8_LONG_CAUSAL, Q8_LONG_TILE, Q8_TILE
from tiledsched.serve.lookup import LookupTable

DECODING = Attention.problem(
    seq_q=1, seq_k=100, head_dim=64, heads=8, kv_heads=4, dtype="bfloat16", kv8="head", lse=True
)
ROWS = DECODING.replace(seq_q=20, seq_k=90, causal=True, alignment="bottom_right")
PAGED = DECODING.replace(seq_k=192, batch=3, lengths=True, page=16, kv8="page")
PACKED = {"tile_m": 16, "tile_n": 32, "pack_gqa": True}
SPLIT = {**PACKED, "kv_splits": 2, "kv_combine": "launch"}
QUERIES = Attention.problem(
    seq_q=100, seq_k=144, head_dim=64, heads=4, kv_heads=2, dtype="bfloat16", kv8="head", q8=True, lse=True
)
TILES = {"tile_m": 64, "tile_n": 32}
CASES = {
    "one key": (DECODING.replace(seq_k=1), PACKED),
    "a tile and one more": (DECODING.replace(seq_k=33, kv8="tensor", dtype="float16"), PACKED),
    "shares": (DECODING, SPLIT),
    "shares counted": (DECODING, {**PACKED, "kv_splits": 2, "tma_loads": False}),
    "shares in order": (DECODING, {**PACKED, "kv_splits": 2, "kv_combine": "in_order"}),
    "two tiles a step": (DECODING.replace(kv8="tensor"), {**PACKED, "kv_subtiles": 2}),
    "wide heads": (DECODING.replace(head_dim=128, value_dim=96), PACKED),
    "narrow heads": (DECODING.replace(head_dim=32), PACKED),
    "rows": (ROWS.replace(window=30, sinks=True), {"tile_m": 64, "tile_n": 32, "q_subtiles": 2}),
    "late stores": (
        ROWS.replace(softcap=True),
        {"tile_m": 64, "tile_n": 32, "persistent": "strided", "store_late": True},
    ),
    "padding": (ROWS.replace(batch=3, starts=True, lengths=True, kv8="tensor"), {"tile_m": 64, "tile_n": 32}),
    "pages of a head": (PAGED.replace(kv8="head"), SPLIT),
    "pages in a tile": (PAGED, {**PACKED, "page_lookup": "scalar"}),
    "a tile in a page": (PAGED.replace(page=64, softcap=True), SPLIT),
    "two tiles of pages": (PAGED.replace(dtype="float16"), {**PACKED, "kv_subtiles": 2}),
    "a window of pages": (PAGED.replace(causal=True, alignment="bottom_right", window=40), PACKED),
    "packed sequences": (ROWS.replace(seq_q=60, packed=4), {"tile_m": 16, "tile_n": 32}),
    "packed rows over pages": (PAGED.replace(seq_q=40, batch=1, packed=3), {"tile_m": 64, "tile_n": 32}),
    "queries": (QUERIES, TILES),
    "queries, one scale": (
        QUERIES.replace(kv8="tensor", causal=True, alignment="bottom_right"),
        {**TILES, "loop_split": True},
    ),
    "queries of wide heads": (
        QUERIES.replace(head_dim=128, value_dim=96, seq_k=208),
        {"tile_m": 64, "tile_n": 64, "kv_subtiles": 2, "loop_split": True},
    ),
    "queries in a window": (
        QUERIES.replace(seq_q=144, causal=True, window=40, sinks=True),
        {**TILES, "qk_ahead": True},
    ),
    "queries, late stores": (
        QUERIES.replace(batch=3, lengths=True, head_dim=80),
        {**TILES, "persistent": "strided", "store_late": True},
    ),
    "queries of long prompts": (
        QUERIES.replace(head_dim=128, seq_q=129, seq_k=272),
        Q8_LONG_TILE | {"loop_split": True},
    ),
    "queries of long prompts, causal": (
        QUERIES.replace(head_dim=128, seq_q=257, seq_k=144, causal=True, alignment="bottom_right"),
        Q8_LONG_CAUSAL | {"loop_split": True},
    ),
    "queries, shares": (QUERIES, {**TILES, "kv_splits": 2, "kv_combine": "launch"}),
    "queries, two tiles": (
        QUERIES.replace(seq_q=150, head_dim=16),
        {**TILES, "q_subtiles": 2, "unroll": 2, "persistent": "strided"},
    ),
}


def is_right(problem, knobs, kernel=Attention):
    schedule = schedule_for(problem, forced=True, **knobs)
    return check_schedule(kernel, problem, schedule, kinds=())


@pytest.mark.parametrize("case", CASES)
def test_against_float64(case):
    passed, worst, message = is_right(*CASES[case])
    assert passed, message
    assert 0.0 < worst < 1.0


FAULTS = {
    "no scale of queries and keys": (
        "own_scale(features.KScale, kv_head, const)\n    chains",
        "1.0\n    chains",
        "queries",
    ),
    "no scale of the values of queries": (
        "scaled(chain.acc, own_scale(features.VScale, kv_head, const))",
        "chain.acc",
        "queries",
    ),
    "queries with the scale of the first head": (" or const.Q8 == PER_HEAD", "", "queries"),
    "queries with the scale of each head": ("or const.Q8 == PER_HEAD", "or const.Q8 > 0", "queries, one scale"),
    "the power of two left in the output": (
        "row_sum = add_rows(chain.row_sum * alpha, p)",
        "row_sum = add_rows(chain.row_sum * alpha, tuple(each * 0.00390625 for each in ct.static_iter(p)))",
        "queries",
    ),
    "the power of two left in the log-sum-exp": (
        "(chain.row_max + ct.log2",
        "(chain.row_max + 8.0 + ct.log2",
        "queries",
    ),
    "probabilities beyond 8 bits": ("step_max - EIGHT_BIT_POWER", "step_max - 2.0 * EIGHT_BIT_POWER", "queries"),
    "no scale of values": ("found * scales.values", "found", "shares"),
    "no scale of keys": ("factor * scales.keys", "factor", "shares"),
    "the scale of the first head": ("kv_head if const.KV8 == PER_HEAD or const.Q8 == PER_HEAD else 0", "0", "shares"),
    "the scale of each head as one": (
        "kv_head if const.KV8 == PER_HEAD or const.Q8 == PER_HEAD else 0",
        "kv_head",
        "two tiles a step",
    ),
    "queries not brought back": ("factor = ct.exp2(power)", "factor = 1.0", "shares"),
    "planes of one byte": ("words >> (8 * place)", "words >> 8", "shares"),
    "the first half of each word": ("words >> (16 * place)", "words", "wide heads"),
    "queries of one plane": ("ct.extract(q, (0, 0, place, 0)", "ct.extract(q, (0, 0, 0, 0)", "wide heads"),
    "columns exchanged": ("(columns[0], columns[1])", "(columns[1], columns[0])", "wide heads"),
    "no scale of pages of keys": (
        "scores * scales_of_pages(keys.eight.keys, keys, j, const)",
        "scores",
        "a tile in a page",
    ),
    "scales of keys for values": (
        "scales_of_pages(keys.eight.values",
        "scales_of_pages(keys.eight.keys",
        "pages in a tile",
    ),
    "pages not told apart": ("each / largest", "each / each", "pages in a tile"),
    "the largest scale left out": ("added[n] * largest", "added[n]", "a tile in a page"),
    "scales of the first tile": ("p[t] * factors[t]", "p[t] * factors[0]", "two tiles of pages"),
    "every page's scale for each key": (
        "ct.broadcast_to(found.reshape((shape[0], 1)), shape)",
        "ct.broadcast_to(found.reshape((1, shape[0])), (shape[1], shape[0]))",
        "pages in a tile",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault):
    old, new, case = FAULTS[fault]
    assert not is_right(*CASES[case], kernel=mutated(old, new))[0]


def test_what_is_refused():
    make = {"seq_q": 1, "seq_k": 64, "head_dim": 64}
    with pytest.raises(ProblemError, match="needs keys in pages"):
        Attention.problem(**make, kv8="page")
    with pytest.raises(ProblemError, match="multiple of 4"):
        Attention.problem(**{**make, "head_dim": 65}, kv8="head")
    with pytest.raises(ProblemError, match=r"kv8 must be one of .*tensor"):
        Attention.problem(**make, kv8="row")
    for changed, words in (
        ({"kv8": ""}, "need kv8 = 'tensor' or 'head'"),
        ({"dtype": "float16"}, "dtype = 'bfloat16', which is the type of the output"),
        ({"seq_q": 64}, "for more than 64 rows, got 64"),
        ({"seq_k": 100, "softcap": True}, "16 bytes, .* got seq_k = 100, softcap = True"),
        ({"value_dim": 40}, "got value_dim = 40"),
        ({"page": 16, "lengths": True}, "got page = 16"),
    ):
        with pytest.raises(ProblemError, match=words):
            QUERIES.replace(**changed)
    broken = SPACES["sm_90"].unworkable(schedule_for(QUERIES).replace(lazy_rescale=True), QUERIES)
    assert "leave 8 bits" in str(broken)


def test_other_problems_are_as_before():
    plain = Attention.problem(seq_q=1, seq_k=64, head_dim=64)
    assert "kv8" not in plain.to_json()
    assert plain.replace(kv8="head").id != plain.id
    assert not SPACES["sm_90"].violations(SPACES["sm_90"].default(plain), plain)
    narrow = plain.replace(seq_q=80, kv8="head", dtype="bfloat16")
    schedule = schedule_for(narrow)
    assert "q8" not in narrow.to_json()
    assert "Q8" not in Attention.spill_class(narrow, schedule)[-1]
    assert Attention.spill_class(narrow.replace(q8=True), schedule)[-1]["Q8"] == 2


@pytest.mark.parametrize("keys", [80, 208, 8208])
def test_lengths_that_stand_for_others_are_lengths_of_queries_in_8_bits(keys):
    p = QUERIES.replace(seq_q=max(80, keys), seq_k=keys)
    assert abs(Attention.similarity.bucketed(p).seq_k / keys - 1) < 0.13
    assert Attention.representative(p.replace(seq_q=8208, causal=True, window=5001)).q8


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, Q8_LONG_TILE | {"persistent": "no", "block_order": "natural", "loop_split": False}),
        ({"seq_k": 8208}, Q8_LONG_TILE | {"loop_split": True}),
        ({"causal": True}, Q8_LONG_CAUSAL | {"loop_split": True}),
        ({"seq_q": 4096, "seq_k": 4096}, Q8_TILE),  # as many keys as lie between what was timed
        ({"head_dim": 64}, Q8_TILE | {"qk_ahead": True}),
        ({"head_dim": 64, "seq_q": 2048, "seq_k": 2048}, Q8_TILE | {"qk_ahead": False}),
        ({"heads": 1, "kv_heads": 1}, Q8_TILE),  # 128 blocks, where none was timed with so few
        ({"causal": True, "window": 500}, Q8_TILE | {"persistent": "no"}),
    ],
)
def test_what_serves_long_prompts_in_8_bits_untuned(changed, wanted):
    p = QUERIES.replace(**{"seq_q": 8192, "seq_k": 8192, "head_dim": 128, "heads": 32} | changed)
    served = LookupTable([], Attention).resolve(p, "sm_90").schedule
    assert {name: served[name] for name in wanted} == wanted
    assert not SPACES["sm_90"].violations(served, p)


def test_a_prompt_in_8_bits_is_modelled_as_faster():
    wide = Attention.problem(seq_q=4096, seq_k=4096, head_dim=128, heads=16, dtype="bfloat16")
    times = []
    for p in (wide.replace(kv8="head", q8=True), wide, wide.replace(kv8="head")):
        schedule = SPACES["sm_90"].default(p).replace(tile_n=128, occupancy=2)
        facts = Attention.cost.expected(p, schedule, arch_spec("sm_90"))
        times.append(Attention.cost.model(p, schedule, facts, arch_spec("sm_90")))
    assert times == sorted(times)


def test_half_the_bytes():
    wide = DECODING.replace(kv8="", seq_k=8192, head_dim=128, batch=16)
    assert wide.replace(kv8="head").min_bytes < 0.51 * wide.min_bytes
