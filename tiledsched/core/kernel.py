"""The class that authors of kernels subclass: a declaration that is read, checked and registered when the class is made.

An error names the field that is wrong, and what is allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy

from tiledsched.core import registry
from tiledsched.core.cases import expected_outputs, output_specs, random_inputs, shrunk
from tiledsched.core.cost import Cost
from tiledsched.core.device import ARCHS
from tiledsched.core.errors import DeclarationError, SpaceError, TiledschedError
from tiledsched.core.expressions import names_read, words_of
from tiledsched.core.fields import DTYPES, LAYOUTS, ArrayField, Choice, Flag, ProblemField, Scalar
from tiledsched.core.labels import labels_of
from tiledsched.core.problem import Declaration, KernelClass, Problem, Requirement
from tiledsched.core.schedule import HINT_KNOBS, PLAIN, Schedule, allowed_hints
from tiledsched.core.shapes import shape_names, split_shape
from tiledsched.core.similarity import Similarity
from tiledsched.core.sources import SHIPPED_KERNELS
from tiledsched.core.space import function_of
from tiledsched.core.space_files import declared_space
from tiledsched.core.storage import is_float

FUNCTIONS = (
    "grid",
    "reference",
    "entry",
    "launches",
    "constants",
    "canonical",
    "flops",
    "inputs",
    "tolerance",
    "check_tile",
    "adversarial",
    "unsound",
    "spill_class",
    "describe",
    "file_words",
    "likely",
    "small",
    "rivals",
    "stand_in",
)
"""Functions that a kernel may declare."""
RESERVED = frozenset(dir(Declaration)) | {"kernel", "values", "id", "xp", "p", "s"}
"""Names that no field of a kernel may have."""
INTEGER_WORDS = "least, below, sentinel, sorted, distinct, first and last"
MOST_CHECKED = 1 << 20
"""Elements of the largest array on which a reference is tried."""


class Kernel(Declaration):
    """A tunable kernel. Subclass it; docs/kernels.md shows what may be declared.

    Functions in the class body are written without `self`, and need no decorator.

    Raises:
        DeclarationError: the declaration is wrong. The message names the field and what is allowed.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        own = vars(cls)
        for name in FUNCTIONS:
            if inspect.isfunction(own.get(name)):
                setattr(cls, name, staticmethod(own[name]))
        found = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
        cls.fields = {name: value for name, value in found.items() if isinstance(value, ProblemField)}
        cls.array_fields = {name: value for name, value in found.items() if isinstance(value, ArrayField)}
        cls.scalar_fields = {name: value for name, value in found.items() if isinstance(value, Scalar)}
        if "name" not in own:
            cls.name = f"{registry.module_word(cls)}:{cls.__name__}"
        PLAIN.update({name: value for name, value in cls.plain.items() if name not in PLAIN})
        cls.requirements = _read_requirements(cls)
        _check_declaration(cls)
        registry.register(cls)


def _check_declaration(kernel: KernelClass) -> None:
    """Raise DeclarationError where the declaration of `kernel` is wrong, as far as a moment's checks can tell."""
    _check_parts(kernel)
    _check_fields(kernel)
    _check_knobs(kernel)
    if kernel.__module__.startswith(SHIPPED_KERNELS):  # tests have tried it, and importing it should cost nothing
        return
    examples = _suite_problems(kernel)
    if examples and kernel.knobs:
        _check_launches(kernel, examples[0])
        _check_reference(kernel, examples[0])


def _suite_problems(kernel: KernelClass) -> list[Problem]:
    found = []
    for name in kernel.suites:
        try:
            found += kernel.suite(name)
        except TiledschedError as error:
            raise DeclarationError(f"{kernel.__name__}.suites[{name!r}]: {error}") from error
    return found


