"""The declaration of attention forward: fields, arrays, and the kernel, constants and grid of a schedule.

The tile code is in the modules `entries`, `tiles`, `flat`, `split`, `packed`, `features` and `scheduler` of this folder. cuTile
is imported only where a kernel is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tiledsched.core.fields as ts
from tiledsched.core.arrays import Tolerance
from tiledsched.core.device import ResourceFacts, arch_spec, grid_blocks
from tiledsched.core.kernel import Kernel
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.kernels.attention import likely, problem
from tiledsched.kernels.attention.model import AttentionCost
from tiledsched.kernels.attention.options import (
    ARRAYS,
    EIGHT_BITS,
    FIELDS,
    KV8_SCALES,
    AttentionFields,
    feature_constants,
)
from tiledsched.kernels.attention.scales import scales
from tiledsched.kernels.attention.similarity import AttentionSimilarity, copies_rows
from tiledsched.kernels.attention.suites import STANDARD, SUITES
from tiledsched.kernels.attention.tiling import (
    column_widths,
    combined_rows,
    combines_later,
    flat_steps,
    ordered,
    pack_width,
    reduction_order,
    rows_per_tile,
    slots,
    span_steps,
    splits,
    steps_per_turn,
    stored_rows,
    tile_heads,
    tile_keys,
    unroll,
    work_tiles,
)

BLOCK_ORDERS = ("natural", "reversed", "heads_fastest", "swizzled")
PERSISTENT_MODES = ("no", "strided", "snake")
KV_DIRECTIONS = ("forward", "backward", "sawtooth", "wide_sawtooth")
"""The kernel is given the index into each of these three."""
LARGEST_ERROR = {
    ("float16", "fp32"): 4e-3,
    ("bfloat16", "fp32"): 2e-2,
    ("float16", "fp16"): 5e-2,
    ("bfloat16", "fp16"): 2e-2,
    ("bfloat16", EIGHT_BITS): 6e-2,
}
"""Largest relative Frobenius error that a tile may have, by (dtype, accum_mode), and with queries in 8 bits.

