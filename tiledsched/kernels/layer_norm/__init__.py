"""Layer normalisation of rows, with or without a weight and a bias. Everything that knows it is in this folder."""

from tiledsched.kernels.layer_norm.declaration import LayerNorm as LayerNorm
