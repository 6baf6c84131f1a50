"""What a function is: the text of its code and of the code that it calls, and the values that it captured.

Both are found without calling the function and without compiling it, in well below a millisecond once its source was read. Code
is identified by its source text, so that another version of Python gives the same result, and arrays by type, shape, strides and
alignment.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import linecache
import os
import sys
import textwrap
from collections.abc import Mapping, Set
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from tiledsched.core.arrays import strides_of
from tiledsched.core.canonical import canonical_json
from tiledsched.core.copies import closed_over, names_in
from tiledsched.core.modules import LIBRARIES

PLAIN = (bool, int, str, type(None))
MOST_PARTS = 5000
"""Values that are read of one function at most."""
PYTHON = os.path.dirname(os.__file__) + os.sep
"""Where Python's own modules lie."""
NAME = "name"
"""The key under which something stands of which only the name counts."""
FULL_ALIGNMENT = 16
"""Bytes: cuTile tells alignments up to this one apart."""


class OpaqueError(Exception):
    """A value that cannot be told from others of its type. The message names it."""


def is_number(value: Any) -> bool:
    """Whether a value is a single number of NumPy's, which looks like an array."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_array(value: Any) -> bool:
    """Whether a value is an array of some library."""
    if is_number(value):
        return False
    ways = ("data_ptr", "__cuda_array_interface__", "__dlpack__", "__array_interface__")
    return hasattr(value, "shape") and hasattr(value, "dtype") and any(hasattr(type(value), way) for way in ways)


def address(array: Any) -> int:
    """Where the first element of an array lies; 0 where it lies nowhere."""
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    for way in ("__cuda_array_interface__", "__array_interface__"):
        if hasattr(array, way):
            return int(getattr(array, way)["data"][0])
    return 0


def describe_array(array: Any) -> str:
    """`float16[4096x1024]`, with the strides in elements unless rows follow each other, and the alignment below 16 bytes."""
    shape = [int(side) for side in array.shape]
    words = ["x".join(map(str, shape))]
    if hasattr(array, "stride"):
        strides = [int(step) for step in array.stride()]
    elif getattr(array, "strides", None):
        strides = [int(step) // int(array.dtype.itemsize) for step in array.strides]
    else:
        strides = []
    usual = strides_of(shape, column=False)
    if strides and any(mine != theirs and side != 1 for mine, theirs, side in zip(strides, usual, shape, strict=True)):
        words.append(f"strides {'x'.join(map(str, strides))}")
    lowest = (where := address(array)) & -where
    if 0 < lowest < FULL_ALIGNMENT:
        words.append(f"align {lowest}")
    return f"{str(array.dtype).rpartition('.')[2]}[{' '.join(words)}]"


def is_library(module: str | None, file: str | None) -> bool:
    """Whether code belongs to Python or to a library whose version, not whose source, tells what it does.

    Args:
        module: name of its module.
        file: where its source lies; None for what has none. A user's module may have the name of one of Python's.
    """
    top = (module or "").partition(".")[0]
    if top in LIBRARIES:
        return True
    own = file is None or (file.startswith(PYTHON) and "site-packages" not in file) or file.startswith("<frozen")
    return top in sys.stdlib_module_names and own


def _is_library_function(function: FunctionType) -> bool:
    return is_library(function.__module__, function.__code__.co_filename)


@functools.lru_cache(maxsize=4096)
def _text_of(code: CodeType) -> str:
    """The text of the code of a function, and of a lambda that of its body; where there is none, as of one made by `exec`, its
    instructions."""
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : _last_line(code)]
    text = textwrap.dedent("".join(lines)) or code.co_code.hex()
    if code.co_name == "<lambda>" and lines:
        text = _lambda_body(code, lines) or text
    # Two functions may stand in one line, and a file may have changed since it was imported.
    constants = [repr(each) for each in code.co_consts if not isinstance(each, (CodeType, frozenset))]
    return "\n".join([text, *code.co_names, *code.co_varnames, *constants])


def _lambda_body(code: CodeType, lines: list[str]) -> str:
    """The text of the body of a lambda among the lines that it stands in, since what stands beside it is not part of it; empty
    before Python 3.11, which does not tell columns."""
    places = [each for each in getattr(code, "co_positions", tuple)() if None not in each and each[2:] != (0, 0)]
    if not places:
        return ""
    (first, begin), (last, end) = min(each[::2] for each in places), max(each[1::2] for each in places)
    body = [line.encode() for line in lines[first - code.co_firstlineno : last - code.co_firstlineno + 1]]
    body[-1] = body[-1][:end]
    body[0] = body[0][begin:]
    return b"".join(body).decode()


def _last_line(code: CodeType) -> int:
    """The number of the last line of a function. `inspect.getsource` takes milliseconds to tell."""
    if sys.version_info >= (3, 11):
        lines = (last for _, last, _, _ in code.co_positions() if last)
    else:
        lines = (line for _, _, line in code.co_lines() if line)
    inner = [_last_line(each) for each in code.co_consts if isinstance(each, CodeType)]
    return max([code.co_firstlineno, *inner, *lines])


def _globals_in(code: CodeType) -> set[str]:
    """The names that code reads as globals. It takes milliseconds to tell."""
    found = {str(each.argval) for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return found.union(*(_globals_in(each) for each in code.co_consts if isinstance(each, CodeType)))


class Reader:
    """Reads tile functions: `code` collects the text of every function met.

    Of functions that run on the host only the code counts (:meth:`code_of`): what they make of their values is seen in what they
    return, and they may keep caches and counters.
    """

    def __init__(self) -> None:
        self.code: list[str] = []
        self._parts = 0
        self._met: set[int] = set()

    def code_of(self, function: Any) -> None:
        """Collect the code of a function that runs on the host, and of the functions that it calls."""
        function = _plain_function(function)
        if function is None or id(function) in self._met or _is_library_function(function):
            return
        self._met.add(id(function))
        self.code.append(_text_of(function.__code__))
        loads = function.__globals__.keys() & names_in(function.__code__)
        for value in [*closed_over(function).values(), *(function.__globals__[name] for name in sorted(loads))]:
            self.code_of(value)

    def function(self, function: Any) -> dict[str, Any]:
        """The values that a tile function captured, by name, as plain data; the text of its code joins `code`.

        Raises:
            OpaqueError: it captured a value that cannot be told from others.
        """
        plain = _plain_function(function)
        if plain is None:
            raise OpaqueError(f"a {type(function).__name__} that is called as a function")
        self._met.add(id(plain))
        self.code.append(_text_of(plain.__code__))
        names = frozenset(names_in(plain.__code__))
        found = {
            name: self.value(value, name, names) for name, value in [*closed_over(plain).items(), *_defaults(plain)]
        }
        for name in sorted(names & plain.__globals__.keys() - found.keys()):
            try:
                found[name] = self.value(plain.__globals__[name], name, names)
            except OpaqueError:
                if name in _globals_in(plain.__code__):  # else it is the name of an attribute only
                    raise
        return {
            name: value for name, value in found.items() if not (isinstance(value, dict) and value.keys() == {NAME})
        }

    def value(self, value: Any, name: str, attributes: Set[str] = frozenset()) -> Any:
        """A value as plain data.

        Args:
            value: the value.
            name: what it is called, for errors.
            attributes: names that the code reads of objects.

        Raises:
            OpaqueError: the value cannot be told from others of its type.
        """
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise OpaqueError(f"{name}, which holds more than {MOST_PARTS} values")
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if is_number(value):
            return self.value(value.item(), name)
        if isinstance(value, PLAIN):
            return value
        if isinstance(value, float):
            return f"float {value!r}"
        if is_array(value):
            return describe_array(value)
        if is_kernel(value):
            captured = self.function(value._pyfunc)
            return {"kernel": name_of(value._pyfunc), "captured": captured, "hints": repr(value._compiler_options)}
        if isinstance(value, ModuleType):
            return self._module(value, attributes)
        if isinstance(value, (FunctionType, MethodType, functools.partial)) or hasattr(value, "__wrapped__"):
            return self._function(value)
        if isinstance(value, type):
            return self._class(value, attributes)
        if isinstance(value, BuiltinFunctionType):
            return {NAME: f"{value.__module__}.{value.__qualname__}"}
        return self._compound(value, name, attributes)

    def _module(self, module: ModuleType, attributes: Set[str]) -> Any:
        """A module: of one that is no library, what the code may read of it."""
        if is_library(module.__name__, getattr(module, "__file__", None)):
            return {NAME: module.__name__}
        read = {name: value for name, value in vars(module).items() if name in attributes}
        plain = {
            name: self.value(value, name, attributes)
            for name, value in sorted(read.items())
            if not isinstance(value, ModuleType)
        }
        return {"module": module.__name__, **plain}

    def _class(self, kind: type, attributes: Set[str]) -> Any:
        """A class: of one that is no library's, the values and the functions that it holds."""
        name = {NAME: f"{kind.__module__}.{kind.__qualname__}"}
        module = sys.modules.get(kind.__module__)
        if is_library(kind.__module__, getattr(module, "__file__", None)) or id(kind) in self._met:
            return name
        self._met.add(id(kind))
        members = {each: one for each, one in vars(kind).items() if each in attributes or isinstance(one, FunctionType)}
        read = {each: self.value(one, each, attributes) for each, one in sorted(members.items()) if not _is_made(one)}
        return {"class": name[NAME], **read} if read else name

    def _function(self, function: Any) -> Any:
        """A function among captured values: a library's by name, another by its code and what it captured in turn."""
        plain = _plain_function(function)
        if plain is None or _is_library_function(plain):
            return {NAME: name_of(plain or function)}
        return {NAME: name_of(plain)} if id(plain) in self._met else self.function(plain) or {NAME: name_of(plain)}

    def _compound(self, value: Any, name: str, attributes: Set[str]) -> Any:
        kind = type(value)
        if isinstance(value, Mapping):
            pairs = [[self.value(key, name), self.value(each, name, attributes)] for key, each in value.items()]
            return sorted(pairs, key=canonical_json)
        if isinstance(value, (list, tuple)):
            return [self.value(each, name, attributes) for each in value]
        if isinstance(value, (set, frozenset)):
            return sorted((self.value(each, name, attributes) for each in value), key=canonical_json)
        module = sys.modules.get(kind.__module__)
        if is_library(kind.__module__, getattr(module, "__file__", None)) and not isinstance(value, SimpleNamespace):
            text = repr(value)
            if " at 0x" not in text and "=0x" not in text:
                return text
        if id(value) in self._met:
            return {NAME: kind.__qualname__}
        self._met.add(id(value))
        fields = fields_of(value)
        if fields is None:
            raise OpaqueError(f"{name}, of the type {kind.__module__}.{kind.__qualname__}")
        described = {each: self.value(one, each, attributes) for each, one in fields.items()}
        return {"type": kind.__qualname__, "class": self._class(kind, attributes), **described}


