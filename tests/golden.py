"""What tests of the command line share. `tests/data/golden/NAME` holds what a command prints, whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click

FOLDER = Path(__file__).parent / "data" / "golden"


def check_golden(name: str, printed: str) -> None:
    """Check that a text is the one in the file of that name.

    With WRITE_GOLDEN=1 the file is written anew; read its diff before you commit it.
    """
    path = FOLDER / name
    if os.environ.get("WRITE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text(encoding="utf-8"), "if that is what should be printed: WRITE_GOLDEN=1"


def lacking(text: str, *words: str) -> list[str]:
    """The words that a text does not have."""
    return [each for each in words if each not in text]


def leaf_commands(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    """Each command by its whole name; those of a group have the group's name before them."""
    for name, each in group.commands.items():
        if isinstance(each, click.Group):
            yield from leaf_commands(each, f"{above}{name} ")
        else:
            yield f"{above}{name}", each
