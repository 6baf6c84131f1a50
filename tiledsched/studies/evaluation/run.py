"""Runs the evaluation of the TiledAttention paper on the GPU of this machine: the bench, then the tiling sensitivity, for which
the best schedule of each tile is raced. What was measured before is not measured again.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tiledsched.core.config import load_settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.ops.bench import bench_here, choose_methods
from tiledsched.rivals.rows import read_rows
from tiledsched.serve.entries import load_table
from tiledsched.studies.evaluation.pages import write_evaluation
from tiledsched.studies.evaluation.rows import METHODS, TilingRow, problems
from tiledsched.tuning import session

TILES = ((32, 64), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256))
"""(tile_m, tile_n): the tiles that the paper compares."""
REGIMES = (("Short S", 1024), ("Mid S", 4096), ("Long S", 8192))
HEAD_DIMS = (64, 128)
AROUND = {"occupancy": (1, 2), "num_worker_warps": (4, 8)}
"""Values tried with each tile in addition to those of the served schedule, because a tile is judged by its best
schedule.
"""


def tile_problems() -> list[tuple[str, Problem]]:
    """Pairs of a regime and a problem: float16, no mask, one batch of eight heads."""
    shared = {"batch": 1, "heads": 8, "kv_heads": 8, "dtype": "float16", "causal": False}
    make = kernel_named("attention").problem
    return [
        (regime, make(seq_q=length, seq_k=length, head_dim=head_dim, **shared))
        for head_dim in HEAD_DIMS
        for regime, length in REGIMES
    ]


def candidates(space: SearchSpace, problem: Problem, served: Schedule) -> list[Schedule]:
    """The served schedule, then each tile with the other knobs of the served schedule and of the default, at a few
    occupancies and warps.

    Both, as what suits one tile may suit no other; what cannot work is left out.
    """
    knobs = [knob for knob in AROUND if knob in space.knobs]
    found = [served]
    for base in (served, space.default(problem)):
        for tile in TILES:
            for values in itertools.product(*(dict.fromkeys((base[knob], *AROUND[knob])) for knob in knobs)):
                found.append(base.replace(tile_m=tile[0], tile_n=tile[1], **dict(zip(knobs, values, strict=True))))
    return [each for each in dict.fromkeys(found) if not space.unworkable(each, problem)]


def race_tiles(
    arch: str,
    folder: Path,
    kernel: KernelClass,
    *,
    budget_s: float | None = None,
    jobs: int | None = None,
    tune: Callable[..., Any] = session.tune,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Race the tiles of every problem; the measurements go to tiles.db in the folder, which :func:`tiling_rows` reads.

    What an earlier call measured is known, so that it goes on where that one stopped. After `budget_s` the other problems are
    left for the next call.

    Args:
        arch: arch of the GPU.
        folder: where the measurements go.
        kernel: attention.
        budget_s: seconds for all problems; None for no limit.
        jobs: compile processes; None for one per CPU.
        tune: what races the schedules of a problem.
        clock: seconds, by which the budget is counted.

    Raises:
        TiledschedError: as `tiledsched.tune` does.
    """
    space = space_for(arch, kernel)
    table = load_table(load_settings(), kernel=kernel, archs={arch})
    named = tile_problems()
    began = clock()
    for number, (_, problem) in enumerate(named):
        left_s = None if budget_s is None else budget_s - (clock() - began)
        if left_s is not None and left_s <= 0:
            return
        served = space.complete(table.resolve(problem, arch, "").schedule)
        tune(
            kernel,
            [problem],
            arch=arch,
            db=str(folder / "tiles.db"),
            candidates=json.dumps([dict(each) for each in candidates(space, problem, served)]),
            runner="gpu",
            jobs=jobs,
            effort="thorough",
            budget_s=None if left_s is None else left_s / (len(named) - number),
        )


def tiling_rows(folder: Path, kernel: KernelClass) -> list[TilingRow]:
    """The rows of tuning_results.csv, from tiles.db in the folder; empty where there is none."""
    from tiledsched.report import build_report
    from tiledsched.store.db import TuningDB

    path = folder / "tiles.db"
    if not path.exists():
        return []
    with TuningDB.open(str(path), read_only=True) as db:
        found = {
            one.problem: one.tiles
            for arch in {line.arch for line in db.landscapes()}
            for one in build_report(db, arch, kernel).measured.problems
            if one.tiles
        }
    return [
        TilingRow(regime=regime, problem=problem, best=found[problem][0], runner_up=(*found[problem], None)[1])
        for regime, problem in tile_problems()
        if problem in found
    ]


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
