"""One problem, ready to be computed by every method: inputs as torch tensors, and the right outputs in float64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.bench.methods import DETERMINISTIC, OURS, Arrays, operator_call
from tiledsched.bench.rivals import module_of
from tiledsched.checking.errors import NOT_FINITE, Error, error_of
from tiledsched.core.arrays import RELATIVE_ERRORS, ArraySpec
from tiledsched.core.cases import expected_outputs, output_specs, random_inputs
from tiledsched.core.errors import MeasureError
from tiledsched.core.problem import Problem
from tiledsched.measure.torch_arrays import as_tensors


@dataclass(frozen=True)
class BenchCase(ABC):
    """The inputs of a problem, and what is made of the outputs of methods."""

    arrays: Arrays
    """The inputs that methods are called on."""
    expected: Sequence[Any]
    """The right outputs in float64, or the parts of them that are compared."""
    cupy: Any
    """CuPy; NumPy in tests."""

    @property
    @abstractmethod
    def compared(self) -> str:
        """How much of the output is compared with float64: `all`, or a number of (batch, head) pairs such as `4/64`."""

    @abstractmethod
    def error(self, out: Any) -> Error:
        """How far a method's output is from float64."""

    @abstractmethod
    def explain(self, method: str, *, verify: bool) -> Any:
        """What one of our own methods launched, and why; see `tiledsched.explain`.

        Args:
            method: its name.
            verify: also compile what is launched, to compare its machine code with the measured artifact.
        """

    def details(self, method: str, *, verify: bool, captured: bool = False) -> dict[str, Any]:
        """Fields of the row of one of our own methods: schedule, provenance and measured_program.

        Args:
            method: its name.
            verify: as for :meth:`explain`.
            captured: whether the method was timed in a CUDA graph, where another rival may be served.
        """
        found = self.explain(method, verify=verify)
        rival = found.in_graphs if captured else found.rival
        if method not in (OURS, DETERMINISTIC) and rival:
            return {"schedule": rival, "provenance": "rival", "measured_program": None}
        return {
            "schedule": found.served.schedule.short(),
            "provenance": found.served.provenance,
            "measured_program": found.is_measured_program if verify else None,
        }

    def error_where_finite(self, pairs: Iterable[tuple[Any, Any]]) -> Error:
        """The error of torch tensors against their references, all of them together; `NOT_FINITE` where an element is not."""
        torch, wide = self.arrays.torch, []
        for one, right in pairs:
            if not bool(torch.isfinite(one).all()):
                return NOT_FINITE
            wide.append((self.cupy.from_dlpack(one.to(torch.float64).contiguous()), right))
        return error_of(self.cupy, wide)


@dataclass(frozen=True)
class WholeCase(BenchCase):
    """A case of which every element of every output is compared."""

    specs: Sequence[ArraySpec]
    """The outputs, as the kernel declares them."""

    @property
    def compared(self) -> str:
        """Everything is compared."""
        return "all"

    def error(self, out: Any) -> Error:
        """How far a method's outputs are from float64.

        Raises:
            MeasureError: the method returns too few outputs, or outputs of other shapes.
        """
        outputs = list(out) if isinstance(out, (tuple, list)) else [out]
        if len(self.specs) == 1 and self.specs[0].listed:
            outputs = [outputs]
        if len(outputs) < len(self.specs):
            names = ", ".join(spec.name for spec in self.specs)
            raise MeasureError(f"it returns {len(outputs)} arrays; the outputs are {names}")
        found = {}
        for spec, made, right in zip(self.specs, outputs, self.expected, strict=False):
            pairs = list(zip(made, right, strict=True)) if spec.listed else [(made, right)]
            for one, wanted in pairs:
                if tuple(one.shape) != tuple(wanted.shape):
                    raise MeasureError(f"its {spec.name} has shape {tuple(one.shape)}, not {tuple(wanted.shape)}")
            found[spec.name] = self.error_where_finite(pairs)
        return Error.of_outputs(found)

    def explain(self, method: str, *, verify: bool) -> Any:
        """What the torch operator of the kernel launches, and why."""
        operator, given = operator_call(self.arrays)
        return operator.explain(*given, verify=verify)


def make_case(torch: Any, cupy: Any, problem: Problem) -> BenchCase:
    """The case of a problem: its inputs are the same in every run.

    A kernel's module in `bench.rivals` may make it in its own way.
    """
    kernel = problem.declaration
    own = getattr(module_of(kernel), "make_case", None)
    if own is not None:
        found: BenchCase = own(torch, cupy, problem)
        return found
    stored = random_inputs(kernel, cupy, cupy.random.default_rng(int(problem.id, 16) % 2**31), problem)
    right = expected_outputs(kernel, cupy, problem, stored, "float64")
    arrays = Arrays(torch=torch, problem=problem, tensors=as_tensors(torch, problem, stored))
    torch.cuda.synchronize()
    return WholeCase(arrays, right, cupy, output_specs(kernel, problem))


def output_dtype(problem: Problem) -> str:
    """The element type by which outputs are judged; where outputs differ, the least accurate one."""
    outputs = output_specs(problem.declaration, problem)
    return max((each.dtype for each in outputs), key=lambda dtype: RELATIVE_ERRORS.get(dtype, 0.0))
