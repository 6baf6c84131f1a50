"""Which part of the package may import which, and which words stand where (CONTRIBUTING.md).

Arrows are read from the source, so that imports inside functions count, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiledsched

PACKAGE = Path(tiledsched.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))
}

DOMAIN = ("cases", "config", "data_files", "declaration", "device", "errors", "expressions", "extras", "fields", "files", "flags", "kernel", "kernel_names", "launches",
          "problem",
          "resources", "schedule", "space", "space_files", "storage")  # fmt: skip
"""Modules at the top that know no room."""
PROOF = {"domain", "kernels", "build", "measure", "interpreter", "model", "store"}
"""What is below the rooms that answer questions."""
MAY_IMPORT = {
    "domain": {"domain"},
    "kernels": {"domain"},
    "build": {"domain", "kernels"},
    "measure": {"domain", "kernels", "build"},
    "model": {"domain", "kernels"},
    "interpreter": {"domain", "kernels", "measure"},  # it judges results as a measurement does
    "store": PROOF - {"store"},
    "search": PROOF,
    "serve": PROOF,
    "report": PROOF,
    "attention": PROOF | {"search", "serve", "report"},
    "tuning": PROOF | {"search", "serve", "report"},
    "refresh": PROOF | {"search", "serve", "tuning"},
    "functions": PROOF | {"serve"},
    "doctor": PROOF | {"search", "serve", "report"},
    "fleet": PROOF | {"search", "serve", "tuning", "refresh"},
    "studies": PROOF | {"search", "serve", "report", "attention", "tuning"},
    "cli": PROOF | {"search", "serve", "report", "attention", "tuning", "refresh", "doctor", "fleet", "studies"},
    "root": PROOF | {"search", "serve", "report", "attention", "tuning"},
    "__main__": {"cli"},
}
"""Room -> rooms that it may import beside itself. Everybody may ask the root for the version."""
EXCEPTIONS = {
    ("kernel_names.py", "tiledsched.kernels"): "the names of the kernels that ship; a kernel is found by its name",
    ("kernel.py", "tiledsched.model.roofline"): "the model of a kernel that brings none",
}
"""Imports against the arrows, each where it is asked for only, and why."""

ATTENTIONS_WORDS = re.compile(r"\b(head_dim|seq_q|seq_k|kv_heads|causal)\b")
ATTENTIONS_ROOMS = ("kernels/attention", "attention/", "studies/")
HEAVY = ("torch", "cupy", "ray")
HEAVY_ROOMS = {
    "torch": ("attention/", "serve/op.py", "serve/launching.py", "serve/plan_cache.py", "serve/process.py", "studies/"),
    "cupy": ("measure/worker.py", "attention/", "studies/"),
    "ray": ("attention/", "studies/"),
}
"""Where a module may need one of them to be imported at all; the rest import it in the function that uses it."""


def room_of(path: str) -> str:
    """The room of a file, by its path in the package."""
    top = path.split("/", maxsplit=1)[0].removesuffix(".py")
    return "root" if top == "__init__" else "domain" if top in DOMAIN else top


def room_of_module(module: str) -> str:
    """The room of a module, by its dotted name."""
    return room_of(module.removeprefix("tiledsched.").replace(".", "/")) if module != "tiledsched" else "root"


def imports(tree: ast.AST, *, run: bool = False) -> Iterator[tuple[str, int]]:
    """Every module that a tree imports, and the line; `run`: those imported as soon as the module is."""
    for node in ast.iter_child_nodes(tree):
        if run and (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _is_for_types(node)):
            continue
        if isinstance(node, ast.Import):
            yield from ((each.name, node.lineno) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package"
            yield from ((_home(str(node.module), each.name), node.lineno) for each in node.names)
        else:
            yield from imports(node, run=run)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _home(module: str, name: str) -> str:
    """The module that `from module import name` imports: `name` itself where it is one, or where the root has it from."""
    if module == "tiledsched" and name in tiledsched._HOMES:
        return tiledsched._HOMES[name]
    inside = PACKAGE / "/".join([*module.split(".")[1:], name])
    return (
        f"{module}.{name}"
        if module.split(".")[0] == "tiledsched" and (inside.is_dir() or inside.with_suffix(".py").is_file())
        else module
    )


def arrows(path: str) -> list[tuple[str, int]]:
    """The package's own modules that a file imports. Types of arguments are no dependency, but for what kernels know."""
    tree = ast.parse(SOURCES[path])
    for node in ast.walk(tree):
        if _is_for_types(node) and not path.startswith("kernels/"):
            node.body = []  # type: ignore[attr-defined]
    return [(module, line) for module, line in imports(tree) if module.split(".")[0] == "tiledsched"]


