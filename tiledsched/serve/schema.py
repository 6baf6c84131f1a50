"""What a call with tensors asks of a kernel: its parameters, and the problem that given tensors pose.

Sizes, element types, layouts and the presence of optional arrays are read off the tensors; what these do not show is a
parameter of its own. Everything is checked against the declaration once more when the problem is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiledsched.core.arrays import ArraySpec
from tiledsched.core.errors import ConfigError, ProblemError
from tiledsched.core.fields import LAYOUTS, ArrayField, Choice, Dim, Flag, Sizes, read_shape
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.storage import strides_of

NO_DEFAULT = object()


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of an operator."""

    name: str
    """As declared."""
    kind: str
    """array, list, field or scalar."""
    schema: str
    """Its type in torch's schema language."""
    default: Any = NO_DEFAULT
    """None where a tensor may be missing or the problem tells the value."""

    def __str__(self) -> str:
        if self.default is NO_DEFAULT:
            return f"{self.schema} {self.name}"
        said = f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)
        return f"{self.schema} {self.name}={said}"


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output of a call."""

    shapes: tuple[tuple[Any, ...], ...]
    """Sizes, symbolic ones where the call is traced."""
    dtype: str
    """By cuTile's name."""
    column: bool
    """Whether the last two axes are swapped in memory."""
    listed: bool
    """Whether it is a list."""

    @property
    def strides(self) -> tuple[tuple[Any, ...], ...]:
        """Of each shape."""
        return tuple(strides_of(shape, self.column) for shape in self.shapes)


