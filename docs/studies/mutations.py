"""How many small faults the tests notice: `python -m docs.studies.mutations --count 80 --seed 1 --jobs 2 --csv FILE`.

Each fault is one change of one expression in host code (a comparison, a condition, a sign, a result). On a copy of the
checkout the sixteen nearest test files are run: those that import the changed module, then those that import a module that
does. The fault is noticed if one of them fails or hangs.
"""

from __future__ import annotations

import ast
import csv
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from docs.studies.flags import flag, parser_with

ROOMS = ("tuning", "serve", "store", "measure", "rivals", "fleet")
OTHER: dict[type[ast.AST], type[ast.AST]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OTHER |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And}
OTHER |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
OTHER |= {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv}
MOST_FILES = 16
"""Test files run for one fault, those that import the module first."""


@dataclass(frozen=True)
class Fault:
    """One changed line of one file."""

    path: str
    """File, from the root of the checkout."""
    line: int
    """Where the changed expression stands."""
    kind: str
    """What was changed into what."""
    text: str
    """The whole file with the change."""


def places(path: str) -> list[tuple[str, int, int]]:
    """Where faults can be planted in a file: its path, the number of the node, and which of the node's changes."""
    nodes = enumerate(ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))))
    return [(path, number, which) for number, node in nodes for which, _ in enumerate(changes(node))]


def plant(path: str, number: int, which: int) -> Fault:
    """The fault at one of the places."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    node = next(each for place, each in enumerate(ast.walk(tree)) if place == number)
    kind, change = list(changes(node))[which]
    change(node)
    return Fault(path, getattr(node, "lineno", 0), kind, ast.unparse(tree))


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """The changes of one node: a name for people, and what makes the change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        other = OTHER[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} -> {other.__name__}", lambda n: n.ops.__setitem__(0, other())
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in OTHER and not is_text(node):
        swap = OTHER[type(node.op)]
        yield f"{type(node.op).__name__} -> {swap.__name__}", lambda n: setattr(n, "op", swap())
    elif isinstance(node, (ast.If, ast.IfExp)) and not (isinstance(node.test, ast.Name) and node.test.id.isupper()):
        yield "condition -> not", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "result -> None", lambda n: setattr(n, "value", ast.Constant(None))


def is_text(node: ast.AST) -> bool:
    """Whether an operation joins text, or types in an annotation."""
    return any(isinstance(each, (ast.JoinedStr, ast.Constant)) and not is_number(each) for each in ast.walk(node))


def is_number(node: ast.AST) -> bool:
    """Whether a node is a number."""
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def importers(path: str, files: dict[str, str]) -> list[str]:
    """The files that import a module."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package, _, name = module.rpartition(".")
    wanted = re.compile(rf"{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b")
    return [each for each, text in files.items() if wanted.search(text)]


def nearest_tests(path: str, tests: dict[str, str], sources: dict[str, str]) -> list[str]:
    """The test files that import a module, those with the fewest imports of the package first; then in the same order those
    that import a module that imports it.
    """

    def by_imports(test: str) -> tuple[int, str]:
        return tests[test].count("import tiledsched") + tests[test].count("from tiledsched"), test

    near = sorted(importers(path, tests), key=by_imports)
    next_to = {test for each in importers(path, sources) for test in importers(each, tests)}
    return [*near, *sorted(next_to - set(near), key=by_imports)]


def noticed(fault: Fault, home: Path, tests: list[str], limit_s: float) -> str:
    """How the tests took a fault: `failed`, `hung` or `passed`."""
    target = home / fault.path
    before = target.read_text(encoding="utf-8")
    target.write_text(fault.text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not compiler and not gpu",
        *tests,
    ]
    try:
        run = subprocess.run(
            command,
            cwd=home,
            env={**os.environ, "PYTHONPATH": str(home)},
            capture_output=True,
            timeout=limit_s,
            check=False,
        )
        return "passed" if run.returncode in (0, 5) else "failed"
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        target.write_text(before, encoding="utf-8")


def main() -> None:
    """Plant the faults, and say what share was noticed."""
    parser = parser_with(
        flag("--count", type=int, default=80),
        flag("--seed", type=int, default=1),
        flag("--jobs", type=int, default=2),
        flag("--limit", type=float, default=300.0, help="seconds for the tests of one fault"),
        flag("--csv", type=Path, required=True),
        prog="python -m docs.studies.mutations",
        description=__doc__,
    )
    options = parser.parse_args()
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split()
    tests = {name: Path(name).read_text() for name in names if re.fullmatch(r"tests/test_(?!gpu)\w+\.py", name)}
    sources = {name: Path(name).read_text() for name in names if re.fullmatch(r"tiledsched/.*\.py", name)}
    draw = random.Random(options.seed)
    each = options.count // len(ROOMS)
    planted: list[Fault] = []
    for room in ROOMS:
        paths = [name for name in names if name.startswith(f"tiledsched/{room}/") and name.endswith(".py")]
        everything = [place for path in paths for place in places(path)]
        planted += [plant(*place) for place in draw.sample(everything, each)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        homes: Queue[Path] = Queue()
        for number in range(options.jobs):
            home = Path(folder, str(number))
            for name in names:
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(name, home / name)
            homes.put(home)

        def judge(fault: Fault) -> list[str]:
            home = homes.get()
            try:
                files = nearest_tests(fault.path, tests, sources)[:MOST_FILES]
                outcome = noticed(fault, home, files, options.limit)
            finally:
                homes.put(home)
            print(f"{outcome:7} {fault.path}:{fault.line} {fault.kind}", file=sys.stderr, flush=True)
            return [fault.path, str(fault.line), fault.kind, outcome, " ".join(files)]

        rows = list(pool.map(judge, planted))
    with options.csv.open("w", newline="") as file:
        csv.writer(file).writerows([["path", "line", "change", "outcome", "tests"], *rows])
    caught = sum(row[3] != "passed" for row in rows)
    print(f"{caught} of {len(rows)} faults were noticed: {caught / len(rows):.2f}")


if __name__ == "__main__":
    main()
