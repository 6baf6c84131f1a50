"""A runner that answers from a recorded landscape instead of a GPU, so that search and tests run anywhere.

Samples are drawn, with replacement, from those recorded for the program; a candidate that was never recorded fails.
What it returns is marked `replay` and never stored as a fresh measurement of a device.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.groups import nested
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.runner import Batch, Candidate, Checked, Device, Measurement

Key = tuple[str, str, tuple[tuple[int, int, int], ...]]


class ReplayRunner:
    """Replays measurements of one device.

    Args:
        kernel: whose candidates are replayed; it tells the grids, which are part of a program's identity.
        measurements: what was recorded, on one device; of one program the last one given counts.
        seed: of the draws.

    Raises:
        MeasureError: nothing was recorded, or on several devices.
    """

    name = "replay"

    def __init__(self, kernel: KernelClass, measurements: Iterable[Measurement], *, seed: int = 0) -> None:
        self._kernel = kernel
        self._rng = random.Random(seed)
        self._problem: Problem | None = None
        recorded = list(measurements)
        devices = {measurement.device for measurement in recorded}
        if len(devices) != 1:
            raise MeasureError(f"a replay needs the record of one device, got {len(devices)}; choose one")
        self.device: Device = devices.pop()
        self.regimes = frozenset(measurement.regime for measurement in recorded)
        self._recorded = nested(
            (self._key(each.problem, each.fingerprint, each.schedule), each.regime, each) for each in recorded
        )

    @property
    def device_name(self) -> str:
        """Name of the GPU whose record is replayed."""
        return self.device.name

    def _key(self, problem: Problem, fingerprint: str, schedule: Schedule) -> Key:
        return problem.id, fingerprint, self._kernel.grids(problem, schedule, self.device)

    def begin(self, problem: Problem) -> None:
        """Choose the landscape.

        Raises:
            MeasureError: nothing was recorded for `problem`.
        """
        if not any(recorded_problem == problem.id for recorded_problem, _, _ in self._recorded):
            raise MeasureError(f"nothing was recorded for {problem} on {self.device.name}; record it on the GPU first")
        self._problem = problem

    def probe(self, candidate: Candidate) -> float | Failure:
        """One recorded sample."""
        found = self._find(candidate)
        return found if isinstance(found, Failure) else self._rng.choice(found.samples_us)

    def check(self, candidate: Candidate) -> Checked | Failure:
        """The recorded accuracy, and one recorded sample as first look."""
        found = self._find(candidate)
        if isinstance(found, Failure):
            return found
        unknown = Accuracy(max_abs_error=0.0, worst_tile_error=0.0, worst_tile=(0, 0, 0), repeatable=True)
        return Checked(accuracy=found.accuracy or unknown, first_look_us=self._rng.choice(found.samples_us))

    def sample(self, candidates: Sequence[Candidate], *, rounds: int, regime: str) -> list[Batch | Failure]:
        """Draws from the recorded samples."""
        batches: list[Batch | Failure] = []
        for candidate in candidates:
            found = self._find(candidate, regime)
            if isinstance(found, Failure):
                batches.append(found)
            else:
                drawn = tuple(self._rng.choices(found.samples_us, k=rounds))
                batches.append(Batch(samples_us=drawn, conditions=found.conditions))
        return batches

    def _find(self, candidate: Candidate, regime: str = "") -> Measurement | Failure:
        """What was recorded of a candidate: in `regime`, or in either where none of it was."""
        assert self._problem is not None, "begin comes first"
        recorded = self._recorded.get(self._key(self._problem, candidate.artifact.fingerprint, candidate.schedule), {})
        found = recorded.get(regime) if regime in self.regimes else next(iter(recorded.values()), None)
        message = f"{candidate.schedule.short()} was not recorded for {self._problem}"
        return found or Failure(kind=FailureKind.LAUNCH_FAILURE, message=message)

    def close(self) -> None:
        """Do nothing: no GPU is held."""
