"""Operators made of declarations, with their kernels run by the interpreter where a GPU would run them."""

from __future__ import annotations

import pickle
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import op_kernels as kernels
from sample_kernels import Accumulate
from serve_on_cpu import capturing, changed
from torch.autograd import forward_ad

import tiledsched as ts
from tiledsched.core.arrays import ArraySpec
from tiledsched.core.errors import ConfigError, LaunchError, ProblemError, UnsupportedError
from tiledsched.measure.runner import Device
from tiledsched.ops import functions
from tiledsched.serve import launch as launching
from tiledsched.serve import plan as serve_plan
from tiledsched.serve import process
from tiledsched.serve.plan import overlaps_itself, scratch_of

pytestmark = pytest.mark.usefixtures("fresh")
CLOSE = {"rtol": 2e-3, "atol": 2e-3}


def made(rows=5, columns=100, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed + rows)
    return (
        torch.randn(rows, columns, generator=generator).to(dtype),
        torch.randn(columns, generator=generator).to(dtype),
    )


def normed(x, w, residual=None, eps=1e-5):
    x = x.float() if residual is None else x.float() + residual.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.float()).to(w.dtype)


norm = ts.op("tiledsched_tests::rms_norm", kernels.RmsNorm)
norm_backward = ts.op("tiledsched_tests::rms_norm_backward", kernels.RmsNormBackward)
product = ts.op("tiledsched_tests::product", kernels.Product)
half_product = ts.op("tiledsched_tests::half_product", kernels.Product, result="float16")
scale_ = ts.op("tiledsched_tests::scale_", kernels.Scale)
accumulate_ = ts.op("tiledsched_tests::accumulate_", Accumulate)
total = ts.op("tiledsched_tests::total", kernels.Total)
just_total = ts.op("tiledsched_tests::just_total", kernels.Total, counted=False)
add_groups = ts.op("tiledsched_tests::add_groups", kernels.AddGroups)
trained = ts.op("tiledsched_tests::trained_norm", kernels.RmsNorm, residual=False)
trained.register_autograd(
    lambda ctx, dy: (lambda dx, dw: (dx, dw.sum(0).to(dx.dtype)))(*norm_backward(dy, *ctx.saved_tensors, *ctx.others))
)


