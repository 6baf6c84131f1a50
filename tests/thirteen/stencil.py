"""One step of heat on a plate: the mean of four neighbours, which are zero beyond the edge."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]


@ct.kernel
def stencil(X, Out, alpha, TM: Int, TN: Int):
    i = (ct.bid(0) * TM + ct.arange(TM, dtype=ct.int32)).reshape((TM, 1))
    j = (ct.bid(1) * TN + ct.arange(TN, dtype=ct.int32)).reshape((1, TN))
    centre = ct.gather(X, (i, j))
    above, below = ct.gather(X, (i - 1, j)), ct.gather(X, (i + 1, j))
    left, right = ct.gather(X, (i, j - 1)), ct.gather(X, (i, j + 1))
    ct.scatter(Out, (i, j), centre + alpha * (above + below + left + right - 4 * centre))


class Stencil(ts.Kernel):
    function = stencil
    height, width = ts.dim(), ts.dim()
    dtype = ts.dtype("float32")
    X, Out = ts.array("height width"), ts.out("height width")
    alpha = ts.scalar(0.2)
    knobs = {"TM": [8, 16, 32], "TN": [128, 64, 256], "num_worker_warps": [4, 8]}
    suites = {"plate": [dict(height=4096, width=4096)]}

    def grid(p, s, device):
        return -(-p.height // s["TM"]), -(-p.width // s["TN"])

    def reference(xp, X, alpha):
        padded = xp.pad(X, 1)
        around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
        return X + alpha * (around - 4 * X)
