"""The arguments of `sdpa`, which are torch's: checked, and translated to what the kernel takes.

Only shapes, dtypes and devices of tensors are read here, never their values, so that it works with fake tensors and under
`torch.compile`.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from tiledsched.core.errors import ProblemError
from tiledsched.kernels.attention.options import MAX_HEAD_DIM
from tiledsched.serve import process

DTYPES = (torch.float16, torch.bfloat16)
"""The dtypes that the kernel computes in."""
EIGHT_BIT_DTYPE = torch.float8_e4m3fn
"""The dtype of keys and values in 8 bits."""
CAUSAL: dict[Any, str | None] = {False: None, True: "top_left", "top_left": "top_left", "bottom_right": "bottom_right"}
"""The values that `causal` may have, and where each aligns the causal mask; None for no mask."""


def name_tensors(q: Any, k: Any, v: Any, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """q, k and v, each given under one of its two names.

    Raises:
        ProblemError: one is missing or given twice.
    """
    found = []
    for name, ours, longer, theirs in (("q", q, "query", query), ("k", k, "key", key), ("v", v, "value", value)):
        if ours is None and theirs is None:
            raise ProblemError(f"{name} is missing; call sdpa(q, k, v)")
        if ours is not None and theirs is not None:
            raise ProblemError(f"{name} is given twice, also as {longer}; give it once")
        found.append(theirs if ours is None else ours)
    return found[0], found[1], found[2]


def read_mask(attn_mask: Any, is_causal: Any, causal: Any, q: Any, k: Any) -> tuple[Any, str | None]:
    """The mask tensor, if there is one, and where the causal mask is aligned, if there is one; never both.

    Args:
        attn_mask: None, a tensor, `torch.nn.attention.bias.CausalBias`, or True or False, which mean `causal`.
        is_causal: torch's argument.
        causal: ours, a key of :data:`CAUSAL`; None where not given.
        q, k: tensors, for the sizes a CausalBias must fit.

    Raises:
        ProblemError: two of them are given, or one has a value that is not allowed.
    """
    if isinstance(attn_mask, bool):
        if causal is not None or is_causal:
            raise ProblemError(
                f"a fourth argument of {attn_mask} means causal, which is given by name, too; give it once"
            )
        attn_mask, causal = None, attn_mask
    if causal is not None and is_causal:
        raise ProblemError(f"is_causal = {is_causal!r} and causal = {causal!r} are both given; give one of them")
    alignment = read_causal(is_causal, "is_causal") if causal is None else read_causal(causal)
    if attn_mask is None:
        return None, alignment
    if alignment is not None:
        raise ProblemError("attn_mask and a causal mask are both given; give one, or a mask that holds both")
    return _read_bias(attn_mask, q, k)


def read_causal(value: Any, name: str = "causal", allowed: Mapping[Any, str | None] = CAUSAL) -> str | None:
    """Where the causal mask is aligned; None for no mask.

    Args:
        value: what the caller gave.
        name: the argument's name, for the message.
        allowed: what each value means.

    Raises:
        ProblemError: the value is not allowed.
    """
    if not isinstance(value, (bool, int, str)) or value not in allowed:
        raise ProblemError(f"{name} = {value!r}; allowed are False, True, 'top_left' and 'bottom_right'")
    return allowed[value]


def _read_bias(attn_mask: Any, q: Any, k: Any) -> tuple[Any, str | None]:
    """The mask tensor or, for a CausalBias, where the causal mask is aligned."""
    if not isinstance(attn_mask, torch.Tensor) or (
        type(attn_mask) is torch.Tensor
        and (
            attn_mask.device != q.device
            or not (attn_mask.dtype == torch.bool or attn_mask.is_floating_point())
            or any(
                size not in (1, whole)
                for size, whole in zip(attn_mask.shape[::-1], (k.shape[-2], q.shape[-2]), strict=False)
            )
        )
    ):
        raise ProblemError(
            f"attn_mask must be a tensor of booleans or floating-point numbers on q's device, {q.device}, that broadcasts to "
            f"[..., {q.shape[-2]} rows, {k.shape[-2]} keys], or a CausalBias, True, False or None, got {described(attn_mask)}"
        )
    if type(attn_mask) is torch.Tensor:
        return attn_mask, None
    from torch.nn.attention.bias import CausalBias, CausalVariant  # which imports torch's compiler for a second

    if not isinstance(attn_mask, CausalBias):
        return attn_mask, None
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) != (q.shape[-2], k.shape[-2]):
        raise ProblemError(
            f"attn_mask is a CausalBias for {attn_mask.seq_len_q} query and {attn_mask.seq_len_kv} key rows, "
            f"but q has {q.shape[-2]} and k {k.shape[-2]} rows"
        )
    return None, "top_left" if attn_mask.variant == CausalVariant.UPPER_LEFT else "bottom_right"


def check_tensors(q: Any, k: Any, v: Any, *, eight_bits: bool = False) -> None:
    """Raise where no attention has these arguments.

    Args:
        q, k, v: what the caller gave.
        eight_bits: whether k and v have 8 bits, and scales.

    Raises:
        ProblemError: not tensors, or on several devices, of several dtypes, or of shapes that do not fit together.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if (
            not isinstance(tensor, torch.Tensor)
            or tensor.ndim < 2
            or tensor.layout is not torch.strided
            or not tensor.is_floating_point()
        ):
            raise ProblemError(
                f"{name} must be a torch.Tensor, got {described(tensor)}; attention takes dense floating-point tensors [batch, "
                "heads, rows, head_dim]"
            )
    if k.device != q.device or v.device != q.device:
        raise ProblemError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if eight_bits and (k.dtype, v.dtype) != (EIGHT_BIT_DTYPE, EIGHT_BIT_DTYPE):
        raise ProblemError(
            f"k_scale and v_scale are for k and v of {EIGHT_BIT_DTYPE}, got {k.dtype} and {v.dtype}; convert them, or leave the "
            "scales out"
        )
    if not eight_bits and q.dtype == EIGHT_BIT_DTYPE:
        raise ProblemError(
            f"q of {EIGHT_BIT_DTYPE} needs k and v of that type, and q_scale, k_scale and v_scale of sdpa"
        )
    if not eight_bits and (k.dtype != q.dtype or v.dtype != q.dtype):
        raise ProblemError(
            f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
            + f"; k and v of {EIGHT_BIT_DTYPE} need k_scale and v_scale" * (k.dtype == EIGHT_BIT_DTYPE)
        )
    if q.shape[-1] != k.shape[-1]:
        raise ProblemError(f"q and k must agree in head_dim (the last axis), got {_shape(q)} and {_shape(k)}")
    if k.shape[-2] != v.shape[-2]:
        raise ProblemError(f"k and v must agree in rows (the last axis but one), got {_shape(k)} and {_shape(v)}")
    if q.ndim == k.ndim == v.ndim == 4:
        if not (heads_grouped(q, k, v) or len({x.shape[1] for x in (q, k, v)} - {1}) <= 1):
            if k.shape[1] != v.shape[1]:
                raise ProblemError(f"k and v must agree in heads (axis 1), got {_shape(k)} and {_shape(v)}")
            raise ProblemError(f"q's heads (axis 1) must be a multiple of k's, got {_shape(q)} and {_shape(k)}")
        if any(q.shape[0] != x.shape[0] and 1 not in (q.shape[0], x.shape[0]) for x in (k, v)):
            raise ProblemError(f"q, k and v must agree in batch (axis 0), got {_shape(q)}, {_shape(k)} and {_shape(v)}")


