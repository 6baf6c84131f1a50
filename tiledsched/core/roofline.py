"""The model of kernels that bring none of their own: a roofline with waves of blocks, and what the machine code tells.

Time is the larger of arithmetic and traffic at the rates that as many blocks reach as the GPU holds at once. The last wave
is rarely full, registers that spill cost traffic, and few warps on an SM hide less of the memory's latency. It orders
schedules roughly; a kernel that knows more declares `model`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tiledsched.core.device import ArchSpec
from tiledsched.core.resources import REGISTERS_PER_SM, ResourceFacts, ctas_per_sm
from tiledsched.core.schedule import Schedule

if TYPE_CHECKING:
    from tiledsched.core.kernel import Kernel

LAUNCH_US = 3.0
"""Start and end of one kernel."""
BLOCK_US = 1.0
"""Start and end of one block, which blocks beside it hide."""
ENOUGH_WARPS = 16
"""Warps on an SM that keep its memory pipes busy."""
EFFICIENCY = 0.8
"""Of the peak rates: what large copies and matrix products reach on an H200."""
SPILL_COST = 1 / 64
"""Share by which each spilled byte per thread lengthens a block."""
SHARPNESS = 4.0
"""Exponent of the smooth maximum of arithmetic and traffic."""
WARPS_PER_GROUP = 4


def estimate_us(kernel: type[Kernel], p: Any, s: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
    """Modelled microseconds of a schedule on the GPU that `spec` describes."""
    resident = ctas_per_sm(spec.arch, facts.registers, facts.threads, facts.shared_bytes)
    grids = [math.prod(grid) for grid in kernel.grids(p, s, spec)]
    slots = max(1, spec.sm_count * resident // max(1, facts.num_ctas))
    waves = max(max(grids) / slots, 1e-9)
    idle = math.ceil(waves) / waves if waves > 1 else max(1.0, spec.sm_count / max(grids))
    warps = resident * facts.threads / 32
    hidden = max(1.0, ENOUGH_WARPS / warps) ** 0.5
    peak = (
        spec.sm_count
        * spec.clock_ghz
        * 1e3
        * (spec.tensor_flops if uses_tensor_cores(kernel, p) else 2 * spec.fp32_ops)
    )
    arithmetic = p.flops / (peak * EFFICIENCY)
    traffic = p.min_bytes / (spec.dram_gbps * 1e3 * EFFICIENCY) * hidden
    body = (arithmetic**SHARPNESS + traffic**SHARPNESS) ** (1 / SHARPNESS) * min(idle, 4.0)
    return LAUNCH_US * len(grids) + BLOCK_US * math.ceil(waves) + body * (1.0 + SPILL_COST * facts.spill_bytes)


def uses_tensor_cores(kernel: type[Kernel], p: Any) -> bool:
    """Whether the arithmetic is probably that of matrix products: it is of narrow types, and far more than the traffic."""
    return any(
        each.dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8") for each in kernel.arrays(p)
    ) and (p.flops > 16 * p.min_bytes)


def expected_facts(s: Schedule, spec: ArchSpec) -> ResourceFacts:
    """Facts of a program that spills nothing and takes the registers that its occupancy leaves."""
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
