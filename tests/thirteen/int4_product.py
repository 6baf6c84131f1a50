"""A product with 4-bit weights, two to a byte, and a scale for each group of 32 rows of a column."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.kernel
def int4_product(X, Packed, Scale, Out, group: Int, TM: Int, TN: Int, TK: Int):
    i, j = ct.bid(0), ct.bid(1)
    acc = ct.zeros((TM, TN), dtype=ct.float32)
    for step in range(ct.num_tiles(X, axis=1, shape=(TM, TK))):
        x = ct.load(X, (i, step), (TM, TK), padding_mode=ZERO)
        packed = ct.load(Packed, (step, j), (TK // 2, TN), padding_mode=ZERO).reshape((TK // 2, 1, TN))
        both = ct.cat((packed & 15, packed >> 4), 1).reshape((TK // group, group, TN))
        scale = ct.load(Scale, (step, j), (TK // group, TN), padding_mode=ZERO).reshape((TK // group, 1, TN))
        w = (both.astype(ct.float16) - 8) * scale
        acc = ct.mma(x, w.reshape((TK, TN)), acc)
    ct.store(Out, (i, j), acc.astype(Out.dtype))


class Int4Product(ts.Kernel):
    function = int4_product
    m, n, k = ts.dim(), ts.dim(), ts.dim()
    group = ts.dim(32, constant=True)
    X = ts.array("m k", dtype="float16")
    Packed = ts.array("k/2 n", dtype="uint8", below=256)
    Scale = ts.array("k/group n", dtype="float16")
    Out = ts.out("m n", dtype="float16")
    knobs = {"TM": [16, 32], "TN": [64, 128], "TK": [64, 128], "num_worker_warps": [4, 8]}
    requires = {"k % group == 0": "groups are whole"}
    constraints = {"TK % group == 0": "a step takes whole groups"}
    suites = {"decode": [dict(m=16, n=14336, k=4096)]}

    def grid(p, s, device):
        return -(-p.m // s["TM"]), -(-p.n // s["TN"])

    def reference(xp, X, Packed, Scale, p):
        w = xp.stack([Packed & 15, Packed >> 4], 1).reshape(p.k, p.n) - 8.0
        return X @ (w * Scale.repeat(p.group, 0))

    def flops(p):
        return 2.0 * p.m * p.n * p.k
