"""Functions written for torch's FlexAttention, as tile code: they mean what torch means, or are refused."""

from __future__ import annotations

import functools
import itertools
import linecache
from types import SimpleNamespace

import cuda.tile as ct
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from serve_on_cpu import TOLERANCE, tensors
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

import tiledsched as ts
from docs.examples import attention_variants
from tiledsched.build.compiler import compile_schedule
from tiledsched.core.errors import DeclarationError
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import InterpreterError, evaluate
from tiledsched.kernels.attention import torch_mods
from tiledsched.kernels.attention.torch_mods import tile_mods
from tiledsched.kernels.attention.variants import variant
from tiledsched.ops.block_masks import read_arrays, types_of
from tiledsched.ops.integrations import transformers as integration

BATCH, HEADS, ROWS, KEYS, COLUMNS = 2, 3, 77, 93, 8
GENERATOR = torch.Generator().manual_seed(1)
IDS = torch.randint(0, 4, (BATCH, KEYS), generator=GENERATOR).sort(1)[0]
BEGINS = torch.stack([torch.searchsorted(each, torch.arange(4)) for each in IDS])
PREFIX = torch.tensor([5, 40])
SLOPES = torch.tensor([0.5, 0.0625, 0.0078125])
BIAS = torch.randn(BATCH, HEADS, ROWS + KEYS, generator=GENERATOR)
DENSE = torch.randn(HEADS, ROWS, KEYS, generator=GENERATOR)
UNPADDED = torch.arange(KEYS) < torch.tensor([[60], [93]])
PAGES = torch.tensor([[2, 0, -1, 1], [3, 2, 1, 0]])
COOLED = SimpleNamespace(temperature=torch.tensor(0.7))


# ---- functions as users of torch write them --------------------------------------------------------------------------


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(size):
    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= size

    return and_masks(causal, near)


def prefix_lm(b, h, q_idx, kv_idx):
    return kv_idx < PREFIX[b]


def sloped(slopes):
    return lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx).to(torch.float32)


def documents(ids):
    return lambda b, h, q_idx, kv_idx: ids[b, q_idx] == ids[b, kv_idx]


def within_documents(inner):
    def mask(b, h, q_idx, kv_idx):
        row, key = (each - BEGINS[b, IDS[b, each]] for each in (q_idx, kv_idx))
        return documents(IDS)(b, h, q_idx, kv_idx) & inner(b, h, row, key)

    return mask


def natten(b, h, q_idx, kv_idx):
    def split(place):
        return place // 11, place % 11

    (row, column), (key_row, key_column) = split(q_idx), split(kv_idx)
    near = (row.clamp(2, 5) - key_row).abs() <= 2
    return near & (torch.abs(torch.clamp(column, min=2, max=8) - key_column) <= 2)


