"""An author's own attention: its kernel, the lists of blocks, its reference, and what is said of mistakes in its functions."""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import cuda.tile as ct
import numpy as np
import pytest
from tile_checks import mutated

import tiledsched as ts
from docs.examples.attention_variants import alibi, causal, dense_bias, same_document, t5_bias, tree
from tiledsched.build.compiler import BuildTask, compile_schedule, compile_task
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core.cases import call_reference, random_inputs
from tiledsched.core.errors import DeclarationError
from tiledsched.core.launches import signature, steps
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import InterpreterError, SmallDevice, run_schedule
from tiledsched.kernels.attention import lists, variants
from tiledsched.kernels.attention.declaration import BLOCK_ORDERS
from tiledsched.kernels.attention.lists import lists_kernel
from tiledsched.kernels.attention.loads import load_tile
from tiledsched.kernels.attention.scheduler import coordinates
from tiledsched.kernels.attention.variants import code_of, declare, flex_attention, list_blocks

SLOPES = {"slopes": ts.array("heads", dtype="float32")}
DOCUMENTS = {"documents": ts.array("batch seq_k", dtype="int32", below=3, sorted=True)}


def window(size):
    def near(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < size)

    return near


def nothing(b, h, q_idx, kv_idx):
    return kv_idx < 0


def everything(b, h, q_idx, kv_idx):
    return kv_idx >= 0


def late_rows(b, h, q_idx, kv_idx):
    """The first block of rows sees no key."""
    return (q_idx >= 130) & (kv_idx <= q_idx)


def by_head(b, h, q_idx, kv_idx):
    return q_idx - kv_idx > 70 * h


def hiding(score, b, h, q_idx, kv_idx):
    return ct.where(kv_idx < q_idx, score, -math.inf)


def by_sequence(b, h, q_idx, kv_idx):
    return kv_idx >= 130 * b


def slopes_and_documents(score, b, h, q_idx, kv_idx, slopes, documents):
    return alibi(score, b, h, q_idx, kv_idx, slopes)


def documents_after_slopes(b, h, q_idx, kv_idx, slopes, documents):
    return ct.gather(documents, (b, q_idx)) == ct.gather(documents, (b, kv_idx))


def level(score, b, h, q_idx, kv_idx):
    return 0.0


def by_key(score, b, h, q_idx, kv_idx):
    return kv_idx * -0.125


def always(b, h, q_idx, kv_idx):
    return True


CAUSAL = flex_attention(mask_mod=causal)
ALIBI = flex_attention(score_mod=alibi, arrays=SLOPES)
SAME = flex_attention(mask_mod=same_document, arrays=DOCUMENTS)
NEAR = flex_attention(mask_mod=window(40))
LATE = flex_attention(mask_mod=late_rows)
BY_HEAD = flex_attention(mask_mod=by_head)
BY_SEQUENCE = flex_attention(mask_mod=by_sequence)
BOTH = flex_attention(score_mod=slopes_and_documents, mask_mod=documents_after_slopes, arrays={**SLOPES, **DOCUMENTS})
BIAS = flex_attention(score_mod=dense_bias, arrays={"bias": ts.array("1 heads seq_q seq_k", dtype="bfloat16")})
LEVEL = flex_attention(score_mod=level)
BY_KEY = flex_attention(score_mod=by_key, mask_mod=always)
TREE = flex_attention(
    mask_mod=tree,
    arrays={
        "context": ts.array("batch", dtype="int32", least=60, below=90),
        "ancestors": ts.array("batch seq_q seq_q", dtype="bool_"),
    },
)

# ---- the kernel ------------------------------------------------------------------------------------------------------

