"""`tune` and `check`, as a Python program calls them, and the session behind these and behind the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.core.config import load_settings
from tiledsched.core.problem import KernelClass
from tiledsched.tuning.check import CheckRow, check_problems
from tiledsched.tuning.options import CHECK_ARCH, CheckOptions, RecordOptions, RefreshOptions, TuneOptions
from tiledsched.tuning.problems import Cases
from tiledsched.tuning.resources import Resources
from tiledsched.tuning.run import TuneReport, tune_problems

if TYPE_CHECKING:
    from tiledsched.tuning.record import RecordResult
    from tiledsched.tuning.refresh import RefreshReport
    from tiledsched.tuning.tuner import Watcher


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

        Raises:
            TiledschedError: of a wrong argument, a missing compiler, or a problem that no schedule works for. What was found
                for the problems before it is stored.
        """
        return tune_problems(self, kernel, problems, options or TuneOptions(), watcher=watcher, command=command)

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
        from tiledsched.tuning.record import record_problems

        return record_problems(
            self,
            kernel,
            problems,
            options or RecordOptions(),
            folder=folder,
            progress=progress,
            on_result=on_result,
            command=command,
        )

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
        from tiledsched.tuning.refresh import refresh_entries

        return refresh_entries(self, kernel, problems, options or RefreshOptions(), watcher=watcher, command=command)

    def check(
        self, kernel: KernelClass | str, problems: Cases | str | None = None, options: CheckOptions | None = None
    ) -> Iterator[CheckRow]:
        """Run schedules of a kernel on the CPU, in the interpreter; see :func:`check`."""
        return check_problems(self.arch, kernel, problems, options or CheckOptions())


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
    with Session(arch, settings=load_settings({"db": db}), jobs=jobs) as session:
        return session.tune(kernel, problems, chosen, watcher=watcher, command=command)


def check(
    kernel: KernelClass | str, problems: Cases | str | None = None, *, arch: str = CHECK_ARCH, **options: Any
) -> Iterator[CheckRow]:
    """Run schedules of a kernel on the CPU, in the interpreter, and compare every output with the kernel's reference.

    Args:
        kernel: the class, or where it is declared.
        problems: what to compute; None for small problems that the kernel names, or its suites' made small.
        arch: whose search space the schedules are drawn from.
        options: fields of :class:`tiledsched.tuning.options.CheckOptions`, e.g. `schedules=5`.

    Yields:
        A row for each schedule of each problem, as it is known.
    """
    return check_problems(arch, kernel, problems, CheckOptions.from_mapping(options, "check"))
