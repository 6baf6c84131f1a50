"""The kernels that are launched: thin entries over the tile code of :mod:`tiledsched.kernels.attention.tiles`.

Each takes q, k, v and out, the arrays of its kind of launch, the softmax scale times log2(e), and the constants. They
differ in their arrays only; what a problem does without is not in its kernel's parameters nor in its machine code.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False, disable-error-code="valid-type"

from __future__ import annotations

from types import FunctionType
from typing import Annotated

import cuda.tile as ct

from tiledsched.kernels.attention.asked import Asked
from tiledsched.kernels.attention.flat import run_flat_loop
from tiledsched.kernels.attention.split import Combining, combine_shares, compute_share, compute_split
from tiledsched.kernels.attention.tiles import Constants, schedule_work

# The head dimension is a compile-time constant. Saying so also keeps cuTile from making a size-one batch axis static,
# which would give batch 1 its own machine code.
HeadArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
WideHeadArray = Annotated[ct.Array, ct.ArrayAnnotation(index_dtype=ct.int64, static_shape_dims=(3,))]
# Of these a launch would also make strides of one static, which axes of size one have by chance.
RowArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,), static_stride_dims=(3,))]
# Where shares lie is constant too, or they would be loaded four bytes at a time. Not so their maxima and sums: of those the
# compiler (13.4 on sm_90) loads four at an address of one (see `launches.assumed`).
PartialArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2), static_stride_dims=(0, 1, 2))]
StateArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2))]
ShareArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1, 2, 3), static_stride_dims=(0, 1, 2, 3))]
CounterArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(1,), static_stride_dims=(1,))]
Int = ct.Constant[int]
Bool = ct.Constant[bool]


def attention(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, scale_log2: float,
              TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
              LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int, KV_DIRECTION: Int,
              Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool, TMA_LOADS: Bool, TMA_STORE: Bool,
              CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool, BOTTOM_RIGHT: Bool, REST_D: Int, TILE_V: Int,
              REST_V: Int, PACK: Int, KV_SPLITS: Int,
              FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool, STORE_LATE: Bool, Q_IN_REGISTERS: Bool,
              UNROLL: Int, PEEL_FIRST: Bool):  # fmt: skip
    """Out = softmax(scale * Q @ K^T, masked) @ V for arrays `[batch, heads, rows, columns]`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST)  # fmt: skip
    if FLAT_STEPS:
        run_flat_loop(Q, K, V, Out, None, scale_log2, None, const)
    else:
        schedule_work(Q, K, V, Out, None, scale_log2, None, const)


def attention_lse(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, Lse: RowArray, scale_log2: float,
                  TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                  LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int,
                  KV_DIRECTION: Int, Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool,
                  TMA_LOADS: Bool, TMA_STORE: Bool, CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool,
                  BOTTOM_RIGHT: Bool, REST_D: Int, TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int,
                  FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool, STORE_LATE: Bool, Q_IN_REGISTERS: Bool,
                  UNROLL: Int, PEEL_FIRST: Bool):  # fmt: skip
    """The same, and Lse = log(sum(exp(scale * Q @ K^T, masked))) of each row, `[batch, heads, rows, 1]`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST)  # fmt: skip
    if FLAT_STEPS:
        run_flat_loop(Q, K, V, Out, Lse, scale_log2, None, const)
    else:
        schedule_work(Q, K, V, Out, Lse, scale_log2, None, const)


def attention_split(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, Lse: RowArray,
                    Partial: PartialArray, State: StateArray, Counters: CounterArray, scale_log2: float,
                    TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                    LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int,
                    KV_DIRECTION: Int, Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool,
                    TMA_LOADS: Bool, TMA_STORE: Bool, CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool,
                    BOTTOM_RIGHT: Bool, REST_D: Int, TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int,
                    FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool, STORE_LATE: Bool, Q_IN_REGISTERS: Bool,
                    UNROLL: Int, PEEL_FIRST: Bool):  # fmt: skip
    """The same by KV_SPLITS blocks for each work tile; see :mod:`tiledsched.kernels.attention.split`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST)  # fmt: skip
    compute_split(Q, K, V, Out, Lse, Partial, State, Counters, scale_log2, None, const)


