"""What a call of `exhaustive_search` asks: its kernel, its problem, and a schedule for each configuration."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from tiledsched.core.canonical import canonical_json, stable_id
from tiledsched.core.fields import Value
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.remember.identity import OpaqueError, Reader, fields_of, is_array, is_kernel, name_of

MARK = "call"
"""The field of a problem that tells calls apart; see :meth:`Call.mark`. Every problem of this package has the field, and no other
problem has."""
GRIDS = "launch_grids"
"""The field of a problem that tells calls apart which differ only in their grids; see :attr:`Call.all_grids`. The first such
problem that is stored does not have the field."""
RESERVED = frozenset(dir(Problem)) | {"kernel", "values", MARK, GRIDS, "l2"}
"""Names that a parameter cannot have as the field of a problem; an underscore is added."""
LONGEST = 100
"""Characters of a value that is stored as it is; of a longer one a digest is stored."""
Grid = tuple[int, ...]


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


@dataclass(eq=False, kw_only=True)
class Call:
    """One call, described without compiling or launching anything."""

    request: Request
    """The call's arguments."""
    kernel: str
    """`package.module:function`, the name under which results are stored."""
    source: str
    """Digest of the code of the kernel, of args_fn and of grid_fn, and of the kernel's name."""
    captured: str
    """Digest of the values that the kernel captured."""
    schedules: tuple[Schedule, ...]
    """One for each configuration, in the caller's order: the public fields of the configuration, and the compiler's hints."""
    grids: tuple[Grid, ...]
    """The grid of each configuration, without ones at its end."""
    places: dict[str, int] = field(init=False)
    """The place of the first configuration with each schedule, by the schedule's id."""

    def __post_init__(self) -> None:
        self.places = {each.id: place for place, each in reversed(list(enumerate(self.schedules)))}
        self._args: dict[int, list[Any]] = {}
        self._digests: dict[tuple[int, tuple[int, ...]], str] = {}

    @functools.cached_property
    def space(self) -> str:
        """A digest of the set of schedules."""
        return stable_id(sorted(self.places))

    @functools.cached_property
    def all_grids(self) -> str:
        """The grid of the first configuration, and a digest of all."""
        all_grids = sorted((schedule, self.grids[place]) for schedule, place in self.places.items())
        return f"{'x'.join(map(str, self.grids[0]))} {stable_id(all_grids, 8)}"

    def mark(self, varying: Sequence[int]) -> str:
        """What tells this call from others of the kernel: a digest of the arguments that all configurations have in common, the
        places of those that vary, the first schedule, and a digest of its arguments, those that vary included.
        """
        places = ".".join(map(str, varying))
        return f"{self._shared(0, varying)} {places} {self.schedules[0].id} {self._shared(0, ())}"

    def has_mark(self, mark: str) -> bool:
        """Whether a stored mark is of this call. `args_fn` is called once.

        Raises:
            OpaqueError: an argument cannot be told from others of its type.
        """
        shared, _, rest = mark.partition(" ")
        places, _, example = rest.partition(" ")
        schedule, _, whole = example.partition(" ")
        varying = [int(each) for each in places.split(".") if each.isdigit()]
        here = self.places.get(schedule)
        if here is None:
            return self._shared(0, varying) == shared
        return self._shared(here, ()) == whole

    def _shared(self, place: int, varying: Sequence[int]) -> str:
        """A digest of a configuration's arguments without those that vary, and of what the kernel captured."""
        key = place, tuple(varying)
        if key not in self._digests:
            shared = [None if number in varying else each for number, each in enumerate(self._arguments(place))]
            self._digests[key] = stable_id([shared, self.captured, self.request.flush_l2])
        return self._digests[key]

    def _arguments(self, place: int) -> list[Any]:
        """The arguments of a configuration, as plain data."""
        if place not in self._args:
            with _no_copies():
                args = self.request.args_fn(self.request.configs[place])
            reader = Reader()
            self._args[place] = [reader.value(each, f"argument {number}") for number, each in enumerate(args)]
        return self._args[place]

    def new_problem(self, name_grids: bool = False) -> Problem:
        """The problem of a call that was never seen: what is passed to every configuration alike, by the names of the kernel's
        parameters. `args_fn` is called once for each configuration.

        Args:
            name_grids: whether only the grids tell the call from another one.

        Raises:
            OpaqueError: an argument cannot be told from others of its type.
        """
        each = [self._arguments(place) for place in sorted(self.places.values())]
        varying = [
            number
            for number, value in enumerate(each[0])
            if not all(len(other) > number and other[number] == value for other in each)
        ]
        code = self.request.kernel_of(self.request.configs[0])._pyfunc.__code__
        values: dict[str, Value] = {}
        for number, value in enumerate(each[0]):
            if number not in varying:
                name = code.co_varnames[number] if number < code.co_argcount else f"argument{number}"
                values[f"{name.lstrip('_') or name}_" if name in RESERVED or name[0] == "_" else name] = plain_value(
                    value
                )
        if not self.request.flush_l2:
            values["l2"] = "warm"
        if name_grids:
            values[GRIDS] = self.all_grids
        values[MARK] = self.mark(varying)
        return Problem(self.kernel, dict(sorted(values.items())))