def paged(b, h, q_idx, kv_idx):
    page = PAGES[b, kv_idx // 24]
    return torch.where(page >= 0, causal(b, h, q_idx, page * 24 + kv_idx % 24), False)


def relative(score, b, h, q_idx, kv_idx):
    return score.astype(ct.float32) + (q_idx - kv_idx)


MODS = {
    "window": (None, window(9)),
    "prefix": (None, or_masks(causal, prefix_lm)),
    "documents": (None, documents(IDS)),
    "causal in documents": (None, within_documents(causal)),
    "neighbourhood": (None, natten),
    "dilated": (
        None,
        lambda b, h, q_idx, kv_idx: torch.logical_and(torch.abs(q_idx - kv_idx) <= 20, (q_idx - kv_idx) % 3 == 0),
    ),
    "pages": (None, paged),
    "padding": (None, lambda b, h, q_idx, kv_idx: UNPADDED[b, kv_idx]),
    "all": (None, noop_mask),
    "ALiBi, and a mask that is tile code": (
        lambda score, b, h, q_idx, kv_idx: score + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (kv_idx - q_idx),
        causal,
    ),
    "slopes and documents": (sloped(SLOPES), and_masks(causal, documents(IDS))),
    "relative bias": (lambda score, b, h, q_idx, kv_idx: score + BIAS[b, h, q_idx - kv_idx], None),
    "dense": (lambda score, b, h, q_idx, kv_idx: score + DENSE[h, q_idx, kv_idx], None),
    "softcap": (lambda score, b, h, q_idx, kv_idx: 3.0 * torch.tanh(score / 3.0), None),
    "causal scores": (lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf")), None),
    "checkerboard": (
        lambda score, b, h, q_idx, kv_idx: torch.where((kv_idx - q_idx).abs() % 2 == 1, 2.0 - score, score),
        None,
    ),
    "a tensor of no axes": (lambda score, b, h, q_idx, kv_idx: score / COOLED.temperature, None),
}


@functools.cache
def by_torch(name):
    score_mod, mask_mod = MODS[name]
    q, k, v = inputs()
    blocks = mask_mod and theirs.create_block_mask(mask_mod, BATCH, HEADS, ROWS, KEYS, device="cpu")
    return theirs.flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks)


@functools.cache
def inputs():
    sizes = ((BATCH, HEADS, each, COLUMNS) for each in (ROWS, KEYS, KEYS))
    return [torch.randn(*each, generator=GENERATOR, dtype=torch.float64) for each in sizes]


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.filterwarnings("ignore:tiledsched.flex uses its reference")
@pytest.mark.parametrize("name", MODS)
def test_a_function_means_what_torch_means(name):
    score_mod, mask_mod = MODS[name]
    blocks = mask_mod and ts.block_mask(mask_mod, *inputs()[:2])
    for given in ({"mask_mod": mask_mod}, {"block_mask": blocks}):
        found = ts.flex(*inputs(), score_mod, **given)
        torch.testing.assert_close(found, by_torch(name), rtol=1e-12, atol=1e-12)


def of_own_ids(b, h, q_idx, kv_idx, ids):
    return torch.logical_and(ids[b, q_idx] == ids[b, kv_idx], q_idx >= kv_idx)


@pytest.mark.parametrize("name", ["window", "dilated", "neighbourhood", "softcap", "checkerboard"])
def test_a_kernel_that_is_declared_is_that_of_calls(name):
    score_mod, mask_mod = MODS[name]
    assert ts.flex_attention(score_mod=score_mod, mask_mod=mask_mod) is variant(*tile_mods(score_mod, mask_mod)[:2], ())


def test_arrays_that_are_declared_are_read_by_brackets():
    with pytest.raises(DeclarationError, match="mask_mod must take"):
        ts.flex_attention(mask_mod=of_own_ids)  # which does not keep it from being understood with its array
    mask_mod = tile_mods(None, of_own_ids, (IDS,))[1]
    found = ts.flex_attention(mask_mod=of_own_ids, arrays={"ids": ts.array("batch seq_k", dtype="int64")})
    assert found is variant(None, mask_mod, [(2, "int64")])


@pytest.mark.parametrize("name", ["documents", "relative bias", "slopes and documents"])
def test_tensors_around_a_declared_function_are_refused(name):
    score_mod, mask_mod = MODS[name]
    with pytest.raises(DeclarationError, match="have the functions take them after their other arguments"):
        ts.flex_attention(score_mod=score_mod, mask_mod=mask_mod)


@pytest.mark.usefixtures("fresh")
def test_functions_that_read_the_arrays_alone_are_compiled_whole(launches):
    q, k, v = tensors(batch=2, heads=HEADS, kv_heads=HEADS, rows=KEYS, columns=16)
    call = lambda q, k, v, ids: ts.flex(q, k, v, MODS["softcap"][0], of_own_ids, arrays=(ids,))  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, IDS), call(q, k, v, IDS))
    mask_mod = documents(IDS)
    around = torch.compile(lambda q, k, v: ts.flex(q, k, v, mask_mod=mask_mod), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="have the functions take them after their other arguments"):
        around(q, k, v)


