"""`bench` as a function: for the command line, and for a worker of a fleet, which runs it for one problem."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from tiledsched.bench.methods import Method, choose_methods
from tiledsched.bench.rows import BenchRow, Cell, append_rows, finished_cells
from tiledsched.bench.run import BenchOptions, Harness, run_bench
from tiledsched.bench.sampling import USUAL_PACE, Pace
from tiledsched.core import config
from tiledsched.core.problem import KernelClass, Problem


def bench_here(
    kernel: KernelClass,
    problems: Sequence[Problem],
    *,
    db: str | None = None,
    methods: Sequence[str] | Sequence[Method] | None = None,
    ceiling: bool = False,
    regime: str = "burst",
    rounds: int = 30,
    budget_s: float | None = None,
    verify: bool = False,
    harness: Harness | None = None,
    pace: Pace = USUAL_PACE,
    done: Callable[[Sequence[str]], Collection[Cell]] = lambda methods: (),
    keep: Callable[[Sequence[BenchRow]], None] = lambda rows: None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[BenchRow]:
    """Time a kernel and its rivals on this GPU.

    Args:
        kernel: the kernel.
        problems: what to compute.
        db: database to serve from; None for the user's.
        methods: the methods that take part, or their names; None for all that are installed.
        ceiling: also time a large matmul, and give every rate over its rate.
        regime: burst, sustained or both.
        rounds: samples of a quick method.
        budget_s: seconds for all problems together.
        verify: check that the machine code that is launched is the one that was measured.
        harness: what runs the methods; None for the current CUDA device.
        pace: pauses between launches, and how long the GPU is warmed up.
        done: called with the names of the methods; returns the cells to leave out.
        keep: called with the rows of each cell as soon as they are known.
        progress: called with a line for each cell.

    Raises:
        TiledschedError: a method is unknown, or the GPU cannot be used.
    """
    from tiledsched.bench.harness import TorchHarness
    from tiledsched.measure.lock import holding_current_gpu

    if db:
        os.environ["TILEDSCHED_DB"] = db  # what is launched reads its own settings
        for forget in config.watchers:  # and this process may have read another database before
            forget()
    chosen = choose_methods(kernel, methods, problems, ceiling=ceiling)
    regimes = ("burst", "sustained") if regime == "both" else (regime,)
    left_out = done([method.name for method in chosen])
    options = BenchOptions(methods=tuple(chosen), regimes=regimes, rounds=rounds, budget_s=budget_s, pace=pace)
    with holding_current_gpu(), config.configure(compile="wait"):  # torch is not to be timed as ours
        here = harness or TorchHarness(verify=verify)
        return run_bench(problems, options, here, done=left_out, keep=keep, progress=progress)


def bench_to_file(kernel: KernelClass, problems: Sequence[Problem], path: Path, **options: Any) -> list[BenchRow]:
    """Run a bench and append the rows of each cell to a CSV file. Cells that the file holds are left out.

    Args:
        kernel: the kernel.
        problems: what to compute.
        path: the CSV file.
        options: of :func:`bench_here`.

    Raises:
        ConfigError: the file is not a bench, or has other columns.
        TiledschedError: as :func:`bench_here`.
    """
    return bench_here(
        kernel,
        problems,
        done=lambda methods: finished_cells(path, methods),
        keep=lambda rows: append_rows(rows, path),
        **options,
    )
