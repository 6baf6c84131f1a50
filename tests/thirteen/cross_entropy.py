"""Cross entropy of each row of logits, in one pass over the vocabulary."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]


@ct.kernel
def cross_entropy(Logits, Target, Loss, TILE: Int):
    row = ct.bid(0)
    top = ct.full((1, 1), -1e30, dtype=ct.float32)
    total = ct.zeros((1, 1), dtype=ct.float32)
    for step in range(ct.num_tiles(Logits, axis=1, shape=(1, TILE))):
        x = ct.load(Logits, (row, step), (1, TILE), padding_mode=ct.PaddingMode.NEG_INF).astype(ct.float32)
        higher = max(top, ct.max(x, axis=1, keepdims=True))
        total = total * ct.exp(top - higher) + ct.sum(ct.exp(x - higher), axis=1, keepdims=True)
        top = higher
    right = ct.gather(Logits, (row, ct.gather(Target, row))).astype(ct.float32)
    ct.store(Loss, (row,), (top + ct.log(total) - right).reshape((1,)))


class CrossEntropy(ts.Kernel):
    function = cross_entropy
    rows, vocab = ts.dim(), ts.dim()
    dtype = ts.dtype("bfloat16", "float16")
    Logits = ts.array("rows vocab")
    Target = ts.array("rows", dtype="int32", below="vocab")
    Loss = ts.out("rows", dtype="float32")
    knobs = {"TILE": [4096, 2048, 1024], "occupancy": [1, 2, 4], "num_worker_warps": [4, 8]}
    suites = {"llama": [dict(rows=4096, vocab=128256), dict(rows=4096, vocab=32000)]}

    def grid(p, s, device):
        return (p.rows,)

    def reference(xp, Logits, Target):
        top = Logits.max(1)
        total = xp.exp(Logits - top[:, None]).sum(1)
        return top + xp.log(total) - Logits[xp.arange(len(Target)), Target]
