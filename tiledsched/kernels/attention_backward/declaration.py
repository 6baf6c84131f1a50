"""The declaration of attention's gradients: fields, arrays, knobs, and the launches that a schedule comes to.

What runs on the GPU is in `tiles` and `entries` beside it; cuTile is imported where a launch is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.arrays import Tolerance
from tiledsched.core.device import grid_blocks
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention.declaration import BLOCK_ORDERS
from tiledsched.kernels.attention.options import ARRAYS, FIELDS, MAX_HEAD_DIM, AttentionFields, feature_constants
from tiledsched.kernels.attention.problem import mask_of
from tiledsched.kernels.attention.suites import STANDARD
from tiledsched.kernels.attention.tiling import column_widths
from tiledsched.kernels.attention_backward import problem
from tiledsched.kernels.attention_backward.model import AttentionBackwardCost
from tiledsched.kernels.attention_backward.suites import SUITES

LARGEST_ERROR = {"float16": 4e-3, "bfloat16": 2e-2}
"""Largest relative Frobenius error that a tile of a gradient may have, by element type.

Rounding P, dS and the gradient makes errors of 4e-4 in float16 and 3e-3 in bfloat16, in dQ, dK and dV alike and at any length;
on adversarial inputs, with up to 200 rows, up to 8e-4 and 6e-3. Leaving out one of 1024 keys makes an error of 7e-2 in dQ,
leaving out one of 1024 rows 6e-2 in dK and 4e-2 in dV, and leaving out 32 of 16384 keys 4e-2 in dQ (docs/measuring.md).
"""
SMALL_SHARE = 0.1
"""Tiles whose elements are smaller than this share of what they are for normal inputs are judged as if they were that large.
Where a row sees one key, dQ and dK are 0, and the kernel gives what rounding leaves of dP - delta: about 1e-6."""
ROW_ELEMENTS = 2048
"""Elements of a tile of the launches that go over rows once."""
SINK_ROWS = 1024
"""Rows that a step of the sinks' launch takes."""
PRODUCT_ORDERS = ("dv_dk_dq", "dk_dv_dq", "dk_dq_dv", "dq_late")
"""The place of dV in the first three is the number that the kernel is given."""
STRUCTURES = ("atomic", "two_pass")
"""What makes dQ: see :mod:`tiles`."""


