"""`python -m docs.studies.repeatability`: one session of the study, or the sum of all sessions so far."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console

from docs.studies.repeatability import methods
from docs.studies.repeatability.rows import METHODS, append_rows, check_columns, read_rows
from docs.studies.repeatability.session import find_field, run_session
from docs.studies.repeatability.summary import summarise
from tiledsched.core.config import load_settings
from tiledsched.core.errors import ConfigError
from tiledsched.core.flags import positive, words
from tiledsched.tuning.problems import kernel_of, problems_of
from tiledsched.tuning.session import Session


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a session on the GPU here, or print the tables of `--summary`.

    Raises:
        TiledschedError: no GPU of the arch, no compiler, or a file of rows that another version wrote.
    """
    parser = argparse.ArgumentParser(prog="python -m docs.studies.repeatability", description=__doc__)
    parser.add_argument("kernel", nargs="?", default="attention", help="which kernel (default: attention)")
    parser.add_argument("--suite", help="which of its suites (default: all)")
    parser.add_argument("--arch", help="of this GPU, e.g. sm_90 (required, except with --summary)")
    parser.add_argument("--programs", type=positive, default=100, help="programs to choose among, per problem (100)")
    parser.add_argument("--methods", type=words(METHODS), default=list(METHODS[:3]), help=", ".join(METHODS))
    parser.add_argument("--seed", type=int, help="of the order of problems and methods (default: the time)")
    parser.add_argument("--csv", type=Path, help="where to append the rows (required, except with --summary)")
    parser.add_argument("--jobs", type=positive, help="compile processes (default: one per CPU)")
    parser.add_argument("--db", help="the database (default: the user's)")
    parser.add_argument("--summary", type=Path, help="measure nothing: sum up the rows of this file")
    options = parser.parse_args(arguments)
    if options.summary:
        for table in summarise(read_rows(options.summary)).tables():
            Console(width=140).print(table)
        return 0
    if not options.arch or not options.csv:
        raise ConfigError("it needs --arch and --csv; pass both, or --summary FILE")
    check_columns(options.csv)
    rows = run_here(options)
    print(f"{rows} rows added to {options.csv}; sum up with: {parser.prog} --summary {options.csv}")
    return 0


def run_here(options: argparse.Namespace) -> int:
    """Run one session on the GPU here; the number of rows that it appended."""
    from tiledsched.measure.gpu import GpuRunner

    began = datetime.now(timezone.utc)
    seed = int(began.timestamp()) if options.seed is None else options.seed
    kernel, settings = kernel_of(options.kernel), load_settings({"db": options.db})
    runner = GpuRunner(kernel, seed=seed)
    try:
        if runner.device.arch != options.arch:
            raise ConfigError(f"this GPU is {runner.device.arch}; pass --arch {runner.device.arch}")
        with Session(options.arch, settings=settings, jobs=options.jobs) as session:
            builder, space = session.builder(kernel), session.space(kernel)
            fields = [
                (problem, find_field(session.db, builder, space, problem, runner.device, options.programs))
                for problem in problems_of(kernel, options.suite)
            ]
        rows = run_session(
            fields,
            methods.make_methods(options.methods, kernel, runner),
            runner,
            seed=seed,
            began=began,
            keep=lambda done: append_rows(done, options.csv),
            progress=lambda line: print(line, file=sys.stderr),
        )
    finally:
        runner.close()
    return len(rows)


if __name__ == "__main__":
    sys.exit(main())
