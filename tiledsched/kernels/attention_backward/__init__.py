"""The gradients of attention. Everything that knows them is in this folder; what they share with attention forward is imported
from :mod:`tiledsched.kernels.attention`.
"""

from tiledsched.kernels.attention_backward.declaration import AttentionBackward as AttentionBackward
