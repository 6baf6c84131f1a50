"""The transpose of a matrix."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]


@ct.kernel
def transpose(X, Out, TM: Int, TN: Int):
    i, j = ct.bid(0), ct.bid(1)
    ct.store(Out, (j, i), ct.transpose(ct.load(X, (i, j), (TM, TN))))


class Transpose(ts.Kernel):
    function = transpose
    rows, columns = ts.dim(), ts.dim()
    dtype = ts.dtype("float16", "float32")
    X, Out = ts.array("rows columns"), ts.out("columns rows")
    knobs = {"TM": [64, 32, 128], "TN": [64, 32, 128], "num_worker_warps": [4, 8]}
    suites = {"square": [dict(rows=8192, columns=8192)], "tall": [dict(rows=65536, columns=1000)]}

    def grid(p, s, device):
        return -(-p.rows // s["TM"]), -(-p.columns // s["TN"])

    def reference(xp, X):
        return X.T