def check_array(name: str, given: Any, axes: str, sizes: tuple[int | None, ...], q: Any, *, whole: bool = True) -> None:
    """Raise unless `given` is a tensor of these sizes on q's device, of integers (`whole`) or of floating-point numbers.

    Args:
        name: the argument's name, for the message.
        given: what the caller gave.
        axes: what the axes are, for the message.
        sizes: the size of each axis; None for any size but 0.
        q: a tensor.
        whole: whether it must hold integers.

    Raises:
        ProblemError: it is something else.
    """
    fits = (
        isinstance(given, torch.Tensor)
        and given.layout is torch.strided
        and given.ndim == len(sizes)
        and all(
            size == wanted or (size > 0 and wanted is None) for size, wanted in zip(given.shape, sizes, strict=True)
        )
        and given.device == q.device
        and given.is_floating_point() != whole
        and not (given.is_complex() or given.dtype == torch.bool)
    )
    if not fits:
        kind = "an integer" if whole else "a floating-point"
        raise ProblemError(f"{name} must be {kind} tensor [{axes}] on q's device, {q.device}, got {described(given)}")


def heads_grouped(q: Any, k: Any, v: Any) -> bool:
    """Whether every head of k and v belongs to the same number of q's heads."""
    kv_heads = k.shape[-3]
    return kv_heads == v.shape[-3] and (not kv_heads or q.shape[-3] % kv_heads == 0)


