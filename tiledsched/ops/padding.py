"""Masks that hide only padding at the ends of each sequence's keys, read as the positions where the keys start and end.

Whether a mask is one of these is known from its values, which are read from the GPU in each call. The call waits for that, and
nothing is remembered: whatever writes to a mask's memory, such as the replay of a CUDA graph, need not tell torch.
"""

from __future__ import annotations

from typing import Any

import torch

from tiledsched.serve import process
from tiledsched.serve.launch import is_transformed
from tiledsched.serve.plan_cache import are_ordinary

HIDDEN = -1e4
"""A mask that adds this or less to a score hides the key: diffusers adds it, and float16 holds it."""
Ends = tuple[Any, Any]
"""key_starts and key_lengths, `[batch]` int32 each; None in place of one where every sequence starts or ends with the array."""


def hidden_ends(mask: Any, q: Any, k: Any) -> Ends | None:
    """Where the keys start and end that a mask shows to every row; None where the mask hides more, or cannot be read.

    The call waits for the GPU. While a CUDA graph is captured no values can be read.

    Args:
        mask: `[batch or 1, 1, 1, keys]`, or `[batch, keys]`: True for what is seen, or what is added to scores.
        q, k: `[batch, heads, rows, columns]`.
    """
    if (
        not isinstance(mask, torch.Tensor)
        or mask.requires_grad
        or mask.device != q.device
        or torch.compiler.is_compiling()
        or is_transformed()
        or not are_ordinary((mask,))
        or q.ndim != 4
        or k.ndim != 4
    ):
        return None
    shapes = [(batch, 1, 1, k.shape[2]) for batch in (1, q.shape[0])] + [(q.shape[0], k.shape[2])]
    if (
        tuple(mask.shape) not in shapes
        or not (mask.dtype == torch.bool or mask.is_floating_point())
        or not mask.numel()
        or (mask.device.type == process.runtime.device_type and process.runtime.is_capturing())
    ):
        return None
    return _read(mask.reshape(mask.shape[0], -1), q.shape[0])


def edges(seen: torch.Tensor, *, every: bool = False) -> Ends | None:
    """Where the keys of each sequence start and end, `[batch]` int32 each; see :data:`Ends`.

    Args:
        seen: `[batch, keys]`, True for keys that count.
        every: give both tensors in any case.

    Returns:
        None where a sequence has padding between its keys. The call waits for the GPU.
    """
    starts, lengths, whole, left, right, _ = _found(seen)
    if not whole:
        return None
    return starts.to(torch.int32) if left or every else None, lengths.to(torch.int32) if right or every else None


def ends_of(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the keys of each sequence start and end, `[batch]` int32 each, if no key between them is padding.

    Args:
        seen: `[batch, keys]`, True for keys that count.
    """
    columns = seen.shape[1]
    places = torch.arange(columns, device=seen.device)
    lengths = torch.where(seen, places + 1, 0).amax(1)
    starts = torch.where(seen, places, columns).amin(1).minimum(lengths)
    return starts.to(torch.int32), lengths.to(torch.int32)


def _read(mask: torch.Tensor, batch: int) -> Ends | None:
    """The ends of a mask `[batch or 1, keys]`; None where it hides more than padding."""
    seen, plain = (mask, None) if mask.dtype == torch.bool else (mask == 0, ((mask == 0) | (mask <= HIDDEN)).all())
    starts, lengths, whole, left, right, usual = _found(seen, plain)
    if not (whole and usual):  # a sequence that sees nothing is torch's to answer
        return None
    starts, lengths = (each.to(torch.int32).expand(batch).contiguous() for each in (starts, lengths))
    return starts if left else None, lengths if right else None


def _found(seen: torch.Tensor, plain: torch.Tensor | None = None) -> tuple[Any, ...]:
    """Starts and ends; whether every key between them counts; whether a sequence starts late, and whether one ends early; and
    whether each sequence has a key and `plain` holds."""
    columns = seen.shape[1]
    starts, lengths = ends_of(seen)
    usual = (lengths > 0).all()
    answers = torch.stack(
        [
            (seen.sum(1) == lengths - starts).all(),
            (starts > 0).any(),
            (lengths < columns).any(),
            usual if plain is None else usual & plain,
        ]
    ).tolist()
    return (starts, lengths, *answers)