NARROW = {"store_late": True, "persistent": "strided", "tile_n": 32, "loop_split": True}
UNEVEN = {"persistent": "snake", "block_order": "reversed", "loop_split": True}
SPLIT = {"kv_splits": 2, "tma_loads": False, "tile_m": 16}
LATER = {"kv_splits": 4, "kv_combine": "launch", "loop_split": True}
PACK = {"pack_gqa": True, "tile_m": 64}
GROUP = {"heads": 4, "kv_heads": 2}
CASES = {
    "documents": (SAME, {"batch": 2, **GROUP}, {}),
    "documents by narrow tiles": (SAME, {"batch": 2, "seq_q": 300}, NARROW),
    "documents and lengths": (SAME, {"batch": 2, "lengths": True, "lse": True}, {"loop_split": True}),
    "one row": (SAME, {"batch": 2, "seq_q": 1, **GROUP}, LATER),
    "few rows": (SAME, {"batch": 2, "seq_q": 64, "lse": True}, {"loop_split": True}),
    "bfloat16": (CAUSAL, {"dtype": "bfloat16", "head_dim": 40, "lse": True}, {"loop_split": True}),
    "unbounded": (CAUSAL, {"seq_q": 256, "seq_k": 256}, {"q_subtiles": 2, "kv_subtiles": 2, "check_bounds": False}),
    "uneven": (CAUSAL, {"seq_q": 300, "heads": 3, "kv_heads": 3}, UNEVEN),
    "swizzled": (
        CAUSAL,
        {"seq_q": 400, "batch": 3, **GROUP},
        {"block_order": "swizzled", "tile_n": 32, "loop_split": True},
    ),
    "large": (
        CAUSAL,
        {"seq_q": 300, "batch": 3, **GROUP},
        {"tile_m": 128, "tile_n": 128, "loop_split": True, "q_in_registers": True, "block_order": "swizzled"},
    ),
    "near": (NEAR, {"seq_q": 300}, {"tile_m": 128, "tile_n": 128, "loop_split": True}),
    "near with sinks": (NEAR, {"seq_q": 300, "sinks": True, "lse": True}, NARROW),
    "two parts": (NEAR, {"seq_q": 64, "head_dim": 96}, SPLIT | {"column_parts": 2, "lazy_rescale": True}),
    "late rows": (LATE, {"seq_q": 270, "seq_k": 256, "lse": True}, {"loop_split": True}),
    "late rows by narrow tiles": (LATE, {"seq_q": 270, "seq_k": 256, "lse": True}, NARROW),
    "heads": (BY_HEAD, {**GROUP, "lse": True}, {"loop_split": True, "tile_n": 32}),
    "heads combined later": (BY_HEAD, {"seq_q": 40, **GROUP, "lse": True}, LATER),
    "hidden by scores": (flex_attention(score_mod=hiding), {"seq_q": 40, "lse": True}, LATER),
    "packed heads": (BY_HEAD, {"seq_q": 16, "causal": True, **GROUP, "lse": True}, PACK | {"kv_direction": "backward"}),
    "sequences": (BY_SEQUENCE, {"batch": 2, **GROUP}, {"loop_split": True}),
    "slopes": (ALIBI, {"seq_q": 150, **GROUP, "dtype": "bfloat16"}, {"loop_split": True, "persistent": "strided"}),
    "bottom right": (
        ALIBI,
        {"seq_q": 150, "causal": True, "alignment": "bottom_right", "lse": True},
        {"loop_split": True},
    ),
    "packed slopes": (ALIBI, {"seq_q": 3, "heads": 6, "kv_heads": 2, "lse": True}, PACK),
    "packed slopes of one row": (
        ALIBI,
        {"seq_q": 1, "heads": 4, "kv_heads": 1, "batch": 2, "lengths": True},
        LATER | PACK,
    ),
    "both": (BOTH, {"batch": 2, "causal": True, "alignment": "bottom_right", **GROUP}, {"loop_split": True}),
    "both packed": (BOTH, {"batch": 2, "seq_q": 64, **GROUP}, PACK),
    "both packed with lists": (BOTH, {"batch": 2, "seq_q": 140, **GROUP}, PACK | {"loop_split": True}),
    "bias": (BIAS, {"seq_q": 150, **GROUP}, {"kv_direction": "sawtooth", "tile_n": 32}),
    "tree": (TREE, {"seq_q": 8, "seq_k": 98, "batch": 2, **GROUP}, PACK),
    "level": (LEVEL, {"seq_q": 150, "seq_k": 256}, {}),
    "by key": (BY_KEY, {"seq_k": 256}, {"loop_split": True}),
}
"""Name -> a kernel, what its problem has besides odd sizes, and knobs."""


def case_of(kernel, sizes, knobs):
    """(problem, schedule)."""
    p = kernel.problem(**{"seq_q": 200, "seq_k": 300, "head_dim": 32, "heads": 2, "kv_heads": 1} | sizes)
    return p, space_for("sm_90", kernel).default(p).replace(**knobs)


