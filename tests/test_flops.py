"""Operations of our operators as torch's counter counts them, beside torch's own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from op_kernels import Product
from serve_on_cpu import tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import tiledsched as ts
from tiledsched.ops.features import AttentionFeatures

pytestmark = pytest.mark.usefixtures("launches", "quiet")


def counted(call, *given, **named) -> int:
    with FlopCounterMode(display=False) as counter:
        call(*given, **named)
    return counter.get_total_flops()


def torchs(q, k, v) -> tuple[int, int]:
    """What torch counts for its own attention of these shapes, forward and backward."""
    shapes = [tuple(each.shape) for each in (q, k, v)]
    return sdpa_flop_count(*shapes), sdpa_backward_flop_count((*shapes[0][:3], shapes[2][3]), *shapes)


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"causal": True, "window": 5}, {"return_lse": True}])
def test_attention_counts_as_torchs(features) -> None:
    q, k, v = tensors(batch=2, heads=4, kv_heads=2, rows=24, keys=40, columns=16, value_columns=32)
    forward, backward = torchs(q, k, v)
    assert counted(ts.sdpa, q, k, v, **features) == forward > 0
    with torch.inference_mode():
        assert counted(ts.sdpa, q, k, v, **features) == forward
    for each in (q, k, v):
        each.requires_grad_()
    for _ in range(2):  # a call whose plan is known, too
        out = ts.sdpa(q, k, v, **features)
        out = out[0] if features.get("return_lse") else out
        assert counted(out.sum().backward) == backward
        assert counted(lambda: ts.sdpa(q, k, v, **features)) == forward


def test_packed_sequences_count_each_for_itself() -> None:
    q, k, v = (each[0].transpose(0, 1) for each in tensors(heads=4, rows=24, columns=16))
    ends = torch.tensor([0, 5, 5, 24], dtype=torch.int32)
    shapes = [(1, 4, length, 16) for length in (5, 0, 19)]
    assert counted(ts.sdpa_varlen, q, k, v, ends, causal=True) == sum(sdpa_flop_count(one, one, one) for one in shapes)
    out = ts.sdpa_varlen(*(each.detach().requires_grad_() for each in (q, k, v)), ends)
    assert counted(out.sum().backward) == sum(sdpa_backward_flop_count(one, one, one, one) for one in shapes)


def test_gradients_of_grouped_products_count_two_products() -> None:
    leaves = [each.clone().requires_grad_() for each in (A[0], OF_TWO)]
    out = ts.grouped_matmul(*leaves, torch.tensor([10, 40], dtype=INT))
    assert counted(out.sum().backward) == 2 * (2 * 40 * 64 * 48)


Q, CACHE, INT = torch.randn(2, 3, 4, 16).half(), torch.randn(5, 16, 2, 16).half(), torch.int32
PAGES, LENGTHS = torch.tensor([[0, 1], [4, 2]], dtype=INT), torch.tensor([20, 7], dtype=INT)
A, B, ONE = torch.randn(3, 40, 64).half(), torch.randn(64, 48).half(), torch.tensor(1.0)
A8, B8 = (torch.randn(size, 64).to(torch.float8_e4m3fn) for size in (32, 48))
OF_TWO = torch.randn(2, 64, 48).half()
COUNTED = {
    "the keys in use of pages": (ts.sdpa_paged, (Q, CACHE, CACHE, PAGES, LENGTHS), 2 * 4 * 3 * (20 + 7) * 32),
    "products": (ts.matmul, (A, B), 2 * 120 * 64 * 48),
    "torch's products": (torch.matmul, (A, B), 2 * 120 * 64 * 48),
    "scaled products": (ts.scaled_matmul, (A8, B8.t(), ONE, ONE), 2 * 32 * 48 * 64),
    "products of nothing": (ts.scaled_matmul, (A8[:0], B8.t(), ONE, ONE), 0),
    "grouped products": (ts.grouped_matmul, (A[0], OF_TWO, torch.tensor([10, 40], dtype=INT)), 2 * 40 * 64 * 48),
    "softmax": (ts.softmax, (A,), 0),
    "torch's softmax": (torch.softmax, (A, -1), 0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_calls_count_what_torch_counts_for_its_own(name) -> None:
    call, given, flops = COUNTED[name]
    assert [counted(call, *given) for _ in range(2)] == [flops] * 2


def test_an_operator_that_is_made_while_a_counter_is_at_work_counts_what_its_kernel_declares() -> None:
    a, b = torch.randn(32, 64).half(), torch.randn(64, 48).half()
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.mul: lambda *given, **named: 7}) as counter:
        ts.op("tiledsched_tests::counted_product", Product)(a, b)
        torch.mul(a, a)
    assert counter.get_total_flops() == 2 * 32 * 48 * 64 + 7


def test_tensors_without_values_count_the_longest_there_may_be() -> None:
    with FakeTensorMode():
        q, k, ends = torch.empty(1, 4, 24, 16), torch.empty(1, 4, 30, 16), torch.empty(3, dtype=torch.int32)
        packed = AttentionFeatures(cu_seqlens_q=ends, cu_seqlens_k=ends)
        assert packed.pairs(q, k) == 2 * 24 * 30
        assert packed._replace(max_seqlen_q=20, max_seqlen_k=10).pairs(q, k) == 2 * 20 * 10
        pages, table = torch.empty(9, 4, 16, 16), torch.empty(2, 6, dtype=torch.int32)
        assert AttentionFeatures(block_table=table, key_lengths=ends[:2]).pairs(q, pages) == 2 * 24 * 6 * 16


@pytest.mark.slow
def test_calls_do_not_import_what_counts(python) -> None:
    """Which imports Triton."""
    code = """
import sys, torch
from serve_on_cpu import Launches, using
import tiledsched as ts
with using(Launches().runtime):
    x = torch.randn(1, 2, 16, 16).half()
    ts.sdpa(x, x, x)
    ts.matmul(x[0, 0], x[0, 0])
assert "torch.utils.flop_counter" not in sys.modules
"""
    python(code)
