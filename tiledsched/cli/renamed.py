"""What is said of a command or a flag that there is not: which one is meant, or what took the place of an old one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

COMMANDS: Mapping[str, str] = {
    "ablate": "tiledsched study ablation",
    "ladder": "tiledsched study ladder",
    "profile": "tiledsched study profile",
    "landscapes": "tiledsched show --landscapes, or tiledsched db export --landscapes DIR to write files",
    "dashboard": "tiledsched tune --storage URL while tuning, or tiledsched db export --landscapes DIR --format optuna "
    "of what is measured; then optuna-dashboard",
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
KEYS: Mapping[str, str] = {
    "--seq-len": "S",
    "--head-dim": "D",
    "--dtype": "dtype",
    "--causal": "causal",
    "--batch": "B",
    "--heads": "heads",
    "--kv-heads": "kv_heads",
    "--seq-q": "seq_q",
    "--alignment": "alignment",
    "--value-dim": "value_dim",
    "--window": "window",
    "--window-right": "window_right",
    "--packed": "packed",
    "--page": "page",
    "--softcap": "softcap",
    "--sinks": "sinks",
    "--starts": "starts",
    "--lengths": "lengths",
    "--lse": "lse",
}
"""Old flag of attention's problems -> the key of `-p` that says the same."""
VARIANTS = ("--any-length", "--decode", "--dtype", "--group")
"""Old flags of `warmup` and `bundle`, now words of `--also`."""
FLAGS: Mapping[str, str] = {
    "landscapes --export": "tiledsched db export --landscapes DIR",
    "study paper --csv": "-o DIR, which holds the rows as CSV",
    "study ablation --csv": "-o DIR, which holds the rows as CSV",
}
"""Command and old flag -> the new one, of those that are not in `KEYS`."""


def unknown_command(name: str, known: Iterable[str]) -> str:
    """What to say of a command that there is not.

    Args:
        name: the words that were typed after `tiledsched`, e.g. `db merge`.
        known: the commands that may stand in the place of its last word.
    """
    if name in COMMANDS:
        return f"{name} is gone; use {COMMANDS[name]}"
    above, _, last = name.rpartition(" ")
    alike = difflib.get_close_matches(last, known, n=1)
    hint = f"did you mean {alike[0]}? " if alike else ""
    return f"there is no command {name}; {hint}see {' '.join(['tiledsched', *above.split(), '--help'])}"


def unknown_flag(command: str, flag: str, words: Sequence[str], known: Iterable[str]) -> str:
    """What to say of a flag that a command does not have.

    Args:
        command: the command's name; empty where the flag stands before any command.
        flag: the flag.
        words: all words that follow the command.
        known: the command's flags.
    """
    if not command:
        return f"there is no flag {flag} before a command; flags come after it: see tiledsched --help"
    known = list(known)
    if "--also" in known and flag in VARIANTS:
        return f"{flag} is gone; use --also {','.join(_values(words, {name: name[2:] for name in VARIANTS}))}"
    if "--problem" in known and flag in KEYS:
        sizes = _values(words, KEYS)
        filled = ["--seq-len" in words, "--batch" not in words, "--heads" not in words]
        more = " (heads and batch are 1 unless they are given, e.g. B=4,H=16)" if all(filled) else ""
        return f"{flag} is gone; use -p {','.join(sizes)}{more}"
    alike = difflib.get_close_matches(flag, known, n=1, cutoff=0.7)
    old = difflib.get_close_matches(flag, KEYS, n=1, cutoff=0.8) if "--problem" in known else []
    meant = alike[0] if alike else f"-p {KEYS[old[0]]}=..." if old else ""
    hint = f"did you mean {meant}? " if meant else ""
    return f"{command} has no flag {flag}; {hint}see tiledsched {command} --help"


def _values(words: Sequence[str], keys: Mapping[str, str]) -> list[str]:
    """The old flags among a command's words, as key=value."""
    found = []
    for place, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag not in keys:
            continue
        following = words[place + 1 : place + 2]
        if not value and following and not following[0].startswith("-"):
            value = following[0]
        value = value.replace(",", ":").replace("both", "no:yes")
        found.append(f"{keys[flag]}={value}" if value and value != "yes" else keys[flag])
    return found
