"""Rows of the database as records: what serving, `exhaustive_search`, reports, exports and `db check` read by one set of rules.

SQLite takes anything in any column, and a server's JSON may be of anything. A row in which one value is not what the store
writes there is left out, and so is a row that refers to it or to none; all other rows count. SQLAlchemy is not imported.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from types import NoneType
from typing import Annotated, Any, NamedTuple, get_args

import msgspec

from tiledsched.build.toolchain import Toolchain
from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.config import warn_once
from tiledsched.core.device import ResourceFacts
from tiledsched.core.errors import DatabaseError, Failure, FailureKind, ProblemError, TiledschedError
from tiledsched.core.problem import Problem, ProblemClass
from tiledsched.core.registry import SHIPPED, problem_from_json
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Conditions, Device, Measurement, RivalTime
from tiledsched.store.codec import LARGEST, LARGEST_FLOAT, MOST_US, PATTERNS, REMEMBERED, check_values, decode
from tiledsched.store.records import (
    ArtifactRecord,
    BuildRecord,
    Entry,
    FailureRecord,
    Made,
    MeasurementSummary,
    StoredMeasurement,
    record_of,
)

Run = Callable[[str, Mapping[str, Any]], Iterable[Sequence[Any]]]
"""Runs a query with named values."""
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What making records raises where a row does not hold what was written."""
NAMESAKE = "@"
"""In the key of an entry, what parts the name of a kernel from the place of its file, where another kernel has the name alone."""
OTHER_FIELDS = " (other fields)"
"""Added to the kernel's name in a problem that was stored when the kernel had other fields. No kernel has that name."""
AT_ONCE = 500
"""Rows that a query names at once."""
LONGEST = 40
"""Characters of a damaged value that are shown."""

Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{12}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Number = Annotated[float, msgspec.Meta(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)]
Us = Annotated[float, msgspec.Meta(gt=0, lt=MOST_US)]
_PROGRAM = {"kernel": str, "arch": str, "schedule_id": Id}
_TIMES = {"fingerprint": str, "median_us": Us, "ci_low_us": Us, "ci_high_us": Us}
TABLES: Mapping[str, Mapping[str, Any]] = {
    "devices": {"id": Id, "name": str, "arch": str, "device": Device},
    "toolchains": {"id": Id, "cuda_tile": str, "tileiras": str, "ptxas": str, "nvvm": str},
    "problems": {"id": Id, "kernel": str, "dims": dict},
    "kernel_views": {"name": str, "kernel": str, "definition": str},
    "schedules": {"id": Id, "knobs": Schedule},
    "artifacts": {"arch": str, "fingerprint": str, "facts": ResourceFacts | None, "cubin_bytes": Count},
    "builds": {
        "id": Count,
        **_PROGRAM,
        "source_hash": str,
        "toolchain_id": Id,
        "problem_class_id": Id,
        "problem_class": ProblemClass,
        "fingerprint": str | None,
        "failure_kind": FailureKind | None,
        "failure_message": str | None,
        "seconds": Number,
        "created_at": datetime,
    },
    "runs": {
        "id": Count,
        "status": str,
        "command": dict,
        "arch": str,
        "hostname": str,
        "pid": Count,
        "host": dict,
        "started_at": datetime,
        "finished_at": datetime | None,
    },
    "measurements": {
        "id": Count,
        **_PROGRAM,
        **_TIMES,
        "uid": str,
        "run_id": Count | None,
        "source_hash": str,
        "toolchain_id": Id,
        "problem_id": Id,
        "device_id": Id,
        "regime": str,
        "runner": str,
        "samples_us": tuple[Us, ...],
        "sample_count": Count,
        "accuracy": Accuracy | None,
        "conditions": Conditions,
        "created_at": datetime,
    },
    "failures": {
        "id": Count,
        **_PROGRAM,
        "run_id": Count | None,
        "stage": str,
        "problem_id": Id | None,
        "fingerprint": str | None,
        "device_id": Id | None,
        "kind": FailureKind,
        "message": str,
        "created_at": datetime,
    },
    "entries": {
        "id": Count,
        **_PROGRAM,
        "problem_id": Id,
        "device_name": str,
        "regime": str,
        "accum_mode": str,
        "compiler": str,
        "provenance": str,
        "fingerprint": str | None,
        "measurement_id": Count | None,
        "model_us": Us | None,
        "runner_up_id": Id | None,
        "margin": Number | None,
        "ties": list,
        "rivals": tuple[RivalTime, ...] | None,
        "candidates": Count,
        "source": str,
        "toolchain_id": Id | None,
        "source_hash": str,
        "run_id": Count | None,
        "updated_at": datetime,
    },
    "fleet_campaigns": {
        "id": Id,
        "job": str,
        "kernel": Annotated[str, msgspec.Meta(max_length=400)],  # where it is declared
        "options": dict,
        "compiler": str,
        "source_hash": str,
        "lease_s": Number,
        "deadline_s": Number,
        "most_attempts": Count,
        "status": str,
        "created_at": datetime,
        "ends_at": datetime | None,
        "finished_at": datetime | None,
    },
    "fleet_workers": {
        "id": Id,
        "campaign_id": Id,
        "hostname": str,
        "pid": Count,
        "gpu": str,
        "device_name": str,
        "arch": str,
        "state": str,
        "note": str,
        "conditions": dict,
        "started_at": datetime,
        "seen_at": datetime,
    },
    "fleet_leases": {
        "id": Count,
        "campaign_id": Id,
        "number": Count,
        "arch": str,
        "problem_id": Id,
        "state": str,
        "attempts": Count,
        "worker_id": Id | None,
        "until": datetime | None,
        "result": dict | None,
        "message": str,
        "done_at": datetime | None,
    },
    "fleet_attempts": {
        "id": Count,
        "lease_id": Count,
        "number": Count,
        "worker_id": Id,
        "started_at": datetime,
        "ended_at": datetime | None,
        "outcome": str,
        "message": str,
        "result": dict | None,
    },
    "fleet_controls": {
        "id": Count,
        **_TIMES,
        "campaign_id": Id,
        "worker_id": Id,
        "gpu": str,
        "arch": str,
        "conditions": dict,
        "taken_at": datetime,
    },
}
"""The columns of each table with the types of their values. What is a record, a dict or a list stands there as JSON."""
NUMBERED = {"measurements", "runs"}
"""The tables with numbers to which others refer."""
PARENTS = {
    "problem_id": "problems",
    "schedule_id": "schedules",
    "runner_up_id": "schedules",
    "device_id": "devices",
    "toolchain_id": "toolchains",
    "measurement_id": "measurements",
}
"""The columns that refer to what records hold, and the tables of that."""
RECORDS = {"devices", "problems", "artifacts", "builds", "measurements", "failures", "entries"}
"""The tables whose texts must have the form that they have in files."""
PLAIN = (str, int, float, datetime, FailureKind, NoneType)


