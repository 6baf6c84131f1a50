"""The gradient of softmax over rows. Everything that knows it is in this folder."""

from __future__ import annotations

from tiledsched.kernels.softmax_backward.declaration import SoftmaxBackward

__all__ = ["SoftmaxBackward"]
