"""Files of the cache folder that tell whether they are whole: a checksum, a line of JSON, and contents."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tiledsched.core.config import log, warn_once
from tiledsched.core.files import make_private, others_may_change, read_bounded, write_whole

Facts = TypeVar("Facts")
MAGIC = b"TILESEALED1 "
"""Begins each file. The checksum of what follows, SHA-256 in hexadecimal digits, and a line break come next."""
START = len(MAGIC) + 64 + 1


def write_sealed(path: Path, facts: Any, contents: bytes) -> OSError | None:
    """Write a file, whole or not at all. Returns why nothing was written, or None: a cache may be lost.

    Args:
        path: the file. Its name goes into it, so that no file takes the place of another one.
        facts: what its contents are, as a dict of JSON values or a `msgspec.Struct`.
        contents: any bytes.
    """
    rest = json.dumps({**msgspec.to_builtins(facts), "name": path.name}).encode() + b"\n" + contents
    try:
        make_private(path.parent)
        write_whole(path, _head(rest) + rest, private=True)
    except OSError as error:
        return error
    return None


def read_sealed(path: Path, kind: type[Facts]) -> tuple[Facts, bytes] | None:
    """The facts and the contents of a file. None where there is no file, where another user may have written it or put it there,
    and where it is damaged in any way: then it is removed.

    Args:
        path: the file.
        kind: the type of its facts. A file with facts of another type is damaged, too.
    """
    try:
        if why := others_may_change(path):
            warn_once(
                f"{path.parent} is not used: {why}, and programs in it would run as they are; take that right away (chmod go-w, "
                "chown), or name another folder with TILEDSCHED_CACHE"
            )
            return None
        data = read_bounded(path)
    except (OSError, ValueError):
        return None
    line, _, contents = data[START:].partition(b"\n")
    if not data.startswith(MAGIC):
        why = "it is no file of this cache"
    elif data[:START] != _head(data[START:]):
        why = "its checksum is wrong"
    else:
        try:
            facts = json.loads(line)
            if facts["name"] == path.name:
                return msgspec.convert(facts, kind), contents
            why = f"it was written as {facts['name']}"
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            why = f"what it says of its contents cannot be read: {error!r}"
    discard(path, why)
    return None


def is_usable(path: Path) -> bool:
    """Whether there is a file that no other user may have written."""
    try:
        return path.is_file() and not others_may_change(path)
    except OSError:
        return False


def discard(path: Path, why: str) -> None:
    """Remove a file that cannot be used, and say why."""
    log.warning("%s is damaged (%s), and is made anew", path, why)
    with contextlib.suppress(OSError):
        path.unlink()


def _head(rest: bytes) -> bytes:
    return MAGIC + hashlib.sha256(rest).hexdigest().encode() + b"\n"
