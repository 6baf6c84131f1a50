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
from tiledsched.kernels import attention_tiles
from tiledsched.kernels.attention import AttentionTemplate
from tiledsched.kernels.attention_tiles import BLOCK_ORDERS, SWIZZLE_PAIRS, Constants, coordinates, snake
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
# With fewer than four columns a tile of averages may be near zero as a whole, and its relative error anything.
HEAD_DIMS = st.one_of(st.sampled_from([8, 16, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256]), st.integers(4, 256))


@st.composite
def problems(draw, **fixed):
    group, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 1), (4, 1), (2, 2), (2, 5)]))
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
def test_which_knobs_change_the_result(case, seed):
    """Tiles, accumulator, direction, key subtiles, division and lazy rescaling change what is added and in what order.

    Every other knob decides where and when the same sums are done: it may not change one bit.
    """
    problem, schedule = case
    inputs = make_inputs(problem, seed)
    sawtooth = schedule["kv_direction"] == "sawtooth"  # every other block turns round, so that its rows matter
    plain = schedule.replace(occupancy=1, num_worker_warps=4, num_ctas=1, latency_k=0, latency_v=0, opt_level=3,
                             loop_split=False, block_order="natural", persistent="no", qk_ahead=False,
                             q_subtiles=schedule["q_subtiles"] if sawtooth else 1,
                             k_load="order", tma_loads=True, tma_store=True, check_bounds=True)  # fmt: skip
    outputs = [run_problem(TEMPLATE, each, problem, *inputs, sm_count=1) for each in (schedule, plain)]
    np.testing.assert_array_equal(*outputs)


# ---- every value of every knob ---------------------------------------------------------------------------------------