@pytest.mark.usefixtures("fresh")
def test_the_kernel_is_given_the_tensors_of_each_call(launches):
    """In the interpreter; the second call, with functions made anew and other tensors, launches the same kernels."""
    q, k, v = tensors(batch=2, heads=HEADS, kv_heads=HEADS, rows=KEYS, columns=16)
    for slopes, ids in ((SLOPES, IDS), (SLOPES * 2, IDS // 2)):
        mods = sloped(slopes), documents(ids)
        blocks = theirs.create_block_mask(mods[1], 2, HEADS, KEYS, KEYS, device="cpu")
        wanted = theirs.flex_attention(q.double(), k.double(), v.double(), score_mod=mods[0], block_mask=blocks)
        torch.testing.assert_close(ts.flex(q, k, v, *mods), wanted.to(q.dtype), **TOLERANCE[q.dtype])
    assert ts.explain(q, k, v, score_mod=mods[0], mask_mod=mods[1]).problem.kernel.startswith("flex_")
    first, second = ([kernel for _, _, kernel, _ in some] for some in (launches[:2], launches[2:4]))
    assert first == second
    assert len(first) == 2  # of the lists of blocks, and of attention


def test_elements_of_all_rows_and_keys_are_loaded_as_tiles():
    names = lambda mod: tile_mods(mod, None)[0].__code__.co_names  # noqa: E731
    assert "_load_tile" in names(lambda score, b, h, q_idx, kv_idx: score + DENSE[h, q_idx, kv_idx])
    assert "_load_tile" not in names(lambda score, b, h, q_idx, kv_idx: score + DENSE[h, q_idx, kv_idx - 1])
    assert "_load_tile" not in names(lambda score, b, h, q_idx, kv_idx: score + DENSE[h, kv_idx, q_idx])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_tangent_is_that_of_numpy(dtype):
    x = np.concatenate([np.linspace(-20, 20, 999), [0.0, 1e-6, -1e-6, 3e38, -3e38]]).astype(dtype)
    x = x[np.isfinite(x)]
    np.testing.assert_allclose(evaluate(torch_mods.tanh, x), np.tanh(x), atol=2e-7 if dtype == "float32" else 1e-3)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param("pages", "sm_90", marks=pytest.mark.slow),
        ("relative bias", "sm_121"),
        pytest.param("neighbourhood", "sm_90", marks=pytest.mark.slow),
    ],
)
def test_it_compiles(name, arch):
    score_mod, mask_mod, arrays = tile_mods(*MODS[name])
    kernel = variant(score_mod, mask_mod, types_of(read_arrays(arrays, arrays[0]) if arrays else ()))
    p = kernel.problem(seq_q=300, seq_k=300, head_dim=64, heads=4, kv_heads=2, batch=2)
    assert compile_schedule(kernel, p, space_for(arch, kernel).default(p), arch).facts.registers


# ---- masks of transformers -------------------------------------------------------------------------------------------


def of_transformers():
    masks = pytest.importorskip("transformers.masking_utils")
    causal, ids = masks.causal_mask_function, IDS - 1
    near = masks.or_masks(causal, lambda b, h, q_idx, kv_idx: abs(q_idx - kv_idx) < 6)  # as Gemma 3's
    return masks, {
        "window": masks.sliding_window_causal_mask_function(5),
        "window to both sides": masks.sliding_window_bidirectional_mask_function(5),
        "chunks": masks.chunked_causal_mask_function(4, PREFIX),
        "packed": masks.and_masks(causal, masks.packed_sequence_mask_function(ids)),
        "blocks that see all of themselves": masks.or_masks(causal, masks.blockwise_overlay(ids)),
        "joined": masks.and_masks(near, masks.sliding_window_overlay(7)),
    }


