"""Dropout whose mask is a hash of the seed and of the place, so that the backward pass can make it again."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]


def mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@ct.kernel
def dropout(X, Out, seed: int, rate: float, TILE: Int, EACH: Int):
    for part in range(EACH):
        tile = ct.bid(0) * EACH + part
        if tile < ct.num_tiles(X, axis=0, shape=(TILE,)):
            place = (tile * TILE + ct.arange(TILE, dtype=ct.int32)).astype(ct.uint32)
            hashed = mixed(place + mixed(ct.full((TILE,), seed, dtype=ct.int32).astype(ct.uint32)))
            kept = (hashed >> 8).astype(ct.float32) >= rate * 16777216.0
            x = ct.load(X, (tile,), (TILE,)).astype(ct.float32)
            ct.store(Out, (tile,), ct.where(kept, x / (1.0 - rate), 0.0).astype(Out.dtype))


class Dropout(ts.Kernel):
    function = dropout
    size = ts.dim()
    dtype = ts.dtype("float16", "bfloat16")
    X, Out = ts.array("size"), ts.out("size")
    seed, rate = ts.scalar(1234), ts.scalar(0.25)
    knobs = {"TILE": [1024, 2048, 4096], "EACH": [1, 2, 4], "occupancy": [1, 2, 4], "num_worker_warps": [4, 8]}
    suites = {"large": [dict(size=1 << 26)]}

    def grid(p, s, device):
        return -(-p.size // (s["TILE"] * s["EACH"]))

    def reference(xp, X, seed, rate):
        start = mixed(xp.full(1, seed, dtype="uint32"))
        hashed = mixed(xp.arange(len(X), dtype="uint32") + start)
        return xp.where((hashed >> 8) >= rate * 16777216.0, X / (1 - rate), 0.0)
