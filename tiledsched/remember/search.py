"""`exhaustive_search` of cuTile, with a memory."""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from tiledsched.core.config import load_settings, warn_once
from tiledsched.core.errors import Failure, MeasureError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.remember import machine as machines
from tiledsched.remember.answers import Answers, AnswerStore, Findings, stored_places
from tiledsched.remember.description import Call, Request, describe_call
from tiledsched.remember.identity import OpaqueError, name_of
from tiledsched.remember.machine import CallProgram, SearchMachine

NOT_STORED = "not stored"
"""The kernel of problems that are in no database."""
_one_at_a_time = threading.RLock()
"""Held while a thread of this process measures."""


def exhaustive_search(
    search_space: Iterable[Any],
    stream: Any,
    grid_fn: Callable[[Any], Any],
    kernel: Any,
    args_fn: Callable[[Any], tuple[Any, ...]],
    hints_fn: Callable[[Any], Mapping[str, Any]] | None = None,
    *,
    quiet: bool = False,
    single_run_timeout_sec: float | None = None,
    flush_l2: bool = True,
    check: bool = False,
) -> Any:
    """Find the fastest configuration of a cuTile kernel, or read the answer where it was found before.

    It takes what `cuda.tile.tune.exhaustive_search` takes and returns what that returns. The answer is stored with the identity
    of the kernel, of the problem and of the space; the next call with the same, in this process or another, is answered from the
    database without compiling or launching anything. Of a space that was extended only what is new is measured.

    Args:
        search_space: configurations: namespaces, dicts, dataclasses, tuples or plain values.
        stream: the CUDA stream to launch on.
        grid_fn: from a configuration to the grid.
        kernel: the kernel, or a function from a configuration to its kernel.
        args_fn: from a configuration to the arguments. It is called anew for every launch, so that it may clone arrays which the
            kernel changes. For an answer from the database it is called once, to see the arguments.
        hints_fn: from a configuration to compiler hints.
        quiet: print nothing.
        single_run_timeout_sec: limit of the first launch of each configuration, in seconds; None for no limit.
        flush_l2: whether the L2 cache is flushed before each timed launch.
        check: whether the arrays that each configuration changes are compared with those of the first one. A configuration that
            computes something else is a failure, whose message says by how much.

    Returns:
        A `cuda.tile.tune.TuningResult`. Its `mean_us` are medians.

    Raises:
        ValueError: the space is empty, or no configuration works.
        MeasureError: something has to be measured and cannot be: there is no GPU, or a CUDA graph is being captured.
    """
    request = Request(
        configs=tuple(search_space),
        stream=stream,
        grid_fn=grid_fn,
        kernel=kernel,
        args_fn=args_fn,
        hints_fn=hints_fn,
        timeout_s=single_run_timeout_sec,
        flush_l2=flush_l2,
        check=check,
    )
    if not request.configs:
        raise ValueError("Search space is empty.")
    result = Search(machines.machine, request).result()
    if not quiet:
        print(result)
    return result


