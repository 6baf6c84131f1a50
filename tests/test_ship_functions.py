"""The torch-shaped functions of kernels over rows, run on the CPU, and the gradients that torch takes from them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from tile_checks import make_inputs
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tiledsched as ts
from tiledsched.core.cases import call_reference
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.core.registry import shipped_functions
from tiledsched.core.rivals import Arrays
from tiledsched.kernels.rms_norm_backward import RmsNormBackward
from tiledsched.kernels.rope import front
from tiledsched.kernels.softmax_backward import SoftmaxBackward
from tiledsched.ops.bench import methods_of
from tiledsched.ops.front import operator

pytestmark = pytest.mark.usefixtures("launches", "quiet")
CLOSE = {"rtol": 2e-2, "atol": 2e-2}


def made(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True), (False, False)])
def test_layer_norm_is_torchs(weight, bias):
    x, w, b = made(2, 5, 72), made(72, seed=1) if weight else None, made(72, seed=2) if bias else None
    torch.testing.assert_close(ts.layer_norm(x, w, b, 1e-3), functional.layer_norm(x, (72,), w, b, 1e-3), **CLOSE)
    torch.testing.assert_close(ts.layer_norm(x.half()), functional.layer_norm(x.half(), (72,)), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("name", sorted(shipped_functions()))
def test_what_is_no_tensor_is_named(name):
    """Each argument that must be a tensor in turn, while the others are."""
    function, x = getattr(ts, name), made(16, 16)
    kinds = {each: kind for each, kind in function.__annotations__.items() if kind.startswith("Tensor")}
    kinds.pop("return", None)
    for place, kind in kinds.items():
        for wrong in ([1.0], np.zeros((16, 16)), *([] if "None" in kind else [None])):
            with pytest.raises(ProblemError, match=f"^{place} must be a torch.Tensor, got {type(wrong).__name__}$"):
                function(**{each: x for each, kind in kinds.items() if "None" not in kind} | {place: wrong})
    with pytest.raises(TypeError, match=r"missing|unexpected"):
        function(nothing=x)


UNITS = {
    "silu": (ts.swiglu, functional.silu),
    "gelu": (ts.geglu, functional.gelu),
    "gelu_tanh": (partial(ts.geglu, approximate="tanh"), partial(functional.gelu, approximate="tanh")),
}


@pytest.mark.parametrize(("mine", "activation"), UNITS.values(), ids=UNITS)
def test_gated_units_are_torchs_and_read_both_halves_of_a_projection(mine, activation):
    packed = made(2, 7, 2 * 80)
    gate, up = packed.chunk(2, -1)
    right = activation(gate.float()) * up.float()
    for found in (mine(packed), mine(gate, up), mine(gate.contiguous(), up.contiguous())):
        torch.testing.assert_close(found.float(), right, **CLOSE)


QUANTISED = {
    "rms_norm": (
        partial(ts.rms_norm, weight=made(72, seed=1)),
        lambda x: functional.rms_norm(x.float(), (72,), made(72, seed=1).float(), 1e-5),
    ),
    "residual": (
        lambda x, **more: ts.rms_norm(x, made(72, seed=1), residual=x, **more),
        lambda x: functional.rms_norm(2 * x.float(), (72,), made(72, seed=1).float(), 1e-5),
    ),
    "swiglu": (lambda x, **more: ts.swiglu(x, x, **more), lambda x: functional.silu(x.float()) * x.float()),
    "geglu": (
        lambda x, **more: ts.geglu(torch.cat((x, x), -1), **more),
        lambda x: functional.gelu(x.float()) * x.float(),
    ),
}
EIGHT = torch.float8_e4m3fn


@pytest.mark.parametrize(("mine", "right"), QUANTISED.values(), ids=QUANTISED)
def test_quantised_rows_are_torchs_over_their_scales(mine, right):
    x = made(2, 9, 72)
    x[1, 3] = 0
    wanted = right(x)
    out, *total, scale = mine(x, quantize="row")
    assert (out.dtype, out.shape, scale.dtype, scale.shape) == (EIGHT, x.shape, torch.float32, (2, 9, 1))
    assert all(torch.equal(each, x + x) for each in total)
    torch.testing.assert_close(scale, wanted.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448, rtol=1e-5, atol=0)
    assert (out.float() == (wanted / scale).to(EIGHT).float()).float().mean() > 0.999
    assert not out[1, 3].float().any()
    given = torch.tensor(0.003)
    out, *total, scale = mine(x, quantize=given)
    assert scale is given
    assert (out.float() == (wanted / given).clamp(-448, 448).to(EIGHT).float()).float().mean() > 0.999
    assert (out.float().abs() == 448).any()
    for wrong in ("column", 0.003, torch.ones(2)):
        with pytest.raises(ProblemError, match='quantize must be "row", or a float32 tensor of one element'):
            mine(x, quantize=wrong)
    assert mine(x[:0], quantize="row")[-1].shape == (0, 9, 1)


def test_quantised_rows_are_what_scaled_products_take():
    x, w = made(2, 9, 64), made(64, 32, seed=1)
    normed_, scale = ts.rms_norm(x, torch.ones(64).bfloat16(), quantize="row")
    eight = w.to(EIGHT).t().contiguous().t()
    found = ts.scaled_matmul(normed_.flatten(0, 1), eight, scale.flatten(0, 1), torch.ones(1, 32))
    right = functional.rms_norm(x.double(), (64,), None, 1e-5).flatten(0, 1) @ eight.double()
    assert (found.double() - right).norm() / right.norm() < 0.04


def rotated(x, cos, sin, interleaved):
    """As models write it: of tables that hold each angle twice."""
    x = x.float()
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        turned = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
    return x * cos.unsqueeze(-3) + turned * sin.unsqueeze(-3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rope_is_what_models_write(interleaved, inplace):
    """q and k are parts of one projection, with other numbers of heads; angles are those of all sequences, or of each."""
    projection = made(2, 5, (4 + 2 + 2) * 16)
    angle = 6.3 * torch.rand(2, 5, 8, generator=torch.Generator().manual_seed(1))
    for tables, twice in ((angle[0], False), (angle, False), (angle[:1], True)):
        q, k, _ = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in projection.clone().split((64, 32, 32), -1))
        right = [rotated(x, tables.cos(), tables.sin(), interleaved) for x in (q, k)]
        given = tables.repeat_interleave(2, -1) if interleaved else torch.cat((tables, tables), -1)
        given = given if twice else tables
        found = ts.rope(q, k, given.cos(), given.sin(), interleaved=interleaved, inplace=inplace)
        assert [x is y for x, y in zip(found, (q, k), strict=True)] == [inplace, inplace]
        for one, wanted in zip(found, right, strict=True):
            torch.testing.assert_close(one.float(), wanted, **CLOSE)


@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_rope_are_turned_back(interleaved, rotary_dim):
    q, k, angle = made(2, 4, 5, 16), made(2, 2, 5, 16, seed=1), 6.3 * torch.rand(5, rotary_dim // 2)
    weights = made(2, 4, 5, 16, seed=2), made(2, 2, 5, 16, seed=3)

    def theirs(q, k, cos, sin):
        parts = [rotated(x[..., :rotary_dim], cos, sin, interleaved) for x in (q, k)]
        return [torch.cat((part, x[..., rotary_dim:]), -1) for part, x in zip(parts, (q, k), strict=True)]

    def ours(*given):
        return ts.rope(*given, interleaved=interleaved, rotary_dim=rotary_dim)

    def gradients(call, *wanted):
        given = [each.clone().requires_grad_() for each in (q, k)]
        outputs = call(*given, angle.cos(), angle.sin())
        loss = sum((outputs[i].float() * weights[i].float()).sum() for i in wanted)
        loss.backward()
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in given]

    for wanted in ((0, 1), (0,)):
        for one, right in zip(gradients(ours, *wanted), gradients(theirs, *wanted), strict=True):
            torch.testing.assert_close(one, right, **CLOSE)
    with pytest.raises(UnsupportedError, match="no gradients of cos and sin; detach them"):
        ours(q, k, angle.cos().requires_grad_(), angle.sin())


@pytest.mark.parametrize("inplace", [False, True])
def test_rope_of_part_of_a_head(inplace):
    q, k, angle = made(3, 5, 16), made(1, 5, 16, seed=1), torch.rand(5, 4)
    before = q.clone()
    right = torch.cat((rotated(q[..., :8], angle.cos(), angle.sin(), False), q[..., 8:].float()), -1)
    found, _ = ts.rope(q, k, angle.cos(), angle.sin(), rotary_dim=8, inplace=inplace)
    torch.testing.assert_close(found.float(), right, **CLOSE)
    assert torch.equal(q, before) != inplace


X, OTHER, GATE, W = made(4, 6, 72), made(6, 4, 72), made(2, 7, 80), made(72)
Q, ANGLE, BATCH, LABELS = made(1, 2, 5, 16), torch.rand(5, 8), made(3, 2, 5, 16), torch.zeros(4, 6, dtype=torch.int64)
REFUSED = [
    (lambda: ts.layer_norm(X, W[:7]), "W, axis 0"),
    (lambda: ts.swiglu(GATE, GATE[..., :8]), "up must have the shape of gate"),
    (lambda: ts.geglu(GATE[..., :7]), "even number of columns"),
    (lambda: ts.geglu(GATE, GATE, approximate="erf"), "'none' and 'tanh'"),
    (
        lambda: ts.rms_norm(X, W, residual=OTHER),
        r"residual must have the shape of input, \(4, 6, 72\), got \(6, 4, 72\)",
    ),
    (lambda: ts.swiglu(X, OTHER), r"up must have the shape of gate, \(4, 6, 72\), got \(6, 4, 72\)"),
    (lambda: ts.cross_entropy(X, LABELS.t()), r"labels must have the shape of logits without its last axis, \(4, 6\)"),
    (lambda: ts.cross_entropy(X[0], LABELS[0, :5]), "labels must have the shape"),
    (lambda: ts.cross_entropy(X, LABELS, reduction="average"), "'none', 'mean' and 'sum'"),
    (lambda: ts.cross_entropy(X, LABELS, label_smoothing=1.5), "label_smoothing = 1.5; .* from 0 to 1"),
    (lambda: ts.cross_entropy(X, LABELS, label_smoothing=-0.1), "from 0 to 1"),
    (lambda: ts.cross_entropy(X, LABELS, label_smoothing=None), "NoneType"),
    (lambda: ts.rope(Q, Q, ANGLE, ANGLE, rotary_dim=5), "an even number"),
    (lambda: ts.rope(Q, Q, ANGLE[:, :3], ANGLE), "cos must be .* with 8 or 16 columns"),
    (lambda: ts.rope(Q, Q, ANGLE, ANGLE[0]), r"sin must be .* got \(8,\)"),
    (lambda: ts.rope(Q, Q[..., :8], ANGLE, ANGLE), "of each head of q and k"),
    (lambda: ts.rope(Q[0, 0], Q[0, 0], ANGLE, ANGLE), r"q and k must both be \[batch, heads, seq, head_dim\]"),
    (lambda: ts.rope(Q[0], Q, ANGLE, ANGLE), "q and k must both be"),
    (lambda: ts.rope(Q, Q, ANGLE[:4], ANGLE), "Cos, axis 1"),
    (lambda: ts.rope(Q, Q, ANGLE.double(), ANGLE.double()), "float64"),
    (
        lambda: ts.rope(BATCH, BATCH, ANGLE.repeat(2, 1, 1), ANGLE.repeat(2, 1, 1)),
        "the same angles, or each has its own",
    ),
]


@pytest.mark.parametrize(("call", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_no_function_takes_is_refused(call, why):
    with pytest.raises(ProblemError, match=why):
        call()


@pytest.fixture
def not_looked():
    front._looks.clear()
    yield
    front._looks.clear()


@pytest.mark.parametrize("interleaved", [False, True])
def test_wide_tables_of_rope_for_the_other_pairs_are_refused(not_looked, interleaved):
    """Also those that hold each angle once, of more elements than are rotated. Where all angles are zero there is nothing to tell."""
    q, k, angle = made(1, 2, 5, 16), made(1, 2, 5, 16), 6.3 * torch.rand(5, 8)
    halves, neighbours = torch.cat((angle, angle), -1), angle.repeat_interleave(2, -1)
    mine, other = (neighbours, halves) if interleaved else (halves, neighbours)
    zeros = torch.zeros(1, 16)
    for _ in range(2):
        ts.rope(q[:, :, :1], k[:, :, :1], zeros.cos(), zeros.sin(), interleaved=interleaved)
    for table, why in (
        (other, "side by side" if other is neighbours else "half a row apart"),
        (torch.rand(5, 16), "nowhere"),
    ):
        with pytest.raises(ProblemError, match=f"they are {why}.* Give the other interleaved, or .*: 8 columns"):
            ts.rope(q, k, table.cos(), table.sin(), interleaved=interleaved)
    narrow, wide = (ts.rope(q, k, table.cos(), table.sin(), interleaved=interleaved) for table in (angle, mine))
    assert all(map(torch.equal, narrow, wide))


def test_a_table_that_was_found_right_is_not_read_again(not_looked, monkeypatch):
    looks = []
    monkeypatch.setattr(torch, "allclose", lambda *given, **more: looks.append(given) or len(looks) % 2 == 1)
    q, table = made(1, 2, 5, 16), torch.rand(5, 16)
    for _ in range(3):
        ts.rope(q, q, table, table)
    assert len(looks) == 4  # of the cosines and of the sines, once


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_cross_entropy_is_torchs(smoothing, reduction):
    logits, labels = made(2, 4, 700), torch.randint(0, 700, (2, 4), generator=torch.Generator().manual_seed(0))
    labels[0, 1] = labels[1, 3] = -1
    more = {"ignore_index": -1, "label_smoothing": smoothing, "reduction": reduction}
    right = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), **more)
    right = right.reshape(labels.shape) if reduction == "none" else right
    for given in (labels, labels.int()):
        found, lse = ts.cross_entropy(logits, given, return_lse=True, **more)
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse, logits.float().logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_numbers_are_refused_also_once_a_call_is_known(launches):
    """Where torch's dispatcher is not asked: an index is not rounded, and None is no number."""
    for _ in range(2):
        ts.cross_entropy(X, LABELS)
        ts.rms_norm(X, W)
    with pytest.raises(ProblemError, match="float"):
        ts.cross_entropy(X, LABELS, ignore_index=1.5)
    with pytest.raises(ProblemError, match="NoneType"):
        ts.rms_norm(X, W, None)


