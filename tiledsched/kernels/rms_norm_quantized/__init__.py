"""Root-mean-square normalisation to 8-bit floats with scales. Everything that knows it is in `kernels/rms_norm`."""

from tiledsched.kernels.rms_norm.declaration import RmsNormQuantized as RmsNormQuantized