class AttentionBackward(AttentionFields, Kernel):
    """The gradients of scaled dot-product attention with respect to Q, K, V and the sinks.

    Q, K, V, masks and features are those of :class:`tiledsched.kernels.attention.Attention`; Out is its output, Lse
    `[batch, heads, seq_q]` its log-sum-exp (natural logarithm, float32, with the sinks counted; minus infinity for rows that see
    nothing), dOut the gradient of Out, and dLse, in problems with `dlse`, that of Lse. Sums are in float32 and rounded once. Rows
    that see nothing have gradients of zero, and so have keys that no row sees.

    `deterministic` problems give the same bits in every run: the sums of dQ are made in a fixed order.
    """

    name = "attention_backward"
    locals().update(FIELDS)
    deterministic = ts.flag(omit_default=True)
    dlse = ts.flag(omit_default=True)
    derived = problem.DERIVED

    Q = ts.array("batch heads seq_q head_dim")
    K = ts.array("batch kv_heads seq_k head_dim")
    V = ts.array("batch kv_heads seq_k value_columns")
    Out = ts.array("batch heads seq_q value_columns")
    dOut = ts.array("batch heads seq_q value_columns")
    Lse = ts.array("batch heads seq_q", dtype="float32")
    locals().update(ARRAYS)
    dLse = ts.array("batch heads seq_q", dtype="float32", when="dlse")
    page = Table = kv8 = q8 = KScale = VScale = None  # there are no gradients of keys in pages or in 8 bits
    dQ = ts.out("batch heads seq_q head_dim")
    dK = ts.out("batch kv_heads seq_k head_dim")
    dV = ts.out("batch kv_heads seq_k value_columns")
    dSinks = ts.out("heads", dtype="float32", when="sinks")
    LseLog2 = ts.workspace(lambda p, s: (p.batch, p.heads, padded_rows(p, s)), aligned=True)
    Delta = ts.workspace(lambda p, s: (p.batch, p.heads, padded_rows(p, s)), aligned=True)
    dQSum = ts.workspace(lambda p, s: dq_sum_shape(p, s), aligned=True)
    dKParts = ts.workspace(lambda p, s: part_shape(p, s, p.head_dim), aligned=True)
    dVParts = ts.workspace(lambda p, s: part_shape(p, s, p.value_columns), aligned=True)
    scale_log2 = ts.scalar(lambda p: problem.gradient_scales(p)[0], dtype="float32")
    cap_scale = ts.scalar(lambda p: problem.gradient_scales(p)[1], dtype="float32")
    scale = ts.scalar(lambda p: problem.gradient_scales(p)[2], dtype="float32")

    knobs = {
        "structure": ts.knob(
            STRUCTURES, about="what makes dQ: adds to one array in any order, or a launch of its own", weight=5.0
        ),
        "tile_m": ts.knob((64, 128, 32, 16), about="query rows per step of the launch for dK and dV", weight=1.0),
        "tile_n": ts.knob((128, 64, 32, 16), about="keys per block of the launch for dK and dV", weight=1.0),
        "tile_m_dq": ts.knob((64, 128, 32, 16), about="query rows per block of the launch for dQ", weight=0.4),
        "tile_n_dq": ts.knob((64, 128, 32, 16), about="keys per step of the launch for dQ", weight=0.4),
        "num_worker_warps": ts.knob((8, 4), about="warps that compute", weight=1.0),
        "occupancy": ts.knob((1, 2, 0), about="blocks an SM should hold; 0 leaves it to the compiler", weight=0.4),
        "scores_transposed": ts.knob(
            (True, False),
            about="make scores with a row for each key, which dK and dV multiply from registers",
            measured_only=True,
        ),
        "block_order": ts.knob(BLOCK_ORDERS, about="order in which blocks take tiles"),
        "persistent": ts.knob(
            (False, True), about="as many blocks as fit at once, each taking one tile after the other"
        ),
        "loop_split": ts.knob((False, True), about="take the steps that need no mask in a loop of their own"),
        "group_heads": ts.knob(
            ("together", "apart"),
            about="whether a block sums dK and dV over the query heads of its group, or a later launch does",
        ),
        "scores_ahead": ts.knob(
            (False, True), about="make the scores of the next step before the gradients of this one", measured_only=True
        ),
        "product_order": ts.knob(
            PRODUCT_ORDERS,
            default="dk_dv_dq",
            about="order of a step's products for dV, dK and dQ; in the last, dQ's is that of the step before",
            measured_only=True,
        ),
        "dq_transposed": ts.knob(
            (False, True), about="make the product for a share of dQ as its transpose", measured_only=True
        ),
        "delta_first": ts.knob(
            (False, True), about="take the row sums off dP before its product is made", measured_only=True
        ),
        "latency_q": ts.knob(
            (2, 0, 6),
            about="latency hint of the loop's loads of queries (of keys for dQ); 0: the compiler's",
            measured_only=True,
        ),
        "latency_do": ts.knob(
            (2, 0, 6),
            about="latency hint of the loop's loads of dOut (of values for dQ); 0: the compiler's",
            measured_only=True,
        ),
        "tma_loads": ts.knob((True, False), about="whether the loop's loads may use the TMA unit", measured_only=True),
        "column_parts": ts.knob(
            (1, 2),
            about="2: hold a width such as 96 as 64 + 32 columns instead of padding it to 128",
            measured_only=True,
        ),
    }
    constraints = {
        "not deterministic or structure != 'atomic'": "atomic adds arrive in any order, so that dQ differs in its last bits",
        "structure == 'two_pass' or (tile_m_dq == 64 and tile_n_dq == 64)": "only a launch of its own has tiles of its own",
        "not scores_ahead or packed == 0": "a sequence may have no rows to make scores ahead of",
        "product_order != 'dq_late' or (structure != 'two_pass' and not scores_ahead)": (
            "a step hands on its own gradients or the next scores, and two passes add nothing"
        ),
        "not dq_transposed or structure != 'two_pass'": "two passes have no shares of dQ",
        "product_order != 'dk_dq_dv' or structure != 'two_pass'": "without a product for dQ the order is that of dk_dv_dq",
        "group_heads == 'together' or group > 1": "a group of one head has nothing to sum up",
        "not loop_split or causal or starts or lengths or packed > 0 or seq_k % tile_n != 0": (
            "without a mask there is nothing to split"
        ),
        "block_order != 'reversed' or causal": "only causal blocks differ in length, so only there does the order matter",
        "column_parts == 1 or split_d < tile_d or split_v < tile_v": "the width is a power of two",
        "element_bytes * (tile_m + tile_n) * (tile_d + tile_v) <= shared_memory_bytes": (
            "tiles of all four inputs must fit in shared memory"
        ),
        "structure != 'two_pass' or element_bytes * (tile_m_dq + tile_n_dq) * (tile_d + tile_v) <= shared_memory_bytes": (
            "tiles of all four inputs must fit in shared memory"
        ),
        "(occupancy if occupancy > 0 else 1) * tile_n * (tile_d + tile_v) < registers_per_sm": (
            "the sums of dK and dV of every block on the SM must fit in registers"
        ),
    }
    exploring = {
        "tile_m >= 32 and tile_n >= 32": "smaller tiles read their operands too often",
        "tile_n >= 64 or tile_d + tile_v > 256": "narrow blocks read every query row, and add to dQ, too often",
        "tile_n * (tile_d + tile_v) + 2 * tile_m * tile_n <= 8192 * num_worker_warps": (
            "the sums of dK and dV and two tiles of scores of a warp are more than its registers"
        ),
        "occupancy > 0 and occupancy * (tile_n * (tile_d + tile_v) + 2 * tile_m * tile_n) <= registers_per_sm": (
            "the sums and scores of all blocks on the SM are more than its registers"
        ),
        "num_worker_warps == 4 or tile_m * tile_n >= 4096 or tile_d + tile_v > 256": (
            "small tiles leave a second group of warps no work"
        ),
        "structure != 'two_pass' or (tile_m_dq >= tile_n and tile_m_dq >= 64 and tile_n_dq == tile_m)": (
            "the launch for dQ holds half as many sums: its blocks are at least as large, and its steps equal"
        ),
        "block_order != 'reversed'": "the blocks with the longest loops start first",
        "block_order == 'natural' or causal": "the order is tried where blocks differ in length",
        "not persistent": "blocks that go on to another tile spilled up to 1216 bytes on the H200, or were slower",
        "latency_q == latency_do": "the hints of both loads are tried together",
        "scores_ahead + delta_first + dq_transposed + (not scores_transposed) <= 1": "these four are tried one at a time",
        "tma_loads or (latency_q == 0 and not scores_ahead)": "loads by threads are tried on the plain kernel only",
    }
    suites = SUITES
    default_suite = STANDARD
    cost = AttentionBackwardCost()
    similarity = problem.AttentionBackwardSimilarity()
    axes = ("seq_k", "head_dim", "causal", "dtype", "deterministic")
    plain = {
        "structure": "atomic",
        "block_order": "natural",
        "column_parts": 1,
        "group_heads": "together",
        "delta_first": False,
        "dq_transposed": False,
        "latency_do": 2,
        "latency_q": 2,
        "persistent": False,
        "product_order": "dk_dv_dq",
        "scores_ahead": False,
        "scores_transposed": True,
        "tile_m_dq": 64,
        "tile_n_dq": 64,
        "tma_loads": True,
    }

    former_knobs = {"shares": (1,)}
    canonical = staticmethod(problem.canonical)
    flops = staticmethod(problem.flops)
    describe = staticmethod(problem.describe)
    file_words = staticmethod(problem.file_words)

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, bool | int]:
        """The compile-time constants, as the kernels name them."""
        tile_d, rest_d = column_widths(p.tile_d, p.parts_d, s)
        tile_v, rest_v = column_widths(p.tile_v, p.parts_v, s)
        uneven = bool(p.starts or p.lengths or p.packed)
        return {
            "TILE_M": s.number("tile_m"),
            "TILE_N": s.number("tile_n"),
            "TILE_M_DQ": s.number("tile_m_dq"),
            "TILE_N_DQ": s.number("tile_n_dq"),
            "TILE_D": tile_d,
            "REST_D": rest_d,
            "TILE_V": tile_v,
            "REST_V": rest_v,
            "TILE_D_WHOLE": p.tile_d,
            "TILE_V_WHOLE": p.tile_v,
            "DQ_COLUMNS": p.tile_d,
            "ROWS": rows_at_once(p, s),
            "SINK_ROWS": SINK_ROWS,
            "GROUP": p.group,
            "EVEN": p.seq_k % s.number("tile_n") == 0 and not uneven,
            "EVEN_DQ": p.seq_k % s.number("tile_n_dq") == 0 and not uneven,
            "CAUSAL": p.causal,
            "BOTTOM_RIGHT": p.alignment == "bottom_right",
            **feature_constants(p),
            "LATENCY_Q": s.number("latency_q"),
            "LATENCY_DO": s.number("latency_do"),
            "TMA_LOADS": bool(s["tma_loads"]),
            "LOOP_SPLIT": bool(s["loop_split"]),
            "BLOCK_ORDER": BLOCK_ORDERS.index(str(s["block_order"])),
            "PERSISTENT": bool(s["persistent"]),
            "TRANSPOSED": bool(s["scores_transposed"]),
            "AHEAD": bool(s["scores_ahead"]),
            "TOGETHER": s["group_heads"] == "together",
            "DQ_LATE": s["product_order"] == "dq_late",
            "DV_PLACE": PRODUCT_ORDERS.index(str(s["product_order"])) % 3,
            "DQ_TRANSPOSED": bool(s["dq_transposed"]),
            "DELTA_FIRST": bool(s["delta_first"]),
            "ADDS": s["structure"] != "two_pass",
            "DLSE": p.dlse,
        }

    @staticmethod
    def launches(p: Problem, s: Schedule, device: Any) -> list[tuple[Callable[..., None], tuple[int]]]:
        """The row sums, dK and dV, dQ, and what some schedules and problems need after them."""
        from tiledsched.kernels.attention_backward import entries

        rows, apart = rows_at_once(p, s), s["group_heads"] == "apart"
        heads = p.heads if apart else p.kv_heads
        found: list[tuple[Callable[..., None], tuple[int]]] = [
            (entries.attention_backward_rows, (p.batch * p.heads * (padded_rows(p, s) // rows),)),
            (entries.attention_backward_keys, blocks(p.seq_k, s.number("tile_n"), p.batch * heads, p, s, device)),
        ]
        if s["structure"] == "two_pass":
            grid = blocks(p.seq_q, s.number("tile_m_dq"), p.batch * p.heads, p, s, device)
            found.append((entries.attention_backward_queries, grid))
        else:
            found.append((entries.attention_backward_store, (p.batch * p.heads * -(-p.seq_q // rows),)))
        if apart:
            found.append((entries.attention_backward_groups, (p.batch * p.kv_heads * -(-p.seq_k // rows),)))
        if p.sinks:
            found.append((entries.attention_backward_sinks, (p.heads,)))
        return found

    @staticmethod
    def inputs(xp: Any, rng: Any, p: Problem) -> Mapping[str, Any]:
        """Random Q, K, V and dOut with the Out and Lse that attention gives for them, and where sequences begin and end."""
        from tiledsched.kernels.attention_backward.inputs import random_inputs

        return random_inputs(xp, rng, p)

    @staticmethod
    def reference(
        xp: Any,
        Q: Any,
        K: Any,
        V: Any,
        Out: Any,
        dOut: Any,
        Lse: Any,
        Sinks: Any,
        Starts: Any,
        Lengths: Any,
        CuQ: Any,
        CuK: Any,
        dLse: Any,
        p: Problem,
    ) -> tuple[Any, ...]:
        """The gradients, in the precision of the inputs."""
        from tiledsched.kernels.attention_backward.reference import attention_gradients

        return attention_gradients(
            xp,
            Q,
            K,
            V,
            Out,
            dOut,
            Lse,
            dLse,
            dtype=str(Q.dtype),
            sinks=Sinks,
            starts=Starts,
            lengths=Lengths,
            cu_q=CuQ,
            cu_k=CuK,
            **mask_of(p),
        )[: 3 + p.sinks]

    @staticmethod
    def adversarial(xp: Any, rng: Any, p: Problem, reference: Callable[..., Any]) -> Iterator[Any]:
        """Yield one case, in which the heads take the kinds of inputs in turn."""
        from tiledsched.kernels.attention_backward.inputs import adversarial_case

        yield adversarial_case(xp, rng, p, reference)

    @staticmethod
    def tolerance(p: Problem, s: Schedule) -> Tolerance:
        """How exact the gradients must be, by element type, and whether they must be the same in every launch."""
        # A tile of one row has one sum for each element, which may cancel; other tiles average over 64 rows.
        alone = min(p.seq_q, p.seq_k) == 1
        return Tolerance(
            relative=LARGEST_ERROR[p.dtype] * (2 if alone else 1),
            floor=SMALL_SHARE * problem.usual_gradient(p),
            repeatable=p.deterministic,
        )

    @staticmethod
    def check_tile(p: Problem, s: Schedule) -> tuple[int, int]:
        """64 rows, and all columns."""
        return 64, MAX_HEAD_DIM

    @staticmethod
    def rivals(p: Problem) -> Mapping[str, Callable[..., Any]]:
        """torch's cuDNN and flash backends, and FlashAttention-4 if it is installed."""
        from tiledsched.kernels.attention_backward.backends import raced

        return raced(p)

    @staticmethod
    def small() -> list[Problem]:
        """Problems with odd lengths, grouped heads, masks and widths, each of which runs in a moment."""
        make = AttentionBackward.problem
        return [
            make(seq_q=80, seq_k=80, head_dim=64, heads=2),
            make(seq_q=100, seq_k=100, head_dim=32, heads=2, causal=True, dtype="bfloat16"),
            make(seq_q=33, seq_k=130, head_dim=40, heads=4, kv_heads=2, causal=True, alignment="bottom_right"),
            make(seq_q=70, seq_k=50, head_dim=32, value_dim=16, heads=3, kv_heads=1, dlse=True, deterministic=True),
            make(
                seq_q=90, seq_k=150, head_dim=32, heads=2, causal=True, alignment="bottom_right", window=40, sinks=True
            ),
            make(seq_q=140, seq_k=140, head_dim=16, heads=2, causal=True, window=30, window_right=40, dtype="bfloat16"),
            make(seq_q=70, seq_k=90, head_dim=16, batch=3, softcap=True, starts=True, lengths=True),
            make(seq_q=150, seq_k=150, head_dim=32, heads=2, kv_heads=1, causal=True, packed=5, sinks=True),
            make(seq_q=90, seq_k=120, head_dim=96, causal=True, alignment="bottom_right", packed=3, window=20),
            make(
                seq_q=90,
                seq_k=40,
                head_dim=16,
                batch=2,
                causal=True,
                alignment="bottom_right",
                lengths=True,
                sinks=True,
            ),
        ]


def padded_rows(p: Problem, s: Schedule) -> int:
    """Rows of the arrays that hold sums of query rows: whole tiles."""
    tile = max(s.number("tile_m"), rows_at_once(p, s))
    return -(-int(p.seq_q) // tile) * tile


def rows_at_once(p: Problem, s: Schedule) -> int:
    """Rows of a block that goes over rows once."""
    return min(128, ROW_ELEMENTS // max(int(p.tile_d), int(p.tile_v)))


def dq_sum_shape(p: Problem, s: Schedule) -> tuple[int, ...]:
    """Shape of the array that shares of dQ are added to."""
    if s["structure"] == "two_pass":
        return (1, 1, 1, 1)
    return (p.batch, p.heads, padded_rows(p, s), int(p.tile_d))


def part_shape(p: Problem, s: Schedule, columns: int) -> tuple[int, ...]:
    """Shape of the array that holds the shares of every query head in dK or dV, where a later launch adds them up."""
    return (p.batch, p.heads, p.seq_k, columns) if s["group_heads"] == "apart" else (1, 1, 1, 1)


def blocks(rows: int, tile: int, heads: int, p: Problem, s: Schedule, device: Any) -> tuple[int]:
    """The grid of a launch with a block for each tile of so many rows of all heads."""
    places = rows // tile + p.packed + 1 if p.packed else -(-rows // tile)
    return (grid_blocks(places * heads, s, device, persistent=bool(s["persistent"])),)
