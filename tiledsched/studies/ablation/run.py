"""Climbs from a plain schedule to the tuned one: on the GPU of this machine, or over recorded landscapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tiledsched.bench.rivals import untuned
from tiledsched.core.config import Settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace, accuracy_class
from tiledsched.core.space_files import space_for
from tiledsched.studies.ablation.ladder import Ladder
from tiledsched.studies.ablation.rows import AblationRow
from tiledsched.studies.ablation.sources import CompiledPrograms, RecordedPrograms


def replay_ablation(
    kernel: KernelClass,
    files: Sequence[Path],
    arch: str,
    *,
    start: str = "default",
    rounds: int = 30,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[list[AblationRow]]:
    """The rows of each recorded landscape. Needs neither a GPU nor a compiler.

    Args:
        kernel: the kernel of a landscape that holds nothing.
        files: landscapes.
        arch: the arch on which all of them were recorded.
        start: the first rung, `untuned` or `default`.
        rounds: samples of each schedule in the final run.
        progress: called with a line for each rung.

    Raises:
        ConfigError: a landscape of another arch.
        MeasureError: a landscape that holds nothing.
    """
    from tiledsched.measure.replay import ReplayRunner
    from tiledsched.store.exchange import read_table

    for path in files:
        table = read_table(path)
        first = table.measurements[0].measurement if table.measurements else None
        if first is not None and first.device.arch != arch:
            raise ConfigError(f"{path} was recorded on {first.device.arch}; pass --arch {first.device.arch}")
        recorded_kernel = first.problem.declaration if first is not None else kernel
        space = space_for(arch, recorded_kernel)
        recorded = RecordedPrograms(table, space)
        ladder = Ladder(
            ReplayRunner(recorded_kernel, recorded.measurements),
            recorded,
            space,
            recorded_kernel,
            recorded.problem,
            regime=recorded.regime,
            rounds=rounds,
            recorded=recorded.holds,
            progress=progress,
        )
        yield ladder.climb(_first_rung(start, space, recorded.problem), recorded.best.schedule)


def run_ablation(
    kernel: KernelClass,
    problems: Sequence[Problem],
    arch: str,
    settings: Settings,
    *,
    start: str = "untuned",
    rounds: int = 30,
    jobs: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[list[AblationRow]]:
    """The rows of each problem, built and measured here.

    Args:
        kernel: whose schedules.
        problems: what to compute.
        arch: that of the GPU.
        settings: database, cache folder and regime.
        start: the first rung, `untuned` (64x64 tiles without hints) or `default` (the space's default schedule).
        rounds: samples of each schedule in the final run.
        jobs: compile processes; None for one per CPU.
        progress: called with a line for each rung.

    Raises:
        MeasureError: there is no GPU of the arch.
    """
    from tiledsched.build.pool import BuildPool
    from tiledsched.serve.entries import load_table
    from tiledsched.store.db import TuningDB
    from tiledsched.tuning.programs import Builder
    from tiledsched.tuning.session import open_runner, prepare_tools

    tools = prepare_tools(kernel, arch, settings=settings)
    runner = open_runner(kernel, arch, runner="gpu", without="--replay FILE")
    assert runner is not None
    try:
        served = load_table(settings, kernel=kernel)
        with TuningDB.open(settings.db) as db, BuildPool(jobs) as pool:
            source = CompiledPrograms(Builder(db, tools.artifacts, kernel, arch, tools.toolchain, pool))
            for problem in problems:
                found = served.resolve(problem, arch, runner.device.name)
                progress(f"{problem}: {found.provenance} schedule {found.schedule.short()}")
                ladder = Ladder(
                    runner,
                    source,
                    tools.space,
                    kernel,
                    problem,
                    regime=settings.regime,
                    rounds=rounds,
                    progress=progress,
                )
                yield ladder.climb(_first_rung(start, tools.space, problem), tools.space.complete(found.schedule))
    finally:
        runner.close()


def _first_rung(start: str, space: SearchSpace, problem: Problem) -> Schedule:
    """The space's default schedule, or the kernel as one would first write it."""
    if start == "default":
        return space.default(problem, pinned=accuracy_class(space, "fp32"))
    return untuned(space, problem)
