"""Fourier transforms of rows whose length is a power of two, real and imaginary parts in arrays of their own."""

import cuda.tile as ct

import tiledsched as ts

Int = ct.Constant[int]
TURN = 6.283185307179586


def roots(rows: Int, columns: Int, length: Int):
    """cos and -sin of 2 pi i j / length."""
    i = ct.arange(rows, dtype=ct.int32).reshape((rows, 1))
    j = ct.arange(columns, dtype=ct.int32).reshape((1, columns))
    angle = (i * j % length).astype(ct.float32) * (TURN / length)
    return ct.cos(angle), -ct.sin(angle)


def times(ar, ai, br, bi):
    return ct.matmul(ar, br) - ct.matmul(ai, bi), ct.matmul(ar, bi) + ct.matmul(ai, br)


@ct.kernel
def fft(Re, Im, OutRe, OutIm, batch: int, n: Int, A: Int):
    outer, inner = roots(A, A, A), roots(n // A, n // A, n // A)
    turn_re, turn_im = roots(A, n // A, n)
    for row in range(ct.bid(0), batch, ct.num_blocks(0)):
        re = ct.load(Re, (row, 0), (1, n)).reshape((A, n // A))
        im = ct.load(Im, (row, 0), (1, n)).reshape((A, n // A))
        re, im = times(outer[0], outer[1], re, im)
        re, im = re * turn_re - im * turn_im, re * turn_im + im * turn_re
        re, im = times(re, im, inner[0], inner[1])
        ct.store(OutRe, (row, 0), ct.transpose(re).reshape((1, n)))
        ct.store(OutIm, (row, 0), ct.transpose(im).reshape((1, n)))


class Fft(ts.Kernel):
    function = fft
    batch, n = ts.dim(), ts.dim(constant=True)
    dtype = ts.dtype("float32")
    Re, Im, OutRe, OutIm = ts.array("batch n"), ts.array("batch n"), ts.out("batch n"), ts.out("batch n")
    knobs = {"A": [16, 32, 8], "occupancy": [2, 1, 4], "num_worker_warps": [4, 8]}
    constraints = {"n >= A * 8": "both factors have eight points"}
    suites = {"signals": [dict(batch=65536, n=256), dict(batch=65536, n=128)]}

    def grid(p, s, device):
        return (min(p.batch, device.sm_count * s["occupancy"]),)

    def reference(xp, Re, Im):
        out = xp.fft.fft(Re + 1j * Im)
        return out.real, out.imag
