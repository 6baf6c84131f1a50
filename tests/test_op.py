"""Operators made of declarations, with their kernels run by the interpreter where a GPU would run them: what a call means, where it
runs, the memory it works on, sizes of nothing, and operators as objects."""

# Declarations are never instantiated, and their functions take no self.

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import cuda.tile as ct
import numpy
import pytest

torch = pytest.importorskip("torch")

import op_kernels as kernels
from sample_kernels import Accumulate
from serve_on_cpu import capturing, changed
from store_samples import artifact
from test_shapes import GroupSums, Scaled
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

import tiledsched as ts
from tiledsched.build.cubin import join, parts
from tiledsched.build.host_code import host_arch
from tiledsched.core.arrays import ArraySpec
from tiledsched.core.errors import ConfigError, LaunchError, ProblemError, UnsupportedError
from tiledsched.core.launches import signature as signature_of
from tiledsched.kernels.matmul import Matmul
from tiledsched.measure.runner import Device
from tiledsched.serve import execute, plan as serve_plan, process
from tiledsched.serve.bundle import BundledProgram, write_bundle
from tiledsched.serve.op import _unpickled
from tiledsched.serve.plan import overlaps_itself, scratch_of

pytestmark = pytest.mark.usefixtures("fresh")
CLOSE = {"rtol": 2e-3, "atol": 2e-3}
HALF = {"rtol": 2e-2, "atol": 2e-2}


def made(rows=5, columns=100, dtype=torch.float16):
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((rows, columns), (columns,)))


def normed(x, w, residual=None, eps=1e-5):
    x = x.float() if residual is None else x.float() + residual.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.float()).to(w.dtype)


def norm_gradients(ctx, dy):
    """By the formula; `ctx.others` is `eps`."""
    saved = ctx.saved_tensors
    (x, w), dy = (each.float() for each in saved), dy.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.others[-1])
    dx = dy * w * scale - x * (dy * w * x).mean(-1, keepdim=True) * scale**3
    return dx.to(saved[0].dtype), (dy * x * scale).sum(0).to(saved[1].dtype)


norm = ts.op("tiledsched_tests::rms_norm", kernels.RmsNorm)
product = ts.op("tiledsched_tests::product", kernels.Product)
half_product = ts.op("tiledsched_tests::half_product", kernels.Product, result="float16")
scale_ = ts.op("tiledsched_tests::scale_", kernels.Scale)
accumulate_ = ts.op("tiledsched_tests::accumulate_", Accumulate)
total = ts.op("tiledsched_tests::total", kernels.Total)
just_total = ts.op("tiledsched_tests::just_total", kernels.Total, counted=False)
add_groups = ts.op("tiledsched_tests::add_groups", kernels.AddGroups)
group_sums = ts.op("tiledsched_tests::group_sums", GroupSums)
scaled = ts.op("tiledsched_tests::scaled", Scaled, group=32)
trained = ts.op("tiledsched_tests::trained_norm", kernels.RmsNorm, residual=False)
trained.register_autograd(norm_gradients)


# What a call means


X, W, WEIGHT = torch.randn(2, 5, 64).bfloat16(), torch.randn(64).bfloat16(), torch.randn(24, 64).bfloat16()
A, B = torch.randn(20, 24).half(), torch.randn(24, 40).half()
XS, YS = ([torch.randn(size) for size in (5, 70, 32)] for _ in range(2))
matmul = ts.op("tiledsched_tests::matmul", Matmul)
norm_of_torch = torch.nn.functional.rms_norm


def columns(x):
    """The same values, one column after the other in memory."""
    return x.t().contiguous().t()


def exact(a, b):
    return a.float() @ b.float()


