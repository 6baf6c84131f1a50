"""What ships: its tables and landscapes by their manifest, which holds the hash of each file and what a landscape is of.

After a shipped file was changed on purpose, ``python -m tiledsched.store.shipped`` writes the manifest anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tiledsched.core import data_files
from tiledsched.core.errors import DatabaseError
from tiledsched.core.files import write_whole
from tiledsched.core.problem import Problem
from tiledsched.core.registry import problem_from_json

SCHEMA_VERSION = 1
"""Of the manifest."""
LISTED = ("tables", "landscapes", "model")
"""Folders whose files are listed."""
REFUSED = (
    "{name} is not the file that shipped ({why}): install tiledsched again, or, where it was changed on purpose, run: "
    "python -m tiledsched.store.shipped"
)


@dataclass(frozen=True, kw_only=True)
class ShippedLandscape:
    """What a recorded landscape is of, known without reading it."""

    path: Path
    """Where it lies."""
    problem: Problem
    """What was recorded."""
    arch: str
    """Of the device that it was recorded on."""
    regime: str
    """burst or sustained."""


def manifest_path() -> Path:
    """Where the manifest lies."""
    return data_files.tuning_db() / "manifest.json"


@lru_cache(maxsize=4)
def _files(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """By name within the folder of shipped data.

    Raises:
        DatabaseError: the manifest is missing or damaged.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        files: Mapping[str, Mapping[str, Any]] = data["files"]
        if data["schema_version"] != SCHEMA_VERSION or not all(len(each["sha256"]) == 64 for each in files.values()):
            raise ValueError("another version")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise DatabaseError(REFUSED.format(name=path.name, why=why)) from error
    return files


def check_shipped(path: Path, data: bytes) -> None:
    """Whether a file of the shipped data holds what it held when it was shipped; of other files nothing is asked.

    Raises:
        DatabaseError: it does not, or the manifest does not list it.
    """
    folder = data_files.tuning_db()
    try:
        name = path.resolve().relative_to(folder.resolve()).as_posix()
    except ValueError:
        return
    if name.partition("/")[0] not in LISTED:
        return
    listed = _files(manifest_path()).get(name)
    if listed is None:
        raise DatabaseError(REFUSED.format(name=name, why="the manifest does not list it"))
    if hashlib.sha256(data).hexdigest() != listed["sha256"]:
        raise DatabaseError(REFUSED.format(name=name, why="its hash is another"))


def shipped_landscapes(kernel: str, arch: str) -> list[ShippedLandscape]:
    """Those of a kernel on an arch, in the order of their names."""
    return [
        ShippedLandscape(
            path=data_files.tuning_db() / name,
            problem=problem_from_json(listed["problem"]),
            arch=listed["arch"],
            regime=listed["regime"],
        )
        for name, listed in sorted(_files(manifest_path()).items())
        if "problem" in listed and listed["problem"]["kernel"] == kernel and listed["arch"] == arch
    ]


def write_manifest() -> int:
    """List what lies in the folder of shipped data; how many files."""
    from tiledsched.store.exchange import parse_table, text_of

    folder = data_files.tuning_db()
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(path for part in LISTED for path in (folder / part).rglob("*.json*")):
        data = path.read_bytes()
        name = path.relative_to(folder).as_posix()
        files[name] = {"sha256": hashlib.sha256(data).hexdigest()}
        if name.startswith("landscapes/"):
            taken = parse_table(text_of(path, data), path.name).measurements[0].measurement
            files[name] |= {"arch": taken.device.arch, "regime": taken.regime, "problem": taken.problem.to_json()}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(listed)}" for name, listed in sorted(files.items()))
    text = f'{{\n  "schema_version": {SCHEMA_VERSION},\n  "files": {{\n{lines}\n  }}\n}}\n'
    write_whole(manifest_path(), text)
    _files.cache_clear()
    return len(files)


if __name__ == "__main__":
    print(f"{write_manifest()} files")
