"""How much one attention problem says about another, for the search and for problems that nobody measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tiledsched.core.arrays import ALIGNMENT
from tiledsched.core.schedule import Schedule
from tiledsched.core.similarity import FAR, Similarity
from tiledsched.kernels.attention.options import FIELDS
from tiledsched.kernels.attention.tiling import steps_per_turn

FEW_ROWS = 64
"""Problems with at most this many query rows are of another kind: they decode, and reading the keys takes their time."""
FEW_KEYS = 640
"""With at most this many keys a block takes so few steps that starting and storing decide its time."""
WIDE_TILE = 128
"""Keys of the widest tile that wins."""
NARROW_ROWS, NARROW_TILES = 16, ((128, 2), (64, 3))
"""Rows of tiles, and keys of tiles with blocks of an SM, for few rows over keys in 8 bits."""
SCALAR_PAGES = 16, 32, 64, 128
"""Sizes of pages that tiles of several can find one by one."""
UNHINTED_PAGES = 4
"""Pages of a tile up to which loads get no latency hint."""
WIDE_HEAD, SMALL_TILE = 128, 32
"""Rows of more than 128 columns that threads copy leave registers for tiles of 32 keys."""
Q8_TILE = {"tile_m": 64, "tile_n": 128, "occupancy": 2, "num_worker_warps": 4}
Q8_WIDE_TILE = {"tile_m": 128, "tile_n": 64, "occupancy": 1, "num_worker_warps": 8}
"""Tiles for queries in 8 bits, and for those whose rows are wide, for which two blocks have too few registers."""
Q8_NARROW_HEAD, Q8_AHEAD_KEYS = 64, 2048
"""Making scores ahead is faster for queries in 8 bits of 64 columns from 4096 keys on and slower at 1024, so that it serves above
the length between the two."""
Q8_LONG_TILE = {"tile_m": 128, "tile_n": 128, "occupancy": 1, "num_worker_warps": 8}
Q8_LONG_CAUSAL = Q8_LONG_TILE | {"persistent": "snake", "store_late": True, "block_order": "reversed"}
Q8_LONG_KEYS, Q8_LONG_ROWS = 4096, 65536
"""Tiles that are faster for queries in 8 bits of 128 columns from 8192 keys on and slower at 2048, so that they serve above the
length between the two; of at least as many rows of all heads and sequences as were timed."""
TIMING_OCTAVES = (3.0, 7.5, 6.0, 9.0, 2.25)
"""Octaves of rows, keys, key heads, group and columns over which ratios of times lose about half of what they have in common.
With these, 802 problems predict each other about best (docs/results/serving.md)."""
FEATURES = tuple(name for name in FIELDS if not name.startswith("window"))
"""Fields of a problem that change its machine code a little."""


class AttentionSimilarity(Similarity):
    """How attention problems compare; the constants are discussed in docs/results/serving.md."""

    own_first = True

    def weight(self, p: Any, q: Any) -> float:
        """How much the measurements of `q` count for the search on `p`: 1 for equal problems, less for each difference.

        By decreasing effect: head dimension (rounded up to a power of two), mask, number of query rows in all, sequence length,
        element type.
        """
        rows = octaves_apart(p.batch * p.heads * p.seq_q, q.batch * q.heads * q.seq_q)
        distance = 0.2 * octaves_apart(p.tile_d, q.tile_d) + 0.1 * (skips_keys(p) != skips_keys(q)) + 0.1 * rows
        distance += 0.1 * feature_distance(p, q)
        return math.exp(-distance - 0.02 * octaves_apart(p.mean_keys, q.mean_keys) - 0.02 * (p.dtype != q.dtype))

    def kind(self, p: Any) -> tuple[bool, int, bool, bool, bool, bool]:
        """What two problems must share so that the winner of one says much about the other.

        It is whether a mask skips keys; the padded head dimension; whether there are few query rows; if there are many, whether
        heads are padded, because padded heads are loaded in column parts and leave other tiles room; whether threads copy
        rows; and whether queries have 8 bits. Of few rows, a mask that ends at the last key hides next to nothing, and counts as
        none.
        """
        few = p.mean_rows <= FEW_ROWS
        return (
            skips_keys(p) and not (few and p.alignment == "bottom_right"),
            p.tile_d,
            few,
            not few and p.head_dim != p.tile_d,
            copies_rows(p),
            p.q8,
        )

    def rival_kind(self, p: Any) -> tuple[bool, bool, int, int]:
        """Whether sequences are packed, whether keys lie in pages, and the widths of keys and values.

        Rivals have functions of their own for packed and paged problems, and programs of their own for each width.
        """
        return p.ends_q, p.paged, p.head_dim, p.value_columns

    def distance(self, p: Any, q: Any) -> float:
        """How far apart two problems of one kind are: octaves of key length, and half as much for most other differences.

        The work of a block follows the key length, the size of accumulators the width of values, and the number of blocks the
        rows and heads (with few rows, the key heads). Element type and grouping matter least. A last tile of keys that is cut off
        takes other code: it masks, and what just fits the registers without the mask spills. Columns of heads that are padded to
        the same width take other code, too. With few rows, a packed group of query heads shares what it reads.

        What won over keys in 8 bits, `p`, is far from keys in 16 bits, where tiles of 16 rows are slower. The other way round,
        :meth:`equivalents` has such tiles.
        """
        few = p.mean_rows <= FEW_ROWS
        lengths = octaves_apart(p.mean_keys, q.mean_keys) + 0.5 * octaves_apart(p.mean_rows, q.mean_rows)
        lengths += octaves_apart(p.tile_v, q.tile_v)
        one, another = (each.sequences * (each.kv_heads if few else each.heads) for each in (p, q))
        blocks = octaves_apart(one, another)
        other = (
            0.1 * (p.dtype != q.dtype)
            + 0.1 * (skips_keys(p) != skips_keys(q))
            + 0.1 * (p.group != q.group)
            + 0.3 * (p.head_dim != q.head_dim)
        )
        ragged = (p.seq_k % WIDE_TILE == 0) != (q.seq_k % WIDE_TILE == 0)
        packs = few and (p.group > 1) != (q.group > 1)
        columns = 0.0 if few or p.tile_d != q.tile_d else octaves_apart(p.head_dim, q.head_dim)
        special = FAR * (p.eight_bits and not q.eight_bits)
        return float(
            lengths
            + 0.5 * blocks
            + other
            + ragged
            + 4.0 * packs
            + 6.0 * columns
            + 0.3 * feature_distance(p, q)
            + special
        )

    def timing_features(self, p: Any) -> tuple[float, ...]:
        """Octaves of rows, keys, key heads, group and columns over those that count as one, and the mask; none of problems with
        optional features, packed sequences, pages or two head dimensions."""
        if p.has_features or p.is_varlen or p.value_dim or p.lse:
            return ()
        sizes = zip((p.seq_q, p.seq_k, p.batch * p.kv_heads, p.group, p.head_dim), TIMING_OCTAVES, strict=True)
        masks = 0.13 * p.causal, 0.11 * (p.causal and p.seq_q != p.seq_k and p.alignment == "bottom_right")
        return (*(math.log2(size) / octaves for size, octaves in sizes), *masks, 0.11 * (p.head_dim != p.tile_d))

    def bucketed(self, p: Any) -> Any:
        """The problem of about the lengths of `p` whose answer serves `p`, too.

        A model that decodes has another length with every token, and finding a new answer would take milliseconds.
        """
        keys = p.key_unit * _about(p.seq_k // p.key_unit, p.mean_rows <= FEW_ROWS and not p.page)
        rows, packed = _about(p.seq_q), 1 << (p.packed - 1).bit_length() if p.packed else 0
        same = (rows, keys, packed) == (p.seq_q, p.seq_k, p.packed)
        return p if same else p.replace(seq_q=rows, seq_k=keys, packed=packed)

    def share_knobs(self, p: Any) -> tuple[str, ...]:
        """The two of the keys' shares, with few rows: there the model's numbers of shares are about those of measured winners."""
        return ("kv_splits", "kv_combine") if p.mean_rows <= FEW_ROWS else ()

    def requires_same_kind(self, p: Any) -> bool:
        """Whether there are few rows, copied rows or queries in 8 bits, for which winners of other kinds are useless."""
        return p.mean_rows <= FEW_ROWS or copies_rows(p) or p.q8

    def carried(self, p: Any, q: Any, s: Schedule) -> Schedule:
        """The schedule with what is faster over pages, where `p` has none or others: scalars find the pages of a tile, and masked
        steps have a loop of their own.

        The other changes are those with which the compiler (13.5 on sm_90) gives a program warps that load, and few spills;
        without such warps, programs take up to 7 times as long (docs/results/serving.md). Few rows have two blocks in place of a
        step of two tiles of keys, whose pages fill the registers, and one loop where a tile of 128 x 128 has four pages. Many
        rows are not persistent, and have a latency hint where a tile has eight.
        """
        if not q.page or q.page == p.page:
            return s
        pages = s.number("tile_n") // q.page if q.page in SCALAR_PAGES else 1
        few, hint, apart = q.mean_rows <= FEW_ROWS, s.number("latency_k"), bool(s["loop_split"] or not p.page)
        if few:
            s = s.replace(kv_subtiles=1, occupancy=s.number("kv_subtiles") * s.number("occupancy"))
            apart = apart and (pages, s["tile_n"], q.tile_d) != (UNHINTED_PAGES, WIDE_TILE, WIDE_HEAD)
        else:
            s = s.replace(persistent="no", store_late=False)
        if pages > 1:
            hint = 0 if pages <= UNHINTED_PAGES else hint if few else 2
        return s.replace(loop_split=apart, page_lookup="scalar" if pages > 1 else "gather", latency_k=hint)

    def equivalents(self, p: Any, q: Any, s: Schedule) -> tuple[Schedule, ...]:
        """The schedule with a loop of its own for masked steps, where `s` has none. For few rows over keys in 8 bits, tiles of 16
        rows: those of 64, which serve 16 bits, write each value to shared memory once more, alone.

        Where no tile of keys is cut off, as on `p`, that loop changes nothing. On `q`, where one is, every step of `s` masks,
        which costs too much if there are many keys.
        """
        if q.kv8 and not p.kv8 and q.mean_rows <= FEW_ROWS:
            return tuple(
                s.replace(
                    tile_m=NARROW_ROWS,
                    tile_n=keys,
                    occupancy=blocks,
                    num_worker_warps=4,
                    loop_split=bool(q.page),
                    page_lookup="scalar" if q.page in (16, 32) else "gather",
                )
                for keys, blocks in NARROW_TILES
            )
        masked = any(skips_keys(each) or each.spanned for each in (p, q))
        if masked or s["loop_split"] or q.mean_rows <= FEW_ROWS or q.mean_keys <= FEW_KEYS:
            return ()
        turn = s.number("tile_n") * s.number("kv_subtiles") * steps_per_turn(s)
        return (s.replace(loop_split=True),) if p.seq_k % turn == 0 and q.seq_k % turn else ()

    def loss_group(self, p: Any) -> str:
        """The group of problems for which the loss of a transferred schedule was measured; none with optional features."""
        if p.has_features:
            return ""
        if p.mean_rows <= FEW_ROWS:
            return "few rows"
        if p.head_dim != p.tile_d or p.value_dim:
            return "padded heads"
        return "few keys" if p.mean_keys <= FEW_KEYS else "many keys"

    def cold_start(
        self, p: Any, default: Schedule, space: Any, estimate: Callable[[Schedule], float]
    ) -> Schedule | None:
        """The schedule that serves `p` where no similar problem was measured; None for the default schedule.

        With few rows, the model chooses splits, packing and tile height: for one row and 8 heads the default launches 8 blocks on
        a GPU of a hundred SMs. With many rows that are wide and copied by threads, tiles are small, which do not spill. With
        queries in 8 bits tiles are those that were fastest of a few on an H200, or, of wide rows, some that do not spill.
        """
        if p.q8:
            wide, long = max(p.tile_d, p.tile_v) > WIDE_HEAD, Q8_LONG_CAUSAL if p.causal else Q8_LONG_TILE
            tile: dict[str, Any] = Q8_WIDE_TILE if wide else long if is_long(p) else Q8_TILE
            masked = skips_keys(p) or p.spanned or p.seq_k % tile["tile_n"] != 0
            ahead = max(p.tile_d, p.tile_v) <= Q8_NARROW_HEAD and p.mean_keys > Q8_AHEAD_KEYS
            order = "swizzled" if p.causal else "natural"
            return default.replace(**{"loop_split": masked, "block_order": order, "qk_ahead": ahead} | tile)
        if p.mean_rows > FEW_ROWS:
            if p.tile_d <= WIDE_HEAD or not copies_rows(p):
                return None
            small = default.replace(tile_n=SMALL_TILE)
            return None if space.violations(small, p) else small
        varied = ("kv_splits", "kv_combine", "pack_gqa", "tile_m", "tma_loads")
        pinned = {name: value for name, value in default.items() if name not in varied}
        valid = [default, *space.limited_to(()).schedules(p, pinned=pinned)]
        return min(valid, key=lambda schedule: (estimate(schedule), schedule.id))


def copies_rows(p: Any) -> bool:
    """Whether threads copy rows of keys or values, because the TMA unit does not take rows of their width.

    Tiles that just fit the registers otherwise then spill, and compile for minutes.
    """
    return any(columns * p.key_bytes % ALIGNMENT for columns in (p.head_dim, p.value_columns))


def skips_keys(p: Any) -> bool:
    """Whether blocks of rows differ in how many keys they see: under a causal mask, and where lists say which keys are worth a
    visit. Both mask some steps, may have a loop of their own for these, and may start with the longest blocks.
    """
    return bool(p.causal or p.listed)


def is_long(p: Any) -> bool:
    """Whether tiles of 128 rows serve queries in 8 bits: those of 128 columns over many keys, in as many rows as were timed."""
    rows = p.sequences * p.heads * p.mean_rows
    return p.tile_d == WIDE_HEAD and not p.window and p.mean_keys > Q8_LONG_KEYS and rows >= Q8_LONG_ROWS


def octaves_apart(first: int, second: int) -> float:
    """Doublings between two sizes."""
    return abs(math.log2(first / second))


def feature_distance(p: Any, q: Any) -> float:
    """Octaves between the keys that a row sees, where a window bounds them, and one for each feature that only one has."""
    one, another = (
        min(each.window + each.window_right if each.window else each.mean_keys, each.mean_keys) for each in (p, q)
    )
    octaves = octaves_apart(one, another) if p.window or q.window else 0.0
    return octaves + sum(bool(getattr(p, name)) != bool(getattr(q, name)) for name in FEATURES)


def _about(length: int, decoding: bool = False) -> int:
    """A length within an eighth of `length` that stands for all such lengths.

    A short length or a round number stands for itself. A model that is decoding stops at each length, so that fewer numbers count
    as round. The length that stands for others is not round: what is valid for it is valid for lengths that divide nothing.
    """
    step = 1 << max(0, (length - 1).bit_length() - 4)
    if length <= FEW_ROWS or length % (max(32, step) if decoding else 32) == 0:
        return length
    return -(-length // step) * step - 1 if step > 1 else length
