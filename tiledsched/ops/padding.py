"""Masks that hide only padding at the ends of each sequence's keys, read as the positions where the keys start and end.

Whether a mask is one of these is known from its values, which are read from the GPU in each call. The call waits for that, and
nothing is remembered: whatever writes to a mask's memory, such as the replay of a CUDA graph, need not tell torch.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch

from tiledsched.serve import process
from tiledsched.serve.execute import is_transformed
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
        or (mask.device.type == process.runtime.device_type and _is_for_a_graph(q))
    ):
        return None
    return _read(mask.reshape(mask.shape[0], -1), q.shape[0])


def _is_for_a_graph(q: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured or, where our kernel serves masks, the call may warm up for a capture. torch has it
    warmed up on a stream other than the default one, and the capture is to find the kernel's program loaded."""
    runtime = process.runtime
    warms_up = process.settings().masks == "own" and bool(runtime.current_stream(q.get_device()))
    return warms_up or runtime.is_capturing()


def edges(seen: torch.Tensor, *, every: bool = False) -> Ends | None:
    """Where the keys of each sequence start and end, `[batch]` int32 each; see :data:`Ends`.

    Args:
        seen: `[batch, keys]`, True for keys that count.
        every: give both tensors in any case.

    Returns:
        None where a sequence has padding between its keys. The call waits for the GPU.
    """
    return _ends(seen.cpu().numpy(), seen.shape[0], seen.device, every=every)


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
    values = mask.cpu()  # few bytes: to work on them where they are would be twenty launches
    if values.dtype == torch.bool:
        seen = values.numpy()
    else:
        added = values.double().numpy()
        seen = added == 0
        if not (seen | (added <= HIDDEN)).all():
            return None
    if not seen.any(1).all():  # a sequence that sees nothing is torch's to answer
        return None
    return _ends(seen, batch, mask.device)


def _ends(seen: Any, batch: int, device: Any, *, every: bool = False) -> Ends | None:
    """The answer of :func:`edges` on a device for what a NumPy array `[batch or 1, keys]` says."""
    columns, counts = seen.shape[1], seen.sum(1)
    starts = seen.argmax(1)
    lengths = numpy.where(counts, columns - seen[:, ::-1].argmax(1), 0)
    if (lengths - starts != counts).any():
        return None
    both = numpy.empty((2, batch), numpy.int32)
    both[0], both[1] = starts, lengths
    left, right = every or starts.any(), every or (lengths < columns).any()
    if not (left or right):
        return None, None
    found = torch.from_numpy(both).to(device)
    return found[0] if left else None, found[1] if right else None
