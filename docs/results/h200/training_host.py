"""Host time of a training call, forward and backward, of `sdpa` and of torch's backends.

    python docs/results/h200/training_host.py

Calls are queued behind a kernel that keeps the GPU busy, so that no call waits for it. Needs a GPU.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ |= {"TILEDSCHED_COMPILE": "wait", "TILEDSCHED_RIVALS": "off"}

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tiledsched import sdpa

CALLS = 200
ROUNDS = 12
SPIN_CYCLES = 200_000_000


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds of one call on the host."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    end = time.perf_counter()
    torch.cuda.synchronize()
    return (end - begin) / CALLS * 1e6


def main() -> None:
    """Print the medians of all methods, which take turns."""
    given = [torch.randn(1, 8, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    dout = torch.randn_like(given[0])
    methods = {
        "sdpa": (lambda: sdpa(*given, causal=True), None),
        "torch flash": (lambda: scaled_dot_product_attention(*given, is_causal=True), SDPBackend.FLASH_ATTENTION),
        "torch cuDNN": (lambda: scaled_dot_product_attention(*given, is_causal=True), SDPBackend.CUDNN_ATTENTION),
        "x * 2": (lambda: given[0] * 2, None),
    }
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, (forward, backend) in methods.items():
            with sdpa_kernel(backend) if backend else nullcontext():
                for _ in range(3):
                    out = forward()
                times.setdefault(f"{name} forward", []).append(host_us(forward))

                def backward(out: Any = out, leaves: Any = given if name != "x * 2" else given[:1]) -> Any:
                    return torch.autograd.grad(out, leaves, dout, retain_graph=True)

                backward()
                times.setdefault(f"{name} backward", []).append(host_us(backward))
    for name, found in times.items():
        print(f"{name:24s} {statistics.median(found):8.1f} us")


if __name__ == "__main__":
    main()