class Search:
    """One call.

    Args:
        machine: builds, launches and times.
        request: the call.
    """

    def __init__(self, machine: SearchMachine, request: Request) -> None:
        self._machine, self._request = machine, request
        self._settings = load_settings()
        self.errors: dict[str, Exception] = {}
        """What configurations raised in this process, by the id of their schedule."""

    def result(self) -> Any:
        """The answer, from the database or from a race."""
        gpu = self._machine.gpu()
        call, store = self._open(gpu)
        known, problem = Answers(), Problem(NOT_STORED, {})
        try:
            if store is not None:
                known = self._counted(store.read())
                if known.covers(call):
                    return self._answer(call, known)
                problem = known.problem or call.new_problem(known.other_grids)
        except OpaqueError as error:
            call, store = self._not_stored(error), None
        if gpu is None:
            raise MeasureError(
                f"no result is stored for {call.kernel} with these arguments, and there is no GPU to measure on; run this "
                "once on a machine with the GPU, or name its database with TILEDSCHED_DB"
            )
        if self._machine.capturing():
            raise MeasureError(
                f"no result is stored for {call.kernel} with these arguments, and nothing can be measured while a CUDA graph is "
                "captured; call it once before the capture"
            )
        with _one_at_a_time, self._machine.measuring(self._request):
            if store is not None:  # another process may have measured while we waited
                known = self._counted(store.read())
                if known.covers(call):
                    return self._answer(call, known)
            found = self._measure(call, known, problem)
        if store is not None and not found.alone:
            warn_once(
                f"results for {call.kernel} are not stored, because another process ran on the GPU while they were measured; the "
                "next call measures again"
            )
        elif store is not None:
            stored = self._counted(store.write(found, known))
            if stored.covers(call):
                return self._answer(call, stored)
        return self._answer(call, found.answers)

    def _open(self, gpu: tuple[str, str] | None) -> tuple[Call, AnswerStore | None]:
        """The description of the call, and where its answers are stored; None where they are not."""
        arch, name = gpu or ("", "")
        if self._settings.remember == "off":
            return self._unnamed(), None
        try:
            call = describe_call(self._request, arch)
        except OpaqueError as error:
            return self._not_stored(error), None
        if gpu is None:
            places = stored_places(self._settings, call)
            if len(places) == 1:
                (arch, name) = places[0]
                call = describe_call(self._request, arch)
        return call, AnswerStore(self._settings, call, arch, name, self._machine.compiler())

    def _not_stored(self, error: OpaqueError) -> Call:
        """The call, after a warning that nothing is stored of it, and why."""
        call = self._unnamed()
        warn_once(
            f"results for {call.kernel} are not stored: the call depends on {error}, which has no lasting identity"
        )
        return call

    def _unnamed(self) -> Call:
        """A call of which nothing is stored: its schedules are numbers."""
        count = len(self._request.configs)
        return Call(
            request=self._request,
            kernel=name_of(getattr(self._request.kernel, "_pyfunc", self._request.kernel)),
            source="",
            captured="",
            schedules=tuple(Schedule(config=number) for number in range(count)),
            grids=tuple((0,) for _ in range(count)),
        )

    def _counted(self, known: Answers) -> Answers:
        return known.unchecked() if self._request.check else known

    def _measure(self, call: Call, known: Answers, problem: Problem) -> Findings:
        """Build what is not known, and race it with the fastest that is known."""
        needed = threading.Thread(target=_import_what_is_needed, args=[self._machine, self._settings.db], daemon=True)
        needed.start()  # while the compiler runs
        if not known.times:
            known = replace(known, failures={})  # where nothing worked, all is tried again
        done = known.times.keys() | known.failures.keys()
        incumbent = self._best(call, known)
        first = call.schedules[0] if self._request.check else None  # what the others are compared with
        programs = {
            each: self._program(call, each)
            for each in dict.fromkeys(call.schedules)
            if each.id not in done or each in (incumbent, first)
        }
        self._machine.build(list(programs.values()), self._request)
        needed.join()
        from tiledsched.remember.measuring import Measuring

        measuring = Measuring(self._machine, call, problem, known, incumbent, programs)
        found = measuring.measure()
        self.errors |= {each.id: error for each, error in measuring.errors.items()}
        return found

    def _program(self, call: Call, schedule: Schedule) -> CallProgram:
        """What is built for the first configuration with a schedule."""
        config = self._request.configs[call.places[schedule.id]]
        kernel = self._request.kernel_of(config).replace_hints(**self._request.hints_of(config))
        return CallProgram(config=config, schedule=schedule, grid=self._request.grid_fn(config), kernel=kernel)

    def _best(self, call: Call, known: Answers) -> Schedule | None:
        """The fastest of the call's schedules by what is stored: the one served, or of those that differ by no more than matters
        the first in the caller's order."""
        timed = [each for each in call.schedules if each.id in known.times]
        served = [each for each in timed if each.id == known.winner]
        if served or not timed:
            return served[0] if served else None
        from tiledsched.tuning.race import Rules

        least = min(known.times[each.id].median_us for each in timed)
        return next(each for each in timed if known.times[each.id].median_us <= (1 + Rules.same) * least)

    def _answer(self, call: Call, known: Answers) -> Any:
        """The result for the caller."""
        from cuda.tile.tune import Measurement, TuningResult

        best = self._best(call, known)
        successes, failures, winner = [], [], None
        for config, schedule in zip(self._request.configs, call.schedules, strict=True):
            if schedule.id in known.times:
                time = known.times[schedule.id]
                made = Measurement(
                    config=config,
                    mean_us=time.median_us,
                    num_samples=time.samples,
                    error_margin_us=(time.ci_high_us - time.ci_low_us) / 2,
                )
                successes.append(made)
                winner = made if winner is None and schedule == best else winner
            elif schedule.id in known.failures:
                failures.append((config, *self._error(schedule, known.failures[schedule.id])))
        if winner is None:
            config, kind, message = (
                failures[0] if failures else (self._request.configs[0], RuntimeError, "not measured")
            )
            raise ValueError(f"No valid config found in search space.\nConfig: {config}\n{kind.__name__}: {message}")
        return TuningResult(best=winner, successes=tuple(successes), failures=tuple(failures))

    def _error(self, schedule: Schedule, failure: Failure) -> tuple[type[BaseException], str]:
        """The type and the message of what a configuration raised, here or in the process that stored it."""
        if schedule.id in self.errors:
            error = self.errors[schedule.id]
            return type(error), str(error)
        name, _, message = failure.message.partition(": ")
        return _exception_named(name), message or failure.message


def _import_what_is_needed(machine: SearchMachine, url: str | None) -> None:
    """Import what measuring and storing take, ask for versions, and make the database where there is none: seconds of work, the
    first time in a process.
    """
    with contextlib.suppress(Exception):  # who needs it says what is wrong with it
        machine.toolchain()
        import scipy.stats  # noqa: F401

        import tiledsched.remember.measuring  # noqa: F401
        from tiledsched.store.db import TuningDB

        TuningDB.open(url).close()


def _exception_named(name: str) -> type[BaseException]:
    """The exception type of this name: Python's, cuTile's, or RuntimeError where neither has it."""
    import cuda.tile

    found = getattr(builtins, name, None) or getattr(cuda.tile, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else RuntimeError
