"""A view for each kernel, for SQL queries: the kernel's entries, with the fields of its problems as columns.

`select schedule from rms_norm where arch = 'sm_90' and columns = 4096` works in SQLite and in PostgreSQL. Names are in
lower case, because PostgreSQL reads unquoted names so.
"""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from tiledsched.core.canonical import stable_id
from tiledsched.core.fields import Dim, Flag
from tiledsched.core.problem import KernelClass
from tiledsched.core.registry import SHIPPED
from tiledsched.core.text import labels_of
from tiledsched.store.engine import SCHEMA_LOCK, one_at_a_time
from tiledsched.store.models import EntryRow, MeasurementRow, ProblemRow, ScheduleRow, ViewRow, of_name

LONGEST_NAME = 63
"""The most characters of a name: PostgreSQL cuts longer ones."""
FIXED = {
    "arch": EntryRow.arch,
    "device_name": EntryRow.device_name,
    "regime": EntryRow.regime,
    "accum_mode": EntryRow.accum_mode,
    "compiler": EntryRow.compiler,
    "provenance": EntryRow.provenance,
    "schedule": ScheduleRow.knobs,
    "median_us": MeasurementRow.median_us,
    "model_us": EntryRow.model_us,
    "fingerprint": EntryRow.fingerprint,
    "updated_at": EntryRow.updated_at,
}
"""Columns of every view. A field with one of these names gets an underscore at its end."""


def create_view(connection: Connection, kernel: KernelClass) -> str:
    """Make the view of `kernel`, or make it anew where the kernel's fields have changed. Does not commit.

    The kernel gives the view's name. What the table `kernel_views` says only tells which of the two possible names it has.

    Returns:
        The view's name.

    Raises:
        sqlalchemy.exc.DBAPIError: the user may not make views.
    """
    one_at_a_time(connection, SCHEMA_LOCK)  # as migrations: of two processes, one makes it and the other waits
    query, mine, names = _text(kernel, connection), _noted(connection, kernel), _names(kernel)
    had = next((name for name in names if mine is not None and name == mine.name), None)
    is_there = had in sa.inspect(connection).get_view_names()
    if mine is not None and had and is_there and mine.definition == query:
        return had
    quoted = connection.dialect.identifier_preparer.quote_identifier
    if had and is_there:
        connection.exec_driver_sql(f"DROP VIEW {quoted(had)}")
    connection.execute(sa.delete(ViewRow).where(ViewRow.kernel == kernel.name))
    name = had or names[0]
    if sa.inspect(connection).has_table(name):  # or a view of that name
        name = names[1]
    connection.execute(sa.delete(ViewRow).where(ViewRow.name == name))  # of a view that is gone
    connection.exec_driver_sql(f"CREATE VIEW {quoted(name)} AS {query}")
    connection.execute(sa.insert(ViewRow), {"name": name, "kernel": kernel.name, "definition": query})
    return name


def is_current(connection: Connection, kernel: KernelClass) -> bool:
    """Whether the view of a kernel is there, as this program makes it."""
    mine = _noted(connection, kernel)
    if mine is None or mine.name not in _names(kernel) or mine.definition != _text(kernel, connection):
        return False
    return mine.name in sa.inspect(connection).get_view_names()


def _noted(connection: Connection, kernel: KernelClass) -> Any:
    """Name and definition of a kernel's view by the table `kernel_views`; None where it has none."""
    return connection.execute(sa.select(ViewRow.name, ViewRow.definition).where(ViewRow.kernel == kernel.name)).first()


def _names(kernel: KernelClass) -> list[str]:
    """The names that a kernel's view may have, the first of which another table or view may have taken."""
    short = view_name(kernel.name)
    return [short, f"{short[: LONGEST_NAME - 7]}_{stable_id(kernel.name, 6)}"]


def _text(kernel: KernelClass, connection: Connection) -> str:
    """The query of a kernel's view in the dialect of a connection."""
    return str(_query(kernel).compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))


def view_name(kernel: str) -> str:
    """The name of a kernel's view if no table has it: `rms_norm` for `mylib.norms:RmsNorm`."""
    last = re.split(r"[:.]", kernel)[-1]
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z0-9])(?=[A-Z][a-z])", "_", last)
    return re.sub(r"[^a-z0-9_]", "_", words.lower())[:LONGEST_NAME] or "kernel"


def _query(kernel: KernelClass) -> sa.Select[Any]:
    """Selects the entries of `kernel`, with the fields of problems and their short names as columns."""
    columns: dict[str, Any] = dict(FIXED)

    def add(name: str, column: Any) -> None:
        name = name.lower()
        while name in columns:
            name += "_"
        columns[name] = column

    fields = {name: _field(kernel, name) for name in kernel.fields}
    for name, column in fields.items():
        add(name, column)
    for short, (first, *others) in labels_of(kernel).items():
        if {first, *others} <= set(fields) and short.lower() != first.lower():  # SQL cannot tell what is derived
            same = sa.and_(sa.true(), *(fields[first] == fields[other] for other in others))
            add(short, sa.case((same, fields[first])) if others else fields[first])
    return (
        sa.select(*(column.label(sa.quoted_name(name, quote=True)) for name, column in columns.items()))
        .select_from(EntryRow)
        .join(ProblemRow, ProblemRow.id == EntryRow.problem_id)
        .join(ScheduleRow, ScheduleRow.id == EntryRow.schedule_id)
        .outerjoin(MeasurementRow, MeasurementRow.id == EntryRow.measurement_id)
        .where(EntryRow.kernel == kernel.name if kernel.name in SHIPPED else of_name(kernel.name))
        .where(ProblemRow.kernel == kernel.name)
    )


def _field(kernel: KernelClass, name: str) -> Any:
    """A field of a problem as an integer, a boolean or text, with the default where the problem leaves it out."""
    each, value = kernel.fields[name], ProblemRow.dims[name]
    if isinstance(each, Flag):
        found: Any = value.as_boolean()
    elif isinstance(each, Dim):
        found = sa.cast(value.as_string(), sa.BigInteger)  # as_integer has 32 bits in PostgreSQL
    else:
        found = value.as_string()
    if each.omit_default and each.default is not None:
        return sa.func.coalesce(found, sa.literal(each.default, found.type))
    return found
