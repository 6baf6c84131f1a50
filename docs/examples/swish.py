"""A kernel whose gradient is a kernel of its own."""

import cuda.tile as ct

import tiledsched as ts


def sigmoid(x):
    return 1.0 / (1.0 + ct.exp(-x))


def swish_tile(X, Out, TILE: ct.Constant[int]):
    x = ct.load(X, (ct.bid(0),), (TILE,), padding_mode=ct.PaddingMode.ZERO)
    ct.store(Out, (ct.bid(0),), (x * sigmoid(x)).astype(Out.dtype))


def swish_backward_tile(X, dOut, dX, TILE: ct.Constant[int]):
    x = ct.load(X, (ct.bid(0),), (TILE,), padding_mode=ct.PaddingMode.ZERO)
    d = ct.load(dOut, (ct.bid(0),), (TILE,), padding_mode=ct.PaddingMode.ZERO)
    s = sigmoid(x)
    ct.store(dX, (ct.bid(0),), (d * s * (1.0 + x * (1.0 - s))).astype(dX.dtype))


class Swish(ts.Kernel):
    """Out = X * sigmoid(X)."""

    function = swish_tile
    size = ts.dim()
    dtype = ts.dtype("float32", "float64")
    X, Out = ts.array("size"), ts.out("size")
    knobs = {"TILE": [1024, 256, 4096]}

    def grid(p, s, device):
        return -(-p.size // s["TILE"])

    def reference(xp, X):
        return X / (1.0 + xp.exp(-X))


class SwishBackward(ts.Kernel):
    """The gradient dX of Swish, from dOut."""

    function = swish_backward_tile
    size = ts.dim()
    dtype = ts.dtype("float32", "float64")
    X, dOut, dX = ts.array("size"), ts.array("size"), ts.out("size")
    knobs = {"TILE": [1024, 256, 4096]}
    grid = Swish.grid

    def reference(xp, X, dOut):
        sigmoid = 1.0 / (1.0 + xp.exp(-X))
        return dOut * sigmoid * (1.0 + X * (1.0 - sigmoid))


swish = ts.op("mylib::swish", Swish)
swish.register_autograd(ts.op("mylib::swish_backward", SwishBackward))
