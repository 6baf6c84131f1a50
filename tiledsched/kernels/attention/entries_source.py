"""The text of the kernels of attention, which list the constants of :mod:`tiledsched.kernels.attention.tiles` one by one.

cuTile (1.7) takes no dataclass as a kernel's parameter, so that each constant is a parameter of each kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from tiledsched.kernels.attention.options import ARRAYS, PADDED_ARRAYS, VARIANT_ARRAYS, VARLEN_ARRAYS
from tiledsched.kernels.attention.tiles import Constants

ANNOTATIONS = {
    "Q": "HeadArray",
    "K": "HeadArray",
    "V": "HeadArray",
    "Out": "HeadArray",
    "Lse": "RowArray",
    "Partial": "PartialArray",
    "Shares": "ShareArray",
    "State": "StateArray",
    "Counters": "CounterArray",
}
"""Array -> its annotation; all others are plain arrays."""
FEATURES = ("WINDOW", "WINDOW_RIGHT", "SOFTCAP", "SINKS", "STARTS", "LENGTHS", "NUMBERS")
"""Constants of kernels with optional features."""
VARLEN = ("PACKED", "PAGE", "PAGE_BY_PAGE")
"""Constants of packed sequences and of keys in pages."""
MODS = ("SCORE_MOD", "MASK_MOD", "WEIGHT_MOD", "BLOCK_ROWS", "BLOCK_KEYS")
"""Constants of an author's own attention."""
SPAN = "KV_SPAN"
"""The constant of kernels whose shares a later launch combines."""
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "attention": ((), "Out = softmax(scale * Q @ K^T, masked) @ V for arrays `[batch, heads, rows, columns]`."),
    "attention_features": (
        PADDED_ARRAYS,
        "Attention with optional features; see :mod:`tiledsched.kernels.attention.features`.",
    ),
    "attention_varlen": (
        VARLEN_ARRAYS,
        "Attention of packed sequences or keys in pages; see :mod:`tiledsched.kernels.attention.packed`.",
    ),
    "attention_kv8": (
        tuple(ARRAYS),
        "Attention over keys and values in 8 bits; see :mod:`tiledsched.kernels.attention.eight_bits`.",
    ),
}
"""Kind of kernel -> the arrays of its features, and one line about it."""
VARIANT = "attention_variant"
"""The kind of kernel of an author's own attention."""
LAUNCHES = {
    "": ("Q K V Out", "", "schedule_work(Q, K, V, Out, None, scale_log2, {features}, const)"),
    "_lse": (
        "Q K V Out Lse",
        "Lse is the log-sum-exp of each row's scores, `[batch, heads, rows, 1]`.",
        "schedule_work(Q, K, V, Out, Lse, scale_log2, {features}, const)",
    ),
    "_split": (
        "Q K V Out Lse Partial State Counters",
        "KV_SPLITS blocks share the keys of a work tile, and the last of them to finish combines the shares.",
        "compute_split(Q, K, V, Out, Lse, Partial, State, Counters, scale_log2, {features}, const)",
    ),
    "_share": (
        "Q K V Shares State",
        "KV_SPLITS blocks share the keys of a work tile, and a later launch combines the shares.",
        "compute_share(Q, K, V, Shares, State, scale_log2, {features}, const)",
    ),
}
"""Ending of a kernel's name -> its arrays, a second line about it, and its call."""


def kernel_source(kind: str, ending: str) -> str:
    """The text of a kernel that ships: of one of :data:`KINDS`, its name with an ending of :data:`LAUNCHES`."""
    more, about = KINDS[kind]
    behind = [each if each in VARLEN_ARRAYS else f"{each}={each}" for each in more[len(PADDED_ARRAYS) :]]
    return _source(kind, (), more, [*PADDED_ARRAYS, "window", "window_right", "cap_scale", *behind], about, ending)


def variant_source(ending: str, given: Sequence[str], arrays: Sequence[str]) -> str:
    """The text of a kernel with an author's own functions, which it finds under the names `SCORE`, `MASK` and `WEIGHT`.

    Args:
        ending: of the kernel's name, one of :data:`LAUNCHES`.
        given: those of `VARIANT_ARRAYS` that the problem has. The kernel takes no others, and all its inputs before its
            outputs: so a launch passes on its arrays as they are, and makes none in the place of others.
        arrays: the names of the arrays that the functions take.
    """
    *padded, blocks = [each if each in given else "None" for each in VARIANT_ARRAYS]
    own_arrays = "".join(f"{each}, " for each in arrays)
    rest = ["mods=Mods(SCORE, MASK, None, WEIGHT)", f"Blocks={blocks}", f"arrays=({own_arrays})"]
    features = [*padded, "window", "window_right", "cap_scale", *rest]
    return _source(VARIANT, (*given, *arrays), (), features, "Attention of an author's own.", ending)


def _source(
    kind: str, inputs: Sequence[str], more: Sequence[str], features: Sequence[str], about: str, ending: str
) -> str:
    """The text of a kernel.

    Args:
        kind: the name of the kernel without its ending.
        inputs: arrays that it takes between q, k and v and what it writes.
        more: arrays that it takes behind these.
        features: arguments of its `Features`.
        about: one line about it.
        ending: of its name, one of :data:`LAUNCHES`.
    """
    own, also, call = LAUNCHES[ending]
    optional = kind != "attention"
    arrays = [*own.split()[:3], *inputs, *own.split()[3:], *more]
    numbers = ["scale_log2: float", *["cap_scale: float", "window: int", "window_right: int"] * optional]
    kinds_of = {
        **dict.fromkeys(MODS, (VARIANT,)),
        **dict.fromkeys(VARLEN, ("attention_varlen", "attention_kv8")),
        "KV8": ("attention_kv8",),
        "Q8": ("attention_kv8",),
    }
    constants = [
        each
        for each in fields(Constants)
        if (each.name == SPAN and ending == "_share")
        or (each.name != SPAN and kind in kinds_of.get(each.name, (kind,)) and (optional or each.name not in FEATURES))
    ]
    parameters = [f"{each}: {ANNOTATIONS.get(each, 'ct.Array')}" for each in arrays] + numbers
    parameters += [f"{each.name}: {str(each.type).capitalize()}" for each in constants]
    lines = [f"def {kind}{ending}(", *(f"    {each}," for each in parameters), "):"]
    lines += [f'    """{" ".join(filter(None, (about, also)))}"""', "    const = Constants("]
    lines += [*(f"        {each.name}={each.name}," for each in constants), "    )"]
    lines += [f"    features = Features({', '.join(features)})"] * optional
    call = call.format(features="features" if optional else "None")
    if call.startswith("schedule_work") and kind in ("attention", "attention_features"):
        flat = call.replace("schedule_work", "run_flat_loop")
        lines += ["    if FLAT_STEPS:", f"        {flat}", "    else:", f"        {call}"]
    else:
        lines.append(f"    {call}")
    return "\n".join([*lines, ""])
