"""`tune` and `check`, as a Python program calls them, and the session behind these and behind the command line."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.checking.schedules import CheckRow, check_problems
from tiledsched.core.config import INVARIANT, load_settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.extras import required
from tiledsched.core.problem import KernelClass, Problem, missing_on
from tiledsched.core.problem_lists import Cases, problems_of
from tiledsched.core.registry import load_kernel
from tiledsched.core.space_files import load_space, space_for
from tiledsched.tuning.options import (
    CHECK_ARCH,
    OTHER_CHECK_ARCH,
    CheckOptions,
    Options,
    RecordOptions,
    RefreshOptions,
    TuneOptions,
)
from tiledsched.tuning.resources import Resources, serving_anew
from tiledsched.tuning.samplers import OURS, make_sampler

if TYPE_CHECKING:
    from tiledsched.tuning.record import RecordResult
    from tiledsched.tuning.refresh import RefreshReport
    from tiledsched.tuning.results import TuneReport, Watcher


class Session(Resources):
    """Tunes, records, refreshes and checks kernels for one arch, and keeps open what that takes from one call to the next.

    See :class:`tiledsched.tuning.resources.Resources` for the arguments. Use it in a `with`, or call `close()`.
    """

    def tune(
        self,
        kernel: KernelClass | str,
        problems: Cases | str | None = None,
        options: TuneOptions | None = None,
        *,
        watcher: Watcher | None = None,
        command: Mapping[str, Any] | None = None,
        worths: Sequence[float] | None = None,
    ) -> TuneReport:
        """Find the best schedule of each problem and serve it from now on.

        Schedules are measured where a GPU of the arch is present; otherwise those that the performance model likes best are
        built, and the model ranks them.

        Args:
            kernel: the class, or where it is declared.
            problems: problems, or values by name; the name of a suite; None for all suites.
            options: how much to do and what decides.
            watcher: who is told of progress.
            command: what to note as the run's command.
            worths: what tuning each of the problems, which are distinct then, is worth; see `Tuner.tune`.

        Raises:
            TiledschedError: of a wrong argument, a missing compiler, or a problem that no schedule works for. What was found
                for the problems before it is stored.
        """
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # as Python itself finds out
            raise ConfigError(
                "a compile process imports the script that started it, and that tunes as it is imported; put the call "
                "of tune() under: if __name__ == '__main__':"
            )
        began = time.monotonic()
        kernel, options = load_kernel(kernel), options or TuneOptions()
        kernel.locator()  # raises where the compile processes could not find it
        invariant = options.numerics == INVARIANT
        wanted = problems_of(kernel, problems, every_batch=invariant)
        given = {name: getattr(options, name) for name in ("regime", "accum_mode", "rivals")}
        settings = replace(self.settings, **{name: value for name, value in given.items() if value is not None})
        options = replace(options, regime=settings.regime, accum_mode=settings.accum_mode)
        space = self.space(kernel, options.space, options.candidates)
        _ = self.toolchain  # a missing compiler is found first
        _ = self.artifacts  # a folder that cannot be written to is found before the GPU is taken
        make_sampler(options.sampler, options.seed)  # one that cannot be made is found, too
        gpu = self.open_runner(kernel, options.runner, seed=options.seed)  # its process starts while we import the rest
        if gpu is None and options.sampler != OURS:
            raise ConfigError(
                f"no GPU of {self.arch} measures here, and without one nothing is searched: the model ranks what is "
                "built; leave out --sampler"
            )
        from tiledsched.measure.gpu import GpuRunner
        from tiledsched.tuning.prior import Incumbents, Shipped, served_now
        from tiledsched.tuning.results import TuneReport
        from tiledsched.tuning.tuner import Tuner

        if isinstance(gpu, GpuRunner):
            gpu.beside_gib = options.beside_gib
        # A rival's numbers are its own, and an effort of `served` is about our own kernel.
        timed = settings.rivals != "off" and options.numerics == "any" and options.effort != "served"
        rivals = self.open_rivals(kernel, settings.regime) if timed else None
        with serving_anew():
            incumbents = Incumbents(self, kernel, settings)
            with self.noted_run(command or _described(kernel, wanted, options)) as run_id:
                if options.budget_s is not None:  # what was opened until here took its part
                    options = replace(options, budget_s=max(0.0, options.budget_s - (time.monotonic() - began)))
                tuner = Tuner(
                    self.builder(kernel, options.compile_timeout_s),
                    space,
                    options,
                    run_id=run_id,
                    runner=gpu,
                    watcher=watcher,
                    served=incumbents,
                    shipped=Shipped(kernel.name, self.arch),
                    rivals=rivals.race if rivals else None,
                )
                results = tuner.tune(wanted, worths)
            device = gpu.device_name if gpu else self.device_here
            settings = replace(settings, numerics=INVARIANT if invariant else "any")
            entries = served_now(self, kernel, settings, [each.entry for each in results], device, options.space)
        return TuneReport(
            kernel=kernel,
            arch=self.arch,
            run_id=run_id,
            results=results,
            entries=entries,
            measured=gpu is not None,
            left=tuner.left,
        )

    def record(
        self,
        kernel: KernelClass | str,
        problems: Cases | str | None = None,
        options: RecordOptions | None = None,
        *,
        folder: str | Path | None,
        progress: Callable[[str], None] = lambda line: None,
        on_result: Callable[[RecordResult], None] = lambda result: None,
        command: Mapping[str, Any] | None = None,
    ) -> tuple[int, list[RecordResult]]:
        """Record landscapes: measure a broad choice of programs of each problem, for replay anywhere.

        Args:
            kernel: the class, or where it is declared.
            problems: as for :meth:`tune`.
            options: how much to record.
            folder: where the landscape files go; None where nothing is measured.
            progress: given a line of text now and then.
            on_result: given each problem's result as it is known.
            command: what to note as the run's command.

        Returns:
            The run's number, and a result for each problem.

        Raises:
            TiledschedError: of a wrong argument, a missing compiler or GPU, or a problem that no schedule works for.
        """
        from tiledsched.tuning.record import Recorder

        kernel, options = load_kernel(kernel), options or RecordOptions()
        wanted = problems_of(kernel, problems)
        options = replace(options, accum_mode=options.accum_mode or self.settings.accum_mode)
        space = self.space(kernel, options.space)
        builder = self.builder(kernel, options.compile_timeout_s)
        measuring = "none" if options.build_only else "gpu"
        runner = self.open_runner(kernel, measuring, seed=options.seed, without="--build-only")
        results = []
        with self.noted_run(command or _described(kernel, wanted, options)) as run_id:
            recorder = Recorder(builder, space, options, run_id=run_id, runner=runner, progress=progress)
            for result in recorder.record(wanted, Path(folder or "")):
                results.append(result)
                on_result(result)
        return run_id, results

    def refresh(
        self,
        kernel: KernelClass | str,
        problems: Cases | str | None = None,
        options: RefreshOptions | None = None,
        *,
        watcher: Watcher | None = None,
        command: Mapping[str, Any] | None = None,
    ) -> RefreshReport:
        """Bring what was measured of a kernel up to the compiler and the kernel's source at hand.

        Every measured entry, shipped or one's own, of another compiler or source is built again. Where that gives the same
        machine code, its evidence holds and is kept. Where not, the problem is tuned again on the GPU it was measured on, the
        old leaders and what won on similar problems under this compiler first; without that GPU it is reported as still to
        race. Entries of other compilers stay as they are: going back to one brings its evidence back. With the GPU, rivals
        that are installed and were not timed next to what is served, or in another version, are timed.

        Args:
            kernel: the class, or where it is declared.
            problems: only these; None for all that are measured.
            options: how much the races do.
            watcher: who is told of progress.
            command: what to note as the command of the races' runs.

        Raises:
            TiledschedError: of a wrong argument or a missing compiler. What was found until then is stored.
        """
        from tiledsched.tuning.refresh import Refresh

        kernel = load_kernel(kernel)
        kernel.locator()  # raises where the compile processes could not find it
        with serving_anew():
            refresh = Refresh(self, kernel, options or RefreshOptions(), watcher)
            return refresh.run(
                problems, lambda raced, chosen: self.tune(kernel, raced, chosen, watcher=watcher, command=command)
            )

    def check(
        self,
        kernel: KernelClass | str,
        problems: Cases | str | None = None,
        options: CheckOptions | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Iterator[CheckRow]:
        """Run schedules of a kernel on the CPU, in the interpreter; see :func:`check`. `progress` is told what runs."""
        return _checked(self.arch, kernel, problems, options or CheckOptions(), progress)


def _described(kernel: KernelClass, problems: Sequence[Problem], options: Options) -> dict[str, Any]:
    """What is noted of a run where the caller gives no command."""
    return {"kernel": kernel.name, "problems": [each.to_json() for each in problems], **options.to_json()}


def tune(
    kernel: KernelClass | str,
    problems: Cases | str | None = None,
    *,
    arch: str,
    db: str | None = None,
    jobs: int | None = None,
    watcher: Watcher | None = None,
    command: Mapping[str, Any] | None = None,
    **options: Any,
) -> TuneReport:
    """Find the best schedule of each problem and serve it from now on: a :class:`Session` for one call.

    Schedules are measured where a GPU of the arch is present; otherwise those that the performance model likes best are
    built, and the model ranks them.

    Args:
        kernel: the class, or where it is declared.
        problems: problems, or values by name; the name of a suite; None for all suites.
        arch: e.g. sm_90.
        db: path or URL of the database; None for the user's.
        jobs: compile processes; None for one per CPU.
        watcher: who is told of progress.
        command: what to note as the run's command.
        options: fields of :class:`tiledsched.tuning.options.TuneOptions`, e.g. `effort="thorough"` or `budget_s=600`.

    Returns:
        Results and entries by problem; prints itself, as a table in a notebook.

    Raises:
        TiledschedError: of a wrong argument, a missing compiler, or a problem that no schedule works for. What was found
            for the problems before it is stored.
    """
    chosen = TuneOptions.from_mapping(options, "tune")
    with required(), Session(arch, settings=load_settings({"db": db}), jobs=jobs) as session:
        return session.tune(kernel, problems, chosen, watcher=watcher, command=command)


def check(
    kernel: KernelClass | str, problems: Cases | str | None = None, *, arch: str = CHECK_ARCH, **options: Any
) -> Iterator[CheckRow]:
    """Run schedules of a kernel on the CPU, in the interpreter, and compare every output with the kernel's reference.

    Args:
        kernel: the class, or where it is declared.
        problems: what to compute; None for small problems that the kernel names, or else for the suites' with sizes of some
            tiles of each schedule.
        arch: whose search space the schedules are drawn from.
        options: fields of :class:`tiledsched.tuning.options.CheckOptions`, e.g. `schedules=5`.

    Yields:
        A row for each schedule of each problem, as it is known.
    """
    return _checked(arch, kernel, problems, CheckOptions.from_mapping(options, "check"))


def _checked(
    arch: str,
    kernel: KernelClass | str,
    problems: Cases | str | None,
    options: CheckOptions,
    progress: Callable[[str], None] | None = None,
) -> Iterator[CheckRow]:
    """What :func:`check` yields."""
    kernel = load_kernel(kernel)
    small = kernel.small() if problems is None and kernel.small is not None else problems
    given = None if small is None else problems_of(kernel, small)
    if arch == CHECK_ARCH and any(missing_on(arch, each) for each in given or kernel.default_problems()):
        arch = OTHER_CHECK_ARCH
    space = load_space(options.space, kernel) if options.space else space_for(arch, kernel)
    yield from check_problems(
        kernel,
        space,
        given,
        grown=problems is None,
        arch=arch,
        schedules=options.schedules,
        seed=options.seed,
        progress=progress,
    )
