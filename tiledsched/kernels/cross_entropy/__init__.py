"""Cross entropy of rows of logits with their labels. Everything that knows it is in this folder."""

from tiledsched.kernels.cross_entropy.declaration import CrossEntropy as CrossEntropy
