"""TileGym's softmax kernels, as its package has them, declared for tiledsched."""

from tilegym.ops.cutile.softmax import (
    _softmax_kernel,
    _softmax_kernel_multi_wave_full_row_reg_cached_ldg,
    _softmax_kernel_tma,
)

import tiledsched as ts


class Softmax(ts.Kernel):
    """Softmax of each row, by one of three of TileGym's kernels: a block for each row, or persistent ones."""

    rows, columns = ts.dim(), ts.dim(constant=True)
    dtype = ts.dtype("bfloat16", "float16")
    input, output = ts.array("rows columns"), ts.out("rows columns")
    knobs = {"load": ["multi_wave", "gather", "tma"], "occupancy": [1, 2, 4, 8], "num_worker_warps": [0, 4, 8]}
    suites = {"wide": [dict(rows=(1 << 27) // columns, columns=columns) for columns in (1024, 2048, 4096, 8192)]}

    def entry(p, s):
        return {
            "multi_wave": _softmax_kernel_multi_wave_full_row_reg_cached_ldg,
            "gather": _softmax_kernel,
            "tma": _softmax_kernel_tma,
        }[s["load"]]

    def constants(p, s):
        tile = 1 << (p.columns - 1).bit_length()
        return {"N": p.columns, "N_ROWS": p.rows, "N_COLS": p.columns, "DIM_COLS": p.columns, "TILE_SIZE": tile}

    def grid(p, s, device):
        return p.rows if s["load"] == "multi_wave" else min(p.rows, device.sm_count * s["occupancy"])

    def reference(xp, input):
        e = xp.exp(input - input.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
