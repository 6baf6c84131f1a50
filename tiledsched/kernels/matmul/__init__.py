"""Matrix product C = A @ B. Everything that knows it is in this folder."""

from __future__ import annotations

from tiledsched.kernels.matmul.declaration import Matmul

__all__ = ["Matmul"]
