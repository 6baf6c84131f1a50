"""Comparisons of builds and measurements, for reports and imports."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from tiledsched.core.errors import ConfigError
from tiledsched.core.groups import grouped
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.measure.runner import Measurement
from tiledsched.store.codec import encode
from tiledsched.store.evidence import may_be_of
from tiledsched.store.models import DeviceRow, MeasurementRow, ProblemRow
from tiledsched.store.reading import (
    UNDISTURBED,
    Circumstances,
    MeasuredProblems,
    WithoutSamples,
    columns_of,
    matching,
    plain_texts,
)
from tiledsched.store.records import BuildRecord, Entry, StoredMeasurement
from tiledsched.store.rows import AT_ONCE, RowReader, in_utc

if TYPE_CHECKING:
    from typing_extensions import Self

UNTIMED = ("samples_us", "accuracy", "arch")
"""Columns of measurements that say nothing of a time."""
ProgramKey = tuple[str, object]
"""(fingerprint, grids): two programs for one problem and device differ where these differ."""


@dataclass(frozen=True, kw_only=True)
class KnobEffect:
    """Whether a knob reaches the machine code, over pairs of schedules of one problem class that differ in it alone."""

    knob: str
    """The knob's name."""
    pairs: int
    """Number of such pairs that were built."""
    same: int
    """Number of pairs with the same fingerprint."""

    @property
    def inert(self) -> bool:
        """Whether the knob was changed at least once, and never changed the program."""
        return self.pairs > 0 and self.same == self.pairs

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {**asdict(self), "inert": self.inert}


@dataclass(frozen=True, kw_only=True)
class RegimeComparison:
    """Whether one program wins in both the burst and the sustained regime, for one problem on one device.

    Only programs measured in both regimes are compared, and a ratio is always of two times of one regime.
    """

    problem: Problem
    """The problem."""
    device_name: str
    """The GPU."""
    accum_mode: str
    """fp32 or fp16 accumulators. Programs of different modes are never compared."""
    programs: int
    """Number of programs that were measured in both regimes."""
    burst_winner: Schedule
    """The schedule with the least median in the burst regime."""
    sustained_winner: Schedule
    """The schedule with the least median in the sustained regime."""
    burst_loss: float
    """How much longer the burst winner takes in the sustained regime than the winner there, as a share."""
    burst_loss_distinct: bool
    """Whether the 95% intervals of those two sustained times are apart."""
    sustained_loss: float
    """How much longer the sustained winner takes in the burst regime than the winner there, as a share."""
    sustained_loss_distinct: bool
    """Whether the 95% intervals of those two burst times are apart."""

    @property
    def same(self) -> bool:
        """Whether one program wins in both."""
        return self.burst_winner == self.sustained_winner

    def to_json(self) -> dict[str, Any]:
        """A plain dict; schedules and the problem become objects."""
        return {**encode(self), "same": self.same}


def knob_effects(builds: Iterable[BuildRecord]) -> list[KnobEffect]:
    """For each knob, how many pairs of schedules differ in it alone and how many of those are one program.

    Schedules are grouped by what is left of them without the knob, so the cost is schedules times knobs, not pairs.
    """
    pairs: Counter[str] = Counter()
    same: Counter[str] = Counter()
    codes: dict[tuple[str, type, KnobValue], int] = {}  # a small number for each knob value: quick to hash
    for built in _by_class(builds).values():
        alike: dict[tuple[str, tuple[int, ...]], Counter[str]] = defaultdict(Counter)
        for record in built:
            values = [(name, type(value), value) for name, value in record.schedule.items()]
            coded = tuple(codes.setdefault(value, len(codes)) for value in values)
            for i, (knob, _, _) in enumerate(values):
                alike[knob, coded[:i] + coded[i + 1 :]][record.fingerprint] += 1
        for (knob, _), programs in alike.items():
            pairs[knob] += _pairs(programs.total())
            same[knob] += sum(_pairs(count) for count in programs.values())
    return [KnobEffect(knob=knob, pairs=pairs[knob], same=same[knob]) for knob in sorted(pairs)]


