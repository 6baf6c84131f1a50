"""What machine code will probably tell of itself, for schedules that were not built: enough to compare them roughly."""

from __future__ import annotations

from tiledsched.build.cubin import REGISTERS_PER_SM, SHARED_BYTES_PER_SM, ResourceFacts, ctas_per_sm
from tiledsched.device import ArchSpec
from tiledsched.kernels.attention.model import WARPS_PER_GROUP, block_rows
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule

MOST_REGISTERS = 255
TILES_IN_FLIGHT = 4
"""Key and value tiles in shared memory, where they fit: what most programs on the H200 hold."""


def expected_facts(problem: Problem, schedule: Schedule, spec: ArchSpec) -> ResourceFacts:
    """Facts of a program that spills nothing, holds four tiles and takes the registers its occupancy leaves it."""
    occupancy = max(1, schedule.number("occupancy"))
    threads = 32 * ((schedule.number("num_worker_warps") or WARPS_PER_GROUP) + spec.producer_warps)
    registers = min(MOST_REGISTERS, REGISTERS_PER_SM // (threads * occupancy) // 8 * 8)
    columns = problem.tile_d * problem.element_bytes
    wanted = (block_rows(schedule) + TILES_IN_FLIGHT * schedule.number("tile_n")) * columns
    shared_bytes = min(wanted, SHARED_BYTES_PER_SM.get(spec.arch, 228) * 1024 // occupancy)
    return ResourceFacts(registers=registers, threads=threads, shared_bytes=shared_bytes, spill_bytes=0,
                         num_ctas=schedule.number("num_ctas"), code_bytes=0,
                         ctas_per_sm=ctas_per_sm(spec.arch, registers, threads, shared_bytes))  # fmt: skip
