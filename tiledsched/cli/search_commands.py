"""The command that compares ways to search: `bench-search`."""

from __future__ import annotations

import argparse
from pathlib import Path

from tiledsched.cli import output
from tiledsched.cli.commands import _print_json


def bench_search(options: argparse.Namespace) -> int:
    """Replay every method on recorded landscapes, then print what each came to."""
    from tiledsched.build.pool import default_jobs
    from tiledsched.studies.search.bench import run_bench, shipped_landscapes
    from tiledsched.studies.search.figure import draw
    from tiledsched.studies.search.methods import METHODS
    from tiledsched.studies.search.scores import read_runs, summarise, write_runs

    path = Path(options.csv) if options.csv else None
    paths = (
        [Path(each) for each in options.landscapes]
        if options.landscapes
        else shipped_landscapes(options.declaration.name)
    )
    samplers = options.samplers if options.samplers is not None else list(METHODS)
    runs = read_runs(path) if path is not None and path.exists() else []
    for sampler in samplers:
        mine = run_bench(
            paths, [sampler], seeds=options.seeds, jobs=options.jobs or default_jobs(), progress=output.note
        )
        runs = [run for run in runs if run.sampler != sampler] + mine
        if path is not None:
            write_runs(runs, path)
    summaries = summarise(runs)
    if options.figure:
        draw(summaries, Path(options.figure))
    if options.json:
        _print_json({"rows": [line.to_json() for line in summaries]})
    else:
        output.print_searches(summaries)
    return 0
