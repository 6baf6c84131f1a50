"""Gradients of root-mean-square normalisation. Everything that knows them is in this folder."""

from __future__ import annotations

from tiledsched.kernels.rms_norm_backward.declaration import RmsNormBackward

__all__ = ["RmsNormBackward"]
