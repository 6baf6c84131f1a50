"""Other implementations of attention that may serve a problem instead of our kernel: torch's backends and FlashAttention-4.

A rival is made for one problem; UnsupportedError means that it cannot compute the problem. It takes tensors of any strides, like
`sdpa`: the inputs in the order declared, and for packed sequences the most rows and the most keys of a sequence. Its output has
the same order of axes in memory as q, like our own output. torch and FlashAttention-4 are imported when a rival is made.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from tiledsched.core.errors import UnsupportedError
from tiledsched.core.extras import package_version
from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Arrays, Call, Function, Variants, call_on, is_installed
from tiledsched.kernels.attention.call_cache import CallCache
from tiledsched.kernels.attention.scales import DEFAULT_CAP, default_scale

BACKENDS = {
    "torch_cudnn": "_scaled_dot_product_cudnn_attention",
    "torch_flash": "_scaled_dot_product_flash_attention",
    "torch_efficient": "_scaled_dot_product_efficient_attention",
}
"""Rival -> the operator of its backend of torch."""
BEFORE_CAUSAL: Mapping[str, tuple[Any, ...]] = {
    "torch_cudnn": (None, False, 0.0),  # no bias, no log-sum-exp, no dropout
    "torch_flash": (0.0,),
    "torch_efficient": (None, False, 0.0),
}
"""Rival -> the arguments of its operator between the arrays and whether the mask is causal."""
RAGGED_CUDNN = "TORCH_CUDNN_SDPA_AVOID_RECOMPILE"
"""Environment variable with which the log-sum-exp of torch's cuDNN backend has the rows before the heads in memory."""
TORCH_VARLEN = "torch_varlen"
"""torch's FlashAttention of packed sequences, as `torch.nn.attention.varlen` calls it."""
FLASH_4 = "flash_attention_4"
FLASH_4_MODULE = "flash_attn.cute"
FLASH_4_PACKAGE = "flash-attn-4"
"""Name of its package. Older packages, called flash_attn, have no such module."""
FEW_ROWS = 128
"""With at most this many query rows for each key head, FlashAttention-4 may split the keys."""


def raced(p: Problem, scale: float | None = None, cap: float | None = None, *, late: bool = False) -> Variants:
    """Name -> rival, for all rivals that are installed and can compute the problem. A tune times them, and they may serve.

    Args:
        p: the problem.
        scale: the softmax scale; 1 / sqrt(head_dim) unless given.
        cap: the cap of the scores of a problem with softcap; the declaration's unless given.
        late: whether FlashAttention-4, whose import takes seconds, is imported only at its first call.
    """
    if p.kv8 or (p.lse and (p.has_features or p.is_varlen)):
        return {}  # none takes keys in 8 bits; where a row may see no key, or has a sink, the log-sum-exps differ
    made: dict[str, Callable[[], Function]] = {name: partial(torch_backend, p, name, scale) for name in BACKENDS}
    if p.is_varlen:
        made = {TORCH_VARLEN: partial(torch_varlen, p, scale)}
    return able(made, flash_4_options, flash_attention_4, (p, scale, cap), late)


def able(
    in_torch: Mapping[str, Callable[[], Function]],
    check: Callable[..., Any],
    flash_4: Callable[..., Function],
    given: tuple[Any, ...],
    late: bool,
) -> Variants:
    """Name -> rival, of those that are installed and can be made.

    Args:
        in_torch: what makes the rivals of torch; UnsupportedError means that one cannot compute the problem.
        check: raises UnsupportedError where FlashAttention-4 cannot compute the problem.
        flash_4: makes the rival that calls FlashAttention-4.
        given: the problem, and the scale and the cap of its scores, for both.
        late: whether `flash_4` is called, and the package imported, only at the rival's first call.
    """
    make_flash_4 = functools.cache(partial(flash_4, *given))

    def at_first_call() -> Function:
        check(*given)
        return lambda *tensors: make_flash_4()(*tensors)

    found, made = {}, dict(in_torch)
    if is_installed(FLASH_4_MODULE):
        made[FLASH_4] = at_first_call if late else make_flash_4
    for name, make in made.items():
        with suppress(UnsupportedError):
            found[name] = make()
    return found


