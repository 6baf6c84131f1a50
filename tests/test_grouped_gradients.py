"""Gradients of `ts.grouped_matmul`, against those of the formula in float64. Kernels are run by the interpreter where a GPU would
run them.
"""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import tiledsched as ts
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.kernels.epilogues import ACTIVATIONS
from tiledsched.kernels.grouped_matmul import front
from tiledsched.ops.front import operator

pytestmark = pytest.mark.usefixtures("fresh")
TOKENS, GROUPS, COLUMNS, K = 19, 4, 75, 41
OFFSETS = {
    "an empty group": (4, 4, 18, 19),
    "empty ends": (0, 7, 19, 19),
    "one row each": (1, 2, 3, 4),
    "rows behind the last": (3, 5, 5, 11),
    "no row at all": (0, 0, 0, 0),
}
COMPUTED = {
    "the product": (),
    "a bias": ("bias",),
    "silu": ("activation",),
    "a gate": ("activation", "gate"),
    "all": ("activation", "bias", "gate", "residual"),
}


def made(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(names, dtype, tokens=TOKENS):
    """Tensors by their names in the function; weights as linear layers keep them."""
    every = {
        "bias": made(GROUPS, COLUMNS, seed=3),
        "gate": made(GROUPS, COLUMNS, K, seed=2),
        "residual": made(tokens, COLUMNS, seed=4),
    }
    given = {"a": made(tokens, K) / 6, "b": made(GROUPS, COLUMNS, K, seed=1)}
    return {name: each.to(dtype) for name, each in (given | every).items() if name in given or name in names}


def formula(a, b, ends, bias=None, activation="none", gate=None, residual=None):
    """By torch, in the precision of the arguments; rows behind the last group are the residual."""
    out = torch.zeros(len(a), b.shape[1], dtype=a.dtype) if residual is None else residual.clone()
    for group, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
        rows = a[begin:end]
        sums = rows @ b[group].t() + (0 if bias is None else bias[group])
        act = ACTIVATIONS[activation].torch
        sums = act(torch.nn.functional, sums if gate is None else rows @ gate[group].t()) * (
            1 if gate is None else sums
        )
        out[begin:end] = out[begin:end] + sums
    return out


def ours(a, b, ends, gate=None, **rest):
    out = ts.grouped_matmul(
        a, b.mT, torch.tensor(ends, dtype=torch.int32), gate=None if gate is None else gate.mT, **rest
    )
    # What is undefined has no influence, whatever is in memory.
    return torch.where(
        (torch.arange(len(a)) < ends[-1])[:, None], out, rest.get("residual", torch.zeros(())).to(out.dtype)
    )


def gradients(call, ends, given, words, dtype):
    leaves = {name: each.to(dtype).requires_grad_() for name, each in given.items()}
    out = call(**leaves, ends=ends, **words)
    weights = made(*out.shape, seed=9).to(dtype)
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), weights), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS)
@pytest.mark.parametrize("name", COMPUTED)
def test_gradients_are_those_of_the_formula(launches, name, ends, dtype):
    given = arguments(COMPUTED[name], dtype)
    words = {"activation": "silu"} if "activation" in COMPUTED[name] else {}
    found = gradients(ours, ends, given, words, dtype)
    right = gradients(formula, ends, given, words, torch.float64)
    for key, wanted in right.items():
        assert found[key].isfinite().all(), key
        if wanted.any():
            error = (found[key].double() - wanted).norm() / wanted.norm()
            assert error <= 8e-3, (key, error.item())
        else:
            assert not found[key].any(), key
    for key in {"b", "gate"} & found.keys():
        assert found[key].is_contiguous()  # as the weights, so that no optimizer copies them
        for group, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
            assert begin != end or not found[key][group].any()


ENDS = torch.tensor([4, 4, 18, 19], dtype=torch.int32)
A, B, GATE, BIAS = (
    made(TOKENS, K) / 6,
    made(GROUPS, K, COLUMNS, seed=1),
    made(GROUPS, K, COLUMNS, seed=2),
    made(GROUPS, COLUMNS, seed=3),
)


@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_gradients_of_a_matrix_that_holds_both_parts_of_a_gate(launches, order):
    both = torch.cat((GATE, B), 2) if order == "halves" else torch.stack((GATE, B), 3).flatten(2)
    both = both.mT.contiguous().requires_grad_()
    b, gate = (each.clone().requires_grad_() for each in (B, GATE))
    ts.grouped_matmul(A, both.mT, ENDS, activation="silu", gate=order).sum().backward()
    ts.grouped_matmul(A, b, ENDS, activation="silu", gate=gate).sum().backward()
    found = both.grad.mT.chunk(2, -1) if order == "halves" else (both.grad.mT[..., ::2], both.grad.mT[..., 1::2])
    for one, right in zip(found, (gate.grad, b.grad), strict=True):
        torch.testing.assert_close(one, right, rtol=1e-2, atol=1e-2)


def test_gradients_of_some_tensors_alone_and_of_a_residual_that_changes_later(launches):
    a, residual = A.clone().requires_grad_(), made(TOKENS, COLUMNS, seed=4)
    out = ts.grouped_matmul(a, B, ENDS, BIAS, "gelu", GATE, residual)
    residual.zero_()
    (found,) = torch.autograd.grad(out.sum(), [a])
    (right,) = torch.autograd.grad(ts.grouped_matmul(a, B, ENDS, BIAS, "gelu", GATE).sum(), [a])
    torch.testing.assert_close(found, right)
    bias = BIAS.clone().requires_grad_()
    ts.grouped_matmul(A, B, ENDS, bias).sum().backward()
    torch.testing.assert_close(bias.grad, torch.tensor([4, 0, 14, 1.0]).to(bias.dtype)[:, None].expand(bias.shape))
    with pytest.raises(UnsupportedError, match="8 bits has no gradients"):
        ts.grouped_matmul(a, B, ENDS, out_scale=torch.tensor(0.03)).float().sum().backward()