def describe_call(request: Request, arch: str) -> Call:
    """Describe a call. `kernel`, `grid_fn` and `hints_fn` are called once for each configuration, `args_fn` not yet.

    Raises:
        OpaqueError: a value that the kernel captured, or a field of a configuration, cannot be told from others of its type.
    """
    kernels = [request.kernel_of(config) for config in request.configs]
    described = {number: _describe_kernel(each) for number, each in {id(each): each for each in kernels}.items()}
    names = sorted({name for name, _, _ in described.values()})
    several = not is_kernel(request.kernel)
    name = names[0] if len(names) == 1 else name_of(request.kernel)
    reader = Reader()
    for function in (request.args_fn, request.grid_fn):
        reader.code_of(function)
    first = described[id(kernels[0])]
    schedules = []
    for config, kernel in zip(request.configs, kernels, strict=True):
        knobs = config_knobs(config)
        for hint, number in hints_for(kernel, request.hints_of(config), arch).items():
            if knobs.get(hint) != number:
                knobs[hint if hint not in knobs else f"hint_{hint}"] = number
        if several:
            knobs["kernel"] = f"{described[id(kernel)][0].rpartition(':')[2]} {stable_id(described[id(kernel)][1:], 8)}"
        schedules.append(Schedule(knobs))
    return Call(
        request=request,
        kernel=name,
        source=stable_id([reader.code, *([] if several else [first[1]])]) + stable_id(name),
        captured="" if several else first[2],
        schedules=tuple(schedules),
        grids=tuple(_grid(request.grid_fn(config)) for config in request.configs),
    )


def _grid(grid: Any) -> Grid:
    """The grid without axes of 1 at its end."""
    axes = [int(axis) for axis in (grid if isinstance(grid, (tuple, list)) else (grid,))]
    while len(axes) > 1 and axes[-1] == 1:
        axes.pop()
    return tuple(axes)


def _describe_kernel(kernel: Any) -> tuple[str, list[str], str]:
    """The name of a kernel, the text of its code and of what it calls, and a digest of what it captured."""
    function, reader = kernel._pyfunc, Reader()
    captured = reader.function(function)
    annotations = {name: str(each) for name, each in getattr(function, "__annotations__", {}).items()}
    captured["annotations"] = {name: text for name, text in annotations.items() if " at 0x" not in text}
    return name_of(function), reader.code, stable_id(captured, 8)


def plain_value(value: Any) -> Value:
    """A described value as the field of a problem has it."""
    if isinstance(value, (bool, int)):
        return value
    text = _text_of(value)
    if text.isprintable() and len(text) <= LONGEST:
        return text
    return f"{type(value).__name__} of {len(value)}: {stable_id(value, 8)}"


def config_knobs(config: Any) -> dict[str, KnobValue]:
    """The public fields of a configuration as the knobs of a schedule.

    Raises:
        OpaqueError: a field cannot be told from others of its type.
    """
    if isinstance(config, Mapping):
        fields: Mapping[Any, Any] = config
    elif isinstance(config, (list, tuple)) and not hasattr(config, "_asdict"):
        fields = {f"config{place}": each for place, each in enumerate(config)}
    elif isinstance(config, (str, int, float, enum.Enum, type(None))) or is_array(config):
        fields = {"config": config}
    else:
        fields = fields_of(config) or {"config": config}
    found: dict[str, KnobValue] = {}
    for name, value in fields.items():
        reader = Reader()
        described = reader.value(value, f"the field {name} of a configuration")
        if isinstance(described, dict) and described.keys() == {"type", "class"}:
            raise OpaqueError(f"the field {name} of a configuration, a {type(value).__qualname__}")
        if reader.code or isinstance(value, FunctionType):
            described = [described, stable_id(reader.code, 8)]
        text = _text_of(described)
        found[str(name)] = (
            described if isinstance(described, (bool, int)) else text if text.isprintable() else repr(text)
        )
    return found


def _text_of(value: Any) -> str:
    """The text of a described value, which may hold characters that cannot be printed."""
    if isinstance(value, str):
        return value.removeprefix("float ")
    return "None" if value is None else canonical_json(value)


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


def _no_copies() -> contextlib.AbstractContextManager[Any]:
    """A context in which torch copies and fills no tensor: arguments are looked at here, and never computed on."""
    if sys.modules.get("torch") is None:
        return contextlib.nullcontext()
    import torch
    from torch.overrides import TorchFunctionMode

    filled = {torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}

    class NoCopies(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.clone, torch.Tensor.clone) and not kwargs:
                return args[0]
            if function in filled and not kwargs:
                return torch.empty_like(args[0])
            return function(*args, **(kwargs or {}))

    return NoCopies()
