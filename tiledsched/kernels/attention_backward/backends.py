"""Other implementations of attention's backward pass that may serve a problem: torch's backends and FlashAttention-4.

A rival is made for one problem; UnsupportedError means that it cannot compute the problem. It takes tensors of any strides: the
inputs in the order declared, and for packed sequences the most rows and the most keys of a sequence. The output and the
log-sum-exp may come from any forward pass. It returns dQ, dK and dV, each with the order of axes in memory of q, k and v, and
dSinks if the problem has sinks. torch and FlashAttention-4 are imported when a rival is made.
"""

from __future__ import annotations

import importlib
import inspect
import os
from functools import partial
from typing import Any

from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Function, Variants
from tiledsched.kernels.attention.backends import (
    FLASH_4_MODULE,
    FLASH_4_PACKAGE,
    RAGGED_CUDNN,
    TORCH_VARLEN,
    VarlenRival,
    able,
    check_torch_mask,
    empty_output,
    flash_4_options,
    heads_first,
    of_flash_4,
    rows_first,
    torch_operator,
    torch_varlen_options,
)
from tiledsched.kernels.attention.call_cache import CallCache

TORCH_CUDNN, TORCH_FLASH = "torch_cudnn", "torch_flash"
FLASH_4_FUNCTIONS = ("_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert")
"""FlashAttention-4's function, and those that it calls, all of which have compiled functions."""


def raced(p: Problem, scale: float | None = None, cap: float | None = None, *, late: bool = False) -> Variants:
    """Name -> rival, for all rivals that are installed and can compute the problem. A tune times them, and they may serve.

    Args:
        p: the problem.
        scale: the softmax scale; 1 / sqrt(head_dim) unless given.
        cap: the cap of the scores of a problem with softcap; the declaration's unless given.
        late: whether FlashAttention-4, whose import takes seconds, is imported only at its first call.
    """
    in_torch = {TORCH_VARLEN: torch_varlen} if p.packed else {TORCH_CUDNN: torch_cudnn, TORCH_FLASH: torch_flash}
    made = {name: partial(make, p, scale) for name, make in in_torch.items()}
    return able(made, flash_4_backward_options, flash_attention_4, (p, scale, cap), late)


def _check_torch(p: Problem, name: str) -> None:
    """Make sure that a backend of torch's can compute a problem, apart from its mask.

    Raises:
        UnsupportedError: it cannot.
    """
    if p.deterministic:
        raise UnsupportedError(
            f"{name} adds up in a fixed order at most where torch.use_deterministic_algorithms is on, for all threads"
        )
    if p.dlse:
        raise UnsupportedError(f"{name} takes no gradient of the log-sum-exp")
    if p.head_dim % 8 or p.value_columns % 8:
        raise UnsupportedError(f"{name} takes head dimensions that are multiples of 8")


def torch_cudnn(p: Problem, scale: float | None = None) -> Function:
    """The backward pass of torch's cuDNN backend.

    Releases of torch differ in which strides they know a plan by (aten/src/ATen/native/cudnn/MHA.cpp): with only those of q, k
    and v, a plan made for one layout of the output's gradient would serve another one wrongly. So the output and its gradient
    are handed over in the order of axes of q.

    Raises:
        UnsupportedError: the rival cannot compute the problem.
    """
    check_torch_mask(p, TORCH_CUDNN)
    _check_torch(p, TORCH_CUDNN)
    if os.environ.get(RAGGED_CUDNN) == "1":
        raise UnsupportedError(f"torch's cuDNN backend takes another log-sum-exp where {RAGGED_CUDNN} is set")
    operator, causal = torch_operator("_scaled_dot_product_cudnn_attention_backward"), p.causal

    def call(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any) -> Any:
        seed, lse = _seed(q), lse.contiguous()[..., None]
        out, dout = _in_order(out, q), _in_order(dout, q)
        sizes = (None, None, None, q.shape[2], k.shape[2])  # no bias, no packed sequences
        return operator(dout, q, k, v, out, lse, seed, seed, *sizes, 0.0, causal, scale=scale)

    return call


def torch_flash(p: Problem, scale: float | None = None) -> Function:
    """The backward pass of torch's flash backend. Its gradients have the rows before the heads in memory.

    Raises:
        UnsupportedError: the rival cannot compute the problem.
    """
    check_torch_mask(p, TORCH_FLASH)
    _check_torch(p, TORCH_FLASH)
    if p.value_dim:
        raise UnsupportedError("torch's flash backend takes one head dimension for all")
    operator, causal = torch_operator("_scaled_dot_product_flash_attention_backward"), p.causal

    def call(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any) -> Any:
        sizes = (None, None, q.shape[2], k.shape[2])  # no packed sequences
        return operator(dout, q, k, v, out, lse.contiguous(), *sizes, 0.0, causal, _seed(q), _seed(q), scale=scale)

    return call


