"""`python -m docs.studies.search`: replay ways to search on recorded landscapes, and count the measurements each takes.

Needs no GPU. `--csv` keeps a row for each run; a later call replaces the rows of the methods it runs and keeps the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.studies.flags import flag, names, parser_with, positive
from docs.studies.search.bench import held_out_landscapes, run_bench, shipped_landscapes
from docs.studies.search.figure import draw
from docs.studies.search.methods import METHODS
from docs.studies.search.scores import Summary, read_runs, summarise, write_runs
from tiledsched.build.pool import default_jobs
from tiledsched.report.document import Heading, Table, to_markdown

TITLES = (
    *("method", "to 1%", "interval", "to 5%", "compiles to 1%", "device s to 1%", "reached"),
    *("regret at 10", "at 25", "at 50", "at 100", "seeds"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay the methods, write a row for each run, and print a line for each method.

    Raises:
        ConfigError: a landscape or a method is unknown, or a method needs a package that is not installed.
    """
    parser = parser_with(
        flag("kernel", nargs="?", default="attention", help="which kernel (default: attention)"),
        flag("--samplers", type=names, help="which methods, with commas between them (default: all)"),
        flag("--seeds", type=positive, default=50, help="runs of each on each landscape, at most (50)"),
        flag("--landscapes", nargs="+", type=Path, help="what to search (default: what ships)"),
        flag("--jobs", type=positive, default=default_jobs(), help="processes (default: one per CPU)"),
        flag("--csv", type=Path, help="keep a row for each run here; rows of other methods stay"),
        flag("--figure", type=Path, help="draw the summary (PNG or SVG)"),
        prog="python -m docs.studies.search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = parser.parse_args(arguments)
    paths = options.landscapes or [*shipped_landscapes(options.kernel), *held_out_landscapes(options.kernel)]
    runs = read_runs(options.csv) if options.csv and options.csv.exists() else []
    for sampler in options.samplers or METHODS:
        found = run_bench(paths, [sampler], seeds=options.seeds, jobs=options.jobs)
        print(f"{sampler}: {len(found)} runs", file=sys.stderr)
        runs = [run for run in runs if run.sampler != sampler] + found
        if options.csv:
            write_runs(runs, options.csv)
    held_out = {path.name.removesuffix(".json.xz") for path in held_out_landscapes()}
    fitted = summarise([run for run in runs if run.landscape not in held_out])
    unseen = summarise([run for run in runs if run.landscape in held_out])
    if options.figure:
        draw(fitted or unseen, options.figure)
    print("Distinct programs until within 1% of the best (median, 95% interval), and mean regret.\n")
    for title, lines in (("Landscapes that ship", fitted), ("Landscapes that nothing was fitted to", unseen)):
        if lines:
            print(to_markdown([Heading(text=title), Table(head=TITLES, rows=tuple(map(cells, lines)))]))
    return 0


def cells(line: Summary) -> tuple[str, ...]:
    """One method's row of the printed table."""
    low, high = line.measurements_to_1pct_interval
    regrets = (line.regret_10, line.regret_25, line.regret_50, line.regret_100)
    times = (line.measurements_to_5pct, line.compiles_to_1pct, line.device_s_to_1pct)
    return (
        line.sampler,
        number(line.measurements_to_1pct),
        f"{number(low)}-{number(high)}",
        *map(number, times),
        f"{line.reached:.0%}",
        *(f"{regret:.2%}" for regret in regrets),
        str(line.seeds),
    )


def number(value: float | None) -> str:
    """Four digits, or `never` where a median run did not come near the best."""
    return "never" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
