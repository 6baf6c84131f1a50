"""The clock of a fleet: everything that waits or looks at the time takes one, so that tests move time instead of sleeping."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime


def wait(seconds: float, stop: threading.Event | None = None) -> bool:
    """Wait, or until `stop` is set; whether it is."""
    return (stop or threading.Event()).wait(seconds)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What tells the time, and how it is waited for; by default this host's clock."""

    now: Callable[[], datetime] | None = None
    """The date and time of leases; None for the database's."""
    monotonic: Callable[[], float] = time.monotonic
    """Seconds since any moment, for deadlines within one process."""
    wait: Callable[[float, threading.Event | None], bool] = wait
    """Waits for so many seconds, or until the event is set; whether it is set."""


CLOCK = Clock()
"""The clock of this host."""
