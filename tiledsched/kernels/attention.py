"""Flash-attention forward in cuTile, with its schedule left open.

Online softmax in base 2 after Dao et al., FlashAttention-2 (arXiv:2307.08691), algorithm 1: each block owns `TILE_M`
query rows and walks over the keys in tiles of `TILE_N`, keeping a running row maximum, row sum and output accumulator.
The scale is applied after the row maximum is taken, which is right for positive scales and saves a pass over the tile.

The small functions below are tile code; they run on the GPU through cuTile and, unmodified, on the CPU through
`tiledsched.interpreter`. `AttentionTemplate` is the host's side of the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import cuda.tile as ct

from tiledsched.errors import ProblemError
from tiledsched.kernels.reference import default_scale
from tiledsched.kernels.template import KernelTemplate, ProblemClass
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule

if TYPE_CHECKING:
    from cuda.tile.compilation import KernelSignature

BLOCK_ORDERS = ("natural", "reversed", "heads_fastest")
"""Order in which blocks take query tiles; the kernel sees the index into this tuple."""
LOG2_E = 1.0 / math.log(2.0)
SMALLEST_NORMAL, LARGEST_FLOAT = 1.2e-38, 3.4e38

# The head dimension is a compile-time constant. Saying so also keeps cuTile from making a size-one batch axis static,
# which would give batch 1 its own machine code.
HeadArray = Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(3,))]
Int = ct.Constant[int]
Bool = ct.Constant[bool]


def attention(Q: HeadArray, K: HeadArray, V: HeadArray, Out: HeadArray, scale_log2: float,
              TILE_M: Int, TILE_N: Int, TILE_D: Int, GROUP: Int, CAUSAL: Bool, EVEN: Bool, FP16_ACCUM: Bool,
              LATENCY_K: Int, LATENCY_V: Int, LOOP_SPLIT: Bool, BLOCK_ORDER: Int, PERSISTENT: Bool):  # fmt: skip
    """Out = softmax(scale * Q @ K^T, masked) @ V for arrays `[batch, heads, rows, head_dim]`.

    `scale_log2` is the softmax scale times log2(e). A block takes one query tile, or, when PERSISTENT, every
    `num_blocks`-th one.
    """
    query_tiles = ct.cdiv(Q.shape[2], TILE_M)
    if PERSISTENT:
        for work in range(ct.bid(0), query_tiles * Q.shape[1] * Q.shape[0], ct.num_blocks(0)):
            attend(Q, K, V, Out, scale_log2, work, query_tiles, TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN,
                   FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT, BLOCK_ORDER)  # fmt: skip
    else:
        attend(Q, K, V, Out, scale_log2, ct.bid(0), query_tiles, TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN,
               FP16_ACCUM, LATENCY_K, LATENCY_V, LOOP_SPLIT, BLOCK_ORDER)  # fmt: skip


def attend(Q, K, V, Out, scale_log2, work, query_tiles, TILE_M, TILE_N, TILE_D, GROUP, CAUSAL, EVEN, FP16_ACCUM,
           LATENCY_K, LATENCY_V, LOOP_SPLIT, BLOCK_ORDER):  # fmt: skip
    """One query tile, start to finish."""
    tile, head, batch = coordinates(work, query_tiles, Q.shape[1], Q.shape[0], CAUSAL, BLOCK_ORDER)
    kv_head = head // GROUP
    accum_dtype = ct.float16 if FP16_ACCUM else ct.float32
    rows = tile * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, TILE_D), padding_mode=ct.PaddingMode.ZERO)
    q = q.reshape((TILE_M, TILE_D))

    row_max = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    row_sum = ct.full((TILE_M, 1), 0.0, dtype=ct.float32)
    acc = ct.full((TILE_M, TILE_D), 0.0, dtype=accum_dtype)

    # Key tiles before `first_masked` lie wholly inside the mask; those from `last` on lie wholly outside.
    seq_k = K.shape[2]
    if CAUSAL:
        first_masked = min(tile * TILE_M, seq_k) // TILE_N
        last = ct.cdiv(min((tile + 1) * TILE_M, seq_k), TILE_N)
    else:
        first_masked = seq_k // TILE_N
        last = ct.cdiv(seq_k, TILE_N)

    if LOOP_SPLIT:
        for j in range(0, first_masked):
            row_max, row_sum, acc = step(q, K, V, batch, kv_head, j, rows, row_max, row_sum, acc, scale_log2, TILE_N,
                                         TILE_D, False, False, accum_dtype, LATENCY_K, LATENCY_V)  # fmt: skip
        for j in range(first_masked, last):
            row_max, row_sum, acc = step(q, K, V, batch, kv_head, j, rows, row_max, row_sum, acc, scale_log2, TILE_N,
                                         TILE_D, CAUSAL, not EVEN, accum_dtype, LATENCY_K, LATENCY_V)  # fmt: skip
    else:
        for j in range(0, last):
            row_max, row_sum, acc = step(q, K, V, batch, kv_head, j, rows, row_max, row_sum, acc, scale_log2, TILE_N,
                                         TILE_D, CAUSAL, not EVEN, accum_dtype, LATENCY_K, LATENCY_V)  # fmt: skip

    out = ct.truediv(acc.astype(ct.float32), row_sum, flush_to_zero=True, rounding_mode=ct.RoundingMode.APPROX)
    ct.store(Out, (batch, head, tile, 0), out.astype(Out.dtype).reshape((1, 1, TILE_M, TILE_D)))


def coordinates(work, query_tiles, heads, batches, CAUSAL, BLOCK_ORDER):
    """(query tile, head, batch) of the `work`-th block."""
    if BLOCK_ORDER == 2:  # heads_fastest: one query tile of every head, then the next; the longest rows first
        batch_head = work % (heads * batches)
        tile = work // (heads * batches)
    else:
        batch_head = work // query_tiles
        tile = work % query_tiles
    if BLOCK_ORDER == 1 or (BLOCK_ORDER == 2 and CAUSAL):
        tile = query_tiles - 1 - tile
    return tile, batch_head % heads, batch_head // heads


def step(q, K, V, batch, kv_head, j, rows, row_max, row_sum, acc, scale_log2, TILE_N, TILE_D, MASK_ROWS, MASK_COLUMNS,
         accum_dtype, LATENCY_K, LATENCY_V):  # fmt: skip
    """Fold key/value tile `j` into the running maximum, sum and accumulator."""
    k = ct.load(K, (batch, kv_head, 0, j), (1, 1, TILE_D, TILE_N), order=(0, 1, 3, 2),
                padding_mode=ct.PaddingMode.ZERO, latency=None if LATENCY_K == 0 else LATENCY_K)  # fmt: skip
    scores = ct.mma(q, k.reshape((TILE_D, TILE_N)), ct.full((q.shape[0], TILE_N), 0.0, dtype=accum_dtype))
    scores = scores.astype(ct.float32)
    if MASK_ROWS or MASK_COLUMNS:
        columns = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        if MASK_ROWS and MASK_COLUMNS:
            visible = (columns <= rows) & (columns < K.shape[2])
        elif MASK_ROWS:
            visible = columns <= rows
        else:
            visible = columns < K.shape[2]
        scores = ct.where(visible, scores, -math.inf)

    new_max = ct.maximum(row_max, ct.max(scores, axis=-1, keepdims=True) * scale_log2)
    p = ct.exp2(scores * scale_log2 - new_max, flush_to_zero=True)
    alpha = ct.exp2(row_max - new_max, flush_to_zero=True)
    row_sum = row_sum * alpha + ct.sum(p, axis=-1, keepdims=True)
    acc = acc * alpha.astype(accum_dtype)

    v = ct.load(V, (batch, kv_head, j, 0), (1, 1, TILE_N, TILE_D), padding_mode=ct.PaddingMode.ZERO,
                latency=None if LATENCY_V == 0 else LATENCY_V)  # fmt: skip
    acc = ct.mma(p.astype(V.dtype), v.reshape((TILE_N, TILE_D)), acc)
    return new_max, row_sum, acc


class AttentionTemplate(KernelTemplate):
    """The host's side of :func:`attention`."""

    name = "attention"

    @property
    def function(self) -> Callable[..., None]:
        return attention

    def problem_class(self, schedule: Schedule, problem: Problem) -> ProblemClass:
        return ProblemClass(head_dim=problem.head_dim, dtype=problem.dtype, causal=problem.causal, group=problem.group,
                            even=problem.seq_k % schedule.number("tile_n") == 0)  # fmt: skip

    def constants(self, schedule: Schedule, problem: Problem) -> tuple[bool | int | float, ...]:
        return (
            schedule.number("tile_m"),
            schedule.number("tile_n"),
            problem.tile_d,
            problem.group,
            problem.causal,
            self.problem_class(schedule, problem).even,
            schedule["accum_mode"] == "fp16",
            schedule.number("latency_k"),
            schedule.number("latency_v"),
            bool(schedule["loop_split"]),
            BLOCK_ORDERS.index(str(schedule["block_order"])),
            bool(schedule["persistent"]),
        )

    def signature(self, schedule: Schedule, problem: Problem) -> KernelSignature:
        from cuda.tile.compilation import ArrayConstraint, CallingConvention, KernelSignature, ScalarConstraint

        # A launch also infers which axes are multiples of 16. Nothing is assumed of them here: on every arch whose
        # code is reproducible the machine code is the same with and without (tests/test_build.py checks).
        aligned = 16 // problem.element_bytes if problem.head_dim * problem.element_bytes % 16 == 0 else 1
        array = ArrayConstraint(
            getattr(ct, problem.dtype), 4, index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(),
            may_alias_internally=False, stride_constant=(None, None, None, 1),
            shape_constant=(None, None, None, problem.head_dim),
            stride_divisible_by=(aligned, aligned, aligned, 1), base_addr_divisible_by=16,
        )  # fmt: skip
        parameters = [array] * 4 + [ScalarConstraint(ct.float32), *self.constants(schedule, problem)]
        return KernelSignature(parameters, CallingConvention.cutile_python_v2(), symbol=self.name)

    def scalars(self, problem: Problem, scale: float | None = None) -> tuple[float, ...]:
        """The softmax scale (1 / sqrt(head_dim) unless given) times log2(e).

        Raises:
            ProblemError: a scale that is not positive or not a normal float32; minus infinity times it would be NaN.
        """
        value = (default_scale(problem) if scale is None else scale) * LOG2_E
        if not SMALLEST_NORMAL < value < LARGEST_FLOAT:
            raise ProblemError(f"the softmax scale must be positive and a normal float32, got {scale!r}")
        return (value,)

    def grid(self, schedule: Schedule, problem: Problem, sm_count: int) -> tuple[int, int, int]:
        """One block per query tile; a persistent grid is as many blocks as the occupancy hint says fit at once."""
        blocks = -(-problem.seq_q // schedule.number("tile_m")) * problem.batch * problem.heads
        if schedule["persistent"]:
            resident = sm_count * max(1, schedule.number("occupancy")) // schedule.number("num_ctas")
            blocks = min(blocks, max(1, resident))
        return (blocks, 1, 1)
