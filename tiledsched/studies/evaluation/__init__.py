"""Repeats the evaluation of TiledAttention (Khan, arXiv:2603.01960) on the GPU at hand.

Its grid, methods, columns, tables and figures; the timing is ours: interleaved, paced and queued ahead. :mod:`rows` holds the
grid and the columns, :mod:`tiles` the tiling sensitivity, :mod:`figures` the charts and :mod:`pages` what is written.
"""
