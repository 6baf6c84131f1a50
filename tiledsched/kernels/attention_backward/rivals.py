"""Other implementations of attention's backward pass, which a bench times in turn with our kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Arrays, Method, RivalCase
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.backends import (
    BACKENDS,
    FLASH_4,
    FLASH_4_MODULE,
    TORCH_VARLEN,
    bound,
    check_torch_mask,
    torch_operator,
)
from tiledsched.kernels.attention.problem import mask_of
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.kernels.attention.rivals import Drawn, compared_pairs, keys_of, rows_of
from tiledsched.kernels.attention_backward.backends import (
    TORCH_CUDNN,
    TORCH_FLASH,
    flash_attention_4,
    torch_cudnn,
    torch_flash,
    torch_varlen,
)
from tiledsched.kernels.attention_backward.reference import attention_gradients

GRADIENTS = ("dQ", "dK", "dV")
MOST_SCORES = 1 << 28
"""Scores of the reference, at most: a quarter of those of the forward pass, which has two products instead of seven."""


def bench_case(torch: Any, xp: Any, p: Problem, own: Callable[..., Any]) -> RivalCase:
    """The case of a problem: standard normal inputs and output gradients, the same in every run. The gradients of some (sequence,
    key head) pairs are compared, with all query heads of each key head.

    Args:
        torch: the module.
        xp: CuPy. It has no bfloat16: it is given float32, which holds both types.
        p: the problem.
        own: computes a problem of the forward pass by our kernel, given the problem and its tensors.
    """
    draw = Drawn(torch, p)
    q, k, v = draw.heads()
    dout = draw.array((p.batch, p.heads, p.seq_q, p.value_columns), p.packed)
    given, features = draw.features(q.device)
    out, lse = _forward(p, (q, k, v, *features), own)
    dlse = [draw.numbers(*lse.shape)] if p.dlse else []
    pairs = compared_pairs(p, p.kv_heads, MOST_SCORES)
    expected: dict[str, list[Any]] = {name: [] for name in GRADIENTS}

    def of_pair(array: Any, sequence: int, kv_head: int, *, queries: bool) -> Any:
        """The heads of a pair, `[heads, rows, columns]`, of an array that lies like q, or like k and v."""
        if queries:
            return rows_of(array, given, sequence, slice(kv_head * p.group, (kv_head + 1) * p.group))
        return keys_of(array, given, sequence, slice(kv_head, kv_head + 1))

    for pair in pairs:
        sequence, kv_head = pair
        parts = (of_pair(each, *pair, queries=each is q or each is dout) for each in (q, k, v, dout))
        wide_q, wide_k, wide_v, wide_dout = (xp.from_dlpack(each.float().contiguous())[None] for each in parts)
        one: dict[str, Any] = mask_of(p)
        if not p.packed:
            one |= {name.lower(): each[sequence : sequence + 1] for name, each in given.items()}
        if p.sinks:
            heads = slice(kv_head * p.group, (kv_head + 1) * p.group)
            one["sinks"] = xp.from_dlpack(features[0][heads].double())
        exact = attention_and_lse(xp, wide_q, wide_k, wide_v, **one)
        if dlse:
            shares = of_pair(dlse[0][..., None], *pair, queries=True)
            one["dlse"] = xp.from_dlpack(shares[None, ..., 0].contiguous())
        found = attention_gradients(xp, wide_q, wide_k, wide_v, exact[0], wide_dout, exact[1], **one)
        for name, right in zip(GRADIENTS, found, strict=False):
            expected[name] += [right[0, head] for head in range(right.shape[1])]

    def compared(made: Mapping[str, Any]) -> Mapping[str, Any]:
        """The heads of all pairs, one after the other."""
        return {
            name: [head for pair in pairs for head in of_pair(made[name], *pair, queries=name == "dQ")]
            for name in GRADIENTS
        }

    return RivalCase(
        arrays=Arrays(torch=torch, problem=p, tensors=(q, k, v, out, dout, lse, *features, *dlse)),
        expected=expected,
        parts=compared,
        compared=f"{len(pairs)}/{p.sequences * p.kv_heads}",
    )


def _forward(p: Problem, tensors: tuple[Any, ...], own: Callable[..., Any]) -> tuple[Any, Any]:
    """The output and the log-sum-exp: torch's flash backend's where it has the mask, since that compiles nothing, else ours."""
    try:
        check_torch_mask(p, TORCH_FLASH)
        if p.value_dim or p.head_dim % 8:
            raise UnsupportedError("torch's flash backend takes one head dimension, a multiple of 8")
        out, lse, *_ = torch_operator(BACKENDS[TORCH_FLASH])(*tensors[:3], 0.0, p.causal)
        return out.contiguous(), lse
    except UnsupportedError:
        values = {name: value for name, value in p.values.items() if name in Attention.fields}
        out, lse = own(Attention.problem(**values, lse=True), tensors)
        return out, lse[..., 0]


METHODS = (
    Method(name=TORCH_FLASH, make=bound(torch_flash, rows_first=True)),
    Method(name=TORCH_CUDNN, make=bound(torch_cudnn)),
    Method(name=TORCH_VARLEN, make=bound(torch_varlen)),
    Method(name=FLASH_4, make=bound(flash_attention_4, rows_first=True), package=FLASH_4_MODULE),
    Method(
        name=f"{FLASH_4}_deterministic",
        make=bound(lambda p: flash_attention_4(p.replace(deterministic=True)), rows_first=True),
        package=FLASH_4_MODULE,
        by_name=True,
    ),
)
"""What a bench times in turn with our own methods, in the order of the rows; docs/bench.md says what each is."""
