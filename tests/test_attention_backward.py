"""Attention's gradients: the reference against torch's autograd, schedules in the interpreter, and that both checks can fail."""

from __future__ import annotations

import cuda.tile as ct
import numpy as np
import pytest
from gradient_schedules import SPACE, fitting
from tile_checks import NUMPY, Device, check, make_inputs, mutated, run_schedule

from tiledsched.checking.errors import case_errors, wrong_result
from tiledsched.checking.inputs import make_cases
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core import arrays, data_files, launches
from tiledsched.core.arrays import to_storage
from tiledsched.core.cases import expected_outputs, output_specs
from tiledsched.interpreter import run_schedule as interpret
from tiledsched.kernels.attention.problem import mask_of
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.kernels.attention_backward import AttentionBackward
from tiledsched.kernels.attention_backward.inputs import normal_inputs, outputs_of
from tiledsched.kernels.attention_backward.problem import gradient_scales, usual_gradient
from tiledsched.kernels.attention_backward.reference import attention_gradients
from tiledsched.serve.lookup import LookupTable
from tiledsched.store.shipped import read_shipped_entries

make = AttentionBackward.problem


def assert_right(p, s):
    right, _, why = check_schedule(AttentionBackward, p, s, device=Device)
    assert right, f"{why}: {p} with {dict(s)}"


FEATURES = {
    "plain": {},
    "top left": {"causal": True, "seq_k": 9},
    "bottom right": {"causal": True, "alignment": "bottom_right"},
    "rows that see nothing": {"causal": True, "alignment": "bottom_right", "seq_k": 4},
    "window": {"causal": True, "alignment": "bottom_right", "window": 3, "window_right": 1},
    "softcap": {"softcap": True, "sinks": True},
    "padded": {"batch": 2, "starts": True, "lengths": True, "sinks": True, "causal": True},
    "packed": {"packed": 3, "causal": True, "alignment": "bottom_right"},
}


