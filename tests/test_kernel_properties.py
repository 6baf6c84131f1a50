"""The attention kernel against a float64 reference, over problems and schedules drawn from the shipped search spaces.

The kernel runs unmodified in the interpreter, so what is shown here is that the algorithm is right for every schedule:
not that the compiler compiles it, which tests/test_build.py shows, nor that a GPU agrees, which measuring checks.
"""

from __future__ import annotations

import inspect
import itertools
import random
import zlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiledsched import data_files
from tiledsched.errors import SpaceError
from tiledsched.interpreter import InterpreterError, run_problem
from tiledsched.kernels import attention as attention_module
from tiledsched.kernels.attention import BLOCK_ORDERS, AttentionTemplate
from tiledsched.kernels.reference import attention_reference
from tiledsched.problem import Problem
from tiledsched.space import space_for

ARCHS = sorted(path.stem for path in (data_files.search_spaces() / "attention").glob("sm_*.toml"))
SPACES = {arch: space_for(arch) for arch in ARCHS}
NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TOLERANCE = {"float16": 1.5e-3, "bfloat16": 1e-2, "fp16 accumulator": 6e-3}
"""Largest relative Frobenius error of any tile of the output; normal inputs make about a quarter of it."""
TEMPLATE = AttentionTemplate()
DRAWN = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300
)


def make_inputs(problem, seed=0, *, amplitude=1.0):
    """q, k and v of normal numbers."""
    rng = np.random.default_rng(seed)
    queries = (problem.batch, problem.heads, problem.seq_q, problem.head_dim)
    keys = (problem.batch, problem.kv_heads, problem.seq_k, problem.head_dim)
    return tuple((rng.standard_normal(s) * amplitude).astype(NUMPY[problem.dtype]) for s in (queries, keys, keys))


def schedule_for(problem, arch="sm_90", **pinned):
    """The default schedule with some knobs changed, which the space must allow."""
    schedule = SPACES[arch].default(problem).replace(**pinned)
    SPACES[arch].validate(schedule, problem)
    return schedule


def check(problem, schedule, inputs=None, *, scale=None, sm_count=2, template=TEMPLATE):
    """Run the kernel and compare every tile of its output with the reference; return the output."""
    q, k, v = make_inputs(problem) if inputs is None else inputs
    scale = problem.head_dim**-0.5 if scale is None else scale
    out = run_problem(template, schedule, problem, q, k, v, scale, sm_count=sm_count)
    exact = attention_reference(np, q, k, v, causal=problem.causal, scale=scale)
    assert np.isfinite(out).all(), "NaN or infinity: unwritten elements, or padding that was used"
    tolerance = TOLERANCE["fp16 accumulator" if schedule["accum_mode"] == "fp16" else problem.dtype]
    for start in range(0, problem.seq_q, schedule.number("tile_m")):
        rows = slice(start, start + schedule.number("tile_m"))
        error = np.linalg.norm(out[:, :, rows].astype(np.float64) - exact[:, :, rows], axis=(2, 3))
        norm = np.linalg.norm(exact[:, :, rows], axis=(2, 3))
        assert (error <= tolerance * norm + 1e-30).all(), (
            f"rows from {start}: {np.max(error / np.maximum(norm, 1e-30))}"
        )
    return out


# ---- drawn problems and schedules ------------------------------------------------------------------------------------

LENGTHS = st.one_of(
    st.integers(1, 200), st.sampled_from([1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300])
)
HEAD_DIMS = st.one_of(st.sampled_from([8, 16, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256]), st.integers(1, 256))


@st.composite
def problems(draw, **fixed):
    group, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (2, 2)]))
    drawn = {
        "seq_q": draw(LENGTHS),
        "seq_k": draw(LENGTHS),
        "head_dim": draw(HEAD_DIMS),
        "dtype": draw(st.sampled_from(["float16", "bfloat16"])),
        "causal": draw(st.booleans()),
        "batch": draw(st.integers(1, 2)),
        "heads": group * kv_heads,
        "kv_heads": kv_heads,
    }
    return Problem(**drawn | fixed)


@st.composite
def cases(draw, **fixed):
    """A problem and a valid schedule for it on some arch."""
    problem, arch = draw(problems(**fixed)), draw(st.sampled_from(ARCHS))
    seed = draw(st.integers(0, 2**32 - 1))
    try:
        return problem, SPACES[arch].sample(problem, random.Random(seed), tries=500)
    except SpaceError:  # few schedules are left for wide heads on small parts: walk through them instead
        return problem, random.Random(seed).choice(list(SPACES[arch].schedules(problem)))


