"""The command line: parse, call, print. No logic lives here."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

from tiledsched.core import errors, extras, files
from tiledsched.core.processes import give_cutile_folder

INTERRUPTED = 130
COMPLETE = "_TILEDSCHED_COMPLETE"
"""The variable with which a shell asks what may complete a line."""
COLLECT_EVERY = 50_000
"""Objects made between two garbage collections. A short command makes many objects and drops few; with Python's 700 it
spends a quarter of its time on collections.
"""


class _Stderr(logging.StreamHandler):
    """Logs to what `sys.stderr` is at that moment: while a tune draws its bars, that prints above them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, unless it reports that a library (SQLAlchemy's pool) was interrupted while it cleaned up."""
        if record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt):
            return
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """The line, printable: it may hold words of a database or a compiler."""
        return files.printable(super().format(record))


class Ended(KeyboardInterrupt):
    """A signal from the system, or from a terminal that was closed, ends this command. It stops as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _ended_by_signals(*, last: bool) -> Iterator[None]:
    """Within the block the signals INT, TERM and HUP raise Ended, so that runs are closed, processes ended and folders removed.
    With `last`, nothing is left to be done after it: a signal ends the process without a word.
    """

    first = itertools.count()

    def end(number: int, frame: object) -> None:
        if next(first) == 0:  # the next must not interrupt the cleaning up that the first one began
            raise Ended(number)

    ours = signal.SIG_DFL, signal.default_int_handler  # nohup ignores HUP
    in_main = threading.current_thread() is threading.main_thread()
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if in_main and signal.getsignal(n) in ours]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if last else handler)


def main(arguments: Sequence[str] | None = None, **fakes: Any) -> int:
    """Run one command.

    Args:
        arguments: the words after `tiledsched`; those of this process unless given.
        fakes: fields of the Invocation that a test replaces, e.g. `devices`.

    Returns:
        The exit code: 0 done, 1 no valid schedule or a regression, 2 usage or configuration, 130 interrupted (143 and 129
        where the signals TERM and HUP did).
    """
    try:
        with _ended_by_signals(last=arguments is None):
            try:
                return _answer(list(sys.argv[1:] if arguments is None else arguments), fakes)
            except KeyboardInterrupt as interrupt:
                with suppress(OSError, AttributeError):  # the terminal may be gone, and standard error closed
                    sys.stderr.write(
                        "tiledsched: interrupted; everything finished so far is stored, run again to go on\n"
                    )
                return 128 + interrupt.number if isinstance(interrupt, Ended) else INTERRUPTED
            except ImportError as error:
                if str(error.name).startswith(extras.NAME):
                    raise
                logging.getLogger(extras.NAME).info("where it was raised:", exc_info=error)
                sys.stderr.write(f"tiledsched: {extras.missing(error)}\n")
                return 2
    finally:
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except OSError:  # it is full; Python would end with a code of its own
            _drop(sys.stderr)


def _answer(words: list[str], fakes: dict[str, Any]) -> int:
    """Run one command, and say what went wrong; the exit code."""
    gc.set_threshold(COLLECT_EVERY)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # no command multiplies matrices large enough to gain from more
    give_cutile_folder()
    import click
    from click.shell_completion import shell_complete

    from tiledsched.cli.app import Invocation
    from tiledsched.cli.commands import root
    from tiledsched.cli.output import OutputError, Results, note

    logging.basicConfig(handlers=[_Stderr()], format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    try:
        if COMPLETE in os.environ:
            return shell_complete(root, {}, "tiledsched", COMPLETE, os.environ[COMPLETE])
        with redirect_stdout(Results(sys.stdout)):
            code = _run(root, words, Invocation(words, **fakes))
            sys.stdout.flush()
            return code
    except click.UsageError as error:
        where = f"; see {error.ctx.command_path} --help" if error.ctx else ""
        note(f"tiledsched: {_with_meant(error.format_message().rstrip('.'))}{where}".replace("?; see", "? see"))
        return 2
    except errors.TiledschedError as error:
        note(f"tiledsched: {error}")
        logging.getLogger("tiledsched").info("where it was raised:", exc_info=error)
        if isinstance(error, OutputError):
            _drop(sys.stdout)
        return error.exit_code
    except BrokenPipeError:
        _drop(sys.stdout)  # the reader (head, less) has gone
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        note(
            f"tiledsched: {where}{error.strerror or error}; see that it is there, that you may use it and that it has room"
        )
        return 2
    except MemoryError as error:
        note(
            f"tiledsched: memory does not suffice ({error or 'no more is free'}); name smaller sizes, or fewer at once"
        )
        return 2
    except ImportError:
        raise
    except Exception as error:
        if mistake := errors.mistake_of(error):
            note(f"tiledsched: {mistake}; correct it there")
            return 2
        raise


def _with_meant(message: str) -> str:
    """What click says of a value that is not one of some words, with the word that is near it."""
    found = re.search(r"'([^']*)' is not one of ('.*')", message)
    words = re.findall(r"'([^']*)'", found[2]) if found else ()
    return f"{message}{errors.did_you_mean(found[1], words)}" if found else message


def _run(root: Any, words: Sequence[str], called: Any) -> int:
    """Run what the words name; the exit code. `--help` and `--version` end early."""
    from click.exceptions import Exit

    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise errors.ConfigError("the folder that this was called in is gone; change to one that is there") from error
    try:
        with root.make_context("tiledsched", list(words), obj=called) as context:
            return int(root.invoke(context) or 0)
    except Exit as done:
        return done.exit_code


def _drop(stream: TextIO | None) -> None:
    """Send to nowhere what Python still has to write as it ends: it cannot be written."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    sys.exit(main())
