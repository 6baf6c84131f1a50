"""The methods of a bench that are rivals of our kernel, the case of a problem that every method computes, how far its outputs are
from float64, and what a few calls tell before methods take turns.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiledsched.checking.errors import NOT_FINITE, Error, error_of
from tiledsched.core.arrays import RELATIVE_ERRORS, ArraySpec, storage_type, tile_type
from tiledsched.core.cases import Arrays as Stored, expected_outputs, input_specs, output_specs, random_inputs
from tiledsched.core.errors import MeasureError, UnsupportedError
from tiledsched.core.modules import SHIPPED_KERNELS
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import SHIPPED
from tiledsched.core.rivals import Arrays, Call, Function, Method, RivalCase, called
from tiledsched.measure.timing import GRAPH_BELOW_US, GRAPH_LAUNCHES, LOOKS, SPIN_MARGIN, TorchStopwatch, host_cost_us

OURS = "tiledsched"
"""The method that always runs our kernel."""
SERVED = "served"
"""The method that runs whatever is served: our kernel, or a rival that was measured to be faster."""
LEFT_OUT = "left_out"
"""The method that runs what would be served if nobody had tuned the suites that hold the problem."""
DETERMINISTIC = "deterministic"
"""The method that runs our kernel with a fixed order of sums, where a kernel has the flag `deterministic`."""
FLASH_4 = "flash_attention_4"
"""FlashAttention-4. torch can be set to use it, so a summary counts it among torch's methods."""
MATMUL = "matmul"
MATMUL_SIZE = 8192
"""Rows and columns of the square matrices whose product is the practical ceiling of arithmetic."""
VARIANT_LOOKS = 5
"""Launches of each variant of a method, of which the fastest counts."""


# Which methods there are


def rivals_module(kernel: KernelClass) -> Any:
    """The file `rivals.py` in the folder that declares a kernel that ships; None for any other kernel."""
    folder, _, file = kernel.__module__.rpartition(".")
    here = kernel.name in SHIPPED and file == "declaration" and folder.startswith(SHIPPED_KERNELS)
    if not here or importlib.util.find_spec(f"{folder}.rivals") is None:
        return None
    return importlib.import_module(f"{folder}.rivals")


def rival_methods(kernel: KernelClass, problems: Sequence[Problem]) -> list[Method]:
    """The rivals of a kernel as methods: those that the kernel's folder lists and that know one of the problems, or any where no
    problem is named; of a kernel that does not ship, the rivals that it names for one of the problems.
    """
    module = rivals_module(kernel)
    if module is not None:
        return [each for each in module.METHODS if not problems or any(map(each.knows, problems))]
    names = dict.fromkeys(name for problem in problems for name in kernel.rivals(problem))
    return [Method(name=name, make=called(partial(_named_rival, name))) for name in names]


def _named_rival(name: str, p: Problem) -> Function:
    rivals = p.declaration.rivals(p)
    if name not in rivals:
        raise UnsupportedError(f"the kernel names no {name} for this problem")
    return rivals[name]


def _matmul(arrays: Arrays) -> Call:
    """One large matrix product through torch: the rate that this GPU's tensor cores reach in practice."""
    torch, first = arrays.torch, arrays.tensors[0]
    dtype = (first[0] if isinstance(first, list) else first).dtype
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").to(dtype) for _ in range(2))
    return partial(torch.matmul, left, right)


CEILING = Method(name=MATMUL, make=_matmul, by_name=True, flops=2.0 * MATMUL_SIZE**3)
"""The product whose rate is the ceiling of the other methods' rates."""


# What they compute


def our_kernel_is_missing(problem: Problem, tensors: Any) -> Any:
    """Stands for our own kernel where nobody handed it over.

    Raises:
        UnsupportedError: in every call.
    """
    raise UnsupportedError("the inputs of this problem are made by our own kernel, which is not here")


