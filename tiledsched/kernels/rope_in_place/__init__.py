"""Rotary position embedding of queries and keys where they lie. Everything that knows it is in `kernels/rope`."""

from __future__ import annotations

from tiledsched.kernels.rope.declaration import RopeInPlace

__all__ = ["RopeInPlace"]
