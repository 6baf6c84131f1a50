"""That the tests of kernels can fail: faults put into the tile code of every kernel but attention, one at a time, each of which a
case notices. The mutations of attention are in `test_kernel_mutations`.
"""

from __future__ import annotations

from functools import partial
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
from tile_checks import NUMPY, check, make_inputs, mutated, run_schedule

import tiledsched as ts
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core.cases import call_reference
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.interpreter import InterpreterError, SmallDevice, run_schedule as run
from tiledsched.interpreter.contraction import Arithmetic
from tiledsched.kernels.cross_entropy import CrossEntropy
from tiledsched.kernels.glu import Glu
from tiledsched.kernels.grouped_matmul.declaration import group_ends
from tiledsched.kernels.layer_norm import LayerNorm
from tiledsched.kernels.rms_norm_backward import RmsNormBackward
from tiledsched.kernels.softmax import Softmax

PINNED: dict[str, dict] = {
    "glu": {"TILE_ROWS": 1, "PERSISTENT": False, "loads": "plain"},
    "layer_norm": {"loads": "plain"},
    "cross_entropy": {"TILE_ROWS": 1, "GROUP": 1, "SPLITS": 1, "loads": "plain", "occupancy": 0},
    "rms_norm_backward": {"TILE_ROWS": 1, "loads": "plain", "occupancy": 1, "BLOCKS": 16},
    "softmax_backward": {"TILE_COLUMNS": 1024},
    "matmul": {"TILE_M": 64, "TILE_N": 64, "TILE_K": 32, "num_worker_warps": 4, "GROUP_M": 4},
    "matmul_epilogue": {"TILE_M": 64, "TILE_N": 64, "TILE_K": 32, "num_worker_warps": 4, "GROUP_M": 4},
    "scaled_matmul": {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64, "GROUP_M": 4, "PERSISTENT": False},
    "grouped_matmul": {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64, "GROUP_M": 4, "STORE": "rows"},
}
PINNED["grouped_matmul_epilogue"] = PINNED["grouped_matmul"]
PINNED["scaled_matmul_epilogue"] = PINNED["scaled_matmul"]
"""What the cases of a kernel change of its default schedule."""


def schedule(kernel, **pinned):
    """The default of each knob, but for what is pinned."""
    default = {name: each.default for name, each in kernel.knob_fields().items()}
    return Schedule(default | {"num_worker_warps": 4} | PINNED.get(kernel.name, {}) | pinned)


def right(name, knobs, inputs=None, **sizes):
    """The kernel is right on random inputs, or on what `inputs` makes of a problem."""
    kernel = kernel_named(name)
    p = kernel.problem(**sizes)
    check(kernel, p, schedule(kernel, **knobs), inputs and inputs(p))


def passes(name, knobs, **sizes):
    """The kernel is right on random and on adversarial inputs, in every arithmetic."""
    kernel = kernel_named(name)
    passed, _, message = check_schedule(kernel, p := kernel.problem(**sizes), schedule(kernel, **knobs))
    assert passed, f"{p} with {knobs}: {message}"


def far_masked(p):
    """Large elements, elements that are all low, and elements that are masked."""
    inputs = make_inputs(Softmax, p)
    inputs["X"][0] = (inputs["X"][0].astype(np.float32) * 1e4).astype(inputs["X"].dtype)
    inputs["X"][1] = -1e4
    inputs["X"][2, 3:] = -np.inf
    inputs["X"][3, :700] = -np.inf
    return inputs


def low(p):
    return {"X": np.full((p.rows, p.columns), -300, np.float16)}


def tiny_and_large(scale):
    """A row of elements of about this size."""

    def inputs(p):
        found = make_inputs(p.declaration, p)
        return found | {"X": (found["X"].astype(np.float32) * scale).astype(np.float16)}

    return inputs


def along(p, eps_rows=()):
    """Inputs whose gradients lie along what was normalised, so that every term counts; rows in `eps_rows` are tiny."""
    inputs = make_inputs(p.declaration, p)
    x = inputs["X"].astype(np.float32)
    x[list(eps_rows)] *= 2.0**-9
    signed = np.sign(inputs["W"].astype(np.float32)) * np.sign(x) * np.abs(inputs["dOut"].astype(np.float32))
    kind = NUMPY[p.dtype]
    return inputs | {"X": x.astype(kind), "dOut": signed.astype(kind)}


def near_one(p):
    inputs = make_inputs(p.declaration, p)
    return inputs | {"dOut": (1 + 0.1 * inputs["dOut"].astype(np.float32)).astype(np.float16)}


def large(p):
    return {
        name: (each.astype(np.float32) * 40).astype(each.dtype) for name, each in make_inputs(p.declaration, p).items()
    }


def small_scales(p):
    """Scales so small that the bias counts."""
    return make_inputs(p.declaration, p) | {name: np.full(1, 0.1, np.float32) for name in ("ScaleA", "ScaleB")}


def alternate_groups(p):
    return make_inputs(p.declaration, p) | {"Offsets": group_ends("alternate", p.tokens, p.experts)}


def far_rows(knobs, dtype="bfloat16", columns=24, arithmetic="fused"):
    """Softmax of rows far from zero, of the lowest and the highest numbers, and of infinities."""
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
    found = run(Softmax, p, schedule(Softmax, **knobs), {"X": x}, device=device, arithmetic=arithmetic)["Out"]
    with np.errstate(invalid="ignore"):
        exact = Softmax.reference(np, x.astype(float))
    np.testing.assert_allclose(found.astype(float), exact, rtol=8e-3 if dtype == "bfloat16" else 1e-3, atol=1e-6)


def far_from_zero(knobs):
    """Rows whose elements differ by a thousandth of their mean; of equal elements; and with another mean in the first tile."""
    p = LayerNorm.problem(rows=3, columns=1000, dtype="float16", weighted=False, biased=False)
    x = np.random.default_rng(0).integers(1000, 1003, (3, 1000)).astype(np.float16)
    x[1], x[2, :512] = 7, 1010
    out = run_schedule(LayerNorm, p, schedule(LayerNorm, **knobs), {"X": x})["Out"].astype(float)
    exact = call_reference(LayerNorm, np, p, {"X": x.astype(float)})[0]
    np.testing.assert_allclose(out, exact, rtol=2e-3, atol=2e-3)


def gates(activation):
    """Gates from -6 to 6, each with a small error of its own."""
    p = Glu.problem(rows=1, columns=600, activation=activation, dtype="float16")
    gate = np.linspace(-6, 6, 600).astype(np.float16)[None]
    given = {"Gate": gate, "Up": np.ones_like(gate)}
    out = run_schedule(Glu, p, schedule(Glu, TILE_COLUMNS=256), given)["Out"]
    exact = call_reference(Glu, np, p, {name: each.astype(float) for name, each in given.items()})[0]
    np.testing.assert_allclose(out.astype(float), exact, rtol=1e-3, atol=1e-6)


