"""The source that is baked: a table of schedules, and a function from the facts of a problem to one of them."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tiledsched.bake.tree import Tree
from tiledsched.core.schedule import Schedule

WIDTH = 116
"""Columns of the source."""
BEGIN, END = "# --- baked by tiledsched:", "# --- end of what tiledsched baked ---"
"""How the first and the last line of baked source begin."""
UNFIT = "no schedule that was baked runs this problem; tune it, and bake again"
"""What is said of a problem that breaks a constraint of the schedule to which the tree leads."""


def source(
    name: str,
    tree: Tree,
    schedules: Sequence[Schedule],
    needs: Mapping[str, Collection[int]],
    facts: Collection[str],
    comment: Sequence[str],
    form: str = "dict",
    hints: str = "",
) -> str:
    """Source that needs no tiledsched, from :data:`BEGIN` to :data:`END`.

    Args:
        name: what its names begin with: the function is `NAME_schedule`.
        tree: its leaves are numbers of schedules.
        schedules: all schedules.
        needs: conditions on the problem, and the numbers of the schedules that do not run without them.
        facts: all that is known of a problem, also what does not matter: the function takes it.
        comment: what the source says of itself.
        form: what a schedule is, dict or SimpleNamespace.
        hints: an expression for the cuTile kernel of a schedule, which is called `each`; empty for none.
    """
    used = list(dict.fromkeys(leaf.best for leaf in tree.leaves()))
    knobs = {knob: [_value(schedules[each][knob]) for each in used] for knob in schedules[used[0]]}
    varying = [knob for knob, values in knobs.items() if len(set(map(repr, values))) > 1]
    same = "".join(f", {knob}={values[0]!r}" for knob, values in knobs.items() if knob not in varying)
    rows = "".join(
        f"{tuple(knobs[knob][place] for knob in varying)!r},".replace(" ", "\0") + " " for place in range(len(used))
    )
    table, row = f"_{name.upper().lstrip('_')}", f"dict(zip({tuple(varying)!r}, row){same})"
    numbers = {each: str(place) for place, each in enumerate(used)}
    asked = names_in(*(each.question for each in tree.nodes()))
    read = sorted(asked | names_in(*needs))
    lines = [f"{BEGIN} {name}_schedule ---"]
    for each in comment:
        lines += textwrap.wrap(each, WIDTH, initial_indent="# ", subsequent_indent="# ")
    lines += ["# fmt: off"]
    lines += _wrapped(f"{table} = [{row if form == 'dict' else f'{form}(**{row})'} for row in [")
    lines += [*_wrapped(rows, "    "), "]]"]
    lines += [f"for each in {table}:", *_wrapped(f"    each['kernel'] = {hints}")] if hints else []
    taken = [*read, *(f"{each}=None" for each in sorted(facts - {*read}))]
    head = [
        *_wrapped(f"def {name}_schedule(*, {', '.join(taken)}):"),
        f'    """The schedule for a problem, an element of {table}."""',
    ]
    if needs:
        number = f"_{name.lstrip('_')}_number({', '.join(sorted(asked))})"
        lines += ["", "", f"def {number}:", *_returns(tree, numbers, "{}"), "", "", *head]
        lines.append(f"    number = {number}")
        unmet = []
        for condition, of in needs.items():
            places = sorted(int(numbers[each]) for each in of)
            some = f"number in {{{', '.join(map(str, places))}}} and " if len(places) < len(used) else ""
            unmet.append(f"{some}not ({condition})")
        lines += [*_wrapped(f"    if ({' or '.join(unmet)}):"), f"        raise ValueError({UNFIT!r})"]
        lines.append(f"    return {table}[number]")
    else:
        lines += ["", "", *head, *_returns(tree, numbers, f"{table}[{{}}]")]
    return "\n".join([*lines, "# fmt: on", END, ""])


def names_in(*texts: str) -> set[str]:
    """The names that expressions read."""
    nodes = (node for text in texts if text for node in ast.walk(ast.parse(text)))
    return {each.id for each in nodes if isinstance(each, ast.Name)} - {"str"}


def _value(value: Any) -> Any:
    """A knob's value. Fields of configurations that are neither numbers nor words are stored as their text."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def left_open(node: ast.expr, known: Mapping[str, Any]) -> str | bool:
    """Whether a condition holds, given the values of some names; what is left of it where that depends on others."""
    if isinstance(node, ast.BoolOp):
        parts = [left_open(each, known) for each in node.values]
        decided = isinstance(node.op, ast.Or)
        asked = [each for each in parts if isinstance(each, str)]
        if decided in parts or not asked:
            return decided if decided in parts else not decided
        apart = [f"({each})" if each.count(" ") > 2 and asked[1:] else each for each in asked]
        return (" or " if decided else " and ").join(apart)
    text = ast.unparse(node)
    if names_in(text) <= known.keys():
        return bool(eval(text, {"__builtins__": {}}, dict(known)))  # noqa: S307  # of a space, which checked it
    words = rf"\b({'|'.join(map(re.escape, known))})\b(?![\"'])"
    return re.sub(words, lambda found: repr(known[found[0]]), text)


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Text in lines, broken at its spaces; a null stands for a space that is not broken."""
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent="        "[: 4 + len(indent)],
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def _returns(tree: Tree, numbers: Mapping[int, str], form: str, depth: int = 1) -> Iterator[str]:
    """The lines that return the number of a tree's schedule in a form, in one line what fits in one."""
    line = f"{'    ' * depth}return {form.format(_inline(tree, numbers))}"
    if len(line) <= WIDTH or not tree.sides:
        yield line
        return
    yield f"{'    ' * depth}if {tree.question}:"
    yield from _returns(tree.sides[0], numbers, form, depth + 1)
    yield from _returns(tree.sides[1], numbers, form, depth)


def _inline(tree: Tree, numbers: Mapping[int, str]) -> str:
    if not tree.sides:
        return numbers[tree.best]
    yes, no = (_inline(side, numbers) for side in tree.sides)
    return f"{f'({yes})' if tree.sides[0].sides else yes} if {tree.question} else {no}"
