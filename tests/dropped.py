"""Dropout of attention in NumPy, by the definition of the generator in its paper, and attention with it in float64: what tile code
is compared with."""

from __future__ import annotations

import math

import numpy as np
import torch


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


def drawn(seed, device="cpu"):
    """The numbers that a call draws after `manual_seed(seed)`, which is repeated."""
    torch.manual_seed(seed)
    numbers = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device)
    torch.manual_seed(seed)
    return numbers.cpu().numpy()


def attention(tensors, weights, seen, added):
    """(output, log-sum-exp) of float64 tensors q, k and v, where probabilities are multiplied with `weights`."""
    q = tensors[0]
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in tensors[1:])
    scores = (q @ k.mT / math.sqrt(q.shape[3]) + added).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) * torch.from_numpy(weights).to(q.device)) @ v, scores.logsumexp(-1)
