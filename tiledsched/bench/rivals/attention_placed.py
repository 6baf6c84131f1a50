"""Packed sequences, and keys in pages: their inputs, how our own functions are called on them, and the parts of one
sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiledsched.bench.methods import Call
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention.rivals import heads_first, longest, rows_first
from tiledsched.kernels.attention.scales import DEFAULT_CAP


def features_of(arrays: Any) -> Any:
    """The features that the public functions read from an `AttentionArrays`. The longest sequence is read from the
    device.
    """
    from tiledsched.ops.features import AttentionFeatures

    p: Problem = arrays.problem
    there = {
        "sinks": p.sinks,
        "key_lengths": p.lengths,
        "cu_seqlens_q": p.ends_q,
        "cu_seqlens_k": p.ends_k,
        "block_table": p.paged,
    }
    given = dict(zip([name for name, wanted in there.items() if wanted], arrays.feature_arrays, strict=True))
    most = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest(p, arrays.tensors), strict=False))
    return AttentionFeatures(
        window=p.window, window_right=p.window_right, softcap=DEFAULT_CAP if p.softcap else 0.0, **given, **most
    )


def found_plan(arrays: Any) -> Any:
    """The plan that the public functions find.

    Raises:
        UnsupportedError: they leave the problem to torch.
    """
    found = arrays.call.find_plan()
    if isinstance(found, str):
        raise UnsupportedError(found)
    return found


def served_placed(arrays: Any) -> Call:
    """`sdpa_varlen` or `sdpa_paged`, whatever they run.

    Raises:
        UnsupportedError: they have no such problem, or leave it to torch.
    """
    from tiledsched.ops.varlen import sdpa_paged, sdpa_varlen

    p: Problem = arrays.problem
    if p.window_right and p.alignment != "bottom_right":
        raise UnsupportedError("a window of two sides is aligned at each sequence's last key")
    found_plan(arrays)
    features = arrays.call.features
    q, k, v = rows_first(p, arrays.q, arrays.k, arrays.v)
    more: dict[str, Any] = {
        "causal": p.alignment if p.causal and not p.window_right else False,
        "sinks": features.sinks,
        "window": (p.window - 1, p.window_right) if p.window_right else p.window or None,
        "softcap": features.softcap or None,
    }
    if not p.packed:
        return lambda: heads_first(sdpa_paged(q, k, v, features.block_table, features.key_lengths, **more))
    if p.page:
        more |= {"block_table": features.block_table, "seqused_k": features.key_lengths}
    lies = (features.cu_seqlens_q, features.cu_seqlens_k, features.max_seqlen_q, features.max_seqlen_k)
    return lambda: heads_first(sdpa_varlen(q, k, v, *lies, **more))


def drawn(torch: Any, problem: Problem, generator: Any) -> list[Any]:
    """Standard normal q, k and v as the kernel takes them; rows come before heads in memory where servers store them so."""
    keys = (problem.key_entries, problem.kv_heads, problem.key_rows)
    shapes = (
        (problem.batch, problem.heads, problem.seq_q, problem.head_dim),
        (*keys, problem.head_dim),
        (*keys, problem.value_columns),
    )
    found = []
    for (entries, heads, rows, columns), packed in zip(shapes, (problem.packed, *[problem.ends_k] * 2), strict=True):
        in_memory = (entries, rows, heads, columns) if problem.is_varlen else (entries, heads, rows, columns)
        one = torch.randn(in_memory, generator=generator, device="cuda").to(getattr(torch, problem.dtype))
        found.append(heads_first(one[0] if packed else one) if problem.is_varlen else one)
    return found


def rows_of(queries: Any, given: Mapping[str, Any], sequence: int, head: int) -> Any:
    """The rows of one sequence and head, `[rows, columns]`, of queries or of an output `[batch, heads, rows, columns]`.

    Args:
        queries: a torch tensor.
        given: what `inputs.places` gives.
        sequence: which, also of packed ones.
        head: which.
    """
    if "CuQ" not in given:
        return queries[sequence, head]
    return queries[0, head, int(given["CuQ"][sequence]) : int(given["CuQ"][sequence + 1])]


def keys_of(keys: Any, given: Mapping[str, Any], sequence: int, kv_head: int) -> Any:
    """The keys or values of one sequence and key head, `[keys, columns]`."""
    if "Table" in given:
        pages = keys[:, kv_head][[int(each) for each in given["Table"][sequence]]]
        return pages.flatten(0, 1)[: int(given["Lengths"][sequence])]
    if "CuK" in given:
        return keys[0, kv_head, int(given["CuK"][sequence]) : int(given["CuK"][sequence + 1])]
    return keys[sequence, kv_head]
