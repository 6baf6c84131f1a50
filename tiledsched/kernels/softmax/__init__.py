"""Softmax of rows. Everything that knows it is in this folder."""

from tiledsched.kernels.softmax.declaration import Softmax as Softmax
