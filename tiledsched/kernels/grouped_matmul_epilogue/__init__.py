"""Grouped products with an epilogue. Everything that knows them is in this folder."""

from tiledsched.kernels.grouped_matmul_epilogue.declaration import GroupedMatmulEpilogue as GroupedMatmulEpilogue
