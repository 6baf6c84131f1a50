"""Errors per tile against numbers worked out by hand, and what the tolerances let through."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attention_runs import run_outputs, run_problem
from tiledsched.kernel import kernel_named
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.inputs import KINDS, adversarial_heads, border_keys, kinds_of_heads
from tiledsched.kernels.attention.reference import attention_and_lse, attention_reference
from tiledsched.measure.accuracy import LARGEST_ERROR, lse_errors, summary, tile_errors, tolerance, wrong_result
from tiledsched.schedule import Schedule
from tiledsched.space_files import space_for


def compare(xp, out, reference, *, tile_m, repeatable):
    """What is stored of the errors of `out`."""
    return summary(*tile_errors(xp, out, reference, tile_m=tile_m), repeatable=repeatable)


def test_by_hand():
    reference = np.full((1, 1, 4, 2), 3.0)
    out = reference.copy()
    out[0, 0, 1] += (3.0, -4.0)  # tile 0: |difference| = 5, |reference| = 3 * sqrt(4) = 6
    out[0, 0, 2, 0] += 1.0  # tile 1: 1 / 6
    found = compare(np, out, reference, tile_m=2, repeatable=True)
    assert found.worst_tile_error == pytest.approx(5 / 6)
    assert found.worst_tile == (0, 0, 0)
    assert found.max_abs_error == 4.0
    assert found.repeatable


def test_equal_arrays():
    reference = np.ones((2, 3, 5, 4))
    found = compare(np, reference.astype(np.float16), reference, tile_m=2, repeatable=False)
    assert (found.max_abs_error, found.worst_tile_error, found.repeatable) == (0.0, 0.0, False)


@pytest.mark.parametrize("where", [(0, 0, 0), (1, 2, 3), (0, 1, 2), (1, 0, 1)])
@pytest.mark.parametrize("value", [7.0, math.nan, math.inf, -math.inf])
def test_the_worst_tile_is_found(where, value):
    batch, head, tile = where
    reference = np.random.default_rng(0).standard_normal((2, 3, 14, 8))  # tiles of 4, 4, 4 and 2 rows
    out = reference + 1e-6
    out[batch, head, tile * 4 + 1, 5] = value
    found = compare(np, out, reference, tile_m=4, repeatable=True)
    assert found.worst_tile == where
    if math.isfinite(value):
        assert 0.1 < found.worst_tile_error < 10
    else:
        assert found.worst_tile_error == found.max_abs_error == math.inf


def test_a_ragged_last_tile_is_held_to_its_own_rows():
    reference = np.ones((1, 1, 5, 1))
    out = reference.copy()
    out[0, 0, 4, 0] = 1.5
    found = compare(np, out, reference, tile_m=4, repeatable=True)
    assert (found.worst_tile, found.worst_tile_error) == ((0, 0, 1), pytest.approx(0.5))
    found = compare(np, out, reference, tile_m=128, repeatable=True)  # a tile larger than the array
    assert (found.worst_tile, found.worst_tile_error) == ((0, 0, 0), pytest.approx(0.5 / math.sqrt(5)))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_reference_rows_that_are_zero(dtype):
    reference = np.zeros((1, 1, 4, 2), dtype=dtype)
    assert compare(np, reference.copy(), reference, tile_m=2, repeatable=True).worst_tile_error == 0.0
    out = reference.copy()
    out[0, 0, 3, 0] = 1e-3
    found = compare(np, out, reference, tile_m=2, repeatable=True)
    assert found.worst_tile == (0, 0, 1)
    assert found.worst_tile_error > 1e6


def test_all_nan_fails_every_gate():
    reference = np.ones((1, 2, 4, 2))
    found = compare(np, np.full_like(reference, np.nan, dtype=np.float16), reference, tile_m=2, repeatable=True)
    assert found.worst_tile_error == math.inf
    assert not found.worst_tile_error <= max(LARGEST_ERROR.values())


def test_tolerances_by_accuracy_class():
    def of(dtype, mode):
        return tolerance(dtype, Schedule(accum_mode=mode)).largest_error

    assert of("float16", "fp32") < of("bfloat16", "fp32") < of("float16", "fp16")


def rounded(values, dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return values.astype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seq", [256, 4096])
def test_what_the_gate_lets_through(dtype, seq):
    """A kernel that rounds P and its output passes with room to spare; one that skips a tile of keys does not."""
    rng = np.random.default_rng(seq)
    q, k, v = (rounded(rng.standard_normal((1, 1, rows, 64)), dtype) for rows in (64, seq, seq))
    reference = attention_reference(np, q, k, v, causal=False, scale=0.125)
    scores = np.exp(q @ k.swapaxes(-1, -2) * 0.125)
    right = rounded((rounded(scores, dtype) @ v) / scores.sum(axis=-1, keepdims=True), dtype)
    gate = LARGEST_ERROR[dtype, "fp32"]
    assert compare(np, right, reference, tile_m=64, repeatable=True).worst_tile_error < gate / 4
    short = attention_reference(np, q, k[:, :, :-32], v[:, :, :-32], causal=False, scale=0.125)
    assert compare(np, short, reference, tile_m=64, repeatable=True).worst_tile_error > 2 * gate


def test_heads_that_share_a_reference():
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((3, 10, 4))
    heads = np.array([[0, 2], [1, 0]])
    out = shared[heads].copy()
    out[1, 0, 9, 0] += 1.0
    relative, largest = tile_errors(np, out, shared, tile_m=4, heads=heads)
    assert relative.shape == (2, 2, 3)
    assert largest == pytest.approx(1.0)
    assert np.argwhere(relative).tolist() == [[1, 0, 2]]
    apart, _ = tile_errors(np, out, shared[heads], tile_m=4)
    np.testing.assert_array_equal(relative, apart)


def test_errors_of_a_log_sum_exp():
    reference = np.zeros((1, 2, 10))
    reference[0, 1, 8:] = -np.inf
    lse = reference.astype(np.float32)
    assert not lse_errors(np, lse, reference, tile_m=4).any()
    lse[0, 0, 5] = 0.25
    assert lse_errors(np, lse, reference, tile_m=4).tolist() == [[[0, 0.25, 0], [0, 0, 0]]]
    for value in (np.nan, 0.0, np.inf):  # where there is nothing to see, only minus infinity will do
        lse[0, 1, 9] = value
        assert lse_errors(np, lse, reference, tile_m=4)[0, 1, 2] == np.inf
    lse[0, 0, 0] = -np.inf
    assert lse_errors(np, lse, reference, tile_m=4)[0, 0, 0] == np.inf
    heads = np.array([[1, 0]])
    assert not lse_errors(np, reference[:, ::-1], reference[0], tile_m=4, heads=heads).any()


def test_the_reference_of_rows_that_see_nothing():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, 2, 5, 8)), rng.standard_normal((1, 1, 3, 8)), rng.standard_normal((1, 1, 3, 4))
    out, lse = attention_and_lse(np, q, k, v, causal=True, scale=0.5, alignment="bottom_right")
    assert out.shape == (1, 2, 5, 4)
    assert not out[:, :, :2].any()
    assert np.isneginf(lse[:, :, :2]).all()
    np.testing.assert_allclose(out[:, :, 2], np.broadcast_to(v[:, :, 0], (1, 2, 4)))
    np.testing.assert_allclose(lse[0, 1, 2], 0.5 * q[0, 1, 2] @ k[0, 0, 0])
    full, whole = attention_and_lse(np, q, k, v, causal=False, scale=0.5)
    np.testing.assert_allclose(out[:, :, 4], full[:, :, 4])
    np.testing.assert_allclose(whole[0, 0], np.log(np.exp(0.5 * q[0, 0] @ k[0, 0].T).sum(axis=-1)))


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


def test_the_first_and_the_worst_wrong_tile_are_named():
    relative = np.full((2, 3, 4), 0.5)
    kinds = np.array([["a", "b", "c"], ["d", "e", "f"]])
    assert wrong_result(relative, 0.5, kinds) is None
    relative[0, 2, 3], relative[1, 1, 0] = 0.6, math.inf
    message = wrong_result(relative, 0.5, kinds).message
    assert message == ("c inputs: relative error 0.6 above 0.5 in batch 0, head 2, query tile 3, the first of 2 wrong "
                       "tiles of 24; the worst, inf, on e inputs in batch 1, head 1, query tile 0")  # fmt: skip
    relative[0, 2, 3] = math.nan  # never let through, whatever made it
    assert "batch 0, head 2" in wrong_result(relative, 0.5, kinds).message
    relative[0, 2, 3] = 0.1
    assert wrong_result(relative, 0.5, kinds).message.endswith("query tile 0, the first of 1 wrong tiles of 24")


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


def simulated(q, k, v, dtype, *, causal, accum_mode="fp32", tile_m=64, tile_n=64, direction=1):
    """A NumPy model of the kernel on one head, `[rows, head_dim]` each.

    P and the output are rounded to the type of the arrays, everything else to float32. With float16 accumulators both
    products are also rounded after every 16 columns, as the tensor cores' steps are.
    """
    scale = np.float32(q.shape[1] ** -0.5 / math.log(2))
    fp16 = accum_mode == "fp16"
    q, k, v = (array.astype(np.float32) for array in (q, k, v))

    def product(a, b, into):
        if not fp16:
            return into + a @ b
        for start in range(0, a.shape[1], 16):
            into = (into + a[:, start : start + 16] @ b[start : start + 16]).astype(np.float16).astype(np.float32)
        return into

    tiles = []
    for start in range(0, len(q), tile_m):
        rows = q[start : start + tile_m]
        row = np.arange(start, start + len(rows))[:, None]
        row_max = np.full((len(rows), 1), np.float32(-1e30))
        row_sum = np.zeros((len(rows), 1), np.float32)
        acc = np.zeros((len(rows), q.shape[1]), np.float32)
        seen = range(0, min(len(k), row[-1, 0] + 1) if causal else len(k), tile_n)
        for first in seen[::direction]:
            keys = k[first : first + tile_n]
            scores = product(rows, keys.T, np.zeros((len(rows), len(keys)), np.float32))
            if causal:
                scores = np.where(np.arange(first, first + len(keys)) <= row, scores, np.float32(-np.inf))
            new_max = np.maximum(row_max, scores.max(axis=-1, keepdims=True) * scale)
            p, alpha = np.exp2(scores * scale - new_max), np.exp2(row_max - new_max)
            row_sum = row_sum * alpha + p.sum(axis=-1, keepdims=True)
            acc = product(rounded(p, dtype).astype(np.float32), v[first : first + tile_n], acc * alpha)
            row_max = new_max
        with np.errstate(over="ignore", invalid="ignore"):
            tiles.append(rounded(acc / row_sum, dtype))
    return np.concatenate(tiles)


CLASSES = [("float16", "fp32", 10), ("bfloat16", "fp32", 7), ("float16", "fp16", 3)]


@pytest.mark.parametrize(("dtype", "accum_mode", "margin"), CLASSES)
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "head_dim", "causal"),
    [
        (300, 300, 16, True),
        (200, 1000, 128, False),
        (1000, 1000, 64, True),
        (64, 8192, 64, False),
        (64, 4096, 256, False),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid")
def test_a_right_kernel_passes_every_kind(dtype, accum_mode, margin, seq_q, seq_k, head_dim, causal):
    """With the margin that the tolerance promises, in either direction over the keys; a float32 reference adds little."""
    q, k, v = drawn(seq_q, seq_k, head_dim, dtype)
    gate = tolerance(dtype, Schedule(accum_mode=accum_mode))
    scale = head_dim**-0.5
    exact = attention_reference(np, q[None], k[None], v[None], causal=causal, scale=scale)
    single = attention_reference(np, q[None], k[None], v[None], causal=causal, scale=scale, dtype="float32")
    assert tile_errors(np, single, exact, tile_m=64)[0].max() < 1e-4
    for at, kind in enumerate(KINDS):
        out = simulated(q[at], k[at], v[at], dtype, causal=causal, accum_mode=accum_mode,
                        direction=1 if at % 2 else -1)  # fmt: skip
        error = tile_errors(np, out[None, None], exact[:, at : at + 1], tile_m=64)[0].max()
        if kind in gate.kinds:
            assert error < gate.largest_error / margin, kind
        elif head_dim >= 64:
            assert error > gate.largest_error, kind  # no reason else to leave it out


def softmax_times(scores, v, *, extra=0.0, narrow_sum=False):
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    product, total = p @ v, p.sum(axis=-1, keepdims=True) + extra * np.exp(-scores.max(axis=-1, keepdims=True))
    return (product.astype(np.float16) if narrow_sum else product) / total


def last_key_left_out(q, k, v):
    return softmax_times(scaled(q, k)[:, :-1], v[:-1])


def one_key_of_padding_counted(q, k, v):
    return softmax_times(scaled(q, k), v, extra=1.0)  # its score is 0, its value too


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
        (scores_summed_in_float16, "cancelling", "float16"),
    ],
)
def test_kernels_that_only_this_kind_tells_from_right_ones(wrong, kind, dtype):
    """Each passes on normal inputs: 64 rows, 16384 keys."""
    gate = LARGEST_ERROR[dtype, "fp32"]
    rng = np.random.default_rng(0)
    normal = [rounded(rng.standard_normal((rows, 64)), dtype) for rows in (64, 16384, 16384)]
    q, k, v = drawn(64, 16384, 64, dtype)
    at = KINDS.index(kind)

    def error(head):
        exact = attention_reference(np, *(array[None, None] for array in head), causal=False, scale=0.125)
        return tile_errors(np, wrong(*head)[None, None], exact, tile_m=64)[0].max()

    assert error(normal) < gate
    assert error([q[at], k[at], v[at]]) > gate


def test_a_mask_off_by_one_far_down():
    """Each row sees one key too many: one in 8000 is lost among normal scores, not at a border."""
    seq, tail = 8256, slice(8160, 8224)  # a tile of rows around the border at 8192
    gate = LARGEST_ERROR["bfloat16", "fp32"]
    rng = np.random.default_rng(0)
    normal = [rounded(rng.standard_normal((seq, 64)), "bfloat16") for _ in range(3)]
    q, k, v = drawn(seq, seq, 64, "bfloat16")

    def error(head):
        row, column = np.arange(tail.start, tail.stop)[:, None], np.arange(seq)
        scores = scaled(head[0][tail], head[1])
        right, wrong = (softmax_times(np.where(column <= row + more, scores, -np.inf), head[2]) for more in (0, 1))
        return tile_errors(np, wrong[None, None], right[None, None], tile_m=64)[0].max()

    assert error(normal) < gate
    assert error([q[0], k[0], v[0]]) > 5 * gate


@pytest.mark.parametrize("accum_mode", ["fp32", "fp16"])
@pytest.mark.parametrize("seq_q", [6, 96, 300])
def test_the_kernel_passes_every_kind_of_other_problems(seq_q, accum_mode):
    """Aligned at the bottom right, with other values' columns and the log-sum-exp."""
    problem = Attention.problem(seq_q=seq_q, seq_k=256, head_dim=40, value_dim=96, causal=True, alignment="bottom_right", batch=2,
                      heads=8, kv_heads=4, lse=True)  # fmt: skip
    plain = space_for("sm_90").default(problem).replace(accum_mode=accum_mode, tile_m=64, tile_n=32)
    heads = kinds_of_heads(problem)
    q, k, v = (array.astype(np.float16) for array in adversarial_heads(np, np.random.default_rng(2), problem))
    exact, lse = attention_and_lse(np, q[None], k[None], v[None], causal=True, scale=0.2, alignment="bottom_right")
    kv_heads = heads[:, :: problem.group]
    template = kernel_named("attention")
    for knobs in ({}, {"column_parts": 2}, {"kv_splits": 4}, {"pack_gqa": True}, {"pack_gqa": True, "kv_splits": 8},
                  {"loop_split": True, "kv_direction": "backward"}):  # fmt: skip
        schedule = plain.replace(**knobs)
        gate, tile_m = tolerance("float16", schedule), template.rows_per_tile(schedule, problem)
        with np.errstate(over="ignore", invalid="ignore"):
            found = run_outputs(template, schedule, problem, q[heads], k[kv_heads], v[kv_heads], 0.2, sm_count=2)
        asked = np.isin(np.array(KINDS)[heads], gate.kinds)
        relative, _ = tile_errors(np, found["out"], exact[0], tile_m=tile_m, heads=heads)
        assert relative[asked].max() < gate.largest_error / 3, schedule.short()
        errors = lse_errors(np, found["lse"], lse[0], tile_m=tile_m, heads=heads)
        assert errors[asked].max() < gate.largest_lse_error / 3, schedule.short()


