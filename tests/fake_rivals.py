"""FlashAttention-4 as no machine without a GPU has it: its package, and functions that compute on the CPU what its own would."""

from __future__ import annotations

import importlib.machinery
import math
import sys
import types

import torch

FLASH_CALLS: list[tuple[object, ...]] = []
"""For each call of :func:`flash`, the longest sequences that it was told of, and where q and k lie."""
OUT: list[int] = []
"""Where the outputs of these calls lie."""


def install_flash_4(monkeypatch, **inner):
    """Install a package that has these functions in its module `interface`; returns the package's module of functions."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    vars(sys.modules["flash_attn.cute.interface"]).update(inner)
    FLASH_CALLS.clear()
    return sys.modules["flash_attn.cute"]


def attend(q, k, v, scale, causal=False, window=None, softcap=0.0, sink=None, used=None):
    """(output, log-sum-exp) of `[batch, rows, heads, columns]`, the mask aligned at the bottom right."""
    q, k, v = (each.transpose(1, 2).float() for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    rows, keys = scores.shape[-2:]
    last, column = torch.arange(rows)[:, None] + keys - rows, torch.arange(keys)[None]
    hidden = (column > last) & bool(causal or window)
    if window:
        hidden = hidden | (column < last - window[0])
    if used is not None:
        hidden = hidden | (column >= used[:, None, None, None])
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.float()[None, :, None, None].expand_as(lse))
    return ((scores - lse).exp() @ v).transpose(1, 2), lse[..., 0]


def flash(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    seqused_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    softcap=None,
    window_size_left=None,
    window_size_right=None,
    learnable_sink=None,
    num_splits=1,
    out=None,
    lse=None,
    return_lse=False,
):
    """FlashAttention-4's inner function of the forward pass, each sequence by itself."""
    if num_splits != 1:
        raise NotImplementedError("no splits on this GPU")
    FLASH_CALLS.append((max_seqlen_q, max_seqlen_k, q.data_ptr(), k.data_ptr()))
    window = None if window_size_left is None else (window_size_left, window_size_right)
    options = (softmax_scale, causal, window, softcap or 0.0, learnable_sink)
    made = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype) if out is None else out.zero_()
    OUT.append(made.data_ptr())
    if cu_seqlens_q is None and page_table is None:
        found, sums = attend(q, k, v, *options, seqused_k)
        if return_lse:
            lse.copy_(sums)
        return made.copy_(found), None
    for index in range(len(seqused_k) if cu_seqlens_q is None else len(cu_seqlens_q) - 1):
        own = index if cu_seqlens_q is None else slice(cu_seqlens_q[index], cu_seqlens_q[index + 1])
        if page_table is None:
            keys, values = (each[cu_seqlens_k[index] : cu_seqlens_k[index + 1]] for each in (k, v))
        else:
            assert page_table.dtype == torch.int32
            used = int(seqused_k[index])
            pages = page_table[index, : -(-used // k.shape[1])].long()
            keys, values = (each[pages].flatten(0, 1)[:used] for each in (k, v))
        if len(q[own]) and len(keys):
            made[own].copy_(attend(q[own][None], keys[None], values[None], *options)[0][0].nan_to_num())
    return made, None


def older(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0):
    """The public function of a beta that has no inner one."""
    window = None if window_size[0] is None else window_size
    return attend(q, k, v, softmax_scale, causal, window, softcap, learnable_sink)[0].to(q.dtype), None


def older_varlen(q, k, v, seqused_k=None, softmax_scale=None, causal=False):
    """Its function for padded batches."""
    return attend(q, k, v, softmax_scale, causal, used=seqused_k)[0].to(q.dtype)
