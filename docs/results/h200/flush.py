"""How fast decoding reads memory, next to a copy and a plain read of as many bytes (docs/results/h200.md).

Each is timed behind a flush of the L2 cache that writes and behind one that only reads. A flush that writes leaves the cache
full of lines that must go to memory while the next kernel reads.

    python docs/results/h200/flush.py > flush.csv
"""

from __future__ import annotations

import csv
import random
import statistics
import sys
import time

import torch
import triton
import triton.language as tl

from tiledsched import sdpa
from tiledsched.measure.nvml import current_device
from tiledsched.measure.timing import TorchStopwatch

SAMPLES = 30
GAP_S = 2e-3
CASES = [
    (batch, heads, kv_heads, keys, head_dim)
    for batch, keys in ((8, 4096), (32, 4096), (128, 2048))
    for heads, kv_heads, head_dim in ((32, 8, 128), (28, 4, 128), (64, 8, 64), (16, 8, 256), (32, 16, 128))
]


@triton.jit
def read_all(x, out, count, block: tl.constexpr, blocks: tl.constexpr):
    """Read all of x with as little work as possible: each of `blocks` blocks sums every `blocks`th piece, in int32."""
    total = tl.zeros((block,), tl.int32)
    for start in range(tl.program_id(0) * block, count, blocks * block):
        total += tl.load(x + start + tl.arange(0, block))
    tl.store(out + tl.program_id(0) * block + tl.arange(0, block), total)


class Reading:
    """A flush of the L2 cache that only reads its buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer.view(torch.int32)

    def zero_(self) -> None:
        """Read the whole buffer; the stopwatch calls this where its own flush would write zeros."""
        self.buffer.sum()


def main() -> None:
    """Print a CSV line for each case, flush and method."""
    device = current_device()
    blocks = 8 * device.sm_count
    buffer = torch.zeros(max(4 * device.l2_bytes, 1 << 26), dtype=torch.uint8, device="cuda")
    lines = csv.writer(sys.stdout, lineterminator="\n")
    lines.writerow(
        ("batch", "heads", "kv_heads", "keys", "head_dim", "mib", "flush", "method", "median_us", "tb_per_s")
    )
    for batch, heads, kv_heads, keys, head_dim in CASES:

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        q = normal(batch, heads, 1, head_dim)
        k, v = (normal(batch, kv_heads, keys, head_dim) for _ in range(2))
        both = torch.cat([k.flatten(), v.flatten()]).view(torch.int32)
        half, other = both[: both.numel() // 2], torch.empty_like(both[: both.numel() // 2])
        out = torch.empty(blocks * 2048, dtype=torch.int32, device="cuda")
        calls = {
            "decoding": lambda q=q, k=k, v=v: sdpa(q, k, v, enable_gqa=True),
            "reading": lambda both=both, out=out: read_all[(blocks,)](
                both, out, both.numel(), 2048, blocks, num_warps=8
            ),
            "copy": lambda half=half, other=other: other.copy_(half),
        }
        moved = 2 * k.numel() * k.element_size()
        for _ in range(3):
            for call in calls.values():
                call()
        watches = {
            name: TorchStopwatch(torch, list(calls.values()), flush, host_us=200.0)
            for name, flush in (("writes", buffer), ("reads", Reading(buffer)))
        }
        samples: dict[tuple[str, int], list[float]] = {}
        for _ in range(SAMPLES):
            turns = [(name, index) for name in watches for index in range(len(calls))]
            random.shuffle(turns)
            for name, index in turns:
                time.sleep(GAP_S)
                watch = watches[name]
                samples.setdefault((name, index), []).append(watch.read(watch.queue(index, paced=True)))
        for (name, index), found in sorted(samples.items()):
            us = statistics.median(found)
            lines.writerow(
                (
                    batch,
                    heads,
                    kv_heads,
                    keys,
                    head_dim,
                    moved >> 20,
                    name,
                    list(calls)[index],
                    round(us, 2),
                    round(moved / us / 1e6, 3),
                )
            )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
