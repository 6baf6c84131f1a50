"""Problems and the declarations that make them: what is computed, as a kernel and a value for each of its fields.

A problem holds its kernel's declaration, and a declaration makes problems, so that the two classes stand together.
:class:`tiledsched.core.kernel.Kernel`, which authors subclass, is a declaration that is checked when the class is made.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from tiledsched.core.arrays import ArraySpec, Tolerance, is_float
from tiledsched.core.canonical import stable_id
from tiledsched.core.cost import Cost
from tiledsched.core.device import LEAST_CAPABILITY, ResourceFacts
from tiledsched.core.errors import ConfigError, DeclarationError, ProblemError, did_you_mean
from tiledsched.core.fields import ArrayField, Dim, Knob, Preparation, ProblemField, Scalar, Value, knob
from tiledsched.core.integers import Integers
from tiledsched.core.schedule import Schedule
from tiledsched.core.shapes import read_shape, read_size, split_shape
from tiledsched.core.similarity import Similarity
from tiledsched.core.sources import evidence_source, is_shipped, source_hash

REPRESENTATIVE_SIZE = 256
"""The size of batch dims for which the one schedule is chosen that serves all their sizes, where none was tuned."""
FILE_PREFIX = "tiledsched_file_"
"""How the names of modules begin that were loaded from a file."""
VERSIONED = re.compile(r"(\w+)_[0-9a-f]{8}")
"""The names of kernels that end in a hash of their code, so that other code is another kernel."""


class Problem:
    """One case of a kernel. Problems are immutable, and equal where the kernel's name and all values are equal.

    `Kernel.problem(...)` and :func:`tiledsched.core.registry.problem_from_json` make them. A value is read as an attribute
    (`problem.rows`), and so is everything that the kernel derives from the values.
    """

    kernel: str
    """The kernel's name."""
    values: Mapping[str, Value]
    """A value for each field, in the order in which the kernel declares the fields."""

    def __init__(
        self, kernel: type[Declaration] | str, values: Mapping[str, Value], *, omitted: frozenset[str] = frozenset()
    ) -> None:
        """Make a problem of valid values.

        Args:
            kernel: the declaration, or the name of a kernel that this process does not know.
            values: a value for each field.
            omitted: the fields that are left out of the JSON.
        """
        name = kernel if isinstance(kernel, str) else kernel.name
        plain = {
            field: list(value) if isinstance(value, tuple) else value
            for field, value in values.items()
            if field not in omitted
        }
        # Values are plain attributes, which serving and search read by the hundred for every problem. What is derived joins them.
        self.__dict__.update(
            values if _OWN.isdisjoint(values) else {field: values[field] for field in values.keys() - _OWN}
        )
        self.__dict__.update(
            kernel=name,
            values=dict(values),
            _declaration=None if isinstance(kernel, str) else kernel,
            _json={"kernel": name, **plain},
            _hash=hash((name, tuple(values.items()))),
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a problem cannot be changed; use problem.replace({name}=...)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        derived = self.declaration.derived
        if name not in derived:
            meant = did_you_mean(name, [*self.values, *derived])
            raise AttributeError(
                f"{self.kernel} has no field {name!r}; it has {', '.join([*self.values, *derived])}{meant}"
            )
        found = self.__dict__[name] = derived[name](self)
        return found

    @property
    def declaration(self) -> type[Declaration]:
        """The declaration of the problem's kernel.

        Raises:
            ConfigError: this process did not know the kernel when the problem was made.
        """
        found: type[Declaration] | None = self._declaration
        if found is None:
            raise unknown_kernel(self.kernel)
        return found

    @property
    def known(self) -> bool:
        """Whether this process knows the kernel."""
        return self._declaration is not None

    @property
    def names(self) -> dict[str, Any]:
        """Everything about the problem that constraints may read: its values, and what the kernel derives from them."""
        return {**self.values, **{name: getattr(self, name) for name in self.declaration.derived}}

    # The model asks for the next two with every schedule, so that they are worked out once.

    @functools.cached_property
    def flops(self) -> float:
        """Floating-point operations; 0 where the kernel states none or is unknown."""
        return float(self.declaration.flops(self)) if self.known else 0.0

    @functools.cached_property
    def min_bytes(self) -> int:
        """Least device-memory traffic in bytes: every input read once, every output written once; 0 for an unknown kernel."""
        return self.declaration.cost.bytes_moved(self) if self.known else 0

    def tflops(self, median_us: float) -> float:
        """The rate in TFLOP/s of a run that takes `median_us` microseconds."""
        return self.flops / median_us / 1e6

    def gbps(self, median_us: float) -> float:
        """The least traffic of the problem over `median_us` microseconds, in GB/s."""
        return self.min_bytes / median_us / 1e3

    def to_json(self) -> dict[str, Any]:
        """A plain dict of the kernel's name and the values; :func:`tiledsched.core.registry.problem_from_json` inverts it.

        Fields declared with `omit_default` are left out at their defaults, so that a field added later changes no stored id.
        """
        return dict(self._json)

    @functools.cached_property
    def id(self) -> str:
        """Stable 12-digit hex id: equal problems have equal ids in every process and version."""
        return stable_id(self._json)

    @property
    def omitted(self) -> frozenset[str]:
        """The fields that are left out of the JSON."""
        return frozenset(set(self.values) - set(self._json))

    def replace(self, **changes: Any) -> Problem:
        """A copy of the problem with some values changed."""
        return self.declaration.problem(**{**self.values, **changes})

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Problem)
            and self._hash == other._hash
            and self.kernel == other.kernel
            and self.values == other.values
        )

    def __hash__(self) -> int:
        return int(self._hash)

    def __lt__(self, other: Problem) -> bool:
        return self._order < other._order

    @functools.cached_property
    def _order(self) -> tuple[Any, ...]:
        return self.kernel, tuple((type(value).__name__, value) for value in self.values.values())

    def __str__(self) -> str:
        return self.declaration.describe(self) if self.known else describe_values(self.values)

    def __repr__(self) -> str:
        return f"Problem({self.kernel}: {describe_values(self.values)})"


