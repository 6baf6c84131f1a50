"""What the measuring process launches: the launches of one candidate as plain data, without a kernel and without a compiler, and
the arrays of one problem, of which the arguments are made. It works for NumPy and CuPy.

Arguments follow version 2 of cuTile's calling convention, as its launcher lays them out (cuda-tile 1.7, `cext/tile_kernel.cpp`
of NVIDIA/cutile-python, and `_ir/type.py` and `_ir2bytecode.py` of the package). An array is its address, every size and
every stride in elements, as int32, or int64 where it is indexed with 64 bits. A number is a number of its type. A list of
arrays is the address of a table in device memory and the int32 number of its rows; a row holds an array's address, sizes
and strides as int64, one after the other without padding: the tile with which a kernel reads a row is a power of two wide,
and what it reads of the next row is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from tiledsched.core.arrays import (
    ArraySpec,
    Tolerance,
    is_float,
    poison,
    same_bits,
    storage_type,
    strides_of,
    to_storage,
)
from tiledsched.core.cases import Arrays, Case, output_specs
from tiledsched.core.errors import DeclarationError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule

Argument = tuple[str, str, Any]
"""("array", name, wide), ("list", name, wide) or ("scalar", dtype, value). `wide`: indexed with 64 bits. Constants are in the
machine code, so that no launch passes them.
"""


@dataclass(frozen=True, kw_only=True)
class LaunchStep:
    """One of the functions that a candidate launches in a row."""

    grid: tuple[int, int, int]
    """Blocks."""
    arguments: tuple[Argument, ...]
    """In the order of the function's parameters."""
    dependent: bool = False
    """Whether it may start before the one ahead of it has ended: it waits itself (:mod:`tiledsched.core.chains`)."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All that is needed to run one artifact on the current problem."""

    fingerprint: str
    """Key of the loaded machine code."""
    steps: tuple[LaunchStep, ...]
    """What is launched, in order; the machine code has a function for each."""
    scratch: tuple[ArraySpec, ...]
    """Arrays it takes besides those of the problem."""
    tolerance: Tolerance
    """How close to the reference its result must be."""
    tile: tuple[int, int]
    """Rows and columns of the tiles that errors are taken over."""


def launch_of(kernel: KernelClass, p: Problem, s: Schedule, device: Any, fingerprint: str) -> Launch:
    """What launching a schedule takes.

    Args:
        kernel: declares it.
        p: the problem.
        s: the schedule.
        device: anything with `sm_count` and `arch`, for the grid.
        fingerprint: of its machine code.

    Raises:
        DeclarationError: the declaration gives no launch.
    """
    from tiledsched.core.launches import scratch, steps

    found = steps(kernel, p, s, device)
    return Launch(
        fingerprint=fingerprint,
        steps=tuple(
            LaunchStep(
                grid=step.grid,
                arguments=tuple(
                    ("scalar", each.dtype, each.value) if each.kind == "scalar" else (each.kind, each.name, each.wide)
                    for each in step.arguments
                    if each.kind != "constant"
                ),
                dependent=bool(s.get("pdl")) and place > 0,
            )
            for place, step in enumerate(found)
        ),
        scratch=scratch(kernel, p, s, found),
        tolerance=kernel.tolerance(p, s),
        tile=kernel.check_tile(p, s),
    )


