"""How the problems of a kernel are laid out in tables: along which size, which problems share a table, and the columns'
titles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.core.fields import Choice, Flag, total
from tiledsched.core.problem import KernelClass, Problem, describe_values
from tiledsched.core.text import labels_of, show


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The layout of tables that follows from a kernel's `axes` and `label`."""

    swept: tuple[str, ...]
    """The size along which tables run: one field, or several fields under one label; empty where problems have no size."""
    shared: tuple[str, ...]
    """Fields whose values are the same for all problems of a table, in the order in which the kernel declares them."""
    columns: Mapping[str, tuple[str, ...]]
    """Column title -> the fields shown in that column; the swept size comes first."""
    optional: tuple[str, ...]
    """Fields that get a column only in tables whose problems differ in them."""
    titles: Mapping[str, str]
    """Field of `shared` -> its label, or its own name where the label stands for several fields or there is none."""

    @property
    def swept_title(self) -> str:
        """The name of the swept size as people read it."""
        return next(iter(self.columns)) if self.swept else "size"

    def size(self, problem: Problem) -> int:
        """The swept size of a problem; where it consists of several fields, the largest of them."""
        return max((total(getattr(problem, name)) for name in self.swept), default=0)

    def shared_values(self, problem: Problem) -> tuple[Any, ...]:
        """The problem's values of the fields in `shared`."""
        return tuple(getattr(problem, name) for name in self.shared)

    def describe_shared(self, problem: Problem) -> str:
        """What the problems of a table share, such as `D=64 float16`."""
        named = dict(zip(self.titles.values(), self.shared_values(problem), strict=True))
        flags = [title for title, value in named.items() if value is True]
        rest = describe_values({title: value for title, value in named.items() if not isinstance(value, bool)})
        return ", ".join(part for part in (rest, *flags) if part)

    def columns_of(self, problems: Sequence[Problem]) -> dict[str, tuple[str, ...]]:
        """Column title -> the fields shown in that column, for a table of these problems."""
        differing = (name for name in self.optional if len({getattr(one, name) for one in problems}) > 1)
        return {**self.columns, **{name: (name,) for name in differing}}


def cell(problem: Problem, fields: Sequence[str]) -> str:
    """The values of some fields in one cell: a single value where all are equal, else with slashes between them; an empty word is
    `none`."""
    return "/".join(dict.fromkeys(show(getattr(problem, name)) or "none" for name in fields))


def axes_of(kernel: KernelClass) -> Axes:
    """The layout of tables that follows from a kernel's declaration.

    Tables run along the first size in `axes`, and hold problems that agree in flags, choices and the other axes that are
    compiled in; axes known at run time only are columns. Without `axes` they run along the first size that is no constant,
    and hold problems that agree in all that is compiled in.
    """
    fields = kernel.fields
    words = [name for name, each in fields.items() if isinstance(each, (Choice, Flag)) and not each.omit_default]
    sizes = [name for name, each in fields.items() if not isinstance(each, (Choice, Flag))]
    constant = [name for name in sizes if getattr(fields[name], "constant", False)]
    axes = kernel.axes or (*[name for name in sizes if name not in constant][:1], *constant)
    labels = labels_of(kernel)
    labelled = {name for names in labels.values() for name in names}
    titles = {names: short for short, names in labels.items()}

    first = [name for name in axes if not isinstance(fields.get(name), (Choice, Flag))][:1]
    swept = next((names for names in labels.values() if set(first) <= set(names)), tuple(first)) if first else ()
    at_run_time = {*sizes} - {*constant}
    shared = [name for name in (*fields, *kernel.derived) if name in {*axes, *words} - {*swept} - at_run_time]
    columns = {titles.get(swept, swept[0]): swept} if swept else {}
    columns |= {short: names for short, names in labels.items() if not {*names} <= {*shared, *swept}}
    rest = [name for name in fields if name not in {*labelled, *swept, *shared}]
    columns |= {name: (name,) for name in rest if name in axes or fields[name].default is None}
    return Axes(
        swept=swept,
        shared=tuple(shared),
        columns=columns,
        titles={name: titles.get((name,), name) for name in shared},
        optional=tuple(name for name in rest if name not in columns),
    )
