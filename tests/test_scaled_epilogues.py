"""Products of 8-bit floats with an epilogue through `ts.scaled_matmul`, and results of 8 bits with a scale for each row, of every
product. Kernels are run by the interpreter where a GPU would run them.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import epilogue_functions as functions

import tiledsched as ts
from tiledsched.core.config import load_settings
from tiledsched.core.errors import DeclarationError, ProblemError, UnsupportedError
from tiledsched.core.registry import kernel_named
from tiledsched.core.space_files import space_for
from tiledsched.kernels.epilogues import ACTIVATIONS
from tiledsched.kernels.own_epilogues import kernel_of
from tiledsched.kernels.scaled_matmul.declaration import BLOCK
from tiledsched.ops.front import operator
from tiledsched.serve.entries import lent_entries, load_table, table_of

pytestmark = pytest.mark.usefixtures("fresh")
EIGHT, HALF = torch.float8_e4m3fn, {"rtol": 1e-2, "atol": 1e-2}


def made(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scales(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


M, N, K = 18, 144, 272
A, W, GATE = made(M, K, dtype=EIGHT), made(N, K, seed=1, dtype=EIGHT), made(N, K, seed=2, dtype=EIGHT)
BIAS, RESIDUAL, SCALE = made(N, seed=3), made(M, N, seed=4), torch.tensor(0.03)
ROWS = 0.01 * 4.0 ** (torch.arange(M) % 3)
"""A scale of each row that is not its neighbours'."""
BOTH = {"halves": torch.cat((GATE, W)), "interleaved": torch.stack((GATE, W), 1).flatten(0, 1)}
KINDS = {
    "tensor": (scales() / 16, scales(1), scales(1, seed=5)),
    "row": (scales(M, 1) / 16, scales(1, N, seed=1), scales(1, N, seed=2)),
    "block": (scales(M, 3) / 16, scales(3, 2, seed=1), scales(3, 2, seed=2)),
}
"""Kind of scales -> those of a, of b and of a gate."""


def exact_sums(a, w, scale_a, scale_b):
    """The scaled product in float64."""
    a, w, scale_a, scale_b = (each.double() for each in (a, w, scale_a, scale_b))
    if scale_b.ndim == 2 and scale_b.shape[0] > 1:
        scale_a = scale_a.repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
        wide = scale_b.t().repeat_interleave(BLOCK, 0)[: w.shape[0]].repeat_interleave(BLOCK, 1)[:, : a.shape[1]]
        return (a * scale_a) @ (w * wide).t()
    return (a @ w.t()) * scale_a * scale_b


def exact(kind, bias=None, activation="none", gate=None, residual=None):
    """The formula, in float64."""
    scale_a, scale_b, scale_gate = KINDS[kind]
    sums = exact_sums(A, W, scale_a, scale_b) + (0 if bias is None else bias.double())
    act = lambda each: ACTIVATIONS[activation].torch(torch.nn.functional, each)  # noqa: E731
    sums = act(sums) if gate is None else act(exact_sums(A, gate, scale_a, scale_gate)) * sums
    return sums + (0 if residual is None else residual.double())


COMPUTED = {
    "residual": {"residual": RESIDUAL},
    "all": {"bias": BIAS, "activation": "gelu", "residual": RESIDUAL},
    "gate": {"gate": GATE, "activation": "silu"},
    "gate and all": {"gate": GATE, "activation": "squared_relu", "bias": BIAS, "residual": RESIDUAL},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COMPUTED)
def test_results_are_those_of_the_formula_rounded_once(launches, name, kind):
    more = dict(COMPUTED[name])
    right = exact(kind, **more)
    if "gate" in more:
        more |= {"gate": GATE.t(), "scale_gate": KINDS[kind][2]}
    with ts.configure(rivals="off"):
        for _ in range(2):
            found = ts.scaled_matmul(A, W.t(), *KINDS[kind][:2], **more)
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found.double(), right, rtol=4.1e-3, atol=2e-5)  # half a bit of bfloat16
        fine = ts.scaled_matmul(A, W.t(), *KINDS[kind][:2], **_typed(more, torch.float32), out_dtype=torch.float32)
        torch.testing.assert_close(fine.double(), right, rtol=1e-4, atol=1e-4)
    assert launches


def _typed(more, dtype):
    """What is added to the sums, in another type."""
    return {name: each.to(dtype) if name in ("bias", "residual") else each for name, each in more.items()}


