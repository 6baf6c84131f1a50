"""Kernels of stored calls, declared by what is stored: the commands show them as any other, and nobody's code is imported."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tiledsched.core import registry
from tiledsched.core.errors import DeclarationError, ProblemError
from tiledsched.core.fields import Choice, Value
from tiledsched.core.files import real_path
from tiledsched.core.groups import values_by_name
from tiledsched.core.problem import Declaration, KernelClass, Problem, describe_values
from tiledsched.remember.description import MARK
from tiledsched.store.location import database_exists

LEFT_OUT = ""
"""The value of a field that a problem does not have."""


@dataclass(frozen=True, kw_only=True)
class StoredField(Choice):
    """A field of stored problems, with the values that they have."""

    values: tuple[Value, ...]
    """Each value once."""

    def read(self, name: str, value: Any) -> Value:
        """The stored value that is written like this; any other value as it is."""
        plain = tuple(value) if isinstance(value, list) else value
        return next((each for each in self.values if str(each) == str(plain)), plain)


class StoredKernel(Declaration):
    """The kernel of stored calls. It has problems and schedules, and no code."""

    is_called = True
    stored: ClassVar[tuple[Problem, ...]] = ()
    """Its problems."""

    @staticmethod
    def grid(p: Any, s: Any, device: Any) -> int:
        """Not known: grids are the caller's."""
        return 1

    @classmethod
    def describe(cls, p: Any) -> str:
        """The values that the problem has, without the digest of its call."""
        return describe_values({name: each for name, each in p.values.items() if name != MARK and each != LEFT_OUT})

    @classmethod
    def problem(cls, **values: Any) -> Problem:
        """The problem of these values; or, where they are those of one stored problem only, that problem.

        Raises:
            ProblemError: the values are those of none of the stored problems, or of several.
        """
        made = super().problem(**values)
        if made.values[MARK] != LEFT_OUT:
            return made
        given = {name: each for name, each in made.values.items() if each != LEFT_OUT}
        found = [each for each in cls.stored if given.items() <= each.values.items()]
        if len(found) != 1:
            what = "none" if not found else f"{len(found)}"
            raise ProblemError(
                f"{what} of the {len(cls.stored)} stored calls of {cls.name} have these values; name others"
            )
        return found[0]

    @classmethod
    def default_problems(cls) -> list[Problem]:
        """All that are stored."""
        return list(cls.stored)

    @classmethod
    def locator(cls) -> str:
        """Nowhere.

        Raises:
            DeclarationError: always.
        """
        raise DeclarationError(
            f"{cls.name} is known from calls of exhaustive_search, which its own program makes; run that program with "
            "TILEDSCHED_REMEMBER=new to measure again"
        )

    @classmethod
    def source_hash(cls) -> str:
        """Empty: the code is not here."""
        return ""

    @classmethod
    def evidence_source(cls) -> str:
        """Empty: the code is not here."""
        return ""


def stored_kernel(name: str, url: str | os.PathLike[str] | None) -> KernelClass | None:
    """The kernel of this name, as the calls stored in the database at `url` describe it; None where there are no such calls.

    It is known by its name from then on. `path/silu.py:silu` is that of the program silu.py, or of the module of that path.
    """
    if ":" not in name or not database_exists(url):
        return None
    from sqlalchemy import select, union

    from tiledsched.store.db import TuningDB
    from tiledsched.store.limit import READ_TIMEOUT_S
    from tiledsched.store.models import BuildRow, EntryRow, MeasurementRow, ProblemRow, ScheduleRow

    with TuningDB.open(url, read_only=True, limit_s=READ_TIMEOUT_S) as db, db.reading() as session:
        for each in names_of(name):
            dims = list(session.scalars(select(ProblemRow.dims).where(ProblemRow.kernel == each)))
            dims = [found for found in dims if MARK in found]
            if dims:
                rows = (BuildRow, MeasurementRow, EntryRow)  # what was imported was built elsewhere
                ids = union(*(select(row.schedule_id).where(row.kernel == each) for row in rows))
                schedules = list(session.scalars(select(ScheduleRow.knobs).where(ScheduleRow.id.in_(ids))))
                return _declare(each, dims, schedules)
    return None


def names_of(name: str) -> list[str]:
    """The names under which calls may be stored that are named like this: of `a/b.py:c` they are `b:c`, `a.b:c` and so on."""
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        return [name]
    parts = Path(real_path(place)).with_suffix("").parts[1:]
    return [f"{'.'.join(parts[start:])}:{function}" for start in reversed(range(len(parts)))]


def _declare(name: str, problems: list[dict[str, Any]], schedules: list[Any]) -> KernelClass:
    values = _by_name(problems)
    fields = {
        each: StoredField(words=tuple(map(str, found)), default=LEFT_OUT, omit_default=True, values=found)
        for each, found in values.items()
    }
    knobs = {each: list(found) for each, found in _by_name(schedules).items()}
    kernel: KernelClass = type(
        name.rpartition(":")[2], (StoredKernel,), {"name": name, "space": name, "fields": fields, "knobs": knobs}
    )
    made = tuple(sorted(kernel.problem(**each) for each in problems))
    kernel.stored = made  # type: ignore[attr-defined]
    kernel.axes = tuple(each for each, found in values.items() if all(type(value) is int for value in found))
    registry.register(kernel)
    return kernel


def _by_name(rows: list[Any]) -> dict[str, tuple[Any, ...]]:
    """By name, the different values that mappings have, sorted."""
    plain = [{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()} for row in rows]
    return {name: tuple(values) for name, values in values_by_name(plain).items()}
