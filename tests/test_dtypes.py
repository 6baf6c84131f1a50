"""Every element type of cuTile in a declaration: its inputs and outputs, in NumPy, in torch and in the interpreter."""

# A declaration is data, and its functions take no self.

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cuda.tile as ct
import ml_dtypes
import numpy as np
import pytest

import tiledsched as ts
from tiledsched.checking.inputs import make_cases
from tiledsched.checking.interpreted import check_schedule
from tiledsched.core.arrays import poison, storage_type, to_float, to_storage
from tiledsched.core.cost import tensor_rate, uses_tensor_cores
from tiledsched.core.errors import DeclarationError, ProblemError
from tiledsched.core.fields import DTYPES
from tiledsched.core.registry import load_kernel

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@ct.kernel
def copy_rows(X, Out, TILE: ct.Constant[int]):
    place = (ct.bid(0), ct.bid(1))
    ct.store(Out, place, ct.load(X, place, (4, TILE)))


class CopyOf(ts.Kernel):
    """A copy of any type."""

    function = copy_rows
    rows, columns = ts.dim(), ts.dim()
    dtype = ts.dtype(*DTYPES)
    X = ts.array("rows columns")
    Out = ts.out("rows columns")
    knobs = {"TILE": [16]}

    def grid(p, s, device):
        return -(-p.rows // 4), -(-p.columns // s["TILE"])

    def reference(xp, X):
        return X


class CopyButOne(CopyOf):
    """A copy that should have one row in another place."""

    def reference(xp, X):
        return xp.concatenate([X[1:], X[:1]])


def test_every_public_type_of_cutile_may_be_declared() -> None:
    numeric = {each for each in dir(ct) if isinstance(getattr(ct, each), ct.DType)} - {
        "float8_e5m3fnu"
    }  # NumPy has none
    assert set(DTYPES) == numeric


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_type_are_checked(dtype) -> None:
    p, s = CopyOf.problem(rows=6, columns=20, dtype=dtype), ts.Schedule({"TILE": 16})
    passed, worst, message = check_schedule(CopyOf, p, s)
    assert (passed, worst) == (True, 0), message
    passed, _, message = check_schedule(CopyButOne, CopyButOne.problem(rows=6, columns=20, dtype=dtype), s)
    assert not passed
    assert "in Out" in message


@pytest.fixture
def on_b200(launches):
    """Launches to come, on a GPU that has every type."""
    from tiledsched.serve import process

    found = replace(process.device_facts(0), arch="sm_100", name="NVIDIA B200")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "device_facts", lambda index: found)
        yield launches


@pytest.mark.parametrize("dtype", DTYPES)
def test_operators_take_every_type(on_b200, dtype) -> None:
    torch = pytest.importorskip("torch")
    copy = ts.op(f"tiledsched_tests::copy_of_{dtype}", CopyOf, dtype=dtype)
    case = next(iter(make_cases(CopyOf, np, np.random.default_rng(0), CopyOf.problem(rows=6, columns=20, dtype=dtype))))
    stored = case.inputs["X"]
    name = storage_type(dtype).replace("uint", "int") if stored.itemsize > 1 else storage_type(dtype)
    x = torch.from_numpy(stored.view(name))
    kind = {"tfloat32": "float32", "float4_e2m1fn": "uint8", "bool_": "bool"}.get(dtype, dtype)
    x = x.view(getattr(torch, kind))
    for _ in range(3):
        out = copy(x)
        assert out.dtype == x.dtype
        assert torch.equal(out.view(torch.uint8), x.view(torch.uint8))


def test_numbers_are_stored_as_their_types_have_them() -> None:
    values = np.array([[-6.2, 0.2, 0.26, 1.0, 2.5, 3.5, 1e30, -0.0]], np.float32)
    packed = to_storage(np, values, "float4_e2m1fn")
    assert packed.shape == (1, 4)
    assert packed[0, 0] == 0x0F  # -6 in the low half, 0 in the high one
    assert to_float(np, packed, "float4_e2m1fn").tolist() == [[-6, 0, 0.5, 1, 2, 4, 6, 0]]
    scales = to_storage(np, np.array([1.0, -3.0, 0.0, 2.0**126, 1e-45]), "float8_e8m0fnu")
    assert to_float(np, scales, "float8_e8m0fnu", "float64").tolist() == [1, 4, 2.0**-127, 2.0**126, 2.0**-127]
    assert scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[1] == 4
    tf32 = to_storage(np, np.array([1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11]), "tfloat32")
    assert tf32.tolist() == [1 + 2.0**-10, 1, 1 + 2.0**-9]
    unset = np.zeros(4, np.uint8)
    poison(unset, "float8_e8m0fnu")
    assert np.isnan(to_float(np, unset, "float8_e8m0fnu")).all()


