"""Inputs to check a kernel on, and the right outputs for them: random inputs, and inputs that bring out what random ones hide.

The code runs with NumPy and with CuPy: the interpreter and the measuring process share it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from tiledsched.core.arrays import POWERS_OF_TWO, ArraySpec, is_float, shape_of_values, to_float, to_storage
from tiledsched.core.errors import DeclarationError, TiledschedError, describe, did_you_mean
from tiledsched.core.fields import Dim, total
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.space import Constraint
from tiledsched.core.space_files import declared_space

Arrays = dict[str, Any]
"""Array or list of arrays by name."""


@dataclass(frozen=True)
class Case:
    """Inputs of a kernel and the right outputs."""

    kinds: str | Sequence[str]
    """The kind of the inputs; or the kind of each index of the outputs' outer axes, flattened."""
    inputs: Arrays
    """Inputs and arrays that are changed in place, by name, as they lie in memory."""
    expected: tuple[Any, ...]
    """Outputs and changed arrays in high precision, in the order declared."""

    def kind_of(self, outer: int) -> str:
        """The kind of the inputs at one index of the outer axes."""
        return self.kinds if isinstance(self.kinds, str) else self.kinds[outer]


def random_inputs(kernel: KernelClass, xp: Any, rng: Any, p: Problem, own: Mapping[str, Any] | None = None) -> Arrays:
    """Inputs as they lie in memory: standard normal numbers, uniform integers, or the kernel's `own` inputs."""
    own = own_inputs(kernel, xp, rng, p) if own is None else own
    found: Arrays = {}
    for spec in input_specs(kernel, p):
        given = own.get(spec.name)
        made = [] if given is None else list(given) if spec.listed else [given]
        if given is None:
            made = [drawn(xp, rng, spec, shape) for shape in spec.shapes]
        stored = [laid_out(xp, to_storage(xp, xp.asarray(each), spec.dtype), spec) for each in made]
        found[spec.name] = stored if spec.listed else stored[0]
    return found


def own_inputs(kernel: KernelClass, xp: Any, rng: Any, p: Problem) -> Mapping[str, Any]:
    """What `inputs(xp, rng, p)` returns, after checking that these are inputs of the problem, of their shapes.

    Raises:
        DeclarationError: the name of an input is wrong, or its shape, or it is no array of numbers.
    """
    with _blaming(kernel, "inputs", xp, p):
        own = kernel.inputs(xp, rng, p)
    if not isinstance(own, Mapping):
        raise DeclarationError(
            f"{kernel.__name__}.inputs: must return a dict of inputs by name, got {type(own).__name__}"
        )
    specs = {spec.name: spec for spec in input_specs(kernel, p)}
    inputs = [name for name, each in kernel.array_fields.items() if each.role in ("in", "inout")]
    for name, value in own.items():
        if name not in inputs:
            raise DeclarationError(
                f"{kernel.__name__}.inputs: {name!r} is no input; the inputs are "
                f"{', '.join(inputs)}{did_you_mean(name, inputs)}"
            )
        if name not in specs:  # this problem does without it
            continue
        made = list(value) if specs[name].listed else [value]
        shapes = tuple(tuple(numpy.shape(each)) for each in made)
        if shapes != specs[name].shapes:
            found, wanted = (shapes, specs[name].shapes) if specs[name].listed else (shapes[0], specs[name].shapes[0])
            raise DeclarationError(f"{kernel.__name__}.inputs: {name} has shape {found} for {p}; declared is {wanted}")
        if any(getattr(each, "dtype", numpy.dtype(float)).kind in "OUSc" for each in map(xp.asarray, made)):
            raise DeclarationError(f"{kernel.__name__}.inputs: {name} holds no real numbers for {p}")
    return own


@contextlib.contextmanager
def _blaming(kernel: KernelClass, field: str, xp: Any, p: Problem) -> Iterator[None]:
    """Within the block an error of NumPy's is one of the declaration. Errors on a GPU say what became of the GPU, and stay."""
    try:
        yield
    except (TiledschedError, MemoryError):
        raise
    except Exception as error:
        if xp is not numpy:
            raise
        raise DeclarationError(f"{kernel.__name__}.{field}: for {p} it raises {describe(error)}") from error


def input_specs(kernel: KernelClass, p: Problem) -> list[ArraySpec]:
    """The arrays whose contents the kernel is given."""
    return [spec for spec in kernel.arrays(p) if spec.role in ("in", "inout")]


def output_specs(kernel: KernelClass, p: Problem) -> list[ArraySpec]:
    """The arrays whose contents are checked."""
    return [spec for spec in kernel.arrays(p) if spec.role in ("out", "inout")]


def drawn(xp: Any, rng: Any, spec: ArraySpec, shape: tuple[int, ...]) -> Any:
    """Random contents of an array: standard normal numbers, or integers of the declared range."""
    if spec.dtype == POWERS_OF_TWO:
        return 2.0 ** rng.integers(-2, 3, size=shape)
    if is_float(spec.dtype):
        return rng.standard_normal(shape_of_values(shape, spec.dtype), dtype=numpy.float32)
    if spec.integers is None:
        return rng.integers(0, 2, size=shape)
    spec.integers.check(spec.name, spec.dtype, shape)
    return spec.integers.random(xp, rng, shape)