def attempt(kernel, p, s, **more):
    """What is wrong with the outputs on random and adversarial inputs; nothing where they are right."""
    return check_schedule(kernel, p, s, kinds=(), **more)[2]


@pytest.mark.parametrize("name", CASES)
def test_a_variant_computes_what_its_functions_say(name):
    kernel, sizes, knobs = CASES[name]
    assert attempt(kernel, *case_of(kernel, sizes, knobs)) == ""


def test_the_cases_keep_what_the_space_says_must_hold():
    for kernel, sizes, knobs in CASES.values():
        p, s = case_of(kernel, sizes, knobs)
        assert space_for("sm_90", kernel).unworkable(s, p) == []


@pytest.mark.parametrize(
    ("lists", "causal", "order", "first"),
    [
        (128, False, "swizzled", 3),
        (128, True, "swizzled", 3),
        (128, False, "heads_fastest", 0),
        (128, False, "natural", 0),
        (128, False, "reversed", 3),
        (0, False, "swizzled", 0),
    ],
)
def test_which_rows_come_first(lists, causal, order, first):
    """Those of lists begin with the last rows if swizzled, as most masks show these the most keys."""
    const = SimpleNamespace(BLOCK_ROWS=lists, CAUSAL=causal, BLOCK_ORDER=BLOCK_ORDERS.index(order))
    places = [coordinates(work, 4, 3, 5, const) for work in range(60)]
    assert places[0] == (first, 0, 0)
    assert len(set(places)) == 60


def test_check_runs_a_variant_whole():
    rows = list(ts.check(BOTH, schedules=1))
    # Schedules for which these are one tile run on larger ones, too.
    assert {row.problem for row in rows} > set(BOTH.small())
    assert [row.message for row in rows if not row.passed] == []


def given_lists(knobs):
    """A pattern of blocks of one's own, with an empty list, for a function that lets all through."""
    kernel = flex_attention(mask_mod=everything)
    p, s = case_of(kernel, {"seq_k": 256, "lse": True}, knobs)
    seen = np.zeros((1, 1, 200, 256), bool)
    seen[..., :128, 128:] = True
    compare(p, s, made(p) | {"Blocks": list_blocks(np, seen)}, seen)


def without_keys(knobs):
    """A sequence without keys beside one that has all, in lists that know of neither."""
    p, s = case_of(SAME, {"batch": 2, "lengths": True, "lse": True}, knobs)
    inputs = made(p)
    inputs["Lengths"][:], inputs["array0"][:] = [0, 300], 0
    inputs["Blocks"] = list_blocks(np, np.ones((2, 1, 200, 300), bool))
    compare(p, s, inputs, np.array([False, True])[:, None, None, None])


def compare(p, s, inputs, visible):
    """Outputs with those of a textbook, and log-sum-exps where no key is visible."""
    outputs = run_schedule(p.declaration, p, s, inputs)
    right = plain(*(inputs[name].astype(float) for name in "QKV"), visible)
    np.testing.assert_allclose(outputs["Out"].astype(float), right, atol=2e-3)
    rows = np.broadcast_to(visible.any(-1, keepdims=True), outputs["Lse"].shape)
    assert np.array_equal(np.isneginf(outputs["Lse"]), ~rows)


@pytest.mark.parametrize("knobs", [{}, {"loop_split": True}, NARROW])
def test_lists_that_are_given_hide_what_they_leave_out(knobs):
    given_lists(knobs)


def test_a_sequence_may_have_no_keys():
    without_keys({})


def test_sizes_of_arrays_that_nothing_declares_are_no_constants():
    kernel = variants.variant(alibi, None, [(1, "float32")])
    p, s = case_of(kernel, {}, {})
    (step,) = steps(kernel, p, s, SmallDevice())
    place = [each.name for each in step.arguments].index("array0")
    assert signature(kernel, p, s, step).parameters[place].shape_constant == (None,)


# ---- the reference ---------------------------------------------------------------------------------------------------


def made(p, seed=0):
    """Random inputs of a problem in float16, float32 and int32, as tile code reads them."""
    return random_inputs(p.declaration, np, np.random.default_rng(seed), p)


