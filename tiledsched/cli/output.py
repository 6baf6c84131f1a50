"""How text is printed: results on standard output, as wide as the terminal is; progress on standard error."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from tiledsched.core import errors, files


def width() -> int:
    """Columns that a line may take: those of COLUMNS, else of the terminal, and off a terminal as many as a line has."""
    return shutil.get_terminal_size((sys.maxsize, 0)).columns


class OutputError(errors.TiledschedError):
    """Standard output cannot be written to."""


class Results:
    """Standard output. What stands in data and a terminal would obey (see :func:`printable`) is spelt out.

    Raises:
        OutputError: standard output is closed, or cannot be written to.
    """

    def __init__(self, stream: TextIO | None) -> None:
        if stream is None:
            raise OutputError("standard output is closed; send it to /dev/null if it is not wanted")
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text, printable."""
        with _writable():
            return self._stream.write(files.printable(text))

    def flush(self) -> None:
        """Write what is buffered."""
        with _writable():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _writable() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # whoever read it has gone, which is no fault
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise OutputError(f"cannot write to standard output: {why}; send it somewhere else") from error


def note(text: str) -> None:
    """Print one line of progress on standard error. Where that is full or closed, nobody is told."""
    if sys.stderr is None:  # to `print`, None is standard output
        return
    try:
        print(files.printable(text), file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        return


def print_wrapped(text: str, indent: str = "", *, hanging: str | None = None) -> None:
    """Print one paragraph. Words are never cut, so that no part of a schedule is lost.

    Args:
        text: the paragraph.
        indent: what its first line begins with.
        hanging: what the others begin with; by default two columns more than the first, if that is indented at all.
    """
    if hanging is None:
        hanging = f"{indent}  " if indent else ""
    wrapper = textwrap.TextWrapper(width(), initial_indent=indent, subsequent_indent=hanging)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    print(wrapper.fill(text))


def print_explained(text: str) -> None:
    """Print explanations. On a terminal each line is wrapped below its own text, right of its title."""
    if not sys.stdout.isatty():
        print(text)
        return
    for line in text.splitlines():
        print_wrapped(line, hanging=" " * 14)


def print_lines(*lines: str) -> None:
    """Print indented paragraphs; those that are empty are left out."""
    for line in filter(None, lines):
        print_wrapped(line, "  ")


def table_lines(columns: Sequence[str], rows: Iterable[Iterable[Any]], right: Collection[str] = ()) -> list[str]:
    """The lines of a table, its head first.

    Args:
        columns: their names.
        rows: the values; None is an empty cell.
        right: the columns whose values are aligned to the right.
    """
    lines = [columns, *(["" if value is None else one_line(str(value)) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [str.rjust if name in right else str.ljust for name in columns]
    return [
        "  ".join(align(text, size) for align, text, size in zip(aligned, line, widths, strict=True)).rstrip()
        for line in lines
    ]


def one_line(text: str) -> str:
    """Text as a cell of a table, in which line breaks and tabs are spelt out, too."""
    return files.printable(text).replace("\n", "\\n").replace("\t", "\\t")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Collection[str] = ()) -> None:
    """Print a table (see `table_lines`), or where that is wider than the terminal, each row as a block of its own."""
    lines = table_lines(columns, rows, right)
    if max(map(len, lines)) <= width():
        print(*lines, sep="\n")
        return
    longest = max(map(len, columns))
    for row in rows:
        for name, value in zip(columns, row, strict=True):
            print_wrapped(f"{name.ljust(longest)}  {'' if value is None else one_line(str(value))}")
        print()


def print_next(steps: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print what to do next: a purpose, and below it the command, on a line of its own so that it can be copied."""
    print("\nNext:")
    for purpose, words in steps:
        print_wrapped(f"{purpose}:", "  ")
        print(f"    {shlex.join([program(), *words])}")


def program() -> str:
    """How this program was called: by its name where the shell finds it, else by its path."""
    called = sys.argv[0]
    if Path(called).name != "tiledsched":
        return "tiledsched"
    found = shutil.which("tiledsched")
    return "tiledsched" if found and Path(found).samefile(called) else called
