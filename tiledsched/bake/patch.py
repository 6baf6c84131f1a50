"""What is baked, in the file in which its kernel stands: the places there that choose a schedule use it."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiledsched.bake.baking import Baking
from tiledsched.bake.text import BEGIN, END
from tiledsched.core.errors import ConfigError
from tiledsched.core.launches import undecorated
from tiledsched.core.schedule import COMPILER_HINTS
from tiledsched.core.shapes import split_shape
from tiledsched.core.text import joined

SEARCH = "exhaustive_search"
IMPORT = re.compile(rf"^from (tiledsched|cuda\.tile\.tune) import {SEARCH}\n", re.MULTILINE)


class Patch:
    """The file of a kernel with what is baked, whether or not it was baked before.

    Args:
        baking: what is baked.
        word: how the kernel was named, which may tell its file.

    Raises:
        ConfigError: the kernel has no one tile function in a file, no place there could use what is baked, or one cannot be
            edited.
    """

    def __init__(self, baking: Baking, word: str = "") -> None:
        self._baking, self._chooser = baking, f"{baking.name}_schedule"
        path, self._function = _place(baking, word)
        if path is None:
            raise ConfigError(
                f"a patch is for a kernel of one `function` in a file that can be found, and {baking.kernel.name} is none; write "
                "a module: -o FILE.py"
            )
        self.path = path
        self.before = path.read_text(encoding="utf-8")
        """What the file holds."""
        data, tree = self.before.encode(), ast.parse(self.before)
        self._starts = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
        self._edits: list[tuple[int, int, str]] = []
        outers = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
        defined = [each for each in outers if each.name == self._function]
        self._takes = [each.arg for one in defined[:1] for each in one.args.args]
        done, searches = _calls(tree, self._chooser), _calls(tree, SEARCH, self._function)
        for call in searches:
            self._replace(call, self._chosen(call))
        for call in (
            () if baking.kernel.is_called else _calls(tree, "launch", self._function)
        ):  # a search has its own launch
            around = [each for each in outers if call in ast.walk(each)]
            if around and not _calls(around[-1], self._chooser):
                self._edit_launch(around[-1], call)
        if not (done or self._edits):
            raise ConfigError(
                f"{self.path} gives {self._function} neither to ct.launch nor to {SEARCH} by this name; write a module, and call "
                "its function where a schedule is chosen: -o FILE.py"
            )
        old = re.search(rf"^{BEGIN} {self._chooser} ---$.*?^{END}\n", self.before, re.MULTILINE | re.DOTALL)
        text, end = baking.source(self._kernel(defined[0])), self._starts[int(defined[0].end_lineno or 0)]
        span = [len(self.before[:each].encode()) for each in old.span()] if old else [end, end]
        self._edits.append((span[0], span[1], text if old else f"\n\n{text}"))
        for begin, end, new in sorted(self._edits, key=lambda each: each[0], reverse=True):
            data = data[:begin] + new.encode() + data[end:]
        self.after = data.decode()
        """What it is to hold."""
        if len(searches) == len(_calls(tree, SEARCH)):
            self.after = IMPORT.sub("", self.after)

    def _error(self, node: Any, message: str) -> ConfigError:
        return ConfigError(f"{self.path}:{node.lineno}: {message}")

    def _replace(self, node: Any, text: str) -> None:
        begin, end = (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )
        self._edits.append((begin, end, text))

    def _given(self, call: ast.Call) -> dict[str, ast.expr]:
        """What a launch gives for each parameter of the tile function, or a search to its launches."""
        tuples = [getattr(each, "body", each) for each in _arguments(call)]
        fitting = [each.elts for each in tuples if isinstance(each, ast.Tuple) and len(each.elts) == len(self._takes)]
        if not fitting:
            raise self._error(call, f"the arguments of {self._function} must be a tuple of {len(self._takes)} here")
        return dict(zip(self._takes, fitting[-1], strict=True))

    def _edit_launch(self, outer: ast.FunctionDef, call: ast.Call) -> None:
        """Set the variables that a launch takes for knobs, before what depends on them."""
        given, before, schedule = self._given(call), _before(outer.body, call), self._baking.schedules[0]
        knobs = [knob for knob in self._takes if knob in schedule]
        elsewhere = sorted(schedule.keys() - {*knobs, *COMPILER_HINTS})
        if elsewhere:
            raise self._error(
                call, f"{joined(elsewhere)} is no parameter of {self._function}, so that nothing here sets it"
            )
        sets = [[each for each in before if _named(given[knob]) in _variables(each)] for knob in knobs]
        if [] in sets:
            knob = knobs[sets.index([])]
            raise self._error(
                call,
                f"{outer.name} assigns no variable that is passed for {knob}; write one before what depends on it, as in "
                f"{knob.lower()} = {ast.unparse(given[knob])}, and pass that",
            )
        last = max((each[-1] for each in sets), key=lambda each: each.lineno, default=None)
        line, indent = (int(last.end_lineno or 0), last.col_offset) if last else (call.lineno - 1, call.col_offset)
        lines = [f"schedule = {self._chosen(call)}", *(f"{_named(given[knob])} = schedule.{knob}" for knob in knobs)]
        place = self._starts[line]
        self._edits.append((place, place, "".join(f"{' ' * indent}{each}\n" for each in lines)))
        for each in _arguments(call):
            if _named(each) == self._function and schedule.keys() & COMPILER_HINTS.keys():
                self._replace(each, "schedule.kernel")

    def _kernel(self, function: ast.FunctionDef) -> str:
        """An expression for the kernel of a schedule `each`, with its hints on these archs and the author's on others."""
        if self._baking.kernel.is_called:
            return ""
        theirs = {
            one.arg: one.value
            for each in function.decorator_list
            if isinstance(each, ast.Call)
            for one in each.keywords
        }
        hints = []
        for hint in COMPILER_HINTS.keys() & self._baking.schedules[0].keys():
            there: Any = theirs.get(hint)
            default = [
                ast.unparse(each) for each in getattr(there, "keywords", ()) if each.arg not in self._baking.archs
            ]
            default += (
                [f"default={ast.unparse(there)}"] if there is not None and not isinstance(there, ast.Call) else []
            )
            value = f"each.{hint}{' or None' * (hint != 'opt_level')}"
            by_arch = [f"{arch}={value}" for arch in self._baking.archs]
            hints.append(f"{hint}=ct.ByTarget({', '.join([*by_arch, *default])})")
        return f"{self._function}.replace_hints({', '.join(sorted(hints))})" if hints else ""

    def _chosen(self, call: ast.Call) -> str:
        """The call that chooses, with all facts of the problem that can be told from the arguments of a launch or a search."""
        kernel, given = self._baking.kernel, {name: ast.unparse(each) for name, each in self._given(call).items()}
        known = {"arch": "'sm_%d%d' % torch.cuda.get_device_capability()"}
        for name, each in {} if kernel.is_called else kernel.array_fields.items():
            if name in given and isinstance(each.shape, str):
                words = {word: f"{given[name]}.shape[{axis}]" for axis, word in enumerate(split_shape(each.shape))}
                words |= {each.dtype or "dtype": f"str({given[name]}.dtype)[6:]"}
                known = {**words, each.layout: f"'row' if {given[name]}.stride(-1) == 1 else 'column'", **known}
        known |= given
        missing = sorted(self._baking.needed_facts - known.keys())
        if missing:
            raise self._error(
                call,
                f"the choice depends on {joined(missing)}, which nothing here tells; name problems that share it, with -p",
            )
        arguments = [f"{name}={known[name]}" for name in sorted(self._baking.facts & known.keys())]
        return f"{self._chooser}({', '.join(arguments)})"


