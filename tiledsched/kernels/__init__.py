"""Kernels that ship: one folder each, with everything that knows it."""

from __future__ import annotations

SHIPPED = {"attention": "tiledsched.kernels.attention:Attention"}
"""Name -> where the kernel is declared."""
