"""`sdpa`: attention on the schedule that the tuned table names, with the signature of torch's own.

The first call of a shape resolves its schedule and makes a plan; later calls find the plan and launch.
Nothing is tuned inside a call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.ops.arguments import (
    CAUSAL,
    EIGHT_BIT_DTYPE,
    check_tensors,
    name_tensors,
    needs_gradients,
    odd_scale,
    read_mask,
    read_scale,
    unserved,
)
from tiledsched.ops.backward import BackwardCall, with_empty_results
from tiledsched.ops.fallback import attend_nested, forget_warnings, report
from tiledsched.ops.features import FEATURE_ARGUMENTS, NO_FEATURES, Window, read_features
from tiledsched.ops.flex import FLEX_ARGUMENTS, read_flex
from tiledsched.ops.masks import attend_masked
from tiledsched.ops.operator import cast_for_autocast, differentiable_attention, serve_checked, trained
from tiledsched.ops.padding import hidden_ends
from tiledsched.ops.plans import AttentionCall, find_ready, launch_attention
from tiledsched.serve.execute import explain_plan, is_plain_call, is_traced, launch_plan
from tiledsched.serve.explain import Explanation
from tiledsched.serve.plan import Plan
from tiledsched.serve.process import forget_kernels, settings

__all__ = ["Plan", "explain", "plan_for", "reload", "sdpa", "settings"]


def sdpa(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    attn_mask: Tensor | bool | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal: bool | str | None = None,
    return_lse: bool = False,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    key_starts: Tensor | None = None,
    key_lengths: Tensor | None = None,
    q_scale: float | Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    deterministic: bool | None = None,
) -> Any:
    """Scaled dot-product attention, softmax(scale * q @ k^T, masked) @ v, on the tuned schedule.

    It takes what `torch.nn.functional.scaled_dot_product_attention` takes, in the same places, and means the same by it.

    Args:
        q: `[batch, heads, seq_q, head_dim]` CUDA tensor, float16 or bfloat16, or, with scales, float8_e4m3fn; any
            strides; head_dim up to 256. Or `[heads, seq_q, head_dim]`, and k and v alike.
        k: `[batch, kv_heads, seq_k, head_dim]`, of q's dtype and device, or, with scales, of float8_e4m3fn; heads a multiple of
            kv_heads.
        v: `[batch, kv_heads, seq_k, value_dim]`; value_dim up to 256.
        attn_mask: a mask tensor (by our kernel or by torch, as the setting `masks` says; one that is `[batch or 1, 1, 1, seq_k]`
            and hides padding at the ends only is read from the GPU in each call; key_starts and key_lengths say it without a
            wait), `torch.nn.attention.bias.CausalBias`, or True or False for `causal`.
        dropout_p: probability of dropout. Other than 0 it is left to torch, unless the setting `masks` is `own`; then what is
            dropped follows from two numbers that each call draws from torch's generator.
        is_causal: torch's word for `causal=True`.
        scale: positive softmax scale; 1 / sqrt(head_dim) unless given.
        enable_gqa: accepted and not needed: heads and kv_heads say it.
        causal: False, True or "top_left" (query row i sees key columns 0..i), or "bottom_right" (0..i + seq_k - seq_q;
            rows that see nothing give zeros, where torch gives NaN or zeros).
        return_lse: return the log-sum-exp of each row's scaled, masked scores, too: natural, float32
            `[batch, heads, seq_q]`.
        query, key, value: torch's names of q, k and v.
        window: keys that a row sees at most, its own included, under a causal mask: transformers' `sliding_window`. Or
            FlashAttention's `window_size`: a pair of the keys before and after a row's own, -1 for all, aligned at the bottom
            right; with `causal` none after, aligned as that says.
        softcap: each scaled score becomes softcap * tanh(score / softcap), before masks; 0 or None for none.
        sinks: `[heads]`, a logit more in each row's denominator and log-sum-exp, without a value; rounded to q's dtype.
        key_starts, key_lengths: `[batch]` integers: row b sees keys key_starts[b] to key_lengths[b] - 1 only, as if a mask hid
            the others, for batches padded on the left or right. Rows that see no key give zeros. Hidden keys and values may
            hold anything, NaN included.
        q_scale: for q of float8_e4m3fn, what its numbers are multiplied with: positive, a number, or a tensor of one or of the
            shape of k_scale. The output is bfloat16 then. Products are of 8 bits, and probabilities are rounded to them, too. A v
            whose keys do not lie side by side in memory (as in `v.mT.contiguous().mT`) is copied in each call. Calls of at most
            64 rows, with softcap or key_starts, or with sizes that are no multiples of 16 take q converted to bfloat16.
        k_scale, v_scale: for k and v of float8_e4m3fn, what their numbers are multiplied with: positive, a number or a
            floating-point tensor of one, or `[kv_heads]`. A number becomes a tensor in the first call that has it.
        deterministic: whether gradients are the same, bit for bit, whenever they are computed. Unless given they are where
            `torch.use_deterministic_algorithms` is on when they are computed; elsewhere parts of a sum may be added in any order,
            by atomic operations, which is faster. The output is the same in either case.

    Returns:
        `[batch, heads, seq_q, value_dim]`, of q's dtype, or bfloat16 for queries in 8 bits, and order of axes in memory; with
        `return_lse` a pair. Both are differentiable, once, in q, k, v and sinks. What the kernel cannot serve (masks, CPU
        tensors, float32, ...) goes to torch's attention with one warning per reason. Under autocast q, k and v are cast first,
        as torch does.

    Raises:
        ProblemError: arguments that contradict each other or do not fit together.
        UnsupportedError: inputs for torch's attention, where the setting `fallback` is `error`.
        LaunchError: the launch failed, or a CUDA graph is being captured and this program never ran before.
    """
    # The short way: all that stands between a call and the launch in the common case. Whatever is special goes the long
    # way, through the operator, and so does the first call of each kind. Nested tensors would end the process in find_ready.
    if (
        not is_traced()
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and attn_mask is None
        and not dropout_p
        and (causal is None or not is_causal)
        and query is None
        and key is None
        and value is None
        and window is None
        and softcap is None
        and sinks is None
        and key_starts is None
        and key_lengths is None
        and q_scale is None
        and k_scale is None
        and v_scale is None
        and (scale is None or type(scale) is float)
        and is_plain_call(q, k, v)
        and not (q.is_nested or k.is_nested or v.is_nested)  # type: ignore[union-attr]
    ):
        wanted: Any = is_causal if causal is None else causal
        alignment = "top_left" if wanted is True else wanted or None
        if alignment is None or type(alignment) is str:
            plan = find_ready(q, k, v, alignment, scale, return_lse)
            if plan is not None:
                if not return_lse:
                    return launch_plan(plan, (q, k, v), None, False, True)
                return launch_attention(plan, q, k, v, True, keep_zeros=True)
            plan = trained.find_ready((q, k, v), (alignment, scale, True), True) if needs_gradients(q, k, v) else None
            if plan is not None:
                options = (alignment, scale, NO_FEATURES, deterministic)
                return differentiable_attention(q, k, v, None, options, return_lse, plan)
    q, k, v = name_tensors(q, k, v, query, key, value)
    features = (window, softcap, sinks, key_starts, key_lengths, q_scale, k_scale, v_scale)
    return _attend(q, k, v, attn_mask, dropout_p, is_causal, scale, causal, return_lse, features, deterministic)


def plan_for(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
    backward: bool = False,
    deterministic: bool | None = None,
    **features: Any,
) -> Plan:
    """The plan `sdpa` uses for these tensors: its `own` is that of our kernel, where a rival is served.

    Args:
        q, k, v, causal, scale, return_lse: as for :func:`sdpa`. A call whose gradients are required runs with `return_lse`.
        backward: the plan of the gradients instead.
        deterministic: as for :func:`sdpa`.
        features: window, softcap, sinks, key_starts, key_lengths, q_scale, k_scale and v_scale, as for `sdpa`.

    Raises:
        UnsupportedError: the kernel cannot serve them.
        ProblemError: they do not fit together.
    """
    return _find_plan(_read_call(q, k, v, causal, scale, return_lse, backward, deterministic, features))


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    verify: bool = False,
    return_lse: bool = False,
    backward: bool = False,
    deterministic: bool | None = None,
    **features: Any,
) -> Explanation:
    """What `sdpa`, or `flex`, would do with these tensors, and why.

    Args:
        q, k, v, causal, return_lse: as for :func:`sdpa`. A call whose gradients are required runs with `return_lse`.
        backward: explain the computation of the gradients instead.
        deterministic: as for :func:`sdpa`.
        verify: also compile, for these very tensors, what would be launched, and compare its machine code with the measured
            one. Takes about a second and needs the compiler.
        features: window, softcap, sinks, key_starts, key_lengths, q_scale, k_scale and v_scale, as for `sdpa`; or score_mod,
            mask_mod, block_mask, arrays and scale, as for :func:`tiledsched.ops.flex.flex`.

    Raises:
        UnsupportedError: the kernel cannot serve them.
        ProblemError: they do not fit together.
    """
    call: AttentionCall | BackwardCall
    if not FLEX_ARGUMENTS.isdisjoint(features):
        if causal or backward or deterministic is not None or not features.keys() <= FLEX_ARGUMENTS:
            raise ProblemError(
                "score_mod and mask_mod are explained without causal, backward, deterministic and the features of sdpa; say "
                "these in one of the functions"
            )
        call = read_flex(q, k, v, return_lse=return_lse, **features)
    else:
        call = _read_call(q, k, v, causal, None, return_lse, backward, deterministic, features)
    return explain_plan(_find_plan(call), call.tensors, verify=verify)


def reload() -> None:
    """Forget the table, the settings and every plan: the next call reads them again."""
    forget_kernels()
    forget_warnings()


def _read_call(
    q: Any,
    k: Any,
    v: Any,
    causal: bool | str,
    scale: float | None,
    lse: bool,
    backward: bool,
    deterministic: bool | None,
    features: dict[str, Any],
) -> AttentionCall | BackwardCall:
    alignment, read = read_features(q, k, CAUSAL[causal], **features)
    call = AttentionCall(q, k, v, alignment, scale, lse or backward, read)
    return with_empty_results(call, deterministic) if backward else call


def _find_plan(call: AttentionCall | BackwardCall) -> Plan:
    found = call.find_plan()
    if isinstance(found, str):
        features = call.forward.features if isinstance(call, BackwardCall) else call.features
        raise UnsupportedError(f"{found}; {features.front} leaves this call to {features.elsewhere}")
    return found


def _attend(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    dropout_p: float,
    is_causal: Any,
    scale: float | None,
    causal: Any,
    return_lse: bool,
    given: tuple[Any, ...],
    deterministic: bool | None,
) -> Any:
    """Every other call: check it, decide, and call the operator or torch's attention.

    `given` are the arguments that :func:`read_features` reads; all others are those of :func:`sdpa`.
    """
    q, k, v = cast_for_autocast(q, k, v)
    scale = read_scale(scale)
    if any(isinstance(each, Tensor) and each.is_nested for each in (q, k, v)):
        if any(each is not None for each in given):
            raise UnsupportedError(
                "windows, softcap, sinks and lengths of nested tensors are not served; call sdpa for each part"
            )
        report("nested tensors are given")
        return attend_nested(q, k, v, attn_mask, dropout_p, is_causal if causal is None else causal, scale, return_lse)
    check_tensors(q, k, v, eight_bits=given[-2] is not None or given[-1] is not None)
    mask, alignment = read_mask(attn_mask, is_causal, causal, q, k)
    causal, (alignment, features) = alignment or False, read_features(q, k, alignment, *given)
    # Of a scale that is no number torch makes other things with four axes than with three.
    as_they_are = odd_scale(scale) and q.shape[0] == k.shape[0] == v.shape[0]
    if q.ndim == k.ndim == v.ndim < 4 and (mask is None or mask.ndim <= q.ndim) and not as_they_are:
        result = sdpa(
            q[None],
            k[None],
            v[None],
            mask,
            dropout_p,
            scale=scale,
            causal=causal,
            return_lse=return_lse,
            deterministic=deterministic,
            **dict(zip(FEATURE_ARGUMENTS, given, strict=True)),
        )
        return (result[0][0], result[1][0]) if return_lse else result[0]
    if (
        isinstance(mask, Tensor)
        and mask.ndim == 4
        and features is NO_FEATURES
        and not unserved(q, k, v, None, dropout_p)
    ):
        ends = hidden_ends(mask, q, k)
        if ends is not None:
            mask, features = None, read_features(q, k, None, key_starts=ends[0], key_lengths=ends[1])[1]
    if (isinstance(mask, Tensor) or dropout_p) and features is NO_FEATURES and deterministic is None:
        result = attend_masked(q, k, v, mask, dropout_p or 0.0, alignment, scale, return_lse)
        if result is not None:
            return result
    if q.dtype == EIGHT_BIT_DTYPE and AttentionCall(q, k, v, alignment, scale, return_lse, features).without_q8():
        q = q.to(torch.bfloat16)
    return serve_checked(q, k, v, mask, dropout_p, alignment, scale, return_lse, features, deterministic)
