"""Records: what goes into the store and comes out of it, as frozen values that need no session."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import cache
from typing import Any, TypeVar

from tiledsched.build.cubin import Artifact
from tiledsched.build.toolchain import Toolchain as Toolchain
from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.canonical import OMIT_DEFAULT
from tiledsched.core.device import ResourceFacts
from tiledsched.core.errors import Failure
from tiledsched.core.problem import Problem, ProblemClass
from tiledsched.core.schedule import Schedule
from tiledsched.core.sources import place_part
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import Conditions, Device, Measurement, RivalTime
from tiledsched.store.codec import PROVENANCES as PROVENANCES, encode

RUN_STATUSES = ("running", "done", "interrupted", "failed")
STAGES = ("build", "measure")
SAME_NUMBERS = "bit for bit the numbers of "
"""How the part of an entry's source begins that says whose numbers a schedule had to have to win."""
BATCH_INVARIANT = "batch-invariant group "
"""How the part of a source begins that tells of bits that do not depend on the batch; the group's name follows, and a colon."""
Place = tuple[str, str, Problem, str, str, str]
"""What an entry answers; see :attr:`Entry.place`."""
Made = TypeVar("Made")


def record_of(kind: type[Made], source: Any, **other: Any) -> Made:
    """A record whose fields have the values of the attributes of `source` with the same names, or those given in `other`."""
    return kind(**other, **{name: getattr(source, name) for name in _names(kind) if name not in other})  # type: ignore[arg-type]  # a class is hashable


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))


class Printable:
    """A record that commands print as JSON."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict: schedules and problems become objects, times ISO 8601 text."""
        return encode(self)


@dataclass(frozen=True, kw_only=True)
class ArtifactRecord:
    """What the store knows of one machine code. The cubin itself is a file elsewhere."""

    arch: str
    """Target, e.g. sm_121."""
    fingerprint: str
    """Fingerprint of the machine code; of a build, empty where it failed."""
    facts: ResourceFacts | None
    """Resources that the machine code takes; None where only the fingerprint is known (imported evidence), or a build failed."""
    cubin_bytes: int
    """Size of the stripped cubin; 0 where unknown, or where a build failed."""


@dataclass(frozen=True, kw_only=True)
class BuildRecord(ArtifactRecord):
    """The outcome of compiling one schedule for one arch and problem class with one toolchain."""

    kernel: str
    """The kernel's name, e.g. attention."""
    source_hash: str
    """Hash of the kernel's source. A build with the same source and toolchain need not be done again."""
    toolchain: Toolchain
    """The compiler."""
    schedule: Schedule
    """The schedule that was compiled."""
    problem_class: ProblemClass
    """The problems that the machine code serves."""
    failure: Failure | None
    """Why the build failed; None where it succeeded."""
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
        """The record of a build that ended in `outcome`."""
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
        """The record of the machine code of a build that succeeded."""
        return record_of(ArtifactRecord, self)


@dataclass(frozen=True, kw_only=True)
class MeasurementSummary(Timing, Printable):
    """A measurement without its raw samples, as an entry carries it."""

    id: int
    """Number of the measurement in this database."""
    uid: str
    """Name of the measurement, the same in every database."""
    samples: int
    """Number of timed launches."""
    device: Device
    """The GPU."""
    conditions: Conditions
    """Clocks, power and throttling meanwhile."""
    accuracy: Accuracy | None
    """Error against the reference; None where it was not computed."""
    runner: str
    """gpu or replay."""
    toolchain: Toolchain
    """The compiler of the program."""
    created_at: datetime
    """UTC."""


@dataclass(frozen=True, kw_only=True)
class StoredMeasurement:
    """A measurement as the store holds it."""

    id: int = 0
    """Number in this database; 0 where the measurement is in none."""
    uid: str
    """A hash of the whole record, 24 hex digits: the same in every database that the measurement is merged into."""
    run_id: int | None = None
    """The run that took it; None when imported."""
    kernel: str
    """The kernel's name."""
    source_hash: str
    """Hash of the kernel's source, for information: a measurement holds for its machine code."""
    toolchain: Toolchain
    """The compiler of the program."""
    measurement: Measurement
    """Samples, estimate, device and conditions."""
    created_at: datetime
    """UTC."""

    @property
    def summary(self) -> MeasurementSummary:
        """The measurement without its samples."""
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


