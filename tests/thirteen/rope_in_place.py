"""Rotary position embedding of queries, in place: the halves of a head are the two coordinates."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]


@ct.kernel
def rope(Q, Cos, Sin, head_dim: Int, TS: Int, TH: Int):
    batch, place, heads = ct.bid(2), ct.bid(0), ct.bid(1)
    half = head_dim // 2
    shape = (1, TS, TH, half)
    cos = ct.load(Cos, (place, 0), (TS, half)).astype(ct.float32).reshape((1, TS, 1, half))
    sin = ct.load(Sin, (place, 0), (TS, half)).astype(ct.float32).reshape((1, TS, 1, half))
    x = ct.load(Q, (batch, place, heads, 0), shape).astype(ct.float32)
    y = ct.load(Q, (batch, place, heads, 1), shape).astype(ct.float32)
    ct.store(Q, (batch, place, heads, 0), (x * cos - y * sin).astype(Q.dtype))
    ct.store(Q, (batch, place, heads, 1), (y * cos + x * sin).astype(Q.dtype))


class RopeInPlace(ts.Kernel):
    function = rope
    batch, seq, heads, head_dim = ts.dim(), ts.dim(), ts.dim(), ts.dim(128, constant=True)
    dtype = ts.dtype("bfloat16", "float16")
    Q = ts.inout("batch seq heads head_dim")
    Cos, Sin = ts.array("seq head_dim/2"), ts.array("seq head_dim/2")
    knobs = {"TS": [16, 8, 32], "TH": [1, 2, 4], "occupancy": [1, 2, 4], "num_worker_warps": [4, 8]}
    suites = {"llama": [dict(batch=4, seq=4096, heads=32), dict(batch=4, seq=4096, heads=24, head_dim=64)]}

    def grid(p, s, device):
        return -(-p.seq // s["TS"]), -(-p.heads // s["TH"]), p.batch

    def reference(xp, Q, Cos, Sin, p):
        x, y = Q[..., : p.head_dim // 2], Q[..., p.head_dim // 2 :]
        cos, sin = Cos[:, None], Sin[:, None]
        return xp.concatenate([x * cos - y * sin, y * cos + x * sin], -1)
