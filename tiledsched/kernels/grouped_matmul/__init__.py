"""Matrix products of groups of rows. Everything that knows them is in this folder."""

from tiledsched.kernels.grouped_matmul.declaration import GroupedMatmul as GroupedMatmul
