"""What the measuring process is told about one launch: plain data, no template, no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tiledsched.kernel import ArraySpec
from tiledsched.measure.accuracy import Tolerance


@dataclass(frozen=True, kw_only=True)
class Launch:
    """All that is needed to run one artifact on the current problem."""

    fingerprint: str
    """Key of the loaded module."""
    grid: tuple[int, int, int]
    """Blocks."""
    tile_m: int
    """Rows of a head per output tile, for the error per tile."""
    tolerance: Tolerance
    """What is asked of its result."""
    extras: tuple[ArraySpec, ...] = ()
    """Arrays it takes beside q, k, v and out."""
