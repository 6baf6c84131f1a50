"""The functions like torch's, and the search with a memory, on a real GPU beside torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("forgotten"),
]

import cuda.tile as ct
from on_gpu import captured, normal, on_side_stream, replayed
from torch.utils.checkpoint import checkpoint

import tiledsched as ts

F = torch.nn.functional


def assert_near(got, wanted, error=0.01):
    """The relative error of the whole output, against a reference in float64."""
    assert got.shape == wanted.shape
    assert ((got.double() - wanted).norm() / wanted.norm()).item() < error


@pytest.mark.parametrize(("rows", "columns"), [(3, 5000), (257, 768), (64, 16400)])
def test_rows(rows, columns) -> None:
    x, weight, bias = normal(rows, columns), normal(columns), normal(columns) + 1
    assert_near(
        ts.layer_norm(x, weight, bias), F.layer_norm(x.double(), (columns,), weight.double(), bias.double(), 1e-5)
    )
    assert_near(ts.softmax(x), x.double().softmax(-1))
    both = normal(rows, 2 * columns)
    gate, up = both.double().chunk(2, -1)
    assert_near(ts.swiglu(both), F.silu(gate) * up)
    for approximate in ("none", "tanh"):
        wanted = F.gelu(gate, approximate=approximate) * up
        assert_near(ts.geglu(*both.chunk(2, -1), approximate=approximate), wanted)


@pytest.mark.parametrize("name", ["matmul", "softmax", "rms_norm"])
def test_rows_have_the_same_bits_in_every_batch(name) -> None:
    x, weight = normal(700, 4096), normal(4096, 512) if name == "matmul" else normal(4096)
    call = ts.softmax if name == "softmax" else lambda x: getattr(ts, name)(x, weight)
    with ts.batch_invariant():
        every, compiled = call(x), torch.compile(call)
        for rows in (1, 2, 17, 65, 512):
            part = x[:rows].contiguous()
            for each in (call(part), compiled(part), replayed(lambda part=part: call(part))):
                assert torch.equal(each.view(torch.int16), every[:rows].view(torch.int16))


NORMS = {
    "rms_norm": (lambda x, w, r: ts.rms_norm(x, w), lambda x, w, r: F.rms_norm(x, w.shape, w, 1e-5)),
    "residual": (
        lambda x, w, r: sum(ts.rms_norm(x, w, residual=r)),
        lambda x, w, r: F.rms_norm(x + r, w.shape, w, 1e-5) + x + r,
    ),
    "softmax": (lambda x, w, r: ts.softmax(x) * w, lambda x, w, r: x.softmax(-1) * w),
}
"""Ours and torch's, each of rows, a weight and more rows."""


def gradients_of(call, given, weights):
    """The gradients of the rows, of the weight, and of the other rows where there are some."""
    given = [each.detach().requires_grad_() for each in given]
    return torch.autograd.grad(call(*given), given, weights, allow_unused=True)


def exact_gradients(call, given, weights):
    return gradients_of(call, [each.double() for each in given], weights.double())


def assert_gradients(found, exact):
    for one, right in zip(found, exact, strict=True):
        assert (one is None) == (right is None)
        if one is not None:
            assert_near(one, right, 0.01)


@pytest.mark.parametrize(("rows", "columns"), [(1031, 768), (300, 16384), (150, 20000)])
@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_rows(name, rows, columns) -> None:
    """Also of rows that are read twice, whose part of the weight's gradient lies in memory."""
    ours, torchs = NORMS[name]
    given = [normal(rows, columns), normal(columns), normal(rows + 1, columns)[:rows]]
    weights = normal(rows, columns, dtype=torch.float32).to(torch.bfloat16)
    exact = exact_gradients(torchs, given, weights)
    for _ in range(2):
        found = gradients_of(ours, given, weights)
        assert_gradients(found, exact)
    again = gradients_of(ours, given, weights)
    assert all(one is other or torch.equal(one, other) for one, other in zip(found, again, strict=True))
    wide = normal(rows, 2 * columns)
    for strided in (wide[:, :columns], wide[:, 1::2], weights[:1].expand(rows, columns)):
        assert_gradients(gradients_of(ours, given, strided), exact_gradients(torchs, given, strided))


