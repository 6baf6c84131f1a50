"""How numbers, counts and code stand in text: the same words in every room."""

from __future__ import annotations

from collections.abc import Iterable

NOTHING = "-"
"""What stands where there is no value."""


def plural(count: int, one: str, many: str = "") -> str:
    """A count and what is counted, e.g. `1 problem` or `1,200 problems`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def joined(words: Iterable[str]) -> str:
    """Words in a sentence: `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def code(text: str) -> str:
    """Text as code in Markdown; a dash where it is empty."""
    return "`" + text.replace("`", "'") + "`" if text else NOTHING


def figure(number: float | None) -> str:
    """A number with four digits: `0.5`, `12.35` or `1,235`; a dash for None."""
    if number is None:
        return NOTHING
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def ratio(value: float | None) -> str:
    """How many times as much: `1.25x`; a dash for None."""
    return NOTHING if value is None else f"{value:.2f}x"


def microseconds(us: float) -> str:
    """A time in microseconds without its unit: with two places below 100, else with one."""
    return f"{us:,.1f}" if us >= 100 else f"{us:.2f}"


def duration(us: float) -> str:
    """A time in seconds, milliseconds or microseconds, with three digits and its unit."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us:.3g} us"
