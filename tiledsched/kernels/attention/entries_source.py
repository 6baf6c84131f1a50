"""Writes `entries.py`, whose kernels list the constants of :mod:`tiledsched.kernels.attention.tiles` one by one.

cuTile (1.7) takes no dataclass as a kernel's parameter, so that each constant is a parameter of each kernel. After a constant
was added, run `python -m tiledsched.kernels.attention.entries_source`; a test checks that the file is current.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from tiledsched.kernels.attention.options import ARRAYS, PADDED_ARRAYS, VARIANT_ARRAYS
from tiledsched.kernels.attention.tiles import Constants

PATH = Path(__file__).with_name("entries.py")
HEAD = '''"""The kernels that are launched: thin entries over the tile code of :mod:`tiledsched.kernels.attention.tiles`.

Each kernel takes q, k, v and the output, the other arrays of its kind of launch, the softmax scale times log2(e), and the
constants. The kernels differ in their arrays only: an array that a problem does without is no parameter of its kernel, and leaves
no trace in its machine code.

Written by :mod:`tiledsched.kernels.attention.entries_source`; change that file, not this one.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from types import FunctionType
from typing import Annotated

import cuda.tile as ct

from tiledsched.kernels.attention.features import Features
from tiledsched.kernels.attention.flat import run_flat_loop
from tiledsched.kernels.attention.split import Combining, combine_shares, compute_share, compute_split
from tiledsched.kernels.attention.tiles import Constants, schedule_work

# The head dimension is a compile-time constant. Saying so also keeps cuTile from making a size-one batch axis static,
# which would give batch 1 its own machine code.
HeadArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
WideHeadArray = Annotated[ct.Array, ct.ArrayAnnotation(index_dtype=ct.int64, static_shape_dims=(3,))]
# A launch would also make strides of one static, which axes of size one have by chance.
RowArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,), static_stride_dims=(3,))]
# The strides of shares are constant, too, or shares would be loaded four bytes at a time. Those of their maxima and sums are not:
# the compiler (13.4 on sm_90) would load four of them at an address of one (see `core.launch.assumed`).
PartialArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2), static_stride_dims=(0, 1, 2))]
StateArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2))]
ShareArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2, 3), static_stride_dims=(0, 1, 2, 3))]
CounterArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,), static_stride_dims=(1,))]
Int = ct.Constant[int]
Bool = ct.Constant[bool]
'''
TAIL = '''

def attention_combine(
    Out: HeadArray,
    Lse: RowArray,
    Shares: ShareArray,
    State: StateArray,
    COMBINE_ROWS: Int,
    TILE_ROWS: Int,
    TILE_HEADS: Int,
    Q_SUBTILES: Int,
    KV_SPLITS: Int,
    KV_SPAN: Int,
    TILE_V: Int,
    REST_V: Int,
    IEEE_DIVISION: Bool,
    BOTTOM_RIGHT: Bool,
):
    """Out and Lse from the shares of `attention_share`; see :func:`tiledsched.kernels.attention.split.combine_shares`."""
    const = Combining(
        COMBINE_ROWS, TILE_ROWS, TILE_HEADS, Q_SUBTILES, KV_SPLITS, KV_SPAN, TILE_V, REST_V, IEEE_DIVISION, BOTTOM_RIGHT
    )
    combine_shares(Out, Lse, Shares, State, None, const)


def attention_features_combine(
    Out: HeadArray,
    Lse: RowArray,
    Shares: ShareArray,
    State: StateArray,
    Sinks: ct.Array,
    COMBINE_ROWS: Int,
    TILE_ROWS: Int,
    TILE_HEADS: Int,
    Q_SUBTILES: Int,
    KV_SPLITS: Int,
    KV_SPAN: Int,
    TILE_V: Int,
    REST_V: Int,
    IEEE_DIVISION: Bool,
    BOTTOM_RIGHT: Bool,
    WINDOW: Bool,
    SINKS: Bool,
    STARTS: Bool,
    LENGTHS: Bool,
):
    """Out and Lse from the shares of `attention_features_share` or `attention_varlen_share`."""
    const = Combining(
        COMBINE_ROWS,
        TILE_ROWS,
        TILE_HEADS,
        Q_SUBTILES,
        KV_SPLITS,
        KV_SPAN,
        TILE_V,
        REST_V,
        IEEE_DIVISION,
        BOTTOM_RIGHT,
        WINDOW,
        SINKS,
        STARTS,
        LENGTHS,
    )
    combine_shares(Out, Lse, Shares, State, Features(Sinks, None, None, 0, 0, 0.0), const)


def widened(entry):
    """A copy of `entry` with 64-bit indices into q, k, v and the output, for arrays of more than 2**31 - 1 elements."""
    wide = FunctionType(entry.__code__, entry.__globals__, f"{entry.__name__}_wide", entry.__defaults__)
    wide.__module__, wide.__doc__ = entry.__module__, entry.__doc__
    wide.__annotations__ = {
        name: "WideHeadArray" if note == "HeadArray" else note for name, note in entry.__annotations__.items()
    }
    return wide


