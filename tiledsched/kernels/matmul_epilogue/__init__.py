"""Matrix products with an epilogue: bias, activation, gate, residual. Everything that knows them is in this folder."""

from tiledsched.kernels.matmul_epilogue.declaration import MatmulEpilogue as MatmulEpilogue
