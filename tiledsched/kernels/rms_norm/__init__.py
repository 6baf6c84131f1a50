"""Root-mean-square normalisation of rows, with or without a residual. Everything that knows it is in this folder."""

from tiledsched.kernels.rms_norm.declaration import RmsNorm as RmsNorm
