"""Cell by cell: prepare the methods, let them take turns, hand over the rows."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from tiledsched.bench.errors import Error
from tiledsched.bench.methods import MATMUL, Method
from tiledsched.bench.rows import OK, BenchRow, Cell
from tiledsched.bench.sampling import LEAST_SAMPLES, sample_counts, sample_in_turn
from tiledsched.core.problem import Problem
from tiledsched.measure.statistics import median_interval
from tiledsched.measure.timing import BURST_GAP_S, STILL_WARM_S, SUSTAINED_REWARM_S, SUSTAINED_WARMUP_S, Log, Stopwatch

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How a bench is run."""

    methods: tuple[Method, ...]
    """What takes part in every cell."""
    regimes: tuple[str, ...] = ("burst",)
    """All cells of the first, then all of the next: a GPU at its power cap takes its time to cool."""
    rounds: int = 30
    """Samples of a quick method in a burst cell; see `tiledsched.bench.sampling.sample_counts`."""
    budget_s: float | None = None
    """Seconds for all cells; those left get equal shares of what is left. None: no limit."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A method that runs and gives the right answer."""

    method: Method
    """Which."""
    look_us: float
    """What one of its samples takes, roughly: a call, or a replay of `launches` calls."""
    launches: int = 0
    """Calls in one CUDA graph; 0 where it is called."""
    error: Error | None = None
    """Against float64; None of the matmul."""
    compared: str = ""
    """How much of the output: (batch, head) pairs of how many, or all."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its row that are its own: schedule, provenance, measured_program."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One cell, ready to be timed."""

    ready: tuple[Ready, ...]
    """In the order `watch` knows them by."""
    failed: Mapping[str, str]
    """Method to why it takes no part."""
    watch: Stopwatch
    """Launches and times them."""
    log: Log
    """Of the GPU's state."""


class Harness(Protocol):
    """The GPU and the libraries on it; tests replace it."""

    device: str
    """Name of the GPU."""
    versions: str
    """Driver and libraries."""

    def prepare(self, problem: Problem, methods: Sequence[Method], regime: str) -> Prepared:
        """Make inputs and reference, run every method once, compare.

        Raises:
            MeasureError: the GPU cannot be used any more.
        """
        ...

    def check(self) -> None:
        """Whether the GPU can still be used.

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
) -> list[BenchRow]:
    """Time every method on every problem in every regime.

    Args:
        problems: what to compute.
        options: methods, regimes and how long.
        harness: what runs them.
        done: cells to leave out.
        keep: given the rows of each cell as they are known.
        progress: told a line per cell.

    Raises:
        MeasureError: the GPU cannot be used any more; the cells before were kept.
    """
    cells = [(regime, problem) for regime in options.regimes for problem in problems if (regime, problem) not in done]
    started = time.monotonic()
    rows: list[BenchRow] = []
    sustained_until = -STILL_WARM_S
    for number, (regime, problem) in enumerate(cells):
        left_s = None if options.budget_s is None else started + options.budget_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            progress(f"the budget is spent, {len(cells) - number} of {len(cells)} cells are left; run again to go on")
            break
        began = time.monotonic()
        share_s = None if left_s is None else left_s / (len(cells) - number)
        still_warm = began - sustained_until < STILL_WARM_S
        found = bench_cell(harness, (regime, problem), options, share_s, still_warm)
        if regime == "sustained":
            sustained_until = time.monotonic()
        keep(found)
        rows.extend(found)
        took_s = time.monotonic() - began
        progress(f"[{number + 1}/{len(cells)}] {regime} {problem}, {took_s:.1f} s: {_in_words(found)}")
    return rows


def _in_words(rows: Sequence[BenchRow]) -> str:
    return ", ".join(
        f"{row.method} {row.median_us:.1f} us" if row.median_us else f"{row.method} {row.status}" for row in rows
    )


def bench_cell(
    harness: Harness, cell: Cell, options: BenchOptions, share_s: float | None = None, still_warm: bool = False
) -> list[BenchRow]:
    """The rows of one cell, in the order of the methods.

    Args:
        harness: what runs them.
        cell: regime and problem.
        options: methods and samples.
        share_s: seconds for the cell, preparation included; None for as long as its samples take.
        still_warm: sustained: whether another such cell has just ended.

    Raises:
        MeasureError: the GPU cannot be used any more.
    """
    (regime, problem), began = cell, time.monotonic()
    prepared = harness.prepare(problem, options.methods, regime)
    warmup_s = 0.0 if regime == "burst" else SUSTAINED_REWARM_S if still_warm else SUSTAINED_WARMUP_S
    left_s = None if share_s is None else share_s - (time.monotonic() - began) - warmup_s
    looks_us = [each.look_us for each in prepared.ready]
    counts = sample_counts(looks_us, regime=regime, rounds=options.rounds, seconds=left_s)
    failed = dict(prepared.failed)
    samples: dict[str, list[float]] = {}
    try:
        timed = (
            sample_in_turn(
                prepared.watch,
                counts,
                regime=regime,
                rng=random.Random(problem.id),
                log=prepared.log,
                gap_s=BURST_GAP_S,
                warmup_s=warmup_s,
            )
            if prepared.ready
            else []
        )
        samples = {each.method.name: taken for each, taken in zip(prepared.ready, timed, strict=True)}
    except RuntimeError as error:  # of torch or of the stopwatch; where the GPU is lost these rows say nothing
        harness.check()
        failed |= {each.method.name: f"while timed: {first_line(error)}" for each in prepared.ready}
    for name, count in zip(list(samples), counts, strict=False):
        if len(samples[name]) < LEAST_SAMPLES:
            failed[name] = (
                f"host too slow: the GPU waited for it in {count - len(samples[name])} of {count} calls, whose "
                "times are its own"
            )
            del samples[name]
    conditions = prepared.log.summary()
    if conditions.beside:
        failed |= dict.fromkeys(samples, f"timed {conditions.disturbance}")
        samples = {}
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
            conditions=replace(conditions, gap_ms=BURST_GAP_S * 1e3 if regime == "burst" else 0.0),
        )
        if method.name in samples:
            row = _timed(row, ready[method.name], samples[method.name])
        rows.append(row)
    return _against_ceiling(rows)


def _timed(row: BenchRow, ready: Ready, samples: Sequence[float]) -> BenchRow:
    low, high = median_interval(samples, CONFIDENCE)
    if ready.error is not None:
        row = replace(row, max_abs_err=ready.error.max_abs, rel_err=ready.error.relative, compared=ready.compared)
    row = replace(
        row, median_us=statistics.median(samples), p95_us=_percentile(samples, 0.95), ci_low_us=low, ci_high_us=high
    )
    return replace(
        row, samples=len(samples), conditions=replace(row.conditions, graph_launches=ready.launches), **ready.details
    )


def _percentile(samples: Sequence[float], share: float) -> float:
    """By linear interpolation between the two nearest samples."""
    ordered, place = sorted(samples), share * (len(samples) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _against_ceiling(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows with their rate over the matmul's, where that took part."""
    ceiling = next((row.tflops for row in rows if row.method == MATMUL), None)
    if not ceiling:
        return list(rows)
    return [replace(row, ceiling_ratio=row.tflops / ceiling) if row.tflops else row for row in rows]


def first_line(error: BaseException) -> str:
    """What an exception says, in one short line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:100]}" if text else type(error).__name__
