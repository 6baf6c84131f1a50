"""The source that is baked: a table of schedules, and a function from the facts of a problem to one of them."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Mapping, Sequence
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
    needs: Sequence[str],
    comment: Sequence[str],
    form: str = "dict",
    hints: str = "",
) -> str:
    """Source that needs no tiledsched, from :data:`BEGIN` to :data:`END`.

    Args:
        name: what its names begin with: the function is `NAME_schedule`.
        tree: its leaves are numbers of schedules.
        schedules: all schedules.
        needs: conditions on knobs and the problem without which a schedule does not run.
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
    others = names_in(*needs) - knobs.keys()
    lines = [f"{BEGIN} {name}_schedule ---"]
    for each in comment:
        lines += textwrap.wrap(each, WIDTH, initial_indent="# ", subsequent_indent="# ")
    lines += ["# fmt: off"]
    lines += _wrapped(f"{table} = [{row if form == 'dict' else f'{form}(**{row})'} for row in [")
    lines += [*_wrapped(rows, "    "), "]]"]
    lines += [f"for each in {table}:", *_wrapped(f"    each['kernel'] = {hints}")] if hints else []
    head = f"def {name}_schedule(*, {''.join(f'{each}, ' for each in sorted(asked | others))}**others):"
    says = f'    """The schedule for a problem, an element of {table}; `others` are facts that do not matter."""'
    if needs:
        number = f"_{name.lstrip('_')}_number({', '.join(sorted(asked))})"
        lines += ["", "", f"def {number}:", *_returns(tree, numbers, "{}"), "", "", head, says]
        met = " and ".join(f"({_reading(each, knobs)})" for each in needs)
        lines += [f"    schedule = {table}[{number}]", *_wrapped(f"    if not ({met}):")]
        lines += [f"        raise ValueError({UNFIT!r})", "    return schedule"]
    else:
        lines += ["", "", head, says, *_returns(tree, numbers, f"{table}[{{}}]")]
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


def _reading(text: str, knobs: Mapping[str, Any]) -> str:
    """A condition that reads knobs from a schedule."""
    tree = ast.parse(text, mode="eval")
    for each in ast.walk(tree):
        if isinstance(each, ast.Name) and each.id in knobs:
            each.id = f"schedule['{each.id}']"
    return ast.unparse(tree)


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Text in lines, broken at its spaces; a null stands for a space that is not broken."""
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent="        "[: 4 + len(indent)], break_on_hyphens=False
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
