"""The schema of an operator: the parameters of a kernel's calls, and the problem that given tensors make up.

Sizes, element types, layouts and the presence of optional arrays are read from the tensors; every field of a problem that
these do not determine is a parameter of its own. When the problem is known, all tensors are checked against the declaration.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tiledsched.core.arrays import strides_of, tile_type
from tiledsched.core.errors import ConfigError, ProblemError, did_you_mean
from tiledsched.core.fields import ALSO_CALLED, LAYOUTS, ArrayField, Choice, Dim, Flag, Sizes
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.shapes import is_solvable, read_shape, shape_names, solve, split_shape

NO_DEFAULT = object()


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of an operator."""

    name: str
    """The name of the declared field."""
    kind: str
    """array, list, field or scalar."""
    type: str
    """Its type in torch's schema language."""
    default: Any = NO_DEFAULT
    """None where a tensor may be missing or the problem determines the value."""

    def __str__(self) -> str:
        if self.default is NO_DEFAULT:
            return f"{self.type} {self.name}"
        default = f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)
        return f"{self.type} {self.name}={default}"


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output of a call: an array, or a list of arrays."""

    shapes: tuple[tuple[Any, ...], ...]
    """The shape of each array; sizes are symbolic where the call is traced."""
    dtype: str
    """Element type, by cuTile's name."""
    strides: tuple[tuple[Any, ...], ...]
    """The strides of each array, in elements."""
    listed: bool = False
    """Whether it is a list."""


