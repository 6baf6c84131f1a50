"""Arrays and arguments of declared kernels: what a launch is given is what the machine code takes."""

from __future__ import annotations

import pickle
import struct
import types

import numpy
import pytest
from sample_kernels import (
    DEVICE,
    KERNELS,
    Accumulate,
    CountUp,
    DoubleEach,
    RowSums,
    ScaleAdd,
    cases_of,
    first,
    run_on_cpu,
)

from tiledsched.build.compiler import compile_schedule
from tiledsched.build.cubin import _info_records, parts, symbol_of
from tiledsched.build.elf import sections
from tiledsched.core.arrays import ArraySpec, is_float, storage_type
from tiledsched.core.cases import input_specs
from tiledsched.core.errors import DeclarationError
from tiledsched.core.launches import steps
from tiledsched.measure.arrays import ProblemArrays, allocate, each, laid_out, launch_of, number, pack
from tiledsched.rivals.methods import as_stored, as_tensors

KERNEL_PARAMETER, KERNEL_PARAMETER_V2 = 0x17, 0x45
"""Attributes of `.nv.info` that describe a parameter, by cuobjdump's names EIATTR_KPARAM_INFO and ..._V2."""


def prepared(kernel, **changes):
    """Arrays, launch and random case of the kernel's first problem."""
    p, s = first(kernel)
    p = p.replace(**changes)
    arrays = ProblemArrays(kernel, numpy, p, cases_of(kernel, p)[:1])
    return arrays, launch_of(kernel, p, s, DEVICE, "f"), arrays.cases[0]


def packed_bytes(arguments) -> list[int]:
    """The size of each argument of a launch: of an array, that of its address."""
    return [8 if isinstance(one, numpy.ndarray) else one.itemsize for one in arguments]


def parameter_bytes(cubin: bytes) -> list[int]:
    """The size of each parameter of the one kernel in a cubin."""
    found = {}
    (info,) = [each for each in sections(cubin) if each.name == f".nv.info.{symbol_of(cubin)}"]
    for attribute, value in _info_records(info.data):
        if attribute == KERNEL_PARAMETER:
            _, ordinal, _, flags = struct.unpack("<IHHI", value)
            found[ordinal] = flags >> 18
        elif attribute == KERNEL_PARAMETER_V2:
            _, ordinal, _, size, _ = struct.unpack("<IHHHH", value)
            found[ordinal] = size
    return [found[ordinal] for ordinal in range(len(found))]


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [
        *((kernel, {}) for kernel in KERNELS),
        (ScaleAdd, {"order": "column"}),
        (ScaleAdd, {"rows": 33, "columns": 77}),
        (ScaleAdd, {"dtype": "bfloat16"}),
        (ScaleAdd, {"rows": 1, "columns": 77, "order": "column", "dtype": "float32"}),
    ],
    ids=str,
)
def test_right_kernels_pass_every_case(kernel, changes):
    p, s = first(kernel)
    p = p.replace(**changes)
    cases = cases_of(kernel, p)
    floats = any(is_float(spec.dtype) for spec in input_specs(kernel, p))
    integers = ["smallest", "largest"] if any(spec.integers for spec in input_specs(kernel, p)) else []
    assert [case.kinds for case in cases] == ["random", *integers, *(["edges", "large", "offset"] if floats else [])]
    for case in cases:
        assert all((one.errors <= one.limit / 3).all() for one in run_on_cpu(kernel, p, s, case))


@pytest.mark.compiler
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_machine_code_takes_what_is_packed(kernel):
    p, s = first(kernel)
    arrays, launch, case = prepared(kernel)
    functions = parts(compile_schedule(kernel, p, s, "sm_90").cubin)
    packed = [packed_bytes(each) for each in arrays.arguments(launch, case)]
    assert len(functions) == len(steps(kernel, p, s, DEVICE))
    assert packed == [parameter_bytes(function) for function in functions]


@pytest.mark.compiler
def test_the_machine_code_takes_what_is_packed_with_wide_indices():
    p, s = first(ScaleAdd)
    p = p.replace(rows=1 << 20, columns=1 << 12)
    launch = launch_of(ScaleAdd, p, s, DEVICE, "f")
    specs = {spec.name: spec for spec in ScaleAdd.arrays(p)}
    huge = numpy.broadcast_to(numpy.zeros((), numpy.float16), specs["X"].shape)
    arguments = pack(numpy, launch.steps[0], specs, dict.fromkeys("XY", huge) | {"Out": huge})
    assert [int(size) for size in arguments[1:5]] == [1 << 20, 1 << 12, 1 << 12, 1]
    cubin = compile_schedule(ScaleAdd, p, s, "sm_90").cubin
    assert packed_bytes(arguments) == parameter_bytes(cubin) == [8] * 15 + [4]


