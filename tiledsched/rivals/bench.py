"""A bench: methods on one GPU, cell by cell. Each runs once and is compared with float64, then they take turns, and the rows are
handed over.

Everything runs in this process on the current CUDA device: torch tensors, torch events, references in CuPy.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import numpy

from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core.errors import MeasureError, UnsupportedError, first_line
from tiledsched.core.extras import package_version, required
from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Arrays, Method, RivalCase
from tiledsched.measure.driver_timeout import asked
from tiledsched.measure.estimate import Timing
from tiledsched.measure.nvml import ConditionsLog, current_device
from tiledsched.measure.timing import GRAPH_LAUNCHES, STILL_WARM_S, Log, Stopwatch, TorchStopwatch
from tiledsched.rivals.methods import (
    MATMUL,
    Trial,
    capture_short,
    case_error,
    make_case,
    our_kernel_is_missing,
    output_dtype,
    try_call,
)
from tiledsched.rivals.rows import OK, BenchRow, Cell
from tiledsched.rivals.sampling import LEAST_SAMPLES, USUAL_PACE, Pace, sample_counts, sample_in_turn

PACKAGES = ("torch", "triton", "cuda-tile", "tilegym", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl")
"""Packages whose versions are recorded, where they are installed."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How a bench is run."""

    methods: tuple[Method, ...]
    """The methods that take part in every cell."""
    regimes: tuple[str, ...] = ("burst",)
    """All cells of the first regime are run before those of the next: a GPU at its power cap takes time to cool."""
    rounds: int = 30
    """Samples of a quick method in a burst cell; see `tiledsched.rivals.sampling.sample_counts`."""
    budget_s: float | None = None
    """Seconds for all cells; the cells that are left share equally what is left of it. None: no limit."""
    pace: Pace = USUAL_PACE
    """Pauses between launches, and how long the GPU is warmed up."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A method that runs and computes the right outputs."""

    method: Method
    """The method."""
    trial: Trial
    """What a few calls took; its rough time is of one sample, which may be a replay of `launches` calls."""
    launches: int = 0
    """Calls in one CUDA graph; 0 where the method is called without a graph."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its row: of its error against float64, and for our own methods schedule, provenance and measured_program."""


@dataclass(frozen=True, kw_only=True)
class PreparedCell:
    """One cell, ready to be timed."""

    ready: tuple[Ready, ...]
    """The methods to time, in the order in which `watch` numbers them."""
    failed: Mapping[str, str]
    """Method -> why it takes no part."""
    watch: Stopwatch
    """Launches and times the methods."""
    log: Log
    """Records the state of the GPU."""


