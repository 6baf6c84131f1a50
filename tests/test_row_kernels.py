"""Layer normalisation, gated units, rotary embedding and cross entropy: right in the interpreter over their schedules, and their
faults noticed; their code as the compiler makes it.
"""

from __future__ import annotations

import math
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
from tile_checks import mutated, run_schedule, sample, searched

from tiledsched.build.compiler import compile_schedule
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core.cases import call_reference
from tiledsched.core.device import ARCHS
from tiledsched.core.errors import ProblemError
from tiledsched.core.resources import ResourceFacts
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import InterpreterError
from tiledsched.interpreter.contraction import Arithmetic
from tiledsched.kernels.cross_entropy import CrossEntropy
from tiledsched.kernels.glu import Glu
from tiledsched.kernels.glu.declaration import erfc
from tiledsched.kernels.layer_norm import LayerNorm
from tiledsched.kernels.rope import Rope, RopeInPlace

KERNELS = (LayerNorm, Glu, Rope, RopeInPlace, CrossEntropy)
ROWS: dict = {"TILE_ROWS": 1, "HOLD": True, "PERSISTENT": False, "loads": "plain", "occupancy": 0}
NUMPY_BF16 = np.dtype(ml_dtypes.bfloat16)
LOGITS: dict = {"TILE_ROWS": 1, "GROUP": 1, "SPLITS": 1, "loads": "plain", "occupancy": 0}


def passes(p, **knobs):
    """Whether a schedule, whose hints do not matter here, computes a problem right on random and adversarial inputs."""
    passed, _, message = check_schedule(p.declaration, p, Schedule({"num_worker_warps": 4} | knobs))
    assert passed, f"{p} with {knobs}: {message}"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_schedules_are_right(kernel):
    for p in kernel.small():
        for s in sample(kernel, p, 3, seed=str(p)):
            passes(p, **s)


@pytest.mark.parametrize(
    ("kernel", "sizes"),
    [
        *((LayerNorm, {"rows": rows, "columns": columns}) for rows, columns in ((1, 1), (7, 700), (4096, 5000))),
        *((Glu, {"rows": rows, "columns": columns}) for rows, columns in ((1, 1), (3, 700), (4096, 14336))),
        *(
            (Rope, {"batch": 1, "seq": seq, "q_heads": heads, "k_heads": 1, "width": width})
            for seq, heads, width in ((1, 1, 1), (9, 28, 40), (4096, 32, 64), (4096, 3, 512))
        ),
        *((CrossEntropy, {"rows": rows, "columns": columns}) for rows, columns in ((1, 1), (64, 1100), (512, 262144))),
    ],
    ids=str,
)
def test_every_problem_has_schedules_and_none_has_too_many(kernel, sizes):
    assert 1 <= len(searched(kernel, kernel.problem(**sizes))) <= 320


def battery_of_layer_norm():
    """Cases that between them notice every mutation of layer normalisation."""
    p = LayerNorm.problem(rows=11, columns=1000)
    for knobs in (
        {"TILE_COLUMNS": 1024},
        {"TILE_COLUMNS": 512},
        {"TILE_COLUMNS": 512, "HOLD": False},
        {"TILE_COLUMNS": 512, "loads": "gather", "TILE_ROWS": 2},
        {"TILE_COLUMNS": 1024, "PERSISTENT": True, "TILE_ROWS": 2, "loads": "tma"},
        {"TILE_COLUMNS": 512, "PERSISTENT": True, "HOLD": False, "loads": "tma"},
    ):
        passes(p, **ROWS | knobs)
        far_from_zero(**ROWS | knobs)


def far_from_zero(**knobs):
    """Rows whose elements differ by a thousandth of their mean; of equal elements; and with another mean in the first tile."""
    p = LayerNorm.problem(rows=3, columns=1000, dtype="float16", weighted=False, biased=False)
    x = np.random.default_rng(0).integers(1000, 1003, (3, 1000)).astype(np.float16)
    x[1], x[2, :512] = 7, 1010
    out = run_schedule(LayerNorm, p, Schedule({"num_worker_warps": 4} | knobs), {"X": x})["Out"].astype(float)
    right = call_reference(LayerNorm, np, p, {"X": x.astype(float)})[0]
    np.testing.assert_allclose(out, right, rtol=2e-3, atol=2e-3)


