"""The launches of a schedule: which functions run, on which grids, with which arguments, and what the compiler assumes.

A parameter gets its argument by its name (docs/kernels.md). The compiler's assumptions follow from the declaration, too: the
element type, which sizes are constants, that the last axis is contiguous, and whether rows are 16-byte aligned.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import cuda.tile as ct
from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, ListConstraint, ScalarConstraint

from tiledsched.core.arrays import ALIGNMENT, ArraySpec, strides_of, tile_type
from tiledsched.core.canonical import stable_id
from tiledsched.core.chains import in_chain
from tiledsched.core.errors import (
    DeclarationError,
    ProblemError,
    TiledschedError,
    author_function,
    describe,
    did_you_mean,
    function_line,
)
from tiledsched.core.fields import ITEM_BYTES, Choice, Dim, Flag, Preparation
from tiledsched.core.preparations import MOST_AXES, launch_of
from tiledsched.core.problem import KernelClass, Problem, ProblemClass
from tiledsched.core.schedule import COMPILER_HINTS, Schedule
from tiledsched.core.shapes import shape_names, split_shape
from tiledsched.core.sources import is_shipped


@dataclass(frozen=True, kw_only=True)
class KernelArgument:
    """The argument of one parameter of a function."""

    name: str
    """Name of the parameter."""
    kind: str
    """array, list, scalar or constant."""
    value: Any = None
    """Value of a scalar or a constant."""
    dtype: str = ""
    """Element type of a scalar."""
    wide: bool = False
    """Whether an array is indexed with 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One launch: a function, its arguments in order and its grid."""

    function: FunctionType
    """The undecorated tile function."""
    hints: Mapping[str, Any]
    """The kernel hints that its author gave it."""
    arguments: tuple[KernelArgument, ...]
    """One argument for each parameter."""
    grid: tuple[int, int, int]
    """Blocks along three axes."""
    prepares: bool = False
    """Whether it is one of :mod:`tiledsched.core.preparations`, which take no hints of a schedule."""

    @property
    def tail(self) -> tuple[Any, ...]:
        """Values of the scalars and constants, in the order of the parameters."""
        return tuple(each.value for each in self.arguments if each.kind in ("scalar", "constant"))


def steps(kernel: KernelClass, p: Problem, s: Schedule, device: Any) -> tuple[Step, ...]:
    """The launches of a schedule, in order.

    Args:
        kernel: the declaration.
        p: the problem.
        s: the schedule.
        device: anything with `sm_count` and `arch`, which only grids read.

    Raises:
        DeclarationError: something that is no function, a grid that is not integers, a parameter without an argument, or a
            function of the declaration raises.
    """
    try:
        return _steps(kernel, p, s, device)
    except (TiledschedError, MemoryError):
        raise
    except Exception as error:
        if is_shipped(kernel):  # which asks for programs that a problem cannot have
            raise
        field = author_function(error, ("grid", "entry", "launches", "constants")) or "grid"
        raise DeclarationError(
            f"{kernel.__name__}.{field}: for {p} and {dict(s)} it raises {describe(error)}"
        ) from error


def _steps(kernel: KernelClass, p: Problem, s: Schedule, device: Any) -> tuple[Step, ...]:
    if kernel.launches is not None:
        wanted = list(kernel.launches(p, s, device))
    else:
        function = kernel.entry(p, s) if kernel.entry is not None else kernel.function
        wanted = [(function, kernel.grid(p, s, device))]
    pairs = [each for each in wanted if not isinstance(each, Preparation)]
    if not wanted or not all(isinstance(each, (tuple, list)) and len(each) == 2 for each in pairs):
        raise DeclarationError(
            f"{kernel.__name__}.launches: must return a list of pairs of function and grid, got {wanted!r}"
        )
    constants = kernel.constants(p, s)
    found = []
    for each in (*kernel.preparations(), *wanted):
        if isinstance(each, Preparation):
            found.append(_prepare(kernel, each, p, s))
            continue
        entry, grid = each
        function, hints = undecorated(entry)
        found.append(
            Step(
                function=function,
                hints=hints,
                arguments=bind(kernel, function, p, s, constants),
                grid=kernel.read_grid(grid),
            )
        )
    return tuple(found)


def _prepare(kernel: KernelClass, each: Preparation, p: Problem, s: Schedule) -> Step:
    for name in (each.target, *([each.source] if each.source else [])):
        if name not in kernel.array_fields:
            known, meant = ", ".join(kernel.array_fields), did_you_mean(name, kernel.array_fields)
            raise DeclarationError(
                f"{kernel.__name__}: a {each.kind} of {name!r}, which is no array; known are {known}{meant}"
            )
    target = kernel.array_spec(each.target, p, s)
    source = kernel.array_spec(each.source, p, s) if each.source else None
    if len(target.shape) not in range(1, MOST_AXES + 1):
        raise DeclarationError(
            f"{kernel.__name__}.{each.target}: {len(target.shape)} axes; a {each.kind} takes 1 to {MOST_AXES}"
        )
    shape = target.shape if source is None else source.shape
    if (shape[:-2] + shape[-2:][::-1] if each.swapped else shape) != target.shape:
        raise DeclarationError(
            f"{kernel.__name__}.{each.target}: a copy of {each.source}, {shape}, must have its shape, got {target.shape}"
        )
    function, blocks, constants = launch_of(each, target, source)
    arrays = [spec for spec in (source, target) if spec is not None]
    arguments = [KernelArgument(name=spec.name, kind="array", wide=spec.wide) for spec in arrays]
    arguments += [_plain_constant(name, value) for name, value in constants.items()]
    return Step(function=function, hints={}, arguments=tuple(arguments), grid=(blocks, 1, 1), prepares=True)


def undecorated(entry: Any) -> tuple[FunctionType, Mapping[str, Any]]:
    """(function, hints) of a cuTile kernel; a plain function has no hints.

    Raises:
        DeclarationError: `entry` is neither a kernel nor a function.
    """
    if isinstance(entry, ct.kernel):
        options = vars(entry._compiler_options) if hasattr(entry, "_compiler_options") else {}
        return entry._pyfunc, {name: options[name] for name in COMPILER_HINTS if options.get(name) is not None}
    if not isinstance(entry, FunctionType) or entry.__name__ == "<lambda>" or hasattr(entry, "__wrapped__"):
        raise DeclarationError(f"expected a cuTile kernel or a function, got {entry!r}; decorate one with @ct.kernel")
    return entry, {}


@functools.cache
def parameters(function: FunctionType) -> tuple[tuple[str, bool, Any], ...]:
    """(name, whether it is annotated as a constant, array annotation or None) of each parameter of a function."""
    hints = typing.get_type_hints(function, include_extras=True)
    found = []
    for name in inspect.signature(function).parameters:
        notes = typing.get_args(hints.get(name))[1:] if typing.get_origin(hints.get(name)) is typing.Annotated else ()
        constant = any(type(note).__name__ == "ConstantAnnotation" for note in notes)
        found.append((name, constant, next((note for note in notes if isinstance(note, ct.ArrayAnnotation)), None)))
    return tuple(found)


def bind(
    kernel: KernelClass, function: FunctionType, p: Problem, s: Schedule, constants: Mapping[str, Any]
) -> tuple[KernelArgument, ...]:
    """The argument of each parameter of `function`.

    Raises:
        DeclarationError: the name of a parameter matches nothing declared.
    """
    scalars = kernel.scalar_values(p)
    found = []
    for name, constant, _ in parameters(function):
        if name in kernel.array_fields:
            spec = kernel.array_spec(name, p, s)
            found.append(KernelArgument(name=name, kind="list" if spec.listed else "array", wide=spec.wide))
        elif name in constants:
            found.append(_constant(kernel, function, name, constants[name]))
        elif name in scalars:
            found.append(_number(name, scalars[name], constant, kernel.scalar_fields[name].dtype))
        elif name in s:
            found.append(_constant(kernel, function, name, s[name]))
        elif name in kernel.fields or name in kernel.derived:
            value = getattr(p, name)
            if isinstance(value, str):
                found.append(_constant(kernel, function, name, value))
            else:
                found.append(_number(name, value, constant, "int32"))
        else:
            known = [*kernel.array_fields, *scalars, *s, *kernel.fields, *kernel.derived]
            raise DeclarationError(
                f"{kernel.name}: parameter {name!r} of {function.__name__} is called like nothing declared "
                f"({', '.join(known)}){did_you_mean(name, known)}; declare it, or return it from constants(p, s) "
                f"({function_line(function)})"
            )
    return tuple(found)


def _constant(kernel: KernelClass, function: FunctionType, name: str, value: Any) -> KernelArgument:
    if type(value) in (int, bool):
        return _plain_constant(name, value)
    if value is None or isinstance(value, str):
        raise _no_constant(kernel, function, name, value)
    return KernelArgument(name=name, kind="constant", value=value)


def _no_constant(kernel: KernelClass, function: FunctionType, name: str, value: Any) -> DeclarationError:
    """The error for a parameter that would get a word, which tile code has not, and how to give it a number."""
    field, blamed = kernel.fields.get(name), name
    how = "constants(p, s) may return its number for it, as in {{{0!r}: {1!r}.index({2})}}"
    if isinstance(field, Choice):
        how = how.format(name, field.words, f"p.{name}")
        if field.is_dtype:
            how = "arrays have it as their dtype, as in X.dtype: leave the parameter out"
    elif name in kernel.knobs:
        how, blamed = how.format(name, kernel.knob_fields()[name].choices, f"s[{name!r}]"), f"knobs[{name!r}]"
    else:
        how, blamed = "return a number for it", "constants"
    return DeclarationError(
        f"{kernel.__name__}.{blamed}: parameter {name!r} of {function.__name__} would get {value!r}, and constants of tile "
        f"code are numbers, true and false; {how} ({function_line(function)})"
    )


@functools.lru_cache(maxsize=16384, typed=True)  # 1 is not True
def _plain_constant(name: str, value: int | bool) -> KernelArgument:
    """A constant argument; cached, because a search binds the same few values with every schedule."""
    return KernelArgument(name=name, kind="constant", value=value)


def _number(name: str, value: Any, constant: bool, dtype: str) -> KernelArgument:
    kind = "constant" if constant or isinstance(value, bool) else "scalar"
    return KernelArgument(name=name, kind=kind, value=value, dtype=dtype)


def signature(kernel: KernelClass, p: Problem, s: Schedule, step: Step) -> Any:
    """The type and assumptions of every parameter of a step. A launch on contiguous arrays infers these and more."""
    found: list[Any] = []
    for (_, _, note), each in zip(parameters(step.function), step.arguments, strict=True):
        if each.kind == "constant":
            found.append(each.value)
        elif each.kind == "scalar":
            found.append(ScalarConstraint(getattr(ct, each.dtype)))
        else:
            spec = kernel.array_spec(each.name, p, s)
            constraint = _array_constraint(spec, _noted(kernel, spec, note))
            found.append(
                ListConstraint(constraint, alias_groups=(), elements_may_alias=False) if spec.listed else constraint
            )
    return KernelSignature(found, CallingConvention.cutile_python_v2(), symbol=symbol(kernel))


def symbol(kernel: KernelClass) -> str:
    """The name of the machine code's function."""
    return "".join(letter if letter.isalnum() else "_" for letter in kernel.name)


