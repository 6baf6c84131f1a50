"""Rotary position embedding of queries and keys where they lie. Everything that knows it is in `kernels/rope`."""

from tiledsched.kernels.rope.declaration import RopeInPlace as RopeInPlace
