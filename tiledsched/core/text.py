"""How numbers, counts, code and problems stand in text: the same words in every room, and those that `--problem` takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tiledsched.core.config import INVARIANT
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule

NOTHING = "-"
"""What stands where there is no value."""


def plural(count: int, one: str, many: str = "") -> str:
    """A count and what is counted, e.g. `1 problem` or `1,200 problems`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def joined(words: Iterable[str]) -> str:
    """Words in a sentence: `a, b and c`; empty for none."""
    *first, last = [*words] or [""]
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


def short(schedule: Schedule) -> str:
    """A schedule as code, with short names of knobs."""
    return code(schedule.short())


def tile_text(tile: tuple[int, int] | None) -> str:
    """A tile as `rows x columns`, e.g. 64x128; a dash for no tile."""
    return f"{tile[0]}x{tile[1]}" if tile else NOTHING


def percent(fraction: float) -> str:
    """A share in a sentence: one place below 9.95%, none above."""
    return f"{fraction * 100:.{0 if fraction >= 0.0995 else 1}f}%"


def percent_cell(fraction: float | None) -> str:
    """A share in a table: one place, thousands with commas; a dash for none."""
    return NOTHING if fraction is None else f"{fraction * 100:,.1f}%"


def change(fraction: float) -> str:
    """A change with its sign, e.g. `+3.2%`."""
    return f"{fraction * 100:+.1f}%"


def longer(drop: float, than: str = "") -> str:
    """How much longer something takes, in words: `6.3% longer`, `2.1 times as long`, where wanted with what it is compared
    with.
    """
    if abs(drop) < 0.0005:
        words, link = "as long", "as"
    elif drop < 1:
        words, link = f"{percent(abs(drop))} {'longer' if drop > 0 else 'less time'}", "than"
    else:
        words, link = f"{1 + drop:,.{1 if drop < 99 else 0}f} times as long", "as"
    return f"{words} {link} {than}" if than else words


def times_as_fast(value: float) -> str:
    """A ratio of times in words: `1.90 times as fast`, or `as fast` where the two differ by less than half a percent."""
    return "as fast" if abs(value - 1) < 0.005 else f"{value:.2f} times as fast"


def class_words(accum_mode: str) -> str:
    """The class of a schedule in words: its accumulators, or that its bits do not depend on the batch."""
    return "batch-invariant schedules" if accum_mode == INVARIANT else f"{accum_mode} accumulators"


def labels_of(kernel: KernelClass) -> dict[str, tuple[str, ...]]:
    """Short name -> the dims that it stands for."""
    return {short: (names,) if isinstance(names, str) else tuple(names) for short, names in kernel.label.items()}


def short_names(kernel: KernelClass) -> list[str]:
    """The short names that stand for fields; others stand for what is derived from fields."""
    return [short for short in kernel.label if fields_called(kernel, short) is not None]


def fields_called(kernel: KernelClass, key: str, several: bool = False) -> tuple[str, ...] | None:
    """The fields that a name or short name stands for; None where it stands for no field.

    Args:
        kernel: the kernel.
        key: the name.
        several: whether its value has slashes, so that each field gets a value of its own.
    """
    names = kernel.written.get(key) if several or key not in kernel.label else None
    names = (names,) if isinstance(names, str) else names or labels_of(kernel).get(key, (key,))
    return names if all(name in kernel.fields for name in names) else None


def format_problem(problem: Problem) -> str:
    """The problem as `--problem` takes it: by short names where there are some, and without fields at their defaults."""
    kernel, words, named = problem.declaration, [], set[str]()
    for short in short_names(kernel):
        names = labels_of(kernel)[short]
        if len({problem.values[name] for name in names}) == 1:
            words.append(f"{short}={show(problem.values[names[0]], '+')}")
            named |= set(names)
    words += [
        f"{name}={show(value, '+')}"
        for name, value in problem.values.items()
        if name not in named and value != kernel.fields[name].default
    ]
    return ",".join(words)


def show(value: Any, between: str = ",") -> str:
    """A value of a problem or a knob as people read it, with a sign between the numbers of a list."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return between.join(map(str, value)) if isinstance(value, tuple) else str(value)
