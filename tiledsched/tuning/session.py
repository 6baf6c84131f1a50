"""`tune` and `check`: what the command line calls, and what a Python program calls instead of it."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.core import config
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.errors import ConfigError, DatabaseError, MeasureError, TiledschedError
from tiledsched.core.files import read_bounded
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import chosen_space, load_space, space_for
from tiledsched.tuning.samplers import OURS, check_sampler

if TYPE_CHECKING:
    from tiledsched.build.artifacts import ArtifactStore
    from tiledsched.build.toolchain import Toolchain
    from tiledsched.measure.gpu import GpuRunner
    from tiledsched.measure.rivals import RivalRaces
    from tiledsched.store.db import TuningDB
    from tiledsched.store.records import Entry
    from tiledsched.tuning.record import RecordResult
    from tiledsched.tuning.tuner import TuneResult, Watcher

MOST_CANDIDATES = 1 << 26
"""Bytes of a file of candidates: another tuner's results may be long."""
Cases = Iterable[Problem | Mapping[str, Any]]
NEARBY = 4
"""Winners of like problems that are raced where what is served is of another compiler."""
CHECK_ARCH = "sm_90"
"""Whose space `check` walks unless told otherwise: the interpreter knows no arch."""


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """What `tune` came to."""

    kernel: KernelClass
    """What was tuned."""
    arch: str
    """For which arch."""
    run_id: int
    """Number of the run in the database."""
    results: Sequence[TuneResult]
    """One for each problem: how much was tried, and what won."""
    entries: Sequence[Entry]
    """What is served for each problem now; the entry that was there where it is stronger than what was found."""
    measured: bool
    """Whether a GPU measured; else the model ranked."""

    @property
    def winners(self) -> dict[Problem, Schedule]:
        """What is served for each problem now."""
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
            time = "" if us is None else f"{us:.1f} us" + ("" if entry.median_us is not None else " (modelled)")
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


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """What one schedule gave on one problem in the interpreter."""

    problem: Problem
    """What was computed."""
    schedule: Schedule
    """How."""
    passed: bool
    """Whether every output is right on every kind of inputs."""
    worst_error: float
    """Largest error of a tile; infinite where something was not written, NaN, or the kernel raised."""
    message: str
    """Why it did not pass; empty where it did."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "problem": self.problem.to_json(),
            "schedule": self.schedule.to_json(),
            "passed": self.passed,
            "worst_error": self.worst_error,
            "message": self.message,
        }


@dataclass(frozen=True, kw_only=True)
class Tools:
    """What building takes."""

    settings: Settings
    """As flags, environment and files say."""
    space: SearchSpace
    """What is searched."""
    toolchain: Toolchain
    """What compiles."""
    artifacts: ArtifactStore
    """Where machine code is kept."""


def kernel_of(kernel: KernelClass | str) -> KernelClass:
    """A kernel, given as itself or by its name."""
    return load_kernel(kernel) if isinstance(kernel, str) else kernel


def problems_of(kernel: KernelClass, problems: Cases | str | None) -> list[Problem]:
    """Problems, given as such, as values by name, as the name of a suite, or as None for all suites.

    Raises:
        ConfigError: there are none.
        ProblemError: one has a wrong value.
    """
    if isinstance(problems, str):
        return kernel.suite(problems)
    if problems is None:
        found = [each for name in kernel.suites for each in kernel.suite(name)]
    else:
        found = [each if isinstance(each, Problem) else kernel.problem(**each) for each in problems]
    if not found:
        raise ConfigError(
            f"no problem of {kernel.name} is named, and it declares no suites; pass --problem, or a list of problems"
        )
    return list(dict.fromkeys(found))


def prepare_tools(
    kernel: KernelClass,
    arch: str,
    *,
    settings: Settings,
    space: str | Path | None = None,
    candidates: str | Path | None = None,
) -> Tools:
    """Space, compiler and store of artifacts for building `kernel` for `arch`.

    Raises:
        SpaceError, ConfigError, CompilerError: a wrong file, or a compiler that is missing or too old.
    """
    from tiledsched.build.artifacts import ArtifactStore
    from tiledsched.build.compiler import prepare_process
    from tiledsched.build.toolchain import check_arch, installed_toolchain

    prepare_process()
    found = chosen_space(arch, kernel, space)
    if candidates:
        found = found.limited_to(_read_candidates(Path(candidates), found), Path(candidates).name)
    toolchain = installed_toolchain()
    check_arch(toolchain, arch)
    artifacts = ArtifactStore(Path(settings.cache) if settings.cache else None)
    artifacts.ready()
    return Tools(settings=settings, space=found, toolchain=toolchain, artifacts=artifacts)


def _read_candidates(path: Path, space: SearchSpace) -> list[dict[str, KnobValue]]:
    from tiledsched.store.foreign import configurations

    try:
        listed = configurations(read_bounded(path, MOST_CANDIDATES).decode("utf-8"), path.name, space.knobs)
    except (OSError, ValueError, RecursionError, DatabaseError) as error:
        raise ConfigError(f"cannot read candidates from {path}: {error}") from error
    if not (isinstance(listed, list) and listed and all(isinstance(each, dict) and each for each in listed)):
        raise ConfigError(
            f"{path} must hold a list of schedules: JSON objects of knob names and values, T4 results, a Kernel "
            "Tuner cache, or CSV with a column for each knob"
        )
    return listed


def open_runner(
    kernel: KernelClass, arch: str, *, runner: str = "auto", seed: int = 0, without: str = "--runner none"
) -> GpuRunner | None:
    """What measures: the GPU, or None where there is none of the arch.

    Args:
        kernel: whose candidates are measured.
        arch: e.g. sm_90.
        runner: auto, gpu (it must be there) or none.
        seed: of inputs and orders.
        without: what to do without it, for people.

    Raises:
        MeasureError: a GPU was asked for, and there is none of the arch; or another process holds it, and is not waited for.
    """
    if runner == "none":
        return None
    from tiledsched.measure.nvml import devices, only_gpu

    if not any(device.arch == arch for device in devices()):
        if runner == "gpu":
            raise MeasureError(f"no {arch} GPU here; run: tiledsched doctor, or use {without}")
        return None
    from tiledsched.measure.gpu import GpuRunner

    return (runner_opener or GpuRunner)(kernel, seed=seed, gpu=only_gpu())


def open_rivals(kernel: KernelClass, gpu: Any, settings: Settings) -> RivalRaces | None:
    """What times a kernel's rivals beside winners on the runner's GPU; None where there are none, or settings want none."""
    from tiledsched.measure.gpu import GpuRunner
    from tiledsched.measure.rivals import can_race, open_races

    if not isinstance(gpu, GpuRunner) or settings.rivals == "off" or not can_race(kernel):
        return None
    return open_races(kernel, gpu, settings.regime)


runner_opener: Callable[..., GpuRunner] | None = None
"""What `open_runner` asks in place of making a runner: in a fleet it stays from one problem to the next."""


@contextmanager
def noted_run(db: TuningDB, command: Mapping[str, Any], arch: str) -> Iterator[int]:
    """A run noted in the database from start to end; its number."""
    run_id = db.start_run(dict(command), arch)
    status = "failed"
    try:
        yield run_id
        status = "done"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        db.finish_run(run_id, status)


def tune(
    kernel: KernelClass | str,
    problems: Cases | str | None = None,
    *,
    arch: str,
    db: str | None = None,
    regime: str | None = None,
    accum_mode: str | None = None,
    rivals: str | None = None,
    effort: str = "default",
    trials: int | None = None,
    budget_s: float | None = None,
    sampler: str = OURS,
    neighbours: bool = False,
    seed: int = 0,
    runner: str = "auto",
    space: str | Path | None = None,
    candidates: str | Path | None = None,
    jobs: int | None = None,
    compile_timeout_s: float = 120.0,
    storage: str | None = None,
    watcher: Watcher | None = None,
    command: Mapping[str, Any] | None = None,
) -> TuneReport:
    """Find the best schedule of each problem and serve it from now on.

    Measured where a GPU of the arch is present; else the model's favourites are built, and it ranks the programs.

    Args:
        kernel: the class, or where it is declared.
        problems: problems, or values by name; the name of a suite; None for all suites.
        arch: e.g. sm_90.
        db: path or URL of the database; None for the user's.
        regime: burst or sustained; None for what settings say.
        accum_mode: accuracy class, of kernels that have several.
        rivals: serve or record, to time the kernel's rivals beside each winner, or off; None for what settings say.
        effort: quick, default or thorough.
        trials: distinct programs to measure per problem, at most, or, without a GPU, schedules to build, the model's
            favourites first; None for those of the effort.
        budget_s: seconds for all problems together.
        sampler: what proposes schedules: surrogate, tpe, gp, cmaes, qmc, random, exhaustive, or module:Class of any sampler
            of Optuna.
        neighbours: also what differs from the fastest in a knob or two, beyond what the space explores.
        seed: of the sampler.
        runner: auto, gpu or none.
        space: a search-space file.
        candidates: a JSON list of schedules; only those are searched.
        jobs: compile processes; None for one per CPU.
        compile_timeout_s: per schedule.
        storage: a file or a database's URL where Optuna's studies are kept while tuning.
        watcher: who is told of progress.
        command: what to note as the run's command.

    Returns:
        Results and entries by problem; prints itself, as a table in a notebook.

    Raises:
        TiledschedError: of a wrong argument, a missing compiler, or a problem that no schedule works for. What was found
            for the problems before it is stored.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as Python itself tells
        raise ConfigError(
            "a compile process imports the script that started it, and that tunes as it is imported; put the call "
            "of tune() under: if __name__ == '__main__':"
        )
    kernel = kernel_of(kernel)
    kernel.locator()  # raises where the compile processes could not find it
    wanted = problems_of(kernel, problems)
    settings = load_settings({"db": db, "regime": regime, "accum_mode": accum_mode, "rivals": rivals})
    tools = prepare_tools(kernel, arch, settings=settings, space=space, candidates=candidates)
    check_sampler(sampler)
    gpu = open_runner(kernel, arch, runner=runner, seed=seed)  # its process starts while we import the rest
    if gpu is None and (sampler != OURS or storage):
        raise ConfigError(
            f"no GPU of {arch} measures here, and without one nothing is searched: the model ranks what is "
            "built; leave out --sampler and --storage"
        )
    from tiledsched.build.pool import open_pool
    from tiledsched.serve.entries import load_entries
    from tiledsched.serve.lookup import LookupTable
    from tiledsched.store.db import TuningDB
    from tiledsched.store.evidence import for_compiler, leaders
    from tiledsched.tuning.prior import Shipped
    from tiledsched.tuning.study_storage import open_storage
    from tiledsched.tuning.tuner import TuneOptions, Tuner

    options = TuneOptions(
        accum_mode=settings.accum_mode,
        effort=effort,
        trials=trials,
        budget_s=budget_s,
        sampler=sampler,
        neighbours=neighbours,
        seed=seed,
        regime=settings.regime,
        compile_timeout_s=compile_timeout_s,
    )
    said = command or {"kernel": kernel.name, "problems": [each.to_json() for each in wanted], "effort": effort}
    races = None
    try:
        races = open_rivals(kernel, gpu, settings)
        kept = open_storage(storage) if storage else None
        with TuningDB.open(settings.db) as store, open_pool(jobs) as pool:
            before = load_entries(settings, {arch}, kernel.name)
            table = LookupTable(
                before,
                kernel,
                regime=settings.regime,
                accum_mode=settings.accum_mode,
                compiler=tools.toolchain.tileiras,
            )

            def served(problem: Problem, device_name: str) -> list[Schedule]:
                if not table.known_arch(arch):
                    return []
                answer = table.resolve(problem, arch, device_name)
                if not (answer.stale and answer.entry):
                    return [answer.schedule]
                now = [
                    each
                    for each in (*store.entries(arch, kernel.name), *before)
                    if (each.provenance, each.device_name, each.regime, each.compiler)
                    == ("measured", device_name, settings.regime, tools.toolchain.tileiras)
                ]
                return [answer.schedule, *leaders(answer.entry), *winners_nearby(kernel, problem, now)]

            with noted_run(store, said, arch) as run_id:
                tuner = Tuner(
                    store,
                    tools.artifacts,
                    tools.space,
                    kernel,
                    tools.toolchain,
                    options,
                    pool=pool,
                    run_id=run_id,
                    runner=gpu,
                    watcher=watcher,
                    served=served,
                    shipped=Shipped(kernel.name, arch),
                    rivals=races.race if races else None,
                    storage=kept,
                )
                results = tuner.tune(wanted)
            known = for_compiler(load_entries(settings, {arch}, kernel.name), tools.toolchain.tileiras)
            now = {entry.place: entry for entry in known}
            entries = [now.get(result.entry.place, result.entry) for result in results]
    finally:
        if races is not None:
            races.close()
        if gpu is not None:
            gpu.close()
        for forget in config.watchers:  # operators of this process look again
            forget()
    return TuneReport(
        kernel=kernel, arch=arch, run_id=run_id, results=results, entries=entries, measured=gpu is not None
    )


