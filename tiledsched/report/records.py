"""The numbers of a report, as plain frozen values.

Times are microseconds; drops, changes and spreads are fractions (0.10 is 10%).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tiledsched.build.cubin import ResourceFacts
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.measure.runner import Device
from tiledsched.report.axes import Axes
from tiledsched.store.records import Entry

if TYPE_CHECKING:
    from tiledsched.report.ceilings import Ceiling
    from tiledsched.store.queries import KnobEffect, RegimeComparison

MEASURED = "measured"
MODELLED = "modelled"
Tile = tuple[int, int]
"""Values of the report's two tile knobs."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One schedule of one problem and its time."""

    schedule: Schedule
    """How it is computed."""
    fingerprint: str
    """Its machine code; empty where unknown."""
    us: float
    """Median of the measurement, or the model's estimate, in microseconds: the report's provenance says which."""
    relative: float = 1.0
    """us / us of the best schedule: 1 for the best."""
    rate: float = 0.0
    """TFLOP/s or GB/s at `us`, in the problem's unit."""
    ci_low_us: float | None = None
    """Lower end of the 95% confidence interval of the median; None where modelled."""
    ci_high_us: float | None = None
    """Upper end; None where modelled."""
    samples: int = 0
    """Timed launches; 0 where modelled."""
    same_program_as: Schedule | None = None
    """The schedule whose time this is, where another one with the same machine code and grid was timed in its place."""
    facts: ResourceFacts | None = None
    """Resources of the machine code; None where unknown."""
    worst_tile_error: float | None = None
    """Largest relative error of any output tile against the reference; None where it was not computed."""


@dataclass(frozen=True, kw_only=True)
class TileTime:
    """The best schedule of one tile size."""

    tile: Tile
    """Values of the tile knobs."""
    us: float
    """Best time over all other knobs, in microseconds."""
    relative: float
    """us / us of the best tile."""


@dataclass(frozen=True, kw_only=True)
class KnobValueRatio:
    """What holding one knob at one value costs."""

    value: KnobValue
    """The value."""
    ratio: float
    """Best time with the knob at this value / best time overall; a geometric mean where several problems are joined."""


@dataclass(frozen=True, kw_only=True)
class KnobImportance:
    """How much one knob matters."""

    knob: str
    """Its name."""
    pairs: int
    """Pairs of schedules of one problem that differ in this knob only and were both timed."""
    mean_change: float | None
    """Mean over the pairs of slower / faster - 1; None without pairs."""
    largest_change: float | None
    """Largest of them; None without pairs."""
    values: tuple[KnobValueRatio, ...]
    """Each value timed, best first."""


@dataclass(frozen=True, kw_only=True)
class KnobShare:
    """How much of the difference between good programs and all programs one knob accounts for."""

    knob: str
    """Its name."""
    share: float
    """0..1, the mean over problems."""
    largest: float
    """The largest of any problem."""
    problems: int
    """Problems in which the knob had more than one value."""


@dataclass(frozen=True, kw_only=True)
class Interaction:
    """A change of one knob whose effect depends on the rest of the schedule."""

    knob: str
    """Its name."""
    before: KnobValue
    """From this value."""
    after: KnobValue
    """To this one."""
    circumstance: str
    """What makes the difference, e.g. `persistent=strided`."""
    effect_with: float
    """Time after / time before - 1 under the circumstance, geometric mean over the pairs."""
    pairs_with: int
    """Pairs behind it."""
    effect_without: float
    """The same elsewhere."""
    pairs_without: int
    """Pairs behind it."""


