"""Scores a search on one landscape, and sums up the scores of all searches."""

from __future__ import annotations

import csv
import io
import lzma
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from docs.studies.search.field import Field
from tiledsched.core.errors import ConfigError
from tiledsched.core.files import csv_text
from tiledsched.store.exchange import text_of, write_text

DEPTHS = (10, 25, 50, 100)
"""Numbers of measurements after which regret is taken."""
RESAMPLES = 999
"""Resamples of the bootstrap."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one search did, in order."""

    measured: tuple[int, ...]
    """Indices of the programs measured, each once."""
    compiled: tuple[int, ...]
    """For each of them, the number of compiles done by the time it was measured."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The score of one search. A value is None where the search ended before it came so near."""

    sampler: str
    """Name of the method."""
    landscape: str
    """Name of the landscape."""
    seed: int
    """Seed of its random numbers."""
    measurements: int
    """Distinct programs it measured before it ended."""
    measurements_to_1pct: int | None
    """How many of them it took to reach a program within 1% of the best."""
    measurements_to_5pct: int | None
    """How many to reach one within 5%."""
    compiles_to_1pct: int | None
    """Compiles until it was within 1%."""
    compiles_to_5pct: int | None
    """Compiles until it was within 5%."""
    device_s_to_1pct: float | None
    """Device seconds until it was within 1%."""
    device_s_to_5pct: float | None
    """Device seconds until it was within 5%."""
    regret_10: float
    """Time of the best of the first 10 measured over the best time, minus 1; of all measured where there were fewer."""
    regret_25: float
    """Time of the best of the first 25 measured over the best time, minus 1."""
    regret_50: float
    """Time of the best of the first 50 measured over the best time, minus 1."""
    regret_100: float
    """Time of the best of the first 100 measured over the best time, minus 1."""


def score(sampler: str, field: Field, seed: int, trace: Trace) -> Run:
    """The score of `trace`."""
    order = np.array(trace.measured)
    regret = np.minimum.accumulate(field.times_us[order]) / field.best_us - 1.0
    seconds = np.cumsum(field.device_s[order])
    values: dict[str, Any] = {}
    for percent in (1, 5):
        near = np.flatnonzero(regret <= percent / 100.0)
        at = int(near[0]) if len(near) else None
        values[f"measurements_to_{percent}pct"] = None if at is None else at + 1
        values[f"compiles_to_{percent}pct"] = None if at is None else trace.compiled[at]
        values[f"device_s_to_{percent}pct"] = None if at is None else round(float(seconds[at]), 4)
    for depth in DEPTHS:
        values[f"regret_{depth}"] = round(float(regret[min(depth, len(regret)) - 1]), 5)
    return Run(sampler=sampler, landscape=field.name, seed=seed, measurements=len(order), **values)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One method over all landscapes and seeds. Medians count a run that never came near as infinite."""

    sampler: str
    """Name of the method."""
    landscapes: int
    """Number of landscapes."""
    seeds: int
    """Runs on each of them."""
    reached: float
    """Share of runs that came within 1%."""
    measurements_to_1pct: float | None
    """Median; None where more than half never came near."""
    measurements_to_1pct_interval: tuple[float | None, float | None]
    """95% bootstrap interval of it, landscapes resampled."""
    measurements_to_5pct: float | None
    """Median."""
    compiles_to_1pct: float | None
    """Median."""
    device_s_to_1pct: float | None
    """Median."""
    regret_10: float
    """Mean."""
    regret_25: float
    """Mean."""
    regret_50: float
    """Mean."""
    regret_100: float
    """Mean."""
    regret_25_interval: tuple[float, float]
    """95% bootstrap interval of that mean, landscapes resampled."""
    worst_regret_50: float
    """Largest of all runs."""


def summarise(runs: Iterable[Run]) -> list[Summary]:
    """One line for each method, best first."""
    by_sampler: dict[str, list[Run]] = {}
    for run in runs:
        by_sampler.setdefault(run.sampler, []).append(run)
    lines = [_summary(sampler, mine) for sampler, mine in by_sampler.items()]
    return sorted(lines, key=lambda line: (line.measurements_to_1pct or math.inf, line.regret_25))


def _summary(sampler: str, runs: Sequence[Run]) -> Summary:
    landscapes = sorted({run.landscape for run in runs})

    def table(name: str) -> list[NDArray[np.float64]]:
        """The values of one column, an array for each landscape."""
        return [
            np.array(
                [
                    math.inf if getattr(run, name) is None else getattr(run, name)
                    for run in runs
                    if run.landscape == landscape
                ],
                dtype=float,
            )
            for landscape in landscapes
        ]

    def median(name: str) -> float | None:
        return _finite(float(np.median(np.concatenate(table(name)))))

    low, high = _interval(table("measurements_to_1pct"), np.median)
    regret_low, regret_high = _interval(table("regret_25"), np.mean)
    return Summary(
        sampler=sampler,
        landscapes=len(landscapes),
        seeds=len(runs) // len(landscapes),
        reached=float(np.mean([run.measurements_to_1pct is not None for run in runs])),
        measurements_to_1pct=median("measurements_to_1pct"),
        measurements_to_1pct_interval=(_finite(low), _finite(high)),
        measurements_to_5pct=median("measurements_to_5pct"),
        compiles_to_1pct=median("compiles_to_1pct"),
        device_s_to_1pct=median("device_s_to_1pct"),
        **{f"regret_{depth}": float(np.mean(np.concatenate(table(f"regret_{depth}")))) for depth in DEPTHS},
        regret_25_interval=(regret_low, regret_high),
        worst_regret_50=max(run.regret_50 for run in runs),
    )


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def _interval(groups: Sequence[NDArray[np.float64]], statistic: Any) -> tuple[float, float]:
    """95% percentile bootstrap interval, groups resampled: runs on one landscape are not independent of each other."""
    from scipy.stats import bootstrap

    if len(groups) < 2:
        value = float(statistic(np.concatenate(groups)))
        return value, value
    with np.errstate(invalid="ignore"):  # SciPy also works out a standard error, of infinities at times
        spread = bootstrap(
            (np.arange(len(groups)),),
            lambda drawn: statistic(np.concatenate([groups[int(i)] for i in drawn])),
            vectorized=False,
            n_resamples=RESAMPLES,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
    return float(spread.low), float(spread.high)


COLUMNS = tuple(field.name for field in fields(Run))


def write_runs(runs: Iterable[Run], path: Path) -> None:
    """Write one row for each run; a file that ends in `.xz` is compressed."""
    ordered = sorted(runs, key=lambda run: (run.sampler, run.landscape, run.seed))
    try:
        write_text(path, csv_text(map(asdict, ordered), COLUMNS))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give another path") from error


def read_runs(path: Path) -> list[Run]:
    """The runs that `write_runs` wrote.

    Raises:
        ConfigError: the file cannot be read or has other columns.
    """
    try:
        text = text_of(path, path.read_bytes())
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give a file that bench-search wrote") from error
    reader = csv.DictReader(io.StringIO(text))
    if tuple(reader.fieldnames or ()) != COLUMNS:
        raise ConfigError(f"{path} has other columns than bench-search writes; give another file")
    return [Run(**{name: _value(name, cell) for name, cell in row.items()}) for row in reader]  # type: ignore[arg-type]


def _value(name: str, cell: str) -> str | int | float | None:
    if name in ("sampler", "landscape"):
        return cell
    if not cell:
        return None
    return float(cell) if name.startswith(("regret", "device_s")) else int(cell)
