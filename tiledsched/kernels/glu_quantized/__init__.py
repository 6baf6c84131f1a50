"""Gated linear units to 8-bit floats with scales. Everything that knows them is in `kernels/glu`."""

from tiledsched.kernels.glu.declaration import GluQuantized as GluQuantized