@dataclass(frozen=True, kw_only=True)
class ProblemReport:
    """Everything the report says about one problem on one device."""

    provenance: str
    """measured or modelled: what every time below is."""
    problem: Problem
    """What is computed."""
    device_name: str
    """The GPU measured; empty where modelled."""
    accum_mode: str
    """fp32 or fp16 accumulators; the two are never compared."""
    size: int
    """What it is filed under: its value along the first of the kernel's axes."""
    shared: tuple[Any, ...]
    """What problems must share to be in one table: a value for each of `Axes.shared`."""
    timed: tuple[Timed, ...]
    """Every schedule with a time, fastest first; at least one."""
    runner_up: Timed | None
    """The fastest schedule that can be told apart from the best; None where there is none."""
    ties: tuple[Schedule, ...]
    """Schedules of other programs that cannot be told apart from the best."""
    default: Timed | None
    """The default schedule; None where it has no time."""
    median_us: float
    """Median over the distinct programs, in microseconds."""
    programs: int
    """Distinct programs (machine code and grid) with a time."""
    measurements: int
    """Measurements, repeats included; 0 where modelled."""
    served: Entry | None
    """What the database serves for this problem; None where it has no entry."""
    knobs: tuple[KnobImportance, ...]
    """Knobs with more than one value, the most important first."""
    tiles: tuple[TileTime, ...] = ()
    """Each tile size, best first; empty where schedules have no tile knobs."""
    trace: tuple[float, ...] = ()
    """Time / best time of each program of the newest run, in the order they were measured; empty where imported or modelled."""

    @property
    def best(self) -> Timed:
        """The fastest schedule."""
        return self.timed[0]

    @property
    def worst(self) -> Timed:
        """The slowest schedule that gave the right answer."""
        return self.timed[-1]

    @property
    def noise(self) -> float:
        """Half the 95% interval of the best / its time: what cannot be told apart; 0 where modelled."""
        low, high = self.best.ci_low_us, self.best.ci_high_us
        return 0.0 if low is None or high is None else (high - low) / 2 / self.best.us

    @property
    def runner_up_drop(self) -> float | None:
        """us of the runner-up / us of the best - 1; None without runner-up."""
        return self.runner_up.us / self.best.us - 1 if self.runner_up else None

    @property
    def default_drop(self) -> float | None:
        """us of the default schedule / us of the best - 1; None where the default has no time, or nothing else has."""
        return self.default.us / self.best.us - 1 if self.default and self.programs > 1 else None

    @property
    def median_drop(self) -> float:
        """Median us over the programs / us of the best - 1."""
        return self.median_us / self.best.us - 1

    @property
    def tile_drop(self) -> float | None:
        """us of the best schedule of the second best tile / us of the best - 1; None with fewer than two tiles."""
        return self.tiles[1].us / self.tiles[0].us - 1 if len(self.tiles) > 1 else None

    @property
    def group(self) -> tuple[Any, ...]:
        """(device name, shared values, accumulator mode): problems of one group share a table."""
        return self.device_name, self.shared, self.accum_mode


