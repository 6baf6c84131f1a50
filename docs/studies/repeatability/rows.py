"""The rows a study writes: one for each method and problem of an session, and one for each program of its referee."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledsched.core.canonical import canonical_json
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named, problem_from_json

METHODS = ("race", "in-turn", "exhaustive", "exhaustive-jit")
REFEREE = "referee"
"""Stands for the method in the rows of the referee."""
PROBLEM_COLUMNS = ("seq_q", "seq_k", "head_dim", "dtype", "causal", "batch", "heads", "kv_heads")
"""Of files from before there were other kernels than attention, which have no column `problem`."""


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One method on one problem on one session; or, of the method `referee`, one program in its interleaved run."""

    session: str
    """When the session began: ISO 8601, UTC."""
    seed: int
    """Of the order of problems and methods."""
    position: int
    """Place of the method among those of its problem, from 1; 0 for the referee."""
    method: str
    """race, in-turn, exhaustive or referee."""
    problem: Problem
    """What was computed."""
    schedule_id: str
    """The schedule chosen (the referee: timed); empty where every candidate failed."""
    schedule: str
    """The same for people."""
    fingerprint: str
    """Its machine code."""
    estimate_us: float | None
    """The method's own estimate of its time; the referee: the median of its samples."""
    ties: tuple[str, ...] | None = None
    """Ids of the race's tie set, the winner's first; None for other methods."""
    regret: float | None
    """Median time of the chosen program over that of the fastest in the same referee run, minus 1."""
    cv: float | None
    """Standard deviation over mean of the referee's samples of this program."""
    cv_of_10: float | None
    """The same of the medians of blocks of ten samples."""
    device_seconds: float | None
    """Wall time from asking for the choice to having it; nothing was compiled in it."""
    kernel_seconds: float | None
    """GPU time inside candidates, as far as the method tells."""
    launches: int | None
    """Launches of candidates, as far as the method tells."""
    candidates: int
    """Programs it chose among."""
    failures: int | None
    """Of them, those that gave no time."""
    device: str
    """GPU."""
    driver: str
    """Driver version."""
    versions: str
    """Compiler and libraries."""

    @property
    def tie_set(self) -> int | None:
        """Size of the race's tie set, the winner included."""
        return None if self.ties is None else len(self.ties)

    def to_csv(self) -> dict[str, Any]:
        """A flat row; :meth:`from_csv` inverts it, up to the digits kept."""
        return {
            "session": self.session,
            "seed": self.seed,
            "position": self.position,
            "method": self.method,
            "problem": canonical_json(self.problem.to_json()),
            "schedule_id": self.schedule_id,
            "schedule": self.schedule,
            "fingerprint": self.fingerprint,
            "estimate_us": _digits(self.estimate_us),
            "tie_set": _digits(self.tie_set),
            "tie_ids": " ".join(self.ties or ()),
            "regret": _digits(self.regret),
            "cv": _digits(self.cv),
            "cv_of_10": _digits(self.cv_of_10),
            "device_seconds": _digits(self.device_seconds),
            "kernel_seconds": _digits(self.kernel_seconds),
            "launches": _digits(self.launches),
            "candidates": self.candidates,
            "failures": _digits(self.failures),
            "device": self.device,
            "driver": self.driver,
            "versions": self.versions,
        }

    @classmethod
    def from_csv(cls, cells: dict[str, str]) -> StudyRow:
        """The row `to_csv` wrote.

        Raises:
            KeyError, ValueError: a cell is missing or is no number where one is needed.
        """
        problem = problem_from_json(json.loads(cells["problem"])) if "problem" in cells else _former_problem(cells)
        return cls(
            session=cells["session" if "session" in cells else "occasion"],  # as older files call it
            seed=int(cells["seed"]),
            position=int(cells["position"]),
            method=cells["method"],
            problem=problem,
            schedule_id=cells["schedule_id"],
            schedule=cells["schedule"],
            fingerprint=cells["fingerprint"],
            estimate_us=_number(cells["estimate_us"]),
            ties=tuple(cells["tie_ids"].split()) if cells["tie_set"] else None,
            regret=_number(cells["regret"]),
            cv=_number(cells["cv"]),
            cv_of_10=_number(cells["cv_of_10"]),
            device_seconds=_number(cells["device_seconds"]),
            kernel_seconds=_number(cells["kernel_seconds"]),
            launches=_whole(cells["launches"]),
            candidates=int(cells["candidates"]),
            failures=_whole(cells["failures"]),
            device=cells["device"],
            driver=cells["driver"],
            versions=cells["versions"],
        )


def _former_problem(cells: dict[str, str]) -> Problem:
    sizes: dict[str, Any] = {name: int(cells[name]) for name in PROBLEM_COLUMNS if name not in ("dtype", "causal")}
    return kernel_named("attention").problem(**sizes, dtype=cells["dtype"], causal=cells["causal"] == "True")


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _number(text: str) -> float | None:
    return float(text) if text else None


def _whole(text: str) -> int | None:
    return int(text) if text else None


def append_rows(rows: Sequence[StudyRow], path: Path) -> None:
    """Add `rows` to the end of a CSV file, which is made where there is none.

    Raises:
        ConfigError: the file there has other columns.
    """
    flat = [row.to_csv() for row in rows]
    check_columns(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(flat[0]))
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(flat)


def check_columns(path: Path) -> None:
    """Look whether rows may be added to `path`, before anything is measured for it.

    Raises:
        ConfigError: it holds something else.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open(newline="", encoding="utf-8") as file:
        found = next(csv.reader(file), [])
    if found != COLUMNS:
        raise ConfigError(f"{path} is not a study of this version: its columns are others; choose another file")


def read_rows(path: Path) -> list[StudyRow]:
    """Every row of a CSV file that `append_rows` wrote.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [StudyRow.from_csv(cells) for cells in csv.DictReader(file)]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); pass a file that --csv wrote") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path} is not a study: {error}; pass a file that --csv wrote") from error


COLUMNS = [
    "session",
    "seed",
    "position",
    "method",
    "problem",
    "schedule_id",
    "schedule",
    "fingerprint",
    "estimate_us",
    "tie_set",
    "tie_ids",
    "regret",
    "cv",
    "cv_of_10",
    "device_seconds",
    "kernel_seconds",
    "launches",
    "candidates",
    "failures",
    "device",
    "driver",
    "versions",
]