def bound(make: Callable[[Problem], Function], *, rows_first: bool = False) -> Callable[[Arrays], Call]:
    """`Method.make` of a rival. With `rows_first`, it is given arrays in the layout of torch's flash backend and of
    FlashAttention-4, where rows come before heads in memory.
    """

    def on_arrays(arrays: Arrays) -> Call:
        tensors = arrays.tensors
        if rows_first:
            tensors = tuple(
                each.transpose(1, 2).contiguous().transpose(1, 2) if each.ndim == 4 else each for each in tensors
            )
        return call_on(make(arrays.problem), tensors)

    return on_arrays


@dataclass(frozen=True, kw_only=True)
class VarlenRival:
    """A rival for packed sequences or for keys in pages."""

    problem: Problem
    """The problem that it computes."""
    attend: Function
    """The function of the tensors and, for packed sequences, the most rows and the most keys of a sequence."""
    version: str = ""
    """Version of its package; empty for torch."""

    def __call__(self, *given: Any) -> Any:
        """Call :attr:`attend`."""
        return self.attend(*given)

    def bind(self, *tensors: Any) -> Function:
        """The call on these tensors. The length of the longest sequence is read from them here, and not in the call."""
        return partial(self.attend, *tensors, *longest(self.problem, tensors))


def longest(p: Problem, tensors: tuple[Any, ...]) -> tuple[int, ...]:
    """The most rows and the most keys of a packed sequence, read from the device; empty if no sequences are packed."""
    if not p.packed:
        return ()
    begins, last = tensors[-4:-2] if p.kv8 else tensors[-2:]  # CuQ, and CuK or Table
    return int(begins.diff().max()), int(p.seq_k if p.page else last.diff().max())


def rows_first(p: Problem, q: Any, k: Any, v: Any) -> list[Any]:
    """Views of q, k and v with the rows before the heads. Packed sequences have no axis for the batch."""
    packed = (p.packed, p.ends_k, p.ends_k)
    return [
        each[0].transpose(0, 1) if lies_so else each.transpose(1, 2)
        for each, lies_so in zip((q, k, v), packed, strict=True)
    ]


def empty_output(q: Any, columns: int) -> Any:
    """An output for queries `q` with `columns` columns, in the order of axes that q has in memory."""
    import torch

    dtype = output_dtype(q)
    if columns == q.shape[3]:
        return torch.empty_like(q, dtype=dtype)
    rows_outside_heads = q.stride(1) < q.stride(2)  # [batch, rows, heads, columns] in memory, as projections make it
    order = (0, 2, 1, 3) if rows_outside_heads else (0, 1, 2, 3)
    return torch.empty_permuted((*q.shape[:3], columns), order, dtype=dtype, device=q.device)


def output_dtype(q: Any) -> Any:
    """The dtype of the output for queries `q`: theirs, or bfloat16 where they have 8 bits."""
    import torch

    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def heads_first(out: Any) -> Any:
    """A view of an output with the heads before the rows, with the strides that `sdpa_varlen` makes."""
    return out.transpose(0, 1)[None] if out.ndim == 3 else out.transpose(1, 2)


def _aligned_below(p: Problem) -> bool:
    """Whether a causal mask ends at the last key. With as many rows as keys, packed alike, both alignments do."""
    return bool(p.alignment == "bottom_right" or (p.seq_q == p.seq_k and not p.page))


def torch_backend(p: Problem, name: str, scale: float | None = None) -> Function:
    """One backend of torch's attention, called by its own operator.

    The public way to allow one backend alone (`torch.nn.attention.sdpa_kernel`) sets flags of the whole process, which other
    threads would read, and `scaled_dot_product_attention` itself may be `sdpa` (`integrations.torch`).

    Raises:
        UnsupportedError: the rival cannot compute the problem.
    """
    check_torch_mask(p, name)
    if name == "torch_efficient" and (p.group > 1 or p.lse):
        raise UnsupportedError("torch's memory-efficient backend repeats no key heads, and pads the log-sum-exp")
    operator, given, causal = torch_operator(BACKENDS[name]), BEFORE_CAUSAL[name], p.causal
    if p.lse and name == "torch_cudnn":
        given = (None, True, 0.0)
        if os.environ.get(RAGGED_CUDNN) == "1":
            raise UnsupportedError(f"torch's cuDNN backend gives another log-sum-exp where {RAGGED_CUDNN} is set")

    def call(q: Any, k: Any, v: Any) -> Any:
        made = operator(q, k, v, *given, causal, scale=scale)
        return (made[0], made[1].reshape(*q.shape[:3], 1)) if p.lse else made[0]

    return call