# What a call means


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_computes_what_is_declared(launches, dtype) -> None:
    x, w = made(dtype=dtype)
    for _ in range(4):  # through the dispatcher, twice by key, by comparison
        torch.testing.assert_close(norm(x, w), normed(x, w), rtol=2e-2, atol=2e-2)
    assert len(launches) == 4
    torch.testing.assert_close(norm(x, w, eps=0.5), normed(x, w, eps=0.5), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(norm(x, w, None, 0.5), normed(x, w, eps=0.5), rtol=2e-2, atol=2e-2)
    assert torch.equal(torch.ops.tiledsched_tests.rms_norm(x, w, eps=0.5), norm(x, W=w, eps=0.5))
    assert len(norm.cache.plans) == 1  # a run-time number is no part of a plan


def test_a_number_stays_of_its_type(launches) -> None:
    x, w = made()
    for eps in (1, torch.tensor(1.0), True):
        torch.testing.assert_close(norm(x, w, eps=eps), normed(x, w, eps=1.0), **CLOSE)
    assert all(type(given) is float for launch in launches for given in launch[3] if isinstance(given, float))
    assert {launch[3][4] for launch in launches} == {1.0}


def test_an_optional_array_sets_its_flag(launches) -> None:
    x, w = made()
    for _ in range(4):
        torch.testing.assert_close(norm(x, w, x), normed(x, w, x), **CLOSE)
        torch.testing.assert_close(norm(x, w), normed(x, w), **CLOSE)
    assert launches[0][3][2] is x
    assert launches[1][3][2].shape == (1, 1)
    assert len(norm.cache.plans) == 2


def test_layouts_are_read_off_strides_and_types_off_tensors(launches) -> None:
    a, b = torch.randn(20, 24).half(), torch.randn(24, 40).half()
    for given, column in ((b, False), (b.t().contiguous().t(), True), (b[:, :], False)):
        out = product(a, given)
        torch.testing.assert_close(out, a.float() @ b.float(), **CLOSE)
        assert launches[-1][3][-1] is column
        assert out.dtype == torch.float32
    assert product(a, b, result="float16").dtype == half_product(a, b).dtype == torch.float16
    with pytest.raises(ProblemError, match=r"product: result must be one of float32, float16, got 'int8'"):
        product(a, b, result="int8")


def test_changes_in_place_count_as_changes(launches) -> None:
    x = torch.arange(40.0)
    for factor in (2.0, 0.25):
        before, version = x.clone(), x._version
        assert scale_(x, factor) is None
        assert torch.equal(x, before * factor)
        assert x._version > version
    saved = torch.ones(40, requires_grad=True)
    kept = torch.ones(40)
    result = saved * kept
    scale_(kept)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_launches_in_a_row_share_their_workspaces(launches) -> None:
    x = torch.randn(200)
    for _ in range(3):
        result, blocks = total(x, 4)
        torch.testing.assert_close(result, x.sum()[None] * 4)
        assert int(blocks) == 7
    torch.testing.assert_close(just_total(x), x.sum()[None])
    assert len(launches) == 8
    partial, count = (launches[2][3][place] for place in (1, 2))
    assert launches[3][3][0] is partial
    assert (
        launches[5][3][1].data_ptr() == count.data_ptr()
    )  # zeros are kept; the first call came through the dispatcher


def test_lists_of_arrays(launches) -> None:
    xs, ys = ([torch.randn(size) for size in (5, 70, 32)] for _ in range(2))
    for _ in range(3):
        found = add_groups(xs, ys, lengths=[5, 70, 32])
        assert isinstance(found, list)
        for out, x, y in zip(found, xs, ys, strict=True):
            torch.testing.assert_close(out, x + y)
    (one,) = add_groups(xs[:1], ys[:1], [5])
    torch.testing.assert_close(one, xs[0] + ys[0])
    with pytest.raises(ProblemError, match=r"add_groups: Ys must be 2 arrays, got 1"):
        add_groups(xs[:2], ys[:1], [5, 70])
    with pytest.raises(ProblemError, match=r"Ys\[1\], axis 0: must be 70, .* got 32"):
        add_groups(xs[:2], ys[::2], [5, 70])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w: (x, w[:7]), r"rms_norm: W, axis 0 \(columns\): must be 100, as the other arrays say, got 7"),
        (lambda x, w: (x[0], w), r"X must have 2 axes \(rows columns\), got shape \(100,\); reshape it"),
        (lambda x, w: (x, w.bfloat16()), "W must be float16, got bfloat16; cast it"),
        (lambda x, w: (x.float(), w.float()), "dtype must be one of float16, bfloat16, got 'float32'"),
        (lambda x, w: (x, w, x[:1]), r"Residual, axis 0 \(rows\): must be 5, .* got 1"),
        (lambda x, w: (x, w.to("meta")), "its tensors must be on one device, got cpu, meta"),
    ],
)
def test_arrays_that_do_not_fit_are_named(launches, change, words) -> None:
    x, w = made()
    norm(x, w)
    with pytest.raises(ProblemError, match=words):
        norm(*change(x, w))
    assert len(launches) == 1


def test_wrong_arguments_are_told(launches) -> None:
    x, w = made()
    for given, named in (((x,), {}), ((x, w, None, 1.0, 2.0), {}), ((x, w), {"epsilon": 1.0}), ((x, w), {"X": x})):
        with pytest.raises(
            TypeError, match=r"rms_norm takes \(Tensor X, Tensor W, Tensor\? Residual=None, float eps=1e-05\)"
        ):
            norm(*given, **named)
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor"):
        norm(x, 3.0)


def test_zeros_of_one_launch_are_apart_and_kept_by_stream(launches) -> None:
    specs = [
        ArraySpec(name=name, role="workspace", dtype="int32", shapes=((size,),), zeroed=True)
        for name, size in (("one", 8), ("two", 8), ("three", 4))
    ]
    wanted = scratch_of(specs)
    first, again, elsewhere = (launching.scratch_arrays(wanted, torch.device("cpu"), stream) for stream in (71, 71, 72))
    assert all(each.shape == spec.shape and not each.any() for each, spec in zip(first, specs, strict=True))
    assert [each.data_ptr() for each in first] == [each.data_ptr() for each in again]
    assert len({each.data_ptr() for each in (*first, *elsewhere)}) == 6
    with capturing():
        assert launching.scratch_arrays(wanted, torch.device("cpu"), 71)[0].data_ptr() != first[0].data_ptr()