def battery_of_glu():
    """Cases that between them notice every mutation of gated units."""
    for activation in ("silu", "gelu", "gelu_tanh"):
        p = Glu.problem(rows=5, columns=600, activation=activation, dtype="float16")
        for knobs in (
            {"TILE_COLUMNS": 256},
            {"TILE_COLUMNS": 256, "PERSISTENT": True, "TILE_ROWS": 2},
            {"TILE_COLUMNS": 512, "TILE_ROWS": 4, "loads": "gather"},
        ):
            passes(p, **ROWS | knobs)
        gate = np.linspace(-6, 6, 600).astype(np.float16)[None]
        one = {"Gate": gate, "Up": np.ones_like(gate)}
        out = run_schedule(Glu, p.replace(rows=1), Schedule(ROWS | {"TILE_COLUMNS": 256, "num_worker_warps": 4}), one)[
            "Out"
        ]
        right = call_reference(Glu, np, p.replace(rows=1), {name: each.astype(float) for name, each in one.items()})[0]
        np.testing.assert_allclose(out.astype(float), right, rtol=1e-3, atol=1e-6)


def battery_of_rope():
    """Cases that between them notice every mutation of rotary embedding."""
    for kernel in (Rope, RopeInPlace):
        for parts in (1, 2):
            p = kernel.problem(batch=2, seq=5, q_heads=6, k_heads=4, parts=parts, width=24, tables=2, dtype="float16")
            passes(p, TILE_SEQ=2, TILE_HEADS=4)
            passes(p.replace(tables=1, k_heads=4, q_heads=9), TILE_SEQ=1, TILE_HEADS=4)


def battery_of_cross_entropy():
    """Cases that between them notice every mutation of cross entropy."""
    for smoothed in (False, True):
        p = CrossEntropy.problem(rows=5, columns=3000, smoothed=smoothed, dtype="float16")
        for knobs in (
            {"TILE_COLUMNS": 4096},
            {"TILE_COLUMNS": 512, "GROUP": 2},
            {"TILE_COLUMNS": 512, "GROUP": 2, "SPLITS": 2},
            {"TILE_COLUMNS": 512, "TILE_ROWS": 4, "loads": "gather"},
        ):
            passes(p, **LOGITS | knobs)
            masked(smoothed, **LOGITS | knobs)
    for columns, knobs in ((33, {}), (1300, {}), (1300, {"SPLITS": 4}), (1025, {"TILE_ROWS": 4, "loads": "gather"})):
        for smoothed in (False, True):
            far_logits(columns, smoothed, **LOGITS | {"TILE_COLUMNS": 256} | knobs)


