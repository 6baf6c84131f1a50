"""How much one attention problem says of another, for the search and for problems that were never measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from tiledsched.core.schedule import Schedule
from tiledsched.core.storage import ALIGNMENT

FEW_ROWS = 64
"""Up to this many query rows a problem is of another kind: decoding, whose time is the reading of the keys."""

FEW_KEYS = 640
"""Up to this many keys a block takes so few steps that starting and storing decide."""

WIDE_TILE = 128
"""Keys of the widest tile that wins."""

WIDE_HEAD, SMALL_TILE = 128, 32
"""Copied rows of more columns than these leave registers for so many keys at once."""


def similarity(p: Any, q: Any) -> float:
    """How much measurements of one problem say of another: 1 for the same, less for each difference.

    By decreasing effect: head dimension (its factor, rounded up to a power of two), mask, number of query rows in all,
    sequence length, element type.
    """

    def octaves(first: int, second: int) -> float:
        return abs(math.log2(first / second))

    rows = octaves(p.batch * p.heads * p.seq_q, q.batch * q.heads * q.seq_q)
    distance = 0.2 * octaves(p.tile_d, q.tile_d) + 0.1 * (p.causal != q.causal) + 0.1 * rows
    distance += 0.1 * _asked_differently(p, q)
    return math.exp(-distance - 0.02 * octaves(p.mean_keys, q.mean_keys) - 0.02 * (p.dtype != q.dtype))


def kind(p: Any) -> tuple[bool, int, bool, bool, bool]:
    """What a problem must share with another so that its winner says much: mask, padded head dimension, few rows or many, with
    many whether heads are padded, which go in column parts, and leave other tiles room; and whether rows are copied."""
    few = p.mean_rows <= FEW_ROWS
    return p.causal, p.tile_d, few, not few and p.head_dim != p.tile_d, copied(p)


def copied(p: Any) -> bool:
    """Whether threads copy rows of keys or values, because their width in bytes is none that the TMA unit takes: what just fits
    registers otherwise spills, and compiles for minutes."""
    return any(columns * p.element_bytes % ALIGNMENT for columns in (p.head_dim, p.value_columns))


def rival_kind(p: Any) -> tuple[bool, bool, int, int]:
    """Whether sequences are packed, whether keys lie in pages, and how wide keys and values are: rivals have functions of their
    own for the former, and programs for each width."""
    return p.ends_q, p.paged, p.head_dim, p.value_columns


def distance(p: Any, q: Any) -> float:
    """How unlike two problems of one kind are: octaves of sequence length and of the padded width of values, and half as much for
    everything else.

    Work per block follows the key length, the size of accumulators the width of values, the number of blocks rows and heads, of
    few rows key heads; dtype and grouping matter least. Where the last tile of keys is cut off the code is another: it masks, and
    what just fits registers without that spills. So it is with columns of heads that are padded to one width: their parts hold
    what there is. With few rows a group of query heads shares what it reads, if it is packed.
    """
    few = p.mean_rows <= FEW_ROWS
    octaves = abs(math.log2(p.mean_keys / q.mean_keys)) + 0.5 * abs(math.log2(p.mean_rows / q.mean_rows))
    octaves += abs(math.log2(p.tile_v / q.tile_v))
    one, another = (each.sequences * (each.kv_heads if few else each.heads) for each in (p, q))
    blocks = abs(math.log2(one / another))
    other = 0.1 * (p.dtype != q.dtype) + 0.1 * (p.group != q.group) + 0.3 * (p.head_dim != q.head_dim)
    ragged = (p.seq_k % WIDE_TILE == 0) != (q.seq_k % WIDE_TILE == 0)
    packs = few and (p.group > 1) != (q.group > 1)
    columns = 0.0 if few or p.tile_d != q.tile_d else abs(math.log2(p.head_dim / q.head_dim))
    return float(octaves + 0.5 * blocks + other + ragged + 4.0 * packs + 6.0 * columns + 0.3 * _asked_differently(p, q))


def _asked_differently(p: Any, q: Any) -> float:
    """Octaves between the keys that a row sees where a window bounds them, and each of the other things only one asks for."""
    one, other = (
        min(each.window + each.window_right if each.window else each.mean_keys, each.mean_keys) for each in (p, q)
    )
    octaves = abs(math.log2(one / other)) if p.window or q.window else 0.0
    flags = ("softcap", "sinks", "starts", "lengths", "ends_q", "paged")
    return octaves + sum(getattr(p, name) != getattr(q, name) for name in flags)


def requires_same_kind(p: Any) -> bool:
    """With few rows, or copied ones, winners of other kinds are of no use."""
    return p.mean_rows <= FEW_ROWS or copied(p)


def equivalents(p: Any, q: Any, s: Schedule) -> tuple[Schedule, ...]:
    """Where no tile of keys is cut off, a loop of its own for those that are changes nothing; without it every step masks, which
    many keys cannot afford."""
    from tiledsched.kernels.attention.declaration import steps_per_turn

    masked = any(each.causal or each.spanned for each in (p, q))
    if masked or s["loop_split"] or q.mean_rows <= FEW_ROWS or q.mean_keys <= FEW_KEYS:
        return ()
    turn = s.number("tile_n") * s.number("kv_subtiles") * steps_per_turn(s)
    return (s.replace(loop_split=True),) if p.seq_k % turn == 0 and q.seq_k % turn else ()


def loss_group(p: Any) -> str:
    """What a transfer loses differs most where there are few keys or heads are padded; of windows and the like it is unknown."""
    if p.asked:
        return ""
    if p.mean_rows <= FEW_ROWS:
        return "few rows"
    if p.head_dim != p.tile_d or p.value_dim:
        return "padded heads"
    return "few keys" if p.mean_keys <= FEW_KEYS else "many keys"


def rounded(p: Any) -> Any:
    """The problem of about these lengths that one answer serves.

    A model that decodes asks for another length with every token; finding an answer anew would cost it milliseconds.
    """
    keys = p.page * _about(p.pages) if p.page else _about(p.seq_k, p.mean_rows <= FEW_ROWS)
    return p.replace(seq_q=_about(p.seq_q), seq_k=keys, packed=1 << (p.packed - 1).bit_length() if p.packed else 0)


def _about(length: int, decoding: bool = False) -> int:
    """A length within an eighth of `length` that stands for all of them; itself where it is short or a round number, of which
    there are fewer for a model that is decoding: it stops at each.

    Not a round number itself, so that what is valid for it is valid for lengths that divide nothing.
    """
    step = 1 << max(0, (length - 1).bit_length() - 4)
    if length <= FEW_ROWS or length % (max(32, step) if decoding else 32) == 0:
        return length
    return -(-length // step) * step - 1 if step > 1 else length


def cold_start(p: Any, default: Schedule, space: Any, estimate: Callable[[Schedule], float]) -> Schedule | None:
    """With few rows, where nothing near was measured: the model's choice of splits, packing and tile height.

    With one row and 8 heads the default launches 8 blocks on a GPU of a hundred SMs; the other knobs stay as they are. With many
    rows that are copied and wide, what does not spill.
    """
    if p.mean_rows > FEW_ROWS:
        if p.tile_d <= WIDE_HEAD or not copied(p):
            return None
        small = default.replace(tile_n=SMALL_TILE)
        return None if space.violations(small, p) else small
    knobs = [name for name in ("kv_splits", "kv_combine", "pack_gqa", "tile_m", "tma_loads") if name in space.knobs]
    varied = (
        default.replace(**dict(zip(knobs, values, strict=True)))
        for values in itertools.product(*(space.knobs[name].choices for name in knobs))
    )
    valid = [default, *(each for each in varied if not space.violations(each, p))]
    return min(valid, key=lambda schedule: (estimate(schedule), schedule.id))
