"""Operators under everything that torch can put around them, and the recipes of the documentation."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import op_kernels as kernels
from serve_on_cpu import changed, expected, rows_first, tensors
from test_op import CLOSE, add_groups, group_sums, made, norm, normed, product, scale_, total, trained
from test_sdpa_features import KEYS, LENGTHS, ROWS, SINKS, STARTS, packed_tensors
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import tiledsched as ts
from tiledsched import configure
from tiledsched.core.errors import ConfigError, UnsupportedError
from tiledsched.ops import sdpa as serve
from tiledsched.ops.operator import sdpa_lse_operator, sdpa_operator
from tiledsched.serve.op import _operators

pytestmark = pytest.mark.usefixtures("fresh")
causal = partial(serve.sdpa, causal=True)
wide_norm = ts.op("tests::wide_norm", kernels.WideNorm)


def attention(gradients=False):
    q, k, v = tensors(rows=8, keys=12, value_columns=24)
    return (*(x.requires_grad_(gradients) for x in (rows_first(q), k, v)), "bottom_right", 0.3)


def with_features():
    return (*tensors(batch=3, heads=4, rows=8, keys=12), "bottom_right", 0.3, 5, 4.0, SINKS, STARTS, LENGTHS)


def packed():
    q, k, v = (each.transpose(0, 1)[None] for each in packed_tensors())
    return q, k, v, "bottom_right", 0.3, 5, 4.0, SINKS, None, None, ROWS.int(), KEYS.int(), None, 30, 33


CALLS = {
    "norm": lambda: (norm, made()),
    "residual": lambda: (norm, (*made(), made()[0], 0.1)),
    "product": lambda: (product, (torch.randn(20, 24).half(), torch.randn(40, 24).half().t(), "float16")),
    "derived types": lambda: (wide_norm, (made()[0], made()[1].float())),
    "in place": lambda: (scale_, (torch.randn(40), 3.0)),
    "two launches": lambda: (total, (torch.randn(70), 3)),
    "lists": lambda: (add_groups, ([torch.randn(5), torch.randn(40)], [torch.randn(5), torch.randn(40)], [5, 40])),
    "derived sizes": lambda: (group_sums, (torch.randn(9, 20), torch.tensor([0, 0, 4, 9]).int())),
    "trained": lambda: (trained, tuple(x.requires_grad_() for x in made())),
    "attention": lambda: (sdpa_operator, attention()),
    "attention's gradient": lambda: (sdpa_operator, attention(True)),
    "log-sum-exp": lambda: (sdpa_lse_operator, attention(True)),
    "attention with features": lambda: (sdpa_operator, with_features()),
    "log-sum-exp with features": lambda: (sdpa_lse_operator, with_features()),
    "attention of packed sequences": lambda: (sdpa_operator, packed()),
    "log-sum-exp of packed sequences": lambda: (sdpa_lse_operator, packed()),
}
COMPILED = (
    "norm",
    "residual",
    "product",
    "derived types",
    "in place",
    "two launches",
    "lists",
    "derived sizes",
    "attention",
)


@pytest.mark.parametrize("where", ["on a GPU", "on the host"])
@pytest.mark.parametrize("name", CALLS)
def test_the_operators_are_well_made(launches, quiet, name, where) -> None:
    """As torch checks them: schema, gradients, tensors without values, and compiled with dynamic sizes."""
    call, given = CALLS[name]()
    if where == "on the host" and (name.startswith(("att", "log")) or name == "trained"):
        pytest.skip("torch computes attention there; the gradients are those of the other case")
    with configure(fallback="torch"), changed(**({} if where == "on a GPU" else {"device_type": "cuda"})):
        torch.library.opcheck(getattr(call, "_overload", call), given, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_whole_it_is_the_same(launches, name) -> None:
    call, given = CALLS[name]()
    again = tree_map_only(torch.Tensor, torch.clone, list(given))
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: (call(*given), given[0]), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), (call(*again), again[0]))
    assert launches


def test_compiled_with_named_arguments(launches) -> None:
    x, w = made()
    q, k, v = tensors(rows=8, keys=16)
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, w, eps=0.5), normed(x, w, eps=0.5), **CLOSE)
    with pytest.raises(Exception, match=r"missing value for argument 'W'|takes \(Tensor X"):
        compiled(x)
    with pytest.raises(Exception, match=r"W, axis 0 \(columns\): must be"):
        compiled(x, w[1:])
    for named in ({"is_causal": True}, {"causal": "bottom_right", "scale": 0.5}):
        whole = torch.compile(lambda *x: serve.sdpa(*x, **named) + 1, fullgraph=True, backend="aot_eager")  # noqa: B023
        assert torch.equal(whole(q, k, v), serve.sdpa(q, k, v, **named) + 1)


SIZES = {
    "norm": (norm, lambda rows: made(rows=rows), normed, norm._overload),
    "attention": (causal, lambda rows: tensors(rows=rows), partial(expected, alignment="top_left"), sdpa_operator),
    "derived sizes": (
        group_sums,
        lambda rows: (torch.arange(180.0).view(9, 20), torch.linspace(0, 9, rows).int()),
        lambda x, offsets: torch.stack([x[one:two].sum(0) for one, two in pairwise(offsets)]),
        group_sums._overload,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_one_graph_serves_many_sizes(launches, name) -> None:
    call, make, wanted, overload = SIZES[name]
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: call(*given) + 1, fullgraph=True, dynamic=True, backend=keep)
    for rows in (7, 19, 33):
        torch.testing.assert_close(compiled(*make(rows)), wanted(*make(rows)) + 1, rtol=4e-3, atol=4e-3)
    assert len(graphs) == 1
    assert any(node.target is overload for node in graphs[0].graph.nodes)


@pytest.mark.parametrize("name", ["norm", "attention"])
@pytest.mark.parametrize("strict", [True, False])
def test_export_and_tracing_record_the_operator(launches, quiet, name, strict) -> None:
    call, make, wanted, overload = SIZES[name]
    rows = {0 if name == "norm" else 2: torch.export.Dim("rows", min=2, max=4096)}
    model = type("Model", (torch.nn.Module,), {"forward": lambda self, *given: call(*given)})()
    shapes = ((rows, None),) if name == "norm" else ((rows,) * 3,)
    program = torch.export.export(model, make(24), dynamic_shapes=shapes, strict=strict)
    torch.testing.assert_close(program.module()(*make(31)), wanted(*make(31)), **CLOSE)
    traced = make_fx(lambda *given: call(*given))(*make(24))
    for each in (program, traced):
        assert any(node.target is overload for node in each.graph.nodes)
    scripted = torch.jit.trace(lambda *given: call(*given), make(24), check_trace=False)
    assert overload.name().partition(".")[0] in str(scripted.graph)
    assert torch.equal(traced(*make(24)), call(*make(24)))


def test_compiled_fallbacks_keep_the_graph_whole(launches, quiet) -> None:
    mask = torch.ones(24, 24, dtype=torch.bool).tril()
    with configure(fallback="torch", masks="torch"):
        for given in ((*tensors(), mask), tensors(dtype=torch.float32)):
            whole = torch.compile(lambda *given: serve.sdpa(*given), fullgraph=True, backend="eager")
            torch.testing.assert_close(whole(*given), torch_sdpa(*given))
    assert launches == []


def test_autocast_casts_as_torch_does_for_attention_and_for_no_declared_operator(launches) -> None:
    q, k, v = tensors(dtype=torch.float32)
    x, w = made(dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = serve.sdpa(q, k, v, causal=True)
        assert torch.equal(out, torch.ops.tiledsched.sdpa(q, k, v, "top_left"))
    assert torch.equal(out, serve.sdpa(*(each.bfloat16() for each in (q, k, v)), causal=True))
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(norm(x, w), norm(x, w))
    assert len(launches) == 5


# Gradients and transforms


def test_gradients_come_from_a_function_and_only_where_they_are_wanted(launches) -> None:
    def grads(call, *given):
        given = [each.clone().requires_grad_() for each in given]
        call(*given).float().square().sum().backward()
        return [each.grad for each in given]

    x, w = made()
    torch._dynamo.reset()
    for call in (trained, torch.compile(trained, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(grads(call, x, w), grads(normed, x, w), rtol=1e-2, atol=2e-2)
    with torch.no_grad():
        assert not trained(x, w.clone().requires_grad_()).requires_grad


DIFFERENTIATED = {
    "a function": (trained, made(), (3,)),
    "an operator": (ts.rms_norm, made(), ()),
    "rows of rows": (ts.rms_norm, (made()[0][None], made()[1]), (0.5,)),
    "the output is saved": (ts.softmax, made()[:1], ()),
    "a product": (ts.matmul, (torch.randn(5, 24).half(), torch.randn(24, 7).half()), ()),
    "an input is missing": (lambda *given: affine(*given, factor=0.5)[0], (torch.randn(40), torch.randn(40)), ()),
}


@pytest.mark.parametrize("saves", [nullcontext, torch.autograd.graph.save_on_cpu])
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_call_like_earlier_ones_is_not_dispatched(launches, monkeypatch, name, saves) -> None:
    """Its gradients have the bits that they had; also of some inputs alone, checkpointed, and where nothing is recorded."""
    call, given, more = DIFFERENTIATED[name]
    given, found = [each.clone().requires_grad_() for each in given], []

    def called(call):
        with torch.autocast("cpu", dtype=torch.bfloat16), saves():
            return call(*given, *more)

    for turn in range(4):
        if turn == 2:
            for each in _operators.values():
                monkeypatch.setattr(each, "_overload", None)
        out = called(call)
        dout = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
        found += [(out, *torch.autograd.grad(out, given, dout, retain_graph=True)) for _ in range(2)]
    out = called(partial(checkpoint, call, use_reentrant=False))
    found.append((out, *torch.autograd.grad(out, given, dout)))
    assert all(torch.equal(*pair) for each in found for pair in zip(found[0], each, strict=True))
    given[-1].requires_grad_(len(given) == 1)
    (alone,) = torch.autograd.grad(called(call), given[:1], dout)
    assert torch.equal(alone, found[0][1])
    with torch.no_grad():
        assert not call(*given, *more).requires_grad


def test_gradients_without_a_backward_are_refused(launches) -> None:
    x, w = made()
    with pytest.raises(
        UnsupportedError, match=r"rms_norm has no backward; declare one and join them: op.register_auto"
    ):
        norm(x, w.requires_grad_()).sum().backward()
    with pytest.raises(UnsupportedError, match="works in place; call it under"):
        scale_(torch.ones(40, requires_grad=True) * 1)
    with pytest.raises(UnsupportedError, match="changes X in place"):
        scale_.register_autograd(lambda ctx: None)


def test_a_setup_context_of_ones_own(launches) -> None:
    def setup(ctx, inputs, output) -> None:
        ctx.seen = len(inputs), tuple(output.shape)

    other = ts.op("tiledsched_tests::with_context", kernels.RmsNorm, residual=False)
    other.register_autograd(
        lambda ctx, dy: dy.new_full(ctx.seen[1], 10 * ctx.seen[0] + len(ctx.needs_input_grad)), setup_context=setup
    )
    x, w = made()
    for _ in range(3):
        out = other(x.requires_grad_(), w).sum()
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], torch.full_like(x, 33))


affine = ts.op("tiledsched_tests::affine", kernels.Affine)
affine_backward = ts.op("tiledsched_tests::affine_backward", kernels.AffineBackward)
affine.register_autograd(affine_backward, names={"dFactored": "dScaled"})
USES = {
    "both outputs": lambda out, scaled: (out * scaled).sum(),
    "the first": lambda out, scaled: out.sum(),
    "the second": lambda out, scaled: scaled.sum(),
    "in parts": lambda out, scaled: (out.flip(0) - scaled.unfold(0, 2, 1).sum(1).sum()).mean(),
}


@pytest.mark.parametrize("use", USES)
def test_an_operator_is_the_backward_of_another(launches, quiet, use) -> None:
    """Of two outputs either may be without a gradient, and an input may be missing."""
    given = [torch.randn(40, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def ours(x, a, *b):
        return affine(x, a, *b, factor=0.5)

    def found(call, count):
        leaves = [each.clone().requires_grad_() for each in given[:count]]
        USES[use](*call(*leaves)).backward()
        return [torch.zeros(40) if each.grad is None else each.grad for each in leaves]

    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for call, count in ((ours, 2), (ours, 3), (compiled, 3)):
        torch.testing.assert_close(found(call, count), found(lambda x, a, b=0.0: (x * a * 0.5 + b, x * 0.5), count))


@pytest.mark.parametrize(
    ("first", "second", "names", "why"),
    [
        (
            norm,
            affine_backward,
            {},
            r"affine_backward, input Scaled: is called like nothing of .*rms_norm, which has X, W",
        ),
        (affine, affine, {}, r"affine, output Out: is called like nothing of .*affine, which has dX, dA, dB"),
        (affine, affine_backward, {"dFactord": "dScaled"}, r"have no dFactord there; .*did you mean 'dFactored'"),
        (affine, affine_backward, {"dB": "dOut"}, r"have no dOut there; known are dX, dA, dB"),
        (affine, affine_backward, {"Scaled": "Scales"}, r"input Scaled: .*did you mean 'Scaled'\?.*names=\{'Scaled'"),
        (add_groups, affine_backward, {}, r"takes lists of arrays or works in place; register a function"),
        (scale_, affine_backward, {}, r"changes X in place"),
    ],
    ids=["inputs", "outputs", "a name", "a gradient", "a meaning", "lists", "in place"],
)
def test_operators_that_do_not_go_together(first, second, names, why) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=why):
        first.register_autograd(second, names=names)


def test_functional_transforms(launches, quiet) -> None:
    q, k, v = tensors(batch=3)
    x, w = made()
    torch.testing.assert_close(torch.vmap(norm, in_dims=(0, None))(x[None], w)[0], norm(x, w))
    batched = torch.func.vmap(lambda q, k, v: serve.sdpa(q[None], k[None], v[None])[0])(q, k, v)
    torch.testing.assert_close(batched, serve.sdpa(q, k, v))
    with configure(fallback="torch"):
        ours, theirs = (
            torch.func.grad(lambda q: call(q, k, v).float().square().sum())(q)  # noqa: B023
            for call in (serve.sdpa, torch_sdpa)
        )
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(UnsupportedError, match=r"torch\.func takes no gradients of operators; use tensors that requ"):
        torch.func.grad(lambda x: norm(x, w).sum())(x)


# The documentation


def recipes(*, gpu: bool) -> list[str]:
    text = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [recipe for recipe in found if recipe.startswith("# needs a GPU") is gpu]


@pytest.mark.parametrize("recipe", recipes(gpu=False))
def test_recipes_run(launches, recipe) -> None:
    exec(recipe, dict(zip("qkv", tensors(rows=24), strict=True)))
    assert launches


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/tutorials/use-in-my-model.md"])
def test_blocks_that_need_a_gpu_run_as_pasted(launches, page) -> None:
    """With smaller tensors, on a CPU that stands in for the GPU."""
    text = (Path(__file__).parent.parent / page).read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(# needs a GPU\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    try:
        exec(re.sub(r"torch\.randn\([^)]*\)", "torch.randn(1, 2, 24, 64, dtype=torch.float16)", block), {})
    finally:
        torch.use_deterministic_algorithms(False)
    assert launches