def test_small_scratch_is_kept_for_the_launches_of_a_thread_on_a_stream(launches) -> None:
    def specs(size):
        return scratch_of([ArraySpec(name="part", role="workspace", dtype="float32", shapes=((size, 4),))])

    def place(wanted, stream=71):
        (made,) = launching.scratch_arrays(wanted, torch.device("cpu"), stream)
        kept.append(made)  # memory that is given back may come again
        return made.data_ptr()

    kept: list = []
    small, large = specs(8), specs(1 << 20)
    assert place(small) == place(small) == place(specs(8))
    assert len({place(small), place(small, 72), place(small, None), place(specs(9))}) == 4
    assert place(large) != place(large)
    both = large + small
    pairs = [launching.scratch_arrays(both, torch.device("cpu"), 71) for _ in range(3)]
    assert [len({pair[place].data_ptr() for pair in pairs}) for place in (0, 1)] == [3, 1]
    assert all([tuple(each.shape) for each in pair] == [(1 << 20, 4), (8, 4)] for pair in pairs)
    with capturing():
        assert place(small) != kept[0].data_ptr()
    others: list = []
    thread = threading.Thread(target=lambda: others.append(place(small)))
    thread.start()
    thread.join()
    assert others[0] != kept[0].data_ptr()
    lengths = []
    for size in range(1, 200):
        place(specs(size))
        lengths.append(len(launches.runtime.scratch))
    assert max(lengths) == launching.MAX_SHARED


@pytest.mark.parametrize("layouts", [(False, False), (True, False), (False, True), (True, True)])
def test_the_shipped_matrix_product(launches, layouts) -> None:
    from tiledsched.kernels.matmul import Matmul

    matmul = ts.op("tiledsched_tests::matmul", Matmul)
    a, b = (torch.randn(size).bfloat16() for size in ((70, 40), (40, 90)))
    given = [x.t().contiguous().t() if column else x for x, column in zip((a, b), layouts, strict=True)]
    torch.testing.assert_close(matmul(*given), (a.float() @ b.float()).bfloat16(), rtol=2e-2, atol=2e-2)
    p = matmul.plan_for(*given).problem
    assert [layout == "column" for layout in (p.a_layout, p.b_layout)] == list(layouts)


def test_the_functions_shaped_like_torchs(launches) -> None:
    from tiledsched.ops import functions

    close = {"rtol": 2e-2, "atol": 2e-2}
    x, w = torch.randn(2, 5, 64).bfloat16(), torch.randn(64).bfloat16()
    weight = torch.randn(24, 64).bfloat16()
    torch.testing.assert_close(functions.matmul(x, weight.t()), torch.nn.functional.linear(x, weight), **close)
    torch.testing.assert_close(functions.matmul(x[0], weight.t()), x[0] @ weight.t(), **close)
    wanted = torch.nn.functional.rms_norm
    torch.testing.assert_close(functions.rms_norm(x, w, 1e-3), wanted(x, (64,), w, 1e-3), **close)
    out, total = functions.rms_norm(x, w, residual=x)
    torch.testing.assert_close(total, x + x)
    torch.testing.assert_close(out, wanted(x + x, (64,), w, 1e-5), **close)
    torch.testing.assert_close(functions.softmax(x), x.softmax(-1), **close)


# Where it runs


def test_it_needs_a_gpu_and_a_search_space(launches) -> None:
    x, w = made()
    with (
        changed(device_type="cuda"),
        pytest.raises(UnsupportedError, match="rms_norm: its tensors are on cpu and the kernel needs a CUDA device"),
    ):
        norm(x, w)
    process.forget_plans()
    launches.runtime.read_device = lambda index: Device(arch="sm_75", name="Tesla T4", sm_count=40)
    with pytest.raises(UnsupportedError, match="no search space for sm_75"):
        norm(x, w)
    assert launches == []


