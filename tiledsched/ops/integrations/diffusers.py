"""Attention for Hugging Face diffusers: `register()`, then `model.set_attention_backend("tiledsched")`.

diffusers (0.35 and newer) chooses among the backends of an enumeration; a member is added to it. That and the registry
are not public, so a test pins them. The way that needs nothing private is its `native` backend, the default, with
`tiledsched.ops.integrations.torch.route_torch_sdpa`.
"""

from __future__ import annotations

from typing import Any

import torch

from tiledsched.core.errors import ConfigError, UnsupportedError
from tiledsched.core.extras import installing
from tiledsched.ops.padding import hidden_ends
from tiledsched.ops.sdpa import sdpa

NAME = "tiledsched"


def register() -> None:
    """Make the backend `tiledsched` known to diffusers. Doing so twice changes nothing.

    Raises:
        ConfigError: diffusers is missing, or has no attention dispatcher of the kind known.
    """
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    except ImportError as error:
        raise ConfigError(f"diffusers 0.35 or newer is needed ({error}); run: {installing('diffusers')}") from error
    if NAME not in {member.value for member in AttentionBackendName}:
        _add_member(AttentionBackendName)
    _AttentionBackendRegistry.register(AttentionBackendName(NAME))(attention)


def _add_member(names: Any) -> None:
    """Add NAME to an enumeration of strings that has been closed."""
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_map_[member._name_] = member
    names._member_names_.append(member._name_)
    names._value2member_map_[NAME] = member


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> torch.Tensor:
    """What diffusers calls in each attention block.

    Args:
        query: `[batch, seq_q, heads, head_dim]`, as everywhere in diffusers.
        key: `[batch, seq_k, kv_heads, head_dim]`.
        value: like key.
        attn_mask: None, `[batch, seq_k]`, or what torch's attention takes. One that hides no more than padding at the ends of the
            keys is served (its values are read from the GPU in each call); with any other torch computes.
        dropout_p: probability.
        is_causal: limit query row i to key columns 0..i.
        scale: softmax scale; 1 / sqrt(head_dim) unless given.
        enable_gqa: whether head counts may differ.
        return_lse: not served.
        _parallel_config: context parallelism; not served.

    Returns:
        `[batch, seq_q, heads, head_dim]`.

    Raises:
        UnsupportedError: the log-sum-exp or context parallelism is asked for, or something is not served and the setting
            `fallback` is `error`.
    """
    if return_lse or _parallel_config is not None:
        raise UnsupportedError(
            "diffusers asks for the log-sum-exp or context parallelism, which the tiledsched backend "
            "does not serve; use set_attention_backend('native')"
        )
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    ends = None if attn_mask is None or is_causal else hidden_ends(attn_mask, q, k)
    if ends is not None:
        return sdpa(
            q, k, v, None, dropout_p, False, scale, enable_gqa, key_starts=ends[0], key_lengths=ends[1]
        ).transpose(1, 2)
    if attn_mask is not None and attn_mask.ndim == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    return sdpa(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).transpose(1, 2)