class RowType(NamedTuple):
    """How the rows of a table are read."""

    kind: Any
    """A class of named tuples, with the JSON of records as text."""
    json: Mapping[str, Any]
    """The columns that hold JSON, and of what."""
    patterns: Sequence[tuple[int, Any]]
    """Places of texts, and what they must match."""


def types_of(kind: Any) -> tuple[Any, Any, bool]:
    """The type of a column's values that are there, the class of these, and whether values may be missing."""
    arms = get_args(kind) if NoneType in get_args(kind) else (kind,)
    return arms[0], getattr(arms[0], "__origin__", arms[0]), NoneType in arms


@functools.cache
def row_type(table: str, *left_out: str) -> RowType:
    """How the rows of a table are read without some of its columns."""
    of_json, patterns = {}, []
    fields: list[tuple[str, Any]] = []
    for name, kind in TABLES[table].items():
        if name in left_out:
            continue
        own, plain, optional = types_of(kind)
        if plain not in PLAIN:
            of_json[name] = own
            kind = str | None if optional else str
        if name in PATTERNS and table in RECORDS and name != "kernel":  # a folder may be named as files may not
            patterns.append((len(fields), PATTERNS[name][0]))
        fields.append((name, kind))
    return RowType(NamedTuple(table, fields), of_json, patterns)


@functools.lru_cache(maxsize=REMEMBERED)
def _matches(pattern: Any, text: str | None) -> bool:
    return text is None or pattern.fullmatch(text) is not None


_FAST = {kind: msgspec.json.Decoder(kind).decode for kind in (tuple[Us, ...], Accuracy, dict, list)}
"""Decoders of what needs no further check."""