On normal inputs, rounding alone makes an error of 3e-4 in float16 and 2.3e-3 in bfloat16 at any length. Leaving out one key of
1024 makes 2.8e-2, and leaving out 32 of 16384 makes 4e-2 (docs/measuring.md). With queries in 8 bits, probabilities are rounded
to 3 bits of mantissa: each is off by 2**-4 of itself at most and 2.5e-2 on average, and so is the output where values are random.
A tile of 16 columns, whose rows see 40 keys, was off by 5.06e-2 on an H200.
"""
LARGEST_LSE_ERROR = {"fp32": 2e-3, "fp16": 1e-1, EIGHT_BITS: 2e-2}
"""Largest absolute error that a log-sum-exp may have, by accum_mode. The log-sum-exp is the logarithm of a sum in float32.
Rounding makes errors far below this (tests/test_measure_accuracy.py); leaving out one key of 500 equal ones makes an error of
this size. Sums of products of 8 bits keep about 14 bits in the tensor cores of sm_90: at a score of 24 of 128 columns, each of
four additions may lose 2**-13 of a sum of 270, together 1.2e-2 of the score. Twice the columns are twice the additions of sums
twice as large: with 256 columns the worst error on an H200 was 5.4e-2.
"""
FAST_SUM_COLUMNS = 128
"""Columns for which the limit for queries in 8 bits holds; beyond, it grows with their square."""
BEYOND_FP16_SUMS = ("large", "cancelling")
"""Kinds of inputs for which the outputs of float16 accumulators, and of sums of 14 bits, are not judged."""


class Attention(AttentionFields, Kernel):
    """Scaled dot-product attention of Q `[batch, heads, seq_q, head_dim]` with K, V `[batch, kv_heads, seq_k, ...]`.

    Causal means query row i sees key columns 0..i (aligned at the top left, as PyTorch's `is_causal`), or, aligned at the
    bottom right, 0..i + seq_k - seq_q (as in FlashAttention since 2.1 and PyTorch's `causal_lower_right`). A row that
    sees no key gives zeros, as FlashAttention does and, for all its warning of NaN, PyTorch 2.13 too; its log-sum-exp is
    minus infinity, so that it weighs nothing when parts are merged.

    With a window, row i sees the last `window` keys of those, its own included: the `sliding_window` of Mistral, Gemma and
    GPT-OSS in transformers, and FlashAttention's `window_size=(window - 1, window_right)`: of a causal mask whose diagonal lies
    `window_right` keys further to the right. Softcap makes cap * tanh(score / cap) of each
    scaled score (Gemma 2, arXiv:2408.00118, section 2). Sinks are a logit for each head that counts in the denominator and
    the log-sum-exp, and has no value (GPT-OSS, arXiv:2508.10925). Starts and lengths say, for each sequence of a batch, the
    first key that counts and the first that does not any more; the causal diagonal stays where it is without them.

    The rows of `packed` sequences lie end to end in a batch of 1, seq_q query rows and seq_k keys in all, and CuQ and CuK say
    where each sequence begins (FlashAttention's cu_seqlens). Keys in pages of `page` rows lie where the Table says (vLLM's
    block_table), up to seq_k keys for each sequence. In both cases a causal diagonal is aligned with each sequence's own keys.
    """

    name = "attention"
    lse = ts.flag(omit_default=True)
    locals().update(FIELDS)
    derived = problem.DERIVED
    suites = SUITES
    default_suite = STANDARD

    Q = ts.array("batch heads seq_q head_dim", dtype="q_dtype")
    K = ts.array("key_entries kv_heads key_rows key_elements", dtype="kv_dtype")
    V = ts.array("key_entries kv_heads key_rows value_elements", dtype="kv_dtype", layout="v_layout")
    locals().update(ARRAYS)
    Out = ts.out("batch heads seq_q value_columns")
    Lse = ts.out("batch heads seq_q 1", dtype="float32", when="lse", absolute=True)
    Partial = ts.workspace(lambda p, s: (slots(p, s), s.number("tile_m"), sum(column_widths(p.tile_v, p.parts_v, s))))
    Shares = ts.workspace(
        lambda p, s: (slots(p, s), tile_heads(p, s), stored_rows(p, s), sum(column_widths(p.tile_v, p.parts_v, s)))
    )
    State = ts.workspace(lambda p, s: (slots(p, s), 2, s.number("tile_m")))
    Counters = ts.workspace(lambda p, s: (work_tiles(p, s), 1), dtype="int32", zeroed=True)
    scale_log2 = ts.scalar(lambda p: scales(p)[0], dtype="float32")
    cap_scale = ts.scalar(lambda p: scales(p)[1], dtype="float32")

    axes = ("seq_k", "head_dim", "causal", "dtype")
    batch_dims = ("batch", "seq_q", "seq_k")
    reduction_order = staticmethod(reduction_order)
    ordered = staticmethod(ordered)
    representative = staticmethod(problem.representative)
    row_dims = staticmethod(problem.row_dims)
    plain = {
        "accum_mode": "fp32",
        "block_order": "natural",
        "check_bounds": True,
        "column_parts": 1,
        "division": "approximate",
        "kv_combine": "last_block",
        "kv_direction": "forward",
        "kv_splits": 1,
        "kv_subtiles": 1,
        "page_lookup": "gather",
        "peel_first": True,
        "persistent": "no",
        "q_subtiles": 1,
        "tma_loads": True,
        "tma_store": True,
        "unroll": 1,
    }
    former_values = {("persistent", False): "no", ("persistent", True): "strided"}
    former_knobs = {"k_load": ("order", "permute")}
    weights = {
        "tile_m": 1.0,
        "q_subtiles": 1.0,
        "num_worker_warps": 1.0,
        "tile_n": 0.4,
        "kv_subtiles": 0.4,
        "occupancy": 0.4,
        "num_ctas": 5.0,
        "tma_loads": 5.0,
    }

    cost = AttentionCost()
    similarity = AttentionSimilarity()
    canonical = staticmethod(problem.canonical)
    flops = staticmethod(problem.flops)
    describe = staticmethod(problem.describe)
    file_words = staticmethod(problem.file_words)
    variants = likely.VARIANTS
    likely = staticmethod(likely.likely)

    @staticmethod
    def entry(p: Problem, s: Schedule) -> Callable[..., None]:
        """The kernel of a problem and schedule; kernels differ in their arrays only."""
        from tiledsched.kernels.attention import entries

        kind = "attention_features" if p.has_features else "attention"
        kind = "attention_kv8" if p.kv8 else "attention_varlen" if p.is_varlen else kind
        kind += "_share" if combines_later(p, s) else "_split" if splits(p, s) > 1 else "_lse" if p.lse else ""
        found: Callable[..., None] = getattr(entries, f"{kind}_wide" if p.wide else kind)
        return found

    @staticmethod
    def launches(p: Problem, s: Schedule, device: Any) -> list[tuple[Callable[..., None], tuple[int]]]:
        """One launch, or two: the second combines the shares of split keys, a few rows of the output in each block."""
        first = p.declaration.entry(p, s), Attention.grid(p, s, device)
        if not combines_later(p, s):
            return [first]
        from tiledsched.kernels.attention import entries

        kind = "attention_features_combine" if p.has_features or p.is_varlen else "attention_combine"
        combine: Callable[..., None] = getattr(entries, f"{kind}_wide" if p.wide else kind)
        return [first, (combine, (p.batch * p.heads * -(-p.seq_q // combined_rows(p, s)),))]

    @staticmethod
    def constants(p: Problem, s: Schedule) -> Mapping[str, bool | int]:
        """The compile-time constants, as the kernels name them."""
        step_n = s.number("tile_n") * s.number("kv_subtiles") * steps_per_turn(s)
        tile_n = tile_keys(p, s)
        tile_d, rest_d = column_widths(p.tile_d, p.parts_d, s)
        tile_v, rest_v = column_widths(p.tile_v, p.parts_v, s)
        found = {
            "TILE_M": s.number("tile_m"),
            "TILE_N": tile_n,
            "TILE_D": tile_d,
            "GROUP": p.group,
            "CAUSAL": p.causal,
            "EVEN": p.seq_k % step_n == 0 and not (p.starts or p.lengths or p.packed),
            "FP16_ACCUM": s["accum_mode"] == "fp16",
            "LATENCY_K": s.number("latency_k"),
            "LATENCY_V": s.number("latency_v"),
            "LOOP_SPLIT": bool(s["loop_split"]),
            "BLOCK_ORDER": BLOCK_ORDERS.index(str(s["block_order"])),
            "PERSISTENT": PERSISTENT_MODES.index(str(s["persistent"])),
            "KV_DIRECTION": KV_DIRECTIONS.index(str(s["kv_direction"])),
            "Q_SUBTILES": s.number("q_subtiles"),
            "KV_SUBTILES": s.number("kv_subtiles") * s.number("tile_n") // tile_n,
            "QK_AHEAD": bool(s["qk_ahead"]),
            "TMA_LOADS": bool(s["tma_loads"]),
            "TMA_STORE": bool(s["tma_store"]),
            "CHECK_BOUNDS": bool(s["check_bounds"]),
            "IEEE_DIVISION": s["division"] == "ieee",
            "LAZY_RESCALE": bool(s["lazy_rescale"]),
            "BOTTOM_RIGHT": p.alignment == "bottom_right",
            "REST_D": rest_d,
            "TILE_V": tile_v,
            "REST_V": rest_v,
            "PACK": pack_width(p, s),
            "KV_SPLITS": splits(p, s),
            "FLAT_STEPS": flat_steps(s),
            "RELOAD_Q": bool(s.get("reload_q", False)),
            "Q_AHEAD": bool(s.get("q_ahead", False)),
            "STORE_LATE": bool(s.get("store_late", False)),
            "Q_IN_REGISTERS": bool(s.get("q_in_registers", False)),
            "UNROLL": unroll(s),
            "PEEL_FIRST": bool(s.get("peel_first", True)),
            **feature_constants(p),
            "PAGE": p.page,
            "PAGE_BY_PAGE": s.get("page_lookup", "gather") == "scalar",
            "KV8": 0 if p.q8 else KV8_SCALES.index(p.kv8),
            "Q8": KV8_SCALES.index(p.kv8) if p.q8 else 0,
            "NUMBERS": p.numbers,
        }
        if combines_later(p, s):  # the launches of shares take six more
            found |= {
                "COMBINE_ROWS": combined_rows(p, s),
                "TILE_ROWS": rows_per_tile(p, s),
                "TILE_HEADS": tile_heads(p, s),
                "KV_SPAN": span_steps(s),
                "SCORE_MOD": False,
                "MASK_MOD": False,
            }
        return found

    @staticmethod
    def spill_class(p: Problem, s: Schedule) -> list[Any]:
        """All but what only computes places in memory: element type, alignment of the mask, the heads of a group that no tile
        packs, and the length of a page. In 41 classes of more than one program all of them spilled, or none.
        """
        places = {
            "BOTTOM_RIGHT",
            "PAGE",
            "COMBINE_ROWS",
            "TILE_ROWS",
            "TILE_HEADS",
            "KV_SPAN",
            "SCORE_MOD",
            "MASK_MOD",
        } | (set() if s.get("pack_gqa", False) else {"GROUP"})
        # Classes of before queries in 8 bits know no Q8.
        rest = {
            name: value
            for name, value in Attention.constants(p, s).items()
            if name not in places and (p.q8 or name != "Q8")
        }
        return [Attention.entry(p, s).__name__, p.page > 0, copies_rows(p), rest]

    @staticmethod
    def grid(p: Problem, s: Schedule, device: Any) -> tuple[int]:
        """One block for each work tile, or for each share of its keys.

        A persistent grid has as many blocks as fit on the GPU at once, according to the occupancy hint.
        """
        return (grid_blocks(work_tiles(p, s) * splits(p, s), s, device, persistent=s["persistent"] != "no"),)

    @staticmethod
    def inputs(xp: Any, rng: Any, p: Problem) -> Mapping[str, Any]:
        """Where sequences begin and end, and the pages of their keys; keys and values in 8 bits with their scales."""
        from tiledsched.kernels.attention.inputs import eight_bit_inputs, places

        return places(rng, p) | (eight_bit_inputs(xp, rng, p) if p.kv8 else {})

    @staticmethod
    def reference(
        xp: Any,
        Q: Any,
        K: Any,
        V: Any,
        Sinks: Any,
        Starts: Any,
        Lengths: Any,
        CuQ: Any,
        CuK: Any,
        Table: Any,
        KScale: Any,
        VScale: Any,
        p: Problem,
    ) -> tuple[Any, Any]:
        """The output and the log-sum-exp of each row, in the precision of the inputs."""
        from tiledsched.kernels.attention.reference import attention_and_lse, scaled_numbers

        if p.kv8:
            K, V = (scaled_numbers(xp, *each, p, str(Q.dtype)) for each in ((K, KScale), (V, VScale)))
        out, lse = attention_and_lse(
            xp,
            Q,
            K,
            V,
            dtype=str(Q.dtype),
            sinks=Sinks,
            starts=Starts,
            lengths=Lengths,
            cu_q=CuQ,
            cu_k=CuK,
            table=Table,
            **problem.mask_of(p),
        )
        return out, lse[..., None]

    @staticmethod
    def adversarial(xp: Any, rng: Any, p: Problem, reference: Callable[..., Any]) -> Iterator[Any]:
        """Yield one case, in which the heads take the kinds of inputs in turn."""
        from tiledsched.kernels.attention.inputs import adversarial_case

        yield adversarial_case(xp, rng, p, reference)

    @staticmethod
    def tolerance(p: Problem, s: Schedule) -> Tolerance:
        """How exact the outputs must be, by element type and accumulator mode."""
        mode = EIGHT_BITS if p.q8 else str(s["accum_mode"])
        return Tolerance(
            relative=LARGEST_ERROR[p.dtype, mode],
            absolute=LARGEST_LSE_ERROR[mode] * (max(1.0, p.head_dim / FAST_SUM_COLUMNS) ** 2 if p.q8 else 1.0),
            except_kinds=() if mode == "fp32" else BEYOND_FP16_SUMS,
        )

    @staticmethod
    def check_tile(p: Problem, s: Schedule) -> tuple[int, int]:
        """The query rows of a head in one query tile, and all columns of the output."""
        return rows_per_tile(p, s), p.value_columns

    @staticmethod
    def unsound(p: Problem, s: Schedule, facts: ResourceFacts, arch: str) -> str | None:
        """Why a program must not run: it splits the keys, a counter tells when shares are done, and key tiles share a place.

        The release that counts a share as done orders all loads before it. The compiler (13.4 on sm_90) then lets the TMA unit
        load a tile before the tile in the same place of shared memory has been read. The search space lets a share take one step,
        or two where all programs built so far have room for two tiles. This function catches programs that have no such room.
        """
        if splits(p, s) == 1 or combines_later(p, s) or not s["tma_loads"] or not arch_spec(arch).producer_warps:
            return None
        columns = column_widths(p.tile_d, p.parts_d, s) + column_widths(p.tile_v, p.parts_v, s)
        pair = s.number("tile_n") * s.number("kv_subtiles") * sum(columns) * p.key_bytes
        shared = facts.shared_bytes
        if shared >= 2 * pair:
            return None
        return (
            f"the compiler left room for one key and one value tile ({shared} bytes of shared memory; both take {pair}). "
            "Where keys are split it overwrites them while they are read"
        )

    @staticmethod
    def standard(**sizes: Any) -> Problem:
        """The problem that people mean by a sequence length and a head dimension; see :func:`problem.standard`."""
        return Attention.problem(**problem.standard(**sizes))

    @staticmethod
    def rivals(p: Problem) -> Mapping[str, Callable[..., Any]]:
        """torch's backends, and FlashAttention-4 if it is installed."""
        from tiledsched.kernels.attention.backends import raced

        return raced(p)

    @staticmethod
    def small() -> list[Problem]:
        """Problems with odd lengths, grouped heads, masks and widths, each of which runs in a moment."""
        make = Attention.problem
        return [
            make(seq_q=80, seq_k=80, head_dim=64, heads=2),
            make(seq_q=100, seq_k=100, head_dim=64, heads=2, causal=True, dtype="bfloat16"),
            make(seq_q=33, seq_k=130, head_dim=40, heads=4, kv_heads=2, causal=True, alignment="bottom_right"),
            make(seq_q=3, seq_k=200, head_dim=64, heads=4, kv_heads=1, lse=True),
            make(
                seq_q=90, seq_k=150, head_dim=32, heads=2, causal=True, alignment="bottom_right", window=40, sinks=True
            ),
            make(seq_q=140, seq_k=140, head_dim=32, heads=2, causal=True, window=30, window_right=40),
            make(seq_q=70, seq_k=90, head_dim=32, batch=2, softcap=True, starts=True, lengths=True),
            make(seq_q=150, seq_k=150, head_dim=32, heads=2, causal=True, packed=5, lse=True),
            make(seq_q=1, seq_k=192, head_dim=32, heads=4, kv_heads=2, batch=3, lengths=True, page=64),
        ]
