"""Cross entropy of rows of logits with their labels. Everything that knows it is in this folder."""

from __future__ import annotations

from tiledsched.kernels.cross_entropy.declaration import CrossEntropy

__all__ = ["CrossEntropy"]
