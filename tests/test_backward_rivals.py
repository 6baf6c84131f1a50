"""The rivals of attention's backward pass, and its bench, without a GPU: stand-ins compute what the libraries would."""

from __future__ import annotations

import math
import sys

import numpy
import pytest

torch = pytest.importorskip("torch")
from fake_rivals import install_flash_4
from test_bench_harness import cell, cuda  # noqa: F401

from tiledsched.core.cases import expected_outputs, random_inputs
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.rivals import call_on
from tiledsched.kernels.attention.backends import FLASH_4
from tiledsched.kernels.attention_backward import backends as rivals
from tiledsched.kernels.attention_backward.declaration import AttentionBackward
from tiledsched.kernels.attention_backward.reference import attention_gradients
from tiledsched.ops.bench import methods_of
from tiledsched.ops.own_methods import own_outputs
from tiledsched.rivals.bench import details
from tiledsched.rivals.methods import DETERMINISTIC, OURS, SERVED, as_tensors, case_error, make_case

METHODS = methods_of(AttentionBackward)
CUDNN, FLASH, VARLEN = rivals.TORCH_CUDNN, rivals.TORCH_FLASH, rivals.TORCH_VARLEN


def problem(**more):
    values = {"seq_q": 24, "seq_k": 24, "head_dim": 16, "batch": 2, "heads": 4, "kv_heads": 2, "dtype": "float16"}
    return AttentionBackward.problem(**{**values, **more})


def packed(**more):
    return problem(**{"batch": 1, "packed": 3, "seq_q": 40, "seq_k": 40, "causal": True, **more})


def below(**more):
    return problem(**{"seq_q": 10, "seq_k": 24, "causal": True, "alignment": "bottom_right", **more})


COMPUTED = {
    problem(): {CUDNN, FLASH, FLASH_4},
    problem(causal=True): {CUDNN, FLASH, FLASH_4},
    problem(causal=True, deterministic=True): {FLASH_4},
    problem(kv_heads=4, value_dim=8): {CUDNN, FLASH_4},
    problem(value_dim=8): {CUDNN},
    problem(seq_q=10, causal=True): {CUDNN},
    below(): {FLASH, FLASH_4},
    below(window=7, softcap=True, sinks=True): {FLASH_4},
    problem(causal=True, window=7, window_right=3): {FLASH_4},
    packed(): {VARLEN, FLASH_4},
    packed(seq_k=60, alignment="bottom_right", window=9, deterministic=True): {FLASH_4},
    packed(causal=False, sinks=True): {FLASH_4},
    problem(causal=True, sinks=True, dlse=True): {FLASH_4},
    packed(dlse=True): set(),
    packed(seq_k=60): set(),
    problem(head_dim=20): set(),
    problem(seq_k=10, causal=True, alignment="bottom_right"): set(),
    problem(lengths=True): set(),
    problem(starts=True): set(),
}
"""Problem -> the rivals that can compute it."""


def gradients(q, k, v, out, dout, lse, scale, *, shift, causal, window, cap=0.0, sinks=None, dlse=None):
    """Gradients of `[batch, heads, rows, columns]`, by the output and log-sum-exp that are given.

    `shift` is how far below the first row the mask's diagonal begins.
    """
    left, right = window
    named = {"sinks": sinks, "dlse": dlse}
    found = attention_gradients(
        numpy,
        *(each.double().numpy() for each in (q, k, v, out, dout, lse)),
        causal=causal or right is not None,
        alignment="bottom_right" if shift else "top_left",
        window=0 if left is None else left + 1,
        window_right=right or 0,
        scale=scale,
        cap=cap,
        **{name: each.double().numpy() for name, each in named.items() if each is not None},
    )
    return [torch.from_numpy(each) for each in (found if sinks is not None else found[:3])]


