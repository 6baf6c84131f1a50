"""Gated linear units to 8-bit floats with scales. Everything that knows them is in this folder."""

from tiledsched.kernels.glu_quantized.declaration import GluQuantized as GluQuantized