@pytest.mark.usefixtures("fresh")
def test_a_mask_without_translation_is_materialised():
    sizes = {"batch_size": BATCH, "q_length": 20, "kv_length": KEYS, "q_offset": 9, "kv_offset": 0}
    with ts.configure(masks="own"):
        named = {"mask_function": lambda b, h, i, j: torch.fmod(i - j, 3) == 0, "allow_is_causal_skip": False}
        assert isinstance(integration.mask(**sizes, **named), torch.Tensor)


@pytest.mark.usefixtures("fresh")
@pytest.mark.filterwarnings("ignore:tiledsched.flex uses its reference")
def test_masks_of_transformers():
    """20 rows behind a cache of 73 keys. They are not materialised where the setting `masks` is `own`."""
    masks, functions = of_transformers()
    q, k, v = inputs()
    for function, padding in itertools.product(functions.values(), (None, UNPADDED)):
        sizes = {"batch_size": BATCH, "q_length": 20, "kv_length": KEYS, "q_offset": KEYS - 20, "kv_offset": 0}
        named = {**sizes, "mask_function": function, "attention_mask": padding, "allow_is_causal_skip": False}
        wanted = masks.sdpa_mask(**named)
        assert torch.equal(integration.mask(**named), wanted)
        with ts.configure(masks="own"):
            seen, later = (integration.mask(**named | {"q_offset": place}) for place in (KEYS - 20, KEYS - 19))
            found, _ = integration.attention(SimpleNamespace(), q[:, :, :20], k, v, seen, is_causal=True)
        assert seen.mask_mod is later.mask_mod is not None
        assert torch.equal(seen.materialize(), wanted)
        right = torch.nn.functional.scaled_dot_product_attention(q[:, :, :20], k, v, attn_mask=wanted)
        torch.testing.assert_close(found.transpose(1, 2), right.nan_to_num(), rtol=1e-12, atol=1e-12)


# ---- each word -------------------------------------------------------------------------------------------------------


WHOLE = (np.arange(-20, 41)[:, None], np.array([-7, -3, -1, 1, 2, 5])[None], np.array([[4]]))
NUMBERS = {
    "whole": [each.astype(np.int32) for each in WHOLE],
    "real": [each * 0.37 + 0.01 for each in WHOLE],
    "true or false": [each % 3 == 1 for each in WHOLE],
}
WORDS = {name: max(text.count("{}"), 1) for name, text in torch_mods.FUNCTIONS.items() if hasattr(torch, name)}


def compared(name):
    """The kinds of numbers for which a function, and the method of that name, gave what torch gives; others are refused."""
    function, count = getattr(torch, name), WORDS[name]
    method = function if name == "where" else lambda x, *others: getattr(x, name)(*others)
    found = []
    for (kind, numbers), call in itertools.product(NUMBERS.items(), (function, method)):
        given = numbers[:count] if name != "where" else [numbers[0] > 0, *numbers[1:]]
        try:
            wanted = call(*map(torch.from_numpy, given))
            code = tile_mods(None, lambda b, h, q_idx, kv_idx, call=call: call(*(b, h, q_idx)[:count]))[1]
            got = evaluate(code, *[*given, 0, 0, 0][:4])
        except (RuntimeError, InterpreterError):
            continue
        np.testing.assert_allclose(got, np.broadcast_to(wanted.numpy(), got.shape), rtol=1e-5, atol=1e-6)
        found.append(kind)
    return found


@pytest.mark.parametrize("name", WORDS)
def test_a_word_means_what_torch_means(name):
    assert len(compared(name)) >= 2


@pytest.mark.parametrize("name", WORDS)
def test_a_word_with_another_meaning_is_noticed(name, monkeypatch):
    """Another function's, of as many numbers."""
    texts = list(dict.fromkeys(torch_mods.FUNCTIONS[each] for each in WORDS if WORDS[each] == WORDS[name]))
    place = texts.index(torch_mods.FUNCTIONS[name])
    monkeypatch.setitem(torch_mods.FUNCTIONS, name, texts[place - 1])
    with pytest.raises(AssertionError):
        assert len(compared(name)) >= 2


