"""Other implementations of attention, which a bench times in turn with our kernel; and a bench's inputs.

Comparing all of a long problem with float64 would take minutes, so that only some (sequence, head) pairs are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy

from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Arrays, Call, Method, RivalCase
from tiledsched.kernels.attention.backends import (
    FLASH_4,
    FLASH_4_MODULE,
    TORCH_VARLEN,
    bound,
    flash_attention_4,
    heads_first,
    torch_varlen,
)
from tiledsched.kernels.attention.flex import flex_attention, mask_of
from tiledsched.kernels.attention.inputs import places
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.kernels.attention.scales import DEFAULT_CAP, default_scale


def refuse_features(p: Problem, *, but: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedError where a problem has features that a method does not compute, except those in `but`."""
    if p.is_varlen:
        raise UnsupportedError("it knows no packed sequences, and no pages")
    features = ("window", "window_right", "softcap", "sinks", "starts", "lengths", "kv8")
    beyond = [name for name in features if getattr(p, name) and name not in but]
    if beyond:
        raise UnsupportedError(f"it knows no {', '.join(beyond)}")


def torch_call(arrays: Arrays) -> Call:
    """torch's attention, with whichever backend it takes. Windows and lengths become a mask of all scores, which is all
    it knows.
    """
    torch, p, (q, k, v) = arrays.torch, arrays.problem, arrays.tensors[:3]
    refuse_features(p, but=("window", "window_right", "starts", "lengths"))
    more: dict[str, Any] = {"enable_gqa": True} if p.group > 1 else {}
    if p.has_features:
        batch, row, key = (torch.arange(size, device=q.device) for size in (p.batch, p.seq_q, p.seq_k))
        seen = mask_of(p, arrays.by_name.get("Starts"), arrays.by_name.get("Lengths"))
        more["attn_mask"] = seen(batch[:, None, None, None], None, row[:, None], key)
    elif p.causal and p.alignment == "bottom_right":
        from torch.nn.attention.bias import causal_lower_right

        more["attn_mask"] = causal_lower_right(p.seq_q, p.seq_k)
    else:
        more["is_causal"] = p.causal
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, **more)


def backend_call(backend: str) -> Callable[[Arrays], Call]:
    """torch's attention, with only one backend allowed."""

    def make(arrays: Arrays) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        allowed, attention = getattr(SDPBackend, backend), torch_call(arrays)

        def call() -> Any:
            with sdpa_kernel(allowed):
                return attention()

        return call

    return make


def eager(arrays: Arrays) -> Call:
    """softmax(q @ k^T) @ v in torch operators, with softmax in float32 and key heads repeated, as models did it before
    SDPA.
    """
    torch, p = arrays.torch, arrays.problem
    refuse_features(p)
    q, keys, values = arrays.tensors
    scale, hidden = default_scale(p), None
    if p.causal:
        offset = p.seq_k - p.seq_q if p.alignment == "bottom_right" else 0
        hidden = torch.ones(p.seq_q, p.seq_k, dtype=torch.bool, device=q.device).triu(offset + 1)

    def call() -> Any:
        k, v = keys, values
        if p.group > 1:
            k, v = k.repeat_interleave(p.group, dim=1), v.repeat_interleave(p.group, dim=1)
        scores = torch.matmul(q, k.transpose(-1, -2)) * scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)

    return call


def triton(arrays: Arrays) -> Call:
    """The flash-attention forward kernel of `triton.py`, autotuned."""
    p = arrays.problem
    refuse_features(p)
    from tiledsched.kernels.attention.triton import triton_attention

    return partial(triton_attention, *arrays.tensors, causal=p.causal, bottom_right=p.alignment == "bottom_right")


def tilegym(arrays: Arrays) -> Call:
    """NVIDIA's TileGym: `tilegym.ops.fmha`, which tunes itself on the first call of a shape."""
    p = arrays.problem
    refuse_features(p)
    if p.alignment != "top_left" or p.value_dim:
        raise UnsupportedError("fmha aligns the mask at the top left and takes one head dimension")
    from tilegym.ops import fmha

    return partial(fmha, *arrays.tensors, scaling=default_scale(p), is_causal=p.causal, has_backward=False)