def plain(q, k, v, visible, bias=0.0):
    """Attention in the words of a textbook."""
    k, v = (np.repeat(each, q.shape[1] // k.shape[1], axis=1) for each in (k, v))
    scores = np.where(visible, q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5 + bias, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
    return weights @ v / np.maximum(weights.sum(-1, keepdims=True), 1e-30)


@pytest.mark.parametrize("at_once", [1 << 22, 1 << 12])
def test_the_reference_is_attention_with_the_functions(monkeypatch, at_once):
    monkeypatch.setattr(variants, "PAIRS_AT_ONCE", at_once)
    p = BOTH.problem(seq_q=200, seq_k=300, head_dim=8, batch=2, **GROUP)
    inputs = made(p)
    read = {name: each.astype(float) if each.dtype.kind == "f" else each for name, each in inputs.items()}
    slopes, documents = read["array0"], read["array1"]
    rows, keys = np.arange(200)[:, None], np.arange(300)
    visible = (documents[:, :200, None] == documents[:, None])[:, None]
    bias = slopes[:, None, None] * (keys - rows)
    out = call_reference(BOTH, np, p, read)[0]
    np.testing.assert_allclose(out, plain(read["Q"], read["K"], read["V"], visible, bias), atol=1e-12)
    assert np.array_equal(inputs["Blocks"], list_blocks(np, visible))


def test_a_row_that_sees_nothing_has_zeros_and_no_weight():
    p = LATE.problem(seq_q=140, seq_k=140, head_dim=8, lse=True)
    out, lse = call_reference(LATE, np, p, {name: each.astype(float) for name, each in made(p).items()})
    assert not out[:, :, :130].any()
    assert np.isneginf(lse[:, :, :130]).all()
    assert np.isfinite(lse[:, :, 130:]).all()


# ---- lists of blocks -------------------------------------------------------------------------------------------------


def all_but_one_pair(b, h, q_idx, kv_idx):
    return (q_idx != 5) | (kv_idx != 7)


def one_pair(b, h, q_idx, kv_idx):
    return (q_idx == 5) & (kv_idx == 140)


MASKS = {
    "causal": (causal, {}),
    "nothing": (nothing, {}),
    "everything": (everything, {}),
    "always": (always, {}),
    "documents": (same_document, DOCUMENTS),
    "late rows": (late_rows, {}),
    "by head": (by_head, {}),
    "by sequence": (by_sequence, {}),
    "window": (window(40), {}),
    "all but one pair": (all_but_one_pair, {}),
    "one pair": (one_pair, {}),
}
SIZES = [(1, 1), (1, 300), (127, 129), (128, 128), (129, 1), (300, 300), (256, 257)]


def lists_of(module, mask, fields):
    """The kernel that fills lists, with declared arrays."""
    kernel = module.lists_kernel(mask, [(variants.rank_of(each), each.dtype) for each in fields.values()])
    declare(kernel, fields, __name__)
    return kernel


def all_lists(module, name, sizes=SIZES):
    """What is wrong with the lists of a mask, of some sizes and every schedule."""
    kernel = lists_of(module, *MASKS[name])
    found = []
    for rows, keys in sizes:
        p = kernel.problem(seq_q=rows, seq_k=keys, batch=2, heads=2)
        found += [attempt(kernel, p, s) for s in space_for("sm_90", kernel).schedules(p)]
    return [message for message in found if message]


@pytest.mark.parametrize("name", MASKS)
def test_lists_are_filled(name):
    assert all_lists(lists, name) == []


def test_a_list_says_which_blocks_are_seen_in_part_and_in_full():
    rows, keys = np.arange(300)[:, None], np.arange(400)
    first, second, third = list_blocks(np, (keys <= rows)[None, None])[0, 0].tolist()
    assert first == [1, 1, 0, 0, 0, 0]
    assert second == [1, 2, 1, 0, 0, 0]
    assert third == [1, 3, 2, 0, 1, 0]  # the last rows see block 2 in part; 0 and 1 in full, from the back


def test_lists_of_one_mask_are_one_kernel():
    assert lists_kernel(window(40), []) is lists_kernel(window(40), [])
    assert lists_kernel(window(40), []) is not lists_kernel(window(41), [])


def both_of(one, other):
    def mask_mod(b, h, q_idx, kv_idx, *arrays):
        return one(b, h, q_idx, kv_idx, *arrays) & other(b, h, q_idx, kv_idx)

    return mask_mod


@dataclass(frozen=True)
class Either:
    """Masks in an object."""

    size: int

    def __call__(self, b, h, q_idx, kv_idx):
        return by_sequence(b, h, q_idx, kv_idx) | (q_idx - kv_idx < self.size)


@pytest.mark.parametrize(
    ("mask", "count", "batches", "heads"),
    [
        (causal, 0, 1, 1),
        (same_document, 1, 2, 1),
        (by_head, 0, 1, 4),
        (both_of(causal, window(9)), 0, 1, 1),
        (both_of(same_document, causal), 1, 2, 1),
        (both_of(causal, both_of(causal, by_head)), 0, 1, 4),
        (Either(9), 0, 2, 1),
    ],
)
def test_a_mask_has_lists_for_each_sequence_and_head_that_it_reads(mask, count, batches, heads):
    p = variants.variant(None, mask, [(2, "int32")] * count).problem(seq_q=99, seq_k=9, head_dim=8, batch=2, heads=4)
    assert (p.mask_batch, p.mask_heads) == (batches, heads)


def test_the_lists_of_a_long_document_mask_take_less_than_a_mebibyte():
    p = SAME.problem(seq_q=32768, seq_k=32768, head_dim=64, heads=16)
    assert p.declaration.array_spec("Blocks", p, None).bytes < 1 << 20
    assert variants.rows_at_once(32768) * 32768 <= variants.PAIRS_AT_ONCE


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_121", marks=pytest.mark.slow)])
def test_the_kernel_of_lists_compiles(arch):
    kernel = lists_of(lists, *MASKS["documents"])
    p = kernel.problem(seq_q=300, seq_k=300, batch=2)
    assert compile_schedule(kernel, p, space_for(arch, kernel).default(p), arch).facts.spill_bytes == 0


def test_the_name_of_a_variant_does_not_hold_where_a_machine_keeps_its_libraries():
    found = str(code_of(t5_bias, "score_mod")) + str(code_of(alibi, "score_mod"))
    assert "'cuda.tile'" in found
    assert str(Path(ct.__file__).parent) not in found


# ---- loads of whole tiles --------------------------------------------------------------------------------------------

RELATIVE = flex_attention(score_mod=t5_bias, arrays={"biases": ts.array("heads 65", dtype="float32")})


@pytest.mark.parametrize("kernel", [BIAS, RELATIVE], ids=["dense", "relative"])
@pytest.mark.parametrize("pack", [{}, {"kv_heads": 1, "seq_q": 5}], ids=["one_head", "packed_heads"])
def test_loads_of_whole_tiles_give_what_gathers_give(kernel, pack):
    p = kernel.problem(seq_q=150, seq_k=190, head_dim=16, heads=4).replace(**pack)
    space = space_for("sm_90", kernel)
    schedule = space.default(p).replace(tile_m=32, tile_n=32, **({"pack_gqa": True} if pack else {}))
    assert check_schedule(kernel, p, schedule)[0]


@pytest.mark.parametrize(
    "places", ["q_idx, kv_idx + 1", "kv_idx, q_idx", "q_idx, kv_idx // 2", "q_idx, b", "kv_idx"], ids=str
)
def test_whole_tiles_are_loaded_at_the_places_of_the_scores_only(places, tmp_path, monkeypatch):
    (tmp_path / "shifted.py").write_text(
        "from tiledsched import load_tile\n\n\ndef shifted(score, b, h, q_idx, kv_idx, bias):\n"
        f"    return score + load_tile(bias, ({places},))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("shifted")
    monkeypatch.delitem(sys.modules, "shifted")
    arrays = {"bias": ts.array("seq_q seq_k" if "," in places else "seq_k", dtype="float32")}
    with pytest.raises(DeclarationError, match=r"shifted.py, line 5.*load_tile takes q_idx and kv_idx as they are"):
        flex_attention(score_mod=module.shifted, arrays=arrays)


def loaded(b, h, q_idx, kv_idx, seen):
    return load_tile(seen, (b, h, q_idx, kv_idx))


def test_a_mask_is_read_by_its_indices_in_a_reference_whatever_its_first_row():
    kernel = flex_attention(mask_mod=loaded, arrays={"seen": ts.array("batch heads seq_q seq_k", dtype="bool")})
    seen = np.random.default_rng(0).random((1, 1, 600, 60)) < 0.5
    found = variants.changed(np, kernel, np.zeros((216, 60)), {"array0": seen}, 0, 0, 384)
    np.testing.assert_array_equal(np.isfinite(found), seen[0, 0, 384:])


def quick(score, b, h, q_idx, kv_idx):
    return ct.truediv(score, 3.0, rounding_mode=ct.RoundingMode.APPROX) + ct.exp2(score * 0.25, flush_to_zero=True)


def test_what_a_function_approximates_its_reference_computes_in_full():
    kernel = flex_attention(score_mod=quick)
    scores = np.linspace(-3, 3, 64).reshape(8, 8)
    found = variants.changed(np, kernel, scores, {}, 0, 0, 0)
    np.testing.assert_allclose(found, scores / 3.0 + 2 ** (scores / 4), rtol=1e-14)


# ---- mistakes in the tile code ---------------------------------------------------------------------------------------

MODULES = [
    f"tiledsched.kernels.attention.{name}"
    for name in ("scheduler", "mods", "packed", "features", "tiles", "split", "flat", "entries")
]
MUTATIONS = [
    ("place >= variant.partial", "place > variant.partial", "uneven"),
    ("HEAD - 1 - (place - variant.partial)", "HEAD - (place - variant.partial)", "uneven"),
    ("HEAD + place), check_bounds=False)", "place), check_bounds=False)", "documents"),
    ("* each + i % each", "* each", "documents"),
    ("(variant.total - variant.partial) * each", "variant.total * each", "documents by narrow tiles"),
    ("rows_of_work(const) // const.BLOCK_ROWS", "rows_of_work(const) // const.TILE_M", "documents"),
    ("rows_of_work(const) // const.BLOCK_ROWS", "const.TILE_M // const.BLOCK_ROWS", "both packed with lists"),
    ("min(batch, Blocks.shape[0] - 1)", "0", "sequences"),
    ("min(head, Blocks.shape[1] - 1)", "0", "heads"),
    ("visible = visible & seen_by_mod(columns, rows, keys, const)", "pass", "bfloat16"),
    ("or const.MASK_MOD\n", "\n", "heads combined later"),
    ("or const.SCORE_MOD\n", "\n", "hidden by scores"),
    ("elif const.MASK_MOD:  # which may hide any key\n        first_masked = 0", "", "few rows"),
    ("scores * variant.scale", "scores", "slopes"),
    ("ct.broadcast_to(ct.astype(changed, ct.float32), scores.shape)", "ct.astype(changed, ct.float32)", "level"),
    ("rows - variant.offset, columns, *variant.arrays\n    )", "rows, columns, *variant.arrays)", "bottom right"),
    ("heads, rows - variant.offset, columns, *variant.arrays)\n", "heads, rows, columns, *variant.arrays)\n", "both"),
    ("heads = head * const.GROUP + row", "heads = head + row", "packed slopes"),
    ("heads = head * const.GROUP + row", "heads = head * const.GROUP", "packed heads"),
    ("K.shape[2] == 0:", "K.shape[2] < 0:", "no keys"),
    ("if const.CAUSAL or not const.EVEN:\n            visible", "if const.CAUSAL:\n            visible", "sequences"),
    (
        "lists_swizzled:\n        place = work_tiles - 1 - place",
        "lists_swizzled:\n        place = work_tiles - 2 - place",
        "swizzled",
    ),
]
"""What stands in the tile code, what is put in its place, and the case that notices it."""


@contextlib.contextmanager
def faulty(old, new):
    variants.entry_of.cache_clear()
    try:
        with mutated(MODULES, old, new):
            yield
    finally:
        variants.entry_of.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "case"), MUTATIONS)
def test_a_fault_in_the_tile_code_is_noticed(old, new, case):
    special = {"empty": given_lists, "no keys": without_keys}
    with faulty(old, new), contextlib.suppress(InterpreterError):
        if case in special:
            with pytest.raises(AssertionError):
                special[case](NARROW if case == "empty" else {})
            return
        kernel, sizes, knobs = CASES[case]
        assert attempt(kernel, *case_of(kernel, sizes, knobs))


LIST_MUTATIONS = [
    ("seen == pairs", "seen >= pairs - 1", "all but one pair"),
    ("& (columns < seq_k)", "", "everything"),
    ("& (rows < seq_q)", "", "all but one pair"),
    ("count * BLOCK\n", "count * BLOCK + 1\n", "everything"),
    (".astype(ct.int32) * count", ".astype(ct.int32)", "everything"),
    ("min(seq_q - place * BLOCK, BLOCK)", "BLOCK", "all but one pair"),
    ("HEAD + blocks - 1 - full", "HEAD + full", "causal"),
    ("range(partial, blocks - full)", "range(partial, partial)", "nothing"),
    ("range(partial, blocks - full)", "range(partial, blocks)", "causal"),
    ("0), partial, check_bounds", "0), full, check_bounds", "causal"),
    ("partial + full, check_bounds", "full, check_bounds", "causal"),
    ("seen > 0", "seen > 1", "one pair"),
    ("part * KEYS", "part", "window"),
    ("mask(batch, head,", "mask(head, batch,", "by head"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "mask"), LIST_MUTATIONS)
def test_a_fault_in_the_kernel_of_lists_is_noticed(old, new, mask):
    with mutated([lists.__name__], old, new):
        from tiledsched.kernels.attention import lists as copy

        assert all_lists(copy, mask, [(129, 129), (300, 300), (256, 257)])


@pytest.mark.parametrize("knobs", [{"loop_split": True}, NARROW])
def test_a_list_that_calls_a_partial_block_full_is_noticed(knobs):
    p, s = case_of(CAUSAL, {}, knobs)
    inputs = made(p)
    blocks = inputs["Blocks"][0, 0]
    assert blocks[1].tolist() == [1, 2, 1, 0, 0]
    blocks[1] = [0, 2, 0, 0, 1]
    out = run_schedule(CAUSAL, p, s, inputs)["Out"].astype(float)
    right = call_reference(CAUSAL, np, p, {name: each.astype(float) for name, each in inputs.items()})[0]
    assert np.abs(out - right)[:, :, :128].max() < 2e-3
    assert np.abs(out - right)[:, :, 128:].max() > 0.1


# ---- mistakes in an author's functions -------------------------------------------------------------------------------


def of_its_tile(score, b, h, q_idx, kv_idx):
    return score - ct.max(score)


def mask_of_its_tile(b, h, q_idx, kv_idx):
    return ct.max(kv_idx) > q_idx


def of_its_rows(score, b, h, q_idx, kv_idx):
    return score / ct.sum(score, axis=0, keepdims=True)


def by_width(score, b, h, q_idx, kv_idx):
    return score * (32 / score.shape[1])


def outside(b, h, q_idx, kv_idx, documents):
    return ct.gather(documents, (b, kv_idx), check_bounds=False) == ct.gather(documents, (b, q_idx))


def one_head(score, b, h, q_idx, kv_idx, slopes):
    return score * ct.gather(slopes, h).reshape((1, 1))


@pytest.mark.parametrize(
    ("functions", "arrays", "place", "message"),
    [
        ({"mask_mod": outside}, DOCUMENTS, 0, "an index lies outside the shape"),
        ({"score_mod": one_head}, SLOPES, 2, f"(test_flex.py, line {one_head.__code__.co_firstlineno + 1})"),
    ],
)
def test_check_finds_a_mistake_in_a_function(functions, arrays, place, message):
    """On one of the problems that a check runs."""
    kernel = flex_attention(**functions, arrays=arrays)
    rows = list(ts.check(kernel, [kernel.small()[place]], schedules=4))
    assert any(message in row.message for row in rows if not row.passed)


@pytest.mark.parametrize("function", [of_its_tile, mask_of_its_tile, by_width, of_its_rows])
def test_a_function_whose_values_depend_on_the_tile_is_refused(function):
    what = "score_mod" if "score" in function.__code__.co_varnames else "mask_mod"
    with pytest.raises(
        DeclarationError, match=f"{what}: {function.__name__.strip('_')} returns other values for a part"
    ):
        flex_attention(**{what: function})


def misspelt(score, b, h, q_idx, kv_idx, slopes):
    return score + ct.gathr(slopes, h)


def inner(score):
    return ct.expp(score)


def through_another(score, b, h, q_idx, kv_idx, slopes):
    return inner(score)


def of_wrong_count(b, h, q_idx, kv_idx, documents):
    return ct.gather(documents, (b, h, q_idx)) == 0


def of_wrong_shape(score, b, h, q_idx, kv_idx, slopes):
    return score + ct.zeros((16, 16), ct.float32)


def of_one_number(score, b, h, q_idx, kv_idx, slopes):
    return score + q_idx.item()


def returns_nothing(score, b, h, q_idx, kv_idx, slopes):
    score + 1.0


def returns_other_shape(score, b, h, q_idx, kv_idx, slopes):
    return ct.zeros((16, 16), ct.float32)


def returns_numbers(b, h, q_idx, kv_idx, documents):
    return q_idx - kv_idx


@pytest.mark.parametrize(
    ("function", "line", "message"),
    [
        (misspelt, misspelt, "module 'cuda.tile' has no attribute 'gathr' (did you mean 'gather'?)"),
        (through_another, inner, "has no attribute 'expp'"),
        (of_wrong_count, of_wrong_count, "has 2 axes; got 3 indices"),
        (of_wrong_shape, of_wrong_shape, "do not fit together; counted from the last axis, sides must be equal or 1"),
        (of_one_number, of_one_number, "a tile of shape (4, 1) was used where one number is needed"),
        (returns_nothing, None, "expected a tile or a number, got NoneType"),
        (returns_other_shape, None, "it must return a tile that broadcasts to (4, 8), got "),
        (returns_numbers, None, "must return booleans, as comparisons do, got int32"),
    ],
)
def test_an_error_in_a_function_begins_with_its_line(function, line, message):
    """Of what a function returns, with the line where the function begins."""
    first = line.__code__.co_firstlineno + 1 if line else function.__code__.co_firstlineno
    what, arrays = ("score_mod", SLOPES) if "score" in function.__code__.co_varnames else ("mask_mod", DOCUMENTS)
    with pytest.raises(DeclarationError) as error:
        flex_attention(**{what: function}, arrays=arrays)
    assert str(error.value).startswith(f"test_flex.py, line {first}: {what}: ")
    assert message in str(error.value)
    if what == "mask_mod":
        with pytest.raises(DeclarationError, match=f"^test_flex.py, line {first}: mask_mod: "):
            lists_kernel(function, [(2, "int32")])


def sorts(score, b, h, q_idx, kv_idx):
    return score * sorted((2, 1))[0]


def loads(score, b, h, q_idx, kv_idx, slopes):
    return score + ct.load(slopes, (1,), (64,), check_bounds=False).reshape((1, 64))


def test_how_large_arrays_are_only_a_call_knows():
    """A function that reads them without checks is no mistake yet."""
    assert flex_attention(score_mod=loads, arrays=SLOPES).mods[0] is loads
    assert flex_attention(mask_mod=outside, arrays=DOCUMENTS).mods[1] is outside


SORTS = flex_attention(score_mod=sorts)


@pytest.mark.compiler
def test_what_only_the_compiler_refuses_is_told_with_its_line():
    p, s = case_of(SORTS, {}, {})
    found = compile_task(BuildTask(kernel=SORTS.locator(), problem=p, schedule=s, arch="sm_90"))
    assert f"(test_flex.py, line {sorts.__code__.co_firstlineno + 1})" in found.failure.message


NEARNESS = 3


def nested(score, b, h, q_idx, kv_idx):
    def nearer(each):
        return each * NEARNESS

    return nearer(score)


def defaulted(size):
    def mask_mod(b, h, q_idx, kv_idx, near=size):
        return q_idx - kv_idx < near

    return mask_mod


def test_the_code_covers_what_nested_functions_read_and_defaults(monkeypatch):
    before = code_of(nested, "score_mod")
    monkeypatch.setitem(nested.__globals__, "NEARNESS", 4)
    assert code_of(nested, "score_mod") != before
    assert code_of(defaulted(3), "mask_mod") == code_of(defaulted(3), "mask_mod")
    assert code_of(defaulted(3), "mask_mod") != code_of(defaulted(4), "mask_mod")


def test_spaces_in_a_size_are_no_further_axis():
    assert variants.rank_of(ts.array("batch seq_k + 1", dtype="int32")) == 2
