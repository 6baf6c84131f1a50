"""Kernels that ship: one folder each, with everything that knows it."""

from __future__ import annotations

SHIPPED = {
    "attention": "tiledsched.kernels.attention:Attention",
    "matmul": "tiledsched.kernels.matmul:Matmul",
    "rms_norm": "tiledsched.kernels.rms_norm:RmsNorm",
    "softmax": "tiledsched.kernels.softmax:Softmax",
}
"""Name -> where the kernel is declared."""
