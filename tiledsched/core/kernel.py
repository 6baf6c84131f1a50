"""The class that authors of kernels subclass: a declaration that is read, checked and registered when the class is made.

An error names the field that is wrong, and what is allowed.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import numpy

from tiledsched.core import registry
from tiledsched.core.arrays import PACKED, POWERS_OF_TWO, Tolerance, is_float
from tiledsched.core.cases import expected_outputs, output_specs, random_inputs, shrunk
from tiledsched.core.copies import closed_over
from tiledsched.core.cost import Cost
from tiledsched.core.device import ARCHS
from tiledsched.core.errors import (
    DeclarationError,
    SpaceError,
    TiledschedError,
    class_line,
    describe,
    did_you_mean,
    nearest,
    says_line,
)
from tiledsched.core.expressions import names_read, words_of
from tiledsched.core.fields import (
    DTYPES,
    LAYOUTS,
    ArrayField,
    Choice,
    Dim,
    Flag,
    Knob,
    ProblemField,
    Scalar,
    Sizes,
    dim,
)
from tiledsched.core.modules import SHIPPED_KERNELS
from tiledsched.core.problem import Declaration, KernelClass, Problem, Requirement
from tiledsched.core.schedule import HINT_KNOBS, PLAIN, Schedule, allowed_hints
from tiledsched.core.shapes import shape_names, split_shape
from tiledsched.core.similarity import Similarity
from tiledsched.core.space import function_of
from tiledsched.core.space_files import declared_space
from tiledsched.core.text import labels_of

if TYPE_CHECKING:
    from tiledsched.core.launches import Step

FUNCTIONS = {
    "grid": ("p", "s", "device"),
    "reference": None,
    "entry": ("p", "s"),
    "launches": ("p", "s", "device"),
    "constants": ("p", "s"),
    "canonical": ("values",),
    "flops": ("p",),
    "inputs": ("xp", "rng", "p"),
    "tolerance": ("p", "s"),
    "check_tile": ("p", "s"),
    "adversarial": ("xp", "rng", "p", "reference"),
    "unsound": ("p", "s", "facts", "arch"),
    "spill_class": ("p", "s"),
    "describe": ("p",),
    "file_words": ("p",),
    "likely": ("p", "variants"),
    "small": (),
    "rivals": ("p",),
    "stand_in": ("p", "numbers"),
    "reduction_order": ("p", "s"),
    "ordered": ("p", "s"),
    "representative": ("p",),
    "row_dims": ("p",),
}
"""Functions that a kernel may declare, each with what it takes in this order; None where parameters get values by their names."""
DATA: dict[str, tuple[Any, str]] = {
    "name": (str, "text"),
    "space": (str, "the name of a kernel"),
    "timed_with": (str, "the name of a kernel"),
    "knobs": (Mapping, 'a dict of a knob and its choices, as in {"TILE": [64, 128]}'),
    "constraints": (Mapping, 'a dict of an expression and its reason, as in {"TILE >= columns": "a row is one tile"}'),
    "requires": (Mapping, 'a dict of an expression and its reason, as in {"k % group == 0": "groups are whole"}'),
    "exploring": (Mapping, 'a dict of an expression and its reason, as in {"TILE <= 4096": "larger ones never won"}'),
    "suites": (Mapping, 'a dict of a name and a list of problems, as in {"small": [dict(rows=64)]}'),
    "default_suite": (str, "the name of a suite"),
    "derived": (Mapping, 'a dict of a name and a function of the problem, as in {"half": lambda p: p.rows // 2}'),
    "label": (Mapping, 'a dict of a short name and a dim, as in {"N": "columns"}'),
    "written": (Mapping, "a dict of a short name and a dim"),
    "axes": (tuple | list, 'a tuple of dims, as in ("rows", "columns")'),
    "plain": (Mapping, "a dict of a knob and the value that is left out"),
    "former_values": (Mapping, "a dict"),
    "former_knobs": (Mapping, "a dict"),
    "weights": (Mapping, "a dict of a knob and a number"),
    "batch_sizes": (tuple | list, "a tuple of sizes, as in (1, 64, 1024)"),
    "batch_dims": (tuple | list, 'a tuple of dims, as in ("rows",)'),
    "planning_rivals": (tuple | list, "a tuple of names of rivals"),
    "compiled_rivals": (tuple | list, "a tuple of names of rivals"),
    "variants": (Mapping, "a dict of a name and what it means"),
    "cost": (Cost, "an object of a subclass of ts.Cost, as in cost = MyCost()"),
    "similarity": (Similarity, "an object of a subclass of ts.Similarity, as in similarity = MySimilarity()"),
}
"""What a kernel may declare as data: its type, and that type in words."""
MISSPELT = 0.8
"""Attributes of a class that are at least as like a name above are taken for that name, misspelt. Others are the author's own."""
INTERNAL = frozenset(name for name in dir(Declaration) if not name.startswith("_")) - {
    *FUNCTIONS,
    *DATA,
    *("function", "fields", "array_fields", "scalar_fields", "requirements"),  # of which all but the first are set here
}
"""What the rest of the package asks of a kernel, which no kernel may declare anew."""
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
        if "space" not in own:
            cls.space = cls.name
        PLAIN.update({name: value for name, value in cls.plain.items() if name not in PLAIN})
        cls.requirements = _read_requirements(cls)
        _check_declaration(cls)
        registry.register(cls)


