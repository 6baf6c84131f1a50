"""Mistakes to plant in the kernels of this folder: file -> what is wrong -> (what stands in the file, what to put there)."""

MISTAKES = {
    "fp8_product": {
        "the loop takes whole steps only": (
            "range(ct.num_tiles(A, axis=1, shape=(TM, TK)))",
            "range(A.shape[1] // TK)",
        ),
        "half-precision sums": ("(TM, TN), 0, dtype=ct.float32", "(TM, TN), 0, dtype=ct.float16"),
        "columns' scales by the row of the block": ("ct.load(ColumnScale, (j,)", "ct.load(ColumnScale, (i,)"),
    },
    "int4_product": {
        "the scales of the first group": ("ct.load(Scale, (step, j)", "ct.load(Scale, (0, j)"),
        "nibbles swapped": ("(packed & 15, packed >> 4)", "(packed >> 4, packed & 15)"),
        "the loop ends after two steps": (
            "range(ct.num_tiles(X, axis=1, shape=(TM, TK)))",
            "range(min(2, ct.num_tiles(X, axis=1, shape=(TM, TK))))",
        ),
    },
    "grouped_gemm": {
        "the expert's offset is ignored where rows are stored": (
            "Out.slice(0, first, last)",
            "Out.slice(0, 0, last - first)",
        ),
        "the last rows of an expert are left out": ("if i * TM < last - first:", "if (i + 1) * TM <= last - first:"),
        "rows of the next expert are written": (
            "X.slice(0, first, last), Out.slice(0, first, last)",
            "X.slice(0, first, X.shape[0]), Out.slice(0, first, X.shape[0])",
        ),
    },
    "cross_entropy": {
        "zeros beyond the vocabulary": ("PaddingMode.NEG_INF", "PaddingMode.ZERO"),
        "the maximum is not subtracted": (
            "higher = max(top, ct.max(x, axis=1, keepdims=True))",
            "higher = ct.zeros((1, 1), dtype=ct.float32)",
        ),
        "sums are not rescaled": ("total * ct.exp(top - higher)", "total"),
    },
    "layer_norm": {
        "eps outside of the root": (
            "ct.rsqrt(ct.sum(squares, axis=1, keepdims=True) / columns + eps)",
            "1 / (ct.sqrt(ct.sum(squares, axis=1, keepdims=True) / columns) + eps)",
        ),
        "what lies beyond the row is counted": ("ct.where(inside, x - mean, 0.0)", "x - mean"),
        "the weights of the first tile": ("ct.load(Weight, (j,)", "ct.load(Weight, (0,)"),
    },
    "swiglu": {
        "exp overflows": ("gate / (1 + ct.exp(-gate))", "gate * ct.exp(gate) / (1 + ct.exp(gate))"),
        "up begins at a whole tile": (
            "ct.load(X.slice(1, columns, 2 * columns), (i, j), (TM, TN))",
            "ct.load(X, (i, j + ct.num_tiles(Out, axis=1, shape=(TM, TN))), (TM, TN))",
        ),
        "a grid one block short": ('-(-p.columns // s["TN"])', 'max(1, p.columns // s["TN"])'),
    },
    "stencil": {
        "neighbours stop at the tile's edge": (
            "ct.gather(X, (i, j - 1)), ct.gather(X, (i, j + 1))",
            "ct.gather(X, (i, max(j - 1, ct.bid(1) * TN))), ct.gather(X, (i, j + 1))",
        ),
        "axes swapped": ("ct.scatter(Out, (i, j)", "ct.scatter(Out, (j, i)"),
        "the edge repeats": ("ct.gather(X, (i - 1, j))", "ct.gather(X, (max(i - 1, 0), j))"),
    },
    "fft": {
        "the last transpose is missing": ("ct.transpose(re).reshape((1, n))", "re.reshape((1, n))"),
        "turned the wrong way": ("re * turn_im + im * turn_re", "im * turn_re - re * turn_im"),
        "the last row is left out": ("range(ct.bid(0), batch, ", "range(ct.bid(0), batch - 1, "),
    },
    "histogram": {
        "no atomics": ("ct.atomic_add(Counts, number, 1)", "ct.scatter(Counts, number, ct.gather(Counts, number) + 1)"),
        "what lies beyond the end is counted": (", padding_value=-1", ""),
        "one block too few": ('(count, -(-p.size // s["TILE"]))', '(count, max(1, p.size // s["TILE"]))'),
    },
    "dropout": {
        "every tile has the first one's mask": ("(tile * TILE + ct.arange", "(ct.arange"),
        "the block's tiles overlap": ("ct.bid(0) * EACH + part", "ct.bid(0) + part"),
        "a block too few": (
            'return -(-p.size // (s["TILE"] * s["EACH"]))',
            'return max(1, p.size // (s["TILE"] * s["EACH"]))',
        ),
    },
    "rope_in_place": {
        "reads what it has overwritten": (
            "ct.store(Q, (batch, place, heads, 1), (y * cos + x * sin)",
            "x = ct.load(Q, (batch, place, heads, 0), shape).astype(ct.float32)\n"
            "    ct.store(Q, (batch, place, heads, 1), (y * cos + x * sin)",
        ),
        "the angle of the head": ("ct.load(Sin, (place, 0)", "ct.load(Sin, (heads, 0)"),
        "turned the wrong way": ("(y * cos + x * sin)", "(y * cos - x * sin)"),
    },
    "transpose": {
        "a block too few along rows": ('return -(-p.rows // s["TM"])', 'return max(1, p.rows // s["TM"])'),
        "reshaped, not transposed": (
            "ct.transpose(ct.load(X, (i, j), (TM, TN)))",
            "ct.load(X, (i, j), (TM, TN)).reshape((TN, TM))",
        ),
        "tiles stay where they were": ("ct.store(Out, (j, i)", "ct.store(Out, (i, j)"),
    },
    "online_softmax": {
        "zeros beyond the row": ("LOW = ct.PaddingMode.NEG_INF", "LOW = ct.PaddingMode.ZERO"),
        "a maximum over the other axis": ("ct.max(x, axis=1, keepdims=True)", "ct.max(x, axis=0, keepdims=True)"),
        "blocks take every other row": (", ct.num_blocks(0)):", ", 2 * ct.num_blocks(0)):"),
    },
}
"""Each replaces text that stands once in its file."""
