"""What is baked, in the file in which its kernel stands: the places there that choose a schedule use it."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiledsched.bake.baking import Baking
from tiledsched.bake.text import BEGIN, END, names_in
from tiledsched.core.device import ARCHS
from tiledsched.core.errors import ConfigError
from tiledsched.core.fields import Dim
from tiledsched.core.launches import steps
from tiledsched.core.schedule import HINT_KNOBS
from tiledsched.core.shapes import split_shape
from tiledsched.core.text import joined

SEARCHED = "SimpleNamespace(best=SimpleNamespace(config={}, mean_us=float('nan')))"
"""What stands in the place of a search: as much of its result as programs read."""


class Patch:
    """What is baked, in the file in which its kernel stands.

    Args:
        baking: what is baked.
        word: how the kernel was named, which may tell its file.

    Raises:
        ConfigError: no file defines the one tile function of the kernel, it has no place that could use what is baked, or one
            that cannot be edited.
    """

    def __init__(self, baking: Baking, word: str = "") -> None:
        self._baking, self._chooser = baking, f"{baking.name}_schedule"
        self.path, self._function = _place(baking, word)
        self.before = self.path.read_text(encoding="utf-8")
        """What the file holds."""
        self._data, self._tree = self.before.encode(), ast.parse(self.before)
        self._starts = [0, *itertools.accumulate(map(len, self._data.splitlines(keepends=True)))]
        self._edits: list[tuple[int, int, str]] = []
        functions = [each for each in ast.walk(self._tree) if isinstance(each, ast.FunctionDef)]
        self._defined = next((each for each in functions if each.name == self._function), None)
        knobs = baking.schedules[0].keys()
        self._hints = [] if baking.kernel.is_called else [hint for hint in HINT_KNOBS if hint in knobs]
        searches = [
            each for each in _calls(self._tree, "exhaustive_search") if _named(_argument(each, 3)) == self._function
        ]
        pairs = [(outer, each) for outer in functions for each in _calls(outer, "launch")]
        launches = [(outer, each) for outer, each in pairs if _named(_argument(each, 2)) == self._function]
        done = _calls(self._tree, self._chooser)
        if self._defined is None or not (searches or launches or done):
            raise ConfigError(
                f"{self.path} does not define {self._function} and give it to ct.launch or exhaustive_search by that name; write a "
                "module, and call its function where schedules are chosen: -o FILE.py"
            )
        self._takes = [each.arg for each in self._defined.args.args]
        old = re.search(rf"^{BEGIN} {self._chooser} ---$.*?^{END}\n", self.before, re.MULTILINE | re.DOTALL)
        form = "SimpleNamespace" if old and "SimpleNamespace(" in old[0] else "dict"
        for call in done:
            if missing := sorted(baking.asked - {str(each.arg) for each in call.keywords}):
                raise self._error(call, f"the choice depends on {', '.join(missing)} now; pass it to {self._chooser}")
        for call in searches:
            form = self._edit_search(call)
        for outer, call in launches:
            if not _calls(outer, self._chooser):
                self._edit_launch(outer, call)
        if searches:
            self._edit_imports(len(searches))
        text = baking.source(form, self._kernel_of_each() if self._hints and form == "dict" else "")
        place = self._starts[int(self._defined.end_lineno or 0)]
        begin, end = (len(self.before[:each].encode()) for each in old.span()) if old else (place, place)
        self._edits.append((begin, end, text if old else f"\n\n{text}"))
        for begin, end, new in sorted(self._edits, key=lambda each: each[0], reverse=True):
            self._data = self._data[:begin] + new.encode() + self._data[end:]
        self.after = self._data.decode()
        """What it holds when it is baked, whether or not it was before."""

    def _replace(self, node: Any, text: str) -> None:
        begin, end = (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )
        self._edits.append((begin, end, text))

    def _error(self, node: ast.expr, message: str) -> ConfigError:
        return ConfigError(f"{self._path}:{node.lineno}: {message}")

    def _edit_search(self, call: ast.Call) -> str:
        """Put the table's choice in the place of a search; what a configuration is there."""
        taken = _argument(call, 4)
        if not isinstance(taken, ast.Lambda) or not isinstance(taken.body, ast.Tuple):
            raise self._error(
                call, "its args_fn is no lambda that returns a tuple, which tells the kernel's arguments; write one"
            )
        config, knobs = taken.args.args[0].arg, self._baking.schedules[0].keys()
        reads = {
            ast.unparse(each.slice).strip("'") if isinstance(each, ast.Subscript) else each.attr: type(each)
            for one in (*call.args, *(keyword.value for keyword in call.keywords))
            if isinstance(one, ast.Lambda)
            for each in ast.walk(one.body)
            if isinstance(each, (ast.Attribute, ast.Subscript)) and _named(each.value) == one.args.args[0].arg
        }
        unlike = sorted({*reads} - knobs | {*self._hints} - {*reads})
        if unlike or not reads:
            raise self._error(
                call,
                f"its lambdas read {', '.join(reads)} of {config}, and the table has {', '.join(knobs)}: {', '.join(unlike)}",
            )
        pairs = zip(self._takes, taken.body.elts, strict=False)
        given = {name: ast.unparse(each) for name, each in pairs if config not in map(_named, ast.walk(each))}
        self._replace(call, SEARCHED.format(self._chosen(given)))
        return "SimpleNamespace" if ast.Attribute in reads.values() else "dict"

    def _edit_imports(self, gone: int) -> None:
        """Import what stands in the place of searches, and no more what is not called any more."""
        imports = [each for each in self._tree.body if isinstance(each, (ast.Import, ast.ImportFrom))]
        for each in imports:
            names = [one.name for one in each.names]
            if names == ["exhaustive_search"] and len(_calls(self._tree, names[0])) == gone:
                self._edits.append((self._starts[each.lineno - 1], self._starts[each.lineno], ""))
        if not any(one.name == "SimpleNamespace" for each in imports for one in each.names):
            place = self._starts[
                next(each for each in imports if getattr(each, "module", "") != "__future__").lineno - 1
            ]
            self._edits.append((place, place, "from types import SimpleNamespace\n"))

    def _edit_launch(self, outer: ast.FunctionDef, call: ast.Call) -> None:
        """Set the variables that a launch takes for knobs, before what depends on them."""
        taken = _argument(call, 3)
        if not isinstance(taken, ast.Tuple) or len(taken.elts) != len(self._takes):
            raise self._error(
                call, f"the arguments of {self._function} are no tuple of {len(self._takes)}; write one there"
            )
        given = dict(zip(self._takes, taken.elts, strict=True))
        before = _before(outer.body, call)
        sets = {
            knob: [each for each in before if _named(given[knob]) in _set_by(each)]
            for knob in self._takes
            if knob in self._baking.schedules[0]
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
        lines = [f"schedule = {self._chosen({name: ast.unparse(each) for name, each in given.items()})}"]
        lines += [f"{_named(given[knob])} = schedule['{knob}']" for knob in sets]
        self._edits.append(
            (self._starts[line], self._starts[line], "".join(f"{' ' * indent}{each}\n" for each in lines))
        )
        if self._hints:
            self._replace(_argument(call, 2), "schedule['kernel']")

    def _kernel_of_each(self) -> str:
        """An expression for the kernel of a schedule `each`, with its hints for some archs and the author's for others."""
        assert self._defined is not None
        decorators = [each for each in self._defined.decorator_list if isinstance(each, ast.Call)]
        theirs = {one.arg: one.value for each in decorators for one in each.keywords}
        parts = []
        for hint in self._hints:
            by_arch = [f"{arch}=each['{hint}']{' or None' * (hint != 'opt_level')}" for arch in self._baking.archs]
            there = theirs.get(hint)
            if isinstance(there, ast.Call):
                by_arch += [ast.unparse(each) for each in there.keywords if each.arg not in self._baking.archs]
            elif there is not None:
                by_arch.append(f"default={ast.unparse(there)}")
            parts.append(f"{hint}=ct.ByTarget({', '.join(by_arch)})")
        return f"{self._function}.replace_hints({', '.join(parts)})"

    def _chosen(self, given: Mapping[str, str]) -> str:
        """The call of the baked function where the tile function has these arguments, with all sizes and what else it needs."""
        known: dict[str, str] = {"arch": "'sm_%d%d' % torch.cuda.get_device_capability()"}
        for name, each in {} if self._baking.kernel.is_called else self._baking.kernel.array_fields.items():
            if name in given and isinstance(each.shape, str):
                known |= {
                    word: f"{given[name]}.shape[{axis}]"
                    for axis, word in enumerate(split_shape(each.shape))
                    if word not in known
                }
                known.setdefault(each.dtype or "dtype", f"str({given[name]}.dtype)[6:]")
                known.setdefault(each.layout, f"'column' if {given[name]}.stride(-1) > 1 else 'row'")
        known |= given
        missing = sorted(self._baking.asked - known.keys())
        if missing:
            raise ConfigError(
                f"a launch of {self._baking.kernel.name} does not tell {joined(missing)}, by which schedules differ; name problems that have "
                "it in common with -p, or write a module: -o FILE.py"
            )
        sizes = [name for name, each in self._baking.kernel.fields.items() if isinstance(each, Dim) and name in known]
        sizes += sorted(given.keys() & names_in(*self._baking.names[0])) if self._baking.kernel.is_called else []
        return f"{self._chooser}({', '.join(f'{name}={known[name]}' for name in dict.fromkeys((*sizes, *sorted(self._baking.asked))))})"


def _place(baking: Baking, word: str) -> tuple[Path, str]:
    """The file and the name of the kernel's only tile function."""
    module, _, name = baking.kernel.name.rpartition(":")
    if baking.kernel.is_called:
        places = [
            Path(word.rpartition(":")[0]),
            *(Path(each, *module.split(".")).with_suffix(".py") for each in ("", *sys.path)),
        ]
        path = next((each for each in places if each.is_file()), None)
        if path is None:
            raise ConfigError(f"{module} is neither here nor where Python looks for modules; run this in its folder")
        return path, name
    found = {
        step.function
        for leaf in baking.tree.leaves()
        for case in map(baking.cases.__getitem__, leaf.rows)
        for step in steps(baking.kernel, case.problem, baking.schedules[leaf.best], ARCHS[case.arch])
    }
    function = found.pop()
    if found:
        names = joined(sorted(each.__name__ for each in (function, *found)))
        raise ConfigError(
            f"schedules of {baking.kernel.name} run several functions ({names}); write a module: -o FILE.py"
        )
    return Path(inspect.getsourcefile(function) or ""), function.__name__


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