def read_new_json(kind: Any, text: str | None, name: str) -> Any:
    """The value that the JSON text of a column holds: a dict, a list, or a record, checked as a record of a file is; None for
    none.

    Args:
        kind: what it holds.
        text: the JSON.
        name: of the column, for errors.

    Raises:
        DatabaseError: it is no JSON, or holds another value.
    """
    if text is None:
        return None
    try:
        data = _FAST[kind](text) if kind in _FAST else msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise DatabaseError(f"{name} {_shown(text)}: {error}") from error
    return data if kind in _FAST else decode(kind, data, name)


read_json = functools.lru_cache(maxsize=REMEMBERED)(read_new_json)
"""As :func:`read_new_json`, of texts that many rows share. What is found must not be changed."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


class ById(dict[Any, Any]):
    """What rows hold that others refer to, by their ids."""

    def __missing__(self, identity: Any) -> Any:
        raise DatabaseError(f"it refers to {identity}, which is not there, or damaged")


class RowReader:
    """Reads the rows of one database. Those that are damaged are skipped; :meth:`warn` says how many.

    Args:
        run: runs a query with named values.
        where: names the database in warnings.
    """

    def __init__(self, run: Run, where: str) -> None:
        self.run, self._where = run, where
        self.layer = ""
        """The layer of the entries that are read."""
        self.skipped: dict[tuple[str, str], str] = {}
        """Why a row was skipped, by its table and what tells it from others there."""
        self._parents: dict[str, dict[Any, Any]] = defaultdict(ById)

    def warn(self) -> None:
        """Say how many rows were skipped, once for each database in the life of this process."""
        if self.skipped and self._where not in _warned:
            _warned.add(self._where)
            count = len(self.skipped)
            warn_once(
                f"{count} damaged row{'s' * (count > 1)} of {self._where} left out; `tiledsched db check` names "
                f"{'them' if count > 1 else 'it'}"
            )

    def typed(self, table: str, rows: Iterable[Sequence[Any]], *left_out: str) -> Iterator[Any]:
        """Rows of a table as named tuples, with JSON as text. They have all columns but those that are left out."""
        kind, _, patterns = row_type(table, *left_out)
        convert = msgspec.convert
        for row in rows:
            try:
                found = convert(tuple(row), kind)
                for place, pattern in patterns:
                    if not _matches(pattern, found[place]):
                        raise ValueError(f"is not allowed here - at `$[{place}]`")
            except ValueError as error:
                self._skip(table, row, _explained(kind, row, str(error)))
                continue
            yield found

    def read(self, table: str, words: Mapping[str, Any], rest: str, *left_out: str) -> Iterator[Any]:
        """Rows of a table, which the rest of the query names `r`."""
        return self.typed(table, self.run(f"{_selected(table, *left_out)} {rest}", words), *left_out)

    def make(self, table: str, rows: Iterable[Any], make: Callable[[Any], Made]) -> Iterator[Made]:
        """What is made of rows."""
        for row in rows:
            try:
                made = make(row)
            except (TiledschedError, *DAMAGE) as error:
                self._skip(table, row, str(error) or type(error).__name__)
                continue
            yield made

    def _skip(self, table: str, row: Sequence[Any], why: str) -> None:
        name = " ".join(map(str, row[: 2 if table == "artifacts" else 1]))
        self.skipped[table, name] = why

    def parents(self, table: str, ids: Iterable[Any]) -> Mapping[Any, Any]:
        """What the rows of a table hold that others refer to, by their ids; also of those that were read before."""
        known, (make, *left_out) = self._parents[table], _MADE[table]
        kind = int if table in NUMBERED else str
        wanted = [each for each in {*ids} if each not in known and type(each) is kind and str(each).isalnum()]
        for start in range(0, len(wanted), AT_ONCE):
            part = wanted[start : start + AT_ONCE]
            some = ", ".join(map(str, part)) if table in NUMBERED else quoted(part)
            found = list(self.read(table, {}, f"WHERE r.id IN ({some})", *left_out))
            if table == "measurements":
                self.read_parents(found, "device_id", "toolchain_id")
            known.update(self.make(table, found, lambda row: (row.id, make(self, row))))
        return known

    def read_parents(self, rows: Sequence[Any], *columns: str) -> None:
        """Read what rows of one table refer to in these columns, or in all of :data:`PARENTS` that they have."""
        for column in columns or [each for each in PARENTS if rows and each in rows[0]._fields]:
            self.parents(PARENTS[column], {getattr(row, column) for row in rows})

    def _parent(self, row: Any, column: str) -> Any:
        """What a row refers to in a column, which was read; None where it refers to nothing."""
        identity = getattr(row, column)
        return None if identity is None else self._parents[PARENTS[column]][identity]

    def entries(self, words: Mapping[str, Any], rest: str) -> list[Entry]:
        """The entries of rows, with their measurements but not their samples; the arguments are those of :meth:`read`."""
        found = list(self.read("entries", words, rest))
        self.read_parents(found)
        return list(self.make("entries", found, self._entry))

    def _entry(self, row: Any) -> Entry:
        if row.provenance == "measured" and row.measurement_id is None:
            raise DatabaseError("measured, but without a measurement")
        rivals = read_json(tuple[RivalTime, ...], row.rivals, "rivals")
        ties = read_json(list, row.ties, "ties")
        return record_of(
            Entry,
            row,
            kernel=row.kernel.partition(NAMESAKE)[0],
            problem=self._parent(row, "problem_id"),
            schedule=self._parent(row, "schedule_id"),
            fingerprint=row.fingerprint or "",
            measurement=self._parent(row, "measurement_id"),
            runner_up=self._parent(row, "runner_up_id"),
            ties=tuple(decode(Schedule, tie["schedule"], "ties") for tie in ties),
            rivals=rivals,
            toolchain=self._parent(row, "toolchain_id"),
            updated_at=in_utc(row.updated_at),
            layer=self.layer,
        )

    def failures(self, words: Mapping[str, Any], rest: str) -> Iterator[FailureRecord]:
        """The failures of rows; the arguments are those of :meth:`read`."""
        found = list(self.read("failures", words, rest))
        self.read_parents(found)
        return self.make("failures", found, self._failure)

    def measurements(self, rows: Iterable[Sequence[Any]]) -> Iterator[StoredMeasurement]:
        """The measurements of rows."""
        found = list(self.typed("measurements", rows))
        self.read_parents(found)
        return self.make(
            "measurements",
            found,
            lambda row: self.measurement(row, read_new_json(tuple[Us, ...], row.samples_us, "samples_us")),
        )

    def measurement(self, row: Any, samples_us: tuple[float, ...]) -> StoredMeasurement:
        """The measurement of a row, whose parents were read."""
        taken = Measurement(
            problem=self._parent(row, "problem_id"),
            schedule=self._parent(row, "schedule_id"),
            fingerprint=row.fingerprint,
            device=self._parent(row, "device_id"),
            regime=row.regime,
            median_us=row.median_us,
            ci_low_us=row.ci_low_us,
            ci_high_us=row.ci_high_us,
            samples_us=samples_us,
            accuracy=read_new_json(Accuracy, row.accuracy, "accuracy"),
            conditions=read_json(Conditions, row.conditions, "conditions"),
            runner=row.runner,
        )
        toolchain, created_at = self._parent(row, "toolchain_id"), in_utc(row.created_at)
        return record_of(StoredMeasurement, row, toolchain=toolchain, measurement=taken, created_at=created_at)

    def builds(self, words: Mapping[str, Any], rest: str) -> Iterator[BuildRecord]:
        """The builds of rows; the arguments are those of :meth:`read`."""
        found, artifacts = list(self.read("builds", words, rest)), self._parents["artifacts"]
        wanted = sorted({row.fingerprint for row in found if row.fingerprint})
        archs = quoted({row.arch for row in found})
        for start in range(0, len(wanted), AT_ONCE):
            some = quoted(wanted[start : start + AT_ONCE])
            rows = self.read("artifacts", {}, f"WHERE r.arch IN ({archs}) AND r.fingerprint IN ({some})")
            artifacts.update(self.make("artifacts", rows, lambda row: ((row.arch, row.fingerprint), artifact_of(row))))
        self.read_parents(found)
        return self.make("builds", found, self._build)

    def _build(self, row: Any) -> BuildRecord:
        artifact = self._parents["artifacts"][row.arch, row.fingerprint] if row.fingerprint else None
        return record_of(
            BuildRecord,
            row,
            toolchain=self._parent(row, "toolchain_id"),
            schedule=self._parent(row, "schedule_id"),
            problem_class=read_json(ProblemClass, row.problem_class, "problem_class"),
            fingerprint=row.fingerprint or "",
            facts=artifact and artifact.facts,
            cubin_bytes=artifact.cubin_bytes if artifact else 0,
            failure=row.failure_kind and Failure(kind=row.failure_kind, message=row.failure_message or ""),
        )

    def _failure(self, row: Any) -> FailureRecord:
        return record_of(
            FailureRecord,
            row,
            problem=self._parent(row, "problem_id"),
            schedule=self._parent(row, "schedule_id"),
            fingerprint=row.fingerprint or "",
            device=self._parent(row, "device_id"),
            failure=Failure(kind=row.kind, message=row.message),
            created_at=in_utc(row.created_at),
        )

    def _summary(self, row: Any) -> MeasurementSummary:
        return record_of(
            MeasurementSummary,
            row,
            samples=row.sample_count,
            device=self._parent(row, "device_id"),
            toolchain=self._parent(row, "toolchain_id"),
            conditions=read_json(Conditions, row.conditions, "conditions"),
            accuracy=read_new_json(Accuracy, row.accuracy, "accuracy"),
            created_at=in_utc(row.created_at),
        )


def _explained(kind: Any, row: Sequence[Any], message: str) -> str:
    """What is wrong with a value, of which msgspec says the place in its row."""
    what, _, place = message.partition(" - at `$[")
    number = int(place.rstrip("]`") or 0)
    return f"{kind._fields[number]} {_shown(row[number])}: {what[:1].lower()}{what[1:]}"


_warned: set[str] = set()


@functools.cache
def _selected(table: str, *left_out: str) -> str:
    kind, of_json, _ = row_type(table, *left_out)
    names = (f"CAST(r.{name} AS TEXT)" if name in of_json else f"r.{name}" for name in kind._fields)
    return f"SELECT {', '.join(names)} FROM {table} r"


def in_utc(time: datetime) -> datetime:
    """A stored time with its zone, UTC."""
    return time.replace(tzinfo=timezone.utc) if time.tzinfo is None else time.astimezone(timezone.utc)


def artifact_of(row: Any) -> ArtifactRecord:
    """The record of a row of machine code."""
    return record_of(ArtifactRecord, row, facts=read_json(ResourceFacts, row.facts, "facts"))


def _problem(rows: RowReader, row: Any) -> Problem:
    """The problem of a row. One that was stored when its kernel had other fields is of no kernel known here."""
    values = read_json(dict, row.dims, "dims")
    check_values(values, "dims")
    try:
        return problem_from_json({"kernel": row.kernel, **values})
    except ProblemError:
        return problem_from_json({"kernel": row.kernel + OTHER_FIELDS, **values})


_MADE: Mapping[str, tuple[Any, ...]] = {
    "problems": (_problem,),
    "schedules": (lambda rows, row: read_json(Schedule, row.knobs, "knobs"),),
    "devices": (lambda rows, row: read_json(Device, row.device, "device"),),
    "toolchains": (lambda rows, row: record_of(Toolchain, row),),
    "measurements": (RowReader._summary, "samples_us"),
    "runs": (lambda rows, row: read_json(dict, row.command, "command"),),
}
"""What is made of rows that others refer to, and the columns that are not read for it."""


def text_or_bytes(value: bytes) -> str | bytes:
    """A text of an SQLite file; its bytes where it is none, so that they cost a row and not the query (`text_factory`)."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def quoted(texts: Iterable[Any]) -> str:
    """Texts as a list in a query, which matches nothing where there is none."""
    return ", ".join("'{}'".format(each.replace("'", "''")) for each in texts) or "NULL"


def where(words: Mapping[str, Any], *more: str) -> str:
    """The condition that columns have the values of the words of their names, and more conditions; empty where there is none."""
    conditions = [*(f"r.{name} = :{name}" for name in words), *more]
    return "WHERE " + " AND ".join(conditions) if conditions else ""


def kernel_condition(kernel: str) -> tuple[str, dict[str, Any]]:
    """The condition that entries are of kernels of this name, in whatever files, and its words; of any kernel for no name."""
    if not kernel:
        return "1 = 1", {}
    namesake = f"{kernel}{NAMESAKE}"
    other = "" if kernel in SHIPPED else f" OR substr(r.kernel, 1, {len(namesake)}) = :namesake"
    return f"(r.kernel = :kernel{other})", {"kernel": kernel, **({"namesake": namesake} if other else {})}