def _check_declaration(kernel: KernelClass) -> None:
    """Raise DeclarationError where the declaration of `kernel` is wrong, as far as a moment's checks can tell."""
    ships = kernel.__module__.startswith(SHIPPED_KERNELS)  # tests have tried it, and importing it should cost nothing
    try:
        if not ships:
            _check_attributes(kernel)
        _check_parts(kernel)
        _check_fields(kernel)
        _check_knobs(kernel)
        examples = [] if ships else _suite_problems(kernel)
        if examples and kernel.knobs:
            _check_launches(kernel, examples[0])
            _check_reference(kernel, examples[0])
            _check_use(kernel, examples[0])
    except DeclarationError as error:
        named = re.match(r"(?:the declaration of \S+: |\w+\.)(\w+)", str(error))
        place = class_line(kernel, named[1] if named else "")
        if not place or says_line(str(error)):
            raise
        raise DeclarationError(f"{error} ({place})") from error


def _check_attributes(kernel: KernelClass) -> None:
    """Check the names and types of what the class body sets: a misspelt name would be taken for something of the author's own."""
    own = vars(kernel)
    for name, value in own.items():
        if name in FUNCTIONS:
            _check_function(kernel, name, value)
        elif name in DATA:
            wanted, words = DATA[name]
            if not isinstance(value, wanted):
                _fail(kernel, name, f"must be {words}, got {value!r}")
        elif name in INTERNAL:
            meant = nearest(name, (*FUNCTIONS, *DATA))
            _fail(kernel, name, f"the name is taken; {f'did you mean {meant}?' if meant else 'choose another one'}")
        elif isinstance(value, FunctionType) and value.__module__ == dim.__module__:
            _fail(kernel, name, f"ts.{value.__name__} is not called; write {name} = ts.{value.__name__}()")
        elif not name.startswith("_") and not isinstance(value, (ProblemField, ArrayField, Scalar)):
            meant = nearest(name, (*FUNCTIONS, *DATA, "function"), MISSPELT)
            if meant and meant not in own and name not in dir(Declaration):
                _fail(kernel, name, f"a kernel has no such attribute; did you mean {meant}?")


def _check_function(kernel: KernelClass, name: str, value: Any) -> None:
    value, wanted = getattr(value, "__func__", value), FUNCTIONS[name]
    if value is None:
        return
    if not callable(value):
        example = f"def {name}({', '.join(('xp', '...') if wanted is None else wanted)}): ..."
        _fail(kernel, name, f"must be a function, as in {example}, got {value!r}")
    found = inspect.signature(value)
    if wanted is None or isinstance(vars(kernel)[name], classmethod):
        return
    try:
        found.bind(*wanted)
    except TypeError:
        alone = "; functions of a declaration are written without self" if "self" in found.parameters else ""
        _fail(kernel, name, f"takes {found}, and must take ({', '.join(wanted)}){alone}")


