"""Attention's adversarial inputs, and what its tolerances let through."""

from __future__ import annotations

import math
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest
import sample_kernels
from attention_runs import attention_reference, run_problem

from tiledsched.checking.errors import output_errors
from tiledsched.checking.inputs import make_cases
from tiledsched.core.arrays import ArraySpec, Tolerance
from tiledsched.core.cases import expected_outputs
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.inputs import KINDS, adversarial_heads, border_keys, kinds_of_heads


def tile_errors(out, expected, tile_m, **spec):
    """Errors of `[heads, rows, columns]` in tiles of `tile_m` whole rows: `[heads, tiles]`."""
    described = ArraySpec(name="Out", role="out", dtype="float64", shapes=(out.shape,), **spec)
    return output_errors(np, described, out, expected, Tolerance(relative=1.0), (tile_m, out.shape[-1])).errors[..., 0]


def gate(dtype, accum_mode="fp32"):
    return Attention.tolerance(
        Attention.standard(seq_len=64, head_dim=64, dtype=dtype), Schedule(accum_mode=accum_mode)
    )


def run_on_cpu(p, s, case):
    """The errors of every output of one schedule in the interpreter."""
    return sample_kernels.run_on_cpu(Attention, p, s, case)


def test_tolerances_by_accuracy_class():
    assert gate("float16").relative < gate("bfloat16").relative < gate("float16", "fp16").relative
    assert not gate("float16").except_kinds
    assert gate("float16", "fp16").except_kinds == ("large", "cancelling")


TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def rounded(values, dtype):
    return values.astype(TYPES[dtype]).astype(np.float64)


def test_heads_that_share_a_reference():
    """It is the right one for each: the case's inputs, head by head, give what is expected of them."""
    problem = Attention.problem(seq_q=10, seq_k=7, head_dim=16, batch=3, heads=6, kv_heads=3, lse=True)
    _, case = make_cases(Attention, np, np.random.default_rng(0), problem)
    assert [case.kind_of(outer) for outer in (0, 1, 2, 6, 17)] == [KINDS[at] for at in (0, 0, 1, 3, 0)]
    for found, right in zip(
        case.expected, expected_outputs(Attention, np, problem, case.inputs, "float64"), strict=True
    ):
        np.testing.assert_array_equal(found, right)


def test_borders_lie_on_the_diagonal_wherever_it_is():
    """Each row's last key, or the one behind it, is what the row looks for most where that key is beside a border."""
    for seq_q, seq_k, alignment in ((100, 300, "bottom_right"), (300, 100, "bottom_right"), (100, 300, "top_left")):
        problem = Attention.problem(seq_q=seq_q, seq_k=seq_k, head_dim=64, causal=True, alignment=alignment)
        q, k, _ = adversarial_heads(np, np.random.default_rng(0), problem)
        scores = q[0] @ k[0].T / 8
        offset = seq_k - seq_q if alignment == "bottom_right" else 0
        keys = [key for key in border_keys(seq_k) if 0 < key - offset < seq_q]
        assert keys
        for key in keys:
            others = np.delete(scores[key - offset], [key, key - 1, *border_keys(seq_k)])
            assert scores[key - offset, key] > others.max() + 3
            assert scores[key - offset - 1, key] > others.max() + 3  # what the row before must not see


def test_kinds_follow_the_key_value_heads():
    problem = Attention.problem(seq_q=4, seq_k=4, head_dim=16, batch=3, heads=6, kv_heads=3)
    assert kinds_of_heads(problem).tolist() == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5], [6, 6, 7, 7, 0, 0]]
    for kv_heads, count in ((1, 3), (3, 8)):
        q, k, v = adversarial_heads(np, np.random.default_rng(0), problem.replace(kv_heads=kv_heads))
        assert q.shape == k.shape == v.shape == (count, 4, 16)
        assert q.dtype == k.dtype == v.dtype == np.float32


def test_borders_of_every_tile_size():
    keys = border_keys(1000)
    assert {15, 16, 63, 64, 127, 128, 255, 256, 511, 512, 767, 768, 895, 896, 991, 992, 999} <= set(keys)
    assert keys == sorted(set(keys))
    assert border_keys(1) == [0]
    assert max(border_keys(16)) == 15


@pytest.mark.parametrize("head_dim", [1, 2, 3, 5, 33, 256])
@pytest.mark.parametrize("seq_k", [1, 2, 17, 300])
def test_any_shape_has_inputs_that_float16_holds(head_dim, seq_k):
    problem = Attention.problem(seq_q=5, seq_k=seq_k, head_dim=head_dim, batch=8)
    heads = adversarial_heads(np, np.random.default_rng(0), problem)
    assert all(np.isfinite(array.astype(np.float16)).all() for array in heads)
    exact = attention_reference(np, *(array[None] for array in heads), causal=False, scale=head_dim**-0.5)
    assert np.isfinite(exact.astype(np.float16)).all()