def read_scale(scale: Any) -> Any:
    """The scale as a Python number, or None. Like torch it accepts a tensor without axes, and waits for its value.

    Raises:
        ProblemError: neither None nor a number, or a tensor whose gradient is required.
    """
    if scale is None or isinstance(scale, (int, float, torch.SymInt, torch.SymFloat)):
        return scale
    if isinstance(scale, numbers.Real) or (
        isinstance(scale, torch.Tensor) and not scale.ndim and not scale.is_complex()
    ):
        if getattr(scale, "requires_grad", False) and torch.is_grad_enabled():
            raise ProblemError("scale requires gradients, and attention has none of it; multiply q by it instead")
        return float(scale)
    raise ProblemError(f"scale must be a number or None, got {type(scale).__name__}")


def odd_scale(scale: Any) -> str:
    """Why the kernel cannot serve a scale; empty where it can."""
    usual = scale is None or not isinstance(scale, (int, float)) or 0 < scale < math.inf
    return "" if usual else f"the softmax scale must be positive and a normal float32, got {scale!r}"


def unserved(q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: float) -> str:
    """Why the kernel cannot serve these arguments; empty where nothing in them forbids it."""
    if attn_mask is not None:
        return "a mask tensor is given"
    if dropout_p:
        return "dropout is asked for"
    if q.device.type != process.runtime.device_type:
        return f"q is on {q.device}; the kernel needs a CUDA device"
    if q.dtype not in (*DTYPES, EIGHT_BIT_DTYPE):
        return f"dtype {q.dtype} is not served; use torch.float16 or torch.bfloat16"
    if not q.ndim == k.ndim == v.ndim == 4:
        return f"q, k and v have {q.ndim}, {k.ndim} and {v.ndim} axes; the kernel takes 4, 3 or 2 of each"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return "the batch of q, k and v differs; torch broadcasts it"
    if not heads_grouped(q, k, v):
        return "the heads of q, k and v differ; torch broadcasts them"
    if q.shape[3] > MAX_HEAD_DIM or v.shape[3] > MAX_HEAD_DIM:
        return f"head_dim {max(q.shape[3], v.shape[3])} is above {MAX_HEAD_DIM}"
    if any(size == 0 for tensor in (q, k, v) for size in tensor.shape):
        return "a tensor is empty"
    return ""


def needs_gradients(q: Any, k: Any, v: Any, sinks: Any = None) -> bool:
    """Whether the result must be differentiable."""
    needed = q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    return torch.is_grad_enabled() and needed


def described(value: Any) -> str:
    """What an argument is: type, shape and device of a tensor, or the class of anything else."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return (
        f"{str(value.dtype).removeprefix('torch.')} {_shape(value)} on {value.device}, {value.layout}"
    ).removesuffix(", torch.strided")


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape)
