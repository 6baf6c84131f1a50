"""Which part of the package may import which, and which words stand where (CONTRIBUTING.md).

Arrows are read from the source, so that imports inside functions and imports for types count, too.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiledsched
from tiledsched.core.registry import shipped_functions

PACKAGE = Path(tiledsched.__file__).parent
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))
}
tree_of = functools.cache(lambda path: ast.parse(SOURCES[path]))
"""The syntax of a file. Every process that runs tests reads this module, and one of them needs it."""
FLOORS = (
    {"core"},
    {"interpreter"},
    {"kernels", "build"},
    {"checking"},
    {"measure"},
    {"store"},
    {"rivals"},
    {"serve"},
    {"tuning", "ops", "report"},
    {"remember"},
    {"studies", "fleet", "bake"},
    {"doctor"},
    {"cli"},
)
"""The rooms from the ground up. A room may import what lies on a lower floor, and nothing of its own floor or above."""
AT_THE_ROOT = {"__init__.py", "__main__.py", "doctor.py"}
"""The modules that lie in no room. `__init__` names what is public, and everybody may ask it for the version."""
STARTED = {
    "tiledsched.measure.worker": "measure/gpu.py",
    "tiledsched.rivals.worker": "rivals/races.py",
    "tiledsched.serve.background": "serve/background.py",
    "tiledsched.fleet.child": "fleet/worker.py",
    "tiledsched.studies.profile.launch": "studies/profile/run.py",
}
"""Modules that run as processes of their own, and the file that starts each by its name."""
NAMED = {
    "core/registry.py": "the kernels that ship are found by name",
    "core/modules.py": "their package is told from others",
    "__init__.py": "public names are imported late",
}
"""Files that may name modules in strings, and why."""

ATTENTIONS_WORDS = re.compile(r"\b(head_dim|seq_q|seq_k|kv_heads|causal)\b")
ATTENTIONS_ROOMS = ("kernels/attention", "ops/", "studies/", "rivals/rows.py", "cli/renamed.py")
HEAVY = ("torch", "cupy", "ray")
HEAVY_ROOMS = {
    "torch": (
        "ops/",
        "serve/flops.py",
        "serve/op.py",
        "serve/execute.py",
        "serve/plan.py",
        "serve/plan_cache.py",
        "serve/process.py",
        "studies/",
    ),
    "cupy": ("measure/worker.py", "ops/", "studies/"),
    "ray": (),
}
"""Where a module may need one of them to be imported at all; the rest import it in the function that uses it."""
HOMES = tiledsched._HOMES | shipped_functions()
"""Public name -> the module that defines it."""


def room_of(path: str) -> str:
    """The room of a file, by its path in the package. The front of a kernel lies in the folder of the kernel, above the room."""
    return "ops" if path.endswith("/front.py") else path.split("/", maxsplit=1)[0].removesuffix(".py")


def lies_in(path: str, places: tuple[str, ...]) -> bool:
    """Whether a file is one of these, or lies in one of these folders or rooms."""
    return path.startswith(places) or f"{room_of(path)}/".startswith(places)


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
    if module == "tiledsched" and name in HOMES:
        return HOMES[name]
    inside = PACKAGE / "/".join([*module.split(".")[1:], name])
    is_module = module.split(".")[0] == "tiledsched" and (inside.is_dir() or inside.with_suffix(".py").is_file())
    return f"{module}.{name}" if is_module else module


def file_of(module: str) -> str:
    """The file of one of the package's modules."""
    path = "/".join(module.split(".")[1:])
    return f"{path}.py" if f"{path}.py" in SOURCES else f"{path}/__init__.py".lstrip("/")


@functools.cache
def arrows(path: str) -> list[tuple[str, int]]:
    """The package's own files that a file imports, each with the line."""
    found = imports(tree_of(path))
    return [(file_of(module), line) for module, line in found if module.split(".")[0] == "tiledsched"]


ROOMS = sorted({room_of(path) for path in SOURCES if path not in AT_THE_ROOT - {"doctor.py"}})


def files_of(room: str) -> list[str]:
    return [path for path in SOURCES if room_of(path) == room]


def test_every_room_has_its_floor():
    assert set(ROOMS) == set().union(*FLOORS)
    assert {path for path in SOURCES if "/" not in path} == AT_THE_ROOT
    assert len(ROOMS) + 1 <= 19


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_down(room):
    floor = next(number for number, rooms in enumerate(FLOORS) if room in rooms)
    below = {room}.union(*FLOORS[:floor])
    against = [
        f"{path}:{line} imports {other}"
        for path in files_of(room)
        for other, line in arrows(path)
        if other != "__init__.py" and room_of(other) not in below
    ]
    assert against == []


