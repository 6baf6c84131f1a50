"""Gradients of `ts.grouped_matmul` on a real GPU against float64, compiled whole, and in CUDA graphs."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("forgotten"),
]

from on_gpu import captured, normal

import tiledsched as ts

F = torch.nn.functional
COUNTS = {
    "uneven": (5, 0, 300, 28, 1, 0),
    "some rows in no group": (0, 40, 1, 0, 64, 33),
    "one group": (0, 0, 334, 0, 0, 0),
}
SIZES = {"aligned": (256, 192), "odd": (250, 187)}
TOKENS = 334


def arguments(k, n, dtype=torch.bfloat16):
    """The rows, the experts' weights and gates as linear layers keep them, their bias and a residual."""
    b, gate = normal(6, n, k, dtype=dtype), normal(6, n, k + 1, dtype=dtype)[..., :k].contiguous()
    return [normal(TOKENS, k, dtype=dtype) / k**0.5, b, gate, normal(6, n, dtype=dtype), normal(TOKENS, n, dtype=dtype)]


def ours(a, b, gate, bias, residual, ends):
    return ts.grouped_matmul(a, b.mT, ends, bias, "silu", gate.mT, residual)


def product(a, b, gate, bias, residual, ends):
    return ts.grouped_matmul(a, b.mT, ends)


def formula(a, b, gate, bias, residual, ends, plain=False):
    out = torch.zeros(len(a), b.shape[1], dtype=a.dtype, device="cuda")
    for group, (begin, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        rows = a[begin:end]
        sums = rows @ b[group].t()
        if not plain:
            sums = F.silu(rows @ gate[group].t()) * (sums + bias[group]) + residual[begin:end]
        out[begin:end] = sums
    return out


def gradients(call, given, ends, weights, **more):
    leaves = [each.detach().clone().requires_grad_() for each in given]
    out = call(*leaves, ends, **more)
    return torch.autograd.grad(out, leaves, weights.to(out.dtype), allow_unused=True)


def assert_right(found, right, group_ends):
    """Each gradient, by its relative error; nothing of empty groups."""
    for one, wanted in zip(found, right, strict=True):
        assert (one is None) == (wanted is None)
        if one is not None:
            assert ((one.double() - wanted).norm() / wanted.norm()).item() < 0.01
    for group, (begin, end) in enumerate(itertools.pairwise([0, *group_ends])):
        assert begin != end or not found[1][group].any()


def ends_of(counts):
    return torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)


def weights_of(ends, n):
    """The gradient of the result, with zeros where it is undefined."""
    rows = torch.arange(TOKENS, device="cuda")[:, None]
    return normal(TOKENS, n, dtype=torch.float32).to(torch.bfloat16).masked_fill(rows >= ends[-1], 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("call", [product, ours], ids=["the product", "all"])
def test_gradients_are_those_of_the_formula(call, counts, size, dtype) -> None:
    k, n = SIZES[size]
    given, ends = arguments(k, n, dtype), ends_of(counts)
    weights = weights_of(ends, n)
    right = gradients(formula, [each.double() for each in given], ends, weights, plain=call is product)
    for _ in range(2):
        found = gradients(call, given, ends, weights)
        assert_right(found, right, ends.tolist())
        assert not found[0][sum(counts) :].any()


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_bfloat16_never_wait_for_the_gpu_and_can_be_captured(size) -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch counts rows on the host here")
    k, n = SIZES[size]
    given, ends = arguments(k, n), ends_of(COUNTS["uneven"])
    weights = weights_of(ends, n)
    gradients(ours, given, ends, weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(ours, given, ends, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, found = captured(lambda: gradients(ours, given, ends, weights))
    ends.copy_(ends_of((50, 50, 0, 100, 100, 34)))
    graph.replay()
    right = gradients(formula, [each.double() for each in given], ends, weights)
    assert_right(found, right, ends.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_gradients_compiled_whole(dtype) -> None:
    k, n = SIZES["odd"]
    given, ends = arguments(k, n, dtype), ends_of(COUNTS["some rows in no group"])
    weights = weights_of(ends, n)
    torch._dynamo.reset()
    found = gradients(torch.compile(ours, fullgraph=True), given, ends, weights)
    right = gradients(formula, [each.double() for each in given], ends, weights)
    assert_right(found, right, ends.tolist())
