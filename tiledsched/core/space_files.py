"""Search spaces as TOML files: reading a file, and finding the files that ship.

A space file may extend another one: the later file's knobs and limits override those of the same name, and its
constraints are added. docs/search-space.md describes the format.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tiledsched.core import data_files
from tiledsched.core.device import ARCHS, LIMITS, arch_limits
from tiledsched.core.errors import ConfigError, SpaceError, did_you_mean
from tiledsched.core.expressions import names_read, words_of
from tiledsched.core.fields import Knob
from tiledsched.core.files import read_toml, real_path
from tiledsched.core.problem import KernelClass
from tiledsched.core.registry import kernel_named, load_kernel
from tiledsched.core.space import Constraint, SearchSpace, contains, some_of

KNOB_KEYS = ("choices", "default", "about", "measured_only")
TOP_KEYS = ("extends", "kernel", "arch", "about", "limits", "knobs", "constraints")


def load_space(path: str | Path, kernel: KernelClass | None = None) -> SearchSpace:
    """The space in a TOML file. The file extends another file or the kernel's declaration.

    Args:
        path: the file.
        kernel: the kernel of the space; None for the kernel that the file names.

    Raises:
        SpaceError: the file is missing or not TOML, or a key in it is wrong. The message names the key, what was found and what
            is allowed.
    """
    path = Path(path)
    merged = _merged_tables(path, (), kernel)
    for key in ("kernel", "arch"):
        if not isinstance(merged.get(key), str):
            raise SpaceError(
                f"{path}: key {key!r} must be a string such as {'attention' if key == 'kernel' else 'sm_90'!r}"
            )
    kernel = kernel or kernel_named(merged["kernel"])
    if merged["kernel"] not in (kernel.name, kernel.space):
        raise SpaceError(f"{path} is for the kernel {merged['kernel']}, not {kernel.name}; give a space of that one")
    if merged["kernel"] != kernel.name:
        merged = {**merged, "constraints": [*merged["constraints"], *_declared(kernel)["constraints"]]}
    return _space(path, merged, kernel)


def chosen_space(arch: str, kernel: KernelClass, path: str | Path | None) -> SearchSpace:
    """The space in a file of the user's, or the kernel's own space if no file is given.

    Raises:
        SpaceError: the file is wrong, or there is no space for the arch.
        ConfigError: the file is for another arch.
    """
    if path is None:
        return space_for(arch, kernel)
    found = load_space(path, kernel)
    if found.arch != arch:
        raise ConfigError(f"{path} is for {found.arch}, not {arch}; pass --arch {found.arch}")
    return found


def space_for(arch: str, kernel: KernelClass | str) -> SearchSpace:
    """The space of a kernel for `arch`, e.g. ``sm_121``, from the file that ships for it or from the declaration.

    Args:
        arch: the arch.
        kernel: the kernel, or its name.

    Raises:
        SpaceError: there is no space for the arch. The message lists the archs that have one.
    """
    kernel = load_kernel(kernel)
    path = data_files.search_spaces() / kernel.space / f"{arch}.toml"
    if path.is_file():
        return load_space(path, kernel)
    if arch not in shipped_archs(kernel):
        raise SpaceError(
            f"{kernel.name} has no search space for arch {arch!r}; known are {', '.join(shipped_archs(kernel))}, or "
            "pass --space FILE"
        )
    return declared_space(arch, kernel)


def declared_space(arch: str, kernel: KernelClass) -> SearchSpace:
    """The space of a kernel whose knobs are in its declaration.

    Raises:
        SpaceError: a knob or a constraint is wrong.
    """
    return _space(Path(f"the declaration of {kernel.name}"), {**_declared(kernel), "arch": arch}, kernel)


def shipped_archs(kernel: KernelClass) -> list[str]:
    """Archs with a space, oldest first: those with a file, or all known archs if the declaration has the knobs."""
    files = {path.stem for path in (data_files.search_spaces() / kernel.space).glob("sm_*.toml")}
    return sorted(files | set(ARCHS if kernel.knobs else ()), key=lambda arch: int(arch[3:]))


def known_knobs(kernel: KernelClass) -> tuple[str, ...]:
    """The knobs of a kernel: those that it declares, or those of the file that its shipped spaces extend."""
    return tuple(kernel.knobs) or _base_knobs(data_files.search_spaces() / kernel.space / "base.toml")


@cache
def _base_knobs(path: Path) -> tuple[str, ...]:
    return tuple(read_toml(path)["knobs"]) if path.is_file() else ()


def _space(path: Path, merged: Mapping[str, Any], kernel: KernelClass) -> SearchSpace:
    limits = {**(arch_limits(merged["arch"]) if merged["arch"] in ARCHS else {}), **merged["limits"]}
    for name, value in limits.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise SpaceError(f"{path}: limits.{name} must be an integer, got {value!r}")
    taken = known_knobs(kernel)
    for name in merged["knobs"]:
        if taken and name not in taken:
            raise SpaceError(
                f"{path}: {kernel.name} has no knob {name!r}; it has {', '.join(taken)}{did_you_mean(name, taken)}"
            )
    knobs = {name: _knob(path, name, table) for name, table in merged["knobs"].items()}
    if not knobs:
        raise SpaceError(f"{path}: no knobs; add a table such as [knobs.tile_m]")
    known = {*knobs, *kernel.fields, *kernel.derived, *limits, *LIMITS}
    words = words_of(kernel) | {name for name, knob in knobs.items() if isinstance(knob.default, str)}
    constraints = tuple(
        _constraint(path, index, table, known, words) for index, table in enumerate(merged["constraints"])
    )
    for name in taken:
        if name not in merged["knobs"]:
            raise SpaceError(
                f"{path}: the knob {name!r} is missing, and {kernel.name} takes it; extend a file that has it: "
                f'extends = "{kernel.name}/{merged["arch"]}.toml"'
            )
    return SearchSpace(
        kernel=kernel.name, arch=merged["arch"], knobs=knobs, constraints=constraints, limits=limits, source=str(path)
    )


def _declared(kernel: KernelClass) -> dict[str, Any]:
    """The contents of a file that says what the declaration says."""
    knobs = {
        name: {**{key: getattr(each, key) for key in KNOB_KEYS}, "choices": list(each.choices)}
        for name, each in kernel.knob_fields().items()
    }
    constraints = [
        {"require": require, "because": because, "exploring": exploring}
        for exploring, listed in ((False, kernel.constraints), (True, kernel.exploring))
        for require, because in listed.items()
    ]
    return {"kernel": kernel.name, "limits": {}, "knobs": knobs, "constraints": constraints}


def _merged_tables(path: Path, seen: tuple[str, ...], kernel: KernelClass | None) -> dict[str, Any]:
    if real_path(path) in seen:
        raise SpaceError(f"{path}: 'extends' goes round in a circle: {' -> '.join(seen)}")
    try:
        own = read_toml(path)
    except OSError as error:
        raise SpaceError(f"cannot read search space {path}: {error.strerror}; check the path") from error
    except ValueError as error:
        raise SpaceError(f"{path} is not valid TOML: {error}") from error
    unknown = sorted(set(own) - set(TOP_KEYS))
    if unknown:
        raise SpaceError(
            f"{path}: unknown key {unknown[0]!r}; allowed are {', '.join(TOP_KEYS)}{did_you_mean(unknown[0], TOP_KEYS)}"
        )
    for key, kind in (("limits", dict), ("knobs", dict), ("constraints", list)):
        if not isinstance(own.get(key, kind()), kind):
            raise SpaceError(f"{path}: {key!r} must be {'a table' if kind is dict else 'an array of tables'}")
    base: dict[str, Any] = {"limits": {}, "knobs": {}, "constraints": []}
    if "extends" in own:
        base = _merged_tables(_extended_path(path, own["extends"]), (*seen, real_path(path)), kernel)
    elif kernel is not None and kernel.knobs:
        base = _declared(kernel)
    knobs = {name: dict(table) if isinstance(table, dict) else table for name, table in base["knobs"].items()}
    for name, table in own.get("knobs", {}).items():
        if not isinstance(table, dict):
            raise SpaceError(f"{path}: knobs.{name} must be a table with 'choices', got {table!r}")
        knobs[name] = knobs.get(name, {}) | table
    return {
        **base,
        **{key: own[key] for key in ("kernel", "arch", "about") if key in own},
        "limits": base["limits"] | own.get("limits", {}),
        "knobs": knobs,
        "constraints": base["constraints"] + own.get("constraints", []),
    }


def _extended_path(path: Path, extends: object) -> Path:
    """Where `extends` points: beside the file, or else among the shipped spaces (``attention/sm_90.toml``)."""
    if not isinstance(extends, str):
        raise SpaceError(f"{path}: 'extends' must be a file name such as 'base.toml', got {extends!r}")
    for candidate in (path.parent / extends, data_files.search_spaces() / extends):
        if os.path.isfile(candidate):  # False also of a name that no file can have
            return candidate
    raise SpaceError(
        f"{path}: 'extends' names {extends[:80]!r}, which is neither beside it nor among the shipped spaces"
    )


def _knob(path: Path, name: str, table: Mapping[str, Any]) -> Knob:
    unknown = sorted(set(table) - set(KNOB_KEYS))
    if unknown:
        meant = did_you_mean(unknown[0], KNOB_KEYS)
        raise SpaceError(
            f"{path}: knobs.{name} has unknown key {unknown[0]!r}; allowed are {', '.join(KNOB_KEYS)}{meant}"
        )
    choices = table.get("choices")
    if not isinstance(choices, list) or not choices:
        raise SpaceError(f"{path}: knobs.{name}.choices must be a list with at least one value, got {choices!r}")
    for choice in choices:
        if not isinstance(choice, (bool, int, str)) or type(choice) is not type(choices[0]):
            raise SpaceError(
                f"{path}: knobs.{name}.choices must all be of one kind (integers, true/false or strings), "
                f"got {some_of(choices)}"
            )
        if isinstance(choice, str) and not choice.isprintable():
            raise SpaceError(f"{path}: knobs.{name}.choices has text that cannot be printed, {choice!r}; correct it")
    (choice, times), *_ = Counter(choices).most_common(1)
    if times > 1:
        raise SpaceError(f"{path}: knobs.{name}.choices has {choice!r} twice, got {some_of(choices)}")
    default = table.get("default", choices[0])
    if not contains(choices, default):
        raise SpaceError(f"{path}: knobs.{name}.default = {default!r} is not one of its choices {some_of(choices)}")
    measured_only = table.get("measured_only", False)
    if not isinstance(measured_only, bool):
        raise SpaceError(f"{path}: knobs.{name}.measured_only must be true or false, got {measured_only!r}")
    return Knob(choices=tuple(choices), default=default, about=str(table.get("about", "")), measured_only=measured_only)


def _constraint(path: Path, index: int, table: Any, known: set[str], words: set[str]) -> Constraint:
    where = f"{path}: constraints[{index}]"
    if not isinstance(table, dict) or set(table) - {"exploring"} != {"require", "because"}:
        raise SpaceError(f"{where} must have the keys 'require' and 'because', and may have 'exploring', got {table!r}")
    if not isinstance(table.get("exploring", False), bool):
        raise SpaceError(f"{where}.exploring must be true or false, got {table['exploring']!r}")
    if not isinstance(table["because"], str):
        raise SpaceError(f"{where}.because must be text, got {table['because']!r}")
    text = table["require"]
    try:
        names = names_read(text, known, words)
    except SpaceError as error:
        raise SpaceError(f"{where}.require = {str(text)[:80]!r} {error}") from error
    return Constraint(require=text, because=table["because"], exploring=table.get("exploring", False), names=names)
