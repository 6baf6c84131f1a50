"""Gradients of root-mean-square normalisation. Everything that knows them is in this folder."""

from tiledsched.kernels.rms_norm_backward.declaration import RmsNormBackward as RmsNormBackward
