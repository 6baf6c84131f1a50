"""Problems that programs were seen to call, as `tiledsched.serve.capture` wrote them down.

A folder holds one file of JSON lines for each process that captured. A line is a problem (`id`, `place`, `problem`, `sample`,
`layout`, `arch`, `device`, `provenance`, `schedule`, `rival`), or the calls so far of problems of the same file, by `id`
(`calls`). What is read is data: it names kernels, and chooses no code that runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiledsched.core.config import TRUTHS
from tiledsched.core.errors import ConfigError
from tiledsched.core.files import read_bounded, user_folder
from tiledsched.core.problem import Problem
from tiledsched.core.registry import problem_from_json
from tiledsched.store.location import database_file

VERSION = 1
"""The version of the lines. Lines of another version are skipped."""
ENDING = ".jsonl"
"""How the names of the files end."""
MOST_CALLS = 1 << 62
"""Counts above this are damage."""
WORDS = ("place", "layout", "arch", "device", "provenance", "rival")
"""What a line of a problem says in words."""


@dataclass(frozen=True, kw_only=True)
class SeenProblem:
    """One problem that programs called, on the GPUs of one name."""

    problem: Problem
    """The problem, with its lengths rounded as serving rounds them: it stands for all problems of about this size."""
    sample: Problem
    """A problem of about this size that was called."""
    place: str
    """Where the kernel is declared; empty where it was declared at a prompt, and no other process can tune it."""
    arch: str
    """The GPU's arch."""
    device: str
    """The GPU's name."""
    layouts: tuple[str, ...]
    """How the inputs lay in memory: contiguous, strided or unaligned. A tune measures contiguous arrays."""
    calls: int
    """Calls of all processes together. It is an estimate: launches that a CUDA graph replays are not counted, and neither are
    the last calls of a process that was killed."""
    processes: int
    """Processes that called it."""
    provenance: str
    """Where its schedule came from when it was seen: measured, transferred, modelled, default or forced."""
    schedule: Mapping[str, Any]
    """The schedule that was served then."""
    rival: str
    """The rival that was called in its place; empty where our own kernel was."""

    def joined(self, other: SeenProblem) -> SeenProblem:
        """This problem and the same one, seen by another process or in another layout."""
        return replace(
            self,
            layouts=tuple(sorted({*self.layouts, *other.layouts})),
            calls=self.calls + other.calls,
            processes=self.processes + other.processes,
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Everything that a folder holds."""

    folder: Path
    """The folder."""
    problems: tuple[SeenProblem, ...]
    """Each problem once for each name of a GPU, in the order in which they were first read."""
    skipped: int
    """Lines that were damaged, of another version or of kernels that refuse them, and files that cannot be read."""


def seen_folder(capture: str, db: str | None) -> Path | None:
    """The folder that the setting `capture` means; None where it is off.

    Args:
        capture: a folder; or yes, true or 1, for the folder `seen` beside the user's database; or empty, no, false or 0.
        db: the setting `db`.
    """
    wanted = TRUTHS.get(capture.lower(), capture)
    if isinstance(wanted, str) and wanted:
        return Path(os.path.expanduser(wanted))
    file = database_file(db)
    return (Path(file).parent if file else user_folder("data")) / "seen" if wanted else None


def read_seen(folder: Path) -> Seen:
    """Read every file of a folder; a folder that is not there holds nothing.

    Raises:
        ConfigError: the folder cannot be read.
    """
    found: dict[tuple[Any, ...], SeenProblem] = {}
    skipped = 0
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(ENDING)) if folder.exists() else []
    except OSError as error:
        raise ConfigError(f"cannot read what was seen in {folder}: {error.strerror}; name another folder") from error
    for path in paths:
        mine: dict[int, SeenProblem] = {}
        try:
            lines = read_bounded(path).splitlines()
        except OSError:  # another user's
            lines, skipped = [], skipped + 1
        for line in lines:
            try:
                _take(json.loads(line), mine)
            except Exception:  # of whatever was written there, and of a declaration that refuses it
                skipped += 1
        of_process: dict[tuple[Any, ...], SeenProblem] = {}
        for each in mine.values():
            key = each.problem, each.place, each.arch, each.device
            of_process[key] = of_process[key].joined(each) if key in of_process else each
        for key, each in of_process.items():
            once = replace(each, processes=1)
            found[key] = found[key].joined(once) if key in found else once
    return Seen(folder=folder, problems=tuple(found.values()), skipped=skipped)


def clear_seen(folder: Path) -> int:
    """Remove what was noted in a folder, and nothing else; how many files that were. A file is a note if its first line is one.

    Raises:
        ConfigError: one cannot be removed.
    """
    removed = 0
    try:
        for path in folder.iterdir() if folder.exists() else ():
            if path.name.endswith(ENDING) and _is_note(path):
                path.unlink(missing_ok=True)
                removed += 1
    except OSError as error:
        raise ConfigError(f"cannot remove what was seen in {folder}: {error.strerror}; remove the notes") from error
    return removed


def _is_note(path: Path) -> bool:
    """Whether the first line of a regular file is of a problem that was seen, in whichever version."""
    try:
        line = json.loads(read_bounded(path).partition(b"\n")[0])
        return path.is_file() and not path.is_symlink() and {"v", "problem", "sample", *WORDS} <= {*line}
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _take(line: Mapping[str, Any], into: dict[int, SeenProblem]) -> None:
    """Add what one line says to the problems of its file; whatever error says that it cannot be used."""
    if line["v"] != VERSION:
        raise ValueError(line["v"])
    if "calls" in line:
        for number, calls in list(_counts(line["calls"])):
            into[number] = replace(into[number], calls=max(calls, into[number].calls))
        return
    problem, sample = problem_from_json(line["problem"]), problem_from_json(line["sample"])
    words = {name: line[name] for name in WORDS}
    number, schedule = line["id"], line["schedule"]
    if not all(isinstance(word, str) for word in words.values()) or type(number) is not int:
        raise TypeError("a word is no text, or a number is none")
    if not isinstance(schedule, dict) or sample.kernel != problem.kernel:
        raise TypeError("no schedule, or a problem of another kernel")
    if problem.known:  # by what are called sizes of about this one now
        problem = problem.declaration.similarity.bucketed(problem)
    layouts = (words.pop("layout"),)
    into[number] = SeenProblem(
        problem=problem, sample=sample, layouts=layouts, calls=0, processes=1, schedule=schedule, **words
    )


def _counts(calls: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    for number, count in calls.items():
        if type(count) is not int or not 0 <= count <= MOST_CALLS:
            raise ValueError(count)
        yield int(number), count