def _suite_problems(kernel: KernelClass) -> list[Problem]:
    found = []
    for name, cases in kernel.suites.items():
        field = f"suites[{name!r}]"
        if isinstance(cases, (str, Mapping)) or not isinstance(cases, Iterable):
            _fail(kernel, field, f"must be a list of problems, as in [dict(rows=64)], got {cases!r}")
        for case in cases:
            if not isinstance(case, (Mapping, Problem)):
                _fail(kernel, field, f"a problem is a dict of sizes, as in dict(rows=64), got {case!r}")
        try:
            found += kernel.suite(name)
        except TiledschedError as error:
            raise DeclarationError(f"{kernel.__name__}.{field}: {error}") from error
    if kernel.default_suite and kernel.default_suite not in kernel.suites:
        _fail(
            kernel,
            "default_suite",
            f"there is no suite {kernel.default_suite!r}; known are "
            f"{', '.join(kernel.suites) or 'none'}{did_you_mean(kernel.default_suite, kernel.suites)}",
        )
    return found


def _read_requirements(kernel: KernelClass) -> tuple[Requirement, ...]:
    found = []
    if not isinstance(kernel.requires, Mapping):
        _fail(kernel, "requires", f"must be {DATA['requires'][1]}, got {kernel.requires!r}")
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


def _fail(kernel: KernelClass, field: str, why: str) -> NoReturn:
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
    if kernel.name in registry.SHIPPED and not kernel.__module__.startswith(SHIPPED_KERNELS):
        _fail(
            kernel,
            "name",
            f"{kernel.name!r} is a kernel that ships; give yours another name, or leave the name out and it is called "
            f"{registry.module_word(kernel)}:{kernel.__name__}",
        )
    for name, each in kernel.derived.items():
        if not callable(each):
            _fail(kernel, f"derived[{name!r}]", f"must be a function of the problem, as in lambda p: 4, got {each!r}")


def _check_fields(kernel: KernelClass) -> None:
    mine = {*kernel.fields, *kernel.array_fields, *kernel.scalar_fields}
    for name in sorted(mine | set(kernel.derived)):
        if name in RESERVED or name.startswith("_"):
            _fail(kernel, name, "the name is taken; call the field something else")
    for name in kernel.derived:
        if name in mine:
            _fail(kernel, f"derived[{name!r}]", "there is a field of that name; call one something else")
    for name, each in kernel.array_fields.items():
        check_array(kernel, name, each)
    if not any(each.role in ("out", "inout") for each in kernel.array_fields.values()):
        _fail(kernel, "function", "no array is an output; declare one with ts.out(...) or ts.inout(...)")
    if kernel.function is None and kernel.entry is None and kernel.launches is None:
        _fail(
            kernel, "function", "there is none; name the cuTile kernel, or give entry(p, s) or launches(p, s, device)"
        )
    sizes = {*kernel.fields, *kernel.derived}
    named = [(f"label[{short!r}]", name) for short, names in labels_of(kernel).items() for name in names]
    axes = [(where, axis) for where in ("axes", "batch_dims") for axis in getattr(kernel, where)]
    if kernel.batch_dims and kernel.reduction_order is Declaration.reduction_order:
        _fail(kernel, "batch_dims", "say which schedules sum in the same order, too: def reduction_order(p, s): ...")
    for where, name in [*named, *axes]:
        if name not in sizes:
            _fail(
                kernel, where, f"{name!r} is no field; known are {', '.join(sorted(sizes))}{did_you_mean(name, sizes)}"
            )


