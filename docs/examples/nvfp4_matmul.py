"""A product of two NVFP4 matrices: 4-bit floats, two to a byte, of which 16 along k share an 8-bit scale.

GPUs with block-scaled tensor cores run it: sm_100 to sm_121.

    tiledsched check docs/examples/nvfp4_matmul.py:Nvfp4Matmul --arch sm_120
    tiledsched tune docs/examples/nvfp4_matmul.py:Nvfp4Matmul --arch sm_120 --runner none
"""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


def unpacked(codes, rows: Int, columns: Int):
    return ct.reshape(ct.unpack_from_bytes(ct.reshape(codes, (-1,)), ct.float4_e2m1fn), (rows, columns))


@ct.kernel
def nvfp4_matmul(A, A_scale, B, B_scale, C, k, alpha, TILE_M: Int, TILE_N: Int, TILE_K: Int):
    i, j = ct.bid(0), ct.bid(1)
    total = ct.zeros((TILE_M, TILE_N), ct.float32)
    for step in range(ct.cdiv(k, TILE_K)):
        a = unpacked(ct.load(A, (i, step), (TILE_M, TILE_K // 2), padding_mode=ZERO), TILE_M, TILE_K)
        b = unpacked(ct.load(B, (j, step), (TILE_N, TILE_K // 2), padding_mode=ZERO), TILE_N, TILE_K)
        a_scale = ct.load(A_scale, (i, step), (TILE_M, TILE_K // 16), padding_mode=ZERO)
        b_scale = ct.load(B_scale, (j, step), (TILE_N, TILE_K // 16), padding_mode=ZERO)
        total = ct.mma_scaled(a, a_scale, ct.transpose(b), ct.transpose(b_scale), total)
    ct.store(C, (i, j), (total * alpha).astype(C.dtype))


class Nvfp4Matmul(ts.Kernel):
    """C = alpha * (A * its scales) @ (B * its scales).T, as a linear layer has it: both matrices have k last."""

    function = nvfp4_matmul
    m, n, k = ts.dim(), ts.dim(), ts.dim()
    A = ts.array("m k/2", dtype="float4_e2m1fn")  # sizes count bytes; the reference gets the k numbers of each row
    A_scale = ts.array("m k/16", dtype="float8_e4m3fn")
    B = ts.array("n k/2", dtype="float4_e2m1fn")
    B_scale = ts.array("n k/16", dtype="float8_e4m3fn")
    C = ts.out("m n", dtype="bfloat16")
    alpha = ts.scalar(1.0)
    requires = {"k % 16 == 0": "16 numbers share a scale"}
    knobs = {"TILE_M": [128, 64], "TILE_N": [128, 64], "TILE_K": [128, 256]}
    suites = {"llama": [dict(m=4096, n=4096, k=4096), dict(m=4096, n=14336, k=4096)]}

    def grid(p, s, device):
        return -(-p.m // s["TILE_M"]), -(-p.n // s["TILE_N"])

    def reference(xp, A, A_scale, B, B_scale, alpha):
        return alpha * (A * A_scale.repeat(16, axis=1)) @ (B * B_scale.repeat(16, axis=1)).T

    def flops(p):
        return 2 * p.m * p.n * p.k
