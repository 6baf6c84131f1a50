"""The page `docs/commands.md`: its head is written by hand, and a section for each command is made from the command's help.

python -m docs.studies.commands_page      # write the sections anew
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from tiledsched.cli.app import EVERYWHERE, CommandGroup
from tiledsched.cli.commands import root

PAGE = Path(__file__).parents[1] / "commands.md"
MADE = "<!-- what follows is made from --help by: python -m docs.studies.commands_page -->\n"
"""The line between the head and the sections."""
MORE = {
    "tune": "[how a tune measures](measuring.md), [tune my kernel](tutorials/tune-my-kernel.md)",
    "check": "[check a kernel](check.md)",
    "record": "[landscapes](database.md#landscapes)",
    "refresh": "[with another compiler](choosing.md#with-another-compiler)",
    "show": "[layers](database.md#layers), [landscapes](database.md#landscapes)",
    "explain": "[how a schedule is chosen](choosing.md)",
    "compare": "[a check for pull requests](gate.md)",
    "report": "[read the report](report.md)",
    "bench": "[suites, methods and columns](bench.md)",
    "study ablation": "[columns of its file](bench.md#the-ablation)",
    "warmup": "[first calls](serving.md#first-calls)",
    "fleet run": "[many GPUs](fleet.md)",
    "db export": "[tables as files](database.md#tables-as-files)",
    "db query": "[what a query may do](database.md#ask-it-in-sql)",
}
"""Pages to go on with, by command."""
Row = tuple[str, str]
"""An option as its help shows it, and what it does."""


def page() -> str:
    """The whole page: the head that stands there, and sections as the help is now."""
    return PAGE.read_text(encoding="utf-8").partition(MADE)[0] + MADE + sections()


def sections() -> str:
    """A section for each command, under the headings of the program's help, and before them the options of several commands."""
    leaves = dict(_leaves(root))
    rows = {name: _rows(command) for name, command in leaves.items()}
    counts = Counter(row for each in rows.values() for row in each)
    common = {_flag(row): row for row, count in reversed(counts.most_common()) if count > 1}
    several = [row for row in counts if common.get(_flag(row)) == row]
    parts = ["\n## Options of several commands\n", _table(several)]
    for heading, commands in root.sections.items():
        parts.append(f"## {heading}\n")
        for command in commands:
            for name, leaf in _leaves_of(command):
                parts.append(_section(name, leaf, [row for row in rows[name] if row not in several]))
                shared = [f"`{_flag(row)}`" for row in rows[name] if row in several]
                also = [f"[Also](#options-of-several-commands) {', '.join(shared)}."] if shared else []
                more = [f"More: {MORE[name]}."] if name in MORE else []
                parts += [" ".join([*also, *more]) + "\n"] if also or more else []
    return "\n".join(parts)


def _leaves(group: CommandGroup, above: str = "") -> Iterator[tuple[str, click.Command]]:
    for each in group.commands.values():
        yield from _leaves_of(each, above)


def _leaves_of(command: click.Command, above: str = "") -> Iterator[tuple[str, click.Command]]:
    """The command by its whole name, or those of the group that it is."""
    name = f"{above}{command.name}"
    if isinstance(command, CommandGroup):
        yield from _leaves(command, f"{name} ")
    else:
        yield name, command


def _rows(command: click.Command) -> list[Row]:
    """The options that a command has for itself; those that name its kernel and its problems stand in the page's head."""
    context = click.Context(command, help_option_names=["-h", "--help"])
    records = []
    for param in command.params:
        record = param.get_help_record(context)
        if record and getattr(param, "heading", "") not in (EVERYWHERE, "Problems") and param.name != "kernel":
            records.append(record)
    return records


def _flag(row: Row) -> str:
    """The name of a row's option."""
    return re.split(r"[ ,]", row[0])[0]


def _section(name: str, command: click.Command, rows: list[Row]) -> str:
    """The heading, the examples, what the command does, and its options."""
    text, _, examples = inspect.cleandoc(command.help or "").partition("\b\n")
    paragraphs = [_marked(" ".join(part.split())) for part in text.strip().split("\n\n")]
    parts = [
        f"### `tiledsched {name}`",
        f"```\n{examples.strip()}\n```",
        *paragraphs,
        *([_table(rows)] if rows else []),
    ]
    return "\n\n".join(parts).rstrip() + "\n"


def _table(rows: Iterable[Row]) -> str:
    lines = [f"|`{_cell(words)}`|{_marked(_cell(text))}|" for words, text in rows]
    return "\n".join(["|option|what it does|", "|---|---|", *lines, ""])


def _cell(text: str) -> str:
    """Text without the limits of numbers, and with choices in braces: Markdowns do not agree on bars within code."""
    choices = re.sub(r"\[([^][]*\|[^][]*)\]", lambda found: f"{{{found[1].replace('|', ', ')}}}", text)
    return re.sub(r"  \[.*\]$", "", choices)


def _marked(text: str) -> str:
    """Text with its flags, variables and files as code."""
    return re.sub(r"(?<![`\w/-])(--?[a-z][\w-]*|TILEDSCHED_[A-Z_]+(?:=\S*\w)?|\w+\.(?:py|csv|toml)\b)", r"`\1`", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