for _entry in [each for each in globals().values() if isinstance(each, FunctionType) and each.__module__ == __name__]:
    if _entry is not widened:
        globals()[f"{_entry.__name__}_wide"] = widened(_entry)
'''
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
PADDED = " ".join(PADDED_ARRAYS)
VARLEN = ("PACKED", "PAGE", "PAGE_BY_PAGE")
"""Constants of packed sequences and of keys in pages."""
MODS = ("SCORE_MOD", "MASK_MOD", "WEIGHT_MOD", "BLOCK_ROWS", "BLOCK_KEYS")
"""Constants of an author's own attention."""
SPAN = "        KV_SPAN=KV_SPAN,"
"""The constant of kernels whose shares a later launch combines, behind those that have a place."""
KINDS = {
    "attention": ("", "Out = softmax(scale * Q @ K^T, masked) @ V for arrays `[batch, heads, rows, columns]`."),
    "attention_features": (
        PADDED,
        "Attention with optional features; see :mod:`tiledsched.kernels.attention.features`.",
    ),
    "attention_varlen": (
        " ".join(ARRAYS),
        "Attention of packed sequences or keys in pages; see :mod:`tiledsched.kernels.attention.packed`.",
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


def source() -> str:
    """The text of `entries.py`."""
    kinds = ((kind, *each) for kind, each in KINDS.items())
    return "\n".join([HEAD.rstrip("\n"), *(_kernel(*kind, ending) for kind in kinds for ending in LAUNCHES), TAIL])


def variant_source(ending: str, given: Sequence[str], arrays: Sequence[str]) -> str:
    """The text of a kernel with an author's own functions, which it finds under the names `SCORE`, `MASK` and `WEIGHT`.

    Args:
        ending: of the kernel's name, one of :data:`LAUNCHES`.
        given: those of `VARIANT_ARRAYS` that the problem has. The kernel takes no others, and all its inputs before its
            outputs: so a launch passes on its arrays as they are, and makes none in the place of others.
        arrays: the names of the arrays that the functions take.
    """
    return _kernel(VARIANT, " ".join([*given, *arrays]), "Attention of an author's own.", ending)


def _kernel(kind: str, more: str, about: str, ending: str) -> str:
    optional = kind != "attention"
    *constants, span = [
        each
        for each in fields(Constants)
        if each.name not in MODS and (optional or not _is_optional(each) or each.name in SPAN)
    ]
    if kind != "attention_varlen":
        constants = [each for each in constants if each.name not in VARLEN]
    numbers = ["scale_log2: float"] + ["cap_scale: float", "window: int", "window_right: int"] * optional
    arrays, also, call = LAUNCHES[ending]
    named, padded, rest = [*arrays.split(), *more.split()], list(PADDED_ARRAYS), more.split()[len(PADDED_ARRAYS) :]
    of_mods = [each for each in fields(Constants) if each.name in MODS and kind == VARIANT]
    if of_mods:
        named = [*arrays.split()[:3], *more.split(), *arrays.split()[3:]]
        *padded, blocks = [each if each in more.split() else "None" for each in VARIANT_ARRAYS]
        own_arrays = "".join(f"{each}, " for each in more.split() if each not in VARIANT_ARRAYS)
        rest = ["mods=Mods(SCORE, MASK, None, WEIGHT)", f"Blocks={blocks}", f"arrays=({own_arrays})"]
    given = ", ".join([*padded, "window", "window_right", "cap_scale", *rest])
    own = [span] if ending == "_share" else []
    named_constants = [f"        {each.name}={each.name}," for each in of_mods]
    lines = [
        "    const = Constants(",
        *(f"        {each.name}," for each in constants),
        *[SPAN] * len(own),
        *named_constants,
        "    )",
    ]
    lines += [f"    features = Features({given})"] * optional
    call = call.format(features="features" if optional else "None")
    if call.startswith("schedule_work") and kind in ("attention", "attention_features"):
        flat = call.replace("schedule_work", "run_flat_loop")
        lines += ["    if FLAT_STEPS:", f"        {flat}", "    else:", f"        {call}"]
    else:
        lines.append(f"    {call}")
    return _function(f"{kind}{ending}", named, numbers, [*constants, *own, *of_mods], [about, also], lines)


def _is_optional(constant: Field[Any]) -> bool:
    return constant.default is False or constant.default == 0


def _function(
    name: str,
    arrays: Sequence[str],
    numbers: Sequence[str],
    constants: Sequence[Field[Any]],
    about: Sequence[str],
    lines: Sequence[str],
) -> str:
    parameters = [f"{each}: {ANNOTATIONS.get(each, 'ct.Array')}" for each in arrays] + list(numbers)
    parameters += [f"{each.name}: {str(each.type).capitalize()}" for each in constants]
    listed = "".join(f"    {each},\n" for each in parameters)
    body = "\n".join(lines)
    said = f'"""{about[0]}\n\n    {about[1]}\n    """' if about[1] else f'"""{about[0]}"""'
    return f"\n\ndef {name}(\n{listed}):\n    {said}\n{body}"


if __name__ == "__main__":
    PATH.write_text(source(), encoding="utf-8")
    print(PATH)