ALLOCATED = 512
"""Arrays begin at multiples of so many bytes, as CuPy's and torch's do."""
WORDS_AT_ONCE = 1 << 24
"""Words of 8 bytes of which a digest is taken at a time: it bounds the memory needed."""
MIX = tuple(map(numpy.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))
"""Multipliers of the generator SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
Packed = list[tuple[Any, ...]]
"""The arguments of each step."""


class ProblemArrays:
    """Cases to check on, and one set of outputs, scratch arrays and arrays changed in place, which all launches share.

    Args:
        kernel: declares the arrays.
        xp: numpy or cupy.
        p: the problem.
        cases: the random one, whose inputs serve for timing, and the others.
    """

    def __init__(self, kernel: KernelClass, xp: Any, p: Problem, cases: Sequence[Case]) -> None:
        self.kernel, self.problem, self.xp = kernel, p, xp
        self.specs = {spec.name: spec for spec in kernel.arrays(p)}
        self.cases = tuple(replace(case, inputs=self._laid_out(case.inputs)) for case in cases)
        self.output_specs = output_specs(kernel, p)
        self.outputs: Arrays = {spec.name: allocate(xp, spec) for spec in self.output_specs}
        self.changed = [spec for spec in self.output_specs if spec.role == "inout"]
        """Arrays that a launch changes in place."""
        self._scratch: dict[tuple[ArraySpec, ...], Arrays] = {}
        self._shared = xp.zeros(0, dtype=numpy.uint8)

    def scratch(self, wanted: tuple[ArraySpec, ...]) -> Arrays:
        """The scratch arrays of a launch. Launches follow one another, so that all share the memory of the largest, but for
        arrays that must hold zeros."""
        size, place = scratch_bytes(wanted), 0
        if size > self._shared.nbytes:
            self._scratch.clear()
            self._shared = None  # given back first
            self._shared = self.xp.zeros(size, dtype=numpy.uint8)

        def share(shape: tuple[int, ...], dtype: str) -> Any:
            nonlocal place
            count = math.prod(shape) * numpy.dtype(dtype).itemsize
            place += aligned(count)
            return self._shared[place - aligned(count) :][:count].view(dtype).reshape(shape)

        if wanted not in self._scratch:
            self._scratch[wanted] = {
                spec.name: allocate(self.xp, spec, None if spec.zeroed else share) for spec in wanted
            }
        return self._scratch[wanted]

    def restore(self, case: Case) -> None:
        """Give the arrays that launches change their contents in `case`."""
        for spec in self.changed:
            for array, pristine in zip(each(self.outputs[spec.name]), each(case.inputs[spec.name]), strict=True):
                array[...] = pristine

    def poison(self, wanted: tuple[ArraySpec, ...]) -> None:
        """Fill what a launch is to write, and scratch that need not be zero, with NaN or the largest integer."""
        for spec in self.output_specs:
            for array in each(self.outputs[spec.name]) if spec.role == "out" else ():
                poison(array, spec.dtype)
        for spec in wanted:
            for array in each(self.scratch(wanted)[spec.name]) if not spec.zeroed else ():
                poison(array, spec.dtype)

    def clear(self, wanted: tuple[ArraySpec, ...]) -> None:
        """Zero the scratch that must be zero: another candidate may not have left it so."""
        for spec in wanted:
            for array in each(self.scratch(wanted)[spec.name]) if spec.zeroed else ():
                array[...] = 0

    def not_zero(self, wanted: tuple[ArraySpec, ...]) -> list[str]:
        """The scratch arrays that must be zero, and are not."""
        return [
            spec.name
            for spec in wanted
            if spec.zeroed and any(bool(array.any()) for array in each(self.scratch(wanted)[spec.name]))
        ]

    def copy_outputs(self) -> Arrays:
        """The outputs as they are now."""
        return {name: [one.copy() for one in each(value)] for name, value in self.outputs.items()}

    def same_outputs(self, kept: Arrays) -> bool:
        """Whether the outputs hold the bits that :meth:`copy_outputs` kept."""
        return all(
            same_bits(one, other)
            for name, value in self.outputs.items()
            for one, other in zip(each(value), kept[name], strict=True)
        )

    def digest(self, of: Arrays) -> int:
        """A number of 64 bits that arrays with other bits have by chance only. It is computed where the arrays are."""
        place, found = 0, 0
        for name in sorted(of):
            for array in each(of[name]):
                found = (found + digest(self.xp, array, place)) % (1 << 64)
                place += array.nbytes // 8 + 1
        return found

    def arguments(self, launch: Launch, case: Case) -> Packed:
        """The arguments of every step of a launch on the inputs of `case`."""
        specs = {**self.specs, **{spec.name: spec for spec in launch.scratch}}
        arrays = {**case.inputs, **self.outputs, **self.scratch(launch.scratch)}
        return [pack(self.xp, step, specs, arrays) for step in launch.steps]

    def _laid_out(self, inputs: Arrays) -> Arrays:
        found: Arrays = {}
        for name, value in inputs.items():
            made = [
                laid_out(self.xp, array, self.specs[name], shape)
                for array, shape in zip(each(value), self.specs[name].shapes, strict=True)
            ]
            found[name] = made if self.specs[name].listed else made[0]
        return found


def first_rows(xp: Any, arrays: Arrays, specs: Sequence[ArraySpec], own: Mapping[str, Any] | None = None) -> Arrays:
    """The parts of a larger problem's arrays that a smaller one has: the first elements along each axis.

    Args:
        xp: numpy or cupy.
        arrays: of the larger problem, by name.
        specs: the smaller problem's arrays.
        own: inputs that the kernel makes for the smaller problem. No integers, such as the ends of groups, are larger than there.
    """
    found: Arrays = {}
    for spec in specs:
        pairs = zip(each(arrays[spec.name]), spec.shapes, strict=True)
        made = [
            array[tuple(slice(min(pair)) for pair in zip(array.shape, shape, strict=True))] for array, shape in pairs
        ]
        if own and spec.name in own and not is_float(spec.dtype):
            made = [xp.minimum(array, xp.asarray(own[spec.name]).max()) for array in made]
        found[spec.name] = made if spec.listed else made[0]
    return found


def digest(xp: Any, array: Any, place: int) -> int:
    """The sum over an array's words of 8 bytes, in the order of its elements, of a number that each word and its place, counted
    from `place`, make. Words that differ in a bit make numbers that have nothing in common.
    """
    words = xp.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    if len(words) % 8:
        words = xp.concatenate([words, xp.zeros(8 - len(words) % 8, dtype=numpy.uint8)])
    words, total = words.view(numpy.uint64), 0
    for start in range(0, len(words), WORDS_AT_ONCE):
        some = words[start : start + WORDS_AT_ONCE]
        first = place + start + 1
        mixed = (xp.arange(first, first + len(some), dtype=numpy.uint64) * MIX[0]) ^ some
        mixed = (mixed ^ (mixed >> numpy.uint64(30))) * MIX[1]
        mixed = (mixed ^ (mixed >> numpy.uint64(27))) * MIX[2]
        total += int((mixed ^ (mixed >> numpy.uint64(31))).sum(dtype=numpy.uint64))
    return total % (1 << 64)


def each(value: Any) -> list[Any]:
    """The arrays of a list, or the only one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]


