"""The attention kernel's side on the host: its constants, signature, arguments and grid.

What runs on the GPU is in `tiledsched.kernels.attention_tiles`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import TYPE_CHECKING

import cuda.tile as ct

from tiledsched.errors import ProblemError
from tiledsched.kernels.attention_tiles import BLOCK_ORDERS, KV_DIRECTIONS, PERSISTENT_MODES, Constants, attention
from tiledsched.kernels.reference import default_scale
from tiledsched.kernels.template import KernelTemplate, ProblemClass
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule

if TYPE_CHECKING:
    from cuda.tile.compilation import KernelSignature

LOG2_E = 1.0 / math.log(2.0)
SMALLEST_NORMAL, LARGEST_FLOAT = 1.2e-38, 3.4e38


class AttentionTemplate(KernelTemplate):
    """The host's side of :func:`tiledsched.kernels.attention_tiles.attention`."""

    name = "attention"

    @property
    def function(self) -> Callable[..., None]:
        return attention

    def problem_class(self, schedule: Schedule, problem: Problem) -> ProblemClass:
        step_n = schedule.number("tile_n") * schedule.number("kv_subtiles")
        return ProblemClass(head_dim=problem.head_dim, dtype=problem.dtype, causal=problem.causal, group=problem.group,
                            even=problem.seq_k % step_n == 0)  # fmt: skip

    def constants(self, schedule: Schedule, problem: Problem) -> tuple[bool | int | float, ...]:
        constants = Constants(
            TILE_M=schedule.number("tile_m"),
            TILE_N=schedule.number("tile_n"),
            TILE_D=problem.tile_d,
            GROUP=problem.group,
            CAUSAL=problem.causal,
            EVEN=self.problem_class(schedule, problem).even,
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
        )
        return astuple(constants)

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
        """One block per piece of work; a persistent grid is as many blocks as the occupancy hint says fit at once."""
        rows = schedule.number("tile_m") * schedule.number("q_subtiles")
        blocks = -(-problem.seq_q // rows) * problem.batch * problem.heads
        if schedule["persistent"] != "no":
            resident = sm_count * max(1, schedule.number("occupancy")) // schedule.number("num_ctas")
            blocks = min(blocks, max(1, resident))
        return (blocks, 1, 1)