def attention_share(Q: HeadArray, K: HeadArray, V: HeadArray,
                    Shares: ShareArray, State: StateArray, scale_log2: float,
                    TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                    LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int,
                    KV_DIRECTION: Int, Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool,
                    TMA_LOADS: Bool, TMA_STORE: Bool, CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool,
                    BOTTOM_RIGHT: Bool, REST_D: Int, TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int,
                    FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool, STORE_LATE: Bool, Q_IN_REGISTERS: Bool,
                    UNROLL: Int, PEEL_FIRST: Bool):  # fmt: skip
    """The shares alone, for a launch of `attention_combine`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST)  # fmt: skip
    compute_share(Q, K, V, Shares, State, scale_log2, None, const)


def attention_asked(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray,
                    Sinks: ct.Array, Starts: ct.Array, Lengths: ct.Array, scale_log2: float, cap_scale: float, window: int,
                    window_right: int,
                    TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                    LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int, KV_DIRECTION: Int,
                    Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool, TMA_LOADS: Bool, TMA_STORE: Bool,
                    CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool, BOTTOM_RIGHT: Bool, REST_D: Int,
                    TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int, FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool,
                    STORE_LATE: Bool, Q_IN_REGISTERS: Bool, UNROLL: Int, PEEL_FIRST: Bool, WINDOW: Bool, WINDOW_RIGHT: Bool,
                    SOFTCAP: Bool,
                    SINKS: Bool, STARTS: Bool, LENGTHS: Bool):  # fmt: skip
    """As `attention`, with what some models ask for beside; see :mod:`tiledsched.kernels.attention.asked`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST, WINDOW,
                      WINDOW_RIGHT,
                      SOFTCAP, SINKS, STARTS, LENGTHS)  # fmt: skip
    asked = Asked(Sinks, Starts, Lengths, window, window_right, cap_scale)
    if FLAT_STEPS:
        run_flat_loop(Q, K, V, Out, None, scale_log2, asked, const)
    else:
        schedule_work(Q, K, V, Out, None, scale_log2, asked, const)


def attention_asked_lse(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, Lse: RowArray,
                        Sinks: ct.Array, Starts: ct.Array, Lengths: ct.Array, scale_log2: float, cap_scale: float,
                        window: int, window_right: int,
                        TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                        LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int,
                        KV_DIRECTION: Int, Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool,
                        TMA_LOADS: Bool, TMA_STORE: Bool, CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool,
                        BOTTOM_RIGHT: Bool, REST_D: Int, TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int,
                        FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool, STORE_LATE: Bool, Q_IN_REGISTERS: Bool, UNROLL: Int,
                        PEEL_FIRST: Bool, WINDOW: Bool, WINDOW_RIGHT: Bool, SOFTCAP: Bool, SINKS: Bool, STARTS: Bool,
                        LENGTHS: Bool):  # fmt: skip
    """The same of `attention_lse`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST, WINDOW,
                      WINDOW_RIGHT,
                      SOFTCAP, SINKS, STARTS, LENGTHS)  # fmt: skip
    asked = Asked(Sinks, Starts, Lengths, window, window_right, cap_scale)
    if FLAT_STEPS:
        run_flat_loop(Q, K, V, Out, Lse, scale_log2, asked, const)
    else:
        schedule_work(Q, K, V, Out, Lse, scale_log2, asked, const)


def attention_asked_split(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, Lse: RowArray,
                          Partial: PartialArray, State: StateArray, Counters: CounterArray,
                          Sinks: ct.Array, Starts: ct.Array, Lengths: ct.Array, scale_log2: float, cap_scale: float,
                          window: int, window_right: int,
                          TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                          LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int,
                          KV_DIRECTION: Int, Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool,
                          TMA_LOADS: Bool, TMA_STORE: Bool, CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool,
                          BOTTOM_RIGHT: Bool, REST_D: Int, TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int,
                          FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool, STORE_LATE: Bool, Q_IN_REGISTERS: Bool,
                          UNROLL: Int, PEEL_FIRST: Bool, WINDOW: Bool, WINDOW_RIGHT: Bool, SOFTCAP: Bool, SINKS: Bool,
                          STARTS: Bool,
                          LENGTHS: Bool):  # fmt: skip
    """The same of `attention_split`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST, WINDOW,
                      WINDOW_RIGHT,
                      SOFTCAP, SINKS, STARTS, LENGTHS)  # fmt: skip
    asked = Asked(Sinks, Starts, Lengths, window, window_right, cap_scale)
    compute_split(Q, K, V, Out, Lse, Partial, State, Counters, scale_log2, asked, const)