def torch_varlen(p: Problem, scale: float | None = None) -> VarlenRival:
    """The backward pass of torch's FlashAttention for packed sequences.

    Raises:
        UnsupportedError: the rival cannot compute the problem.
    """
    _check_torch(p, TORCH_VARLEN)
    causal, options = torch_varlen_options(p, scale)
    operator = torch_operator("_flash_attention_backward")

    def differentiate(
        q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, cu_q: Any, cu_k: Any, most_q: int, most_k: int
    ) -> Any:
        (q, k, v), (out, dout, _) = rows_first(p, q, k, v), rows_first(p, out, dout, v)
        sizes = (cu_q, cu_k, most_q, most_k)
        found = operator(dout, q, k, v, out, lse[0].contiguous(), *sizes, 0.0, causal, _seed(q), _seed(q), **options)
        return tuple(heads_first(_ended(each, ends)) for each, ends in zip(found, (cu_q, cu_k, cu_k), strict=True))

    return VarlenRival(problem=p, attend=differentiate)


def _ended(gradient: Any, ends: Any) -> Any:
    """A gradient `[rows, heads, columns]` with zeros behind the last sequence, which torch leaves unwritten."""
    import torch

    rows = torch.arange(len(gradient), device=gradient.device)
    return gradient.masked_fill_((rows >= ends[-1])[:, None, None], 0.0)


def _seed(q: Any) -> Any:
    """What stands for the random numbers of a dropout, of which there is none. Kernels load it all the same."""
    import torch

    return torch.empty(2, dtype=torch.uint64, device=q.device)


def _in_order(array: Any, like: Any) -> Any:
    """An array with its axes in the order of those of `like` in memory, and without gaps; a copy if it lies otherwise."""
    wanted = empty_output(like, array.shape[3])
    alike = zip(array.shape, array.stride(), wanted.stride(), strict=True)
    if all(size == 1 or stride == other for size, stride, other in alike):
        return array
    return wanted.copy_(array)


def flash_4_backward_options(p: Problem, scale: float | None = None, cap: float | None = None) -> dict[str, Any]:
    """The arguments of FlashAttention-4's backward pass for a problem, apart from arrays.

    Raises:
        UnsupportedError: FlashAttention-4 cannot compute it.
    """
    options = flash_4_options(p, scale, cap)
    if p.lengths:
        raise UnsupportedError("FlashAttention-4 leaves the gradients of keys behind a sequence's length unwritten")
    if p.head_dim % 8 or p.value_columns % 8:
        raise UnsupportedError("FlashAttention-4 takes head dimensions that are multiples of 8")
    if p.group > 1 and p.value_dim:
        raise UnsupportedError("FlashAttention-4 takes one head dimension for all where query heads share key heads")
    if p.packed and p.dlse:
        raise UnsupportedError("FlashAttention-4 is given no gradient of the log-sum-exp of packed sequences")
    left, right = options.pop("window_size", (None, None))
    return options | {"window_size_left": left, "window_size_right": right, "deterministic": p.deterministic}


def flash_attention_4(p: Problem, scale: float | None = None, cap: float | None = None) -> Function:
    """FlashAttention-4's backward pass, which writes into gradients of ours.

    Raises:
        UnsupportedError: FlashAttention-4 cannot compute the problem, is not installed, or has no function known here.
    """
    options = flash_4_backward_options(p, scale, cap)
    try:
        module = importlib.import_module(f"{FLASH_4_MODULE}.interface")
    except ImportError as missing:
        raise UnsupportedError(f"FlashAttention-4 cannot be imported: {missing}") from missing
    arrays = [
        name
        for name, given in (
            ("learnable_sink", p.sinks),
            ("cu_seqlens_q", p.ends_q),
            ("cu_seqlens_k", p.ends_k),
            ("dlse", p.dlse),
        )
        if given
    ]
    if p.packed:
        arrays += ["max_seqlen_q", "max_seqlen_k"]
    function, *around = (getattr(module, name, None) for name in FLASH_4_FUNCTIONS)
    if function is None or not {*options, *arrays, "dq", "dk", "dv"} <= set(inspect.signature(function).parameters):
        raise UnsupportedError(f"this {FLASH_4_PACKAGE} has no backward pass for the problem")

    def whole(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, dq: Any, dk: Any, dv: Any, **named: Any) -> Any:
        return function(q, k, v, out, dout, lse, dq=dq, dk=dk, dv=dv, **options, **named)

    cached = CallCache(whole, [function, *around])

    def differentiate(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, *others: Any) -> Any:
        found = [empty_output(each, each.shape[3]) for each in (q, k, v)]
        for each in found if p.packed else ():
            each.zero_()  # there may be rows behind the last sequence
        outputs = rows_first(p, out, dout, v)[:2]
        tensors = (*rows_first(p, q, k, v), *outputs, lse[0] if p.packed else lse, *rows_first(p, *found))
        if not others:
            cached(*tensors)
            return tuple(found)
        named = dict(zip(arrays, others, strict=True))
        if p.sinks:
            named["learnable_sink"] = named["learnable_sink"].float()  # whose type its gradient has
        made = whole(*tensors, **named)
        return (*found, made[3]) if p.sinks else tuple(found)

    return of_flash_4(p, differentiate)
