"""What is known about each arch without a GPU: the numbers that the static models use, and how many blocks an SM holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tiledsched.core.errors import ConfigError, did_you_mean

REGISTERS_PER_SM = 65536
REGISTER_GRANULARITY = 256  # per warp, all archs since sm_50
MAX_SPILL_BYTES = 48
"""Registers that the program of a schedule which was not measured may spill, in bytes a thread: hardly a measured winner spills
more (docs/results/serving.md)."""
SYSTEM_SHARED_BYTES = 1024  # reserved per block by the driver, sm_80 and later
MAX_THREADS_PER_SM = {"sm_86": 1536, "sm_87": 1536, "sm_89": 1536, "sm_110": 1536, "sm_120": 1536, "sm_121": 1536}
SHARED_KIB_PER_SM = {
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
"""CUDA C++ Programming Guide, technical specifications per compute capability. A block may have all but what is reserved."""


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
    by_shared = (SHARED_KIB_PER_SM.get(arch, 228) << 10) // max(1, shared_bytes + reserved)
    return max(1, min(by_registers, by_threads, by_shared))


def grid_blocks(tiles: int, s: Mapping[str, Any], device: Any, *, persistent: bool) -> int:
    """Blocks of a grid: one for each of `tiles`, or where that is fewer, of a persistent grid, as many as fit on the GPU at once
    according to the occupancy hint of the schedule `s`.
    """
    if not persistent:
        return tiles
    resident = device.sm_count * max(1, int(s["occupancy"])) // int(s.get("num_ctas", 1))
    return min(tiles, max(1, resident))


@dataclass(frozen=True, kw_only=True)
class ArchSpec:
    """One GPU taken as representative of its arch. Rates are per SM and clock, from NVIDIA's documentation."""

    arch: str
    """Name of the arch, e.g. sm_90."""
    device: str
    """The representative GPU."""
    sm_count: int
    """Streaming multiprocessors."""
    clock_ghz: float
    """Boost clock."""
    tensor_flops: int
    """fp16 or bf16 tensor-core operations with fp32 accumulation, dense, per SM and clock (a multiply-add is 2)."""
    exp2_ops: int
    """exp2 results per SM and clock (special function units)."""
    fp32_ops: int
    """fp32 instructions per SM and clock."""
    shared_bytes: int
    """Shared memory bytes per SM and clock."""
    dram_gbps: float
    """Device-memory bandwidth, GB/s."""
    l2_bytes: int
    """Size of the L2 cache."""
    product_rows: int = 16
    """Rows of one tensor-core instruction: 16 for mma.sync (one warp), 64 for wgmma, 128 for tcgen05 (a warpgroup)."""
    producer_warps: int = 4
    """Warps that cuTile sets aside for moving data (TMA); 0 before sm_90, where there is no TMA."""
    fp16_accumulate_speedup: int = 1
    """How much faster fp16 accumulation is than fp32."""
    fp8_speedup: int = 2
    """How much faster products of 8-bit floats are than those of 16-bit ones; 1 before sm_89, which has no such products."""
    host_arch: str = ""
    """Architecture of the only hosts that such GPUs have; empty where there are several kinds."""


MB = 1 << 20

