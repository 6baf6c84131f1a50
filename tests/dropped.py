"""Dropout of attention in NumPy, by the definition of the generator in its paper: what tile code is compared with."""

from __future__ import annotations

import numpy as np


def philox(counter, seed, rounds):
    """The four words of Philox 4x32 for arrays of counters (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011)."""
    a, b, c, d = (np.asarray(each).astype(np.uint64) for each in counter)
    words = np.asarray(seed).astype(np.uint32).astype(np.uint64)
    for _ in range(rounds):
        one, other = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = other >> 32 ^ b ^ words[0], other % 2**32, one >> 32 ^ d ^ words[1], one % 2**32
        words = (words + np.array([0x9E3779B9, 0xBB67AE85], np.uint64)) % 2**32
    return a, b, c, d


def factors(p, seed, batch=1, heads=1, rows=64, keys=64):
    """What attention multiplies its probabilities with, `[batch, heads, rows, keys]`: each word decides about one of four keys
    that are eight apart."""
    b, h, row, key = np.ogrid[:batch, :heads, :rows, :keys]
    words = philox((key // 32 * 8 + key % 8, row, h, b), seed, 7)
    return np.where(np.choose(key // 8 % 4, words) < int(p * 2**32), 0.0, np.float32(1 / (1 - p)))
