"""How well the model orders programs that were measured: ``python -m tiledsched.model.evaluate --db FILE``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tiledsched.device import arch_spec
from tiledsched.model.static import estimate_us, grid_blocks
from tiledsched.problem import Problem
from tiledsched.space import space_for
from tiledsched.store.db import TuningDB

TOPS = (1, 5, 10)
"""Depths of the model's list at which regret is taken."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The model against one landscape."""

    problem: Problem
    """What was measured."""
    arch: str
    """Where."""
    programs: int
    """Distinct programs measured; the same program under several schedules counts once, with its median."""
    rho: float
    """Spearman's rank correlation of modelled and measured time; 1 is the same order."""
    best_rank: int
    """Place of the truly fastest on the model's list, from 1."""
    regret: dict[int, float]
    """Time of the fastest among the model's first n over the true fastest, minus 1; by n."""
    scale: float
    """Geometric mean of modelled over measured time."""


def evaluate(db: TuningDB, *, regime: str = "burst", at_defaults: bool = False) -> list[Agreement]:
    """The model against every landscape of `db` in `regime`.

    With `at_defaults`, only programs whose measured-only knobs, which the model cannot see, are at their defaults: those
    it chooses among where nothing is measured. Best and regret are then taken among them, too.
    """
    found = []
    for summary in db.landscapes():
        if summary.regime != regime:
            continue
        spec, artifacts, space = arch_spec(summary.arch), db.artifacts(summary.arch), space_for(summary.arch)
        pins = space.modelled_pins() if at_defaults else {}
        measured: dict[tuple[str, int], list[float]] = {}
        modelled: dict[tuple[str, int], float] = {}
        for stored in db.landscape(summary.problem, summary.device_name, regime):
            one = stored.measurement
            facts = artifacts[summary.arch, one.fingerprint].facts
            schedule = space.complete(one.schedule)
            if facts is None or any(schedule[name] != value for name, value in pins.items()):
                continue
            program = one.fingerprint, grid_blocks(summary.problem, one.schedule, spec)
            measured.setdefault(program, []).append(one.median_us)
            modelled[program] = estimate_us(summary.problem, one.schedule, facts, spec)
        if not measured:
            continue
        times = [float(np.median(values)) for values in measured.values()]
        found.append(agreement(summary.problem, summary.arch, times, list(modelled.values())))
    return found


def agreement(problem: Problem, arch: str, measured: Sequence[float], modelled: Sequence[float]) -> Agreement:
    """Compare two lists of times of the same programs. Among equal estimates the slowest counts as first."""
    times, order = np.asarray(measured), np.lexsort((-np.asarray(measured), np.asarray(modelled)))
    best = float(times.min())
    return Agreement(
        problem=problem, arch=arch, programs=len(times), rho=spearman(measured, modelled),
        best_rank=int(np.flatnonzero(times[order] == best)[0]) + 1,
        regret={top: float(times[order][:top].min()) / best - 1.0 for top in TOPS},
        scale=math.exp(float(np.mean(np.log(np.asarray(modelled) / times)))),
    )  # fmt: skip


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's rank correlation; equal values share their mean rank."""
    ranks = []
    for values in (first, second):
        _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2.0)[inverse])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def table(agreements: Sequence[Agreement]) -> str:
    """The agreements as a Markdown table."""
    lines = ["| problem | arch | programs | rho | best is no. | " + " | ".join(f"regret of first {top}" for top in TOPS)
             + " | scale |", "|---|---|" + "---:|" * (len(TOPS) + 4)]  # fmt: skip
    for one in agreements:
        regrets = " | ".join(f"{100 * one.regret[top]:.1f}%" for top in TOPS)
        lines.append(f"| {one.problem} | {one.arch} | {one.programs} | {one.rho:.2f} | {one.best_rank} | {regrets} "
                     f"| {one.scale:.2f} |")  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    """Print the table for the database named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m tiledsched.model.evaluate", description=__doc__)
    parser.add_argument("--db", required=True, help="file or URL of a tuning database")
    parser.add_argument("--regime", default="burst", help="burst or sustained")
    parser.add_argument("--at-defaults", action="store_true", help="only programs with measured-only knobs at defaults")
    arguments = parser.parse_args()
    database = TuningDB.open(arguments.db, read_only=True)
    print(table(evaluate(database, regime=arguments.regime, at_defaults=arguments.at_defaults)))


if __name__ == "__main__":
    main()
