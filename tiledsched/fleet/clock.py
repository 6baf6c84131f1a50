"""The clock of a fleet: everything that waits or looks at the time takes one, so that tests move time instead of sleeping.

A database that is away for a while is waited for by it, with a bound; what the database refuses is not tried again.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

import sqlalchemy as sa

from tiledsched.core import errors, files
from tiledsched.core.config import log

T = TypeVar("T")
RETRY_S = 600.0
"""How long a database may be away before a worker gives up."""
FIRST_S, LONGEST_S = 0.2, 10.0
"""Pauses between tries: the first, and what they double up to. A thousand workers must not come back all at once: each takes a
random part of its pause."""


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


def is_away(error: BaseException) -> bool:
    """Whether the database could not be reached, or was in no state to answer: another try may find it well."""
    cause = error.__cause__
    return isinstance(error, errors.DatabaseError) and isinstance(
        cause, (sa.exc.OperationalError, sa.exc.InterfaceError)
    )


def is_full(error: BaseException | None) -> bool:
    """Whether a disk of this host had no room."""
    return files.is_full(error) or any(
        isinstance(each, errors.NoRoomError)
        or (isinstance(each, sqlite3.OperationalError) and "disk is full" in str(each))
        for each in files.causes(error)
    )


def retry_while_unavailable(
    ask: Callable[[], T], *, retry_s: float = RETRY_S, stop: threading.Event | None = None, clock: Clock = CLOCK
) -> T:
    """What `ask` returns; again and again while the database is away.

    Args:
        ask: one or more whole transactions that may be made again.
        retry_s: how long to go on.
        stop: ends the waiting early where it is set.
        clock: by which it is waited.

    Raises:
        DatabaseError: it was away all that time, or refused.
    """
    gives_up, pause_s, announced = clock.monotonic() + retry_s, FIRST_S, False
    while True:
        try:
            return ask()
        except errors.DatabaseError as error:
            if not is_away(error) or clock.monotonic() >= gives_up or (stop is not None and stop.is_set()):
                raise
            if not announced:
                log.warning("%s; trying again for %.0f s", error, retry_s)
                announced = True
        wait_s = random.uniform(0.5, 1.0) * min(pause_s, max(0.0, gives_up - clock.monotonic()))
        clock.wait(wait_s, stop)
        pause_s = min(2 * pause_s, LONGEST_S)