class TorchHarness:
    """Runs methods on the current CUDA device.

    Args:
        verify: also compile what our own method launches, where that is known, and compare its machine code with the
            measured artifact; about a second a problem.
        own: computes a problem by our own kernel; see :func:`tiledsched.rivals.methods.make_case`.

    Raises:
        MissingPackageError: torch or CuPy is missing.
        MeasureError: torch sees no CUDA device.
    """

    def __init__(self, *, verify: bool = False, own: Callable[..., Any] = our_kernel_is_missing) -> None:
        with required():
            import cupy
            import torch
        if not torch.cuda.is_available():
            raise MeasureError("torch sees no CUDA device; run: tiledsched doctor")
        self._torch, self._cupy, self._verify, self._own = torch, cupy, verify, own
        device = current_device()
        self.device, self.arch, self._memory_bytes = device.name, device.arch, device.memory_bytes
        self.versions = versions(torch, device.driver)
        self._flush = torch.empty(max(2 * device.l2_bytes, 1 << 26), dtype=torch.uint8, device="cuda")

    def prepare(self, problem: Problem, methods: Sequence[Method], regime: str) -> PreparedCell:
        """Make inputs and reference, run every method once, and compare its outputs with float64.

        Raises:
            MeasureError: the GPU cannot be used any more.
        """
        torch, failed = self._torch, {}
        found: list[Ready] = []
        try:
            torch.cuda.empty_cache()
            case = make_case(torch, self._cupy, problem, self._own)
            torch.cuda.synchronize()
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise _lost(error) from error
            failed, methods = {each.name: "out of memory: the inputs" for each in methods}, ()
        for method in methods:
            outcome = self._try(method, case)
            if isinstance(outcome, str):
                failed[method.name] = outcome
            else:
                found.append(outcome)
        trials = [each.trial for each in found]
        host_us = max((each.host_us for each in trials), default=0.0)
        watch = TorchStopwatch(torch, [each.call for each in trials], self._flush, host_us=host_us)
        launches = capture_short(watch, trials) if regime == "sustained" else [0] * len(trials)
        for index, (ready, count) in enumerate(zip(found, launches, strict=True)):
            if count:
                trial = replace(ready.trial, look_us=ready.trial.look_us * GRAPH_LAUNCHES)
                ready = replace(ready, trial=trial, launches=count)
            about = details(ready.method, case.arrays, verify=self._verify, captured=count > 0)
            found[index] = replace(ready, fields={**ready.fields, **about})
        return PreparedCell(ready=tuple(found), failed=failed, watch=watch, log=ConditionsLog(ask=asked))

    def check(self) -> None:
        """Make sure that the GPU can still be used.

        Raises:
            MeasureError: it cannot.
        """
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as error:
            raise _lost(error) from error

    def _try(self, method: Method, case: RivalCase) -> Ready | str:
        """Call a method a few times: what was learnt, or why the method takes no part."""
        torch, problem = self._torch, case.arrays.problem
        refusal = method.refusal(problem, self._memory_bytes)
        if refusal:
            return refusal
        try:
            with warnings.catch_warnings():  # torch warns why it refuses a backend; the status says that it did
                warnings.simplefilter("ignore")
                call = method.make(case.arrays)
                out = call()
                torch.cuda.synchronize()
                found = None if method.name == MATMUL else case_error(self._cupy, case, out)
                del out
                trial = try_call(torch, call, self._flush)
        except UnsupportedError as error:
            return f"not served: {error}"
        except Exception as error:
            self._check_context(method, error)
            return "out of memory" if _out_of_memory(error) else first_line(error)
        if found is None:
            return Ready(method=method, trial=trial)
        about = {"max_abs_err": found.max_abs, "rel_err": found.relative, "output_errs": found.by_output}
        about["compared"] = case.compared
        return found.verdict(output_dtype(problem)) or Ready(method=method, trial=trial, fields=about)

    def _check_context(self, method: Method, error: Exception) -> None:
        """Make sure that the GPU can still be used after `error`. An illegal access breaks the CUDA context of this
        process for good.

        Raises:
            MeasureError: it cannot.
        """
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as broken:
            raise MeasureError(
                f"{method.name} broke the CUDA context ({first_line(error)}); run again, and "
                "without that method with --methods"
            ) from broken
        self._torch.cuda.empty_cache()


def details(method: Method, arrays: Arrays, *, verify: bool, captured: bool) -> dict[str, Any]:
    """Fields of the row of one of our own methods: schedule, provenance and measured_program. If they cannot be found out, the
    row keeps its times and says so.

    Args:
        method: the method.
        arrays: its inputs.
        verify: also compile what is launched, to compare its machine code with the measured artifact.
        captured: whether the method was timed in a CUDA graph, where another rival may be served.
    """
    if method.explain is None:
        return {}
    try:
        found = method.explain(arrays, verify)
    except Exception as error:
        return {"provenance": f"not known: {first_line(error)}"}
    rival = found.in_graphs if captured else found.rival
    if method.names_rivals and rival:
        return {"schedule": rival, "provenance": "rival", "measured_program": None}
    return {
        "schedule": found.served.schedule.short(),
        "provenance": found.served.provenance,
        "measured_program": found.is_measured_program if verify else None,
    }


def _lost(error: Exception) -> MeasureError:
    return MeasureError(
        f"the GPU cannot be used any more ({first_line(error)}); run again, and with --methods "
        "leave out the one that broke it"
    )


def _out_of_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError"  # torch's or CuPy's


