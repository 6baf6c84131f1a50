"""Attention of padded batches in compiled code, where what is padding are values that no trace reads.

Two operators of torch. The first finds, once in a forward pass, where each sequence's keys start and end, and tells the host
whether that is all that the mask says: there is a wait for the GPU in it. The second, in each layer, is the kernel where it is,
and torch's attention under the whole mask where it is not. While a CUDA graph is captured nothing can be waited for and a replay
may hold other values: there it is torch's.
"""

from __future__ import annotations

from typing import Any

import torch

from tiledsched.attention.beside import Beside, visible_keys
from tiledsched.attention.fallback import attend_in_torch, report
from tiledsched.attention.launching import empty_output
from tiledsched.attention.operator import attend, cast_for_autocast
from tiledsched.attention.padding import ends_of

WHOLE, LEFT, RIGHT = 1, 2, 4
"""Of what the host is told: starts and ends say all; some sequence starts late; some ends early."""
_library = torch.library.Library("tiledsched", "FRAGMENT")
_library.define("padding_ends(Tensor seen) -> (Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_library.define("sdpa_padded(Tensor q, Tensor k, Tensor v, Tensor starts, Tensor lengths, Tensor seen, Tensor which, "
                "bool causal, float? scale, SymInt window, float softcap, Tensor? sinks) -> Tensor",
                tags=(torch.Tag.pt2_compliant_tag,))  # fmt: skip


def traced_edges(seen: Any) -> tuple[Any, Any, Any]:
    """Where keys start and end, `[batch]` int32 each, and what of that is so, on the host, `[]` uint8.

    Args:
        seen: `[batch, keys]`, True for keys that count.
    """
    found: tuple[Any, Any, Any] = torch.ops.tiledsched.padding_ends.default(seen)
    return found


def sdpa_padded(q: Any, k: Any, v: Any, starts: Any, lengths: Any, told: tuple[Any, Any], *, causal: str | bool,
                scale: float | None, window: int | None, softcap: float | None = None, sinks: Any = None) -> Any:  # fmt: skip
    """`sdpa` of what :func:`traced_edges` found, without gradients.

    Args:
        q, k, v: tensors that the kernel serves.
        starts, lengths: found.
        told: the mask, and what of them is so.
        causal: bottom_right, or False.
        scale, window, softcap, sinks: as for `sdpa`.
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = cast_for_autocast(q, k, v)
    return torch.ops.tiledsched.sdpa_padded.default(
        q, k, v, starts, lengths, *told, bool(causal), scale, window or 0, softcap or 0.0, sinks
    )


def _padding_ends(seen: Any) -> tuple[Any, Any, Any]:
    starts, lengths = ends_of(seen)
    if seen.is_cuda and torch.cuda.is_current_stream_capturing():
        return starts, lengths, torch.zeros((), dtype=torch.uint8)
    whole = (seen.sum(1) == lengths - starts).all()
    which = whole * WHOLE + (starts > 0).any() * LEFT + (lengths < seen.shape[1]).any() * RIGHT
    return starts, lengths, which.to("cpu", torch.uint8)


def _sdpa_padded(q: Any, k: Any, v: Any, starts: Any, lengths: Any, seen: Any, which: Any, causal: bool, scale: float | None,
                 window: int, softcap: float, sinks: Any) -> Any:  # fmt: skip
    found, alignment = int(which), "bottom_right" if causal else None
    beside = Beside(window, softcap, sinks)
    if found & WHOLE:
        beside = beside._replace(starts=starts if found & LEFT else None, lengths=lengths if found & RIGHT else None)
        return attend(q, k, v, alignment, scale, False, beside)
    report("a mask hides more than padding at the ends, or a CUDA graph is captured, which must hold for any")
    mask, whole = seen[:, None, None], visible_keys(q, k, alignment, beside)
    mask = mask if whole is None else whole & mask
    result = attend_in_torch(q, k, v, mask, 0.0, None, scale, False, Beside(0, softcap, sinks))
    return empty_output(q, v.shape[3]).copy_(result)


def _fake_ends(seen: Any) -> tuple[Any, Any, Any]:
    ends = [seen.new_empty(seen.shape[:1], dtype=torch.int32) for _ in range(2)]
    return (*ends, torch.empty((), dtype=torch.uint8, device="cpu"))


def _fake_padded(q: Any, k: Any, v: Any, *_: Any) -> Any:
    return empty_output(q, v.shape[3])


for _key in ("CUDA", "CPU"):
    _library.impl("padding_ends", _padding_ends, _key)
    _library.impl("sdpa_padded", _sdpa_padded, _key)
torch.library.register_fake("tiledsched::padding_ends", _fake_ends, lib=_library)
torch.library.register_fake("tiledsched::sdpa_padded", _fake_padded, lib=_library)
