"""How large the project is, in what a newcomer has to hold: `python -m docs.studies.size [FOLDER]`, in a checkout.

Statements are every `ast.stmt` but docstrings, so that no way of formatting changes the count.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

PACKAGE = "tiledsched"


def statements(text: str) -> int:
    """The statements of a source file, docstrings and other bare constants left out."""
    return sum(
        isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in ast.walk(ast.parse(text))
    )


def imported(text: str, modules: set[str]) -> set[str]:
    """The package's own modules that a source file imports, inside functions and for types as well."""
    names = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    found = set()
    for name in names:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {"", PACKAGE}


def loops(graph: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules that import each other in a loop."""
    reach = {each: set(others) for each, others in graph.items()}
    for middle in graph:
        for each in graph:
            if middle in reach[each]:
                reach[each] |= reach[middle]
    groups = {frozenset(other for other in reach[each] if each in reach[other]) for each in graph}
    return [set(group) for group in groups if group]


def floors(graph: dict[str, set[str]]) -> int:
    """The length of the longest chain of rooms that import one another; loops count once."""
    depth: dict[str, int] = {}

    def climb(room: str, path: frozenset[str]) -> int:
        if room not in depth:
            depth[room] = 1 + max((climb(each, path | {room}) for each in graph[room] - path - {room}), default=0)
        return depth[room]

    return max(climb(room, frozenset()) for room in graph)


def main() -> None:
    """Print the table."""
    home = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    names = subprocess.run(["git", "ls-files"], cwd=home, capture_output=True, text=True, check=True).stdout.split()
    sources = {name: (home / name).read_text(encoding="utf-8") for name in names if name.endswith(".py")}
    package = {name: text for name, text in sources.items() if name.startswith(f"{PACKAGE}/")}
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): text for name, text in package.items()
    }
    graph = {module: imported(text, set(modules)) - {module} for module, text in modules.items()}
    rooms = {module: module.split(".")[1] if "." in module else "" for module in modules}
    house: dict[str, set[str]] = {room: set() for room in set(rooms.values()) - {""}}
    for module, others in graph.items():
        if rooms[module]:
            house[rooms[module]] |= {rooms[each] for each in others} - {rooms[module], ""}
    classes = Counter(
        node.name for text in package.values() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)
    )
    text = "\n".join(sources.values())
    pages = [name for name in names if name.endswith(".md") and name.startswith("docs/")]
    by_room = Counter[str]()
    for module, source in modules.items():
        by_room[rooms[module] or "root"] += statements(source)
    print("statements of the package:", sum(by_room.values()), dict(by_room.most_common()))
    for folder in ("docs/studies", "tests"):
        print(
            f"statements of {folder}:",
            sum(statements(t) for name, t in sources.items() if name.startswith(f"{folder}/")),
        )
    print("rooms:", len(house), "| floors:", floors(house), "| arrows:", sum(map(len, house.values())))
    print("circles of modules:", len(loops(graph)))
    print("modules at the root:", sum(name.count("/") == 1 for name in package))
    print("class names with two meanings:", sum(count > 1 for count in classes.values()))
    print("environment variables:", len(set(re.findall(r"TILEDSCHED_[A-Z][A-Z_]+", "\n".join(package.values())))))
    print("tables:", len(set(re.findall(r'__tablename__ = "(\w+)"', text))))
    print("formatting left to hand:", sum(line.count("fmt: " + "skip") for line in text.splitlines()))
    print("words in docs:", sum(len((home / name).read_text(encoding="utf-8").split()) for name in pages))


if __name__ == "__main__":
    main()
