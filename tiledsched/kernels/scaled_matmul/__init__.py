"""Products of 8-bit floats with scales. Everything that knows them is in this folder."""

from __future__ import annotations

from tiledsched.kernels.scaled_matmul.declaration import ScaledMatmul

__all__ = ["ScaledMatmul"]
