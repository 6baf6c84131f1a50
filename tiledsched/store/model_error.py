"""How far the performance model's estimates are off, by kernel, arch, sizes and tile.

The figures are those of `tuning_db/model/KERNEL/error.json`. `python -m docs.studies.model_error` makes them: it compares
estimates, made as a tune makes them, with times that the model was not fitted to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule, named_tile
from tiledsched.core.text import percent
from tiledsched.store.manifest import model_file


@dataclass(frozen=True, kw_only=True)
class ModelError:
    """What was found where estimates were compared with times that the model was not fitted to."""

    mean: float
    """Mean size of (estimate / measured time - 1)."""
    worst: float
    """The error of the largest size, with its sign: below 0 where the estimate is too short."""
    figures: int
    """Number of times that the estimates were compared with."""
    source: str
    """What these times are, e.g. `published figures of GB10`."""

    def __str__(self) -> str:
        worst = f"{abs(self.worst) * 100:.0f}% too {'long' if self.worst > 0 else 'short'}"
        return f"{percent(self.mean)} off on average ({self.figures} {self.source}; at worst {worst})"


def error_of(arch: str, problem: Problem, schedule: Schedule) -> ModelError | None:
    """The model's error for problems like this one on an arch.

    Args:
        arch: e.g. sm_121.
        problem: its kernel, sizes and types are looked up. Sizes beyond those that were compared have no error.
        schedule: its tile is looked up. Where too few times of that tile were compared, those of all tiles count.

    Returns:
        The error; None where no estimate was compared with measurements for this kernel, arch or these sizes.
    """
    name = "x".join(str(schedule[knob]) for knob in named_tile(schedule) or ())
    rows = (model_file(problem.kernel, "error.json") or {"rows": ()})["rows"]
    found = [
        row for row in rows if row["arch"] == arch and row["tile"] in ("", name) and _covers(row["where"], problem)
    ]
    if not found:
        return None
    row = max(found, key=lambda row: (bool(row["tile"]), row["figures"]))
    return ModelError(mean=row["mean"], worst=row["worst"], figures=row["figures"], source=row["source"])


def error_text(error: ModelError | None) -> str:
    """The model's error, or that it is not known: the end of a sentence about an estimate."""
    return f"such estimates were {error}" if error else "no estimate for such a problem was compared with measurements"


def _covers(where: dict[str, list[Any] | None], problem: Problem) -> bool:
    """Whether a row names all that is special about a problem, and allows its values: by a list, or by ranges."""
    values = {name: value for name, value in problem.to_json().items() if name != "kernel"}
    return all(
        name in where and (where[name] is None or any(_in(value, each) for each in where[name] or ()))
        for name, value in values.items()
    )


def _in(value: Any, allowed: Any) -> bool:
    return bool(allowed[0] <= value <= allowed[1]) if isinstance(allowed, list) else bool(value == allowed)
