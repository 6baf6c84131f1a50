"""Problems, schedules and inputs drawn for the attention kernel's tests, and the check of one run against the reference."""

from __future__ import annotations

import random
from functools import lru_cache, partial

import ml_dtypes
import numpy as np
from attention_runs import run_outputs
from hypothesis import HealthCheck, settings, strategies as st

from tiledsched.core import data_files
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.kernels.attention.scales import DEFAULT_CAP

ARCHS = sorted(path.stem for path in (data_files.search_spaces() / "attention").glob("sm_*.toml"))
SPACES = {arch: space_for(arch, Attention) for arch in ARCHS}
NUMPY = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TOLERANCE = {"float16": 1.5e-3, "bfloat16": 1e-2, "fp16 accumulator": 6e-3}
"""Largest relative Frobenius error of any tile of the output; normal inputs make about a quarter of it."""
LSE_TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2}
"""Largest error of a log-sum-exp, beside as much of its size."""
DRAWN = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)


def make_inputs(problem, seed=0, *, amplitude=1.0):
    """q, k and v of normal numbers."""
    rng = np.random.default_rng(seed)
    queries = (problem.batch, problem.heads, problem.seq_q, problem.head_dim)
    keys = (problem.key_entries, problem.kv_heads, problem.key_rows, problem.head_dim)
    values = (*keys[:3], problem.value_columns)
    return tuple((rng.standard_normal(s) * amplitude).astype(NUMPY[problem.dtype]) for s in (queries, keys, values))


def schedule_for(problem, arch="sm_90", *, forced=False, **pinned):
    """The default schedule with some knobs changed, which the space must allow; `forced`: but for exploring's sake."""
    space = SPACES[arch]
    schedule = space.default(problem).replace(**pinned)
    if forced:
        values = space.constraint_values(problem) | dict(schedule)
        broken = [each.because for each in space.constraints if not each.exploring and not each.holds(values)]
        assert not broken, broken
    else:
        assert space.violations(schedule, problem) == []
    return schedule


