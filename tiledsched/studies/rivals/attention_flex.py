"""torch's flex attention, compiled for one problem: windows, capped scores, sinks, and keys that start or end early."""

from __future__ import annotations

from typing import Any

from tiledsched.errors import UnsupportedError
from tiledsched.kernels.attention.declaration import DEFAULT_CAP
from tiledsched.kernels.attention.reference import default_scale
from tiledsched.problem import Problem


def flex_attention(arrays: Any) -> Any:
    """The call on an `AttentionArrays`.

    Sinks have no place in flex attention: the output is weighed by the sigmoid of the log-sum-exp less the sink, which is the
    share of the denominator that the keys have.

    Raises:
        UnsupportedError: nothing is asked for that torch's backends do not compute; compiling takes seconds a problem.
    """
    p: Problem = arrays.problem
    if not p.asked:
        raise UnsupportedError("it is compiled for windows, softcap, sinks, starts and lengths only")
    import torch
    from torch.nn.attention import flex_attention as flex

    asked = dict(zip([n for n in ("sinks", "starts", "lengths") if getattr(p, n)], arrays.asked, strict=True))
    block_mask = None
    if p.causal or p.starts or p.lengths:
        seen = mask_of(p, asked.get("starts"), asked.get("lengths"))
        each_batch = p.batch if p.starts or p.lengths else None
        block_mask = flex.create_block_mask(seen, each_batch, None, p.seq_q, p.seq_k, device=arrays.q.device)
    more: dict[str, Any] = {"block_mask": block_mask, "score_mod": cap_scores if p.softcap else None,
                            "scale": default_scale(p), "enable_gqa": p.group > 1}  # fmt: skip
    request = getattr(flex, "AuxRequest", None)  # of torch 2.9 and later
    if p.sinks:
        more |= {"return_aux": request(lse=True)} if request else {"return_lse": True}
    torch.compiler.reset()  # else it gives up on a function that it has compiled for eight problems
    attend = torch.compile(flex.flex_attention, dynamic=False)
    sinks = asked.get("sinks")

    def call() -> Any:
        found = attend(arrays.q, arrays.k, arrays.v, **more)
        if sinks is None:
            return found
        out, more_found = found
        lse = more_found.lse if request else more_found
        return out * torch.sigmoid(lse - sinks.float()[None, :, None])[..., None].to(out.dtype)

    return call


def cap_scores(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
    """A scaled score, capped."""
    import torch

    return DEFAULT_CAP * torch.tanh(score / DEFAULT_CAP)


def mask_of(p: Problem, starts: Any, lengths: Any) -> Any:
    """Whether a row sees a key, as flex attention asks."""
    offset = p.seq_k - p.seq_q if p.alignment == "bottom_right" else 0

    def seen(batch: Any, head: Any, row: Any, key: Any) -> Any:
        visible = key >= 0
        if p.causal:
            visible = visible & (key <= row + offset + p.window_right)
        if p.window:
            visible = visible & (key > row + offset - p.window)
        if starts is not None:
            visible = visible & (key >= starts[batch])
        if lengths is not None:
            visible = visible & (key < lengths[batch])
        return visible

    return seen
