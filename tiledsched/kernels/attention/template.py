"""The attention kernel's side on the host: which entry is launched, its constants, signature, arrays and grid.

What runs on the GPU is in `tiledsched.kernels.attention.entries`, `attention_split` and `attention_tiles`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import cuda.tile as ct

from tiledsched.device import arch_spec
from tiledsched.errors import ProblemError
from tiledsched.kernels.attention import entries as attention_entries
from tiledsched.kernels.attention import flat as attention_flat
from tiledsched.kernels.attention import split as attention_split
from tiledsched.kernels.attention import tiles as attention_tiles
from tiledsched.kernels.attention.reference import default_scale
from tiledsched.kernels.attention.tiles import BLOCK_ORDERS, KV_DIRECTIONS, PERSISTENT_MODES, Constants
from tiledsched.kernels.template import ExtraArray, KernelTemplate, ProblemClass
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule

if TYPE_CHECKING:
    from cuda.tile.compilation import ArrayConstraint, KernelSignature

    from tiledsched.build.cubin import Artifact

LOG2_E = 1.0 / math.log(2.0)
SMALLEST_NORMAL, LARGEST_FLOAT = 1.2e-38, 3.4e38
HEAD_ARRAYS = 4
"""The first parameters: q, k, v and out."""


class AttentionTemplate(KernelTemplate):
    """The host's side of the kernels in :mod:`tiledsched.kernels.attention.entries`."""

    name = "attention"
    modules = (attention_entries, attention_flat, attention_split, attention_tiles)

    @property
    def function(self) -> Callable[..., None]:
        return attention_entries.attention

    def entry(self, schedule: Schedule, problem: Problem) -> Callable[..., None]:
        kind = "attention_lse" if problem.lse else "attention"
        if _splits(schedule) > 1:
            kind = "attention_split"
        entry: Callable[..., None] = getattr(attention_entries, f"{kind}_wide" if problem.wide else kind)
        return entry

    def workspace(self, schedule: Schedule, problem: Problem) -> tuple[ExtraArray, ...]:
        splits, tile_m = _splits(schedule), schedule.number("tile_m")
        lse = ExtraArray(name="lse", shape=(problem.batch, problem.heads, problem.seq_q, 1), dtype="float32",
                         output=problem.lse)  # fmt: skip
        if splits == 1:
            return (lse,) if problem.lse else ()
        pieces = self._pieces(schedule, problem)
        slots = pieces * schedule.number("q_subtiles") * splits
        columns = sum(_parts(problem.tile_v, problem.parts_v, schedule))
        return (
            lse,
            ExtraArray(name="partial", shape=(slots, tile_m, columns), dtype="float32"),
            ExtraArray(name="state", shape=(slots, 2, tile_m), dtype="float32"),
            ExtraArray(name="counters", shape=(pieces, 1), dtype="int32", zeroed=True),
        )

    def problem_class(self, schedule: Schedule, problem: Problem) -> ProblemClass:
        step_n = schedule.number("tile_n") * schedule.number("kv_subtiles") * max(_unroll(schedule), _flat(schedule))
        causal = _needs_mask(problem)
        return ProblemClass(head_dim=problem.head_dim, dtype=problem.dtype, causal=causal, group=problem.group,
                            even=problem.seq_k % step_n == 0, value_dim=problem.value_dim, lse=problem.lse,
                            bottom_right=causal and problem.alignment == "bottom_right",
                            wide=problem.wide)  # fmt: skip

    def constants(self, schedule: Schedule, problem: Problem) -> tuple[bool | int | float, ...]:
        which = self.problem_class(schedule, problem)
        tile_d, rest_d = _parts(problem.tile_d, problem.parts_d, schedule)
        tile_v, rest_v = _parts(problem.tile_v, problem.parts_v, schedule)
        constants = Constants(
            TILE_M=schedule.number("tile_m"),
            TILE_N=schedule.number("tile_n"),
            TILE_D=tile_d,
            GROUP=problem.group,
            CAUSAL=which.causal,
            EVEN=which.even,
            FP16_ACCUM=schedule["accum_mode"] == "fp16",
            LATENCY_K=schedule.number("latency_k"),
            LATENCY_V=schedule.number("latency_v"),
            LOOP_SPLIT=bool(schedule["loop_split"]),
            BLOCK_ORDER=BLOCK_ORDERS.index(str(schedule["block_order"])),
            PERSISTENT=PERSISTENT_MODES.index(str(schedule["persistent"])),
            KV_DIRECTION=KV_DIRECTIONS.index(str(schedule["kv_direction"])),
            Q_SUBTILES=schedule.number("q_subtiles"),
            KV_SUBTILES=schedule.number("kv_subtiles"),
            QK_AHEAD=bool(schedule["qk_ahead"]),
            PERMUTE_K=schedule["k_load"] == "permute",
            TMA_LOADS=bool(schedule["tma_loads"]),
            TMA_STORE=bool(schedule["tma_store"]),
            CHECK_BOUNDS=bool(schedule["check_bounds"]),
            IEEE_DIVISION=schedule["division"] == "ieee",
            LAZY_RESCALE=bool(schedule["lazy_rescale"]),
            BOTTOM_RIGHT=which.bottom_right,
            REST_D=rest_d,
            TILE_V=tile_v,
            REST_V=rest_v,
            PACK=_pack(schedule, problem),
            KV_SPLITS=_splits(schedule),
            FLAT_STEPS=_flat(schedule),
            RELOAD_Q=bool(schedule.get("reload_q", False)),
            Q_AHEAD=bool(schedule.get("q_ahead", False)),
            STORE_LATE=bool(schedule.get("store_late", False)),
            Q_IN_REGISTERS=bool(schedule.get("q_in_registers", False)),
            UNROLL=_unroll(schedule),
            PEEL_FIRST=bool(schedule.get("peel_first", True)),
        )
        return tuple(vars(constants).values())

    def signature(self, schedule: Schedule, problem: Problem) -> KernelSignature:
        from cuda.tile.compilation import CallingConvention, KernelSignature, ScalarConstraint

        query, value = _head_array(problem, problem.head_dim), _head_array(problem, problem.value_columns)
        extras = [_extra_array(extra) for extra in self.workspace(schedule, problem)]
        parameters = [query, query, value, value, *extras, ScalarConstraint(ct.float32),
                      *self.constants(schedule, problem)]  # fmt: skip
        return KernelSignature(parameters, CallingConvention.cutile_python_v2(), symbol=self.name)

    def assumed(self, signature: KernelSignature) -> KernelSignature:
        """A launch also infers what sizes, and the strides of the arrays of split keys, are multiples of. On the latter the
        compiler (13.4 on sm_90) makes other machine code, and wrong one: loads of four maxima at addresses of one.
        """  # fmt: skip
        from cuda.tile.compilation import ArrayConstraint, KernelSignature

        parameters = list(signature.parameters)
        for place, each in enumerate(parameters):
            if isinstance(each, ArrayConstraint):
                strides = each.stride_divisible_by if place < HEAD_ARRAYS else 1
                parameters[place] = replace(each, shape_divisible_by=1, stride_divisible_by=strides)
        return KernelSignature(parameters, signature.calling_convention, signature.symbol)

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
        """One block per piece of work, or one for each share of its keys.

        A persistent grid is as many blocks as the occupancy hint says fit at once.
        """
        blocks = self._pieces(schedule, problem) * _splits(schedule)
        if schedule["persistent"] != "no":
            resident = sm_count * max(1, schedule.number("occupancy")) // schedule.number("num_ctas")
            blocks = min(blocks, max(1, resident))
        return (blocks, 1, 1)

    def unsound(self, schedule: Schedule, problem: Problem, artifact: Artifact) -> str | None:
        """Split keys whose tiles share a place in shared memory.

        The release that counts a share as done orders all loads before it, and the compiler (13.4 on sm_90) then has the TMA
        unit load a tile before it waits for the one in the same place to be read. The search space lets a share take one step,
        or two where all programs built so far have room for both; this is for those to come.
        """
        if _splits(schedule) == 1 or not schedule["tma_loads"] or not arch_spec(artifact.arch).producer_warps:
            return None
        columns = _parts(problem.tile_d, problem.parts_d, schedule) + _parts(problem.tile_v, problem.parts_v, schedule)
        pair = schedule.number("tile_n") * schedule.number("kv_subtiles") * sum(columns) * problem.element_bytes
        shared = artifact.facts.shared_bytes
        if shared >= 2 * pair:
            return None
        return (f"the compiler left room for one key and one value tile ({shared} bytes of shared memory; both take {pair}). "
                "Where keys are split it overwrites them while they are read")  # fmt: skip

    def rows_per_tile(self, schedule: Schedule, problem: Problem) -> int:
        return schedule.number("tile_m") // _pack(schedule, problem)

    def _pieces(self, schedule: Schedule, problem: Problem) -> int:
        rows = self.rows_per_tile(schedule, problem) * schedule.number("q_subtiles")
        return -(-problem.seq_q // rows) * problem.batch * (problem.heads // _pack(schedule, problem))


def _needs_mask(problem: Problem) -> bool:
    """Whether a causal mask hides anything: not from a single row that ends where the keys end."""
    return problem.causal and not (problem.alignment == "bottom_right" and problem.seq_q == 1)


# Schedules that were stored before there were these knobs do without them.


def _splits(schedule: Schedule) -> int:
    """Blocks that share the keys of one piece of work."""
    return int(schedule.get("kv_splits", 1))


def _flat(schedule: Schedule) -> int:
    """Steps per turn of a flat loop; 0 for nested loops."""
    return int(schedule.get("flat_steps", 0))


def _unroll(schedule: Schedule) -> int:
    """Steps per turn of a nested loop."""
    return int(schedule.get("unroll", 1))


def _pack(schedule: Schedule, problem: Problem) -> int:
    """Query heads whose rows share a tile."""
    return problem.group if schedule.get("pack_gqa", False) else 1


def _parts(tile: int, parts: tuple[int, int], schedule: Schedule) -> tuple[int, int]:
    """Columns of the first and second part of a row as `schedule` divides it."""
    return parts if schedule.get("column_parts", 1) == 2 else (tile, 0)


def _head_array(problem: Problem, columns: int) -> ArrayConstraint:
    """An array `[batch, heads, rows, columns]`."""
    from cuda.tile.compilation import ArrayConstraint

    # A launch also infers which axes are multiples of 16. Nothing is assumed of them here: on every arch whose
    # code is reproducible the machine code is the same with and without (tests/test_build.py checks).
    aligned = 16 // problem.element_bytes if columns * problem.element_bytes % 16 == 0 else 1
    return ArrayConstraint(
        getattr(ct, problem.dtype), 4, index_dtype=ct.int64 if problem.wide else ct.int32, stride_lower_bound_incl=0,
        alias_groups=(), may_alias_internally=False, stride_constant=(None, None, None, 1),
        shape_constant=(None, None, None, columns), stride_divisible_by=(aligned, aligned, aligned, 1),
        base_addr_divisible_by=16,
    )  # fmt: skip


def _extra_array(extra: ExtraArray) -> ArrayConstraint:
    """A contiguous array; the axes behind the first are constants of the schedule, except in arrays of rows."""
    from cuda.tile.compilation import ArrayConstraint

    inner = (None, None, None, 1) if extra.name == "lse" else (None, *extra.shape[1:])
    outer: tuple[int | None, ...] = (None,) * (len(extra.shape) - 1)
    if extra.name == "partial":
        outer = (extra.shape[1] * extra.shape[2], extra.shape[2])
    return ArrayConstraint(
        getattr(ct, extra.dtype), len(extra.shape), index_dtype=ct.int32, stride_lower_bound_incl=0, alias_groups=(),
        may_alias_internally=False, stride_constant=(*outer, 1), shape_constant=inner,
        base_addr_divisible_by=16,
    )  # fmt: skip
