"""Products with an epilogue through `ts.matmul`: what they compute, gradients, errors, functions of an author, and which schedules
serve what nobody tuned. Kernels are run by the interpreter where a GPU would run them.
"""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import epilogue_functions as functions

import tiledsched as ts
from tiledsched.core.config import load_settings
from tiledsched.core.errors import DeclarationError, ProblemError, UnsupportedError
from tiledsched.core.registry import kernel_named
from tiledsched.interpreter import evaluate
from tiledsched.kernels import epilogue_tiles
from tiledsched.kernels.epilogues import ACTIVATIONS
from tiledsched.kernels.own_epilogues import kernel_of
from tiledsched.ops.front import operator
from tiledsched.serve.entries import load_table

pytestmark = pytest.mark.usefixtures("fresh")
HALF = {"rtol": 1e-2, "atol": 1e-2}


def made(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


X, W, GATE = made(2, 9, 40) / 6, made(72, 40, seed=1), made(72, 40, seed=2)
BIAS, RESIDUAL, SCALE = made(72, seed=3), made(2, 9, 72, seed=4), torch.tensor(0.03)
BOTH = {"halves": torch.cat((GATE, W)), "interleaved": torch.stack((GATE, W), 1).flatten(0, 1)}


def exact(x, w, bias=None, activation="none", gate=None, residual=None):
    """By torch, in the precision of the arguments."""
    sums = x @ w.t() + (0 if bias is None else bias)
    act = lambda each: ACTIVATIONS[activation].torch(torch.nn.functional, each)  # noqa: E731
    sums = act(sums) if gate is None else act(x @ gate.t()) * sums
    return sums + (0 if residual is None else residual)


COMPUTED = {
    "bias": {"bias": BIAS},
    "residual": {"residual": RESIDUAL},
    "all": {"bias": BIAS, "activation": "gelu", "residual": RESIDUAL},
    "gate": {"gate": GATE, "activation": "silu"},
    "gate and all": {"gate": GATE, "activation": "relu", "bias": BIAS, "residual": RESIDUAL},
    **{name: {"activation": name} for name in ACTIVATIONS if name != "none"},
}


@pytest.mark.parametrize("name", COMPUTED)
def test_results_are_those_of_the_formula_rounded_once(launches, name):
    more = COMPUTED[name]
    given = {key: value.t() if key == "gate" else value for key, value in more.items()}
    right = exact(X.double(), W.double(), **{k: v if isinstance(v, str) else v.double() for k, v in more.items()})
    with ts.configure(rivals="off"):
        for _ in range(2):
            found = ts.matmul(X, W.t(), **given)
            torch.testing.assert_close(found.double(), right, rtol=4.1e-3, atol=1e-5)  # half a bit of bfloat16
        assert ts.matmul(X[0], W.t(), **given | ({"residual": RESIDUAL[0]} if "residual" in given else {})).ndim == 2
    assert launches


@pytest.mark.parametrize("order", BOTH)
def test_a_matrix_may_hold_both_parts_of_a_gate(launches, order):
    right = ts.matmul(X, W.t(), None, "silu", GATE.t())
    torch.testing.assert_close(ts.matmul(X, BOTH[order].t(), None, "silu", order), right, rtol=0, atol=0)
    if order == "halves":
        lies = BOTH[order].t().contiguous()
        torch.testing.assert_close(ts.matmul(X, lies, None, "silu", order), right, **HALF)


def test_columns_of_one_row_may_be_interleaved(launches):
    both = made(1, 144)  # which is row- and column-major, whatever its strides
    found = ts.matmul(X[..., :1], both, gate="interleaved")
    torch.testing.assert_close(found, ts.matmul(X[..., :1], both[:, 1::2], gate=both[:, ::2]), rtol=0, atol=0)


def test_results_of_8_bits_are_divided_by_the_scale_and_cut(launches):
    far = RESIDUAL * 50
    found = ts.matmul(X, W.t(), BIAS, residual=far, out_scale=SCALE)
    right = exact(X.double(), W.double(), BIAS.double(), residual=far.double()) / SCALE.item()
    assert found.dtype == torch.float8_e4m3fn
    assert (right.abs() > 448).any()
    torch.testing.assert_close(found.double(), right.clamp(-448, 448), rtol=0.065, atol=0.01)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_tile_code_of_activations_is_exact_to_float32(name):
    x = np.linspace(-12, 12, 2400, dtype=np.float32).reshape(48, 50)
    row, column = np.arange(48)[:, None], np.arange(50)[None]
    found = evaluate(getattr(epilogue_tiles, name), x, row, column, arrays=())
    wanted = ACTIVATIONS[name].exact(np, x.astype(float))
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)
    by_torch = ACTIVATIONS[name].torch(torch.nn.functional, torch.from_numpy(x).double())
    np.testing.assert_allclose(by_torch.numpy(), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", COMPUTED)
def test_gradients_are_those_of_the_formula(launches, name, twice):
    more = {key: value for key, value in COMPUTED[name].items() if isinstance(value, torch.Tensor)}
    words = {key: value for key, value in COMPUTED[name].items() if key not in more}
    tensors = dict(x=X, w=W, **more)

    def gradients(call, kind):
        leaves = {key: value.detach().to(kind).requires_grad_() for key, value in tensors.items()}
        out, wanted = call(**leaves, **words), list(leaves.values())
        found = torch.autograd.grad(out, wanted, made(*out.shape, seed=9).to(kind), create_graph=twice)
        if not twice:
            return found
        weighed = sum((each * made(*each.shape, seed=place).to(kind)).sum() for place, each in enumerate(found))
        return torch.autograd.grad(weighed, wanted, allow_unused=True, materialize_grads=True)

    def ours(x, w, gate=None, **rest):
        return ts.matmul(x, w.t(), gate=None if gate is None else gate.t(), **rest)

    for one, right in zip(gradients(ours, torch.bfloat16), gradients(exact, torch.float64), strict=True):
        error = (one.double() - right).norm() / right.norm().clamp(min=1e-12)
        assert error <= (2.5e-2 if twice else 8e-3), error.item()  # sums are rounded before torch's formulae


def test_a_residual_may_be_changed_in_place(launches):
    x, residual = X.clone().requires_grad_(), RESIDUAL.clone()
    out = ts.matmul(x, W.t(), BIAS, "gelu", GATE.t(), residual)
    residual.zero_()
    (found,) = torch.autograd.grad(out.sum(), [x])
    (right,) = torch.autograd.grad(ts.matmul(x, W.t(), BIAS, "gelu", GATE.t()).sum(), [x])
    torch.testing.assert_close(found, right)


def test_gradients_of_some_tensors_alone_and_of_the_plain_product(launches):
    w = W.clone().requires_grad_()
    (ts.matmul(X, w.t()) * RESIDUAL).sum().backward()
    torch.testing.assert_close(w.grad.double(), RESIDUAL.double().flatten(0, 1).t() @ X.double().flatten(0, 1), **HALF)
    bias = BIAS.clone().requires_grad_()
    ts.matmul(X, W.t(), bias).sum().backward()
    torch.testing.assert_close(bias.grad, torch.full_like(bias, 18.0))
    with pytest.raises(UnsupportedError, match="8 bits has no gradients"):
        ts.matmul(X, w.t(), out_scale=SCALE).float().sum().backward()


TRACED = {
    "bias": lambda x: ts.matmul(x, W.t(), BIAS, "gelu"),
    "gate": lambda x: ts.matmul(x, BOTH["interleaved"].t(), activation="silu", gate="interleaved"),
    "8 bits": lambda x: ts.matmul(x, W.t(), out_scale=SCALE).float(),
    "own": lambda x: ts.matmul(x, W.t(), epilogue=functions.capped),
}


@pytest.mark.parametrize("name", TRACED)
def test_one_graph_under_torch_compile(launches, name):
    operator.cache_clear()
    compiled = torch.compile(TRACED[name], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), TRACED[name](X))
    x = X.clone().requires_grad_()
    if name in ("bias", "gate"):
        (one,), (two,) = (torch.autograd.grad(call(x).sum(), [x]) for call in (compiled, TRACED[name]))
        torch.testing.assert_close(one, two)


