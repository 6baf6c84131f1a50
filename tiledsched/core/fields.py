"""The fields of a kernel's declaration: sizes, types, arrays and scalars. See docs/kernels.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tiledsched.core.errors import DeclarationError, did_you_mean

Value = int | bool | str | tuple[int, ...]
"""The value of a problem's field: a size, a flag, a word (or the name of a type), or several sizes."""
ITEM_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool_": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "tfloat32": 4,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn": 1,
}
"""Bytes of an element of an array, by cuTile's name of its type. A byte holds two numbers of float4_e2m1fn, so that the sizes of
such an array count bytes, as those of torch's float4_e2m1fn_x2 do."""
DTYPES = tuple(ITEM_BYTES)
"""Element types an array may have, by cuTile's names."""
ALSO_CALLED = {"bool": "bool_", "tf32": "tfloat32", "float4_e2m1fn_x2": "float4_e2m1fn"}
"""Other names of types, as torch and people call them."""
LAYOUTS = ("row", "column")
LARGEST_SIZE = 1 << 40
"""Of a dim that names no largest one. No memory holds so many elements."""


@dataclass(frozen=True, kw_only=True)
class Dim:
    """A size; see :func:`dim`."""

    default: int | None
    constant: bool
    least: int
    most: int | None
    omit_default: bool

    def read(self, name: str, value: Any) -> Value:
        """`value`, if the field `name` may have it; raises ValueError with the reason otherwise."""
        whole, most = isinstance(value, int) and not isinstance(value, bool), self.most or LARGEST_SIZE
        if whole and self.least <= value <= most:
            return int(value)
        if whole and value > most:
            raise ValueError(f"{name} must be at most {most}, got {value}")
        least = {0: "an integer of 0 or more", 1: "a positive integer"}.get(
            self.least, f"an integer of {self.least} or more"
        )
        raise ValueError(f"{name} must be {least}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Several sizes; see :func:`sizes`."""

    default: tuple[int, ...] | None = None
    omit_default: bool = False

    def read(self, name: str, value: Any) -> Value:
        """`value`, if the field `name` may have it; raises ValueError with the reason otherwise."""
        try:
            found = tuple(value)
        except TypeError:
            found = ()
        if not found or not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in found):
            raise ValueError(f"{name} must be a list of positive integers, got {value!r}")
        return found


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A word out of some; see :func:`choice`."""

    words: tuple[str, ...]
    default: str
    omit_default: bool
    is_dtype: bool = False

    def read(self, name: str, value: Any) -> Value:
        """`value`, if the field `name` may have it; raises ValueError with the reason otherwise."""
        if self.is_dtype and isinstance(value, str):
            value = ALSO_CALLED.get(value, value)
        if value not in self.words:
            raise ValueError(
                f"{name} must be one of {', '.join(each or repr(each) for each in self.words)}, got {value!r}"
                f"{did_you_mean(value, self.words)}"
            )
        return str(value)


@dataclass(frozen=True, kw_only=True)
class Flag:
    """True or false; see :func:`flag`."""

    default: bool
    omit_default: bool

    def read(self, name: str, value: Any) -> Value:
        """`value`, if the field `name` may have it; raises ValueError with the reason otherwise."""
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value


ProblemField = Dim | Sizes | Choice | Flag


@dataclass(frozen=True, kw_only=True)
class ArrayField:
    """An array or a list of arrays; see :func:`array`."""

    shape: str | Callable[..., Any]
    role: str
    """in, out, inout or workspace."""
    dtype: str | None = None
    layout: str = "row"
    when: str | None = None
    least: str | int = 0
    below: str | int | None = None
    sentinels: tuple[int, ...] = ()
    sorted: bool = False
    distinct: bool = False
    first: str | int | None = None
    last: str | int | None = None
    cleared: bool = False
    """For outputs: whether every call begins by setting them to zero."""
    copy_of: str | None = None
    """For scratch memory: the input of which every call begins by making a copy."""
    listed: bool = False
    """Whether the field is a list of arrays."""
    zeroed: bool = False
    absolute: bool = False
    """For outputs: whether the gate bounds the absolute error, not the error relative to the norm of the tile."""
    aligned: bool = False
    """For scratch memory: whether machine code may count on rows that start at multiples of 16 bytes, as it does for inputs."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", ALSO_CALLED.get(self.dtype or "", self.dtype))

    @property
    def limits(self) -> dict[str, str | int]:
        """What is said of the values of integers, apart from sentinels: numbers and sizes by the name of the argument."""
        found = {"least": self.least, "below": self.below, "first": self.first, "last": self.last}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def speaks_of_integers(self) -> bool:
        """Whether anything is said of the values of integers."""
        return bool(self.limits.keys() - {"least"} or self.least or self.sentinels or self.sorted or self.distinct)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A launch that needs no tile code of the author's; see :func:`zero` and :func:`copy`."""

    kind: str
    """zero or copy."""
    target: str
    """The array that is written."""
    source: str = ""
    """The array that is copied."""
    swapped: bool = False
    """Whether the last two axes of the source are those of the target the other way round."""


