"""All commands, in the order in which the help lists them."""

from __future__ import annotations

import click

from tiledsched import __version__
from tiledsched.cli import (
    bake_commands,
    bench_commands,
    db_commands,
    fleet_commands,
    machine_commands,
    result_commands,
    tuning_commands,
)
from tiledsched.cli.app import PROGRAM_OPTIONS, CommandGroup

EPILOG = """\b
Problems are named with -p, e.g. tiledsched tune attention -p S=4096,D=128.
Exit codes: 0 done, 1 no valid schedule or a regression, 2 usage or
configuration, 130 interrupted. Settings come from flags, then TILEDSCHED_*
variables, then tiledsched.toml, then the user's config.toml.
"""

root = CommandGroup(
    "tiledsched",
    help="Find, prove, keep and serve the best schedules of cuTile kernels.",
    epilog=EPILOG,
    params=list(PROGRAM_OPTIONS),
    context_settings={"help_option_names": ["-h", "--help"]},
    sections={
        "Find schedules": [
            tuning_commands.tune,
            tuning_commands.check,
            tuning_commands.record,
            tuning_commands.refresh,
        ],
        "Look at them": [
            result_commands.show,
            result_commands.explain,
            result_commands.report,
            result_commands.compare,
        ],
        "Compare with other implementations": [bench_commands.bench, bench_commands.study],
        "Use them": [bake_commands.bake, machine_commands.warmup, machine_commands.doctor, machine_commands.trust_file],
        "Many GPUs and hosts": [fleet_commands.fleet],
        "Database": [db_commands.db],
    },
)
click.version_option(__version__, prog_name="tiledsched", message="%(prog)s %(version)s")(root)
