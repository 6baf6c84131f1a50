"""A product of 8-bit matrices with a scale for each row of A and each column of B."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.kernel
def fp8_product(A, B, RowScale, ColumnScale, C, TM: Int, TN: Int, TK: Int):
    i, j = ct.bid(0), ct.bid(1)
    acc = ct.full((TM, TN), 0, dtype=ct.float32)
    for step in range(ct.num_tiles(A, axis=1, shape=(TM, TK))):
        a = ct.load(A, (i, step), (TM, TK), padding_mode=ZERO)
        b = ct.load(B, (step, j), (TK, TN), padding_mode=ZERO)
        acc = ct.mma(a, b, acc)
    rows = ct.load(RowScale, (i,), (TM,), padding_mode=ZERO).reshape((TM, 1))
    columns = ct.load(ColumnScale, (j,), (TN,), padding_mode=ZERO).reshape((1, TN))
    ct.store(C, (i, j), (acc.astype(ct.float32) * rows * columns).astype(C.dtype))


class Fp8Product(ts.Kernel):
    function = fp8_product
    m, n, k = ts.dim(), ts.dim(), ts.dim()
    A = ts.array("m k", dtype="float8_e4m3fn")
    B = ts.array("k n", dtype="float8_e4m3fn", layout="column")
    RowScale, ColumnScale = ts.array("m", dtype="float32"), ts.array("n", dtype="float32")
    C = ts.out("m n", dtype="bfloat16")
    knobs = {"TM": [128, 64], "TN": [128, 256], "TK": [128, 64], "num_worker_warps": [4, 8], "num_ctas": [1, 2]}
    suites = {"llama": [dict(m=4096, n=4096, k=4096)]}

    def grid(p, s, device):
        return -(-p.m // s["TM"]), -(-p.n // s["TN"])

    def reference(xp, A, B, RowScale, ColumnScale):
        return A @ B * RowScale[:, None] * ColumnScale

    def flops(p):
        return 2.0 * p.m * p.n * p.k
