"""The race's runner for a caller's own launches: in the caller's process, on the caller's arrays."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.blame import first_line
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Batch, Candidate, Checked, Device
from tiledsched.measure.timing import LEAST_REST, SHORT_US, sample_rounds
from tiledsched.remember.comparing import OutputComparison
from tiledsched.remember.description import Request
from tiledsched.remember.machine import CallProgram, SearchMachine
from tiledsched.tuning.race import Rules

RULES = Rules(most_rounds=23, short_factor=2, precision=0.005)
"""Fewer rounds than a tune takes: a caller waits for the answer. Programs that differ by less than the rules tell are ties."""
SHORT_GAP_S, GAP_S = 0.001, 0.003
"""From one timed launch to the next, below and above `SHORT_US`."""
LOOKS = 2
"""Launches of a first look, of which the faster counts."""


class CallRunner:
    """Races a caller's programs; see `tiledsched.measure.runner.Runner`.

    Args:
        machine: launches and times.
        device: the GPU.
        programs: what races, by schedule.
        request: the call.
    """

    name = "gpu"
    regimes = frozenset(["burst"])

    def __init__(
        self, machine: SearchMachine, device: Device, programs: Mapping[Schedule, CallProgram], request: Request
    ) -> None:
        self.device, self.device_name = device, device.name
        self.errors: dict[Schedule, Exception] = {}
        """What programs raised as they were launched."""
        self.concurrent_pids: tuple[int, ...] = ()
        """Other processes that ran on the GPU meanwhile."""
        self._machine, self._programs, self._request = machine, programs, request
        self._rng = random.Random(0)
        self._looks: dict[Schedule, float] = {}
        self._launched: set[Schedule] = set()

    def begin(self, problem: Problem) -> None:
        """Nothing: the caller has the arrays."""

    def probe(self, candidate: Candidate) -> float | Failure:
        """The faster of the first launches, in microseconds; a failure where the program does not run."""
        program = self._programs[candidate.schedule]
        try:
            self._launch_first(candidate.schedule)
            watch = self._machine.stopwatch([program], self._request)
            looks = [watch.read(watch.queue(0, paced=True)) for _ in range(LOOKS)]
        except MeasureError:
            raise
        except Exception as error:
            return self._failed(candidate.schedule, error)
        self._looks[candidate.schedule] = min(looks)
        return min(looks)

    def _launch_first(self, schedule: Schedule) -> None:
        if schedule not in self._launched:
            self._machine.first_launch(self._programs[schedule], self._request)
            self._launched.add(schedule)

    def _failed(self, schedule: Schedule, error: Exception) -> Failure:
        self.errors[schedule] = error
        self._machine.check_gpu(error)
        return Failure(kind=kind_of(error), message=first_line(error))

    def compare(self, schedule: Schedule, comparison: OutputComparison) -> Accuracy | Failure:
        """Launch once more and compare the outputs with the right ones."""
        try:
            self._launch_first(schedule)
            return comparison.compare(self._programs[schedule])
        except Exception as error:
            return self._failed(schedule, error)

    def check(self, candidate: Candidate) -> Checked | Failure:
        """Nothing: where outputs are compared, they are before the race."""
        return Checked(accuracy=None, first_look_us=self._looks[candidate.schedule])

    def sample(self, candidates: Sequence[Candidate], *, rounds: int, regime: str) -> list[Batch | Failure]:
        """Samples of each candidate, taken in turn; failures where a launch failed."""
        programs = [self._programs[each.schedule] for each in candidates]
        slowest_us = max((self._looks.get(each.schedule, 0.0) for each in candidates), default=0.0)
        gap_s = max(SHORT_GAP_S if slowest_us < SHORT_US else GAP_S, LEAST_REST * slowest_us / 1e6)
        log = self._machine.log()
        watch = self._machine.stopwatch(programs, self._request)
        try:
            samples = sample_rounds(
                watch, len(programs), rounds=rounds, regime=regime, rng=self._rng, log=log, gap_s=gap_s
            )
        except MeasureError:
            raise
        except Exception as error:  # of which of them is not known: each has run before
            return [self._failed(each.schedule, error) for each in candidates]
        conditions = replace(log.summary(), gap_ms=gap_s * 1e3)
        self.concurrent_pids = conditions.concurrent_pids or self.concurrent_pids
        alone = replace(conditions, concurrent_pids=())
        return [Batch(samples_us=tuple(values), conditions=alone) for values in samples]

    def close(self) -> None:
        """Nothing is held."""


MARKS: tuple[tuple[str, FailureKind], ...] = (
    ("out of memory", FailureKind.OUT_OF_MEMORY),
    ("outofmemory", FailureKind.OUT_OF_MEMORY),
    ("launchtimeout", FailureKind.HANG),
    ("compilertimeout", FailureKind.COMPILE_TIMEOUT),
    ("illegal", FailureKind.ILLEGAL_ADDRESS),
    ("misaligned", FailureKind.ILLEGAL_ADDRESS),
    ("return code -", FailureKind.COMPILER_KILLED),
    ("tile", FailureKind.COMPILE_ERROR),
)
"""What stands in an error's type or message, in lower case, for each kind of failure."""


def kind_of(error: BaseException) -> FailureKind:
    """The kind of failure that an exception of a build or a launch is."""
    text = first_line(error).lower()
    return next((kind for mark, kind in MARKS if mark in text), FailureKind.LAUNCH_FAILURE)
