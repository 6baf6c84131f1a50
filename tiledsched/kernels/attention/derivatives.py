"""The derivative of an author's function of scores in its score, by rule.

The function is run on a `Dual`, a number with its slope, in place of the score (forward-mode automatic differentiation). For
that it is copied with other meanings of the names that it reads: `ct.exp`, say, then takes a `Dual`, too. What cuTile (1.7) does
not hand on to a dataclass is written anew in the text of the copy, within the same lines: `-x` as `(0-x)`, and `x < y` as a
comparison of values.

At ties the second argument of a maximum or minimum counts, and the slope of `abs` at 0 is 1.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="no-untyped-call"

from __future__ import annotations

import ast
import inspect
import linecache
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cuda.tile as ct

from tiledsched.core.canonical import stable_id
from tiledsched.core.copies import Copier, codes_in
from tiledsched.core.errors import DeclarationError
from tiledsched.core.sources import compiled
from tiledsched.kernels.attention.loads import DEFINITIONS

FLOATS = (ct.float16, ct.bfloat16, ct.float32, ct.float64)
VALUE_OF = "_value_of_score"
"""The name of :func:`value_of` in the text of copies."""


def is_dual(x):
    """Whether a number depends on the score."""
    return ct.static_eval(isinstance(x, Dual))


def value_of(x):
    """The number itself."""
    return x.value if is_dual(x) else x


def slope_of(x):
    """The derivative of a number in the score."""
    return x.slope if is_dual(x) else 0.0


def score_of(tile):
    """A tile of scores as what the copy of a function takes."""
    return Dual(tile, ct.full(tile.shape, 1.0, tile.dtype))


def formula(text: str) -> Any:
    """The tile function of `x` and `y` that a text says."""
    text = f"def slope(x, y):\n    return {text}\n"
    return compiled(f"<derivative {stable_id(text, 8)}>", text, {"ct": ct, "LN_2": math.log(2.0)}, "slope")


def of_one(plain, slope):
    """The rule of a function of one number; `slope(x, y)` is its derivative at `x`, where `y` is its value."""

    def rule(x, **options):
        if not is_dual(x):
            return plain(x, **options)
        y = plain(x.value, **options)
        return Dual(y, slope(x.value, y) * x.slope)

    return rule


def of_two(plain, slopes):
    """The rule of a function of two numbers; `slopes(x, y)` are its derivatives in both."""

    def rule(x, y, **options):
        value = plain(value_of(x), value_of(y), **options)
        if not (is_dual(x) or is_dual(y)):
            return value
        of_x, of_y = slopes(value_of(x), value_of(y))
        if is_dual(x) and is_dual(y):
            slope = of_x * x.slope + of_y * y.slope
        elif is_dual(x):
            slope = of_x * x.slope
        else:
            slope = of_y * y.slope
        return Dual(value, slope)

    return rule


def of_values(plain):
    """The rule of a comparison, which has no derivative."""

    def rule(x, y):
        return plain(value_of(x), value_of(y))

    return rule


def swapped(rule):
    """A rule that takes its two numbers in the other order."""

    def other_first(y, x):
        return rule(x, y)

    return other_first


def where(condition, x, y):
    """`ct.where` of numbers that may depend on the score."""
    found = ct.where(condition, value_of(x), value_of(y))
    if is_dual(x) or is_dual(y):
        return Dual(found, ct.where(condition, slope_of(x), slope_of(y)))
    return found


def astype(x, dtype, **options):
    """`ct.astype` of a number that may depend on the score. As an integer it has no derivative."""
    if not is_dual(x):
        return ct.astype(x, dtype, **options)
    value = ct.astype(x.value, dtype, **options)
    return Dual(value, ct.astype(x.slope, dtype)) if ct.static_eval(dtype in FLOATS) else value


add, sub = of_two(ct.add, formula("(1.0, 1.0)")), of_two(ct.sub, formula("(1.0, -1.0)"))
mul, truediv = of_two(ct.mul, formula("(y, x)")), of_two(ct.truediv, formula("(1.0 / y, -x / (y * y))"))
power = of_two(ct.pow, formula("(y * x ** (y - 1), x**y * ct.log(x))"))
RULES: dict[Any, Callable[..., Any]] = {
    ct.add: add,
    ct.sub: sub,
    ct.mul: mul,
    ct.truediv: truediv,
    ct.where: where,
    ct.astype: astype,
    ct.pow: power,
    ct.maximum: of_two(ct.maximum, formula("(ct.where(x > y, 1.0, 0.0), ct.where(x > y, 0.0, 1.0))")),
    ct.minimum: of_two(ct.minimum, formula("(ct.where(x < y, 1.0, 0.0), ct.where(x < y, 0.0, 1.0))")),
    ct.exp: of_one(ct.exp, formula("y")),
    ct.exp2: of_one(ct.exp2, formula("y * LN_2")),
    ct.log: of_one(ct.log, formula("1.0 / x")),
    ct.log2: of_one(ct.log2, formula("1.0 / (x * LN_2)")),
    ct.sqrt: of_one(ct.sqrt, formula("0.5 / y")),
    ct.rsqrt: of_one(ct.rsqrt, formula("-0.5 * y / x")),
    ct.tanh: of_one(ct.tanh, formula("1.0 - y * y")),
    ct.sin: of_one(ct.sin, formula("ct.cos(x)")),
    ct.cos: of_one(ct.cos, formula("-ct.sin(x)")),
    ct.negative: of_one(ct.negative, formula("-1.0")),
    ct.abs: of_one(ct.abs, formula("ct.where(x < 0, -1.0, 1.0)")),
    **{each: of_one(each, formula("0.0")) for each in (ct.floor, ct.ceil)},
    **{
        each: of_values(each) for each in (ct.equal, ct.not_equal, ct.less, ct.less_equal, ct.greater, ct.greater_equal)
    },
}
"""cuTile's function -> what it is in a copy."""
NAMESPACE = ModuleType(ct.__name__, "The module `cuda.tile` with functions that take a `Dual`.")
# cuTile knows `static_iter` and the like by the module that they are called from, which this one is not.
vars(NAMESPACE).update({name: each for name, each in vars(ct).items() if not name.startswith("static_")})
vars(NAMESPACE).update({plain.__name__: rule for plain, rule in RULES.items()})