def attention_asked_share(Q: HeadArray, K: HeadArray, V: HeadArray,
                          Shares: ShareArray, State: StateArray,
                          Sinks: ct.Array, Starts: ct.Array, Lengths: ct.Array, scale_log2: float, cap_scale: float,
                          window: int, window_right: int,
                          TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                          LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int,
                          KV_DIRECTION: Int, Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool,
                          TMA_LOADS: Bool, TMA_STORE: Bool, CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool,
                          BOTTOM_RIGHT: Bool, REST_D: Int, TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int,
                          FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool, STORE_LATE: Bool, Q_IN_REGISTERS: Bool,
                          UNROLL: Int, PEEL_FIRST: Bool, WINDOW: Bool, WINDOW_RIGHT: Bool, SOFTCAP: Bool, SINKS: Bool,
                          STARTS: Bool,
                          LENGTHS: Bool):  # fmt: skip
    """The same of `attention_share`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST, WINDOW,
                      WINDOW_RIGHT,
                      SOFTCAP, SINKS, STARTS, LENGTHS)  # fmt: skip
    asked = Asked(Sinks, Starts, Lengths, window, window_right, cap_scale)
    compute_share(Q, K, V, Shares, State, scale_log2, asked, const)


def attention_placed(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray,
                     Sinks: ct.Array, Starts: ct.Array, Lengths: ct.Array,
                     CuQ: ct.Array, CuK: ct.Array, Table: ct.Array, scale_log2: float, cap_scale: float, window: int,
                     window_right: int,
                     TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                     LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int, KV_DIRECTION: Int,
                     Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool, TMA_LOADS: Bool, TMA_STORE: Bool,
                     CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool, BOTTOM_RIGHT: Bool, REST_D: Int,
                     TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int, FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool,
                     STORE_LATE: Bool, Q_IN_REGISTERS: Bool, UNROLL: Int, PEEL_FIRST: Bool, WINDOW: Bool, WINDOW_RIGHT: Bool,
                     SOFTCAP: Bool,
                     SINKS: Bool, STARTS: Bool, LENGTHS: Bool, PACKED: Bool, PAGE: Int,
                     PAGE_BY_PAGE: Bool):  # fmt: skip
    """As `attention_asked`, of packed sequences or keys in pages; see :mod:`tiledsched.kernels.attention.packed`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST, WINDOW,
                      WINDOW_RIGHT,
                      SOFTCAP, SINKS, STARTS, LENGTHS, PACKED, PAGE, PAGE_BY_PAGE)  # fmt: skip
    asked = Asked(Sinks, Starts, Lengths, window, window_right, cap_scale, CuQ, CuK, Table)
    schedule_work(Q, K, V, Out, None, scale_log2, asked, const)