@pytest.mark.parametrize("name", NORMS)
def test_gradients_compiled_whole_in_graphs_and_recomputed(name) -> None:
    ours, torchs = NORMS[name]
    given = [normal(500, 4096), normal(4096), normal(501, 4096)[:500]]
    weights = normal(502, 4096)[:500]
    exact = exact_gradients(torchs, given, weights)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True)
    for _ in range(2):
        assert_gradients(gradients_of(compiled, given, weights), exact)
    with torch.autocast("cuda", dtype=torch.float16):
        assert_gradients(gradients_of(lambda *g: checkpoint(ours, *g, use_reentrant=False), given, weights), exact)
    on_side_stream(lambda: gradients_of(ours, given, weights), times=2)
    graph, found = captured(lambda: gradients_of(ours, given, weights))
    for each in (given[0], weights):
        each.copy_(each.flip(0))
    graph.replay()
    assert_gradients(found, exact_gradients(torchs, given, weights))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_rotary_embedding_of_parts_of_a_projection(interleaved, inplace) -> None:
    packed = normal(2, 77, 6, 64)  # [batch, seq, heads of q, k and v, head_dim]
    q, k = packed[:, :, :3].transpose(1, 2), packed[:, :, 3:5].transpose(1, 2)
    angles = normal(77, 32, dtype=torch.float32).double()

    def turned(x):
        pairs = x.double().unflatten(-1, (32, 2) if interleaved else (2, 32))
        axis = -1 if interleaved else -2
        a, b = pairs.unbind(axis)
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2)

    wanted, values = [turned(x) for x in (q, k)], packed[:, :, 5].clone()
    got = ts.rope(q, k, angles.cos().float(), angles.sin().float(), interleaved=interleaved, inplace=inplace)
    for one, right in zip(got, wanted, strict=True):
        assert_near(one, right)
    assert torch.equal(packed[:, :, 5], values)
    assert (got[0].data_ptr() == q.data_ptr()) == inplace


@pytest.mark.parametrize("columns", [2, 33, 1000, 1025, 50257, 128256])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(columns, smoothing) -> None:
    logits = 5 * normal(33, columns)
    labels = torch.randint(columns, (33,), device="cuda")
    labels[::5] = -100
    for reduction in ("none", "mean"):
        wanted = F.cross_entropy(logits.double(), labels, reduction=reduction, label_smoothing=smoothing)
        assert_near(ts.cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing), wanted, 1e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [33, 1000, 50257])
def test_cross_entropy_of_rows_far_from_zero(columns, smoothing) -> None:
    """The last two rows are of equal logits, the lowest that there are and others that are nearly as low."""
    logits = normal(5, columns).float()
    for row, offset in enumerate((0.0, 1e6, -1e6)):
        logits[row] += offset
    logits[3], logits[4] = torch.finfo(torch.float32).min, -2e38
    labels = torch.randint(columns, (5,), device="cuda")
    wanted = F.cross_entropy(
        logits.double() - logits.double().amax(1, keepdim=True), labels, reduction="none", label_smoothing=smoothing
    )
    got = ts.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


EPILOGUES = {
    "bias": ({"activation": "gelu"}, ("bias",)),
    "gate": ({"activation": "silu"}, ("gate",)),
    "all": ({"activation": "gelu_tanh"}, ("bias", "gate", "residual")),
}


@pytest.mark.parametrize("rivals", ["off", "serve"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 272, 512), (129, 257, 130), (300, 1024, 4096)])
@pytest.mark.parametrize("name", EPILOGUES)
def test_products_with_an_epilogue(name, m, n, k, rivals) -> None:
    """Forward, gradients, compiled whole and in a graph."""
    words, given = EPILOGUES[name]
    shapes = {"bias": (n,), "gate": (k, n), "residual": (m, n)}
    x, w = (normal(m, k) / k**0.5).requires_grad_(), normal(k, n)
    more = {each: normal(*shapes[each]) for each in given}

    def wanted(x, w, bias=0, gate=None, residual=0):
        act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[
            words["activation"]
        ]
        sums = x @ w + bias
        return (act(sums) if gate is None else act(x @ gate) * sums) + residual

    def call(x):
        return ts.matmul(x, w, **more, **words)

    exact = x.detach().double().requires_grad_()
    right = wanted(exact, w.double(), **{name: each.double() for name, each in more.items()})
    with ts.configure(rivals=rivals):
        out = call(x)
        assert_near(out, right)
        weight = normal(m, n + 1)[:, :n]
        (found,), (slope,) = (
            torch.autograd.grad(each, [of], weight.to(each.dtype)) for each, of in ((out, x), (right, exact))
        )
        assert_near(found, slope, 0.02)
        with torch.no_grad():
            assert_near(torch.compile(call, fullgraph=True)(x), right)
            assert_near(replayed(lambda: call(x)), right)


