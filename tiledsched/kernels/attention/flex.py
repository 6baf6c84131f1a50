"""torch's flex attention, compiled for one problem: windows, softcap, sinks, sequence lengths, and packed sequences."""

from __future__ import annotations

from typing import Any

from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Arrays, Call
from tiledsched.kernels.attention.scales import DEFAULT_CAP, default_scale


def flex_attention(arrays: Arrays) -> Call:
    """The call on the inputs of a problem.

    Sinks have no place in flex attention: the output is weighed by the sigmoid of the log-sum-exp less the sink, which is the
    share of the denominator that the keys have.

    Raises:
        UnsupportedError: nothing is asked for that torch's backends do not compute (compiling takes seconds a problem), or keys
            in pages, which it would have to be given gathered.
    """
    p = arrays.problem
    if not p.has_features:
        raise UnsupportedError("it is compiled for windows, softcap, sinks, starts, lengths and packed sequences only")
    if p.page:
        raise UnsupportedError("it reads no pages, and keys gathered before are another problem")
    import torch
    from torch.nn.attention import flex_attention as flex

    given, (q, k, v) = arrays.by_name, arrays.tensors[:3]
    sinks, starts, lengths = given.get("Sinks"), given.get("Starts"), given.get("Lengths")
    seen = None
    if p.packed or p.causal or p.starts or p.lengths:
        seen = mask_of(p, starts, lengths, p.packed and documents(p, given["CuQ"], given["CuK"]))
    each_batch = p.batch if p.starts or p.lengths else None
    more: dict[str, Any] = {
        "block_mask": seen and flex.create_block_mask(seen, each_batch, None, p.seq_q, p.seq_k, device=q.device),
        "score_mod": cap_scores if p.softcap else None,
        "scale": default_scale(p),
        "enable_gqa": p.group > 1,
    }
    request = getattr(flex, "AuxRequest", None)  # of torch 2.9 and later
    if p.sinks:
        more |= {"return_aux": request(lse=True)} if request else {"return_lse": True}
    torch.compiler.reset()  # else it gives up on a function that it has compiled for eight problems
    attend = torch.compile(flex.flex_attention, dynamic=False)

    def call() -> Any:
        found = attend(q, k, v, **more)
        if sinks is None:
            return found
        out, more_found = found
        lse = more_found.lse if request else more_found
        return out * torch.sigmoid(lse - sinks.float()[None, :, None])[..., None].to(out.dtype)

    return call


def cap_scores(score: Any, batch: Any, head: Any, row: Any, key: Any) -> Any:
    """Flex attention's score function for softcap: the capped score."""
    import torch

    return DEFAULT_CAP * torch.tanh(score / DEFAULT_CAP)


def mask_of(p: Problem, starts: Any, lengths: Any, packed: Any = None) -> Any:
    """Flex attention's mask function: whether a row sees a key. `packed` is what :func:`documents` returns."""
    offset = p.seq_k - p.seq_q if p.alignment == "bottom_right" else 0

    def seen(batch: Any, head: Any, row: Any, key: Any) -> Any:
        visible, last = (packed[0][row] == packed[1][key], packed[2][row]) if packed else (key >= 0, row + offset)
        if p.causal:
            visible = visible & (key <= last + p.window_right)
        if p.window:
            visible = visible & (key > last - p.window)
        if starts is not None:
            visible = visible & (key >= starts[batch])
        if lengths is not None:
            visible = visible & (key < lengths[batch])
        return visible

    return seen


def documents(p: Problem, cu_q: Any, cu_k: Any) -> Any:
    """The number of the packed sequence of each row, `[seq_q]`, and of each key, `[seq_k]`; and of each row the key on the mask's
    diagonal in its sequence, `[seq_q]`."""
    import torch

    def sequence_of(offsets: Any, count: int) -> Any:
        places = torch.arange(count, device=offsets.device)
        return torch.searchsorted(offsets[1:].contiguous(), places.to(offsets.dtype), right=True)

    of_row, of_key = sequence_of(cu_q, p.seq_q), sequence_of(cu_k, p.seq_k)
    end = 1 if p.alignment == "bottom_right" else 0  # both ends of a sequence meet there, or both beginnings
    shift = (cu_k[end : len(cu_k) - 1 + end] - cu_q[end : len(cu_q) - 1 + end])[of_row]
    return of_row, of_key, torch.arange(p.seq_q, device=cu_q.device) + shift