def test_types_have_the_names_that_people_use() -> None:
    assert ts.dtype("tf32", "bool", "float4_e2m1fn_x2").words == ("tfloat32", "bool_", "float4_e2m1fn")
    assert CopyOf.problem(rows=1, columns=1, dtype="bool") == CopyOf.problem(rows=1, columns=1, dtype="bool_")
    assert ts.array("rows", dtype="bool").dtype == "bool_"
    with pytest.raises(
        DeclarationError, match="two numbers of float4_e2m1fn share a byte along the last axis; declare"
    ):
        type("Columns", (CopyOf,), {"X": ts.array("rows columns", layout="column"), "__module__": __name__})


MXFP8 = load_kernel(f"{EXAMPLES / 'mxfp8_matmul.py'}:Mxfp8Matmul")
NVFP4 = load_kernel(f"{EXAMPLES / 'nvfp4_matmul.py'}:Nvfp4Matmul")
SMALL = {"TILE_M": 64, "TILE_N": 64, "TILE_K": 128}


@pytest.mark.parametrize("kernel", [MXFP8, NVFP4])
def test_block_scaled_products_are_right(kernel) -> None:
    p, s = kernel.problem(m=70, n=66, k=160), ts.Schedule(SMALL)
    passed, worst, message = check_schedule(kernel, p, s)
    assert passed, message
    assert worst < 5e-3

    def reference(xp, A, A_scale, B, B_scale):
        return kernel.reference(
            xp, A, A_scale, B, xp.roll(B_scale, 1, axis=1), **({"alpha": 1} if kernel is NVFP4 else {})
        )

    wrong = type("Wrong", (kernel,), {"reference": reference, "suites": {}, "__module__": __name__})
    assert not check_schedule(wrong, wrong.problem(m=70, n=66, k=160), s)[0]
    with pytest.raises(ProblemError, match=r"numbers share a scale: k % \d+ == 0 is false for k=40"):
        kernel.problem(m=64, n=64, k=40)


@pytest.mark.parametrize("kernel", [MXFP8, pytest.param(NVFP4, marks=pytest.mark.slow)])
def test_check_knows_types_that_its_usual_arch_lacks(kernel) -> None:
    assert all(row.passed for row in ts.check(kernel, schedules=1))


@pytest.mark.parametrize("pairs", ["uint8", "float4_e2m1fn_x2"])
def test_four_bit_numbers_come_as_bytes_or_as_torchs_pairs(on_b200, pairs) -> None:
    torch = pytest.importorskip("torch")
    product = ts.op("tiledsched_tests::nvfp4", NVFP4)
    assert str(product.schema).startswith("(Tensor A, Tensor A_scale, Tensor B, Tensor B_scale, float alpha=1.0)")
    p = NVFP4.problem(m=16, n=24, k=32)
    case = next(iter(make_cases(NVFP4, np, np.random.default_rng(0), p)))
    a, a_scale, b, b_scale = (torch.from_numpy(each) for each in case.inputs.values())
    given = a.view(getattr(torch, pairs)), a_scale.view(torch.float8_e4m3fn), b, b_scale.view(torch.float8_e4m3fn)
    for _ in range(3):
        torch.testing.assert_close(product(*given).double(), torch.from_numpy(case.expected[0]), rtol=2e-2, atol=0.1)
    assert product.plan_for(*given).problem == p
    with pytest.raises(ProblemError, match="A must be float4_e2m1fn, got int8; cast it"):
        product(a.view(torch.int8), *given[1:])


def test_the_model_knows_how_fast_products_of_a_type_are() -> None:
    rates = [tensor_rate(kernel.problem(m=4096, n=4096, k=4096)) for kernel in (MXFP8, NVFP4)]
    assert rates == [2, 4]
    assert uses_tensor_cores(NVFP4.problem(m=4096, n=4096, k=4096))


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", [MXFP8, NVFP4])
def test_block_scaled_products_are_compiled(kernel) -> None:
    from tiledsched.build.compiler import compile_schedule

    made = compile_schedule(kernel, kernel.problem(m=4096, n=4096, k=4096), ts.Schedule(SMALL), "sm_120")
    assert made.facts.spill_bytes == 0
