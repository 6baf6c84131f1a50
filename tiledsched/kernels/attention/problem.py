"""What follows from the sizes of an attention problem, and the sizes that people mean by a sequence length alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiledsched.core.arrays import ALIGNMENT, LARGEST_INT32
from tiledsched.core.errors import ProblemError
from tiledsched.core.fields import ITEM_BYTES, Value
from tiledsched.kernels.attention.options import ALIGNMENTS, EIGHT_BITS, FIELDS, feature_words
from tiledsched.kernels.attention.scales import DEFAULT_CAP, default_scale
from tiledsched.kernels.attention.similarity import FEW_ROWS

NARROWEST_PLANE = 32
"""Columns of the narrowest product with a part of the columns of keys or values in 8 bits. Four warps share 32 columns."""
SMALLEST_PAGE = 16
"""The keys of a page are a multiple of this number."""
REPRESENTATIVE_KEYS, REPRESENTATIVE_SEQUENCES = 8192, 2
"""Keys of a sequence, and sequences that decode together, in the problem that stands for all lengths and batches."""
TOKENS = 16 * 1024
"""Tokens in the default problem: batch * seq_q. The convention of the FlashAttention papers."""
HIDDEN = 2048
"""heads * head_dim in the default problem, from the same papers."""


def canonical(values: dict[str, Value]) -> dict[str, Value]:
    """The values that stand for all equivalent ways to state a problem.

    value_dim = head_dim is stored as 0. What hides nothing is stored as no mask: a window of as many keys as there are, and a
    causal mask where the first row sees the last key, as a single row does that is aligned at the bottom right. Keys that a
    row could see beyond the last one do not count in window_right. Of two alignments that say the same, as where seq_q = seq_k,
    the one is stored that needs no window_right, top_left before bottom_right; without a causal mask it is top_left.

    Of packed sequences and pages only the device knows the lengths, which are at most all rows and all keys. That alone is used,
    so that one packed sequence, or one page for each sequence, is a problem of its own.

    Raises:
        ProblemError: heads is not a multiple of kv_heads, a window has no causal mask, or packed sequences or pages contradict
            other fields.
    """
    heads, kv_heads = int(values["heads"]), int(values["kv_heads"])  # type: ignore[arg-type]
    if heads % kv_heads:
        raise ProblemError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads}); repeat or drop heads")
    changed: dict[str, Value] = {}
    if values["value_dim"] == values["head_dim"]:
        changed["value_dim"] = 0
    _check_places(values)
    if not values["causal"]:
        changed["alignment"] = "top_left"
    if values["window"] and not values["causal"]:
        raise ProblemError(f"window = {values['window']} needs causal: row i sees the last keys up to its own")
    if values["window_right"] and not values["causal"]:
        raise ProblemError(
            f"window_right = {values['window_right']} needs causal: row i sees so many keys after its own"
        )
    if values["causal"]:
        rows, keys, window, right = (int(values[name]) for name in ("seq_q", "seq_k", "window", "window_right"))  # type: ignore[arg-type]
        alignment, window, right = hiding_mask(str(values["alignment"]), window, right, rows, keys)
        if alignment and not (values["packed"] or values["page"]):
            alignment, window, right = _usual_alignment(alignment, window, right, keys - rows)
        changed |= {
            "causal": alignment is not None,
            "alignment": alignment or "top_left",
            "window": window,
            "window_right": right,
        }
    return {**values, **changed}


def hiding_mask(alignment: str, window: int, window_right: int, rows: int, keys: int) -> tuple[str | None, int, int]:
    """What a causal mask hides of so many rows and keys, or fewer: its alignment, or None where it hides nothing; its window, 0
    where that hides nothing; and the keys after its own that a row sees.
    """
    bottom_right = alignment == "bottom_right"
    window = 0 if window >= (keys if bottom_right else rows) else window
    all_after = (rows if bottom_right else keys) - 1  # with which the first row sees the last key
    if window or window_right < all_after:
        return alignment, window, min(window_right, all_after)
    return None, 0, 0


def _usual_alignment(alignment: str, window: int, window_right: int, offset: int) -> tuple[str, int, int]:
    """The usual one of the two ways to state a mask, whose diagonals lie `offset` keys apart: that in which a row sees no keys
    after its own, at the top left if both are, else that of FlashAttention's windows, at the bottom right.
    """
    shift = offset if alignment == "bottom_right" else -offset
    stated = {alignment: (window, window_right)}
    if window_right + shift >= 0 and (not window or window - shift > 0):
        other = "top_left" if alignment == "bottom_right" else "bottom_right"
        stated[other] = (window and window - shift, window_right + shift)
    plain = [each for each in ALIGNMENTS if each in stated and not stated[each][1]]
    usual = (
        plain[0]
        if plain
        else "bottom_right"
        if "bottom_right" in stated and offset
        else min(stated, key=ALIGNMENTS.index)
    )
    return usual, *stated[usual]


def _check_places(values: dict[str, Value]) -> None:
    """Raise ProblemError if packed sequences or pages contradict other fields."""
    packed, page = int(values["packed"]), int(values["page"])  # type: ignore[arg-type]
    if packed and values["batch"] != 1:
        raise ProblemError(
            f"packed = {packed} sequences lie in a batch of 1, got batch = {values['batch']}; leave it out"
        )
    if page and not values["lengths"]:
        raise ProblemError(f"page = {page} needs lengths: what a page holds beyond its sequence's keys is not theirs")
    if ((packed or page) and values["starts"]) or (packed and not page and values["lengths"]):
        raise ProblemError("starts and lengths are not for packed sequences, nor starts for pages; leave them out")
    if values.get("kv8") and not values["q8"]:
        _check_words(values)
    if values.get("q8") and (reason := unfit_for_q8(values)):
        raise ProblemError(reason)
    if page % SMALLEST_PAGE:
        raise ProblemError(f"page must be a multiple of {SMALLEST_PAGE}, the narrowest side of a product, got {page}")
    if page and int(values["seq_k"]) % page:  # type: ignore[arg-type]
        raise ProblemError(f"seq_k = {values['seq_k']} must be whole pages of {page}; give a multiple of it")


def _check_words(values: dict[str, Value]) -> None:
    """Raise ProblemError if keys and values in 8 bits do not come in words, or have scales for pages that there are not."""
    if values["kv8"] == "page" and not values["page"]:
        raise ProblemError("kv8 = 'page' needs keys in pages; give page, or use kv8 = 'head' or 'tensor'")
    columns = [int(values[name] or values["head_dim"]) for name in ("head_dim", "value_dim")]  # type: ignore[arg-type]
    numbers, _ = words_of(*columns)
    if any(each % numbers for each in columns):
        raise ProblemError(
            f"rows of keys and values in 8 bits are whole words of {numbers} numbers, got {columns[0]} and {columns[1]} "
            f"columns; pad them with zeros to a multiple of {numbers}"
        )


def unfit_for_q8(values: Mapping[str, Any]) -> str:
    """Why there is no kernel with queries in 8 bits for the values of a problem; empty where there is one."""
    if values["kv8"] not in ("tensor", "head") or values["dtype"] != "bfloat16":
        return (
            "queries in 8 bits need kv8 = 'tensor' or 'head', and dtype = 'bfloat16', which is the type of the output"
        )
    if values["seq_q"] <= FEW_ROWS:
        return (
            f"queries in 8 bits are for more than {FEW_ROWS} rows, got {values['seq_q']}; few are as fast in bfloat16"
        )
    sizes = {name: values[name] for name in ("seq_k", "head_dim", "value_dim") if values[name] % ALIGNMENT}
    wrong = sizes | {name: values[name] for name in ("page", "packed", "starts", "softcap") if values[name]}
    return (
        f"queries in 8 bits are for sizes of whole {ALIGNMENT} bytes, without page, packed, starts and softcap, got "
        f"{', '.join(f'{name} = {value}' for name, value in wrong.items())}; give queries in bfloat16"
        if wrong
        else ""
    )


def words_of(head_dim: int, value_columns: int) -> tuple[int, str]:
    """How many numbers of 8 bits an element of k or v holds, the first in its lowest byte, and the type of such elements.

    The compiler reads words from shared memory whole, and numbers one by one. Each product takes one number of each word, and has
    32 columns at least.
    """
    numbers = min(4, min(padded(head_dim), padded(value_columns)) // NARROWEST_PLANE) or 1
    return numbers, {1: "int8", 2: "int16", 4: "int32"}[numbers]


def visible_pairs(p: Any) -> float:
    """Query-key pairs that contribute, per head.

    They are seq_q * seq_k, the area under the causal diagonal, or the part of that area that a window leaves. Packed sequences
    count as equally long, and sequences that start late or end early as full ones.
    """
    rows, keys = p.mean_rows, p.mean_keys
    if not p.causal:
        return float(p.seq_q * keys)
    under = _area_under(rows, keys, _diagonal(p) + p.window_right)
    return max(1, p.packed) * (under - _area_under(rows, keys, _diagonal(p) - p.window) if p.window else under)


def _diagonal(p: Any) -> int:
    """Keys that the first row sees before its own key."""
    return int(p.mean_keys - p.mean_rows) if p.alignment == "bottom_right" else 0


def _area_under(rows: int, columns: int, diagonal: int) -> float:
    """Area of the part of a rectangle where column < row + diagonal."""
    rising = max(0, min(rows, columns - diagonal)) - max(0, -diagonal)  # rows that end at the diagonal
    if rising <= 0:
        return (
            float(rows * columns) if columns <= diagonal else max(0, rows - max(0, columns - diagonal)) * float(columns)
        )
    first = max(0, diagonal)
    return rising * first + rising * rising / 2 + max(0, rows - max(0, -diagonal) - rising) * float(columns)


def hidden_keys(p: Any) -> int:
    """Keys at the beginning that lie before the first row's window, so that no row sees them."""
    return min(int(p.mean_keys), max(0, _diagonal(p) + 1 - p.window)) if p.window else 0