def test_no_files_import_each_other():
    graph = {path: {other for other, _ in arrows(path)} - {path, "__init__.py"} for path in SOURCES}
    graphlib.TopologicalSorter(graph).prepare()  # an error names the files of a circle


def test_no_module_is_named_in_a_string():
    """A name in a string hides an arrow."""
    found = [
        f"{path}:{node.lineno} {node.value}"
        for path in SOURCES
        if path not in NAMED
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"tiledsched\.[a-z_.]+(:\w+)?", node.value)
        and (PACKAGE / file_of(node.value.partition(":")[0])).is_file()
        and STARTED.get(node.value) != path
    ]
    assert found == []


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in ("kernels", "ops", "studies")])
def test_no_room_knows_a_kernel_by_heart(room):
    """Kernels are found by their names; only their fronts and the studies import one."""
    known = [
        f"{path}:{line} imports {other}"
        for path in files_of(room)
        for other, line in arrows(path)
        if other.startswith("kernels/") and room_of(path) != "kernels"
    ]
    assert known == []


def test_kernels_know_each_other_only_by_what_they_share():
    """But gradients, and products with an epilogue, know what they are of."""
    for path in files_of("kernels"):
        for other, line in arrows(path):
            if other.count("/") > 1 and path.count("/") > 1:
                own = path.split("/")[1]
                assert other.split("/")[1] in (own, re.sub("_(backward|in_place|epilogue|quantized)$", "", own)), (
                    f"{path}:{line} imports {other}"
                )


@pytest.mark.parametrize("room", ROOMS)
def test_the_words_of_attention_stand_in_its_rooms(room):
    found = [
        f"{path}:{number} {line.strip()}"
        for path in files_of(room)
        if not lies_in(path, ATTENTIONS_ROOMS)
        for number, line in enumerate(SOURCES[path].splitlines(), 1)
        if ATTENTIONS_WORDS.search(line)
    ]
    assert found == []


@functools.cache
def reached(heavy: str) -> set[str]:
    """The files whose import brings in a heavy package: their own import, or that of a module which they import."""
    early = {path: {module for module, _ in imports(tree_of(path), run=True)} for path in SOURCES}
    files = {
        path: {file_of(each) for each in modules if each.startswith("tiledsched.")} for path, modules in early.items()
    }
    found = {path for path, modules in early.items() if any(module.split(".")[0] == heavy for module in modules)}
    while more := {path for path, others in files.items() if others & found} - found:
        found |= more
    return found


@pytest.mark.parametrize("heavy", HEAVY)
def test_heavy_packages_are_imported_where_they_are_used(heavy):
    assert sorted(path for path in reached(heavy) if not lies_in(path, HEAVY_ROOMS[heavy])) == []


def test_torch_and_cupy_are_found():
    assert {"serve/op.py", "ops/sdpa.py"} <= reached("torch")
    assert "measure/worker.py" in reached("cupy")


def test_imports_are_found_wherever_they_stand():
    """That the checks above can fail."""
    text = "import torch\nif TYPE_CHECKING:\n    import cupy\ntry:\n    import ray\nexcept ImportError:\n    pass\n"
    text += "def f():\n    from tiledsched import sdpa\n    from tiledsched.store import db\n"
    text += "class A:\n    from tiledsched.core.errors import Failure\n"
    tree = ast.parse(text)
    modules = ["torch", "cupy", "ray", "tiledsched.ops.sdpa", "tiledsched.store.db", "tiledsched.core.errors"]
    assert [name for name, _ in imports(tree)] == modules
    assert [name for name, _ in imports(tree, run=True)] == ["torch", "ray", "tiledsched.core.errors"]
    assert [file_of(each) for each in modules[3:]] == ["ops/sdpa.py", "store/db.py", "core/errors.py"]
    assert ATTENTIONS_WORDS.search("p.head_dim")
    assert not ATTENTIONS_WORDS.search("head_dims")


WITHOUT_A_NOUN = re.compile(r"(The only one|The same|torch's own|As of|Of the)\b[^.]{0,60}\.")
"""Docstrings that a reader understands only beside the ones before them."""


def test_docstrings_can_be_read_alone():
    texts = [
        (path, node.value.value)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    assert [each for each in texts if WITHOUT_A_NOUN.fullmatch(each[1])] == []
    assert WITHOUT_A_NOUN.fullmatch("The same.")