def attention_placed_lse(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, Lse: RowArray,
                         Sinks: ct.Array, Starts: ct.Array, Lengths: ct.Array,
                         CuQ: ct.Array, CuK: ct.Array, Table: ct.Array, scale_log2: float, cap_scale: float, window: int,
                         window_right: int,
                         TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                         LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int,
                         KV_DIRECTION: Int, Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool,
                        TMA_LOADS: Bool, TMA_STORE: Bool, CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool,
                         BOTTOM_RIGHT: Bool, REST_D: Int, TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int,
                         FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool, STORE_LATE: Bool, Q_IN_REGISTERS: Bool, UNROLL: Int,
                        PEEL_FIRST: Bool, WINDOW: Bool, WINDOW_RIGHT: Bool, SOFTCAP: Bool, SINKS: Bool, STARTS: Bool,
                         LENGTHS: Bool, PACKED: Bool, PAGE: Int,
                         PAGE_BY_PAGE: Bool):  # fmt: skip
    """The same of `attention_lse`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST, WINDOW,
                      WINDOW_RIGHT,
                      SOFTCAP, SINKS, STARTS, LENGTHS, PACKED, PAGE, PAGE_BY_PAGE)  # fmt: skip
    asked = Asked(Sinks, Starts, Lengths, window, window_right, cap_scale, CuQ, CuK, Table)
    schedule_work(Q, K, V, Out, Lse, scale_log2, asked, const)


def attention_placed_split(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, Lse: RowArray,
                           Partial: PartialArray, State: StateArray, Counters: CounterArray,
                           Sinks: ct.Array, Starts: ct.Array, Lengths: ct.Array,
                           CuQ: ct.Array, CuK: ct.Array, Table: ct.Array, scale_log2: float, cap_scale: float, window: int,
                           window_right: int,
                           TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                           LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int,
                           KV_DIRECTION: Int, Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool,
                          TMA_LOADS: Bool, TMA_STORE: Bool, CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool,
                           BOTTOM_RIGHT: Bool, REST_D: Int, TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int,
                           FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool, STORE_LATE: Bool, Q_IN_REGISTERS: Bool,
                           UNROLL: Int, PEEL_FIRST: Bool, WINDOW: Bool, WINDOW_RIGHT: Bool, SOFTCAP: Bool, SINKS: Bool,
                           STARTS: Bool,
                           LENGTHS: Bool, PACKED: Bool, PAGE: Int,
                           PAGE_BY_PAGE: Bool):  # fmt: skip
    """The same of `attention_split`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST, WINDOW,
                      WINDOW_RIGHT,
                      SOFTCAP, SINKS, STARTS, LENGTHS, PACKED, PAGE, PAGE_BY_PAGE)  # fmt: skip
    asked = Asked(Sinks, Starts, Lengths, window, window_right, cap_scale, CuQ, CuK, Table)
    compute_split(Q, K, V, Out, Lse, Partial, State, Counters, scale_log2, asked, const)


def attention_placed_share(Q: HeadArray, K: HeadArray, V: HeadArray,
                           Shares: ShareArray, State: StateArray,
                           Sinks: ct.Array, Starts: ct.Array, Lengths: ct.Array,
                           CuQ: ct.Array, CuK: ct.Array, Table: ct.Array, scale_log2: float, cap_scale: float, window: int,
                           window_right: int,
                           TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
                           LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Int,
                           KV_DIRECTION: Int, Q_SUBTILES: Int, KV_SUBTILES: Int, QK_AHEAD: Bool, PERMUTE_K: Bool,
                          TMA_LOADS: Bool, TMA_STORE: Bool, CHECK_BOUNDS: Bool, IEEE_DIVISION: Bool, LAZY_RESCALE: Bool,
                           BOTTOM_RIGHT: Bool, REST_D: Int, TILE_V: Int, REST_V: Int, PACK: Int, KV_SPLITS: Int,
                           FLAT_STEPS: Int, RELOAD_Q: Bool, Q_AHEAD: Bool, STORE_LATE: Bool, Q_IN_REGISTERS: Bool,
                           UNROLL: Int, PEEL_FIRST: Bool, WINDOW: Bool, WINDOW_RIGHT: Bool, SOFTCAP: Bool, SINKS: Bool,
                           STARTS: Bool,
                           LENGTHS: Bool, PACKED: Bool, PAGE: Int,
                           PAGE_BY_PAGE: Bool):  # fmt: skip
    """The same of `attention_share`."""
    const = Constants(TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT,
                      BLOCK_ORDER, PERSISTENT, KV_DIRECTION, Q_SUBTILES, KV_SUBTILES, QK_AHEAD, PERMUTE_K, TMA_LOADS,
                      TMA_STORE, CHECK_BOUNDS, IEEE_DIVISION, LAZY_RESCALE, BOTTOM_RIGHT, REST_D, TILE_V, REST_V, PACK,
                      KV_SPLITS, FLAT_STEPS, RELOAD_Q, Q_AHEAD, STORE_LATE, Q_IN_REGISTERS, UNROLL, PEEL_FIRST, WINDOW,
                      WINDOW_RIGHT,
                      SOFTCAP, SINKS, STARTS, LENGTHS, PACKED, PAGE, PAGE_BY_PAGE)  # fmt: skip
    asked = Asked(Sinks, Starts, Lengths, window, window_right, cap_scale, CuQ, CuK, Table)
    compute_share(Q, K, V, Shares, State, scale_log2, asked, const)