def flash_4(
    q,
    k,
    v,
    out,
    dout,
    lse,
    softmax_scale=None,
    causal=False,
    softcap=0.0,
    window_size_left=None,
    window_size_right=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    deterministic=False,
    dq=None,
    dk=None,
    dv=None,
    dlse=None,
    learnable_sink=None,
):
    """FlashAttention-4's function, on `[batch, rows, heads, columns]`; it says what it was told in `DETERMINISTIC_CALLS`."""
    DETERMINISTIC_CALLS.append(deterministic)
    dsinks = 0.0
    places = [(slice(None), slice(None))]
    arrays = [each.transpose(1, 2) for each in (q, k, v, out, dout, dq, dk, dv)] if cu_seqlens_q is None else []
    if cu_seqlens_q is not None:
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        arrays = [each.transpose(0, 1)[None] for each in (q, k, v, out, dout, dq, dk, dv)]
        lse = lse[None]
        ends = [each.tolist() for each in (cu_seqlens_q, cu_seqlens_k)]
        places = [(slice(*ends[0][i : i + 2]), slice(*ends[1][i : i + 2])) for i in range(len(ends[0]) - 1)]
    of_rows = (True, False, False, True, True)
    for rows, keys in places:
        own = [each[:, :, rows if by_rows else keys] for each, by_rows in zip(arrays, of_rows, strict=False)]
        shift = own[1].shape[2] - own[0].shape[2]
        options = {"shift": shift, "causal": causal, "window": (window_size_left, window_size_right)}
        found = gradients(*own, lse[:, :, rows], softmax_scale, cap=softcap, sinks=learnable_sink, dlse=dlse, **options)
        for made, to, at in zip(found, arrays[5:], (rows, keys, keys), strict=False):
            to[:, :, at] = made.to(to.dtype)
        dsinks = dsinks + found[3] if learnable_sink is not None else dsinks
    return (dq, dk, dv) if learnable_sink is None else (dq, dk, dv, dsinks.to(learnable_sink.dtype))


def torch_operator(name):
    """The operator of that name, with the arguments that its schema has."""
    parameters = [each.name for each in getattr(torch.ops.aten, name).default._schema.arguments]

    def call(*given, **more):
        named = {**dict(zip(parameters, given, strict=False)), **more}
        assert len(given) + len(more) <= len(parameters)
        assert named["dropout_p"] == 0.0
        q, k, v, out, dout, lse = (named[each] for each in ("query", "key", "value", "out", "grad_out", "logsumexp"))
        causal, scale = named["is_causal"], named["scale"]
        if named["cum_seq_q"] is not None:
            dq, dk, dv = (torch.full_like(each, math.nan) for each in (q, k, v))
            sides = named.get("window_size_left"), named.get("window_size_right")
            ends = named["cum_seq_q"], named["cum_seq_k"], named["max_q"], named["max_k"]
            return flash_4(q, k, v, out, dout, lse, scale, causal, 0.0, *sides, *ends, False, dq, dk, dv)
        if "cudnn" in name:
            assert out.stride() == dout.stride() == torch.empty_like(q[..., : out.shape[3]]).stride()
            assert lse.shape == (*q.shape[:3], 1)
            lse = lse[..., 0]
        scale = q.shape[3] ** -0.5 if scale is None else scale
        shift = 0 if "cudnn" in name else k.shape[2] - q.shape[2]
        found = gradients(q, k, v, out, dout, lse, scale, shift=shift, causal=causal, window=(None, None))
        return tuple(each.to(q.dtype) for each in found)

    return call


DETERMINISTIC_CALLS: list[bool] = []


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """FlashAttention-4 and torch's operators as they would be on a GPU."""
    DETERMINISTIC_CALLS.clear()
    install_flash_4(monkeypatch, _flash_attn_bwd=flash_4)
    monkeypatch.setattr(rivals, "torch_operator", torch_operator)


def tensors(p):
    """(the inputs of a problem as tensors, its gradients in float64)."""
    stored = random_inputs(AttentionBackward, numpy, numpy.random.default_rng(1), p)
    return as_tensors(torch, p, stored), expected_outputs(AttentionBackward, numpy, p, stored, "float64")


@pytest.mark.parametrize("p", COMPUTED, ids=str)
def test_each_rival_computes_what_it_can_from_any_forward_and_refuses_the_rest(p) -> None:
    assert set(rivals.raced(p)) == set(rivals.raced(p, late=True)) == COMPUTED[p]
    given, right = tensors(p)
    for late in (False, True):
        for name, rival in rivals.raced(p, late=late).items():
            bound = (given[-2].diff().max(), given[-1].diff().max()) if p.packed and late else ()
            found = rival(*given, *map(int, bound)) if bound else call_on(rival, given)()
            assert len(found) == len(right)
            for made, wanted in zip(found, right, strict=True):
                error = numpy.linalg.norm(made.double().numpy() - wanted) / numpy.linalg.norm(wanted)
                assert error < 2e-3, (name, error)
            if p.sinks:
                assert found[3].dtype == torch.float32
    assert set(DETERMINISTIC_CALLS) <= {p.deterministic}


