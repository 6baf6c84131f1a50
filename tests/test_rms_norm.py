"""Root-mean-square normalisation: right in the interpreter over its schedules, its faults noticed, its code as compiled."""

from __future__ import annotations

import numpy as np
import pytest
from tile_checks import check, make_inputs, mutated, run_schedule, sample, searched

from tiledsched.build.compiler import compile_schedule
from tiledsched.core.device import ARCHS
from tiledsched.core.schedule import Schedule
from tiledsched.interpreter import InterpreterError
from tiledsched.kernels.rms_norm import RmsNorm

DEFAULT = {name: each.default for name, each in RmsNorm.knob_fields().items()}


def schedule(**pinned):
    return Schedule(DEFAULT | pinned)


@pytest.mark.parametrize("p", RmsNorm.small(), ids=str)
def test_schedules_are_right(p):
    for s in sample(RmsNorm, p, 12, seed=p.columns):
        check(RmsNorm, p, s)


def test_the_sum_is_normalised_before_it_is_rounded():
    """A residual of a thousand and elements of a thousandth: rounded, the sums would all be equal."""
    p = RmsNorm.problem(rows=4, columns=256, residual=True, dtype="float16")
    inputs = make_inputs(RmsNorm, p)
    inputs["X"] = (inputs["X"] * 100).astype(np.float16)
    inputs["R"] = (-inputs["X"].astype(np.float32) + 1e-3 * inputs["R"].astype(np.float32)).astype(np.float16)
    check(RmsNorm, p, schedule(TILE_COLUMNS=512), inputs)


def test_rows_of_zeros_stay_zero():
    p = RmsNorm.problem(rows=3, columns=100)
    inputs = make_inputs(RmsNorm, p)
    inputs["X"][1] = 0
    out = run_schedule(RmsNorm, p, schedule(TILE_COLUMNS=512), inputs)["Out"]
    assert np.isfinite(out.astype(np.float32)).all()
    assert not out[1].astype(np.float32).any()


@pytest.mark.parametrize("columns", [1024, 4096, 5120, 16384])
def test_as_many_schedules_are_searched_as_a_tune_can_learn_from(columns):
    assert 20 <= len(searched(RmsNorm, RmsNorm.problem(rows=16384, columns=columns))) <= 200


MUTATIONS = {
    "mean over the tile": ("keepdims=True) / const.COLUMNS", "keepdims=True) / const.TILE_COLUMNS"),
    "no epsilon": ("/ const.COLUMNS + eps)", "/ const.COLUMNS)"),
    "root for its inverse": ("ct.rsqrt(", "ct.sqrt("),
    "not weighed": ("scale_of(x * x, eps, const) * weight", "scale_of(x * x, eps, const)"),
    "weights of the first tile": ("tile = ct.load(array, (column,)", "tile = ct.load(array, (0 * column,)"),
    "weights of another tile, held": (
        "tiles[j] * scale * load_vector(W, j, const)",
        "tiles[j] * scale * load_vector(W, 0, const)",
    ),
    "squares of the first tile": ("squares = squares + tiles[j] * tiles[j]", "squares = squares"),
    "squares not squared": ("squares = squares + x * x", "squares = squares + x"),
    "tiles of the first column": ("ct.load(array, (row, column)", "ct.load(array, (row, 0 * column)"),
    "gathers of the first column": ("return column * const.TILE_COLUMNS +", "return 0 * column * const.TILE_COLUMNS +"),
    "gathers of the first row": ("rows = row * const.TILE_ROWS +", "rows = 0 * row * const.TILE_ROWS +"),
    "padding undetermined": ("padding_mode=ct.PaddingMode.ZERO,\n                       allow_tma", "allow_tma"),
    "persistent blocks skip rows": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):"),
    "persistent blocks end early": ("ct.cdiv(X.shape[0], const.TILE_ROWS)", "X.shape[0] // const.TILE_ROWS"),
    "the last tile left out": (
        "- 1) // const.TILE_COLUMNS",
        "- 1) // const.TILE_COLUMNS - (const.COLUMNS > const.TILE_COLUMNS)",
    ),
    "residual left out": ("x = x + load_rows(R", "x = x + 0.0 * load_rows(R"),
    "sum not stored": ("if Sum is not None:", "if False:"),
    "residual stored for the sum": (
        "store_rows(Sum, row, j, x, const)",
        "store_rows(Sum, row, j, load_rows(R, row, j, const), const)",
    ),
    "residual left out of the second pass": (
        "summed(X, R, None, row, j, const)",
        "summed(X, None, None, row, j, const)",
    ),
    "scaled in float16": ("column, const).astype(ct.float32)", "column, const)"),
}


def battery():
    """Cases that between them notice every mutation above."""
    for residual in (False, True):
        p = RmsNorm.problem(rows=7, columns=1000, residual=residual)
        for pinned in (
            {"TILE_COLUMNS": 1024},
            {"TILE_COLUMNS": 512},
            {"TILE_COLUMNS": 512, "HOLD": False},
            {"TILE_COLUMNS": 512, "loads": "gather", "TILE_ROWS": 2},
            {"TILE_COLUMNS": 1024, "PERSISTENT": True, "TILE_ROWS": 2, "loads": "tma", "occupancy": 1},
            {"TILE_COLUMNS": 512, "PERSISTENT": True, "HOLD": False, "loads": "tma", "occupancy": 1},
        ):
            check(RmsNorm, p, schedule(**pinned))
    p = RmsNorm.problem(rows=2, columns=512, dtype="float16")
    inputs = make_inputs(RmsNorm, p)
    inputs["X"] = (inputs["X"].astype(np.float32) * np.array([[1e-3], [1000.0]])).astype(np.float16)
    for row in range(2):
        one = RmsNorm.problem(rows=1, columns=512, dtype="float16")
        check(RmsNorm, one, schedule(TILE_COLUMNS=512), {**inputs, "X": inputs["X"][row : row + 1]})


def test_the_battery_passes_the_kernel():
    battery()


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_noticed(name):
    modules = ["tiledsched.kernels.rows", "tiledsched.kernels.rms_norm.tiles"]
    with mutated(modules, *MUTATIONS[name]), pytest.raises((AssertionError, InterpreterError)):
        battery()


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_121"])
def test_compiles_without_spills(arch):
    p = RmsNorm.problem(rows=4096, columns=4096, residual=True)
    for loads in ("plain", "gather", "tma"):
        facts = compile_schedule(RmsNorm, p, schedule(loads=loads), arch).facts
        assert facts.spill_bytes == 0


def test_model_prefers_more_bytes_under_way():
    from tiledsched.core.resources import ResourceFacts

    def us(registers, shared, **pinned):
        facts = ResourceFacts(
            registers=registers,
            threads=128,
            shared_bytes=shared,
            spill_bytes=0,
            num_ctas=1,
            code_bytes=0,
            ctas_per_sm=1,
        )
        p = RmsNorm.problem(rows=32768, columns=4096)
        return RmsNorm.cost.model(p, schedule(**pinned), facts, ARCHS["sm_90"])

    assert us(72, 1040) < us(255, 1040)
    assert us(72, 1040) < us(72, 1040, HOLD=False, TILE_COLUMNS=512)
    bytes_moved = RmsNorm.cost.bytes_moved(RmsNorm.problem(rows=32768, columns=4096))
    assert us(72, 1040) >= bytes_moved / 4.8e6
