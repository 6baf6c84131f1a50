"""TileGym's rotary embedding, as its package has it, declared for tiledsched."""

from tilegym.ops.cutile import rope as tilegym

import tiledsched as ts


def padded(size):
    return 1 << (size - 1).bit_length()


class Rope(ts.Kernel):
    """Rotary position embedding of queries and keys, in place; one table of angles for all sequences."""

    function = tilegym._rope_kernel
    batch, seq, q_heads, k_heads = ts.dim(), ts.dim(), ts.dim(constant=True), ts.dim(constant=True)
    head_dim = ts.dim(128, constant=True)
    dtype = ts.dtype("bfloat16", "float16")
    q, k = ts.inout("batch q_heads seq head_dim"), ts.inout("batch k_heads seq head_dim")
    cos, sin = ts.array("1 seq head_dim"), ts.array("1 seq head_dim")
    knobs = {"occupancy": [1, 2, 4, 7, 9, 12, 16], "num_worker_warps": [0, 4, 8]}
    suites = {"llama": [dict(batch=b, seq=s, q_heads=32, k_heads=8) for b, s in ((1, 4096), (4, 4096), (1, 16384))]}

    def constants(p, s):
        tiles = {"TILE_QH": padded(p.q_heads), "TILE_KH": padded(p.k_heads), "TILE_RD": p.head_dim // 2}
        return {"COS_BS": 1, "SEQ_LEN": p.seq, **tiles}

    def grid(p, s, device):
        return p.batch * p.seq

    def reference(xp, q, k, cos, sin):
        half = q.shape[-1] // 2
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]

        def rotated(x):
            a, b = x[..., :half], x[..., half:]
            return xp.concatenate([a * c - b * s, b * c + a * s], -1)

        return rotated(q), rotated(k)