SWEPT = [
    Problem(seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, dtype=dtype, causal=causal, heads=2, kv_heads=1)
    for (seq_q, seq_k), head_dim, dtype, causal in itertools.product(
        [(100, 130), (130, 100), (256, 128)], (64, 40), ("float16", "bfloat16"), (True, False)
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
@pytest.mark.parametrize("mode", ["strided", "snake"])
def test_persistent_blocks_cover_the_work(order, sm_count, heads, kv_heads, mode):
    problem = Problem(seq_q=200, seq_k=70, head_dim=16, causal=True, batch=2, heads=heads, kv_heads=kv_heads)
    schedule = schedule_for(problem, tile_m=64, persistent=mode, block_order=order)
    work = 4 * heads * 2
    blocks = TEMPLATE.grid(schedule, problem, sm_count)[0]
    assert blocks == min(work, sm_count * schedule.number("occupancy"))
    check(problem, schedule, sm_count=sm_count)


def walk_order(order, *, causal, pieces, heads, batches):
    """(query tile, head, batch) of every piece of work, in order."""
    problem = Problem(seq_q=64, seq_k=64, head_dim=16, causal=causal)
    schedule = schedule_for(problem, block_order="natural").replace(block_order=order)
    const = Constants(*TEMPLATE.constants(schedule, problem))
    return [coordinates(work, pieces, heads, batches, const) for work in range(pieces * heads * batches)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("order", BLOCK_ORDERS)
@pytest.mark.parametrize(("heads", "batches"), [(1, 1), (8, 1), (3, 5), (8, 2), (5, 4)])
def test_every_order_takes_every_tile_once(order, heads, batches, causal):
    taken = walk_order(order, causal=causal, pieces=3, heads=heads, batches=batches)
    assert sorted(taken) == list(itertools.product(range(3), range(heads), range(batches)))


def test_a_swizzled_order_stays_with_eight_heads_and_takes_the_longest_tiles_first():
    taken = walk_order("swizzled", causal=True, pieces=3, heads=5, batches=2)
    first, rest = taken[: 3 * SWIZZLE_PAIRS], taken[3 * SWIZZLE_PAIRS :]
    assert {(batch, head) for _, head, batch in first} == {(0, head) for head in range(5)} | {(1, 0), (1, 1), (1, 2)}
    assert [tile for tile, _, _ in first] == [2] * 8 + [1] * 8 + [0] * 8
    assert [tile for tile, _, _ in rest] == [2, 2, 1, 1, 0, 0]
    assert walk_order("swizzled", causal=False, pieces=3, heads=5, batches=2)[0] == (0, 0, 0)


def test_a_snake_turns_round_after_each_lap():
    assert [[snake(block, 4, lap) for block in range(4)] for lap in range(3)] == [
        [0, 1, 2, 3],
        [3, 2, 1, 0],
        [0, 1, 2, 3],
    ]


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

MUTATIONS = {
    "causal mask one short": ("columns <= rows", "columns < rows"),
    "causal mask one long": ("columns <= rows", "columns <= rows + 1"),
    "column mask one long": ("columns < keys.K.shape[2]", "columns <= keys.K.shape[2]"),
    "no column mask": ("not const.EVEN", "False"),
    "no mask on scores": ("scores = ct.where(visible, scores, -math.inf)", "scores = scores"),
    "accumulator not rescaled": ("acc = chain.acc * alpha.astype(chain.acc.dtype)", "acc = chain.acc"),
    "row sum not rescaled": ("add_rows(chain.row_sum * alpha, p)", "add_rows(chain.row_sum, p)"),
    "row maximum not kept": ("return Chain(acc, new_max, row_sum), p", "return Chain(acc, chain.row_max, row_sum), p"),
    "row maximum starts at zero": ("start = -math.inf if", "start = 0.0 if"),
    "scores not scaled": ("ct.exp2(s * scale_log2 - new_max", "ct.exp2(s - new_max"),
    "output not normalized": ("ct.truediv(acc, row_sum, flush", "ct.truediv(acc, 1.0, flush"),
    "wrong key/value head": ("kv_head = head // const.GROUP", "kv_head = head % K.shape[1]"),
    "first loop starts late": ("range(boundary)", "range(1, boundary)"),
    "second loop starts late": ("range(boundary, end)", "range(boundary + 1, end)"),
    "loop ends early": ("range(end)", "range(end - 1)"),
    "causal tiles unmasked": ("min(piece * block_m, seq_k) //", "min((piece + 1) * block_m, seq_k) //"),
    "ragged tile unmasked": ("first_masked = seq_k // step_n", "first_masked = ct.cdiv(seq_k, step_n)"),
    "causal end too early": ("min((piece + 1) * block_m, seq_k)", "min(piece * block_m + 1, seq_k)"),
    "first value tile only": ("load(keys.V, (keys.batch, keys.kv_head, j, 0)", "load(keys.V, (keys.batch, keys.kv_head, 0, 0)"),
    "first key tile only": ("(keys.batch, keys.kv_head, 0, j)", "(keys.batch, keys.kv_head, 0, 0)"),
    "query of another head": ("load(Q, (batch, head, tile, 0)", "load(Q, (batch, kv_head, tile, 0)"),
    "output of another head": ("ct.store(Out, (batch, head, ", "ct.store(Out, (batch, kv_head, "),
    "batch and head exchanged": ("batch_head % heads, batch_head // heads", "batch_head // heads, batch_head % heads"),
    "persistent blocks skip work": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):"),
    "reversed order off by one": ("pieces - 1 - piece", "pieces - piece"),
    "heads-fastest order wrong": ("piece = work // pairs", "piece = work // heads"),
    "rows counted from zero": ("return tile * const.TILE_M +", "return 0 * const.TILE_M +"),
    "columns counted from zero": ("columns = j * const.TILE_N +", "columns = 0 * const.TILE_N +"),
    "padding undetermined": ("ct.PaddingMode.ZERO if const.CHECK_BOUNDS else ", ""),
    "always a float16 accumulator": ("ct.float16 if const.FP16_ACCUM else ct.float32", "ct.float16"),
    "probabilities rounded to integers": ("p[t].astype(values[t].dtype)", "p[t].astype(ct.int32).astype(values[t].dtype)"),
    "output not cast": ("out.astype(Out.dtype)", "out"),
    "snake's last lap missing": ("snake(ct.bid(0), blocks, total // blocks)", "blocks"),
    "snake's last lap too long": ("total - snake(ct.bid(0), blocks, total // blocks)", "total"),
    "snake turns short": ("(blocks - 1 - 2 * block)", "(blocks - 2 - 2 * block)"),
    "swizzled groups overlap": ("(SWIZZLE_PAIRS * pieces) * SWIZZLE_PAIRS", "(SWIZZLE_PAIRS * pieces)"),
    "last swizzled group too wide": ("width = min(SWIZZLE_PAIRS, pairs - first)", "width = SWIZZLE_PAIRS"),
    "swizzled tile counted over heads": ("% (SWIZZLE_PAIRS * pieces) // width", "% (SWIZZLE_PAIRS * pieces) // pairs"),
    "backward walk off by one": ("i = keys.steps - 1 - i\n", "i = keys.steps - i\n"),
    "backward walk is masked forward": ("keys.steps - first_masked if backward else first_masked", "first_masked"),
    "backward walk masks the wrong loop": ("backward = const.KV_DIRECTION == BACKWARD", "backward = False"),
    "sawtooth stands still": ("(keys.steps - 1 - 2 * i)", "(keys.steps - 1 - i)"),
    "sawtooth turns everywhere by two": ("piece % 2)", "piece % 2 * 2)"),
    "unseen steps make NaN": ("-math.inf if const.KV_DIRECTION == FORWARD else LOWEST", "-math.inf"),
    "lowest maximum too high": ("LOWEST = -3.4e38", "LOWEST = -10.0"),
    "second query tile is the first": ("piece * const.Q_SUBTILES + s", "piece * const.Q_SUBTILES"),
    "second query tile beyond the end": ("tile = min(tile, ct.cdiv(seq_q, const.TILE_M) - 1)", "tile = tile"),
    "second key tile is the first": ("i * const.KV_SUBTILES + t", "i * const.KV_SUBTILES"),
    "second key tile beyond the end": ("j if const.KV_SUBTILES == 1 or const.EVEN else", "j if True else"),
    "maximum of the first key tile only": ("step_max = ct.maximum(step_max, ", "step_max = ct.minimum(step_max, "),
    "scores ahead of themselves": ("products(queries, keys, i + 1, const)", "products(queries, keys, i, const)"),
    "last step ahead not folded": ("fold(rows, keys, end, chains,", "fold(rows, keys, end - 1, chains,"),
    "last step ahead unmasked": ("True, scale_log2, const)\n    return", "False, scale_log2, const)\n    return"),
    "boundary beyond the last step": ("boundary = min(boundary, end)", "boundary = boundary"),
    "keys not transposed": ("k = ct.permute(k, (1, 0))", "k = k"),
    "bounds never checked": ("check_bounds=const.CHECK_BOUNDS", "check_bounds=False"),
    "exact division by something else": ("out = ct.truediv(acc, row_sum)", "out = ct.truediv(acc, row_sum + 1)"),
    "lazy rescaling never": ("> RESCALE_ABOVE", "> math.inf"),
    "lazy rescaling forgets the sum": ("            row_sum = row_sum * alpha\n", "            row_sum = row_sum\n"),
    "lazy rescaling forgets the output": ("acc = acc * alpha.astype(acc.dtype)", "acc = acc"),
    "lazy rescaling takes the new maximum": ("new_max = chain.row_max", "new_max = new_max"),
}  # fmt: skip


def mutated(old, new):
    """The attention template over a copy of the kernel's module with `old` replaced by `new`."""
    source = inspect.getsource(attention_tiles)
    assert old in source, f"the kernel no longer contains {old!r}: rewrite this mutation"
    source = source.replace(old, new)
    namespace = {"__name__": attention_tiles.__name__}
    exec(compile(source, "mutated_attention", "exec"), namespace)

    class Mutated(AttentionTemplate):
        function = staticmethod(namespace["attention"])

    return Mutated()


def battery(template):
    """Cases that between them must notice every mutation above."""
    causal = Problem(seq_q=200, seq_k=170, head_dim=40, causal=True, batch=2, heads=4, kv_heads=2)
    ragged = causal.replace(causal=False, batch=1)
    even = Problem(seq_q=256, seq_k=128, head_dim=64, causal=True, heads=2)
    many = Problem(seq_q=130, seq_k=70, head_dim=16, causal=True, batch=3, heads=3, kv_heads=3)
    tiles: dict = {"tile_m": 64, "tile_n": 64}
    for problem, knobs in (
        (causal, {}),
        (causal, {"loop_split": True}),
        (causal, {"loop_split": True, "block_order": "reversed", "persistent": "strided"}),
        (causal, {"block_order": "heads_fastest", "persistent": "strided"}),
        (causal.replace(seq_k=40), {"loop_split": True}),
        (causal, {"tile_m": 128, "tile_n": 32}),
        (ragged, {}),
        (ragged, {"loop_split": True}),
        (ragged.replace(seq_k=192, dtype="bfloat16"), {}),
        (many, {"persistent": "snake", "block_order": "heads_fastest"}),
        (many, {"block_order": "swizzled"}),
        (causal, {"kv_direction": "backward", "tile_m": 128, "tile_n": 32}),
        (causal, {"kv_direction": "backward", "loop_split": True}),
        (causal, {"kv_direction": "sawtooth"}),
        (causal.replace(seq_q=130), {"q_subtiles": 2}),
        (ragged, {"kv_subtiles": 2}),
        (ragged.replace(seq_k=40), {"kv_subtiles": 2}),
        (causal, {"qk_ahead": True}),
        (causal.replace(seq_k=64), {"qk_ahead": True, "loop_split": True}),
        (causal, {"k_load": "permute"}),
        (even, {"check_bounds": False}),
        (ragged, {"division": "ieee"}),
        (causal, {"lazy_rescale": True}),
    ):
        check(problem, schedule_for(problem, **tiles | knobs), template=template)
    problem = causal.replace(head_dim=64)
    schedule = schedule_for(problem, **tiles)
    inputs, expected = one_hot_inputs(problem)
    np.testing.assert_array_equal(run_problem(template, schedule, problem, *inputs, 1.0), expected)
    q, k, v = make_inputs(problem)
    check(problem, schedule, (np.full_like(q, -30), np.full_like(k, 30), v), template=template)
    check(problem, schedule, (np.full_like(q, 60), np.full_like(k, 60), v), scale=1e-3, template=template)
    backward = schedule_for(problem, tile_m=128, tile_n=32, kv_direction="backward")
    check(problem, backward, (np.full_like(q, -30), np.full_like(k, 30), v), template=template)
    lazy = schedule_for(problem, **tiles, lazy_rescale=True)
    check(problem, lazy, (q * 8, k * 8, v), template=template)  # maxima that grow by more than 2**8, row by row


def test_the_battery_passes_the_kernel():
    battery(TEMPLATE)


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name):
    template = mutated(*MUTATIONS[name])
    with pytest.raises((AssertionError, InterpreterError)):
        battery(template)
