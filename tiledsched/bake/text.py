"""The source that is baked: a table of schedules, and a function from the facts of a problem to one of them."""

from __future__ import annotations

import ast
import contextlib
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tiledsched.bake.tree import Tree
from tiledsched.core.schedule import Schedule

WIDTH = 116
"""Columns of the source."""
MOST_LINES = 2
"""Lines of a conditional expression; larger trees are statements."""
BEGIN, END = "# --- baked by tiledsched:", "# --- end of what tiledsched baked ---"
"""How the first and the last line of baked source begin."""
HEAD = """\
{begin} {name}_schedule ---
{comment}
# fmt: off
class _Schedule(dict):  # knobs are keys and attributes; where a search stood, this is its result, too
    __getattr__, mean_us = dict.__getitem__, float('nan')
    best, config = property(lambda self: self), property(lambda self: self.get('config', self))


"""
UNFIT = "no schedule that was baked runs this problem; tune it, and bake again"


def source(
    name: str,
    tree: Tree,
    schedules: Sequence[Schedule],
    needs: Mapping[str, Collection[int]],
    facts: Collection[str],
    comment: Sequence[str],
    kernel: str = "",
) -> str:
    """Source that needs no tiledsched, from :data:`BEGIN` to :data:`END`.

    Args:
        name: what its names begin with: the function is `NAME_schedule`.
        tree: its leaves are numbers of schedules.
        schedules: all schedules.
        needs: conditions on the problem, and the numbers of the schedules that do not run without them.
        facts: all that is known of a problem, also what does not matter: the function takes it.
        comment: what the source says of itself.
        kernel: an expression for the cuTile kernel of a schedule, which is called `each`; empty for none.
    """
    used = list(dict.fromkeys(leaf.best for leaf in tree.leaves()))
    knobs = {knob: [_literal(schedules[each][knob]) for each in used] for knob in schedules[used[0]]}
    varying = [knob for knob, values in knobs.items() if len(set(values)) > 1]
    same = "".join(f", {knob}={values[0]}" for knob, values in knobs.items() if knob not in varying)
    rows = [f"({''.join(f'{knobs[knob][place]},' for knob in varying)})" for place in range(len(used))]
    table, numbers = f"_{name.upper()}", {each: place for place, each in enumerate(used)}
    asked, checked = names_in(*(each.question for each in tree.nodes())), names_in(*needs)
    taken = sorted(f"{each}=None" if each not in asked | checked else each for each in facts)
    taken.sort(key=lambda each: each.endswith("=None"))
    number = f"_{name}_number({', '.join(sorted(asked))})"
    lines = _wrapped(f"{table} = [_Schedule(zip({tuple(varying)!r}, row){same}) for row in [{', '.join(rows)}]]")
    lines += [f"for each in {table}:", *_wrapped(f"    each.update(kernel={kernel})")] if kernel else []
    lines += ["", "", f"def {number}:", *_returns(tree, numbers), "", ""]
    lines += [*_wrapped(f"def {name}_schedule(*, {', '.join(taken)}):"), f"    number = {number}"]
    unmet = [
        f"number in {sorted(numbers[each] for each in of)} and " * (len(of) < len(used)) + f"not ({text})"
        for text, of in sorted(needs.items())
    ]
    if unmet:
        lines += [*_wrapped(f"    if ({' or '.join(unmet)}):"), f"        raise ValueError({UNFIT!r})"]
    comments = [textwrap.fill(each, WIDTH, initial_indent="# ", subsequent_indent="# ") for each in comment if each]
    head = HEAD.format(begin=BEGIN, name=name, comment="\n".join(comments))
    return head + "\n".join([*lines, f"    return {table}[number]", "# fmt: on", END, ""])


def names_in(*texts: str) -> set[str]:
    """The names that expressions read."""
    nodes = (node for text in texts if text for node in ast.walk(ast.parse(text)))
    return {each.id for each in nodes if isinstance(each, ast.Name)} - {"str"}


def _literal(value: Any) -> str:
    """A knob's value, which is not broken at its spaces. What is neither number nor word in a configuration is stored as text."""
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(value)
    return repr(value).replace(" ", "\0")


def left_open(node: ast.expr, known: Mapping[str, Any]) -> str | bool:
    """Whether a condition holds, given the values of some names; what is left of it where that depends on others."""
    if isinstance(node, ast.BoolOp):
        parts, decided = [left_open(each, known) for each in node.values], isinstance(node.op, ast.Or)
        asked = [each for each in parts if isinstance(each, str)]
        if decided in parts or not asked:
            return decided if decided in parts else not decided
        return (" or " if decided else " and ").join(
            f"({each})" if each.count(" ") > 2 and asked[1:] else each for each in asked
        )
    text = ast.unparse(node)
    if names_in(text) <= known.keys():
        return bool(eval(text, {"__builtins__": {}}, dict(known)))  # an expression of a space, which checked it
    words = rf"\b({'|'.join(map(re.escape, known))})\b(?![\"'])"
    return re.sub(words, lambda found: repr(known[found[0]]), text)


def _wrapped(text: str) -> list[str]:
    """Text in lines, broken at its spaces; a null stands for a space that is not broken."""
    first = " " * (len(text) - len(text.lstrip(" ")))
    whole = textwrap.TextWrapper(WIDTH, first, f"    {first}", break_long_words=False, break_on_hyphens=False)
    lines = whole.wrap(text[len(first) :])
    return [line.replace("\0", " ") for line in lines]


def _returns(tree: Tree, numbers: Mapping[int, int], depth: int = 1) -> Iterator[str]:
    """The lines that return the number of a tree's schedule: in one line what fits in one."""
    indent, found = "    " * depth, _inline(tree, numbers)
    lines = _wrapped(f"{indent}return {found if len(found) + len(indent) < WIDTH - 8 else f'({found})'}")
    if len(lines) <= MOST_LINES or not tree.sides:
        yield from lines
        return
    yield f"{'    ' * depth}if {tree.question}:"
    yield from _returns(tree.sides[0], numbers, depth + 1)
    yield from _returns(tree.sides[1], numbers, depth)


def _inline(tree: Tree, numbers: Mapping[int, int]) -> str:
    if not tree.sides:
        return str(numbers[tree.best])
    yes, no = (_inline(side, numbers) for side in tree.sides)
    question = tree.question.replace(" ", "\0")
    return f"{f'({yes})' if tree.sides[0].sides else yes} if {question} else {no}"