def make_case(torch: Any, cupy: Any, problem: Problem, own: Callable[..., Any] = our_kernel_is_missing) -> RivalCase:
    """The case of a problem: its inputs are the same in every run.

    Args:
        torch: the module.
        cupy: the module; NumPy in tests.
        problem: what is computed. The file `rivals.py` of its kernel may make the case in its own way.
        own: computes a problem by our own kernel, given the problem and its tensors: inputs may be outputs of another kernel.
    """
    kernel = problem.declaration
    made: Callable[..., RivalCase] | None = getattr(rivals_module(kernel), "bench_case", None)
    if made is not None:
        case = made(torch, cupy, problem, own)
    else:
        stored = random_inputs(kernel, cupy, cupy.random.default_rng(int(problem.id, 16) % 2**31), problem)
        right = expected_outputs(kernel, cupy, problem, stored, "float64")
        specs = output_specs(kernel, problem)
        case = RivalCase(
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


def case_error(cupy: Any, case: RivalCase, out: Any) -> Error:
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


# What a few calls tell


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A call that ran."""

    call: Call
    """Computes the problem once."""
    look_us: float
    """Rough time of a call on the GPU, in microseconds."""
    host_us: float = 0.0
    """Time until a call returns, in microseconds."""


def try_call(torch: Any, call: Call, flush: Any, looks: int = LOOKS) -> Trial:
    """Time a call roughly, on the host and on the GPU.

    Args:
        torch: the module.
        call: has been called before.
        flush: a tensor larger than the L2 cache.
        looks: launches that are timed; the quickest counts.
    """
    host_us = host_cost_us(torch, call)
    watch = TorchStopwatch(torch, [call], flush, host_us=host_us)
    return Trial(call=call, look_us=min(watch.read(watch.queue(0, paced=True)) for _ in range(looks)), host_us=host_us)


def capture_short(watch: TorchStopwatch, trials: Sequence[Trial]) -> list[int]:
    """Have the stopwatch time short calls as CUDA graphs: back to back, what costs the host more than the GPU would be timed with
    the host's part. Returns the calls in each graph, 0 for what is called without one.
    """
    return [
        GRAPH_LAUNCHES
        if each.look_us < max(GRAPH_BELOW_US, SPIN_MARGIN * each.host_us) and watch.capture(index, GRAPH_LAUNCHES)
        else 0
        for index, each in enumerate(trials)
    ]


# Arrays as they lie in memory, and torch's tensors that share it


def as_tensors(torch: Any, problem: Problem, stored: Stored) -> tuple[Any, ...]:
    """Arrays as they lie in memory, as torch tensors of their own types that share it, in the order declared. Two numbers of
    float4_e2m1fn are an element of uint8."""
    found = []
    for spec in input_specs(problem.declaration, problem):
        value = stored[spec.name]
        found.append(
            [_as_tensor(torch, each, spec) for each in value] if spec.listed else _as_tensor(torch, value, spec)
        )
    return tuple(found)


def _as_tensor(torch: Any, array: Any, spec: ArraySpec) -> Any:
    """DLPack has no unsigned 16-bit bits of a bfloat16: bits travel as signed integers, and are seen as what they are."""
    wanted = getattr(torch, tile_type(spec.dtype).rstrip("_"))
    if array.dtype.kind in "ub":
        array = array.view(f"i{array.dtype.itemsize}" if array.dtype.itemsize > 1 or wanted != torch.uint8 else "u1")
    tensor = torch.from_dlpack(array)
    return tensor if tensor.dtype == wanted else tensor.view(wanted)


def as_stored(torch: Any, xp: Any, tensor: Any, spec: ArraySpec) -> Any:
    """The other way: a tensor as an array of NumPy's or CuPy's that holds its bits, as a spec says that it lies in memory."""
    kind = storage_type(spec.dtype)
    if kind == "bool" or kind.startswith("uint"):  # these may be the bits of a type that NumPy does not have
        tensor = tensor.view(
            getattr(torch, "uint8" if tensor.element_size() == 1 else f"int{8 * tensor.element_size()}")
        )
    array = xp.from_dlpack(tensor)
    return array if str(array.dtype) == kind else array.view(kind)
