"""Search spaces as TOML files: reading them, and finding those that ship.

A space file may extend another one: the later file's knobs and limits override those of the same name, and its
constraints are added. docs/search-space.md describes the format.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiledsched import data_files
from tiledsched.errors import SpaceError
from tiledsched.space import PROBLEM_NAMES, Constraint, Knob, SearchSpace, contains

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ALLOWED_NODES = (ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add,
                 ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt,
                 ast.GtE, ast.In, ast.NotIn, ast.Tuple, ast.Name, ast.Load, ast.Constant, ast.IfExp)  # fmt: skip
KNOB_KEYS = ("choices", "default", "about", "measured_only")
TOP_KEYS = ("extends", "kernel", "arch", "about", "limits", "knobs", "constraints")


def load_space(path: str | Path) -> SearchSpace:
    """The space in a TOML file, with what it extends.

    Raises:
        SpaceError: the file is missing or not TOML, or a key in it is wrong; the message names the key, what was
            found and what is allowed.
    """
    path = Path(path)
    merged = _merged_tables(path, ())
    for key in ("kernel", "arch"):
        if not isinstance(merged.get(key), str):
            raise SpaceError(
                f"{path}: key {key!r} must be a string such as {'attention' if key == 'kernel' else 'sm_90'!r}"
            )
    limits = merged["limits"]
    for name, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise SpaceError(f"{path}: limits.{name} must be an integer, got {value!r}")
    knobs = {name: _knob(path, name, table) for name, table in merged["knobs"].items()}
    if not knobs:
        raise SpaceError(f"{path}: no knobs; add a table such as [knobs.tile_m]")
    known = set(knobs) | set(PROBLEM_NAMES) | set(limits)
    constraints = tuple(_constraint(path, index, table, known) for index, table in enumerate(merged["constraints"]))
    return SearchSpace(kernel=merged["kernel"], arch=merged["arch"], knobs=knobs, constraints=constraints,
                       limits=limits, source=str(path))  # fmt: skip


def space_for(arch: str, *, kernel: str = "attention") -> SearchSpace:
    """The space shipped for `arch`, e.g. ``sm_121``.

    Raises:
        SpaceError: no file for that arch; the message lists those there are.
    """
    path = data_files.search_spaces() / kernel / f"{arch}.toml"
    if not path.is_file():
        known = ", ".join(shipped_archs(kernel=kernel))
        raise SpaceError(f"no search space for arch {arch!r}; known are {known}, or pass --space FILE")
    return load_space(path)


def shipped_archs(*, kernel: str = "attention") -> list[str]:
    """Archs with a shipped space, oldest first."""
    files = (data_files.search_spaces() / kernel).glob("sm_*.toml")
    return sorted((path.stem for path in files), key=lambda arch: int(arch[3:]))


def _merged_tables(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    if path.resolve() in seen:
        raise SpaceError(f"{path}: 'extends' goes round in a circle: {' -> '.join(str(p) for p in seen)}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpaceError(f"cannot read search space {path}: {error.strerror}; check the path") from error
    try:
        own = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpaceError(f"{path} is not valid TOML: {error}") from error
    unknown = sorted(set(own) - set(TOP_KEYS))
    if unknown:
        raise SpaceError(f"{path}: unknown key {unknown[0]!r}; allowed are {', '.join(TOP_KEYS)}")
    for key, kind in (("limits", dict), ("knobs", dict), ("constraints", list)):
        if not isinstance(own.get(key, kind()), kind):
            raise SpaceError(f"{path}: {key!r} must be {'a table' if kind is dict else 'an array of tables'}")
    base: dict[str, Any] = {"limits": {}, "knobs": {}, "constraints": []}
    if "extends" in own:
        base = _merged_tables(_extended_path(path, own["extends"]), (*seen, path.resolve()))
    knobs = {name: dict(table) if isinstance(table, dict) else table for name, table in base["knobs"].items()}
    for name, table in own.get("knobs", {}).items():
        if not isinstance(table, dict):
            raise SpaceError(f"{path}: knobs.{name} must be a table with 'choices', got {table!r}")
        knobs[name] = knobs.get(name, {}) | table
    return {**base, **{key: own[key] for key in ("kernel", "arch", "about") if key in own},
            "limits": base["limits"] | own.get("limits", {}), "knobs": knobs,
            "constraints": base["constraints"] + own.get("constraints", [])}  # fmt: skip


def _extended_path(path: Path, extends: object) -> Path:
    """Where `extends` points: beside the file, or else among the shipped spaces (``attention/sm_90.toml``)."""
    if not isinstance(extends, str):
        raise SpaceError(f"{path}: 'extends' must be a file name such as 'base.toml', got {extends!r}")
    for candidate in (path.parent / extends, data_files.search_spaces() / extends):
        if candidate.is_file():
            return candidate
    raise SpaceError(f"{path}: 'extends' names {extends!r}, which is neither beside it nor among the shipped spaces")


def _knob(path: Path, name: str, table: Mapping[str, Any]) -> Knob:
    unknown = sorted(set(table) - set(KNOB_KEYS))
    if unknown:
        raise SpaceError(f"{path}: knobs.{name} has unknown key {unknown[0]!r}; allowed are {', '.join(KNOB_KEYS)}")
    choices = table.get("choices")
    if not isinstance(choices, list) or not choices:
        raise SpaceError(f"{path}: knobs.{name}.choices must be a list with at least one value, got {choices!r}")
    for choice in choices:
        if not isinstance(choice, (bool, int, str)) or type(choice) is not type(choices[0]):
            raise SpaceError(f"{path}: knobs.{name}.choices must all be of one kind (integers, true/false or strings), "
                             f"got {choices!r}")  # fmt: skip
    default = table.get("default", choices[0])
    if not contains(choices, default):
        raise SpaceError(f"{path}: knobs.{name}.default = {default!r} is not one of its choices {choices}")
    measured_only = table.get("measured_only", False)
    if not isinstance(measured_only, bool):
        raise SpaceError(f"{path}: knobs.{name}.measured_only must be true or false, got {measured_only!r}")
    return Knob(name=name, choices=tuple(choices), default=default, about=str(table.get("about", "")),
                measured_only=measured_only)  # fmt: skip


def _constraint(path: Path, index: int, table: Any, known: set[str]) -> Constraint:
    where = f"{path}: constraints[{index}]"
    if not isinstance(table, dict) or set(table) - {"exploring"} != {"require", "because"}:
        raise SpaceError(f"{where} must have the keys 'require' and 'because', and may have 'exploring', got {table!r}")
    if not isinstance(table.get("exploring", False), bool):
        raise SpaceError(f"{where}.exploring must be true or false, got {table['exploring']!r}")
    text = table["require"]
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, TypeError) as error:
        raise SpaceError(f"{where}.require = {text!r} is not an expression: {error}") from error
    names = set()
    for node in ast.walk(tree):
        if not isinstance(node, ALLOWED_NODES):
            raise SpaceError(f"{where}.require uses {type(node).__name__}; only names, numbers, comparisons, arithmetic "
                             "and and/or/not are allowed")  # fmt: skip
        if isinstance(node, ast.Name):
            names.add(node.id)
    unknown = sorted(names - known)
    if unknown:
        raise SpaceError(f"{where}.require reads unknown name {unknown[0]!r}; known are {', '.join(sorted(known))}")
    return Constraint(require=text, because=table["because"], exploring=table.get("exploring", False),
                      names=frozenset(names))  # fmt: skip
