"""The rows that the study writes: one for each method and problem of a session, and one for each program of the referee."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledsched.core.canonical import canonical_json
from tiledsched.core.errors import ConfigError
from tiledsched.core.files import csv_text
from tiledsched.core.problem import Problem
from tiledsched.core.registry import problem_from_json

METHODS = ("race", "in-turn", "exhaustive", "exhaustive-jit")
REFEREE = "referee"
"""The method in rows of the referee."""
WORDS = ("session", "method", "schedule_id", "schedule", "fingerprint", "device", "driver", "versions")
INTEGERS = ("seed", "position", "launches", "candidates", "failures")
NUMBERS = ("estimate_us", "regret", "cv", "cv_of_10", "device_seconds", "kernel_seconds")
"""Fields of a row whose columns hold a word, an integer or a number; the last two may be empty."""
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
"""Columns of the CSV file, in order."""


@dataclass(frozen=True, kw_only=True)
class StudyRow:
    """One method on one problem in one session; or, for the method `referee`, one program in its interleaved run."""

    session: str
    """When the session began: ISO 8601, UTC."""
    seed: int
    """Seed of the order of problems and methods."""
    position: int
    """Place of the method among those of its problem, from 1; 0 for the referee."""
    method: str
    """race, in-turn, exhaustive or referee."""
    problem: Problem
    """The problem."""
    schedule_id: str
    """Id of the schedule that was chosen, or timed by the referee; empty where every candidate failed."""
    schedule: str
    """That schedule as people read it."""
    fingerprint: str
    """Fingerprint of its machine code."""
    estimate_us: float | None
    """The method's own estimate of its time; for the referee, the median of its samples."""
    ties: tuple[str, ...] | None = None
    """Ids of the race's tie set, the winner's first; None for other methods."""
    regret: float | None
    """Median time of the chosen program over that of the fastest in the same referee run, minus 1."""
    cv: float | None
    """Standard deviation over mean of the referee's samples of this program."""
    cv_of_10: float | None
    """The same ratio for the medians of blocks of ten samples."""
    device_seconds: float | None
    """Wall time from asking for the choice to having it; nothing was compiled in it."""
    kernel_seconds: float | None
    """GPU time in candidates, as far as the method reports it."""
    launches: int | None
    """Launches of candidates, as far as the method reports them."""
    candidates: int
    """Number of programs to choose among."""
    failures: int | None
    """How many of them gave no time."""
    device: str
    """Name of the GPU."""
    driver: str
    """Driver version."""
    versions: str
    """Compiler and libraries."""

    def to_csv(self) -> dict[str, Any]:
        """One cell for each of `COLUMNS`; :meth:`from_csv` reads it back, up to the digits kept."""
        cells = {name: getattr(self, name) for name in (*WORDS, *INTEGERS, *NUMBERS)}
        cells |= {
            "problem": canonical_json(self.problem.to_json()),
            "tie_set": None if self.ties is None else len(self.ties),
            "tie_ids": " ".join(self.ties or ()),
        }
        return {name: _digits(cells[name]) for name in COLUMNS}

    @classmethod
    def from_csv(cls, cells: dict[str, str]) -> StudyRow:
        """The row that `to_csv` wrote.

        Raises:
            KeyError, ValueError: a cell is missing, or holds no number where one is needed.
        """
        return cls(
            problem=problem_from_json(json.loads(cells["problem"])),
            ties=tuple(cells["tie_ids"].split()) if cells["tie_set"] else None,
            **{name: cells[name] for name in WORDS},  # type: ignore[arg-type]
            **{name: int(cells[name]) if cells[name] else None for name in INTEGERS},  # type: ignore[arg-type]
            **{name: float(cells[name]) if cells[name] else None for name in NUMBERS},  # type: ignore[arg-type]
        )


def _digits(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def append_rows(rows: Sequence[StudyRow], path: Path) -> None:
    """Append rows to a CSV file, which is made where there is none.

    Raises:
        ConfigError: the file there has other columns.
    """
    check_columns(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        file.write(csv_text([row.to_csv() for row in rows], COLUMNS, head=file.tell() == 0))


def check_columns(path: Path) -> None:
    """Make sure that rows can be appended to a file, before anything is measured.

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
    """The rows of a CSV file that `append_rows` wrote.

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
