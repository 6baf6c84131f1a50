"""The flags that a fleet adds to the commands of one GPU, and the commands that it has alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from tiledsched.cli import fleet_commands
from tiledsched.core.flags import count, positive
from tiledsched.fleet.campaign import DEADLINE_S, LEASE_S, MOST_ATTEMPTS

WORKERS = "work without GPUs, that many problems at a time (on each node): builds and the model's ranking"


def of_a_fleet(
    parser: argparse.ArgumentParser, archs: Callable[[str], list[str]], run: Callable[[argparse.Namespace], int]
) -> None:
    """Make a command of one GPU one of many: `--arch` may name several."""
    flags = parser._option_string_actions
    flags["--arch"].type, flags["--arch"].metavar = archs, "ARCH[,ARCH]"
    flags["--arch"].help = "targets, e.g. sm_90,sm_100 or h200 (default: those of the GPUs here)"
    parser.set_defaults(run=run, usual_arch=False)
    add = parser.add_argument_group("of the fleet").add_argument
    add(
        "--ray-address",
        metavar="ADDRESS",
        help="use every GPU of this Ray cluster: auto, HOST:PORT, or local (default: the GPUs of this host)",
    )
    add("--open-only", action="store_true", help="open the campaign and stop; `tiledsched fleet work` does the rest")
    add("--workers", type=count, default=0, metavar="N", help=WORKERS)
    add(
        "--lease",
        type=float,
        default=LEASE_S,
        metavar="SECONDS",
        help=f"after which a worker that says nothing has lost its problem (default: {LEASE_S:g})",
    )
    add(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        metavar="SECONDS",
        help=f"after which an attempt is killed as hung (default: {DEADLINE_S:g})",
    )
    add(
        "--attempts",
        type=positive,
        default=MOST_ATTEMPTS,
        metavar="N",
        help=f"at one problem (default: {MOST_ATTEMPTS})",
    )


def add_others(actions: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """`work`, `status` and `stop`."""
    work = command(
        actions,
        "work",
        fleet_commands.work,
        "work on campaigns with the GPUs of this host until nothing is left: "
        "what a Slurm array or a Kubernetes job runs",
    )
    work.add_argument("campaign", nargs="?", metavar="CAMPAIGN", help="only this one (default: all that are running)")
    work.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for a campaign (default: not at all)",
    )
    work.add_argument("--workers", type=count, default=0, metavar="N", help=WORKERS)
    work.add_argument("--jobs", type=positive, metavar="N", help="compile processes (default: one per CPU)")
    status = command(
        actions, "status", fleet_commands.status, "say how far a campaign is, on which GPUs, and what failed"
    )
    status.add_argument("campaign", nargs="?", metavar="CAMPAIGN", help="which (default: the newest)")
    status.add_argument("--all", action="store_true", help="list all campaigns")
    status.add_argument("--watch", action="store_true", help="look again every two seconds, until it ends or Ctrl-C")
    stop = command(
        actions, "stop", fleet_commands.stop, "let workers end with what they hold; the same command goes on later"
    )
    stop.add_argument("campaign", metavar="CAMPAIGN", help="which")
