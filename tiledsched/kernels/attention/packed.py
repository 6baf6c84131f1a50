"""Where a work tile's rows and keys are, for sequences that lie end to end (`CuQ`, `CuK`) and for keys in pages (`Table`).

Only the kernels `attention_varlen*` know packed sequences and pages. A packed sequence is a slice of the arrays: elements beyond
its end are read as zeros and not written, as at the end of an array.

Each head has a list of places for work tiles. The places of sequence b begin at b + CuQ[b] // rows. They are at least as many as
the sequence has work tiles, whatever the lengths of the other sequences. So the grid follows from sizes alone, a block finds
its sequence by bisection, and each sequence has at most one place too many. (Counting work tiles would waste no place, but sums
over a tile make the compiler start more warps, and with eight workers it gives up.)

A tile of keys takes several pages, or lies in one page. The table says which.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct

from tiledsched.kernels.attention.scheduler import coordinates, pack_count, rows_of_work


def place_in_sequence(place, block_rows, features):
    """(place among the sequence's work tiles, sequence) of a place of a head. A sequence's last place may be empty."""
    sequence, beyond = 0, features.CuQ.shape[0] - 1
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        if first_place(middle, block_rows, features) <= place:
            sequence = middle
        else:
            beyond = middle
    return max(place - first_place(sequence, block_rows, features), 0), sequence


def first_place(sequence, block_rows, features):
    """The first place of a sequence in the list of a head."""
    return sequence + ct.gather(features.CuQ, (sequence,), check_bounds=False) // block_rows


def own_rows(array, offsets, sequence):
    """The rows of one sequence, as a slice of an array that holds the rows of all sequences."""
    rows = array.shape[2]
    begin = min(max(ct.gather(offsets, (sequence,), check_bounds=False), 0), rows)
    end = min(max(ct.gather(offsets, (sequence + 1,), check_bounds=False), begin), rows)
    return array.slice(axis=2, start=begin, stop=end)


def own_work(Q, K, V, work, work_tiles, features, const):
    """(place among the sequence's work tiles, head, sequence, queries, keys, values) of the `work`-th place of all heads."""
    batches = 1 if const.PACKED else Q.shape[0]
    place, head, sequence = coordinates(work, work_tiles, pack_count(Q, const), batches, const)
    if const.PACKED:
        place, sequence = place_in_sequence(place, rows_of_work(const), features)
        if const.PAGE == 0:
            K, V = own_rows(K, features.CuK, sequence), own_rows(V, features.CuK, sequence)
        Q = own_rows(Q, features.CuQ, sequence)
    return place, head, sequence, Q, K, V


def is_filled(place, Q, const):
    """Whether a place of the sequence with queries `Q` holds a work tile."""
    return place * rows_of_work(const) < Q.shape[2]


def own_outputs(Out, Lse, sequence, features):
    """The rows of one sequence in both outputs; `Lse` may be None."""
    if Lse is not None:
        Lse = own_rows(Lse, features.CuQ, sequence)
    return own_rows(Out, features.CuQ, sequence), Lse


def offset_in_pages(batch, seq_q, features, const):
    """Keys before the first row's own key: with BOTTOM_RIGHT, the last row's own key is the last key of its sequence."""
    if const.BOTTOM_RIGHT:
        length = ct.gather(features.Lengths, (batch,), check_bounds=False)
        return min(max(length, 0), features.Table.shape[1] * const.PAGE) - seq_q
    return 0


def spans_pages(const):
    """Whether a tile of keys takes several whole pages."""
    return const.PAGE > 0 and const.PAGE < const.TILE_N


def pages_of(keys, j, const):
    """(page, place in the page) of the `j`-th key tile of a sequence; where a tile takes several pages, a tile of pages.

    Entries of the table beyond the last key are not followed: the page of another sequence may hold values that are not finite.
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
    """The page number at one place of a sequence's row of the table."""
    page = ct.gather(keys.span.Table, (keys.batch, place), check_bounds=False)
    return min(max(page, 0), keys.K.shape[0] - 1)
