"""Optional features of attention: windows, capped scores, sinks, padding, packed sequences and pages."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch._subclasses.fake_tensor import is_fake

from tiledsched.core.errors import ProblemError
from tiledsched.core.problem import KernelClass
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.backends import output_dtype
from tiledsched.kernels.attention.options import ARRAYS, FeatureArguments
from tiledsched.kernels.attention_backward import AttentionBackward
from tiledsched.ops.arguments import EIGHT_BIT_DTYPE, check_array
from tiledsched.serve import process
from tiledsched.serve.execute import is_traced


class AttentionFeatures(FeatureArguments):
    """The optional features of a call: the arguments of the operators, and what the kernels make of them."""

    __slots__ = ()
    kernel: ClassVar[KernelClass] = Attention
    """The kernel that serves them."""
    gradients_kernel: ClassVar[KernelClass] = AttentionBackward
    """The kernel of their gradients."""
    front: ClassVar[str] = "sdpa"
    """The function of this package that they are arguments of."""
    elsewhere: ClassVar[str] = "torch's attention"
    """What computes calls that the kernel does not serve."""
    by_reference: ClassVar[Any] = None
    """Computes them from q, k, v and the scale; None where torch's attention does."""
    attn_mask: ClassVar[Any] = None
    """A mask tensor with which torch's attention computes them; None where no tensor says them."""
    gradients_by_reference: ClassVar[Any] = None
    """Computes the gradients of a `BackwardCall`; None likewise."""
    forward_operator: ClassVar[Any] = None
    """Computes the output and the log-sum-exp in compiled graphs, from q, k, v and the scale; None for `sdpa_lse`."""
    backward_operator: ClassVar[Any] = None
    """Computes gradients there; None for `sdpa_backward`."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What a plan depends on; nothing of it is true where there is no feature at all."""
        return (
            self.window,
            self.softcap,
            self.sinks is not None,
            self.key_starts is not None,
            self.key_lengths is not None,
            None if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1,
            None if self.block_table is None else self.block_table.shape,
            self.window_right,
            self.kv8,
        )

    @property
    def kv8(self) -> str:
        """What keys and values in 8 bits have a scale for, as the problem names it; empty where they have q's dtype."""
        shape = () if self.k_scale is None else self.k_scale.shape
        return {0: "", 1: "head", 2: "page"}[len(shape)] if shape != (1,) else "tensor"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the problem that the features decide."""
        window, softcap, sinks, starts, lengths, packed, _, window_right = self.key[:8]
        return {
            "window": window,
            "window_right": window_right,
            "softcap": softcap > 0,
            "sinks": sinks,
            "starts": starts,
            "lengths": lengths,
            "packed": packed or 0,
        }

    def with_tensors(self, tensors: Sequence[Any]) -> AttentionFeatures:
        """The same features with other tensors, in the order of :attr:`tensors`."""
        return AttentionFeatures._make((*self[:2], *tensors[:6], *self[8:11], *tensors[6:]))

    @property
    def is_varlen(self) -> bool:
        """Whether sequences are packed end to end, or their keys lie in pages."""
        return self.cu_seqlens_q is not None or self.block_table is not None

    def pairs(self, q: Any, k: Any) -> int:
        """Pairs of a row and a key in one head, as torch counts the operations of attention: all pairs of each sequence, also
        those that causal masks, windows and padding hide.

        Lengths of packed sequences and of pages are read, which waits for the GPU. Of tensors without values every sequence is
        as long as the longest may be.

        Args:
            q, k: `[batch, heads, rows, columns]`, as the operators take them.
        """
        rows, keys = q.shape[2], k.shape[2]
        if not self.is_varlen:
            return int(q.shape[0] * rows * keys)
        lengths = self.key_lengths if self.cu_seqlens_k is None else self.cu_seqlens_k.diff()
        if is_fake(lengths) or lengths.is_meta:
            keys *= 1 if self.block_table is None else self.block_table.shape[1]
            return int(len(lengths) * (self.max_seqlen_q or rows) * (self.max_seqlen_k or keys))
        return int((lengths * (rows if self.cu_seqlens_q is None else self.cu_seqlens_q.diff())).sum())

    def feature_arrays(self, q: Any) -> dict[str, Any]:
        """The tensors among the features as the kernel takes them, by the names of its arrays."""
        found: dict[str, Any] = {}
        if self.sinks is not None:
            found["Sinks"] = self.sinks.detach().to(output_dtype(q)).contiguous()
        for name, each in zip(ARRAYS, self.tensors, strict=True):
            if each is not None and ARRAYS[name].dtype == "float32":
                usual = each.dtype is torch.float32 and each.ndim == 1 and each.is_contiguous()
                found[name] = each if usual else each.detach().float().contiguous().view(-1)
            elif each is not None and name not in found:
                usual = each.dtype is torch.int32 and each.is_contiguous()
                found[name] = each if usual else each.to(torch.int32).contiguous()
        return found


NO_FEATURES = AttentionFeatures()
FEATURES, NO_KEY = len(NO_FEATURES), NO_FEATURES.key


def read_given(given: tuple[Any, ...], others: int) -> tuple[Any, ...]:
    """The features and the `others` that follow them at the end of an operator's arguments, where torch's dispatcher leaves out
    those at their defaults."""
    if not given:
        return (NO_FEATURES, *(None,) * others)
    features, more = AttentionFeatures(*given[:FEATURES]), given[FEATURES:]
    return (NO_FEATURES if more and not any(features.key) else features, *more, *(None,) * (others - len(more)))


Window: TypeAlias = "int | tuple[int, int] | None"
"""The type of the `window` argument of `sdpa`."""
ALL_KEYS = 1 << 30
"""Stands for every key after a row's own: more than there are, and within 32 bits when added to a row."""
FEATURE_ARGUMENTS = ("window", "softcap", "sinks", "key_starts", "key_lengths", "q_scale", "k_scale", "v_scale")
"""The arguments of `sdpa` that :func:`read_features` reads, in its order."""


