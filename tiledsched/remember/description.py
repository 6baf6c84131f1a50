"""What a call of `exhaustive_search` asks: its kernel, its problem, and a schedule for each configuration."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.core.canonical import canonical_json
from tiledsched.core.fields import Value
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.remember.identity import OpaqueError, Reader, digest, fields_of

MARK = "captured"
"""The field of a problem that holds a digest of what the kernel captured. Every problem of this package has it."""
RESERVED = ("kernel", "values", "declaration", "known", "names", "id", "omitted", MARK, "l2")
"""Names that a captured value cannot have as the field of a problem; it gets an underscore at its end."""
LONGEST = 80
"""Characters of a value that is stored as it is; of a longer one a digest is stored."""
Grid = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, as far as it can be told without compiling or launching anything."""

    kernel: str
    """`package.module:function`, the name under which results are stored."""
    problem: Problem
    """What args_fn and grid_fn captured, by name: arrays by type and shape, numbers by value."""
    source: str
    """Digest of the code, and of the kernel's name."""
    schedules: tuple[Schedule, ...]
    """One for each configuration, in the caller's order: the public fields of the configuration, and the compiler's hints."""
    grids: tuple[Grid, ...]
    """The grid of each configuration."""

    @property
    def space(self) -> str:
        """A digest of the set of schedules."""
        return digest(sorted({each.id for each in self.schedules}))


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of a call, whatever the version of cuTile that they were written for."""

    configs: Sequence[Any]
    stream: Any
    grid_fn: Callable[[Any], Any]
    kernel: Any
    args_fn: Callable[[Any], tuple[Any, ...]]
    hints_fn: Callable[[Any], Mapping[str, Any]] | None
    timeout_s: float | None
    flush_l2: bool
    check: bool

    def kernel_of(self, config: Any) -> Any:
        """The cuTile kernel of a configuration, before its hints."""
        return self.kernel if is_kernel(self.kernel) else self.kernel(config)

    def hints_of(self, config: Any) -> dict[str, Any]:
        """The hints of a configuration."""
        return dict(self.hints_fn(config)) if self.hints_fn is not None else {}


def is_kernel(value: Any) -> bool:
    """Whether a value is a cuTile kernel, rather than a function that returns one."""
    return hasattr(value, "_pyfunc") and hasattr(value, "replace_hints")


def describe_call(request: Request, arch: str) -> Call:
    """Describe a call. `kernel`, `grid_fn` and `hints_fn` are called once for each configuration, `args_fn` never.

    Raises:
        OpaqueError: a value cannot be told from others of its type. The message names it.
    """
    kernels = [request.kernel_of(config) for config in request.configs]
    told = {id(each): _describe_kernel(each) for each in kernels}
    names = sorted({name for name, _, _ in told.values()})
    reader = Reader(tile=False)
    captured = reader.function(request.args_fn)
    of_grid = reader.function(request.grid_fn)
    several = not is_kernel(request.kernel)
    name = names[0] if len(names) == 1 else getattr(request.kernel, "__module__", "") + ":" + _qualname(request.kernel)
    values: dict[str, Value] = {}
    for label, value in [*captured.items(), *of_grid.items()]:
        field = f"{label}_" if label in RESERVED or label.startswith("_") else label
        field = field.lstrip("_") or "value_"
        plain = plain_value(value)
        if field in values and values[field] != plain:
            field = f"grid_{field}"
        values[field] = plain
    values = dict(sorted(values.items()))
    if not request.flush_l2:
        values["l2"] = "warm"
    first = told[id(kernels[0])]
    values[MARK] = "" if several else first[2]
    code = [reader.code, *([] if several else [first[1]])]
    schedules = []
    for config, kernel in zip(request.configs, kernels, strict=True):
        knobs = config_knobs(config)
        for hint, number in hints_for(kernel, request.hints_of(config), arch).items():
            if knobs.get(hint) != number:
                knobs[hint if hint not in knobs else f"hint_{hint}"] = number
        if several:
            knobs["kernel"] = f"{told[id(kernel)][0].rpartition(':')[2]} {digest(told[id(kernel)][1:], 8)}"
        schedules.append(Schedule(knobs))
    return Call(
        kernel=name,
        problem=Problem(name, values),
        source=digest(code) + digest(name),
        schedules=tuple(schedules),
        grids=tuple(_grid(request.grid_fn(config)) for config in request.configs),
    )


def _grid(grid: Any) -> Grid:
    """The grid without axes of 1 at its end."""
    axes = [int(axis) for axis in (grid if isinstance(grid, (tuple, list)) else (grid,))]
    while len(axes) > 1 and axes[-1] == 1:
        axes.pop()
    return tuple(axes)


def _describe_kernel(kernel: Any) -> tuple[str, dict[str, str], str]:
    """The name of a kernel, the text of its code and of what it calls, and a digest of what it captured."""
    function = kernel._pyfunc
    reader = Reader(tile=True)
    captured = reader.function(function)
    annotations = {name: str(each) for name, each in getattr(function, "__annotations__", {}).items()}
    captured["annotations"] = {name: text for name, text in annotations.items() if " at 0x" not in text}
    return f"{function.__module__}:{_qualname(function)}", reader.code, digest(captured, 8)


def _qualname(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__)).replace(".<locals>", "")


def plain_value(value: Any) -> Value:
    """A described value as the field of a problem has it."""
    if isinstance(value, (bool, int)) or (isinstance(value, str) and value.isprintable() and len(value) <= LONGEST):
        return value.removeprefix("float ") if isinstance(value, str) else value
    if value is None:
        return "None"
    if isinstance(value, list) and len(value) <= LONGEST // 4 and all(type(each) is int for each in value):
        return ",".join(map(str, value))
    text = canonical_json(value)
    return text if len(text) <= LONGEST else f"{type(value).__name__} of {len(value)} #{digest(value, 8)}"


def config_knobs(config: Any) -> dict[str, KnobValue]:
    """The public fields of a configuration as the knobs of a schedule.

    Raises:
        OpaqueError: a field cannot be told from others of its type.
    """
    if isinstance(config, Mapping):
        held: Mapping[Any, Any] = config
    elif isinstance(config, (str, int, float, enum.Enum, type(None))):
        held = {"config": config}
    elif isinstance(config, (list, tuple)) and not hasattr(config, "_asdict"):
        held = {f"config{place}": each for place, each in enumerate(config)}
    else:
        held = fields_of(config) or {"config": config}
    reader = Reader(tile=False)
    found: dict[str, KnobValue] = {}
    for name, value in held.items():
        if isinstance(value, (bool, int)) and not isinstance(value, enum.Enum):
            found[str(name)] = value
            continue
        described = reader.value(value, f"the field {name} of a configuration", frozenset())
        if isinstance(described, dict) and not described.keys() - {"type"}:
            raise OpaqueError(f"the field {name} of a configuration, a {described.get('type')}")
        if isinstance(value, types.FunctionType):
            described = {"function": f"{value.__module__}:{_qualname(value)}", "code": digest(reader.code, 8)}
        found[str(name)] = _text(described)
    return found


def _text(value: Any) -> str:
    text = (
        value.removeprefix("float ") if isinstance(value, str) else "None" if value is None else canonical_json(value)
    )
    return text if text.isprintable() else repr(text)


def hints_for(kernel: Any, hints: Mapping[str, Any], arch: str) -> dict[str, int]:
    """The hints that a kernel is compiled with for an arch: those of its decorator, with others in their place. What is left to
    the compiler is left out.

    Raises:
        ValueError, TypeError: as cuTile does of a hint that is not allowed.
    """
    options = kernel._compiler_options
    if hints:
        options = dataclasses.replace(options, **hints)
    found = {}
    for each in dataclasses.fields(options):
        value = getattr(options, each.name)
        if hasattr(value, "_by_target"):
            other = each.default if "UNSPECIFIED" in repr(value._default) else value._default
            value = value._by_target.get(arch, other)
        if value is not None and value != each.default:
            found[each.name] = value
    return found
