"""docs/results/strangers.csv: one row for every kernel of other people's that was tried."""

from __future__ import annotations

import ast
import csv
import importlib
import importlib.util
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

TABLE = Path(__file__).parents[2] / "docs" / "results" / "strangers.csv"
COLUMNS = ("package", "version", "file", "kernel", "runs", "agrees", "largest_error", "lacking_operation")
GROUPS = {
    "tilegym": ("tilegym_rows", "tilegym_products", "tilegym_attention", "tilegym_states", "tilegym_backward"),
    "cutile-python": ("samples",),
}
"""Modules of this folder that hold the programs of each package."""


def read_table() -> dict[tuple[str, str, str], dict[str, str]]:
    """Rows by package, file and kernel."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {(row["package"], row["file"], row["kernel"]): row for row in csv.DictReader(file)}


def write_table(rows: Iterable[dict[str, str]]) -> None:
    """Write rows in order of package, file and kernel."""
    ordered = sorted(rows, key=lambda row: (row["package"], row["file"], row["kernel"]))
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(ordered)


def version_of(package: str, folder: Path) -> str:
    """The release of an installed package, or the commit that a clone is at."""
    if package == "tilegym":
        return version(package)
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def kernels_in(folder: Path, *, skip: str = "") -> set[tuple[str, str]]:
    """File and name of every function decorated as a cuTile kernel below `folder`; nothing below `folder/skip`."""
    found = set()
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder).as_posix()
        if skip and file.startswith(f"{skip}/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(_is_kernel(each) for each in node.decorator_list):
                found.add((file, node.name))
    return found


def _is_kernel(decorator: ast.expr) -> bool:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator) == "ct.kernel"


def rows_of(package: str, group: str, folder: Path) -> list[dict[str, str]]:
    """Run every program of a group; a row for each of its kernels."""
    from strangers import programs

    number, rows = version_of(package, folder), []
    for program in importlib.import_module(f"strangers.{group}").PROGRAMS:
        outcome = programs.run(program)
        for kernel in program.kernels:
            runs = kernel in outcome.launched
            rows.append(
                {
                    "package": package,
                    "version": number,
                    "file": program.file,
                    "kernel": kernel,
                    "runs": "yes" if runs else "no",
                    "agrees": "yes" if runs and outcome.agrees else "no",
                    "largest_error": f"{outcome.error:.1e}" if runs else "",
                    "lacking_operation": outcome.lacking,
                }
            )
    return rows
