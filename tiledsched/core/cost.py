"""What a schedule costs: the least traffic of a problem, and a model of the time that a schedule takes.

A kernel that knows more than the defaults subclasses :class:`Cost` and declares `cost = MyCost()`. The default model is a
roofline. Its time is the larger of arithmetic and traffic, at the rates that are reached by as many blocks as the GPU holds
at once. The last wave of blocks is rarely full, registers that spill cost traffic, and few warps on an SM hide less of the
memory's latency. The model orders schedules roughly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.core.device import REGISTERS_PER_SM, ArchSpec, ResourceFacts, ctas_per_sm
from tiledsched.core.schedule import Schedule

COPY_SHARE = 0.88
"""Share of the published bandwidth of device memory that a copy reaches: 4.24 of 4.8 TB/s on the H200."""
NEXT_LAUNCH_US = 2.0
"""Time that another launch in the same stream adds. Chosen, not fitted."""
LAUNCH_US = 3.0
"""Time from the start to the end of an empty kernel, in microseconds."""
BLOCK_US = 1.0
"""Time that starting and ending a block takes where no other block hides it, in microseconds."""
ENOUGH_WARPS = 16
"""Warps on an SM that keep its memory pipes busy."""
EFFICIENCY = 0.8
"""Share of the peak rates that large copies and matrix products reach on an H200."""
SPILL_COST = 1 / 64
"""Share by which each spilled byte per thread lengthens a block."""
SMALLEST_US = 1e-9
"""Times below this count as nothing."""
SHARPNESS = 4.0
"""Exponent of the smooth maximum of two times. Chosen, not fitted."""
WARPGROUP_ROWS = 64
"""Fewest rows of a tile that groups of warps multiply together (wgmma, tcgen05); below, single warps do."""
WARPS_PER_GROUP = 4
"""One warp per SM partition: what wgmma and tcgen05 call a warpgroup."""
TENSOR_RATES = {
    "tfloat32": 0.5,
    "float16": 1,
    "bfloat16": 1,
    "float8_e4m3fn": 2,
    "float8_e5m2": 2,
    "int8": 2,
    "float4_e2m1fn": 4,
}
"""Element type whose matrix products run on tensor cores -> their rate by that of float16. NVIDIA's white papers of Ampere,
Hopper and Blackwell; FP4 has that rate from sm_100 on, and runs nowhere before."""
SMALL_INPUT = 1 / 4
"""An input with a smaller share of the bytes of the largest one is no operand of a product, but a scale or an offset."""


@dataclass(frozen=True, kw_only=True)
class PublishedTime:
    """The time of a rival that is expected by figures that others published."""

    rival: str
    """The kernel's name for the rival."""
    us: float
    """Its expected time in microseconds, the host's part included."""
    ours_us: float
    """Modelled time of our schedule under the same conditions."""
    margin: float
    """Share by which the rival must be faster to be served: how far off the model may be on this GPU."""
    source: str
    """Where the figures are from."""


class Cost:
    """What a kernel's problems and schedules cost. `p` is the problem, `s` the schedule, `spec` describes the GPU."""

    def bytes_moved(self, p: Any) -> int:
        """Least device-memory traffic in bytes: every input is read once, and every output is written once."""
        return sum(each.bytes * (2 if each.role == "inout" else 1) for each in p.declaration.arrays(p))

    def expected(self, p: Any, s: Schedule, spec: ArchSpec) -> ResourceFacts:
        """The resources that machine code which is not built yet will probably take.

        The default spills nothing, and takes the registers that its occupancy leaves.
        """
        occupancy = max(1, int(s.get("occupancy", 1)))
        threads = 32 * ((int(s.get("num_worker_warps", 0)) or WARPS_PER_GROUP) + spec.producer_warps)
        registers = min(255, REGISTERS_PER_SM // (threads * occupancy) // 8 * 8)
        return ResourceFacts(
            registers=registers,
            threads=threads,
            shared_bytes=0,
            spill_bytes=0,
            num_ctas=max(1, int(s.get("num_ctas", 1))),
            code_bytes=0,
            ctas_per_sm=ctas_per_sm(spec.arch, registers, threads, 0),
        )

    def model(self, p: Any, s: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
        """Estimated time in microseconds of machine code that takes the resources `facts`. Only the order of estimates counts."""
        resident = facts.resident(spec.arch)
        grids = [math.prod(grid) for grid in p.declaration.grids(p, s, spec)]
        slots = max(1, spec.sm_count * resident // max(1, facts.num_ctas))
        waves = max(max(grids) / slots, 1e-9)
        idle = math.ceil(waves) / waves if waves > 1 else max(1.0, spec.sm_count / max(grids))
        warps = resident * facts.threads / 32
        hidden = max(1.0, ENOUGH_WARPS / warps) ** 0.5
        flops_per_cycle = spec.tensor_flops * tensor_rate(p) if uses_tensor_cores(p) else 2 * spec.fp32_ops
        peak = spec.sm_count * spec.clock_ghz * 1e3 * flops_per_cycle
        arithmetic = p.flops / (peak * EFFICIENCY)
        traffic = p.min_bytes / (spec.dram_gbps * 1e3 * EFFICIENCY) * hidden
        body = smooth_max(arithmetic, traffic) * min(idle, 4.0)
        return LAUNCH_US * len(grids) + BLOCK_US * math.ceil(waves) + body * (1.0 + SPILL_COST * facts.spill_bytes)

    def lent_times(self, p: Any) -> Mapping[str, tuple[str, float, float]]:
        """Which rivals of a kernel that declares `timed_with` take as long as methods of that kernel and a little more: name of
        the rival -> name of the method, and the microseconds that a call takes longer, on the GPU and on the host."""
        return {}

    def timed_as(self, p: Any) -> Any:
        """The problem of the kernel that `timed_with` names, or of this one, whose times say what methods take on `p`."""
        return p

    def published(
        self, p: Any, s: Schedule, spec: ArchSpec, device_name: str, figures: Mapping[str, Any]
    ) -> Sequence[PublishedTime]:
        """The times of rivals that are expected on a GPU by published figures; none unless the kernel has some.

        Args:
            p: the problem.
            s: what is served.
            spec: describes the GPU.
            device_name: the driver's name for the GPU.
            figures: what the kernel's file of published figures says of each GPU, by product name.
        """
        return ()


def smooth_max(first: float, second: float) -> float:
    """The p-norm of two times: the larger where they differ, somewhat more where they are close."""
    largest = max(first, second, SMALLEST_US)
    return largest * ((first / largest) ** SHARPNESS + (second / largest) ** SHARPNESS) ** (1.0 / SHARPNESS)


def uses_tensor_cores(p: Any) -> bool:
    """Whether the arithmetic is probably that of matrix products: of narrow types, and over 16 operations per byte."""
    narrow = any(each.dtype in TENSOR_RATES for each in p.declaration.arrays(p))
    return narrow and p.flops > 16 * p.min_bytes


def tensor_rate(p: Any) -> float:
    """The rate of the problem's matrix products by that of float16: the one of the slowest operand."""
    inputs = [each for each in p.declaration.arrays(p) if each.role == "in"]
    largest = max((each.bytes for each in inputs), default=0)
    operands = [each.dtype for each in inputs if each.bytes >= SMALL_INPUT * largest]
    return min((TENSOR_RATES[each] for each in operands if each in TENSOR_RATES), default=1)
