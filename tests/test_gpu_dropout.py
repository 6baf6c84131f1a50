"""Dropout of `sdpa` on a GPU: what is dropped, bit for bit, outputs and gradients against float64, graphs and checkpoints."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch")

from dropped import attention, drawn, factors
from torch.utils.checkpoint import checkpoint

import tiledsched as ts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE, BATCH, HEADS, KV_HEADS, P = "cuda", 2, 4, 2, 0.3
RTOL, ATOL = 3e-2, 5e-3
"""Of the norm of a result in bfloat16; what a number may be off in the root of the mean square."""
SIZES = [(1, 1), (1, 129), (63, 65), (64, 64), (65, 1000), (129, 63), (1000, 129)]
CASES = [
    *itertools.product(SIZES, [64, 128], ["plain"]),
    *itertools.product([(65, 129)], [64, 128], ["causal", "two passes"]),
]
CASES += itertools.product([(65, 129), (300, 300)], [64], ["boolean", "additive"])
TWO_PASSES = {"structure": "two_pass", "tile_m": 64, "tile_n": 64, "tile_m_dq": 64, "tile_n_dq": 64}
"""Gradients as they are computed where they must be the same in every call."""


@pytest.fixture(autouse=True)
def own():
    with ts.configure(masks="own", fallback="error"):
        yield


def uniform(rows, keys, width=64):
    """Tensors of which all probabilities are alike and attention returns them."""
    q, k = (torch.zeros(BATCH, of, size, width) for of, size in ((HEADS, rows), (KV_HEADS, keys)))
    return [each.half().to(DEVICE) for each in (q, k, torch.eye(keys).expand(BATCH, KV_HEADS, keys, keys))]


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("rows", "keys"), [*SIZES, (1000, 1000)])
def test_what_is_dropped_bit_for_bit(rows, keys, width):
    q, k, v = uniform(rows, keys, width)
    wanted = torch.from_numpy(factors(P, drawn(rows, DEVICE), BATCH, HEADS, rows, keys)).to(DEVICE)
    for first in range(0, keys, 250):
        torch.manual_seed(rows)
        found = ts.sdpa(q, k, v[..., first : first + 250], dropout_p=P)
        part = wanted[..., first : first + 250]
        assert torch.equal(found != 0, part != 0)
        torch.testing.assert_close(found.double() * keys, part.double(), rtol=2e-3, atol=0)


@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.99])
def test_the_share_that_is_dropped(p):
    q, k, v = uniform(1000, 200)
    dropped = (ts.sdpa(q, k, v, dropout_p=p) == 0).double()
    assert abs(dropped.mean().item() - p) < 5 * math.sqrt(p * (1 - p) / dropped.numel())


@pytest.mark.parametrize(("size", "width", "kind"), CASES)
def test_outputs_and_gradients(size, width, kind):
    (rows, keys), generator = size, torch.Generator(DEVICE).manual_seed(1)
    shapes = [(BATCH, HEADS, rows), (BATCH, KV_HEADS, keys), (BATCH, KV_HEADS, keys), (BATCH, HEADS, rows)]
    given = [torch.randn(*each, width, generator=generator, device=DEVICE).bfloat16() for each in shapes]
    share = 0.7 if kind in ("boolean", "additive") else 1.0
    seen = torch.rand(BATCH, 1, rows, keys, generator=generator, device=DEVICE) < share
    seen = seen.tril() if kind == "causal" else seen
    seen[..., 0] = True
    added = torch.randn(rows, keys, generator=generator, device=DEVICE).bfloat16() * (kind == "additive")
    more = {"causal": {"is_causal": True}, "boolean": {"attn_mask": seen}}
    more["additive"] = {"attn_mask": added.masked_fill(~seen, -math.inf)}
    ours, exact = (
        [each.detach().to(dtype).requires_grad_() for each in given[:3]] for dtype in (torch.bfloat16, torch.float64)
    )
    wanted = attention(exact, factors(P, drawn(2, DEVICE), BATCH, HEADS, rows, keys), seen, added)
    with ts.configure(**(TWO_PASSES if kind == "two passes" else {})):
        found = ts.sdpa(*ours, dropout_p=P, return_lse=True, **more.get(kind, {}))
        found[0].backward(given[3])
    wanted[0].backward(given[3].double())
    results = [*found, *(each.grad for each in ours)]
    for one, other in zip(results, [*wanted, *(each.grad for each in exact)], strict=True):
        assert (one.double() - other).norm() <= RTOL * other.norm() + ATOL * math.sqrt(other.numel())


def test_each_replay_of_a_graph_drops_others_and_a_seed_the_same():
    q, k, v = (each.requires_grad_() for each in uniform(130, 129))

    def step():
        out = ts.sdpa(q, k, v, dropout_p=P)
        return out.detach(), torch.autograd.grad(out, v, torch.ones_like(out))[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    kept = torch.from_numpy(factors(P, drawn(3, DEVICE), BATCH, HEADS, 130, 129)).to(DEVICE) != 0
    for same in (True, False):
        graph.replay()
        out, dv = (each.double() for each in captured)
        assert torch.equal(out != 0, kept) == same
        sums = out.unflatten(1, (KV_HEADS, -1)).sum((2, 3))  # the gradients drop what the output does
        torch.testing.assert_close(dv[..., 0], sums, rtol=5e-3, atol=5e-3)


def test_a_checkpoint_drops_the_same_again():
    given = [torch.randn_like(each) for each in uniform(130, 129)]
    found = []
    for call in (ts.sdpa, lambda *tensors, **more: checkpoint(ts.sdpa, *tensors, use_reentrant=False, **more)):
        own = [each.clone().requires_grad_() for each in given]
        torch.manual_seed(4)
        call(*own, dropout_p=P).square().sum().backward()
        found.append(own)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-2, atol=1e-3)
