"""One tune: find the best schedule of each problem, and what was found as a report."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tiledsched.core import config
from tiledsched.core.config import Settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.tuning.options import TuneOptions
from tiledsched.tuning.problems import Cases, kernel_of, problems_of
from tiledsched.tuning.resources import Resources
from tiledsched.tuning.samplers import OURS, check_sampler

if TYPE_CHECKING:
    from tiledsched.store.records import Entry
    from tiledsched.tuning.tuner import TuneResult, Watcher


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """What a tune found."""

    kernel: KernelClass
    """The kernel that was tuned."""
    arch: str
    """The arch it was tuned for."""
    run_id: int
    """Number of the run in the database."""
    results: Sequence[TuneResult]
    """One for each problem: how much was tried, and what won."""
    entries: Sequence[Entry]
    """What is served for each problem now; the entry that was there where it is stronger than what was found."""
    measured: bool
    """Whether a GPU measured; otherwise the performance model ranked what was built."""

    @property
    def winners(self) -> dict[Problem, Schedule]:
        """The schedule that is served for each problem now."""
        return {entry.problem: entry.schedule for entry in self.entries}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A plain dict for each problem: sizes, winner, ties, runner-up and evidence."""
        return [
            {
                **entry.problem.to_json(),
                "arch": entry.arch,
                "device": entry.device_name,
                "provenance": entry.provenance,
                "schedule": entry.schedule.to_json(),
                "median_us": entry.median_us,
                "model_us": entry.model_us,
                "ties": [tie.to_json() for tie in entry.ties],
                "margin": entry.margin,
                "runner_up": entry.runner_up.to_json() if entry.runner_up else None,
                "rivals": None if entry.rivals is None else [asdict(each) for each in entry.rivals],
                "programs": result.programs,
                "measured_programs": result.measured,
                "failed": result.failed,
                "seconds": round(result.seconds, 3),
            }
            for entry, result in zip(self.entries, self.results, strict=True)
        ]

    def _lines(self) -> list[tuple[str, str, str, str]]:
        lines = []
        for entry in self.entries:
            us = entry.median_us if entry.median_us is not None else entry.model_us
            said = entry.median_us is not None or entry.provenance == "modelled"
            time = "" if us is None else f"{us:.1f} us" + ("" if said else " (modelled)")
            lines.append((str(entry.problem), entry.schedule.short(), time, entry.provenance))
        return lines

    def __str__(self) -> str:
        return "\n".join([f"{self.kernel.name} on {self.arch}", *("  " + "  ".join(line) for line in self._lines())])

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        from html import escape

        head = "".join(f"<th>{word}</th>" for word in ("problem", "schedule", "time", "provenance"))
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>" for line in self._lines()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def tune_problems(
    resources: Resources,
    kernel: KernelClass | str,
    problems: Cases | str | None,
    options: TuneOptions,
    *,
    watcher: Watcher | None = None,
    command: Mapping[str, Any] | None = None,
) -> TuneReport:
    """Tune each problem and store what should be served; see :meth:`tiledsched.tuning.session.Session.tune`."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as Python itself finds out
        raise ConfigError(
            "a compile process imports the script that started it, and that tunes as it is imported; put the call "
            "of tune() under: if __name__ == '__main__':"
        )
    kernel = kernel_of(kernel)
    kernel.locator()  # raises where the compile processes could not find it
    wanted = problems_of(kernel, problems)
    settings = _settings(resources, options)
    options = replace(options, regime=settings.regime, accum_mode=settings.accum_mode)
    space = resources.space(kernel, options.space, options.candidates)
    compiler = resources.toolchain.tileiras
    _ = resources.artifacts  # a folder that cannot be written to is found before the GPU is taken
    check_sampler(options.sampler)
    gpu = resources.open_runner(
        kernel, options.runner, seed=options.seed
    )  # its process starts while we import the rest
    if gpu is None and (options.sampler != OURS or options.storage):
        raise ConfigError(
            f"no GPU of {resources.arch} measures here, and without one nothing is searched: the model ranks what is "
            "built; leave out --sampler and --storage"
        )
    from tiledsched.serve.entries import load_entries
    from tiledsched.store.evidence import for_compiler
    from tiledsched.tuning.prior import Incumbents, Shipped
    from tiledsched.tuning.study_storage import open_storage
    from tiledsched.tuning.tuner import Tuner

    noted = command or {"kernel": kernel.name, "problems": [each.to_json() for each in wanted], **options.to_json()}
    rivals = resources.open_rivals(kernel, settings.regime) if settings.rivals != "off" else None
    storage = open_storage(options.storage) if options.storage else None
    try:
        incumbents = Incumbents(resources, kernel, settings)
        with resources.noted_run(noted) as run_id:
            tuner = Tuner(
                resources.builder(kernel, options.compile_timeout_s),
                space,
                options,
                run_id=run_id,
                runner=gpu,
                watcher=watcher,
                served=incumbents,
                shipped=Shipped(kernel.name, resources.arch),
                rivals=rivals.race if rivals else None,
                storage=storage,
            )
            results = tuner.tune(wanted)
        known = for_compiler(load_entries(settings, {resources.arch}, kernel.name), compiler)
        now = {entry.place: entry for entry in known}
        entries = [now.get(result.entry.place, result.entry) for result in results]
    finally:
        for forget in config.watchers:  # operators of this process look again
            forget()
    return TuneReport(
        kernel=kernel, arch=resources.arch, run_id=run_id, results=results, entries=entries, measured=gpu is not None
    )


def _settings(resources: Resources, options: TuneOptions) -> Settings:
    """The settings of the resources, over which those of the options go."""
    given = {name: getattr(options, name) for name in ("regime", "accum_mode", "rivals")}
    return replace(resources.settings, **{name: value for name, value in given.items() if value is not None})