@DRAWN
@given(case=cases(), seed=st.integers(0, 1000), sm_count=st.integers(1, 8))
def test_output_matches_the_reference(case, seed, sm_count):
    problem, schedule = case
    check(problem, schedule, make_inputs(problem, seed), sm_count=sm_count)


@settings(DRAWN, max_examples=30)
@given(case=cases(batch=1, heads=2, kv_heads=1), log_scale=st.floats(-30, 2))
def test_any_positive_scale(case, log_scale):
    problem, schedule = case
    check(problem, schedule.replace(accum_mode="fp32"), scale=10.0**log_scale)


@settings(DRAWN, max_examples=30)
@given(case=cases(), seed=st.integers(0, 1000))
def test_only_tiles_and_accumulator_change_the_result(case, seed):
    """Every other knob decides where and when the same sums are done: it may not change one bit."""
    problem, schedule = case
    inputs = make_inputs(problem, seed)
    plain = schedule.replace(occupancy=1, num_worker_warps=4, num_ctas=1, latency_k=0, latency_v=0, opt_level=3,
                             loop_split=False, block_order="natural", persistent=False)  # fmt: skip
    outputs = [run_problem(TEMPLATE, each, problem, *inputs, sm_count=1) for each in (schedule, plain)]
    np.testing.assert_array_equal(*outputs)


# ---- every value of every knob ---------------------------------------------------------------------------------------

SWEPT = [
    Problem(seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, dtype=dtype, causal=causal, heads=2, kv_heads=1)
    for (seq_q, seq_k), head_dim, dtype, causal in itertools.product(
        [(100, 130), (130, 100)], (64, 40), ("float16", "bfloat16"), (True, False)
    )
]


@pytest.mark.parametrize(
    ("arch", "knob", "value"),
    [(arch, knob.name, value) for arch in ARCHS for knob in SPACES[arch].knobs.values() for value in knob.choices],
)
def test_every_value_of_every_knob(arch, knob, value):
    """Each is taken by some schedule of the space, and that schedule is right."""
    rng = random.Random(zlib.crc32(f"{arch} {knob} {value}".encode()))
    for problem in rng.sample(SWEPT, len(SWEPT)):
        valid = list(itertools.islice(SPACES[arch].schedules(problem, pinned={knob: value}), 2000))
        if valid:
            check(problem, rng.choice(valid))
            return
    pytest.fail(f"no schedule on {arch} has {knob} = {value!r}; the choice is dead")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_schedules(arch, causal, head_dim):
    problem = Problem(seq_q=150, seq_k=150, head_dim=head_dim, causal=causal)
    check(problem, SPACES[arch].default(problem))


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("seq_k", [1, 63, 64, 65, 130])
def test_lengths_around_the_tile(seq_q, seq_k, causal):
    problem = Problem(seq_q=seq_q, seq_k=seq_k, head_dim=16, causal=causal)
    split = causal or seq_k % 64 != 0
    check(problem, schedule_for(problem, tile_m=64, tile_n=64, loop_split=split))


@pytest.mark.parametrize("head_dim", [1, 3, 17, 24, 40, 72, 80, 96, 100, 160, 192, 255, 256])
def test_head_dims_that_are_padded(head_dim):
    problem = Problem(seq_q=70, seq_k=90, head_dim=head_dim, causal=True)
    check(problem, schedule_for(problem))


@pytest.mark.parametrize("order", BLOCK_ORDERS)
@pytest.mark.parametrize("sm_count", [1, 3, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (8, 1)])
def test_persistent_blocks_cover_the_work(order, sm_count, heads, kv_heads):
    problem = Problem(seq_q=200, seq_k=70, head_dim=16, causal=True, batch=2, heads=heads, kv_heads=kv_heads)
    schedule = schedule_for(problem, tile_m=64, persistent=True, block_order=order)
    work = 4 * heads * 2
    blocks = TEMPLATE.grid(schedule, problem, sm_count)[0]
    assert blocks == min(work, sm_count * schedule.number("occupancy"))
    check(problem, schedule, sm_count=sm_count)


def test_strided_and_shared_inputs():
    """Arrays as frameworks hand them over: heads inside rows, keys expanded from one, a slice of a larger cache."""
    problem = Problem(seq_q=70, seq_k=90, head_dim=40, batch=2, heads=2, kv_heads=2)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 70, 2, 40)).astype(np.float16).transpose(0, 2, 1, 3)
    k = np.broadcast_to(rng.standard_normal((1, 1, 90, 40)).astype(np.float16), (2, 2, 90, 40))
    v = rng.standard_normal((2, 2, 128, 64)).astype(np.float16)[:, :, 10:100, 24:]
    check(problem, schedule_for(problem), (q, k, v))