def losses(p, knobs, given, arithmetic="rounded"):
    """(losses and log-sum-exps, the exact ones)."""
    device = SmallDevice(arch="sm_90")
    outputs = run(CrossEntropy, p, schedule(CrossEntropy, **knobs), given, device=device, arithmetic=arithmetic)
    exact = call_reference(CrossEntropy, np, p, given | {"Logits": given["Logits"].astype(float)})
    return (outputs["Loss"], outputs["Lse"]), exact


def masked_logits(knobs, smoothed):
    """Low logits, lanes and tiles without one, a large one first, and labels that are ignored or no column."""
    p = CrossEntropy.problem(rows=5, columns=3000, smoothed=smoothed)
    logits = np.full((5, 3000), -300, np.float32)
    logits[0, 0], logits[2, 2999] = 200, -100
    if not smoothed:
        logits[1, :2998] = -np.inf
    given = {"Logits": logits.astype(ml_dtypes.bfloat16), "Labels": np.array([0, 2999, -100, 3000, -1])}
    found, exact = losses(p, knobs, given)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    assert np.isnan(found[0]).tolist() == [False, False, False, True, True]


def far_logits(knobs, columns, smoothed, dtype="float32", arithmetic="rounded"):
    """Rows near and far from zero, which are all as exact: the loss is of differences. Rows of the lowest and the highest numbers,
    and of infinities.
    """
    rng, kind = np.random.default_rng(columns), NUMPY[dtype]
    logits = rng.standard_normal((11, columns)).astype(np.float32)
    logits[1] += 1e6
    logits[2] -= 1e6
    logits[3] -= 2e38
    largest = float(ml_dtypes.finfo(kind).max)
    most = largest / (2 * columns) if smoothed else largest  # the sum of all differences is to be finite
    logits[4] = -2e38 + most / 30 * logits[4]
    logits[5] = -largest
    logits[6] = -most
    logits[6, columns // 2] = 1
    logits[7] = 0
    logits[7, columns // 3] = most
    logits[8, : columns * 3 // 4] = -np.inf
    logits[9] = -np.inf
    logits[10, columns - 1] = np.inf
    labels = rng.integers(0, columns, 11)
    labels[[6, 7, 8]] = columns // 2, columns // 3, columns - 1
    p = CrossEntropy.problem(rows=11, columns=columns, smoothed=smoothed, dtype=dtype)
    (loss, lse), exact = losses(p, knobs, {"Logits": logits.astype(kind), "Labels": labels}, arithmetic)
    np.testing.assert_allclose(loss, exact[0], rtol=3e-6, atol=1e-6)
    np.testing.assert_allclose(lse, exact[1], rtol=1e-6, atol=1e-6)
    assert np.isnan(loss[-2:]).all()
    assert np.isfinite(loss[: 8 if smoothed else 9]).all()


class WithoutEpsilon(RmsNormBackward):
    """Nothing keeps what is divided by from being 0."""

    name = "without_epsilon"
    eps = ts.scalar(0.0)


QUANTISED = {"TILE_ROWS": 2, "TILE_COLUMNS": 512, "loads": "plain"}


def rows_of_zeros():
    p = kernel_named("rms_norm_quantized").problem(rows=3, columns=40)
    inputs = make_inputs(p.declaration, p)
    inputs["X"][1] = 0
    found = run_schedule(p.declaration, p, schedule(p.declaration, **QUANTISED), inputs)
    assert not found["Out"][1].astype(float).any()
    assert found["Scale"][1] > 0
    assert found["Out"][[0, 2]].astype(float).any(axis=1).all()


def without_epsilon(knobs):
    p = WithoutEpsilon.problem(rows=3, columns=40, dtype="float16")
    pinned = PINNED["rms_norm_backward"] | {"TILE_ROWS": 2}
    check(WithoutEpsilon, p, schedule(WithoutEpsilon, **pinned | knobs), along(p))


WALKS: tuple[dict, ...] = (
    {"TILE_COLUMNS": 1024},
    {"TILE_COLUMNS": 512},
    {"TILE_COLUMNS": 512, "HOLD": False},
    {"TILE_COLUMNS": 512, "loads": "gather", "TILE_ROWS": 2},
    {"TILE_COLUMNS": 1024, "PERSISTENT": True, "TILE_ROWS": 2, "loads": "tma", "occupancy": 1},
    {"TILE_COLUMNS": 512, "PERSISTENT": True, "HOLD": False, "loads": "tma", "occupancy": 1},
)
"""How rows are walked: whole, in several tiles, read twice, gathered, and by blocks that stay."""
BACKWARD_WALKS: tuple[dict, ...] = (
    {"TILE_COLUMNS": 1024},
    {"TILE_COLUMNS": 1024, "AHEAD": True, "TILE_ROWS": 2},
    {"TILE_COLUMNS": 512, "AHEAD": True},
    {"TILE_COLUMNS": 512, "loads": "gather", "TILE_ROWS": 2},
    {"TILE_COLUMNS": 512, "HOLD": False, "TILE_ROWS": 2, "loads": "tma"},
)
"""Whole, read ahead, in several tiles, and read twice."""
NARROW = {"TILE_M": 16, "SWAP": True}
EPILOGUE = {"bias": True, "residual": True}
BY_ROW = {"out_dtype": "float8_e4m3fn", "out_scales": "row"}


def cases_of(kernel):
    """The cases of a kernel, by name."""
    made: dict[str, list] = {
        "softmax": [
            *(partial(right, kernel, walk, rows=7, columns=1000) for walk in WALKS[:5]),
            *(partial(right, kernel, walk, far_masked, rows=5, columns=1000) for walk in WALKS[:5]),
            *(partial(right, kernel, walk, low, rows=2, columns=1023, dtype="float16") for walk in WALKS[:5]),
            partial(far_rows, WALKS[2]),
        ],
        "rms_norm": [
            *(
                partial(right, kernel, walk, rows=7, columns=1000, residual=residual)
                for residual in (False, True)
                for walk in WALKS
            ),
            *(
                partial(right, kernel, WALKS[1], tiny_and_large(scale), rows=1, columns=512, dtype="float16")
                for scale in (1e-3, 1000.0)
            ),
            *(
                partial(passes, "rms_norm_quantized", QUANTISED, rows=7, columns=1000, residual=True, static=static)
                for static in (False, True)
            ),
            rows_of_zeros,
        ],
        "layer_norm": [
            *(partial(passes, kernel, walk, rows=11, columns=1000) for walk in WALKS),
            *(partial(far_from_zero, walk) for walk in WALKS),
        ],
        "glu": [
            *(
                partial(passes, kernel, knobs, rows=5, columns=600, activation=activation, dtype="float16")
                for activation in ("silu", "gelu", "gelu_tanh")
                for knobs in (
                    {"TILE_COLUMNS": 256},
                    {"TILE_COLUMNS": 256, "PERSISTENT": True, "TILE_ROWS": 2},
                    {"TILE_COLUMNS": 512, "TILE_ROWS": 4, "loads": "gather"},
                )
            ),
            *(partial(gates, activation) for activation in ("silu", "gelu", "gelu_tanh")),
            partial(passes, "glu_quantized", QUANTISED, rows=5, columns=600, dtype="float16"),
        ],
        "rope": [
            partial(
                passes,
                name,
                {"TILE_SEQ": tile, "TILE_HEADS": 4},
                **{"batch": 2, "seq": 5, "k_heads": 4, "parts": parts, "width": 24, "dtype": "float16"} | more,
            )
            for name in ("rope", "rope_in_place")
            for parts in (1, 2)
            for tile, more in ((2, {"q_heads": 6, "tables": 2}), (1, {"q_heads": 9, "tables": 1}))
        ],
        "cross_entropy": [
            *(
                case
                for smoothed in (False, True)
                for knobs in (
                    {"TILE_COLUMNS": 4096},
                    {"TILE_COLUMNS": 512, "GROUP": 2},
                    {"TILE_COLUMNS": 512, "GROUP": 2, "SPLITS": 2},
                    {"TILE_COLUMNS": 512, "TILE_ROWS": 4, "loads": "gather"},
                )
                for case in (
                    partial(passes, kernel, knobs, rows=5, columns=3000, smoothed=smoothed, dtype="float16"),
                    partial(masked_logits, knobs, smoothed),
                )
            ),
            *(
                partial(far_logits, {"TILE_COLUMNS": 256} | knobs, columns, smoothed)
                for columns, knobs in (
                    (33, {}),
                    (1300, {}),
                    (1300, {"SPLITS": 4}),
                    (1025, {"TILE_ROWS": 4, "loads": "gather"}),
                    (1281, {"SPLITS": 2}),
                )
                for smoothed in (False, True)
            ),
        ],
        "rms_norm_backward": [
            *(
                partial(
                    right,
                    kernel,
                    walk,
                    partial(along, eps_rows=[1, 5]),
                    rows=37,
                    columns=600,
                    residual=residual,
                    dtype="float16",
                )
                for residual in (False, True)
                for walk in BACKWARD_WALKS
            ),
            partial(  # more parts than are read at once
                right, kernel, {"BLOCKS": 132, "TILE_COLUMNS": 512}, along, rows=100, columns=40, dtype="float16"
            ),
            *(partial(without_epsilon, walk) for walk in BACKWARD_WALKS),
        ],
        "softmax_backward": [
            partial(right, kernel, walk, near_one, rows=7, columns=1000, dtype="float16") for walk in WALKS[:5]
        ],
        "matmul": [
            *(
                partial(right, kernel, knobs, m=450, n=250, k=200, b_layout="column")
                for knobs in (
                    {},
                    {"PERSISTENT": True},
                    {"REST_N": 32},
                    {"SPLIT_K": 4},
                    {"GROUP_M": 1},
                    {"SPLIT_K": 8, "TILE_K": 64},
                )
            ),
            *(
                partial(right, kernel, knobs, inputs, m=130, n=75, k=101, dtype="float16")
                for knobs, inputs in (
                    ({"PAD": True}, None),
                    ({"SPLIT_K": 2}, None),
                    ({"REST_N": 32, "PAD": True}, None),
                    ({"REST_N": 32}, None),
                    ({}, large),
                )
            ),
        ],
        "matmul_epilogue": [
            *(
                partial(passes, kernel, knobs, m=150, n=150, k=72, **EPILOGUE, activation=activation)
                for activation, knobs in (
                    ("relu", {}),
                    ("squared_relu", {"REST_N": 32}),
                    ("silu", {"SPLIT_K": 2}),
                    ("gelu_tanh", {"SPLIT_K": -2}),
                    ("gelu", {"PAD": True}),
                )
            ),
            partial(passes, kernel, {}, m=150, n=150, k=72, **EPILOGUE, activation="silu", gate=True),
            partial(passes, kernel, {"PAD": True}, m=150, n=150, k=75, activation="silu", gate=True),
            partial(passes, kernel, {}, m=70, n=80, k=72, bias=True, out_dtype="float8_e4m3fn"),
            partial(passes, kernel, {}, m=70, n=80, k=72, bias=True, **BY_ROW),
        ],
        "scaled_matmul": [
            *(
                partial(right, kernel, knobs, m=100, n=144, k=336, bias=True)
                for knobs in (NARROW, NARROW | {"SPLIT_K": 2}, {"PERSISTENT": True})
            ),
            *(
                partial(right, kernel, knobs, small_scales, m=70, n=144, k=336, scales="tensor", bias=True)
                for knobs in ({}, {"SPLIT_K": 4})
            ),
            partial(right, kernel, {}, m=100, n=272, k=304, scales="block", bias=True),
            partial(right, kernel, {"SPLIT_K": 2}, m=70, n=144, k=304, scales="block"),
            partial(right, kernel, {"REST_N": 32}, m=70, n=272, k=144, bias=True),
            partial(right, kernel, {"TILE_K": 128}, m=70, n=144, k=304, scales="block"),
        ],
        "scaled_matmul_epilogue": [
            partial(passes, kernel, {}, m=100, n=144, k=304, **EPILOGUE, activation="silu"),
            partial(passes, kernel, NARROW, m=70, n=144, k=304, gate=True, activation="silu"),
            partial(passes, kernel, {}, m=70, n=272, k=304, scales="block", gate=True, bias=True),
            partial(passes, kernel, {"SPLIT_K": 2}, m=70, n=144, k=336, **EPILOGUE, activation="gelu"),
            partial(passes, kernel, {"REST_N": 64}, m=70, n=272, k=144, **EPILOGUE),
            partial(passes, kernel, {}, m=70, n=80, k=80, activation="relu", **BY_ROW),
            partial(passes, kernel, {"SPLIT_K": 2}, m=70, n=80, k=272, scales="tensor", activation="silu"),
            partial(passes, kernel, {"SPLIT_K": 2}, m=70, n=144, k=304, scales="block", residual=True),
        ],
        "grouped_matmul_epilogue": [
            partial(passes, kernel, {"PERSISTENT": True, "SWAP": True}, tokens=210, experts=7, n=150, k=72, **EPILOGUE),
            partial(passes, kernel, NARROW, tokens=90, experts=5, n=150, k=72, gate=True, activation="silu"),
            partial(passes, kernel, {"STORE": "view"}, tokens=90, experts=3, n=80, k=72, gate=True, **EPILOGUE),
            partial(passes, kernel, {}, tokens=90, experts=3, n=75, k=75, gate=True, out_dtype="float8_e4m3fn"),
            partial(passes, kernel, {}, tokens=90, experts=3, n=80, k=72, **BY_ROW),
        ],
        "grouped_matmul": [
            *(
                partial(right, kernel, knobs, tokens=210, experts=17, n=80, k=104, b_layout="column")
                for knobs in (NARROW, {"STORE": "view", "PERSISTENT": False}, {"PERSISTENT": False})
            ),
            partial(right, kernel, {}, alternate_groups, tokens=90, experts=4, n=75, k=70),
        ],
    }
    return dict(enumerate(made[kernel], 1))


MUTATIONS: dict[str, dict[str, tuple]] = {
    "softmax": {
        "maximum not taken": (
            "exponentials = power(x, ct.max(x, axis=1, keepdims=True))",
            "exponentials = power(x, 0.0)",
            15,
        ),
        "maximum of the first tile": ("highest = ct.maximum(highest, tiles[j])", "highest = highest", 7),
        "maximum not kept": ("        highest = higher\n", "", 13),
        "scaled before the maximum is taken off": ("(x - maximum) * LOG2_E", "x * LOG2_E - maximum * LOG2_E", 16),
        "base 2": ("(x - maximum) * LOG2_E", "(x - maximum)", 6),
        "sum not rescaled": ("total = total * power(highest, higher) +", "total = total +", 3),
        "sum not rescaled at the end": ("ct.sum(total * power(highest, row_max),", "ct.sum(total,", 8),
        "sum of the first tile": ("total = total + exponentials[j]", "total = total", 12),
        "not divided": (
            "return ct.truediv(1.0, total, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)",
            "return 1.0 + 0.0 * total",
            15,
        ),
        "columns beyond the last count": ("if const.COLUMNS % const.TILE_COLUMNS != 0:", "if False:", 15),
        "one column too many": (
            "column_indices(j, const) < const.COLUMNS",
            "column_indices(j, const) <= const.COLUMNS",
            15,
        ),
        "unseen elements make NaN": ("LOWEST = -3.4e38", "LOWEST = -math.inf", 8),
        "lowest maximum too high": ("LOWEST = -3.4e38", "LOWEST = 10.0", 13),
        "persistent blocks skip rows": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):", 5),
        "tiles of the first column": ("ct.load(array, (row, column)", "ct.load(array, (row, 0 * column)", 7),
    },
    "rms_norm": {
        "mean over the tile": ("keepdims=True) / const.COLUMNS", "keepdims=True) / const.TILE_COLUMNS", 5),
        "no epsilon": ("/ const.COLUMNS + eps)", "/ const.COLUMNS)", 13),
        "root for its inverse": ("ct.rsqrt(", "ct.sqrt(", 14),
        "not weighed": ("scale_of(x * x, eps, const) * weight", "scale_of(x * x, eps, const)", 14),
        "weights of the first tile": ("tile = ct.load(array, (column,)", "tile = ct.load(array, (0 * column,)", 2),
        "weights of another tile, held": (
            "tiles[j] * scale * load_vector(W, j, const)",
            "tiles[j] * scale * load_vector(W, 0, const)",
            2,
        ),
        "squares of the first tile": ("squares = squares + tiles[j] * tiles[j]", "squares = squares", 2),
        "squares not squared": ("squares = squares + x * x", "squares = squares + x", 6),
        "tiles of the first column": ("ct.load(array, (row, column)", "ct.load(array, (row, 0 * column)", 2),
        "gathers of the first column": (
            "return column * const.TILE_COLUMNS +",
            "return 0 * column * const.TILE_COLUMNS +",
            4,
        ),
        "gathers of the first row": ("rows = row * const.TILE_ROWS +", "rows = 0 * row * const.TILE_ROWS +", 4),
        "padding undetermined": ("padding_mode=ct.PaddingMode.ZERO,\n                       allow_tma", "allow_tma", 5),
        "persistent blocks skip rows": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):", 5),
        "persistent blocks end early": ("ct.cdiv(X.shape[0], const.TILE_ROWS)", "X.shape[0] // const.TILE_ROWS", 5),
        "the last tile left out": (
            "- 1) // const.TILE_COLUMNS",
            "- 1) // const.TILE_COLUMNS - (const.COLUMNS > const.TILE_COLUMNS)",
            2,
        ),
        "residual left out": ("x = x + load_rows(R", "x = x + 0.0 * load_rows(R", 11),
        "sum not stored": ("if Sum is not None:", "if False:", 11),
        "residual stored for the sum": (
            "store_rows(Sum, row, j, x, const)",
            "store_rows(Sum, row, j, load_rows(R, row, j, const), const)",
            11,
        ),
        "residual left out of the second pass": (
            "summed(X, R, None, row, j, const)",
            "summed(X, None, None, row, j, const)",
            9,
        ),
        "scaled in float16": ("column, const).astype(ct.float32)", "column, const)", 14),
        "quantised without a scale": ("x = tiles[j] * inverse", "x = tiles[j]", 15),
        "multiplied by the scale": ("inverse = 1.0 / scale", "inverse = scale", 16),
        "the largest of the first tile": ("highest = ct.maximum(highest, ct.abs(tiles[j]))", "highest = highest", 15),
        "the largest without its sign": ("ct.abs(tiles[0])", "tiles[0]", 15),
        "the largest of other rows": ("keepdims=True), LEAST_HIGHEST)", "keepdims=True), ct.max(highest))", 15),
        "other rows' scale": ("inverse = 1.0 / scale", "inverse = 1.0 / ct.maximum(scale, ct.max(scale))", 15),
        "elements that do not fit": ("if Given is not None:", "if False:", 16),
        "negative elements that do not fit": ("ct.where(x < -LARGEST, -LARGEST, x)", "x", 16),
        "scales larger than needed": ("LEAST_HIGHEST) / LARGEST", "LEAST_HIGHEST) / 440.0", 15),
        "rows of zeros divided by zero": ("LEAST_HIGHEST = 1e-12", "LEAST_HIGHEST = 0.0", 17),
        "residual left out of quantised rows": ("R if residual else None, W, Given", "None, W, Given", 15),
    },
    "matmul": {
        "the last step left out": ("begin, end = 0, steps", "begin, end = 0, steps - 1", 10),
        "steps rounded down": ("steps = ct.cdiv(A.shape[1], const.TILE_K)", "steps = A.shape[1] // const.TILE_K", 10),
        "k not padded": (
            "(const.TILE_M, const.TILE_K), padding_mode=ct.PaddingMode.ZERO",
            "(const.TILE_M, const.TILE_K)",
            10,
        ),
        "sum not kept": ("acc = ct.mma(a, b, acc)", "acc = ct.mma(a, b, acc * 0.0)", 10),
        "sum in float16": ("(const.TILE_M, const.TILE_N), ct.float32", "(const.TILE_M, const.TILE_N), ct.float16", 2),
        "shares overlap": ("steps * work.share // const.SPLIT_K", "steps * work.share // (const.SPLIT_K + 1)", 8),
        "shares leave gaps": (
            "steps * (work.share + 1) // const.SPLIT_K",
            "steps // const.SPLIT_K * (work.share + 1)",
            4,
        ),
        "one share left out": ("ct.static_iter(range(SPLIT_K))", "ct.static_iter(range(1, SPLIT_K))", 8),
        "every share in one place": (
            "(work.share, work.row, column), tile",
            "(0 * work.share, work.row, column), tile",
            8,
        ),
        "last group too tall": ("rows = min(const.GROUP_M, tiles_m - first)", "rows = const.GROUP_M", 11),
        "groups overlap": ("(const.GROUP_M * tiles_n) * const.GROUP_M", "(const.GROUP_M * tiles_n)", 2),
        "row and column exchanged": (
            "Work(first + within % rows, within // rows",
            "Work(within // rows, first + within % rows",
            10,
        ),
        "persistent blocks skip work": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):", 2),
        "second part is the first": (
            "return work.column * (const.TILE_N // const.REST_N + 1)",
            "return work.column * (const.TILE_N // const.REST_N)",
            3,
        ),
        "second part of the next tile": (
            "+ const.TILE_N // const.REST_N\n",
            "+ const.TILE_N // const.REST_N + 1\n",
            10,
        ),
        "second part beyond the edge": (
            "second = min(second, ct.cdiv(B.shape[1], const.REST_N) - 1)",
            "second = second",
            3,
        ),
        "second part stored beyond the edge": ("if column * const.REST_N < Out.shape[1]:", "if column >= 0:", 3),
        "first parts side by side": ("else const.TILE_N + const.REST_N\n", "else const.TILE_N\n", 3),
        "copies of the first rows": (
            "elements_of(ct.bid(0), ct.bid(1), ROWS, COLUMNS), tile",
            "elements_of(0 * ct.bid(0), ct.bid(1), ROWS, COLUMNS), tile",
            9,
        ),
        "copies without zeros": ("(ROWS, COLUMNS), padding_mode=ct.PaddingMode.ZERO", "(ROWS, COLUMNS)", 9),
        "sums beyond the edge": ("check_bounds=not COMBINE_EVEN)\n\n\ndef", "check_bounds=False)\n\n\ndef", 8),
    },
    "scaled_matmul": {
        "a row's scale for every row": ("sums * rows[:, None]", "sums * ct.max(rows)", 3),
        "scales of the first rows": ("ct.load(ScaleA, (work.row,)", "ct.load(ScaleA, (0 * work.row,)", 3),
        "scales of the first columns": ("view.load((column_of(work", "view.load((0 * column_of(work", 4),
        "one of two scales": ("ct.load(ScaleA, (0,), (1,)).item() * ct.load(ScaleB", "ct.load(ScaleB", 4),
        "bias scaled": (
            "sums = sums + vector_of(Bias, work, PART, const)",
            "sums = sums + vector_of(Bias, work, PART, const) * only_scale(ScaleA, ScaleB)",
            4,
        ),
        "bias left out of shares": ("if bias:", "if False:", 5),
        "shares not scaled": (
            "total = total * ct.gather(ScaleA, rows, check_bounds=not COMBINE_EVEN)",
            "total = total",
            2,
        ),
        "sum not transposed back": ("ct.transpose(acc) if const.SWAP else acc", "acc", 1),
        "operands exchanged, not transposed": ("ct.mma(ct.transpose(b), ct.transpose(a)", "ct.mma(b, a", 1),
        "steps rounded down": ("steps = ct.cdiv(A.shape[1], length)", "steps = A.shape[1] // length", 4),
        "shares leave gaps": (
            "steps * (work.share + 1) // const.SPLIT_K",
            "steps // const.SPLIT_K * (work.share + 1)",
            5,
        ),
        "scales of the first step": ("ct.load(ScaleA, (step, work.row)", "ct.load(ScaleA, (0 * step, work.row)", 6),
        "scales of the first block of rows": ("(step, work.row), (1, const", "(step, 0 * work.row), (1, const", 6),
        "scales of another block of columns": ("work.column * const.TILE_N // BLOCK, step", "work.column, step", 6),
        "block scales of the first step": ("const.TILE_N // BLOCK, step))", "const.TILE_N // BLOCK, 0 * step))", 6),
        "steps of one block counted from its end": ("range(step * inner, stop", "range(stop - 1, stop", 6),
        "sums not begun anew": ("part, stop = zeros(0, const)", "part, stop = sums", 6),
        "sums counted twice": ("ct.where(step < 0, sums", "ct.where(step > 0, sums", 9),
        "scaled again behind shares": ("elif not BLOCK_SCALES:", "else:", 7),
        "the last step of two parts alone": (
            "return sums + ct.mma(a, b, zeros(PART",
            "return ct.mma(a, b, zeros(PART",
            8,
        ),
        "a second part's columns loaded from the first's": (
            "more.load((step, second)",
            "more.load((step, 0 * second)",
            8,
        ),
        "a second part's scales from the first's": (
            "return work.column * (const.TILE_N",
            "return 0 * (const.TILE_N",
            8,
        ),
        "k not padded": (
            "(const.TILE_M, const.TILE_K), padding_mode=ct.PaddingMode.ZERO",
            "(const.TILE_M, const.TILE_K)",
            4,
        ),
        "every share in one place": (
            "(work.share, work.row, work.column), sums",
            "(0, work.row, work.column), sums",
            5,
        ),
        "persistent blocks skip work": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):", 3),
        "sums rounded before they are scaled": (
            "sums = sums * only_scale",
            "sums = sums.astype(ct.float8_e4m3fn) * only_scale",
            4,
        ),
    },
    "grouped_matmul": {
        "the next group's rows overwritten": ("mask=(rows < group.end) & (columns < width)", "mask=columns < width", 4),
        "columns beyond the edge": ("mask=(rows < group.end) & (columns < width)", "mask=rows < group.end", 4),
        "the view goes on": ("C.slice(0, 0, group.end)", "C.slice(0, 0, C.shape[0])", 2),
        "every group from row 0": ("begins + (slot - before) * TILE_M", "(slot - before) * TILE_M", 4),
        "a group begins where it ends": ("ct.maximum(groups - 1, 0)", "groups", 4),
        "the first group begins late": ("begins = ct.where(groups > 0, begins, 0)", "begins = begins", 3),
        "tiles rounded down": (
            "(ct.maximum(ends - begins, 0) + (TILE_M - 1)) // TILE_M",
            "(ends - begins) // TILE_M",
            4,
        ),
        "the next group's matrix": ("columns.load((group.index, step", "columns.load((group.index * 0, step", 4),
        "a group too many": ("(slot < before + tiles)", "(slot <= before + tiles)", 4),
        "tiles counted from the end of their group": (
            "ct.cumsum(tiles, axis=0) - tiles",
            "ct.cumsum(tiles, axis=0)",
            4,
        ),
        "sum not transposed back": ("acc, gate = ct.transpose(acc), None", "acc, gate = acc, None", 1),
        "steps rounded down": ("range(ct.cdiv(A.shape[1], const.TILE_K))", "range(A.shape[1] // const.TILE_K)", 4),
        "k not padded": ("padding_mode=ct.PaddingMode.ZERO, traversal_steps=steps", "traversal_steps=steps", 4),
        "tiles of A begin at multiples of their size": ("steps = (1, COLUMNS)", "steps = (const.TILE_M, COLUMNS)", 4),
        "persistent blocks skip work": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):", 4),
        "blocks without work": ("elif ct.bid(0) < used * tiles_n:", "else:", 3),
    },
    "layer_norm": {
        "mean over the tile": ("keepdims=True) / const.COLUMNS", "keepdims=True) / const.TILE_COLUMNS", 11),
        "no epsilon": ("mean_of(squares, const) + eps)", "mean_of(squares, const))", 11),
        "mean not taken": ("x - mean, 0.0)", "x, 0.0)", 11),
        "padding differs from the mean": ("if const.COLUMNS % const.TILE_COLUMNS != 0:", "if False:", 11),
        "mean of the first tile": ("total = total + tiles[j]", "total = total", 8),
        "squares of the last tile": (
            "squares = squares + far * far\n        scale",
            "squares = far * far\n        scale",
            8,
        ),
        "mean not corrected": ("mean = near + off", "mean = near", 9),
        "variance not corrected": ("- off * off, 0.0", "- 0.0 * off, 0.0", 9),
        "no weight": ("x = x * weight", "x = x", 5),
        "no bias": ("x = x + bias", "x = x", 5),
        "weight of the first tile": ("load_vector(W, j, const) if", "load_vector(W, 0, const) if", 2),
        "bias of the first tile": ("load_vector(B, j, const) if", "load_vector(B, 0, const) if", 2),
        "persistent blocks skip rows": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):", 6),
        "square of what is far from zero": (
            "far * scale_of(far * far,",
            "far * scale_of(x * x - mean_of(x, const) * x,",
            11,
        ),
    },
    "glu": {
        "base 2": ("x * -LOG2_E", "x * -1.0", 10),
        "not gated": ("activated(gate, activation) * up", "activated(gate, activation)", 2),
        "gate and up exchanged": ("activated(gate, activation) * up", "activated(up, activation) * gate", 10),
        "the cube left out": ("1.5957691216 + 0.0713548163 * x * x", "1.5957691216", 12),
        "gelu is silu": ("if activation == GELU:", "if False:", 11),
        "the other tail": ("x < 0.0, beyond, 1.0 - beyond", "x > 0.0, beyond, 1.0 - beyond", 11),
        "a coefficient's sign": ("-0.18628806", "0.18628806", 11),
        "columns of the first tile": ("tile % column_tiles(const)", "tile % 1", 10),
        "quantised before it is gated": ("activation) * load_rows(Up, row, j, const)", "activation)", 13),
        "persistent blocks end early": ("TILE_ROWS) * column_tiles(const)\n", "TILE_ROWS)\n", 2),
    },
    "rope": {
        "turned the other way": ("pairs[0] * cos - pairs[1] * sin", "pairs[0] * cos + pairs[1] * sin", 5),
        "the second elements kept": ("pairs[1] * cos + pairs[0] * sin", "pairs[1]", 5),
        "the second half from the first": (
            "array, place, heads, 1, const.TILE_HALF",
            "array, place, heads, 0, const.TILE_HALF",
            7,
        ),
        "the second half stored as the first": (
            "store_part(out, place, heads, 1,",
            "store_part(out, place, heads, 0,",
            7,
        ),
        "neighbours exchanged": ("(0, 0, 0, 0, 1), shape", "(0, 0, 0, 0, 0), shape", 5),
        "keys of the first tile": (
            "load_part(array, place, heads, 0, const.TILE_HALF",
            "load_part(array, (place[0], place[1], 0), heads, 0, const.TILE_HALF",
            7,
        ),
        "keys left out": ("if head * keys[1] < keys[0]:", "if head * keys[1] < 0:", 2),
        "keys stored as queries": (
            "store_rotated(OutK, place, keys[1], k,",
            "store_rotated(OutK, place, keys[1], q,",
            5,
        ),
        "angles of the first sequence": ("min(batch, tables - 1)", "0", 5),
        "angles of the first positions": ("(batch, seq, 0),", "(batch, 0, 0),", 5),
        "angles not of the batch": ("min(batch, tables - 1)", "batch", 2),
        "sines for cosines": ("angles(Sin, table", "angles(Cos, table", 5),
    },
    "cross_entropy": {
        "maximum not kept": ("return higher, total, logits", "return highest, total, logits", 8),
        "maximum of a group's first tile": ("largest = ct.maximum(largest, tiles[i])", "largest = largest", 4),
        "sum not rescaled": (
            "total = total * power(highest - higher)",
            "total = total + 0.0 * power(highest - higher)",
            8,
        ),
        "sum not rescaled at the end": (
            "ct.sum(total * power(highest - row_max)",
            "ct.sum(total + 0.0 * power(highest - row_max)",
            8,
        ),
        "base 2": ("ct.exp2(x * LOG2_E", "ct.exp2(x", 23),
        "padding counts": ("if const.COLUMNS % const.TILE_COLUMNS != 0:", "if False:", 8),
        "padding is summed up": ("if last else far)", "if False else far)", 10),
        "tiles behind the groups left out": ("if rest > 0 and", "if rest > 1 and", 8),
        "every part takes the rest": ("(const.SPLITS == 1 or split == const.SPLITS - 1)", "split >= 0", 6),
        "a part begins late": ("range(split * share,", "range(split * share + 1,", 8),
        "a part ends late": ("min(split * share + share, groups)", "groups", 6),
        "parts not rescaled": ("power(parts - highest)", "power(0.0 * parts)", 6),
        "the lowest is not finite": ("LOWEST = -3.4028234663852886e38", "LOWEST = -math.inf", 8),
        "the lowest is above some logits": ("LOWEST = -3.4028234663852886e38", "LOWEST = -3.4e38", 23),
        "the loss is made of the log-sum-exp": (
            "(highest - target)\n",
            "(highest + log_total - target) - log_total\n",
            10,
        ),
        "logits are scaled before they are subtracted": (
            "power(tiles[i].astype(ct.float32) - higher)",
            "ct.exp2(tiles[i].astype(ct.float32) * LOG2_E - higher * LOG2_E, flush_to_zero=True)",
            8,
        ),
        "an infinite logit": ("highest < math.inf", "highest <= math.inf", 23),
        "logits are summed up from 0": ("ct.where(near > -math.inf, near, 0.0)", "0.0 * near", 24),
        "logits less minus infinity": ("ct.where(near > -math.inf, near, 0.0)", "near", 24),
        "logits less padding": (
            "near = ct.max(within(first.astype(ct.float32), -math.inf, 0, const)",
            "near = ct.max(ct.maximum(first.astype(ct.float32), 0.0)",
            24,
        ),
        "not how far from the maximum": (
            "(highest - near - logits / const.COLUMNS)",
            "(highest - logits / const.COLUMNS)",
            10,
        ),
        "ignored rows count": ("label == ignore_index", "label == 3000", 8),
        "labels that are no column": ("ct.float32), math.nan)", "ct.float32), 0.0)", 8),
        "no smoothing": ("smoothing * (highest - near", "0.0 * (highest - near", 10),
        "the target counts whole": ("(1.0 - smoothing) *", "1.0 *", 24),
        "labels of the first rows": ("ct.load(Labels, (row,)", "ct.load(Labels, (0,)", 8),
        "the elements before the first aligned one left out": ("column, column - const.COLUMNS", "column, column", 25),
        "rows that begin anywhere read as if aligned": ("(unit - begin % unit) % unit", "0 * begin", 25),
        "tiles reach into the next row": ("const.COLUMNS - elements_of_16_bytes(array) + 1", "const.COLUMNS", 26),
        "natural for binary": ("ct.log2(total) * LN_2", "ct.log2(total)", 8),
    },
    "rms_norm_backward": {
        "mean over the tile": ("keepdims=True) / const.COLUMNS + eps", "keepdims=True) / const.TILE_COLUMNS + eps", 14),
        "no epsilon": ("/ const.COLUMNS + eps)", "/ const.COLUMNS)", 1),
        "root for its inverse": ("ct.rsqrt(", "ct.sqrt(", 14),
        "pull not scaled twice": ("(scale * scale / const.COLUMNS)", "(scale / const.COLUMNS)", 14),
        "pull summed, not averaged": ("(scale * scale / const.COLUMNS)", "(scale * scale)", 14),
        "no pull": ("scale * (weighed[j] - x[j] * pull)", "scale * weighed[j]", 14),
        "no pull, read twice": ("load_vector(W, j, const) - x * pull)", "load_vector(W, j, const))", 10),
        "the wrong way": ("weighed[j] - x[j] * pull", "weighed[j] + x[j] * pull", 14),
        "not weighed": ("gradients[j] * weight_of(W, weight, j, const)", "gradients[j]", 14),
        "weights of the first tile": ("load_vector(W, j, const) if", "load_vector(W, 0, const) if", 8),
        "dots not weighed, read twice": (
            "load_rows(dOut, row, j, const) * load_vector(W, j, const) * x",
            "load_rows(dOut, row, j, const) * x",
            10,
        ),
        "squares of the first tile": ("squares = squares + x[j] * x[j]", "squares = squares", 8),
        "dots of the first tile": ("dots = dots + weighed[j] * x[j]", "dots = dots", 8),
        "dW of weighed gradients": ("sums[j] + gradients[j] *", "sums[j] + weighed[j] *", 14),
        "dW not scaled": ("gradients[j] * (x[j] * scale)", "gradients[j] * x[j]", 14),
        "dW of the last row": ("sums[j] + gradients[j]", "gradients[j]", 1),
        "dW of the last row, read twice": ("+ load_part(Parts, j, const), const)", ", const)", 10),
        "dW begins with anything": (
            "store_part(Parts, j, ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32), const)",
            "pass",
            10,
        ),
        "a part counted for each row": ("part = ct.where(first, part, 0.0)", "part = part", 10),
        "parts of the first block": ("ct.store(Parts, (ct.bid(0), j)", "ct.store(Parts, (0, j)", 14),
        "parts of the first column": ("ct.store(Parts, (ct.bid(0), j)", "ct.store(Parts, (ct.bid(0), 0)", 10),
        "the first parts only": ("Parts, (i, ct.bid(0))", "Parts, (0, ct.bid(0))", 11),
        "parts of the first columns": ("Parts, (i, ct.bid(0))", "Parts, (i, 0)", 14),
        "the last parts only": ("total = total + ct.load(", "total = ct.load(", 11),
        "the last parts left out": ("ct.cdiv(Parts.shape[0], SUM_ROWS)", "Parts.shape[0] // SUM_ROWS", 14),
        "rows beyond the last count": ("scale = ct.where(places < rows, scale, 0.0)", "pass", 14),
        "the last row is none": ("places < rows, scale", "places < rows - 1, scale", 14),
        "blocks skip rows": (
            "row_tiles, ct.num_blocks(0)):\n            given",
            "row_tiles, ct.num_blocks(0) + 1):\n            given",
            1,
        ),
        "the same row twice": ("given = following", "given = given", 7),
        "ahead by one": ("min(row + ct.num_blocks(0), row_tiles - 1)", "min(row + 1, row_tiles - 1)", 7),
        "blocks skip rows, read twice": (
            "ct.cdiv(X.shape[0], const.TILE_ROWS), ct.num_blocks(0)):\n        squares",
            "ct.cdiv(X.shape[0], const.TILE_ROWS), ct.num_blocks(0) + 1):\n        squares",
            10,
        ),
        "no gradient of the sum": ("gradient = gradient + load_rows(dSum, row, j, const)", "gradient = gradient", 10),
        "the sum's gradient of the first tile": (
            "load_rows(dSum, row, j, const)",
            "load_rows(dSum, row, 0, const)",
            10,
        ),
    },
    "matmul_epilogue": {
        "no bias": ("acc = acc + bias.astype(ct.float32)", "pass", 1),
        "no residual": ("acc = acc + residual.astype(ct.float32)", "pass", 1),
        "the residual before the activation": (
            "acc = activated(acc,",
            "acc = activated(acc if residual is None else acc + residual,",
            1,
        ),
        "the sums activated, not the gate": (
            "activated(gate, row, column, extras) * acc",
            "activated(acc, row, column, extras) * gate",
            6,
        ),
        "no gate": ("activated(gate, row, column, extras) * acc", "activated(gate, row, column, extras)", 6),
        "a gate that is added": ("column, extras) * acc", "column, extras) + acc", 6),
        "multiplied by the scale": ("(1.0 / scale_of(extras.scale, row))", "scale_of(extras.scale, row)", 8),
        "every row divided by the first one's scale": ("ct.gather(scale, (row, 0)", "ct.gather(scale, (0 * row, 0)", 9),
        "relu of others": ("ct.where(acc < 0.0, 0.0, acc)", "ct.where(acc > 0.0, 0.0, acc)", 1),
        "not squared": ("return acc * acc", "return acc", 2),
        "logistic": ("return acc * logistic(acc)\n", "return logistic(acc)", 3),
        "another factor": ("1.5957691216", "0.7978845608", 4),
        "no cube": ("0.0713548163 * acc * acc", "0.0713548163 * acc", 4),
        "gelu by tanh is near, and relu is not gelu": ("return exact_gelu(acc)", "return relu(acc, row, column)", 5),
        "the bias of other columns": ("column = column + work.column * const.REST_N", "pass", 2),
        "the bias of the first columns": (
            "ct.gather(extras.bias, column)\n",
            "ct.gather(extras.bias, column % 64)\n",
            1,
        ),
        "the residual of the first tile": (".load(place)", ".load((0, 0))", 1),
        "no second part": ("if part == 0 or column_of", "if part == 0 or False and column_of", 2),
        "the gate of the first columns": ("gates.load((step, work.column)", "gates.load((step, 0)", 6),
        "the same product twice": ("gates.load((step, work.column)", "columns.load((step, work.column)", 6),
        "the gate is not copied": ("copy_tile(Gate, PaddedGate, PAD_ROWS, PAD_COLUMNS)", "pass", 7),
        "finished without the residual, behind shares": (
            "ct.gather(extras.residual, (row, column), check_bounds=not EVEN)",
            "None",
            3,
        ),
        "finished without the bias, behind shares": (
            "ct.gather(extras.bias, column, check_bounds=not EVEN)",
            "None",
            3,
        ),
        "the second share is left out": (
            "sum_of_shares(Partial, row, column, SPLIT_K, EVEN)",
            "sum_of_shares(Partial, row, column, 1, EVEN)",
            3,
        ),
    },
    "scaled_matmul_epilogue": {
        "the gate with the scales of B": ("scaled(gate, extras.scales[2]", "scaled(gate, extras.scales[1]", 2),
        "the gate not scaled": (
            "None if gate is None else scaled(gate, extras.scales[2], row, column, extras)",
            "gate",
            2,
        ),
        "one of two scales": ("acc * only_scale(extras.scales[0], scale)", "acc * only_scale(scale, scale)", 7),
        "the scales of the first row": ("ct.gather(extras.scales[0], row)", "ct.gather(extras.scales[0], 0 * row)", 1),
        "the scales of the first column": ("ct.gather(scale, column)", "ct.gather(scale, 0 * column)", 1),
        "a second part's scales from the first's": (
            "elements_of(work.row, place[1]",
            "elements_of(work.row, 0 * place[1]",
            5,
        ),
        "scaled behind the bias": (
            "acc = scaled(acc, extras.scales[1], row, column, extras)\n    if bias is not None:\n        acc = acc + bias.astype(ct.float32)\n",
            "acc = scaled(acc if bias is None else acc + bias.astype(ct.float32), extras.scales[1], row, column, extras)",
            1,
        ),
        "sums of blocks scaled again": ("if scale is None or scale.ndim == 2:", "if scale is None:", 3),
        "shares of blocks scaled again": ("if scale is None or scale.ndim == 2:", "if scale is None:", 8),
        "shares not scaled": ("acc = scaled(acc, extras.scales[1], row, column, extras)", "pass", 4),
        "blocks of the gate with the scales of B": (
            "main_loop(A, Gate, ScaleA, ScaleGate",
            "main_loop(A, Gate, ScaleA, ScaleB",
            3,
        ),
        "the same product twice": ("gates.load((step, work.column)", "columns.load((step, work.column)", 2),
        "the gate of the first columns": ("gates.load((step, work.column)", "gates.load((step, 0)", 2),
        "the gate is not transposed": ("ct.transpose(acc), ct.transpose(gate)", "ct.transpose(acc), gate", 2),
        "steps rounded down": ("range(ct.cdiv(A.shape[1], const.TILE_K))", "range(A.shape[1] // const.TILE_K)", 2),
        "the gate left out": ("None if gates is None else gates[part]", "None", 2),
        "no second part": (
            "if part == 0 or column_of(work, part, const) * const.REST_N < C.shape[1]:",
            "if part == 0:",
            5,
        ),
    },
    "grouped_matmul_epilogue": {
        "the scales of a group's first rows": (
            "residual, rows, columns, extras)",
            "residual, rows - group.row, columns, extras)",
            5,
        ),
        "the bias of the first group": (
            "ct.gather(extras.bias, (group.index, columns))",
            "ct.gather(extras.bias, (0, columns))",
            1,
        ),
        "the residual of the first rows": ("at = (group.row, column)", "at = (0, column)", 1),
        "the gate of the first group": ("gates.load((group.index, step, column)", "gates.load((0, step, column)", 2),
        "the same product twice": ("g = gates.load(", "g = columns.load(", 2),
        "the gate is not transposed": ("None if Gate is None else ct.transpose(gate)", "gate", 2),
        "no gate": ("finished(acc, gate, bias", "finished(acc, None, bias", 2),
        "the product of the gate is not summed": ("added(gate, a, g, const)", "added(acc, a, g, const)", 4),
        "persistent blocks skip tiles": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):", 1),
    },
    "softmax_backward": {
        "mean not taken": ("(gradients[j].astype(ct.float32) - mean)", "gradients[j].astype(ct.float32)", 5),
        "mean not taken, read twice": ("share * (gradient - mean)", "share * gradient", 3),
        "the wrong way": ("gradients[j].astype(ct.float32) - mean", "gradients[j].astype(ct.float32) + mean", 5),
        "products of the first tile": (
            "products + gradients[j].astype(ct.float32) * shares[j].astype(ct.float32)",
            "products",
            4,
        ),
        "products of the last tile": (
            "products = products + load_rows(dOut, row, j, const)",
            "products = load_rows(dOut, row, j, const)",
            3,
        ),
        "summed in float16": (
            "products = gradients[0].astype(ct.float32) * shares[0].astype(ct.float32)",
            "products = gradients[0] * shares[0]",
            5,
        ),
        "shares of the first tile": ("load_tile(Out, row, j, const)", "load_tile(Out, row, 0, const)", 4),
        "stored as the first": (
            "store_rows(dX, row, j, share * (gradient - mean)",
            "store_rows(dX, row, 0, share * (gradient - mean)",
            3,
        ),
        "persistent blocks skip rows": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):", 5),
    },
}
"""Kernel -> fault -> what stands in the tile code, what is put in its place, and the case that notices it soonest."""
SHARED = {
    "matmul": "products",
    "matmul_epilogue": "epilogue_tiles",
    "scaled_matmul": "products",
    "grouped_matmul": "products",
    "scaled_matmul_epilogue": "epilogue_tiles",
    "grouped_matmul_epilogue": "grouped_matmul.tiles",
}
"""Kernel -> the module of tile code that it shares with others, if that is not `rows`."""


