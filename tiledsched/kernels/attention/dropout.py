"""Dropout of attention's probabilities, by a generator that counts.

Whether a probability is kept is a function of a seed, the sequence, the head, the row and the key, and of nothing else: every
schedule drops the same, and so do the gradients. The generator is Philox 4x32 with seven rounds (Salmon, Moraes, Dror and Shaw,
Parallel random numbers: as easy as 1, 2, 3, SC 2011). Each of its calls makes four numbers, for four keys.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

from dataclasses import dataclass

import cuda.tile as ct

ROUNDS = 7
"""The fewest with which the generator passes all of the tests that its authors made (BigCrush)."""
FACTORS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
NEXT = 8
"""How far apart the four keys are: in the layout of products one thread has all of them."""


@dataclass(frozen=True)
class Dropout:
    """What probabilities are multiplied with after the softmax: 0 with the probability `p`, else 1 / (1 - p)."""

    p: float
    """Above 0 and below 1."""

    def __call__(self, b, h, q_idx, kv_idx, *arrays):
        """The factors of a tile. The last of the arrays is the seed: two int32 numbers."""
        seed = tuple(ct.gather(arrays[len(arrays) - 1], (each,)).astype(ct.uint32) for each in ct.static_iter(range(2)))
        return ct.where(random_bits(seed, b, h, q_idx, kv_idx) >= int(self.p * 2**32), 1.0 / (1.0 - self.p), 0.0)


def philox(counter, seed, ROUNDS):
    """Four tiles of 32 random bits for tiles of counters.

    Args:
        counter: four uint32 tiles.
        seed: two uint32 numbers.
        ROUNDS: how many rounds are made.
    """
    a, b, c, d = counter
    for i in ct.static_iter(range(ROUNDS)):
        first, second = seed[0] + i * STEPS[0] % 2**32, seed[1] + i * STEPS[1] % 2**32
        low, high = product(a, FACTORS[0])
        other_low, other_high = product(c, FACTORS[1])
        a, b, c, d = other_high ^ b ^ first, other_low, high ^ d ^ second, low
    return a, b, c, d


def product(a, factor):
    """The lower and the upper 32 bits of a product."""
    whole = a.astype(ct.uint64) * factor
    return whole.astype(ct.uint32), (whole >> 32).astype(ct.uint32)


def random_bits(seed, b, h, q_idx, kv_idx):
    """32 random bits for each row and key of a tile of either orientation. The arguments are those of a mask_mod."""
    across, rows, keys = kv_idx.shape[0] == 1, q_idx.shape[0] * q_idx.shape[1], kv_idx.shape[0] * kv_idx.shape[1]
    groups = kv_idx // (4 * NEXT) * NEXT + kv_idx % NEXT
    whole = keys % (4 * NEXT) == 0  # then the tile begins at a multiple of its side, and each number is made once
    if whole:
        first = ct.extract(kv_idx, (0, 0), (1, 1)).item() // 4
        groups = (first + ct.arange(keys // 4, dtype=ct.int32)).reshape((1, keys // 4) if across else (keys // 4, 1))
    found = philox(tuple(ct.astype(each, ct.uint32) for each in ct.static_iter((groups, q_idx, h, b))), seed, ROUNDS)
    if not whole:
        place = kv_idx // NEXT % 4
        return ct.where(place < 2, ct.where(place == 0, found[0], found[1]), ct.where(place == 2, found[2], found[3]))
    shape, axis = ((rows, keys // (4 * NEXT), NEXT), 2) if across else ((keys // (4 * NEXT), NEXT, rows), 1)
    parts = tuple(each.reshape(shape) for each in ct.static_iter(found))
    halves = ct.cat((parts[0], parts[1]), axis), ct.cat((parts[2], parts[3]), axis)
    return ct.cat(halves, axis).reshape((rows, keys) if across else (keys, rows))
