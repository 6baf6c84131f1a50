"""Functions written for torch's FlexAttention, as tile code.

Plain arithmetic is tile code already, and is used as it is. Any other function is run in Python on stand-ins for numbers, which
note each operation as a line of tile code: `bias[h, q_idx]` of a tensor that the function reads becomes `ct.gather`, and
`torch.exp(x)` or `x.exp()` becomes `ct.exp(x)`. The tensors become run-time arrays, whose contents compile nothing anew.

torch is not imported: it hands calls on stand-ins over (`__torch_function__`), and a tensor is what has a shape and a device.
"""

from __future__ import annotations

import functools
import inspect
import traceback
import weakref
from collections.abc import Mapping, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import cuda.tile as ct

from tiledsched.core.errors import DeclarationError
from tiledsched.core.sources import compiled
from tiledsched.kernels.attention.loads import load_tile
from tiledsched.kernels.attention.options import MASK_PARAMETERS, PARAMETERS, word_of
from tiledsched.kernels.attention.scales import LOG2_E

SIGNS = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "/": "truediv div",
    "//": "floordiv",
    "%": "mod remainder",
    "**": "pow",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
    "==": "eq",
    "!=": "ne",
    "&": "and bitwise_and",
    "|": "or bitwise_or",
    "^": "xor bitwise_xor",
}
"""Python's sign -> what Python and torch call its function. `torch.floor_divide` is missing: of numbers that are not whole,
cuTile's `//` is floor(x / y), which may be 1 more than torch's where x / y is rounded to a whole number.
"""
OPERATORS = {name: f"{{}} {sign} {{}}" for sign, names in SIGNS.items() for name in names.split()} | {
    "neg": "-{}",
    "invert": "~{}",
    "abs": "abs({})",
}
FUNCTIONS = OPERATORS | {
    **{
        each: f"_ct.{each}({{}})"
        for each in ("abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "floor", "ceil", "isnan")
    },
    **{each: f"_ct.{each}({{}})" for each in ("sin", "cos", "tan", "sinh", "cosh")},
    "tanh": "_tanh({})",
    **dict.fromkeys(("maximum", "clamp_min"), "_ct.maximum({}, {}, propagate_nan=True)"),
    **dict.fromkeys(("minimum", "clamp_max"), "_ct.minimum({}, {}, propagate_nan=True)"),
    "clamp": "_ct.minimum(_ct.maximum({}, {}, propagate_nan=True), {}, propagate_nan=True)",
    "bitwise_not": "~{}",
    "where": "_ct.where({}, {}, {})",
    "sigmoid": "1.0 / (1.0 + _ct.exp(-{}))",
    "logical_and": "({} != 0) & ({} != 0)",
    "logical_or": "({} != 0) | ({} != 0)",
    "logical_not": "{} == 0",
}
"""torch's function, or method of a tensor -> the expression of tile code that means the same."""
METHODS = {
    "new_ones": "True",
    "new_zeros": "False",
    "to": "{}",
    "to bool": "{} != 0",
    "bool": "{} != 0",
    **{f"to {each}": f"_ct.astype({{}}, _ct.{each})" for each in ("float32", "float16", "bfloat16", "int32", "int64")},
    "float": "_ct.astype({}, _ct.float32)",
    "int": "_ct.astype({}, _ct.int32)",
    "long": "_ct.astype({}, _ct.int64)",
}
"""What is a method only; `to` with the name of a type, where it has one. The masks that torch joins begin with `new_ones`."""
ADVICE = (
    "write it with arithmetic, comparisons, elements of tensors such as bias[h, q_idx, kv_idx], and torch's "
    f"{', '.join(sorted(FUNCTIONS.keys() - OPERATORS.keys() | {'abs'}))}"
)
_plain = functools.cache(lambda what, count: weakref.WeakKeyDictionary[Any, Any]())
"""Of an argument and a number of arrays: functions that are tile code already -> the same with room for any number of arrays, or
None."""


def tanh(x: Any) -> Any:
    """The hyperbolic tangent, of float32 within 2e-7: one exponential and one reciprocal of the GPU."""
    if x.dtype != ct.float32:
        return ct.tanh(x)
    power = ct.exp2(x * (2.0 * LOG2_E), flush_to_zero=True)
    return 1.0 - ct.truediv(2.0, power + 1.0, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)


class _Trace:
    """The lines of a function in tile code, as they are noted."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays, self.differs = arrays, False
        """All arrays of the call, to which more are added; and whether the function is no tile code as it stands."""
        self.lines: list[str] = []

    def note(self, template: str, *values: Any) -> _Number:
        """Note an expression of numbers."""
        if template == OPERATORS["truediv"] and isinstance(values[1], (int, float)) and values[1]:
            return self.note(OPERATORS["mul"], values[0], 1.0 / values[1])  # in a tenth of the instructions
        texts = [self.text(each) for each in values]
        self.lines.append(f"v{len(self.lines)} = {template.format(*texts)}")
        return _Number(self, f"v{len(self.lines) - 1}")

    def text(self, value: Any) -> str:
        """A number in tile code."""
        if isinstance(value, _Number):
            return value.text
        if isinstance(value, (bool, int, float)):
            return f"({value})"
        if not hasattr(value, "device"):
            raise TypeError(f"{value!r:.80} is no number")
        return self.element(value, ()).text

    def element(self, tensor: Any, index: Any) -> _Number:
        """An element of a tensor. Indices below 0 count from its end, as in torch."""
        self.differs = True
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) != len(tensor.shape):
            raise TypeError(
                f"a tensor of {len(tensor.shape)} axes takes as many numbers as indices, not {len(indices)}"
            )
        place = next((place for place, each in enumerate(self.arrays) if each is tensor), len(self.arrays))
        if place == len(self.arrays):
            self.arrays.append(tensor)
        array = f"_arrays[{place}]"
        inside = [
            each if each in MASK_PARAMETERS else f"_ct.where({each} < 0, {each} + {array}.shape[{axis}], {each})"
            for axis, each in enumerate(map(self.text, indices))
        ]
        load = "_load_tile" if inside[-2:] == ["q_idx", "kv_idx"] else "_ct.gather"
        return self.note(f"{load}({array}, ({', '.join(inside) or '0'},))")

    def call(self, name: str, values: Sequence[Any], options: Any, known: Any) -> _Number:
        """A function or method of torch's."""
        self.differs = True
        if name not in known or (options and name not in METHODS and [*options] != ["min", "max"]):
            raise TypeError(f"torch's {' '.join([name, *(options or ())])} has no translation")
        return self.note(known[name], *([*values, *(options or {}).values()] if name in FUNCTIONS else values[:1]))


class _Number:
    """What stands for a number, or for each number of a tile, while a function is run."""

    device = "cpu"  # of tensors that a function makes of numbers

    def __init__(self, trace: _Trace, text: str) -> None:
        self.trace, self.text = trace, text

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        within = [*args, *(kwargs or {}).values(), *(args[-1] if args and isinstance(args[-1], tuple) else ())]
        trace = next(each.trace for each in within if isinstance(each, cls))
        own = inspect.isroutine(function)  # and no operator that a library adds to torch
        name = function.__name__.removeprefix("__").removesuffix("__") if own else str(function)
        return trace.element(*args) if name == "getitem" else trace.call(name, args, kwargs, FUNCTIONS)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "where" or hasattr(ct.Tile, name):  # a tensor's `where` has another order
            raise AttributeError(f"numbers have no {name} here")
        return lambda *others, **options: self.trace.call(name, (self, *others), options, FUNCTIONS | METHODS)

    def __bool__(self) -> bool:
        raise TypeError("a condition on numbers is not known in Python; write torch.where")

    def to(self, *given: Any, **options: Any) -> Any:
        """The number as another type; as it is on another device."""
        kinds = [str(each).removeprefix("torch.") for each in (*given, *options.values()) if "torch." in str(each)]
        return self.trace.call(" ".join(["to", *kinds]), (self,), None, METHODS)


for _name, _template in OPERATORS.items():
    setattr(_Number, f"__{_name}__", lambda x, *others, text=_template: x.trace.note(text, x, *others))
    setattr(_Number, f"__r{_name}__", lambda x, other, text=_template: x.trace.note(text, other, x))


def tile_mods(score_mod: Any, mask_mod: Any, arrays: Sequence[Any] = ()) -> tuple[Any, Any, tuple[Any, ...]]:
    """Functions of an author as tile code, and all arrays that they are given.

    A function that is tile code already is returned as it is. Of any other the code is found anew in each call, because what it
    reads may have changed; the same code gives the same function, whatever the tensors hold.

    Args:
        score_mod: `score_mod(score, b, h, q_idx, kv_idx, *arrays)`, in torch's words or cuTile's, or None.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx, *arrays)`, likewise.
        arrays: what the functions take. A function in torch's words that has no room for them is given none.

    Returns:
        The score function, the mask function, and the arrays with the tensors behind them that the functions read.

    Raises:
        DeclarationError: something has no translation. The message names the line, and says what there is.
    """
    found, given = list(arrays), {"score_mod": score_mod, "mask_mod": mask_mod}
    codes = [_tile_code(each, what, found, len(arrays)) for what, each in given.items()]
    more = [each if each.shape else each.reshape(1) for each in found[len(arrays) :]]
    score, mask = (whole if more and whole not in (None, own) and not _has_room(own) else own for own, whole in codes)
    return score, mask, (*arrays, *more)


class _ArrayToCome(SimpleNamespace):
    """What stands for an array of which only the number of axes is known."""

    def __getitem__(self, index: Any) -> _Number:
        among = (index,) if isinstance(index, _Number) else index
        return next(each.trace for each in among if isinstance(each, _Number)).element(self, index)


def in_tile_code(functions: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    """Functions of an author, by their names, as tile code for arrays of so many axes, where no tensor is at hand.

    Raises:
        DeclarationError: something has no translation, or a function reads other tensors than those arrays.
    """
    arrays: list[Any] = [_ArrayToCome(shape=(1,) * rank, device="meta") for rank in ranks]
    found = {what: _tile_code(each, what, arrays, len(ranks))[0] for what, each in functions.items()}
    if len(arrays) > len(ranks):
        raise DeclarationError(
            f"{', '.join(functions)}: only a call of tiledsched.flex outside of torch.compile finds the tensors that a function "
            "reads from around it; have the functions take them after their other arguments, and for each pass an array in "
            "arrays=..."
        )
    return found


def _has_room(function: Any, count: float = float("inf")) -> bool:
    """Whether a function takes so many arguments, or any number."""
    kinds = [each.kind for each in inspect.signature(function).parameters.values()]
    return len(kinds) >= count or inspect.Parameter.VAR_POSITIONAL in kinds


def _tile_code(given: Any, what: str, arrays: list[Any], count: int) -> tuple[Any, Any]:
    """A function as tile code; and the same with room for any number of arrays, or None where that cannot be written. The tensors
    that it reads are added to the arrays.

    Raises:
        DeclarationError: it is no tile code, and has no translation.
    """
    if given is None or (isinstance(given, FunctionType) and given in _plain(what, count)):
        return given, given and _plain(what, count)[given]
    trace, parameters = _Trace(arrays), PARAMETERS[what]
    try:
        own = arrays[:count] if count and _has_room(given, len(parameters) + count) else []
        result = trace.text(given(*(_Number(trace, each) for each in parameters), *own))
        name = word_of(given) if word_of(given).isidentifier() else what
        head = f"def {name}({', '.join(parameters)}, *_arrays):"
        code = _function(name, "\n    ".join([head, *trace.lines, f"return {result}\n"]))
    except Exception as error:
        if trace.differs:
            frames = [each for each in traceback.extract_tb(error.__traceback__) if "/torch/" not in each.filename]
            lines = [
                f"{each.filename}, line {each.lineno}, {each.line}" for each in frames if each.filename != __file__
            ]
            raise DeclarationError(": ".join([what, *lines[-1:], f"{error}; {ADVICE}"])) from error
        code = None  # cuTile says what is wrong with it, if anything
    if isinstance(given, FunctionType) and not trace.differs:
        _plain(what, count)[given] = code
    return code if trace.differs else given, code


@functools.cache
def _function(name: str, text: str) -> Any:
    """The function of a text, which is the same for the same text."""
    names = {
        "__name__": __name__,
        "_ct": ct,
        "_load_tile": load_tile,
        "_tanh": tanh,
        "inf": float("inf"),
        "nan": float("nan"),
    }
    return compiled(f"<{name} as tile code {hash(text):x}>", text, names, name)
