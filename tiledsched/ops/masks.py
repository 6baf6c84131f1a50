"""Mask tensors and dropout of `sdpa`, by our kernel with the functions of :mod:`tiledsched.kernels.attention.shipped_mods`.

No number of a mask is read on the host: whoever writes to its memory, such as the replay of a CUDA graph, need not tell anyone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tiledsched.kernels.attention.dropout import Dropout
from tiledsched.kernels.attention.shipped_mods import additive_mask, boolean_mask, causal_mask
from tiledsched.kernels.attention.similarity import FEW_ROWS
from tiledsched.kernels.attention.variants import variant
from tiledsched.kernels.attention_backward.masks import mask_kernel
from tiledsched.ops.arguments import odd_scale, unserved
from tiledsched.ops.block_masks import find_lists, types_of
from tiledsched.ops.flex import flex_lse_operator, flex_operator
from tiledsched.serve import process
from tiledsched.serve.execute import NotLoadedError, has_tangent
from tiledsched.serve.plan import beyond_int32

MOST_DROPPED = 0.99
"""Largest probability of dropout that our kernel serves: in float16 what it divides probabilities by must not be much smaller."""
MEASURED_ARCHS = ("sm_90",)
"""Where mask tensors were timed beside those of torch's backends."""


def attend_masked(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: float, causal: str | None, scale: float | None, return_lse: bool
) -> Any:
    """Attention with a mask tensor or dropout, as torch means them, by our kernel; None where the call is to go to torch.

    A boolean mask is True where a row sees a key; a mask of numbers is added to the scaled scores in float32. Rows that see no
    key give zeros, and a log-sum-exp of minus infinity. Of a boolean mask a launch lists the blocks that are worth a visit.

    Which probabilities are dropped is drawn from torch's generator in each call, and each replay of a CUDA graph: two numbers, of
    which, and of its place, the kernel makes whether a probability is kept. All schedules drop the same.

    Args:
        q, k, v: `[batch, heads, rows, columns]`.
        mask: None, or boolean, float32 or of q's dtype, of a shape that broadcasts to `[batch, heads, seq_q, seq_k]`.
        dropout_p: probability that a probability is dropped.
        causal: top_left, bottom_right or None; None where there is a mask tensor.
        scale: softmax scale or None.
        return_lse: return the log-sum-exp, too.
    """
    if odd_scale(scale) or unserved(q, k, v, None, 0.0) or not 0 <= dropout_p <= MOST_DROPPED:
        return None
    if (
        not (is_own() or (is_faster(q.get_device()) and not dropout_p and q.shape[2] > 1))
        or torch._C._are_functorch_transforms_active()
        or has_tangent((q, k, v, mask))
        or (type(q) is not torch.Tensor and is_traceable_wrapper_subclass(q))  # such as distributed tensors
        or (causal == "bottom_right" and q.shape[2] != k.shape[2])
    ):
        return None
    masks = () if mask is None else (read_mask_tensor(mask, q, k),)
    if masks and masks[0] is None:
        return None
    score_mod, mask_mod = None, causal_mask if causal else None
    if masks:
        score_mod, mask_mod = (None, boolean_mask) if mask.dtype == torch.bool else (additive_mask, None)
    # Drawn on the device, so that a graph that was captured draws anew whenever it is replayed.
    seed = (torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=q.device),) if dropout_p else ()
    # A float that torch.compile holds for a variable becomes a number only so.
    kernel, lists = kernel_of(score_mod, mask_mod, types_of((*masks, *seed)), dropout_p.__float__()), None
    operator = flex_lse_operator if return_lse else flex_operator
    try:
        if mask_mod is not None and q.shape[2] > FEW_ROWS:  # as many lists as the mask has sequences and heads
            lists = find_lists(kernel, q[: masks[0].shape[0], : masks[0].shape[1]] if masks else q, k, masks)
        return operator(q, k, v, lists, [*masks, *seed], kernel, scale)
    except NotLoadedError:  # in a capture of a graph, for which torch needs no program
        if is_own():
            raise
        return None


def kernel_of(score_mod: Any, mask_mod: Any, types: tuple[tuple[int, str], ...], dropout_p: float) -> str:
    """The name of the kernel of a mask and a probability of dropout, which is made first where need be."""
    if not dropout_p:
        return str(mask_kernel(mask_mod is boolean_mask, *types[0]).name)
    return variant(score_mod, mask_mod, types, None, dropout(dropout_p)).name


dropout = functools.lru_cache(maxsize=256)(Dropout)
"""The function that drops with a probability: the same object for the same one, by which its kernel is found."""


def is_own() -> bool:
    """Whether the setting `masks` leaves all such calls to our kernel."""
    return process.settings().masks == "own"


def is_faster(index: int) -> bool:
    """Whether the setting `masks` is `auto`, and mask tensors were measured on the architecture of device `index`, where those of
    several rows were faster than any of torch's backends (docs/results/attention_variants.md)."""
    return process.settings().masks == "auto" and process.device_facts(index).arch in MEASURED_ARCHS


# Under torch.compile: called while tracing and not traced.
is_own._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_faster._dynamo_marked_constant = True  # type: ignore[attr-defined]
kernel_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def read_mask_tensor(mask: Any, q: Any, k: Any) -> Any:
    """A mask as the kernel takes it, a view of the same memory or a copy: `[batch or 1, heads or 1, seq_q, seq_k]`, or without
    the axis of rows where it is the same for all; booleans as bytes. None for what the kernel does not take, or torch refuses.
    """
    dtypes = (torch.bool, torch.float32, q.dtype)
    if (
        mask.dtype not in dtypes
        or mask.device != q.device
        or mask.requires_grad
        or mask.ndim > 4
        or beyond_int32((mask,))
    ):
        return None
    if torch.is_autocast_enabled(q.device.type) and mask.is_floating_point():
        mask = mask.to(q.dtype)  # as torch's own function does
    mask = mask[(None,) * (4 - mask.ndim)]
    sizes = (*q.shape[:3], k.shape[2])
    if any(size not in (1, whole) for size, whole in zip(mask.shape, sizes, strict=True)):
        return None
    mask = mask.expand(-1, -1, -1, sizes[3])
    mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    mask = mask[tuple([slice(None if stride else 1) for stride in mask.stride()[:3]])]  # expanded axes are read once
    return mask[:, :, 0] if mask.shape[2] == 1 else with_aligned_rows(mask)


def with_aligned_rows(mask: Any) -> Any:
    """A mask whose rows lie as the TMA unit loads them: without gaps, and each from a multiple of 16 bytes on. It is copied where
    they do not; else each thread would load its elements one by one, in every step of every block."""
    unit, keys = 16 // mask.element_size(), mask.shape[3]
    if mask.stride(3) == 1 and not any(each % unit for each in mask.stride()[:3]):
        return mask
    return mask.new_empty((*mask.shape[:3], -(-keys // unit) * unit))[..., :keys].copy_(mask)