def check_array(kernel: KernelClass, name: str, each: ArrayField) -> None:
    """Check the declaration of an array.

    Raises:
        DeclarationError: it is wrong; the message begins with the kernel and the name.
    """
    if isinstance(each.shape, str):
        allowed = {*kernel.fields, *kernel.derived, *(kernel.knobs if each.role == "workspace" else ())}
        unknown = sorted(_names(kernel, name, each.shape) - allowed)
        if unknown or not split_shape(each.shape):
            said = f"{unknown[0]!r} is no size" if unknown else "the shape is empty"
            meant = did_you_mean(unknown[0], allowed) if unknown else ""
            _fail(kernel, name, f"{said}; known are {', '.join(sorted(allowed))} and numbers{meant}")
    elif not callable(each.shape):
        _fail(kernel, name, f'its shape must be text, as in "rows columns", or a function of p, got {each.shape!r}')
    dtypes = [field for field, kind in kernel.fields.items() if isinstance(kind, Choice) and kind.is_dtype]
    if (each.dtype or "dtype") not in (*dtypes, *DTYPES, *kernel.derived):
        known = ", ".join([*dtypes, *DTYPES])
        word = each.dtype or "dtype"
        meant = did_you_mean(word, (*dtypes, *DTYPES))
        _fail(kernel, name, f"its type {word!r} is neither a dtype field nor a type; known are {known}{meant}")
    layout = kernel.fields.get(each.layout)
    if each.layout not in (*LAYOUTS, *kernel.derived) and not (
        isinstance(layout, Choice) and set(layout.words) <= set(LAYOUTS)
    ):
        _fail(
            kernel,
            name,
            f"layout {each.layout!r} is neither row, column nor a choice of the two{did_you_mean(each.layout, LAYOUTS)}",
        )
    if each.when is not None and not isinstance(kernel.fields.get(each.when), Flag) and each.when not in kernel.derived:
        flags = [flag for flag, kind in kernel.fields.items() if isinstance(kind, Flag)]
        _fail(
            kernel, name, f"when = {each.when!r} is no flag; declare it with ts.flag(){did_you_mean(each.when, flags)}"
        )
    for limit, value in each.limits.items():
        if isinstance(value, str) and _names(kernel, name, value) - {*kernel.fields, *kernel.derived}:
            _fail(kernel, name, f"{limit} = {value!r} is no field{did_you_mean(value, kernel.fields)}")
    types = kernel.fields[each.dtype or "dtype"].words if (each.dtype or "dtype") in dtypes else (each.dtype,)  # type: ignore[union-attr]
    if each.speaks_of_integers and any(map(is_float, types)):
        _fail(kernel, name, f"{INTEGER_WORDS} are said of integers, and {name} holds floating-point numbers")
    if PACKED in types and (each.layout != "row" or each.listed):
        _fail(
            kernel, name, f"two numbers of {PACKED} share a byte along the last axis; declare one array of layout row"
        )
    if each.copy_of is not None:
        _check_copy(kernel, name, each)
    if each.cleared and POWERS_OF_TWO in types:
        _fail(kernel, name, f"{POWERS_OF_TWO} has no 0; leave zeroed out")
    if each.sorted and each.sentinels:
        _fail(kernel, name, "sorted values have no sentinels; give one of the two")


def _check_copy(kernel: KernelClass, name: str, each: ArrayField) -> None:
    source = kernel.array_fields.get(str(each.copy_of))
    if source is None or source.role != "in" or source.listed:
        inputs = [other for other, field in kernel.array_fields.items() if field.role == "in"]
        _fail(kernel, name, f"copy_of = {each.copy_of!r} is no input; known are {', '.join(inputs)}")
    elif isinstance(source.shape, str) and isinstance(each.shape, str):
        have, wanted = split_shape(source.shape), split_shape(each.shape)
        if wanted not in (have, have[:-2] + have[-2:][::-1]):
            _fail(
                kernel, name, f"a copy of {each.copy_of} has its shape, {source.shape!r}, or its last two axes swapped"
            )
    if each.zeroed:
        _fail(kernel, name, "a copy is not zero; give one of copy_of and zeroed")


def _names(kernel: KernelClass, name: str, text: str) -> frozenset[str]:
    try:
        return shape_names(text)
    except ValueError as error:
        raise DeclarationError(f"{kernel.__name__}.{name}: {error}") from error


def _check_knobs(kernel: KernelClass) -> None:
    for name, choices in kernel.knobs.items():
        if not isinstance(choices, Knob) and (isinstance(choices, str) or not isinstance(choices, Iterable)):
            _fail(kernel, f"knobs[{name!r}]", f"must be a list of choices, as in [64, 128], got {choices!r}")
    for name, each in kernel.knob_fields().items():
        wrong = [choice for choice in each.choices if name in HINT_KNOBS and choice not in HINT_KNOBS[name]]
        if wrong:
            _fail(kernel, f"knobs[{name!r}]", f"{wrong[0]!r} is no such hint; allowed are {allowed_hints(name)}")
        if name in {*kernel.fields, *kernel.array_fields, *kernel.scalar_fields, *kernel.derived}:
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

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getattr__(name)

    get = Mapping.get  # type: ignore[assignment]  # it reads the knob as above