def laid_out(xp: Any, array: Any, spec: ArraySpec) -> Any:
    """The array with its last two axes swapped in memory, if the declaration says so."""
    if not spec.column or array.ndim < 2:
        return xp.ascontiguousarray(array)
    return xp.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)


def expected_outputs(
    kernel: KernelClass, xp: Any, p: Problem, inputs: Arrays, precision: str = "float64"
) -> tuple[Any, ...]:
    """The reference's outputs for inputs as they lie in memory, one for each output of the kernel."""
    types = {spec.name: spec.dtype for spec in input_specs(kernel, p)}
    read = {
        name: [to_float(xp, each, types[name], precision) for each in value]
        if isinstance(value, list)
        else to_float(xp, value, types[name], precision)
        for name, value in inputs.items()
    }
    return call_reference(kernel, xp, p, read)[: len(output_specs(kernel, p))]


def call_reference(kernel: KernelClass, xp: Any, p: Problem, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """The outputs of the reference, as a tuple. It is given inputs, scalars, fields and `p` by the names of its parameters.
    Numbers among the inputs take the place of declared scalars.

    Raises:
        DeclarationError: there is no reference, or the name of a parameter matches nothing declared.
    """
    if kernel.reference is None:
        raise DeclarationError(
            f"{kernel.__name__}.reference: missing; declare reference(xp, ...), its outputs by NumPy or CuPy"
        )
    known = {**kernel.scalar_values(p), **inputs, "p": p, "xp": xp}
    given: dict[str, Any] = {}
    for name, parameter in inspect.signature(kernel.reference).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= inputs
        elif name in known:
            given[name] = known[name]
        elif name in kernel.fields or name in kernel.derived:
            given[name] = getattr(p, name)
        elif name in kernel.array_fields:
            given[name] = None  # an input that this problem does not have
        else:
            meant = did_you_mean(name, [*known, *kernel.fields])
            meant = "; a reference is written without self" if name == "self" else meant
            raise DeclarationError(
                f"{kernel.__name__}.reference: its parameter {name!r} is called like nothing declared; known "
                f"are {', '.join([*known, *kernel.fields])}{meant}"
            )
    with _blaming(kernel, "reference", xp, p):
        found = kernel.reference(**given)
    outputs = [name for name, each in kernel.array_fields.items() if each.role in ("out", "inout")]
    if found is None or isinstance(found, Mapping):
        raise DeclarationError(
            f"{kernel.__name__}.reference: returns {'nothing' if found is None else 'a dict'}; return the array, or a tuple "
            f"of the arrays, of {', '.join(outputs)}"
        )
    results = tuple(found) if isinstance(found, tuple) else (found,)
    if len(results) > len(outputs):
        raise DeclarationError(
            f"{kernel.__name__}.reference: returns {len(results)} arrays; the outputs are {', '.join(outputs)}"
        )
    return results


SMALL = (3, 4, 1, 2, 8, 16, 64)
"""Sizes that are tried for run-time dims, in this order."""
LARGER = (32, 128, 256, 512, 1024, 2048, 4096)
"""Sizes that are tried next, where a kernel requires multiples of something."""


def shrunk(kernel: KernelClass, p: Problem) -> Problem:
    """The problem with run-time sizes as small as its kernel allows. A size of 0, which is of something that the problem does
    without, stays.

    Dims that can only change together, such as the sides of a square, shrink by one factor.
    """
    dims = [name for name, each in kernel.fields.items() if isinstance(each, Dim) and not each.constant]
    stuck: dict[str, int] = {}
    for name in dims:
        before = total(p.values[name])
        if not before:
            continue
        sizes = (*SMALL, *(size for size in LARGER if size < before))
        found = next(filter(None, (replaced(kernel, p, {name: size}) for size in sizes)), None)
        if found is None:
            stuck[name] = before
        p = found or p
    longest = max(stuck.values(), default=0)
    for size in (*SMALL, *LARGER) if len(stuck) > 1 else ():
        values = {name: max(1, before * size // longest) for name, before in stuck.items()}
        if size < longest and (found := replaced(kernel, p, values)) is not None:
            return found
    return p


def replaced(kernel: KernelClass, p: Problem, values: Mapping[str, Any]) -> Problem | None:
    """The problem with other values; None where the kernel allows no such problem, or a constraint that reads no knob none."""
    try:
        found = p.replace(**values)
        for spec in kernel.arrays(found):
            if not all(size > 0 for shape in spec.shapes for size in shape):
                return None
        return found if all(each.holds(found.names) for each in _problem_constraints(kernel)) else None  # type: ignore[arg-type]  # a class is hashable
    except (TiledschedError, ArithmeticError):
        return None


@functools.cache
def _problem_constraints(kernel: KernelClass) -> tuple[Constraint, ...]:
    """The declared constraints that read the problem and no knob."""
    declared = declared_space("sm_90", kernel).needed if kernel.knobs else ()
    return tuple(each for each in declared if each.names <= {*kernel.fields, *kernel.derived})