def flash_attn(arrays: Arrays) -> Call:
    """The flash-attn package, on arrays in its own layout, `[batch, rows, heads, head_dim]`."""
    p = arrays.problem
    refuse_features(p)
    if p.causal and p.alignment == "top_left" and p.seq_q != p.seq_k:
        raise UnsupportedError("flash_attn_func aligns the mask at the bottom right")
    from flash_attn import flash_attn_func

    q, k, v = (array.transpose(1, 2).contiguous() for array in arrays.tensors)
    return lambda: flash_attn_func(q, k, v, causal=p.causal).transpose(1, 2)


def scores_of(item_bytes: int) -> Callable[[Problem], int]:
    """The memory of a method that holds the whole score matrix, with so many bytes for each element."""
    return lambda p: item_bytes * p.batch * p.heads * p.seq_q * p.seq_k


METHODS = (
    Method(name="torch_flash", make=backend_call("FLASH_ATTENTION")),
    Method(name="torch_cudnn", make=backend_call("CUDNN_ATTENTION")),
    Method(name="torch_efficient", make=backend_call("EFFICIENT_ATTENTION")),
    Method(name="torch_math", make=backend_call("MATH"), extra_bytes=scores_of(16)),
    Method(name="torch_auto", make=torch_call),
    Method(name=TORCH_VARLEN, make=bound(torch_varlen)),
    Method(name="eager", make=eager, extra_bytes=scores_of(12)),
    Method(name="triton", make=triton, package="triton"),
    Method(name="tilegym", make=tilegym, package="tilegym"),
    Method(name="flash_attn", make=flash_attn, package="flash_attn.flash_attn_interface"),
    Method(name=FLASH_4, make=bound(flash_attention_4, rows_first=True), package=FLASH_4_MODULE),
    Method(name="torch_flex", make=flex_attention, package="triton"),
)
"""What a bench times in turn with our own methods, in the order of the rows; docs/bench.md says what each is."""


MOST_SCORES = 1 << 30
"""Scores of the reference, at most: four heads of 16384 x 16384, which take some tens of milliseconds in float64 on an
H200.
"""
MOST_PAIRS = 64
"""(sequence, head) pairs, at most, since each costs a few launches."""
Pair = tuple[int, int]
"""(sequence, query head). Without packing, each entry of the batch is a sequence."""


def bench_case(torch: Any, xp: Any, p: Problem, own: Callable[..., Any]) -> RivalCase:
    """The case of a problem: standard normal inputs, the same in every run, and the pairs that are compared.

    Args:
        torch: the module.
        xp: CuPy. It has no bfloat16: it is given float32, which holds both types.
        p: the problem.
        own: unused here; see :func:`tiledsched.kernels.attention_backward.rivals.bench_case`.
    """
    draw = Drawn(torch, p)
    q, k, v = draw.heads()
    given, features = draw.features(q.device)
    pairs, expected = compared_pairs(p), []
    for sequence, head in pairs:
        kv_head = head // p.group
        parts = (rows_of(q, given, sequence, head), *(keys_of(each, given, sequence, kv_head) for each in (k, v)))
        one = {} if p.is_varlen else {name.lower(): each[sequence : sequence + 1] for name, each in given.items()}
        if p.sinks:
            one["sinks"] = features[0][head : head + 1].double().cpu().numpy()
        expected.append(reference_of_pair(xp, p, *(xp.from_dlpack(each.float()) for each in parts), **one))
    return RivalCase(
        arrays=Arrays(torch=torch, problem=p, tensors=(q, k, v, *features)),
        expected={"Out": expected},
        parts=lambda made: {"Out": [rows_of(made["Out"].detach(), given, *pair) for pair in pairs]},
        compared=f"{len(pairs)}/{p.sequences * p.heads}",
    )


