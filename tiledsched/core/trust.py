"""Which project files may say where things go.

A `tiledsched.toml` that lies in the working directory may come from anybody. It names what is served and searched, but no
server, and no file or folder outside its own folder, until its user has once said `tiledsched trust`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tiledsched.core.errors import ConfigError
from tiledsched.core.files import read_bounded, user_folder, write_whole

PLACES = ("db", "site", "capture")
"""Settings that say where things are read and written."""


def sqlite_path(place: str) -> str:
    """The path in what follows `sqlite://` in a URL; every part of the program takes it from here."""
    return unquote(place.partition("?")[0].removeprefix("/"))  # sqlite:///PATH


def outside(name: str, value: Any, path: Path) -> str:
    """What a setting of the project file at `path` names that is not inside the file's folder: a server or a place; empty
    where it names nothing of the kind.
    """
    if name not in PLACES:
        return ""
    scheme, found, place = str(value).rpartition("://")
    if found and scheme != "sqlite":
        return "a server"
    place = sqlite_path(place) if found else place
    folder = Path(os.path.realpath(path.parent))  # where the file is found, even if it is a link: places start there
    inside = place == ":memory:" or Path(os.path.realpath(folder / os.path.expanduser(place))).is_relative_to(folder)
    return "" if inside else "a place outside its folder"


def is_trusted(path: Path) -> bool:
    """Whether this user trusts the file at `path` with the contents that it has."""
    return _line(path) in _lines()


def trust(path: Path, *, revoke: bool = False) -> Path:
    """Trust the file at `path` as it is, until it changes, or do so no longer; returns the list of what is trusted.

    Raises:
        ConfigError: the file cannot be read, or the list cannot be written.
    """
    try:
        name = _name(path)
        kept = [line for line in _lines() if line.partition("  ")[2] != name]
        listed = _list()
        listed.parent.mkdir(parents=True, exist_ok=True)
        lines = [*kept, *([] if revoke else [_line(path)])]
        write_whole(listed, "".join(f"{line}\n" for line in lines), private=True)
    except OSError as error:
        raise ConfigError(f"cannot trust {path}: {error.strerror or error}; name a file that can be read") from error
    return listed


def _list() -> Path:
    return user_folder("config") / "trusted"


def _lines() -> list[str]:
    try:
        return read_bounded(_list()).decode(errors="replace").splitlines()
    except OSError:
        return []


def _line(path: Path) -> str:
    """A file's line in the list, as sha256sum writes it."""
    return f"{hashlib.sha256(read_bounded(path)).hexdigest()}  {_name(path)}"


def _name(path: Path) -> str:
    """A file's name in the list: where it is found, as places are named from there, on one line."""
    return str(Path(os.path.realpath(path.parent)) / path.name).replace("\\", "\\\\").replace("\n", "\\n")