def test_errors_keep_their_words_under_torch_compile(launches):
    call = lambda x, y: ts.rms_norm(x, W, residual=y)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=True)
    with pytest.raises(Exception, match="residual must have the shape of input"):
        compiled(X, OTHER)


def test_part_of_a_head_is_rotated_under_vmap(launches):
    x = made(3, 1, 2, 5, 16)
    found = torch.func.vmap(lambda q: ts.rope(q, q, ANGLE[:, :4], ANGLE[:, :4], rotary_dim=8)[0])(x)
    for one, right in zip(found, x, strict=True):
        torch.testing.assert_close(one, ts.rope(right, right, ANGLE[:, :4], ANGLE[:, :4], rotary_dim=8)[0])


def test_labels_that_are_no_column_make_nan():
    logits = made(4, 24)
    found = ts.cross_entropy(logits, torch.tensor([0, 24, -1, -100]), reduction="none")
    assert found.isnan().tolist() == [False, True, True, False]
    assert found[3] == 0


def test_nothing_is_launched_for_empty_inputs(launches):
    x = torch.ones(2, 0, 8).half()
    assert ts.layer_norm(x).shape == ts.swiglu(x, x).shape == x.shape
    assert ts.layer_norm(torch.ones(3, 0).half()).shape == (3, 0)
    found = ts.rope(x[:, None], x[:, None], torch.ones(0, 4), torch.ones(0, 4))
    assert [each.shape for each in found] == [(2, 1, 0, 8)] * 2
    assert ts.cross_entropy(x, torch.ones(2, 0, dtype=torch.int64), reduction="sum") == 0
    assert ts.cross_entropy(torch.ones(3, 0), torch.ones(3, dtype=torch.int64), reduction="none").isnan().all()
    assert not launches


