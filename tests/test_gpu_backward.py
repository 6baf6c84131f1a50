"""Gradients of `sdpa` on a real GPU: against float64, beside torch's flash attention, and under torch's machinery."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

from attention_gradients import errors, exact_gradients
from on_gpu import captured, on_side_stream
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils.checkpoint import checkpoint

from tiledsched import configure
from tiledsched.core.errors import UnsupportedError
from tiledsched.kernels.attention.backends import raced
from tiledsched.ops import backward
from tiledsched.ops.varlen import sdpa_varlen

LARGEST = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Relative error of gradients, by dtype."""
BESIDE_FLASH = 1.1
"""Our error over that of torch's flash attention, for each gradient: two orders of the same sums differ by some percent."""


@pytest.fixture(autouse=True)
def serve(monkeypatch):
    from tiledsched.ops import sdpa as module

    torch.manual_seed(0)
    monkeypatch.setenv("TILEDSCHED_FALLBACK", "error")
    with configure(rivals="off"):
        module.reload()
        yield module
    module.reload()


def leaves(batch=2, heads=4, kv_heads=None, rows=256, keys=None, columns=64, value_columns=None, dtype=torch.bfloat16):
    generator = torch.Generator(device="cuda").manual_seed(rows * 31 + columns)
    kv = (batch, kv_heads or heads, keys or rows)
    shapes = ((batch, heads, rows, columns), (*kv, columns), (*kv, value_columns or columns))
    made = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    return [each.to(dtype).requires_grad_() for each in made]


def sinks():
    return torch.tensor([0.5, -2.0, 3.0, 0.0], device="cuda", requires_grad=True)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