def test_any_number_of_rows_is_compiled_once_and_empty_products_are_finished(launches):
    call = lambda x: ts.matmul(x, W.t(), BIAS, "gelu")  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9, 17):
        torch.testing.assert_close(compiled(x := made(rows, 40)), call(x))
    assert ts.matmul(X[:0], W.t(), BIAS).shape == (0, 9, 72)
    nothing = ts.matmul(X[0, :, :0], W[:, :0].t(), BIAS, "relu")  # no column of A: the epilogue of zeros
    torch.testing.assert_close(nothing, BIAS.relu().expand(9, 72))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = ts.matmul(X[0, :, :0], W[:, :0].t(), BIAS, epilogue=functions.halved_by(2.0))
    torch.testing.assert_close(own, (2 * BIAS).expand(9, 72))


def test_a_row_has_the_same_bits_in_every_batch(launches):
    x = made(70, 40)
    with ts.batch_invariant():
        for more in ({"bias": BIAS, "activation": "gelu"}, {"activation": "silu", "gate": GATE.t()}):
            every = ts.matmul(x, W.t(), **more)
            for rows in (1, 5, 33):
                assert torch.equal(ts.matmul(x[:rows], W.t(), **more), every[:rows])


def test_operands_may_lie_differently(launches):
    right = ts.matmul(X, W.t(), None, "silu", GATE.t())
    torch.testing.assert_close(ts.matmul(X, W.t(), None, "silu", GATE.t().contiguous()), right, rtol=0, atol=0)


