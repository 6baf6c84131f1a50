"""Schedules of attention's gradients that a search leaves out, for the tests that run them."""

from __future__ import annotations

from typing import Any

from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention_backward import AttentionBackward

SPACE = space_for("sm_90", AttentionBackward)


def fitting(p: Problem, knobs: dict[str, Any]) -> Schedule:
    """The default schedule of a problem with some knobs changed; whatever else a schedule needs is as it is for 16 x 16 tiles."""
    wanted = {"tile_m": 16, "tile_n": 16, "num_worker_warps": 4} | knobs
    if wanted.get("structure") == "two_pass":
        wanted = {"tile_m_dq": 16, "tile_n_dq": 16} | wanted
    schedule = SPACE.default(p).replace(**wanted)
    values = SPACE.constraint_values(p) | dict(schedule)
    broken = [each.because for each in SPACE.constraints if not each.exploring and not each.holds(values)]
    assert not broken, broken
    return schedule