@lru_cache
def drawn(seq_q, seq_k, head_dim, dtype):
    """One head of each kind as stored, `[kinds, rows, head_dim]`: q, k, v."""
    problem = Attention.problem(seq_q=seq_q, seq_k=seq_k, head_dim=head_dim, batch=len(KINDS))
    return [rounded(array, dtype) for array in adversarial_heads(np, np.random.default_rng(1), problem)]


def test_each_kind_is_what_it_says():
    q, k, v = drawn(128, 1024, 64, "float16")
    of = dict(zip(KINDS, q @ k.swapaxes(-1, -2) * 0.125, strict=True))
    borders = border_keys(1024)
    assert np.isin(of["borders"].argmax(axis=-1), borders).mean() > 0.4  # rows whose direction no border key has: none
    for key in borders:
        row = (key - 1) % 61  # sees `key` as one of its largest, and is the row before it
        assert of["borders"][row, key] > np.delete(of["borders"][row], borders).max() + 4
    assert of["negative"].max() < -15
    by_tile = of["rising"].reshape(128, 16, 64).max(axis=-1)
    assert (np.diff(by_tile) > 0).all()
    assert (np.diff(of["falling"].reshape(128, 16, 64).max(axis=-1)) < 0).all()
    peaked = np.sort(of["peaked"], axis=-1)
    assert np.median(1 / np.exp(peaked - peaked[:, -1:]).sum(axis=-1)) > 0.5  # share of the largest key
    assert len(np.unique(of["peaked"].argmax(axis=-1))) > 50
    assert np.abs(v[KINDS.index("large")]).max() > 40000
    at = KINDS.index("cancelling")
    partial = np.cumsum(q[at, 0] * k[at, 0])
    assert np.abs(partial).max() > 1900
    assert abs(partial[-1]) < 100
    assert (of["uniform"] == 0).all()


CLASSES = [("float16", "fp32", 10), ("bfloat16", "fp32", 7), ("float16", "fp16", 3)]