_RecordingSchedule.__name__ = "Schedule"  # which the errors of an author's code name


def _check_launches(kernel: KernelClass, example: Problem) -> None:
    """Check that every parameter has an argument, that the grid is integers, and that every knob and array has an effect."""
    from tiledsched.core.launches import steps

    knobs = kernel.knob_fields()
    schedule = _RecordingSchedule({name: each.default for name, each in knobs.items()})
    _check_results(kernel, example, schedule)
    found = steps(kernel, example, schedule, ARCHS["sm_90"])
    _check_constants(kernel, found)
    taken = {argument.name for step in found for argument in step.arguments}
    chosen = kernel.entry is not None or kernel.launches is not None
    for name in knobs:
        if name not in taken | schedule.read and name not in HINT_KNOBS and not chosen:
            functions = ", ".join(step.function.__name__ for step in found)
            meant = did_you_mean(name, HINT_KNOBS)
            _fail(
                kernel,
                f"knobs[{name!r}]",
                f"neither a parameter of {functions} nor a hint ({', '.join(HINT_KNOBS)}){meant}, and "
                "read by neither grid nor constants; take it, or leave it out",
            )
    if not chosen:
        _check_taken(kernel, example, schedule, found)


def _check_results(kernel: KernelClass, example: Problem, schedule: Schedule) -> None:
    """Check what the simple functions of a declaration return for one problem and schedule. `rivals` is not called: it imports
    torch, which processes that compile do without.
    """
    number = (int, float)
    wanted: list[tuple[str, Callable[[], Any], Any, str]] = [
        *((f"derived[{name!r}]", functools.partial(getattr, example, name), object, "") for name in kernel.derived),
        ("constants", lambda: kernel.constants(example, schedule), Mapping, "a dict of a parameter and its value"),
        ("flops", lambda: kernel.flops(example), number, "a number"),
        (
            "tolerance",
            lambda: kernel.tolerance(example, schedule),
            Tolerance,
            "a ts.Tolerance, as in ts.Tolerance(relative=0.01)",
        ),
        ("check_tile", lambda: kernel.check_tile(example, schedule), tuple | list, "rows and columns, as in (64, 256)"),
    ]
    for field, call, kind, words in wanted:
        try:
            found = call()
        except DeclarationError:
            raise
        except Exception as error:
            _fail(kernel, field, f"for {example} it raises {describe(error)}")
        if not isinstance(found, kind):
            _fail(kernel, field, f"must return {words}, got {found!r}")


def _check_taken(kernel: KernelClass, example: Problem, schedule: Schedule, found: Iterable[Step]) -> None:
    """Check that the function takes every array, and a parameter every constant that the declaration returns."""
    parameters = {argument.name: step.function for step in found for argument in step.arguments}
    functions = ", ".join(dict.fromkeys(function.__name__ for function in parameters.values()))
    for name, field in kernel.array_fields.items():
        if name not in parameters and field.role != "workspace":
            _fail(
                kernel,
                name,
                f"{functions} takes no array of that name{did_you_mean(name, parameters)}; take it, or leave it out",
            )
    for name in kernel.constants(example, schedule):
        if name not in parameters:
            _fail(
                kernel,
                "constants",
                f"no parameter of {functions} is called {name!r}{did_you_mean(name, parameters)}; take it, or leave it out",
            )


def _check_constants(kernel: KernelClass, found: Iterable[Step]) -> None:
    """Check that parameters that are annotated as constant integers get integers."""
    for step in found:
        hints = typing.get_type_hints(step.function, include_extras=True)
        for each in step.arguments:
            wanted = typing.get_args(hints.get(each.name))
            if each.kind == "constant" and wanted and wanted[0] is int and isinstance(each.value, float):
                _fail(
                    kernel,
                    "constants",
                    f"{each.name} is annotated as a constant integer and gets {each.value!r}; // divides without a rest",
                )


