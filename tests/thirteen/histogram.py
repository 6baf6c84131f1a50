"""How often each number occurs."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]


@ct.kernel
def clear(Counts, TILE: Int):
    ct.store(Counts, (ct.bid(0),), ct.zeros((TILE,), dtype=ct.int32))


@ct.kernel
def count(X, Counts, bins: int, TILE: Int):
    place = ct.bid(0) * TILE + ct.arange(TILE, dtype=ct.int32)
    number = ct.gather(X, place, padding_value=-1)
    ct.atomic_add(Counts, number, 1)


class Histogram(ts.Kernel):
    size, bins = ts.dim(), ts.dim()
    X = ts.array("size", dtype="int32", below="bins")
    Counts = ts.out("bins", dtype="int32")
    knobs = {"TILE": [1024, 256, 512, 2048], "num_worker_warps": [4, 8]}
    suites = {"bytes": [dict(size=1 << 26, bins=256), dict(size=1 << 24, bins=10000)]}

    def launches(p, s, device):
        return [(clear, -(-p.bins // s["TILE"])), (count, -(-p.size // s["TILE"]))]

    def reference(xp, X, p):
        return xp.bincount(X, minlength=p.bins)