def read_features(
    q: Any,
    k: Any,
    alignment: str | None,
    window: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    key_starts: Any = None,
    key_lengths: Any = None,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    pages: int = 0,
) -> tuple[str | None, AttentionFeatures]:
    """The features that these arguments of `sdpa` mean, checked, and where the causal mask is aligned: a window of two sides
    needs a causal mask.

    Args:
        q, k: tensors that fit together.
        alignment: of the causal mask; None for no mask.
        window, softcap, sinks, key_starts, key_lengths, q_scale, k_scale, v_scale: as the caller gave them; None for those
            not given.
        pages: entries of k, where these are pages.

    Raises:
        ProblemError: one has a value that is not allowed, or does not fit q and k.
    """
    if all(each is None for each in (window, softcap, sinks, key_starts, key_lengths, q_scale, k_scale, v_scale)):
        return alignment, NO_FEATURES
    right = 0
    if isinstance(window, (tuple, list)):
        window, alignment, right = _two_sides(window, alignment)
    if window is not None:
        if not isinstance(window, (int, torch.SymInt)) or isinstance(window, bool) or window < 1:
            raise ProblemError(
                f"window must be a positive integer, the keys that a row sees up to its own, or a pair of keys before and after "
                f"it, got {window!r}"
            )
        if alignment is None:
            raise ProblemError(
                f"window = {window} needs causal = True or 'bottom_right': row i sees the last keys up to its own"
            )
    if softcap is not None and (
        isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 <= softcap < math.inf
    ):
        raise ProblemError(f"softcap must be a positive number, or 0 or None for none, got {softcap!r}")
    heads, batch = (q.shape[-3] if q.ndim > 2 else 1), (q.shape[0] if q.ndim > 3 else 1)
    if sinks is not None:
        check_array("sinks", sinks, f"heads = {heads}", (heads,), q, whole=False)
    for name, each in (("key_starts", key_starts), ("key_lengths", key_lengths)):
        if each is not None:
            check_array(name, each, f"batch = {batch}", (batch,), q)
    found = AttentionFeatures(
        window or 0,
        float(softcap or 0.0),
        sinks,
        key_starts,
        key_lengths,
        window_right=right,
        **read_scales(q, k, q_scale, k_scale, v_scale, pages),
    )
    return alignment, found if any(found.key) else NO_FEATURES


