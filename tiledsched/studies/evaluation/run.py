"""Runs the evaluation of the TiledAttention paper on the GPU of this machine. What was measured before is not measured again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass
from tiledsched.ops.bench import bench_here, choose_methods
from tiledsched.rivals.rows import read_rows
from tiledsched.studies.evaluation.pages import write_evaluation
from tiledsched.studies.evaluation.rows import METHODS, problems
from tiledsched.studies.evaluation.tiles import race_tiles, tiling_rows
from tiledsched.tuning import session


def run_evaluation(
    kernel: KernelClass,
    folder: Path,
    *,
    methods: Sequence[str] | None = None,
    budget_s: float | None = None,
    jobs: int | None = None,
    tiles: bool = True,
    arch: str = "",
    tune: Callable[..., Any] = session.tune,
    **options: Any,
) -> None:
    """Time every method on the paper's problems, and race the tiles. Each result is stored in the folder as it is known.

    Args:
        kernel: attention.
        folder: where `bench.csv` and the tiles' results are; a run that was stopped goes on from them.
        methods: names of the methods that take part; None for all of the paper's that are installed.
        budget_s: seconds for everything; None for no limit.
        jobs: compile processes; None for one per CPU.
        tiles: whether to race the tiles after the benchmark.
        arch: arch of the GPU; empty to ask the GPU.
        tune: what races the tiles.
        options: of `tiledsched.ops.bench.bench_here`.

    Raises:
        ConfigError: none of the named methods is one of the paper's.
        MeasureError: there is no GPU that can be used.
    """
    from tiledsched.measure.nvml import current_device

    chosen = [each for each in choose_methods(kernel, methods or list(METHODS)) if each.name in METHODS]
    if not chosen:
        raise ConfigError(f"the study knows {', '.join(METHODS)}; name some of them with --methods")
    began = time.monotonic()
    bench_here(kernel, problems(), path=folder / "bench.csv", methods=chosen, budget_s=budget_s, **options)
    if tiles:
        left = None if budget_s is None else max(0.0, budget_s - (time.monotonic() - began))
        race_tiles(arch or current_device().arch, folder, kernel, budget_s=left, jobs=jobs, tune=tune)


def write_pages(kernel: KernelClass, folder: Path, regime: str) -> tuple[list[Path], int, int]:
    """Write tables and figures of what a folder holds: the files, and how many problems are measured and are left.

    Raises:
        ConfigError: nothing was measured there.
    """
    path = folder / "bench.csv"
    if not path.exists():
        raise ConfigError(f"{folder} holds no study; leave out --summary to measure one")
    rows = [row for row in read_rows(path) if row.regime == regime]
    files = write_evaluation(folder, rows, tiling_rows(folder, kernel))
    known = len({row.problem for row in rows})
    return files, known, len(problems()) - known
