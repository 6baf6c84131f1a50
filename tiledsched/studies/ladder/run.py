"""Measures every rung from the naive attention kernel to the schedule that is served, on the GPU of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tiledsched.bench.rows import append_rows, finished_cells
from tiledsched.core.problem import Problem
from tiledsched.studies.ladder.rungs import methods


def run_ladder(
    problems: Sequence[Problem],
    path: Path,
    *,
    regime: str = "burst",
    rounds: int = 30,
    budget_s: float | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Time each rung on each problem. Each result is appended to the file as it is known; what is in it is not measured again.

    Args:
        problems: what to compute.
        path: a CSV file.
        regime: burst or sustained.
        rounds: samples of a quick rung.
        budget_s: seconds for everything; None for no limit.
        progress: called with a line for each cell.

    Raises:
        MeasureError: there is no GPU that can be used.
    """
    from tiledsched.bench.harness import TorchHarness
    from tiledsched.bench.run import BenchOptions, run_bench
    from tiledsched.measure.lock import holding_current_gpu

    steps = methods()
    options = BenchOptions(methods=tuple(steps), regimes=(regime,), rounds=rounds, budget_s=budget_s)
    done = finished_cells(path, [step.name for step in steps])
    with holding_current_gpu():
        run_bench(
            problems, options, TorchHarness(), done=done, keep=lambda rows: append_rows(rows, path), progress=progress
        )
