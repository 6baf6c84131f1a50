"""Launches of `sdpa` and of torch's cuDNN backend, in turn, for Nsight Compute to profile (docs/results/h200.md).

Without an argument it makes one launch of each for six problems (`profile.csv`); with `cycles`, six of each (`cycles.csv`).
"""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tiledsched import sdpa

PROBLEMS = [  # batch, heads, rows, causal; 128 columns
    (32, 16, 512, False),
    (16, 16, 1024, False),
    (8, 16, 2048, False),
    (1, 16, 16384, False),
    (32, 16, 512, True),
    (4, 16, 4096, True),
]
CYCLES = [
    (32, 16, 512, False),
    (16, 16, 1024, False),
    (8, 16, 2048, False),
    (4, 16, 4096, False),
    (16, 16, 1024, True),
    (1, 8, 512, False),
]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    """Launch what tiledsched serves."""
    sdpa(q, k, v, causal=causal)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    """Launch torch's cuDNN backend, the fastest of its backends on these problems."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        scaled_dot_product_attention(q, k, v, is_causal=causal)


def main(problems: list[tuple[int, int, int, bool]], rounds: int) -> None:
    """Launch each method twice to warm up, then `rounds` times under the profiler."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    calls = []
    for batch, heads, rows, causal in problems:
        shape = (batch, heads, rows, 128)
        q, k, v = (torch.randn(shape, generator=generator, device="cuda").half() for _ in range(3))
        calls += [(ours, (q, k, v, causal)), (cudnn, (q, k, v, causal))]
    for call, arguments in [each for each in calls for _ in range(2)]:
        call(*arguments)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call, arguments in calls * rounds:
        call(*arguments)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    if sys.argv[1:] == ["cycles"]:
        main(CYCLES, 6)
    else:
        main(PROBLEMS, 1)
