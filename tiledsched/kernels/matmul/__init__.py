"""Matrix product C = A @ B. Everything that knows it is in this folder."""

from tiledsched.kernels.matmul.declaration import Matmul as Matmul