def _array_constraint(spec: ArraySpec, note: Any) -> Any:
    shape, ndim, item = spec.shape, len(spec.shape), ITEM_BYTES[spec.dtype]
    strides, unit = strides_of(shape, spec.column), unit_axis(ndim, spec.column)
    same = len(set(spec.shapes)) == 1
    fixed_sizes = {axis % ndim for axis in note.static_shape_dims} if same else set()
    fixed_strides = {axis % ndim for axis in note.static_stride_dims} or {unit}
    # A launch also infers which sizes are multiples of 16. Nothing is assumed of them here: where tiles are loaded with
    # their edges checked the machine code is the same with and without (tests/test_build.py checks for attention).
    run = shape[unit] * item if ndim else item
    known = spec.role != "workspace" or spec.aligned
    aligned = ALIGNMENT // item if run % ALIGNMENT == 0 and known and same else 1
    return ArrayConstraint(
        getattr(ct, tile_type(spec.dtype)),
        ndim,
        index_dtype=note.index_dtype,
        stride_lower_bound_incl=0,
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=tuple(
            (1 if axis == unit else strides[axis]) if axis in fixed_strides else None for axis in range(ndim)
        ),
        shape_constant=tuple(shape[axis] if axis in fixed_sizes else None for axis in range(ndim)),
        stride_divisible_by=tuple(1 if axis == unit or axis in fixed_strides else aligned for axis in range(ndim)),
        base_addr_divisible_by=ALIGNMENT,
    )


