"""Sequences that lie end to end (`CuQ`, `CuK`), and keys that lie in pages (`Table`): where a work tile's rows and keys are.

Only the entries `attention_placed*` are told of it. A packed sequence is a slice of the arrays: what lies beyond its end is
read as zeros and not written, as at the end of an array. A head has places for work tiles: sequence b those from
b + CuQ[b] // rows on, which are at least as many as it has work tiles, whatever the lengths of the others. So the grid follows
from sizes alone, a block finds its sequence by bisection, and there is one place too many for each sequence at most. (Counting
work tiles would waste none, but sums over a tile make the compiler start more warps, and with eight workers it gives up.) A
tile of keys takes several pages, or lies in one: where they lie is read from the table.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.attention.scheduler import coordinates, pack_count, rows_of_work


def place_in_sequence(place, block_rows, asked):
    """(place among a sequence's work tiles, sequence) of a head's place; beyond its work tiles, if it is one too many."""
    sequence, beyond = 0, asked.CuQ.shape[0] - 1
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if first_place(middle, block_rows, asked) <= place:
            sequence = middle
        else:
            beyond = middle
    return max(place - first_place(sequence, block_rows, asked), 0), sequence


def first_place(sequence, block_rows, asked):
    """A sequence's first place."""
    return sequence + ct.gather(asked.CuQ, (sequence,), check_bounds=False) // block_rows


def own_rows(array, offsets, sequence):
    """The rows of a sequence, out of an array that holds those of all."""
    rows = array.shape[2]
    begin = min(max(ct.gather(offsets, (sequence,), check_bounds=False), 0), rows)
    end = min(max(ct.gather(offsets, (sequence + 1,), check_bounds=False), begin), rows)
    return array.slice(axis=2, start=begin, stop=end)


def own_sequence(Q, K, V, work, work_tiles, asked, const):
    """(place among its work tiles, head, sequence, its queries, keys and values) of the `work`-th place of all heads."""
    place, head, _ = coordinates(work, work_tiles, pack_count(Q, const), 1, const)
    place, sequence = place_in_sequence(place, rows_of_work(const), asked)
    if const.PAGE == 0:
        K, V = own_rows(K, asked.CuK, sequence), own_rows(V, asked.CuK, sequence)
    return place, head, sequence, own_rows(Q, asked.CuQ, sequence), K, V


def is_filled(place, Q, const):
    """Whether there is a work tile in a place of a sequence, whose queries `Q` are."""
    return place * rows_of_work(const) < Q.shape[2]


def own_outputs(Out, Lse, sequence, asked):
    """The rows of a sequence in both outputs; `Lse` may be None."""
    if Lse is not None:
        Lse = own_rows(Lse, asked.CuQ, sequence)
    return own_rows(Out, asked.CuQ, sequence), Lse


def offset_in_pages(batch, seq_q, asked, const):
    """Keys that the first row sees before its own, where the last row ends at the last key of its sequence."""
    if const.BOTTOM_RIGHT:
        length = ct.gather(asked.Lengths, (batch,), check_bounds=False)
        return min(max(length, 0), asked.Table.shape[1] * const.PAGE) - seq_q
    return 0


def spans_pages(const):
    """Whether a tile of keys takes several pages, whole."""
    return const.PAGE > 0 and const.PAGE < const.TILE_N


def pages_of(keys, j, const):
    """(page, place in it) of the `j`-th key tile of a sequence; of several pages, a tile of them.

    What the table says beyond the last key is not trusted, and not followed: another's page may hold what is not finite.
    """
    if spans_pages(const):
        pages = const.TILE_N // const.PAGE
        first, last = j * pages, max(ct.cdiv(keys.span.end, const.PAGE) - 1, 0)
        each = ct.arange(pages, dtype=ct.int32)
        if const.PAGE_BY_PAGE:  # scalars are the loading warps' own work
            found = ct.full((pages,), 0, dtype=ct.int32)
            for n in ct.static_iter(range(pages)):
                found = ct.where(each == n, ct.astype(page_at(keys, min(first + n, last)), ct.int32), found)
            return found, 0
        found = ct.gather(keys.span.Table, (keys.batch, ct.minimum(first + each, last)), check_bounds=False)
        return ct.minimum(ct.maximum(found, 0), keys.K.shape[0] - 1).astype(ct.int32), 0
    tiles = const.PAGE // const.TILE_N
    return page_at(keys, j // tiles), j % tiles


def page_at(keys, place):
    """The page in a place of a sequence's row of the table."""
    page = ct.gather(keys.span.Table, (keys.batch, place), check_bounds=False)
    return min(max(page, 0), keys.K.shape[0] - 1)