@dataclass(frozen=True, kw_only=True)
class Entry(Printable):
    """What is served for one problem on one arch or device, and why.

    Unique on kernel, arch, problem, device_name, regime, accum_mode and compiler.
    """

    kernel: str
    """The kernel's name, e.g. attention."""
    arch: str
    """e.g. sm_121."""
    problem: Problem
    """The problem."""
    device_name: str = ""
    """The GPU that the entry holds for; empty for the whole arch."""
    regime: str = ""
    """burst, sustained, graph or graph-cold; empty where nothing was measured."""
    accum_mode: str = "fp32"
    """fp32 or fp16: results with fp16 accumulators are less accurate, and never served in place of fp32 ones. Or `invariant`: the
    bits of a row do not depend on the number of rows."""
    provenance: str
    """measured, transferred, modelled or default."""
    schedule: Schedule
    """The schedule that is served."""
    fingerprint: str = ""
    """Fingerprint of its machine code; empty where the schedule was not built."""
    measurement_id: int | None = None
    """Number of the measurement behind the entry; None where nothing was measured."""
    measurement: MeasurementSummary | None = None
    """That measurement, filled in by the store on reading; ignored on writing."""
    model_us: float | None = None
    """The model's estimate, in microseconds. Must never be printed as measured."""
    runner_up: Schedule | None = None
    """The best schedule whose confidence interval is apart from this one's."""
    margin: float | None = None
    """How much longer the runner-up takes, as a share of this schedule's median."""
    ties: tuple[Schedule, ...] = ()
    """Schedules whose confidence intervals overlap this one's."""
    rivals: tuple[RivalTime, ...] | None = field(default=None, metadata=OMIT_DEFAULT)
    """Times of rivals in the same run; None where none was timed."""
    candidates: int = 0
    """Number of distinct programs that were compared."""
    source: str = ""
    """Where the entry comes from, for people: `tune run 12`, `table sm_90.json`, a paper."""
    toolchain: Toolchain | None = None
    """The compiler of its machine code; None where the schedule was not built."""
    source_hash: str = ""
    """Hash of the kernel's source, for information: a measurement holds for its machine code."""
    run_id: int | None = None
    """The run that wrote the entry; None where it was imported."""
    updated_at: datetime | None = None
    """When the entry was written, UTC; the store fills in the current time where this is None."""
    layer: str = ""
    """The layer in which the entry was found: shipped, bundle, site or user. Filled in for serving, and never stored."""

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
        """Version of the compiler, e.g. 13.4.92; empty where the schedule was not built."""
        return self.toolchain.tileiras if self.toolchain else ""

    @property
    def place(self) -> Place:
        """What the entry answers: kernel, arch, problem, device name, regime and accumulator mode. Compilers share places."""
        return self.kernel, self.arch, self.problem, self.device_name, self.regime, self.accum_mode

    @property
    def key(self) -> tuple[str, ...]:
        """What the entry is unique on: its place, with the problem's id, its compiler, and where its kernel is declared.

        The last part tells apart kernels of one name in different files; it is empty for kernels that ship.
        """
        kernel, arch, problem, *others = self.place
        return kernel, arch, problem.id, *others, self.compiler, place_part(self.source_hash)

    @property
    def rank(self) -> int:
        """0 for the strongest provenance. One that is none, as in a row that somebody changed, is weaker than all."""
        return PROVENANCES.index(self.provenance) if self.provenance in PROVENANCES else len(PROVENANCES)

    @property
    def same_numbers(self) -> str:
        """Whose numbers a schedule had to have to win, and what that cost, for people; empty where any right ones could win."""
        return self._part(SAME_NUMBERS)

    @property
    def batch_invariant(self) -> str:
        """The group of schedules of equal bits at every batch, and what they cost, for people; empty where it is in none."""
        return self._part(BATCH_INVARIANT)

    @property
    def group(self) -> str:
        """The name of that group; entries of one group compute the same bits. Empty where the entry is in none."""
        return self.batch_invariant.removeprefix(BATCH_INVARIANT).partition(":")[0]

    def _part(self, begins: str) -> str:
        """The part of the source that begins with these words."""
        return next((part for part in self.source.split("; ") if part.startswith(begins)), "")

    def replace(self, **changes: Any) -> Entry:
        """A copy with `changes` applied."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """A candidate that gave no usable measurement."""

    id: int
    """Number in this database."""
    run_id: int | None
    """The run in which it happened."""
    kernel: str
    """The kernel's name."""
    arch: str
    """e.g. sm_121."""
    stage: str
    """build or measure."""
    problem: Problem | None
    """The problem; None for a failed build, which would serve many problems."""
    schedule: Schedule
    """The candidate."""
    fingerprint: str
    """Fingerprint of its machine code; empty for a failed build."""
    device: Device | None
    """The GPU; None for a failed build."""
    failure: Failure
    """Kind and message."""
    created_at: datetime
    """UTC."""

    @property
    def device_name(self) -> str:
        """Name of the GPU; empty for a failed build."""
        return self.device.name if self.device else ""


@dataclass(frozen=True, kw_only=True)
class LandscapeSummary:
    """How many measurements there are of one problem on one device in one regime."""

    problem: Problem
    """The problem."""
    device_name: str
    """The GPU."""
    arch: str
    """The GPU's arch."""
    regime: str
    """burst or sustained."""
    distinct_programs: int
    """Number of programs that were measured."""
    measurements: int
    """Number of measurements, repeated ones included."""


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """A measurement that contradicts the entry for its problem."""

    entry: Entry
    """What is served."""
    schedule: Schedule
    """Schedule of that measurement: the entry's own, with another time, or a faster one."""
    median_us: float
    """Median of that measurement, in microseconds."""

    def __str__(self) -> str:
        entry, us = self.entry, self.entry.median_us or math.nan
        lost = f"lost to {self.schedule.short()}, measured at"
        what = "was also measured at" if self.schedule == entry.schedule else lost
        where = f"{entry.problem} on {entry.device_name}, {entry.regime}"
        return f"{where}: {entry.schedule.short()}, served with {us:.2f} us, {what} {self.median_us:.2f} us"


@dataclass(frozen=True, kw_only=True)
class MergeResult(Printable):
    """The outcome of an import or a merge."""

    entries_added: int = 0
    """Number of entries with a new key."""
    entries_replaced: int = 0
    """Number of keys whose entry was replaced: the new one's provenance is stronger, or equal and its evidence better."""
    entries_kept: int = 0
    """Number of keys whose entry stayed."""
    measurements_added: int = 0
    """Number of new measurements."""
    measurements_kept: int = 0
    """Number of measurements that were there already."""
    contradictions: tuple[Contradiction, ...] = ()
    """Measurements that contradict what is served. A new race decides between them."""

    def __add__(self, other: MergeResult) -> MergeResult:
        counts = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.name != "contradictions"
        }
        # Where both name a contradiction of one key, the second is the newer one.
        latest = {each.entry.key: each for each in (*self.contradictions, *other.contradictions)}
        return MergeResult(**counts, contradictions=tuple(latest.values()))