def unit_axis(ndim: int, column: bool) -> int:
    """The axis along which neighbouring elements are neighbours in memory."""
    return ndim - 2 if column and ndim > 1 else ndim - 1


def annotated(kernel: KernelClass, step: Step, p: Problem, s: Schedule) -> FunctionType:
    """The function of a step, with annotations from the declaration for the arrays that its author did not annotate, and wide
    indices for arrays that need them.

    With them, a launch infers the assumptions of a build: cuTile tells launches apart by constant sizes, among others, and an
    axis of one element does not become a constant by chance.
    """
    pairs = zip(parameters(step.function), step.arguments, strict=True)
    notes = tuple(
        (name, _noted(kernel, kernel.array_spec(each.name, p, s), note))
        for (name, _, note), each in pairs
        if each.kind == "array" and (note is None or (each.wide and note.index_dtype != ct.int64))
    )
    return _with_notes(step.function, notes) if notes else step.function


@functools.lru_cache(maxsize=1024)
def _with_notes(function: FunctionType, notes: tuple[tuple[str, Any], ...]) -> FunctionType:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__module__, copy.__qualname__, copy.__doc__ = function.__module__, function.__qualname__, function.__doc__
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__annotations__ = {
        **typing.get_type_hints(function, include_extras=True),
        **{name: typing.Annotated[ct.Array, note] for name, note in notes},
    }
    return copy


