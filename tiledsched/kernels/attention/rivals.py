"""Other implementations of attention, which a bench times in turn with our kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Arrays, Call, Method
from tiledsched.kernels.attention.backends import (
    FLASH_4,
    FLASH_4_MODULE,
    TORCH_VARLEN,
    bound,
    flash_attention_4,
    torch_varlen,
)
from tiledsched.kernels.attention.bench_case import bench_case
from tiledsched.kernels.attention.flex import flex_attention, mask_of
from tiledsched.kernels.attention.scales import default_scale

__all__ = ["METHODS", "bench_case"]


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
