"""Arrays as they lie in memory, and torch's tensors of their own types that share it. torch is an argument."""

from __future__ import annotations

from typing import Any

from tiledsched.core import ArraySpec, Problem, input_specs
from tiledsched.core.cases import Arrays as Stored
from tiledsched.core.storage import storage_type, tile_type


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
