"""An attention of one's own on a GPU: the twelve variants, their lists of blocks, graphs, gradients and masks."""

from __future__ import annotations

import numpy
import pytest

torch = pytest.importorskip("torch")

import tiledsched as ts
from docs.examples import attention_variants as variants
from docs.studies import flex_variants
from docs.studies.batch_invariance import normal
from tiledsched.kernels.attention.variants import list_blocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LARGEST_GRADIENT_ERROR = 3e-2
"""Largest relative error of a gradient in bfloat16."""


@pytest.mark.parametrize("name", flex_variants.NAMES)
def test_a_variant_is_right_at_odd_sizes(name):
    rows = list(flex_variants.right([name]))
    assert len(rows) == len(flex_variants.ODD)
    assert [row for row in rows if not row["error"] <= flex_variants.LARGEST_ERROR] == []


@pytest.mark.parametrize(("rows", "keys"), [(65, 64), (128, 128), (129, 300), (1000, 257)])
@pytest.mark.parametrize("name", ["causal", "same_document", "block_sparse"])
def test_lists_of_blocks_are_those_of_the_mask(name, rows, keys):
    of = flex_variants.compared(name, 2, 4, max(rows, keys))
    q, k = (torch.zeros(2, 4, size, 64, dtype=torch.bfloat16, device="cuda") for size in (rows, keys))
    found = ts.block_mask(of.mask, q, k, arrays=of.arrays).lists
    places = torch.meshgrid(*(torch.arange(size, device="cuda") for size in (2, 4, rows, keys)), indexing="ij")
    visible = of.torch_mask(*places).cpu().numpy()[: found.shape[0], : found.shape[1]]
    numpy.testing.assert_array_equal(found.cpu().numpy(), list_blocks(numpy, visible))


def test_other_contents_replay_in_a_graph():
    first, other = (flex_variants.compared("same_document", 2, 4, 1000, seed=seed) for seed in (0, 1))
    q, k, v = flex_variants.tensors_of(first, 2, 4, 1000, 64)
    ids = first.arrays[0].clone()

    def call():
        return ts.flex(q, k, v, mask_mod=variants.same_document, arrays=(ids,))

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for each in (first, other, first):
        ids.copy_(each.arrays[0])
        graph.replay()
        assert torch.equal(out, call())


@pytest.mark.parametrize("name", ["alibi", "same_document", "softcap"])
@pytest.mark.parametrize("keys", [1, 63, 129, 500])
def test_gradients(name, keys):
    of = flex_variants.compared(name, 2, 4, keys)
    given = flex_variants.tensors_of(of, 2, 4, keys, 64)
    own = [each.clone().requires_grad_() for each in given]
    exact = [each.double().requires_grad_() for each in given]
    above = torch.randn_like(given[0])
    ts.flex(*own, score_mod=of.score, mask_mod=of.mask, arrays=of.arrays).backward(above)
    flex_variants.torch_call(of, *exact, compiled=False)().backward(above.double())
    for one, wanted in zip(own, exact, strict=True):
        error = (one.grad.double() - wanted.grad).norm()  # of a single key the gradients of q and k are zero
        assert error <= LARGEST_GRADIENT_ERROR * max(wanted.grad.norm(), 1e-3 * above.double().norm())


@pytest.mark.parametrize("schedule", ["served", "large_in_registers", "three_swizzled"])
@pytest.mark.parametrize("name", ["causal", "window_with_global_tokens"])
def test_masks_of_places_by_several_schedules(name, schedule):
    for rows, keys in ((129, 129), (1000, 1000), (333, 700), (700, 333)):
        mask = flex_variants.compared(name, 2, 4, keys).mask
        q, k, v = (normal(seed, 2, 4, size, 128) for seed, size in enumerate((rows, keys, keys)))
        i, j = torch.arange(rows, device="cuda")[:, None], torch.arange(keys, device="cuda")
        size = max(1, keys // 32)
        seen = j <= i if name == "causal" else ((i - j).abs() <= size) | (i < 16) | (j < 16)
        scores = (q.double() @ k.double().mT * 128**-0.5).masked_fill(~seen, -torch.inf)
        with ts.configure(**flex_variants.SCHEDULES[schedule], fallback="error"):
            found = ts.flex(q, k, v, mask_mod=mask)
        assert flex_variants.relative_error(found, scores.softmax(-1) @ v.double()) <= flex_variants.LARGEST_ERROR


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 1000), (16, 3000), (64, 65), (129, 300)])
def test_masks_of_sdpa(kind, rows, keys):
    q = torch.randn(2, 4, rows, 64, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(2, 4, keys, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    mask = torch.rand(2, 1, rows, keys, device="cuda") < 0.7
    mask[..., 0] = True
    mask[1, :, ::2] = False  # rows that see no key
    mask = mask if kind == "boolean" else torch.where(mask, 0.5, -torch.inf).bfloat16()
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask if kind == "boolean" else mask.double()
    )
    with ts.configure(masks="own", fallback="error"):
        found = ts.sdpa(q, k, v, mask)
    assert flex_variants.relative_error(found, wanted) <= flex_variants.LARGEST_ERROR