def _check_use(kernel: KernelClass, example: Problem) -> None:
    """Check that something uses every size and scalar. Whatever a function of the author's mentions counts."""
    used = _words_of_functions(kernel)
    for each in kernel.array_fields.values():
        texts = [text for text in (each.shape, *each.limits.values()) if isinstance(text, str)]
        used |= {each.layout, each.when or "", *itertools.chain(*map(shape_names, texts))}
    for text in (*kernel.constraints, *kernel.exploring, *kernel.requires):
        used |= set(re.findall(r"\w+", text))
    if "values" in used or "names" in used:  # they may read any of them
        return
    for name, field in {**kernel.fields, **kernel.scalar_fields}.items():
        if name not in used and isinstance(field, (Dim, Sizes, Scalar)):
            _fail(kernel, name, "nothing uses it, no array, function or constraint; use it, or leave it out")


def _words_of_functions(kernel: KernelClass) -> set[str]:
    """Every name, attribute and text in the functions of the class and of its module, and of modules that it imports."""
    import cuda.tile as ct

    found: set[str] = set()
    left: list[Any] = [value for base in kernel.__mro__ if base not in Kernel.__mro__ for value in vars(base).values()]
    left += [*kernel.derived.values(), *(each.shape for each in kernel.array_fields.values())]
    left += [each.value for each in kernel.scalar_fields.values()]
    modules = [sys.modules[kernel.__module__]]
    folder, package = os.path.dirname(str(getattr(modules[0], "__file__", ""))), kernel.__module__.partition(".")[0]
    for module in modules:  # which grows by those of its own package or folder
        for value in vars(module).values():
            path = (
                str(getattr(value, "__file__", None)) if isinstance(value, ModuleType) and value not in modules else ""
            )
            if path and (value.__name__.partition(".")[0] == package or os.path.dirname(path) == folder):
                modules.append(value)
            left.append(value)
    seen: set[int] = set()
    while left:
        value = left.pop()
        if isinstance(value, ct.kernel):
            value = value._pyfunc
        elif isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            left += [value.__code__, *closed_over(value).values()]
        elif isinstance(value, CodeType):
            found |= {*value.co_names, *value.co_varnames, *value.co_freevars}
            left += value.co_consts
        elif isinstance(value, str):
            found.add(value)
        elif isinstance(value, (tuple, frozenset)):
            left += value
        elif isinstance(value, type) and value.__module__ == kernel.__module__:
            left += vars(value).values()
    return found


def _check_reference(kernel: KernelClass, example: Problem) -> None:
    """Check that the reference returns one array of the declared shape for each output, on a small problem."""
    small = shrunk(kernel, example)
    if any(each.bytes > 8 * MOST_CHECKED for each in kernel.arrays(small)):
        return
    rng = numpy.random.default_rng(0)
    results = expected_outputs(kernel, numpy, small, random_inputs(kernel, numpy, rng, small))
    wanted = output_specs(kernel, small)
    if len(results) < len(wanted):
        _fail(
            kernel,
            "reference",
            f"returns {len(results)} arrays; the outputs are {', '.join(each.name for each in wanted)}",
        )
    for each, result in zip(wanted, results, strict=False):
        types = {numpy.asarray(one).dtype for one in (result if each.listed else [result])}
        odd = [dtype for dtype in types if dtype.kind not in "biuf" and dtype.name not in DTYPES]
        if odd:
            _fail(
                kernel,
                "reference",
                f"returns {each.name} of {_said(odd[0])} for {small}; return an array of real numbers",
            )
        shapes = tuple(numpy.shape(one) for one in result) if each.listed else (numpy.shape(result),)
        if shapes != each.value_shapes:
            _fail(
                kernel,
                "reference",
                f"returns {each.name} of shape {shapes[0]} for {small}; declared is {each.value_shapes[0]}",
            )


def _said(dtype: Any) -> str:
    """An element type of NumPy that no output has, in words."""
    return {"O": "Python objects", "U": "text", "S": "text", "c": "complex numbers"}.get(dtype.kind, f"type {dtype}")
