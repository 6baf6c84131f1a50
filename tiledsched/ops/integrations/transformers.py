"""Attention for Hugging Face transformers: `register()`, then `attn_implementation="tiledsched"`.

The contract is that of the library's own `sdpa` (its `integrations/sdpa_attention.py` and `masking_utils.py`):

- without a mask, one query row sees every key (generation with a cache);
- without a mask, several rows are causal from the top left where the module is causal. A static cache holds more keys than were
  written; the others are cut off;
- every other pattern comes as a mask.

Masks that the kernel can compute itself are not materialised; a :class:`SeenKeys` stands for each of them. These are the masks of
rows appended to a cache, each of which sees the keys up to its own (a prompt in chunks, speculative decoding), of a sliding
window, of padding on the left or right, of one row on a static cache, and of packed sequences. Where a model is called with
FlashAttention's arguments (`cu_seq_lens_q` and so on), these say where packed sequences lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tiledsched.core.copies import closed_over
from tiledsched.core.errors import ConfigError, DeclarationError, ProblemError, UnsupportedError
from tiledsched.core.extras import installing
from tiledsched.ops import fallback
from tiledsched.ops.block_masks import read_mods
from tiledsched.ops.features import AttentionFeatures, Window
from tiledsched.ops.flex import flex
from tiledsched.ops.padding import edges, ends_of
from tiledsched.ops.sdpa import sdpa
from tiledsched.ops.varlen import sdpa_varlen
from tiledsched.serve import process

NAME = "tiledsched"
CHANGES_SCORES = ("head_mask",)
"""Arguments of some models that neither the kernel nor torch's attention computes."""
ONLY_THEIRS = ("position_bias", "cache")
"""Arguments that transformers' own `sdpa` handles: a learnt bias, and the paged cache of continuous batching."""
SPECIAL_ARGUMENTS = {
    *CHANGES_SCORES,
    *ONLY_THEIRS,
    "output_attentions",
    "softcap",
    "s_aux",
    "sinks",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
}
"""Arguments of a model that change what is computed."""


@dataclass(frozen=True, eq=False)
class SeenKeys:
    """A mask that is not materialised: each row sees the last `window` keys up to its own, or all keys, of its own sequence.

    Where a cache holds more keys than were written, the first `columns` keys count, and the last row ends at the last of them.
    """

    columns: int
    """Number of keys from the beginning that count."""
    causal: bool
    """Whether a row sees no keys beyond its own."""
    window: Window
    """Number of keys that a row sees at most, or a pair of keys before and after its own; None for all."""
    starts: torch.Tensor | None
    """`[batch]`: the first key that is no padding; None where there is none on the left."""
    lengths: torch.Tensor | None
    """`[batch]`: the first key of the padding on the right; None where there is none."""
    materialize: Callable[[], torch.Tensor]
    """Makes the full mask."""
    offsets: torch.Tensor | None = None
    """`[sequences + 1]` int32: where packed sequences begin, counted over all rows; None where none are packed."""
    longest: int = 0
    """Number of rows of the longest packed sequence."""
    mask_mod: Any = None
    """The mask as a function for `flex`, where the above do not say it; None where they do."""
    arrays: tuple[torch.Tensor, ...] = ()
    """What the function takes."""
    ndim = 4  # transformers reads it of a mask that it is given

    def contiguous(self) -> SeenKeys:
        """The mask itself: `generate` calls this for every mask that it makes ahead."""
        return self

    # For models that compute with the mask it is the full mask.

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, lambda each: each.materialize(), (args, kwargs or {}))
        return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    def to(self, device: Any, *_: Any, **__: Any) -> SeenKeys:
        """The mask on another device, for models that are spread over several."""
        moved: dict[str, Any] = {name: getattr(self, name) for name in ("starts", "lengths", "offsets")}
        moved = {name: each if each is None else each.to(device) for name, each in moved.items()}
        moved["arrays"] = tuple(each.to(device) for each in self.arrays)
        return replace(self, **moved, materialize=lambda: self.materialize().to(device))


