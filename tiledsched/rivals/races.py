"""Times rivals next to the winner of a race, through a process of their own.

What decides between schedules is measured by a process that holds neither torch nor a compiler. Rivals need torch, so that they
are timed by another one, which is started when the first is to be timed and takes part in nothing else: it launches our winner's
cubin as the first does, and rivals as a program would call them, in turn. The first process is idle meanwhile.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Mapping, Sequence

from tiledsched.core.config import log
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.processes import python_command
from tiledsched.measure.estimate import Timing
from tiledsched.measure.gpu import GpuRunner
from tiledsched.measure.runner import Candidate, RivalTime
from tiledsched.measure.timing import BURST_GAP_S

RIVAL_COMMAND = python_command("tiledsched.rivals.worker")
ROUNDS = {"burst": 30, "sustained": 200, "graph": 30, "graph-cold": 30}
"""Samples of each, by regime."""
LEAST_ROUNDS = 6
"""Samples below which a rival counts as not timed: fewer have no 95% interval."""
VERSIONS_S = 300.0
"""How long their versions may take: packages are imported, and one may compile itself meanwhile."""
RACE_S = 600.0
"""How long a race of rivals may take: some compile themselves, for minutes."""


def rival_time(
    name: str,
    samples_us: Sequence[float],
    ours_us: Sequence[float],
    *,
    host_us: float,
    version: str,
    capturable: bool,
    failure: str = "",
) -> RivalTime:
    """What a rival takes: medians, and the interval of the ratio by round.

    Args:
        name: its name in the kernel's declaration.
        samples_us: its samples in microseconds; NaN where the host was late.
        ours_us: samples of our winner in the same rounds.
        host_us: microseconds that a call takes the host.
        version: of the package that computes.
        capturable: whether it was captured in a CUDA graph and replayed.
        failure: why its samples say nothing; empty where they do.
    """
    pairs = [pair for pair in zip(samples_us, ours_us, strict=True) if not any(map(math.isnan, pair))]
    if len(pairs) < LEAST_ROUNDS:
        failure = failure or "host too slow: the GPU waited for it nearly every time"
    if failure:
        return RivalTime(name=name, failure=failure, host_us=round(host_us, 1), version=version)
    ratio = Timing.of([theirs / ours for theirs, ours in pairs])
    return RivalTime(
        name=name,
        median_us=statistics.median(theirs for theirs, _ in pairs),
        ours_us=statistics.median(ours for _, ours in pairs),
        ratio=ratio.median_us,
        ratio_low=ratio.ci_low_us,
        ratio_high=ratio.ci_high_us,
        samples=len(pairs),
        host_us=round(host_us, 1),
        capturable=capturable,
        version=version,
    )


class RivalRaces:
    """Times rivals through a process of their own. If that fails, a problem has no times of rivals, and its tune goes on.

    Args:
        kernel: whose rivals.
        runner: measures our own; both hold one GPU.
        regime: burst, sustained, graph or graph-cold.
        command: how to start the process; tests start another.
        rounds: samples of each rival, by regime.
    """

    def __init__(
        self,
        kernel: KernelClass,
        runner: GpuRunner,
        *,
        regime: str,
        command: Sequence[str] = RIVAL_COMMAND,
        rounds: Mapping[str, int] = ROUNDS,
    ) -> None:
        self._kernel, self._ours, self._regime = kernel, runner, regime
        self._command, self._rounds = command, rounds[regime]
        self._rivals: GpuRunner | None = None
        self._problem: Problem | None = None
        self._unable = False

    def race(self, problem: Problem, candidate: Candidate) -> list[RivalTime] | None:
        """Time every rival of `problem` next to `candidate`; None where that cannot be done, of which the log warns once."""
        rivals = self._started()
        if rivals is None:
            return None
        try:
            if self._problem != problem:
                rivals.beside_gib = None if self._ours.beside_gib is None else 0.0  # ours holds what is taken
                rivals.begin(problem)
                self._problem = problem
            self._ours.meet(rivals.meet(self._ours.meet(frozenset())))
            request = (self._rounds, self._regime, self._ours.seed, BURST_GAP_S * 1e3)
            answer = rivals.ask(RACE_S, "rivals", *request, candidates=[candidate])
        except MeasureError as error:
            answer = Failure(kind=FailureKind.LAUNCH_FAILURE, message=str(error))
        if isinstance(answer, Failure):
            log.warning("%s: its rivals were not timed: %s", problem, answer.message)
            self._problem = None
            return None
        return answer

    def versions(self, problem: Problem) -> Mapping[str, str]:
        """Name -> version of every rival of `problem` that is installed; none where the process cannot say."""
        rivals = self._started()
        try:
            found = rivals and rivals.ask(VERSIONS_S, "versions", self._kernel.locator(), problem)
        except MeasureError:
            found = None
        return found if isinstance(found, Mapping) else {}

    def _started(self) -> GpuRunner | None:
        """What owns the process, which is started with the first call; None where it cannot be."""
        if self._rivals is None and not self._unable:
            self._rivals = self._ours.companion(self._command)
            try:
                self._rivals.wait()
            except MeasureError as error:
                log.warning("rivals are not timed: %s", error)
                self._unable = True
                self.close()
        return self._rivals

    def close(self) -> None:
        """End the process. Safe to call twice."""
        if self._rivals is not None:
            self._rivals.close()
            self._rivals = None


def can_race(kernel: KernelClass) -> bool:
    """Whether the kernel names rivals, and torch is there to call them."""
    return kernel.rivals is not Kernel.rivals and importlib.util.find_spec("torch") is not None