def read_scales(q: Any, k: Any, q_scale: Any, k_scale: Any, v_scale: Any, pages: int) -> dict[str, Any]:
    """The scales of keys and values in 8 bits as tensors `[1]`, `[kv_heads]` or `[pages, 1]`. That of queries in 8 bits is a
    factor of that of the keys.

    Args:
        q: of which the type counts.
        k: `[..., kv_heads, rows, columns]`.
        q_scale: a number, or a tensor of one number or of the shape of `k_scale`; None for queries of 16 bits.
        k_scale, v_scale: numbers, or tensors of one number, `[kv_heads]`, `[pages]` or `[pages, 1]`; None for none.
        pages: entries of k, where these are pages.

    Raises:
        ProblemError: one is missing, is something else or requires a gradient, or they have different shapes.
    """
    if (q_scale is None) == (q.dtype == EIGHT_BIT_DTYPE):
        raise ProblemError(
            f"q_scale is for q of {EIGHT_BIT_DTYPE}, which needs it, got q of {q.dtype} and q_scale = {q_scale!r}; give both, or "
            "queries in 16 bits"
        )
    if q_scale is None and k_scale is None and v_scale is None:
        return {}
    if {type(q_scale), type(k_scale)} <= {int, float} and min(q_scale, k_scale) > 0:
        q_scale, k_scale = None, q_scale * k_scale
    kv_heads = k.shape[-3] if k.ndim > 2 else 1
    sizes: dict[Any, tuple[int, ...]] = {
        **({(pages,): (pages, 1), (pages, 1): (pages, 1)} if pages else {}),
        (kv_heads,): (kv_heads,),
        (): (1,),
        (1,): (1,),
    }
    found: dict[str, Any] = {}
    # What a captured graph writes is not there before its first replay.
    make = _number if is_traced() or process.runtime.is_capturing() else _kept_number
    scales = {"k_scale": k_scale, "v_scale": v_scale} | ({} if q_scale is None else {"q_scale": q_scale})
    for name, each in scales.items():
        if isinstance(each, numbers.Real) and each is not True and 0 < float(each) < math.inf:
            each = make(float(each), k.device)
        shape = tuple(each.shape) if isinstance(each, torch.Tensor) else None
        learned = torch.is_grad_enabled() and getattr(each, "requires_grad", False)
        if shape not in sizes or not each.is_floating_point() or each.device != k.device or learned:
            got = f"{each.dtype} {shape} on {each.device}" if shape is not None else repr(each)
            raise ProblemError(
                f"{name} must be a positive number, or a floating-point tensor on k's device of one number, "
                f"[kv_heads = {kv_heads}]{f' or [pages = {pages}]' if pages else ''}, got {got}"
                f"{', which requires a gradient, and scales have none' * learned}; keys and values in 8 bits need k_scale and "
                "v_scale"
            )
        found[name] = each.reshape(sizes[shape])
    if q_scale is not None:
        found["k_scale"] = found["k_scale"].float() * found.pop("q_scale").float()
    if found["k_scale"].shape != found["v_scale"].shape:
        raise ProblemError(
            f"k_scale (times q_scale) and v_scale must have one shape, got {tuple(found['k_scale'].shape)} and "
            f"{tuple(found['v_scale'].shape)}; expand one of them"
        )
    return found


def _number(value: float, device: Any) -> Any:
    """A tensor of one number."""
    return torch.full((1,), value, dtype=torch.float32, device=device)


_kept_number = functools.lru_cache(256)(_number)
"""Those of a model are few, and each takes a launch to make."""


def in_words(each: Any, numbers: int, kind: str) -> Any:
    """A tensor of 8-bit numbers as the kernel takes it: of type `kind`, in words of `numbers` or, of their own type, with rows
    that begin at multiples of `numbers`. One whose rows are no whole words, or begin elsewhere, is copied."""
    split = each.stride(-1) != 1 or any(step % numbers for step in (*each.stride()[:-1], each.storage_offset()))
    return (each.contiguous() if split else each).view(getattr(torch, kind))


def _two_sides(window: Any, alignment: str | None) -> tuple[int | None, str | None, int]:
    """FlashAttention's pair as ours: keys up to a row's own, the causal mask that is needed, and keys after a row's own."""
    pair = [-1 if each is None else each for each in window]
    if len(pair) != 2 or any(not isinstance(each, int) or isinstance(each, bool) or each < -1 for each in pair):
        raise ProblemError(
            f"window must be a positive integer, or a pair of keys before and after a row's own, -1 for all, "
            f"got {window!r}"
        )
    before, after = (min(each, ALL_KEYS) for each in pair)
    if alignment is not None:
        after = 0
    elif before >= 0 or after >= 0:
        alignment = "bottom_right"
    return before + 1 or None, alignment, (ALL_KEYS if after < 0 else after) if alignment else 0
