"""What an author declares of a kernel, and what everything else asks of it.

A kernel is a class that is never instantiated: its fields are data, and the functions an author overrides take the
problem `p` and the schedule `s`. Declarations are checked when the class is made; docs/kernels.md shows one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from tiledsched.core import registry as kernel_names
from tiledsched.core.errors import ConfigError, DeclarationError, ProblemError
from tiledsched.core.fields import (
    ITEM_BYTES,
    ArrayField,
    Choice,
    Dim,
    Flag,
    KnobField,
    ProblemField,
    Scalar,
    Value,
    read_shape,
)
from tiledsched.core.problem import Problem, describe_values
from tiledsched.core.schedule import PLAIN, Schedule

if TYPE_CHECKING:
    from tiledsched.core.device import ArchSpec
    from tiledsched.core.resources import ResourceFacts

HINT_KNOBS: Mapping[str, Sequence[int]] = {
    "num_ctas": (0, 1, 2, 4, 8, 16),
    "occupancy": range(33),
    "opt_level": range(4),
    "num_worker_warps": (0, 1, 2, 4, 8, 16, 32),
}
"""Knobs that reach cuTile as kernel hints, and what compilers (13.4) take, 0 for their own choice; the rest are compile-time
constants of the kernel.
"""
LARGEST_INT32 = 2**31 - 1
FUNCTIONS = (
    "grid",
    "reference",
    "entry",
    "launches",
    "constants",
    "canonical",
    "flops",
    "bytes_moved",
    "inputs",
    "tolerance",
    "check_tile",
    "adversarial",
    "model",
    "expected",
    "similarity",
    "kind",
    "rival_kind",
    "distance",
    "rounded",
    "requires_same_kind",
    "equivalents",
    "loss_group",
    "cold_start",
    "unsound",
    "describe",
    "file_words",
    "likely",
    "small",
    "rivals",
)
"""What a declaration may override."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """An array of one problem."""

    name: str
    """Its field."""
    role: str
    """in, out, inout or workspace."""
    dtype: str
    """Element type, by cuTile's name."""
    shapes: tuple[tuple[int, ...], ...]
    """Elements along each axis: one shape, or one for each array of a list."""
    column: bool = False
    """Whether the last two axes are swapped in memory."""
    listed: bool = False
    """Whether it is a list."""
    aligned: bool = False
    """Of scratch memory: whether machine code counts on the alignment of its rows."""
    zeroed: bool = False
    """Whether it must hold zeros when the kernel starts. The kernel leaves zeros behind, so once is enough."""
    absolute: bool = False
    """Whether its errors are judged as they are."""
    below: int | None = None
    """Of integer inputs: they are at least 0 and less than this."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the only array."""
        return self.shapes[0]

    @property
    def bytes(self) -> int:
        """Of all its elements."""
        return sum(math.prod(shape) for shape in self.shapes) * ITEM_BYTES[self.dtype]

    @property
    def wide(self) -> bool:
        """Whether some element lies beyond what a 32-bit index reaches."""
        return any(math.prod(shape) > LARGEST_INT32 for shape in self.shapes)


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What is asked of the outputs of a schedule."""

    relative: float
    """Largest relative Frobenius error of a tile that passes."""
    absolute: float = 2e-3
    """Largest absolute error of outputs that are judged by it."""
    except_kinds: tuple[str, ...] = ()
    """Kinds of inputs of which nothing is asked."""


RELATIVE_ERRORS = {
    "float16": 4e-3,
    "bfloat16": 2e-2,
    "float32": 2e-3,
    "float64": 1e-6,
    "float8_e4m3fn": 1e-1,
    "float8_e5m2": 2e-1,
}
"""By output type: about eight times what rounding to it makes. float32 leaves room for products in tf32."""


class Kernel:
    """A tunable kernel. Subclass it; see docs/kernels.md for what may be declared.

    Raises:
        DeclarationError: by making the subclass, where the declaration is wrong: it names the field and what is allowed.
    """

    # What an author declares.
    name: ClassVar[str] = ""
    """As tables and the database know it: module and class unless given."""
    function: ClassVar[Any] = None
    """The cuTile kernel, decorated or not."""
    knobs: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Knob -> its choices, the default first; or :func:`tiledsched.knob`. Empty where search-space files have them."""
    constraints: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Expression -> why a schedule that breaks it cannot work."""
    exploring: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Expression -> why what breaks it, and works, is not searched."""
    suites: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]] = MappingProxyType({})
    """Name -> problems that are tuned and benched together."""
    default_suite: ClassVar[str] = ""
    """The suite that is meant where no problem is named; empty where all of them are."""
    derived: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})
    """Name -> function of the problem, for constraints, shapes and functions."""
    label: ClassVar[Mapping[str, str | tuple[str, ...]]] = MappingProxyType({})
    """Short name -> the dim it stands for, or several dims where they are equal."""
    written: ClassVar[Mapping[str, str | tuple[str, ...]]] = MappingProxyType({})
    """Further short names that :meth:`describe` writes -> the dim, or dims with slashes between them."""
    axes: ClassVar[tuple[str, ...]] = ()
    """Dims along which reports look, the most telling first; the problem's sizes unless given."""
    plain: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Knob values that go without saying when a schedule is written for people."""
    former_values: ClassVar[Mapping[tuple[str, Any], Any]] = MappingProxyType({})
    """(knob, value of an earlier version) -> what it is called now, for stored schedules."""
    weights: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Knob -> how much of what two programs share is lost where they differ in it."""

    # What is made of it.
    fields: ClassVar[Mapping[str, ProblemField]] = MappingProxyType({})
    array_fields: ClassVar[Mapping[str, ArrayField]] = MappingProxyType({})
    scalar_fields: ClassVar[Mapping[str, Scalar]] = MappingProxyType({})

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
            cls.name = f"{kernel_names.module_word(cls)}:{cls.__name__}"
        PLAIN.update({name: value for name, value in cls.plain.items() if name not in PLAIN})
        from tiledsched.core.validate import check_declaration

        with kernel_names.known_as_declared(cls):  # its problems ask it for what is derived, also while it is checked
            check_declaration(cls)

    # What an author may override. `p` is the problem, `s` the schedule.

    @staticmethod
    def grid(p: Any, s: Any, device: Any) -> Sequence[int] | int:
        """Blocks along up to three axes; `device` has `sm_count` and `arch`."""
        raise DeclarationError("a kernel needs grid(p, s, device): the number of blocks along 1 to 3 axes")

    reference: ClassVar[Any] = None
    """`reference(xp, ...)`: the outputs in high precision, from float64 inputs by name: an array, or a tuple of them."""

    entry: ClassVar[Any] = None
    """`entry(p, s)`: which function a schedule runs."""
    launches: ClassVar[Any] = None
    """`launches(p, s, device)`: a list of (function, grid), run one after the other."""

    @staticmethod
    def constants(p: Any, s: Any) -> Mapping[str, Any]:
        """Values of parameters that are called like nothing declared."""
        return {}

    @staticmethod
    def canonical(values: dict[str, Value]) -> dict[str, Value]:
        """One of several ways to say a problem; raises ProblemError where values do not go together."""
        return values

    @staticmethod
    def flops(p: Any) -> float:
        """Floating-point operations."""
        return 0.0

    @staticmethod
    def inputs(xp: Any, rng: Any, p: Any) -> Mapping[str, Any]:
        """Inputs that are not to be drawn from a normal distribution, by name."""
        return {}

    @classmethod
    def tolerance(cls, p: Any, s: Any) -> Tolerance:
        """What is asked of the outputs."""
        outputs = [each.dtype for each in cls.arrays(p) if each.role in ("out", "inout")]
        return Tolerance(relative=max((RELATIVE_ERRORS.get(each, 0.0) for each in outputs), default=0.0))

    @staticmethod
    def check_tile(p: Any, s: Any) -> tuple[int, int]:
        """Rows and columns of the tiles that errors are taken over; the rows are those of one index of all outer axes."""
        return 64, 256

    adversarial: ClassVar[Any] = None
    """`adversarial(xp, rng, p, reference)`: yields cases of its own; see :mod:`tiledsched.core.cases`."""

    @classmethod
    def model(cls, p: Any, s: Any, facts: ResourceFacts, spec: ArchSpec) -> float:
        """Estimated microseconds; only their order is used."""
        from tiledsched.core.roofline import estimate_us

        return estimate_us(cls, p, s, facts, spec)

    @classmethod
    def expected(cls, p: Any, s: Any, spec: ArchSpec) -> ResourceFacts:
        """What machine code that was not built will probably take."""
        from tiledsched.core.roofline import expected_facts

        return expected_facts(s, spec)

    @classmethod
    def similarity(cls, p: Any, q: Any) -> float:
        """How much measurements of one problem say of another: 1 for the same, less for each difference."""
        return math.exp(-0.1 * cls.octaves(p, q) - 0.1 * cls.differences(p, q))

    @classmethod
    def kind(cls, p: Any) -> tuple[Any, ...]:
        """What a problem must share with another so that its winner says much."""
        return tuple(p.values[name] for name, each in cls.fields.items() if isinstance(each, (Choice, Flag)))

    @staticmethod
    def rival_kind(p: Any) -> tuple[Any, ...]:
        """What a problem must share with another, beside that, so that what rivals took there says something of it."""
        return ()

    @classmethod
    def distance(cls, p: Any, q: Any) -> float:
        """How unlike two problems of one kind are, in octaves of size; of sizes that machine code is made for, twice as much."""
        constant = [name for name, each in cls.fields.items() if isinstance(each, Dim) and each.constant]
        return cls.octaves(p, q) + cls.octaves(p, q, constant) + 0.3 * cls.differences(p, q)

    @staticmethod
    def rounded(p: Any) -> Any:
        """A problem that stands for all of about its size, so that one answer serves them."""
        return p

    @staticmethod
    def equivalents(p: Any, q: Any, s: Any) -> Sequence[Any]:
        """Schedules that are the program of `s` on problem `p`, and another on `q` that may be faster there."""
        return ()

    @staticmethod
    def requires_same_kind(p: Any) -> bool:
        """Whether winners of other kinds say nothing of this problem."""
        return False

    @staticmethod
    def loss_group(p: Any) -> str:
        """The problems among which what a transfer to this one loses was measured; empty where that was never."""
        return ""

    cold_start: ClassVar[Any] = None
    """`cold_start(p, default, space, estimate)`: the schedule where nothing near was measured; None to leave the default.
    `estimate(schedule)` is in microseconds, or a logarithm of them."""

    @staticmethod
    def unsound(p: Any, s: Any, facts: ResourceFacts, arch: str) -> str | None:
        """Why the machine code must not be run, where the compiler is known to make it wrong; else None."""
        return None

    @classmethod
    def describe(cls, p: Any) -> str:
        """A problem for people."""
        return describe_values(p.values)

    file_words: ClassVar[Any] = None
    """`file_words(p)`: the problem in the name of a file; kernel and values unless given."""
    variants: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Ways in which a program's problems may differ from the tuned ones -> what each means; `warmup --also` takes them."""
    likely: ClassVar[Any] = None
    """`likely(p, variants)`: the problems like `p` that the variants name, each with its values as text."""
    small: ClassVar[Any] = None
    """`small()`: problems that the interpreter runs in a moment, odd sizes among them."""

    planning_rivals: ClassVar[tuple[str, ...]] = ()
    """Rivals that plan each problem they have not seen, for tens of milliseconds: they serve only what they were measured on."""

    compiled_rivals: ClassVar[tuple[str, ...]] = ()
    """Rivals whose first call in a process takes seconds: they serve where each call gains a microsecond or more."""

    @staticmethod
    def rivals(p: Any) -> Mapping[str, Callable[..., Any]]:
        """Name -> what returns the outputs of inputs (torch tensors, in the order declared), which it leaves as they are.

        Where it has a method `bind`, that is given inputs first and returns the call on them: it reads what of their values must
        be known before, which is not timed.
        """
        return {}

    # What everything else asks.

    @classmethod
    def problem(cls, **values: Any) -> Problem:
        """The problem with these values; fields not named are at their defaults.

        Raises:
            ProblemError: a value is missing, unknown or not allowed.
        """
        unknown = sorted(set(values) - set(cls.fields))
        if unknown:
            raise ProblemError(f"unknown problem keys {unknown}; known are {sorted(cls.fields)}")
        missing = [name for name, each in cls.fields.items() if name not in values and each.default is None]
        if missing:
            raise ProblemError(f"a problem of {cls.name} needs {missing}")
        try:
            found = {name: each.read(name, values.get(name, each.default)) for name, each in cls.fields.items()}
        except ValueError as error:
            raise ProblemError(str(error)) from error
        found = cls.canonical(found)
        omitted = frozenset(
            name for name, each in cls.fields.items() if each.omit_default and found[name] == each.default
        )
        return Problem(cls.name, found, omitted=omitted)

    @classmethod
    def suite(cls, name: str) -> list[Problem]:
        """The problems of a suite.

        Raises:
            ConfigError: no such suite.
        """
        if name not in cls.suites:
            known = ", ".join(cls.suites) or "none"
            raise ConfigError(f"{cls.name} has no suite {name!r}; known are {known}")
        return [each if isinstance(each, Problem) else cls.problem(**each) for each in cls.suites[name]]

    @classmethod
    def default_problems(cls) -> list[Problem]:
        """The problems that are meant where none is named: those of the default suite, or of every suite."""
        names = [cls.default_suite] if cls.default_suite else cls.suites
        return list(dict.fromkeys(problem for name in names for problem in cls.suite(name)))

    @classmethod
    def arrays(cls, p: Problem) -> tuple[ArraySpec, ...]:
        """Inputs and outputs in the order declared; outputs and inputs that the problem does without are left out."""
        wanted = (name for name, each in cls.array_fields.items() if each.role != "workspace")
        return tuple(cls.array_spec(name, p) for name in wanted if cls.present(name, p))

    @classmethod
    def present(cls, name: str, p: Problem) -> bool:
        """Whether the problem has this array."""
        when = cls.array_fields[name].when
        return when is None or bool(getattr(p, when))

    @classmethod
    def array_spec(cls, name: str, p: Problem, s: Schedule | None = None) -> ArraySpec:
        """One array of a problem; that of an absent input has one element, that of an absent output is scratch."""
        scratch = cls.array_fields[name].role == "workspace"
        # What is no scratch depends on no schedule.
        return cls._read_array(name, p, s) if scratch else _kept_array(cls, name, p)  # type: ignore[arg-type]

    @classmethod
    def _read_array(cls, name: str, p: Problem, s: Schedule | None) -> ArraySpec:
        each = cls.array_fields[name]
        absent = not cls.present(name, p)
        dtype = each.dtype or "dtype"
        if dtype in cls.fields:
            dtype = str(p.values[dtype])
        layout = str(getattr(p, each.layout)) if each.layout in cls.fields else each.layout
        shapes = cls._shapes(each, p, s)
        if absent and each.role == "in":
            shapes = tuple((1,) * len(shape) for shape in shapes)
        below = each.below if each.below is None or isinstance(each.below, int) else int(getattr(p, each.below))
        return ArraySpec(
            name=name,
            role="workspace" if absent else each.role,
            dtype=dtype,
            shapes=shapes,
            column=layout == "column",
            listed=each.listed,
            aligned=each.aligned,
            zeroed=each.zeroed,
            absolute=each.absolute,
            below=below,
        )

    @classmethod
    def _shapes(cls, each: ArrayField, p: Problem, s: Schedule | None) -> tuple[tuple[int, ...], ...]:
        if isinstance(each.shape, str):
            return (
                read_shape(each.shape, lambda name: int(s[name] if s is not None and name in s else getattr(p, name))),
            )
        found = each.shape(p, s) if each.role == "workspace" else each.shape(p)
        return tuple(map(tuple, found)) if each.listed else (tuple(found),)

    @classmethod
    def bytes_moved(cls, p: Any) -> int:
        """Least device-memory traffic: every input read once, every output written once."""
        return sum(each.bytes * (2 if each.role == "inout" else 1) for each in cls.arrays(p))

    @classmethod
    def grids(cls, p: Problem, s: Schedule, device: Any) -> tuple[tuple[int, int, int], ...]:
        """The grid of each launch: with the machine code they say which program a schedule is."""
        if cls.launches is not None:
            return tuple(cls.read_grid(grid) for _, grid in cls.launches(p, s, device))
        return (cls.read_grid(cls.grid(p, s, device)),)

    @classmethod
    def read_grid(cls, grid: Any) -> tuple[int, int, int]:
        """A grid of three axes.

        Raises:
            DeclarationError: not 1 to 3 positive integers.
        """
        axes = (grid,) if isinstance(grid, int) else tuple(grid) if isinstance(grid, Sequence) else ()
        whole = all(type(axis) is int and axis > 0 for axis in axes)
        if not 1 <= len(axes) <= 3 or not whole:
            raise DeclarationError(
                f"{cls.__name__}.grid: must be 1 to 3 positive integers, got {grid!r}; -(-a // b) rounds up"
            )
        return (*axes, *(1,) * (3 - len(axes)))

    @classmethod
    def scalar_values(cls, p: Problem) -> dict[str, float | int]:
        """The run-time numbers of a problem."""
        return {name: each.value(p) if callable(each.value) else each.value for name, each in cls.scalar_fields.items()}

    @classmethod
    def octaves(cls, p: Any, q: Any, names: Sequence[str] | None = None) -> float:
        """Octaves between the sizes of two problems, all together, or those named."""
        pairs = ((p.values[name], q.values[name]) for name in (p.values if names is None else names))
        return sum(
            abs(math.log2(max(1, total(one)) / max(1, total(other))))
            for one, other in pairs
            if isinstance(one, (int, tuple)) and not isinstance(one, bool)
        )

    @classmethod
    def differences(cls, p: Any, q: Any) -> int:
        """How many flags and choices differ."""
        return sum(
            p.values[name] != q.values[name] for name, each in cls.fields.items() if isinstance(each, (Choice, Flag))
        )

    @classmethod
    def problem_kind(cls, p: Any) -> tuple[Any, ...]:
        """Everything of a problem but its run-time sizes."""
        return tuple(p.values[name] for name, each in cls.fields.items() if not isinstance(each, Dim) or each.constant)

    @classmethod
    def knob_fields(cls) -> dict[str, KnobField]:
        """The declared knobs."""
        return {
            name: each
            if isinstance(each, KnobField)
            else KnobField(choices=tuple(each), default=next(iter(each), None))
            for name, each in cls.knobs.items()
        }

    @classmethod
    def locator(cls) -> str:
        """`module:Class`, or `/path/file.py:Class`: where another process finds it.

        Raises:
            DeclarationError: it was made at a prompt, where no other process can.
        """
        return kernel_names.locator(cls)

    @classmethod
    def source_hash(cls) -> str:
        """Hash of the source of the modules of its functions: builds of other source are not looked up, but made again."""
        from tiledsched.core.launch import source_hash

        return source_hash(cls)


