"""Gradients of root-mean-square normalisation and of softmax: right in the interpreter over their schedules, their faults noticed,
and the functions' gradients as torch takes them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tile_checks import NUMPY, check, make_inputs, mutated, run_schedule, sample, searched
from torch.utils.checkpoint import checkpoint

import tiledsched as ts
from tiledsched.build.compiler import compile_schedule
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core.cases import call_reference
from tiledsched.core.device import ARCHS
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.resources import ResourceFacts
from tiledsched.core.rivals import Arrays
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.interpreter import InterpreterError
from tiledsched.kernels.rms_norm_backward import RmsNormBackward
from tiledsched.kernels.softmax_backward import SoftmaxBackward
from tiledsched.ops.bench import methods_of

KERNELS = (RmsNormBackward, SoftmaxBackward)
NORM = {"TILE_ROWS": 1, "HOLD": True, "AHEAD": False, "loads": "plain", "num_worker_warps": 4, "occupancy": 1}
SOFTMAX = {"TILE_ROWS": 1, "HOLD": True, "PERSISTENT": False, "loads": "plain", "num_worker_warps": 4, "occupancy": 0}


def along(p, seed=0, eps_rows=()):
    """Inputs whose gradients lie along what was normalised, so that every term counts; rows in `eps_rows` are tiny."""
    inputs = make_inputs(p.declaration, p, seed)
    x = inputs["X"].astype(np.float32)
    x[list(eps_rows)] *= 2.0**-9
    signed = np.sign(inputs["W"].astype(np.float32)) * np.sign(x) * np.abs(inputs["dOut"].astype(np.float32))
    kind = NUMPY[p.dtype]
    return inputs | {"X": x.astype(kind), "dOut": signed.astype(kind)}


@pytest.mark.parametrize("p", [p for kernel in KERNELS for p in kernel.small()], ids=str)
def test_schedules_are_right(p):
    kernel = p.declaration
    inputs = along(p, eps_rows=[0]) if kernel is RmsNormBackward else None
    for s in sample(kernel, p, 4, seed=str(p)):
        check(kernel, p, s, inputs)


@pytest.mark.parametrize("p", [kernel.small()[0] for kernel in KERNELS], ids=str)
def test_schedules_are_right_on_adversarial_inputs(p):
    (s,) = sample(p.declaration, p, 1, seed=str(p))
    passed, _, message = check_schedule(p.declaration, p, s)
    assert passed, message


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 4096), (131072, 1024), (8192, 16384), (300, 65536)])
def test_every_problem_has_schedules_and_none_has_too_many(kernel, rows, columns):
    p = kernel.problem(rows=rows, columns=columns)
    for arch in ("sm_90", "sm_121"):
        assert 1 <= len(searched(kernel, p, arch)) <= 320


WALKS = (
    {"TILE_COLUMNS": 1024},
    {"TILE_COLUMNS": 1024, "AHEAD": True, "TILE_ROWS": 2},
    {"TILE_COLUMNS": 512, "AHEAD": True},
    {"TILE_COLUMNS": 512, "loads": "gather", "TILE_ROWS": 2},
    {"TILE_COLUMNS": 512, "HOLD": False, "TILE_ROWS": 2, "loads": "tma"},
)
"""How rows are walked: whole, read ahead, in several tiles, and read twice."""


class WithoutEpsilon(RmsNormBackward):
    """Nothing keeps what is divided by from being 0."""

    name = "without_epsilon"
    eps = ts.scalar(0.0)


def test_rows_beyond_the_last_add_nothing_where_epsilon_is_zero():
    p = WithoutEpsilon.problem(rows=3, columns=40, dtype="float16")
    for walk in WALKS:
        check(WithoutEpsilon, p, Schedule(NORM | walk | {"BLOCKS": 16, "TILE_ROWS": 2}), along(p))


@pytest.mark.parametrize("walk", [WALKS[1], WALKS[-1]], ids=str)
def test_the_gradient_of_the_weight_has_the_same_bits_in_any_order_of_blocks(walk):
    """It is summed up in float32, which has the half that is left of 300 ones."""
    p = RmsNormBackward.problem(rows=301, columns=24, dtype="float16")
    s = Schedule(NORM | walk | {"BLOCKS": 16})
    inputs = make_inputs(RmsNormBackward, p)
    found = [run_schedule(RmsNormBackward, p, s, inputs, order)["dW"] for order in ("forward", "reverse")]
    assert np.array_equal(*found)
    ones = {"X": np.ones((301, 24)), "dOut": np.ones((301, 24)), "W": np.ones(24)}
    ones["dOut"][-1] = -299.5
    halves = {name: each.astype(np.float16) for name, each in ones.items()}
    np.testing.assert_allclose(run_schedule(RmsNormBackward, p, s, halves)["dW"], 0.5, atol=2e-3)


def battery_of_rms_norm_backward():
    """Cases that between them notice every mutation of the gradients of normalisation."""
    for residual in (False, True):
        p = RmsNormBackward.problem(rows=37, columns=600, residual=residual, dtype="float16")
        for walk in WALKS:
            check(RmsNormBackward, p, Schedule(NORM | {"BLOCKS": 16} | walk), along(p, eps_rows=[1, 5]))
    p = RmsNormBackward.problem(rows=100, columns=40, dtype="float16")  # more parts than are read at once
    check(RmsNormBackward, p, Schedule(NORM | {"BLOCKS": 132, "TILE_COLUMNS": 512}), along(p))
    test_rows_beyond_the_last_add_nothing_where_epsilon_is_zero()


def battery_of_softmax_backward():
    """Cases that between them notice every mutation of the gradient of softmax."""
    p = SoftmaxBackward.problem(rows=7, columns=1000, dtype="float16")
    inputs = make_inputs(SoftmaxBackward, p)
    inputs["dOut"] = (1 + 0.1 * inputs["dOut"].astype(np.float32)).astype(np.float16)
    for walk in (
        {"TILE_COLUMNS": 1024},
        {"TILE_COLUMNS": 512},
        {"TILE_COLUMNS": 512, "HOLD": False},
        {"TILE_COLUMNS": 512, "loads": "gather", "TILE_ROWS": 2},
        {"TILE_COLUMNS": 1024, "PERSISTENT": True, "TILE_ROWS": 2, "loads": "tma", "occupancy": 1},
    ):
        check(SoftmaxBackward, p, Schedule(SOFTMAX | walk), inputs)


BATTERIES = {"rms_norm_backward": battery_of_rms_norm_backward, "softmax_backward": battery_of_softmax_backward}
MUTATIONS = {
    "rms_norm_backward": {
        "mean over the tile": ("keepdims=True) / const.COLUMNS + eps", "keepdims=True) / const.TILE_COLUMNS + eps"),
        "no epsilon": ("/ const.COLUMNS + eps)", "/ const.COLUMNS)"),
        "root for its inverse": ("ct.rsqrt(", "ct.sqrt("),
        "pull not scaled twice": ("(scale * scale / const.COLUMNS)", "(scale / const.COLUMNS)"),
        "pull summed, not averaged": ("(scale * scale / const.COLUMNS)", "(scale * scale)"),
        "no pull": ("scale * (weighed[j] - x[j] * pull)", "scale * weighed[j]"),
        "no pull, read twice": ("load_vector(W, j, const) - x * pull)", "load_vector(W, j, const))"),
        "the wrong way": ("weighed[j] - x[j] * pull", "weighed[j] + x[j] * pull"),
        "not weighed": ("gradients[j] * weight_of(W, weight, j, const)", "gradients[j]"),
        "weights of the first tile": ("load_vector(W, j, const) if", "load_vector(W, 0, const) if"),
        "dots not weighed, read twice": (
            "load_rows(dOut, row, j, const) * load_vector(W, j, const) * x",
            "load_rows(dOut, row, j, const) * x",
        ),
        "squares of the first tile": ("squares = squares + x[j] * x[j]", "squares = squares"),
        "dots of the first tile": ("dots = dots + weighed[j] * x[j]", "dots = dots"),
        "dW of weighed gradients": ("sums[j] + gradients[j] *", "sums[j] + weighed[j] *"),
        "dW not scaled": ("gradients[j] * (x[j] * scale)", "gradients[j] * x[j]"),
        "dW of the last row": ("sums[j] + gradients[j]", "gradients[j]"),
        "dW of the last row, read twice": ("+ load_part(Parts, j, const), const)", ", const)"),
        "dW begins with anything": (
            "store_part(Parts, j, ct.zeros((const.TILE_ROWS, const.TILE_COLUMNS), ct.float32), const)",
            "pass",
        ),
        "a part counted for each row": ("part = ct.where(first, part, 0.0)", "part = part"),
        "parts of the first block": ("ct.store(Parts, (ct.bid(0), j)", "ct.store(Parts, (0, j)"),
        "parts of the first column": ("ct.store(Parts, (ct.bid(0), j)", "ct.store(Parts, (ct.bid(0), 0)"),
        "the first parts only": ("Parts, (i, ct.bid(0))", "Parts, (0, ct.bid(0))"),
        "parts of the first columns": ("Parts, (i, ct.bid(0))", "Parts, (i, 0)"),
        "the last parts only": ("total = total + ct.load(", "total = ct.load("),
        "the last parts left out": ("ct.cdiv(Parts.shape[0], SUM_ROWS)", "Parts.shape[0] // SUM_ROWS"),
        "rows beyond the last count": ("scale = ct.where(places < rows, scale, 0.0)", "pass"),
        "the last row is none": ("places < rows, scale", "places < rows - 1, scale"),
        "blocks skip rows": (
            "row_tiles, ct.num_blocks(0)):\n            given",
            "row_tiles, ct.num_blocks(0) + 1):\n            given",
        ),
        "the same row twice": ("given = following", "given = given"),
        "ahead by one": ("min(row + ct.num_blocks(0), row_tiles - 1)", "min(row + 1, row_tiles - 1)"),
        "blocks skip rows, read twice": (
            "ct.cdiv(X.shape[0], const.TILE_ROWS), ct.num_blocks(0)):\n        squares",
            "ct.cdiv(X.shape[0], const.TILE_ROWS), ct.num_blocks(0) + 1):\n        squares",
        ),
        "no gradient of the sum": ("gradient = gradient + load_rows(dSum, row, j, const)", "gradient = gradient"),
        "the sum's gradient of the first tile": ("load_rows(dSum, row, j, const)", "load_rows(dSum, row, 0, const)"),
    },
    "softmax_backward": {
        "mean not taken": ("(gradients[j].astype(ct.float32) - mean)", "gradients[j].astype(ct.float32)"),
        "mean not taken, read twice": ("share * (gradient - mean)", "share * gradient"),
        "the wrong way": ("gradients[j].astype(ct.float32) - mean", "gradients[j].astype(ct.float32) + mean"),
        "products of the first tile": (
            "products + gradients[j].astype(ct.float32) * shares[j].astype(ct.float32)",
            "products",
        ),
        "products of the last tile": (
            "products = products + load_rows(dOut, row, j, const)",
            "products = load_rows(dOut, row, j, const)",
        ),
        "summed in float16": (
            "products = gradients[0].astype(ct.float32) * shares[0].astype(ct.float32)",
            "products = gradients[0] * shares[0]",
        ),
        "shares of the first tile": ("load_tile(Out, row, j, const)", "load_tile(Out, row, 0, const)"),
        "stored as the first": (
            "store_rows(dX, row, j, share * (gradient - mean)",
            "store_rows(dX, row, 0, share * (gradient - mean)",
        ),
        "persistent blocks skip rows": ("ct.num_blocks(0)):", "ct.num_blocks(0) + 1):"),
    },
}


@pytest.mark.parametrize("name", BATTERIES)
def test_the_batteries_pass_the_kernels(name):
    BATTERIES[name]()


@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in MUTATIONS for fault in MUTATIONS[name]])
def test_mutations_are_noticed(name, fault):
    modules = ["tiledsched.kernels.rows", f"tiledsched.kernels.{name}.tiles"]
    with mutated(modules, *MUTATIONS[name][fault]), pytest.raises((AssertionError, InterpreterError)):
        BATTERIES[name]()


@pytest.mark.parametrize(
    ("kernel", "faster", "slower"),
    [
        # (knobs, registers, threads, shared memory, bytes spilled), as compiled; times on an H200
        (
            RmsNormBackward,
            (NORM | {"loads": "tma", "occupancy": 3, "BLOCKS": 396}, 92, 256, 29784, 0),  # 208 us
            (NORM | {"num_worker_warps": 8, "occupancy": 2, "BLOCKS": 264}, 106, 256, 9216, 0),  # 314 us
        ),
        (
            SoftmaxBackward,
            (SOFTMAX, 84, 128, 1040, 0),  # 189 us
            (
                SOFTMAX | {"TILE_ROWS": 2, "loads": "tma", "num_worker_warps": 8, "occupancy": 4},
                40,
                384,
                1040,
                160,
            ),  # 375 us
        ),
    ],
    ids=["rms_norm_backward", "softmax_backward"],
)
def test_the_model_orders_programs_as_they_were_measured(kernel, faster, slower):
    def us(knobs, registers, threads, shared, spilled):
        facts = ResourceFacts(
            registers=registers,
            threads=threads,
            shared_bytes=shared,
            spill_bytes=spilled,
            num_ctas=1,
            code_bytes=0,
            ctas_per_sm=1,
        )
        s = Schedule({"TILE_COLUMNS": 4096} | knobs)
        return kernel.cost.model(p, s, facts, ARCHS["sm_90"])

    p = kernel.problem(rows=32768, columns=4096)
    assert p.min_bytes / 4.8e6 < us(*faster) < 0.9 * us(*slower)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_what_nobody_measured_gets_the_default_or_what_is_surely_faster(kernel):
    spec = ARCHS["sm_121"]
    space = space_for("sm_121", kernel)
    for p in kernel.suite("widths"):
        estimate = lambda s, p=p: kernel.cost.model(p, s, kernel.cost.expected(p, s, spec), spec)  # noqa: E731
        default = space.default(p)
        found = kernel.similarity.cold_start(p, default, space, estimate)
        assert found == default or estimate(found) < 0.85 * estimate(default)


# The functions


ROUNDING = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Largest relative error of a gradient: twice what rounding makes, and with a residual the sum is rounded before."""


def made(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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


@pytest.mark.compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_121"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_the_default_compiles_without_spills(kernel, arch):
    p = kernel.problem(rows=32768, columns=4096)
    assert compile_schedule(kernel, p, space_for(arch, kernel).default(p), arch).facts.spill_bytes <= 16
