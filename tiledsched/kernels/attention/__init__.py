"""Attention forward: softmax(scale * Q @ K^T, masked) @ V. Everything that knows it is in this folder and its front,
:mod:`tiledsched.ops`.
"""

from tiledsched.kernels.attention.declaration import Attention as Attention