def test_functions_of_an_author(launches):
    sums = X.double() @ W.double().t()
    found = ts.matmul(X, W.t(), epilogue=functions.capped)
    right = sums.clamp(-1, 1).flatten(0, 1)
    right[0] = torch.arange(72)
    torch.testing.assert_close(found.double().flatten(0, 1), right, **HALF)
    rows, columns = torch.arange(18.0), made(72, dtype=torch.float16)
    found = ts.matmul(X, W.t(), residual=RESIDUAL, epilogue=functions.scaled_rows, arrays=(rows, columns))
    right = sums * rows.reshape(2, 9, 1) * columns.double() + RESIDUAL.double()
    torch.testing.assert_close(found.double(), right, **HALF)
    for factor in (0.5, 3.0):  # what it takes from around it is part of the kernel
        found = ts.matmul(X, W.t(), epilogue=functions.halved_by(factor))
        torch.testing.assert_close(found.double(), sums * factor, **HALF)


def test_an_epilogue_in_torchs_words_is_that_in_cutiles(launches):
    own = ts.matmul(X, W.t(), epilogue=functions.in_torchs_words)
    assert torch.equal(own, ts.matmul(X, W.t(), epilogue=functions.capped))


REFUSED = {
    "sums of a tile": (
        lambda: ts.matmul(X, W.t(), epilogue=functions.of_its_row),
        DeclarationError,
        "epilogue: of_its_row returns other values for a part of a tile than for the whole",
    ),
    "activation": (lambda: ts.matmul(X, W.t(), activation="gleu"), ProblemError, "did you mean .gelu"),
    "a word for a gate": (lambda: ts.matmul(X, W.t(), gate="both"), ProblemError, "halves"),
    "odd columns": (lambda: ts.matmul(X, W[:71].t(), gate="halves"), ProblemError, "even number of columns"),
    "rows interleaved": (
        lambda: ts.matmul(X, W.t().contiguous(), gate="interleaved"),
        ProblemError,
        "lay other out anew",
    ),
    "bias": (lambda: ts.matmul(X, W.t(), BIAS[:5]), ProblemError, "Bias, axis 0"),
    "residual": (
        lambda: ts.matmul(X, W.t(), residual=RESIDUAL.transpose(0, 1).flatten(0, 1).view(9, 2, 72)),
        ProblemError,
        r"residual must have the shape of the result, \(2, 9, 72\), got \(9, 2, 72\)",
    ),
    "residual of a gate": (
        lambda: ts.matmul(X, BOTH["halves"].t(), gate="halves", residual=RESIDUAL[0]),
        ProblemError,
        r"residual must have the shape of the result, \(2, 9, 72\), got \(9, 72\)",
    ),
    "a gate that is true": (
        lambda: ts.matmul(X, W.t(), gate=True),
        ProblemError,
        "gate must be a torch.Tensor, got bool",
    ),
    "arrays as one": (
        lambda: ts.matmul(X, W.t(), epilogue=functions.scaled_rows, arrays=BIAS),
        ProblemError,
        r"arrays must be a tuple of tensors.* got bfloat16 \(72,\) on cpu",
    ),
    "arrays of numbers": (
        lambda: ts.matmul(X, W.t(), epilogue=functions.scaled_rows, arrays=(1.0, 2.0)),
        ProblemError,
        "arrays must be a tuple of tensors",
    ),
    "another name": (lambda: ts.matmul(X, W.t(), biass=BIAS), TypeError, r"matmul\(\) got an unexpected"),
    "a type": (lambda: ts.matmul(X, W.t(), BIAS.float()), ProblemError, "Bias must be bfloat16"),
    "no tensor": (lambda: ts.matmul(X, W.t(), 3), ProblemError, "bias must be a torch.Tensor"),
    "scales": (lambda: ts.matmul(X, W.t(), out_scale=BIAS.float()), ProblemError, r"got shape \(72,\)"),
    "arrays alone": (lambda: ts.matmul(X, W.t(), arrays=(BIAS,)), ProblemError, "give epilogue, too"),
    "arrays of nothing": (lambda: ts.matmul(X, W.t(), BIAS, arrays=(BIAS,)), ProblemError, "give epilogue, too"),
    "both": (lambda: ts.matmul(X, W.t(), activation="relu", epilogue=functions.capped), ProblemError, "one of them"),
    "parameters": (
        lambda: ts.matmul(X, W.t(), epilogue=functions.capped, arrays=(BIAS,)),
        DeclarationError,
        "must take",
    ),
    "a lambda": (
        lambda: ts.matmul(X, W.t(), epilogue=lambda acc, row, column: acc),
        DeclarationError,
        "name in a file",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(launches, name):
    call, error, why = REFUSED[name]
    with pytest.raises(error, match=why):
        call()


def test_what_nobody_tuned_takes_the_schedules_of_the_plain_product():
    kernel = kernel_named("matmul_epilogue")
    table = load_table(load_settings(), kernel=kernel, archs={"sm_90"})
    sizes = {"m": 4096, "n": 4096, "k": 14336, "b_layout": "column"}
    plain = kernel_named("matmul").problem(**sizes)
    own = load_table(load_settings(), kernel=kernel_named("matmul"), archs={"sm_90"}).resolve(plain, "sm_90")
    for more in ({"residual": True}, {"bias": True, "activation": "gelu"}):
        served = table.resolve(kernel.problem(**sizes, **more), "sm_90")
        assert (served.provenance, served.entry.problem) == ("transferred", plain)
        shared = served.schedule.keys() & own.schedule.keys()
        assert {name: served.schedule[name] for name in shared} == dict(own.schedule)
    gated = table.resolve(kernel.problem(**sizes | {"n": 14336, "k": 4096}, gate=True), "sm_90")
    assert gated.entry.problem.n == 28672  # of both halves together
    assert 2 * gated.schedule["TILE_M"] * gated.schedule["TILE_N"] <= 32768 * gated.schedule["num_ctas"]


def test_what_nobody_tuned_goes_to_cublas_where_that_is_expected_to_be_faster():
    """By the times of plain products; torch.compile reads and writes all results once more."""
    kernel = kernel_named("matmul_epilogue")
    table = load_table(load_settings(), kernel=kernel, archs={"sm_90"})
    sizes = {"m": 512, "n": 1024, "k": 4096, "b_layout": "column"}

    def offers(**more):
        return {each.name: each.ratio for each in table.resolve(kernel.problem(**sizes, **more), "sm_90").rivals}

    (fused,) = offers(bias=True).items()
    (compiled,) = offers(bias=True, activation="silu").items()
    assert (fused[0], compiled[0]) == ("cublas_fused", "torch_compile")
    assert fused[1] < compiled[1]
    own = kernel_of(kernel, functions.capped, ())
    table = load_table(load_settings(), kernel=own, archs={"sm_90"})
    assert table.resolve(own.problem(**sizes), "sm_90").rivals == ()


@pytest.mark.parametrize("p", kernel_named("matmul_epilogue").small(), ids=str)
def test_torchs_rivals_are_the_reference_before_it_is_rounded(p):
    kernel = kernel_named("matmul_epilogue")
    given = [each for each in kernel.arrays(p) if each.role == "in"]
    tensors = [
        torch.randn(each.shape, dtype=torch.float32) / math.sqrt(p.k if each.name == "A" else 1) for each in given
    ]
    tensors = [each.abs() if spec.name == "Scale" else each for each, spec in zip(tensors, given, strict=True)]
    arrays = {spec.name: each.double().numpy() for spec, each in zip(given, tensors, strict=True)}
    wanted = kernel.reference(np, p, **arrays)
    for name, call in p.declaration.rivals(p).items():
        if name != "torch_compile":
            tolerance = 0.07 if p.quantised else 1e-3
            np.testing.assert_allclose(call(*tensors).double().numpy(), wanted, rtol=tolerance, atol=tolerance)


EXPERTS, EXPERT_GATES = made(3, 72, 40, seed=5), made(3, 72, 40, seed=6)
ENDS, EXPERT_BIAS = torch.tensor([4, 4, 18], dtype=torch.int32), made(3, 72, seed=7)
EXPERT_BOTH = torch.cat((EXPERT_GATES, EXPERTS), 1)


@pytest.mark.parametrize("gate", [None, EXPERT_GATES.mT, "halves"], ids=["none", "a tensor", "halves"])
def test_groups_have_epilogues_too(launches, gate):
    x, residual = X.flatten(0, 1), RESIDUAL.flatten(0, 1)
    of = [(x[:4], 0), (x[4:], 2)]
    right = torch.cat(
        [
            exact(
                rows.double(),
                *(each[at].double() for each in (EXPERTS, EXPERT_BIAS)),
                "silu",
                EXPERT_GATES[at].double() if g else None,
            )
            for rows, at in of
            for g in [gate is not None]
        ]
    )
    b = EXPERT_BOTH if gate == "halves" else EXPERTS
    found = ts.grouped_matmul(x, b.mT, ENDS, EXPERT_BIAS, "silu", gate, residual)
    torch.testing.assert_close(found.double(), right + residual.double(), **HALF)
    if gate is None:
        found = ts.grouped_matmul(x, b.mT, ENDS, epilogue=functions.halved_by(2.0))
        torch.testing.assert_close(found, ts.grouped_matmul(x, b.mT, ENDS) * 2, **HALF)
        eight = ts.grouped_matmul(x, b.mT, ENDS, out_scale=SCALE)
        assert eight.dtype == torch.float8_e4m3fn


def test_torchs_grouped_product_and_its_operations_are_a_rival():
    kernel = kernel_named("grouped_matmul_epilogue")
    sizes = {"tokens": 18, "experts": 3, "n": 72, "k": 40, "b_layout": "column"}
    p = kernel.problem(**sizes, gate=True, activation="silu", residual=True)
    given = X.flatten(0, 1), EXPERTS.mT, ENDS, EXPERT_GATES.mT, RESIDUAL.flatten(0, 1)
    a, b, _, gate, residual = (each.double().numpy() for each in given)
    wanted = kernel.reference(np, p, A=a, B=b, Offsets=ENDS.numpy(), Gate=gate, Residual=residual)
    np.testing.assert_allclose(kernel.rivals(p)["torch"](*given).double().numpy(), wanted, rtol=0.05, atol=0.05)
    assert not kernel.rivals(kernel.problem(**sizes, bias=True))  # torch's grouped product takes none