def test_gradients_lie_as_the_inputs_and_a_plan_of_cudnn_sees_one_layout() -> None:
    """The stand-in of cuDNN checks the strides that it is given."""
    p = problem(causal=True)
    given, _ = tensors(p)
    turned = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in given[:5]]
    for q, k, v in (given[:3], turned[:3]):
        for out, dout in ((given[3], turned[4]), (turned[3], given[4].mean((0, 1), keepdim=True).expand_as(given[4]))):
            rivals.raced(p)[CUDNN](q, k, v, out, dout, given[5])
            found = rivals.raced(p)[FLASH_4](q, k, v, out, dout, given[5])
            assert [each.stride() for each in found] == [each.stride() for each in (q, k, v)]


def test_rows_behind_the_last_sequence_have_zero_gradients() -> None:
    p = packed()
    given, _ = tensors(p)
    given[-1][-1] = given[-2][-1] = 36
    for name, rival in rivals.raced(p).items():
        for made in call_on(rival, given)():
            assert made[:, :, :36].any(), name
            assert made.isfinite().all(), name
            assert not made[:, :, 36:].any(), name


def test_scale_and_cap_are_those_of_the_call() -> None:
    p = problem(softcap=True)
    given, _ = tensors(p)
    found = rivals.raced(p, 0.5, 3.0)[FLASH_4](*given)
    wanted = gradients(*given, 0.5, shift=0, causal=False, window=(None, None), cap=3.0)
    for made, right in zip(found, wanted, strict=True):
        assert (made - right).abs().max() < 2e-3


def test_what_is_not_there_is_no_rival(monkeypatch) -> None:
    monkeypatch.setenv(rivals.RAGGED_CUDNN, "1")
    assert set(rivals.raced(problem())) == {FLASH, FLASH_4}
    monkeypatch.delattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_bwd")
    with pytest.raises(UnsupportedError, match="no backward pass"):
        rivals.flash_attention_4(problem())
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert set(rivals.raced(problem())) == {FLASH}
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)
    with pytest.raises(UnsupportedError, match="cannot be imported"):
        rivals.flash_attention_4(problem())


# The bench


@pytest.fixture
def ours_first(launches, monkeypatch):
    """No flash backend of torch's makes the outputs of the forward pass on a CPU: our kernel does."""

    def refuse(name):
        raise UnsupportedError("no GPU")

    monkeypatch.setattr("tiledsched.kernels.attention_backward.rivals.torch_operator", refuse)


@pytest.mark.parametrize("p", [problem(causal=True), packed(sinks=True)], ids=str)
def test_every_method_has_the_error_of_each_gradient(cuda, ours_first, p) -> None:  # noqa: F811
    cupy = sys.modules["cupy"]
    case = make_case(torch, cupy, p, own_outputs)
    assert case.compared == f"{p.sequences * 2}/{p.sequences * 2}"
    for name in (OURS, SERVED, DETERMINISTIC, *(COMPUTED.get(p) or {FLASH_4}), f"{FLASH_4}_{DETERMINISTIC}"):
        error = case_error(cupy, case, METHODS[name].make(case.arrays)())
        apart = dict(each.split("=") for each in error.by_output.split())
        assert list(apart) == ["dQ", "dK", "dV"]
        assert 0 < max(map(float, apart.values())) == pytest.approx(error.relative, rel=1e-2)
        assert error.relative < 2e-3, name
    assert set(DETERMINISTIC_CALLS) == {False, True}
    schedules = {
        name: details(METHODS[name], case.arrays, verify=False, captured=False) for name in (OURS, DETERMINISTIC)
    }
    assert "atomic" not in schedules[DETERMINISTIC]["schedule"]
    assert schedules[OURS]["provenance"] in ("default", "modelled", "transferred")


def test_rows_tell_errors_apart_and_gradients_that_are_wrong_have_no_time(cuda, ours_first, monkeypatch) -> None:  # noqa: F811
    def halved(name):
        call = torch_operator(name)
        return lambda *given, **more: (*call(*given, **more)[:2], call(*given, **more)[2] / 2)

    monkeypatch.setattr(rivals, "torch_operator", halved)
    rows = cell((METHODS[name] for name in (CUDNN, FLASH_4, VARLEN)), problem=problem(causal=True))
    begins = ["wrong result: relative error 0.5", "ok", "not served: torch's varlen attention is for packed sequences"]
    for row, status in zip(rows.values(), begins, strict=True):
        assert row.status.startswith(status)
    assert rows[FLASH_4].output_errs.startswith("dQ=")
    assert math.isclose(rows[CUDNN].problem.flops, 2.5 * 4 * 2 * 4 * (24 * 24 / 2) * 16)