@dataclass(frozen=True, kw_only=True)
class Scalar:
    """A run-time number; see :func:`scalar`."""

    value: float | int | Callable[[Any], float | int]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Knob:
    """A knob, of a declaration or of a search space; see :func:`knob`."""

    choices: tuple[Any, ...]
    """All allowed values, in the order written."""
    default: Any
    """Value in the default schedule."""
    about: str = ""
    """One line for people."""
    measured_only: bool = False
    """Whether the static model cannot see the effect of the knob, so that only a measurement tells its values apart."""
    weight: float | None = None
    """How much the search treats two programs as different where they differ in the knob."""


def dim(
    default: int | None = None,
    *,
    constant: bool = False,
    least: int = 1,
    most: int | None = None,
    omit_default: bool = False,
) -> Any:
    """A size of the problem.

    Args:
        default: the value where a problem does not name one; None if every problem must name one.
        constant: whether the size is a compile-time constant; otherwise it is a run-time size.
        least, most: the range of allowed sizes.
        omit_default: leave the default out of the problem's JSON, so that adding the field to a kernel changes no stored id.
    """
    for name, value in (("default", default), ("least", least), ("most", most)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise DeclarationError(f"ts.dim: {name} must be an integer, got {value!r}")
    if most is not None and most < least:
        raise DeclarationError(f"ts.dim: the most, {most}, is less than the least, {least}")
    if default is not None and not least <= default <= (default if most is None else most):
        raise DeclarationError(f"ts.dim: the default {default} is not from {least} to {most or 'any number'}")
    return Dim(default=default, constant=constant, least=least, most=most, omit_default=omit_default)


def sizes(default: tuple[int, ...] | None = None) -> Any:
    """A list of sizes, such as the rows of each group."""
    return Sizes(default=default)


def dtype(*allowed: str) -> Any:
    """An element type; the first of those allowed is the default.

    Raises:
        DeclarationError: no type is named, or one that cuTile does not have.
    """
    allowed = tuple(ALSO_CALLED.get(each, each) for each in allowed)
    wrong = [each for each in allowed if each not in DTYPES]
    if wrong or not allowed:
        meant = did_you_mean(getattr(wrong[0], "name", wrong[0]), DTYPES) if wrong else ""
        said = f"{wrong[0]!r} is not the name of a type, as text; " if wrong else ""
        raise DeclarationError(f"ts.dtype: {said}name one or more of {', '.join(DTYPES)}{meant}")
    return Choice(words=allowed, default=allowed[0], omit_default=False, is_dtype=True)


def choice(*words: str, omit_default: bool = False) -> Any:
    """One of several words, known when the kernel is compiled. The first word is the default."""
    if not words or not all(isinstance(word, str) for word in words) or len(set(words)) < len(words):
        raise DeclarationError(f"ts.choice: name the words to choose from, each as text and once; got {words!r}")
    return Choice(words=words, default=words[0], omit_default=omit_default)


def flag(default: bool = False, *, omit_default: bool = False) -> Any:
    """A flag, known when the kernel is compiled."""
    if not isinstance(default, bool):
        raise DeclarationError(f"ts.flag: the default must be True or False, got {default!r}")
    return Flag(default=default, omit_default=omit_default)


def array(
    shape: str | Callable[..., Any],
    *,
    dtype: str | None = None,
    layout: str = "row",
    when: str | None = None,
    least: str | int = 0,
    below: str | int | None = None,
    sentinel: int | tuple[int, ...] = (),
    sorted: bool = False,
    distinct: bool = False,
    first: str | int | None = None,
    last: str | int | None = None,
) -> Any:
    """An input array.

    What is said of integers decides which values a kernel is checked and timed on; calls are not checked for it.

    Args:
        shape: a size for each axis, parted by spaces: names of sizes, numbers, and sums, products or quotients of them
            ("batch experts+1 rows/2"); or a function of the problem that returns sizes.
        dtype: a type, or the name of a dtype field or of a derived value that is a type; None for the field called `dtype`.
        layout: row, column (the last two axes swapped in memory), or the name of a choice of the two, or of what is derived.
        when: the name of a flag; without the flag, the function gets an array of one element.
        least, below: for integers: values are at least `least` and less than `below`, each a number or a size ("rows+1").
            Without `below` they are 0 or 1, or go up to `last`.
        sentinel: for integers: one or several values with a meaning of their own, such as -100 for labels to ignore.
        sorted: for integers: whether no value is less than the one before it along the last axis.
        distinct: for integers: whether no value but the sentinels occurs twice.
        first, last: for integers: the first and the last value along the last axis, each a number or a size.
    """
    return ArrayField(
        shape=shape,
        role="in",
        dtype=dtype,
        layout=layout,
        when=when,
        least=least,
        below=below,
        sentinels=sentinel if isinstance(sentinel, tuple) else (sentinel,),
        sorted=sorted,
        distinct=distinct,
        first=first,
        last=last,
    )


def arrays(shape: Callable[..., Any], *, dtype: str | None = None) -> Any:
    """A list of input arrays. `shape` is a function of the problem that returns a list of shapes."""
    return ArrayField(shape=shape, role="in", dtype=dtype, listed=True)


def out(
    shape: str | Callable[..., Any],
    *,
    dtype: str | None = None,
    layout: str = "row",
    when: str | None = None,
    absolute: bool = False,
    aligned: bool = False,
    zeroed: bool = False,
) -> Any:
    """An output array.

    Args:
        shape, dtype, layout: see :func:`array`.
        when: the name of a flag; without the flag, the array is scratch memory.
        absolute: whether the accuracy gate bounds the absolute error instead of the relative one.
        aligned: see :func:`workspace`. Outputs without `when` are always aligned.
        zeroed: whether every call begins by setting the output to zero, for kernels that add to it.
    """
    return ArrayField(
        shape=shape,
        role="out",
        dtype=dtype,
        layout=layout,
        when=when,
        absolute=absolute,
        aligned=aligned,
        cleared=zeroed,
    )


def outs(shape: Callable[..., Any], *, dtype: str | None = None) -> Any:
    """A list of output arrays. `shape` is a function of the problem that returns a list of shapes."""
    return ArrayField(shape=shape, role="out", dtype=dtype, listed=True)


def inout(shape: str | Callable[..., Any], *, dtype: str | None = None, layout: str = "row") -> Any:
    """An array that is changed in place, and restored between checked or timed launches. For the arguments see :func:`array`."""
    return ArrayField(shape=shape, role="inout", dtype=dtype, layout=layout)


def workspace(
    shape: str | Callable[..., Any],
    *,
    dtype: str = "float32",
    zeroed: bool = False,
    aligned: bool = False,
    layout: str = "row",
    copy_of: str | None = None,
) -> Any:
    """Scratch memory.

    Args:
        shape: see :func:`array`. It may also name knobs; a function takes the problem and the schedule.
        dtype: the element type.
        zeroed: whether the memory is zero before the first launch. Every launch must leave it zero.
        aligned: whether the compiler may assume that rows start at multiples of 16 bytes, if they do. TMA needs that, and so do
            loads of more than one element.
        layout: see :func:`array`.
        copy_of: the name of an input of the same shape, or of one whose last two axes are swapped. Every call begins by making
            the copy, in the type and layout of the scratch memory.
    """
    return ArrayField(
        shape=shape, role="workspace", dtype=dtype, zeroed=zeroed, aligned=aligned, layout=layout, copy_of=copy_of
    )


def zero(target: str) -> Any:
    """For `launches`: a launch that sets the array of this name to zero."""
    return Preparation(kind="zero", target=target)


def copy(source: str, target: str, *, swapped: bool = False) -> Any:
    """For `launches`: a launch that copies one array to another, in the type and layout of the latter.

    Args:
        source, target: names of arrays.
        swapped: whether the last two axes of the source are those of the target the other way round.
    """
    return Preparation(kind="copy", target=target, source=source, swapped=swapped)


def scalar(value: float | int | Callable[[Any], float | int], *, dtype: str | None = None) -> Any:
    """A run-time number: a value, or a function of the problem. Its type is float32 unless given; int32 for an integer."""
    found = dtype or ("int32" if isinstance(value, int) and not isinstance(value, bool) else "float32")
    if not callable(value) and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise DeclarationError(f"ts.scalar: must be a number or a function of the problem, got {value!r}")
    if found not in DTYPES:
        raise DeclarationError(
            f"ts.scalar: {found!r} is no type; known are {', '.join(DTYPES)}{did_you_mean(found, DTYPES)}"
        )
    return Scalar(value=value, dtype=found)


def knob(
    choices: Any, *, default: Any = None, about: str = "", measured_only: bool = False, weight: float | None = None
) -> Any:
    """A knob with more properties than its choices.

    Args:
        choices: the values, all of one type.
        default: the value in the default schedule; the first choice unless given.
        about: one line for people.
        measured_only: whether the static model cannot see the effect of the knob.
        weight: how much the search treats two programs as different where they differ in the knob: they share exp(-weight) of
            what they would share. None for the weight that its kind of knob has.
    """
    listed = tuple(choices)
    first = listed[0] if default is None and listed else default
    return Knob(choices=listed, default=first, about=about, measured_only=measured_only, weight=weight)


def total(value: Any) -> int:
    """A size as one number: of several sizes, their sum."""
    return sum(value) if isinstance(value, tuple) else int(value)
