"""Products of 8-bit floats with an epilogue. Everything that knows them is in this folder."""

from tiledsched.kernels.scaled_matmul_epilogue.declaration import ScaledMatmulEpilogue as ScaledMatmulEpilogue
