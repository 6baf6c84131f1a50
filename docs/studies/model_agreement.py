"""How well the model orders measured programs: `python -m docs.studies.model_agreement FILE...` (or `--db FILE`).

Prints one table for the static model alone and one with the measured factors, where each problem is judged with factors
fitted to the others only: every landscape with the same sequence lengths, head dimension and mask is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import spearmanr

from docs.studies.flags import flag, parser_with
from docs.studies.landscapes import Landscape, landscape_of, read_landscape, shape_of
from docs.studies.model_residual import fit
from tiledsched.core.device import arch_spec
from tiledsched.core.problem import Problem
from tiledsched.core.space_files import space_for
from tiledsched.report.document import Table, to_markdown
from tiledsched.store.db import TuningDB

TOPS = (1, 5, 10)
"""How many of the programs that the model likes best are looked at for regret."""
NEAR = 1.01
"""A program counts as good as the best up to this many times the best's time."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How well the model orders one landscape."""

    problem: Problem
    """The problem."""
    arch: str
    """The arch it was measured on."""
    programs: int
    """Distinct programs measured; the same program under several schedules counts once, with its median."""
    rho: float
    """Spearman's rank correlation of modelled and measured time; 1 is the same order."""
    best_rank: int
    """Place of the truly fastest program in the model's order, from 1."""
    near_rank: int
    """Place of the first program that is within 1% of the fastest."""
    regret: dict[int, float]
    """n -> time of the fastest among the model's first n over the true fastest, minus 1."""
    scale: float
    """Geometric mean of modelled over measured time."""


def evaluate(landscapes: Sequence[Landscape], *, at_defaults: bool = False, held_out: bool = False) -> list[Agreement]:
    """Compare the model with every landscape.

    Args:
        landscapes: of one arch and one regime.
        at_defaults: only programs whose measured-only knobs are at their defaults: those that the model chooses among
            where nothing is measured. Best and regret are then taken among them, too.
        held_out: with the measured factors, fitted to the landscapes of other problems.
    """
    found = []
    for one in landscapes:
        modelled = one.modelled_us
        if held_out:
            residual = fit([other for other in landscapes if shape_of(other.problem) != shape_of(one.problem)])
            modelled = modelled * np.exp([residual.log_factor(p.schedule, p.facts) for p in one.programs])
        kept = _at_defaults(one) if at_defaults else np.ones(len(one.programs), dtype=bool)
        if kept.any():
            found.append(agreement(one.problem, one.arch, one.measured_us[kept], modelled[kept]))
    return found


def agreement(problem: Problem, arch: str, measured: ArrayLike, modelled: ArrayLike) -> Agreement:
    """Compare two lists of times of the same programs. Among equal estimates the slowest program counts as first."""
    times, estimates = np.asarray(measured, dtype=float), np.asarray(modelled, dtype=float)
    ranked, best = times[np.lexsort((-times, estimates))], float(times.min())
    return Agreement(
        problem=problem,
        arch=arch,
        programs=len(times),
        rho=float(spearmanr(times, estimates).statistic),
        best_rank=int(np.flatnonzero(ranked == best)[0]) + 1,
        near_rank=int(np.flatnonzero(ranked <= NEAR * best)[0]) + 1,
        regret={top: float(ranked[:top].min()) / best - 1.0 for top in TOPS},
        scale=math.exp(float(np.mean(np.log(estimates / times)))),
    )


def expected_blocks(landscapes: Sequence[Landscape]) -> tuple[int, int]:
    """For how many programs the kernel expects the right number of blocks on an SM before they are built; and how many
    programs there are.
    """
    right = [
        one.problem.declaration.cost.expected(one.problem, p.schedule, arch_spec(one.arch)).ctas_per_sm
        == p.facts.ctas_per_sm
        for one in landscapes
        for p in one.programs
    ]
    return sum(right), len(right)


def stored_landscapes(db: TuningDB, regime: str = "burst") -> list[Landscape]:
    """Every landscape of one regime in a database."""
    found = []
    for summary in db.landscapes():
        if summary.regime == regime:
            facts = {fingerprint: record.facts for (_, fingerprint), record in db.artifacts(summary.arch).items()}
            stored = db.landscape(summary.problem, summary.device_name, regime)
            found.append(landscape_of([one.measurement for one in stored], facts))
    return found


def table(agreements: Sequence[Agreement]) -> str:
    """The agreements as a Markdown table, and how often the model's first ten contain the best program, or one within
    1% of it.
    """
    head = ("problem", "arch", "programs", "rho", "best is no.", "within 1% is no.")
    rows = [
        (
            str(one.problem),
            one.arch,
            str(one.programs),
            f"{one.rho:.2f}",
            str(one.best_rank),
            str(one.near_rank),
            *(f"{100 * one.regret[top]:.1f}%" for top in TOPS),
            f"{one.scale:.2f}",
        )
        for one in agreements
    ]
    printed = to_markdown([Table(head=(*head, *(f"regret of first {top}" for top in TOPS), "scale"), rows=rows)])
    deepest = TOPS[-1]
    strict, near = (
        sum(rank <= deepest for rank in ranks)
        for ranks in ([a.best_rank for a in agreements], [a.near_rank for a in agreements])
    )
    return (
        f"{printed}\nAmong the first {deepest}: the best in {strict} of {len(agreements)} problems, a program within 1% of it "
        f"in {near}."
    )


def _at_defaults(landscape: Landscape) -> NDArray[np.bool_]:
    pins = space_for(landscape.arch, landscape.problem.declaration).modelled_pins()
    return np.array([all(p.schedule[name] == value for name, value in pins.items()) for p in landscape.programs])


def main() -> None:
    """Print the tables for the landscapes that the command line names."""
    parser = parser_with(
        flag("files", nargs="*", type=Path, help="landscape files of one arch and regime"),
        flag("--db", help="file or URL of a tuning database, instead of files"),
        flag("--regime", default="burst", help="burst or sustained, with --db"),
        flag("--at-defaults", action="store_true", help="only programs with measured-only knobs at defaults"),
        prog="python -m docs.studies.model_agreement",
        description=__doc__,
    )
    arguments = parser.parse_args()
    if bool(arguments.files) == bool(arguments.db):
        parser.error("give landscape files or --db, one of the two")
    if arguments.db:
        with TuningDB.open(arguments.db, read_only=True) as database:
            landscapes = stored_landscapes(database, arguments.regime)
    else:
        landscapes = [read_landscape(path) for path in arguments.files]
    print(f"The static model:\n\n{table(evaluate(landscapes, at_defaults=arguments.at_defaults))}")
    right, programs = expected_blocks(landscapes)
    print(f"\nBlocks on an SM: as expected of {right} of {programs} programs.")
    attention = all(one.problem.kernel == "attention" for one in landscapes)  # whose factors model_residual knows
    if attention and len({shape_of(one.problem) for one in landscapes}) > 1:
        corrected = evaluate(landscapes, at_defaults=arguments.at_defaults, held_out=True)
        print(f"\nWith measured factors, each problem held out:\n\n{table(corrected)}")


if __name__ == "__main__":
    main()
