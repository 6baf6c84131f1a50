"""Rotary position embedding of queries and keys. Everything that knows it is in this folder."""

from __future__ import annotations

from tiledsched.kernels.rope.declaration import Rope, RopeInPlace

__all__ = ["Rope", "RopeInPlace"]
