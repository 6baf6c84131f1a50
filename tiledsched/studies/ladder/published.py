"""What NVIDIA published for the same kernel and the same problem. Nothing here was measured by this project."""

from __future__ import annotations

from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named

SOURCE = "github.com/NVIDIA/dgx-spark-playbooks, nvidia/cutile-kernels/README.md, read at 0db7c14"
RUNG_LENGTH = 2048
"""The sequence length of `RUNGS`."""
RUNGS = {"naive": 62.8, "exp2": 66.5, "load_order": 66.3, "latency": 66.5, "occupancy": 79.5, "division": 81.1}
"""Rung -> TFLOP/s on a GB10."""
RATES = {
    "GB10": {1024: 58.188, 2048: 80.907, 4096: 86.19, 8192: 88.891, 16384: 89.492},
    "B300": {1024: 465.0, 2048: 770.0, 4096: 999.0, 8192: 1159.0, 16384: 1254.0},
}
"""GPU -> sequence length -> TFLOP/s of NVIDIA's finished kernel."""
COMMAND = "tiledsched study ladder -p B=4,H=32,S=1024:2048:4096:8192:16384,D=128,dtype=float16,causal=yes"
"""Measures the ladder for the problems of these figures."""


def published_problem(length: int) -> Problem:
    """The problem of NVIDIA's scripts at a sequence length."""
    shared = {"batch": 4, "heads": 32, "kv_heads": 32, "head_dim": 128, "dtype": "float16", "causal": True}
    return kernel_named("attention").problem(seq_q=length, seq_k=length, **shared)