COMPUTED = {
    "float16": (norm, made(), normed),
    "bfloat16": (norm, made(dtype=torch.bfloat16), normed),
    "a number": (norm, (*made(), None, 0.5), normed),
    "an optional array": (norm, (*made(), made()[0]), normed),
    "rows": (product, (A, B), exact),
    "columns": (product, (A, columns(B)), exact),
    "another type": (product, (A, B, "float16"), lambda a, b, result: exact(a, b).half()),
    "a type of its own": (half_product, (A, B), lambda a, b: exact(a, b).half()),
    "workspaces": (total, (torch.randn(200), 4), lambda x, power: (x.sum()[None] * power, torch.tensor([7]).int())),
    "fewer outputs": (just_total, (torch.randn(200),), lambda x: x.sum()[None]),
    "lists": (add_groups, (XS, YS, [5, 70, 32]), lambda xs, ys, sizes: [x + y for x, y in zip(xs, ys, strict=True)]),
    "a list of one": (add_groups, (XS[:1], YS[:1], [5]), lambda xs, ys, sizes: [xs[0] + ys[0]]),
    **{
        f"matmul {one.__name__} {other.__name__}": (matmul, (one(A), other(B)), lambda a, b: exact(a, b).half())
        for one in (columns, torch.clone)
        for other in (columns, torch.clone)
    },
    "linear": (ts.matmul, (X, WEIGHT.t()), lambda x, weight: torch.nn.functional.linear(x, weight.t())),
    "a matrix": (ts.matmul, (X[0], WEIGHT.t()), torch.matmul),
    "rms_norm": (ts.rms_norm, (X, W, 1e-3), lambda x, w, eps: norm_of_torch(x, (64,), w, eps)),
    "rms_norm of a sum": (
        lambda x, w: ts.rms_norm(x, w, residual=x),
        (X, W),
        lambda x, w: (norm_of_torch(x + x, (64,), w, 1e-5), x + x),
    ),
    "softmax": (ts.softmax, (X,), lambda x: x.softmax(-1)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_it_computes_what_is_declared(launches, name) -> None:
    call, given, wanted = COMPUTED[name]
    want = wanted(*given)
    with ts.configure(rivals="off"):
        for _ in range(4):  # through the dispatcher, twice by key, by comparison
            found = call(*given)
            assert type(found) is type(want)
            torch.testing.assert_close(found, want, **HALF)
    assert len(launches) == (8 if "outputs" in name or name == "workspaces" else 4)


def test_numbers_are_no_part_of_a_plan_and_of_the_type_declared(launches) -> None:
    x, w = made()
    for eps in (1, torch.tensor(1.0), True):
        assert torch.equal(torch.ops.tiledsched_tests.rms_norm(x, w, eps=eps), norm(x, W=w, eps=eps))
    assert {(type(launch[3][4]), launch[3][4]) for launch in launches} == {(float, 1.0)}
    assert len(norm.cache.plans) == 1


def test_optional_arrays_layouts_and_types_are_read_off_the_tensors(launches) -> None:
    x, w = made()
    norm(x, w, x)
    norm(x, w)
    assert launches[0][3][2] is x
    assert (launches[1][3][2].shape, len(norm.cache.plans)) == ((1, 1), 2)
    for given, column in ((B, False), (columns(B), True), (B[:, :], False)):
        product(A, given)
        assert launches[-1][3][-1] is column
    p = matmul.plan_for(columns(A), B).problem
    assert (p.a_layout, p.b_layout) == ("column", "row")


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


def halves(*shapes):
    return tuple(torch.zeros(shape).half() for shape in shapes)


WRONG = {
    "size": (
        norm,
        halves((5, 100), (7,)),
        r"rms_norm: W, axis 0 \(columns\): must be 100, as the other arrays say, got 7",
    ),
    "empty": (norm, halves((0, 100), (7,)), r"W, axis 0 \(columns\): must be 100"),
    "axes": (norm, halves((100,), (100,)), r"X must have 2 axes \(rows columns\), got shape \(100,\); reshape it"),
    "type": (norm, (made()[0], made()[1].bfloat16()), "W must be float16, got bfloat16; cast it"),
    "type of all": (norm, made(dtype=torch.float32), "dtype must be one of float16, bfloat16, got 'float32'"),
    "optional": (norm, halves((5, 100), (100,), (1, 100)), r"Residual, axis 0 \(rows\): must be 5, .* got 1"),
    "device": (norm, (made()[0], made()[1].to("meta")), "its tensors must be on one device, got cpu, meta"),
    "choice": (
        product,
        (*halves((8, 16), (16, 8)), "int8"),
        "product: result must be one of float32, float16, got 'int8'",
    ),
    "list": (add_groups, ([torch.ones(5)], [torch.ones(6)], [5]), r"Ys\[0\], axis 0: must be 5, .* got 6"),
    "lists": (
        add_groups,
        ([torch.ones(5), torch.ones(70)], [torch.ones(5)], [5, 70]),
        "add_groups: Ys must be 2 arrays, got 1",
    ),
    "sum": (group_sums, (torch.zeros(9, 20), torch.zeros(0).int()), "group_sums: "),
    "required": (scaled, (torch.zeros(3, 40), torch.zeros(3, 2)), "scaled: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_do_not_fit_are_named_in_the_same_words_where_a_call_is_traced(launches, name) -> None:
    operator, given, words = WRONG[name]
    with pytest.raises(ProblemError, match=words) as real:
        operator(*given)
    with FakeTensorMode() as mode, pytest.raises(ProblemError) as traced:
        operator(*tree_map_only(torch.Tensor, mode.from_tensor, given))
    assert str(traced.value) == str(real.value)
    assert not launches


def test_wrong_arguments_are_told(launches) -> None:
    x, w = made()
    for given, named in (((x,), {}), ((x, w, None, 1.0, 2.0), {}), ((x, w), {"epsilon": 1.0}), ((x, w), {"X": x})):
        with pytest.raises(
            TypeError, match=r"rms_norm takes \(Tensor X, Tensor W, Tensor\? Residual=None, float eps=1e-05\)"
        ):
            norm(*given, **named)
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor"):
        norm(x, 3.0)


def scratch_at(wanted, stream=71):
    """Where the scratch arrays of a launch on a stream are, and the arrays."""
    found = execute.scratch_arrays(wanted, torch.device("cpu"), stream)
    return [each.data_ptr() for each in found], found


def test_zeros_of_one_launch_are_apart_and_kept_by_stream(launches) -> None:
    sizes = {"one": 8, "two": 8, "three": 4}
    wanted = scratch_of(
        ArraySpec(name=name, role="workspace", dtype="int32", shapes=((size,),), zeroed=True)
        for name, size in sizes.items()
    )
    (first, arrays), (again, _), (elsewhere, _) = map(scratch_at, [wanted] * 3, (71, 71, 72))
    assert [(each.shape[0], bool(each.any())) for each in arrays] == [(size, False) for size in sizes.values()]
    assert (first, len({*first, *elsewhere})) == (again, 6)
    with capturing():
        assert scratch_at(wanted)[0][0] != first[0]


def test_small_scratch_is_kept_for_the_launches_of_a_thread_on_a_stream(launches) -> None:
    def specs(size):
        return scratch_of([ArraySpec(name="part", role="workspace", dtype="float32", shapes=((size, 4),))])

    def place(wanted, stream=71):
        where, made = scratch_at(wanted, stream)
        kept.append(made)  # memory that is given back may come again
        return where[-1]

    kept: list = []
    small, large = specs(8), specs(1 << 20)
    first = place(small)
    assert place(small) == place(specs(8)) == first
    assert len({first, place(small, 72), place(small, None), place(specs(9))}) == 4
    assert place(large) != place(large)
    assert len({place(large + small) for _ in range(3)}) == 1
    assert [tuple(each.shape) for each in kept[-1]] == [(1 << 20, 4), (8, 4)]
    assert len({each[0].data_ptr() for each in kept[-3:]}) == 3
    with capturing():
        assert place(small) != first
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(place, small).result() != first
    place(specs(numpy.int64(10)))  # as an author's function may give it
    for size in range(1, 200):
        place(specs(size))
        assert len(launches.runtime.scratch) <= execute.MAX_SHARED


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

    @contextmanager
    def on_device(index):
        entered.append(index)
        launches.runtime.current_device = lambda: -1
        yield

    launches.runtime.on_device, launches.runtime.current_device = on_device, lambda: 3
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
    assert len(launches) == 9


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
    assert "rows=5 columns=100 float16 on NVIDIA H200" in str(first.explain(x, w))


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


def test_programs_of_a_bundle_are_used_and_need_no_compiler(launches, tmp_path, monkeypatch) -> None:
    given = torch.randn(70), 3
    declared, plan = total.kernel, total.plan_for(*given)
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
    plan = total.plan_for(*given)
    total(*given)
    for (kernel, *_), launch, code in zip(plan.steps, launches, parts(built.cubin), strict=True):
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
    for each in (x, torch._neg_view(x)):
        with pytest.raises(
            ProblemError, match="in place, and several of its elements lie in one place of memory; clone it"
        ):
            scale_(each if x.ndim == 1 else each[0])
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
    torch.testing.assert_close(ts.matmul(a[None], b), a[None] @ b, rtol=0, atol=0)
    assert not launches
    with pytest.raises(ProblemError, match="k"):
        product(a, torch.ones(k + 1, n, dtype=dtype))
    with pytest.raises(ProblemError, match="dtype"):
        product(a.double(), b.double())


NONE, ONE = torch.ones(0), torch.ones(3)
NOTHING = {
    "in place": (scale_, (NONE,), None),
    "sums": (total, (NONE,), (torch.zeros(1), torch.zeros(1).int())),
    "lists": (add_groups, ([NONE, ONE], [NONE, ONE], [0, 3]), [NONE, ONE * 2]),
    "no rows": (group_sums, (torch.zeros(0, 20), torch.zeros(4).int()), torch.zeros(3, 20)),
    "no columns": (group_sums, (torch.zeros(5, 0), torch.zeros(4).int()), torch.zeros(3, 0)),
    **{
        f"{call.__name__} {shape}": (call, (torch.ones(shape).half(), *more), torch.ones(shape).half())
        for shape in ((0, 7), (4, 0), (0, 0), (2, 0, 7), (2, 3, 0), (0,))
        for call, more in ((ts.softmax, ()), (ts.rms_norm, (torch.ones(shape[-1]).half(),)))
    },
}


@pytest.mark.parametrize("name", NOTHING)
def test_other_sizes_of_nothing(launches, quiet, name) -> None:
    call, given, wanted = NOTHING[name]
    found = call(*given)
    assert (found is None) == (wanted is None)
    if wanted is not None:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not launches


def test_what_is_left_of_nothing_is_not_captured_and_its_gradients_are_zero(launches, quiet) -> None:
    with capturing(), pytest.raises(LaunchError, match="leave the call out"):
        add_groups(*NOTHING["lists"][1])
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


class Largest(GroupSums):
    """The largest of each column, of which there is none in no rows."""

    Offsets = ts.array("groups", dtype="int32", below="rows")
    suites = {}

    def reference(xp, X, Offsets, groups):
        return xp.stack([X.max(0)] * groups)


def test_what_no_elements_have_is_refused(launches) -> None:
    largest = ts.op("tiledsched_tests::largest", Largest)
    with pytest.raises(
        UnsupportedError, match=r"largest: Largest\.reference: for rows=0 .* it raises ValueError: zero-size"
    ):
        largest(torch.zeros(0, 20), torch.zeros(3).int())


# As objects


def test_operators_are_sent_and_copied_by_name() -> None:
    assert pickle.loads(pickle.dumps(norm)) is copy.copy(norm) is copy.deepcopy({"op": norm})["op"] is norm
    make, (_, *rest) = scaled.__reduce__()
    other = make("tiledsched_tests::scaled_elsewhere", *rest)
    assert (make, other.kernel.name, other.schema.pinned) == (_unpickled, Scaled.name, {"group": 32})
