"""A product of two MXFP8 matrices: 8-bit floats, of which 32 along k share a scale that is a power of two.

GPUs with block-scaled tensor cores run it: sm_100 to sm_121.

    tiledsched check docs/examples/mxfp8_matmul.py:Mxfp8Matmul --arch sm_120
    tiledsched tune docs/examples/mxfp8_matmul.py:Mxfp8Matmul --arch sm_120 --runner none
"""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.kernel
def mxfp8_matmul(A, A_scale, B, B_scale, C, k, TILE_M: Int, TILE_N: Int, TILE_K: Int):
    i, j = ct.bid(0), ct.bid(1)
    total = ct.zeros((TILE_M, TILE_N), ct.float32)
    for step in range(ct.cdiv(k, TILE_K)):
        a = ct.load(A, (i, step), (TILE_M, TILE_K), padding_mode=ZERO)
        b = ct.load(B, (j, step), (TILE_N, TILE_K), padding_mode=ZERO)
        a_scale = ct.load(A_scale, (i, step), (TILE_M, TILE_K // 32), padding_mode=ZERO)
        b_scale = ct.load(B_scale, (j, step), (TILE_N, TILE_K // 32), padding_mode=ZERO)
        total = ct.mma_scaled(a, a_scale, ct.transpose(b), ct.transpose(b_scale), total)
    ct.store(C, (i, j), total.astype(C.dtype))


class Mxfp8Matmul(ts.Kernel):
    """C = (A * its scales) @ (B * its scales).T, as a linear layer has it: both matrices have k last."""

    function = mxfp8_matmul
    m, n, k = ts.dim(), ts.dim(), ts.dim()
    dtype = ts.dtype("float8_e4m3fn", "float8_e5m2")
    A = ts.array("m k")
    A_scale = ts.array("m k/32", dtype="float8_e8m0fnu")
    B = ts.array("n k")
    B_scale = ts.array("n k/32", dtype="float8_e8m0fnu")
    C = ts.out("m n", dtype="bfloat16")
    requires = {"k % 32 == 0": "32 numbers share a scale"}
    knobs = {"TILE_M": [128, 64], "TILE_N": [128, 64], "TILE_K": [128, 64]}
    suites = {"llama": [dict(m=4096, n=4096, k=4096), dict(m=4096, n=14336, k=4096)]}

    def grid(p, s, device):
        return -(-p.m // s["TILE_M"]), -(-p.n // s["TILE_N"])

    def reference(xp, A, A_scale, B, B_scale):
        return (A * A_scale.repeat(32, axis=1)) @ (B * B_scale.repeat(32, axis=1)).T

    def flops(p):
        return 2 * p.m * p.n * p.k