@pytest.mark.parametrize(("dtype", "accum_mode", "margin"), CLASSES)
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "head_dim", "causal"),
    [
        (300, 300, 16, True),
        (200, 1000, 128, False),
        (400, 400, 64, True),
        pytest.param(64, 4096, 64, False, marks=pytest.mark.slow),
        (64, 1024, 256, False),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_a_right_kernel_passes_every_kind(dtype, accum_mode, margin, seq_q, seq_k, head_dim, causal):
    """With the margin that the tolerance promises, in either direction over the keys; a float32 reference adds little."""
    heads, named = drawn(seq_q, seq_k, head_dim, dtype), {"causal": causal, "scale": head_dim**-0.5}
    asked, sizes = gate(dtype, accum_mode), {"seq_q": seq_q, "seq_k": seq_k, "head_dim": head_dim, "causal": causal}
    exact, single = (
        attention_reference(np, *(head[None] for head in heads), **named, dtype=each)[0]
        for each in ("float64", "float32")
    )
    assert tile_errors(single, exact, 64).max() < 1e-4
    problem = Attention.problem(**sizes, dtype=dtype, heads=len(KINDS), kv_heads=len(KINDS))
    plain = space_for("sm_90", Attention).default(problem).replace(accum_mode=accum_mode, tile_m=64, tile_n=64)
    stored = [each[None].astype(TYPES[dtype]) for each in heads]
    for direction in ("forward", "backward"):
        out = run_problem(Attention, plain.replace(kv_direction=direction), problem, *stored)[0].astype(np.float64)
        for kind, errors in zip(KINDS, tile_errors(out, exact, 64).max(axis=1), strict=True):
            assert errors < asked.relative / margin or kind in asked.except_kinds, kind


def softmax_times(scores, v, *, extra=0.0, narrow_sum=False):
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    product, total = p @ v, p.sum(axis=-1, keepdims=True) + extra * np.exp(-scores.max(axis=-1, keepdims=True))
    return (product.astype(np.float16) if narrow_sum else product) / total


def last_key_left_out(q, k, v):
    return softmax_times(scaled(q, k)[:, :-1], v[:-1])


def one_key_of_padding_counted(q, k, v):
    return softmax_times(scaled(q, k), v, extra=1.0)  # its score is 0, its value too


def no_maximum(q, k, v):
    p = np.exp(scaled(q, k).astype(np.float32))
    return p.astype(np.float64) @ v / p.sum(axis=-1, keepdims=True)


def maximum_of_the_first_tile_kept(q, k, v):
    scores = scaled(q, k)
    p = np.exp(scores - scores[:, :64].max(axis=-1, keepdims=True))
    return p.astype(np.float16).astype(np.float64) @ v / p.sum(axis=-1, keepdims=True)


def maximum_of_the_last_tile_kept(q, k, v):
    return maximum_of_the_first_tile_kept(q, k[::-1], v[::-1])


def output_rounded_before_it_is_divided(q, k, v):
    return softmax_times(scaled(q, k), v, narrow_sum=True)


def scores_summed_in_float16(q, k, v):
    total = np.zeros((len(q), len(k)), np.float16)
    for start in range(0, q.shape[1], 16):
        total = (total + q[:, start : start + 16] @ k[:, start : start + 16].T).astype(np.float16)
    return softmax_times(total.astype(np.float64) * q.shape[1] ** -0.5, v)


def scores_kept_in_bfloat16(q, k, v):
    return softmax_times(rounded(scaled(q, k) / math.log(2), "bfloat16") * math.log(2), v)


def scaled(q, k):
    return q @ k.T * q.shape[1] ** -0.5


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
@pytest.mark.parametrize(
    ("wrong", "kind", "dtype"),
    [
        (last_key_left_out, "borders", "bfloat16"),
        (one_key_of_padding_counted, "negative", "float16"),
        (maximum_of_the_first_tile_kept, "rising", "float16"),
        (maximum_of_the_last_tile_kept, "falling", "float16"),
        (scores_kept_in_bfloat16, "peaked", "bfloat16"),
        (output_rounded_before_it_is_divided, "large", "float16"),
        (no_maximum, "large", "bfloat16"),
        (scores_summed_in_float16, "cancelling", "float16"),
    ],
)
def test_kernels_that_only_this_kind_tells_from_right_ones(wrong, kind, dtype):
    """Each passes on normal inputs: 64 rows, 16384 keys."""
    limit = gate(dtype).relative
    rng = np.random.default_rng(0)
    normal = [rounded(rng.standard_normal((rows, 64)), dtype) for rows in (64, 16384, 16384)]
    q, k, v = drawn(64, 16384, 64, dtype)
    at = KINDS.index(kind)

    def error(head):
        exact = attention_reference(np, *(array[None, None] for array in head), causal=False, scale=0.125)
        return tile_errors(wrong(*head)[None], exact[0], 64).max()

    assert error(normal) < limit
    if kind in gate("float16", "fp16").except_kinds and dtype == "float16":
        limit = gate("float16", "fp16").relative  # there is no reason else to leave it out where sums are in float16
    assert error([q[at], k[at], v[at]]) > limit


def test_a_mask_off_by_one_far_down():
    """Each row sees one key too many: one in 8000 is lost among normal scores, not at a border."""
    seq, tail = 8256, slice(8160, 8224)  # a tile of rows around the border at 8192
    limit = gate("bfloat16").relative
    rng = np.random.default_rng(0)
    normal = [rounded(rng.standard_normal((seq, 64)), "bfloat16") for _ in range(3)]
    q, k, v = drawn(seq, seq, 64, "bfloat16")

    def error(head):
        row, column = np.arange(tail.start, tail.stop)[:, None], np.arange(seq)
        scores = scaled(head[0][tail], head[1])
        right, wrong = (softmax_times(np.where(column <= row + more, scores, -np.inf), head[2]) for more in (0, 1))
        return tile_errors(wrong[None], right[None], 64).max()

    assert error(normal) < limit
    assert error([q[0], k[0], v[0]]) > 5 * limit


@pytest.mark.parametrize("accum_mode", ["fp32", "fp16"])
@pytest.mark.parametrize("seq_q", [6, 150])
def test_the_kernel_passes_every_kind_of_other_problems(seq_q, accum_mode):
    """Aligned at the bottom right, with other values' columns and the log-sum-exp."""
    problem = Attention.problem(
        seq_q=seq_q,
        seq_k=128,
        head_dim=40,
        value_dim=96,
        causal=True,
        alignment="bottom_right",
        batch=2,
        heads=8,
        kv_heads=4,
        lse=True,
    )
    plain = space_for("sm_90", Attention).default(problem).replace(accum_mode=accum_mode, tile_m=64, tile_n=32)
    _, case = make_cases(Attention, np, np.random.default_rng(2), problem)
    for knobs in (
        {},
        {"column_parts": 2},
        {"kv_splits": 4},
        {"pack_gqa": True},
        {"pack_gqa": True, "kv_splits": 8},
        {"loop_split": True, "kv_direction": "backward"},
    ):
        schedule = plain.replace(**knobs)
        for errors in run_on_cpu(problem, schedule, case):
            assert errors.errors.max() < errors.limit / 3, (errors.output, schedule.short())
