"""What `cycles.csv` was counted on: six rounds of sdpa and of torch's cuDNN backend on six problems, in turn."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tiledsched import sdpa

PROBLEMS = [  # batch, heads, rows, causal; 128 columns
    (32, 16, 512, False), (16, 16, 1024, False), (8, 16, 2048, False), (4, 16, 4096, False), (16, 16, 1024, True),
    (1, 8, 512, False),
]  # fmt: skip
WARM, ROUNDS = 2, 6


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    """The tuned kernel."""
    sdpa(q, k, v, causal=causal)


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> None:
    """The fastest of torch's backends there."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        scaled_dot_product_attention(q, k, v, is_causal=causal)


def main() -> None:
    """Two launches of each to warm up, then the rounds that are counted."""
    calls = []
    for batch, heads, rows, causal in PROBLEMS:
        q, k, v = (torch.randn((batch, heads, rows, 128), device="cuda").half() for _ in range(3))
        calls += [(ours, (q, k, v, causal)), (cudnn, (q, k, v, causal))]
    for call, arguments in [each for each in calls for _ in range(WARM)]:
        call(*arguments)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for _ in range(ROUNDS):
        for call, arguments in calls:
            call(*arguments)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