CASES = {
    "full": ({}, dict),
    "causal, one key head, odd": ({"rows": 333, "kv_heads": 1}, lambda: {"causal": True}),
    "bottom right, wide": (
        {"rows": 130, "keys": 300, "columns": 128, "dtype": torch.float16},
        lambda: {"causal": "bottom_right", "scale": 0.2},
    ),
    "more rows than keys": ({"rows": 300, "keys": 130}, lambda: {"causal": "bottom_right"}),
    "widths": ({"columns": 96, "value_columns": 40}, lambda: {"causal": True}),
    "widest": ({"columns": 256, "rows": 192}, lambda: {"causal": True}),
    "window": ({"rows": 400}, lambda: {"causal": True, "window": 70}),
    "window of two sides, sinks": ({"rows": 300}, lambda: {"window": (40, 25), "sinks": sinks()}),
    "softcap": ({"kv_heads": 2}, lambda: {"softcap": 3.0, "causal": True}),
    "padding": ({"batch": 3}, lambda: {"key_starts": ints(0, 20, 256), "key_lengths": ints(256, 190, 256)}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_float64(serve, case) -> None:
    sizes, more = CASES[case]
    q, k, v = given = leaves(**sizes)
    asked = more()
    given = [*given, *([asked["sinks"]] if "sinks" in asked else [])]
    out, lse = serve.sdpa(q, k, v, return_lse=True, **asked)
    dout = torch.randn_like(out)
    dlse = torch.where(lse.isfinite(), torch.randn_like(lse), 0.0)
    for grads, with_lse in ((dout, None), ((dout, dlse), dlse)):
        found = torch.autograd.grad(out if with_lse is None else (out, lse), given, grads, retain_graph=True)
        wanted = exact_gradients(q, k, v, dout, dlse=with_lse, **asked)
        assert max(errors(found, wanted)) < LARGEST[q.dtype], errors(found, wanted)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("sizes", [{"dtype": torch.float16}, {"columns": 128}, {"rows": 999, "columns": 128}])
@pytest.mark.parametrize("causal", [False, True])
def test_errors_are_not_larger_than_those_of_flash_attention(serve, sizes, causal, deterministic) -> None:
    q, k, v = given = leaves(**{"rows": 1024, **sizes})
    dout = torch.randn_like(q)
    wanted = exact_gradients(q, k, v, dout, causal=causal)
    out = serve.sdpa(q, k, v, causal=causal, deterministic=deterministic)
    ours = errors(torch.autograd.grad(out, given, dout), wanted)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        theirs = errors(torch.autograd.grad(torch_sdpa(q, k, v, is_causal=causal), given, dout), wanted)
    print(f"errors of dq, dk, dv: ours {ours}, flash {theirs}")
    assert all(our <= BESIDE_FLASH * their for our, their in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows_first", [False, True])
def test_rivals_give_the_log_sum_exp(serve, causal, rows_first) -> None:
    """The gradients that our kernel makes of it are right, too."""
    q, k, v = given = leaves(rows=512, columns=128)
    if rows_first:
        given = [each.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for each in given]
        q, k, v = given
    p = serve.plan_for(q, k, v, causal=causal, return_lse=True).problem
    scores = (q.detach().double() @ k.detach().double().mT) * 128**-0.5
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    dout = torch.randn_like(q)
    wanted = exact_gradients(q, k, v, dout, causal=causal)
    found = raced(p)
    assert {"torch_cudnn", "torch_flash"} <= found.keys()
    for name, call in found.items():
        for _ in range(2):
            with torch.no_grad():
                out, theirs = call(q, k, v)
        assert theirs.shape == (*q.shape[:3], 1), name
        torch.testing.assert_close(theirs[..., 0].double(), lse, atol=1e-4, rtol=1e-4, msg=name)
        made = torch.ops.tiledsched.sdpa_backward(
            dout, *(each.detach() for each in given), out, theirs[..., 0], "top_left" if causal else None
        )
        assert max(errors(made[:3], wanted)) < LARGEST[q.dtype], name


def test_packed_sequences(serve) -> None:
    rows, keys = ints(0, 70, 70, 71, 400), ints(0, 33, 190, 190, 500)
    q, k, v = given = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((400, 4, 64), (500, 2, 64), (500, 2, 64))
    ]
    out = sdpa_varlen(q, k, v, rows, keys, 329, 310, causal=True)
    dout = torch.randn_like(out)
    found = torch.autograd.grad(out, given, dout)
    dense = [each.transpose(0, 1)[None] for each in (*given, dout)]
    wanted = exact_gradients(*dense, cu_q=rows, cu_k=keys, causal="bottom_right")
    assert max(errors([each.transpose(0, 1)[None] for each in found], wanted)) < LARGEST[q.dtype]


def test_layouts(serve) -> None:
    """Parts of one projection, whose gradient comes back whole; and gradients of a sum, of which all elements are one."""
    packed = torch.randn(2, 256, 3, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (each.transpose(1, 2) for each in packed.unbind(2))
    (found,) = torch.autograd.grad(serve.sdpa(q, k, v, causal=True).sum(), packed)
    wanted = exact_gradients(q, k, v, torch.ones_like(q), causal=True)
    assert max(errors([each.transpose(1, 2) for each in found.unbind(2)], wanted)) < LARGEST[q.dtype]


def test_deterministic_gradients_are_the_same_bit_for_bit(serve) -> None:
    q, k, v = given = leaves(rows=2048, kv_heads=2)
    dout = torch.randn_like(q)

    def gradients(**asked):
        return torch.autograd.grad(serve.sdpa(q, k, v, causal=True, **asked), given, dout)

    first = gradients(deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        rest = [gradients() for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(False)
    for each in rest:
        assert all(map(torch.equal, each, first))
    assert max(errors(gradients(), [each.double() for each in first])) < LARGEST[q.dtype]


@pytest.mark.parametrize("backends", [["inductor"], ["cudagraphs"], ["inductor", "cudagraphs"]])
def test_compiled_whole_they_are_the_same(serve, backends) -> None:
    def model(q, k, v):
        return serve.sdpa(q * 2, k, v, causal=True).float().square().mean((1, 3))

    given = leaves()
    wanted = torch.autograd.grad(model(*given).sum(), given)
    compiled = [torch.compile(model, fullgraph=True, backend=backend) for backend in backends]
    for call in compiled * 3:  # graphs hold no scratch arrays that are kept for other launches
        found = torch.autograd.grad(call(*given).sum(), given)
        assert max(errors(found, [each.double() for each in wanted])) < LARGEST[given[0].dtype]


def test_a_cuda_graph_holds_forward_and_backward(serve) -> None:
    q, k, v = given = leaves()
    dout = torch.randn_like(q)

    def step():
        return torch.autograd.grad(serve.sdpa(q, k, v, causal=True), given, dout)

    on_side_stream(step, times=2)
    graph, found = captured(step)
    for _ in range(2):
        with torch.no_grad():
            for each in (*given, dout):
                each.copy_(torch.randn_like(each))
        graph.replay()
        assert max(errors(found, exact_gradients(q, k, v, dout, causal=True))) < LARGEST[q.dtype]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_under_autocast(serve, reentrant) -> None:
    given = leaves(dtype=torch.float32)

    def model(q, k, v):
        return serve.sdpa(q, k, v, causal=True).float()

    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = checkpoint(model, *given, use_reentrant=reentrant)
    out.sum().backward()
    q, k, v = (each.detach().bfloat16() for each in given)
    wanted = exact_gradients(q, k, v, torch.ones_like(q), causal=True)
    assert max(errors([each.grad for each in given], wanted)) < LARGEST[torch.bfloat16]
    with torch.autograd.graph.save_on_cpu():
        out = model(*(each.bfloat16() for each in given))
    found = torch.autograd.grad(out.sum(), given)
    assert max(errors(found, wanted)) < LARGEST[torch.bfloat16]


def test_memory_grows_with_the_rows_alone(serve) -> None:
    given = leaves(batch=1, heads=2, rows=16384)
    serve.sdpa(*given, causal=True).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    serve.sdpa(*given, causal=True).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 16 * given[0].nbytes  # the scores would be 256 times


@pytest.mark.parametrize("compiled", [False, True])
def test_torch_computes_what_the_kernel_refuses(serve, monkeypatch, compiled) -> None:
    q, k, v = given = leaves(kv_heads=2)
    monkeypatch.setattr(backward.BackwardCall, "make_plan", lambda call: "no")

    def model(*given):
        return serve.sdpa(*given, causal=True)

    attend = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    dout = torch.randn_like(q)
    with configure(fallback="torch", rivals="off"), pytest.warns(UserWarning, match="no"):
        found = torch.autograd.grad(attend(*given), given, dout)
    assert max(errors(found, exact_gradients(q, k, v, dout, causal=True))) < LARGEST[q.dtype]
    assert not backward.cache.ready


def test_second_derivatives_are_refused(serve) -> None:
    q, k, v = leaves()
    (first,) = torch.autograd.grad(serve.sdpa(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivatives"):
        first.sum().backward()
