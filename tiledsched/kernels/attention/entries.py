"""The kernels that are launched: thin entries over the tile code of :mod:`tiledsched.kernels.attention.tiles`.

Each kernel takes q, k, v and the output, the other arrays of its kind of launch, the softmax scale times log2(e), and the
constants. The kernels differ in their arrays only: an array that a problem does without is no parameter of its kernel, and leaves
no trace in its machine code.

All but the last two are made here of the text that :mod:`tiledsched.kernels.attention.entries_source` writes.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

import itertools
from types import FunctionType
from typing import Annotated

import cuda.tile as ct

from tiledsched.core.sources import compiled
from tiledsched.kernels.attention.entries_source import KINDS, LAUNCHES, kernel_source
from tiledsched.kernels.attention.features import Features

# The text of the kernels reads these names.
from tiledsched.kernels.attention.flat import run_flat_loop  # noqa: F401
from tiledsched.kernels.attention.split import Combining, combine_shares, compute_share, compute_split  # noqa: F401
from tiledsched.kernels.attention.tiles import Constants, schedule_work  # noqa: F401
from tiledsched.kernels.rows import Bool, Int

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
        TILE_M=COMBINE_ROWS,
        TILE_ROWS=TILE_ROWS,
        TILE_HEADS=TILE_HEADS,
        Q_SUBTILES=Q_SUBTILES,
        KV_SPLITS=KV_SPLITS,
        KV_SPAN=KV_SPAN,
        TILE_V=TILE_V,
        REST_V=REST_V,
        IEEE_DIVISION=IEEE_DIVISION,
        BOTTOM_RIGHT=BOTTOM_RIGHT,
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
    SCORE_MOD: Bool,
    MASK_MOD: Bool,
):
    """Out and Lse from the shares of `attention_features_share` or `attention_varlen_share`."""
    const = Combining(
        TILE_M=COMBINE_ROWS,
        TILE_ROWS=TILE_ROWS,
        TILE_HEADS=TILE_HEADS,
        Q_SUBTILES=Q_SUBTILES,
        KV_SPLITS=KV_SPLITS,
        KV_SPAN=KV_SPAN,
        TILE_V=TILE_V,
        REST_V=REST_V,
        IEEE_DIVISION=IEEE_DIVISION,
        BOTTOM_RIGHT=BOTTOM_RIGHT,
        WINDOW=WINDOW,
        SINKS=SINKS,
        STARTS=STARTS,
        LENGTHS=LENGTHS,
        SCORE_MOD=SCORE_MOD,
        MASK_MOD=MASK_MOD,
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


for _kind, _ending in itertools.product(KINDS, LAUNCHES):
    compiled(f"<{_kind}{_ending}>", kernel_source(_kind, _ending), globals(), f"{_kind}{_ending}")
for _entry in [each for each in globals().values() if isinstance(each, FunctionType) and each.__module__ == __name__]:
    if _entry is not widened:
        globals()[f"{_entry.__name__}_wide"] = widened(_entry)