def versions(torch: Any, driver: str) -> str:
    """Versions of the driver and the libraries, in one line."""
    parts = [f"driver {driver}", f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
    for package in PACKAGES:
        if version := package_version(package):
            parts.append(f"{package} {version}")
    compiler = compiler_at_hand()
    return " ".join([*parts, *([f"tileiras {compiler}"] if compiler else [])])


def run_bench(
    problems: Sequence[Problem],
    options: BenchOptions,
    harness: Any,
    *,
    done: Collection[Cell] = (),
    keep: Callable[[Sequence[BenchRow]], None] = lambda rows: None,
    progress: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[BenchRow]:
    """Time every method on every problem in every regime.

    Args:
        problems: what to compute.
        options: methods, regimes and how long.
        harness: what runs the methods, as :class:`tiledsched.rivals.bench.TorchHarness` does; tests bring another.
        done: cells to leave out.
        keep: called with the rows of each cell as soon as they are known.
        progress: called with a line for each cell.
        clock: seconds, by which the budget is counted.

    Raises:
        MeasureError: the GPU cannot be used any more; `keep` has the cells before.
    """
    cells = [(regime, problem) for regime in options.regimes for problem in problems if (regime, problem) not in done]
    started = clock()
    rows: list[BenchRow] = []
    sustained_until = -STILL_WARM_S
    for number, (regime, problem) in enumerate(cells):
        began = clock()
        left_s = None if options.budget_s is None else started + options.budget_s - began
        if left_s is not None and left_s <= 0:
            progress(f"the budget is spent, {len(cells) - number} of {len(cells)} cells are left; run again to go on")
            break
        share_s = None if left_s is None else left_s / (len(cells) - number)
        still_warm = began - sustained_until < STILL_WARM_S
        found = bench_cell(harness, (regime, problem), options, share_s, still_warm)
        took_s = clock() - began
        if regime == "sustained":
            sustained_until = began + took_s
        keep(found)
        rows.extend(found)
        progress(f"[{number + 1}/{len(cells)}] {regime} {problem}, {took_s:.1f} s: {_times_of(found)}")
    return rows


def _times_of(rows: Sequence[BenchRow]) -> str:
    return ", ".join(
        f"{row.method} {row.median_us:.1f} us" if row.median_us else f"{row.method} {row.status}" for row in rows
    )


def bench_cell(
    harness: Any, cell: Cell, options: BenchOptions, share_s: float | None = None, still_warm: bool = False
) -> list[BenchRow]:
    """The rows of one cell, in the order of the methods.

    Args:
        harness: what runs the methods.
        cell: regime and problem.
        options: methods and samples.
        share_s: seconds for the cell, its preparation included; None for as long as its samples take.
        still_warm: in the sustained regime, whether another sustained cell has just ended.

    Raises:
        MeasureError: the GPU cannot be used any more.
    """
    (regime, problem), began, pace = cell, time.monotonic(), options.pace
    prepared = harness.prepare(problem, options.methods, regime)
    warmup_s = 0.0 if regime == "burst" else pace.rewarm_s if still_warm else pace.warmup_s
    left_s = None if share_s is None else share_s - (time.monotonic() - began) - warmup_s
    looks_us = [each.trial.look_us for each in prepared.ready]
    counts = sample_counts(looks_us, regime=regime, rounds=options.rounds, gap_s=pace.gap_s, seconds=left_s)
    failed = dict(prepared.failed)
    samples = _sampled(harness, prepared, counts, cell, replace(pace, warmup_s=warmup_s), failed)
    conditions = prepared.log.summary()
    if conditions.concurrent_pids:
        failed |= dict.fromkeys(samples, f"timed {conditions.disturbance}")
        samples = {}
    conditions = replace(conditions, gap_ms=pace.gap_s * 1e3 if regime == "burst" else 0.0)
    ready = {each.method.name: each for each in prepared.ready}
    rows = []
    for method in options.methods:
        row = BenchRow(
            problem=problem,
            method=method.name,
            regime=regime,
            status=failed.get(method.name, OK),
            flops=method.flops,
            device=harness.device,
            versions=harness.versions,
            conditions=conditions,
            taken=f"{datetime.now(timezone.utc):%Y-%m-%d}",
        )
        if method.name in samples:
            timed, own = samples[method.name], ready[method.name]
            row = replace(
                row,
                timing=Timing.of(timed),
                p95_us=float(numpy.percentile(timed, 95)),
                samples=len(timed),
                conditions=replace(conditions, graph_launches=own.launches),
                **own.fields,
            )
        rows.append(row)
    return _against_ceiling(rows)


def _sampled(
    harness: Any, prepared: PreparedCell, counts: Sequence[int], cell: Cell, pace: Pace, failed: dict[str, str]
) -> dict[str, list[float]]:
    """Method -> its samples in microseconds. Methods without enough of them are added to `failed`."""
    regime, problem = cell
    names = [each.method.name for each in prepared.ready]
    if not names:
        return {}
    try:
        taken = sample_in_turn(
            prepared.watch, counts, regime=regime, rng=random.Random(problem.id), log=prepared.log, pace=pace
        )
    except RuntimeError as error:  # of torch or of the stopwatch; where the GPU is lost, the rows would say nothing
        harness.check()
        failed |= {name: f"while timed: {first_line(error)}" for name in names}
        return {}
    enough = {}
    for name, samples, count in zip(names, taken, counts, strict=True):
        if len(samples) >= LEAST_SAMPLES:
            enough[name] = samples
        else:
            failed[name] = (
                f"host too slow: in {count - len(samples)} of {count} calls the GPU waited for the host, so that their "
                "times are the host's"
            )
    return enough


def _against_ceiling(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows with their rate over the matmul's rate, where the matmul took part."""
    ceiling = next((row.tflops for row in rows if row.method == MATMUL), None)
    if not ceiling:
        return list(rows)
    return [replace(row, ceiling_ratio=row.tflops / ceiling) if row.tflops else row for row in rows]
