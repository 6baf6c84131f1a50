"""Other implementations of attention that may serve a problem in our kernel's place: torch's backends and FlashAttention-4.

Each is made for one problem, or refused there. What it takes are tensors as `sdpa` does, of any strides: the inputs in the
order declared. What it returns lies in memory in the order of axes that q has, as our own output does. torch and
FlashAttention-4 are imported where one is made.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tiledsched.errors import UnsupportedError
from tiledsched.kernels.attention.declaration import DEFAULT_CAP
from tiledsched.kernels.attention.reference import default_scale
from tiledsched.problem import Problem

Function = Callable[..., Any]
BACKENDS = {
    "torch_cudnn": "_scaled_dot_product_cudnn_attention",
    "torch_flash": "_scaled_dot_product_flash_attention",
    "torch_efficient": "_scaled_dot_product_efficient_attention",
}
"""Rival -> the operator of torch's backend."""
BEFORE_CAUSAL: Mapping[str, tuple[Any, ...]] = {
    "torch_cudnn": (None, False, 0.0),  # no bias, no log-sum-exp, no dropout
    "torch_flash": (0.0,),
    "torch_efficient": (None, False, 0.0),
}
"""What each is given between its arrays and whether the mask is causal."""
FLASH_4 = "flash_attention_4"
FLASH_4_MODULE = "flash_attn.cute"
"""Of the package flash-attn-4; older packages called flash_attn have no such part."""
FEW_ROWS = 128
"""Of all query heads of a key head together: below it FlashAttention-4 is let split the keys."""


def flash_4_installed() -> bool:
    """Whether FlashAttention-4 is there; its own modules are not imported to find out."""
    try:
        return importlib.util.find_spec(FLASH_4_MODULE) is not None
    except ModuleNotFoundError:  # there is no flash_attn at all
        return False


def rivals(p: Problem, scale: float | None = None, cap: float | None = None) -> Mapping[str, Function]:
    """Name -> what computes `p`, for those that can and are installed.

    Args:
        p: the problem. None returns the log-sum-exp, or takes packed sequences or pages.
        scale: of the softmax; 1 / sqrt(head_dim) unless given.
        cap: of the scores, where the problem has one; the declaration's unless given.
    """
    made: dict[str, Callable[[], Function]] = {name: partial(torch_backend, p, name, scale) for name in BACKENDS}
    if flash_4_installed():
        made[FLASH_4] = partial(flash_attention_4, p, scale, cap)
    found = {}
    for name, make in made.items() if not (p.lse or p.placed) else ():
        try:
            found[name] = make()
        except UnsupportedError:
            continue
    return found


def _last_row_sees_all(p: Problem) -> bool:
    """Whether the causal mask hides nothing: one row, aligned at the end of the keys."""
    return bool(p.causal and p.alignment == "bottom_right" and p.seq_q == 1 and not p.window)


def torch_backend(p: Problem, name: str, scale: float | None = None) -> Function:
    """One backend of torch's attention, by its own operator.

    The public way to allow one backend alone (`torch.nn.attention.sdpa_kernel`) sets flags of the whole process, which other
    threads would read, and `scaled_dot_product_attention` itself may be `sdpa` (`integrations.torch`).

    Raises:
        UnsupportedError: it computes no such problem.
    """
    if p.asked:
        raise UnsupportedError(
            "torch's backends take no windows, softcap, sinks, starts and lengths, but as a mask of all scores"
        )
    causal = p.causal and not _last_row_sees_all(p)
    if causal and p.seq_q != p.seq_k:
        if (name == "torch_flash") != (p.alignment == "bottom_right"):
            raise UnsupportedError(f"{name} aligns the causal mask elsewhere")
        if p.seq_q > p.seq_k and p.alignment == "bottom_right":
            raise UnsupportedError(f"{name} may leave rows that see no key unwritten")
    if p.group > 1 and name == "torch_efficient":
        raise UnsupportedError("torch's memory-efficient backend repeats no key heads")
    operator, given = torch_operator(BACKENDS[name]), BEFORE_CAUSAL[name]

    def call(q: Any, k: Any, v: Any) -> Any:
        return operator(q, k, v, *given, causal, scale=scale)[0]

    return call


def torch_operator(name: str) -> Function:
    """An operator of torch's; its first output is the attention's.

    Raises:
        UnsupportedError: this torch has none of that name.
    """
    import torch

    found = getattr(torch.ops.aten, name, None)
    if found is None:
        raise UnsupportedError(f"this torch has no aten::{name}")
    operator: Function = found.default
    return operator