def aligned(size: int) -> int:
    """A number of bytes, rounded up to where CuPy and torch begin arrays."""
    return -(-size // ALLOCATED) * ALLOCATED


def scratch_bytes(wanted: Sequence[ArraySpec]) -> int:
    """The bytes of scratch arrays that launches share."""
    return sum(
        aligned(math.prod(shape) * numpy.dtype(storage_type(spec.dtype)).itemsize)
        for spec in wanted
        if not spec.zeroed
        for shape in spec.shapes
    )


def allocate(xp: Any, spec: ArraySpec, make: Callable[[tuple[int, ...], str], Any] | None = None) -> Any:
    """Zeros as a spec wants them, or what `make` makes of a shape and an element type: an array, or a list."""
    made = []
    for shape in spec.shapes:
        swapped = spec.column and len(shape) > 1
        array = (make or xp.zeros)((*shape[:-2], shape[-1], shape[-2]) if swapped else shape, storage_type(spec.dtype))
        made.append(array.swapaxes(-1, -2) if swapped else array)
    return made if spec.listed else made[0]


def laid_out(xp: Any, array: Any, spec: ArraySpec, shape: tuple[int, ...]) -> Any:
    """An input laid out in memory as the launch expects it: itself, or a copy.

    Raises:
        DeclarationError: it is not what the declaration says.
    """
    if tuple(array.shape) != shape or str(array.dtype) != storage_type(spec.dtype):
        raise DeclarationError(
            f"{spec.name} is declared as {spec.dtype} {shape}; `inputs` or `adversarial` made "
            f"{array.dtype} {tuple(array.shape)}, correct them"
        )
    wanted = strides_of(shape, spec.column)
    if all(
        stride == array.itemsize * want
        for size, stride, want in zip(shape, array.strides, wanted, strict=True)
        if size > 1
    ):
        return array
    copy = allocate(xp, replace(spec, shapes=(shape,), listed=False))
    copy[...] = array
    return copy


def pack(xp: Any, step: LaunchStep, specs: Mapping[str, ArraySpec], arrays: Arrays) -> tuple[Any, ...]:
    """The arguments of one function; see the top of this file.

    Args:
        xp: numpy or cupy.
        step: names them.
        specs: of every array.
        arrays: by name, as they lie in memory.
    """
    packed: list[Any] = []
    for kind, name, value in step.arguments:
        if kind == "array":
            packed += [arrays[name], *map(numpy.int64 if value else numpy.int32, layout(arrays[name], specs[name]))]
        elif kind == "list":
            rows = [[address(array), *layout(array, specs[name])] for array in arrays[name]]
            packed += [xp.asarray(numpy.array(rows, dtype=numpy.int64)), numpy.int32(len(rows))]
        else:
            packed.append(number(name, value))
    return tuple(packed)


def layout(array: Any, spec: ArraySpec) -> tuple[int, ...]:
    """Sizes, and strides in elements. Those of axes of one element are what a declaration says, not what they are by chance."""
    return (*array.shape, *strides_of(array.shape, spec.column))


def number(dtype: str, value: float) -> Any:
    """A scalar of `dtype`.

    Raises:
        OverflowError: an integer that the type does not hold.
    """
    if is_float(dtype):
        return to_storage(numpy, numpy.asarray(value, dtype=numpy.float64), dtype)[()]
    return numpy.dtype(storage_type(dtype)).type(value)


def address(array: Any) -> int:
    """Where an array begins in memory."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])
