"""What is baked, in the file in which its kernel stands: the places there that choose a schedule use it."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from tiledsched.bake.text import BEGIN, END
from tiledsched.core.errors import ConfigError

SEARCHED = "SimpleNamespace(best=SimpleNamespace(config={}, mean_us=float('nan')))"
"""What stands in the place of a search: as much of its result as programs read."""
Chosen = Callable[[Mapping[str, str]], str]
"""From the expressions that a place has for the tile function's parameters to the call of the baked function."""


class SourceFile:
    """A Python file that defines a tile function and launches it.

    Args:
        path: for messages.
        text: what it holds.
        function: the name of the tile function.

    Raises:
        ConfigError: it does not define the function.
    """

    def __init__(self, path: str, text: str, function: str) -> None:
        self._path, self._data, self._tree, self._function = path, text.encode(), ast.parse(text), function
        self._starts = [0, *itertools.accumulate(map(len, self._data.splitlines(keepends=True)))]
        self._edits: list[tuple[int, int, str]] = []
        self._outers = [each for each in ast.walk(self._tree) if isinstance(each, ast.FunctionDef)]
        found = [each for each in self._tree.body if isinstance(each, ast.FunctionDef) and each.name == function]
        if not found:
            raise ConfigError(f"{path} defines no function {function}; write a module: -o FILE.py")
        self._defined = found[0]
        self.takes = [each.arg for each in self._defined.args.args]
        """The parameters of the tile function."""

    def baked(
        self, chooser: str, knobs: Collection[str], hints: Collection[str], chosen: Chosen, source: Callable[[str], str]
    ) -> str:
        """The text of the file with what is baked, whether or not it was baked before.

        Args:
            chooser: the name of the baked function.
            knobs: the knobs of its schedules.
            hints: those that are compiler hints.
            chosen: gives a call of the baked function.
            source: gives the baked source, by what a schedule is: dict or SimpleNamespace.

        Raises:
            ConfigError: no place could use it, or one cannot be edited.
        """
        text = self._data.decode()
        old = re.search(rf"^{BEGIN} {chooser} ---$.*?^{END}\n", text, re.MULTILINE | re.DOTALL)
        form = "SimpleNamespace" if old and "import SimpleNamespace" in old[0] else "dict"
        searches = [
            each for each in _calls(self._tree, "exhaustive_search") if _named(_argument(each, 3)) == self._function
        ]
        launches = [
            (outer, each)
            for outer in self._outers
            for each in _calls(outer, "launch")
            if _named(_argument(each, 2)) == self._function
        ]
        if not (searches or launches or _calls(self._tree, chooser)):
            raise ConfigError(
                f"{self._path} gives {self._function} neither to ct.launch nor to exhaustive_search by that name; write a module, and "
                "call its function where schedules are chosen: -o FILE.py"
            )
        for call in searches:
            form = self._edit_search(call, knobs, hints, chosen)
        for outer, call in launches:
            if not _calls(outer, chooser):
                self._edit_launch(outer, call, knobs, hints, chosen)
        place = self._starts[int(self._defined.end_lineno or 0)]
        spans = [len(text[:each].encode()) for each in old.span()] if old else [place, place]
        self._edits.append((spans[0], spans[1], source(form) if old else f"\n\n{source(form)}"))
        for begin, end, new in sorted(self._edits, key=lambda each: each[0], reverse=True):
            self._data = self._data[:begin] + new.encode() + self._data[end:]
        return self._data.decode()

    def _replace(self, node: Any, text: str) -> None:
        begin, end = (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )
        self._edits.append((begin, end, text))

    def _error(self, node: ast.expr, message: str) -> ConfigError:
        return ConfigError(f"{self._path}:{node.lineno}: {message}")

    def _edit_search(self, call: ast.Call, knobs: Collection[str], hints: Collection[str], chosen: Chosen) -> str:
        """Put the table's choice in the place of a search; what a configuration is there."""
        taken = _argument(call, 4)
        if not isinstance(taken, ast.Lambda) or not isinstance(taken.body, ast.Tuple):
            raise self._error(
                call, "its args_fn is no lambda that returns a tuple, which tells the kernel's arguments; write one"
            )
        config = taken.args.args[0].arg
        reads = {
            ast.unparse(each.slice).strip("'") if isinstance(each, ast.Subscript) else each.attr: type(each)
            for one in (*call.args, *(keyword.value for keyword in call.keywords))
            if isinstance(one, ast.Lambda)
            for each in ast.walk(one.body)
            if isinstance(each, (ast.Attribute, ast.Subscript)) and _named(each.value) == one.args.args[0].arg
        }
        unlike = sorted({*reads} - {*knobs} | {*hints} - {*reads})
        if unlike or not reads:
            raise self._error(
                call,
                f"its lambdas read {', '.join(reads)} of {config}, and the table has {', '.join(knobs)}: {', '.join(unlike)}",
            )
        pairs = zip(self.takes, taken.body.elts, strict=False)
        given = {name: ast.unparse(each) for name, each in pairs if config not in map(_named, ast.walk(each))}
        self._replace(call, SEARCHED.format(chosen(given)))
        for each in ast.walk(self._tree):
            if isinstance(each, ast.ImportFrom) and [one.name for one in each.names] == ["exhaustive_search"]:
                self._replace(each, "# exhaustive_search: its answers are baked below")
        return "SimpleNamespace" if ast.Attribute in reads.values() else "dict"

    def _edit_launch(
        self, outer: ast.FunctionDef, call: ast.Call, knobs: Collection[str], hints: Collection[str], chosen: Chosen
    ) -> None:
        """Set the variables that a launch takes for knobs, before what depends on them."""
        taken = _argument(call, 3)
        if not isinstance(taken, ast.Tuple) or len(taken.elts) != len(self.takes):
            raise self._error(
                call, f"the arguments of {self._function} are no tuple of {len(self.takes)}; write one there"
            )
        given = dict(zip(self.takes, taken.elts, strict=True))
        before = _before(outer.body, call)
        sets = {
            knob: [each for each in before if _named(given[knob]) in _set_by(each)]
            for knob in self.takes
            if knob in knobs
        }
        loose = [knob for knob, each in sets.items() if not each]
        if loose:
            value = ast.unparse(given[loose[0]])
            raise self._error(
                call,
                f"{loose[0]} is {value}, which {outer.name} does not assign; assign a variable before what depends on it, as in "
                f"{loose[0].lower()} = {value}, and pass that",
            )
        places = [(int(each[-1].end_lineno or 0), each[-1].col_offset) for each in sets.values()]
        line, indent = max(places, default=(call.lineno - 1, call.col_offset))
        lines = [f"schedule = {chosen({name: ast.unparse(each) for name, each in given.items()})}"]
        lines += [f"{_named(given[knob])} = schedule['{knob}']" for knob in sets]
        self._edits.append(
            (self._starts[line], self._starts[line], "".join(f"{' ' * indent}{each}\n" for each in lines))
        )
        if hints:
            self._replace(_argument(call, 2), "schedule['kernel']")

    def kernel_of_each(self, hints: Collection[str], archs: Sequence[str]) -> str:
        """An expression for the kernel of a schedule `each`, with its hints for some archs and the author's for others."""
        decorators = [each for each in self._defined.decorator_list if isinstance(each, ast.Call)]
        theirs = {one.arg: one.value for each in decorators for one in each.keywords}
        parts = []
        for hint in hints:
            by_arch = [f"{arch}=each['{hint}']{' or None' * (hint != 'opt_level')}" for arch in archs]
            there = theirs.get(hint)
            if isinstance(there, ast.Call):
                by_arch += [ast.unparse(each) for each in there.keywords if each.arg not in archs]
            elif there is not None:
                by_arch.append(f"default={ast.unparse(there)}")
            parts.append(f"{hint}=ct.ByTarget({', '.join(by_arch)})")
        return f"{self._function}.replace_hints({', '.join(parts)})"


def _named(node: Any) -> str:
    """The last part of a name such as `ct.launch`; empty for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [each for each in ast.walk(tree) if isinstance(each, ast.Call) and _named(each.func) == name]


def _argument(call: ast.Call, place: int) -> Any:
    """An argument of a launch or a search, which most programs pass by their places."""
    names = {3: ("kernel", "kernel_args"), 2: ("kernel",), 4: ("args_fn",)}[place]
    named = [each.value for each in call.keywords if each.arg in names]
    return call.args[place] if len(call.args) > place else (*named, None)[0]


def _before(block: Sequence[ast.stmt], call: ast.Call) -> list[ast.stmt]:
    """The statements that run before a call: those before it in its block, and in the blocks around that one."""
    for place, each in enumerate(block):
        if call in ast.walk(each):
            blocks = [getattr(each, name, []) for name in ("body", "orelse", "finalbody")]
            return [*block[:place], *itertools.chain(*(_before(inner, call) for inner in blocks))]
    return []


def _set_by(statement: ast.stmt) -> set[str]:
    """The variables that a statement assigns, or one in it."""
    nodes = (each for each in ast.walk(statement) if isinstance(each, ast.Name))
    return {each.id for each in nodes if isinstance(each.ctx, ast.Store)}
