"""Climbs from a plain schedule to the tuned one: on the GPU of this machine, or over recorded landscapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace, accuracy_class
from tiledsched.core.space_files import space_for
from tiledsched.ops.own_methods import untuned
from tiledsched.studies.ablation.ladder import AblationRow, Ladder
from tiledsched.studies.ablation.sources import CompiledPrograms, RecordedPrograms
from tiledsched.tuning.session import Session


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
            taken=max(f"{stored.created_at:%Y-%m-%d}" for stored in table.measurements),
            progress=progress,
        )
        yield ladder.climb(_first_rung(start, space, recorded.problem), recorded.best.schedule)


def run_ablation(
    session: Session,
    kernel: KernelClass,
    problems: Sequence[Problem],
    *,
    start: str = "untuned",
    rounds: int = 30,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[list[AblationRow]]:
    """The rows of each problem, built and measured here.

    Args:
        session: builds and measures; it is closed at the end.
        kernel: whose schedules.
        problems: what to compute.
        start: the first rung, `untuned` (64x64 tiles without hints) or `default` (the space's default schedule).
        rounds: samples of each schedule in the final run.
        progress: called with a line for each rung.

    Raises:
        MeasureError: there is no GPU of the session's arch.
    """
    from tiledsched.serve.entries import load_table

    settings = session.settings
    with session:
        runner = session.open_runner(kernel, "gpu", without="--replay FILE")
        assert runner is not None
        served, space = load_table(settings, kernel=kernel), session.space(kernel)
        source = CompiledPrograms(session.builder(kernel))
        for problem in problems:
            found = served.resolve(problem, session.arch, runner.device.name)
            progress(f"{problem}: {found.provenance} schedule {found.schedule.short()}")
            ladder = Ladder(
                runner,
                source,
                space,
                kernel,
                problem,
                regime=settings.regime,
                rounds=rounds,
                taken=f"{datetime.now(timezone.utc):%Y-%m-%d}",
                progress=progress,
            )
            yield ladder.climb(_first_rung(start, space, problem), space.complete(found.schedule))


def _first_rung(start: str, space: SearchSpace, problem: Problem) -> Schedule:
    """The space's default schedule, or the kernel as one would first write it."""
    plain = space.default(problem, pinned=accuracy_class(space, "fp32"))
    return plain if start == "default" else untuned(space, problem)
