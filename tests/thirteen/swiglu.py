"""silu(gate) * up, where a row holds the gate's columns and then those of up."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]


@ct.kernel
def swiglu(X, Out, columns: int, TM: Int, TN: Int):
    i, j = ct.bid(0), ct.bid(1)
    gate = ct.load(X.slice(1, 0, columns), (i, j), (TM, TN)).astype(ct.float32)
    up = ct.load(X.slice(1, columns, 2 * columns), (i, j), (TM, TN)).astype(ct.float32)
    ct.store(Out, (i, j), (gate / (1 + ct.exp(-gate)) * up).astype(Out.dtype))


class SwiGlu(ts.Kernel):
    function = swiglu
    rows, columns = ts.dim(), ts.dim()
    dtype = ts.dtype("float16", "bfloat16")
    X = ts.array("rows columns*2")
    Out = ts.out("rows columns")
    knobs = {"TM": [1, 2, 4, 8], "TN": [1024, 512, 2048], "occupancy": [1, 2, 4], "num_worker_warps": [4, 8]}
    suites = {"llama": [dict(rows=4096, columns=14336), dict(rows=4096, columns=11008)]}

    def grid(p, s, device):
        return -(-p.rows // s["TM"]), -(-p.columns // s["TN"])

    def reference(xp, X, p):
        gate, up = X[:, : p.columns], X[:, p.columns :]
        return gate / (1 + xp.exp(-gate)) * up
