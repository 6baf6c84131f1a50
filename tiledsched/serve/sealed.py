"""Files of the cache folder that tell whether they are whole: a checksum, a line of JSON, and contents."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from tiledsched.core.files import read_bounded, write_whole

log = logging.getLogger("tiledsched")
MAGIC = b"TILESEALED1 "
"""Begins each file. The checksum of what follows, SHA-256 in hexadecimal digits, and a line break come next."""
START = len(MAGIC) + 64 + 1


def write_sealed(path: Path, told: dict[str, Any], contents: bytes) -> None:
    """Write a file, whole or not at all. Nothing is written where the folder cannot be written to: a cache may be lost.

    Args:
        path: the file. Its name goes into it, so that no file takes the place of another one.
        told: what its contents are, as JSON values.
        contents: any bytes.
    """
    rest = json.dumps({**told, "name": path.name}).encode() + b"\n" + contents
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, MAGIC + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)


def read_sealed(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """What a file tells of its contents, and these. None where there is no file, or it is damaged: then it is removed."""
    try:
        data = read_bounded(path)
    except OSError:
        return None
    rest = data[START:]
    line, _, contents = rest.partition(b"\n")
    if data[:START] == MAGIC + hashlib.sha256(rest).hexdigest().encode() + b"\n":
        told: dict[str, Any] = json.loads(line)
        if told["name"] == path.name:
            return told, contents
    discard(path, "its checksum is wrong")
    return None


def discard(path: Path, why: str) -> None:
    """Remove a file that cannot be used, and say why."""
    log.warning("%s is damaged (%s), and is made anew", path, why)
    with contextlib.suppress(OSError):
        path.unlink()