def compare_regimes(latest: Iterable[StoredMeasurement]) -> list[RegimeComparison]:
    """For each problem and device with programs measured in both regimes, who wins in each and what it costs.

    `latest` are measurements, newest first: of a program measured several times the first counts. Programs are told apart
    by machine code and grid, so that it does not matter which of their equivalent schedules was measured.
    """
    alike = grouped(((one.kernel, one.measurement.problem, one.measurement.device.name), one) for one in latest)
    taken: dict[tuple[str, Problem, str, str], dict[str, dict[ProgramKey, Measurement]]] = {}
    for place, members in alike.items():
        _, problem, _ = place
        codes: dict[str, set[str]] = defaultdict(set)
        for stored in members:
            codes[stored.measurement.regime].add(stored.measurement.fingerprint)
        in_both = codes["burst"] & codes["sustained"]
        for stored in members:
            if (found := stored.measurement).fingerprint in in_both:
                accum_mode = str(found.schedule.get("accum_mode", "fp32"))
                regimes = taken.setdefault((*place, accum_mode), {})
                program = program_key(found.fingerprint, problem, found.schedule, found.device)
                regimes.setdefault(found.regime, {}).setdefault(program, found)
    compared = []
    for (_, problem, device, accum_mode), regimes in taken.items():
        burst, sustained = regimes.get("burst", {}), regimes.get("sustained", {})
        both = [program for program in burst if program in sustained]
        if not both:
            continue
        first = min(both, key=lambda program: (burst[program].median_us, burst[program].schedule.id))
        second = min(both, key=lambda program: (sustained[program].median_us, burst[program].schedule.id))
        burst_loss, burst_distinct = _loss(sustained[first], sustained[second])
        sustained_loss, sustained_distinct = _loss(burst[second], burst[first])
        compared.append(
            RegimeComparison(
                problem=problem,
                device_name=device,
                accum_mode=accum_mode,
                programs=len(both),
                burst_winner=burst[first].schedule,
                sustained_winner=burst[second].schedule,
                burst_loss=burst_loss,
                burst_loss_distinct=burst_distinct,
                sustained_loss=sustained_loss,
                sustained_loss_distinct=sustained_distinct,
            )
        )
    return sorted(compared, key=lambda one: (one.device_name, one.problem, one.accum_mode))


class _Timed(NamedTuple):
    """What a measurement says of the time of a program, of whose problem everybody knows."""

    schedule: Schedule
    """How it is launched."""
    shared: Circumstances
    """Where and how it was timed."""
    fingerprint: str
    """Fingerprint of the machine code."""
    timing: tuple[float, float, float]
    """Median and both ends of its 95% interval, in microseconds."""
    samples: int
    """Timed launches."""
    uid: str
    """Name of the measurement, the same in every database."""
    created_at: datetime
    """UTC."""
    run_id: int | None = None
    """The run that took it; None when imported."""

    @classmethod
    def of(cls, stored: StoredMeasurement) -> Self:
        """What a whole measurement says."""
        own = stored.measurement
        shared = Circumstances(own.conditions, own.device, stored.toolchain, stored.source_hash, own.runner, own.regime)
        timing = own.median_us, own.ci_low_us, own.ci_high_us
        return cls(
            own.schedule,
            shared,
            own.fingerprint,
            timing,
            len(own.samples_us),
            stored.uid,
            stored.created_at,
            stored.run_id,
        )


class TimedRow(_Timed):
    """A row that :mod:`tiledsched.store.evidence` takes like a stored measurement, among those of one problem."""

    __slots__ = ()
    measurement = property(lambda self: self)
    samples_us = property(lambda self: range(self.samples))
    problem = property(lambda self: None)
    device = property(lambda self: self.shared.device)
    regime = property(lambda self: self.shared.regime)
    conditions = property(lambda self: self.shared.conditions)
    toolchain = property(lambda self: self.shared.toolchain)


