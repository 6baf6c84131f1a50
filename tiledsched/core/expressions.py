"""Constraints are expressions written as text. Only expressions that are quick and safe to evaluate are accepted."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from functools import lru_cache

from tiledsched.core.errors import SpaceError, did_you_mean
from tiledsched.core.fields import Dim, Flag
from tiledsched.core.problem import KernelClass

ALLOWED_NODES = (
    ast.Expression,
    ast.BoolOp,
    ast.And,
    ast.Or,
    ast.UnaryOp,
    ast.Not,
    ast.USub,
    ast.BinOp,
    ast.Add,
    ast.Sub,
    ast.Mult,
    ast.FloorDiv,
    ast.Mod,
    ast.Compare,
    ast.Eq,
    ast.NotEq,
    ast.Lt,
    ast.LtE,
    ast.Gt,
    ast.GtE,
    ast.In,
    ast.NotIn,
    ast.Tuple,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.IfExp,
)
INSTEAD = {
    ast.Div: "; // divides",
    ast.Attribute: "; sizes and knobs stand alone: rows, not p.rows",
    ast.Subscript: "; knobs stand alone: TILE, not s['TILE']",
    ast.Call: "; derived may hold functions of the problem",
}
"""What to write in place of a part that is not allowed."""
LONGEST = 1000
"""Most characters of an expression."""
DEEPEST = 50
"""Most levels of parts within parts of an expression."""
LARGEST = 1 << 63
"""Absolute values of numbers are below this."""


def words_of(kernel: KernelClass) -> set[str]:
    """The fields and knobs of a kernel that are text or lists."""
    fields = {name for name, field in kernel.fields.items() if not isinstance(field, (Dim, Flag))}
    return fields | {name for name, knob in kernel.knob_fields().items() if isinstance(knob.default, str)}


def names_read(text: object, known: Collection[str], words: Collection[str] = ()) -> frozenset[str]:
    """The names that an expression reads, after checking that it may be a constraint.

    Args:
        text: the expression.
        known: the names it may read.
        words: the known names that stand for text, which may be compared but not used in arithmetic.

    Raises:
        SpaceError: the text is no expression, or does more than compare names and numbers and compute with them. The caller
            adds where the text stands.
    """
    if not isinstance(text, str):
        raise SpaceError("is not an expression: it is no text")
    if len(text) > LONGEST:
        raise SpaceError(f"has {len(text)} characters; {LONGEST} are allowed: write several constraints")
    return _names_read(text, frozenset(known), frozenset(words))


@lru_cache(maxsize=4096)
def _names_read(text: str, known: frozenset[str], words: frozenset[str]) -> frozenset[str]:
    """:func:`names_read` of text: the spaces of archs that are read one after the other share most of their constraints."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        compares = "; == compares" if re.search(r"[^=<>!]=[^=]", text) else ""
        raise SpaceError(
            f"is not an expression: {getattr(error, 'msg', None) or error or type(error).__name__}{compares}"
        ) from error
    _check_depth(tree)
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED_NODES):
            raise SpaceError(
                f"uses {type(node).__name__}; only names, numbers, comparisons, arithmetic and and/or/not are allowed"
                f"{INSTEAD.get(type(node), '')}"
            )
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant):
            _check_constant(node.value)
        operands = [node.left, node.right] if isinstance(node, ast.BinOp) else []
        operands += [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else []
        if any(_is_text(operand, words) for operand in operands):
            raise SpaceError("computes with text; text is compared, as in dtype == 'float16'")
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Mod)) and _is_zero(node.right):
            raise SpaceError("divides by 0")
    unknown = sorted(names - known)
    if unknown:
        raise SpaceError(
            f"reads unknown name {unknown[0]!r}; known are {', '.join(sorted(known))}{did_you_mean(unknown[0], known)}"
        )
    return frozenset(names)


def _check_depth(tree: ast.AST) -> None:
    layer, depth = [tree], 0
    while layer:
        depth += 1
        if depth > DEEPEST:
            raise SpaceError(f"has more than {DEEPEST} parts within parts; write several constraints")
        layer = [child for node in layer for child in ast.iter_child_nodes(node)]


def _check_constant(value: object) -> None:
    if not isinstance(value, (bool, int, str)):
        raise SpaceError(f"holds {value!r}; only integers, true and false, and text are allowed")
    if isinstance(value, int) and abs(value) >= LARGEST:
        raise SpaceError("holds a number beyond 64 bits")


def _is_text(node: ast.expr, words: Collection[str]) -> bool:
    """Whether a part of an expression is, or may be, text or a tuple."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.IfExp):
        return _is_text(node.body, words) or _is_text(node.orelse, words)
    if isinstance(node, ast.BoolOp):
        return any(_is_text(value, words) for value in node.values)
    return isinstance(node, ast.Tuple) or (isinstance(node, ast.Name) and node.id in words)


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0
