"""The gradient of softmax over rows. Everything that knows it is in this folder."""

from tiledsched.kernels.softmax_backward.declaration import SoftmaxBackward as SoftmaxBackward