def _read_requirements(kernel: KernelClass) -> tuple[Requirement, ...]:
    found = []
    for text, because in kernel.requires.items():
        try:
            names = tuple(sorted(names_read(text, {*kernel.fields, *kernel.derived}, words_of(kernel))))
        except SpaceError as error:
            hint = "; conditions on knobs are constraints" if any(name in str(text) for name in kernel.knobs) else ""
            raise DeclarationError(f"{kernel.__name__}.requires: {text!r} {error}{hint}") from error
        if not isinstance(because, str) or not because:
            _fail(kernel, f"requires[{text!r}]", "say why, in words that a caller reads")
        found.append(Requirement(require=text, because=because, names=names, holds=function_of(text, names)))
    return tuple(found)


def _fail(kernel: KernelClass, field: str, why: str) -> None:
    raise DeclarationError(f"{kernel.__name__}.{field}: {why}")


def _check_parts(kernel: KernelClass) -> None:
    words = [word for each in kernel.fields.values() if isinstance(each, Choice) for word in each.words]
    for text in (kernel.name, *kernel.suites, *words):
        if not str(text).isprintable():
            _fail(
                kernel,
                "name",
                f"{text!r} is text that cannot be printed; call the kernel, suite or choice something else",
            )
    for name, part in (("cost", Cost), ("similarity", Similarity)):
        if not isinstance(getattr(kernel, name), part):
            _fail(
                kernel,
                name,
                f"must be an object of a subclass of ts.{part.__name__}, as in {name} = My{part.__name__}()",
            )


def _check_fields(kernel: KernelClass) -> None:
    mine = {*kernel.fields, *kernel.array_fields, *kernel.scalar_fields}
    for name in sorted(mine | set(kernel.derived)):
        if name in RESERVED or name.startswith("_"):
            _fail(kernel, name, "the name is taken; call the field something else")
    for name in kernel.derived:
        if name in mine:
            _fail(kernel, f"derived[{name!r}]", "there is a field of that name; call one something else")
    for name, each in kernel.array_fields.items():
        _check_array(kernel, name, each)
    if not any(each.role in ("out", "inout") for each in kernel.array_fields.values()):
        _fail(kernel, "function", "no array is an output; declare one with ts.out(...) or ts.inout(...)")
    if kernel.function is None and kernel.entry is None and kernel.launches is None:
        _fail(
            kernel, "function", "there is none; name the cuTile kernel, or give entry(p, s) or launches(p, s, device)"
        )
    sizes = {*kernel.fields, *kernel.derived}
    named = [(f"label[{short!r}]", name) for short, names in labels_of(kernel).items() for name in names]
    for where, name in [*named, *(("axes", axis) for axis in kernel.axes)]:
        if name not in sizes:
            _fail(kernel, where, f"{name!r} is no field; known are {', '.join(sorted(sizes))}")


def _check_array(kernel: KernelClass, name: str, each: ArrayField) -> None:
    if isinstance(each.shape, str):
        allowed = {*kernel.fields, *kernel.derived, *(kernel.knobs if each.role == "workspace" else ())}
        unknown = sorted(_names(kernel, name, each.shape) - allowed)
        if unknown or not split_shape(each.shape):
            said = f"{unknown[0]!r} is no size" if unknown else "the shape is empty"
            _fail(kernel, name, f"{said}; known are {', '.join(sorted(allowed))} and numbers")
    dtypes = [field for field, kind in kernel.fields.items() if isinstance(kind, Choice) and kind.is_dtype]
    if (each.dtype or "dtype") not in (*dtypes, *DTYPES):
        known = ", ".join([*dtypes, *DTYPES])
        _fail(
            kernel, name, f"its type {each.dtype or 'dtype'!r} is neither a dtype field nor a type; known are {known}"
        )
    layout = kernel.fields.get(each.layout)
    if each.layout not in LAYOUTS and not (isinstance(layout, Choice) and set(layout.words) <= set(LAYOUTS)):
        _fail(kernel, name, f"layout {each.layout!r} is neither row, column nor a choice of the two")
    if each.when is not None and not isinstance(kernel.fields.get(each.when), Flag) and each.when not in kernel.derived:
        _fail(kernel, name, f"when = {each.when!r} is no flag; declare it with ts.flag()")
    for limit, value in each.limits.items():
        if isinstance(value, str) and _names(kernel, name, value) - {*kernel.fields, *kernel.derived}:
            _fail(kernel, name, f"{limit} = {value!r} is no field")
    types = kernel.fields[each.dtype or "dtype"].words if (each.dtype or "dtype") in dtypes else (each.dtype,)  # type: ignore[union-attr]
    if each.speaks_of_integers and any(map(is_float, types)):
        _fail(kernel, name, f"{INTEGER_WORDS} are said of integers, and {name} holds floating-point numbers")
    if each.sorted and each.sentinels:
        _fail(kernel, name, "sorted values have no sentinels; give one of the two")