def record(
    kernel: KernelClass | str,
    problems: Cases | str | None = None,
    *,
    arch: str,
    out: str | Path | None,
    db: str | None = None,
    programs: int = 300,
    sustained_leaders: int = 24,
    build_only: bool = False,
    budget_s: float | None = None,
    accum_mode: str | None = None,
    space: str | Path | None = None,
    seed: int = 0,
    jobs: int | None = None,
    compile_timeout_s: float = 120.0,
    progress: Callable[[str], None] = lambda line: None,
    on_result: Callable[[RecordResult], None] = lambda result: None,
    command: Mapping[str, Any] | None = None,
) -> tuple[int, list[RecordResult]]:
    """Record landscapes: measure a broad choice of programs of each problem, for replay anywhere.

    Args:
        kernel: the class, or where it is declared.
        problems: as for :func:`tune`.
        arch: e.g. sm_90.
        out: folder for the landscape files; None with `build_only`.
        db: path or URL of the database; None for the user's.
        programs: distinct programs per problem.
        sustained_leaders: how many of the fastest are measured in the sustained regime, too.
        build_only: build the programs and stop; needs no GPU.
        budget_s: seconds for all problems together.
        accum_mode: accuracy class, of kernels that have several.
        space: a search-space file.
        seed: of the choice of schedules.
        jobs: compile processes; None for one per CPU.
        compile_timeout_s: per schedule.
        progress: told a line now and then.
        on_result: given each problem's result as it is known.
        command: what to note as the run's command.

    Returns:
        The run's number, and a result for each problem.

    Raises:
        TiledschedError: of a wrong argument, a missing compiler or GPU, or a problem that no schedule works for.
    """
    from tiledsched.build.pool import open_pool
    from tiledsched.store.db import TuningDB
    from tiledsched.tuning.record import Recorder, RecordOptions

    kernel = kernel_of(kernel)
    wanted = problems_of(kernel, problems)
    settings = load_settings({"db": db, "accum_mode": accum_mode})
    tools = prepare_tools(kernel, arch, settings=settings, space=space)
    options = RecordOptions(
        accum_mode=settings.accum_mode,
        programs=programs,
        seed=seed,
        sustained_leaders=sustained_leaders,
        budget_s=budget_s,
        compile_timeout_s=compile_timeout_s,
    )
    said = command or {"kernel": kernel.name, "problems": [each.to_json() for each in wanted], "programs": programs}
    runner = open_runner(kernel, arch, runner="none" if build_only else "gpu", seed=seed, without="--build-only")
    results = []
    try:
        with TuningDB.open(settings.db) as store, open_pool(jobs) as pool, noted_run(store, said, arch) as run_id:
            recorder = Recorder(
                store,
                tools.artifacts,
                tools.space,
                kernel,
                tools.toolchain,
                options,
                pool=pool,
                run_id=run_id,
                runner=runner,
                progress=progress,
            )
            for result in recorder.record(wanted, Path(out) if out else Path()):
                results.append(result)
                on_result(result)
    finally:
        if runner is not None:
            runner.close()
    return run_id, results


