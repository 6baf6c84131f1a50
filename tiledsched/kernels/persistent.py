"""Grids of blocks that take one work tile after another."""

from __future__ import annotations

from typing import Any

from tiledsched.core.schedule import Schedule


def resident_blocks(tiles: int, s: Schedule, device: Any) -> int:
    """Blocks of a persistent grid: as many as fit on the GPU at once, according to the occupancy hint, or one for each of `tiles`
    where these are fewer."""
    resident = device.sm_count * max(1, s.number("occupancy")) // int(s.get("num_ctas", 1))
    return min(tiles, max(1, resident))