# ---- adversarial inputs ----------------------------------------------------------------------------------------------


def one_hot_inputs(problem, seed=0):
    """Inputs for which softmax picks exactly one key per row, and the output that makes: one row of v.

    Keys are random signs, nearly orthogonal; a query is four times the key it looks for, so that with scale 1 every
    other key is 2**-100 or less of it.
    """
    rng = np.random.default_rng(seed)
    _, k, v = make_inputs(problem, seed)
    k = np.sign(k.astype(np.float32)).astype(k.dtype)
    shape = (problem.batch, problem.heads, problem.seq_q)
    reach = np.minimum(np.arange(problem.seq_q) + 1, problem.seq_k) if problem.causal else problem.seq_k
    chosen = np.broadcast_to(rng.integers(0, reach, shape), shape)
    batch = np.arange(problem.batch)[:, None, None]
    kv_head = (np.arange(problem.heads) // problem.group)[None, :, None]
    q = (k[batch, kv_head, chosen] * np.float32(4)).astype(k.dtype)
    return (q, k, v), v[batch, kv_head, chosen]


@settings(DRAWN, max_examples=40)
@given(case=cases(head_dim=128), seed=st.integers(0, 1000))
def test_one_hot_rows_give_that_row_exactly(case, seed):
    problem, schedule = case
    inputs, expected = one_hot_inputs(problem, seed)
    out = run_problem(TEMPLATE, schedule, problem, *inputs, 1.0, sm_count=2)
    np.testing.assert_array_equal(out, expected)


@settings(DRAWN, max_examples=30)
@given(case=cases(head_dim=64, batch=1))
def test_very_negative_scores(case):
    """Every score is -57600 * scale, far below the zeros of padded keys: without its mask the padding would win."""
    problem, schedule = case
    q, k, v = make_inputs(problem)
    check(problem, schedule.replace(accum_mode="fp32"), (np.full_like(q, -30), np.full_like(k, 30), v))


@settings(DRAWN, max_examples=30)
@given(case=cases(batch=1), seed=st.integers(0, 1000))
def test_large_magnitudes(case, seed):
    """Scores beyond float16's range; values near its end."""
    problem, schedule = case
    q, k, v = make_inputs(problem, seed, amplitude=60.0)
    q[..., 0], k[..., 0] = 300, 300
    values = (v.astype(np.float32) * 200).clip(-60000, 60000).astype(v.dtype)
    check(problem, schedule.replace(accum_mode="fp32"), (q, k, values), scale=1e-3)


@settings(DRAWN, max_examples=20)
@given(case=cases(batch=1))
def test_zero_queries_average_the_values(case):
    problem, schedule = case
    q, k, v = make_inputs(problem)
    check(problem, schedule, (np.zeros_like(q), k, v))


@settings(DRAWN, max_examples=10)
@given(case=cases(batch=1))
def test_zero_values_give_zeros(case):
    problem, schedule = case
    q, k, v = make_inputs(problem)
    assert not check(problem, schedule, (q, k, np.zeros_like(v))).any()


# ---- these tests can fail --------------------------------------------------------------------------------------------

KEYS = "order=(0, 1, 3, 2),"
ZERO = "padding_mode=ct.PaddingMode.ZERO"
MUTATIONS = {
    "causal mask one short": ("columns <= rows", "columns < rows"),
    "causal mask one long": ("columns <= rows", "columns <= rows + 1"),
    "column mask one long": ("columns < K.shape[2]", "columns <= K.shape[2]"),
    "no column mask": ("not EVEN", "False"),
    "no mask on scores": ("scores = ct.where(visible, scores, -math.inf)", "scores = scores"),
    "accumulator not rescaled": ("acc = acc * alpha.astype(accum_dtype)", "acc = acc"),
    "row sum not rescaled": ("row_sum = row_sum * alpha +", "row_sum = row_sum +"),
    "row maximum not kept": ("return new_max, row_sum, acc", "return row_max, row_sum, acc"),
    "row maximum starts at zero": ("-math.inf, dtype=ct.float32", "0.0, dtype=ct.float32"),
    "scores not scaled": ("ct.exp2(scores * scale_log2 - new_max", "ct.exp2(scores - new_max"),
    "output not normalized": ("ct.truediv(acc.astype(ct.float32), row_sum,", "ct.truediv(acc.astype(ct.float32), 1.0,"),
    "wrong key/value head": ("kv_head = head // GROUP", "kv_head = head % K.shape[1]"),
    "unmasked loop starts late": ("range(0, first_masked)", "range(1, first_masked)"),
    "masked loop starts late": ("range(first_masked, last)", "range(first_masked + 1, last)"),
    "loop ends early": ("range(0, last)", "range(0, last - 1)"),
    "causal tiles unmasked": ("min(tile * TILE_M, seq_k) //", "min((tile + 1) * TILE_M, seq_k) //"),
    "ragged tile unmasked": ("first_masked = seq_k // TILE_N", "first_masked = ct.cdiv(seq_k, TILE_N)"),
    "causal end too early": ("min((tile + 1) * TILE_M, seq_k)", "min(tile * TILE_M + 1, seq_k)"),
    "first value tile only": ("(batch, kv_head, j, 0)", "(batch, kv_head, 0, 0)"),
    "first key tile only": ("(batch, kv_head, 0, j)", "(batch, kv_head, 0, 0)"),
    "query of another head": ("ct.load(Q, (batch, head, tile, 0)", "ct.load(Q, (batch, kv_head, tile, 0)"),
    "output of another head": ("ct.store(Out, (batch, head, tile, 0)", "ct.store(Out, (batch, kv_head, tile, 0)"),
    "batch and head exchanged": ("batch_head % heads, batch_head // heads", "batch_head // heads, batch_head % heads"),
    "persistent blocks skip work": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):"),
    "reversed order off by one": ("query_tiles - 1 - tile", "query_tiles - tile"),
    "heads-fastest order wrong": ("tile = work // (heads * batches)", "tile = work // heads"),
    "rows counted from zero": ("rows = tile * TILE_M +", "rows = 0 * TILE_M +"),
    "columns counted from zero": ("columns = j * TILE_N +", "columns = 0 * TILE_N +"),
    "keys' padding undetermined": (f"{KEYS}\n                {ZERO},", KEYS),
    "values' padding undetermined": (f"(1, 1, TILE_N, TILE_D), {ZERO},", "(1, 1, TILE_N, TILE_D),"),
    "queries' padding undetermined": (f"(1, 1, TILE_M, TILE_D), {ZERO})", "(1, 1, TILE_M, TILE_D))"),
    "always a float16 accumulator": ("ct.float16 if FP16_ACCUM else ct.float32", "ct.float16"),
    "probabilities rounded to integers": ("p.astype(V.dtype)", "p.astype(ct.int32).astype(V.dtype)"),
    "output not cast": ("out.astype(Out.dtype)", "out"),
}  # fmt: skip


