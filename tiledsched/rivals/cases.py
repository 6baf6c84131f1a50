"""The case of a problem that every method computes, and how far a method's outputs are from float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tiledsched.checking.errors import NOT_FINITE, Error, error_of
from tiledsched.core.arrays import RELATIVE_ERRORS, ArraySpec
from tiledsched.core.cases import expected_outputs, output_specs, random_inputs
from tiledsched.core.errors import MeasureError, UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Arrays, Call, Case
from tiledsched.measure.torch_arrays import as_tensors
from tiledsched.rivals.trials import try_call

VARIANT_LOOKS = 5
"""Launches of each variant of a method, of which the fastest counts."""


def our_kernel_is_missing(problem: Problem, tensors: Any) -> Any:
    """Stands for our own kernel where nobody handed it over.

    Raises:
        UnsupportedError: in every call.
    """
    raise UnsupportedError("the inputs of this problem are made by our own kernel, which is not here")


def make_case(torch: Any, cupy: Any, problem: Problem, own: Callable[..., Any] = our_kernel_is_missing) -> Case:
    """The case of a problem: its inputs are the same in every run.

    Args:
        torch: the module.
        cupy: the module; NumPy in tests.
        problem: what is computed. The file `rivals.py` of its kernel may make the case in its own way.
        own: computes a problem by our own kernel, given the problem and its tensors: inputs may be outputs of another kernel.
    """
    from tiledsched.rivals.methods import rivals_module

    kernel = problem.declaration
    made: Callable[..., Case] | None = getattr(rivals_module(kernel), "bench_case", None)
    if made is not None:
        case = made(torch, cupy, problem, own)
    else:
        stored = random_inputs(kernel, cupy, cupy.random.default_rng(int(problem.id, 16) % 2**31), problem)
        right = expected_outputs(kernel, cupy, problem, stored, "float64")
        specs = output_specs(kernel, problem)
        case = Case(
            arrays=Arrays(torch=torch, problem=problem, tensors=as_tensors(torch, problem, stored)),
            expected={spec.name: as_list(spec, each) for spec, each in zip(specs, right, strict=True)},
            parts=lambda outputs: {spec.name: as_list(spec, outputs[spec.name]) for spec in specs},
        )

    def look_us(call: Call) -> float:
        call()  # compiles, and tunes what tunes itself
        return try_call(torch, call, torch.empty(1, device="cuda"), VARIANT_LOOKS).look_us

    torch.cuda.synchronize()
    return replace(case, arrays=replace(case.arrays, look_us=look_us))


def as_list(spec: ArraySpec, value: Any) -> list[Any]:
    """The arrays of one output, which may be a list of them."""
    return list(value) if spec.listed else [value]


def outputs_by_name(problem: Problem, out: Any) -> dict[str, Any]:
    """A method's outputs by name.

    Raises:
        MeasureError: the method returns too few outputs, or outputs of other shapes.
    """
    specs = output_specs(problem.declaration, problem)
    outputs = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(specs) == 1 and specs[0].listed:
        outputs = [outputs]
    if len(outputs) < len(specs):
        names = ", ".join(spec.name for spec in specs)
        raise MeasureError(f"it returns {len(outputs)} arrays; the outputs are {names}")
    for spec, made in zip(specs, outputs, strict=False):
        for one, shape in zip(as_list(spec, made), spec.shapes, strict=True):
            if tuple(one.shape) != tuple(shape):
                raise MeasureError(f"its {spec.name} has shape {tuple(one.shape)}, not {tuple(shape)}")
    return {spec.name: made for spec, made in zip(specs, outputs, strict=False)}


def case_error(cupy: Any, case: Case, out: Any) -> Error:
    """How far a method's outputs are from float64; `NOT_FINITE` where an element of any of them is infinite or NaN.

    Raises:
        MeasureError: the method returns too few outputs, or outputs of other shapes.
    """
    torch, problem = case.arrays.torch, case.arrays.problem
    outputs = outputs_by_name(problem, out)
    every = [one for spec in output_specs(problem.declaration, problem) for one in as_list(spec, outputs[spec.name])]
    if not all(bool(torch.isfinite(one).all()) for one in every):
        return NOT_FINITE
    found = {}
    for name, parts in case.parts(outputs).items():
        wide = (cupy.from_dlpack(one.detach().to(torch.float64).contiguous()) for one in parts)
        found[name] = error_of(cupy, zip(wide, case.expected[name], strict=True))
    return Error.of_outputs(found)


def output_dtype(problem: Problem) -> str:
    """The element type by which outputs are judged; where outputs differ, the least accurate one."""
    outputs = output_specs(problem.declaration, problem)
    return max((each.dtype for each in outputs), key=lambda dtype: RELATIVE_ERRORS.get(dtype, 0.0))
