"""Products of 8-bit floats with scales. Everything that knows them is in this folder."""

from tiledsched.kernels.scaled_matmul.declaration import ScaledMatmul as ScaledMatmul
