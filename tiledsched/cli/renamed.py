"""What took the place of commands and flags that are gone."""

from __future__ import annotations

from collections.abc import Mapping

from tiledsched.core.errors import ConfigError

COMMANDS: Mapping[str, str] = {
    "ablate": "tiledsched study ablation",
    "ladder": "tiledsched study ladder",
    "profile": "tiledsched study profile",
    "landscapes": "tiledsched show --landscapes, or tiledsched db export --landscapes DIR to write files",
    "dashboard": "tiledsched report, or tiledsched db query for tools of your own",
    "bundle": "tiledsched warmup -o FILE",
    "completion": 'eval "$(_TILEDSCHED_COMPLETE=bash_source tiledsched)", also with zsh_source or fish_source',
    "bench-search": "python -m docs.studies.search, in a checkout of the repository",
    "repeatability": "python -m docs.studies.repeatability, in a checkout of the repository",
    "fleet tune": "tiledsched fleet run tune",
    "fleet record": "tiledsched fleet run record",
    "fleet refresh": "tiledsched fleet run refresh",
    "fleet bench": "tiledsched fleet run bench",
    "fleet stop": "tiledsched fleet status --stop",
    "fleet simulate": "python -m docs.studies.fleet_simulation, in a checkout of the repository",
    "db merge": "tiledsched db import",
    "db upgrade": "tiledsched db check --upgrade",
    "db forget-failures": "tiledsched db check --forget-failures",
    "study attention": "tiledsched study paper",
}
"""Old command -> what does its work now."""
FLAGS: Mapping[str, str] = {
    "warmup --any-length": "--also any-length",
    "warmup --decode": "--also decode",
    "warmup --dtype": "--also dtype=bfloat16",
    "warmup --group": "--also group=1:4",
    "study paper --csv": "-o DIR, which holds the rows as CSV",
    "study ablation --csv": "-o DIR, which holds the rows as CSV",
    "bench --resume": "--csv FILE alone: the same command goes on with a file that is there",
    "fleet status --watch": "watch tiledsched fleet status",
    "db export --format csv": "--format tiledsched, which db import reads, or tiledsched db query --csv for spreadsheets",
    "db export --format optuna": "--format t4, or tiledsched db query",
    "tune --storage": "tiledsched report, or tiledsched db query, after the tune",
    "show --kernel": "the kernel's name alone: tiledsched show attention",
    "--seq-len": "-p S=1024:4096",
    "--head-dim": "-p D=128",
    "--dtype": "-p dtype=bfloat16",
    "--causal": "-p causal, or -p causal=no:yes for both",
    "--batch": "-p B=4",
    "--heads": "-p heads=16",
    "--kv-heads": "-p kv_heads=8",
    "--seq-q": "-p seq_q=1",
    "--alignment": "-p alignment=bottom_right",
    "--value-dim": "-p value_dim=64",
    "--window": "-p window=1024",
    "--window-right": "-p window_right=0",
    "--packed": "-p packed=16",
    "--page": "-p page=64",
    "--softcap": "-p softcap",
    "--sinks": "-p sinks",
    "--starts": "-p starts",
    "--lengths": "-p lengths",
    "--lse": "-p lse",
}
"""Old flag, of one command or of all, or old value of a flag -> what says the same now."""


def check_command(path: str) -> None:
    """Make sure that a command, e.g. `tiledsched db merge`, is not one that is gone.

    Raises:
        ConfigError: it is; the message names the command that does its work now.
    """
    name = path.removeprefix("tiledsched ")
    if name in COMMANDS:
        raise ConfigError(f"{name} is gone; use {COMMANDS[name]}")


def check_flag(path: str, flag: str) -> None:
    """Make sure that a flag, or a flag with its value, which a command, e.g. `tiledsched tune`, does not have is not one that it
    had.

    Raises:
        ConfigError: it is; the message names what says the same now.
    """
    now = FLAGS.get(f"{path.removeprefix('tiledsched ')} {flag}", FLAGS.get(flag))
    if now is not None:
        raise ConfigError(f"{flag} is gone; use {now}")
