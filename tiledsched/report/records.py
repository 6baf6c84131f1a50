"""The numbers of a report, as plain frozen values.

Times are microseconds; drops, changes and spreads are fractions (0.10 is 10%).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from tiledsched.core.device import ResourceFacts
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import HINT_KNOBS, KnobValue, Schedule
from tiledsched.core.text import class_words
from tiledsched.measure.estimate import Timing
from tiledsched.measure.runner import Device
from tiledsched.report.axes import Axes
from tiledsched.serve.chain import Served
from tiledsched.serve.transfer import ExpectedLoss
from tiledsched.store.model_error import ModelError
from tiledsched.store.queries import KnobEffect, RegimeComparison
from tiledsched.store.records import Entry, MeasurementSummary

MEASURED = "measured"
MODELLED = "modelled"
AS_GOOD = 0.01
"""What takes at most this much longer is as good: times of one program repeat to about half of it."""
Tile = tuple[int, int]
"""Values of the report's two tile knobs."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One schedule of one problem and its time."""

    schedule: Schedule
    """The schedule."""
    fingerprint: str
    """Fingerprint of its machine code; empty where it is not known."""
    us: float
    """Median of the measurement, or the model's estimate, in microseconds; the section's provenance says which."""
    relative: float = 1.0
    """Its time over the best schedule's time: 1 for the best."""
    rate: float = 0.0
    """TFLOP/s or GB/s at `us`, in the problem's unit."""
    timing: Timing | None = None
    """The measured time with its interval; None where modelled."""
    samples: int = 0
    """Timed launches; 0 where modelled."""
    taken: datetime | None = None
    """When it was measured, UTC; None where modelled."""
    same_program_as: Schedule | None = None
    """The schedule that was timed in its place, because it has the same machine code and grid; None where it was timed
    itself.
    """
    facts: ResourceFacts | None = None
    """Resources of the machine code; None where unknown."""

    @property
    def program(self) -> Schedule:
        """The schedule that stands for its program."""
        return self.same_program_as or self.schedule

    def ties_with(self, other: Timed) -> bool:
        """Whether two times cannot be told apart, because their intervals overlap, or differ by no more than `AS_GOOD`."""
        one, two = self.timing, other.timing
        overlap = one and two and one.ci_low_us <= two.ci_high_us and two.ci_low_us <= one.ci_high_us
        return bool(overlap) or max(self.us, other.us) <= min(self.us, other.us) * (1 + AS_GOOD)


@dataclass(frozen=True, kw_only=True)
class Untuned:
    """What would be served for a problem that had never been tuned, nor another that is the same work, and what it costs."""

    schedule: Schedule
    """The schedule that the lookup would then find."""
    provenance: str
    """How it would be found: transferred, modelled or default."""
    relative: float | None
    """Its time over the best time, both of the report; None where this schedule has no time for the problem."""
    expected: ExpectedLoss | None = None
    """What choices like it lost on measured problems that were hidden from the lookup; None where that was never measured."""


@dataclass(frozen=True, kw_only=True)
class TileTime:
    """The best schedule of one tile size."""

    tile: Tile
    """Values of the tile knobs."""
    us: float
    """Best time over all other knobs, in microseconds."""
    relative: float
    """Its time over the best time of all tiles."""
    schedule: Schedule
    """The schedule with that time."""
    programs: int
    """Distinct programs with this tile that have a time."""
    searched: bool
    """Whether they are enough, beside those of other tiles, to say what the tile costs; always so for the first tile."""
    ties: bool = False
    """Whether its best schedule cannot be told apart from that of the first tile; never so where modelled."""


@dataclass(frozen=True, kw_only=True)
class ValueEffect:
    """What one value of a knob costs, compared with another value, from matched pairs: programs of one problem that differ
    in that knob alone.
    """

    knob: str
    """Name of the knob."""
    value: KnobValue
    """The value."""
    against: KnobValue
    """The value that it is compared with."""
    ratio: float | None
    """Time with `value` over time with `against`, a geometric mean; None where too few pairs were timed."""
    ci_low: float | None
    """Lower end of the ratio's 95% interval, or the least ratio where `estimated`; None where too few pairs were timed."""
    ci_high: float | None
    """Upper end of the ratio's 95% interval, or the largest ratio where `estimated`; None where too few pairs were timed."""
    pairs: int
    """Matched pairs whose faster program is close to the best."""
    problems: int
    """Problems with such pairs."""
    estimated: bool = False
    """Whether the times are estimates. They are the same every time, so that their spread over pairs is no interval."""


