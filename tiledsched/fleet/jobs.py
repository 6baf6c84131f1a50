"""What a worker does with one problem: the functions behind the single commands, on one problem, and the control program.

A job is `job(kernel, problem, arch, *, db, jobs, progress, **options) -> dict`: what it measures goes to `db`, what it returns
is kept with the lease. It may be killed at any moment and called again.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

from tiledsched.core.errors import Failure, MeasureError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.tuning import session as tuning
from tiledsched.tuning.refresh import refresh as refresh_here

Progress = Callable[[str], None]
CONTROL_ROUNDS = 30
"""Samples of the control program, each time."""


class StageProgress:
    """Tells the stages of a tune as lines."""

    def __init__(self, say: Progress) -> None:
        self._say, self._what, self._total = say, "", 0

    def stage(self, problem: Problem, what: str, total: int) -> None:
        """A stage begins."""
        self._what, self._total = what, total
        self._say(f"{what} {total}" if total else what)

    def step(self, done: int) -> None:
        """So much of it is done."""
        self._say(f"{self._what} {done}/{self._total}")

    def best(self, us: float, schedule: Schedule) -> None:
        """Nothing: the result says it."""


def tune(
    kernel: KernelClass, problem: Problem, arch: str, *, db: str, jobs: int | None, progress: Progress, **options: Any
) -> dict[str, Any]:
    """`tiledsched tune` of one problem."""
    report = tuning.tune(kernel, [problem], arch=arch, db=db, jobs=jobs, watcher=StageProgress(progress), **options)
    (row,) = report.rows
    return row


def record(
    kernel: KernelClass, problem: Problem, arch: str, *, db: str, jobs: int | None, progress: Progress, **options: Any
) -> dict[str, Any]:
    """`tiledsched record` of one problem. Its landscape is in the database; who asked for files writes them from there."""
    with tempfile.TemporaryDirectory() as folder:
        _, (result,) = tuning.record(
            kernel, [problem], arch=arch, out=folder, db=db, jobs=jobs, progress=progress, **options
        )
    return {
        "schedules": result.schedules,
        "programs": result.programs,
        "wanted": result.wanted,
        "compiled": result.compiled,
        "measured": result.measured,
        "failed": result.failed,
        "complete": result.complete,
        "landscapes": [{"device": each.device_name, "regime": each.regime} for each in result.files],
    }


def refresh(
    kernel: KernelClass, problem: Problem, arch: str, *, db: str, jobs: int | None, progress: Progress, **options: Any
) -> dict[str, Any]:
    """`tiledsched refresh` of one problem."""
    return refresh_here(
        kernel, [problem], arch=arch, db=db, jobs=jobs, watcher=StageProgress(progress), **options
    ).to_json()


PASSED_TO: dict[Callable[..., Any], Callable[..., Any]] = {
    tune: tuning.tune,
    record: tuning.record,
    refresh: refresh_here,
}
"""What takes the options of a job."""


def unknown_options(job: Callable[..., Any], options: Iterable[str]) -> list[str]:
    """Those that a job does not take: by mistake, or because another version of this package wrote them."""
    takes = inspect.signature(PASSED_TO.get(job, job)).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
    return [] if anything else sorted(set(options) - set(takes))


def control(
    kernel: KernelClass, problem: Problem, arch: str, *, db: str, jobs: int | None, **options: Any
) -> dict[str, Any]:
    """Time one program, the same on every GPU of an arch: the default schedule of one problem, in the burst regime.

    Raises:
        MeasureError: it does not build or run here.
    """
    from tiledsched.build.pool import open_pool
    from tiledsched.core.config import load_settings
    from tiledsched.measure.estimate import Timing
    from tiledsched.store.db import TuningDB
    from tiledsched.tuning.programs import Builder

    tools = tuning.prepare_tools(kernel, arch, settings=load_settings({"db": db}), space=options.get("space"))
    runner = tuning.open_runner(kernel, arch, runner="gpu")
    assert runner is not None
    try:
        with TuningDB.open(db) as store, open_pool(jobs) as pool:
            builder = Builder(store, tools.artifacts, kernel, arch, tools.toolchain, pool)
            schedule = tools.space.default(problem)
            builder.build([schedule], problem)
            candidates = builder.candidates(builder.programs([schedule], problem, runner.device))
        if not candidates:
            raise MeasureError(
                f"the control program ({schedule.short()} for {problem}) does not build; run: tiledsched doctor"
            )
        runner.begin(problem)
        checked = runner.check(candidates[0])
        if isinstance(checked, Failure):
            raise MeasureError(
                f"the control program does not run on this GPU: {checked.message}; run: tiledsched doctor"
            )
        (batch,) = runner.sample(candidates, rounds=CONTROL_ROUNDS, regime="burst")
    finally:
        runner.close()
    if isinstance(batch, Failure):
        raise MeasureError(f"the control program does not run on this GPU: {batch.message}; run: tiledsched doctor")
    return {
        "fingerprint": candidates[0].artifact.fingerprint,
        **vars(Timing.of(batch.samples_us)),
        "conditions": batch.conditions.to_json(),
    }
