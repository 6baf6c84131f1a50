"""Attention and every other implementation of it: how each is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiledsched.bench.methods import LEFT_OUT, OURS, SERVED, Call, Method
from tiledsched.bench.rivals import arch_of, schedule_launch
from tiledsched.bench.rivals.attention_case import AttentionArrays, make_case
from tiledsched.bench.rivals.attention_flex import flex_attention
from tiledsched.bench.rivals.attention_plans import left_out_plan, own_plan, plan_call, served_call
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.rivals import (
    FLASH_4,
    FLASH_4_MODULE,
    TORCH_VARLEN,
    flash_4_function,
    flash_attention_4,
    torch_varlen,
)
from tiledsched.kernels.attention.scales import default_scale
from tiledsched.measure.rivals import call_on

__all__ = ["METHODS", "UNTUNED", "make_case", "untuned_schedule"]
UNTUNED: dict[str, KnobValue] = {
    "tile_m": 64,
    "tile_n": 64,
    "occupancy": 0,
    "num_worker_warps": 0,
    "num_ctas": 0,
    "latency_k": 0,
    "latency_v": 0,
    "opt_level": 3,
    "accum_mode": "fp32",
    "loop_split": False,
    "block_order": "natural",
    "persistent": "no",
    "kv_direction": "forward",
    "q_subtiles": 1,
    "kv_subtiles": 1,
    "qk_ahead": False,
    "tma_loads": True,
    "tma_store": True,
    "check_bounds": True,
    "division": "approximate",
    "lazy_rescale": False,
}
"""The kernel as one would first write it: 64x64 tiles, and every hint left to the compiler. Knobs not named here have
their defaults.
"""


def _ours(arrays: AttentionArrays) -> Call:
    """Our kernel as `sdpa`, `sdpa_varlen` and `sdpa_paged` launch it, even where a rival is served."""
    return plan_call(arrays, own_plan(arrays))


def _left_out(arrays: AttentionArrays) -> Call:
    """Our kernel on the policy's choice, or the rival that is expected to be faster."""
    return plan_call(arrays, left_out_plan(arrays))


def _refuse_features(problem: Problem, *, but: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedError where a problem has features that a method does not compute, except those in `but`."""
    if problem.is_varlen:
        raise UnsupportedError("it knows no packed sequences, and no pages")
    beyond = [
        name
        for name in ("window", "window_right", "softcap", "sinks", "starts", "lengths")
        if getattr(problem, name) and name not in but
    ]
    if beyond:
        raise UnsupportedError(f"it knows no {', '.join(beyond)}")


def untuned_schedule(arch: str) -> Schedule:
    """`UNTUNED`, with the knobs that it does not name at the defaults of the arch's space."""
    return space_for(arch, Attention).complete(Schedule(UNTUNED))


def _untuned(arrays: AttentionArrays) -> Call:
    problem, q = arrays.problem, arrays.q
    _refuse_features(problem)
    launch = schedule_launch(arrays.torch, Attention, problem, untuned_schedule(arch_of(arrays.torch)))
    shape = (*q.shape[:3], arrays.v.shape[3])

    def call() -> Any:
        out = q.new_empty(shape)
        launch(q, arrays.k, arrays.v, out)
        return out

    return call


def _torch_call(arrays: AttentionArrays) -> Call:
    """torch's attention, with whichever backend it takes. Windows and lengths become a mask of all scores, which is all
    it knows.
    """
    torch, problem = arrays.torch, arrays.problem
    _refuse_features(problem, but=("window", "window_right", "starts", "lengths"))
    more: dict[str, Any] = {"enable_gqa": True} if problem.group > 1 else {}
    if problem.has_features:
        from tiledsched.ops.fallback import visible_keys

        call = arrays.call
        more["attn_mask"] = visible_keys(arrays.q, arrays.k, call.causal, call.features)
    elif problem.causal and problem.alignment == "bottom_right":
        from torch.nn.attention.bias import causal_lower_right

        more["attn_mask"] = causal_lower_right(problem.seq_q, problem.seq_k)
    else:
        more["is_causal"] = problem.causal
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(arrays.q, arrays.k, arrays.v, **more)


def _torch_backend(backend: str) -> Callable[[AttentionArrays], Call]:
    """torch's attention, with only one backend allowed."""

    def make(arrays: AttentionArrays) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        allowed, attention = getattr(SDPBackend, backend), _torch_call(arrays)

        def call() -> Any:
            with sdpa_kernel(allowed):
                return attention()

        return call

    return make


def _eager(arrays: AttentionArrays) -> Call:
    """softmax(q @ k^T) @ v in torch operators, with softmax in float32 and key heads repeated, as models did it before
    SDPA.
    """
    torch, problem = arrays.torch, arrays.problem
    _refuse_features(problem)
    scale, group = default_scale(problem), problem.group
    hidden = None
    if problem.causal:
        offset = problem.seq_k - problem.seq_q if problem.alignment == "bottom_right" else 0
        ones = torch.ones(problem.seq_q, problem.seq_k, dtype=torch.bool, device=arrays.q.device)
        hidden = ones.triu(offset + 1)

    def call() -> Any:
        k, v = arrays.k, arrays.v
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.matmul(arrays.q, k.transpose(-1, -2)) * scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)

    return call


