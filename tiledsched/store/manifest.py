"""The manifest of the shipped data: the hash of every table, landscape and model, and the problem of every landscape.

A file that was changed by mistake is refused. After one was changed on purpose, ``python -m tiledsched.store.shipped``
writes the manifest anew.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from tiledsched.core import data_files
from tiledsched.core.config import log
from tiledsched.core.errors import DatabaseError
from tiledsched.core.files import read_bounded
from tiledsched.core.problem import Problem
from tiledsched.core.registry import problem_from_json

SCHEMA_VERSION = 1
"""Version of the manifest's format."""
LISTED = ("tables", "landscapes", "model")
"""Folders of the shipped data whose files are listed."""
REFUSED = (
    "{name} is not the file that shipped ({why}): install tiledsched again, or, where it was changed on purpose, run: "
    "python -m tiledsched.store.shipped"
)


class _Hashed(TypedDict):
    """What the manifest says of every file."""

    sha256: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


class ListedFile(_Hashed, total=False):
    """What it says of a table: its size, and the hash of its serving copy; and of a landscape: what was recorded."""

    bytes: int
    serving: str
    arch: str
    regime: str
    problem: dict[str, Any]


class _Manifest(msgspec.Struct):
    schema_version: Annotated[int, msgspec.Meta(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    files: dict[str, ListedFile]


@dataclass(frozen=True, kw_only=True)
class ShippedLandscape:
    """A landscape that ships, as the manifest describes it."""

    path: Path
    """The landscape's file."""
    problem: Problem
    """The problem that was recorded."""
    arch: str
    """Arch of the device that it was recorded on."""
    regime: str
    """burst or sustained."""


def manifest_path() -> Path:
    """The manifest's file."""
    return data_files.tuning_db() / "manifest.json"


@lru_cache(maxsize=4)
def listed_files(path: Path) -> Mapping[str, ListedFile]:
    """What a manifest says of each file, by the file's name within the folder of shipped data.

    Raises:
        DatabaseError: the manifest is missing or damaged.
    """
    try:
        return msgspec.json.decode(read_bounded(path), type=_Manifest).files
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise DatabaseError(REFUSED.format(name=path.name, why=why)) from error


def sha256(data: bytes | mmap.mmap) -> str:
    """The SHA-256 hash of some bytes as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def model_file(kernel: str, name: str) -> Any:
    """The contents of a file in `tuning_db/model/KERNEL`; None where there is no such file, or it is damaged, which a warning
    says."""
    path = data_files.tuning_db() / "model" / kernel / name
    try:
        data = path.read_bytes()
        check_shipped(path, data)
    except FileNotFoundError:
        return None
    except (OSError, DatabaseError) as error:
        log.warning("%s; what %s says is left out", error, path.name)
        return None
    return json.loads(data)


@lru_cache(maxsize=16)
def published_figures(kernel: str) -> Mapping[str, Any]:
    """What `tuning_db/model/KERNEL/published.json` says of each GPU, by product name; nothing where there is no such file, or it
    is damaged."""
    found = model_file(kernel, "published.json")
    return found["devices"] if found else {}


def check_shipped(path: Path, data: bytes) -> None:
    """Refuse a file of the shipped data whose contents are not those that shipped. Files elsewhere are not checked.

    Raises:
        DatabaseError: the contents differ, or the manifest does not list the file.
    """
    try:
        name = path.resolve().relative_to(data_files.tuning_db().resolve()).as_posix()
    except ValueError:
        return
    if name.partition("/")[0] not in LISTED:
        return
    listed = listed_files(manifest_path()).get(name)
    if listed is None:
        raise DatabaseError(REFUSED.format(name=name, why="the manifest does not list it"))
    if sha256(data) != listed["sha256"]:
        raise DatabaseError(REFUSED.format(name=name, why="its hash is another"))


def shipped_landscapes(kernel: str | None = None, arch: str | None = None) -> list[ShippedLandscape]:
    """The shipped landscapes of a kernel on an arch, or of all, sorted by file name."""
    return [
        ShippedLandscape(
            path=data_files.tuning_db() / name,
            problem=problem_from_json(listed["problem"]),
            arch=listed.get("arch", ""),
            regime=listed.get("regime", ""),
        )
        for name, listed in sorted(listed_files(manifest_path()).items())
        if "problem" in listed and kernel in (None, listed["problem"]["kernel"]) and arch in (None, listed.get("arch"))
    ]
