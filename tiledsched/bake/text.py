"""The source that is baked: a table of schedules, and a function from the facts of a problem to one of them."""

from __future__ import annotations

import ast
import contextlib
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
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
    best, config, mean_us = property(lambda self: self), property(lambda self: self.get('config', self)), float('nan')
    def __getattr__(self, name):
        return self[name] if name in self else object.__getattribute__(self, name)


"""
UNFIT = "no schedule that was baked runs this problem; tune it, and bake again"


def source(
    name: str,
    tree: Tree,
    schedules: Sequence[Schedule],
    needs: Mapping[int, str],
    facts: Collection[str],
    comment: Sequence[str],
    kernel: str = "",
) -> str:
    """Source that needs no tiledsched, from :data:`BEGIN` to :data:`END`.

    Args:
        name: what its names begin with: the function is `NAME_schedule`.
        tree: its leaves are numbers of schedules.
        schedules: all schedules.
        needs: by the number of a schedule, the condition on a problem without which it does not run; none if it always runs.
        facts: all that is known of a problem, also what does not matter: the function takes it.
        comment: what the source says of itself.
        kernel: an expression for the cuTile kernel of a schedule, which is called `each`; empty for none.
    """
    used = sorted(dict.fromkeys(leaf.best for leaf in tree.leaves()), key=lambda each: needs.get(each, ""))
    knobs = {knob: [_literal(schedules[each][knob]) for each in used] for knob in schedules[used[0]]}
    if {*knobs.get("pdl", ())} == {"0"}:  # sources that were baked before kernels had this knob stay as they are
        del knobs["pdl"]
    varying = [knob for knob, values in knobs.items() if len(set(values)) > 1]
    same = "".join(f", {knob}={values[0]}" for knob, values in knobs.items() if knob not in varying)
    rows = [f"({''.join(f'{knobs[knob][place]},' for knob in varying)})" for place in range(len(used))]
    table, numbers = f"_{name.upper()}", {each: str(place) for place, each in enumerate(used)}
    asked, checked = names_in(*(each.question for each in tree.nodes())), names_in(*needs.values())
    taken = sorted(f"{each}=None" if each not in asked | checked else each for each in facts)
    taken.sort(key=lambda each: each.endswith("=None"))
    number, runs = (
        f"_{name}_number({', '.join(sorted(asked))})",
        f"_{name}_runs({', '.join(['number', *sorted(checked)])})",
    )
    lines = _wrapped(f"{table} = [_Schedule(zip({tuple(varying)!r}, row){same}) for row in [{', '.join(rows)}]]")
    lines += [f"for each in {table}:", *_wrapped(f"    each.update(kernel={kernel})")] if kernel else []
    lines += ["", "", *_wrapped(f"def {number}:"), *_returns(tree, numbers), "", ""]
    if needs:
        needed = [re.sub(" (?!and |or )(?<!and )(?<!or )", "\0", needs.get(each, "True")) for each in used]
        spans = [place for place, each in enumerate(needed) if place == 0 or each != needed[place - 1]]
        lines += [*_wrapped(f"def {runs}:"), *_returns(_by_number(spans), dict(enumerate(needed))), "", ""]
    lines += [*_wrapped(f"def {name}_schedule(*, {', '.join(taken)}):"), *_wrapped(f"    number = {number}")]
    lines += [*_wrapped(f"    if not {runs}:"), f"        raise ValueError({UNFIT!r})"] if needs else []
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


def clauses(node: ast.expr, known: Mapping[str, Any]) -> set[frozenset[str]]:
    """What is left of a condition, given the values of some names: it holds if of each set of expressions at least one holds."""
    if isinstance(node, ast.BoolOp):
        parts = [clauses(each, known) for each in node.values]
        alternatives = [[each] for part in parts for each in part] if isinstance(node.op, ast.And) else product(*parts)
        return {frozenset().union(*each) for each in alternatives}
    text = ast.unparse(node)
    if names_in(text) <= known.keys():  # an expression of a space, which checked it
        return set() if eval(text, {"__builtins__": {}}, dict(known)) else {frozenset()}
    words = rf"\b({'|'.join(map(re.escape, known))})\b(?![\"'])"
    return {frozenset({re.sub(words, lambda found: repr(known[found[0]]), text)})}


def conjunction(found: Collection[frozenset[str]]) -> str:
    """An expression for these clauses, without those that follow from others; empty if there are none."""
    needed = [each for each in found if not any(other < each for other in found)]
    texts = sorted(" or ".join(sorted(each, key=lambda text: (len(text), text))) or "False" for each in needed)
    return " and ".join(f"({each})" if " or " in each and texts[1:] else each for each in texts)


def _wrapped(text: str) -> list[str]:
    """Text in lines, broken at its spaces; a null stands for a space that is not broken."""
    first = " " * (len(text) - len(text.lstrip(" ")))
    whole = textwrap.TextWrapper(WIDTH, first, f"    {first}", break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in whole.wrap(text[len(first) :])]


def _by_number(firsts: Sequence[int]) -> Tree:
    """The tree that leads a number to the last of these that is not above it; they ascend."""
    half = len(firsts) // 2
    sides = tuple(map(_by_number, (firsts[:half], firsts[half:]))) if half else ()
    return Tree(best=firsts[0], rows=(), loss=0, question=f"number < {firsts[half]}" * bool(half), sides=sides)


def _returns(tree: Tree, texts: Mapping[int, str], depth: int = 1) -> Iterator[str]:
    """The lines that return what a tree leads to, whose text is given: in few lines what fits in them."""
    indent, found = "    " * depth, _inline(tree, texts)
    lines = _wrapped(f"{indent}return {found if len(found) + len(indent) < WIDTH - 8 else f'({found})'}")
    if len(lines) <= MOST_LINES or not tree.sides:
        yield from lines
        return
    yield f"{'    ' * depth}if {tree.question}:"
    yield from _returns(tree.sides[0], texts, depth + 1)
    yield from _returns(tree.sides[1], texts, depth)


def _inline(tree: Tree, texts: Mapping[int, str]) -> str:
    if not tree.sides:
        return texts[tree.best]
    yes, no = (_inline(side, texts) for side in tree.sides)
    question = tree.question.replace(" ", "\0")
    return f"{f'({yes})' if tree.sides[0].sides else yes} if {question} else {no}"
