"""TileGym's persistent RMS norm, as its package has it, declared for tiledsched."""

from tilegym.ops.cutile.rms_norm import _rms_norm_kernel_static_persistent

import tiledsched as ts


def padded(size):
    return 1 << (size - 1).bit_length()


class RmsNorm(ts.Kernel):
    """Y = X * W / root mean square of each row of X; what divides is stored as Rstd."""

    function = _rms_norm_kernel_static_persistent
    rows, columns = ts.dim(), ts.dim(constant=True)
    dtype = ts.dtype("bfloat16", "float16")
    X, Y, W = ts.array("rows columns"), ts.out("rows columns"), ts.array("columns")
    Rstd = ts.out("rows", dtype="float32")
    EPS, OFFSET = ts.scalar(1e-6), ts.scalar(0.0)
    knobs = {"TILE_SIZE_M": [4, 1, 2, 8, 16], "occupancy": [0, 1, 2], "num_worker_warps": [0, 4, 8]}
    exploring = {"TILE_SIZE_M * columns <= 65536": "the registers of an SM hold a tile"}
    suites = {
        "llama": [dict(rows=rows, columns=columns) for columns in (2048, 4096, 8192) for rows in (512, 4096, 16384)]
    }

    def constants(p, s):
        return {"TILE_SIZE_N": padded(p.columns)}

    def grid(p, s, device):
        return min(device.sm_count, -(-p.rows // s["TILE_SIZE_M"]))

    def reference(xp, X, W, EPS, OFFSET):
        scale = 1 / xp.sqrt((X * X).mean(-1, keepdims=True) + EPS)
        return X * scale * (OFFSET + W), scale[:, 0]
