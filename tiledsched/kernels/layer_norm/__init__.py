"""Layer normalisation of rows, with or without a weight and a bias. Everything that knows it is in this folder."""

from __future__ import annotations

from tiledsched.kernels.layer_norm.declaration import LayerNorm

__all__ = ["LayerNorm"]