def more_inputs(problem, seed=0):
    """Sinks, starts and lengths where the problem has them: in a batch of several, one sequence is empty and one whole."""
    rng = np.random.default_rng(seed)
    found = {}
    if problem.sinks:
        found["Sinks"] = (3 * rng.standard_normal(problem.heads)).astype(NUMPY[problem.dtype])
    if problem.starts:
        found["Starts"] = rng.integers(0, problem.seq_k, problem.batch).astype(np.int32)
        found["Starts"][0] = 0
    if problem.lengths:
        found["Lengths"] = rng.integers(0, problem.seq_k + 1, problem.sequences).astype(np.int32)
        found["Lengths"][-1] = 0 if problem.sequences > 1 else found["Lengths"][-1]
    if problem.packed:
        found["CuQ"] = random_offsets(rng, problem.seq_q, problem.packed)
    if problem.packed and not problem.page:
        found["CuK"] = random_offsets(rng, problem.seq_k, problem.packed)
    if problem.page:  # beyond a sequence's keys it names nothing
        found["Table"] = rng.permutation(problem.key_entries).reshape(problem.sequences, -1).astype(np.int32)
        for table, length in zip(found["Table"], found["Lengths"], strict=True):
            table[-(-int(length) // problem.page) :] = rng.choice([-1, 2**31 - 1])
    return found


def without_unused_slots(problem, array, more):
    """Keys or values with NaN in every slot that belongs to no sequence: such slots may hold anything."""
    if not (problem.starts or problem.lengths):
        return array
    used = np.zeros((array.shape[0], array.shape[2]), bool)
    for sequence in range(problem.sequences):
        first = max(int(more["Starts"][sequence]), 0) if problem.starts else 0
        end = min(int(more["Lengths"][sequence]), problem.seq_k) if problem.lengths else problem.seq_k
        for key in range(first, end):
            entry, row = (
                (more["Table"][sequence][key // problem.page], key % problem.page) if problem.page else (sequence, key)
            )
            used[entry, row] = True
    return np.where(used[:, None, :, None], array, np.asarray(np.nan, array.dtype))


def random_offsets(rng, total, sequences):
    """Where packed sequences begin, and where the last ends: some are empty, some of one row, one is long."""
    cuts = rng.integers(0, total + 1, sequences - 1)
    cuts[: len(cuts) // 2] = total // 3  # one after the other, empty
    if len(cuts) > 2:
        cuts[0] = min(total // 3 + 1, total)
    return np.array([0, *np.sort(cuts), total], np.int32)


def case_of(problem, inputs, more, scale, cap):
    """The inputs of a run, with NaN where no sequence has a key, and the output and log-sum-exp that are right for them."""
    q, k, v = make_inputs(problem) if inputs is None else inputs
    more = more_inputs(problem) if more is None else more
    k, v = (without_unused_slots(problem, array, more) for array in (k, v))
    right = attention_and_lse(
        np,
        q,
        k,
        v,
        causal=problem.causal,
        scale=scale,
        alignment=problem.alignment,
        window=problem.window,
        window_right=problem.window_right,
        cap=cap,
        sinks=more.get("Sinks"),
        starts=more.get("Starts"),
        lengths=more.get("Lengths"),
        cu_q=more.get("CuQ"),
        cu_k=more.get("CuK"),
        table=more.get("Table"),
    )
    return (q, k, v), more, right


usual_case = lru_cache(maxsize=256)(partial(case_of, inputs=None, more=None))
"""Of inputs that only the problem decides: hundreds of planted mistakes meet the same few problems."""


def check(
    problem, schedule, inputs=None, *, scale=None, sm_count=2, kernel=Attention, order="forward", cap=None, more=None
):
    """Run the kernel and compare every tile of its outputs with the reference; return the output."""
    scale = problem.head_dim**-0.5 if scale is None else scale
    cap = cap or (DEFAULT_CAP if problem.softcap else 0.0)
    find = usual_case if inputs is None and more is None else partial(case_of, inputs=inputs, more=more)
    arrays, more, (exact, lse) = find(problem, scale=scale, cap=cap)
    found = run_outputs(kernel, schedule, problem, *arrays, scale, sm_count=sm_count, order=order, cap=cap, more=more)
    out = found["out"]
    assert np.isfinite(out).all(), "NaN or infinity: unwritten elements, or padding that was used"
    tolerance = TOLERANCE["fp16 accumulator" if schedule["accum_mode"] == "fp16" else problem.dtype]
    for start in range(0, problem.seq_q, schedule.number("tile_m")):
        rows = slice(start, start + schedule.number("tile_m"))
        error = np.linalg.norm(out[:, :, rows].astype(np.float64) - exact[:, :, rows], axis=(2, 3))
        norm = np.linalg.norm(exact[:, :, rows], axis=(2, 3))
        assert (error <= tolerance * norm + 1e-30).all(), (
            f"rows from {start}: {np.max(error / np.maximum(norm, 1e-30))}"
        )
    assert ("lse" in found) == problem.lse
    if problem.lse:
        unseen = np.isneginf(lse)
        np.testing.assert_array_equal(np.isneginf(found["lse"]), unseen)
        limit = LSE_TOLERANCE[str(schedule["accum_mode"])]
        np.testing.assert_allclose(found["lse"][~unseen], lse[~unseen], atol=limit, rtol=limit)
    return out


LENGTHS = st.one_of(
    st.integers(1, 200), st.sampled_from([1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300])
)
# With fewer than four columns a tile of averages may be near zero as a whole, and its relative error anything.
HEAD_DIMS = st.one_of(st.sampled_from([8, 16, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256]), st.integers(4, 256))


@st.composite
def problems(draw, **fixed):
    """Any problem."""
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
        "alignment": draw(st.sampled_from(["top_left", "bottom_right"])),
        "value_dim": draw(st.sampled_from([0, 0, 0, 16, 40, 64, 96, 128])),
        "lse": draw(st.booleans()),
    }
    return Attention.problem(**drawn | fixed)


@st.composite
def decoding_problems(draw, **fixed):
    """Few query rows at the end of many keys."""
    group, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (4, 1), (8, 1), (3, 1), (4, 2)]))
    drawn = {
        "seq_q": draw(st.integers(1, 16)),
        "seq_k": draw(st.integers(16, 700)),
        "causal": True,
        "alignment": "bottom_right",
        "heads": group * kv_heads,
        "kv_heads": kv_heads,
    }
    return draw(problems(**drawn | fixed))


@st.composite
def feature_problems(draw, of=problems, **fixed):
    """Problems with optional features, each feature in half of them."""
    problem = draw(of(**fixed))
    window = draw(st.one_of(st.just(0), st.integers(1, 300)))
    right = draw(st.one_of(st.just(0), st.integers(1, 300)))
    features = {name: draw(st.booleans()) for name in ("softcap", "sinks", "starts", "lengths")}
    return problem.replace(
        **features, **({"window": window, "window_right": right, "causal": True} if window or right else {})
    )


@st.composite
def placed_problems(draw, of=problems, **fixed):
    """Packed sequences, or keys in pages, or both; half of them with optional features."""
    packed = draw(st.sampled_from([0, 0, 1, 3, 8, 30]))
    page = draw(st.sampled_from([16, 32, 48, 64, 128])) if not packed else draw(st.sampled_from([0, 0, 16, 64]))
    problem = draw(of(**{"batch": 1 if packed else draw(st.integers(1, 3)), **fixed}))
    window, right = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (20, 30), (100, 0), (0, 40)]))
    seq_k = -(-min(problem.seq_k, 400) // page) * page if page else problem.seq_k
    features = {name: draw(st.booleans()) for name in ("softcap", "sinks")}
    return problem.replace(
        seq_k=seq_k,
        packed=packed,
        page=page,
        lengths=page > 0,
        **features,
        **({"window": window, "window_right": right, "causal": True} if window or right else {}),
    )


@st.composite
def cases(draw, of=problems, **fixed):
    """A problem and a valid schedule for it on some arch."""
    problem, arch = draw(of(**fixed)), draw(st.sampled_from(ARCHS))
    return problem, SPACES[arch].sample(problem, random.Random(draw(st.integers(0, 2**32 - 1))))


def one_hot_inputs(problem, seed=0):
    """Inputs for which softmax picks exactly one key per row, and the output that makes: one row of v.

    Keys are random signs, nearly orthogonal; a query is four times the key it looks for, so that with scale 1 every
    other key is 2**-100 or less of it. A row that sees no key gives zeros.
    """
    rng = np.random.default_rng(seed)
    _, k, v = make_inputs(problem, seed)
    k = np.sign(k.astype(np.float32)).astype(k.dtype)
    shape = (problem.batch, problem.heads, problem.seq_q)
    offset = problem.seq_k - problem.seq_q if problem.alignment == "bottom_right" else 0
    seen = np.clip(np.arange(problem.seq_q) + 1 + offset, 0, problem.seq_k)
    reach = np.maximum(seen, 1) if problem.causal else problem.seq_k
    chosen = np.broadcast_to(rng.integers(0, reach, shape), shape)
    batch = np.arange(problem.batch)[:, None, None]
    kv_head = (np.arange(problem.heads) // problem.group)[None, :, None]
    q = (k[batch, kv_head, chosen] * np.float32(4)).astype(k.dtype)
    expected = v[batch, kv_head, chosen].copy()
    if problem.causal:
        expected[:, :, seen == 0] = 0
    return (q, k, v), expected
