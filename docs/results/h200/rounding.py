"""How the number of keys taken together decides the rounding error of attention, in NumPy on a CPU.

Products are exact here (float64), so that only two roundings are left, both to float16: of the probabilities before they
meet the values, and of the output. Probabilities are relative to the largest score seen so far; that one is exactly 1 and
not rounded. So the more often a row starts with a maximum of its own, the smaller the error: short steps do that, and
shares of the keys that are put together at the end, even more.

Run: python docs/results/h200/rounding.py
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HEAD_DIM = 128
HEADS = 4
CASES = ((128, 1), (64, 1), (256, 1), (128, 2), (128, 4), (128, 8))
"""Keys a step, shares of the keys."""


def attend(scores: NDArray[np.float64], v: NDArray[np.float64], step: int, shares: int) -> NDArray[np.float64]:
    """softmax(scores) @ v by steps of `step` keys in `shares` shares; scores `[rows, keys]`, v `[keys, HEAD_DIM]`."""
    parts = []
    for columns in np.array_split(np.arange(scores.shape[1]), shares):
        peak, total, out = -np.inf * np.ones((len(scores), 1)), 0.0, 0.0
        for start in range(0, len(columns), step):
            these = columns[start : start + step]
            higher = np.maximum(peak, scores[:, these].max(1, keepdims=True))
            shrink, weights = np.exp(peak - higher), np.exp(scores[:, these] - higher)
            total = total * shrink + weights.sum(1, keepdims=True)
            out = out * shrink + weights.astype(np.float16).astype(np.float64) @ v[these]
            peak = higher
        parts.append((peak, total, out))
    top = np.max([peak for peak, _, _ in parts], axis=0)
    whole = sum(out * np.exp(peak - top) for peak, _, out in parts)
    result: NDArray[np.float64] = whole / sum(total * np.exp(peak - top) for peak, total, _ in parts)
    return result


def errors(keys: int, rows: int) -> list[float]:
    """Relative error (Frobenius) of each case, over `HEADS` heads of normally distributed float16 inputs."""
    rng, wrong, right = np.random.default_rng(0), np.zeros(len(CASES)), 0.0
    for _ in range(HEADS):
        q, k, v = (rng.standard_normal((n, HEAD_DIM)).astype(np.float16).astype(np.float64) for n in (rows, keys, keys))
        scores = q @ k.T / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        reference = weights @ v / weights.sum(1, keepdims=True)
        right += (reference**2).sum()
        for i, case in enumerate(CASES):
            out = attend(scores, v, *case).astype(np.float16).astype(np.float64)
            wrong[i] += ((out - reference) ** 2).sum()
    return [float(x) for x in np.sqrt(wrong / right)]


def main() -> None:
    """Print the error of 128 keys a step in one share over that of each case."""
    print(
        "| keys | " + " | ".join(f"{step} a step, {shares} share{'s' * (shares > 1)}" for step, shares in CASES) + " |"
    )
    print("|---:|" + "---:|" * len(CASES))
    for keys, rows in ((512, 512), (1024, 512), (4096, 128)):
        found = errors(keys, rows)
        print(f"| {keys} | {found[0]:.3e} | " + " | ".join(f"{found[0] / each:.3f}x" for each in found[1:]) + " |")


if __name__ == "__main__":
    main()