def compared_pairs(problem: Problem, heads: int | None = None, most_scores: int = MOST_SCORES) -> list[Pair]:
    """The pairs whose output is compared: the first, the last, and others drawn with the problem's id as seed.

    As many as `most_scores` and `MOST_PAIRS` allow, two at least, all where they allow it. So every run of a problem
    compares the same pairs.

    Args:
        problem: whose.
        heads: how many heads a sequence has, if not the query heads are compared but the key heads.
        most_scores: scores of the reference, at most.
    """
    heads = heads or problem.heads
    total, group = problem.sequences * heads, problem.heads // heads
    count = min(total, MOST_PAIRS, max(2, most_scores // (group * problem.mean_rows * problem.mean_keys)))
    numbers = {0, total - 1}
    others = random.Random(problem.id).sample(range(1, max(1, total - 1)), max(0, count - len(numbers)))
    return [divmod(number, heads) for number in sorted(numbers.union(others))]


def reference_of_pair(xp: Any, problem: Problem, q: Any, k: Any, v: Any, **features: Any) -> Any:
    """The float64 output of one (sequence, head) pair, `[seq_q, value_dim]`.

    Args:
        xp: numpy or cupy.
        problem: mask and scale.
        q: `[seq_q, head_dim]` of that head, of a type that `xp` knows and float64 holds.
        k: `[seq_k, head_dim]` of its key head; v, `[seq_k, value_dim]`, likewise.
        features: sinks, starts and lengths, `[1]` each, of that head and sequence, where the problem has them.
    """
    out, _ = attention_and_lse(
        xp,
        *(each[None, None] for each in (q, k, v)),
        causal=problem.causal,
        scale=default_scale(problem),
        alignment=problem.alignment,
        window=problem.window,
        window_right=problem.window_right,
        cap=DEFAULT_CAP if problem.softcap else 0.0,
        **features,
    )
    return out[0, 0]


class Drawn:
    """Standard normal inputs of a problem on the GPU, the same in every run.

    Args:
        torch: the module.
        p: the problem.
    """

    def __init__(self, torch: Any, p: Problem) -> None:
        self._torch, self._p = torch, p
        self._generator = torch.Generator(device="cuda").manual_seed(int(p.id, 16) % 2**31)

    def numbers(self, *shape: int) -> Any:
        """A float32 array of that shape."""
        return self._torch.randn(shape, generator=self._generator, device="cuda")

    def heads(self) -> list[Any]:
        """q, k and v as the kernel takes them."""
        p = self._p
        keys = (p.key_entries, p.kv_heads, p.key_rows)
        queries = self.array((p.batch, p.heads, p.seq_q, p.head_dim), p.packed)
        return [queries, *(self.array((*keys, columns), p.ends_k) for columns in (p.head_dim, p.value_columns))]

    def array(self, shape: tuple[int, ...], packed: Any) -> Any:
        """An array of the problem's type, in which sequences are packed or are not. Rows come before heads in memory where
        servers store them so.
        """
        entries, heads, rows, columns = shape
        one = self.numbers(*((entries, rows, heads, columns) if self._p.is_varlen else shape)).to(self._dtype)
        return heads_first(one[0] if packed else one) if self._p.is_varlen else one

    def features(self, device: Any) -> tuple[Mapping[str, Any], list[Any]]:
        """(where sequences and pages lie, as arrays on the host; the tensors of the problem's features, sinks first)."""
        p, torch = self._p, self._torch
        given = places(numpy.random.default_rng(int(p.id, 16) % 2**31), p)
        sinks = [self.numbers(p.heads).to(self._dtype)] if p.sinks else []
        alike = {id(each): torch.as_tensor(each, dtype=torch.int32, device=device) for each in given.values()}
        return given, sinks + [alike[id(each)] for each in given.values()]  # rows and keys that lie alike: one tensor

    @property
    def _dtype(self) -> Any:
        return getattr(self._torch, self._p.dtype)


def rows_of(queries: Any, given: Mapping[str, Any], sequence: int, head: int | slice) -> Any:
    """The rows of one sequence and head, `[rows, columns]`, of queries or of an output `[batch, heads, rows, columns]`.

    Args:
        queries: a torch tensor.
        given: what `inputs.places` gives.
        sequence: which, also of packed ones.
        head: which; for a slice, the first axis is that of heads.
    """
    if "CuQ" not in given:
        return queries[sequence, head]
    return queries[0, head, int(given["CuQ"][sequence]) : int(given["CuQ"][sequence + 1])]


def keys_of(keys: Any, given: Mapping[str, Any], sequence: int, kv_head: int | slice) -> Any:
    """The keys or values of one sequence and key head, `[keys, columns]`."""
    if "Table" in given:
        pages = keys[:, kv_head][[int(each) for each in given["Table"][sequence]]]
        return pages.flatten(0, 1)[: int(given["Lengths"][sequence])]
    if "CuK" in given:
        return keys[0, kv_head, int(given["CuK"][sequence]) : int(given["CuK"][sequence + 1])]
    return keys[sequence, kv_head]
