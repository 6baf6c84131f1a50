"""Gated linear units: the activation of one matrix times another. Everything that knows them is in this folder."""

from __future__ import annotations

from tiledsched.kernels.glu.declaration import Glu

__all__ = ["Glu"]