def _triton(arrays: AttentionArrays) -> Call:
    _refuse_features(arrays.problem)
    from tiledsched.bench.rivals.triton_attention import triton_attention

    bottom_right = arrays.problem.alignment == "bottom_right"
    return lambda: triton_attention(
        arrays.q, arrays.k, arrays.v, causal=arrays.problem.causal, bottom_right=bottom_right
    )


def _tilegym(arrays: AttentionArrays) -> Call:
    """NVIDIA's TileGym: `tilegym.ops.fmha`, which tunes itself on the first call of a shape."""
    problem = arrays.problem
    _refuse_features(problem)
    if problem.alignment != "top_left" or problem.value_dim:
        raise UnsupportedError("fmha aligns the mask at the top left and takes one head dimension")
    from tilegym.ops import fmha

    scale = default_scale(problem)
    return lambda: fmha(arrays.q, arrays.k, arrays.v, scaling=scale, is_causal=problem.causal, has_backward=False)


def _flash_attn(arrays: AttentionArrays) -> Call:
    """The flash-attn package, on arrays in its own layout, `[batch, rows, heads, head_dim]`."""
    problem = arrays.problem
    _refuse_features(problem)
    if problem.causal and problem.alignment == "top_left" and problem.seq_q != problem.seq_k:
        raise UnsupportedError("flash_attn_func aligns the mask at the bottom right")
    from flash_attn import flash_attn_func

    q, k, v = (array.transpose(1, 2).contiguous() for array in (arrays.q, arrays.k, arrays.v))
    return lambda: flash_attn_func(q, k, v, causal=problem.causal).transpose(1, 2)


def _flash_attention_4(arrays: AttentionArrays) -> Call:
    """FlashAttention-4, on arrays in its own layout, `[batch, rows, heads, head_dim]`."""
    if arrays.problem.is_varlen:
        return call_on(flash_attention_4(arrays.problem), arrays.tensors)
    attend, _ = flash_4_function(arrays.problem)
    q, k, v = (array.transpose(1, 2).contiguous() for array in arrays.tensors[:3])
    features = arrays.tensors[3:]
    return lambda: attend(q, k, v, *features).transpose(1, 2)


def _torch_varlen(arrays: AttentionArrays) -> Call:
    return call_on(torch_varlen(arrays.problem), arrays.tensors)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(name=OURS, about="our kernel on the schedule that the table names", make=_ours),
        Method(
            name=SERVED,
            about="sdpa, sdpa_varlen or sdpa_paged, whatever they run: our kernel, or a rival measured faster",
            make=served_call,
        ),
        Method(name=LEFT_OUT, about="the same, had nobody tuned the problem's suite", make=_left_out, by_name=True),
        Method(name="untuned", about="the same kernel, 64x64 tiles, no hints", make=_untuned),
        Method(name="torch_flash", about="torch SDPA, flash backend", make=_torch_backend("FLASH_ATTENTION")),
        Method(name="torch_cudnn", about="torch SDPA, cuDNN backend", make=_torch_backend("CUDNN_ATTENTION")),
        Method(
            name="torch_efficient",
            about="torch SDPA, memory-efficient backend",
            make=_torch_backend("EFFICIENT_ATTENTION"),
        ),
        Method(name="torch_math", about="torch SDPA, math backend", make=_torch_backend("MATH"), score_bytes=16),
        Method(name="torch_auto", about="torch SDPA, whichever backend torch takes", make=_torch_call),
        Method(name=TORCH_VARLEN, about="torch's FlashAttention of packed sequences", make=_torch_varlen),
        Method(name="eager", about="softmax(QK^T)V in torch operators", make=_eager, score_bytes=12),
        Method(name="triton", about="a flash-attention forward in Triton, autotuned", make=_triton, package="triton"),
        Method(name="tilegym", about="TileGym's cuTile kernel, autotuned", make=_tilegym, package="tilegym"),
        Method(
            name="flash_attn",
            about="the flash-attn package",
            make=_flash_attn,
            package="flash_attn.flash_attn_interface",
        ),
        Method(
            name=FLASH_4,
            about="the flash-attn-4 package, FlashAttention-4",
            make=_flash_attention_4,
            package=FLASH_4_MODULE,
        ),
        Method(name="torch_flex", about="torch's flex attention, compiled", make=flex_attention, package="triton"),
    )
}
"""The methods by name, in the order of the rows."""