def mutated(old, new):
    """The attention template over a copy of the kernel's module with `old` replaced by `new`."""
    source = inspect.getsource(attention_module)
    assert old in source, f"the kernel no longer contains {old!r}: rewrite this mutation"
    source = source.replace(old, new)
    namespace = {"__name__": "mutated_attention"}
    exec(compile(source, "mutated_attention", "exec"), namespace)
    return namespace["AttentionTemplate"]()


def battery(template):
    """A dozen cases that between them must notice every mutation above."""
    causal = Problem(seq_q=200, seq_k=170, head_dim=40, causal=True, batch=2, heads=4, kv_heads=2)
    ragged = causal.replace(causal=False, batch=1)
    tiles: dict = {"tile_m": 64, "tile_n": 64}
    for problem, knobs in (
        (causal, {}),
        (causal, {"loop_split": True}),
        (causal, {"loop_split": True, "block_order": "reversed", "persistent": True}),
        (causal, {"block_order": "heads_fastest", "persistent": True}),
        (causal.replace(seq_k=40), {"loop_split": True}),
        (causal, {"tile_m": 128, "tile_n": 32}),
        (ragged, {}),
        (ragged, {"loop_split": True}),
        (ragged.replace(seq_k=192, dtype="bfloat16"), {}),
    ):
        check(problem, schedule_for(problem, **tiles | knobs), template=template)
    problem = causal.replace(head_dim=64)
    schedule = schedule_for(problem, **tiles)
    inputs, expected = one_hot_inputs(problem)
    np.testing.assert_array_equal(run_problem(template, schedule, problem, *inputs, 1.0), expected)
    q, k, v = make_inputs(problem)
    check(problem, schedule, (np.full_like(q, -30), np.full_like(k, 30), v), template=template)
    check(problem, schedule, (np.full_like(q, 60), np.full_like(k, 60), v), scale=1e-3, template=template)


def test_the_battery_passes_the_kernel():
    battery(TEMPLATE)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name):
    template = mutated(*MUTATIONS[name])
    with pytest.raises((AssertionError, InterpreterError)):
        battery(template)
