"""Matrix products of groups of rows. Everything that knows them is in this folder."""

from __future__ import annotations

from tiledsched.kernels.grouped_matmul.declaration import GroupedMatmul

__all__ = ["GroupedMatmul"]
