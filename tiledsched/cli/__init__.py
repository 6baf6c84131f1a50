"""The command line: parse, call, print. No logic lives here."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tiledsched.core.errors import TiledschedError

INTERRUPTED = 130
COLLECT_EVERY = 50_000
"""Objects made between two searches for garbage: importing and reading make many and drop few, and Python's 700 take a quarter
of a short command's time.
"""


class _Stderr(logging.StreamHandler):
    """Writes to what stderr is by then: above the bars of a tune, where there are any, which would else wipe it out."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; none of a library (SQLAlchemy's pool) that met the command's end while it tidied up."""
        if record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt):
            return
        self.stream = sys.stderr
        super().emit(record)


class Ended(KeyboardInterrupt):
    """The system, or a terminal that is gone, ends this command: it stops as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _told_to_end() -> Iterator[None]:
    """Within the block TERM and HUP raise Ended, so that runs are closed, processes ended and folders removed."""

    before: dict[signal.Signals, Any] = {}

    def end(number: int, frame: object) -> None:
        for each in before:  # once: a second one would cut short what the first has begun
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup has HUP ignored
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 no valid schedule or a regression, 2 usage, 130 interrupted (143 and 129
    where TERM or HUP did).
    """
    gc.set_threshold(COLLECT_EVERY)
    from tiledsched.cli.parser import parse

    try:
        options = parse(sys.argv[1:] if arguments is None else list(arguments))
        logging.basicConfig(
            handlers=[_Stderr()],
            format="%(levelname)s %(name)s: %(message)s",
            level=logging.DEBUG if options.verbose else logging.WARNING,
        )
        with _told_to_end():
            return int(options.run(options))
    except TiledschedError as error:
        print(f"tiledsched: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        with suppress(OSError):  # a terminal that is gone
            print("tiledsched: interrupted; everything finished so far is stored, run again to go on", file=sys.stderr)
        return 128 + interrupt.number if isinstance(interrupt, Ended) else INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has gone
        return 0


if __name__ == "__main__":
    sys.exit(main())
