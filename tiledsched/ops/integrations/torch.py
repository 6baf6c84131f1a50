"""Route torch's own `scaled_dot_product_attention` here, and back.

`torch.nn.functional.scaled_dot_product_attention` is replaced while routing is on, process-wide. This works for every torch
since 2.9 and under `torch.compile`: Dynamo guards on the function, so code compiled before is compiled again, and once more when
routing ends. Two other ways were rejected:

- An override of `aten::_scaled_dot_product_flash_attention`, which is what torch's own hook for flash attention
  (`torch.nn.attention.register_flash_attention_impl`, torch 2.11) activates for FA3 and FA4: it is reached only where
  torch has already chosen flash over cuDNN, and it must serve or raise, with no way back to what it replaced.
- A `TorchFunctionMode`: sees names imported earlier, too, but runs Python for every torch function and in one thread.

torch's hook still turns routing on and off: importing this module registers `tiledsched` with it, so that
`torch.nn.attention.activate_flash_attention_impl("tiledsched")` and `restore_flash_attention_impl()` work.

Not routed: modules that imported the function by name before (they keep the original), and C++ code that calls it inside
(the fast path of `nn.TransformerEncoder` and `nn.MultiheadAttention`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.attention
import torch.nn.functional as functional

from tiledsched.ops.sdpa import sdpa

NAME = "tiledsched"

_lock = threading.Lock()
_replaced: Any = functional.scaled_dot_product_attention
"""What `scaled_dot_product_attention` was before routing."""


def routed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` with torch's own signature and meaning, served by `sdpa` where it can be.

    What `sdpa` does not serve it computes with torch's own function, with one warning per reason. Calls that torch treats
    in ways of its own go on to what was replaced: fewer than four axes, and head counts that differ without `enable_gqa`
    (torch broadcasts or refuses them).
    """
    if query.dim() != 4 or (query.shape[1] != key.shape[1] and not enable_gqa):
        return _replaced(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def enabled() -> bool:
    """Whether torch's attention is routed here now."""
    return functional.scaled_dot_product_attention is routed_attention


def enable() -> None:
    """Route torch's attention here, process-wide, until :func:`disable`. Doing so twice changes nothing."""
    global _replaced
    with _lock:
        if not enabled():
            _replaced = functional.scaled_dot_product_attention
            functional.scaled_dot_product_attention = routed_attention


def disable() -> None:
    """Give torch its attention back. Where another program has replaced it since, its replacement stays."""
    with _lock:
        if enabled():
            functional.scaled_dot_product_attention = _replaced


@contextmanager
def route_torch_sdpa() -> Iterator[None]:
    """Routing within a `with` block; what was before it is restored, so blocks nest."""
    before = enabled()
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


class _Routing:
    """The object that torch's hook holds while an implementation is active."""

    def remove(self) -> None:
        disable()


def _activate() -> _Routing:
    enable()
    return _Routing()


if hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)