@dataclass(frozen=True, kw_only=True)
class KnobVerdict:
    """What to do about one knob, over several problems."""

    knob: str
    """Name of the knob."""
    advice: str
    """leave: one value is as good as the best for all problems. same: no difference matters. few: one value is as good as the
    best, but too few problems show it. choose: problems contradict each other. unclear: none of these is known. untried: no two
    values were compared in enough pairs. Of estimates, only differences beyond the model's error count.
    """
    value: KnobValue
    """Where to leave the knob; otherwise the value that most problems prefer."""
    effects: tuple[ValueEffect, ...]
    """Every other value that was timed, compared with `value`; untried ones too."""
    preferred: tuple[tuple[KnobValue, int], ...]
    """Each value that problems prefer, with the number of these problems, the most frequent first. A problem prefers a value
    if none compared with it is faster, and at least one is surely slower; of estimates, if the best time with every other
    value is longer by more than the model's error.
    """
    problems: int = 0
    """The fewest problems in which another value was compared with `value`; 0 where estimated."""
    winners: tuple[tuple[KnobValue, int], ...] = ()
    """Each value that the winners of searches have, with their number, the most frequent first; empty where estimated."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProblemReport:
    """Everything the report says about one problem on one device. Two of them are never equal."""

    provenance: str
    """measured or modelled, for all times below."""
    problem: Problem
    """The problem."""
    device_name: str
    """Name of the GPU; empty where modelled."""
    accum_mode: str
    """fp32 or fp16 accumulators; the two are never compared."""
    size: int
    """Its size along the first of the kernel's axes, by which tables are sorted."""
    shared: tuple[Any, ...]
    """Values of the fields in `Axes.shared`: problems that agree in them share a table."""
    timed: tuple[Timed, ...]
    """Every schedule with a time, fastest first; at least one."""
    runner_up: Timed | None
    """The fastest schedule that can be told apart from the best; None where there is none."""
    default: Timed | None
    """The default schedule; None where it has no time."""
    median_us: float
    """Median over the distinct programs, in microseconds."""
    programs: int
    """Distinct programs (machine code and grid) with a time; where modelled, also those left out because they spill registers."""
    served: Entry | None
    """This problem's own entry; None where it has none."""
    explained: Served | None = None
    """What `explain` serves for this problem on this device, and why; None where it serves nothing."""
    serves: Timed | None = None
    """The time, among `timed`, of the schedule that `explain` serves; None where it was not timed together with the others."""
    ties: frozenset[Schedule] = frozenset()
    """Timed schedules that cannot be told apart from the one of `serves`, which is not among them. Where that is None: from
    the fastest.
    """
    level: frozenset[Schedule] = frozenset()
    """Timed schedules that cannot be told apart from the leader."""
    untuned: Untuned | None = None
    """What would be served without tuning, and what it costs: what is served, where nothing was tuned. None where the lookup
    knows nothing, and for problems that ship of which little but the winner has a time.
    """
    whole: bool = False
    """Whether all of the search space has a time, but for programs that spill registers."""
    tiles: tuple[TileTime, ...] = ()
    """Each tile size: that of the leader first, then the others by their best times. Empty where schedules have no tile knobs."""
    taken: datetime | None = None
    """When the newest of its measurements was taken, UTC; None where modelled."""
    winners: tuple[Schedule, ...] = ()
    """What won the searches of the report's problems on this device; empty where modelled."""
    error: ModelError | None = None
    """How far estimates like these are off; None where measured, and where estimates were never compared with measurements."""
    trace: tuple[float, ...] = ()
    """Time over the best time for each program of the newest run, in the order measured; empty where imported or
    modelled.
    """

    @cached_property
    def known_times(self) -> list[tuple[dict[str, KnobValue], float]]:
        """Every schedule with a time, and that time over the best time; also what cannot be told apart from the best, as 1."""
        ties = {*self.ties, *(self.served.ties if self.served else ())} if self.faster is None else ()
        return [*((dict(one.schedule), one.relative) for one in self.timed), *((dict(tie), 1.0) for tie in ties)]

    @property
    def tolerance(self) -> float:
        """What takes at most this share longer than the best may be as good: infinite for estimates whose error is not known."""
        if self.provenance == MEASURED:
            return AS_GOOD
        return max(AS_GOOD, self.error.mean) if self.error else math.inf

    @property
    def best(self) -> Timed:
        """The fastest schedule."""
        return self.timed[0]

    @property
    def leader(self) -> Timed:
        """What is served, where the fastest schedule cannot be told apart from it, or lost the race against it; else the fastest
        schedule.
        """
        served, own = self.serves, self.served
        if served is None or served.us <= self.best.us or self.best.schedule in self.ties:
            return served or self.best
        lost = own is not None and (own.schedule, own.runner_up) == (served.schedule, self.best.schedule)
        return served if lost else self.best

    @property
    def faster(self) -> Timed | None:
        """The fastest schedule, where its time is surely shorter than that of what is served; else None, as where modelled."""
        return self.best if self.provenance == MEASURED and self.serves and self.leader is not self.serves else None

    @property
    def other_run(self) -> MeasurementSummary | None:
        """What `explain` says that its schedule took for this problem, where that was measured in another run than `serves`."""
        entry = self.explained.entry if self.explained else None
        if entry is None or entry.problem != self.problem or entry.schedule != (self.explained or entry).schedule:
            return None
        found = entry.measurement
        return None if found and self.serves and self.serves.us == found.median_us else found

    @property
    def runner_up_drop(self) -> float | None:
        """Time of the runner-up over that of the leader, minus 1; None without runner-up. Where a race timed the two in turn, the
        race tells it.
        """
        raced = self.served if self.served and self.served.schedule == self.leader.schedule else None
        if raced and self.runner_up and raced.runner_up == self.runner_up.schedule:
            return raced.margin
        return self.runner_up.us / self.leader.us - 1 if self.runner_up else None

    @property
    def default_drop(self) -> float | None:
        """Time of the default schedule over the best time, minus 1; None where the default, or everything else, has no
        time.
        """
        return self.default.us / self.best.us - 1 if self.default and self.programs > 1 else None

    @property
    def second_tile(self) -> TileTime | None:
        """The best tile but the leader's; None with fewer than two tiles, and where too little was searched of it.

        What is not searched enough could only turn out faster: within `AS_GOOD` of the best it says that the tile matters
        little.
        """
        second = self.tiles[1] if len(self.tiles) > 1 else None
        return second if second and (second.searched or second.relative <= 1 + AS_GOOD) else None

    @property
    def tile_drop(self) -> float | None:
        """Best time of the second tile over that of the leader's, minus 1, and not below 0; None where that tile is not known."""
        return max(0.0, self.second_tile.us / self.tiles[0].us - 1) if self.second_tile else None

    @property
    def worst_tile(self) -> TileTime | None:
        """The slowest of the tiles that were searched enough; None where only the best was."""
        return next((tile for tile in reversed(self.tiles[1:]) if tile.searched), None)

    @property
    def group(self) -> tuple[Any, ...]:
        """(device name, shared values, accumulator mode): problems with the same three share a table."""
        return self.device_name, self.shared, self.accum_mode