ROOMS = sorted({room_of(path) for path in SOURCES})


def files_of(room: str) -> list[str]:
    return [path for path in SOURCES if room_of(path) == room]


def test_every_room_has_its_arrows():
    assert set(ROOMS) == set(MAY_IMPORT)
    assert {name.removesuffix(".py") for name in files_of("domain")} == set(DOMAIN)


def test_no_two_rooms_import_each_other():
    for room, allowed in MAY_IMPORT.items():
        for other in allowed - {room}:
            assert room not in MAY_IMPORT[other], (room, other)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    against = [f"{path}:{line} imports {module}" for path in files_of(room) for module, line in arrows(path)
               if room_of_module(module) not in {room, "root", *MAY_IMPORT[room]}
               and (path, module) not in EXCEPTIONS]  # fmt: skip
    assert against == []


def test_exceptions_are_needed_and_only_where_they_are_asked_for():
    for path, module in EXCEPTIONS:
        assert module in {name for name, _ in arrows(path)}, f"{path} no longer imports {module}: take it off the list"
        assert module not in {name for name, _ in imports(ast.parse(SOURCES[path]), run=True)}


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in ("kernels", "attention", "studies")])
def test_no_room_knows_a_kernel_by_heart(room):
    """Kernels are found by their names; only the front of attention and the studies import one."""
    known = [f"{path}:{line} imports {module}" for path in files_of(room) for module, line in arrows(path)
             if module.startswith("tiledsched.kernels.")]  # fmt: skip
    assert known == []


def test_kernels_know_each_other_only_by_what_they_share():
    for path in files_of("kernels"):
        own = "tiledsched.kernels." + path.split("/")[1]
        for module, line in arrows(path):
            folder = module.removeprefix("tiledsched.kernels.").split(".")[0]
            if module.startswith("tiledsched.kernels.") and path.count("/") > 1 and not module.startswith(own):
                assert (PACKAGE / "kernels" / f"{folder}.py").is_file(), f"{path}:{line} imports {module}"


def test_nothing_but_the_command_line_imports_studies():
    known = {room_of(path) for path in SOURCES for module, _ in arrows(path) if room_of_module(module) == "studies"}
    assert known == {"cli", "studies"}


@pytest.mark.parametrize("room", ROOMS)
def test_the_words_of_attention_stand_in_its_rooms(room):
    found = [f"{path}:{number} {line.strip()}" for path in files_of(room) if not path.startswith(ATTENTIONS_ROOMS)
             for number, line in enumerate(SOURCES[path].splitlines(), 1) if ATTENTIONS_WORDS.search(line)]  # fmt: skip
    assert found == []


def reached(heavy: str) -> set[str]:
    """The files whose import brings in a heavy package: their own import, or that of a module which they import."""
    early = {path: {module for module, _ in imports(ast.parse(text), run=True)} for path, text in SOURCES.items()}
    names = {
        path: "tiledsched." + path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in SOURCES
    }
    found = {path for path, modules in early.items() if any(module.split(".")[0] == heavy for module in modules)}
    while more := {path for path, modules in early.items() if modules & {names[each] for each in found}} - found:
        found |= more
    return found


@pytest.mark.parametrize("heavy", HEAVY)
def test_heavy_packages_are_imported_where_they_are_used(heavy):
    assert sorted(path for path in reached(heavy) if not path.startswith(HEAVY_ROOMS[heavy])) == []


def test_torch_and_cupy_are_found():
    assert {"serve/op.py", "attention/sdpa.py"} <= reached("torch")
    assert "measure/worker.py" in reached("cupy")


def test_imports_are_found_wherever_they_stand():
    """That the checks above can fail."""
    text = "import torch\nif TYPE_CHECKING:\n    import cupy\ntry:\n    import ray\nexcept ImportError:\n    pass\n"
    text += "def f():\n    from tiledsched import sdpa, data_files\n    from tiledsched.store import db\n"
    text += "class A:\n    from tiledsched.errors import Failure\n"
    tree = ast.parse(text)
    assert [name for name, _ in imports(tree)] == ["torch", "cupy", "ray", "tiledsched.attention.sdpa", "tiledsched.data_files",
                                                  "tiledsched.store.db", "tiledsched.errors"]  # fmt: skip
    assert [name for name, _ in imports(tree, run=True)] == ["torch", "ray", "tiledsched.errors"]
    modules = ("tiledsched", "tiledsched.errors", "tiledsched.store.db", "tiledsched.kernels")
    assert [room_of_module(each) for each in modules] == ["root", "domain", "store", "kernels"]
    assert ATTENTIONS_WORDS.search("p.head_dim")
    assert not ATTENTIONS_WORDS.search("head_dims")
