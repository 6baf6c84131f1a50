"""The grid of the evaluation, and its rows: one for each method on each problem, with a status."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tiledsched.core.groups import nested
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.report.records import TileTime
from tiledsched.rivals.rows import OK, BenchRow

LENGTHS = (512, 1024, 2048, 4096, 8192)
HEAD_DIMS = (64, 96, 128, 160)
DTYPES = ("float16", "bfloat16")
BASELINE = "torch_sdpa"
"""The method that speedups are relative to: torch's SDPA, which chooses its backend itself."""
METHODS = {
    "tiledsched": "tiledsched",
    "torch_auto": BASELINE,
    "torch_math": "torch_sdpa_math",
    "eager": "standard_eager",
    "torch_flash": "torch_sdpa_flash_forced",
    "torch_efficient": "torch_sdpa_efficient_forced",
    "torch_cudnn": "torch_sdpa_cudnn_forced",
    "triton": "triton",
}
"""Name of a method in the bench -> its name in the paper's files."""
OURS = METHODS["tiledsched"]
EXPLICIT = ("torch_sdpa_math", "standard_eager")
FORCED = ("torch_sdpa_flash_forced", "torch_sdpa_efficient_forced", "torch_sdpa_cudnn_forced")
STATUSES = (
    ("out of memory", "oom"),
    ("skipped: its score matrices", "oom"),
    ("not installed", "unsupported"),
    ("not served", "unsupported"),
    ("No available kernel", "unsupported"),
    ("No viable backend", "unsupported"),
    ("not supported", "unsupported"),
    ("wrong", "wrong"),
    ("timed ", "disturbed"),
)
"""(text in the status of a bench row without a time, status in the paper's files). Anything else is a `runtime_error`."""


def problems() -> list[Problem]:
    """The 80 problems, each one batch of eight heads, the quick ones first."""
    kernel = kernel_named("attention")
    return [
        kernel.problem(
            batch=1, heads=8, kv_heads=8, seq_q=length, seq_k=length, head_dim=head_dim, dtype=dtype, causal=causal
        )
        for length, head_dim, dtype, causal in itertools.product(LENGTHS, HEAD_DIMS, DTYPES, (False, True))
    ]


Cell = tuple[str, bool, int, int]
"""(dtype, causal, S, D) of a problem."""


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """A line of benchmark_results.csv. Figures are None where there is no time."""

    method: str
    """One of the names that METHODS maps to."""
    baseline_name: str = BASELINE
    """The method that it is compared with."""
    dtype: str
    """float16 or bfloat16."""
    causal: bool
    """Whether the mask is causal."""
    B: int
    """Batch."""
    H: int
    """Heads."""
    S: int
    """Sequence length."""
    D: int
    """Head dimension."""
    flops_forward: float
    """4 D operations for each query-key pair that is not masked: S^2 pairs, or S (S + 1) / 2 with the causal mask."""
    median_ms: float | None = None
    """Median time in milliseconds."""
    p95_ms: float | None = None
    """95th percentile of the time in milliseconds."""
    throughput_tokens_per_s: float | None = None
    """B H S over the median time."""
    tflops_per_s: float | None = None
    """flops_forward over the median time."""
    approx_bw_gbps: float | None = None
    """Queries, keys, values and outputs, each moved once, over the median time. It is a proxy, not a measurement of
    traffic.
    """
    status: str = OK
    """ok, unsupported, oom, wrong, disturbed or runtime_error."""
    status_detail: str = ""
    """Why there is no time."""

    @property
    def cell(self) -> Cell:
        """(dtype, causal, S, D)."""
        return self.dtype, self.causal, self.S, self.D


COLUMNS = [field.name for field in fields(ResultRow)]
"""Columns of benchmark_results.csv, in the paper's order."""


@dataclass(frozen=True, kw_only=True)
class TilingRow:
    """A line of tuning_results.csv."""

    regime: str
    """Short S, Mid S or Long S."""
    problem: Problem
    """The problem whose length and head dimension the line names."""
    best: TileTime
    """The best tile, judged by its best schedule."""
    runner_up: TileTime | None
    """The second best; None where only one tile could be measured."""

    @property
    def drop(self) -> float | None:
        """How much longer the second best tile takes, in percent."""
        return (self.runner_up.us / self.best.us - 1) * 100 if self.runner_up else None

    def to_csv(self) -> dict[str, Any]:
        """One cell for each of the paper's columns."""
        other = self.runner_up
        return {
            "regime": self.regime,
            "S": self.problem.seq_q,
            "D": self.problem.head_dim,
            "best_TM": self.best.tile[0],
            "best_TN": self.best.tile[1],
            "best_median_ms": self.best.us / 1e3,
            "runner_TM": other.tile[0] if other else None,
            "runner_TN": other.tile[1] if other else None,
            "runner_median_ms": other.us / 1e3 if other else None,
            "sensitivity_drop_percent": self.drop,
        }


TILING_COLUMNS = (
    "regime",
    "S",
    "D",
    "best_TM",
    "best_TN",
    "best_median_ms",
    "runner_TM",
    "runner_TN",
    "runner_median_ms",
    "sensitivity_drop_percent",
)
"""Columns of tuning_results.csv, in the paper's order."""


def result_of(row: BenchRow) -> ResultRow:
    """A row of the bench in the paper's columns."""
    p = row.problem
    pairs = p.seq_q * (p.seq_q + 1) / 2 if p.causal else p.seq_q * p.seq_k
    flops = 4.0 * p.batch * p.heads * p.head_dim * pairs
    shared = {
        "method": METHODS.get(row.method, row.method),
        "dtype": p.dtype,
        "causal": p.causal,
        "B": p.batch,
        "H": p.heads,
        "S": p.seq_q,
        "D": p.head_dim,
        "flops_forward": flops,
    }
    if not row.median_us:
        status = next((status for text, status in STATUSES if text.lower() in row.status.lower()), "runtime_error")
        return ResultRow(**shared, status=status, status_detail=row.status)
    seconds = row.median_us / 1e6
    moved = 4 * p.batch * p.heads * p.seq_q * p.head_dim * 2
    return ResultRow(
        **shared,
        median_ms=row.median_us / 1e3,
        p95_ms=row.p95_us / 1e3 if row.p95_us else None,
        throughput_tokens_per_s=p.batch * p.heads * p.seq_q / seconds,
        tflops_per_s=flops / seconds / 1e12,
        approx_bw_gbps=moved / seconds / 1e9,
    )


def times_by_cell(rows: Sequence[ResultRow]) -> dict[Cell, dict[str, float]]:
    """Cell -> method -> milliseconds, of the methods that have a time there."""
    return nested((row.cell, row.method, row.median_ms) for row in rows if row.median_ms)