def _noted(kernel: KernelClass, spec: ArraySpec, note: Any) -> Any:
    """The annotation of an array: its author's, with indices of 64 bits where the array needs them, or the declaration's."""
    if note is None:
        return _note(kernel, spec)  # type: ignore[arg-type]
    return replace(note, index_dtype=ct.int64) if spec.wide else note


@functools.lru_cache(maxsize=4096)
def _note(kernel: KernelClass, spec: ArraySpec) -> Any:
    return ct.ArrayAnnotation(
        index_dtype=ct.int64 if spec.wide else ct.int32,
        static_shape_dims=_constant_axes(kernel, spec.name),  # type: ignore[arg-type]
        static_stride_dims=(unit_axis(len(spec.shape), spec.column),) if spec.shape else (),
    )


@functools.cache
def _constant_axes(kernel: KernelClass, name: str) -> tuple[int, ...]:
    """The axes of an array whose sizes are made of numbers and constant dims alone; those of a workspace may also be made of
    knobs."""
    field = kernel.array_fields[name]
    constant = {name for name, each in kernel.fields.items() if isinstance(each, Dim) and each.constant}
    constant |= set(kernel.knobs) if field.role == "workspace" else set()
    words = split_shape(field.shape) if isinstance(field.shape, str) else ()
    return tuple(axis for axis, word in enumerate(words) if shape_names(word) <= constant)


def assumed(kernel: KernelClass, inferred: Any, step: Step) -> Any:
    """The signature that machine code is built for where a launch infers the signature `inferred` from its arguments.

    It assumes what :func:`signature` assumes, so that the machine code launched is the machine code built and measured. A launch
    also infers what sizes, and the strides of workspaces, are multiples of, and that axes of one element are constant. From the
    strides of workspaces the compiler (13.4 on sm_90) makes other machine code for split keys, which is wrong: it loads four
    maxima at addresses of one. Where no size is constant, a launch takes version 1 of cuTile's calling convention, which passes
    the same arguments to the same machine code as version 2.
    """
    found = list(inferred.parameters)
    notes = (note for _, _, note in parameters(step.function))
    for place, (argument, note, each) in enumerate(zip(step.arguments, notes, found, strict=True)):
        if isinstance(each, ArrayConstraint):
            field = kernel.array_fields[argument.name]
            axes = note.static_shape_dims if note else _constant_axes(kernel, argument.name)  # type: ignore[arg-type]
            fixed = {axis % each.ndim for axis in axes}
            sizes = tuple(size if axis in fixed else None for axis, size in enumerate(each.shape_constant))
            scratch = field.role == "workspace" or argument.name in _sometimes(kernel)  # type: ignore[arg-type]
            strides = 1 if scratch and not field.aligned else each.stride_divisible_by
            each = replace(each, shape_constant=sizes, shape_divisible_by=1, stride_divisible_by=strides)
            if scratch and field.layout == "row" and not (note and note.static_stride_dims):
                constant = (*[None] * (each.ndim - 1), each.stride_constant[-1])
                each = replace(each, stride_constant=constant, stride_lower_bound_incl=0)
            found[place] = each
    convention = inferred.calling_convention
    if convention.version == 1:
        convention = CallingConvention.cutile_python_v2()
    return KernelSignature(found, convention, inferred.symbol)


