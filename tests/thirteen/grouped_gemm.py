"""Rows sorted by expert, each multiplied by its expert's weights."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.kernel
def grouped_gemm(X, W, Offsets, Out, TM: Int, TN: Int, TK: Int):
    expert, i, j = ct.bid(2), ct.bid(1), ct.bid(0)
    first = ct.gather(Offsets, expert)
    last = ct.gather(Offsets, expert + 1)
    if i * TM < last - first:
        x, out = X.slice(0, first, last), Out.slice(0, first, last)
        acc = ct.zeros((TM, TN), dtype=ct.float32)
        for step in range(ct.num_tiles(X, axis=1, shape=(TM, TK))):
            a = ct.load(x, (i, step), (TM, TK), padding_mode=ZERO)
            b = ct.load(W, (expert, step, j), (1, TK, TN), padding_mode=ZERO).reshape((TK, TN))
            acc = ct.mma(a, b, acc)
        ct.store(out, (i, j), acc.astype(Out.dtype))


class GroupedGemm(ts.Kernel):
    function = grouped_gemm
    rows, n, k, experts = ts.dim(), ts.dim(), ts.dim(), ts.dim()
    dtype = ts.dtype("bfloat16")
    X, W = ts.array("rows k"), ts.array("experts k n")
    Offsets = ts.array("experts+1", dtype="int32", sorted=True, first=0, last="rows")
    Out = ts.out("rows n")
    knobs = {"TM": [128, 64], "TN": [128, 64], "TK": [64, 32], "num_worker_warps": [4, 8]}
    suites = {"mixtral": [dict(rows=8192, n=14336, k=4096, experts=8)]}

    def grid(p, s, device):
        return -(-p.n // s["TN"]), -(-p.rows // s["TM"]), p.experts

    def reference(xp, X, W, Offsets, p):
        ends = [int(end) for end in Offsets]
        return xp.concatenate([X[ends[e] : ends[e + 1]] @ W[e] for e in range(p.experts)])

    def flops(p):
        return 2.0 * p.rows * p.n * p.k
