"""Gated linear units: the activation of one matrix times another. Everything that knows them is in this folder."""

from tiledsched.kernels.glu.declaration import Glu as Glu
