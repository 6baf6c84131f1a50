"""The rows of an ablation, and their CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiledsched.core.canonical import canonical_json
from tiledsched.core.files import csv_text, write_whole
from tiledsched.core.problem import Problem
from tiledsched.measure.estimate import Timing
from tiledsched.rivals.rows import SIZES, timing_columns

LADDER, WITHOUT, TRIED = "ladder", "without", "tried"
FIRST_COLUMNS = ("dtype", "causal", *SIZES)
"""Values of attention with a column of their own; empty for a problem that has no such field."""


@dataclass(frozen=True, kw_only=True)
class AblationRow:
    """One schedule on the way from the plain schedule to the tuned one, or next to the tuned one."""

    problem: Problem
    """The problem."""
    regime: str
    """burst or sustained."""
    view: str
    """`ladder` for a rung; `without` for the tuned schedule with one knob changed back; `tried` for a possible rung, in
    the run that chose among several.
    """
    rung: int
    """Place on the ladder, where 0 is the plain schedule; for `tried`, the rung it might have been."""
    knob: str
    """The knobs changed, joined by +; empty for rung 0."""
    before: str
    """Their values before."""
    after: str
    """Their values after."""
    schedule: str
    """The whole schedule as people read it."""
    schedule_id: str
    """Its id."""
    timing: Timing | None = None
    """The time; None where there is none."""
    speedup_over_previous: float | None = None
    """Time before the change over time after it. For `without`, the time before is the tuned schedule's."""
    speedup_over_plain: float | None = None
    """Time of rung 0 over its own time; None for `tried`, which ran in another run."""
    status: str
    """`ok`, or why there is no time: a broken constraint, a failed build or launch, or nothing recorded."""
    device: str = ""
    """Name of the GPU."""
    runner: str = ""
    """gpu or replay."""
    taken: str = ""
    """Day on which it was timed, in UTC, as YYYY-MM-DD; empty where it was not recorded."""

    def to_csv(self) -> dict[str, Any]:
        """One cell for each column, also for `--json`."""
        p = self.problem.values
        return {
            "regime": self.regime,
            **{name: p.get(name, "") for name in FIRST_COLUMNS},
            "view": self.view,
            "rung": self.rung,
            "knob": self.knob,
            "from": self.before,
            "to": self.after,
            **timing_columns(self.timing, 4),
            "speedup_over_previous": _rounded(self.speedup_over_previous),
            "speedup_over_plain": _rounded(self.speedup_over_plain),
            "status": self.status,
            "schedule": self.schedule,
            "schedule_id": self.schedule_id,
            "alignment": p.get("alignment", ""),
            "value_dim": p.get("value_dim", ""),
            "device": self.device,
            "runner": self.runner,
            "kernel": self.problem.kernel,
            "problem": canonical_json(self.problem.to_json()),
            "taken": self.taken,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def write_rows(rows: Sequence[AblationRow], path: Path) -> None:
    """Write all rows to a CSV file, in place of what it held."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, csv_text([row.to_csv() for row in rows]))