def test_outputs_have_the_type_of_what_is_added(launches):
    for dtype in (torch.float16, torch.float32):
        for more in ({"bias": BIAS, "activation": "relu"}, {"residual": RESIDUAL}):
            assert ts.scaled_matmul(A, W.t(), *KINDS["row"][:2], **_typed(more, dtype)).dtype == dtype


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("order", BOTH)
def test_a_matrix_and_its_scales_may_hold_both_parts_of_a_gate(launches, order, kind):
    scale_a, scale_b, scale_gate = KINDS[kind]
    if kind == "tensor":
        scale_gate = both = scale_b
    else:
        pair = (scale_gate[0], scale_b[0])
        both = (torch.cat(pair) if order == "halves" else torch.stack(pair, 1).flatten())[None]
    right = ts.scaled_matmul(A, W.t(), scale_a, scale_b, activation="silu", gate=GATE.t(), scale_gate=scale_gate)
    found = ts.scaled_matmul(A, BOTH[order].t(), scale_a, both, activation="silu", gate=order)
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_blocks_of_both_parts_of_a_gate(launches):
    w, gate = made(256, K, seed=1, dtype=EIGHT), made(256, K, seed=2, dtype=EIGHT)
    scale_a, scale_b, scale_gate = KINDS["block"]
    right = ts.scaled_matmul(A, w.t(), scale_a, scale_b, gate=gate.t(), scale_gate=scale_gate)
    both, both_scales = torch.cat((gate, w)), torch.cat((scale_gate, scale_b), 1)
    torch.testing.assert_close(ts.scaled_matmul(A, both.t(), scale_a, both_scales, gate="halves"), right)
    for order, given, of_both in (("interleaved", both, both_scales), ("halves", both[:288], both_scales[:, :3])):
        with pytest.raises(ProblemError, match="columns of both; give the gate as a tensor"):
            ts.scaled_matmul(A, given.t(), scale_a, of_both, gate=order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (1,), (M,), (M, 1)])
def test_results_of_8_bits_are_divided_by_a_scale_or_those_of_their_rows(launches, shape, kind):
    scale = ROWS.reshape(shape) if M in shape else SCALE.reshape(shape)
    far = RESIDUAL * 20
    found = ts.scaled_matmul(A, W.t(), *KINDS[kind][:2], BIAS, residual=far, out_scale=scale, out_dtype=EIGHT)
    right = exact(kind, BIAS, residual=far) / (ROWS[:, None] if M in shape else SCALE).double()
    assert found.dtype == EIGHT
    assert (right.abs() > 448).any()
    torch.testing.assert_close(found.double(), right.clamp(-448, 448), rtol=0.065, atol=0.01)


X, X_SCALES = made(2, 9, 40) / 6, ROWS.reshape(2, 9)
EXPERTS, ENDS = made(3, 72, 40, seed=5), torch.tensor([4, 4, 18], dtype=torch.int32)


@pytest.mark.parametrize("behind", [(), (1,)])
@pytest.mark.parametrize("more", [{}, {"activation": "silu"}, {"SPLIT_K": 2}], ids=str)
def test_rows_of_other_products_have_scales_too(launches, behind, more):
    """Each product of two matrices and of groups divides each row by its scale, whatever its neighbours' are."""
    knobs = {name: each for name, each in more.items() if name.isupper()}
    words = {name: each for name, each in more.items() if not name.isupper()}
    act = torch.nn.functional.silu if words else lambda x: x
    with ts.configure(rivals="off", **knobs):
        eight = ts.matmul(X, EXPERTS[0].t(), **words, out_scale=X_SCALES.reshape(2, 9, *behind))
    right = act(X.double() @ EXPERTS[0].double().t()) / X_SCALES[..., None]
    torch.testing.assert_close(eight.double(), right.clamp(-448, 448), rtol=0.065, atol=0.01)
    if not knobs:
        x, of_rows = X.flatten(0, 1), ROWS.reshape(18, *behind)
        eight = ts.grouped_matmul(x, EXPERTS.mT, ENDS, **words, out_scale=of_rows)
        sums = torch.cat([x[:4].double() @ EXPERTS[0].double().t(), x[4:].double() @ EXPERTS[2].double().t()])
        torch.testing.assert_close(eight.double(), (act(sums) / ROWS[:, None]).clamp(-448, 448), rtol=0.065, atol=0.01)


