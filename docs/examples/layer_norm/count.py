"""Counts what is written for a tuned layer norm with each tool: statements, and the tool's names that its author must know.

python docs/examples/layer_norm/count.py

Everything counts except docstrings, imports and what stands under `if __name__ == "__main__"`, which only checks the result.
Statements of the kernel are those of the function that the GPU runs; for a kernel in a string, its lines that hold more than
braces. A tool's names are those that are read from its modules or are keywords of calls of such names, and what a declaration
assigns that its base class knows.
"""

from __future__ import annotations

import ast
from pathlib import Path

MODULES = {
    "with_tiledsched.py": {"ts", "ct"},
    "with_cuda_tile_tune.py": {"ct", "exhaustive_search"},
    "with_triton.py": {"triton", "tl"},
    "with_helion.py": {"helion", "hl"},
    "with_kernel_tuner.py": {"kernel_tuner", "cupy"},
}
"""By file, what its tool's names are read from."""
DECLARED = {"function", "knobs", "constraints", "suites", "grid", "reference"}
"""What the base class `ts.Kernel` knows of what a declaration assigns."""

UNSEEN = {
    "with_cuda_tile_tune.py": {"kernel.replace_hints", "result.best.config"},
    "with_triton.py": {"kernel[grid]"},
    "with_kernel_tuner.py": {"block_size_x"},
}
"""Names and forms of a tool that stand on objects of its own, or in text."""


def written(tree: ast.Module) -> list[ast.stmt]:
    """The top-level statements that count."""
    return [
        each
        for each in tree.body
        if not isinstance(each, (ast.Import, ast.ImportFrom, ast.If)) and not _is_docstring(each)
    ]


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def statements(nodes: list[ast.stmt]) -> int:
    """How many statements there are, those inside others among them."""
    return sum(isinstance(each, ast.stmt) and not _is_docstring(each) for node in nodes for each in ast.walk(node))


def is_kernel(node: ast.stmt, modules: set[str]) -> bool:
    """Whether a GPU runs this function: the tool decorates it."""
    return isinstance(node, ast.FunctionDef) and any(_root(each) in modules for each in node.decorator_list)


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Call)):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id if isinstance(node, ast.Name) else ""


def names(nodes: list[ast.AST], modules: set[str]) -> set[str]:
    """The tool's names in some code."""
    found = set()
    for node in (each for one in nodes for each in ast.walk(one)):
        if isinstance(node, (ast.Attribute, ast.Name)) and _root(node) in modules:
            found.add(ast.unparse(node) if not isinstance(node, ast.Name) else node.id)
        if isinstance(node, ast.Call) and _root(node.func) in modules:
            found |= {f"{each.arg}=" for each in node.keywords if each.arg}
        if isinstance(node, ast.ClassDef):
            assigned = {
                ast.unparse(target) for each in node.body if isinstance(each, ast.Assign) for target in each.targets
            }
            assigned |= {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            found |= assigned & DECLARED
    return {each for each in found if "(" not in each} - (modules - {"exhaustive_search"})


def count(path: Path) -> dict[str, object]:
    """What one file takes."""
    tree, modules = ast.parse(path.read_text(encoding="utf-8")), MODULES[path.name]
    body = written(tree)
    kernel = [each for each in body if is_kernel(each, modules)]
    rest: list[ast.AST] = [each for each in body if each not in kernel]
    source = [
        each.value.value for each in body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "SOURCE"
    ]
    lines = sum(len(line.strip(" {}()")) > 0 for text in source for line in text.splitlines())
    decorators: list[ast.AST] = [one for each in kernel for one in each.decorator_list]
    return {
        "kernel": statements(kernel) + lines,
        "rest": statements(rest),
        "names": sorted(names([*rest, *decorators], modules) | UNSEEN.get(path.name, set())),
    }


if __name__ == "__main__":
    here = Path(__file__).parent
    print("|file|statements in the kernel|statements around it|the tuner's names around it|")
    print("|---|---:|---:|---|")
    for name in MODULES:
        found = count(here / name)
        print(f"|`{name}`|{found['kernel']}|{found['rest']}|{len(found['names'])}: {', '.join(found['names'])}|")
