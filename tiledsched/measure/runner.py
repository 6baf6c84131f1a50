"""The protocol between the search and whatever measures: its requests and their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from tiledsched.build.cubin import Artifact
from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.canonical import OMIT_DEFAULT
from tiledsched.core.errors import Failure
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.estimate import Timing

LAUNCHED = ("burst", "sustained")
"""The regimes in which launches are timed: cool and one by one, or back to back at the power cap."""
GRAPHS = ("graph", "graph-cold")
"""The regimes in which replays of CUDA graphs are timed: with the cache that the last replay left, or behind a flush of it."""
REGIMES = (*LAUNCHED, *GRAPHS)
HOW = {
    "sustained": "at its power cap",
    "graph": "in replayed CUDA graphs",
    "graph-cold": "in replayed CUDA graphs with an empty cache",
}
"""How a GPU was timed, in words for people; burst is the usual way, of which nothing is said."""
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as the driver names it."""

    name: str
    """Marketing name, e.g. NVIDIA H200."""
    arch: str
    """e.g. sm_90."""
    sm_count: int
    """Streaming multiprocessors."""
    memory_bytes: int = 0
    """Device memory; 0 where unknown."""
    l2_bytes: int = 0
    """Second-level cache; 0 where unknown."""
    driver: str = ""
    """Driver version, e.g. 580.159.04."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The state of the GPU while samples were taken, from NVML. A field is 0 or empty where NVML does not tell."""

    sm_clock_mhz: int = 0
    """Median SM clock."""
    memory_clock_mhz: int = 0
    """Median memory clock."""
    power_w: float = 0.0
    """Highest board power."""
    temperature_c: int = 0
    """Highest GPU temperature."""
    throttle_reasons: tuple[str, ...] = ()
    """Names of every reason seen to hold the clock down (idle excluded)."""
    gap_ms: float = 0.0
    """Start-to-start distance of paced launches; 0 where they were not paced."""
    graph_launches: int = 0
    """Launches per sample, replayed as one CUDA graph; 0 where events enclosed a single launch."""
    memory_cap_bytes: int = field(default=0, metadata=OMIT_DEFAULT)
    """Device memory that a search beside a full memory might take for arrays; 0 where it had no limit."""
    memory_peak_bytes: int = field(default=0, metadata=OMIT_DEFAULT)
    """The most that it had taken until then, where it had a limit."""
    others: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)
    """Processes of others that had the GPU open, by NVML's numbers."""
    concurrent_pids: tuple[int, ...] | None = field(default=(), metadata={**OMIT_DEFAULT, "key": "beside"})
    """Numbers of the other processes that ran on the GPU meanwhile: times taken while they ran decide nothing. None where NVML
    does not say."""

    @property
    def disturbance(self) -> str:
        """The other processes that ran on the GPU meanwhile, in words; empty where there were none."""
        numbers = ", ".join(map(str, self.concurrent_pids or ()))
        return f"beside process {numbers} on the GPU" if numbers else ""


