"""Rivals of rotary position embedding in place: they write new tensors, which moves as many bytes."""

from __future__ import annotations

from tiledsched.bench.rivals.rope import rivals

__all__ = ["rivals"]