def padding_below(p: Any) -> int:
    """Padding at one end of a sequence is drawn below this number of keys, a quarter of all."""
    return max(1, int(p.seq_k) // 4)


def padding_keys(p: Any) -> float:
    """Mean number of keys of a sequence that are padding, as inputs are drawn. The first sequence has no padding."""
    return float((p.starts + p.lengths) * (padding_below(p) - 1) / 2 * (p.sequences - 1) / p.sequences)


def is_wide(p: Any) -> bool:
    """Whether some array has elements beyond the reach of a 32-bit index."""
    columns = max(p.head_dim, p.value_columns)
    keys = p.kv_heads * p.key_entries * p.key_rows * (columns // p.numbers)
    return bool(max(p.batch * p.heads * p.seq_q * columns, keys) > LARGEST_INT32)


def padded(columns: int) -> int:
    """The number of columns rounded up to a power of two, at least 16, the narrowest side of a matrix product."""
    return max(16, 1 << (columns - 1).bit_length())


def two_parts(columns: int) -> tuple[int, int]:
    """The one or two powers of two that hold `columns` with least padding: (64, 32) for 96, and (128, 0) for 100."""
    first = max(16, 1 << (columns.bit_length() - 1))
    second = padded(columns - first) if columns > first else 0
    return (first, second) if first + second < padded(columns) else (padded(columns), 0)


DERIVED = {
    "group": lambda p: p.heads // p.kv_heads,  # query heads per key/value head
    "group_rows": lambda p: (
        1 << (p.heads // p.kv_heads - 1).bit_length()
    ),  # rows of a tile for one query of each of them
    "value_columns": lambda p: p.value_dim or p.head_dim,  # columns of v and the output
    "tile_d": lambda p: padded(p.head_dim),  # what the kernel pads to on chip
    "tile_v": lambda p: padded(p.value_columns),
    "parts_d": lambda p: two_parts(p.head_dim),  # two powers of two that hold it in fewer columns than tile_d
    "parts_v": lambda p: two_parts(p.value_columns),
    "split_d": lambda p: sum(p.parts_d),
    "split_v": lambda p: sum(p.parts_v),
    "q_dtype": lambda p: EIGHT_BITS if p.q8 else p.dtype,
    "element_bytes": lambda p: ITEM_BYTES[p.q_dtype],
    "eight_bits": lambda p: bool(p.kv8),  # whether keys and values have 8 bits
    # Numbers in an element of k or v.
    "numbers": lambda p: words_of(p.head_dim, p.value_columns)[0] if p.kv8 and not p.q8 else 1,
    "kv_dtype": lambda p: words_of(p.head_dim, p.value_columns)[1] if p.kv8 and not p.q8 else p.q_dtype,
    "v_layout": lambda p: "column" if p.q8 else "row",
    "key_type": lambda p: EIGHT_BITS if p.kv8 else p.dtype,  # of the numbers in them
    "key_bytes": lambda p: ITEM_BYTES[p.key_type],
    "key_elements": lambda p: p.head_dim // p.numbers,  # elements of a row of k and of v
    "value_elements": lambda p: p.value_columns // p.numbers,
    "kv_scales": lambda p: {"head": p.kv_heads, "page": p.key_entries}.get(p.kv8, 1),
    "wide": is_wide,
    "visible_pairs": visible_pairs,
    "key_unit": lambda p: p.page or (ALIGNMENT if p.q8 else 1),  # of which the number of keys is a multiple
    "past_keys": lambda p: p.seq_k + 1,  # what lengths lie below
    "has_features": lambda p: any(
        getattr(p, name) for name in FIELDS if name != "page"
    ),  # whether it is more than plain attention
    "is_varlen": lambda p: bool(p.packed or p.page),  # whether sequences do not lie one in each entry of a batch
    "score_mod": lambda p: False,  # whether a function of an author's changes scores, and one hides keys
    "mask_mod": lambda p: False,
    "listed": lambda p: False,  # whether there are lists of the blocks that are not empty
    "spanned": lambda p: bool(
        p.window or p.starts or p.lengths or p.packed
    ),  # whether masks hide keys beside the causal one
    "ends_q": lambda p: bool(p.packed),  # which offsets of packed sequences are given
    "ends_k": lambda p: bool(p.packed and not p.page),
    "paged": lambda p: bool(p.page),
    "sequences": lambda p: p.packed or p.batch,
    "offsets": lambda p: p.packed + 1,
    "pages": lambda p: p.seq_k // max(1, p.page),  # of a sequence
    "key_entries": lambda p: (
        (p.packed or p.batch) * (p.seq_k // p.page) if p.page else p.batch
    ),  # first axis of k and v
    "key_rows": lambda p: p.page or p.seq_k,  # and their third
    "mean_rows": lambda p: -(-p.seq_q // max(1, p.packed)),  # query rows of a sequence
    "mean_keys": lambda p: p.seq_k if p.page else -(-p.seq_k // max(1, p.packed)),
}
"""What constraints, shapes and host code read of a problem in addition to its fields."""


def representative(p: Any) -> Any:
    """The problem that stands for all batches, lengths and chunks that share their bits with `p`: single rows decode, and two or
    more rows of a sequence are a part of its prompt.

    One row that is aligned at the last key has no causal mask, so that both kinds differ in more than in sizes.
    """
    keys = max(REPRESENTATIVE_KEYS, 2 * (p.window + p.window_right))
    keys += -keys % p.key_unit
    sequences, rows = (REPRESENTATIVE_SEQUENCES, 1) if p.mean_rows == 1 else (1, keys)
    if p.packed:
        together = max(2, sequences)
        return p.replace(seq_q=rows * together, seq_k=keys * (1 if p.page else together), packed=together)
    return p.replace(batch=sequences, seq_q=rows, seq_k=keys)


def row_dims(p: Any) -> tuple[str, ...]:
    """The batch dims along which the results of `p` are the first ones of a larger problem.

    Rows may follow where the mask does not move with them, and keys where a row does not see them.
    """
    rows = ("seq_q",) if p.alignment == "top_left" else ()
    keys = ("seq_k",) if rows and p.causal and not p.window_right else ()
    return (() if p.packed else ("batch",)) + rows + keys


def flops(p: Any) -> float:
    """Floating-point operations of the two products; causal counts half, as in FlashAttention's benchmarks."""
    return float(2.0 * p.batch * p.heads * p.visible_pairs * (p.head_dim + p.value_columns))


def describe(p: Any) -> str:
    """The problem in one line: `B=4 H=16 S=4096 D=128 float16 causal`."""
    seq = f"S={p.seq_q}" if p.seq_q == p.seq_k else f"Sq={p.seq_q} Sk={p.seq_k}"
    heads = f"H={p.heads}" if p.heads == p.kv_heads else f"H={p.heads}/{p.kv_heads}"
    columns = f"D={p.head_dim}/{p.value_dim}" if p.value_dim else f"D={p.head_dim}"
    mask = " causal" if p.causal else ""
    mask += " bottom-right" if p.alignment == "bottom_right" else ""
    more = feature_words(p, " ", "=", "+") + (" +lse" if p.lse else "")
    return f"B={p.batch} {heads} {seq} {columns} {p.dtype}{mask}{more}"


def file_words(p: Any) -> str:
    """The problem in the name of a file: `s4096_d128_float16_causal_b4_h16`."""
    seq = f"s{p.seq_q}" if p.seq_q == p.seq_k else f"sq{p.seq_q}_sk{p.seq_k}"
    heads = f"h{p.heads}" if p.heads == p.kv_heads else f"h{p.heads}-{p.kv_heads}"
    mask = "full" if not p.causal else "causal" if p.alignment == "top_left" else "bottom-right"
    columns = f"d{p.head_dim}-{p.value_dim}" if p.value_dim else f"d{p.head_dim}"
    more = feature_words(p, "_", "", "") + ("_lse" if p.lse else "")
    return f"{seq}_{columns}_{p.dtype}_{mask}_b{p.batch}_{heads}{more}"


def mask_of(p: Any) -> dict[str, Any]:
    """The arguments of the reference, of forward as of the gradients, that say what a row sees and how scores are made."""
    return {
        "causal": p.causal,
        "scale": default_scale(p),
        "alignment": p.alignment,
        "window": p.window,
        "window_right": p.window_right,
        "cap": DEFAULT_CAP if p.softcap else 0.0,
    }


def standard(
    *,
    seq_len: int,
    head_dim: int,
    dtype: str = "float16",
    causal: bool = False,
    batch: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> dict[str, Any]:
    """The values of the problem that people mean by a sequence length and a head dimension alone.

    Unless given, batch and heads fill 16k tokens of 2048 hidden columns, the convention of the FlashAttention benchmarks (Dao,
    arXiv:2307.08691, section 4.1), so that every sequence length does comparable work.
    """
    heads = heads if heads is not None else max(1, HIDDEN // head_dim)
    return {
        "seq_q": seq_len,
        "seq_k": seq_len,
        "head_dim": head_dim,
        "dtype": dtype,
        "causal": causal,
        "batch": batch if batch is not None else max(1, TOKENS // seq_len),
        "heads": heads,
        "kv_heads": kv_heads if kv_heads is not None else heads,
    }