class Form:
    """The parameters of an operator made of `kernel`, and what calls of it mean.

    Args:
        kernel: its declaration.
        pinned: fields of its problems that are the same in every call.

    Raises:
        ConfigError: no operator can be made of it, or a field of that name is not declared.
    """

    def __init__(self, kernel: KernelClass, pinned: Mapping[str, Any]) -> None:
        self.kernel = kernel
        unknown = sorted(set(pinned) - set(kernel.fields))
        if unknown:
            raise ConfigError(f"{kernel.name} has no field {unknown[0]!r}; known are {', '.join(kernel.fields)}")
        self.pinned = dict(pinned)
        for name, each in kernel.array_fields.items():
            if each.role == "out" and each.when is not None:
                declared = kernel.fields.get(each.when)
                if not isinstance(declared, Flag):
                    raise ConfigError(
                        f"{kernel.name}.{name}: whether there is this output depends on {each.when}, which no call "
                        "can say; make it a flag"
                    )
                self.pinned.setdefault(each.when, declared.default)
        self.inputs = [
            name
            for name, each in kernel.array_fields.items()
            if each.role in ("in", "inout") and self.pinned.get(each.when or "", True)
        ]
        self.outputs = [
            name
            for name, each in kernel.array_fields.items()
            if each.role == "out" and self.pinned.get(each.when or "", True)
        ]
        self.changed = [name for name in self.inputs if kernel.array_fields[name].role == "inout"]
        if not self.inputs:
            raise ConfigError(
                f"{kernel.name} has no input array, which would say where it runs; call its kernel yourself"
            )
        self.parameters = self._parameters()

    def is_optional(self, name: str) -> bool:
        """Whether an input may be missing."""
        when = self.kernel.array_fields[name].when
        return when is not None and when not in self.pinned

    def _parameters(self) -> tuple[Parameter, ...]:
        """Arrays as declared, then what they do not show, then scalars."""
        kernel, found = self.kernel, []
        shown = self._shown()
        for name in self.inputs:
            each = kernel.array_fields[name]
            kind = "Tensor[]" if each.listed else "Tensor(a!)" if each.role == "inout" else "Tensor"
            if each.role == "inout":  # each changes by itself
                kind = f"Tensor({chr(ord('a') + self.changed.index(name))}!)"
            optional = self.is_optional(name)
            found.append(
                Parameter(
                    name=name,
                    kind="list" if each.listed else "array",
                    schema=kind + "?" * optional,
                    default=None if optional else NO_DEFAULT,
                )
            )
        for name, field in kernel.fields.items():
            if name in self.pinned or name in shown:
                continue
            kind = {Dim: "SymInt", Sizes: "SymInt[]", Flag: "bool", Choice: "str"}[type(field)]
            default = field.default if isinstance(field, Sizes) or field.default is not None else NO_DEFAULT
            found.append(
                Parameter(
                    name=name, kind="field", schema=kind, default=NO_DEFAULT if isinstance(field, Sizes) else default
                )
            )
        for name, scalar in kernel.scalar_fields.items():
            kind = "SymInt" if "int" in scalar.dtype else "float"
            plain = not callable(scalar.value) and repr(scalar.value).lstrip("-")[0].isdigit()
            found.append(
                Parameter(
                    name=name,
                    kind="scalar",
                    schema=kind if plain else f"{kind}?",
                    default=scalar.value if plain else None,
                )
            )
        for place in reversed(range(len(found) - 1)):  # no default comes before a parameter without one
            if found[place + 1].default is NO_DEFAULT and found[place].default is not NO_DEFAULT:
                found[place] = replace(found[place], default=NO_DEFAULT)
        return tuple(found)

    def _shown(self) -> set[str]:
        """Fields that the tensors of every call show, and the flags of optional ones."""
        kernel = self.kernel
        flags = {
            each.when
            for name in self.inputs
            if self.is_optional(name) and (each := kernel.array_fields[name]).when in kernel.fields
        }
        found = {str(name) for name in flags}
        for name in self.inputs:
            if not self.is_optional(name):
                each = kernel.array_fields[name]
                found |= {_dtype_of(each), each.layout, *(word for word, _ in self._sizes(each))}
        return found & set(kernel.fields)

    def _sizes(self, each: ArrayField) -> list[tuple[str, int]]:
        """Dims that stand alone in a shape, and their axes."""
        words = each.shape.split() if isinstance(each.shape, str) else []
        return [(word, axis) for axis, word in enumerate(words) if isinstance(self.kernel.fields.get(word), Dim)]

    def schema(self) -> str:
        """Parameters and results in torch's schema language."""
        results = ["Tensor[]" if self.kernel.array_fields[name].listed else "Tensor" for name in self.outputs]
        said = results[0] if len(results) == 1 else f"({', '.join(results)})"
        return f"({', '.join(map(str, self.parameters))}) -> {said}"

    def read(self, given: Sequence[Any]) -> dict[str, Any]:
        """What a call says of the problem's fields; sizes stay symbolic where it is traced.

        Raises:
            ProblemError: an array has another number of axes than declared, or two disagree in a flag or a layout.
        """
        kernel = self.kernel
        found: dict[str, Any] = dict(self.pinned)
        for parameter, value in zip(self.parameters, given, strict=True):
            if parameter.kind == "field":
                found[parameter.name] = tuple(value) if isinstance(value, (list, tuple)) else value
        for name, value in zip(self.inputs, given, strict=False):
            each = kernel.array_fields[name]
            given_flag = self.is_optional(name) and each.when in kernel.fields
            if given_flag and found.setdefault(str(each.when), value is not None) != (value is not None):
                raise ProblemError(
                    f"{name} is {'missing' if value is None else 'given'} and others of {each.when} are not; give "
                    "all of them or none"
                )
            for tensor in [value] if not each.listed else value:
                if tensor is not None:
                    self._read_array(name, each, tensor, found)
        return found

    def _read_array(self, name: str, each: ArrayField, tensor: Any, found: dict[str, Any]) -> None:
        if isinstance(each.shape, str) and tensor.ndim != len(each.shape.split()):
            raise ProblemError(
                f"{name} must have {len(each.shape.split())} axes ({each.shape}), got shape "
                f"{tuple(tensor.shape)}; reshape it"
            )
        for word, axis in self._sizes(each):
            found.setdefault(word, tensor.shape[axis])
        if _dtype_of(each) in self.kernel.fields:
            found.setdefault(_dtype_of(each), dtype_name(tensor))
        if each.layout in self.kernel.fields and tensor.ndim > 1:
            strides = tensor.stride()
            found.setdefault(each.layout, "column" if strides[-2] == 1 and strides[-1] != 1 else "row")

    def problem(self, given: Sequence[Any]) -> Problem:
        """The problem that a call poses.

        Raises:
            ProblemError: none that the kernel has, or an array that does not fit the others; the message names it.
        """
        found = self.read(given)
        fields = self.kernel.fields
        p = self.kernel.problem(
            **{name: int(value) if isinstance(fields[name], Dim) else value for name, value in found.items()}
        )
        for name, value in zip(self.inputs, given, strict=False):
            spec = self.kernel.array_spec(name, p)
            if (value is not None) != self.kernel.present(name, p):
                raise ProblemError(f"{name} must {'not ' * (value is not None)}be given for {p}")
            if value is not None:
                self._check(spec, list(value) if spec.listed else [value])
        return p

    def _check(self, spec: ArraySpec, tensors: Sequence[Any]) -> None:
        """The arrays of one field against what the problem says of them."""
        if len(tensors) != len(spec.shapes):
            raise ProblemError(f"{spec.name} must be {len(spec.shapes)} arrays, got {len(tensors)}")
        words = self.kernel.array_fields[spec.name].shape
        for place, (tensor, shape) in enumerate(zip(tensors, spec.shapes, strict=True)):
            name = f"{spec.name}[{place}]" if spec.listed else spec.name
            if tuple(tensor.shape) != shape:
                if len(shape) != tensor.ndim:
                    raise ProblemError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}; reshape it")
                wrong = next(axis for axis in range(tensor.ndim) if tensor.shape[axis] != shape[axis])
                what = f" ({words.split()[wrong]})" if isinstance(words, str) else ""
                raise ProblemError(
                    f"{name}, axis {wrong}{what}: must be {shape[wrong]}, as the other arrays say, got "
                    f"{tensor.shape[wrong]}"
                )
            if dtype_name(tensor) != spec.dtype:
                raise ProblemError(f"{name} must be {spec.dtype}, got {dtype_name(tensor)}; cast it")

    def results(self, given: Sequence[Any]) -> list[Output]:
        """The outputs of a call; where it is traced, with its symbolic sizes, as far as names of sizes tell them."""
        found = self.read(given)
        outputs, p = [], None
        for name in self.outputs:
            each = self.kernel.array_fields[name]
            try:
                if not isinstance(each.shape, str):
                    raise LookupError(name)
                shapes: tuple[Any, ...] = (read_shape(each.shape, lambda word: found[word]),)
            except LookupError:
                p = p or self.problem(given)
                shapes = self.kernel.array_spec(name, p).shapes
            layout = found.get(each.layout, self._default(each.layout)) if each.layout not in LAYOUTS else each.layout
            outputs.append(
                Output(
                    shapes=shapes,
                    dtype=str(found.get(_dtype_of(each), self._default(_dtype_of(each)))),
                    column=layout == "column",
                    listed=each.listed,
                )
            )
        return outputs

    def _default(self, name: str) -> Any:
        """Of a field; a type or layout itself where it is none."""
        return self.kernel.fields[name].default if name in self.kernel.fields else name


def _dtype_of(each: ArrayField) -> str:
    return each.dtype or "dtype"


def dtype_name(tensor: Any) -> str:
    """cuTile's name of a tensor's element type."""
    name = str(tensor.dtype).removeprefix("torch.")
    return "bool_" if name == "bool" else name
