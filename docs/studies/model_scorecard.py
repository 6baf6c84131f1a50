"""Compares the model with what others published about Blackwell: `python -m docs.studies.model_scorecard`.

Compiles some sixty schedules (a few minutes on two cores; no GPU) and asks the model for the orders that were published.
Their kernels are not this one, so only orders are compared. Nothing here was used for calibration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tiledsched.build.compiler import BuildTask
from tiledsched.build.pool import BuildPool
from tiledsched.core.device import ResourceFacts, arch_spec
from tiledsched.core.errors import CompilerError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.model import estimate_us
from tiledsched.report.document import Table, to_markdown

Choice = tuple[int, int, int, int]
"""(tile_m, tile_n, occupancy, worker warps)."""
Times = Callable[[Problem, Choice], float]
"""From a problem and a choice to modelled microseconds on one arch."""
CANDIDATES: tuple[Choice, ...] = tuple(
    (tile_m, tile_n, occupancy, warps)
    for (tile_m, tile_n), occupancy, warps in itertools.product(
        [(64, 64), (64, 128), (128, 64), (128, 128)], [1, 2], [4, 8]
    )
)
LARGE: Choice = (256, 128, 1, 8)


@dataclass(frozen=True, kw_only=True)
class Faster:
    """A publication found one schedule faster than another. Each is taken with the better number of warps."""

    arch: str
    """The arch."""
    problem: Problem
    """The problem."""
    winner: tuple[int, int, int]
    """(tile_m, tile_n, occupancy) of the faster schedule."""
    loser: tuple[int, int, int]
    """(tile_m, tile_n, occupancy) of the slower one."""
    published: str
    """What was published, and where."""


@dataclass(frozen=True, kw_only=True)
class Best:
    """A publication named schedules as the best, or as where to start."""

    arch: str
    """The arch."""
    problem: Problem
    """The problem, where we chose what the publication leaves open."""
    winners: tuple[tuple[int, int, int], ...]
    """(tile_m, tile_n, occupancy) of each schedule named; any of them will do."""
    published: str
    """What was published, and where."""


def _problem(seq_len: int, *, causal: bool = False, few: bool = False) -> Problem:
    if few:
        return Attention.standard(seq_len=seq_len, head_dim=128, causal=causal, batch=1, heads=8)
    return Attention.standard(seq_len=seq_len, head_dim=128, causal=causal)


PLAYBOOK = Attention.standard(seq_len=2048, head_dim=128, causal=True, batch=4, heads=32)
"""The problem of the cuTile playbook's ladder of optimizations, as the script beside it has it."""

CLAIMS: tuple[Faster | Best, ...] = (
    Faster(
        arch="sm_121",
        problem=PLAYBOOK,
        winner=(64, 64, 2),
        loser=(64, 64, 1),
        published="occupancy 2 over 1: 79.5 against 66.5 TFLOP/s, 1.20x (cuTile playbook, GB10)",
    ),
    Best(
        arch="sm_121",
        problem=PLAYBOOK,
        winners=((64, 64, 2),),
        published="start at 64x64, occupancy 2 (cuTile playbook, GB10)",
    ),
    # At S=1024 the sign flips between the author's three sessions; docs.studies.blackwell has them all.
    *(
        Faster(
            arch="sm_121",
            problem=_problem(seq, few=True),
            winner=(64, 128, 1),
            loser=(64, 64, 1),
            published=f"64x128 over 64x64: {gain}x (TiledAttention, GB10, mean of three sessions)",
        )
        for seq, gain in ((4096, 1.094), (8192, 1.103))
    ),
    *(
        Best(
            arch="sm_120",
            problem=_problem(4096, causal=causal),
            winners=((64, 64, 2),),
            published="stored winner 64x64, occupancy 2 (RTX PRO 6000)",
        )
        for causal in (False, True)
    ),
    Best(
        arch="sm_100",
        problem=_problem(4096, causal=True),
        winners=((128, 128, 2),),
        published="stored winner 128x128, occupancy 2 (B200)",
    ),
    *(
        Best(
            arch="sm_103",
            problem=_problem(4096, causal=causal),
            winners=((256, 128, 1), (128, 128, 2)),
            published="start at 256x128, occupancy 1, or 128x128, occupancy 2 (cuTile playbook)",
        )
        for causal in (False, True)
    ),
)


