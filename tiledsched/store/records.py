"""What goes into the store and comes out of it, as plain frozen values: no session, no lazy loading."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import datetime
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from tiledsched.build.cubin import Artifact, ResourceFacts
from tiledsched.build.toolchain import Toolchain as Toolchain
from tiledsched.core.errors import Failure
from tiledsched.core.problem import Problem, ProblemClass
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Accuracy, Conditions, Device, Measurement, RivalTime
from tiledsched.store.codec import encode

PROVENANCES = ("measured", "transferred", "modelled", "default")
"""Strongest first. An entry never replaces one of stronger provenance."""
RUN_STATUSES = ("running", "done", "interrupted", "failed")
STAGES = ("build", "measure")
Place = tuple[str, str, Problem, str, str, str]
"""What an entry answers; see :attr:`Entry.place`."""
Made = TypeVar("Made")


def record_of(kind: type[Made], source: Any, **other: Any) -> Made:
    """A record whose fields are those of `source` that are called the same, but for what is given as `other`."""
    for name, types in _types(kind).items():  # type: ignore[arg-type]  # a class is hashable
        if name not in other:
            value = other[name] = getattr(source, name)
            if not isinstance(value, types):  # SQLite takes anything in any column
                raise TypeError(f"{name} is {value!r}")
    return kind(**other)


@cache
def _types(kind: type) -> dict[str, tuple[type, ...]]:
    """What the value of each field may be."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        found[name] = tuple(get_origin(arm) or arm for arm in arms) + ((int,) if float in arms else ())
    return found


@dataclass(frozen=True, kw_only=True)
class ArtifactRecord:
    """What the store knows of one machine code; the cubin itself is a file elsewhere."""

    arch: str
    """Target, e.g. sm_121."""
    fingerprint: str
    """Of the machine code."""
    facts: ResourceFacts | None
    """Resources it takes; None where only the fingerprint is known (imported evidence)."""
    cubin_bytes: int
    """Size of the stripped cubin; 0 where unknown."""


@dataclass(frozen=True, kw_only=True)
class BuildRecord:
    """What became of one schedule, compiled for one arch and problem class by one toolchain."""

    kernel: str
    """Its name, e.g. attention."""
    source_hash: str
    """Hash of the kernel's source: with the toolchain it says what need not be compiled again."""
    toolchain: Toolchain
    """What compiled it."""
    arch: str
    """Target, e.g. sm_121."""
    schedule: Schedule
    """What was compiled."""
    problem_class: ProblemClass
    """For which problems."""
    fingerprint: str
    """Of the machine code; empty when it did not build."""
    facts: ResourceFacts | None
    """Resources it takes; None when it did not build."""
    cubin_bytes: int
    """Size of the stripped cubin; 0 when it did not build."""
    failure: Failure | None
    """Why it did not build; None when it did."""
    seconds: float
    """Wall time of the compile."""

    @classmethod
    def of(
        cls,
        outcome: Artifact | Failure,
        *,
        kernel: str,
        source_hash: str,
        toolchain: Toolchain,
        arch: str,
        schedule: Schedule,
        problem_class: ProblemClass,
        seconds: float,
    ) -> BuildRecord:
        """The record of a compile that ended in `outcome`."""
        artifact = outcome if isinstance(outcome, Artifact) else None
        return cls(
            kernel=kernel,
            source_hash=source_hash,
            toolchain=toolchain,
            arch=arch,
            schedule=schedule,
            problem_class=problem_class,
            fingerprint=artifact.fingerprint if artifact else "",
            facts=artifact.facts if artifact else None,
            cubin_bytes=len(artifact.cubin) if artifact else 0,
            failure=outcome if isinstance(outcome, Failure) else None,
            seconds=seconds,
        )

    @property
    def key(self) -> tuple[str, str]:
        """(schedule id, problem class id): the key of `find_builds`."""
        return self.schedule.id, self.problem_class.id

    @property
    def artifact(self) -> ArtifactRecord:
        """What is known of the machine code of a build that succeeded."""
        return ArtifactRecord(
            arch=self.arch, fingerprint=self.fingerprint, facts=self.facts, cubin_bytes=self.cubin_bytes
        )


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One `tune` from start to end."""

    id: int
    """Number in this database."""
    status: str
    """running, done, interrupted or failed."""
    command: dict[str, Any]
    """Its arguments."""
    arch: str
    """What was tuned for."""
    host: dict[str, Any]
    """Where it ran: hostname, pid and platform, and whatever the caller added."""
    started_at: datetime
    """UTC."""
    finished_at: datetime | None
    """UTC; None while running."""


class MeasurementSummary(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The evidence under an entry, without the raw samples."""

    id: int
    """Number of the measurement in this database."""
    uid: str
    """Its name in every database."""
    median_us: float
    """Median launch, in microseconds."""
    ci_low_us: float
    """Lower end of the 95% confidence interval of the median."""
    ci_high_us: float
    """Upper end."""
    samples: int
    """Timed launches."""
    device: Device
    """Where it was taken."""
    conditions: Conditions
    """Clocks, power, throttling."""
    accuracy: Accuracy | None
    """Error against the reference; None where it was not computed."""
    runner: str
    """gpu or replay."""
    toolchain: Toolchain
    """What compiled the program."""
    created_at: datetime
    """UTC."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict for `--json` output."""
        data: dict[str, Any] = encode(self)
        return data


