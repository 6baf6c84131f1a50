"""Inputs made to bring out what normally distributed ones hide: a rescale left out, a mask off by one, a narrow sum.

A head's queries, keys and values are of one *kind*. Scores below are those of the softmax: scale * q . k, in natural
units. Where a kind asks for scores, queries lie near a vector u of signs and keys at a multiple of it: u . u is head_dim,
so that the multiple t gives the score t * sqrt(head_dim).

Every kind is bounded so that a right kernel stays within the tolerances of the declaration: no
probability that matters is lost when P is rounded to float16 (6e-8 and less become 0), and no output leaves float16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

from tiledsched.core.arrays import LARGEST, storage_type, to_storage
from tiledsched.core.cases import Case, laid_out
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention.options import EIGHT_BITS
from tiledsched.kernels.attention.problem import padding_below
from tiledsched.kernels.attention.reference import by_row

KINDS = ("borders", "negative", "rising", "falling", "peaked", "large", "cancelling", "uniform")
"""In the order in which they are given to the heads; with few heads, the first are the ones that find most."""

CODES = 61
"""Query directions of `borders`: a prime, so that tile borders, multiples of 16, meet different ones."""
BORDER_SCORE = 12.0
RISE = 24.0
NEGATIVE_SCORE = -20.0
PEAKED_QUERIES = 8.0
LARGE_SCORE = 100.0
LARGE_VALUES = 2.0**14
LARGEST_VALUE = 60000.0
CANCELLING_SUM = 2048.0
SMALLEST_KV_SCALE = 1e-20
"""Stands for the largest of a part of keys or values in 8 bits, where all of them are 0."""
LARGEST_SINK = 4.0
TILE_SIZES = (16, 32, 64, 128, 256)
SHORT = (1, 0, 17, 64, 5, 33)
"""Lengths of the short packed sequences that lie next to a long one."""


def adversarial_case(xp: Any, rng: Any, p: Problem, reference: Callable[[dict[str, Any]], tuple[Any, ...]]) -> Case:
    """The case in which the heads take the kinds of inputs in turn.

    One reference serves all heads of a kind, unless they differ in sinks or keys.
    """
    kinds = kinds_of_heads(p)
    heads = xp.asarray(kinds)
    kv_heads = heads[:, :: p.group]
    if p.page:  # whose first axis is that of sequences, packed or not
        kv_heads = xp.repeat(kv_heads, p.sequences // p.batch, axis=0)
    given = places(rng, p, uneven=True)
    types = {"Q": p.q_dtype} | dict.fromkeys("KV", "float32" if p.kv8 else p.dtype)  # which are made narrow last
    distinct = {
        name: to_storage(xp, array, types[name])
        for name, array in zip("QKV", adversarial_heads(xp, rng, p, given), strict=True)
    }
    inputs = {name: xp.ascontiguousarray(array[heads if name == "Q" else kv_heads]) for name, array in distinct.items()}
    if p.sinks:  # of much weight and of little, in turn
        logits = xp.where(xp.arange(p.heads) % 2 == 0, LARGEST_SINK, -LARGEST_SINK)
        inputs["Sinks"] = to_storage(xp, logits.astype(numpy.float32), p.dtype)
    unused = unused_slots(xp, p, given)
    if unused is not None:
        nan = to_storage(xp, xp.full((), xp.nan, numpy.float32), types["K"])
        inputs |= {name: xp.where(unused[:, None, :, None], nan, inputs[name]) for name in "KV"}
    if p.page:
        inputs |= {name: in_pages(xp, inputs[name], given["Table"], p.page) for name in "KV"}
    for name in "KV" if p.kv8 else "":
        narrow, inputs[f"{name}Scale"] = in_eight_bits(xp, inputs[name], p)
        inputs[name] = laid_out(xp, narrow, p.declaration.array_spec(name, p))
    inputs |= {name: to_storage(xp, xp.asarray(array), "int32") for name, array in given.items()}
    if p.has_features:
        expected = reference(inputs)
    else:
        expected = tuple(each[0][heads] for each in reference({name: array[None] for name, array in distinct.items()}))
    return Case([KINDS[kind] for kind in kinds.reshape(-1).tolist()], inputs, expected)


def eight_bit_inputs(xp: Any, rng: Any, p: Problem) -> dict[str, Any]:
    """Random keys and values of about the normal distribution in 8 bits, and scales that differ by a factor of ten."""
    found: dict[str, Any] = {}
    for name, columns in (("K", p.head_dim), ("V", p.value_columns)):
        scales = (10.0 ** (rng.random(p.kv_scales, dtype=numpy.float32) - 2.0)).astype(numpy.float32)
        numbers = rng.standard_normal((p.key_entries, p.kv_heads, p.key_rows, columns), dtype=numpy.float32)
        numbers /= by_row(scales, p)
        found |= {name: numbers if p.q8 else in_words(xp, numbers, p), f"{name}Scale": scales}
    return found


def in_eight_bits(xp: Any, numbers: Any, p: Problem) -> tuple[Any, Any]:
    """Keys or values as words of four numbers in 8 bits, and the scales that let the largest number of each part just fit."""
    others = {"tensor": (0, 1, 2, 3), "head": (0, 2, 3), "page": (1, 2, 3)}[p.kv8]
    largest = xp.maximum(xp.nan_to_num(xp.abs(numbers)).max(axis=others).reshape(-1), SMALLEST_KV_SCALE)
    scales = (largest / LARGEST[EIGHT_BITS]).astype(numpy.float32)
    return in_words(xp, numbers / by_row(scales, p), p), scales


def in_words(xp: Any, numbers: Any, p: Problem) -> Any:
    """Numbers rounded to 8 bits, as elements of k or v: in words, unless queries have 8 bits, too."""
    return xp.ascontiguousarray(to_storage(xp, numbers, EIGHT_BITS)).view(storage_type(p.kv_dtype))


def places(rng: Any, p: Problem, *, uneven: bool = False) -> dict[str, Any]:
    """The arrays, by name, that say where sequences begin and end and where their pages lie. Only arrays of the problem are made.

    In a padded batch, one sequence takes all keys, and the others half of them or more. Packed sequences are about equally long.
    With `uneven`, all packed sequences but one are short, some are empty, and the last two sequences in pages have one key and no
    key.
    """
    found = {}
    for name, wanted in (("Starts", p.starts), ("Lengths", p.lengths)):
        if wanted:
            padding = rng.integers(0, padding_below(p), size=(p.sequences,))
            padding[0] = 0
            for sequence, keys in ((1, 0), (2, 1)) if p.page and uneven else ():
                if sequence < p.sequences:
                    padding[-sequence] = p.seq_k - keys
            found[name] = padding if name == "Starts" else p.seq_k - padding
    if not p.is_varlen:
        return found
    own = numpy.random.default_rng(int(rng.integers(0, 1 << 31)))  # on the host, whatever `rng` is
    if p.packed:
        found["CuQ"] = offsets(own, p.seq_q, p.packed, uneven=uneven)
    if p.packed and not p.page:
        same = p.seq_q == p.seq_k and not (uneven and p.alignment == "bottom_right")
        found["CuK"] = found["CuQ"] if same else offsets(own, p.seq_k, p.packed, uneven=uneven, first=1)
    if p.page:
        found["Table"] = own.permutation(p.key_entries).reshape(p.sequences, p.pages)
    return found


def unused_slots(xp: Any, p: Problem, given: dict[str, Any]) -> Any:
    """`[sequences, seq_k]`, bool: the slots of keys before a sequence's start or behind its length; None where there can be none.

    Serving engines leave such slots unwritten.
    """
    if not (p.starts or p.lengths):
        return None
    columns = xp.arange(p.seq_k)[None]
    first, end = (xp.asarray(given.get(name, default)) for name, default in (("Starts", 0), ("Lengths", p.seq_k)))
    return (columns < first.reshape(-1, 1)) | (columns >= end.reshape(-1, 1))


def offsets(rng: numpy.random.Generator, total: int, sequences: int, *, uneven: bool, first: int = 0) -> numpy.ndarray:
    """`[sequences + 1]`, int64: where each of the sequences that lie end to end begins, and where the last one ends.

    Args:
        rng: draws the lengths.
        total: rows of all sequences.
        sequences: number of sequences.
        uneven: whether one sequence is long and the others short; otherwise lengths differ by a factor of three at most.
        first: index of the short length to begin with.
    """
    if uneven:
        lengths = numpy.array([min(SHORT[(first + i) % len(SHORT)], total // sequences) for i in range(sequences)])
        lengths[sequences // 2] += total - lengths.sum()
        return numpy.concatenate([[0], lengths.cumsum()])
    weights = rng.uniform(0.5, 1.5, sequences).cumsum()
    return numpy.concatenate([[0], numpy.rint(weights / weights[-1] * total)]).astype(numpy.int64)


def in_pages(xp: Any, array: Any, table: Any, page: int) -> Any:
    """Keys or values `[sequences, kv_heads, seq_k, columns]` as pages `[pages, kv_heads, page, columns]`.

    The table `[sequences, pages of a sequence]` says where each page lies.
    """
    batch, heads, rows, columns = array.shape
    cut = array.reshape(batch, heads, rows // page, page, columns).swapaxes(1, 2).reshape(-1, heads, page, columns)
    pool = xp.empty_like(cut)
    pool[xp.asarray(table.reshape(-1))] = cut
    return pool


def kinds_of_heads(problem: Problem, count: int = len(KINDS)) -> numpy.ndarray:
    """`[batch, heads]`, int64: which of `count` kinds of inputs each query head has, an index into `KINDS`.

    Key/value heads take the kinds in turn, batch entry after batch entry; the query heads of a group follow theirs.
    """
    kv_heads = numpy.arange(problem.batch * problem.kv_heads).reshape(problem.batch, problem.kv_heads)
    return numpy.repeat(kv_heads % count, problem.group, axis=1)


def adversarial_heads(xp: Any, rng: Any, problem: Problem, given: dict[str, Any] | None = None) -> tuple[Any, Any, Any]:
    """One head of queries, keys and values for each kind that `problem` has key/value heads for.

    Heads of a kind are the same, so that one reference serves them all: that heads are told apart, the random inputs
    show.

    Args:
        xp: numpy or cupy.
        rng: a Generator of that module.
        problem: shapes, key count and where the diagonal of a causal mask lies; dtype does not matter.
        given: the arrays that :func:`places` returns.

    Returns:
        `[kinds, seq_q, head_dim]`, `[kinds, seq_k, head_dim]` and `[kinds, seq_k, value_columns]`, float32, in the order
        of `KINDS`.
    """
    count = min(len(KINDS), problem.batch * problem.kv_heads)
    queries = rng.standard_normal((count, problem.seq_q, problem.head_dim), dtype=numpy.float32)
    keys = rng.standard_normal((count, problem.seq_k, problem.head_dim), dtype=numpy.float32)
    values = rng.standard_normal((count, problem.seq_k, problem.value_columns), dtype=numpy.float32)
    signs = xp.where(rng.standard_normal((CODES, problem.head_dim), dtype=numpy.float32) < 0, -1.0, 1.0)
    signs = signs.astype(numpy.float32)
    for index, kind in enumerate(KINDS[:count]):
        for rows, columns in sequences(problem, given or {}):
            q, k, v = queries[index, rows], keys[index, columns], values[index, columns]
            if kind == "borders":
                diagonal = k.shape[0] - q.shape[0] if problem.alignment == "bottom_right" else 0
                _borders(xp, q, k, signs, diagonal)
            else:
                _SHAPE[kind](xp, q, k, v, signs)
    return queries, keys, values


def sequences(problem: Problem, given: dict[str, Any]) -> list[tuple[slice, slice]]:
    """The rows and keys of each packed sequence that has both; all rows and keys if no sequences are packed."""
    if "CuK" not in given:
        return [(slice(None), slice(None))]
    begins, keys = ([int(each) for each in given[name]] for name in ("CuQ", "CuK"))
    pairs = zip(itertools.pairwise(begins), itertools.pairwise(keys), strict=True)
    return [(slice(*rows), slice(*columns)) for rows, columns in pairs if rows[0] < rows[1] and columns[0] < columns[1]]


def border_keys(seq_k: int) -> list[int]:
    """The keys on both sides of the first, second and last border between key tiles of each size, and the last key."""
    borders = {size * number for size in TILE_SIZES for number in (1, 2, (seq_k - 1) // size)}
    doubling = {1 << power for power in range(4, seq_k.bit_length())}
    beside = {key for border in borders | doubling for key in (border - 1, border)}
    return sorted({key for key in beside if 0 <= key < seq_k} | {seq_k - 1})


# Each function below is given one head's standard normal q `[seq_q, head_dim]`, k `[seq_k, head_dim]` and v `[seq_k,
# value_columns]`, and changes them in place. `signs` is `[CODES, head_dim]`, each element 1 or -1.


def _borders(xp: Any, q: Any, k: Any, signs: Any, diagonal: int) -> None:
    """One key beside a tile border outweighs the rest: the last that a row may see when causal, or the first it may not.

    The last key that row i may see is p = i + diagonal, and it looks in direction p % CODES. The key at border position p
    answers to the directions of that row and of the one before, which must not see it when causal; other rows of both
    directions see it alike.
    """
    _near(xp, q, signs[(xp.arange(q.shape[0]) + diagonal) % CODES])
    per_key = BORDER_SCORE / q.shape[1] ** 0.5
    for key in border_keys(k.shape[0]):
        k[key] = per_key * (signs[(key - 1) % CODES] + signs[key % CODES])


def _negative(xp: Any, q: Any, k: Any, v: Any, signs: Any) -> None:
    """All scores near -20: one key of padding, whose score is 0, outweighs a hundred million of them."""
    _near(xp, q, signs[0])
    k *= 0.5
    k += NEGATIVE_SCORE / q.shape[1] ** 0.5 * signs[0]


def _ramp(first: float, last: float, xp: Any, q: Any, k: Any, v: Any, signs: Any) -> None:
    """Scores go from one number at the first key to another at the last."""
    _near(xp, q, signs[0])
    k *= 0.02
    scores = xp.linspace(first, last, k.shape[0], dtype=numpy.float32)
    k += (scores / q.shape[1] ** 0.5)[:, None] * signs[0]


def peaked(xp: Any, q: Any, *others: Any) -> None:
    """Scores of standard deviation 8: one key or a few decide each row, others for each row."""
    q *= PEAKED_QUERIES


def _large(xp: Any, q: Any, k: Any, v: Any, signs: Any) -> None:
    """Values up to 60000, where float16 ends at 65504: their average fits, a sum that is not yet divided does not.

    All scores are near 100, and their differences as at random: without the row's maximum, exponentials overflow in float32.
    """
    q *= 0.5
    q += signs[0]
    k += LARGE_SCORE / q.shape[1] ** 0.5 * signs[0]
    v *= LARGE_VALUES
    xp.clip(v, -LARGEST_VALUE, LARGEST_VALUE, out=v)


def _cancelling(xp: Any, q: Any, k: Any, v: Any, signs: Any) -> None:
    """Within q . k, the first quarter of the columns adds 2048 and the last takes it away; the sign changes by key.

    What lies between decides the score, and a narrow accumulator has lost it by then.
    """
    quarter = q.shape[1] // 4
    if quarter == 0:
        return
    size = (CANCELLING_SUM / quarter) ** 0.5
    sign = xp.where(xp.arange(k.shape[0]) % 2 == 0, size, -size).astype(numpy.float32)[:, None]
    q[:, :quarter] = q[:, -quarter:] = size
    k[:, :quarter] = sign
    k[:, -quarter:] = -sign
    q[:, quarter:-quarter] *= 2.0**0.5  # half the columns are left to make scores of standard deviation 1


def uniform(xp: Any, q: Any, *others: Any) -> None:
    """Queries are zero, so that every key that is seen counts the same."""
    q[...] = 0.0


def _near(xp: Any, q: Any, direction: Any) -> None:
    q *= 0.1
    q += direction


_SHAPE: dict[str, Callable[..., None]] = {
    "negative": _negative,
    # Every key tile raises the row maximum, and rescales what was.
    "rising": partial(_ramp, 0.0, RISE),
    # The first tile has the maximum, and most probabilities underflow.
    "falling": partial(_ramp, RISE, 0.0),
    "peaked": peaked,
    "large": _large,
    "cancelling": _cancelling,
    "uniform": uniform,
}
