"""All commands, in the order in which the help lists them."""

from __future__ import annotations

import click

from tiledsched import __version__
from tiledsched.cli.app import PROGRAM_OPTIONS, Group
from tiledsched.cli.bench_commands import bench, study
from tiledsched.cli.db_commands import db
from tiledsched.cli.fleet_commands import fleet
from tiledsched.cli.machine_commands import doctor, warmup
from tiledsched.cli.result_commands import compare, explain, report, show
from tiledsched.cli.tuning_commands import check, record, refresh, tune

EPILOG = """\b
Problems are named with -p, e.g. tiledsched tune attention -p S=4096,D=128.
Exit codes: 0 done, 1 no valid schedule or a regression, 2 usage or
configuration, 130 interrupted. Settings come from flags, then TILEDSCHED_*
variables, then tiledsched.toml, then the user's config.toml.
"""

root = Group(
    "tiledsched",
    help="Find, prove, keep and serve the best schedules of cuTile kernels.",
    epilog=EPILOG,
    params=list(PROGRAM_OPTIONS),
    context_settings={"help_option_names": ["-h", "--help"]},
    sections={
        "Find schedules": [tune, check, record, refresh],
        "Look at them": [show, explain, report, compare],
        "Compare with other implementations": [bench, study],
        "Use them": [warmup, doctor],
        "Many GPUs and hosts": [fleet],
        "Database": [db],
    },
)
click.version_option(__version__, prog_name="tiledsched", message="%(prog)s %(version)s")(root)
