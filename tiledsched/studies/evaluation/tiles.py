"""The tiling sensitivity of the evaluation: the best schedule of each tile, raced on the GPU."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledsched.core.config import load_settings
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.report.records import TileTime
from tiledsched.serve.entries import load_table
from tiledsched.tuning import session

TILES = ((32, 64), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256))
"""(tile_m, tile_n): the tiles that the paper compares."""
REGIMES = (("Short S", 1024), ("Mid S", 4096), ("Long S", 8192))
HEAD_DIMS = (64, 128)
AROUND = {"occupancy": (1, 2), "num_worker_warps": (4, 8)}
"""Values tried with each tile in addition to those of the served schedule, because a tile is judged by its best
schedule.
"""


@dataclass(frozen=True, kw_only=True)
class TilingRow:
    """A line of tuning_results.csv."""

    regime: str
    """Short S, Mid S or Long S."""
    problem: Problem
    """The problem whose length and head dimension the line names."""
    best: TileTime
    """The best tile, judged by its best schedule."""
    runner_up: TileTime | None
    """The second best; None where only one tile could be measured."""

    @property
    def drop(self) -> float | None:
        """How much longer the second best tile takes, in percent."""
        return (self.runner_up.us / self.best.us - 1) * 100 if self.runner_up else None

    def to_csv(self) -> dict[str, Any]:
        """One cell for each of the paper's columns."""
        other = self.runner_up
        return {
            "regime": self.regime,
            "S": self.problem.seq_q,
            "D": self.problem.head_dim,
            "best_TM": self.best.tile[0],
            "best_TN": self.best.tile[1],
            "best_median_ms": self.best.us / 1e3,
            "runner_TM": other.tile[0] if other else None,
            "runner_TN": other.tile[1] if other else None,
            "runner_median_ms": other.us / 1e3 if other else None,
            "sensitivity_drop_percent": self.drop,
        }


COLUMNS = (
    "regime",
    "S",
    "D",
    "best_TM",
    "best_TN",
    "best_median_ms",
    "runner_TM",
    "runner_TN",
    "runner_median_ms",
    "sensitivity_drop_percent",
)
"""Columns of tuning_results.csv, in the paper's order."""


def problems() -> list[tuple[str, Problem]]:
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
    named = problems()
    began = clock()
    for number, (_, problem) in enumerate(named):
        left_s = None if budget_s is None else budget_s - (clock() - began)
        if left_s is not None and left_s <= 0:
            return
        served = space.complete(table.resolve(problem, arch, "").schedule)
        file = folder / "tiles.json"
        file.write_text(json.dumps([dict(each) for each in candidates(space, problem, served)]), encoding="utf-8")
        try:
            tune(
                kernel,
                [problem],
                arch=arch,
                db=str(folder / "tiles.db"),
                candidates=str(file),
                runner="gpu",
                jobs=jobs,
                effort="thorough",
                budget_s=None if left_s is None else left_s / (len(named) - number),
            )
        finally:
            file.unlink(missing_ok=True)


def tiling_rows(folder: Path, kernel: KernelClass) -> list[TilingRow]:
    """The rows of tuning_results.csv, from tiles.db in the folder; empty where there is none."""
    from tiledsched.report import build_report
    from tiledsched.store.db import TuningDB

    path = folder / "tiles.db"
    if not path.exists():
        return []
    with TuningDB.open(str(path), read_only=True) as db:
        archs = {line.arch for line in db.landscapes()}
        found = {
            one.problem: one.tiles
            for arch in archs
            for one in build_report(db, arch, kernel).measured.problems
            if one.tiles
        }
    rows = []
    for regime, problem in problems():
        best, runner_up, *_ = [*found.get(problem, ()), None, None]
        if best is not None:
            rows.append(TilingRow(regime=regime, problem=problem, best=best, runner_up=runner_up))
    return rows
