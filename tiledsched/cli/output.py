"""How text is printed: results on standard output, as wide as the terminal is; progress on standard error."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any


def width() -> int:
    """Columns that a line may take: those of COLUMNS, else of the terminal, and off a terminal as many as a line has."""
    return shutil.get_terminal_size((sys.maxsize, 0)).columns


def note(text: str) -> None:
    """Print one line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def plural(count: int, one: str, many: str = "") -> str:
    """A count and what is counted, e.g. `1 problem` or `1,200 problems`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


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


def table_lines(columns: Sequence[str], rows: Iterable[Iterable[Any]], right: Collection[str] = ()) -> list[str]:
    """The lines of a table, its head first.

    Args:
        columns: their names.
        rows: the values; None is an empty cell.
        right: the columns whose values are aligned to the right.
    """
    lines = [columns, *(["" if value is None else str(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [str.rjust if name in right else str.ljust for name in columns]
    return [
        "  ".join(align(text, size) for align, text, size in zip(aligned, line, widths, strict=True)).rstrip()
        for line in lines
    ]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], right: Collection[str] = ()) -> None:
    """Print a table (see `table_lines`), or where that is wider than the terminal, each row as a block of its own."""
    lines = table_lines(columns, rows, right)
    if max(map(len, lines)) <= width():
        print(*lines, sep="\n")
        return
    longest = max(map(len, columns))
    for row in rows:
        for name, value in zip(columns, row, strict=True):
            print_wrapped(f"{name.ljust(longest)}  {'' if value is None else value}")
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