_OWN = frozenset(dir(Problem))
"""Attributes that every problem has, whatever its kernel calls its fields."""


def unknown_kernel(name: str, meant: str = "") -> ConfigError:
    """The error for a kernel that this process does not know, and what may have been meant."""
    return ConfigError(
        f"kernel {name!r} is not known here{meant}; name the file or module that declares it (file.py:Class)"
    )


@dataclass(frozen=True)
class ProblemClass:
    """Everything about a problem and a schedule's signature that the machine code depends on, apart from the knobs.

    Problems of one class share their artifacts.
    """

    values: Mapping[str, Any]
    """The compile-time fields of the problem, for people, and `signature`, a hash of every assumption of the compiler."""

    def __hash__(self) -> int:
        return hash(self.id)

    @functools.cached_property
    def id(self) -> str:
        """Stable id, which is part of the key under which a build is stored."""
        return stable_id(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """A plain dict; :meth:`from_json` inverts it."""
        return dict(self.values)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProblemClass:
        """The problem class that :meth:`to_json` wrote."""
        return cls(dict(data))


def unit_of(problem: Problem) -> str:
    """The unit in which the problem's rates are given: TFLOP/s, or GB/s where the problem has no FLOPs."""
    return "TFLOP/s" if problem.flops else "GB/s"


def unit_text(problem: Problem) -> str:
    """The unit of the problem's rates for people, with what its FLOPs count where that is not the work done."""
    counted = problem.declaration.counted_work if problem.known and problem.flops else ""
    return f"{unit_of(problem)} {counted}".rstrip()


def rate_of(problem: Problem, us: float) -> float:
    """The rate of a run that takes `us` microseconds, in the problem's unit."""
    return problem.tflops(us) if problem.flops else problem.gbps(us)


def rate_text(problem: Problem, us: float, places: int = 0) -> str:
    """The rate of a run that takes `us` microseconds with its unit: `612 TFLOP/s`; empty where the kernel says neither FLOPs
    nor bytes."""
    return f"{rate:.{places}f} {unit_text(problem)}" if (rate := rate_of(problem, us)) else ""


def describe_values(values: Mapping[str, Value]) -> str:
    """`rows=4096 columns=8192 float16`: the name of a type stands alone, and so does the name of a flag that is true."""
    parts = []
    for name, value in values.items():
        if isinstance(value, bool):
            parts.extend([name] if value else [])
        elif isinstance(value, str):
            parts.append(value if name == "dtype" else f"{name}={value}")
        else:
            parts.append(f"{name}={','.join(map(str, value))}" if isinstance(value, tuple) else f"{name}={value}")
    return " ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A condition that every problem of a kernel meets."""

    require: str
    """The expression, as it is written."""
    because: str
    """The reason, for people whose problem was refused."""
    names: tuple[str, ...]
    """The names that the expression reads, in the order of `holds`."""
    holds: Callable[..., Any]
    """The expression as a function of the values of `names`."""


class Declaration:
    """What is declared of a kernel, and the questions that the rest of the package asks about it.

    The class is never instantiated. Its attributes are data, and the functions an author overrides take the problem `p` and the
    schedule `s`.
    """

    # What an author declares as data.
    name: ClassVar[str] = ""
    """The kernel's name in tables and in the database. The default is module and class."""
    space: ClassVar[str] = ""
    """The kernel whose files of search spaces are its own, too, with the constraints that it adds, and whose winners serve it
    until it is tuned: its problems must have the same fields. The default is its name."""
    timed_with: ClassVar[str] = ""
    """The kernel whose timed problems say what this one takes where neither it nor its rivals were timed; see
    :meth:`tiledsched.core.cost.Cost.lent_times`."""
    declared_in: ClassVar[str] = ""
    """The module that declares the kernel, where the class is made by another one."""
    function: ClassVar[Any] = None
    """The cuTile kernel, decorated or not."""
    knobs: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Knob -> its choices, the default first; or :func:`tiledsched.knob`. Empty where search-space files list the knobs."""
    constraints: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Expression -> why a schedule that breaks it cannot work."""
    exploring: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Expression -> why a schedule that breaks it works, but is not searched."""
    requires: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Expression over a problem's fields -> why a problem that breaks it is none of this kernel's."""
    suites: ClassVar[Mapping[str, Sequence[Mapping[str, Any]]]] = MappingProxyType({})
    """Name -> problems that are tuned and benched together."""
    default_suite: ClassVar[str] = ""
    """The suite that is meant where no problem is named; empty where all suites are."""
    derived: ClassVar[Mapping[str, Callable[[Any], Any]]] = MappingProxyType({})
    """Name -> function of the problem, for constraints, shapes and functions."""
    label: ClassVar[Mapping[str, str | tuple[str, ...]]] = MappingProxyType({})
    """Short name -> the dim that it stands for, or several dims where they are equal."""
    written: ClassVar[Mapping[str, str | tuple[str, ...]]] = MappingProxyType({})
    """Further short names that :meth:`describe` writes -> the dim, or the dims that are written with slashes between them."""
    axes: ClassVar[tuple[str, ...]] = ()
    """Dims along which reports look, the most telling one first. The default is the problem's sizes."""
    plain: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Knob values that are left out when a schedule is written for people."""
    former_values: ClassVar[Mapping[tuple[str, Any], Any]] = MappingProxyType({})
    """(knob, value in an earlier version) -> the value's name today, for stored schedules."""
    former_knobs: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})
    """Knob of an earlier version -> the values of it that made the program of today, for stored schedules."""
    weights: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Knob -> its weight w in the search: schedules that differ in the knob share exp(-w) of what they would share."""
    planning_rivals: ClassVar[tuple[str, ...]] = ()
    """Rivals that spend tens of milliseconds on each new problem. They serve only the problems they were measured on, and where
    published times let expect that each call gains a millisecond."""
    compiled_rivals: ClassVar[tuple[str, ...]] = ()
    """Rivals whose first call in a process takes seconds. They serve where each call gains a microsecond or more."""
    is_called: ClassVar[bool] = False
    """Whether it is known from calls of `exhaustive_search` alone: its own program chooses, launches and measures."""
    counted_work: ClassVar[str] = ""
    """What follows the rates of problems in TFLOP/s where `flops` counts other work than is done, such as "of all pairs"."""
    cost: ClassVar[Cost] = Cost()
    """Least traffic and the model of a schedule's time."""
    similarity: ClassVar[Similarity] = Similarity()
    """How much one problem says about another."""
    batch_dims: ClassVar[tuple[str, ...]] = ()
    """Dims that count rows which must not influence one another where `numerics` is "invariant", such as a product's rows of A.
    Empty where the kernel does not support that."""
    unordered: ClassVar[str] = "declares no batch_dims and no reduction_order"
    """Why a kernel without batch dims has none, after its name in a sentence."""

    # What is read from the class body when the class is made.
    fields: ClassVar[Mapping[str, ProblemField]] = MappingProxyType({})
    array_fields: ClassVar[Mapping[str, ArrayField]] = MappingProxyType({})
    scalar_fields: ClassVar[Mapping[str, Scalar]] = MappingProxyType({})
    requirements: ClassVar[Sequence[Requirement]] = ()

    # What an author may override. `p` is the problem, `s` the schedule.

    @staticmethod
    def grid(p: Any, s: Any, device: Any) -> Sequence[int] | int:
        """Blocks along up to three axes; `device` has `sm_count` and `arch`."""
        raise DeclarationError("a kernel needs grid(p, s, device): the number of blocks along 1 to 3 axes")

    reference: ClassVar[Any] = None
    """`reference(xp, ...)`: the outputs in high precision, from float64 inputs by name: an array or a tuple of arrays."""

    entry: ClassVar[Any] = None
    """`entry(p, s)`: the function that a schedule runs."""
    launches: ClassVar[Any] = None
    """`launches(p, s, device)`: a list of pairs of function and grid, which run one after the other."""

    @staticmethod
    def constants(p: Any, s: Any) -> Mapping[str, Any]:
        """Values of the function's parameters whose names match nothing declared."""
        return {}

    @staticmethod
    def canonical(values: dict[str, Value]) -> dict[str, Value]:
        """The values that stand for all equivalent ways to state a problem; raises ProblemError where values contradict."""
        return values

    @staticmethod
    def flops(p: Any) -> float:
        """Floating-point operations of a problem; 0 for a kernel that is limited by memory."""
        return 0.0

    @staticmethod
    def inputs(xp: Any, rng: Any, p: Any) -> Mapping[str, Any]:
        """Inputs, by name, that must not be drawn from a normal distribution."""
        return {}

    @classmethod
    def tolerance(cls, p: Any, s: Any) -> Tolerance:
        """How exact the outputs must be. The default follows from the types of inputs and outputs."""
        specs = cls.arrays(p)
        outputs = [each.dtype for each in specs if each.role in ("out", "inout")]
        return Tolerance.of_types(
            outputs, [each.dtype for each in specs if each.role != "out" and is_float(each.dtype)]
        )

    @staticmethod
    def check_tile(p: Any, s: Any) -> tuple[int, int]:
        """Rows and columns of the tiles over which errors are taken. All rows of a tile have the same index on the outer axes."""
        return 64, 256

    adversarial: ClassVar[Any] = None
    """`adversarial(xp, rng, p, reference)`: yields cases of the kernel's own; see :mod:`tiledsched.core.cases`."""

    @staticmethod
    def unsound(p: Any, s: Any, facts: ResourceFacts, arch: str) -> str | None:
        """Why machine code must not run, where the compiler is known to make it wrong; None where it may run."""
        return None

    spill_class: ClassVar[Any] = None
    """`spill_class(p, s)`: JSON values that decide whether the program of a schedule spills registers, so that one build answers
    for all problems that agree in them. The default is everything that the machine code depends on."""

    @classmethod
    def describe(cls, p: Any) -> str:
        """The problem in one line, for people."""
        return describe_values({name: value for name, value in p.values.items() if name not in p.omitted})

    file_words: ClassVar[Any] = None
    """`file_words(p)`: the problem in the name of a file. The default is the kernel and the values."""
    small: ClassVar[Any] = None
    """`small()`: problems that the interpreter runs in a moment, odd sizes among them."""

    @staticmethod
    def rivals(p: Any) -> Mapping[str, Callable[..., Any]]:
        """Other implementations of the problem: name -> a function from the inputs to the outputs.

        Inputs are torch tensors in the order declared, and must not be changed. A rival with a method `bind` is given the inputs
        before it is timed, and returns the call on them: `bind` reads what must be known of their values.
        """
        return {}

    stand_in: ClassVar[Any] = None
    """`stand_in(p, numbers)`: the function from the inputs to the outputs, as torch has it, that serves while the program of a
    problem is compiled; `numbers` are the scalars by name. Unless declared, a rival that compiles nothing stands in."""

    batch_sizes: ClassVar[tuple[int, ...]] = (1, 16, 64, 128, 256, 512, 1024, 2048)
    """Sizes of the first of `batch_dims` that a tune of batch-invariant schedules races where none is named."""

    @staticmethod
    def reduction_order(p: Any, s: Any) -> Hashable:
        """A value for the order in which each row is summed. Schedules of equal value claim that they compute each row with the
        same bits, at every size of `batch_dims`; None claims nothing. A tune proves claims on the GPU, and refuses broken ones.
        """
        return None

    @classmethod
    def ordered(cls, p: Any, s: Schedule) -> Schedule:
        """The schedule most like `s` that has a `reduction_order`: `s` itself, unless the kernel has schedules for it that no
        search explores. Candidates where `numerics` is "invariant" are the explored schedules, each after this."""
        return s

    @classmethod
    def representative(cls, p: Any) -> Problem:
        """The problem that stands for all problems that differ from `p` in `batch_dims` only."""
        return p.replace(**dict.fromkeys(cls.batch_dims, REPRESENTATIVE_SIZE))

    @classmethod
    def row_dims(cls, p: Any) -> tuple[str, ...]:
        """The batch dims along which the results of `p` are the first ones of a problem that is larger along them."""
        return cls.batch_dims

    variants: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Ways in which a program's problems may differ from the tuned ones -> what each means; `warmup --also` takes them."""
    likely: ClassVar[Any] = None
    """`likely(p, variants)`: the problems like `p` that the variants name, each with its values as text."""

    # What the rest of the package asks.

    @classmethod
    def problem(cls, **values: Any) -> Problem:
        """The problem with these values. Fields that are not named take their defaults.

        Raises:
            ProblemError: a value is missing, unknown or not allowed, or a requirement of the kernel is not met.
        """
        found = cls.read_values(values)
        omitted = frozenset(
            name for name, each in cls.fields.items() if each.omit_default and found[name] == each.default
        )
        p = Problem(cls, found, omitted=omitted)
        cls.check_requirements(p)
        return p

    @classmethod
    def check_requirements(cls, p: Problem) -> None:
        """Raise where a problem does not meet what the kernel requires.

        Raises:
            ProblemError: the reason that the kernel gives, the expression and the values that it reads.
        """
        for each in cls.requirements:
            values = [getattr(p, name) for name in each.names]
            try:
                if each.holds(*values):
                    continue
                said = "is false"
            except (ArithmeticError, TypeError) as error:
                said = f"cannot be evaluated ({error})"
            given = ", ".join(f"{name}={value}" for name, value in zip(each.names, values, strict=True))
            raise ProblemError(f"{each.because}: {each.require} {said} for {given}")

    @classmethod
    def read_values(cls, values: Mapping[str, Any]) -> dict[str, Value]:
        """A value for each field, in canonical form; fields that are not named take their defaults.

        Raises:
            ProblemError: a value is missing, unknown or not allowed.
        """
        unknown = sorted(set(values) - set(cls.fields))
        if unknown:
            meant = did_you_mean(unknown[0], cls.fields)
            raise ProblemError(f"unknown problem keys {unknown}; known are {sorted(cls.fields)}{meant}")
        missing = [name for name, each in cls.fields.items() if name not in values and each.default is None]
        if missing:
            # As `-p` and the help of commands call them.
            short = {key: (names,) if isinstance(names, str) else names for key, names in cls.label.items()}
            short = {key: names for key, names in short.items() if set(names) <= set(missing)}
            called = [f"{key} ({' and '.join(names)})" for key, names in short.items()]
            rest = [name for name in missing if not any(name in names for names in short.values())]
            raise ProblemError(f"a problem of {cls.name} needs {', '.join([*called, *rest])}")
        try:
            found = {name: each.read(name, values.get(name, each.default)) for name, each in cls.fields.items()}
        except ValueError as error:
            raise ProblemError(str(error)) from error
        return cls.canonical(found | _vector_layouts(cls, found))

    @classmethod
    def suite(cls, name: str) -> list[Problem]:
        """The problems of a suite, each of them once.

        Raises:
            ConfigError: there is no such suite.
        """
        if name not in cls.suites:
            raise ConfigError(
                f"{cls.name} has no suite {name!r}; known are {', '.join(cls.suites) or 'none'}{did_you_mean(name, cls.suites)}"
            )
        return list(dict.fromkeys(cls.as_problem(each) for each in cls.suites[name]))

    @classmethod
    def as_problem(cls, case: Problem | Mapping[str, Any]) -> Problem:
        """A problem that is given as itself or as its values by name."""
        if isinstance(case, Problem):
            return case
        if not isinstance(case, Mapping):
            raise ProblemError(f"{case!r:.80} is no problem; give its values by name, of {', '.join(cls.fields)}")
        return cls.problem(**case)

    @classmethod
    def default_problems(cls) -> list[Problem]:
        """The problems that are meant where none is named: those of the default suite, or of every suite."""
        names = [cls.default_suite] if cls.default_suite else cls.suites
        return list(dict.fromkeys(problem for name in names for problem in cls.suite(name)))

    @classmethod
    def arrays(cls, p: Problem) -> tuple[ArraySpec, ...]:
        """The inputs and outputs of a problem, in the order declared. Arrays that the problem does without are left out."""
        wanted = (name for name, each in cls.array_fields.items() if each.role != "workspace")
        return tuple(cls.array_spec(name, p) for name in wanted if cls.present(name, p))

    @classmethod
    def present(cls, name: str, p: Problem) -> bool:
        """Whether the problem has this array."""
        when = cls.array_fields[name].when
        return when is None or bool(getattr(p, when))

    @classmethod
    def array_spec(cls, name: str, p: Problem, s: Schedule | None = None) -> ArraySpec:
        """One array of a problem. An absent input has one element, and an absent output is scratch memory.

        Only the shape of scratch memory depends on the schedule `s`.
        """
        scratch = cls.array_fields[name].role == "workspace"
        return cls._read_array(name, p, s) if scratch else _cached_array(cls, name, p)  # type: ignore[arg-type]

    @classmethod
    def _read_array(cls, name: str, p: Problem, s: Schedule | None) -> ArraySpec:
        each = cls.array_fields[name]
        absent = not cls.present(name, p)
        dtype = each.dtype or "dtype"
        if dtype in cls.fields or dtype in cls.derived:
            dtype = str(getattr(p, dtype))
        layout = str(getattr(p, each.layout)) if each.layout in (*cls.fields, *cls.derived) else each.layout
        shapes = cls._shapes(each, p, s)
        if absent and each.role == "in":
            shapes = tuple((1,) * len(shape) for shape in shapes)
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
            integers=cls._integers(each, p),
        )

    @classmethod
    def _integers(cls, each: ArrayField, p: Problem) -> Integers | None:
        if not each.speaks_of_integers:
            return None
        limits = {
            name: value if isinstance(value, int) else int(read_size(value, lambda name: getattr(p, name)))
            for name, value in each.limits.items()
        }
        below = limits.pop("below", limits.get("last", limits["least"] + 1) + 1)
        return Integers(below=below, sentinels=each.sentinels, sorted=each.sorted, distinct=each.distinct, **limits)

    @classmethod
    def _shapes(cls, each: ArrayField, p: Problem, s: Schedule | None) -> tuple[tuple[int, ...], ...]:
        if isinstance(each.shape, str):
            try:
                shape = read_shape(each.shape, lambda name: int(s[name] if s and name in s else getattr(p, name)))
            except ZeroDivisionError as error:
                raise ProblemError(f"the shape {each.shape!r} divides by 0 for {p}") from error
            if any(size < 0 for size in shape):
                raise ProblemError(f"the shape {each.shape!r} is {shape} for {p}; no size may be negative")
            return (shape,)
        found = each.shape(p, s) if each.role == "workspace" else each.shape(p)
        return tuple(map(tuple, found)) if each.listed else (tuple(found),)

    @classmethod
    def grids(cls, p: Problem, s: Schedule, device: Any) -> tuple[tuple[int, int, int], ...]:
        """The grid of each launch. Together with the machine code, grids tell which program a schedule is."""
        if cls.launches is not None:
            launches = cls.launches(p, s, device)
            return tuple(cls.read_grid(1 if isinstance(each, Preparation) else each[1]) for each in launches)
        return (cls.read_grid(cls.grid(p, s, device)),)

    @classmethod
    def preparations(cls) -> tuple[Preparation, ...]:
        """The launches with which every call begins: copies of inputs, and outputs set to zero."""
        found = []
        for name, each in cls.array_fields.items():
            if each.copy_of is not None:
                shapes = each.shape, cls.array_fields[each.copy_of].shape
                swapped = all(isinstance(one, str) for one in shapes) and len({*map(split_shape, shapes)}) > 1
                found.append(Preparation(kind="copy", target=name, source=each.copy_of, swapped=swapped))
            elif each.cleared:
                found.append(Preparation(kind="zero", target=name))
        return tuple(found)

    @classmethod
    def read_grid(cls, grid: Any) -> tuple[int, int, int]:
        """The grid that an author gave, with three axes.

        Raises:
            DeclarationError: the grid is not 1 to 3 positive integers.
        """
        axes = (grid,) if isinstance(grid, int) else tuple(grid) if isinstance(grid, Sequence) else ()
        whole = all(type(axis) is int and axis > 0 for axis in axes)
        if not whole:  # integers of NumPy are integers, too
            axes = tuple(int(axis) if hasattr(axis, "dtype") and axis.dtype.kind in "iu" else axis for axis in axes)
            whole = all(type(axis) is int and axis > 0 for axis in axes)
        if not 1 <= len(axes) <= 3 or not whole:
            raise DeclarationError(
                f"{cls.__name__}.grid: must be 1 to 3 positive integers, got {grid!r}; -(-a // b) rounds up"
            )
        return (*axes, *(1,) * (3 - len(axes)))

    @classmethod
    def scalar_values(cls, p: Problem) -> dict[str, float | int]:
        """The run-time numbers of a problem, by name."""
        return {name: each.value(p) if callable(each.value) else each.value for name, each in cls.scalar_fields.items()}

    @classmethod
    def borrows(cls) -> bool:
        """Whether the kernel has the search space of another one, whose winners serve it until it is tuned."""
        return cls.space not in ("", cls.name)

    adapts: ClassVar[bool] = False
    """Whether :meth:`adapted` changes schedules."""

    @classmethod
    def adapted(cls, p: Problem, s: Schedule, arch: str) -> Schedule:
        """The schedule that serves this kernel where `s` won on a problem of the kernel whose search space this one has."""
        return s

    @classmethod
    def problem_kind(cls, p: Problem) -> tuple[Any, ...]:
        """The values of all fields of a problem that are not run-time sizes."""
        return tuple(p.values[name] for name, each in cls.fields.items() if not isinstance(each, Dim) or each.constant)

    @classmethod
    def knob_fields(cls) -> dict[str, Knob]:
        """The declared knobs, each with its choices and default."""
        return {name: each if isinstance(each, Knob) else knob(each) for name, each in cls.knobs.items()}

    @classmethod
    def locator(cls) -> str:
        """`module:Class`, or `/path/file.py:Class`: where another process finds the kernel.

        Raises:
            DeclarationError: the kernel was declared at a prompt, where no other process can find it.
        """
        name = cls.__module__
        module = sys.modules.get(name)
        spec, path = getattr(module, "__spec__", None), getattr(module, "__file__", None)
        if name != "__main__" and spec is not None and "." in name and FILE_PREFIX not in name:
            return f"{name}:{cls.__qualname__}"
        if path is None or not Path(path).is_file():
            raise DeclarationError(
                f"{cls.__name__} was declared at a prompt; put it in a file, so that the compile processes can import it"
            )
        return f"{Path(path).resolve()}:{cls.__qualname__}"

    @classmethod
    def source_hash(cls) -> str:
        """Hash of the source that the kernel's machine code comes from; see :func:`tiledsched.core.sources.source_hash`."""
        return source_hash(cls)

    @classmethod
    def evidence_source(cls) -> str:
        """What an entry of the kernel notes of its source; see :func:`tiledsched.core.sources.evidence_source`."""
        if is_shipped(cls):
            return cls.source_hash()
        try:
            return evidence_source(cls, cls.locator())
        except (DeclarationError, OSError):  # declared at a prompt, or its file is gone
            return ""