@dataclass(frozen=True, kw_only=True)
class StoredMeasurement:
    """A measurement with what the store knows beside it."""

    id: int
    """Number in this database."""
    uid: str
    """24 hex digits over the whole record: the same in every database it is merged into."""
    run_id: int | None
    """The run that took it; None when imported."""
    kernel: str
    """Its name."""
    source_hash: str
    """Hash of the kernel's source, for the record: what was measured holds for its machine code."""
    toolchain: Toolchain
    """What compiled the program."""
    measurement: Measurement
    """Samples, estimate, device and conditions."""
    created_at: datetime
    """UTC."""

    @property
    def summary(self) -> MeasurementSummary:
        """The same without the samples, as an entry carries it."""
        taken = self.measurement
        return record_of(
            MeasurementSummary,
            taken,
            id=self.id,
            uid=self.uid,
            samples=len(taken.samples_us),
            toolchain=self.toolchain,
            created_at=self.created_at,
        )


class Entry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What is served for one problem on one arch or device, and why.

    Unique on kernel, arch, problem, device_name, regime, accum_mode and compiler.
    """

    OMIT_DEFAULT = ("rivals",)
    """Fields that are not written where they have their default."""

    kernel: str
    """Its name, e.g. attention."""
    arch: str
    """e.g. sm_121."""
    problem: Problem
    """What is computed."""
    device_name: str = ""
    """The GPU it holds for; empty for the whole arch."""
    regime: str = ""
    """burst or sustained; empty where nothing was measured."""
    accum_mode: str = "fp32"
    """fp32 or fp16: fp16 accumulators are an accuracy class of their own."""
    provenance: str
    """measured, transferred, modelled or default."""
    schedule: Schedule
    """What is served."""
    fingerprint: str = ""
    """Its machine code; empty where it was not built."""
    measurement_id: int | None = None
    """Number of the measurement behind it; None where nothing was measured."""
    measurement: MeasurementSummary | None = None
    """That measurement, filled in by the store on reading; ignored on writing."""
    model_us: float | None = None
    """The model's estimate, in microseconds. Never to be printed as measured."""
    runner_up: Schedule | None = None
    """The best schedule that can be told apart from this one."""
    margin: float | None = None
    """(runner_up - best) / best, by median."""
    ties: tuple[Schedule, ...] = ()
    """Schedules that cannot be told apart from this one."""
    rivals: tuple[RivalTime, ...] | None = None
    """What rivals took beside this one; None where none was timed."""
    candidates: int = 0
    """Distinct programs compared."""
    source: str = ""
    """Where it comes from, for people: `tune run 12`, `table sm_90.json`, a paper."""
    toolchain: Toolchain | None = None
    """What compiled it; None where it was not built."""
    source_hash: str = ""
    """Hash of the kernel's source, for the record: what was measured holds for its machine code."""
    run_id: int | None = None
    """The run that wrote it; None when imported."""
    updated_at: datetime | None = None
    """UTC; the store fills in the current time where None."""
    layer: str = ""
    """Where it was found: shipped, bundle, site or user; filled in for serving, and never stored."""

    @property
    def median_us(self) -> float | None:
        """Measured median in microseconds; None where nothing was measured."""
        return self.measurement.median_us if self.measurement else None

    @property
    def tflops(self) -> float | None:
        """Measured rate in TFLOP/s; None where nothing was measured."""
        return self.problem.tflops(self.measurement.median_us) if self.measurement else None

    @property
    def compiler(self) -> str:
        """Version of the compiler whose machine code it is, e.g. 13.4.92; empty where it was not built."""
        return self.toolchain.tileiras if self.toolchain else ""

    @property
    def place(self) -> Place:
        """What the entry answers: kernel, arch, problem, device name, regime and accumulator mode. Compilers share places."""
        return self.kernel, self.arch, self.problem, self.device_name, self.regime, self.accum_mode

    @property
    def key(self) -> tuple[str, ...]:
        """What the entry is unique on: its place, with the problem's id, and its compiler."""
        kernel, arch, problem, *others = self.place
        return kernel, arch, problem.id, *others, self.compiler

    @property
    def rank(self) -> int:
        """0 for the strongest provenance."""
        return PROVENANCES.index(self.provenance)

    def replace(self, **changes: Any) -> Entry:
        """A copy with `changes` applied."""
        return msgspec.structs.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for `--json` output; schedules and the problem become objects, times ISO 8601 text."""
        data: dict[str, Any] = encode(self)
        return data


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """A candidate that gave no usable measurement."""

    id: int
    """Number in this database."""
    run_id: int | None
    """The run it happened in."""
    kernel: str
    """Its name."""
    arch: str
    """e.g. sm_121."""
    stage: str
    """build or measure."""
    problem: Problem | None
    """What was to be computed; None for builds, which serve many problems."""
    schedule: Schedule
    """The candidate."""
    fingerprint: str
    """Its machine code; empty when it did not build."""
    device_name: str
    """Where; empty for builds."""
    failure: Failure
    """Kind and message."""
    created_at: datetime
    """UTC."""


@dataclass(frozen=True, kw_only=True)
class LandscapeSummary:
    """How much is measured of one problem on one device in one regime."""

    problem: Problem
    """What was computed."""
    device_name: str
    """Where."""
    arch: str
    """The device's arch."""
    regime: str
    """burst or sustained."""
    distinct_programs: int
    """Fingerprints measured; two launch grids of one machine code count once."""
    measurements: int
    """Measurements, repeats included."""


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """Measurements of one problem on one kind of GPU that do not go with what is served."""

    entry: Entry
    """What is served."""
    schedule: Schedule
    """Of the measurement that contradicts: the same program at another time, or a faster one."""
    median_us: float
    """What that measurement says."""

    def __str__(self) -> str:
        entry, us = self.entry, self.entry.median_us or math.nan
        lost = f"lost to {self.schedule.short()}, measured at"
        what = "was also measured at" if self.schedule == entry.schedule else lost
        where = f"{entry.problem} on {entry.device_name}, {entry.regime}"
        return f"{where}: {entry.schedule.short()}, served with {us:.2f} us, {what} {self.median_us:.2f} us"


@dataclass(frozen=True, kw_only=True)
class MergeResult:
    """What an import or merge did."""

    entries_added: int = 0
    """Keys that were new."""
    entries_replaced: int = 0
    """Keys whose entry gave way: the other one's provenance is stronger, or equal and its evidence better."""
    entries_kept: int = 0
    """Keys whose entry stayed."""
    measurements_added: int = 0
    """Measurements that were new."""
    measurements_kept: int = 0
    """Measurements already here."""
    contradictions: tuple[Contradiction, ...] = ()
    """Where what was measured contradicts what is served: a race decides."""

    def __add__(self, other: MergeResult) -> MergeResult:
        counts = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.name != "contradictions"
        }
        # Of what the first said of a key the second knows better.
        latest = {each.entry.key: each for each in (*self.contradictions, *other.contradictions)}
        return MergeResult(**counts, contradictions=tuple(latest.values()))

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        data: dict[str, Any] = encode(self)
        return data
