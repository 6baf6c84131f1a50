"""How a schedule divides an attention problem: rows, heads and keys of a tile, and how many tiles and blocks there are.

Schedules stored by earlier versions may lack a knob. They are read as if it had the value that the kernel had then.
"""

from __future__ import annotations

import math
from typing import Any

from tiledsched.core.cost import WARPGROUP_ROWS
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule

ROWS_PER_WARP = 16
"""Rows of a tensor-core product that one warp holds, on every arch. With fewer rows, several warps share the keys of a row."""
SMALLEST_SPAN, LARGEST_SPAN = 2, 64
"""Steps of shares of a fixed size."""
COMBINED_ELEMENTS = 8192
"""Elements that a block of the combining launch reads at once, of all shares together."""


def rows_per_tile(p: Problem, s: Schedule) -> int:
    """Query rows per head that one tile holds."""
    return s.number("tile_m") // pack_width(p, s)


def pack_width(p: Problem, s: Schedule) -> int:
    """Query heads that a tile has rows for."""
    return int(p.group_rows) if s.get("pack_gqa", False) else 1


def packs(p: Problem, s: Schedule) -> int:
    """Query heads of a sequence, or, where heads that share their keys are packed, packs of heads."""
    return int(p.kv_heads if s.get("pack_gqa", False) else p.heads)


def tile_heads(p: Problem, s: Schedule) -> int:
    """Query heads of a tile that exist."""
    return int(p.group) if s.get("pack_gqa", False) else 1


def work_tiles(p: Problem, s: Schedule) -> int:
    """Work tiles of a problem; for packed sequences, the most there can be."""
    rows = rows_per_tile(p, s) * s.number("q_subtiles")
    per_head = p.seq_q // rows + p.packed if p.packed else -(-p.seq_q // rows)
    return int(per_head * p.batch * packs(p, s))


def slots(p: Problem, s: Schedule) -> int:
    """Places in scratch memory: one for each query tile and share of the keys."""
    return work_tiles(p, s) * s.number("q_subtiles") * splits(p, s)


def span_steps(s: Schedule) -> int:
    """Steps of each share of the keys where shares have a fixed size; 0 where their number is fixed."""
    return s.number("kv_splits") if s.get("kv_combine") == "in_order" else 0


def splits(p: Problem, s: Schedule) -> int:
    """Blocks that share the keys of one work tile: a power of two."""
    if span_steps(s):
        return 1 << (-(-int(p.seq_k) // (span_steps(s) * step_keys(s))) - 1).bit_length()
    return int(s.get("kv_splits", 1))


def step_keys(s: Schedule) -> int:
    """Keys of one step."""
    return s.number("tile_n") * s.number("kv_subtiles")


def combines_later(p: Problem, s: Schedule) -> bool:
    """Whether a second launch combines the shares of split keys."""
    return splits(p, s) > 1 and s.get("kv_combine", "last_block") != "last_block"


def combined_rows(p: Problem, s: Schedule) -> int:
    """Query rows of one block of the combining launch: few, so that there are many blocks, but no more than a tile stores."""
    most = max(1, COMBINED_ELEMENTS // (splits(p, s) * p.tile_v))
    return min(stored_rows(p, s), 1 << (most.bit_length() - 1))


def stored_rows(p: Problem, s: Schedule) -> int:
    """Query rows per head of a tile that are stored: those that exist, rounded up to a power of two; one row in decoding."""
    return min(rows_per_tile(p, s), 1 << (int(p.seq_q) - 1).bit_length())


def steps_per_turn(s: Schedule) -> int:
    """Steps of one turn of a loop over the keys. A loop takes whole turns, so that a last step may see no keys."""
    return max(unroll(s), flat_steps(s))


def flat_steps(s: Schedule) -> int:
    """Steps per turn of a flat loop; 0 for nested loops."""
    return int(s.get("flat_steps", 0))


def unroll(s: Schedule) -> int:
    """Steps per turn of a nested loop."""
    return int(s.get("unroll", 1))


def column_widths(tile: int, parts: tuple[int, int], s: Schedule) -> tuple[int, int]:
    """Columns of the first and the second part of a row; a schedule that does not divide rows has no second part."""
    return parts if s.get("column_parts", 1) == 2 else (tile, 0)


def tile_keys(p: Problem, s: Schedule) -> int:
    """Keys of a tile. One load takes whole pages where their length is a power of two; otherwise a tile lies in one page."""
    tile = s.number("tile_n")
    return math.gcd(tile, p.page) if p.page > tile or p.page & (p.page - 1) else tile


def reduction_order(p: Problem, s: Schedule) -> tuple[Any, ...] | None:
    """What decides in which order the sums of a row are made, whatever else is computed with it.

    It is the keys that are added at once, where shares of the keys end, the parts of the columns, the type of the sums, and how
    products are divided among warps. Masked keys, empty steps and empty shares add exactly nothing. None where the order, or
    whether a sum is rescaled, depends on other rows or on the number of keys.
    """
    if ordered(p, s) != s:
        return None
    rows, names = s.number("tile_m"), ("accum_mode", "division", "column_parts", "num_ctas")
    sharing = max(1, s.number("num_worker_warps") * ROWS_PER_WARP // rows)
    keys = span_steps(s), tile_keys(p, s), step_keys(s)
    return *keys, rows >= WARPGROUP_ROWS, sharing, *(s.get(name) for name in names)


def ordered(p: Problem, s: Schedule) -> Schedule:
    """The schedule most like `s` that has an order of its sums which depends on no other row and no number of keys.

    Shares have a fixed size: that of the shares of `p`, rounded up to a power of two; packed sequences have no shares. Keys
    go forward, sums are rescaled at each step, and bounds are checked, so that the schedule works for all sizes.
    """
    changed = s.replace(kv_direction="forward", lazy_rescale=False, check_bounds=True)
    if p.packed or span_steps(s) or splits(p, s) == 1:
        return changed.replace(kv_splits=1) if p.packed else changed
    steps = -(-int(p.seq_k) // (splits(p, s) * step_keys(s)))
    span = min(max(1 << (steps - 1).bit_length(), SMALLEST_SPAN), LARGEST_SPAN)
    return changed.replace(kv_splits=span, kv_combine="in_order", column_parts=1, pdl=0)