def test_functions_of_an_author(launches):
    sums = exact_sums(A, W, *KINDS["row"][:2])
    found = ts.scaled_matmul(A, W.t(), *KINDS["row"][:2], epilogue=functions.capped)
    right = sums.clamp(-1, 1)
    right[0] = torch.arange(N)
    torch.testing.assert_close(found.double(), right, **HALF)
    rows, columns = torch.arange(float(M)), made(N, dtype=torch.float16)
    given = {"epilogue": functions.scaled_rows, "arrays": (rows, columns), "residual": RESIDUAL}
    found = ts.scaled_matmul(A, W.t(), *KINDS["block"][:2], **given)
    right = exact_sums(A, W, *KINDS["block"][:2]) * rows[:, None] * columns.double() + RESIDUAL.double()
    torch.testing.assert_close(found.double(), right, **HALF)
    gated = {"gate": GATE.t(), "scale_gate": KINDS["row"][2]}
    found = ts.scaled_matmul(A, W.t(), *KINDS["row"][:2], **gated, **given)
    gates = exact_sums(A, GATE, KINDS["row"][0], KINDS["row"][2]) * rows[:, None] * columns.double()
    torch.testing.assert_close(found.double(), gates * sums + RESIDUAL.double(), **HALF)


ROW, OF_BOTH = KINDS["row"], scales(1, 2 * N)
TRACED = {
    "gate": lambda a, s: ts.scaled_matmul(a, BOTH["halves"].t(), s, OF_BOTH, activation="silu", gate="halves"),
    "all": lambda a, s: ts.scaled_matmul(a, W.t(), s, ROW[1], BIAS, activation="gelu"),
    "rows of 8 bits": lambda a, s: ts.scaled_matmul(a, W.t(), s, ROW[1], out_scale=s).float(),
}