def modelled(arch: str, pool: BuildPool) -> Times:
    """Modelled times of every candidate on `arch`, after compiling them for both masks."""
    candidates = (*CANDIDATES, LARGE) if arch == "sm_103" else CANDIDATES
    problems = {claim.problem.causal: claim.problem for claim in CLAIMS if claim.arch == arch}
    schedules = {
        (causal, choice): _schedule(arch, problem, choice)
        for causal, problem in problems.items()
        for choice in candidates
    }
    keys = {(causal, schedule): (causal, choice) for (causal, choice), schedule in schedules.items()}
    facts: dict[tuple[bool, Choice], ResourceFacts] = {}
    for built in pool.build(
        [
            BuildTask(kernel=Attention.locator(), schedule=schedule, problem=problems[causal], arch=arch)
            for (causal, _), schedule in schedules.items()
        ]
    ):
        if built.artifact is None:
            raise CompilerError(f"{built.task.schedule.short()} does not compile for {arch}: {built.failure}")
        facts[keys[built.task.problem.causal, built.task.schedule]] = built.artifact.facts

    def times(problem: Problem, choice: Choice) -> float:
        key = problem.causal, choice
        return estimate_us(problem, schedules[key], facts[key], arch_spec(arch))

    return times


def judge(claim: Faster | Best, times: Times) -> tuple[str, str]:
    """(what the model says, whether that is right, a tie or wrong)."""
    candidates = (*CANDIDATES, LARGE) if claim.arch == "sm_103" else CANDIDATES

    def best_of(tile: tuple[int, int, int]) -> float:
        return min(times(claim.problem, choice) for choice in candidates if choice[:3] == tile)

    if isinstance(claim, Faster):
        ratio = best_of(claim.loser) / best_of(claim.winner)
        return f"{ratio:.3f}x", "right" if ratio > 1.005 else "a tie" if ratio > 0.995 else "wrong"
    ranked = sorted({choice[:3] for choice in candidates}, key=best_of)
    place = min(ranked.index(winner) for winner in claim.winners)
    ahead = (
        best_of(ranked[1]) / best_of(ranked[0]) - 1 if place == 0 else best_of(ranked[place]) / best_of(ranked[0]) - 1
    )
    first = "x".join(map(str, ranked[0][:2])) + f" occupancy {ranked[0][2]}"
    said = f"no. {place + 1}, {ahead:.1%} {'ahead' if place == 0 else f'behind {first}'}"
    return said, "right" if place == 0 else "a tie" if ahead < 0.005 else "wrong"


def rows() -> Iterator[tuple[str, ...]]:
    """One row for each claim."""
    with BuildPool() as pool:
        times = {arch: modelled(arch, pool) for arch in dict.fromkeys(claim.arch for claim in CLAIMS)}
    for claim in CLAIMS:
        yield (claim.arch, str(claim.problem), claim.published, *judge(claim, times[claim.arch]))


def _schedule(arch: str, problem: Problem, choice: Choice) -> Schedule:
    tile_m, tile_n, occupancy, warps = choice
    plain = {name: knob.default for name, knob in space_for(arch, Attention).knobs.items()}
    if "loop_split" in plain and problem.causal:
        plain["loop_split"] = True
    return Schedule(plain, tile_m=tile_m, tile_n=tile_n, occupancy=occupancy, num_worker_warps=warps)


if __name__ == "__main__":
    print(
        to_markdown([Table(head=("arch", "problem", "published", "modelled", "verdict"), rows=tuple(rows()))]), end=""
    )
