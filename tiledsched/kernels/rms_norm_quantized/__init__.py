"""Root-mean-square normalisation to 8-bit floats with scales. Everything that knows it is in this folder."""

from tiledsched.kernels.rms_norm_quantized.declaration import RmsNormQuantized as RmsNormQuantized
