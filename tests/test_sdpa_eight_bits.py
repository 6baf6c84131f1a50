"""`sdpa`, `sdpa_varlen` and `sdpa_paged` over keys and values in 8 bits: served by the kernel, or left to torch, alike."""

from __future__ import annotations

import numpy
import pytest

torch = pytest.importorskip("torch")

import tiledsched as ts
from tiledsched.core.errors import ProblemError
from tiledsched.kernels.attention import Attention
from tiledsched.ops import plans
from tiledsched.ops.sdpa import plan_for

pytestmark = pytest.mark.usefixtures("fresh")

PAGE, PAGES = 16, 9
EIGHT = torch.float8_e4m3fn


def quantised(*shape, dim=None, dtype=EIGHT):
    """Numbers in 8 bits, their scales over all but axis `dim`, and what both stand for."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    kept = [axis for axis in range(len(shape)) if axis != dim]
    scale = (
        numbers.abs().amax(kept, keepdim=True)
        / 448
        * (1 + torch.arange(1 if dim is None else shape[dim])).view(
            [-1 if axis == dim else 1 for axis in range(len(shape))]
        )
    )
    narrow = (numbers / scale).to(dtype)
    return narrow, scale.flatten(), narrow.float() * scale


def rows(dtype=torch.bfloat16, heads=4, seq_q=1):
    return torch.randn(2, heads, seq_q, 64, generator=torch.Generator().manual_seed(7)).to(dtype)


def agree(found, wanted, dtype=torch.bfloat16):
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2e-2, atol=2e-2)


def right(q, k, v, **more):
    return torch.nn.functional.scaled_dot_product_attention(q.float(), k, v, enable_gqa=True, **more)


@pytest.mark.parametrize("dim", [None, 1])
def test_sdpa(launches, dim):
    (k, k_scale, keys), (v, v_scale, values) = quantised(2, 2, 50, 64, dim=dim), quantised(2, 2, 50, 64, dim=dim)
    wanted = right(rows(), keys, values)
    agree(ts.sdpa(rows(), k, v, k_scale=k_scale, v_scale=v_scale), wanted)
    agree(ts.sdpa(rows(torch.float16), k, v, k_scale=k_scale, v_scale=v_scale), wanted, torch.float16)
    if dim is None:
        agree(ts.sdpa(rows(), k, v, k_scale=float(k_scale), v_scale=numpy.float32(v_scale.item())), wanted)
        agree(ts.sdpa(rows()[0], k[0], v[0], k_scale=k_scale[0], v_scale=v_scale[0]), wanted[0])
    spread = [each.mT.contiguous().mT for each in (k, v)]  # columns that do not lie side by side
    agree(ts.sdpa(rows(), *spread, k_scale=k_scale, v_scale=v_scale), wanted)
    assert launches


@pytest.mark.parametrize("dim", [None, 1])
def test_gradients_are_torchs(launches, left_to_torch, dim):
    (k, k_scale, keys), (v, v_scale, values) = quantised(2, 2, 50, 64, dim=dim), quantised(2, 2, 50, 64, dim=dim)
    q, wanted = rows().requires_grad_(), rows().float().requires_grad_()
    out = ts.sdpa(q, k, v, k_scale=k_scale, v_scale=v_scale)
    out.sum().backward()
    right(wanted, keys, values).sum().backward()
    agree(out, right(rows(), keys, values))
    agree(q.grad, wanted.grad)
    assert launches == []


@pytest.mark.parametrize("dim", [None, 2, 0])
def test_pages(launches, dim):
    """Through `sdpa_paged` and `sdpa_varlen`, with scales of one number, of each head and of each page."""
    (k, k_scale, keys), (v, v_scale, values) = (
        quantised(PAGES, PAGE, 2, 64, dim=dim),
        quantised(PAGES, PAGE, 2, 64, dim=dim),
    )
    table, lengths = torch.tensor([[4, 0, 8], [1, 7, 2]], dtype=torch.int32), torch.tensor([40, 17], dtype=torch.int32)
    q = rows().transpose(1, 2)
    found = ts.sdpa_paged(q, k, v, table, lengths, k_scale=k_scale, v_scale=v_scale)
    begins = torch.tensor([0, 1, 2], dtype=torch.int32)
    more = {"block_table": table, "seqused_k": lengths, "max_seqlen_q": 1, "k_scale": k_scale, "v_scale": v_scale}
    packed = ts.sdpa_varlen(q.flatten(0, 1), k, v, begins, **more)
    for place, length in enumerate(lengths.tolist()):
        own = [each[table[place].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for each in (keys, values)]
        wanted = right(rows()[place : place + 1], *own)[0].transpose(0, 1)
        agree(found[place], wanted)
        agree(packed[place], wanted[0])
    assert len(launches) >= 2


def test_plans_differ_by_scales(launches):
    k, scale, _ = quantised(2, 2, 50, 64, dim=1)
    ts.sdpa(rows(), k, k, k_scale=scale, v_scale=scale)
    ts.sdpa(rows(), k, k, k_scale=scale[:1], v_scale=scale[:1])
    assert [plan.problem.kv8 for plan in plans.cache.plans.values()] == ["head", "tensor"]
    assert plan_for(rows(), k, k, k_scale=scale, v_scale=scale).problem == Attention.problem(
        seq_q=1, seq_k=50, head_dim=64, dtype="bfloat16", batch=2, heads=4, kv_heads=2, kv8="head"
    )


@pytest.mark.parametrize(
    ("dtype", "scales", "words"),
    [
        (EIGHT, {}, "of torch.float8_e4m3fn need k_scale and v_scale"),
        (EIGHT, {"k_scale": 1.0}, "v_scale must be a positive number.* got None; .* need k_scale and v_scale"),
        (
            EIGHT,
            {"k_scale": torch.ones(3), "v_scale": 1.0},
            r"k_scale must be .*\[kv_heads = 2\], got torch.float32 \(3,\)",
        ),
        (EIGHT, {"k_scale": torch.ones(2), "v_scale": 1.0}, r"must have one shape, got \(2,\) and \(1,\)"),
        (EIGHT, {"k_scale": True, "v_scale": 1.0}, "k_scale must be a positive number, .* got True"),
        (EIGHT, {"k_scale": 1.0, "v_scale": 0.0}, "v_scale must be a positive number, .* got 0.0"),
        (
            EIGHT,
            {"k_scale": torch.ones(2, requires_grad=True), "v_scale": torch.ones(2)},
            "requires a gradient, and scales have none",
        ),
        (
            torch.float8_e5m2,
            {"k_scale": 1.0, "v_scale": 1.0},
            "are for k and v of torch.float8_e4m3fn, got torch.float8_e5m2",
        ),
        (torch.bfloat16, {"k_scale": 1.0, "v_scale": 1.0}, "convert them, or leave the scales out"),
    ],
)
def test_what_is_refused(launches, dtype, scales, words):
    k = quantised(2, 2, 50, 64, dtype=dtype)[0]
    with pytest.raises(ProblemError, match=words):
        ts.sdpa(rows(), k, k, **scales)
    assert launches == []
