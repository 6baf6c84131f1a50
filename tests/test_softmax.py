"""Softmax: right in the interpreter over its schedules, its faults noticed, its code as the compiler makes it."""

from __future__ import annotations

from typing import get_args

import ml_dtypes
import numpy as np
import pytest
from tile_checks import check, make_inputs, mutated, run_schedule, sample

from tiledsched.build.compiler import compile_schedule
from tiledsched.core.schedule import Schedule
from tiledsched.interpreter import InterpreterError, SmallDevice
from tiledsched.interpreter import run_schedule as run
from tiledsched.interpreter.contraction import Arithmetic
from tiledsched.kernels.softmax import Softmax

DEFAULT = {name: each.default for name, each in Softmax.knob_fields().items()}
WALKS: tuple[dict, ...] = (
    {"TILE_COLUMNS": 1024},
    {"TILE_COLUMNS": 512},
    {"TILE_COLUMNS": 512, "HOLD": False},
    {"TILE_COLUMNS": 512, "loads": "gather", "TILE_ROWS": 2},
    {"TILE_COLUMNS": 1024, "PERSISTENT": True, "TILE_ROWS": 2, "loads": "tma", "occupancy": 1},
)


def schedule(**pinned):
    return Schedule(DEFAULT | pinned)


@pytest.mark.parametrize("p", Softmax.small(), ids=str)
def test_schedules_are_right(p):
    for s in sample(Softmax, p, 12, seed=p.columns):
        check(Softmax, p, s)


@pytest.mark.parametrize("pinned", WALKS, ids=str)
def test_large_and_masked_elements_do_not_overflow(pinned):
    p = Softmax.problem(rows=5, columns=1000)
    inputs = make_inputs(Softmax, p)
    inputs["X"][0] = (inputs["X"][0].astype(np.float32) * 1e4).astype(inputs["X"].dtype)
    inputs["X"][1] = -1e4
    inputs["X"][2, 3:] = -np.inf
    inputs["X"][3, :700] = -np.inf
    with np.errstate(invalid="ignore"):
        check(Softmax, p, schedule(**pinned), inputs)


def far_rows(dtype, columns, arithmetic, **pinned):
    """Rows far from zero, of the lowest and the highest numbers, and of infinities."""
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    largest = float(ml_dtypes.finfo(kind).max)
    x = np.random.default_rng(columns).standard_normal((9, columns))
    x[0] += 1e4
    x[1] -= 1e4
    x[2] = x[3] = x[4] = -largest
    x[3, columns // 2] = largest
    x[4, 0] = 1
    x[5, : columns * 3 // 4] = -np.inf
    x[6] = largest
    x[7] = -np.inf
    x[8, -1] = np.inf
    x = x.astype(kind)
    p = Softmax.problem(rows=9, columns=columns, dtype=dtype)
    device = SmallDevice(arch="sm_90")
    found = run(Softmax, p, schedule(**pinned), {"X": x}, device=device, arithmetic=arithmetic)["Out"].astype(float)
    with np.errstate(invalid="ignore"):
        right = Softmax.reference(np, x.astype(float))
    np.testing.assert_allclose(found, right, rtol=8e-3 if dtype == "bfloat16" else 1e-3, atol=1e-6)


@pytest.mark.parametrize("arithmetic", get_args(Arithmetic))
@pytest.mark.parametrize("pinned", WALKS, ids=str)
def test_rows_far_from_zero(pinned, arithmetic):
    for dtype in ("bfloat16", "float16"):
        for columns in (1, 24, 1000, 1025):
            far_rows(dtype, columns, arithmetic, **pinned)


def test_a_maximum_that_is_scaled_before_it_is_taken_off_is_wrong_where_products_are_fused():
    early = ("(x - maximum) * LOG2_E", "x * LOG2_E - maximum * LOG2_E")
    with mutated(["tiledsched.kernels.softmax.tiles"], *early), pytest.raises(AssertionError):
        far_rows("bfloat16", 24, "fused", **WALKS[2])


def test_rows_sum_to_one():
    p = Softmax.problem(rows=6, columns=3000, dtype="float16")
    for pinned in WALKS:
        out = run_schedule(Softmax, p, schedule(**pinned), make_inputs(Softmax, p))["Out"]
        np.testing.assert_allclose(out.astype(np.float64).sum(-1), 1.0, atol=2e-3)


MUTATIONS = {
    "maximum not taken": ("exponentials = power(x, ct.max(x, axis=1, keepdims=True))", "exponentials = power(x, 0.0)"),
    "maximum of the first tile": ("highest = ct.maximum(highest, tiles[j])", "highest = highest"),
    "maximum not kept": ("        highest = higher\n", ""),
    "base 2": ("(x - maximum) * LOG2_E", "(x - maximum)"),
    "sum not rescaled": ("total = total * power(highest, higher) +", "total = total +"),
    "sum not rescaled at the end": ("ct.sum(total * power(highest, row_max),", "ct.sum(total,"),
    "sum of the first tile": ("total = total + exponentials[j]", "total = total"),
    "not divided": (
        "return ct.truediv(1.0, total, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)",
        "return 1.0 + 0.0 * total",
    ),
    "columns beyond the last count": ("if const.COLUMNS % const.TILE_COLUMNS != 0:", "if False:"),
    "one column too many": ("column_indices(j, const) < const.COLUMNS", "column_indices(j, const) <= const.COLUMNS"),
    "unseen elements make NaN": ("LOWEST = -3.4e38", "LOWEST = -math.inf"),
    "lowest maximum too high": ("LOWEST = -3.4e38", "LOWEST = 10.0"),
    "persistent blocks skip rows": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):"),
    "tiles of the first column": ("ct.load(array, (row, column)", "ct.load(array, (row, 0 * column)"),
}


def battery():
    """Cases that between them notice every mutation above."""
    p = Softmax.problem(rows=7, columns=1000)
    inputs = make_inputs(Softmax, p)
    for pinned in WALKS:
        check(Softmax, p, schedule(**pinned), inputs)
        test_large_and_masked_elements_do_not_overflow(pinned)
    p = Softmax.problem(rows=2, columns=1023, dtype="float16")
    low = {"X": np.full((2, 1023), -300, np.float16)}
    for pinned in WALKS:
        check(Softmax, p, schedule(**pinned), low)


def test_the_battery_passes_the_kernel():
    battery()


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name):
    modules = ["tiledsched.kernels.rows", "tiledsched.kernels.softmax.tiles"]
    with mutated(modules, *MUTATIONS[name]), pytest.raises((AssertionError, InterpreterError)):
        battery()


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_121"])
def test_compiles_without_spills(arch):
    for columns, pinned in ((4096, {}), (5120, {"TILE_COLUMNS": 1024}), (16384, {"TILE_COLUMNS": 2048, "HOLD": False})):
        facts = compile_schedule(Softmax, Softmax.problem(rows=4096, columns=columns), schedule(**pinned), arch).facts
        assert facts.spill_bytes == 0