# Tensor, exp2 and fp32 rates: CUDA C++ Programming Guide, arithmetic throughput table, and the architecture white
# papers (A100, GA102, AD102, H100, Blackwell, RTX Blackwell); SM counts, clocks, caches and bandwidths: product pages.
# GeForce cards run fp32 accumulation at half their fp16 rate; the professional cards of the same arch do not.
ARCHS = {
    spec.arch: spec
    for spec in (
        ArchSpec(
            arch="sm_80",
            device="NVIDIA A100-SXM4-80GB",
            sm_count=108,
            clock_ghz=1.41,
            tensor_flops=2048,
            exp2_ops=16,
            fp32_ops=64,
            shared_bytes=128,
            dram_gbps=2039,
            l2_bytes=40 * MB,
            producer_warps=0,
            fp8_speedup=1,
        ),
        ArchSpec(
            arch="sm_86",
            device="NVIDIA A10",
            sm_count=72,
            clock_ghz=1.695,
            tensor_flops=1024,
            exp2_ops=16,
            fp32_ops=128,
            shared_bytes=128,
            dram_gbps=600,
            l2_bytes=6 * MB,
            producer_warps=0,
            fp8_speedup=1,
        ),
        ArchSpec(
            arch="sm_89",
            device="NVIDIA GeForce RTX 4090",
            sm_count=128,
            clock_ghz=2.52,
            tensor_flops=512,
            exp2_ops=16,
            fp32_ops=128,
            shared_bytes=128,
            dram_gbps=1008,
            l2_bytes=72 * MB,
            producer_warps=0,
            fp16_accumulate_speedup=2,
        ),
        ArchSpec(
            arch="sm_90",
            device="NVIDIA H200",
            sm_count=132,
            clock_ghz=1.98,
            tensor_flops=4096,
            exp2_ops=16,
            fp32_ops=128,
            shared_bytes=128,
            dram_gbps=4800,
            l2_bytes=50 * MB,
            product_rows=64,
        ),
        ArchSpec(
            arch="sm_100",
            device="NVIDIA B200",
            sm_count=148,
            clock_ghz=1.85,
            tensor_flops=8192,
            exp2_ops=16,
            fp32_ops=128,
            shared_bytes=128,
            dram_gbps=8000,
            l2_bytes=126 * MB,
            product_rows=128,
        ),
        ArchSpec(
            arch="sm_103",
            device="NVIDIA B300",
            sm_count=148,
            clock_ghz=1.92,
            tensor_flops=8192,
            exp2_ops=32,
            fp32_ops=128,
            shared_bytes=128,
            dram_gbps=8000,
            l2_bytes=126 * MB,
            product_rows=128,
        ),
        ArchSpec(
            arch="sm_110",
            device="NVIDIA Jetson AGX Thor",
            sm_count=20,
            clock_ghz=1.57,
            tensor_flops=8192,
            exp2_ops=16,
            fp32_ops=128,
            shared_bytes=128,
            dram_gbps=273,
            l2_bytes=32 * MB,
            product_rows=128,
            host_arch="aarch64",
        ),
        ArchSpec(
            arch="sm_120",
            device="NVIDIA RTX PRO 6000 Blackwell",
            sm_count=188,
            clock_ghz=2.6,
            tensor_flops=1024,
            exp2_ops=16,
            fp32_ops=128,
            shared_bytes=128,
            dram_gbps=1792,
            l2_bytes=128 * MB,
        ),
        ArchSpec(
            arch="sm_121",
            device="NVIDIA GB10",
            sm_count=48,
            clock_ghz=2.42,
            tensor_flops=1024,
            exp2_ops=16,
            fp32_ops=128,
            shared_bytes=128,
            dram_gbps=273,
            l2_bytes=24 * MB,
            host_arch="aarch64",
        ),
    )
}

SAME_CODE = {"sm_120": "sm_121", "sm_121": "sm_120"}
"""Archs for which the compiler makes the same machine code: all schedules that the shipped tables of both hold have equal
fingerprints. What was measured on one says for the other what another device of the same arch says."""


LIMITS = ("sm_count", "shared_memory_bytes", "registers_per_sm", "compute_capability")
"""Numbers of the arch that constraints may read; a search-space file may add others."""


def arch_limits(arch: str) -> dict[str, int]:
    """The values of :data:`LIMITS`; CUDA C++ Programming Guide, technical specifications per compute capability."""
    return {
        "sm_count": arch_spec(arch).sm_count,
        "shared_memory_bytes": (SHARED_KIB_PER_SM[arch] << 10) - SYSTEM_SHARED_BYTES,
        "registers_per_sm": REGISTERS_PER_SM,
        "compute_capability": int(arch[3:]),
    }


