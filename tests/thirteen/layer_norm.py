"""Layer normalisation of rows of any length, in three passes over tiles of the row."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]
ZERO = ct.PaddingMode.ZERO


@ct.kernel
def layer_norm(X, Weight, Bias, Out, columns: int, eps, TILE: Int):
    row = ct.bid(0)
    steps = ct.num_tiles(X, axis=1, shape=(1, TILE))
    total = ct.zeros((1, TILE), dtype=ct.float32)
    for j in range(steps):
        total += ct.load(X, (row, j), (1, TILE), padding_mode=ZERO).astype(ct.float32)
    mean = ct.sum(total, axis=1, keepdims=True) / columns
    squares = ct.zeros((1, TILE), dtype=ct.float32)
    for j in range(steps):
        x = ct.load(X, (row, j), (1, TILE), padding_mode=ZERO).astype(ct.float32)
        inside = (ct.arange(TILE, dtype=ct.int32) + j * TILE < columns).reshape((1, TILE))
        centred = ct.where(inside, x - mean, 0.0)
        squares += centred * centred
    scale = ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / columns + eps)
    for j in range(steps):
        x = ct.load(X, (row, j), (1, TILE), padding_mode=ZERO).astype(ct.float32)
        w = ct.load(Weight, (j,), (TILE,), padding_mode=ZERO).astype(ct.float32)
        b = ct.load(Bias, (j,), (TILE,), padding_mode=ZERO).astype(ct.float32)
        ct.store(Out, (row, j), ((x - mean) * scale * w + b).astype(Out.dtype))


class LayerNorm(ts.Kernel):
    function = layer_norm
    rows, columns = ts.dim(), ts.dim()
    dtype = ts.dtype("float16", "bfloat16")
    X, Weight, Bias = ts.array("rows columns"), ts.array("columns"), ts.array("columns")
    Out = ts.out("rows columns")
    eps = ts.scalar(1e-5)
    knobs = {"TILE": [1024, 2048, 4096, 8192], "occupancy": [1, 2, 4], "num_worker_warps": [4, 8]}
    suites = {"odd": [dict(rows=8192, columns=5000), dict(rows=16384, columns=4096)]}

    def grid(p, s, device):
        return (p.rows,)

    def reference(xp, X, Weight, Bias, eps):
        centred = X - X.mean(1, keepdims=True)
        return centred / xp.sqrt((centred * centred).mean(1, keepdims=True) + eps) * Weight + Bias