KernelClass = type[Declaration]


def _vector_layouts(kernel: KernelClass, values: Mapping[str, Value]) -> dict[str, Value]:
    """The layouts of input arrays that have one row or one column: both layouts lay such an array out alike, and the one counts
    whose neighbours are those of the longer axis."""
    found: dict[str, Value] = {}
    for layout, shapes in _input_shapes(kernel).items():  # type: ignore[arg-type]  # a class is hashable
        sides = [tuple(_side(word, values) for word in shape) for shape in shapes]
        usual = {"column" if rows != 1 else "row" for rows, columns in sides if 1 in (rows, columns)}
        if len(usual) == 1 and all(1 in each for each in sides) and usual <= set(kernel.fields[layout].words):  # type: ignore[union-attr]
            found[layout] = usual.pop()
    return found


def _side(word: str, values: Mapping[str, Any]) -> Any:
    """The value of a size; the size as it is written where it reads what is derived from a problem, which is not made yet."""
    try:
        return read_size(word, values.__getitem__)
    except (KeyError, ZeroDivisionError):
        return word


@functools.cache
def _input_shapes(kernel: KernelClass) -> dict[str, list[tuple[str, ...]]]:
    """By the field of a layout, the words of the last two axes of the arrays that have it, where all of them are inputs."""
    found: dict[str, list[tuple[str, ...]]] = {}
    others = set()
    for each in kernel.array_fields.values():
        words = split_shape(each.shape)[-2:] if isinstance(each.shape, str) else ()
        found.setdefault(each.layout, []).append(words)
        if each.role != "in" or len(words) < 2 or each.layout not in kernel.fields:
            others.add(each.layout)
    return {layout: shapes for layout, shapes in found.items() if layout not in others}


@functools.lru_cache(maxsize=4096)
def missing_on(arch: str, p: Problem) -> str:
    """Which element type of a problem cuTile does not compile for an arch, in words; empty where it compiles all. Types are those
    of arrays, and all that are named by the problem's fields or derived from them."""
    types = {each.dtype for each in p.declaration.arrays(p)}.union(map(str, p.names.values()))
    return next(
        (
            f"cuTile has no {name} on {arch}; choose another type, or another GPU"
            for name, least in LEAST_CAPABILITY.items()
            if name in types and int(arch[3:]) < least
        ),
        "",
    )


@functools.lru_cache(maxsize=4096)
def _cached_array(kernel: KernelClass, name: str, p: Problem) -> ArraySpec:
    """An array whose shape depends on no schedule: a search asks for it with every schedule."""
    return kernel._read_array(name, p, None)
