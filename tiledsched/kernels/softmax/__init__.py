"""Softmax of rows. Everything that knows it is in this folder."""

from __future__ import annotations

from tiledsched.kernels.softmax.declaration import Softmax

__all__ = ["Softmax"]