# ---- what is refused, and what is used as it is ----------------------------------------------------------------------


@torch.library.custom_op("tiledsched_tests::tanh", mutates_args=())
def approximate_tanh(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


REFUSED = [
    (
        lambda score, b, h, q_idx, kv_idx: score if score * SLOPES[h] > 3 else 0.0,
        "a condition on numbers is not known in Python",
    ),
    (lambda score, b, h, q_idx, kv_idx: torch.cumsum(score, -1), "torch's cumsum has no translation"),
    (lambda score, b, h, q_idx, kv_idx: torch.nn.functional.silu(score), "torch's silu inplace has no translation"),
    (
        lambda score, b, h, q_idx, kv_idx: score + BIAS[b][h],
        "a tensor of 3 axes takes as many numbers as indices, not 1",
    ),
    (lambda score, b, h, q_idx, kv_idx: score + BIAS[b, h, :], "slice(None, None, None) is no number"),
    (lambda score, b, h, q_idx, kv_idx: score * SLOPES, "a tensor of 1 axes takes as many numbers as indices, not 0"),
    (lambda score, b, h, q_idx, kv_idx: score.to(torch.complex64), "torch's to complex64 has no translation"),
    (lambda score, b, h, q_idx, kv_idx: score.exp().softmax(-1), "torch's softmax has no translation"),
    (lambda score, b, h, q_idx, kv_idx: score.exp().where(q_idx > 0, 0.0), "numbers have no where here"),
    (lambda score, b, h, q_idx, kv_idx: torch.add(score, b, alpha=2), "torch's add alpha has no translation"),
    (
        lambda score, b, h, q_idx, kv_idx: torch.exp(torch.ops.tiledsched_tests.tanh(score)),
        "torch's tiledsched_tests.tanh has no translation",
    ),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_a_function_without_translation_is_refused_with_its_line(function, message):
    line = function.__code__.co_firstlineno
    with pytest.raises(DeclarationError) as error:
        tile_mods(function, None)
    found = f"score_mod: {__file__}, line {line}, {linecache.getline(__file__, line).strip()}: {message}"
    assert str(error.value).startswith(found)
    assert "elements of tensors such as bias[h, q_idx, kv_idx], and torch's abs, " in str(error.value)


def test_tile_code_is_used_as_it_is():
    scores = [attention_variants.alibi, attention_variants.softcap(3.0), attention_variants.dense_bias, relative, None]
    masks = [attention_variants.causal, attention_variants.prefix_lm, attention_variants.tree, causal, None]
    for given in itertools.product(scores, masks, [(SLOPES,), ()]):
        assert tile_mods(*given) == given


def test_other_numbers_are_other_code():
    assert tile_mods(None, window(9))[1] is tile_mods(None, window(9))[1] is not tile_mods(None, window(8))[1]


def test_what_a_function_reads_is_read_in_each_call():
    slopes = SLOPES

    def mod(score, b, h, q_idx, kv_idx):
        return score + slopes[h]

    before = tile_mods(mod, None)
    slopes = SLOPES * 2
    assert tile_mods(mod, None)[0] is before[0]
    assert tile_mods(mod, None)[2][0] is slopes


def test_arrays_of_the_call_stand_before_those_that_functions_read():
    def score_mod(score, b, h, q_idx, kv_idx, factors):
        return score * factors[h] + SLOPES[h]

    factors = torch.tensor([1.0, 2.0, 3.0])
    score, mask, arrays = tile_mods(score_mod, prefix_lm, (factors,))
    assert arrays == (factors, SLOPES, PREFIX)
    held = [each.numpy() for each in arrays]
    assert evaluate(score, np.full((1, 1), 2.0), 0, 1, 0, 0, arrays=held) == 4.0625
    assert [evaluate(mask, 1, 0, 0, np.full((1, 1), key), arrays=held).item() for key in (39, 40)] == [True, False]
    assert tile_mods(score_mod, causal, (factors,))[1] is not causal  # which has no room for slopes