KernelClass = type[Kernel]


@functools.lru_cache(maxsize=4096)
def _kept_array(kernel: KernelClass, name: str, p: Problem) -> ArraySpec:
    """A search asks for the same arrays with every schedule."""
    return kernel._read_array(name, p, None)


def allowed_hints(name: str) -> str:
    """The values of a hint, for people: `0, 4, 8` or `0 to 32`."""
    values = HINT_KNOBS[name]
    return f"{values[0]} to {values[-1]}" if isinstance(values, range) else ", ".join(map(str, values))


def labels_of(kernel: KernelClass) -> dict[str, tuple[str, ...]]:
    """Short name -> the dims it stands for."""
    return {short: (names,) if isinstance(names, str) else tuple(names) for short, names in kernel.label.items()}


def total(value: Any) -> int:
    """A size: of several, their sum."""
    return sum(value) if isinstance(value, tuple) else int(value)


def told(problem: Problem) -> str:
    """What `--problem` takes for it: short names where they say it, and no field that has its default."""
    kernel, words, said = problem.declaration, [], set[str]()
    for short in short_names(kernel):
        names = labels_of(kernel)[short]
        if len({problem.values[name] for name in names}) == 1:
            words.append(f"{short}={_word(problem.values[names[0]])}")
            said |= set(names)
    words += [
        f"{name}={_word(value)}"
        for name, value in problem.values.items()
        if name not in said and value != kernel.fields[name].default
    ]
    return ",".join(words)


def short_names(kernel: KernelClass) -> list[str]:
    """Labels that stand for fields."""
    return [short for short in kernel.label if fields_called(kernel, short) is not None]


def fields_called(kernel: KernelClass, key: str, several: bool = False) -> tuple[str, ...] | None:
    """The fields that a name or label stands for, with `several` those of a value with slashes; None where there are none."""
    names = kernel.written.get(key) if several or key not in kernel.label else None
    names = (names,) if isinstance(names, str) else names or labels_of(kernel).get(key, (key,))
    return names if all(name in kernel.fields for name in names) else None


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
