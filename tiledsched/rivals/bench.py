"""Runs a bench cell by cell: prepares the methods, lets them take turns, and hands over the rows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, Protocol

import numpy

from tiledsched.checking.errors import Error
from tiledsched.core.blame import first_line
from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Method
from tiledsched.measure.estimate import Timing
from tiledsched.measure.timing import STILL_WARM_S, Log, Stopwatch
from tiledsched.rivals.methods import MATMUL
from tiledsched.rivals.rows import OK, BenchRow, Cell
from tiledsched.rivals.sampling import LEAST_SAMPLES, USUAL_PACE, Pace, sample_counts, sample_in_turn
from tiledsched.rivals.trials import Trial


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
    error: Error | None = None
    """Its error against float64; None for the matmul."""
    compared: str = ""
    """How much of the output was compared: `all`, or a number of (batch, head) pairs such as `4/64`."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its row that only our own methods have: schedule, provenance, measured_program."""


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


class Harness(Protocol):
    """The GPU and the libraries on it; tests replace it."""

    device: str
    """Name of the GPU."""
    versions: str
    """Driver and libraries, in one line."""

    def prepare(self, problem: Problem, methods: Sequence[Method], regime: str) -> PreparedCell:
        """Make inputs and reference, run every method once, and compare its outputs.

        Raises:
            MeasureError: the GPU cannot be used any more.
        """
        ...

    def check(self) -> None:
        """Make sure that the GPU can still be used.

        Raises:
            MeasureError: it cannot.
        """
        ...


def run_bench(
    problems: Sequence[Problem],
    options: BenchOptions,
    harness: Harness,
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
        harness: what runs the methods.
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
    harness: Harness, cell: Cell, options: BenchOptions, share_s: float | None = None, still_warm: bool = False
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
        timed = method.name in samples
        rows.append(_with_times(row, ready[method.name], samples[method.name]) if timed else row)
    return _against_ceiling(rows)


def _sampled(
    harness: Harness, prepared: PreparedCell, counts: Sequence[int], cell: Cell, pace: Pace, failed: dict[str, str]
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


def _with_times(row: BenchRow, ready: Ready, samples: Sequence[float]) -> BenchRow:
    if ready.error is not None:
        error = ready.error
        row = replace(row, max_abs_err=error.max_abs, rel_err=error.relative, output_errs=error.by_output)
        row = replace(row, compared=ready.compared)
    return replace(
        row,
        timing=Timing.of(samples),
        p95_us=float(numpy.percentile(samples, 95)),
        samples=len(samples),
        conditions=replace(row.conditions, graph_launches=ready.launches),
        **ready.details,
    )


def _against_ceiling(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows with their rate over the matmul's rate, where the matmul took part."""
    ceiling = next((row.tflops for row in rows if row.method == MATMUL), None)
    if not ceiling:
        return list(rows)
    return [replace(row, ceiling_ratio=row.tflops / ceiling) if row.tflops else row for row in rows]