def attention_combine(Out: HeadArray, Lse: RowArray, Shares: ShareArray, State: StateArray,
                      COMBINE_ROWS: Int, TILE_ROWS: Int, TILE_HEADS: Int, Q_SUBTILES: Int, KV_SPLITS: Int,
                      TILE_V: Int, REST_V: Int, IEEE_DIVISION: Bool, BOTTOM_RIGHT: Bool):  # fmt: skip
    """Out and Lse from the shares of an `attention_share`; see :func:`tiledsched.kernels.attention.split.combine_shares`."""
    const = Combining(
        COMBINE_ROWS, TILE_ROWS, TILE_HEADS, Q_SUBTILES, KV_SPLITS, TILE_V, REST_V, IEEE_DIVISION, BOTTOM_RIGHT
    )
    combine_shares(Out, Lse, Shares, State, None, const)


def attention_asked_combine(Out: HeadArray, Lse: RowArray, Shares: ShareArray, State: StateArray, Sinks: ct.Array,
                            COMBINE_ROWS: Int, TILE_ROWS: Int, TILE_HEADS: Int, Q_SUBTILES: Int, KV_SPLITS: Int,
                            TILE_V: Int, REST_V: Int, IEEE_DIVISION: Bool, BOTTOM_RIGHT: Bool, WINDOW: Bool, SINKS: Bool,
                            STARTS: Bool, LENGTHS: Bool):  # fmt: skip
    """The same of `attention_asked_share` and `attention_placed_share`."""
    const = Combining(COMBINE_ROWS, TILE_ROWS, TILE_HEADS, Q_SUBTILES, KV_SPLITS, TILE_V, REST_V, IEEE_DIVISION, BOTTOM_RIGHT,
                      WINDOW, SINKS, STARTS, LENGTHS)  # fmt: skip
    combine_shares(Out, Lse, Shares, State, Asked(Sinks, None, None, 0, 0, 0.0), const)


def widened(entry):
    """`entry` with 64-bit indices into q, k, v and out, for arrays of more than 2**31 - 1 elements."""
    wide = FunctionType(entry.__code__, entry.__globals__, f"{entry.__name__}_wide", entry.__defaults__)
    wide.__module__, wide.__doc__ = entry.__module__, entry.__doc__
    wide.__annotations__ = {name: "WideHeadArray" if note == "HeadArray" else note
                            for name, note in entry.__annotations__.items()}  # fmt: skip
    return wide


for _kind in ("attention", "attention_asked", "attention_placed"):
    for _entry in (_kind, f"{_kind}_lse", f"{_kind}_split", f"{_kind}_share", f"{_kind}_combine"):
        if _entry in globals():
            globals()[f"{_entry}_wide"] = widened(globals()[_entry])
