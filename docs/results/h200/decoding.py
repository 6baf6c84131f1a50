"""How the performance model's estimates of decoding compare with measured times (docs/model.md).

    python -P docs/results/h200/decoding.py

Needs no GPU: the times are read from the CSV files of tunes that lie next to this script.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np

from tiledsched.core.device import arch_spec
from tiledsched.core.schedule import PLAIN, SHORT, Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.similarity import FEW_ROWS
from tiledsched.store.exchange import text_of

FILES = ("coverage_tuned.csv.xz", "both_regimes.csv.xz")
KNOBS = {short: name for name, short in SHORT.items()}
LAST_FITTED = "4"
"""The model's constants were chosen from runs up to this one of the second file; problems of later runs are new to it."""
LEAST = 5
"""Measured programs that a problem must have to be compared."""


def schedule_of(short: str, default: Schedule) -> Schedule:
    """The schedule that a text of `Schedule.short` describes."""
    tile, *rest = short.split()
    rows, keys = tile.split("x")
    found = {name: type(value)(PLAIN.get(name, 0)) for name, value in default.items() if not isinstance(value, str)}
    found |= {name: PLAIN[name] for name in default if name in PLAIN} | {"tile_m": int(rows), "tile_n": int(keys)}
    for word in rest:
        name, _, value = word.partition("=")
        if value:
            found[KNOBS.get(name, name)] = int(value) if value.isdigit() else value
        else:
            found[name.removeprefix("no_")] = not name.startswith("no_")
    return default.replace(**found)


def main() -> None:
    """Print a line for every second problem, one for the other half, and one for problems tuned after the model was fitted."""
    spec, space = arch_spec("sm_90"), space_for("sm_90", Attention)
    problems = {str(problem): problem for name in Attention.suites for problem in Attention.suite(name)}
    races: dict[str, dict[str, float]] = defaultdict(dict)
    later = set()
    for name in FILES:
        path = Path(__file__).parent / name
        for row in csv.DictReader(io.StringIO(text_of(path, path.read_bytes()))):
            problem = problems.get(row["problem"])
            if problem is not None and problem.mean_rows <= FEW_ROWS and row.get("regime", "burst") == "burst":
                if row["problem"] not in races and row.get("run", "") > LAST_FITTED:
                    later.add(row["problem"])
                races[row["problem"]][row["schedule"]] = float(row["median_us"])
    compared = sorted(name for name, race in races.items() if len(race) >= LEAST and name not in later)
    print("problems  programs  estimate over measured  its spread within a problem  rank correlation")
    for half in (compared[::2], compared[1::2], sorted(later)):
        levels, spreads, ranks, programs = [], [], [], 0
        for name in half:
            problem, race = problems[name], races[name]
            pairs = []
            for short, us in race.items():
                schedule = schedule_of(short, space.default(problem))
                estimate = Attention.cost.model(
                    problem, schedule, Attention.cost.expected(problem, schedule, spec), spec
                )
                pairs.append((math.log(estimate), math.log(us)))
            gaps = [estimate - us for estimate, us in pairs]
            levels.append(statistics.mean(gaps))
            spreads.append(statistics.pstdev(gaps))
            ranks.append(np.corrcoef(np.argsort(np.argsort(np.array(pairs), axis=0), axis=0).T)[0, 1])
            programs += len(pairs)
        print(
            f"{len(half):8d}  {programs:8d}  {math.exp(statistics.mean(levels)):21.2f}x  {statistics.mean(spreads):27.3f}  "
            f"{statistics.mean(ranks):16.2f}"
        )


if __name__ == "__main__":
    main()