def _plain_function(function: Any) -> FunctionType | None:
    """The Python function behind wrappers, methods, partial functions and callable objects; None where there is none."""
    for _ in range(20):
        if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):
            return function
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, MethodType):
            function = function.__func__
        elif isinstance(function, (type, ModuleType)) or function is None:
            return None
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            function = vars(type(function)).get("__call__")
    return None


def _is_made(value: Any) -> bool:
    """Whether a function was made by the standard library, as those of dataclasses are."""
    return isinstance(value, FunctionType) and value.__code__.co_filename.startswith("<")


def name_of(function: Any) -> str:
    """`package.module:function`; a function inside another one has the names of both. A program that was started has the name
    under which others import it.
    """
    name = str(getattr(function, "__qualname__", type(function).__qualname__)).replace(".<locals>", "")
    module = getattr(function, "__module__", None) or "builtins"
    if module == "__main__":
        main = sys.modules[module]
        spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec is not None else Path(path).stem if path else module
    return f"{module}:{name}"


def is_kernel(value: Any) -> bool:
    """Whether a value is a cuTile kernel, rather than a function that returns one."""
    return hasattr(value, "_pyfunc") and hasattr(value, "replace_hints")


def _defaults(function: FunctionType) -> list[tuple[str, Any]]:
    """The default values of a function's parameters, by name."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = function.__defaults__ or ()
    return [*zip(names[len(names) - len(given) :], given, strict=True), *(function.__kwdefaults__ or {}).items()]


def fields_of(value: Any) -> dict[str, Any] | None:
    """The public fields of an object; None for one without any."""
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if hasattr(value, "__dict__"):
        return {name: each for name, each in vars(value).items() if not name.startswith("_")}
    slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if not name.startswith("_") and hasattr(value, name)}
    return found or None
