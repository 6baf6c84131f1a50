"""What a worker does with one problem: the commands of one GPU, on one problem, and the control program.

A job is a function `job(session, kernel, problem, progress, **options) -> dict`. What it measures goes to the session's
database, what it returns is stored with the lease. It may be killed at any moment and called again.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.core.errors import Failure, MeasureError
from tiledsched.core.files import OwnFolder
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import check_allowed
from tiledsched.fleet.gpus import Gpu
from tiledsched.measure.estimate import Timing
from tiledsched.ops.bench import bench_here
from tiledsched.store.codec import encode
from tiledsched.tuning.options import Options, RecordOptions, RefreshOptions, TuneOptions, options_of
from tiledsched.tuning.results import Watcher
from tiledsched.tuning.session import Session

Progress = Callable[[str], None]
"""Takes a line of text that says what is done just now."""
CONTROL_ROUNDS = 30
"""Samples of the control program, each time."""


class StageProgress(Watcher):
    """A watcher of a tune that reports its stages as lines of text."""

    def __init__(self, say: Progress) -> None:
        self._say, self._what, self._total = say, "", 0

    def stage(self, problem: Problem, what: str, total: int) -> None:
        """A stage begins."""
        self._what, self._total = what, total
        self._say(f"{what} {total}" if total else what)

    def step(self, done: int) -> None:
        """`done` steps of the stage are done."""
        self._say(f"{self._what} {done}/{self._total}")


def tune(session: Session, kernel: KernelClass, problem: Problem, progress: Progress, **options: Any) -> dict[str, Any]:
    """Tune one problem; the row of its report."""
    chosen = TuneOptions.from_mapping(options, "tune")
    report = session.tune(kernel, [problem], chosen, watcher=StageProgress(progress))
    (row,) = report.rows
    return row


def record(
    session: Session, kernel: KernelClass, problem: Problem, progress: Progress, **options: Any
) -> dict[str, Any]:
    """Record one problem. Its landscapes are in the database; who wants files writes them from there."""
    chosen = RecordOptions.from_mapping(options, "record")
    with OwnFolder() as folder:
        _, (result,) = session.record(kernel, [problem], chosen, folder=folder, progress=progress)
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
    session: Session, kernel: KernelClass, problem: Problem, progress: Progress, **options: Any
) -> dict[str, Any]:
    """Refresh the entries of one problem."""
    chosen = RefreshOptions.from_mapping(options, "refresh")
    return session.refresh(kernel, [problem], chosen, watcher=StageProgress(progress)).to_json()


def bench(
    session: Session, kernel: KernelClass, problem: Problem, progress: Progress, **options: Any
) -> dict[str, Any]:
    """Time one problem next to its rivals; the rows as a CSV file has them."""
    rows = bench_here(kernel, [problem], db=session.settings.db, progress=progress, **options)
    return {"rows": [row.to_csv() for row in rows]}


def control(session: Session, kernel: KernelClass, problem: Problem, **options: Any) -> dict[str, Any]:
    """Time one program, the same on every GPU of an arch: the default schedule of one problem, in the burst regime.

    Raises:
        MeasureError: it does not build or run here.
    """
    schedule = session.space(kernel, options.get("space")).default(problem)
    runner = session.open_runner(kernel, "gpu")
    assert runner is not None
    builder = session.builder(kernel)
    builder.build([schedule], problem)
    candidates = builder.candidates(builder.programs([schedule], problem, runner.device))
    if not candidates:
        raise MeasureError(
            f"the control program ({schedule.short()} for {problem}) does not build; run: tiledsched doctor"
        )
    runner.begin(problem)
    checked = runner.check(candidates[0])
    batch = (
        checked if isinstance(checked, Failure) else runner.sample(candidates, rounds=CONTROL_ROUNDS, regime="burst")[0]
    )
    if isinstance(batch, Failure):
        raise MeasureError(f"the control program does not run on this GPU: {batch.message}; run: tiledsched doctor")
    return {
        "fingerprint": candidates[0].artifact.fingerprint,
        **vars(Timing.of(batch.samples_us)),
        "conditions": encode(batch.conditions),
    }


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command of a fleet."""

    run: Callable[..., dict[str, Any]]
    """Does one problem."""
    options: type[Options] | None = None
    """The class of its options; None where they are the keywords of `run`."""
    control: Callable[..., dict[str, Any]] = control
    """Times the control program."""
    gpus: Callable[[], Sequence[Gpu]] | None = None
    """Stands in for the GPUs of this host, as replays do; None for those that the driver lists."""

    def unknown(self, options: Iterable[str]) -> list[str]:
        """The options that it does not take: mistakes, or written by another version of this package."""
        if self.options is not None:
            return sorted(set(options) - {each.name for each in options_of(self.options)})
        takes = inspect.signature(bench_here if self.run is bench else self.run).parameters
        anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in takes.values())
        return [] if anything else sorted(set(options) - set(takes))


JOBS: Mapping[str, Job] = {
    "tune": Job(run=tune, options=TuneOptions),
    "record": Job(run=record, options=RecordOptions),
    "refresh": Job(run=refresh, options=RefreshOptions),
    "bench": Job(run=bench),
}
"""The commands of a fleet by name."""


def find_job(name: str) -> Job:
    """A command of a fleet, or `module:function` of a module that the environment allows; the module may also define `control`
    and `gpus`.

    Raises:
        ConfigError: it is neither. A database names jobs, and whoever can write to it must not thereby choose code.
    """
    if name in JOBS:
        return JOBS[name]
    module_name, _, function = name.partition(":")
    check_allowed(name, f"a campaign, whose job is none of {', '.join(JOBS)},")
    module = importlib.import_module(module_name)
    return Job(
        run=getattr(module, function), control=getattr(module, "control", control), gpus=getattr(module, "gpus", None)
    )
