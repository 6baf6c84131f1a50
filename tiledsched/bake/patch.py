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
from tiledsched.bake.text import BEGIN, END, names_in
from tiledsched.core.errors import ConfigError
from tiledsched.core.files import plain_text
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
        raw = path.read_bytes()
        plain_text(path, raw)
        self.before = raw.decode()
        """What the file holds."""
        self._data = data = raw.replace(b"\r\n", b"\n")
        tree = ast.parse(data)
        self._starts = [0, *itertools.accumulate(map(len, data.splitlines(keepends=True)))]
        self._edits: list[tuple[int, int, str]] = []
        outers = [each for each in ast.walk(tree) if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
        defined = [each for each in outers if each.name == self._function]
        self._takes = [each.arg for one in defined[:1] for each in (*one.args.posonlyargs, *one.args.args)]
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
        old = re.search(rf"^{BEGIN} {self._chooser} ---$.*?^{END}\n".encode(), data, re.MULTILINE | re.DOTALL)
        text, top = self._kernel(defined[0]), next(each for each in tree.body if defined[0] in ast.walk(each))
        if text and top is not defined[0] and isinstance(top, (ast.FunctionDef, ast.ClassDef)):
            raise self._error(
                defined[0], f"{self._function} is defined in {top.name}; move it out, so that its hints can be set"
            )
        span, text = old.span() if old else [self._starts[int(top.end_lineno or 0)]] * 2, baking.source(text)
        self._edits.append((*span, text if old else f"\n\n{text}"))
        for begin, end, new in sorted(self._edits, key=lambda each: each[0], reverse=True):
            data = data[:begin] + new.encode() + data[end:]
        self.after = IMPORT.sub("", data.decode()) if len(searches) == len(_calls(tree, SEARCH)) else data.decode()
        """What it is to hold."""
        try:
            ast.parse(self.after.encode())
        except SyntaxError as error:
            raise ConfigError(
                f"{path}: a line cannot be added to it ({error.text or error.msg}); write each statement on a line of its own"
            ) from error
        self.after = self.after.replace("\n", "\r\n") if b"\r" in raw else self.after

    def _error(self, node: Any, message: str) -> ConfigError:
        return ConfigError(f"{self.path}:{node.lineno}: {message}")

    def _replace(self, node: Any, text: str) -> None:
        first, last = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]
        self._edits.append((first + node.col_offset, last + node.end_col_offset, text))

    def _given(self, call: ast.Call) -> dict[str, ast.expr]:
        """What a launch gives for each parameter of the tile function, or a search to its launches."""
        tuples = [getattr(each, "body", each) for each in _arguments(call)]
        fitting = [each.elts for each in tuples if isinstance(each, ast.Tuple) and len(each.elts) == len(self._takes)]
        if not fitting:
            raise self._error(call, f"the arguments of {self._function} must be a tuple of {len(self._takes)} here")
        return dict(zip(self._takes, fitting[-1], strict=True))

    def _edit_launch(self, outer: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> None:
        """Set the variables that a launch takes for knobs, before what depends on them."""
        given, before, schedule = self._given(call), _before(outer.body, call), self._baking.schedules[0]
        chosen, texts = self._chosen(call), {name: ast.unparse(each) for name, each in given.items()}
        knobs = [knob for knob in self._takes if knob in schedule]
        elsewhere = sorted(schedule.keys() - {*knobs, *COMPILER_HINTS})
        if elsewhere:
            raise self._error(
                call, f"{joined(elsewhere)} is no parameter of {self._function}, so that nothing here sets it"
            )
        sets = [[each for each in before if texts[knob] in _names(each, ast.Store)] for knob in knobs]
        if [] in sets:
            knob = knobs[sets.index([])]
            raise self._error(
                call,
                f"{outer.name} assigns no variable that is passed for {knob}; write one before what depends on it, as in "
                f"{knob.lower()} = {texts[knob]}, and pass that",
            )
        last = max((each[-1] for each in sets), key=lambda each: each.lineno, default=None)
        line, variables = int(last.end_lineno or 0) if last else call.lineno - 1, {texts[knob] for knob in knobs}
        if line >= call.lineno:
            raise self._error(call, "write this launch on a line of its own")
        early = [each for each in before if each.lineno <= line]
        below = set().union(*(_names(each, ast.Store) for each in before if each.lineno > line))
        for each in early:
            used, others = variables & _names(each, ast.Load), _names(each, ast.Store) - variables - below
            if used and others:
                raise self._error(
                    each,
                    f"{joined(sorted(others))} depends on {joined(sorted(used))}; move this below line {line}, after which "
                    "the schedule sets it",
                )
        known = {each.arg for each in ast.walk(outer.args) if isinstance(each, ast.arg)}
        late = names_in(chosen) & below - known.union(*(_names(each, ast.Store) for each in early))
        if late:
            raise self._error(
                call,
                f"the schedule is chosen after line {line}, and {joined(sorted(late))} is assigned below; move that up",
            )
        taken = {getattr(each, "id", getattr(each, "arg", "")) for each in ast.walk(outer)}
        name = "baked_schedule" if "schedule" in taken else "schedule"
        lines = [f"{name} = {chosen}", *(f"{texts[knob]} = {name}.{knob}" for knob in knobs)]
        place, start = self._starts[line], self._starts[(last.lineno if last else call.lineno) - 1]
        indent = re.split(rb"[^ \t]", self._data[start:], maxsplit=1)[0].decode()
        self._edits.append((place, place, "".join(f"{indent}{each}\n" for each in lines)))
        for argument in _arguments(call):
            if _named(argument) == self._function and schedule.keys() & COMPILER_HINTS.keys():
                self._replace(argument, f"{name}.kernel")

    def _kernel(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
        """An expression for the kernel of a schedule `each`, with its hints on these archs and the author's on others."""
        if self._baking.kernel.is_called:
            return ""
        theirs = {
            one.arg: one.value
            for each in function.decorator_list
            if isinstance(each, ast.Call)
            for one in each.keywords
        }
        written = [ast.unparse(getattr(each, "func", each)).rpartition(".") for each in function.decorator_list]
        module = next((head for head, _, name in written if head and name == "kernel"), "ct")
        hints = []
        for hint in COMPILER_HINTS.keys() & self._baking.schedules[0].keys():
            there: Any = theirs.get(hint)
            default = [
                ast.unparse(each) for each in getattr(there, "keywords", ()) if each.arg not in self._baking.archs
            ]
            default += [
                f"default={ast.unparse(each)}"
                for each in [there]
                if isinstance(each, ast.expr) and not isinstance(each, ast.Call)
            ]
            value = f"each.{hint}{' or None' * (hint != 'opt_level')}"
            by_arch = [f"{arch}={value}" for arch in self._baking.archs]
            hints.append(f"{hint}={module}.ByTarget({', '.join([*by_arch, *default])})")
        if hints and module == "ct" and b" as ct\n" not in self._data:
            raise self._error(function, "write `import cuda.tile as ct` above, with whose `ct.ByTarget` hints are set")
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


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The variables, attributes and items that a statement assigns (`ast.Store`) or reads (`ast.Load`), but for those of
    functions in it, which run later, and those that an expression assigns."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return set()
    inner = [node.value] if isinstance(node, ast.NamedExpr) else ast.iter_child_nodes(node)
    is_one = isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(node.ctx, context)
    return {*[ast.unparse(node)] * is_one}.union(*(_names(each, context) for each in inner))
