"""The metrics that Nsight Compute collects, and how its raw page is read."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiledsched.core.errors import MeasureError

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = {
    "long_scoreboard": "data from memory or L2",
    "short_scoreboard": "data from shared memory",
    "wait": "the instruction before",
    "barrier": "other warps at a barrier",
    "math_pipe_throttle": "a busy arithmetic unit",
    "mio_throttle": "a full queue to shared memory",
    "lg_throttle": "a full queue to memory",
    "tex_throttle": "a full queue to the texture unit",
    "no_instruction": "the next instruction",
    "dispatch_stall": "the dispatcher",
    "drain": "stores to end, at exit",
    "membar": "a memory barrier",
    "sleeping": "the end of a sleep",
    "gmma": "the tensor cores",
    "branch_resolving": "the target of a branch",
    "misc": "something else",
}
"""Reasons why a warp does not issue, and what it waits for."""
LOCAL = tuple(f"l1tex__t_sectors_pipe_lsu_mem_local_op_{op}.sum" for op in ("ld", "st"))
"""Sectors of 32 bytes moved between registers and local memory: register spills."""
SECTOR_BYTES = 32


@dataclass(frozen=True)
class Metric:
    """One figure of a call."""

    column: str
    """Its column in the CSV file, whose name ends with the unit."""
    label: str
    """Its name as people read it."""
    names: tuple[str, ...]
    """Its names in Nsight Compute. Several are added, as far as a kernel has them."""
    how: str = "mean"
    """How the kernels of a call are joined: sum, max, or mean weighted by duration."""
    scale: float = 1.0
    """Factor from Nsight Compute's base unit to the unit of the column."""


ELAPSED, ACTIVE = "avg.pct_of_peak_sustained_elapsed", "avg.pct_of_peak_sustained_active"
METRICS = (
    Metric("duration_us", "duration, µs", ("gpu__time_duration.sum",), how="sum", scale=0.001),
    Metric("sm_throughput_pct", "SM throughput, % of peak", (f"sm__throughput.{ELAPSED}",)),
    Metric("memory_throughput_pct", "memory throughput, % of peak", (f"gpu__compute_memory_throughput.{ELAPSED}",)),
    Metric("tensor_pipe_pct", "tensor pipes busy, % of elapsed cycles", (f"sm__pipe_tensor_cycles_active.{ELAPSED}",)),
    Metric(
        "tensor_pipe_active_pct", "tensor pipes busy, % of active cycles", (f"sm__pipe_tensor_cycles_active.{ACTIVE}",)
    ),
    Metric("occupancy_pct", "achieved occupancy, % of warps", (f"sm__warps_active.{ACTIVE}",)),
    Metric("registers", "registers per thread", ("launch__registers_per_thread",), how="max"),
    Metric("threads", "threads per block", ("launch__block_size",), how="max"),
    Metric("blocks", "blocks", ("launch__grid_size",), how="max"),
    Metric("shared_kib", "shared memory per block, KiB", ("launch__shared_mem_per_block",), how="max", scale=1 / 1024),
    Metric("spilled_mib", "spilled to local memory, MiB", LOCAL, how="sum", scale=SECTOR_BYTES / 2**20),
    Metric("instructions", "warp instructions", ("smsp__inst_executed.sum",), how="sum"),
    Metric("l2_mib", "through L2, MiB", ("lts__t_sectors.sum",), how="sum", scale=SECTOR_BYTES / 2**20),
    Metric(
        "dram_mib",
        "read and written in DRAM, MiB",
        ("dram__bytes_read.sum", "dram__bytes_write.sum"),
        how="sum",
        scale=1 / 2**20,
    ),
)
TIME = METRICS[0]


def ncu_metrics() -> str:
    """The value of ncu's `--metrics`."""
    names = [name for metric in METRICS for name in metric.names]
    return ",".join([*names, *(STALL.format(reason) for reason in STALLS)])


@dataclass(frozen=True, kw_only=True)
class KernelProfile:
    """One profiled kernel."""

    name: str
    """Its name as ncu shows it."""
    values: dict[str, float]
    """Value in base units by ncu's name. What this GPU or driver does not have is missing."""


@dataclass(frozen=True, kw_only=True)
class MethodProfile:
    """One call of a method."""

    method: str
    """Name of the method."""
    kernels: tuple[KernelProfile, ...] = ()
    """The kernels it launched, in order."""
    status: str = "ok"
    """`ok`, or why there is no profile."""

    def value(self, metric: Metric) -> float | None:
        """The metric over all kernels of the call; None where ncu did not report it."""
        return self._joined(metric.names, metric.how, metric.scale)

    def _joined(self, names: Sequence[str], how: str = "mean", scale: float = 1.0) -> float | None:
        having = [kernel for kernel in self.kernels if kernel.values.keys() & {*names}]
        if not having:
            return None
        values = [sum(kernel.values.get(name, 0.0) for name in names) for kernel in having]
        if how == "mean":
            return float(np.average(values, weights=[each.values.get(TIME.names[0], 1.0) for each in having])) * scale
        return (sum(values) if how == "sum" else max(values)) * scale

    def stalls(self) -> dict[str, float]:
        """Reason -> warps stalled for it per issued instruction, over all kernels, the largest first."""
        values = {reason: self._joined((STALL.format(reason),)) for reason in STALLS}
        found = {reason: value for reason, value in values.items() if value is not None}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def to_csv(self, least_bytes: float) -> dict[str, Any]:
        """One cell for each column."""
        row: dict[str, Any] = {"method": self.method, "status": self.status, "kernels": len(self.kernels)}
        row |= {metric.column: _rounded(self.value(metric)) for metric in METRICS}
        row |= {f"{kind}_over_least": _rounded(over(self, kind, least_bytes)) for kind in ("l2", "dram")}
        row |= {f"stalled_{reason}": _rounded(value) for reason, value in sorted(self.stalls().items())}
        return row


def over(profile: MethodProfile, kind: str, least_bytes: float) -> float | None:
    """Bytes moved over the least possible, where every input is read once and every output written once. `kind` is l2
    or dram.
    """
    mib = profile.value(next(metric for metric in METRICS if metric.column == f"{kind}_mib"))
    return None if mib is None or not least_bytes else mib * 2**20 / least_bytes


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def read_raw(text: str) -> list[KernelProfile]:
    """The kernels in the output of `ncu --csv --page raw --print-units base`, after any other lines.

    Raises:
        MeasureError: there is no such page in the text.
    """
    start = text.find('"ID","Process ID"')
    if start < 0:
        raise MeasureError("Nsight Compute profiled nothing")
    found = [
        KernelProfile(
            name=row["Kernel Name"],
            values={
                name: number for name, cell in row.items() if "__" in name and (number := _number(cell)) is not None
            },
        )
        for place, row in enumerate(csv.DictReader(io.StringIO(text[start:], newline="")))
        if place and None not in row and None not in row.values()  # the first holds the units
    ]
    if not found:
        raise MeasureError("Nsight Compute profiled no kernel")
    return found


def _number(cell: str) -> float | None:
    """The number in a cell, where commas separate thousands; None for words and for what was not available."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None
