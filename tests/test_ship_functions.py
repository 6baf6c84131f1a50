"""The torch-shaped functions of layer normalisation, gated linear units, rotary embedding and cross entropy, run on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

import tiledsched as ts
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.kernels.rope import front
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