@pytest.mark.parametrize("columns", [(70, 75), (64, 80)], ids=["odd", "even"])
def test_operands_of_the_weights_gradients_may_lie_anywhere(columns):
    ends = ENDS.tolist()
    for x, y in itertools.product(*(lying(TOKENS, each) for each in columns)):
        found = front._groups_product(x, y, ENDS)
        for group, (begin, end) in enumerate(itertools.pairwise([0, *ends])):
            wanted = x[begin:end].double().t() @ y[begin:end].double()
            torch.testing.assert_close(found[group].double(), wanted, rtol=1e-2, atol=1e-2)
        assert found.is_contiguous()


def lying(rows, columns):
    """Row- and column-major matrices, one row many times, and parts of wider ones."""
    wide = made(rows, columns + 5)
    return wide[:, 2 : columns + 2], wide[:, :columns], made(columns, rows).t(), made(1, columns).expand(rows, columns)


TRACED = {
    "the product": lambda a, b, bias: ts.grouped_matmul(a, b, ENDS),
    "all": lambda a, b, bias: ts.grouped_matmul(a, b, ENDS, bias, "silu", GATE),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", TRACED)
def test_one_graph_under_torch_compile(launches, name, dtype, monkeypatch):
    monkeypatch.setitem(globals(), "GATE", GATE.to(dtype))
    operator.cache_clear()
    compiled = torch.compile(TRACED[name], fullgraph=True, backend="aot_eager")
    leaves = [each.to(dtype, copy=True).requires_grad_() for each in (A, B.mT.contiguous().mT, BIAS)]
    both = [torch.autograd.grad(call(*leaves).sum(), leaves, allow_unused=True) for call in (compiled, TRACED[name])]
    for one, two in zip(*both, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two)


def test_any_number_of_rows_is_compiled_once(launches):
    def call(x, b, bias, ends):
        return ts.grouped_matmul(x, b, ends, bias, "silu")

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    b, bias = B.clone().requires_grad_(), BIAS.clone().requires_grad_()
    for rows in (7, 12, 19):
        x, ends = A[:rows].clone().requires_grad_(), ENDS.clamp(max=rows)
        with torch._dynamo.config.patch(error_on_recompile=rows > 7):
            found = torch.autograd.grad(compiled(x, b, bias, ends).sum(), [x, b, bias])
        for one, two in zip(found, torch.autograd.grad(call(x, b, bias, ends).sum(), [x, b, bias]), strict=True):
            torch.testing.assert_close(one, two)


def test_second_derivatives_of_weights_and_bias_are_refused(launches):
    leaves = [each.clone().requires_grad_() for each in (A, B, BIAS)]
    for _ in range(2):
        out = ts.grouped_matmul(leaves[0], leaves[1], ENDS, leaves[2])
        for found in torch.autograd.grad((out.float() ** 2).sum(), leaves, create_graph=True)[1:]:
            with pytest.raises(UnsupportedError, match="second derivatives of grouped_matmul"):
                found.sum().backward(retain_graph=True)


def test_no_groups_have_no_bias(launches):
    assert ts.grouped_matmul(A, B[:0], ENDS[:0], BIAS[:0], "relu").shape == (len(A), B.shape[2])


def test_nothing_at_all_has_gradients_of_nothing(launches):
    a, b = A[:0].clone().requires_grad_(), B.clone().requires_grad_()
    ts.grouped_matmul(a, b, ENDS * 0).sum().backward()
    assert a.grad.shape == (0, K)
    assert b.grad.shape == b.shape
    assert not b.grad.any()


@pytest.mark.parametrize("grouped", [False, True])
def test_a_gradient_of_relu_is_that_of_the_sign_of_the_output(launches, grouped):
    """The product alone rounds to 1, so that a bias of -1 would leave nothing of a sum of 2**-12."""
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 1.0, 2.0**-12
    w, bias = (
        torch.ones(16, 16, dtype=torch.bfloat16),
        torch.full((16,), -1.0, dtype=torch.bfloat16, requires_grad=True),
    )
    if grouped:
        out = ts.grouped_matmul(x, w[None], torch.tensor([1], dtype=torch.int32), bias[None], "relu")
    else:
        out = ts.matmul(x, w, bias, "relu")
    out.sum().backward()
    assert (out > 0).all()
    assert (bias.grad == 1).all()


def test_gradients_of_no_groups_and_of_no_columns(launches):
    a = A.clone().requires_grad_()
    ts.grouped_matmul(a, B[:0], ENDS[:0]).sum().backward()
    assert not a.grad.any()
    b = B[:, :, :0].clone().requires_grad_()
    ts.grouped_matmul(A, b, ENDS).sum().backward()
    assert b.grad.shape == b.shape


def test_rows_of_more_axes_are_refused_where_the_result_would_not_have_them(launches):
    for more in ({}, {"activation": "silu"}):
        with pytest.raises(ProblemError, match="must have 2 axes"):
            ts.grouped_matmul(A[None], B, ENDS, **more)
