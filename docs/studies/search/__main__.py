"""`python -m docs.studies.search`: replay ways to search on recorded landscapes, and say how many measurements each takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from docs.studies.flags import names, positive
from docs.studies.search.bench import held_out_landscapes, run_bench, shipped_landscapes
from docs.studies.search.figure import draw
from docs.studies.search.methods import METHODS
from docs.studies.search.scores import Summary, read_runs, summarise, write_runs
from tiledsched.build.pool import default_jobs
from tiledsched.core.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay the methods, write a row for each run, and print a line for each method. Needs no GPU.

    Raises:
        ConfigError: a file or a method that is not there.
    """
    parser = argparse.ArgumentParser(prog="python -m docs.studies.search", description=__doc__)
    parser.add_argument("kernel", nargs="?", default="attention", help="which kernel (default: attention)")
    parser.add_argument("--samplers", type=names, help="which methods, with commas between them (default: all)")
    parser.add_argument("--seeds", type=positive, default=50, help="runs of each on each landscape, at most (50)")
    parser.add_argument("--landscapes", nargs="+", type=Path, help="what to search (default: what ships)")
    parser.add_argument("--jobs", type=positive, help="processes (default: one per CPU)")
    parser.add_argument("--csv", type=Path, help="also keep a row for each run here; rows of other methods stay")
    parser.add_argument("--figure", type=Path, help="also draw it (PNG or SVG)")
    options = parser.parse_args(arguments)
    kernel = options.kernel
    paths = options.landscapes or [*shipped_landscapes(kernel), *held_out_landscapes(kernel)]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"there is no landscape at {path}; give files that `tiledsched record` wrote")
    runs = read_runs(options.csv) if options.csv and options.csv.exists() else []
    for sampler in options.samplers or METHODS:
        mine = run_bench(
            paths,
            [sampler],
            seeds=options.seeds,
            jobs=options.jobs or default_jobs(),
            progress=lambda line: print(line, file=sys.stderr),
        )
        runs = [run for run in runs if run.sampler != sampler] + mine
        if options.csv:
            write_runs(runs, options.csv)
    held_out = {path.name.removesuffix(".json.xz") for path in held_out_landscapes()}
    fitted = summarise([run for run in runs if run.landscape not in held_out])
    unseen = summarise([run for run in runs if run.landscape in held_out])
    if options.figure:
        draw(fitted or unseen, options.figure)
    for title, lines in (("landscapes that ship", fitted), ("landscapes that nothing was fitted to", unseen)):
        if lines:
            Console(width=160).print(as_table(lines, title))
    return 0


def as_table(summaries: Sequence[Summary], title: str) -> Table:
    """A line for each method: medians of what it takes to come near the exhaustive best, and mean regrets on the way."""
    table = Table(title=f"{title}: distinct programs until within 1% of the best (median, 95% interval), and regret")
    for name in (
        *("method", "to 1%", "interval", "to 5%", "compiles to 1%", "device s to 1%", "reached"),
        *("regret at 10", "at 25", "at 50", "at 100", "seeds"),
    ):
        table.add_column(name, justify="left" if name == "method" else "right")

    def cell(value: float | None) -> str:
        return "never" if value is None else f"{value:.4g}"

    for line in summaries:
        low, high = line.measurements_to_1pct_interval
        regrets = (line.regret_10, line.regret_25, line.regret_50, line.regret_100)
        times = (line.measurements_to_5pct, line.compiles_to_1pct, line.device_s_to_1pct)
        table.add_row(
            line.sampler,
            cell(line.measurements_to_1pct),
            f"{cell(low)}-{cell(high)}",
            *map(cell, times),
            f"{line.reached:.0%}",
            *(f"{regret:.2%}" for regret in regrets),
            str(line.seeds),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