TRACED = {
    "rms_norm": lambda x: ts.rms_norm(x, x[0, 0, 0], residual=x)[0],
    "layer_norm": lambda x: ts.layer_norm(x, x[0, 0, 0], None),
    "swiglu": ts.swiglu,
    "rms_norm_quantized": lambda x: [each.float() for each in ts.rms_norm(x, x[0, 0, 0], residual=x, quantize="row")],
    "glu_quantized": lambda x: ts.swiglu(x, quantize=x.new_full((), 0.003, dtype=torch.float32))[0].float(),
    "rope": lambda x: ts.rope(x, x[:, :2], ANGLE, ANGLE)[1],
    "rope_in_place": lambda x: ts.rope(x + 0, x + 1, ANGLE, ANGLE, inplace=True)[1],
    "cross_entropy": lambda x: ts.cross_entropy(x, torch.zeros(2, 4, 5, dtype=torch.int64)),
}


@pytest.mark.parametrize("call", TRACED.values(), ids=TRACED)
def test_one_graph_under_torch_compile(call):
    """Also where the first call is the one that is traced."""
    operator.cache_clear()
    x = made(2, 4, 5, 16)
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


# Gradients of root-mean-square normalisation and of softmax, as torch takes them from the functions


KERNELS = (RmsNormBackward, SoftmaxBackward)
ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Largest relative error of a gradient: twice what rounding makes, and with a residual the sum is rounded before."""


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
