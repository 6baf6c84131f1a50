"""Errors per tile against numbers worked out by hand, and what the tolerances let through."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tiledsched.kernels.reference import attention_reference
from tiledsched.measure.accuracy import TOLERANCE, compare, tolerance
from tiledsched.schedule import Schedule


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
    assert not found.worst_tile_error <= max(TOLERANCE.values())


def test_tolerances_by_accuracy_class():
    def of(dtype, mode):
        return tolerance(dtype, Schedule(accum_mode=mode))

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
    gate = tolerance(dtype, Schedule(accum_mode="fp32"))
    assert compare(np, right, reference, tile_m=64, repeatable=True).worst_tile_error < gate / 4
    short = attention_reference(np, q, k[:, :, :-32], v[:, :, :-32], causal=False, scale=0.125)
    assert compare(np, short, reference, tile_m=64, repeatable=True).worst_tile_error > 2 * gate