class TimedRows(MeasuredProblems):
    """Reads the times of many problems, some problems at a time.

    Args:
        rows: reads the rows.
        session: an open session.
        kernel: the only kernel; empty for all.
        arch: the only arch; empty for all.
        regime: burst or sustained; empty for both.
    """

    def __init__(self, rows: RowReader, session: Session, kernel: str, arch: str, regime: str) -> None:
        super().__init__(rows, session, *matching({ProblemRow.kernel: kernel or None}))
        row = MeasurementRow
        self._session = session
        self._arch, self._wanted = arch, matching({row.kernel: kernel or None, row.regime: regime or None})
        self._mine = cache(_is_of_known_kernel)

    def read(self, problems: Iterable[Problem]) -> dict[Problem, list[TimedRow]]:
        """The measurements of some problems, the newest first. Those that were disturbed are left out, and those of other kernels
        of the same name.
        """
        ids = [number for problem in problems for number in self.problems.get(problem, ([], 0))[0]]
        try:
            with plain_texts(self._session):
                return self._read(ids)
        except sa.exc.OperationalError:  # a text that is none
            return self._read(ids)

    def _read(self, ids: list[str]) -> dict[Problem, list[TimedRow]]:
        found: dict[Problem, list[TimedRow]] = defaultdict(list)
        query = select(*columns_of(MeasurementRow, *UNTIMED))
        for start in range(0, len(ids), AT_ONCE):
            wanted = query.where(MeasurementRow.problem_id.in_(ids[start : start + AT_ONCE]), *self._wanted)
            # The connection itself gives rows in half of the time that the session takes.
            result = self._session.connection().execute(wanted, execution_options={"yield_per": AT_ONCE})
            for some in result.partitions():
                for problem, timed in self.made(some, self._made, *UNTIMED):
                    if timed is not None:
                        found[problem].append(timed)
        for rows in found.values():
            rows.sort(key=lambda each: (each.created_at, each.uid), reverse=True)
        return found

    def devices(self) -> list[str]:
        """The names of the GPUs on which anything was measured."""
        measured = DeviceRow.id.in_(select(MeasurementRow.device_id))
        return list(self._session.scalars(select(DeviceRow.name).where(measured)))

    def last_run_began(self) -> datetime | None:
        """When the first measurement was taken of the run that took the newest; None where no run took any."""
        row = MeasurementRow
        wanted = [row.run_id.is_not(None), *self._wanted]
        newest = select(row.run_id).where(*wanted).order_by(row.created_at.desc(), row.run_id.desc()).limit(1)
        number = self._session.scalar(newest)
        return (
            None
            if number is None
            else self._session.scalar(select(func.min(row.created_at)).where(row.run_id == number, *self._wanted))
        )

    def _made(self, row: Any) -> tuple[Problem, TimedRow | None]:
        problem, shared = self.parents["problems"][row.problem_id], self.circumstances(row)
        # A condition on the arch in the query would be answered from the index of archs, which has most rows in one place.
        if self._arch not in ("", shared.device.arch) or shared.conditions.concurrent_pids:
            return problem, None
        if not self._mine(row.kernel, row.source_hash):
            return problem, None
        schedule = self.parents["schedules"][row.schedule_id]
        timing = row.median_us, row.ci_low_us, row.ci_high_us
        return problem, TimedRow(
            schedule, shared, row.fingerprint, timing, row.sample_count, row.uid, in_utc(row.created_at), row.run_id
        )


def _is_of_known_kernel(kernel: str, source_hash: str) -> bool:
    """Whether evidence may be of the kernel of this name that is known here, and not of another one of its name."""
    try:
        return may_be_of(source_hash, kernel_named(kernel))
    except ConfigError:  # nobody here can tell
        return True


class Comparable:
    """Finds, for one entry after another, the measurements that may contradict it, without their samples.

    They are those of the entry's own schedule, and all of each schedule that was surely faster at least once.
    """

    def __init__(self, rows: RowReader, session: Session) -> None:
        self._rows, self._session = rows, session
        self._readers: dict[tuple[str, str], WithoutSamples] = {}

    def measurements(self, entry: Entry) -> list[StoredMeasurement]:
        """The measurements that may contradict an entry, which is measured, on its device and in its regime."""
        if not entry.problem.known or entry.measurement is None:
            return []
        if (entry.kernel, entry.arch) not in self._readers:
            reader = WithoutSamples(self._rows, self._session, entry.arch, entry.problem.declaration)
            self._readers[entry.kernel, entry.arch] = reader
        reader, row = self._readers[entry.kernel, entry.arch], MeasurementRow
        alike = [
            row.problem_id.in_(reader.problems.get(entry.problem, ((), 0))[0]),
            row.device_id.in_(select(DeviceRow.id).where(DeviceRow.name == entry.device_name)),
            row.regime == entry.regime,
            UNDISTURBED,
        ]
        faster = select(row.schedule_id).where(*alike, row.ci_high_us < entry.measurement.ci_low_us)
        own = row.schedule_id == entry.schedule.id
        ids = self._session.scalars(select(row.id).where(*alike, row.schedule_id.in_(faster) | own)).all()
        return reader.read(self._session, entry.problem, ids)


def program_key(fingerprint: str, problem: Problem, schedule: Schedule, device: Any) -> ProgramKey:
    """What makes a program of a problem distinct: its machine code and the grids of its launches. A tune, a report, `explain` and
    `show` all count programs by it.
    """
    try:
        return fingerprint, problem.declaration.grids(problem, schedule, device)
    except Exception:  # an unknown kernel, or a schedule of an older space: its grid function may stumble in any way
        return fingerprint, schedule.id


def _loss(served: Measurement, best: Measurement) -> tuple[float, bool]:
    """How much longer `served` takes than `best`, and whether their intervals are apart."""
    return served.median_us / best.median_us - 1, served.ci_low_us > best.ci_high_us


def _by_class(builds: Iterable[BuildRecord]) -> dict[str, list[BuildRecord]]:
    """Builds that succeeded, by what they were built for: class, arch, kernel source and toolchain."""
    return grouped(
        ("/".join((one.kernel, one.source_hash, one.toolchain.id, one.arch, one.problem_class.id)), one)
        for one in builds
        if one.failure is None
    )


def _pairs(count: int) -> int:
    return count * (count - 1) // 2