@dataclass(frozen=True, kw_only=True)
class TileSensitivity:
    """What the choice of tile is worth in one regime of sizes."""

    device_name: str
    """The GPU measured; empty where modelled."""
    shared: tuple[Any, ...]
    """What its problems share: a value for each of `Axes.shared`."""
    accum_mode: str
    """fp32 or fp16 accumulators."""
    regime: str
    """short, medium or long."""
    sizes: tuple[int, ...]
    """The sizes joined, along the first of the kernel's axes."""
    problems: int
    """Problems joined."""
    best: Tile
    """The tile whose best schedule has the least time, by geometric mean over the problems."""
    runner_up: Tile | None
    """The best other tile; None where only one was timed in every problem."""
    drop: float | None
    """Mean time of the runner-up / mean time of the best - 1; None without runner-up."""
    spread: float
    """Mean time of the worst tile / mean time of the best - 1."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """All problems whose times are of one kind. Measured and modelled times never share a section."""

    provenance: str
    """measured or modelled."""
    problems: tuple[ProblemReport, ...]
    """By device, what they share, accumulator mode, then size."""
    sensitivity: tuple[TileSensitivity, ...]
    """By the same groups, then regime."""
    knobs: tuple[KnobImportance, ...]
    """Over all problems, the most important first."""
    shares: tuple[KnobShare, ...] = ()
    """Importance of each knob over all problems; empty where modelled, or where little was measured."""
    interactions: tuple[Interaction, ...] = ()
    """Knobs that depend on each other, over all problems; empty where modelled."""


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """How often candidates failed in one way."""

    stage: str
    """build or measure."""
    kind: str
    """One of errors.FailureKind."""
    candidates: int
    """Distinct pairs of schedule and problem (of schedule and problem class, for builds)."""
    example: str
    """One message."""
    schedule: Schedule
    """The schedule of that message."""


@dataclass(frozen=True, kw_only=True)
class DeviceConditions:
    """Under what conditions the measurements of one device were taken. Ranges are (lowest, highest) medians."""

    device: Device
    """The GPU, as it was last seen."""
    drivers: tuple[str, ...]
    """Driver versions."""
    compilers: tuple[str, ...]
    """Compilers, one line each."""
    source_hashes: tuple[str, ...]
    """Versions of the kernel's source."""
    runners: tuple[str, ...]
    """gpu or replay."""
    sm_clock_mhz: tuple[int, int] | None
    """SM clock; None where NVML did not tell."""
    memory_clock_mhz: tuple[int, int] | None
    """Memory clock; None where NVML did not tell."""
    power_w: float
    """Highest board power; 0 where NVML did not tell."""
    temperature_c: int
    """Highest GPU temperature; 0 where NVML did not tell."""
    throttle_reasons: tuple[tuple[str, int], ...]
    """Reasons that held the clock down, with the number of measurements in which they were seen."""
    first: datetime
    """Oldest measurement, UTC."""
    last: datetime
    """Newest measurement, UTC."""
    measurements: int
    """How many."""
    samples: int
    """Timed launches in all of them."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known of one kernel's schedules on one arch."""

    kernel: str
    """Its name."""
    arch: str
    """e.g. sm_121."""
    axes: Axes
    """How its problems are laid out."""
    tile_knobs: tuple[str, str] | None
    """The two knobs that make a tile; None where there are no two."""
    regime: str
    """burst or sustained: the measurements taken in."""
    device_name: str
    """The one device taken in; empty for all of the arch."""
    elsewhere: int
    """Measurements on this arch that were left out because of their regime or device."""
    measured: Section
    """Problems with measurements."""
    modelled: Section
    """Problems with nothing but the model's estimate."""
    unmeasured: tuple[Entry, ...]
    """Entries with neither, e.g. transferred ones."""
    inert: tuple[KnobEffect, ...]
    """How often a knob leaves the machine code unchanged: the most inert knob first."""
    builds: int
    """Builds those counts are over."""
    failures: tuple[FailureCount, ...]
    """The most frequent first."""
    conditions: tuple[DeviceConditions, ...]
    """One for each device measured."""
    regimes: tuple[RegimeComparison, ...]
    """Problems measured in both regimes, whichever the report is about."""
    model_compilers: tuple[str, ...]
    """Compilers behind the modelled entries, one line each."""
    ceilings: tuple[Ceiling, ...] = ()
    """The highest rates measured on each GPU, of whatever kernel."""

    @property
    def accuracy_classes(self) -> bool:
        """Whether the kernel can be less accurate for speed: only then is the accumulator mode worth a column."""
        best = [one.best.schedule for section in (self.measured, self.modelled) for one in section.problems]
        return any("accum_mode" in schedule for schedule in (*best, *(entry.schedule for entry in self.unmeasured)))

    def group_text(self, one: ProblemReport) -> str:
        """What the problems of a panel share, in words: shared sizes, accumulators, and the device where there are several."""
        accum = f"{one.accum_mode} accumulators" if one.accum_mode != "fp32" else ""
        device = one.device_name if len({each.device_name for each in self.measured.problems}) > 1 else ""
        return (
            ", ".join(part for part in (self.axes.describe_shared(one.problem), accum, device) if part) or self.kernel
        )

    @property
    def warning(self) -> str:
        """The first line of a report that holds no measurement; empty where something was measured."""
        if self.measured.problems:
            return ""
        where = self.arch
        if self.elsewhere:
            where += f" in the {self.regime} regime" + (f" on {self.device_name}" if self.device_name else "")
        if self.modelled.problems:
            return f"Nothing was measured on {where}: every figure below is the model's estimate"
        todo = f"tiledsched tune {self.kernel} --arch {self.arch}"
        return f"Nothing was measured on {where}, and nothing was modelled: run `{todo}`"