def test_epilogues_of_8_bits_of_groups_and_of_an_author() -> None:
    x, w, scale = normal(65, 512) / 23, normal(272, 512).t(), torch.tensor(0.02, device="cuda")
    assert_near(ts.matmul(x, w, out_scale=scale).float() * scale, x.double() @ w.double(), 0.05)
    columns = normal(272, dtype=torch.float32)
    right = (x.double() @ w.double()) * columns.double()
    assert_near(ts.matmul(x, w, epilogue=by_column, arrays=(columns,)), right)
    b, gate = (normal(6, 192, 512).transpose(1, 2) + shift for shift in (0, 0.1))
    ends = torch.tensor([0, 5, 5, 40, 64, 65], dtype=torch.int32, device="cuda")
    groups = [(0, 5, 1), (5, 40, 3), (40, 64, 4), (64, 65, 5)]
    bias = normal(6, 192)
    right = torch.cat(
        [
            F.silu(x[a:z].double() @ gate[g].double()) * (x[a:z].double() @ b[g].double() + bias[g].double())
            for a, z, g in groups
        ]
    )
    assert_near(ts.grouped_matmul(x, b, ends, bias, "silu", gate), right)


def by_column(acc, row, column, columns):
    """Sums, each times the number of its column."""
    return acc * ct.gather(columns, column)


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("m", [1, 16, 300])
def test_products_of_8_bit_floats(m, scales) -> None:
    a, b = (normal(*shape).to(torch.float8_e4m3fn) for shape in ((m, 512), (272, 512)))
    sizes = ((m, 1), (1, 272)) if scales == "row" else ((1,), (1,))
    scale_a, scale_b = (torch.rand(*size, device="cuda") + 0.5 for size in sizes)
    wanted = (a.double() @ b.double().t()) * scale_a * scale_b
    for fast in (False, True):
        assert_near(ts.scaled_matmul(a, b.t(), scale_a, scale_b, use_fast_accum=fast), wanted)
    bias = normal(272)
    assert_near(ts.scaled_matmul(a, b.t(), scale_a, scale_b, bias), wanted + bias.double())
    # The tensor cores of sm_90 keep 13 bits of a sum of 128 products (docs/python.md).
    assert_near(ts.scaled_matmul(a, b.t(), scale_a, scale_b, out_dtype=torch.float32), wanted, 2.5e-4)


@pytest.mark.parametrize("rivals", ["off", "serve"])
@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
@pytest.mark.parametrize("m", [1, 17, 300])
def test_epilogues_of_products_of_8_bit_floats(m, scales, rivals) -> None:
    """A gate, a residual, results of 8 bits with a scale for all and for each row; compiled whole and in a graph."""
    a, b, gate = (normal(*shape).to(torch.float8_e4m3fn) for shape in ((m, 512), (256, 512), (256, 512)))
    b = b.flip(0).contiguous()  # another one than the gate
    sizes = {"tensor": ((1,), (1,)), "row": ((m, 1), (1, 256)), "block": ((m, 4), (4, 2))}[scales]
    scale_a, scale_b, scale_gate = (torch.rand(*size, device="cuda") + 0.5 for size in (*sizes, sizes[1]))
    scale_a /= 512**0.5

    def exact(b, scale_b):
        if scales != "block":
            return (a.double() @ b.double().t()) * scale_a * scale_b
        wide = scale_b.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (a.double() * scale_a.repeat_interleave(128, 1)) @ (b.double() * wide).t()

    bias, residual = normal(256), normal(m, 256)
    sums, gates = exact(b, scale_b) + bias.double(), exact(gate, scale_gate)

    def swiglu(a):
        return ts.scaled_matmul(
            a, b.t(), scale_a, scale_b, bias, activation="silu", gate=gate.t(), scale_gate=scale_gate
        )

    with ts.configure(rivals=rivals):
        for call in (swiglu, torch.compile(swiglu, fullgraph=True), lambda a: replayed(lambda: swiglu(a))):
            assert_near(call(a), F.silu(gates) * sums)
        for fast in (False, True):
            given = {"activation": "gelu_tanh", "residual": residual, "use_fast_accum": fast}
            added = ts.scaled_matmul(a, b.t(), scale_a, scale_b, bias, **given)
            assert_near(added, F.gelu(sums, approximate="tanh") + residual.double())
        for scale in (torch.tensor([0.02], device="cuda"), 0.01 + 0.02 * torch.rand(m, 1, device="cuda")):
            eight = ts.scaled_matmul(a, b.t(), scale_a, scale_b, bias, out_scale=scale)
            assert_near(eight.double() * scale, sums, 0.05)


