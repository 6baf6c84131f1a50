"""The resources that one block of machine code takes, and how many blocks an SM holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

REGISTERS_PER_SM = 65536
REGISTER_GRANULARITY = 256  # per warp, all archs since sm_50
MAX_SPILL_BYTES = 48
"""Registers that the program of a schedule which was not measured may spill, in bytes a thread: hardly a measured winner spills
more (docs/results/serving.md)."""
SYSTEM_SHARED_BYTES = 1024  # reserved per block by the driver, sm_80 and later
MAX_THREADS_PER_SM = {"sm_86": 1536, "sm_87": 1536, "sm_89": 1536, "sm_110": 1536, "sm_120": 1536, "sm_121": 1536}
SHARED_BYTES_PER_SM = {
    "sm_80": 164,
    "sm_86": 100,
    "sm_87": 164,
    "sm_89": 100,
    "sm_90": 228,
    "sm_100": 228,
    "sm_103": 228,
    "sm_110": 228,
    "sm_120": 100,
    "sm_121": 100,
}
"""KiB; CUDA C++ Programming Guide, technical specifications per compute capability."""


@dataclass(frozen=True, kw_only=True)
class ResourceFacts:
    """The resources of one block of an artifact, known before it runs."""

    registers: int
    """Per thread, as allocated at launch (warp-specialized kernels redistribute them later)."""
    threads: int
    """Per CTA: the required block width (REQNTID)."""
    shared_bytes: int
    """Static shared memory per CTA."""
    spill_bytes: int
    """Bytes of each thread's stack frame, which holds what did not fit the registers."""
    num_ctas: int
    """CTAs per cluster; 1 without clusters."""
    code_bytes: int
    """Size of the machine code."""
    ctas_per_sm: int
    """CTAs the registers, threads and shared memory of one SM allow at once."""

    def resident(self, arch: str) -> int:
        """Blocks that one SM of an arch holds at once. Worked out anew: facts stored earlier counted shared memory twice."""
        return ctas_per_sm(arch, self.registers, self.threads, self.shared_bytes)

    def to_json(self) -> dict[str, Any]:
        """A plain dict; pass it to the constructor to invert."""
        return asdict(self)


def spilled(spill_bytes: int) -> int:
    """Bytes of registers that a program spills a thread, where that is more than may cost time; else 0."""
    return spill_bytes if spill_bytes > MAX_SPILL_BYTES else 0


def ctas_per_sm(arch: str, registers: int, threads: int, shared_bytes: int) -> int:
    """CTAs that fit on one SM at once, after the CUDA occupancy rules (registers per warp in units of 256).

    From compute capability 9.0 on, the shared memory a cubin states includes the part the driver reserves.
    """
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
    by_registers = REGISTERS_PER_SM // (per_warp * warps)
    by_threads = MAX_THREADS_PER_SM.get(arch, 2048) // threads
    reserved = SYSTEM_SHARED_BYTES if int(arch[3:]) < 90 else 0
    by_shared = SHARED_BYTES_PER_SM.get(arch, 228) * 1024 // max(1, shared_bytes + reserved)
    return max(1, min(by_registers, by_threads, by_shared))


def grid_blocks(tiles: int, s: Mapping[str, Any], device: Any, *, persistent: bool) -> int:
    """Blocks of a grid: one for each of `tiles`, or where that is fewer, of a persistent grid, as many as fit on the GPU at once
    according to the occupancy hint of the schedule `s`.
    """
    if not persistent:
        return tiles
    resident = device.sm_count * max(1, int(s["occupancy"])) // int(s.get("num_ctas", 1))
    return min(tiles, max(1, resident))
