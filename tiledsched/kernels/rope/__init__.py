"""Rotary position embedding of queries and keys. Everything that knows it is in this folder."""

from tiledsched.kernels.rope.declaration import Rope as Rope, RopeInPlace as RopeInPlace