def check_torch_mask(p: Problem, name: str) -> None:
    """Make sure that a backend of torch's attention has the mask of a problem.

    Raises:
        UnsupportedError: it has not.
    """
    if p.has_features:
        raise UnsupportedError(
            "torch's backends take no windows, softcap, sinks, starts and lengths, but as a mask of all scores"
        )
    if p.causal and p.seq_q != p.seq_k:
        if (name == "torch_flash") != (p.alignment == "bottom_right"):
            raise UnsupportedError(f"{name} aligns the causal mask elsewhere")
        if p.seq_q > p.seq_k and p.alignment == "bottom_right":
            raise UnsupportedError(f"{name} may leave rows that see no key unwritten")


def torch_operator(name: str) -> Function:
    """An operator of torch, whose first output is that of the attention.

    Raises:
        UnsupportedError: this torch has no operator of that name.
    """
    import torch

    found = getattr(torch.ops.aten, name, None)
    if found is None:
        raise UnsupportedError(f"this torch has no aten::{name}")
    operator: Function = found.default
    return operator


def torch_varlen(p: Problem, scale: float | None = None) -> VarlenRival:
    """torch's FlashAttention for packed sequences, called by the operator that `torch.nn.attention.varlen` uses.

    Raises:
        UnsupportedError: the rival cannot compute the problem.
    """
    causal, options = torch_varlen_options(p, scale)
    operator = torch_operator("_flash_attention_forward")

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, most_q: int, most_k: int) -> Any:
        lies = (cu_q, cu_k, most_q, most_k, 0.0, causal, False)  # no dropout, no mask for people to look at
        return heads_first(operator(*rows_first(p, q, k, v), *lies, **options)[0])

    return VarlenRival(problem=p, attend=attend)


def torch_varlen_options(p: Problem, scale: float | None) -> tuple[bool, dict[str, Any]]:
    """(whether the mask is causal, the arguments by name) of torch's FlashAttention for packed sequences.

    Raises:
        UnsupportedError: it cannot compute the problem.
    """
    if not p.packed or p.page:
        raise UnsupportedError("torch's varlen attention is for packed sequences; few of its releases take pages")
    if p.softcap or p.sinks or p.value_dim or p.head_dim % 8:
        raise UnsupportedError(
            "torch's varlen attention takes no softcap, no sinks, one head dimension for all, a multiple of 8"
        )
    if p.causal and not _aligned_below(p):
        raise UnsupportedError("torch's varlen attention aligns the mask at the bottom right")
    options: dict[str, Any] = {"scale": default_scale(p) if scale is None else scale}
    if not (p.window or p.window_right):
        return p.causal, options
    return False, {**options, "window_size_left": p.window - 1, "window_size_right": p.window_right}


def flash_attention_4(p: Problem, scale: float | None = None, cap: float | None = None) -> Function:
    """FlashAttention-4 on tensors `[batch, heads, rows, columns]` of any strides, which it reads where they lie.

    Beta versions take different arguments. If one of their functions takes an output, it writes into ours; otherwise its output
    is copied into the order of axes that q has.

    Raises:
        UnsupportedError: FlashAttention-4 has no such mask, or is not installed.
    """
    import torch

    attend, into = flash_4_function(p, scale, cap)

    def call(q: Any, k: Any, v: Any, *more: Any) -> Any:
        out, turned = empty_output(q, v.shape[-1]), rows_first(p, q, k, v)
        if into is None:
            made = heads_first(attend(*turned, *more))
            return made if made.stride() == out.stride() else out.copy_(made)
        lse = [torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)] if p.lse else []
        written = rows_first(p, out, k, v)[0]
        if more:
            attend(*turned, *more, out=written)
        else:
            into(*turned, written, *lse)
        return (out, lse[0][..., None]) if lse else out

    return of_flash_4(p, call)


