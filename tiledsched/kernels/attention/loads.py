"""Loads for functions of scores and masks: what a whole tile of scores needs at once, instead of its elements one by one."""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import cuda.tile as ct


def load_tile(array, indices):
    """What `ct.gather(array, indices)` gives where the last two indices are `q_idx` and `kv_idx` themselves, in far less time.

    .. code-block:: python

        def dense_bias(score, b, h, q_idx, kv_idx, bias):
            return score + tiledsched.load_tile(bias, (b, h, q_idx, kv_idx))

    For the functions of `tiledsched.flex`. The TMA unit loads the part of the array as it lies in memory, if its rows begin at
    multiples of 16 bytes; a gather takes each element by itself.

    Args:
        array: of two or more axes, the last two of them rows and keys.
        indices: a tuple with an index for each axis; the leading ones integers.

    Returns:
        The elements, `[rows, keys]`, or `[keys, rows]` where the tile of scores lies that way. Beyond the ends of rows and keys
        they are zero.
    """
    leading, q_idx, kv_idx = indices[:-2], indices[-2], indices[-1]
    rows, keys = q_idx.shape[0] * q_idx.shape[1], kv_idx.shape[0] * kv_idx.shape[1]
    zero, several = ct.full((1,), 0, dtype=ct.int32), False
    for each in ct.static_iter(leading):
        several = several or (each + zero).ndim > 1
    if several or rows & (rows - 1) or keys & (keys - 1):  # rows of several heads, or no tile of a kernel
        found = ct.gather(array, indices)
    else:  # a tile whose sides are powers of two begins at a multiple of them, as all tiles of the kernels do
        row = min(first_of(q_idx) // rows, ct.cdiv(array.shape[array.ndim - 2], rows) - 1)
        key = min(first_of(kv_idx) // keys, ct.cdiv(array.shape[array.ndim - 1], keys) - 1)
        ones, order = ct.static_eval((1,) * len(leading)), ct.static_eval(tuple(range(len(leading))))
        zeros = ct.PaddingMode.ZERO
        if kv_idx.shape[0] == 1:
            found = ct.load(array, (*leading, row, key), (*ones, rows, keys), padding_mode=zeros)
            found = found.reshape((rows, keys))
        else:
            last = ct.static_eval(len(leading))
            found = ct.load(
                array, (*leading, key, row), (*ones, keys, rows), order=(*order, last + 1, last), padding_mode=zeros
            )
            found = found.reshape((keys, rows))
    return found


def load_by_distance(table, h, q_idx, kv_idx):
    """A number of each head for the distance of a key from a row: `table[h, furthest + kv_idx - q_idx]`, where distances beyond
    `furthest` count as `furthest`.

    .. code-block:: python

        def relative_bias(score, b, h, q_idx, kv_idx, table):
            return score + tiledsched.load_by_distance(table, h, q_idx, kv_idx)

    For the functions of `tiledsched.flex`. Where all keys of a tile are further from all its rows, one number is loaded.

    Args:
        table: `[heads, 2 * furthest + 1]`.
        h, q_idx, kv_idx: as the function is given them.

    Returns:
        The numbers, of the shape of the tile of scores.
    """
    furthest = table.shape[1] // 2
    rows, keys = q_idx.shape[0] * q_idx.shape[1], kv_idx.shape[0] * kv_idx.shape[1]
    first = first_of(kv_idx) - first_of(q_idx)
    if first - rows >= furthest or first + keys <= -furthest:
        found = ct.gather(table, (h, furthest + min(max(first, -furthest), furthest)))
        found = ct.broadcast_to(found, (kv_idx - q_idx).shape)
    else:
        found = gather_by_distance(table, h, q_idx, kv_idx)
    return found


def first_of(places):
    """The first number of rows or keys, as a scalar."""
    return ct.extract(places, (0, 0), (1, 1)).item()


def gather_tile(array, indices):
    """:func:`load_tile` by its definition."""
    return ct.gather(array, indices)


def gather_by_distance(table, h, q_idx, kv_idx):
    """:func:`load_by_distance` by its definition."""
    furthest = table.shape[1] // 2
    place = ct.minimum(ct.maximum(kv_idx - q_idx, -furthest), furthest) + furthest
    return ct.gather(table, (ct.minimum(h, table.shape[0] - 1), place))


DEFINITIONS = {load_tile: gather_tile, load_by_distance: gather_by_distance}
"""What an author's functions may load with -> what takes its place in references."""