def test_an_array_is_its_address_sizes_and_strides():
    arrays, launch, case = prepared(ScaleAdd, order="column")
    (arguments,) = arrays.arguments(launch, case)
    assert arguments[0] is case.inputs["X"]
    assert arguments[10] is arrays.outputs["Out"]
    assert [int(one) for one in (*arguments[1:5], *arguments[6:10])] == [40, 200, 200, 1, 40, 200, 1, 40]
    assert [type(one) for one in (*arguments[1:5], arguments[15])] == [*[numpy.int32] * 4, numpy.float32]
    assert arguments[15] == 2.5
    assert pickle.loads(pickle.dumps(launch)) == launch
    assert launch.steps[0].arguments[-1] == ("scalar", "float32", 2.5)


def test_a_list_is_a_table_and_its_length():
    arrays, launch, case = prepared(DoubleEach)
    ((xs, count, outs, _),) = arrays.arguments(launch, case)
    assert (count, type(count), xs.dtype) == (3, numpy.int32, numpy.int64)
    assert xs.tolist() == [
        [x.ctypes.data, rows, 48, 48, 1] for x, rows in zip(case.inputs["Xs"], (40, 3, 17), strict=True)
    ]
    assert outs[:, 0].tolist() == [out.ctypes.data for out in arrays.outputs["Outs"]]
    assert xs.flags.c_contiguous  # rows follow one another without padding


def test_steps_share_the_workspace_and_scratch_is_poisoned_or_cleared():
    arrays, launch, case = prepared(RowSums)
    sums, add = arrays.arguments(launch, case)
    (workspace,) = arrays.scratch(launch.scratch).values()
    assert sums[5] is add[0] is workspace
    assert (workspace.shape, [step.grid for step in launch.steps]) == ((8, 300), [(300, 8, 1), (300, 1, 1)])
    arrays.poison(launch.scratch)
    assert numpy.isnan(workspace).all()
    arrays, launch, _ = prepared(CountUp)
    (counter,) = arrays.scratch(launch.scratch).values()
    assert arrays.scratch(tuple(launch.scratch))["Counter"] is counter
    arrays.poison(launch.scratch)
    assert not counter.any()
    assert numpy.isnan(arrays.outputs["Out"]).all()
    counter[0] = 3
    assert arrays.not_zero(launch.scratch) == ["Counter"]
    arrays.clear(launch.scratch)
    assert arrays.not_zero(launch.scratch) == []


def test_what_is_changed_in_place_is_neither_poisoned_nor_an_input():
    arrays, launch, case = prepared(Accumulate)
    arrays.restore(case)
    changed = arrays.outputs["X"]
    assert arrays.arguments(launch, case)[0][0] is changed
    assert changed is not case.inputs["X"]
    arrays.poison(launch.scratch)
    numpy.testing.assert_array_equal(changed, case.inputs["X"])
    kept = arrays.copy_outputs()
    changed += 1
    assert not arrays.same_outputs(kept)
    arrays.restore(case)
    assert arrays.same_outputs(kept)


@pytest.mark.parametrize(
    "dtype", ["float32", "float16", "bfloat16", "float8_e5m2", "bool_", "uint8", "int8", "int32", "uint16"]
)
def test_torch_and_numpy_share_memory_of_every_type(dtype):
    torch = pytest.importorskip("torch")
    spec = ArraySpec(name="X", role="in", dtype=dtype, shapes=((4, 6),))
    stored = numpy.ones((4, 6), storage_type(dtype))
    problem = types.SimpleNamespace(declaration=types.SimpleNamespace(arrays=lambda p: [spec]))
    (tensor,) = as_tensors(torch, problem, {"X": stored})
    assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{dtype.rstrip('_')}", (4, 6))
    tensor[1, 2] = 0
    assert not stored[1, 2]
    back = as_stored(torch, numpy, tensor, spec)
    assert (back.dtype, numpy.shares_memory(back, stored)) == (stored.dtype, True)
    numpy.testing.assert_array_equal(back, stored)


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("int32", 7, numpy.int32(7)),
        ("int64", 1 << 40, numpy.int64(1 << 40)),
        ("bfloat16", 1.0, numpy.uint16(0x3F80)),
        ("float16", 0.1, numpy.float16(0.1)),
    ],
)
def test_numbers_are_of_their_type(dtype, value, expected):
    assert (number(dtype, value), type(number(dtype, value))) == (expected, type(expected))
    with pytest.raises(OverflowError):
        number("int32", 1 << 31)


def test_inputs_lie_as_declared():
    spec = ArraySpec(name="X", role="in", dtype="float16", shapes=((4, 6),), column=True)
    right = allocate(numpy, spec)
    assert (right.strides, laid_out(numpy, right, spec, (4, 6)) is right) == ((2, 8), True)
    rows = numpy.arange(24, dtype=numpy.float16).reshape(4, 6)
    copied = laid_out(numpy, rows, spec, (4, 6))
    assert copied.strides == (2, 8)
    numpy.testing.assert_array_equal(copied, rows)
    for wrong in (rows[:3], rows.astype(numpy.float32)):
        with pytest.raises(DeclarationError, match=r"X is declared as float16 \(4, 6\); .* correct them"):
            laid_out(numpy, wrong, spec, (4, 6))
    listed = ArraySpec(name="Xs", role="out", dtype="bfloat16", shapes=((2,), (3,)), listed=True)
    assert each(allocate(numpy, listed))[1].dtype == numpy.uint16