def test_what_torch_says_of_a_gpu(monkeypatch) -> None:
    properties = SimpleNamespace(major=12, minor=1, name="NVIDIA GB10", multi_processor_count=48)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert process.read_device(0) == Device(name="NVIDIA GB10", arch="sm_121", sm_count=48)


def test_settings_hold_from_the_next_call(launches) -> None:
    x, w = made()
    norm(x, w)
    with ts.configure(occupancy=2, tile_m=128):  # a knob of other kernels is none of its business
        norm(x, w)
        explanation = norm.explain(x, w)
    norm(x, w)
    assert explanation.served.provenance == "forced"
    assert explanation.served.schedule["occupancy"] == 2
    assert launches[0][2] is launches[2][2] is not launches[1][2]
    assert "rows=5 columns=100 float16 on NVIDIA H200" in str(explanation)


def test_a_capture_needs_programs_that_have_run(launches) -> None:
    x, w = made(columns=90)
    with capturing(), pytest.raises(LaunchError, match="call tiledsched_tests::rms_norm once with these shapes"):
        norm(x, w)
    want = norm(x, w)
    with capturing():
        assert torch.equal(norm(x, w), want)
        norm(*made(rows=6, columns=90))  # another problem, the same program
        with pytest.raises(LaunchError, match="has not run in this process"):
            norm(x[:, :64].contiguous(), w[:64])


def test_the_current_stream_of_the_tensors_device_is_used(launches) -> None:
    asked = []
    launches.runtime.current_stream = lambda index: asked.append(index) or 17
    norm(*made())
    assert (asked, launches[0][0]) == ([-1], 17)
    entered = []

    class Device:
        def __init__(self, index) -> None:
            entered.append(index)

        def __enter__(self):
            launches.runtime.current_device = lambda: -1

        def __exit__(self, *error):
            pass

    launches.runtime.on_device = Device
    launches.runtime.current_device = lambda: 3
    norm(*made())
    assert entered == [-1]


def test_an_ordinary_call_is_launched_without_the_dispatcher(launches, monkeypatch) -> None:
    x, w = made()
    for _ in range(3):
        norm(x, w)
    weight = torch.nn.Parameter(w)
    with torch.no_grad():
        for _ in range(3):
            norm(x, weight)
        monkeypatch.setattr(norm, "_overload", None)
        norm(x, weight)
        monkeypatch.setattr("tiledsched.serve.op.call_key", None)
        norm(x, w)
        norm(x, weight)
    monkeypatch.undo()
    assert not launches[-1][3][1].requires_grad or not torch.is_grad_enabled() or len(launches) == 9


# Inside torch


CALLS = {
    "norm": lambda: (norm, (*made(),)),
    "residual": lambda: (norm, (*made(), made()[0], 0.1)),
    "product": lambda: (product, (torch.randn(20, 24).half(), torch.randn(40, 24).half().t())),
    "half": lambda: (half_product, (torch.randn(20, 24).half(), torch.randn(24, 40).half())),
    "in place": lambda: (scale_, (torch.randn(40), 3.0)),
    "two launches": lambda: (total, (torch.randn(70), 3)),
    "lists": lambda: (add_groups, ([torch.randn(5), torch.randn(40)], [torch.randn(5), torch.randn(40)], [5, 40])),
    "trained": lambda: (trained, tuple(x.requires_grad_() for x in made())),
    "gradients": lambda: (norm_backward, (made()[0], *made(seed=1))),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_operators_are_well_made(launches, name) -> None:
    made_op, given = CALLS[name]()
    torch.library.opcheck(made_op._overload, given, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "trained"])
def test_compiled_whole_it_is_the_same(launches, backend, name) -> None:
    made_op, given = CALLS[name]()
    again = [
        [x.clone() for x in each]
        if isinstance(each, list) and torch.is_tensor(each[0])
        else each.clone()
        if torch.is_tensor(each)
        else each
        for each in given
    ]
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: (made_op(*given), given[0]), fullgraph=True, backend=backend)
    (found, first), want = compiled(*given), made_op(*again)
    torch.testing.assert_close((found, first), (want, again[0]))


def test_the_operator_itself_can_be_compiled(launches) -> None:
    x, w = made()
    torch._dynamo.reset()
    compiled = torch.compile(norm, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, w, eps=0.5), normed(x, w, eps=0.5), **CLOSE)
    with pytest.raises(Exception, match=r"missing value for argument 'W'|takes \(Tensor X"):
        compiled(x)


