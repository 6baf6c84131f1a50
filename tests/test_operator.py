"""The operators under everything torch can put around them, and the recipes of the documentation."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from serve_on_cpu import TOLERANCE, expected, tensors
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from tiledsched import configure
from tiledsched.ops import sdpa as serve
from tiledsched.ops.operator import sdpa_lse_operator, sdpa_operator

pytestmark = pytest.mark.usefixtures("fresh")


# Under torch's machinery


def test_autocast_casts_as_torch_does(launches) -> None:
    q, k, v = tensors(dtype=torch.float32)
    half = tuple(x.bfloat16() for x in (q, k, v))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = serve.sdpa(q, k, v, causal=True)
        direct = torch.ops.tiledsched.sdpa(q, k, v, "top_left")
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, direct)
    assert torch.equal(out, serve.sdpa(*half, causal=True))
    assert len(launches) == 3


@pytest.mark.parametrize(
    ("operator", "gradients"), [(sdpa_operator, False), (sdpa_operator, True), (sdpa_lse_operator, True)]
)
def test_the_operators_are_well_made(launches, quiet, operator, gradients) -> None:
    with configure(fallback="torch"):
        q, k, v = tensors(rows=8, keys=12, value_columns=24)
        rows_first = q.transpose(1, 2).contiguous().transpose(1, 2)
        given = [x.requires_grad_(gradients) for x in (rows_first, k, v)]
        torch.library.opcheck(operator, (*given, "bottom_right", 0.3), rtol=1e-2, atol=1e-2)


def test_fake_tensors_tell_shapes_and_strides(launches) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = tensors(batch=2, heads=3, value_columns=8)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    real = serve.sdpa(q, k, v, return_lse=True)
    with FakeTensorMode() as mode:
        fake = serve.sdpa(*(mode.from_tensor(x) for x in (q, k, v)), return_lse=True)
    for ours, theirs in zip(fake, real, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert len(launches) == 1


@pytest.mark.parametrize("arguments", [{"is_causal": True}, {"causal": "bottom_right", "scale": 0.5}])
def test_compiled_whole_it_is_the_same(launches, arguments) -> None:
    def model(q, k, v):
        return serve.sdpa(q * 2, k, v, **arguments) + 1

    q, k, v = tensors(rows=8, keys=16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), model(q, k, v))
    assert len(launches) == 2


def test_one_graph_serves_many_lengths(launches) -> None:
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda q, k, v: serve.sdpa(q, k, v, causal=True), fullgraph=True, dynamic=True, backend=keep
    )
    for rows in (7, 19, 33):
        q, k, v = tensors(rows=rows)
        torch.testing.assert_close(compiled(q, k, v), expected(q, k, v, "top_left"), **TOLERANCE[q.dtype])
    assert len(graphs) == 1
    assert any(node.target is sdpa_operator for node in graphs[0].graph.nodes)


def test_compiled_fallbacks_keep_the_graph_whole(launches, quiet) -> None:
    with configure(fallback="torch"):
        q, k, v = tensors()
        mask = torch.ones(24, 24, dtype=torch.bool).tril()
        masked = torch.compile(lambda q, k, v: serve.sdpa(q, k, v, mask), fullgraph=True, backend="eager")
        torch.testing.assert_close(masked(q, k, v), torch_sdpa(q, k, v, mask))
        wide = torch.compile(lambda *x: serve.sdpa(*x), fullgraph=True, backend="eager")
        q, k, v = tensors(dtype=torch.float32)
        torch.testing.assert_close(wide(q, k, v), torch_sdpa(q, k, v))
    assert launches == []


@pytest.mark.parametrize("strict", [True, False])
def test_it_can_be_exported(launches, strict) -> None:
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return serve.sdpa(q, k, v, causal=True)

    q, k, v = tensors()
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=({2: rows},) * 3, strict=strict)
    assert any(node.target is sdpa_operator for node in program.graph.nodes)
    q, k, v = tensors(rows=31)
    torch.testing.assert_close(program.module()(q, k, v), expected(q, k, v, "top_left"), **TOLERANCE[q.dtype])


def test_tracing_records_the_operator(launches) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    q, k, v = tensors()
    want = serve.sdpa(q, k, v)
    graph = make_fx(lambda q, k, v: serve.sdpa(q, k, v))(q, k, v)
    assert any(node.target is sdpa_operator for node in graph.graph.nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda q, k, v: serve.sdpa(q, k, v), (q, k, v), check_trace=False)
    assert "tiledsched::sdpa" in str(traced.graph)
    assert torch.equal(graph(q, k, v), want)


def test_functional_transforms(launches, quiet) -> None:
    q, k, v = tensors(batch=3)
    batched = torch.func.vmap(lambda q, k, v: serve.sdpa(q[None], k[None], v[None])[0])(q, k, v)
    torch.testing.assert_close(batched, serve.sdpa(q, k, v))
    with configure(fallback="torch"):
        gradient = torch.func.grad(lambda q: serve.sdpa(q, k, v).float().square().sum())(q)
        want = torch.func.grad(lambda q: torch_sdpa(q, k, v).float().square().sum())(q)
    torch.testing.assert_close(gradient, want)


# The documentation


def recipes(*, gpu: bool) -> list[str]:
    text = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [recipe for recipe in found if recipe.startswith("# needs a GPU") is gpu]


@pytest.mark.parametrize("recipe", recipes(gpu=False))
def test_recipes_run(launches, recipe) -> None:
    exec(recipe, dict(zip("qkv", tensors(rows=24), strict=True)))
    assert launches
