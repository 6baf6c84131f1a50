"""Small kernels for the tests of operators, each with something of its own to say."""

# Declarations are never instantiated, and their functions take no self.

from __future__ import annotations

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]


@ct.kernel
def rms_norm(X, W, Residual, Out, eps, columns: Int, TILE: Int, RESIDUAL: ct.Constant[bool]):
    row = ct.bid(0)
    x = ct.load(X, (row, 0), (1, TILE), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    if RESIDUAL:
        x += ct.load(Residual, (row, 0), (1, TILE), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    w = ct.load(W, (0,), (TILE,), padding_mode=ct.PaddingMode.ZERO).astype(ct.float32)
    scale = ct.rsqrt(ct.sum(x * x, axis=1, keepdims=True) / columns + eps)
    ct.store(Out, (row, 0), (x * scale * w).astype(Out.dtype))


class RmsNorm(ts.Kernel):
    """Root-mean-square normalisation of each row, of a sum where there is a residual."""

    function = rms_norm
    rows = ts.dim()
    columns = ts.dim(constant=True)
    dtype = ts.dtype("float16", "bfloat16")
    residual = ts.flag()
    X = ts.array("rows columns")
    W = ts.array("columns")
    Residual = ts.array("rows columns", when="residual")
    Out = ts.out("rows columns")
    eps = ts.scalar(1e-5)
    knobs = {"TILE": [1024, 128], "occupancy": [1, 2, 4]}
    constraints = {"TILE >= columns": "a row is one tile"}

    def constants(p, s):
        return {"RESIDUAL": p.residual}

    def grid(p, s, device):
        return p.rows

    def reference(xp, X, W, Residual, eps):
        X = X if Residual is None else X + Residual
        return X / xp.sqrt((X * X).mean(-1, keepdims=True) + eps) * W


class WideNorm(RmsNorm):
    """The same with weights and results of a type that follows from that of the rows."""

    derived = {"wide": lambda p: "float32" if p.dtype == "float16" else "bfloat16"}
    W = ts.array("columns", dtype="wide")
    Out = ts.out("rows columns", dtype="wide")


@ct.kernel
def scaled_product(A, B, C, k, TILE: Int, COLUMN: ct.Constant[bool]):
    i, j = ct.bid(0), ct.bid(1)
    total = ct.zeros((TILE, TILE), ct.float32)
    for step in range(ct.cdiv(k, TILE)):
        a = ct.load(A, (i, step), (TILE, TILE), padding_mode=ct.PaddingMode.ZERO)
        b = ct.load(B, (step, j), (TILE, TILE), padding_mode=ct.PaddingMode.ZERO)
        total = ct.mma(a, b, total)
    ct.store(C, (i, j), total.astype(C.dtype))


class Product(ts.Kernel):
    """C = A @ B with B either way in memory, into a type of its own."""

    function = scaled_product
    m, n, k = ts.dim(), ts.dim(), ts.dim()
    dtype = ts.dtype("float16", "bfloat16")
    result = ts.dtype("float32", "float16")
    layout = ts.choice("row", "column")
    A = ts.array("m k")
    B = ts.array("k n", layout="layout")
    C = ts.out("m n", dtype="result")
    knobs = {"TILE": [16, 32]}

    def constants(p, s):
        return {"COLUMN": p.layout == "column"}

    def grid(p, s, device):
        return -(-p.m // s["TILE"]), -(-p.n // s["TILE"])

    def reference(xp, A, B):
        return A @ B

    def flops(p):
        return 2 * p.m * p.n * p.k


@ct.kernel
def scale_in_place(X, factor, TILE: Int):
    i = ct.bid(0)
    x = ct.load(X, (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(X, (i,), (x * factor).astype(X.dtype))


class Scale(ts.Kernel):
    """X *= factor."""

    function = scale_in_place
    size = ts.dim()
    dtype = ts.dtype("float32", "float16")
    X = ts.inout("size")
    factor = ts.scalar(2.0)
    knobs = {"TILE": [16, 32]}

    def grid(p, s, device):
        return -(-p.size // s["TILE"])

    def reference(xp, X, factor):
        return X * factor


@ct.kernel
def partial_sums(X, Partial, Count, TILE: Int):
    i = ct.bid(0)
    x = ct.load(X, (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Partial, (i,), ct.reshape(ct.sum(x), (1,)))
    ct.store(Count, (i,), ct.load(Count, (i,), (1,)) + 1)


@ct.kernel
def total_sum(Partial, Count, Sum, Blocks, power, TILES: Int):
    parts = ct.load(Partial, (0,), (TILES,), padding_mode=ct.PaddingMode.ZERO)
    count = ct.load(Count, (0,), (TILES,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Sum, (0,), ct.reshape(ct.sum(parts) * power, (1,)))
    ct.store(Blocks, (0,), ct.reshape(ct.sum(count), (1,)))
    ct.store(Count, (0,), count * 0)


class Total(ts.Kernel):
    """The sum of all elements times a power of two, and how many blocks made it: two launches with workspaces between."""

    size = ts.dim()
    power = ts.dim(1, least=0)
    counted = ts.flag(True)
    X = ts.array("size", dtype="float32")
    Partial = ts.workspace(lambda p, s: (-(-p.size // s["TILE"]),))
    Count = ts.workspace(lambda p, s: (64,), dtype="int32", zeroed=True)
    Sum = ts.out("1", dtype="float32")
    Blocks = ts.out("1", dtype="int32", when="counted")
    knobs = {"TILE": [32, 64]}

    def constants(p, s):
        return {"TILES": 64}

    def launches(p, s, device):
        return [(partial_sums, -(-p.size // s["TILE"])), (total_sum, 1)]

    def reference(xp, X, power):
        return (X.sum() * power)[None], xp.zeros(1)


@ct.kernel
def add_groups(Xs, Ys, Outs, groups: Int, TILE: Int):
    i = ct.bid(0)
    for g in ct.static_iter(range(groups)):
        if i * TILE < Xs[g].shape[0]:
            x = ct.load(Xs[g], (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO)
            y = ct.load(Ys[g], (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO)
            ct.store(Outs[g], (i,), x + y)


class AddGroups(ts.Kernel):
    """Sums of pairs of arrays of several sizes."""

    function = add_groups
    lengths = ts.sizes()
    dtype = ts.dtype("float32")
    Xs = ts.arrays(lambda p: [(length,) for length in p.lengths])
    Ys = ts.arrays(lambda p: [(length,) for length in p.lengths])
    Outs = ts.outs(lambda p: [(length,) for length in p.lengths])
    knobs = {"TILE": [16, 32]}

    def constants(p, s):
        return {"groups": len(p.lengths)}

    def grid(p, s, device):
        return -(-max(p.lengths) // s["TILE"])

    def reference(xp, Xs, Ys):
        return ([x + y for x, y in zip(Xs, Ys, strict=True)],)


@ct.kernel
def affine(X, A, B, Out, Scaled, factor, biased: ct.Constant[bool], TILE: Int):
    i = ct.bid(0)
    x, a = (ct.load(each, (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO) for each in (X, A))
    out = x * a * factor
    if biased:
        out = out + ct.load(B, (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Out, (i,), out)
    ct.store(Scaled, (i,), x * factor)


class Affine(ts.Kernel):
    """Out = factor * X * A + B, where there is a B, and Scaled = factor * X."""

    function = affine
    size = ts.dim()
    biased = ts.flag()
    X, A = (ts.array("size", dtype="float32") for _ in range(2))
    B = ts.array("size", dtype="float32", when="biased")
    Out, Scaled = (ts.out("size", dtype="float32") for _ in range(2))
    factor = ts.scalar(2.0)
    knobs = {"TILE": [16, 32]}

    def grid(p, s, device):
        return -(-p.size // s["TILE"])

    def reference(xp, X, A, B, factor):
        return X * A * factor + (0 if B is None else B), X * factor


@ct.kernel
def affine_backward(dOut, dFactored, Scaled, A, dX, dA, dB, factor, scaled: ct.Constant[bool], TILE: Int):
    i = ct.bid(0)
    d, x, a = (ct.load(each, (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO) for each in (dOut, Scaled, A))
    total = d * a
    if scaled:
        total = total + ct.load(dFactored, (i,), (TILE,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(dX, (i,), total * factor)
    ct.store(dA, (i,), d * x)
    ct.store(dB, (i,), d)


class AffineBackward(ts.Kernel):
    """The gradients of Affine."""

    function = affine_backward
    size = ts.dim()
    scaled = ts.flag()
    dOut, Scaled, A = (ts.array("size", dtype="float32") for _ in range(3))
    dFactored = ts.array("size", dtype="float32", when="scaled")
    dX, dA, dB = (ts.out("size", dtype="float32") for _ in range(3))
    factor = ts.scalar(2.0)
    knobs = {"TILE": [16, 32]}
    grid = Affine.grid

    def reference(xp, dOut, Scaled, A, dFactored, factor):
        return (dOut * A + (0 if dFactored is None else dFactored)) * factor, dOut * Scaled, dOut