def _operator_of_the_full_mask(name: str) -> Callable[..., torch.Tensor]:
    return lambda self, *given: getattr(self.materialize(), name)(*given)


for _name in ("__getitem__", "__add__", "__mul__", "__and__", "__invert__"):
    setattr(SeenKeys, _name, _operator_of_the_full_mask(_name))


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


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | SeenKeys | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer.

    Args:
        module: the layer; its `is_causal` counts where the argument is None.
        query: `[batch, heads, seq_q, head_dim]`.
        key: `[batch, kv_heads, seq_k, head_dim]`.
        value: like key.
        attention_mask: None, a `SeenKeys`, or a mask that torch's attention takes.
        dropout: probability; not zero only in training.
        scaling: softmax scale; 1 / sqrt(head_dim) unless given.
        is_causal: overrides the layer's.
        more: whatever else the model passes; of it `softcap` (Gemma 2), `s_aux` (GPT-OSS's sinks) and FlashAttention's
            `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` are served.

    Returns:
        `[batch, seq_q, heads, head_dim]`, and no weights.

    Raises:
        UnsupportedError: the model needs what neither the kernel nor torch's attention computes, or something is not
            served and the setting `fallback` is `error`.
    """
    if attention_mask is None and query.shape[2] == 1 and not dropout and more.keys().isdisjoint(SPECIAL_ARGUMENTS):
        # The short way for a step of generation, whose time is spent on the host.
        out = sdpa(query, key, value, scale=scaling, enable_gqa=True, causal=False)
        return out.transpose(1, 2).contiguous(), None
    for name in CHANGES_SCORES:
        if more.get(name) is not None:
            raise UnsupportedError(
                f"{type(module).__name__} needs {name}, which changes the scores and is not served; load "
                "the model with attn_implementation='eager'"
            )
    reason = _not_served(attention_mask, more)
    by_function = isinstance(attention_mask, SeenKeys) and attention_mask.mask_mod is not None
    scores: dict[str, Any] = {"softcap": more.get("softcap"), "sinks": more.get("s_aux", more.get("sinks"))}
    scores = {name: value for name, value in scores.items() if value is not None}
    if by_function and (dropout or scores or (query.requires_grad and torch.is_grad_enabled())):
        reason = reason or "a mask by its own function is served without gradients, dropout, softcap and sinks"
    if reason and scores:  # transformers' own attention computes no softcap and no sinks
        fallback.report(reason)
        out = fallback.attend_in_torch(
            query, key, value, _in_full(attention_mask), dropout, None, scaling, False, AttentionFeatures(**scores)
        )
        return out.transpose(1, 2).contiguous(), None
    if reason:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        fallback.report(reason)
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            _in_full(attention_mask),
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **more,
        )
    if by_function:
        seen: Any = attention_mask
        key, value = key[:, :, : seen.columns], value[:, :, : seen.columns]
        out = flex(query, key, value, mask_mod=seen.mask_mod, arrays=seen.arrays, scale=scaling)
        return out.transpose(1, 2).contiguous(), None
    causal: bool | str = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rows = query.shape[2]
    packed = _packed(attention_mask, query, more)
    if packed is not None:
        if isinstance(attention_mask, SeenKeys):
            causal, scores = attention_mask.causal, scores | {"window": attention_mask.window}
        q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        out = sdpa_varlen(q, k, v, *packed, causal=causal, scale=scaling, dropout_p=dropout, **scores)
        return out.unflatten(0, (query.shape[0], rows)), None
    if isinstance(attention_mask, SeenKeys):
        seen = attention_mask
        key, value = key[:, :, : seen.columns], value[:, :, : seen.columns]
        causal = "bottom_right" if seen.causal else False
        scores |= {"window": seen.window, "key_starts": seen.starts, "key_lengths": seen.lengths}
    elif rows == 1:
        causal = False  # the last token sees every key; from the top left it would see the first only
    elif causal and key.shape[2] > rows:
        key, value = key[:, :, :rows], value[:, :, :rows]  # the part of a static cache that was written
    out = sdpa(query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=True, causal=causal, **scores)
    return out.transpose(1, 2).contiguous(), None


def _packed(attention_mask: Any, query: torch.Tensor, more: dict[str, Any]) -> tuple[Any, ...] | None:
    """Offsets of packed rows and keys and the lengths of the longest, as `sdpa_varlen` takes them; None where none are packed."""
    if isinstance(attention_mask, SeenKeys):
        if attention_mask.offsets is not None:
            return attention_mask.offsets, attention_mask.offsets, attention_mask.longest, attention_mask.longest
        hides_more = attention_mask.starts is not None or attention_mask.lengths is not None
    else:
        hides_more = attention_mask is not None
    ends = more.get("cu_seq_lens_q"), more.get("cu_seq_lens_k")
    if query.shape[0] != 1 or hides_more or not all(isinstance(each, torch.Tensor) for each in ends):
        return None
    longest = (each if type(each) is int else None for each in (more.get("max_length_q"), more.get("max_length_k")))
    return (*ends, *longest)


def mask(*arguments: Any, **named: Any) -> torch.Tensor | SeenKeys | None:
    """What transformers calls once per forward pass: the mask of its own `sdpa`, or a `SeenKeys` that says the same. It takes
    whatever the installed version passes to its mask functions.
    """
    if isinstance(named.get("attention_mask"), SeenKeys):
        return named["attention_mask"]  # made ahead by `generate`
    seen = None if arguments else _seen_keys(named)
    if seen is None and not (arguments or torch.compiler.is_compiling()):
        seen = _by_function(named)
    if seen is not None:
        return seen
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*arguments, **named)


def _seen_keys(named: dict[str, Any]) -> SeenKeys | None:
    """The mask where it is made of a causal mask or none, a sliding window, and padding on the left and right; else None.

    Also None for versions of transformers that pass other arguments; and while it is traced, when no values can be read, if there
    is a padding mask.
    """
    traced = torch.compiler.is_compiling()
    is_required = not (named.get("allow_is_causal_skip", True) or named.get("allow_is_bidirectional_skip", False))
    if is_required and named.get("q_length") == 1:
        return _static_row(named, traced=traced)
    place = named.get("q_offset")
    on_static = isinstance(place, torch.Tensor)
    if isinstance(place, torch.Tensor) and not traced and not _is_capturing(place.device):
        named = named | {"q_offset": int(place)}
    sizes = [size for size in map(named.get, ("q_length", "kv_length", "q_offset", "kv_offset")) if type(size) is int]
    if len(sizes) < 4 or (traced and named.get("attention_mask") is not None):
        return None
    rows, columns, before, hidden = sizes
    if traced:  # closures cannot be read then
        causal, window = _traced_pattern(named)
    else:
        sequences, function = _unpacked(named.get("mask_function"))
        if sequences is not None:
            return _packed_keys(named, sequences, function)
        causal, window = _pattern(function)
        if causal is None and columns < (named.get("local_size") or 0):
            causal = True  # a single chunk, or window: `allow_is_causal_skip` says whether it is causal
    may_be_left_out = (
        named.get("allow_is_causal_skip", True) if causal else named.get("allow_is_bidirectional_skip", False)
    )
    if causal is None or named.get("use_vmap") or not may_be_left_out:
        return None
    slides = window is not None
    if causal:
        columns = min(columns, rows + before - hidden)
        window = window if isinstance(window, int) and window < columns else None
    elif isinstance(window, tuple):  # aligned with the last row: the diagonal, where there are as many rows as keys
        if rows != columns or before or hidden:
            return None
        window = window if min(window) < columns - 1 else None
    if rows < 1 or columns < (rows if causal else 1):
        return None
    padding = named.get("attention_mask")
    starts, lengths = None, None
    if padding is not None:
        if padding.ndim != 2 or padding.shape[1] < hidden + columns:
            return None
        found = edges(padding[:, hidden : hidden + columns].bool())
        if found is None:
            return None
        starts, lengths = found
    appended = causal and 1 < rows < columns and not traced
    if not (slides or appended or on_static) and starts is None and lengths is None:
        return None  # transformers itself decides what to call without a mask
    from transformers.masking_utils import sdpa_mask

    return SeenKeys(
        columns=columns,
        causal=causal,
        window=window,
        starts=starts,
        lengths=lengths,
        materialize=lambda: sdpa_mask(**{**named, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}),
    )


def _static_row(named: dict[str, Any], *, traced: bool) -> SeenKeys | None:
    """The mask of one row on a static cache. The keys that it sees are known on the GPU only, so that every step of a generation
    is the same problem and the same compiled code, and a CUDA graph may hold it.

    None where the mask is another, or where there is padding and values cannot be read.
    """
    before, columns, hidden, padding = (
        named.get(name) for name in ("q_offset", "kv_length", "kv_offset", "attention_mask")
    )
    function, device = named.get("mask_function"), torch.device(named.get("device") or "cpu")
    # Closures cannot be read while it is traced.
    causal, window = (_plain_pattern(function), None) if traced else _pattern(function)
    blind = traced or _is_capturing(device)
    if (
        not causal
        or named.get("use_vmap")
        or isinstance(window, tuple)
        or before is None
        or type(columns) is not int
        or type(hidden) is not int
        or (padding is not None and (blind or padding.ndim != 2))
    ):
        return None
    if isinstance(before, torch.Tensor):
        before = before.clone()  # the cache counts on in place
        named = named | {"q_offset": before}
    keys = torch.arange(hidden, hidden + columns, device=device)
    seen, slides = keys <= before, window is not None and window < columns
    if slides:
        seen = seen & (keys > before - window)
    seen = seen[None].expand(named["batch_size"], -1)
    if padding is not None:
        given = torch.nn.functional.pad(padding.bool(), (0, max(0, hidden + columns - padding.shape[1])))
        found = edges(seen & given[:, hidden : hidden + columns], every=True)
    else:
        found = ends_of(seen)
        found = found if slides else (None, found[1])
    if found is None:
        return None
    from transformers.masking_utils import sdpa_mask

    return SeenKeys(
        columns=columns,
        causal=False,
        window=None,
        starts=found[0],
        lengths=found[1],
        materialize=lambda: sdpa_mask(**named),
    )


def _by_function(named: dict[str, Any]) -> SeenKeys | None:
    """The mask by its own function, for `flex`. None unless the setting `masks` is `own`; and where transformers may leave the
    mask out, or the function has no translation to tile code.

    Where rows and keys begin is a tensor: as a number, it would be part of the code.
    """
    from transformers import masking_utils as theirs

    may_be_left_out = named.get("allow_is_causal_skip", True) or named.get("allow_is_bidirectional_skip", False)
    function, padding = named.get("mask_function"), named.get("attention_mask")
    if process.settings().masks != "own" or may_be_left_out or named.get("use_vmap"):
        return None
    device = torch.device(named.get("device") or "cpu")
    try:
        if padding is not None:
            function = theirs.and_masks(function, theirs.padding_mask_function(padding.bool()))
        places = [torch.as_tensor(named[name], device=device).clone() for name in ("q_offset", "kv_offset")]
        function = theirs.add_offsets_to_mask_function(function, *places)
        _, code, arrays = read_mods(None, function, (), torch.empty(0, device=device))
    except (DeclarationError, ProblemError, KeyError):
        return None
    return SeenKeys(
        columns=named["kv_length"],
        causal=False,
        window=None,
        starts=None,
        lengths=None,
        materialize=functools.partial(theirs.sdpa_mask, **named),
        mask_mod=code,
        arrays=arrays,
    )


def _is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured: no values can be read then."""
    return device.type == "cuda" and process.runtime.is_capturing()


def _packed_keys(named: dict[str, Any], sequences: torch.Tensor, function: Any) -> SeenKeys | None:
    """The mask of packed sequences, by the number `[batch, rows]` of each row's sequence; None where the mask hides more, or
    there is padding.

    It reads from the GPU where the sequences begin: otherwise their count is not known.
    """
    causal, window = _pattern(function)
    rows, columns, before, hidden = (named[name] for name in ("q_length", "kv_length", "q_offset", "kv_offset"))
    if (
        causal is None
        or rows != columns
        or before
        or hidden
        or named.get("attention_mask") is not None
        or named.get("use_vmap")
        or tuple(sequences.shape) != (named.get("batch_size"), rows)
    ):
        return None
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    offsets = torch.nn.functional.pad(begins.flatten().nonzero()[:, 0], (0, 1), value=sequences.numel()).to(torch.int32)
    from transformers.masking_utils import sdpa_mask

    return SeenKeys(
        columns=columns,
        causal=causal,
        window=window,
        starts=None,
        lengths=None,
        offsets=offsets,
        longest=int(offsets.diff().max()),
        materialize=lambda: sdpa_mask(**named),
    )


def _unpacked(mask_function: Any) -> tuple[Any, Any]:
    """The sequence numbers in a mask function of transformers for packed sequences, and the mask function within a sequence;
    None and the function itself where sequences are not packed."""
    parts = _closed_over(mask_function, "and_masks", "mask_functions")
    if isinstance(parts, tuple) and len(parts) == 2:
        for first, second in (parts, parts[::-1]):  # versions differ in their order
            sequences = _closed_over(first, "packed_sequence_mask_function", "packed_sequence_mask")
            if isinstance(sequences, torch.Tensor):
                # Some versions count from where a sequence begins, which changes neither causal masks nor windows.
                function = _closed_over(second, "remap_positions_for_packed_sequence", "mask_function")
                return sequences, second if function is None else function
    return None, mask_function


def _pattern(mask_function: Any) -> tuple[bool | None, Window]:
    """Whether a mask function of transformers is causal, and its window; (None, None) for a pattern that is not known.

    The function is a closure over its parts, and only parts that are known by name are accepted.
    """
    parts = _closed_over(mask_function, "and_masks", "mask_functions")
    if not (isinstance(parts, tuple) and len(parts) == 2):
        return _plain_pattern(mask_function), None
    causal = _plain_pattern(parts[1])
    overlay = "sliding_window_overlay" if causal else "sliding_window_bidirectional_overlay"
    window = _closed_over(parts[0], overlay, "sliding_window")
    if causal is None or type(window) is not int or window < (1 if causal else 0):
        return None, None
    return causal, window if causal else (window, window)


def _plain_pattern(mask_function: Any) -> bool | None:
    """Whether a mask function of transformers that is no closure is causal; None for any other function."""
    from transformers import masking_utils as known

    if mask_function is known.causal_mask_function:
        return True
    return False if mask_function is getattr(known, "bidirectional_mask_function", known) else None


def _traced_pattern(named: dict[str, Any]) -> tuple[bool | None, Window]:
    """Whether the mask is causal, and its window, by the other arguments: a causal mask that may be left out has no more than a
    window, unless it is one of chunks."""
    if named.get("local_size") is None:
        return _plain_pattern(named.get("mask_function")), None
    config, window = named.get("config"), named.get("local_size")
    sliding = window is not None and window == getattr(config, "sliding_window", None)
    if sliding and named.get("allow_is_causal_skip") and getattr(config, "attention_chunk_size", None) is None:
        return True, window
    return None, None


def _closed_over(function: Any, maker: str, name: str) -> Any:
    """The variable `name` of a closure that the function `maker` of transformers made; None for any other function."""
    if getattr(function, "__module__", "") != "transformers.masking_utils" or not function.__qualname__.startswith(
        f"{maker}."
    ):
        return None
    return closed_over(function).get(name)


def _not_served(attention_mask: Any, more: dict[str, Any]) -> str:
    """Why `sdpa` cannot serve a call; empty where it can."""
    for name in ONLY_THEIRS:
        if more.get(name) is not None:
            return f"{name} is not served"
    if more.get("output_attentions"):
        return "attention weights are asked for"
    if attention_mask is not None and not isinstance(attention_mask, SeenKeys):
        return "the mask is more than causal, a sliding window and padding at the ends"
    return ""


def _in_full(attention_mask: Any) -> Any:
    """The mask as a tensor, which transformers' own attention takes."""
    return attention_mask.materialize() if isinstance(attention_mask, SeenKeys) else attention_mask
