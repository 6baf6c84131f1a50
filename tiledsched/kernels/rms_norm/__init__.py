"""Root-mean-square normalisation of rows, with or without a residual. Everything that knows it is in this folder."""

from __future__ import annotations

from tiledsched.kernels.rms_norm.declaration import RmsNorm

__all__ = ["RmsNorm"]
