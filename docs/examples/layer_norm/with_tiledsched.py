"""Layer norm with tiledsched: the kernel is cuTile, and the declaration below it is what the tuner needs to know."""

import cuda.tile as ct

import tiledsched as ts


@ct.kernel
def layer_norm_kernel(X, W, B, Out, eps, columns: ct.Constant[int], TILE: ct.Constant[int]):
    row = ct.bid(0)
    x = ct.load(X, (row, 0), (1, TILE), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    mean = ct.sum(x, axis=1, keepdims=True) / columns
    centred = ct.where(ct.arange(TILE, dtype=ct.int32) < columns, x - mean, 0.0)
    variance = ct.sum(centred * centred, axis=1, keepdims=True) / columns
    w = ct.load(W, (0,), (TILE,), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    b = ct.load(B, (0,), (TILE,), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    ct.store(Out, (row, 0), (centred * ct.rsqrt(variance + eps) * w + b).astype(Out.dtype))


class LayerNorm(ts.Kernel):
    """Each row with mean 0 and variance 1, times a weight, plus a bias."""

    function = layer_norm_kernel
    rows = ts.dim()
    columns = ts.dim(constant=True)
    dtype = ts.dtype("float16", "bfloat16")
    X, W, B, Out = ts.array("rows columns"), ts.array("columns"), ts.array("columns"), ts.out("rows columns")
    eps = ts.scalar(1e-5)
    knobs = {"TILE": [1024, 2048, 4096, 8192], "num_worker_warps": [4, 8], "occupancy": [1, 2, 4]}
    constraints = {"TILE >= columns": "a row is one tile"}

    def grid(p, s, device):
        return p.rows

    def reference(xp, X, W, B, eps):
        centred = X - X.mean(1, keepdims=True)
        return centred / xp.sqrt((centred * centred).mean(1, keepdims=True) + eps) * W + B


layer_norm = ts.op("examples::layer_norm", LayerNorm)

if __name__ == "__main__":
    from harness import arch_here, check

    ts.tune(LayerNorm, [dict(rows=8192, columns=4096)], arch=arch_here(), effort="quick")
    check(layer_norm)