@dataclass(frozen=True, eq=False)
class Dual:
    """A number that depends on the score."""

    value: Any
    """The number, a tile."""
    slope: Any
    """Its derivative in the score, a tile that broadcasts to the shape of the number."""

    __add__, __radd__ = add, swapped(add)
    __sub__, __rsub__ = sub, swapped(sub)
    __mul__, __rmul__ = mul, swapped(mul)
    __truediv__, __rtruediv__ = truediv, swapped(truediv)
    __pow__, __rpow__ = power, swapped(power)
    astype = astype

    @property
    def shape(self):
        """The sides of the tile."""
        return self.value.shape

    @property
    def dtype(self):
        """The type of its elements."""
        return self.value.dtype


def by_rule(score_mod: Any) -> Any:
    """A copy of a function of scores that takes a `Dual` as its score, and returns one where the result depends on it.

    Raises:
        DeclarationError: the text of a function lies in no file.
    """
    replaced = {
        id(plain): rule
        for plain, rule in ((ct, NAMESPACE), *RULES.items(), *zip(DEFINITIONS, DEFINITIONS, strict=True))
    }
    return Copier({VALUE_OF: value_of}, replaced, _rewritten).copy(score_mod)


def derivative(copy: Any) -> Any:
    """The derivative in the score, a tile function of a score, as a copy of :func:`by_rule` has it."""

    def score_grad(score, *others):
        return slope_of(copy(score_of(score), *others))

    return score_grad


def _rewritten(function: FunctionType) -> CodeType:
    """The code of a function in whose text signs and comparisons take a `Dual`. cuTile finds the text where Python keeps that of
    modules, in a file of the same name and the same lines."""
    try:
        lines, first = inspect.findsource(function)
        trees = [*ast.walk(ast.parse("".join(lines)))]
    except (OSError, SyntaxError) as error:
        raise DeclarationError(
            f"the text of {function.__qualname__} lies in no file, and its derivative is made from it; put it into one"
        ) from error
    lines = [*lines]
    marked: list[tuple[ast.expr, str]] = []
    own = next(each for each in trees if isinstance(each, ast.FunctionDef) and _first_line(each) == first + 1)
    for node in ast.walk(own):
        if (
            isinstance(node, ast.UnaryOp)
            and isinstance(node.op, ast.USub)
            and not isinstance(node.operand, ast.Constant)
        ):
            marked.append((node, "(0"))
        elif isinstance(node, ast.Compare) and not isinstance(node.ops[0], (ast.Is, ast.IsNot, ast.In, ast.NotIn)):
            marked += [(each, f"{VALUE_OF}(") for each in (node.left, *node.comparators)]
    edits = [(node.lineno, node.col_offset, place, text) for place, (node, text) in enumerate(marked)]
    edits += [(node.end_lineno or 0, node.end_col_offset or 0, 0, ")") for node, _ in marked]
    for line, column, _, text in sorted(edits, reverse=True):  # what is further inside first
        before = lines[line - 1].encode()
        lines[line - 1] = (before[:column] + text.encode() + before[column:]).decode()
    whole, name = "".join(lines), function.__code__.co_filename.replace("\\", "/").rpartition("/")[2]
    file = f"<tiledsched {stable_id([whole, first], 8)}>/{name}"
    linecache.cache[file] = (len(whole), None, lines, file)
    codes = codes_in(compile(whole, file, "exec", dont_inherit=True))
    return next(each for each in codes if (each.co_name, each.co_firstlineno) == (function.__code__.co_name, first + 1))


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])
