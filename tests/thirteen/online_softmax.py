"""Softmax of rows of any length, whose maximum and sum are found in one pass; a block takes several rows in turn."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]
LOW = ct.PaddingMode.NEG_INF


@ct.kernel
def online_softmax(X, Out, TM: Int, TN: Int):
    steps = ct.num_tiles(X, axis=1, shape=(TM, TN))
    for i in range(ct.bid(0), ct.num_tiles(X, axis=0, shape=(TM, TN)), ct.num_blocks(0)):
        top = ct.full((TM, 1), -1e30, dtype=ct.float32)
        total = ct.zeros((TM, 1), dtype=ct.float32)
        for j in range(steps):
            x = ct.load(X, (i, j), (TM, TN), padding_mode=LOW).astype(ct.float32)
            higher = max(top, ct.max(x, axis=1, keepdims=True))
            total = total * ct.exp(top - higher) + ct.sum(ct.exp(x - higher), axis=1, keepdims=True)
            top = higher
        for j in range(steps):
            x = ct.load(X, (i, j), (TM, TN), padding_mode=LOW).astype(ct.float32)
            ct.store(Out, (i, j), (ct.exp(x - top) / total).astype(Out.dtype))


class OnlineSoftmax(ts.Kernel):
    function = online_softmax
    rows, columns = ts.dim(), ts.dim()
    dtype = ts.dtype("bfloat16", "float16")
    X, Out = ts.array("rows columns"), ts.out("rows columns")
    knobs = {"TM": [1, 2, 4], "TN": [1024, 2048, 512], "BLOCKS": [1, 2, 8], "num_worker_warps": [4, 8]}
    suites = {"scores": [dict(rows=4096, columns=8192), dict(rows=8192, columns=4000)]}

    def grid(p, s, device):
        return (min(-(-p.rows // s["TM"]), device.sm_count * s["BLOCKS"]),)

    def reference(xp, X):
        e = xp.exp(X - X.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)