def of_flash_4(p: Problem, call: Function) -> Function:
    """A rival that calls FlashAttention-4, which says the version of the package."""
    version = f"{FLASH_4_PACKAGE} {package_version(FLASH_4_PACKAGE)}"
    if p.is_varlen:
        return VarlenRival(problem=p, attend=call, version=version)
    call.__dict__["version"] = version
    return call


def flash_4_options(p: Problem, scale: float | None = None, cap: float | None = None) -> dict[str, Any]:
    """The arguments of FlashAttention-4's functions for a problem, apart from arrays.

    Raises:
        UnsupportedError: FlashAttention-4 has no such mask.
    """
    if p.starts:
        raise UnsupportedError("FlashAttention-4 takes no first keys; it packs such batches")
    causal = p.causal
    if causal and not _aligned_below(p):
        raise UnsupportedError("FlashAttention-4 aligns the mask at the bottom right")
    if causal and p.lengths and not p.page:
        raise UnsupportedError(
            "FlashAttention-4 moves the mask's diagonal to the end of each length; sdpa leaves it where it is"
        )
    if causal and p.seq_q > p.seq_k and not p.packed:
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


def flash_4_function(
    p: Problem, scale: float | None = None, cap: float | None = None
) -> tuple[Function, CallCache | None]:
    """FlashAttention-4 on tensors `[batch, rows, heads, columns]`, and a cache of such calls without further arrays, which writes
    into the output that follows the tensors; None where the function takes no output.

    Packed sequences are `[rows, heads, columns]`, and the last arguments are the most rows and the most keys of a sequence.
    FlashAttention-4's inner function needs no autograd and takes `out`. With few rows, it may split the keys. Of a problem with
    log-sum-exp the cached function also writes that, which follows the output.

    Raises:
        UnsupportedError: FlashAttention-4 is not installed, has no function known here, or no such mask.
    """
    options = flash_4_options(p, scale, cap)
    try:
        module = importlib.import_module(FLASH_4_MODULE)
        inner = getattr(importlib.import_module(f"{FLASH_4_MODULE}.interface"), "_flash_attn_fwd", None)
    except ImportError as missing:
        raise UnsupportedError(f"FlashAttention-4 cannot be imported: {missing}") from missing
    optional = (
        ("learnable_sink", p.sinks),
        ("seqused_k", p.lengths),
        ("cu_seqlens_q", p.ends_q),
        ("cu_seqlens_k", p.ends_k),
        ("page_table", p.paged),
    )
    arrays = [name for name, given in optional if given]
    needed = {"out", "window_size_left", "seqused_k", *arrays}
    if inner is not None and needed <= set(inspect.signature(inner).parameters):
        left, right = options.pop("window_size", (None, None))
        options |= {"window_size_left": left, "window_size_right": right}
        function = inner
    else:
        name = "flash_attn_varlen_func" if p.lengths or p.is_varlen else "flash_attn_func"
        function = getattr(module, name, None)
        if function is None:
            raise UnsupportedError(f"this FlashAttention-4 has no {name}")
    taken = set(inspect.signature(function).parameters)
    unknown = {*options, *arrays} - taken
    if unknown:
        raise UnsupportedError(f"this FlashAttention-4 does not take {', '.join(sorted(unknown))}")
    if p.lse and not {"out", "lse", "return_lse"} <= taken:
        raise UnsupportedError("this FlashAttention-4 takes no array for the log-sum-exp")
    splits = [{"num_splits": 0}] if p.mean_rows * p.group <= FEW_ROWS and "num_splits" in taken else []
    bounds = ("max_seqlen_q", "max_seqlen_k") if p.packed else ()

    def attend(q: Any, k: Any, v: Any, *others: Any, **more: Any) -> Any:
        named = {name: each for name, each in zip((*arrays, *bounds), others, strict=True) if name in taken}
        try:
            made = function(q, k, v, **options, **named, **more, **(splits[0] if splits else {}))
        except Exception:
            if not splits:
                raise
            splits.clear()  # not on this GPU
            made = function(q, k, v, **options, **named, **more)
        return made[0] if isinstance(made, tuple) else made

    def attend_into(q: Any, k: Any, v: Any, out: Any, *lse: Any) -> None:
        attend(q, k, v, out=out, **({"lse": lse[0], "return_lse": True} if lse else {}))

    return attend, CallCache(attend_into, [function]) if "out" in taken else None
