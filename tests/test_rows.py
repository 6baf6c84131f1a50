"""Kernels over rows: what is special about each of them. What they have in common is tested in `test_kernels`."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tile_checks import check, make_inputs, run_schedule

from tiledsched.core.errors import ProblemError
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.glu.declaration import erfc
from tiledsched.kernels.rms_norm import RmsNorm
from tiledsched.kernels.rms_norm_backward import RmsNormBackward
from tiledsched.kernels.rope import Rope

ONE_TILE = Schedule({name: each.default for name, each in RmsNorm.knob_fields().items()} | {"TILE_COLUMNS": 512})


def test_the_sum_is_normalised_before_it_is_rounded():
    """A residual of a thousand and elements of a thousandth: rounded, the sums would all be equal."""
    p = RmsNorm.problem(rows=4, columns=256, residual=True, dtype="float16")
    inputs = make_inputs(RmsNorm, p)
    inputs["X"] = (inputs["X"] * 100).astype(np.float16)
    inputs["R"] = (-inputs["X"].astype(np.float32) + 1e-3 * inputs["R"].astype(np.float32)).astype(np.float16)
    check(RmsNorm, p, ONE_TILE, inputs)


def test_rows_of_zeros_stay_zero():
    p = RmsNorm.problem(rows=3, columns=100)
    inputs = make_inputs(RmsNorm, p)
    inputs["X"][1] = 0
    out = run_schedule(RmsNorm, p, ONE_TILE, inputs)["Out"]
    assert np.isfinite(out.astype(np.float32)).all()
    assert not out[1].astype(np.float32).any()


@pytest.mark.parametrize(
    "walk",
    [
        {"TILE_COLUMNS": 1024, "HOLD": True, "AHEAD": True},
        {"TILE_COLUMNS": 512, "HOLD": False, "AHEAD": False, "loads": "tma"},
    ],
    ids=str,
)
def test_the_gradient_of_the_weight_has_the_same_bits_in_any_order_of_blocks(walk):
    """It is summed up in float32, which has the half that is left of 300 ones."""
    p = RmsNormBackward.problem(rows=301, columns=24, dtype="float16")
    s = Schedule({"TILE_ROWS": 2, "loads": "plain", "num_worker_warps": 4, "occupancy": 1, "BLOCKS": 16} | walk)
    inputs = make_inputs(RmsNormBackward, p)
    found = [run_schedule(RmsNormBackward, p, s, inputs, order)["dW"] for order in ("forward", "reverse")]
    assert np.array_equal(*found)
    ones = {"X": np.ones((301, 24)), "dOut": np.ones((301, 24)), "W": np.ones(24)}
    ones["dOut"][-1] = -299.5
    halves = {name: each.astype(np.float16) for name, each in ones.items()}
    np.testing.assert_allclose(run_schedule(RmsNormBackward, p, s, halves)["dW"], 0.5, atol=2e-3)


def test_the_complementary_error_function_is_that_of_the_standard_library():
    x = np.concatenate([np.linspace(-9, 9, 1001), [0.125, 0.25, 1e-9, 0.0, 30.0]])
    np.testing.assert_allclose(erfc(np, x), [math.erfc(each) for each in x], rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tables": 2}, "all sequences have the same angles, or each has its own"),
        ({"parts": 1, "width": 7}, "a head is pairs of elements"),
    ],
    ids=["tables", "width"],
)
def test_angles_that_fit_no_sequence_or_head_are_refused(more, words):
    with pytest.raises(ProblemError, match=words):
        Rope.problem(batch=3, seq=5, q_heads=2, k_heads=1, **more)