def test_rows_of_results_have_scales() -> None:
    x, w, b = normal(65, 512) / 23, normal(272, 512).t(), normal(6, 192, 512).transpose(1, 2)
    scale = 0.01 + 0.02 * torch.rand(65, 1, device="cuda")
    assert_near(ts.matmul(x, w, out_scale=scale).double() * scale, x.double() @ w.double(), 0.05)
    ends = torch.tensor([0, 5, 5, 40, 64, 65], dtype=torch.int32, device="cuda")
    groups = [(0, 5, 1), (5, 40, 3), (40, 64, 4), (64, 65, 5)]
    right = torch.cat([x[first:end].double() @ b[group].double() for first, end, group in groups])
    assert_near(ts.grouped_matmul(x, b, ends, out_scale=scale.flatten()).double() * scale, right, 0.05)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (16, 272, 512), (300, 400, 1040), (129, 1024, 7168)])
def test_products_of_8_bit_floats_with_scales_of_blocks(m, n, k) -> None:
    a, b = (normal(*shape).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    steps = -(-k // 128)
    scale_a, scale_b = (10 ** normal(*shape).float() for shape in ((m, steps), (-(-n // 128), steps)))
    left = a.double() * scale_a.repeat_interleave(128, 1)[:, :k]
    right = b.double() * scale_b.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    for lying in (scale_a, scale_a.t().contiguous().t()):
        got = ts.scaled_matmul(a, b.t(), lying, scale_b.t(), out_dtype=torch.float32)
        assert_near(got, left @ right.t(), 2.5e-4)


@pytest.mark.parametrize("ends", [(0, 0, 5, 5, 133, 300), (50, 100, 150, 200, 250, 300), (300,) * 6])
def test_products_of_groups(ends) -> None:
    a, b = normal(300, 256), normal(6, 192, 256).transpose(1, 2)
    offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
    begins = (0, *ends)
    wanted = torch.cat([a[begins[i] : ends[i]].double() @ b[i].double() for i in range(6)])
    assert_near(ts.grouped_matmul(a, b, offsets), wanted)


def test_functions_in_a_graph_and_compiled_whole() -> None:
    x, weight = normal(64, 4096), normal(4096)

    def block(x):
        return ts.swiglu(ts.layer_norm(x, weight))

    wanted = block(x)
    assert torch.equal(torch.compile(block, fullgraph=True)(x), wanted)
    assert torch.equal(replayed(lambda: block(x)), wanted)


@ct.kernel
def double(x, out, TILE: ct.Constant[int]):
    """Twice the input, tile by tile."""
    ct.store(out, (ct.bid(0),), ct.load(x, (ct.bid(0),), (TILE,)) * 2)


def test_a_search_is_answered_from_what_it_stored() -> None:
    x = normal(1 << 20, dtype=torch.float32)
    out = torch.zeros_like(x)
    calls = []

    def search():
        return ts.exhaustive_search(
            [256, 1024, 4096],
            torch.cuda.current_stream(),
            lambda tile: (x.numel() // tile,),
            double,
            lambda tile: calls.append(tile) or (x, out, tile),
            quiet=True,
            check=True,
        )

    first, second = search(), search()
    for _ in range(20):  # nothing is stored while another process runs on the GPU, as other files of tests do
        if second == first:
            break
        first, second = second, search()
    assert second == first
    assert torch.equal(out, 2 * x)
    assert len(first.successes) == 3
    measured = len(calls)
    assert search() == first
    assert len(calls) <= measured + 1
