"""Gradients of root-mean-square normalisation and of softmax, as torch takes them from the functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tile_checks import make_inputs
from torch.utils.checkpoint import checkpoint

import tiledsched as ts
from tiledsched.core.cases import call_reference
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.rivals import Arrays
from tiledsched.kernels.rms_norm_backward import RmsNormBackward
from tiledsched.kernels.softmax_backward import SoftmaxBackward
from tiledsched.ops.bench import methods_of

KERNELS = (RmsNormBackward, SoftmaxBackward)
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Largest relative error of a gradient: twice what rounding makes, and with a residual the sum is rounded before."""


def made(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(x, w, residual=None):
    x = x if residual is None else x + residual
    out = torch.nn.functional.rms_norm(x, (x.shape[-1],), w, 1e-5)
    return out if residual is None else (out, x)


def gradients(call, given, wanted=None):
    """The gradients of the outputs, each weighed by other numbers, for those of the tensors that are `wanted`."""
    given = [each.detach().clone() for each in given]
    asked = [each.requires_grad_() for i, each in enumerate(given) if wanted is None or i in wanted]
    made_ = call(*given)
    outputs = made_ if isinstance(made_, tuple) else (made_,)
    pairs = [(each, made(*each.shape, seed=9 + i).to(each.dtype)) for i, each in enumerate(outputs)]
    pairs = [(each, weight) for each, weight in pairs if each.requires_grad]
    return torch.autograd.grad([each for each, _ in pairs], asked, [weight for _, weight in pairs])


def assert_right(found, call, given, wanted=None, factor=1.0):
    right = gradients(call, [each.double() for each in given], wanted)
    for one, exact in zip(found, right, strict=True):
        assert (one.shape, one.dtype) == (exact.shape, given[0].dtype)
        error = (one.double() - exact).norm() / exact.norm()
        assert error <= factor * ROUNDING[one.dtype], error.item()


CALLS = {
    "rms_norm": (ts.rms_norm, normed, [(2, 9, 72), (72,)]),
    "residual": (lambda x, w, r: ts.rms_norm(x, w, residual=r), normed, [(2, 9, 72), (72,), (2, 9, 72)]),
    "softmax": (ts.softmax, lambda x: x.softmax(-1), [(2, 9, 72)]),
}


def inputs_of(name, dtype=torch.bfloat16):
    return [made(*shape, seed=i, dtype=dtype) for i, shape in enumerate(CALLS[name][2])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_float64(launches, name, dtype):
    ours, torchs, _ = CALLS[name]
    given = inputs_of(name, dtype)
    found = gradients(ours, given)
    assert_right(found, torchs, given)
    count = len(launches)
    assert count == {"softmax": 2}.get(name, 3)
    assert all(torch.equal(*pair) for pair in zip(found, gradients(ours, given), strict=True))
    with torch.autocast("cpu", dtype=torch.float16):
        assert_right(gradients(ours, given), torchs, given)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_some_inputs_alone(launches, name):
    ours, torchs, shapes = CALLS[name]
    given = inputs_of(name)
    for wanted in range(len(shapes)):
        assert_right(gradients(ours, given, [wanted]), torchs, given, [wanted])


@pytest.mark.parametrize("name", CALLS)
def test_gradients_under_torch_compile_and_checkpointing(launches, quiet, name):
    ours, torchs, _ = CALLS[name]
    given = inputs_of(name)
    torch._dynamo.reset()
    assert_right(gradients(torch.compile(ours, fullgraph=True, backend="aot_eager"), given), torchs, given)
    before = len(launches)
    found = gradients(lambda *given: checkpoint(ours, *given, use_reentrant=False), given)
    assert_right(found, torchs, given)
    assert len(launches) - before == {"softmax": 3}.get(name, 4)  # forward twice


@pytest.mark.parametrize("name", CALLS)
def test_only_what_is_read_is_saved_and_nothing_of_an_output_without_gradient(launches, name):
    ours, torchs, _ = CALLS[name]
    given = [each.requires_grad_() for each in inputs_of(name)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        out = ours(*given)
    first = out[0] if isinstance(out, tuple) else out
    kept = {"rms_norm": given[:2], "residual": given[:2], "softmax": given}[name]
    assert sorted(each.numel() for each in saved) == sorted(each.numel() for each in kept)
    before = len(launches)
    first.sum().backward()
    exact = [each.detach().double().requires_grad_() for each in given]
    right = torchs(*exact)
    (right[0] if isinstance(right, tuple) else right).sum().backward()
    for one, other in zip(given, exact, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=2e-2, atol=2e-2)
    launched = launches[before:]
    assert len(launched) == (1 if name == "softmax" else 2)
    assert all(0 not in each.stride() for _, _, _, row in launched for each in row if isinstance(each, torch.Tensor))
    if name == "residual":
        assert launched[0][3][3].numel() == 1  # no gradient of the sum


def test_gradients_that_are_strided_or_of_nothing(launches):
    x, w = made(6, 72).requires_grad_(), made(72).requires_grad_()
    wide = made(6, 144, seed=3)
    for gradient in (wide[:, :72], wide[:, ::2], made(72, 6, seed=4).t(), made(1, 72).expand(6, 72)):
        found = torch.autograd.grad(ts.rms_norm(x, w), (x, w), gradient)
        whole = torch.autograd.grad(ts.rms_norm(x, w), (x, w), gradient.contiguous())
        assert all(torch.equal(*pair) for pair in zip(found, whole, strict=True))
    parted = wide[:, ::2].requires_grad_()
    found = [torch.autograd.grad(ts.softmax(each), parted, x.detach()) for each in (parted, parted.contiguous())]
    assert torch.equal(found[0][0], found[1][0])


def test_gradients_of_no_rows_and_no_columns(launches):
    for shape in ((0, 72), (2, 0, 72), (4, 0)):
        x, w = torch.ones(shape).half().requires_grad_(), torch.ones(shape[-1]).half().requires_grad_()
        out, total = ts.rms_norm(x, w, residual=x)
        (out.sum() + total.sum() + ts.softmax(x).sum()).backward()
        assert (x.grad.shape, w.grad.tolist()) == (x.shape, [0.0] * shape[-1])
    assert not launches


@pytest.mark.parametrize("name", CALLS)
def test_second_derivatives_are_refused(launches, name):
    given = [each.requires_grad_() for each in inputs_of(name)]
    out = CALLS[name][0](*given)
    first = out[0] if isinstance(out, tuple) else out
    (found,) = torch.autograd.grad(first.square().sum(), given[0], create_graph=True)  # which asks for none yet
    with pytest.raises(UnsupportedError, match=r"second derivatives are required and tiledsched::\w+_backward has no"):
        found.sum().backward()


@pytest.mark.parametrize("p", [p for kernel in KERNELS for p in kernel.small()[:6]], ids=str)
def test_what_torch_computes_meanwhile_and_torchs_rival_are_the_reference(p):
    kernel = p.declaration
    inputs = make_inputs(kernel, p)
    exact = call_reference(kernel, np, p, {name: each.astype(np.float64) for name, each in inputs.items()})
    tensors = [torch.from_numpy(each.astype(np.float32)).to(getattr(torch, p.dtype)) for each in inputs.values()]
    benched = methods_of(kernel, [p])["torch"].make(Arrays(torch=torch, problem=p, tensors=tuple(tensors)))
    for made_ in (kernel.stand_in(p, kernel.scalar_values(p))(*tensors), benched()):
        for one, right in zip(made_ if isinstance(made_, tuple) else (made_,), exact, strict=True):
            assert one.dtype == tensors[0].dtype
            error = np.linalg.norm(one.double().numpy() - right) / np.linalg.norm(right)
            assert error < 6e-3, error