@dataclass(frozen=True, kw_only=True)
class GapTrial:
    """The samples taken with launches paced at one distance."""

    gap_ms: float
    """Start-to-start distance of launches."""
    median_us: float
    """Time of the candidate."""
    spread: float
    """Robust coefficient of variation of its samples."""
    sm_clock_mhz: int
    """Median SM clock; 0 where NVML does not tell."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One program to measure on one problem."""

    schedule: Schedule
    """How it is launched (grid and tile sizes)."""
    artifact: Artifact
    """What is launched."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A candidate that loaded, ran and gave the right answer."""

    accuracy: Accuracy | None
    """Its error over the whole output; None where nothing was compared, because nobody asked for it."""
    first_look_us: float
    """Time of one launch, cold: good enough to tell a hopeless candidate, never reported."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of one candidate from one interleaved run."""

    samples_us: tuple[float, ...]
    """One per round; sample i of every candidate in the run was taken in the same round i."""
    conditions: Conditions
    """State of the GPU during the run."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Timing):
    """The time of one candidate on one problem, with the samples and the conditions."""

    problem: Problem
    """What was computed."""
    schedule: Schedule
    """How."""
    fingerprint: str
    """Fingerprint of the machine code."""
    device: Device
    """The GPU it was measured on."""
    regime: str
    """burst (cool, full clocks), sustained (at the power cap), or graph or graph-cold (replayed in CUDA graphs)."""
    samples_us: tuple[float, ...]
    """Every timed launch, in order. Of a hopeless candidate, one: its look, neither paced nor behind an L2 flush."""
    accuracy: Accuracy | None
    """Error against the reference; None for a hopeless candidate, which was never checked."""
    conditions: Conditions
    """Clocks, power, throttling."""
    runner: str
    """gpu or replay."""


@dataclass(frozen=True, kw_only=True)
class RivalTime:
    """What a rival took next to the winner of a race, in one interleaved run."""

    name: str
    """Its name in the kernel's declaration."""
    failure: str = field(default="", metadata=OMIT_DEFAULT)
    """Why it was not timed; empty where it was."""
    median_us: float | None = None
    """Median of its samples."""
    ours_us: float | None = None
    """Median of our winner's in the same run."""
    ratio: float | None = None
    """Median over the rounds of its time over ours."""
    ratio_low: float | None = None
    """Lower end of its 95% confidence interval."""
    ratio_high: float | None = None
    """Upper end."""
    samples: int = 0
    """Rounds."""
    host_us: float = 0.0
    """What a call costs the host; no part of its time."""
    capturable: bool = False
    """Whether a CUDA graph may hold it: it was captured and replayed."""
    version: str = ""
    """Version of the package that computes, for people."""


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A candidate that gave no measurement."""

    schedule: Schedule
    """How it would have been launched."""
    fingerprint: str
    """Which machine code; empty when it did not build."""
    failure: Failure
    """Why."""


class Runner(Protocol):
    """What the race asks of a GPU. Implementations are interchangeable: gpu, replay, and fakes in tests.

    A failure of one candidate is returned, never raised; the runner stays usable. Only the loss of the GPU itself, or a
    driver that cannot be used at all, raises MeasureError.
    """

    name: str
    """Stored with each measurement: gpu or replay."""
    regimes: frozenset[str]
    """The regimes in which it can time."""

    @property
    def device(self) -> Device:
        """The GPU measured, or the one whose record is replayed."""

    @property
    def device_name(self) -> str:
        """Name of the GPU, which may be known before the rest is."""

    def begin(self, problem: Problem) -> None:
        """Make fresh random inputs and the high-precision reference for `problem`; candidates that follow are for it.

        It may go on in the background. What goes wrong then is raised by the next call.
        """

    def probe(self, candidate: Candidate) -> float | Failure:
        """Load `candidate` and time a launch of it, in microseconds: good enough to tell the hopeless, no more."""

    def check(self, candidate: Candidate) -> Checked | Failure:
        """Run `candidate` over NaN-poisoned output, on random inputs (twice, and in quick succession) and on adversarial ones;
        compare every tile.
        """

    def sample(self, candidates: Sequence[Candidate], *, rounds: int, regime: str) -> list[Batch | Failure]:
        """Time candidates against each other: `rounds` launches each, interleaved, in shuffled order.

        The conditions also tell who else ran on the GPU since the first request of a row of them; with no rounds, only they
        are asked for.
        """

    def close(self) -> None:
        """Give the GPU back. Safe to call twice."""


@runtime_checkable
class RowRunner(Runner, Protocol):
    """A runner that also tells which bits rows have."""

    def rows(
        self, candidate: Candidate, problem: Problem, largest: Problem, sizes: Sequence[Problem]
    ) -> list[int] | Failure:
        """Run `candidate` for `problem` on inputs whose rows are the first rows of those of `largest`, always the same ones;
        digests of the first rows of the outputs, as many as each of `sizes` has.
        """