LEAST_CAPABILITY = {
    "float8_e4m3fn": 90,
    "float8_e5m2": 90,
    "float8_e8m0fnu": 100,
    "float4_e2m1fn": 100,
    "float8_e5m3fnu": 107,
}
"""Element type -> the least compute capability for which cuTile (1.7) compiles it; any for types that are not listed."""
DEVICES = {
    spec.device: spec
    for spec in (
        replace(
            ARCHS["sm_120"],
            device="NVIDIA GeForce RTX 5090",
            sm_count=170,
            clock_ghz=2.41,
            tensor_flops=512,
            l2_bytes=96 * MB,
            fp16_accumulate_speedup=2,
        ),
    )
}
"""Driver's name -> the numbers of a GPU that the representative of its arch misrepresents. The RTX 5090's peak with fp32
accumulators is 209.5 TFLOP/s (RTX Blackwell white paper); the numbers of the RTX PRO 6000 would give it 500."""


def arch_spec(arch: str, device_name: str = "") -> ArchSpec:
    """The numbers of a GPU, or of the representative GPU of its arch.

    Args:
        arch: the arch.
        device_name: the driver's name for the GPU; without one, or where :data:`DEVICES` has none of that name, the numbers are
            those of the representative.

    Raises:
        ConfigError: an arch this package does not know.
    """
    if arch not in ARCHS:
        names = [*OTHER_NAMES, *(name for listed in PRODUCTS.values() for name in listed)]
        raise ConfigError(
            f"unknown arch {arch!r}; known are {', '.join(ARCHS)}{did_you_mean(arch, (*ARCHS, *names), 0.75)}"
        )
    own = DEVICES.get(device_name)
    return own if own is not None and own.arch == arch else ARCHS[arch]


PRODUCTS = {
    "sm_80": ("A100", "A30"),
    "sm_86": ("A10", "A16", "A40", "RTX A6000", "RTX 3090", "RTX 3080"),
    "sm_89": ("L4", "L40", "L40S", "RTX 6000 Ada", "RTX 4090", "RTX 4080"),
    "sm_90": ("H100", "H200", "H800", "H20", "GH200"),
    "sm_100": ("B200", "GB200"),
    "sm_103": ("B300", "GB300"),
    "sm_110": ("Thor",),
    "sm_120": ("RTX PRO 6000", "RTX 5090", "RTX 5080"),
    "sm_121": ("GB10",),
}
"""Arch -> product names of its GPUs, from NVIDIA's table of compute capabilities."""
OTHER_NAMES = {"jetsonagxthor": "sm_110", "dgxspark": "sm_121", "spark": "sm_121"}
"""What else people call such a GPU, or a machine that has one."""


def describe_gpus(arch: str, measured: Iterable[str] = ()) -> str:
    """The GPUs that something was measured on, by the driver's names, else all products of the arch: `H100 or H200 (sm_90)`."""
    measured = sorted({*measured} - {""})
    *others, last = measured or PRODUCTS.get(arch, (arch,))
    named = f"{', '.join(others)} {'and' if measured else 'or'} {last}" if others else last
    return named if named == arch else f"{named} ({arch})"


def arch_of(device_name: str) -> str:
    """The arch of a GPU by the driver's name for it; empty where no product has that name."""
    words = f" {device_name.replace('-', ' ')} "
    found = [(len(name), arch) for arch, names in PRODUCTS.items() for name in names if f" {name} " in words]
    return max(found, default=(0, ""))[1]


def arch_named(text: str) -> str:
    """The arch that people mean by `sm_90`, `sm90`, `90`, `9.0` or `H200`; any other text is returned unchanged."""
    plain = "".join(
        character for character in text.lower().removeprefix("nvidia").removeprefix(" geforce") if character.isalnum()
    )
    numbers = {arch.removeprefix("sm_"): arch for arch in ARCHS}
    names = {name.lower().replace(" ", ""): arch for arch, listed in PRODUCTS.items() for name in listed}
    return numbers.get(plain.removeprefix("sm")) or names.get(plain) or OTHER_NAMES.get(plain) or text