def test_one_graph_serves_many_sizes(launches) -> None:
    graphs = []

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: norm(x, w) + 1, fullgraph=True, dynamic=True, backend=keep)
    for rows in (7, 19, 33):
        x, w = made(rows=rows)
        torch.testing.assert_close(compiled(x, w), normed(x, w) + 1, **CLOSE)
    assert len(graphs) == 1
    assert any(node.target is norm._overload for node in graphs[0].graph.nodes)


def test_export_and_tracing_record_the_operator(launches) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    class Model(torch.nn.Module):
        def forward(self, x, w):
            return norm(x, w)

    x, w = made()
    program = torch.export.export(Model(), (x, w), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)}, None))
    assert any(node.target is norm._overload for node in program.graph.nodes)
    x, w = made(rows=9)
    torch.testing.assert_close(program.module()(x, w), normed(x, w), **CLOSE)
    graph = make_fx(lambda x, w: norm(x, w))(x, w)
    assert any(node.target is norm._overload for node in graph.graph.nodes)


def test_autocast_changes_nothing(launches) -> None:
    x, w = made(dtype=torch.bfloat16)
    want = norm(x, w)
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(norm(x, w), want)


def test_gradients_come_from_a_second_operator(launches) -> None:
    def grads(call, *given):
        given = [each.clone().requires_grad_() for each in given]
        call(*given).float().square().sum().backward()
        return [each.grad for each in given]

    x, w = made()
    want = grads(normed, x, w)
    torch._dynamo.reset()
    for call in (trained, torch.compile(trained, fullgraph=True, backend="aot_eager")):
        for found, right in zip(grads(call, x, w), want, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-2, atol=2e-2)
    with torch.no_grad():
        assert not trained(x, w.clone().requires_grad_()).requires_grad


def test_gradients_without_a_backward_are_refused(launches) -> None:
    x, w = made()
    out = norm(x, w.requires_grad_())
    with pytest.raises(
        UnsupportedError, match=r"rms_norm has no backward; declare one and join them: op.register_autograd"
    ):
        out.sum().backward()
    with pytest.raises(UnsupportedError, match="works in place; call it under"):
        scale_(torch.ones(40, requires_grad=True) * 1)
    with pytest.raises(UnsupportedError, match="changes X in place"):
        scale_.register_autograd(lambda ctx: None)


def test_a_setup_context_of_ones_own(launches) -> None:
    seen = []

    def setup(ctx, inputs, output) -> None:
        seen.append((len(inputs), tuple(output.shape)))
        ctx.shape = inputs[0].shape

    other = ts.op("tiledsched_tests::with_context", kernels.RmsNorm, residual=False)
    other.register_autograd(lambda ctx, dy: dy.new_ones(ctx.shape), setup_context=setup)
    x, w = made()
    x.requires_grad_()
    other(x, w).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert seen == [(3, (5, 100))]


affine = ts.op("tiledsched_tests::affine", kernels.Affine)
affine_backward = ts.op("tiledsched_tests::affine_backward", kernels.AffineBackward)
affine.register_autograd(affine_backward, names={"dFactored": "dScaled"})