def masked(smoothed, **knobs):
    """Low logits, lanes and tiles without one, a large one first, and labels that are ignored or no column."""
    p = CrossEntropy.problem(rows=5, columns=3000, smoothed=smoothed)
    logits = np.full((5, 3000), -300, np.float32)
    logits[0, 0], logits[2, 2999] = 200, -100
    labels = np.array([0, 2999, -100, 3000, -1])
    if not smoothed:
        logits[1, :2998] = -np.inf
    given = {"Logits": logits.astype(NUMPY_BF16), "Labels": labels}
    loss, lse = run_losses(p, knobs, given)
    right = call_reference(CrossEntropy, np, p, {"Logits": given["Logits"].astype(float), "Labels": labels})
    np.testing.assert_allclose(loss, right[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(lse, right[1], rtol=1e-4, atol=1e-4)
    assert np.isnan(loss).tolist() == [False, False, False, True, True]


def far_logits(columns, smoothed, dtype="float32", arithmetic="rounded", **knobs):
    """Rows near and far from zero, which are all as exact: the loss is of differences. Rows of the lowest and the highest numbers,
    and of infinities.
    """
    rng = np.random.default_rng(columns)
    kind = NUMPY_BF16 if dtype == "bfloat16" else np.dtype(dtype)
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
    given = {"Logits": logits.astype(kind), "Labels": rng.integers(0, columns, 11)}
    given["Labels"][[6, 7, 8]] = columns // 2, columns // 3, columns - 1
    p = CrossEntropy.problem(rows=11, columns=columns, smoothed=smoothed, dtype=dtype)
    loss, lse = run_losses(p, knobs, given, arithmetic)
    right = call_reference(CrossEntropy, np, p, given | {"Logits": given["Logits"].astype(float)})
    np.testing.assert_allclose(loss, right[0], rtol=3e-6, atol=1e-6)
    np.testing.assert_allclose(lse, right[1], rtol=1e-6, atol=1e-6)
    assert np.isnan(loss[-2:]).all()
    assert np.isfinite(loss[: 8 if smoothed else 9]).all()


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
                    far_logits(columns, smoothed, dtype, arithmetic, **LOGITS | {"TILE_COLUMNS": 256} | more)


def run_losses(p, knobs, given, arithmetic="rounded"):
    from tiledsched.interpreter.launch import SmallDevice
    from tiledsched.interpreter.launch import run_schedule as run

    schedule = Schedule({"num_worker_warps": 4} | knobs)
    outputs = run(CrossEntropy, p, schedule, given, device=SmallDevice(arch="sm_90"), arithmetic=arithmetic)
    return outputs["Loss"], outputs["Lse"]


BATTERIES = {
    "layer_norm": battery_of_layer_norm,
    "glu": battery_of_glu,
    "rope": battery_of_rope,
    "cross_entropy": battery_of_cross_entropy,
}
MUTATIONS = {
    "layer_norm": {
        "mean over the tile": ("keepdims=True) / const.COLUMNS", "keepdims=True) / const.TILE_COLUMNS"),
        "no epsilon": ("mean_of(squares, const) + eps)", "mean_of(squares, const))"),
        "mean not taken": ("x - mean, 0.0)", "x, 0.0)"),
        "padding differs from the mean": ("if const.COLUMNS % const.TILE_COLUMNS != 0:", "if False:"),
        "mean of the first tile": ("total = total + tiles[j]", "total = total"),
        "squares of the last tile": (
            "squares = squares + far * far\n        scale",
            "squares = far * far\n        scale",
        ),
        "mean not corrected": ("mean = near + off", "mean = near"),
        "variance not corrected": ("- off * off, 0.0", "- 0.0 * off, 0.0"),
        "no weight": ("x = x * weight", "x = x"),
        "no bias": ("x = x + bias", "x = x"),
        "weight of the first tile": ("load_vector(W, j, const) if", "load_vector(W, 0, const) if"),
        "bias of the first tile": ("load_vector(B, j, const) if", "load_vector(B, 0, const) if"),
        "persistent blocks skip rows": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):"),
        "square of what is far from zero": (
            "far * scale_of(far * far,",
            "far * scale_of(x * x - mean_of(x, const) * x,",
        ),
    },
    "glu": {
        "base 2": ("x * -LOG2_E", "x * -1.0"),
        "not gated": ("activated(gate, activation) * up", "activated(gate, activation)"),
        "gate and up exchanged": ("activated(gate, activation) * up", "activated(up, activation) * gate"),
        "the cube left out": ("1.5957691216 + 0.0713548163 * x * x", "1.5957691216"),
        "gelu is silu": ("if activation == GELU:", "if False:"),
        "the other tail": ("x < 0.0, beyond, 1.0 - beyond", "x > 0.0, beyond, 1.0 - beyond"),
        "a coefficient's sign": ("-0.18628806", "0.18628806"),
        "columns of the first tile": ("tile % column_tiles(const)", "tile % 1"),
        "persistent blocks end early": ("column_tiles(const)\n        for", "1\n        for"),
    },
    "rope": {
        "turned the other way": ("pairs[0] * cos - pairs[1] * sin", "pairs[0] * cos + pairs[1] * sin"),
        "the second elements kept": ("pairs[1] * cos + pairs[0] * sin", "pairs[1]"),
        "the second half from the first": (
            "array, place, heads, 1, const.TILE_HALF",
            "array, place, heads, 0, const.TILE_HALF",
        ),
        "the second half stored as the first": ("store_part(out, place, heads, 1,", "store_part(out, place, heads, 0,"),
        "neighbours exchanged": ("(0, 0, 0, 0, 1), shape", "(0, 0, 0, 0, 0), shape"),
        "keys of the first tile": (
            "load_part(array, place, heads, 0, const.TILE_HALF",
            "load_part(array, (place[0], place[1], 0), heads, 0, const.TILE_HALF",
        ),
        "keys left out": ("if head * keys[1] < keys[0]:", "if head * keys[1] < 0:"),
        "keys stored as queries": ("store_rotated(OutK, place, keys[1], k,", "store_rotated(OutK, place, keys[1], q,"),
        "angles of the first sequence": ("min(batch, tables - 1)", "0"),
        "angles of the first positions": ("(batch, seq, 0),", "(batch, 0, 0),"),
        "angles not of the batch": ("min(batch, tables - 1)", "batch"),
        "sines for cosines": ("angles(Sin, table", "angles(Cos, table"),
    },
    "cross_entropy": {
        "maximum not kept": ("return higher, total, logits", "return highest, total, logits"),
        "maximum of a group's first tile": ("largest = ct.maximum(largest, tiles[i])", "largest = largest"),
        "sum not rescaled": (
            "total = total * power(highest - higher)",
            "total = total + 0.0 * power(highest - higher)",
        ),
        "sum not rescaled at the end": (
            "ct.sum(total * power(highest - row_max)",
            "ct.sum(total + 0.0 * power(highest - row_max)",
        ),
        "base 2": ("ct.exp2(x * LOG2_E", "ct.exp2(x"),
        "padding counts": ("if const.COLUMNS % const.TILE_COLUMNS != 0:", "if False:"),
        "padding is summed up": ("if last else far)", "if False else far)"),
        "tiles behind the groups left out": ("if rest > 0 and", "if rest > 1 and"),
        "every part takes the rest": ("(const.SPLITS == 1 or split == const.SPLITS - 1)", "split >= 0"),
        "a part begins late": ("range(split * share,", "range(split * share + 1,"),
        "a part ends late": ("min(split * share + share, whole_groups(const))", "whole_groups(const)"),
        "parts not rescaled": ("power(parts - highest)", "power(0.0 * parts)"),
        "the lowest is not finite": ("LOWEST = -3.4028234663852886e38", "LOWEST = -math.inf"),
        "the lowest is above some logits": ("LOWEST = -3.4028234663852886e38", "LOWEST = -3.4e38"),
        "the loss is made of the log-sum-exp": ("(highest - target)\n", "(highest + log_total - target) - log_total\n"),
        "logits are scaled before they are subtracted": (
            "power(tiles[i].astype(ct.float32) - higher)",
            "ct.exp2(tiles[i].astype(ct.float32) * LOG2_E - higher * LOG2_E, flush_to_zero=True)",
        ),
        "an infinite logit": ("highest < math.inf", "highest <= math.inf"),
        "logits are summed up from 0": ("ct.where(near > -math.inf, near, 0.0)", "0.0 * near"),
        "logits less minus infinity": ("ct.where(near > -math.inf, near, 0.0)", "near"),
        "logits less padding": (
            "near = ct.max(within(load_rows(Logits, row, 0, const), -math.inf, 0, const)",
            "near = ct.max(ct.maximum(load_rows(Logits, row, 0, const), 0.0)",
        ),
        "not how far from the maximum": (
            "(highest - near - logits / const.COLUMNS)",
            "(highest - logits / const.COLUMNS)",
        ),
        "ignored rows count": ("label == ignore_index", "label == 3000"),
        "labels that are no column": ("ct.float32), math.nan)", "ct.float32), 0.0)"),
        "no smoothing": ("smoothing * (highest - near", "0.0 * (highest - near"),
        "the target counts whole": ("(1.0 - smoothing) *", "1.0 *"),
        "labels of the first rows": ("ct.load(Labels, (row,)", "ct.load(Labels, (0,)"),
        "natural for binary": ("ct.log2(total) * LN_2", "ct.log2(total)"),
    },
}


@pytest.mark.parametrize("name", BATTERIES)
def test_the_batteries_pass_the_kernels(name):
    BATTERIES[name]()


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in MUTATIONS for fault in MUTATIONS[name]])
def test_mutations_are_noticed(name, fault):
    modules = ["tiledsched.kernels.rows", f"tiledsched.kernels.{name}.tiles"]
    with mutated(modules, *MUTATIONS[name][fault]), pytest.raises((AssertionError, InterpreterError)):
        BATTERIES[name]()


