"""Climbs from a plain schedule to the tuned one: on the GPU of this machine, or over recorded landscapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone

from tiledsched.core.errors import ConfigError, MeasureError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace, accuracy_class
from tiledsched.core.space_files import space_for
from tiledsched.measure.replay import ReplayRunner
from tiledsched.ops.own_methods import untuned
from tiledsched.store.db import TuningDB
from tiledsched.studies.ablation.ladder import AblationRow, Ladder
from tiledsched.tuning.builder import Builder
from tiledsched.tuning.recording import Recording
from tiledsched.tuning.session import Session


def replay_ablation(
    files: Sequence[str],
    arch: str,
    *,
    start: str = "default",
    rounds: int = 30,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[list[AblationRow]]:
    """The rows of each recorded landscape. Needs neither a GPU nor a compiler.

    Args:
        files: landscapes.
        arch: the arch on which all of them were recorded.
        start: the first rung, `untuned` or `default`.
        rounds: samples of each schedule in the final run.
        progress: called with a line for each rung.

    Raises:
        ConfigError: a landscape of another arch, or one that holds nothing.
        MeasureError: no program in it passed the accuracy check.
    """
    for path in files:
        recording = Recording([path])
        if recording.arch != arch:
            raise ConfigError(f"{path} was recorded on {recording.arch}; pass --arch {recording.arch}")
        problem, kernel, space = recording.problems[0], recording.kernel, space_for(arch, recording.kernel)
        checked = [each for each in recording.measurements if each.accuracy is not None]
        if not checked:
            raise MeasureError(f"no program of {problem} passed the accuracy check; record it again")
        best = min(checked, key=lambda each: (each.median_us, each.schedule.id))
        with TuningDB.open(":memory:") as db:
            ladder = Ladder(
                ReplayRunner(kernel, recording.measurements),
                Builder(db, recording.programs, kernel, arch, recording.toolchain, recording),
                space,
                problem,
                regime=best.regime,
                rounds=rounds,
                recorded={each.schedule for each in recording.measurements}.__contains__,
                taken=recording.day,
                progress=progress,
            )
            yield ladder.climb(_first_rung(start, space, problem), best.schedule)


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
        builder = session.builder(kernel)
        for problem in problems:
            found = served.resolve(problem, session.arch, runner.device.name)
            progress(f"{problem}: {found.provenance} schedule {found.schedule.short()}")
            ladder = Ladder(
                runner,
                builder,
                space,
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
