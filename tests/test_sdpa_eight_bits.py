"""`sdpa`, `sdpa_varlen` and `sdpa_paged` over keys and values in 8 bits: served by the kernel, or left to torch, alike."""

from __future__ import annotations

import numpy
import pytest

torch = pytest.importorskip("torch")

import tiledsched as ts
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.kernels.attention import Attention
from tiledsched.measure.runner import Device
from tiledsched.ops import plans
from tiledsched.ops.sdpa import plan_for
from tiledsched.serve import process

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


def close(found, wanted, most):
    assert found.dtype is torch.bfloat16
    assert (found.double() - wanted.double()).norm() < most * wanted.double().norm()


def queries(**more):
    """q, k and v in 8 bits with their scales, by the names of sdpa's arguments; and what they stand for."""
    found = {"q": quantised(2, 4, 80, 64), **{name: quantised(2, 2, 96, 64, **more) for name in "kv"}}
    scales = {f"{name}_scale": scale for name, (_, scale, _) in found.items()}
    return {name: each for name, (each, _, _) in found.items()} | scales, [each for _, _, each in found.values()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_queries_where_there_is_no_gpu():
    given, exact = queries()
    numbers = {name: float(each) if name.endswith("scale") else each for name, each in given.items()}
    with pytest.warns(UserWarning, match="q is on cpu"):
        close(ts.sdpa(**numbers), right(*exact), 2e-2)
    with pytest.raises(ProblemError, match="v_scale must be a positive number"):
        ts.sdpa(**numbers | {"v_scale": 0.0})


@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_queries(launches, dim, causal):
    given, exact = queries(dim=dim)
    wanted = right(*exact, is_causal=causal)
    found, sums = ts.sdpa(**given, is_causal=causal, return_lse=True)
    close(found, wanted, 0.04)
    [plan] = plans.cache.plans.values()
    assert plan.problem.q8
    assert (plan.served.schedule["tile_m"], plan.served.schedule["tile_n"]) == (64, 128)
    spread = given | {"v": given["v"].mT.contiguous().mT}  # as the kernel takes it
    one = {name: float(each) if each.numel() == 1 else each for name, each in spread.items() if "scale" in name}
    for same in (spread, spread | one, spread | {"q": given["q"].transpose(1, 2).contiguous().transpose(1, 2)}):
        assert torch.equal(ts.sdpa(**same, is_causal=causal), found)
    heads = {name: each[0] if each.ndim == 4 else each for name, each in given.items()}
    assert torch.equal(ts.sdpa(**heads, is_causal=causal), found[0])
    more = given | {"q_scale": given["q_scale"].expand(given["k_scale"].shape)}
    assert torch.equal(ts.sdpa(**more, is_causal=causal), found)
    assert sums.dtype is torch.float32
    assert plan_for(**given, causal=causal).problem.q8


@pytest.mark.parametrize(
    "more", [{"rows": 3}, {"keys": 50}, {"softcap": 1e3}, {"key_starts": torch.zeros(2, dtype=torch.int32)}], ids=str
)
def test_queries_without_a_program_are_taken_in_bfloat16(launches, more):
    given, exact = queries()
    rows, keys = more.pop("rows", 80), more.pop("keys", 96)
    cut = {"q": given["q"][:, :, :rows], "k": given["k"][:, :, :keys], "v": given["v"][:, :, :keys]}
    found = ts.sdpa(**given | cut | more)
    close(found, right(exact[0][:, :, :rows], *(each[:, :, :keys] for each in exact[1:])), 5e-3)
    [plan] = plans.cache.plans.values()
    assert (plan.problem.kv8, plan.problem.q8) == ("tensor", False)


def test_queries_with_sinks_and_lengths(launches):
    given, exact = queries(dim=1)
    lengths, sinks = torch.tensor([96, 40], dtype=torch.int32), torch.tensor([0.0, 1.0, -1.0, 2.0])
    found = ts.sdpa(**given, key_lengths=lengths, sinks=sinks)
    bits = [each.to(torch.bfloat16) for each in exact]
    wanted = ts.sdpa(*bits, key_lengths=lengths, sinks=sinks)
    close(found, wanted, 0.04)
    assert sorted(plan.problem.q8 for plan in plans.cache.plans.values()) == [False, True]


def test_gpus_without_8_bits_leave_them_to_torch(launches):
    given, exact = queries()
    old = Device(arch="sm_89", name="NVIDIA GeForce RTX 4090", sm_count=128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "device_facts", lambda index: old)
        with pytest.raises(UnsupportedError, match="cuTile has no float8_e4m3fn on sm_89"):
            ts.sdpa(**given)
        with ts.configure(fallback="torch"), pytest.warns(UserWarning, match="uses torch's attention: cuTile"):
            close(ts.sdpa(**given), right(*exact), 5e-3)
    assert launches == []


def test_compiled_queries(launches):
    given, _ = queries()
    names = list(given)
    compiled = torch.compile(
        lambda *each: ts.sdpa(**dict(zip(names, each, strict=True))), backend="eager", fullgraph=True
    )
    found = compiled(*given.values())
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, ts.sdpa(**given))


def test_gradients_of_queries_are_torchs(launches, left_to_torch):
    given, exact = queries()
    out = ts.sdpa(**given | {"q": given["q"].requires_grad_()})
    out.sum().backward()
    close(out, right(*exact), 5e-3)
    assert given["q"].grad is not None
    assert launches == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"q_scale": None}, "q_scale is for q of torch.float8_e4m3fn, which needs it, got .* and q_scale = None"),
        ({"q": torch.zeros(2, 4, 80, 64)}, "got q of torch.float32 and q_scale"),
        ({"q_scale": torch.ones(3)}, "q_scale must be a positive number"),
        ({"q_scale": torch.ones(2)}, r"times q_scale\) and v_scale must have one shape, got \(2,\) and \(1,\)"),
        (
            {"q_scale": None, "k_scale": None, "v_scale": None},
            "q of torch.float8_e4m3fn needs k and v of that type, and",
        ),
        ({"k_scale": None}, "k_scale must be a positive number"),
        ({"q_scale": -2.0, "k_scale": -2.0}, "k_scale must be a positive number.* got -2.0"),
    ],
)
def test_what_is_refused_of_queries(launches, changed, words):
    with pytest.raises(ProblemError, match=words):
        ts.sdpa(**queries()[0] | changed)
    assert launches == []


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


def test_scales_of_16_bits_are_multiplied_in_32_and_outputs_have_the_axes_of_queries(launches):
    """Their product was 0 in float16, so that each row was the mean of all values."""
    q, k, v = (torch.randn(1, 1, rows, 64).to(EIGHT) for rows in (80, 96, 96))
    small = torch.tensor(1e-4).half()
    found = ts.sdpa(q, k, v, q_scale=small, k_scale=small, v_scale=1.0, scale=1e7)
    wanted = ts.sdpa(q, k, v, q_scale=float(small), k_scale=float(small), v_scale=1.0, scale=1e7)
    torch.testing.assert_close(found, wanted)
    scales = {"q_scale": 0.1, "k_scale": 0.1, "v_scale": 0.1}
    assert torch.equal(ts.sdpa(q[0, 0], k[0, 0], v[0, 0], **scales), ts.sdpa(q, k, v, **scales)[0, 0])
