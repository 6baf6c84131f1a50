"""Rows to records: the statements that read, and the records made of their rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Select, Text, cast, func, select, text, type_coerce
from sqlalchemy.orm import Session
from sqlalchemy.types import NULLTYPE

from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import DIGITS, is_shipped
from tiledsched.measure.runner import Conditions, Device
from tiledsched.store.codec import REMEMBERED
from tiledsched.store.evidence import may_be_of
from tiledsched.store.models import Base, DeviceRow, MeasurementRow, ProblemRow, UtcDateTime
from tiledsched.store.records import Made, StoredMeasurement, Toolchain
from tiledsched.store.rows import AT_ONCE, PARENTS, RowReader, read_json, row_type

_conditions = cast(MeasurementRow.conditions, Text)
UNDISTURBED = _conditions.not_like('%"beside": [%') & _conditions.not_like('%"beside":[%')
"""No other process is known to have run on the GPU during the measurement. SQLite would fail at JSON that is none."""
NOT_CHOSEN_BY = ("samples_us", "uid", "ci_low_us", "ci_high_us", "accuracy", "created_at")
"""Columns of measurements by which none is chosen to be read whole."""
_ids_now: dict[str, str] = {}
"""The id that a stored problem has today, by the id that it is stored under."""


def matching(wanted: Mapping[Any, Any]) -> list[ColumnElement[bool]]:
    """A condition for each column whose wanted value is not None."""
    return [column == value for column, value in wanted.items() if value is not None]


def ids_of(rows: RowReader, session: Session, problem: Problem) -> list[str]:
    """The ids under which a problem is stored: its own, and those that it had when equal problems had several names."""
    stored = session.scalars(select(ProblemRow.id).where(ProblemRow.kernel == problem.kernel)).all()
    new = rows.parents("problems", (each for each in stored if each not in _ids_now))
    _ids_now.update((each, known.id) for each, known in new.items())
    return [problem.id, *(each for each in stored if each != problem.id and _ids_now.get(each) == problem.id)]


def columns_of(model: type[Base], *left_out: str) -> list[ColumnElement[Any]]:
    """The columns of a table as :class:`RowReader` takes them: plain values of the driver, and text for JSON."""
    kind, of_json, _ = row_type(model.__table__.name, *left_out)
    found = []
    for name in kind._fields:
        column = model.__table__.columns[name]
        is_time = isinstance(column.type, UtcDateTime)
        found.append(cast(column, Text) if name in of_json else type_coerce(column, NULLTYPE) if is_time else column)
    return found


def rows_of(session: Session, where: str, *, at_once: bool = True) -> RowReader:
    """A reader of rows over a session.

    Args:
        session: an open session.
        where: names the database in warnings.
        at_once: whether the rows of a query are taken from a server at once; else some at a time.
    """
    options = {} if at_once else {"yield_per": AT_ONCE}

    def run(query: str, words: Mapping[str, Any]) -> Any:
        if words or options:
            used = {word: value for word, value in words.items() if f":{word}" in query}
            return session.connection().execute(text(query), used, execution_options=options)
        return session.connection().exec_driver_sql(query)

    return RowReader(run, where)


@contextmanager
def plain_texts(session: Session) -> Iterator[None]:
    """Within the block, SQLite makes texts itself, for which Python takes half of the time of a long query; a text that is none
    raises an OperationalError of SQLAlchemy.
    """
    driver: Any = session.connection().connection.driver_connection
    before = getattr(driver, "text_factory", None)
    if before is not None:
        driver.text_factory = str
    try:
        yield
    finally:
        if before is not None:
            driver.text_factory = before


def select_measurements() -> Select:
    """Selects measurements, the newest first, as :meth:`RowReader.measurements` takes them. Conditions may name devices."""
    return (
        select(*columns_of(MeasurementRow))
        .outerjoin(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .order_by(MeasurementRow.created_at.desc(), MeasurementRow.id.desc())
    )


class UnreadSamples(tuple[float, ...]):
    """Stands for samples that were left in the database: it has their number, and reading one is an error."""

    def __iter__(self) -> Iterator[float]:
        raise ValueError("these samples were not read; ask for `measurements`")

    def __getitem__(self, place: Any) -> Any:
        return next(iter(self))


class Circumstances(NamedTuple):
    """What the measurements of one run share."""

    conditions: Conditions
    device: Device
    toolchain: Toolchain
    source_hash: str
    runner: str
    regime: str


class PlainRow(NamedTuple):
    """The part of a measurement that decides whether the whole of it is read."""

    id: int
    run_id: int | None
    schedule: Schedule
    circumstances: Circumstances
    fingerprint: str
    median_us: float
    samples: int


Choose = Callable[[Problem, Iterable[PlainRow]], "Collection[int] | None"]
"""From the measurements of one problem, newest first, to the ids of those that are read whole; None for all."""


@cache
def unread(count: int) -> UnreadSamples:
    """So many samples that were not read."""
    return UnreadSamples((0.0,) * count)


class MeasuredProblems:
    """Reads measurements, some problems at a time. What many of them share is read once.

    Args:
        rows: reads the rows.
        session: an open session.
        of_kernel: conditions on the problems.
    """

    def __init__(self, rows: RowReader, session: Session, *of_kernel: ColumnElement[bool]) -> None:
        self.rows = rows
        self.parents = {table: rows.parents(table, ()) for table in PARENTS.values()}
        """By table and id, what measurements refer to."""
        wanted = select(ProblemRow.id).where(*of_kernel)
        # An index has the answer to this; which arch they are of is only in the rows.
        counted = select(MeasurementRow.problem_id, func.count()).where(MeasurementRow.problem_id.in_(wanted))
        counts = {row[0]: row[1] for row in session.execute(counted.group_by(MeasurementRow.problem_id))}
        stored = [each for each in session.scalars(wanted) if each in counts]
        self.problems: dict[Problem, tuple[list[str], int]] = {}
        """The problems that were measured: the ids of each, and the number of measurements, also on other archs."""
        known = rows.parents("problems", stored)
        for number in stored:
            if number in known:
                numbers, count = self.problems.get(known[number], ([], 0))
                self.problems[known[number]] = [*numbers, number], count + counts[number]
        self._shared = lru_cache(maxsize=REMEMBERED)(self._circumstances)

    def made(self, found: Iterable[Any], make: Callable[[Any], Made], *left_out: str) -> Iterator[Made]:
        """What is made of rows, read without some columns."""
        typed = list(self.rows.typed("measurements", found, *left_out))
        self.rows.read_parents(typed)
        return self.rows.make("measurements", typed, make)

    def circumstances(self, row: Any) -> Circumstances:
        """What a row shares with others of its run."""
        return self._shared(row.conditions, row.device_id, row.toolchain_id, row.source_hash, row.runner, row.regime)

    def _circumstances(self, conditions: str, device_id: str, toolchain_id: str, *others: str) -> Circumstances:
        device, toolchain = self.parents["devices"][device_id], self.parents["toolchains"][toolchain_id]
        return Circumstances(read_json(Conditions, conditions, "conditions"), device, toolchain, *others)


class WithoutSamples(MeasuredProblems):
    """Reads the measurements of one kernel on one arch, a problem at a time and without their samples."""

    def __init__(self, rows: RowReader, session: Session, arch: str, kernel: KernelClass) -> None:
        super().__init__(rows, session, ProblemRow.kernel == kernel.name)
        # As an expression, because the index of archs has most rows in one place.
        of_arch = MeasurementRow.arch + "" == arch
        self._wanted = [of_arch, MeasurementRow.kernel == kernel.name, UNDISTURBED]
        if not is_shipped(kernel):  # of one that ships there is no other, and telling takes a look at every row
            self._wanted.append(of_known_kernels(session, self._wanted, kernel))

    def read(self, session: Session, problem: Problem, ids: Collection[int] | None = None) -> list[StoredMeasurement]:
        """The measurements of one problem, or those of it with some ids, the newest first."""
        if ids is None:
            found = list(session.execute(self._selected("samples_us").where(*self._of(problem))))
        else:
            numbers, found = sorted(ids), []
            for start in range(0, len(numbers), AT_ONCE):
                found += session.execute(
                    self._selected("samples_us").where(MeasurementRow.id.in_(numbers[start : start + AT_ONCE]))
                )
        made = list(self.made(found, lambda row: self.rows.measurement(row, unread(row.sample_count)), "samples_us"))
        return made if ids is None else sorted(made, key=lambda each: (each.created_at, each.id), reverse=True)

    def plain_rows(self, session: Session, problem: Problem) -> Iterator[PlainRow]:
        """The measurements of one problem as far as a choice between them asks, the newest first. Few are in memory at a time."""
        # The connection itself gives rows in half of the time that the session takes.
        query = self._selected(*NOT_CHOSEN_BY).where(*self._of(problem))
        result = session.connection().execute(query, execution_options={"yield_per": AT_ONCE})
        for some in result.partitions():
            yield from self.made(some, self._plain, *NOT_CHOSEN_BY)

    def _plain(self, row: Any) -> PlainRow:
        shared, schedule = self.circumstances(row), self.parents["schedules"][row.schedule_id]
        return PlainRow(row.id, row.run_id, schedule, shared, row.fingerprint, row.median_us, row.sample_count)

    def _of(self, problem: Problem) -> list[ColumnElement[bool]]:
        return [MeasurementRow.problem_id.in_(self.problems[problem][0]), *self._wanted]

    def _selected(self, *left_out: str) -> Select:
        newest = (MeasurementRow.created_at.desc(), MeasurementRow.id.desc())
        return select(*columns_of(MeasurementRow, *left_out)).order_by(*newest)


def of_known_kernels(
    session: Session, conditions: list[ColumnElement[bool]], kernel: KernelClass | None = None
) -> ColumnElement[bool]:
    """A condition that leaves out measurements of other kernels that have the names of kernels known here, such as one in a file
    of the same name.

    Args:
        session: an open session.
        conditions: the conditions of a query.
        kernel: the kernel whose measurements these are; None for the kernels that this process knows by their names.
    """
    sources = (
        select(MeasurementRow.kernel, MeasurementRow.source_hash)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .where(func.length(MeasurementRow.source_hash) == 2 * DIGITS, *conditions)
        .distinct()
    )
    others = []
    for name, note in session.execute(sources):
        if not isinstance(note, str):
            continue
        try:
            mine = may_be_of(note, kernel or kernel_named(name))
        except ConfigError:  # nobody here can tell
            continue
        if not mine:
            others.append(note)
    return MeasurementRow.source_hash.not_in(others)


def select_latest(conditions: list[ColumnElement[bool]]) -> Select:
    """Selects the id of the newest measurement of each (problem, artifact, schedule, device name, regime)."""
    one = (
        MeasurementRow.problem_id,
        MeasurementRow.arch,
        MeasurementRow.fingerprint,
        MeasurementRow.schedule_id,
        DeviceRow.name,
        MeasurementRow.regime,
    )
    newest = (MeasurementRow.created_at.desc(), MeasurementRow.id.desc())
    ranked = (
        select(MeasurementRow.id, func.row_number().over(partition_by=one, order_by=newest).label("place"))
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .where(*conditions)
        .subquery()
    )
    return select(ranked.c.id).where(ranked.c.place == 1)


def select_landscapes() -> Select:
    """Selects (problem id, device name, arch, regime, distinct programs, measurements).

    Schedules count programs, because only one of several schedules that give equal programs is measured. Fingerprints would
    not do: two launch grids of one machine code are two programs.
    """
    keys = (ProblemRow.id, DeviceRow.name, DeviceRow.arch, MeasurementRow.regime)
    return (
        select(*keys, func.count(MeasurementRow.schedule_id.distinct()), func.count(MeasurementRow.id))
        .select_from(MeasurementRow)
        .join(ProblemRow, ProblemRow.id == MeasurementRow.problem_id)
        .join(DeviceRow, DeviceRow.id == MeasurementRow.device_id)
        .group_by(*keys)
    )
