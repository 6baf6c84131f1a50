"""Types of command-line flags, for the programs in this folder."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any


def positive(text: str) -> int:
    """One integer, 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def count(text: str) -> int:
    """One integer, 0 or more."""
    return 0 if text.strip() == "0" else positive(text)


def integers(text: str) -> list[int]:
    """Positive integers with commas between them."""
    return [positive(part.strip()) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Words with commas between them."""
    return [part.strip() for part in text.split(",")]


def words(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """What reads words out of `allowed`, with commas between them."""

    def read(text: str) -> list[str]:
        found = names(text)
        wrong = [each for each in found if each not in allowed]
        if wrong:
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(allowed)}")
        return found

    return read


Flag = tuple[tuple[str, ...], dict[str, Any]]
"""Names of a flag, and argparse's options of it."""


def flag(*names: str, **options: Any) -> Flag:
    """A flag or an argument; `options` are those of argparse."""
    return names, options


def parser_with(*flags: Flag, **options: Any) -> argparse.ArgumentParser:
    """A parser of these flags; `options` are those of argparse's parser."""
    parser = argparse.ArgumentParser(**options)
    for names, given in flags:
        parser.add_argument(*names, **given)
    return parser
