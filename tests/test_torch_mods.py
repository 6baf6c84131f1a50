"""Functions written for torch's FlexAttention, as tile code: they mean what torch means, or are refused."""

from __future__ import annotations

import functools
import math
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from docs.examples import attention_variants
from tiledsched.core.errors import DeclarationError
from tiledsched.interpreter import evaluate
from tiledsched.kernels.attention import torch_mods
from tiledsched.kernels.attention.torch_mods import tile_mods

BATCH, HEADS, ROWS, KEYS, COLUMNS = 2, 3, 77, 93, 8
GENERATOR = torch.Generator().manual_seed(1)
IDS = torch.randint(0, 4, (BATCH, KEYS), generator=GENERATOR).sort(1)[0]
BEGINS = torch.stack([torch.searchsorted(each, torch.arange(4)) for each in IDS])
PREFIX = torch.tensor([5, 40])
SLOPES = torch.tensor([0.5, 0.0625, 0.0078125])
BIAS = torch.randn(BATCH, HEADS, ROWS + KEYS, generator=GENERATOR)
UNPADDED = torch.arange(KEYS) < torch.tensor([[60], [93]])
PAGES = torch.tensor([[2, 0, -1, 1], [3, 2, 1, 0]])
TEMPERATURE = torch.tensor(0.7)


# ---- functions as users of torch write them --------------------------------------------------------------------------


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(size):
    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= size

    return and_masks(causal, near)


def prefix_lm(b, h, q_idx, kv_idx):
    return kv_idx < PREFIX[b]


def same_document(b, h, q_idx, kv_idx):
    return IDS[b, q_idx] == IDS[b, kv_idx]


def within_documents(inner):
    def mask(b, h, q_idx, kv_idx):
        row, key = (each - BEGINS[b, IDS[b, each]] for each in (q_idx, kv_idx))
        return same_document(b, h, q_idx, kv_idx) & inner(b, h, row, key)

    return mask


def natten(b, h, q_idx, kv_idx):
    def split(place):
        return place // 11, place % 11

    (row, column), (key_row, key_column) = split(q_idx), split(kv_idx)
    near = (row.clamp(2, 5) - key_row).abs() <= 2
    return near & (torch.abs(torch.clamp(column, min=2, max=8) - key_column) <= 2)


def dilated(b, h, q_idx, kv_idx):
    distance = torch.abs(q_idx - kv_idx)
    return torch.logical_and(distance <= 20, (distance % 3) == 0)


def paged(b, h, q_idx, kv_idx):
    page = PAGES[b, kv_idx // 24]
    return torch.where(page >= 0, causal(b, h, q_idx, page * 24 + kv_idx % 24), False)


def alibi(score, b, h, q_idx, kv_idx):
    return score + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (kv_idx - q_idx)


def alibi_of_slopes(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx).to(torch.float32)


def relative(score, b, h, q_idx, kv_idx):
    return score + (q_idx - kv_idx)


def relative_bias(score, b, h, q_idx, kv_idx):
    return score + BIAS[b, h, q_idx - kv_idx]


def softcap(cap):
    tanh = torch.tanh
    return lambda score, b, h, q_idx, kv_idx: cap * tanh(score / cap)


def causal_scores(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx, score, -float("inf"))


def checkerboard(score, b, h, q_idx, kv_idx):
    score = torch.where((kv_idx - q_idx).abs() % 2 == 1, score * 0.5, score)
    return torch.where((kv_idx - q_idx) % 3 == 0, score * 2.0, score)


class Cooled:
    """What a function reads of an object is read in each call."""

    def __init__(self):
        self.temperature = TEMPERATURE

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score / self.temperature


MODS = {
    "window": (None, window(9)),
    "prefix": (None, or_masks(causal, prefix_lm)),
    "documents": (None, same_document),
    "causal in documents": (None, within_documents(causal)),
    "neighbourhood": (None, natten),
    "dilated": (None, dilated),
    "pages": (None, paged),
    "padding": (None, lambda b, h, q_idx, kv_idx: UNPADDED[b, kv_idx]),
    "all": (None, noop_mask),
    "ALiBi and a mask that is tile code": (alibi, causal),
    "slopes and documents": (alibi_of_slopes, and_masks(causal, same_document)),
    "relative": (relative, None),
    "relative bias": (relative_bias, window(30)),
    "softcap": (softcap(3.0), None),
    "causal scores": (causal_scores, None),
    "checkerboard": (checkerboard, None),
    "a tensor of no axes": (Cooled().score_mod, None),
}


def attention(q, k, v, score_mod, mask_mod):
    """In NumPy, with the functions as tile code."""
    score_mod, mask_mod, arrays = tile_mods(score_mod, mask_mod)
    arrays = [each.numpy() for each in arrays]
    row, key = np.arange(ROWS, dtype=np.int32)[:, None], np.arange(KEYS, dtype=np.int32)[None]
    out = np.empty((BATCH, HEADS, ROWS, COLUMNS))
    for b, h in np.ndindex(BATCH, HEADS):
        scores = q[b, h] @ k[b, h].T / math.sqrt(COLUMNS)
        if score_mod is not None:
            scores = np.broadcast_to(evaluate(score_mod, scores, b, h, row, key, arrays=arrays), scores.shape)
        if mask_mod is not None:
            scores = np.where(evaluate(mask_mod, b, h, row, key, arrays=arrays), scores, -np.inf)
        weights = np.exp(scores - np.maximum(scores.max(1, keepdims=True), -1e300))
        out[b, h] = weights @ v[b, h] / np.maximum(weights.sum(1, keepdims=True), 1e-300)
    return out


@functools.cache
def by_torch(name):
    score_mod, mask_mod = MODS[name]
    q, k, v = inputs()
    blocks = mask_mod and theirs.create_block_mask(mask_mod, BATCH, HEADS, ROWS, KEYS, device="cpu")
    return theirs.flex_attention(q, k, v, score_mod=score_mod, block_mask=blocks).numpy()


@functools.cache
def inputs():
    sizes = ((BATCH, HEADS, each, COLUMNS) for each in (ROWS, KEYS, KEYS))
    return [torch.randn(*each, generator=GENERATOR, dtype=torch.float64) for each in sizes]


def difference(name):
    return np.abs(attention(*(each.numpy() for each in inputs()), *MODS[name]) - by_torch(name)).max()


@pytest.fixture(autouse=True)
def _eager(monkeypatch):
    monkeypatch.setattr(theirs, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.parametrize("name", MODS)
def test_a_function_means_what_torch_means(name):
    assert difference(name) < 1e-6  # torch's slopes and bias are float32


# ---- each word -------------------------------------------------------------------------------------------------------


def of_word(name, count):
    """A function of scores that calls one function of torch's, and its method where that has the same arguments."""
    function, method = getattr(torch, name), getattr(torch.Tensor, name)

    def integers(score, b, h, q_idx, kv_idx):
        numbers = (q_idx - kv_idx, kv_idx % 7 - 10, 3)[:count]
        return function(*numbers) * 1

    def floats(score, b, h, q_idx, kv_idx):
        numbers = (score * 3, score + q_idx, 0.5)[:count]
        return (function(*numbers) if name == "where" else method(*numbers)) * 1.0

    return integers, floats


WORDS = {name: len({*re.findall(r"{\d?}", text)}) if "{0}" in text else text.count("{}") for name, text in torch_mods.FUNCTIONS.items() if hasattr(torch, name)}


def test_words():
    print(WORDS)