def flash_attention_4(p: Problem, scale: float | None = None, cap: float | None = None) -> Function:
    """FlashAttention-4 on tensors `[batch, heads, rows, columns]` of any strides, which it reads where they lie.

    Beta versions differ in what they can be told: into an output of ours where one of their functions takes it, else what they
    return is copied into the order of axes that q has.

    Raises:
        UnsupportedError: it has no such mask, or is not installed.
    """
    attend, into = flash_4_function(p, scale, cap)
    import torch

    def call(q: Any, k: Any, v: Any, *asked: Any) -> Any:
        turned = [each.transpose(1, 2) for each in (q, k, v)]
        if into and v.shape[-1] == q.shape[-1]:
            out = torch.empty_like(q)
            attend(*turned, *asked, out=out.transpose(1, 2))
            return out
        made = attend(*turned, *asked).transpose(1, 2)
        return torch.empty_like(q).copy_(made) if made.shape == q.shape and made.stride() != q.stride() else made

    return call


def flash_4_options(p: Problem, scale: float | None = None, cap: float | None = None) -> dict[str, Any]:
    """How FlashAttention-4's functions are told of a problem; of its arrays beside q, k and v see :func:`flash_4_function`.

    Raises:
        UnsupportedError: it has no such mask.
    """
    if p.starts:
        raise UnsupportedError("FlashAttention-4 takes no first keys; it packs such batches")
    bottom_right = p.alignment == "bottom_right" or p.seq_q == p.seq_k
    causal = p.causal and not _last_row_sees_all(p)
    if causal and not bottom_right:
        raise UnsupportedError("FlashAttention-4 aligns the mask at the bottom right")
    if causal and p.lengths:
        raise UnsupportedError(
            "FlashAttention-4 moves the mask's diagonal to the end of each length; sdpa leaves it where it is"
        )
    if causal and p.seq_q > p.seq_k:
        raise UnsupportedError("FlashAttention-4 may leave rows that see no key unwritten")
    options: dict[str, Any] = {"softmax_scale": default_scale(p) if scale is None else scale}
    if p.window:
        options["window_size"] = (p.window - 1, p.window_right)
    elif p.window_right:
        options["window_size"] = (None, p.window_right)
    else:
        options["causal"] = causal
    if p.softcap:
        options["softcap"] = DEFAULT_CAP if cap is None else cap
    return options


def flash_4_function(p: Problem, scale: float | None = None, cap: float | None = None) -> tuple[Function, bool]:
    """What computes `p` on tensors in its own order, `[batch, rows, heads, columns]`, and whether it takes `out`.

    Its inner function does without autograd and takes `out`. Few rows are split over their keys as it likes, where it can.

    Raises:
        UnsupportedError: it is not installed, has no function known here, or no such mask.
    """
    options = flash_4_options(p, scale, cap)
    try:
        module = importlib.import_module(FLASH_4_MODULE)
        inner = getattr(importlib.import_module(f"{FLASH_4_MODULE}.interface"), "_flash_attn_fwd", None)
    except ImportError as missing:
        raise UnsupportedError(f"FlashAttention-4 cannot be imported: {missing}") from missing
    if inner is not None and {"out", "window_size_left", "seqused_k"} <= set(inspect.signature(inner).parameters):
        left, right = options.pop("window_size", (None, None))
        options |= {"window_size_left": left, "window_size_right": right}
        function = inner
    else:
        name = "flash_attn_varlen_func" if p.lengths else "flash_attn_func"
        function = getattr(module, name, None)
        if function is None:
            raise UnsupportedError(f"this FlashAttention-4 has no {name}")
    taken = set(inspect.signature(function).parameters)
    if not options.keys() <= taken:
        raise UnsupportedError(f"this FlashAttention-4 does not take {', '.join(sorted(options.keys() - taken))}")
    arrays = [name for name, given in (("learnable_sink", p.sinks), ("seqused_k", p.lengths)) if given]
    splits = [{"num_splits": 0}] if p.seq_q * p.group <= FEW_ROWS and "num_splits" in taken else []

    def attend(q: Any, k: Any, v: Any, *asked: Any, **more: Any) -> Any:
        named = dict(zip(arrays, asked, strict=True))
        try:
            made = function(q, k, v, **options, **named, **more, **(splits[0] if splits else {}))
        except Exception:
            if not splits:
                raise
            splits.clear()  # not on this GPU
            made = function(q, k, v, **options, **named, **more)
        return made[0] if isinstance(made, tuple) else made

    return attend, "out" in taken