def test_the_complementary_error_function_is_that_of_the_standard_library():
    x = np.concatenate([np.linspace(-9, 9, 1001), [0.125, 0.25, 1e-9, 0.0, 30.0]])
    np.testing.assert_allclose(erfc(np, x), [math.erfc(each) for each in x], rtol=1e-13, atol=1e-300)


@pytest.mark.parametrize(
    ("kernel", "sizes", "faster", "slower"),
    [
        # (knobs, registers, threads, shared memory, bytes spilled), as compiled; times on an H200
        (
            CrossEntropy,
            {"rows": 4096, "columns": 128256},
            (LOGITS | {"TILE_COLUMNS": 1024, "GROUP": 4}, 64, 128, 1040, 0),  # 254 us
            (LOGITS | {"TILE_COLUMNS": 1024, "GROUP": 8}, 64, 128, 1040, 224),  # 652 us
        ),
        (
            Glu,
            {"rows": 4096, "columns": 14336},
            (ROWS | {"TILE_COLUMNS": 1024}, 28, 128, 0, 0),  # 86 us
            (ROWS | {"TILE_COLUMNS": 4096, "PERSISTENT": True, "loads": "tma"}, 64, 128, 0, 48),  # 108 us
        ),
        (
            LayerNorm,
            {"rows": 8192, "columns": 5000},
            (ROWS | {"TILE_COLUMNS": 2048, "loads": "gather"}, 70, 128, 1040, 0),  # 46 us
            (ROWS | {"TILE_COLUMNS": 2048}, 130, 128, 1040, 0),  # 61 us
        ),
    ],
    ids=["cross_entropy", "glu", "layer_norm"],
)
def test_the_model_orders_programs_as_they_were_measured(kernel, sizes, faster, slower):
    def us(knobs, registers, threads, shared, spilled):
        facts = ResourceFacts(
            registers=registers,
            threads=threads,
            shared_bytes=shared,
            spill_bytes=spilled,
            num_ctas=1,
            code_bytes=0,
            ctas_per_sm=1,
        )
        return kernel.cost.model(p, Schedule(knobs), facts, ARCHS["sm_90"])

    p = kernel.problem(**sizes)
    assert p.min_bytes / 4.8e6 < us(*faster) < 0.9 * us(*slower)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_what_nobody_measured_gets_the_default_or_what_is_surely_faster(kernel):
    spec = ARCHS["sm_121"]
    for p in kernel.suite("models"):
        space = space_for("sm_121", kernel)

        def estimate(s, p=p):
            return kernel.cost.model(p, s, kernel.cost.expected(p, s, spec), spec)

        default = space.default(p)
        found = kernel.similarity.cold_start(p, default, space, estimate)
        assert found == default or estimate(found) < 0.85 * estimate(default)
        assert not kernel.cost.expected(p, found, spec).spill_bytes


def test_tables_of_angles_are_one_or_one_for_each_sequence():
    sizes = {"seq": 5, "q_heads": 2, "k_heads": 1}
    with pytest.raises(ProblemError, match="all sequences have the same angles, or each has its own"):
        Rope.problem(batch=3, tables=2, **sizes)
    with pytest.raises(ProblemError, match="a head is pairs of elements"):
        Rope.problem(batch=3, parts=1, width=7, **sizes)


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_121"])
def test_compiles_without_spills(arch):
    for p in (
        LayerNorm.problem(rows=8192, columns=5000),
        Glu.problem(rows=4096, columns=14336, activation="gelu"),
        Rope.problem(batch=1, seq=4096, q_heads=32, k_heads=8),
        CrossEntropy.problem(rows=4096, columns=128256, smoothed=True),
    ):
        default = space_for(arch, p.declaration).default(p)
        assert compile_schedule(p.declaration, p, default, arch).facts.spill_bytes == 0
