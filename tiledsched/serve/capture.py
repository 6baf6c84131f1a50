"""Noting the problems that a process calls, so that they can be tuned: `tiledsched tune --seen`.

A problem is noted when its plan is made. It is on disk then, as a line of a file of this process alone (see
`tiledsched.store.captured_calls`); a hot call only counts. The counts follow now and then, when further plans are made, and
at the end of the process. Whatever goes wrong costs the notes, with one warning, and never a call.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tiledsched.core import config
from tiledsched.core.arrays import ALIGNMENT
from tiledsched.core.config import Settings, configure, log
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import Problem
from tiledsched.core.registry import place_of
from tiledsched.store.captured_calls import ENDING, VERSION, seen_folder

MOST_NOTED = 4096
"""Problems that one process notes. A kernel whose problems are not rounded may pose another one with each call."""
COUNTS_S = 10.0
"""Least seconds between two lines of counts. They also wait for an eighth of the time since the first plan, so that a process
that runs for weeks writes few of them."""


class capture(configure):  # noqa: N801
    """Note the problems that this process calls from now on, or within the block of a `with`.

    `with tiledsched.capture(): model.generate(...)`, and then `tiledsched tune --seen` on the command line. Plans that were
    made before are made anew, so that their problems are noted, too.

    Args:
        folder: where notes go; by default the folder `seen` beside the user's database.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        if not isinstance(folder, (str, os.PathLike, type(None))):
            raise ConfigError(f"capture takes a folder, not {folder!r:.80}; write: with tiledsched.capture(): call()")
        super().__init__(capture="1" if folder is None else os.fspath(folder))


class _Noted:
    """One problem that was noted, with the counter of its calls."""

    def __init__(self, number: int, line: dict[str, Any]) -> None:
        self.line = {"v": VERSION, "id": number, **line}
        self.calls = itertools.count()
        self.is_written, self.written_calls = False, 0
        self._not_calls = 0
        """How often the counter was moved by anything but a call of this process."""

    def count(self) -> int:
        """The calls so far. A counter tells its value only by moving on."""
        self._not_calls += 1
        return next(self.calls) - self._not_calls + 1

    def begin_anew(self) -> None:
        """Note that the calls so far were those of the process that this one was forked from."""
        inherited = self.count()
        self._not_calls += inherited
        self.is_written, self.written_calls = False, 0


class _Notes:
    """The notes of this process in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, Path()
        self._noted: dict[tuple[Any, ...], _Noted] = {}
        self.begin_anew()

    def begin_anew(self) -> None:
        """Write to a new file from now on: at first, and in a child process."""
        self._lock = threading.RLock()  # a thread that is not in the child may hold the old one
        self._began = self._counted = time.monotonic()
        host = re.sub(r"[^A-Za-z0-9]+", "-", platform.node())[:64]
        self._path = self._folder / f"{host}-{os.getpid()}-{secrets.token_hex(4)}{ENDING}"
        for each in self._noted.values():
            each.begin_anew()

    def note(self, key: tuple[Any, ...], describe: Callable[[], dict[str, Any]]) -> Iterator[int] | None:
        """The counter of a problem, which is written down when it is new; None where too many are."""
        with self._lock:
            noted = self._noted.get(key)
            if noted is None:
                if len(self._noted) >= MOST_NOTED:
                    raise _FullError(f"{MOST_NOTED:,} problems were noted")
                noted = self._noted[key] = _Noted(len(self._noted), describe())
            due = time.monotonic() - self._counted > max(COUNTS_S, (self._counted - self._began) / 8)
            if not noted.is_written or due:
                self.write([noted], counts=due)
            return noted.calls

    def write(self, wanted: Sequence[_Noted] = (), *, counts: bool = True) -> None:
        """Write problems that are not on disk yet; with `counts` also the calls of all problems, where they changed."""
        with self._lock:
            changed = (
                {each: calls for each in self._noted.values() if (calls := each.count()) != each.written_calls}
                if counts
                else {}
            )
            new = [each for each in dict.fromkeys([*wanted, *changed]) if not each.is_written]
            lines = [each.line for each in new]
            if changed:
                lines.append({"v": VERSION, "calls": {str(each.line["id"]): calls for each, calls in changed.items()}})
            if not lines:
                return
            self._append("".join(f"{json.dumps(line)}\n" for line in lines).encode())
            for each in new:
                each.is_written = True
            for each, calls in changed.items():
                each.written_calls = calls
            if counts:
                self._counted = time.monotonic()

    def _append(self, data: bytes) -> None:
        """Add whole lines to this process's own file, in one write."""
        self._folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if os.write(file, data) < len(data):
                raise OSError("the disk is full")
        finally:
            os.close(file)


class _FullError(Exception):
    """A process noted as much as it may."""


_every: dict[tuple[str, str | None], _Notes | None] = {}
"""The notes by what the settings `capture` and `db` are; None where they cannot be kept."""


def note(
    settings: Settings, problem: Problem, tensors: Sequence[Any], device: Any, served: Any, rival: str
) -> Iterator[int] | None:
    """The counter of calls of a problem, which is noted unless one of about its size is; None where nothing can be noted.

    Args:
        settings: of this process; its `capture` is not empty.
        problem: what is computed.
        tensors: the inputs.
        device: the GPU: its `name` and `arch`.
        served: the table's answer.
        rival: the rival that is called in its place; empty for none.
    """
    place = (settings.capture, settings.db)
    try:
        if place not in _every:
            folder = seen_folder(*place)
            _every.setdefault(place, _Notes(folder) if folder else None)
        notes = _every[place]
        if notes is None:
            return None
        kernel, layout = problem.declaration, layout_of(tensors)
        bucketed = kernel.similarity.bucketed(problem)

        def describe() -> dict[str, Any]:
            return {
                "place": place_of(kernel),
                "problem": bucketed.to_json(),
                "sample": problem.to_json(),
                "layout": layout,
                "arch": device.arch,
                "device": device.name,
                "provenance": served.provenance,
                "schedule": served.schedule.to_json(),
                "rival": rival,
            }

        return notes.note((kernel, bucketed, layout, device.arch, device.name), describe)
    except Exception as error:
        _give_up(place, error)
        return None


def layout_of(tensors: Sequence[Any]) -> str:
    """How the arrays of a call lie in memory, in a word: contiguous, strided, or unaligned."""
    if any(each.data_ptr() % ALIGNMENT for each in tensors):
        return "unaligned"
    return "contiguous" if all(each.is_contiguous() for each in tensors) else "strided"


def _give_up(place: tuple[str, str | None], error: Exception) -> None:
    """Note nothing more there, and say so once."""
    _every[place] = None
    why = str(error) if isinstance(error, _FullError) else f"{type(error).__name__}: {error}"
    log.warning("problems are no longer captured in %s: %s", seen_folder(*place), why)


def _write_all() -> None:
    for place, notes in list(_every.items()):
        if notes is not None:
            try:
                notes.write()
            except Exception as error:
                _give_up(place, error)


def _begin_anew() -> None:
    for notes in _every.values():
        if notes is not None:
            notes.begin_anew()


atexit.register(_write_all)
config.watchers.append(_write_all)
os.register_at_fork(after_in_child=_begin_anew)