def test_an_operator_is_the_backward_of_another(launches, quiet) -> None:
    """Of two outputs either may be without a gradient, and an input may be missing."""
    given = [torch.randn(40, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def ours(x, a, *b):
        return affine(x, a, *b, factor=0.5)

    def torchs(x, a, b=0.0):
        return x * a * 0.5 + b, x * 0.5

    def found(call, use, count):
        leaves = [each.clone().requires_grad_() for each in given[:count]]
        use(*call(*leaves)).backward()
        return [torch.zeros(40) if each.grad is None else each.grad for each in leaves]

    torch._dynamo.reset()
    uses = (
        lambda out, scaled: (out * scaled).sum(),
        lambda out, scaled: out.sum(),
        lambda out, scaled: scaled.sum(),
        lambda out, scaled: (out.flip(0) - scaled.unfold(0, 2, 1).sum(1).sum()).mean(),
    )
    for use in uses:
        for count in (2, 3):
            want = found(torchs, use, count)
            torch.testing.assert_close(found(ours, use, count), want)
        torch.testing.assert_close(found(torch.compile(ours, fullgraph=True, backend="aot_eager"), use, 3), want)
    assert pickle.loads(pickle.dumps(affine)) is affine


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


# Making operators


def test_the_same_name_serves_the_kernel_as_it_is_now(launches) -> None:
    x, w = made()
    first = ts.op("tiledsched_tests::again", kernels.RmsNorm)
    first(x, w)
    assert ts.op("tiledsched_tests::again", kernels.RmsNorm) is first
    values = {name: each for name, each in vars(kernels.RmsNorm).items() if name not in ("__dict__", "__weakref__")}
    changed = type(
        "RmsNorm", (ts.Kernel,), values | {"eps": ts.scalar(1e-5), "knobs": {"TILE": [256], "occupancy": [7]}}
    )
    assert changed is not kernels.RmsNorm
    assert ts.op("tiledsched_tests::again", changed) is first
    torch.testing.assert_close(first(x, w), normed(x, w), **CLOSE)
    assert first.explain(x, w).served.schedule["occupancy"] == 7
    with pytest.raises(ConfigError, match=r"again is an operator of .*RmsNorm.* already"):
        ts.op("tiledsched_tests::again", kernels.Product)
    with pytest.raises(ConfigError, match="already"):
        ts.op("tiledsched_tests::again", kernels.RmsNorm, residual=True)


@pytest.mark.parametrize(
    ("name", "kernel", "pinned", "words"),
    [
        ("rms_norm", kernels.RmsNorm, {}, "write namespace::name, such as mylib::rmsnorm"),
        ("tiledsched_tests::x", kernels.RmsNorm, {"row": 1}, "no field 'row'; known are rows, columns"),
        (
            "tiledsched_taken::x",
            kernels.RmsNorm,
            {},
            r"torch does not take tiledsched_taken::x\(Tensor X.*use another name",
        ),
    ],
)
def test_what_cannot_be_an_operator_is_refused(name, kernel, pinned, words) -> None:
    library = torch.library.Library("tiledsched_taken", "FRAGMENT")
    library.define("x(Tensor x) -> Tensor")
    with pytest.raises(ConfigError, match=words):
        ts.op(name, kernel, **pinned)


def test_a_kernel_without_inputs_or_with_outputs_by_chance_is_refused() -> None:
    import cuda.tile as ct

    def fill(Out, TILE: ct.Constant[int]):
        ct.store(Out, (ct.bid(0),), ct.zeros((TILE,), Out.dtype))

    declared = {
        "function": fill,
        "size": ts.dim(),
        "Out": ts.out("size", dtype="float32"),
        "knobs": {"TILE": [16]},
        "grid": lambda p, s, device: -(-p.size // 16),
        "reference": lambda xp, p: xp.zeros(p.size),
    }
    with pytest.raises(ConfigError, match="has no input array"):
        ts.op("tiledsched_tests::fill", type("Fill", (ts.Kernel,), dict(declared)))
    declared |= {
        "X": ts.array("size", dtype="float32"),
        "Other": ts.out("size", dtype="float32", when="big"),
        "derived": {"big": lambda p: p.size > 9},
    }
    with pytest.raises(ConfigError, match=r"Other: whether there is this output depends on big"):
        ts.op("tiledsched_tests::fill", type("Fill2", (ts.Kernel,), dict(declared)))


# Programs built ahead


@pytest.mark.parametrize(("name", "given"), [("norm", made()), ("two launches", (torch.randn(70), 3))])
def test_programs_of_a_bundle_are_used_and_need_no_compiler(launches, tmp_path, monkeypatch, name, given) -> None:
    from dataclasses import replace

    from store_samples import artifact

    from tiledsched.build.cubin import join, parts
    from tiledsched.build.host_code import host_arch
    from tiledsched.core.launches import signature as signature_of
    from tiledsched.serve.bundle import BundledProgram, write_bundle

    operator = {"norm": norm, "two launches": total}[name]
    declared, plan = operator.kernel, operator.plan_for(*given)
    codes = [replace(artifact("ab" * 12, "sm_90"), cubin=f"code {place}".encode()) for place in range(len(plan.steps))]
    built = join(codes)
    program = BundledProgram(
        kernel=declared.name,
        arch="sm_90",
        schedule=plan.served.schedule,
        problem=plan.problem,
        fingerprint=built.fingerprint,
        host_arch=host_arch(),
    )
    path = tmp_path / "b.zip"
    write_bundle(
        path, [program], {("sm_90", built.fingerprint): built}, [], {declared.name: declared.source_hash()}, "none"
    )
    monkeypatch.setenv("TILEDSCHED_BUNDLE", str(path))
    monkeypatch.setattr("tiledsched.build.store.read_artifact", lambda code, arch: replace(built, cubin=code))
    process.forget_kernels()
    plan = operator.plan_for(*given)
    operator(*given)
    for (kernel, _, _), launch, code in zip(plan.steps, launches, parts(built.cubin), strict=True):
        assert launch[2] is kernel
        signature = signature_of(declared, plan.problem, plan.served.schedule, kernel.step)
        assert kernel._compile(signature, None, (9, 0))[0] == code


# What torch sees in tensors


@pytest.mark.parametrize("special", [torch._neg_view, torch._to_functional_tensor])
def test_tensors_are_what_torch_sees_in_them(launches, special) -> None:
    x, w = made()
    plain = -x if special is torch._neg_view else x
    for _ in range(4):
        wanted, found = norm(plain, w), norm(special(x), w)
        found = torch._from_functional_tensor(found) if torch._is_functional_tensor(found) else found
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    zero = torch._efficientzerotensor(x.shape, dtype=x.dtype)
    torch.testing.assert_close(norm(zero, w), torch.zeros_like(x), rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match="ordinary tensors"):
        norm.own(special(x), w)


def test_negated_tensors_change_in_place(launches) -> None:
    x = torch.randn(20)
    for _ in range(4):
        before = x.clone()
        scale_(torch._neg_view(x), factor=3.0)
        torch.testing.assert_close(x, before * 3)


def test_forward_mode_derivatives_are_refused(launches) -> None:
    x, w = made()
    norm(x, w)
    for way in (
        lambda: torch.func.jvp(lambda x: norm(x, w), (x,), (x,)),
        lambda: torch.func.jacfwd(lambda x: norm(x, w))(x),
        lambda: torch.func.jvp(lambda w: trained(x, w), (w,), (w,)),
        lambda: torch.func.jvp(lambda x: (scale_(x), x), (x.flatten(),), (x.flatten(),)),
        lambda: torch.func.jvp(torch.ops.tiledsched_tests.rms_norm, (x, w), (x, w)),
    ):
        with pytest.raises((UnsupportedError, NotImplementedError), match="forward"):
            way()
    with forward_ad.dual_level():
        with pytest.raises(UnsupportedError, match="forward-mode"):
            norm(forward_ad.make_dual(x, x), w)
        torch.testing.assert_close(norm(x, w), normed(x, w), **CLOSE)


@pytest.mark.parametrize(
    "x", [torch.zeros(1).expand(20), torch.zeros(30).as_strided((20,), (0,)), torch.zeros(5, 1).expand(5, 4)]
)
def test_in_place_one_element_has_one_place(launches, x) -> None:
    with pytest.raises(ProblemError, match="clone it"):
        scale_(x if x.ndim == 1 else x[0])
    assert not launches
    scale_(torch.zeros(40)[::2])  # strides alone are no fault
    assert launches


LAID = {
    "apart": lambda memory: (memory[:4], memory[4:]),
    "the same": lambda memory: (memory[:4], memory[:4]),
    "one row further": lambda memory: (memory[:4], memory[1:5]),
    "one row before": lambda memory: (memory[1:5], memory[:4]),
    "transposed": lambda memory: (memory[:6], memory[:6].t()),
    "columns": lambda memory: (memory[:, :3], memory[:, 3:]),  # torch compares dense tensors only
    "empty": lambda memory: (memory[:0], memory[:0]),
}


@pytest.mark.parametrize(("way", "refused"), [*zip(LAID, (False, False, True, True, True, False, False), strict=True)])
def test_in_place_no_part_of_memory_is_another_argument(launches, way, refused) -> None:
    """As torch has it, also in a call that differs from those before in nothing but where its tensors lie."""
    memory, others = torch.randn(8, 6), (torch.randn(8, 6), torch.randn(8, 6))
    for _ in range(4):
        accumulate_(LAID[way](others[0])[0], LAID[way](others[1])[1])
    x, y = LAID[way](memory)
    before, count, wanted = memory.clone(), len(launches), x * 0.5 + y
    with pytest.raises(RuntimeError, match="single memory location") if refused else nullcontext():
        x.add_(y)
    memory.copy_(before)
    for call in (accumulate_, accumulate_.own, torch.ops.tiledsched_tests.accumulate_) if refused else ():
        with pytest.raises(
            ProblemError, match="accumulate_: X is changed in place and shares a part of its memory with Y"
        ):
            call(x, y)
    assert len(launches) == count
    assert torch.equal(memory, before)
    if not refused:
        accumulate_(x, y)
        assert torch.equal(x, wanted)


@pytest.mark.parametrize(
    ("sizes", "strides", "overlaps"),
    [
        ((4, 5), (5, 1), False),
        ((4, 5), (1, 4), False),
        ((4, 1), (1, 0), False),
        ((4, 0), (0, 0), False),
        ((4, 5), (1, 1), True),
        ((4, 5), (0, 1), True),
        ((), (), False),
    ],
)
def test_elements_that_share_memory(sizes, strides, overlaps) -> None:
    assert overlaps_itself(torch.zeros(64).as_strided(sizes, strides)) is overlaps


# Sizes of 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 5), (4, 0, 5), (4, 3, 0), (0, 0, 0), (0, 3, 0)])
def test_products_of_nothing(launches, dtype, m, n, k) -> None:
    a, b = torch.ones(m, k, dtype=dtype), torch.ones(k, n, dtype=dtype)
    for call in (product, torch.ops.tiledsched_tests.product, torch.compile(product, backend="aot_eager")):
        found = call(a, b)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, (a @ b).float(), rtol=0, atol=0)
    with capturing():
        torch.testing.assert_close(product(a, b), (a @ b).float(), rtol=0, atol=0)
    torch.testing.assert_close(functions.matmul(a[None], b), a[None] @ b, rtol=0, atol=0)
    assert not launches
    with pytest.raises(ProblemError, match="k"):
        product(a, torch.ones(k + 1, n, dtype=dtype))
    with pytest.raises(ProblemError, match="dtype"):
        product(a.double(), b.double())


@pytest.mark.parametrize("shape", [(0, 7), (4, 0), (0, 0), (2, 0, 7), (2, 3, 0), (0,)])
def test_rows_of_nothing(launches, quiet, shape) -> None:
    x, w = torch.ones(shape).half(), torch.ones(shape[-1]).half()
    for found in (functions.softmax(x), functions.rms_norm(x, w), *functions.rms_norm(x, w, residual=x)):
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert not launches


def test_other_sizes_of_nothing(launches, quiet) -> None:
    x = torch.zeros(0)
    assert scale_(x) is None
    sums, blocks = total(x)
    assert (sums.tolist(), blocks.tolist()) == ([0.0], [0])
    assert (sums.dtype, blocks.dtype) == (torch.float32, torch.int32)
    found = add_groups([torch.ones(0), torch.ones(3)], [torch.ones(0), torch.ones(3)], [0, 3])
    assert [each.tolist() for each in found] == [[], [2.0, 2.0, 2.0]]
    with capturing(), pytest.raises(LaunchError, match="leave the call out"):
        add_groups([torch.ones(0), torch.ones(3)], [torch.ones(0), torch.ones(3)], [0, 3])
    x, w = torch.ones(0, 7, requires_grad=True), torch.ones(7, requires_grad=True)
    gradients = torch.autograd.grad(trained(x.half(), w.half()).sum(), (x, w))
    assert [each.tolist() for each in gradients] == [[], [0.0] * 7]
    assert not launches


def test_a_view_beyond_32_bits_is_refused_whatever_the_other_arrays_are(launches, monkeypatch) -> None:
    a, b = torch.ones(4, 5).half(), torch.ones(5, 60).half()[:, ::20]
    monkeypatch.setattr(serve_plan, "LARGEST_INT32", 200)
    with pytest.raises(UnsupportedError, match="B is not contiguous"):
        product(a, b)
    product(a, b.contiguous())