@pytest.mark.parametrize("name", FEATURES)
def test_the_reference_is_what_autograd_finds(name):
    """In float64, through attention written with torch's functions, and through a gradient of the log-sum-exp, too."""
    torch = pytest.importorskip("torch")
    p = make(**{"seq_q": 7, "seq_k": 11, "head_dim": 8, "value_dim": 6, "heads": 4, "kv_heads": 2} | FEATURES[name])
    rng = np.random.default_rng(0)
    given = {key: np.asarray(value, np.float64) for key, value in AttentionBackward.inputs(np, rng, p).items()}
    places = {key: given.get(key) for key in ("Starts", "Lengths", "CuQ", "CuK")}
    leaves = {key: torch.tensor(given[key], requires_grad=True) for key in ("Q", "K", "V", "Sinks") if key in given}
    gradient, of_lse = torch.tensor(given["dOut"]), torch.tensor(rng.standard_normal((p.batch, p.heads, p.seq_q)))
    cap = mask_of(p)["cap"]
    total = 0.0
    for b, h in np.ndindex(p.sequences, p.heads):
        entry, rows, keys = b, slice(0, p.seq_q), slice(0, p.seq_k)
        if p.packed:
            entry, rows, keys = 0, *(slice(*map(int, places[cu][b : b + 2])) for cu in ("CuQ", "CuK"))
        q, k, v = leaves["Q"][entry, h, rows], *(leaves[each][entry, h // p.group, keys] for each in "KV")
        scores = q @ k.T * p.head_dim**-0.5
        scores = cap * torch.tanh(scores / cap) if cap else scores
        row, column = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
        row = row + (len(k) - len(q) if p.alignment == "bottom_right" else 0)
        seen = (column <= row + p.window_right) | torch.tensor(not p.causal)
        seen = seen & (column > row - p.window) if p.window else seen
        seen = seen & (column >= places["Starts"][b]) & (column < places["Lengths"][b]) if p.starts else seen
        weights = torch.where(seen, torch.exp(scores), 0.0)
        sums = weights.sum(-1) + (torch.exp(leaves["Sinks"][h]) if p.sinks else 0.0)
        some = sums > 0
        out = (weights @ v)[some] / sums[some][:, None]
        total = total + (out * gradient[entry, h, rows][some]).sum()
        total = total + (torch.log(sums[some]) * of_lse[entry, h, rows][some]).sum()
    wanted = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    more = {"sinks": given.get("Sinks"), "starts": places["Starts"], "lengths": places["Lengths"]}
    more |= {"cu_q": places["CuQ"], "cu_k": places["CuK"], **mask_of(p)}
    out, lse = attention_and_lse(np, given["Q"], given["K"], given["V"], **more)
    found = attention_gradients(
        np, *(given[each] for each in "QKV"), out, given["dOut"], lse, np.asarray(of_lse), **more
    )
    for one, right in zip(found, wanted, strict=False):
        np.testing.assert_allclose(one, right.numpy(), atol=1e-12)


ODD = {
    "one row": ({"seq_q": 1, "seq_k": 70}, {}),
    "one key": ({"seq_q": 70, "seq_k": 1}, {"structure": "two_pass"}),
    "one of each": ({"seq_q": 1, "seq_k": 1}, {}),
    "more rows than keys, top left": ({"seq_q": 90, "seq_k": 20, "causal": True}, {"loop_split": True}),
    "keys that no row sees": ({"seq_q": 20, "seq_k": 90, "causal": True}, {"scores_ahead": True}),
    "width 8": ({"head_dim": 8, "value_dim": 24, "dtype": "bfloat16"}, {}),
    "width 256": ({"seq_q": 20, "seq_k": 20, "head_dim": 256}, {}),
    "two parts of both": ({"head_dim": 80, "value_dim": 96}, {"column_parts": 2}),
    "two parts of both, two passes": ({"head_dim": 80, "value_dim": 48}, {"column_parts": 2, "structure": "two_pass"}),
    "a group of five": (
        {"heads": 10, "kv_heads": 2, "causal": True},
        {"group_heads": "apart", "structure": "two_pass"},
    ),
    "a window of one": ({"causal": True, "window": 1}, {"loop_split": True}),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_problems(name):
    fields, knobs = ODD[name]
    p = make(**{"seq_q": 40, "seq_k": 50, "head_dim": 16} | fields)
    assert_right(p, fitting(p, knobs))


def test_two_passes_give_the_same_bits_in_every_order_of_blocks_and_atomic_adds_do_not():
    p = make(seq_q=128, seq_k=256, head_dim=64, heads=2, kv_heads=2)
    inputs, tiles = make_inputs(AttentionBackward, p), {"tile_m": 64, "tile_n": 32}

    def bits(knobs):
        schedule = fitting(p, tiles | knobs)
        found = [run_schedule(AttentionBackward, p, schedule, inputs, order) for order in ("forward", 1, 2)]
        return {name: len({each[name].tobytes() for each in found}) for name in found[0]}

    assert bits({"structure": "two_pass"}) == {"dQ": 1, "dK": 1, "dV": 1}
    assert bits({"structure": "atomic"})["dQ"] > 1


@pytest.mark.parametrize(
    "knobs",
    [{}, {"structure": "two_pass"}, {"group_heads": "apart"}, {"structure": "two_pass", "group_heads": "apart"}],
    ids=str,
)
def test_rows_behind_the_last_packed_sequence_have_gradients_of_zero(knobs):
    """Whatever lies there: forward writes no Out and no Lse for them."""
    p = make(seq_q=90, seq_k=100, head_dim=16, heads=2, packed=2, causal=True, sinks=True)
    inputs = {
        name: np.asarray(array, np.float32) for name, array in normal_inputs(np, np.random.default_rng(0), p).items()
    }
    inputs |= {"CuQ": np.array([0, 3, 40], np.int32), "CuK": np.array([0, 40, 41], np.int32)}
    inputs |= outputs_of(np, p, inputs)
    for name in ("Out", "dOut", "Lse"):
        inputs[name][:, :, 40:] = np.nan
    types = {spec.name: NUMPY[spec.dtype] for spec in p.declaration.arrays(p)}
    inputs = {name: array.astype(types[name]) for name, array in inputs.items()}
    check(AttentionBackward, p, fitting(p, knobs), inputs)


def test_a_sink_above_all_scores_has_a_gradient():
    """e**100 is no float32: a tile of rows that ends behind the last one must not multiply it with 0."""
    p = make(seq_q=40, seq_k=44, head_dim=16, heads=2, sinks=True)
    inputs = {
        name: np.asarray(array, np.float32) for name, array in normal_inputs(np, np.random.default_rng(0), p).items()
    }
    inputs["Sinks"][:] = 100.0, 1.0
    inputs |= outputs_of(np, p, inputs)
    types = {spec.name: NUMPY[spec.dtype] for spec in p.declaration.arrays(p)}
    check(AttentionBackward, p, fitting(p, {}), {name: array.astype(types[name]) for name, array in inputs.items()})


def test_deterministic_problems_admit_no_atomic_adds():
    p = make(seq_q=4096, seq_k=4096, head_dim=128, heads=16, kv_heads=16, deterministic=True)
    assert SPACE.default(p)["structure"] != "atomic"
    assert "any order" in SPACE.violations(SPACE.default(p.replace(deterministic=False)), p)[0]
    assert {p.declaration.describe(p), p.declaration.file_words(p)} == {
        "B=1 H=16 S=4096 D=128 float16 deterministic",
        "s4096_d128_float16_full_b1_h16_deterministic",
    }


def test_stored_schedules_of_ordered_sums_are_refused_and_others_of_that_time_are_kept():
    """Schedules were stored with the knob `shares`; 1 was its only value where it made no difference."""
    p = make(seq_q=4096, seq_k=4096, head_dim=64, heads=32, kv_heads=32)
    now = SPACE.default(p)
    assert SPACE.complete(now.replace(shares=1)) == now
    (why,) = SPACE.unworkable(SPACE.complete(now.replace(structure="ordered", shares=1)), p)
    assert "structure" in why
    assert "ordered" in why
    why = SPACE.unworkable(SPACE.complete(now.replace(structure="ordered", shares=4)), p)
    assert "unknown knobs" in str(why)
    shipped = read_shipped_entries(data_files.tuning_db() / "tables" / "attention_backward" / "sm_90.json")
    entry = next(each for each in shipped if not each.problem.deterministic)
    for shares in (1, 4):
        old = entry.replace(schedule=entry.schedule.replace(structure="ordered", shares=shares))
        served = LookupTable([old], AttentionBackward).resolve(entry.problem, "sm_90", entry.device_name)
        assert served.provenance != "measured"
        assert SPACE.unworkable(served.schedule, entry.problem) == []


@pytest.mark.parametrize(
    "fields", [{"causal": True, "alignment": "bottom_right"}, {"packed": 3}, {"lengths": True}], ids=str
)
def test_arrays_beyond_32_bits_have_wide_indices(monkeypatch, fields):
    """As if an array of more than 1000 elements were one: some of each problem are, and some are not."""
    p = make(**{"seq_q": 37, "seq_k": 53, "head_dim": 24, "heads": 2} | fields)
    monkeypatch.setattr(arrays, "LARGEST_INT32", 1000)
    try:
        for structure in ("atomic", "two_pass"):
            assert_right(p, fitting(p, {"structure": structure, "loop_split": True}))
    finally:
        launches._note.cache_clear()
    wide = make(seq_q=1 << 20, seq_k=1 << 20, head_dim=128, heads=32, kv_heads=8)
    monkeypatch.undo()
    signatures = [launches.signature(AttentionBackward, wide, SPACE.default(wide), step) for step in steps_of(wide)]
    names = [[each.name for each in step.arguments] for step in steps_of(wide)]
    found = dict(zip(names[1], signatures[1].parameters, strict=True))
    assert (found["Q"].index_dtype, found["K"].index_dtype) == (ct.int64, ct.int32)


def steps_of(p):
    return launches.steps(AttentionBackward, p, SPACE.default(p), Device)


def test_scales():
    p = make(seq_q=1, seq_k=1, head_dim=64)
    assert (gradient_scales(p)[2], gradient_scales(p, 0.5)[2]) == (0.125, 0.5)
    assert gradient_scales(p.replace(softcap=True), 0.5, 2.0)[1:] == (2 * 0.5 / np.log(2) / 2.0, 0.5)


@pytest.mark.parametrize("structure", ["atomic", "two_pass"])
def test_a_call_may_give_the_scale_and_the_cap(structure):
    p = make(seq_q=40, seq_k=40, head_dim=16, softcap=True)
    mask = mask_of(p) | {"scale": 0.4, "cap": 3.0}
    inputs = make_inputs(AttentionBackward, p)
    out, lse = attention_and_lse(np, inputs["Q"], inputs["K"], inputs["V"], **mask)
    inputs |= {"Out": out.astype(np.float16), "Lse": lse.astype(np.float32)}
    scalars = dict(zip(("scale_log2", "cap_scale", "scale"), gradient_scales(p, 0.4, 3.0), strict=True))
    found = interpret(AttentionBackward, p, fitting(p, {"structure": structure}), inputs, scalars=scalars)
    exact = attention_gradients(np, *inputs.values(), **mask)
    for one, right in zip(found.values(), exact, strict=False):
        assert np.linalg.norm(one - right) < 1e-3 * np.linalg.norm(right)


# What a mistake costs, beside the limits of the declaration.


def errors_of(p, change):
    """Output -> the largest error of a tile on random inputs, where `change` has changed what the reference is given."""
    case = next(make_cases(AttentionBackward, np, np.random.default_rng(0), p))
    inputs = {name: array.copy() for name, array in case.inputs.items()}
    wrong = change(inputs) or expected_outputs(AttentionBackward, np, p, inputs)
    specs = output_specs(AttentionBackward, p)
    stored = {spec.name: to_storage(np, each, spec.dtype) for spec, each in zip(specs, wrong, strict=True)}
    schedule = SPACE.default(p)
    tolerance, tile = AttentionBackward.tolerance(p, schedule), AttentionBackward.check_tile(p, schedule)
    found = case_errors(np, specs, stored, case, tolerance, tile)
    return {each.output: float(each.errors.max()) for each in found}, wrong_result(found, case)


def one_key_less(inputs):
    """The last key is left out where dQ is made: of 512 keys, and so of the sums of every row."""
    inputs["K"][:, :, -1] = 0


def one_row_less(inputs):
    """The last query row is left out of dK and dV."""
    inputs["dOut"][:, :, -1] = 0


@pytest.mark.parametrize("fields", [{}, {"causal": True}, {"seq_q": 30}, {"seq_k": 30, "head_dim": 128}], ids=str)
def test_the_usual_size_of_gradients(fields):
    """By which tiles of nearly nothing are judged."""
    p = make(**{"seq_q": 300, "seq_k": 300, "head_dim": 32} | fields)
    case = next(make_cases(AttentionBackward, np, np.random.default_rng(0), p))
    found = [float(np.sqrt((each**2).mean())) for each in case.expected]
    assert 0.5 < min(found) / usual_gradient(p) < 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_key_or_a_row_left_out_is_beyond_the_limits(dtype):
    p = make(seq_q=512, seq_k=512, head_dim=32, dtype=dtype)
    limit = AttentionBackward.tolerance(p, SPACE.default(p)).relative
    rounding, _ = errors_of(p, lambda inputs: None)
    key, why = errors_of(p, one_key_less)
    assert why is not None
    assert key["dQ"] > limit > 4 * rounding["dQ"]
    row, why = errors_of(p, one_row_less)
    assert why is not None
    assert min(row["dK"], row["dV"]) > limit > 4 * max(rounding["dK"], rounding["dV"])


# Mistakes, each of which one case must notice.

CASES = {
    "plain": ({"heads": 2, "kv_heads": 2, "batch": 2}, {}),
    "rows": ({"heads": 4, "kv_heads": 2}, {"scores_transposed": False}),
    "causal": ({"causal": True, "seq_k": 40}, {"loop_split": True}),
    "unsplit": ({"causal": True, "seq_k": 40}, {}),
    "bottom right": ({"causal": True, "alignment": "bottom_right", "seq_k": 60}, {"loop_split": True}),
    "window": ({"causal": True, "window": 20, "window_right": 5, "seq_q": 90, "seq_k": 90}, {"loop_split": True}),
    "window unsplit": ({"causal": True, "window": 20, "window_right": 5, "seq_q": 90, "seq_k": 90}, {}),
    "two passes": ({"heads": 2, "causal": True}, {"structure": "two_pass"}),
    "full, two passes": ({"heads": 2}, {"structure": "two_pass", "loop_split": True}),
    "window, two passes": (
        {"causal": True, "window": 20, "seq_q": 90, "seq_k": 90},
        {"structure": "two_pass", "loop_split": True},
    ),
    "group": ({"heads": 4, "kv_heads": 2}, {}),
    "apart": ({"heads": 4, "kv_heads": 2}, {"group_heads": "apart"}),
    "ahead": ({"causal": True}, {"scores_ahead": True}),
    "late": ({"causal": True}, {"product_order": "dq_late"}),
    "dQ transposed": ({}, {"dq_transposed": True}),
    "delta first": ({}, {"delta_first": True}),
    "persistent": ({"heads": 2, "kv_heads": 2, "batch": 2}, {"persistent": True}),
    "swizzled": ({"causal": True, "heads": 2, "kv_heads": 2}, {"block_order": "swizzled"}),
    "parts": ({"head_dim": 48, "value_dim": 48}, {"column_parts": 2}),
    "softcap": ({"softcap": True, "heads": 3, "kv_heads": 3}, {}),
    "softcap, two passes": ({"softcap": True, "heads": 3, "kv_heads": 3}, {"structure": "two_pass"}),
    "sinks": ({"sinks": True, "heads": 2, "dlse": True}, {}),
    "padded": ({"starts": True, "lengths": True, "batch": 3}, {"loop_split": True}),
    "packed": ({"packed": 4, "causal": True, "heads": 2, "seq_q": 90, "seq_k": 90}, {}),
}
TILES = {
    "delta forgotten": ("ct.float32), const) - delta\n", "ct.float32), const)\n", "plain"),
    "delta of the other sign": ("ct.float32), const) - delta\n", "ct.float32), const) + delta\n", "plain"),
    "delta of the other sign, first": ("(-delta, score_shape", "(delta, score_shape", "delta first"),
    "the last share of dQ left out": ("if const.DQ_LATE and begin < end:", "if False:", "late"),
    "shares of dQ of the same tile": ("handed_on = ds, i", "handed_on = ds, carried[1]", "late"),
    "dK not scaled": (
        "part * scale for part in ct.static_iter(sums.dk)",
        "part for part in ct.static_iter(sums.dk)",
        "plain",
    ),
    "dV scaled": ("place), sums.dv,", "place), tuple(part * scale for part in ct.static_iter(sums.dv)),", "plain"),
    "dQ not scaled": ("(total * scale).astype(dQ.dtype)", "total.astype(dQ.dtype)", "plain"),
    "dQ not scaled, two passes": (
        "part * scale for part in ct.static_iter(sums))",
        "part for part in ct.static_iter(sums))",
        "two passes",
    ),
    "scores not scaled": ("powers, lse = logits * scale_log2,", "powers, lse = logits,", "plain"),
    "log-sum-exp in another base": ("lse * LOG2_E, math.inf", "lse, math.inf", "plain"),
    "log-sum-exp forgotten": ("powers - lse, flush", "powers, flush", "plain"),
    "dQ not set to zero": (
        "ct.zeros((1, 1, ROWS, TILE_DQ), ct.float32)\n",
        "ct.full((1, 1, ROWS, TILE_DQ), 1e-2, ct.float32)\n",
        "plain",
    ),
    "causal mask one long": (
        "visible = columns <= last\n            if const.WINDOW",
        "visible = columns <= last + 1\n            if const.WINDOW",
        "causal",
    ),
    "causal mask one short": (
        "visible = columns <= last\n            if const.WINDOW",
        "visible = columns < last\n            if const.WINDOW",
        "causal",
    ),
    "no mask": ("p = ct.where(visible, p, 0.0)\n    return p", "return p", "unsplit"),
    "keys beyond the end count": (
        "visible = columns < tile.stop\n        if",
        "visible = columns < tile.stop + 99\n        if",
        "plain",
    ),
    "keys before the start count": ("visible = visible & (columns >= tile.start)", "visible = visible", "padded"),
    "hidden keys may be anything": ("part, ct.zeros(part.shape, part.dtype)", "part, part", "padded"),
    "window one long": ("columns > last - tile.window", "columns >= last - tile.window", "window unsplit"),
    "window to the right forgotten": (
        "offset = offset + features.window_right\n        window =",
        "offset = offset\n        window =",
        "window",
    ),
    "offset of the other sign": ("offset = K.shape[2] - seq_q if", "offset = seq_q - K.shape[2] if", "bottom right"),
    "scores transposed": (
        "ct.mma(of_keys[part], ct.transpose(of_rows[part]), product)",
        "ct.transpose(ct.mma(of_keys[part], ct.transpose(of_rows[part]), product))",
        "plain",
    ),
    "weights not transposed": (
        "by_key = weights if const.TRANSPOSED else ct.transpose(weights)",
        "by_key = weights",
        "rows",
    ),
    "dS transposed twice": (
        "by_key = ds if const.TRANSPOSED else ct.transpose(ds)",
        "by_key = ct.transpose(ds)",
        "dQ transposed",
    ),
    "dS not transposed": ("by_row = ct.transpose(ds) if const.TRANSPOSED else ds", "by_row = ds", "plain"),
    "first tile of rows left out": ("for i in range(start, stop):", "for i in range(start + 1, stop):", "plain"),
    "last tile of rows left out": ("for i in range(start, stop):", "for i in range(start, stop - 1):", "plain"),
    "causal rows begin late": (
        "begin = min(max(first_key - offset, 0)",
        "begin = min(max(first_key + const.TILE_M - offset, 0)",
        "causal",
    ),
    "masked tiles without a mask": (
        "first = min(ct.cdiv(max(first_key + (const.TILE_N - 1) - offset, 0)",
        "first = min(ct.cdiv(max(first_key - offset, 0)",
        "causal",
    ),
    "window's rows end early": (
        "end = min(ct.cdiv(max(first_key + (const.TILE_N - 1) - offset + window, 0)",
        "end = min(ct.cdiv(max(first_key - offset + window, 0)",
        "window",
    ),
    "window's tiles without a mask": (
        "second = min(max(first_key - offset + window, 0)",
        "second = min(max(first_key + const.TILE_N - offset + window, 0)",
        "window",
    ),
    "head of a group": ("head * const.GROUP + member)", "head * const.GROUP)", "group"),
    "keys of another head": (
        "head if const.TOGETHER else head // const.GROUP",
        "head if const.TOGETHER else head % K.shape[1]",
        "apart",
    ),
    "a head of the group left out": ("for member in range(GROUP):", "for member in range(GROUP - 1):", "apart"),
    "keys of another head, two passes": (
        "batch, head // const.GROUP, steps",
        "batch, 0 * head, steps",
        "two passes: heads",
    ),
    "scores of the same step": ("min(i + 1, ct.cdiv(rows.Q.shape[2]", "min(i, ct.cdiv(rows.Q.shape[2]", "ahead"),
    "persistent blocks skip work": (
        "dK.shape[1] * dK.shape[0], ct.num_blocks(0)):",
        "dK.shape[1] * dK.shape[0], ct.num_blocks(0) + 1):",
        "persistent",
    ),
    "order off by one": ("place = place_count - 1 - place", "place = place_count - place", "swizzled"),
    "second part of columns is the first": ("(*index, column)", "(*index, 0)", "parts"),
    "softcap's slope forgotten": ("ds = ds * (1.0 - logits * logits)", "ds = ds", "softcap"),
    "softcap's slope forgotten, two passes": ("ds = ds * (1.0 - logits * logits)", "ds = ds", "softcap, two passes"),
    "sinks' sign": ("-ct.sum(total, axis=2)", "ct.sum(total, axis=2)", "sinks"),
    "sinks of one head": ("ct.load(Sinks, (head,), (1,))", "ct.load(Sinks, (0,), (1,))", "sinks"),
    "gradient of the log-sum-exp forgotten": (
        "delta = delta - ct.load(dLse",
        "delta = delta - 0.0 * ct.load(dLse",
        "sinks",
    ),
    "last key tile left out, two passes": (
        "(boundary, steps, True)",
        "(boundary, steps - 1, True)",
        "full, two passes",
    ),
    "no mask, two passes": ("p = ct.where(seen(columns, last, keys, const), p, 0.0)", "pass", "two passes"),
    "keys counted from the first, two passes": ("j = j + keys.span.first", "j = j", "window, two passes"),
    "delta forgotten, two passes": (
        "(dp if factors is None else dp * factors) - delta",
        "(dp if factors is None else dp * factors)",
        "two passes",
    ),
    "places by query rows": ("0, features.CuK)\n        behind", "0, features.CuQ)\n        behind", "packed unlike"),
}
CASES |= {
    "two passes: heads": ({"heads": 4, "kv_heads": 2}, {"structure": "two_pass"}),
    "packed unlike": ({"packed": 4, "heads": 2, "seq_q": 90, "seq_k": 150}, {}),
}


def case(name):
    fields, knobs = CASES[name]
    p = make(**{"seq_q": 40, "seq_k": 44, "head_dim": 16} | fields)
    return p, fitting(p, knobs)


@pytest.mark.parametrize("name", CASES)
def test_the_cases_pass_the_kernel(name):
    assert_right(*case(name))


MODULES = [f"tiledsched.kernels.attention_backward.{name}" for name in ("tiles", "rows", "queries", "entries")]


@pytest.mark.slow
@pytest.mark.parametrize("name", TILES)
def test_mistakes_are_noticed(name):
    old, new, where = TILES[name]
    with mutated(MODULES, old, new):
        p, s = case(where)
        right, _, _ = check_schedule(AttentionBackward, p, s, device=Device)
        assert not right
