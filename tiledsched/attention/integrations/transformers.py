"""Attention for Hugging Face transformers: `register()`, then `attn_implementation="tiledsched"`.

The contract is that of the library's own `sdpa` (its `integrations/sdpa_attention.py` and `masking_utils.py`): without a
mask, one query row sees every key (generation with a cache), more rows are causal from the top left where the module is
causal (a static cache holds more keys than were written: they are cut off), and any other pattern comes as a mask. One
thing is added: rows appended to a cache whose keys they all may see up to their own (a prompt in chunks, speculative
decoding) get no materialised mask but torch's `causal_lower_right`, which the kernel serves.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right

from tiledsched.attention import fallback
from tiledsched.attention.sdpa import sdpa
from tiledsched.errors import ConfigError, UnsupportedError
from tiledsched.extras import installing

NAME = "tiledsched"
CHANGES_SCORES = ("softcap", "s_aux", "sinks", "head_mask")
"""What some models hand to attention and neither the kernel nor torch's attention computes."""
ONLY_THEIRS = ("position_bias", "cache")
"""What transformers' own `sdpa` treats itself: a learnt bias, and the paged cache of continuous batching."""


def register() -> None:
    """Make `attn_implementation="tiledsched"` known to transformers. Doing so twice changes nothing.

    Raises:
        ConfigError: transformers is missing, or older than its registry for masks (4.53).
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ConfigError(
            f"transformers 4.53 or newer is needed ({error}); run: {installing('transformers')}"
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
              attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
              is_causal: bool | None = None, **more: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """What transformers calls in each layer.

    Args:
        module: the layer; its `is_causal` counts where the argument is None.
        query: `[batch, heads, seq_q, head_dim]`.
        key: `[batch, kv_heads, seq_k, head_dim]`.
        value: like key.
        attention_mask: None, a `CausalBias`, or a mask that torch's attention takes.
        dropout: probability; not zero only in training.
        scaling: softmax scale; 1 / sqrt(head_dim) unless given.
        is_causal: overrides the layer's.
        more: whatever else the model passes.

    Returns:
        `[batch, seq_q, heads, head_dim]`, and no weights.

    Raises:
        UnsupportedError: the model needs what neither the kernel nor torch's attention computes, or something is not
            served and the setting `fallback` is `error`.
    """
    for name in CHANGES_SCORES:
        if more.get(name) is not None:
            raise UnsupportedError(f"{type(module).__name__} needs {name}, which changes the scores and is not served; load "
                                   "the model with attn_implementation='eager'")  # fmt: skip
    reason = _not_served(attention_mask, more)
    if reason:
        fallback.report(reason)
        return _theirs()(module, query, key, value, _plain(attention_mask, query.device), dropout=dropout,
                         scaling=scaling, is_causal=is_causal, **more)  # fmt: skip
    causal: bool | str = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rows = query.shape[2]
    if isinstance(attention_mask, CausalBias):
        causal = "bottom_right"
    elif rows == 1:
        causal = False  # the last token sees every key; the top-left diagonal would leave it the first only
    elif causal and key.shape[2] > rows:
        key, value = key[:, :, :rows], value[:, :, :rows]  # of a static cache, the part that is written
    out = sdpa(query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=True, causal=causal)
    return out.transpose(1, 2).contiguous(), None


def mask(*arguments: Any, **named: Any) -> torch.Tensor | None:
    """What transformers calls once per forward pass: the mask of its `sdpa`, or `causal_lower_right` where that is all.

    Takes whatever the installed version passes to its mask functions.
    """
    lower_right = _lower_right(named)
    if lower_right is not None:
        return lower_right
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*arguments, **named)


def _lower_right(named: dict[str, Any]) -> CausalBias | None:
    """The mask where it says no more than: each row sees the cache and its own chunk up to itself.

    Asked as transformers asks whether it may leave a mask out.
    """
    columns, padding, local = (named.get(name) for name in ("kv_length", "attention_mask", "local_size"))
    if (not named.get("allow_is_causal_skip", True) or named.get("kv_offset", 0) != 0 or type(columns) is not int
            or torch.compiler.is_compiling() or (local is not None and columns >= local)):  # fmt: skip
        return None
    rows, seen = _rows_and_seen(named)
    if rows < 2 or seen < 1 or seen + rows != columns:
        return None
    if padding is not None and not (padding.shape[-1] >= columns and bool(padding[:, :columns].all())):
        return None
    return causal_lower_right(rows, columns)


def _rows_and_seen(named: dict[str, Any]) -> tuple[int, int]:
    """Query rows, and keys before the first of them; versions before 5 give both as a tensor of positions."""
    positions = named.get("cache_position")
    if isinstance(positions, torch.Tensor):
        return len(positions), int(positions[0]) if len(positions) > 1 else 0  # read from the GPU, where it matters
    rows, seen = named.get("q_length"), named.get("q_offset")
    return (rows, seen) if isinstance(rows, int) and isinstance(seen, int) else (0, 0)


def _not_served(attention_mask: torch.Tensor | None, more: dict[str, Any]) -> str:
    for name in ONLY_THEIRS:
        if more.get(name) is not None:
            return f"{name} is not served"
    if more.get("output_attentions"):
        return "attention weights are asked for"
    if attention_mask is not None and not isinstance(attention_mask, CausalBias):
        return "the mask is more than causal (padding, a sliding window, packed sequences, ...)"
    return ""


def _plain(attention_mask: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """A mask that transformers' own attention understands."""
    if isinstance(attention_mask, CausalBias):
        return attention_mask._materialize(device)
    return attention_mask


@functools.cache
def _theirs() -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward
