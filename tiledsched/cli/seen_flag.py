"""What programs were seen to call: `--seen` of the commands, which problems it means, and how they are listed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tiledsched.cli.app import Invocation, option
from tiledsched.cli.output import note, print_wrapped, program, table_lines
from tiledsched.cli.problems import matching
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.text import duration, plural
from tiledsched.store.captured_calls import Seen, read_seen, seen_folder

if TYPE_CHECKING:
    from tiledsched.tuning.worth import SeenWorth

HERE = "1"
"""The value of `--seen` where no folder is named."""


def to_capture(value: str) -> str:
    """What to do so that there is something in the folder that `--seen` names."""
    return f"run your program once with TILEDSCHED_CAPTURE={value}: TILEDSCHED_CAPTURE={value} python your_model.py"


class _Folder(click.Path):
    """The folder behind `--seen`, which may be left out."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The folder, which must be there; the usual one where none is named.

        Raises:
            ConfigError: it is not there. A kernel that stands behind the flag is taken for it.
        """
        if value == HERE or os.path.isdir(value):
            return value
        if os.sep not in str(value) or ":" in str(value):
            raise ConfigError(
                f"--seen {value}: there is no such folder; a kernel stands before the flag: {value} --seen"
            )
        raise ConfigError(f"--seen {value}: there is no such folder; {to_capture(value)}")


seen_option = option(
    "--seen",
    type=_Folder(),
    is_flag=False,
    flag_value=HERE,
    metavar="[FOLDER]",
    heading="Problems",
    help="the problems that your programs called where capture was on (TILEDSCHED_CAPTURE=1), of all kernels unless one is "
    "named; notes of another FOLDER",
)


def archs_of(seen: Seen) -> list[str]:
    """The archs on which problems were seen."""
    return sorted({each.arch for each in seen.problems})


def only_arch(seen: Seen) -> str:
    """The one arch of the problems.

    Raises:
        ConfigError: there are several.
    """
    first, *others = archs_of(seen)
    if others:
        raise ConfigError(f"problems were seen on {', '.join([first, *others])}; pass --arch with one of them")
    return first


def by_kernel(seen: Seen, *, arch: str = "", samples: bool = False) -> dict[KernelClass, list[Problem]]:
    """The distinct problems of each kernel that is known here, those called most first. A note says how to name the kernels that
    are not known.

    Args:
        seen: the problems.
        arch: only what was seen on it; empty for all.
        samples: also the problems that were called, whose lengths are not rounded.

    Raises:
        ConfigError: no kernel is known.
    """
    unknown = {each.problem.kernel: each.place for each in seen.problems if not each.problem.known}
    for name, place in unknown.items():
        count = sum(each.problem.kernel == name for each in seen.problems)
        note(f"tiledsched: {plural(count, 'problem')} of {name} left out: {how_to_name(place)}")
    known = sorted((each for each in seen.problems if each.problem.known), key=lambda each: -each.calls)
    if not known:
        raise ConfigError("none of the kernels that were seen is known here; name one before --seen")
    found: dict[KernelClass, dict[Problem, None]] = {}
    for each in known:
        if arch in ("", each.arch):
            both = (each.problem, each.sample) if samples else (each.problem,)
            found.setdefault(each.problem.declaration, {}).update(dict.fromkeys(both))
    return {kernel: list(problems) for kernel, problems in found.items()}


def how_to_name(place: str) -> str:
    """What makes the kernel at a place known to a command: data never chooses what code runs."""
    if not place:
        return "it was declared at a prompt; put it in a file, so that other processes can import it"
    return f"name it: {shlex.join([program(), 'tune', place, '--seen'])}"


def folder_of(run: Invocation, value: str) -> Path:
    """The folder that `--seen` names: the one behind it, that of the setting `capture`, or the one next to the database."""
    settings = run.settings()
    wanted = (value, settings.capture, HERE) if value != HERE else (settings.capture, HERE)
    return next(folder for each in wanted if (folder := seen_folder(each, settings.db)))


def select(
    run: Invocation,
    value: str,
    *,
    kernel: KernelClass | str | None,
    archs: Sequence[str | None] | None,
    filters: Sequence[str] = (),
    suite: str | None = None,
) -> Seen:
    """The problems that `--seen` means.

    Args:
        run: the call of the command line.
        value: the value of `--seen`.
        kernel: name of the only kernel; or a command's kernel, which counts where its words name it; None for all.
        archs: the archs that are named; None for those of the GPUs here, or where there are none, for what was seen, if that is
            one arch.
        filters: what `-p` says.
        suite: what `--suite` says.

    Raises:
        ConfigError: there are none. The message says what to do.
    """
    if suite:
        raise ConfigError("--seen says which problems are meant; leave out --suite")
    if isinstance(kernel, type):
        source = click.get_current_context().get_parameter_source("kernel")
        kernel = None if source in (None, ParameterSource.DEFAULT) else kernel.name
    seen = read_seen(folder_of(run, value))
    if seen.skipped:
        lines = plural(seen.skipped, "damaged line or file", "damaged lines or files")
        note(f"tiledsched: {lines} in {seen.folder} skipped")
    if not seen.problems:
        raise ConfigError(f"nothing was seen: no program has noted what it calls in {seen.folder}; {to_capture(value)}")
    there = archs_of(seen)
    wanted = (
        set(filter(None, archs or ())) or {device.arch for device in run.gpus()} or set(there[:1] * (len(there) == 1))
    )
    if not wanted:
        raise ConfigError(f"there is no GPU here, and problems were seen on {', '.join(there)}; pass --arch {there[0]}")
    found = [each for each in seen.problems if each.arch in wanted]
    if not found:
        raise ConfigError(
            f"nothing was seen on {', '.join(sorted(wanted))}, only on {', '.join(there)}; pass --arch {there[0]}, or on "
            f"this GPU {to_capture(value)}"
        )
    kernels = sorted({each.problem.kernel for each in found})
    if kernel is not None and kernel not in kernels:
        raise ConfigError(f"nothing of {kernel} was seen, only of {', '.join(kernels)}; {to_capture(value)}")
    found = [each for each in found if kernel in (None, each.problem.kernel)]
    let_through = set(matching((each.problem for each in found), filters))
    if not let_through:
        raise ConfigError("no problem that was seen matches -p; leave it out, or name less")
    return replace(seen, problems=tuple(each for each in found if each.problem in let_through))


def ranked(run: Invocation, seen: Seen, **flags: Any) -> list[SeenWorth]:
    """The problems by what tuning them would win; `flags` are settings that flags of the command give."""
    from tiledsched.serve.entries import load_table
    from tiledsched.tuning.worth import rank

    settings = run.settings(**flags)
    return rank(seen.problems, lambda kernel: load_table(settings, kernel=kernel, archs=archs_of(seen)))


def print_seen(rows: Sequence[SeenWorth]) -> None:
    """Print two lines for each problem, what is most worth tuning first; and below them what the marks in them mean."""
    columns = ("to win", "calls", "a call", "loss", "served", "kernel")
    first, *lines = table_lines(columns, map(_cells, rows), columns[:4])
    print(first)
    for line, row in zip(lines, rows, strict=True):
        odd = ", ".join(layout for layout in row.seen.layouts if layout != "contiguous")
        print(line)
        print_wrapped(f"{row.seen.problem} ({odd} arrays)" if odd else str(row.seen.problem), "    ")
    print()
    for mark in _marks(rows):
        print_wrapped(mark)


def _cells(row: SeenWorth) -> tuple[str, ...]:
    served = row.served
    if served is None:
        return "?", f"~{row.calls:,}", "?", "?", row.seen.rival or row.seen.provenance, row.seen.problem.kernel
    us = "?" if row.call_us is None else f"{duration(row.call_us)}{'' if row.is_measured else ' m'}"
    loss = f"{row.served_loss:.1%}{'' if row.is_known else ' a'}"
    by = row.rival or f"{served.provenance}{', stale' if served.stale else ''}"
    return duration(row.win_us), f"~{row.calls:,}", us, loss, by, row.seen.problem.kernel


def _marks(rows: Sequence[SeenWorth]) -> list[str]:
    """What the marks mean that stand in the rows."""
    known = [row for row in rows if row.served is not None]
    marks = [
        "to win: calls x time of a call x loss. Calls are estimates: launches that a CUDA graph replays are not counted.",
        "loss: how much slower a call is than with the best schedule, as far as it is known.",
    ]
    if any(not row.is_known for row in known):
        marks.append("a: not known, and assumed by where the schedule comes from.")
    if any(not row.is_measured and row.us is not None for row in known):
        marks.append("m: modelled; other times were measured for this very problem.")
    if any(row.rival for row in known):
        marks.append("A rival in the place of a provenance is called where it is installed.")
    if any({"strided", "unaligned"} & {*row.seen.layouts} for row in rows):
        marks.append(
            "A tune measures contiguous arrays. Others may take other times, and unaligned ones other programs."
        )
    marks += dict.fromkeys(
        f"?: {row.seen.problem.kernel} is not known here; {how_to_name(row.seen.place)}"
        for row in rows
        if not row.seen.problem.known
    )
    unserved = {
        f"{row.seen.problem.kernel} on {row.seen.arch}" for row in rows if row.served is None and row.seen.problem.known
    }
    marks += [f"?: nothing can be served for {each}, which has no search space." for each in sorted(unserved)]
    return marks