@pytest.mark.parametrize("accum_mode", ["fp32", "fp16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_passes_every_kind(causal, accum_mode):
    """The attention kernel itself, in the interpreter, with each value of each knob that the problem allows."""
    problem = Attention.problem(seq_q=256, seq_k=256, head_dim=32, causal=causal, batch=2, heads=4, kv_heads=4)
    space = space_for("sm_90")
    plain = space.default(problem).replace(accum_mode=accum_mode, tile_m=64, tile_n=32)
    heads = kinds_of_heads(problem)
    q, k, v = (array.astype(np.float16) for array in adversarial_heads(np, np.random.default_rng(2), problem))
    exact = attention_reference(np, q[None], k[None], v[None], causal=causal, scale=32**-0.5)[0]
    inputs = q[heads], k[heads], v[heads]
    variants = [plain.replace(**{name: choice}) for name, knob in space.knobs.items() for choice in knob.choices]
    allowed = [each for each in dict.fromkeys(variants) if not space.violations(each, problem)]
    assert len(allowed) > 20
    for schedule in allowed:
        gate = tolerance("float16", schedule)
        with np.errstate(over="ignore", invalid="ignore"):
            out = run_problem(kernel_named("attention"), schedule, problem, *inputs, 32**-0.5, sm_count=2)
        relative, _ = tile_errors(np, out, exact, tile_m=schedule.number("tile_m"), heads=heads)
        asked = np.isin(np.array(KINDS)[heads], gate.kinds)
        assert relative[asked].max() < gate.largest_error / 3, schedule.short()
