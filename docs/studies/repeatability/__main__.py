"""`python -m docs.studies.repeatability`: run one session of the study on the GPU here, or sum up the sessions so far.

    python -m docs.studies.repeatability -p B=4,H=32,S=4096,D=64,causal=no:yes --programs 100 --csv study.csv
    python -m docs.studies.repeatability --summary study.csv

What is chosen among has to be measured before, by `tiledsched record` or `tiledsched tune`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from docs.studies.flags import flag, parser_with, positive, words
from docs.studies.repeatability import methods
from docs.studies.repeatability.rows import METHODS, StudyRow, append_rows, check_columns, read_rows
from docs.studies.repeatability.session import find_field, run_session
from docs.studies.repeatability.summary import summarise
from tiledsched.cli.problems import read_problems
from tiledsched.core.config import load_settings
from tiledsched.core.errors import ConfigError, TiledschedError
from tiledsched.core.problem import Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.space import SearchSpace
from tiledsched.measure.runner import Runner
from tiledsched.store.db import TuningDB
from tiledsched.tuning.builder import Builder
from tiledsched.tuning.session import Session


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's arguments.

    Raises:
        ConfigError: neither a summary is asked for, nor problems and a file are given.
    """
    parser = parser_with(
        flag("kernel", nargs="?", default="attention", help="which kernel (default: attention)"),
        flag("-p", "--problem", nargs="+", default=[], help="problems, as `tiledsched tune -p` takes them"),
        flag("--programs", type=positive, default=100, help="programs to choose among, per problem (100)"),
        flag("--methods", type=words(METHODS), default=list(METHODS[:3]), help=", ".join(METHODS)),
        flag("--seed", type=int, help="of the order of problems and methods (default: the time)"),
        flag("--csv", type=Path, help="the file to which the rows are appended"),
        flag("--jobs", type=positive, help="compile processes (default: one per CPU)"),
        flag("--db", help="the database (default: the user's)"),
        flag("--summary", type=Path, help="measure nothing: sum up the rows of this file"),
        prog="python -m docs.studies.repeatability",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options = parser.parse_args(arguments)
    if not options.summary and not (options.problem and options.csv):
        raise ConfigError(
            "nothing to measure, or nowhere to keep it; pass -p PROBLEM and --csv FILE, or --summary FILE"
        )
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a session, or print the tables of `--summary`; 2 where no GPU, compiler or measured program is found."""
    try:
        options = parse(arguments)
        if options.summary:
            print(summarise(read_rows(options.summary)).to_markdown(), end="")
            return 0
        check_columns(options.csv)
        rows = run_here(options)
    except TiledschedError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{len(rows)} rows added; sum up with: python -m docs.studies.repeatability --summary {options.csv}")
    return 0


def run_here(options: argparse.Namespace) -> list[StudyRow]:
    """Open the GPU, the database and the compile processes, and run one session with them."""
    from tiledsched.measure.gpu import GpuRunner

    kernel, settings = load_kernel(options.kernel), load_settings({"db": options.db})
    seed = int(datetime.now(timezone.utc).timestamp()) if options.seed is None else options.seed
    runner = GpuRunner(kernel, seed=seed)
    try:
        arch = runner.device.arch
        with Session(arch, settings=settings, jobs=options.jobs) as session:
            builder, space = session.builder(kernel), session.space(kernel)
            problems = [problem for text in options.problem for problem in read_problems(kernel, text)]
            chosen = methods.make_methods(options.methods, kernel, runner)
            return study(problems, session.db, builder, space, runner, chosen, options.programs, seed, options.csv)
    finally:
        runner.close()


def study(
    problems: Sequence[Problem],
    db: TuningDB,
    builder: Builder,
    space: SearchSpace,
    runner: Runner,
    chosen: Sequence[methods.SelectionMethod],
    programs: int,
    seed: int,
    csv: Path,
) -> list[StudyRow]:
    """One session: every method chooses once among at most `programs` programs of each problem; rows go to `csv`."""
    began = datetime.now(timezone.utc)
    fields = [(problem, find_field(db, builder, space, problem, runner.device, programs)) for problem in problems]
    return run_session(
        fields,
        chosen,
        runner,
        seed=seed,
        began=began,
        keep=lambda done: append_rows(done, csv),
        progress=lambda line: print(line, file=sys.stderr),
    )


if __name__ == "__main__":
    sys.exit(main())
