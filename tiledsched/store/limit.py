"""When queries end: after a time, and when a signal comes. SQLAlchemy is not imported."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

READ_TIMEOUT_S = 5
"""How long a reader waits for a file's lock, how long anybody waits for a server, and how long the queries of a kernel's call may
take, in seconds.
"""
STEPS_BETWEEN_LOOKS = 100_000
"""Instructions of SQLite, some milliseconds of them, after which a query looks whether it should end."""


class Limit:
    """Ends queries of SQLite that run for longer than a time, or meanwhile a signal comes: while a query runs, Python does not
    heed signals.

    Args:
        seconds: the longest time of a transaction; None for any time.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds, self._ends, self._raised = seconds, math.inf, list[BaseException]()

    def begin(self) -> None:
        """A transaction begins."""
        self._ends = math.inf if self.seconds is None else time.monotonic() + self.seconds

    def _looks(self) -> Iterator[bool]:
        """Whether the query must end, each time that SQLite asks. Handlers of signals run as soon as Python code runs again,
        which in a generator is where it stopped, inside the `try`; SQLite would lose what they raise.
        """
        while True:
            try:
                yield bool(self._raised) or time.monotonic() > self._ends
            except GeneratorExit:
                return
            except BaseException as raised:
                self._raised.append(raised)

    def watch(self, connection: sqlite3.Connection) -> None:
        """Ask for all queries of a connection."""
        connection.set_progress_handler(self._looks().__next__, STEPS_BETWEEN_LOOKS)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise what a signal raised in place of the error of the query that it ended."""
        try:
            yield
        except Exception:
            if self._raised:
                raise self._raised.pop() from None
            raise