@dataclass(frozen=True, kw_only=True)
class Section:
    """All measured problems, or all modelled ones. Measured and modelled times never share a section."""

    provenance: str
    """measured or modelled."""
    problems: tuple[ProblemReport, ...]
    """The problems, sorted by device, by what they share, by accumulator mode, then by size."""


@dataclass(frozen=True, kw_only=True)
class FailureCount:
    """How often candidates failed in one way."""

    stage: str
    """Where they failed: build or measure."""
    kind: str
    """One of errors.FailureKind."""
    candidates: int
    """Distinct pairs of schedule and problem (of schedule and problem class, for builds)."""
    example: str
    """The message of one such failure."""
    schedule: Schedule
    """The schedule that this message is about."""


@dataclass(frozen=True, kw_only=True)
class DeviceConditions:
    """The conditions under which the measurements of one device were taken. Ranges are (lowest, highest) medians."""

    device: Device
    """The GPU, as the newest measurement describes it."""
    drivers: tuple[str, ...]
    """Driver versions."""
    compilers: tuple[str, ...]
    """Compilers, one line each."""
    source_hashes: tuple[str, ...]
    """Versions of the kernel's source."""
    runners: tuple[str, ...]
    """gpu or replay."""
    sm_clock_mhz: tuple[int, int] | None
    """SM clock; None where NVML did not report it."""
    memory_clock_mhz: tuple[int, int] | None
    """Memory clock; None where NVML did not report it."""
    power_w: float
    """Highest board power; 0 where NVML did not report it."""
    temperature_c: int
    """Highest GPU temperature; 0 where NVML did not report it."""
    held_down: str
    """In how many measurements the clock was held down, and how far, in words; empty where it was in none."""
    throttle_reasons: tuple[tuple[str, int], ...]
    """Reasons that held the clock down, with the number of measurements in which they were seen."""
    first: datetime
    """Oldest measurement, UTC."""
    last: datetime
    """Newest measurement, UTC."""
    measurements: int
    """Number of measurements."""
    samples: int
    """Timed launches in all of them."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The highest rate that any kernel reached on one GPU, in one unit."""

    device_name: str
    """Name of the GPU."""
    unit: str
    """TFLOP/s or GB/s."""
    rate: float
    """The rate, in that unit."""
    problem: Problem
    """The problem that was computed."""
    sm_clock_mhz: int
    """Median SM clock of its samples; 0 where NVML did not report it."""
    taken: datetime
    """When it was measured, UTC."""

    def __str__(self) -> str:
        clock = f" at {self.sm_clock_mhz} MHz" if self.sm_clock_mhz else ""
        return f"{self.rate:.0f} {self.unit}{clock} ({self.problem.kernel} {self.problem}, {self.taken:%Y-%m-%d})"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What is known of one kernel's schedules on one arch."""

    kernel: str
    """Name of the kernel."""
    arch: str
    """e.g. sm_121."""
    axes: Axes
    """How its problems are laid out in tables."""
    tile_knobs: tuple[str, ...]
    """The two knobs over which heat maps are drawn; empty where the kernel has no such knobs."""
    regime: str
    """burst or sustained: only its measurements are in the report."""
    device_name: str
    """The only device in the report; empty where all devices of the arch are."""
    elsewhere: int
    """Number of measurements on this arch that were left out because of their regime, device, compiler or way of timing."""
    left_out: int
    """Number of problems that are known and not in the report, because there are too many."""
    measured: Section
    """Problems with measurements."""
    modelled: Section
    """Problems that only the model has an estimate for."""
    invariant: tuple[Entry, ...] = ()
    """Entries of schedules whose bits do not depend on the batch."""
    unmeasured: tuple[Entry, ...]
    """Entries of problems that are neither measured nor modelled, such as transferred ones."""
    inert: tuple[KnobEffect, ...]
    """How often a knob leaves the machine code unchanged: the most inert knob first."""
    builds: int
    """Number of builds that these counts are over."""
    failures: tuple[FailureCount, ...]
    """Failures of candidates, the most frequent first."""
    conditions: tuple[DeviceConditions, ...]
    """Conditions of measurement, for each device."""
    regimes: tuple[RegimeComparison, ...]
    """Problems measured in both regimes, whichever regime the report is about."""
    model_compilers: tuple[str, ...]
    """Compilers behind the modelled entries, one line each."""
    ceilings: tuple[Ceiling, ...] = ()
    """The highest rates that any kernel reached, for each GPU."""

    @property
    def problems(self) -> tuple[ProblemReport, ...]:
        """All problems, measured ones first."""
        return (*self.measured.problems, *self.modelled.problems)

    @property
    def tile(self) -> tuple[str, ...]:
        """The knobs that make a tile; none where a map is drawn over compiler hints for want of a tile."""
        return () if {*self.tile_knobs} & {*HINT_KNOBS} else self.tile_knobs

    def group_text(self, one: ProblemReport) -> str:
        """What the problems of a panel share: sizes, accumulators, and the device where there are several."""
        accum = class_words(one.accum_mode) if one.accum_mode != "fp32" else ""
        device = one.device_name if len({each.device_name for each in self.measured.problems}) > 1 else ""
        return (
            ", ".join(part for part in (self.axes.describe_shared(one.problem), accum, device) if part) or self.kernel
        )