def _names(kernel: KernelClass, name: str, text: str) -> frozenset[str]:
    try:
        return shape_names(text)
    except ValueError as error:
        raise DeclarationError(f"{kernel.__name__}.{name}: {error}") from error


def _check_knobs(kernel: KernelClass) -> None:
    for name, each in kernel.knob_fields().items():
        wrong = [choice for choice in each.choices if name in HINT_KNOBS and choice not in HINT_KNOBS[name]]
        if wrong:
            _fail(kernel, f"knobs[{name!r}]", f"{wrong[0]!r} is no such hint; allowed are {allowed_hints(name)}")
        if name in kernel.fields:
            _fail(kernel, f"knobs[{name!r}]", "there is a field of that name; call one something else")
    if kernel.knobs:
        try:
            declared_space("sm_90", kernel)
        except SpaceError as error:
            raise DeclarationError(str(error)) from error


class _RecordingSchedule(Schedule):
    """A schedule that records which of its knobs are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def number(self, name: str) -> int:
        return int(self[name])


def _check_launches(kernel: KernelClass, example: Problem) -> None:
    """Check that every parameter has an argument, that the grid is integers, and that every knob has an effect."""
    from tiledsched.core.launch import steps

    knobs = kernel.knob_fields()
    schedule = _RecordingSchedule({name: each.default for name, each in knobs.items()})
    try:
        found = steps(kernel, example, schedule, ARCHS["sm_90"])
    except DeclarationError:
        raise
    except Exception as error:
        _fail(kernel, "grid", f"for {example} and {dict(schedule)} it raises {type(error).__name__}: {error}")
    taken = {argument.name for step in found for argument in step.arguments}
    chosen = kernel.entry is not None or kernel.launches is not None
    for name in knobs:
        if name not in taken | schedule.read and name not in HINT_KNOBS and not chosen:
            functions = ", ".join(step.function.__name__ for step in found)
            _fail(
                kernel,
                f"knobs[{name!r}]",
                f"neither a parameter of {functions} nor a hint ({', '.join(HINT_KNOBS)}), and "
                "read by neither grid nor constants; take it, or leave it out",
            )


def _check_reference(kernel: KernelClass, example: Problem) -> None:
    """Check that the reference returns one array of the declared shape for each output, on a small problem."""
    small = shrunk(kernel, example)
    if any(each.bytes > 8 * MOST_CHECKED for each in kernel.arrays(small)):
        return
    rng = numpy.random.default_rng(0)
    try:
        results = expected_outputs(kernel, numpy, small, random_inputs(kernel, numpy, rng, small))
    except DeclarationError:
        raise
    except Exception as error:
        _fail(kernel, "reference", f"for {small} it raises {type(error).__name__}: {error}")
    wanted = output_specs(kernel, small)
    if len(results) < len(wanted):
        _fail(
            kernel,
            "reference",
            f"returns {len(results)} arrays; the outputs are {', '.join(each.name for each in wanted)}",
        )
    for each, result in zip(wanted, results, strict=False):
        shapes = tuple(numpy.shape(one) for one in result) if each.listed else (numpy.shape(result),)
        if shapes != each.shapes:
            _fail(
                kernel,
                "reference",
                f"returns {each.name} of shape {shapes[0]} for {small}; declared is {each.shapes[0]}",
            )