@pytest.mark.parametrize("name", TRACED)
def test_one_graph_under_torch_compile_and_any_number_of_rows(launches, name):
    operator.cache_clear()
    compiled = torch.compile(TRACED[name], fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (5, 9, 17):
        given = A[:rows].clone(), scales(rows, 1)
        torch.testing.assert_close(compiled(*given), TRACED[name](*given))


# Sizes that torch.compile does not know beside those it does, which come to the same.
TWICE = {
    "rows and columns": lambda a, w: ts.scaled_matmul(
        torch.cat((a, a)), torch.cat((w, w)).t(), torch.ones(2 * M, 1), torch.ones(1, 2 * N)
    ),
    "both matrices": lambda a, w: ts.scaled_matmul(
        a, torch.cat((w, w)).t(), torch.ones(M, 1), torch.ones(1, 2 * N), activation="silu", gate="halves"
    ),
    "rows of the result": lambda a, w: ts.matmul(
        torch.cat((a, a)).bfloat16(), w.bfloat16().t(), out_scale=torch.ones(2 * M, 1)
    ).float(),
}


@pytest.mark.parametrize("name", TWICE)
def test_sizes_that_torch_compile_does_not_know_equal_those_it_does(launches, name):
    compiled = torch.compile(TWICE[name], fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(A, W), TWICE[name](A, W))


def test_empty_products_are_finished(launches):
    scale_a, scale_b, scale_gate = KINDS["row"]
    more = {"activation": "silu", "gate": GATE.t(), "scale_gate": scale_gate}
    assert ts.scaled_matmul(A[:0], W.t(), scale_a[:0], scale_b, **more).shape == (0, N)
    empty = ts.scaled_matmul(A[:0], W.t(), scale_a[:0], scale_b, out_scale=scale_a[:0])
    assert (empty.shape, empty.dtype) == ((0, N), EIGHT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nothing = ts.scaled_matmul(A[:, :0], W[:, :0].t(), scale_a, scale_b, BIAS, activation="relu")
    torch.testing.assert_close(nothing, BIAS.relu().expand(M, N))


def test_a_row_has_the_same_bits_in_every_batch(launches):
    scale_a, scale_b, scale_gate = KINDS["row"]
    with ts.batch_invariant():
        for more in ({"bias": BIAS, "activation": "gelu"}, {"gate": GATE.t(), "scale_gate": scale_gate}):
            every = ts.scaled_matmul(A, W.t(), scale_a, scale_b, **more)
            for rows in (1, 5):
                found = ts.scaled_matmul(A[:rows], W.t(), scale_a[:rows], scale_b, **more)
                assert torch.equal(found, every[:rows])


REFUSED = {
    "a gate without scales": (lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], gate=GATE.t()), "give both or neither"),
    "scales without a gate": (lambda: ts.scaled_matmul(A, W.t(), *ROW), "scale_a and scale_b|bias"),
    "scales of no gate": (
        lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], scale_gate=ROW[2]),
        "belongs to a gate that is a tensor",
    ),
    "scales of a word": (
        lambda: ts.scaled_matmul(A, BOTH["halves"].t(), ROW[0], scales(2 * N), gate="halves", scale_gate=ROW[2]),
        "belongs to a gate that is a tensor",
    ),
    "scales of rows for a gate": (
        lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], gate=GATE.t(), scale_gate=ROW[0]),
        r"scale_gate must have the shape of scale_b, \(1, 144\), got \(18, 1\)",
    ),
    "an activation": (lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], activation="gleu"), "did you mean .gelu"),
    "8 bits without a scale": (
        lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], out_dtype=EIGHT),
        "got out_dtype = torch.float8_e4m3fn. Give out_scale, too",
    ),
    "a scale without 8 bits": (
        lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], out_dtype=torch.float16, out_scale=SCALE),
        "got out_dtype = torch.float16. Leave it out",
    ),
    "a bias of another type": (
        lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], BIAS.half(), out_scale=SCALE),
        "Bias must be bfloat16, got float16; cast it",
    ),
    "a residual of another type": (
        lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], BIAS, residual=RESIDUAL.half()),
        "Residual must be bfloat16, got float16; cast it",
    ),
    "scales of columns": (
        lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], out_scale=ROW[1]),
        r"one number, or one for each row of the result, \(18, 1\); got shape \(1, 144\)",
    ),
    "scales of rows exchanged": (
        lambda: ts.matmul(X, EXPERTS[0].t(), out_scale=X_SCALES.t()),
        r"one for each row of the result, \(2, 9, 1\); got shape \(9, 2\)",
    ),
    "scales of flat rows": (
        lambda: ts.matmul(X, EXPERTS[0].t(), out_scale=ROWS),
        r"one for each row of the result, \(2, 9, 1\); got shape \(18,\)",
    ),
    "scales of groups": (
        lambda: ts.grouped_matmul(X.flatten(0, 1), EXPERTS.mT, ENDS, out_scale=torch.ones(3)),
        r"one for each row of the result, \(18, 1\); got shape \(3,\)",
    ),
    "scales of bfloat16": (
        lambda: ts.matmul(X, EXPERTS[0].t(), out_scale=X_SCALES.bfloat16()),
        "Scale must be float32, got bfloat16",
    ),
    "a number": (
        lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], out_scale=0.03),
        "out_scale must be a torch.Tensor, got float",
    ),
    "arrays alone": (lambda: ts.scaled_matmul(A, W.t(), *ROW[:2], arrays=(BIAS,)), "give epilogue, too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(launches, name):
    call, why = REFUSED[name]
    with pytest.raises(ProblemError, match=why):
        call()


def test_a_lambda_and_gradients_are_refused_as_elsewhere(launches):
    with pytest.raises(DeclarationError, match="name in a file"):
        ts.scaled_matmul(A, W.t(), *ROW[:2], epilogue=lambda acc, row, column: acc)
    with pytest.raises(UnsupportedError):
        ts.scaled_matmul(A, W.t(), *ROW[:2], residual=RESIDUAL.clone().requires_grad_()).sum().backward()


def test_scales_of_rows_are_for_8_bits():
    with pytest.raises(ProblemError, match="only results of 8 bits"):
        kernel_named("scaled_matmul_epilogue").problem(m=4, n=16, k=16, out_scales="row")


def test_what_nobody_tuned_takes_the_schedules_of_the_plain_product():
    kernel, product = kernel_named("scaled_matmul_epilogue"), kernel_named("scaled_matmul")
    table = table_of(lent_entries(load_settings(), {"sm_90"}, kernel), load_settings(), kernel=kernel)
    sizes = {"m": 16, "n": 4096, "k": 14336, "fast_accum": True}
    plain = product.problem(**sizes)
    own = load_table(load_settings(), kernel=product, archs={"sm_90"}).resolve(plain, "sm_90")
    for more in ({"residual": True}, {"activation": "gelu"}, {"out_dtype": "float8_e4m3fn", "out_scales": "row"}):
        served = table.resolve(kernel.problem(**sizes, **more), "sm_90")
        assert (served.provenance, served.entry.problem) == ("transferred", own.entry.problem)
        assert served.schedule == own.schedule
    for scales in ("row", "block"):
        p = kernel.problem(m=16, n=14336, k=4096, scales=scales, fast_accum=scales == "row", gate=True)
        gated = table.resolve(p, "sm_90")
        assert gated.provenance == "transferred"
        assert (gated.schedule["TILE_M"], gated.schedule["TILE_N"]) == (16, 128)


@pytest.mark.parametrize("m", [16, 512, 4096])
@pytest.mark.parametrize("scales", KINDS)
@pytest.mark.parametrize("arch", ["sm_90", "sm_121"])
def test_gated_products_have_half_as_many_columns_in_a_tile(arch, scales, m):
    """Whatever the sums are: the schedules of plain products of all columns leave none out that fits."""
    kernel = kernel_named("scaled_matmul_epilogue")
    table = load_table(load_settings(), kernel=kernel, archs={arch})
    for fast in (False, True) if scales != "block" else (False,):
        p = kernel.problem(m=m, n=14336, k=4096, scales=scales, fast_accum=fast, gate=True)
        s = table.resolve(p, arch).schedule
        assert space_for(arch, kernel).unworkable(s, p) == []
        assert m < 512 or s["TILE_M"] >= 64


def test_what_nobody_tuned_goes_to_torch_where_that_is_expected_to_be_faster():
    """By the times of the plain products in the table, and those of one more pass over the results."""
    kernel = kernel_named("scaled_matmul_epilogue")
    table = load_table(load_settings(), kernel=kernel, archs={"sm_90"})
    sizes = {"m": 4096, "n": 4096, "k": 12288}
    (slow,) = table.resolve(kernel.problem(**sizes, activation="silu", gate=True), "sm_90").rivals
    assert (slow.name, slow.ratio < 0.75) == ("torch_compile", True)
    assert table.resolve(kernel.problem(**sizes, residual=True, fast_accum=True), "sm_90").rivals == ()
    own = kernel_of(kernel, functions.capped, ())
    table = load_table(load_settings(), kernel=own, archs={"sm_90"})
    assert table.resolve(own.problem(**sizes), "sm_90").rivals == ()


@pytest.mark.parametrize("p", kernel_named("scaled_matmul_epilogue").small(), ids=str)
def test_torchs_rival_is_the_reference_before_it_is_rounded(p, monkeypatch):
    """With a product that a CPU has in the place of torch's, which takes its arguments."""
    kernel = kernel_named("scaled_matmul_epilogue")
    if p.dtype != "float8_e4m3fn" or (p.blocks and p.k % 512):
        assert not kernel.rivals(p)  # nor has torch the plain product
        return

    def scaled_mm(a, b, scale_a, scale_b, bias=None, **words):
        return ((a.double() @ b.double()) * scale_a * scale_b).to(words["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    rng = np.random.default_rng(0)
    own = kernel.inputs(np, rng, p)
    given = [each for each in kernel.arrays(p) if each.role == "in"]
    drawn = [torch.from_numpy(np.asarray(own.get(each.name, rng.standard_normal(each.shape)))) for each in given]
    tensors = [each.to(getattr(torch, spec.dtype)) for spec, each in zip(given, drawn, strict=True)]
    wanted = kernel.reference(
        np, p, **{spec.name: each.double().numpy() for spec, each in zip(given, tensors, strict=True)}
    )
    found = kernel.rivals(p)["torch"](*tensors).double().numpy()
    tolerance = 0.07 if p.quantised else 0.03
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale_b": torch.ones(512, 1)}, "so does scale_b: one number"),
        ({"scale_b": torch.ones(3, 2)}, "so does scale_b: one number"),
        ({"activation": ["silu"]}, "known are"),
        ({"out_dtype": float}, "out_dtype must be"),
        ({"a": torch.zeros(1, 17, 272).to(torch.float8_e4m3fn)}, "must have 2 axes"),
    ],
)
def test_hasty_calls_are_refused_in_words(launches, given, message):
    a, b = torch.zeros(17, 272).to(torch.float8_e4m3fn), torch.zeros(512, 272).to(torch.float8_e4m3fn).t()
    words = {"a": a, "b": b, "scale_a": torch.ones(1), "scale_b": torch.ones(1), "gate": "halves"} | given
    with pytest.raises(ProblemError, match=message):
        ts.scaled_matmul(**words)
