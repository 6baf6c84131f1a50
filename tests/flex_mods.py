"""Functions of an author for the tests of `flex`."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.tile as ct


def causal(b, h, q_idx, kv_idx, *arrays):
    return q_idx >= kv_idx


def window(size):
    def near(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < size)

    return near


@dataclass(frozen=True)
class Strided:
    """Sees every key whose distance is a multiple of `step`."""

    step: float

    def __call__(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx) % self.step == 0


def documents(b, h, q_idx, kv_idx, ids):
    return ct.gather(ids, (b, q_idx)) == ct.gather(ids, (b, kv_idx))


def unpadded(b, h, q_idx, kv_idx, seen):
    return ct.gather(seen, (b, kv_idx))


def alibi(score, b, h, q_idx, kv_idx, slopes):
    return score + ct.gather(slopes, h) * (kv_idx - q_idx)


def biased(score, b, h, q_idx, kv_idx, bias):
    return score + ct.gather(bias, (b, h, q_idx, kv_idx))


def turned(score, b, h, q_idx, kv_idx, *arrays):
    return score + ct.transpose(score)


def between(b, h, q_idx, kv_idx):
    return q_idx - 5 < kv_idx <= q_idx


def halved(score, b, h, q_idx, kv_idx, *arrays):
    return score * 0.5 + ct.max(score, axis=1, keepdims=True) * 0.0


def half(score, b, h, q_idx, kv_idx, *arrays):
    return score * 0.0 + 0.5


def nothing(b, h, q_idx, kv_idx):
    return kv_idx < q_idx - 10_000