def _place(baking: Baking, word: str) -> tuple[Path | None, str]:
    """The file and the name of the kernel's tile function; no file where there is none, or several functions."""
    module, _, name = baking.kernel.name.rpartition(":")
    if not baking.kernel.is_called:
        function, _ = undecorated(baking.kernel.function) if baking.kernel.function else (None, {})
        return (Path(inspect.getsourcefile(function) or ""), function.__name__) if function else (None, "")
    modules = (Path(each, *module.split(".")).with_suffix(".py") for each in ("", *sys.path))
    return next((each for each in (Path(word.rpartition(":")[0]), *modules) if each.is_file()), None), name


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(each.value for each in call.keywords)]


def _named(node: Any) -> str:
    """The last part of a name such as `ct.launch`; empty for anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _calls(tree: ast.AST, name: str, taking: str = "") -> list[ast.Call]:
    """The calls of a function, or those that get something of a name."""
    found = [each for each in ast.walk(tree) if isinstance(each, ast.Call) and _named(each.func) == name]
    return [each for each in found if not taking or taking in map(_named, _arguments(each))]


def _before(block: Sequence[ast.stmt], call: ast.Call) -> list[ast.stmt]:
    """The statements that run before a call: those before it in its block, and in the blocks around that one."""
    for place, each in enumerate(block):
        if call in ast.walk(each):
            blocks = [getattr(each, name, []) for name in ("body", "orelse", "finalbody")]
            return [*block[:place], *itertools.chain(*(_before(inner, call) for inner in blocks))]
    return []


def _variables(statement: ast.stmt) -> set[str]:
    """What a statement assigns, or one in it."""
    names = [each for each in ast.walk(statement) if isinstance(each, ast.Name)]
    return {each.id for each in names if isinstance(each.ctx, ast.Store)}