@functools.cache
def _sometimes(kernel: KernelClass) -> frozenset[str]:
    """Outputs that only some problems have, and that are scratch memory for the others."""
    return frozenset(name for name, each in kernel.array_fields.items() if each.role == "out" and each.when)


def problem_class(kernel: KernelClass, p: Problem, s: Schedule, device: Any) -> ProblemClass:
    """The part of a problem that the machine code of a schedule depends on.

    Run-time sizes are not part of it, but the assumptions that follow from them are.
    """
    assumptions: list[Any] = []
    for step in steps(kernel, p, s, device):
        assumptions.append(step.function.__name__)
        for (_, _, note), each in zip(parameters(step.function), step.arguments, strict=True):
            if each.kind in ("array", "list"):
                spec = kernel.array_spec(each.name, p, s)
                assumptions.append(_assumption(spec, _noted(kernel, spec, note)))
            else:
                assumptions.append([type(each.value).__name__, each.value] if each.kind == "constant" else each.dtype)
    compiled = {
        name: p.values[name]
        for name, each in kernel.fields.items()
        if isinstance(each, (Choice, Flag)) or (isinstance(each, Dim) and each.constant)
    }
    return ProblemClass({**compiled, "signature": stable_id(assumptions)})


@functools.lru_cache(maxsize=4096)
def _assumption(spec: ArraySpec, note: Any) -> str:
    return str(_array_constraint(spec, note))


def tile_kernels(kernel: KernelClass, schedules: Mapping[str, Schedule], p: Problem, device: Any) -> list[Any]:
    """A cuTile kernel object for each step, with the hints of every arch in `schedules` as `ct.ByTarget` values.

    A hint of 0 leaves the choice to the compiler, except for `opt_level`, where 0 is a level.

    Raises:
        ProblemError: the schedules run different functions.
    """
    by_arch = {arch: steps(kernel, p, s, device) for arch, s in schedules.items()}
    first, *others = by_arch.values()
    for other in others:
        if [step.function for step in other] != [step.function for step in first]:
            names = sorted({step.function.__name__ for each in by_arch.values() for step in each})
            raise ProblemError(f"these schedules run different kernels ({', '.join(names)}); make one kernel of each")
    s, found = next(iter(schedules.values())), []
    for place, step in enumerate(first):
        function, overlap = annotated(kernel, step, p, s), s.get("pdl", 0)
        waits, releases = overlap and place > 0, overlap == 2 and place + 1 < len(first)
        if waits or releases:
            function = in_chain(function, bool(waits), releases)
        found.append(ct.kernel(function, **_hints(step, schedules)))
    return found


def _hints(step: Step, schedules: Mapping[str, Schedule]) -> dict[str, Any]:
    hints = dict(step.hints)
    for knob in () if step.prepares else COMPILER_HINTS:
        values = {arch: s.number(knob) for arch, s in schedules.items() if knob in s}
        if values:
            by_arch = {arch: value if value or knob == "opt_level" else None for arch, value in values.items()}
            hints[knob] = ct.ByTarget(default=next(iter(by_arch.values())), **by_arch)
    return hints


def scratch(kernel: KernelClass, p: Problem, s: Schedule, wanted: Sequence[Step]) -> tuple[ArraySpec, ...]:
    """Scratch arrays: those that the steps take and the problem does not have, in the order of first use."""
    present = {each.name for each in kernel.arrays(p)}
    names = dict.fromkeys(each.name for step in wanted for each in step.arguments if each.kind in ("array", "list"))
    return tuple(kernel.array_spec(name, p, s) for name in names if name not in present)