class OpSchema:
    """The parameters of an operator made of `kernel`, and the meaning of its calls. `str()` gives it in torch's schema language.

    Args:
        kernel: its declaration.
        pinned: fields of its problems that are the same in every call.

    Raises:
        ConfigError: no operator can be made of the kernel, or a pinned field is not declared.
    """

    def __init__(self, kernel: KernelClass, pinned: Mapping[str, Any]) -> None:
        self.kernel = kernel
        unknown = sorted(set(pinned) - set(kernel.fields))
        if unknown:
            meant = did_you_mean(unknown[0], kernel.fields)
            raise ConfigError(f"{kernel.name} has no field {unknown[0]!r}; known are {', '.join(kernel.fields)}{meant}")
        self.given = dict(pinned)
        """What the caller fixed. `pinned` are also the flags that decide which outputs there are."""
        self.pinned = dict(pinned)
        arrays = kernel.array_fields
        for name, each in arrays.items():
            if each.role == "out" and each.when is not None:
                declared = kernel.fields.get(each.when)
                if not isinstance(declared, Flag):
                    raise ConfigError(
                        f"{kernel.name}.{name}: whether there is this output depends on {each.when}, which no call "
                        "can say; make it a flag"
                    )
                self.pinned.setdefault(each.when, declared.default)
        present = [name for name, each in arrays.items() if self.pinned.get(each.when or "", True)]
        self.inputs = [name for name in present if arrays[name].role in ("in", "inout")]
        self.outputs = [name for name in present if arrays[name].role == "out"]
        self.changed = [name for name in self.inputs if arrays[name].role == "inout"]
        if not self.inputs:
            raise ConfigError(
                f"{kernel.name} has no input array, which would say where it runs; call its kernel yourself"
            )
        self._equations: list[tuple[str, int, str, str]] = []
        self.parameters = self._parameters()

    def __str__(self) -> str:
        results = ["Tensor[]" if self.kernel.array_fields[name].listed else "Tensor" for name in self.outputs]
        result = results[0] if len(results) == 1 else f"({', '.join(results)})"
        return f"({', '.join(map(str, self.parameters))}) -> {result}"

    def is_optional(self, name: str) -> bool:
        """Whether an input may be missing."""
        when = self.kernel.array_fields[name].when
        return when is not None and when not in self.pinned

    def _parameters(self) -> tuple[Parameter, ...]:
        """Arrays as declared, then the fields that these do not determine, then scalars."""
        kernel, found = self.kernel, []
        for name in self.inputs:
            each, optional = kernel.array_fields[name], self.is_optional(name)
            text = "Tensor[]" if each.listed else "Tensor"
            if each.role == "inout":  # a letter of its own says that it changes by itself
                text = f"Tensor({chr(ord('a') + self.changed.index(name))}!)"
            found.append(
                Parameter(
                    name=name,
                    kind="list" if each.listed else "array",
                    type=text + "?" * optional,
                    default=None if optional else NO_DEFAULT,
                )
            )
        determined = self._determined()
        for name, field in kernel.fields.items():
            if name in self.pinned or name in determined:
                continue
            text = {Dim: "SymInt", Sizes: "SymInt[]", Flag: "bool", Choice: "str"}[type(field)]
            default = NO_DEFAULT if isinstance(field, Sizes) or field.default is None else field.default
            found.append(Parameter(name=name, kind="field", type=text, default=default))
        for name, scalar in kernel.scalar_fields.items():
            text = "SymInt" if "int" in scalar.dtype else "float"
            plain = not callable(scalar.value) and repr(scalar.value).lstrip("-")[0].isdigit()
            found.append(
                Parameter(
                    name=name,
                    kind="scalar",
                    type=text if plain else f"{text}?",
                    default=scalar.value if plain else None,
                )
            )
        for place in reversed(range(len(found) - 1)):  # no default may stand before a parameter without one
            if found[place + 1].default is NO_DEFAULT and found[place].default is not NO_DEFAULT:
                found[place] = replace(found[place], default=NO_DEFAULT)
        return tuple(found)

    def _determined(self) -> set[str]:
        """Fields that the tensors of every call determine, and the flags of optional tensors."""
        found: set[str] = set()
        for name in self.inputs:
            each = self.kernel.array_fields[name]
            if self.is_optional(name):
                found.add(str(each.when))
            else:
                found |= {_dtype_of(each), each.layout, *(word for word, _ in self._sizes(each))}
        found &= set(self.kernel.fields)
        self._equations = self._solvable(found | set(self.pinned))
        return found | {dim for *_, dim in self._equations}

    def _sizes(self, each: ArrayField) -> list[tuple[str, int]]:
        """Dims that stand alone in a shape, and their axes."""
        words = split_shape(each.shape) if isinstance(each.shape, str) else ()
        return [(word, axis) for axis, word in enumerate(words) if isinstance(self.kernel.fields.get(word), Dim)]

    def _solvable(self, known: set[str]) -> list[tuple[str, int, str, str]]:
        """The sizes, such as "experts+1", of inputs that every call gives, from which dims follow one after the other: the
        input, the axis, the size as it is declared, and the dim, the only one in it that is not known before.

        Args:
            known: the fields that are known without them.
        """
        sizes = [
            (name, axis, word, shape_names(word))
            for name in self.inputs
            if not self.is_optional(name) and isinstance(self.kernel.array_fields[name].shape, str)
            for axis, word in enumerate(split_shape(self.kernel.array_fields[name].shape))
        ]
        found: list[tuple[str, int, str, str]] = []
        known = set(known)
        for _ in self.kernel.fields:
            for name, axis, word, names in sizes:
                open_names = names - known
                dim = next(iter(open_names), "")
                if len(open_names) == 1 and isinstance(self.kernel.fields.get(dim), Dim) and is_solvable(word, dim):
                    found.append((name, axis, word, dim))
                    known.add(dim)
        return found

    def read(self, given: Sequence[Any]) -> dict[str, Any]:
        """The problem's fields, as far as the arguments of a call determine them; sizes stay symbolic where it is traced.

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
        for array, axis, word, dim in self._equations:
            if dim not in found:
                try:
                    found[dim] = solve(word, dim, given[self.inputs.index(array)].shape[axis], found.__getitem__)
                except ValueError as error:
                    raise ProblemError(f"{array}, axis {axis}: {error}") from error
        return found

    def _read_array(self, name: str, each: ArrayField, tensor: Any, found: dict[str, Any]) -> None:
        """Add the fields that one tensor determines to `found`."""
        if isinstance(each.shape, str) and tensor.ndim != len(split_shape(each.shape)):
            raise ProblemError(
                f"{name} must have {len(split_shape(each.shape))} axes ({each.shape}), got shape "
                f"{tuple(tensor.shape)}; reshape it"
            )
        for word, axis in self._sizes(each):
            found.setdefault(word, tensor.shape[axis])
        field = self.kernel.fields.get(_dtype_of(each))
        if isinstance(field, Choice):
            found.setdefault(_dtype_of(each), _dtype_among(field.words, dtype_name(tensor)))
        if each.layout in self.kernel.fields and tensor.ndim > 1:
            strides = tensor.stride()
            found.setdefault(each.layout, "column" if strides[-2] == 1 and strides[-1] != 1 else "row")

    def problem(self, given: Sequence[Any]) -> Problem:
        """The problem of a call.

        Raises:
            ProblemError: the kernel has no such problem, or an array does not fit the others; the message names it.
        """
        found = self.read(given)
        fields = self.kernel.fields
        p = self.kernel.problem(
            **{name: int(value) if isinstance(fields[name], Dim) else value for name, value in found.items()}
        )
        self._check_arrays(p, given)
        return p

    def empty_problem(self, given: Sequence[Any]) -> Problem | None:
        """The problem of a call where a size is 0 that the kernel needs to be positive; None where there is none.

        It says how large the outputs are, and nothing is launched for it.

        Raises:
            ProblemError: an array does not fit the others, or a field has a value that is not allowed.
        """
        found, fields = self.read(given), self.kernel.fields

        def is_empty(name: str) -> bool:
            each, value = fields[name], found.get(name)
            return (isinstance(each, Dim) and each.least > 0 and type(value) is int and not value) or (
                isinstance(each, Sizes) and value is not None and 0 in value
            )

        empty = {name: found[name] for name in fields if is_empty(name)}
        if not empty:
            return None
        # Every other value is checked as usual, with some allowed size in place of each that is 0.
        allowed = {name: max(1, getattr(fields[name], "least", 1)) for name in empty}
        allowed |= {name: (1,) for name in empty if isinstance(fields[name], Sizes)}
        p = Problem(self.kernel, self.kernel.read_values(found | allowed) | empty)
        self.kernel.check_requirements(p)
        self._check_arrays(p, given)
        return p

    def _check_arrays(self, p: Problem, given: Sequence[Any]) -> None:
        """Raise where the arrays of a call are not those of the problem."""
        for name, value in zip(self.inputs, given, strict=False):
            spec = self.kernel.array_spec(name, p)
            if (value is not None) != self.kernel.present(name, p):
                raise ProblemError(f"{name} must {'not ' * (value is not None)}be given for {p}")
            tensors = () if value is None else value if spec.listed else [value]
            if value is not None and len(tensors) != len(spec.shapes):
                raise ProblemError(f"{name} must be {len(spec.shapes)} arrays, got {len(tensors)}")
            words = self.kernel.array_fields[name].shape
            for place, (tensor, shape) in enumerate(zip(tensors, spec.shapes, strict=False)):
                which = f"{name}[{place}]" if spec.listed else name
                _check_tensor(which, words, tensor, shape, spec.dtype, operator.ne)

    def checked_results(self, given: Sequence[Any], is_true: Callable[[Any], bool]) -> list[Output]:
        """The outputs of a call, after the checks that :meth:`problem` makes. Where it is traced, sizes are compared as far as
        the tracer can tell, and what the kernel requires of them is left to the call.

        Args:
            given: the arguments.
            is_true: whether a comparison of symbolic sizes is known to be true.

        Raises:
            ProblemError: as :meth:`problem`.
        """
        found, fields = self.read(given), self.kernel.fields
        sizes = [value for name, value in found.items() if isinstance(fields[name], Dim)]
        if all(isinstance(size, int) for size in sizes):
            if self.empty_problem(given) is None:
                self.problem(given)
            return self.results(given)
        for name, value in found.items():
            if not isinstance(fields[name], (Dim, Sizes)):
                try:
                    fields[name].read(name, value)
                except ValueError as error:
                    raise ProblemError(str(error)) from error
        for name, value in zip(self.inputs, given, strict=False):
            each = self.kernel.array_fields[name]
            word = _dtype_of(each)
            for tensor in [value] if isinstance(each.shape, str) and value is not None else ():
                with suppress(KeyError):  # a size that is derived from the problem
                    shape = read_shape(each.shape, found.__getitem__)  # type: ignore[arg-type]
                    derived = word in self.kernel.derived  # a type that the call checks
                    dtype = dtype_name(tensor) if derived else str(found.get(word, self._default(word)))
                    _check_tensor(name, each.shape, tensor, shape, dtype, lambda one, other: is_true(one != other))
        return self.results(given)

    def results(self, given: Sequence[Any]) -> list[Output]:
        """The outputs of a call. Where it is traced their sizes are symbolic, if the names of sizes determine them."""
        found = self.read(given)
        outputs, p = [], None
        for name in self.outputs:
            each = self.kernel.array_fields[name]
            dtype = found.get(_dtype_of(each), self._default(_dtype_of(each)))
            try:
                if not isinstance(each.shape, str) or dtype in self.kernel.derived:
                    raise LookupError(name)
                shapes: tuple[Any, ...] = (read_shape(each.shape, lambda word: found[word]),)
            except LookupError:
                p = p or self.empty_problem(given) or self.problem(given)
                shapes, dtype = (spec := self.kernel.array_spec(name, p)).shapes, spec.dtype
            layout = found.get(each.layout, self._default(each.layout)) if each.layout not in LAYOUTS else each.layout
            outputs.append(
                Output(
                    shapes=shapes,
                    dtype=str(dtype),
                    strides=tuple(strides_of(shape, layout == "column") for shape in shapes),
                    listed=each.listed,
                )
            )
        return outputs

    def _default(self, name: str) -> Any:
        """The default of a field; a type or layout itself where it is no field."""
        return self.kernel.fields[name].default if name in self.kernel.fields else name


def _check_tensor(
    name: str, words: Any, tensor: Any, shape: Sequence[Any], dtype: str, differ: Callable[[Any, Any], bool]
) -> None:
    """Raise where a tensor is not of this shape and type. `words` is the shape as it is declared, `differ` compares sizes."""
    if len(shape) != tensor.ndim:
        raise ProblemError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}; reshape it")
    for axis, (size, wanted) in enumerate(zip(tensor.shape, shape, strict=True)):
        if differ(size, wanted):
            what = f" ({split_shape(words)[axis]})" if isinstance(words, str) else ""
            raise ProblemError(f"{name}, axis {axis}{what}: must be {wanted}, as the other arrays say, got {size}")
    if dtype_name(tensor) not in (dtype, tile_type(dtype)):
        raise ProblemError(f"{name} must be {dtype}, got {dtype_name(tensor)}; cast it")


def _dtype_of(each: ArrayField) -> str:
    return each.dtype or "dtype"


def dtype_name(tensor: Any) -> str:
    """cuTile's name of a tensor's element type."""
    name = str(tensor.dtype).removeprefix("torch.")
    return ALSO_CALLED.get(name, name)


def _dtype_among(words: Sequence[str], name: str) -> str:
    """The type out of `words` of a tensor of the type `name`: torch has types that hold another type's bits."""
    return name if name in words else next((word for word in words if tile_type(word) == name), name)