@pytest.mark.parametrize("kernel", MUTATIONS)
def test_the_cases_pass_the_kernel(kernel):
    cases = cases_of(kernel)
    for case in {case for *_, case in MUTATIONS[kernel].values()}:
        cases[case]()


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "fault"), [(kernel, fault) for kernel in MUTATIONS for fault in MUTATIONS[kernel]])
def test_mutations_are_noticed(kernel, fault):
    old, new, case = MUTATIONS[kernel][fault]
    modules = [f"tiledsched.kernels.{SHARED.get(kernel, 'rows')}", f"tiledsched.kernels.{kernel}.tiles"]
    with mutated(modules, old, new), pytest.raises((AssertionError, InterpreterError)):
        cases_of(kernel)[case]()


@pytest.mark.parametrize("arithmetic", get_args(Arithmetic))
@pytest.mark.parametrize("walk", WALKS[:5], ids=str)
def test_softmax_of_rows_far_from_zero(walk, arithmetic):
    for dtype in ("bfloat16", "float16"):
        for columns in (1, 24, 1000, 1025):
            far_rows(walk, dtype, columns, arithmetic)


@pytest.mark.parametrize("arithmetic", get_args(Arithmetic))
@pytest.mark.parametrize("columns", [1, 2, 24, 33, 1000, 1024, 1025])
def test_losses_are_as_exact_far_from_zero_as_near(columns, arithmetic):
    """In any arithmetic, losses made of the log-sum-exp fail here; where products are fused, so does a maximum that is scaled
    before it is taken off, in every row that leaves a lane without a column.
    """
    for dtype in ("float32", "bfloat16"):
        for smoothed in (False, True):
            for more in ({}, {"TILE_ROWS": 4, "loads": "tma"}, {"SPLITS": 2}, {"SPLITS": 4}):
                if more.get("SPLITS", 1) * 256 <= columns or "SPLITS" not in more:
                    far_logits({"TILE_COLUMNS": 256} | more, columns, smoothed, dtype, arithmetic)