def winners_nearby(kernel: KernelClass, problem: Problem, entries: Iterable[Entry]) -> list[Schedule]:
    """What won on the problems most alike, of entries of the compiler at hand: what it made slow or fast there, it did here."""
    others = sorted(
        (entry for entry in entries if entry.problem != problem),
        key=lambda entry: (-kernel.similarity.weight(problem, entry.problem), entry.problem),
    )
    return list(dict.fromkeys(entry.schedule for entry in others))[:NEARBY]


def check(
    kernel: KernelClass | str,
    problems: Cases | str | None = None,
    *,
    schedules: int = 20,
    seed: int = 0,
    arch: str = CHECK_ARCH,
    space: str | Path | None = None,
) -> Iterator[CheckRow]:
    """Run schedules of a kernel on the CPU, in the interpreter, and compare every output with the reference.

    Args:
        kernel: the class, or where it is declared.
        problems: what to compute; None for small problems that the kernel names, or its suites' made small.
        schedules: how many for each problem: the default, and others drawn from the space.
        seed: of inputs and choice.
        arch: whose space is walked.
        space: a search-space file.

    Yields:
        A row as each is known.
    """
    kernel = kernel_of(kernel)
    wanted = problems_of(kernel, problems) if problems is not None else small_problems(kernel)
    found = load_space(space, kernel) if space else space_for(arch, kernel)
    from tiledsched.interpreter.checking import check_schedule

    for problem in wanted:
        for schedule in _some_schedules(found, problem, schedules, seed):
            passed, worst, message = check_schedule(kernel, problem, schedule, arch=arch, seed=seed)
            yield CheckRow(problem=problem, schedule=schedule, passed=passed, worst_error=worst, message=message)


def small_problems(kernel: KernelClass) -> list[Problem]:
    """Problems that the interpreter runs in a moment: the kernel's own, or those of its suites made small, twice: all
    sizes as small as can be, and the largest one a length that no tile divides.

    Raises:
        ConfigError: the kernel names no problem at all.
    """
    from tiledsched.core.validate import shrunk

    if kernel.small is not None:
        return list(kernel.small())
    by_kind = {kernel.problem_kind(each): each for each in reversed(problems_of(kernel, None))}
    pairs = (
        (shrunk(kernel, each), shrunk(kernel, each, (67, 68, 72, 80, 128), only_largest=True))
        for each in by_kind.values()
    )
    return list(dict.fromkeys(small for pair in pairs for small in pair))


def _some_schedules(space: SearchSpace, problem: Problem, count: int, seed: int) -> list[Schedule]:
    rng = random.Random(seed)
    found = {space.default(problem): None}
    for _ in range(20 * count):
        if len(found) >= count:
            break
        with suppress(TiledschedError):
            found.setdefault(space.sample(problem, rng))
    return list(found)[:count]
