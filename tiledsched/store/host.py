"""Which host and process this is, and whether another process of this host still lives."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path
from typing import Any

ENDED = ("Z", "X")
"""States of a process that ended, and of which its parent has not heard: in a container there may be none that listens."""


def facts() -> dict[str, Any]:
    """Name, process and platform, as stored with a run."""
    return {
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": _started(os.getpid()),
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def is_alive(pid: int, started: int | None) -> bool:
    """Whether process `pid` of this host runs and, where that can be told, is the one that began at `started`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it lives and belongs to somebody else
    state, began = _stat(pid)
    return state not in ENDED and (started is None or began in (None, started))


def own_word() -> str:
    """This process, for the name of a file: in a container that is started again, its successor may have the same number."""
    return f"{os.getpid()}.{_started(os.getpid()) or ''}"


def lives(word: str) -> bool:
    """Whether the process of this host that called itself so still runs."""
    pid, _, started = word.partition(".")
    return pid.isdigit() and is_alive(int(pid), int(started) if started.isdigit() else None)


def _started(pid: int) -> int | None:
    """Start of the process in clock ticks since boot, which tells it from a later one of the same number (Linux)."""
    return _stat(pid)[1]


def _stat(pid: int) -> tuple[str, int | None]:
    """State and start of a process; nothing where that cannot be told."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", None
    fields = stat.rpartition(")")[2].split()  # from field 3; the name before it may hold spaces
    return fields[0], int(fields[19])
