"""Measures every rung from the naive attention kernel to the schedule that is served, on the GPU of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tiledsched.bench.job import bench_to_file
from tiledsched.bench.run import BenchOptions, Harness
from tiledsched.bench.sampling import USUAL_PACE, Pace
from tiledsched.core.problem import Problem
from tiledsched.studies.ladder.rungs import methods


def run_ladder(
    problems: Sequence[Problem],
    path: Path,
    *,
    regime: str = "burst",
    rounds: int = 30,
    budget_s: float | None = None,
    harness: Harness | None = None,
    pace: Pace = USUAL_PACE,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Time each rung on each problem. Each result is appended to the file as it is known; what is in it is not measured again.

    Args:
        problems: what to compute.
        path: a CSV file.
        regime: burst or sustained.
        rounds: samples of a quick rung.
        budget_s: seconds for everything; None for no limit.
        harness: what runs the rungs; None for the current CUDA device.
        pace: pauses between launches, and how long the GPU is warmed up.
        progress: called with a line for each cell.

    Raises:
        MeasureError: there is no GPU that can be used.
    """
    options = BenchOptions(methods=tuple(methods()), regimes=(regime,), rounds=rounds, budget_s=budget_s, pace=pace)
    bench_to_file(problems, options, path, harness=harness, progress=progress)
