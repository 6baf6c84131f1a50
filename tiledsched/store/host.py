"""Names this host and this process, and tells whether another process of this host still runs."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path
from typing import Any

ENDED = ("Z", "X")
"""States of a process that has ended, and whose parent has not asked for its exit status. In a container there may be no
parent that asks."""


def facts() -> dict[str, Any]:
    """Host name, process and platform, as a run is stored with them."""
    return {
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": _stat(os.getpid())[1],
        "platform": platform.platform(),
        "python": platform.python_version(),
    }


def is_alive(pid: int, started: int | None) -> bool:
    """Whether process `pid` of this host runs and, where the system tells, is the process that began at `started`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it lives and belongs to somebody else
    state, began = _stat(pid)
    return state not in ENDED and (started is None or began in (None, started))


def own_word() -> str:
    """A word that names this process in file names. Its pid alone would not do: a restarted container gives it out again."""
    return f"{os.getpid()}.{_stat(os.getpid())[1] or ''}"


def lives(word: str) -> bool:
    """Whether the process of this host that :func:`own_word` named so still runs."""
    pid, _, started = word.partition(".")
    return pid.isdigit() and is_alive(int(pid), int(started) if started.isdigit() else None)


def _stat(pid: int) -> tuple[str, int | None]:
    """State of a process, and its start in clock ticks since boot (Linux), by which two processes of the same pid differ.

    Empty and None where the system does not tell.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", None
    fields = stat.rpartition(")")[2].split()  # from field 3; the name before it may hold spaces
    return fields[0], int(fields[19])
