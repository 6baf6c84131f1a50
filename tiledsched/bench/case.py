"""One problem of any kernel, ready to be computed by others: inputs as torch tensors, and outputs in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tiledsched.bench.errors import Error
from tiledsched.bench.methods import SERVED, Arrays, operator_call
from tiledsched.bench.rivals import module_of
from tiledsched.core.arrays import RELATIVE_ERRORS, ArraySpec
from tiledsched.core.cases import expected_outputs, output_specs, random_inputs
from tiledsched.core.errors import MeasureError
from tiledsched.core.problem import Problem
from tiledsched.measure.torch_arrays import as_tensors


class Case(Protocol):
    """What methods are called on, and what is made of their outputs."""

    @property
    def arrays(self) -> Arrays:
        """Inputs."""
        ...

    @property
    def compared(self) -> str:
        """How much of the output is compared."""
        ...

    def error(self, out: Any) -> Error:
        """How far a method's output is from float64."""
        ...

    def details(self, method: str, *, verify: bool, captured: bool = False) -> dict[str, Any]:
        """Fields of the row of our kernel or of what is served, in a CUDA graph where it was `captured`: schedule, provenance,
        measured_program."""
        ...


@dataclass(frozen=True)
class WholeCase:
    """Every element of every output is compared."""

    arrays: Arrays
    """What methods are called on."""
    specs: Sequence[ArraySpec]
    """The outputs."""
    expected: Sequence[Any]
    """Of each, float64."""
    cupy: Any
    """CuPy, or what stands for it."""

    @property
    def compared(self) -> str:
        """All of it."""
        return "all"

    def error(self, out: Any) -> Error:
        """How far a method's outputs are from float64.

        Raises:
            MeasureError: there are not as many, or they have other shapes.
        """
        outputs = list(out) if isinstance(out, (tuple, list)) else [out]
        if len(self.specs) == 1 and self.specs[0].listed:
            outputs = [outputs]
        if len(outputs) < len(self.specs):
            raise MeasureError(
                f"it returns {len(outputs)} arrays; the outputs are {', '.join(s.name for s in self.specs)}"
            )
        found = [
            self._error(spec, each, right)
            for spec, each, right in zip(self.specs, outputs, self.expected, strict=False)
        ]
        return Error(max_abs=max(each.max_abs for each in found), relative=max(each.relative for each in found))

    def _error(self, spec: ArraySpec, out: Any, right: Any) -> Error:
        torch, xp = self.arrays.torch, self.cupy
        largest, squares, norm = 0.0, 0.0, 0.0
        for one, wanted in zip(out, right, strict=True) if spec.listed else ((out, right),):
            if tuple(one.shape) != tuple(wanted.shape):
                raise MeasureError(f"its {spec.name} has shape {tuple(one.shape)}, not {tuple(wanted.shape)}")
            wide = one.to(torch.float64)
            if not bool(torch.isfinite(wide).all()):
                return Error(max_abs=math.inf, relative=math.inf)
            difference = xp.from_dlpack(wide) - wanted
            largest = max(largest, float(xp.abs(difference).max()) if difference.size else 0.0)
            squares += float((difference * difference).sum())
            norm += float((wanted * wanted).sum())
        return Error(max_abs=largest, relative=math.sqrt(squares / norm) if norm else math.sqrt(squares))

    def details(self, method: str, *, verify: bool, captured: bool = False) -> dict[str, Any]:
        """What the operator launches, and why; of what is served, the rival in its place."""
        operator, given = operator_call(self.arrays)
        found = operator.explain(*given, verify=verify)
        rival = found.in_graphs if captured else found.rival
        if method == SERVED and rival:
            return {"schedule": rival, "provenance": "rival", "measured_program": None}
        return {
            "schedule": found.served.schedule.short(),
            "provenance": found.served.provenance,
            "measured_program": found.is_measured_program if verify else None,
        }


def make_case(torch: Any, cupy: Any, problem: Problem) -> Case:
    """The inputs of a problem, the same in every run, and its outputs in float64.

    A kernel's own module of rivals may have a better way.
    """
    kernel = problem.declaration
    own = getattr(module_of(kernel), "make_case", None)
    if own is not None:
        found: Case = own(torch, cupy, problem)
        return found
    stored = random_inputs(kernel, cupy, cupy.random.default_rng(int(problem.id, 16) % 2**31), problem)
    right = expected_outputs(kernel, cupy, problem, stored, "float64")
    arrays = Arrays(torch=torch, problem=problem, tensors=as_tensors(torch, problem, stored))
    torch.cuda.synchronize()
    return WholeCase(arrays, output_specs(kernel, problem), right, cupy)


def output_dtype(problem: Problem) -> str:
    """The type by which outputs are judged: of several the one that may be least right."""
    outputs = output_specs(problem.declaration, problem)
    return max((each.dtype for each in outputs), key=lambda dtype: RELATIVE_ERRORS.get(dtype, 0.0))
