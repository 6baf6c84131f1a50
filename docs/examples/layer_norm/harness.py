"""Compares a layer norm with torch's, and times the first call and later ones."""

import os
import sys
import time
from pathlib import Path

import torch

INTERPRETED = [name for name in ("TRITON_INTERPRET", "HELION_INTERPRET") if os.environ.get(name) == "1"]
"""Environment variables that make a tool run on the CPU."""


def arch_here() -> str:
    """The arch of the GPU here, e.g. sm_90."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def check(layer_norm, rows=8192, columns=4096) -> None:
    """Compare `layer_norm(x, w, b)` with torch, and print what a first and a later call take."""
    device = "cpu" if INTERPRETED else "cuda"
    rows = 8 if INTERPRETED else rows
    torch.manual_seed(0)
    x, w, b = (
        torch.randn(*shape, dtype=torch.float16, device=device) for shape in ((rows, columns), [columns], [columns])
    )
    right = torch.nn.functional.layer_norm(x.float(), (columns,), w.float(), b.float())
    started = time.perf_counter()
    out = layer_norm(x, w, b)
    first_s = time.perf_counter() - started
    torch.testing.assert_close(out.float(), right, atol=1e-2, rtol=1e-2)
    name = Path(sys.argv[0]).stem
    if INTERPRETED:
        print(f"{name}: right on the CPU ({INTERPRETED[0]}=1)", flush=True)
        return
    times = []
    for _ in range(50):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # the host queues everything meanwhile
        before.record()
        layer_norm(x, w, b)
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    median_us = sorted(times)[len(times) // 2]
    print(
        f"{name}: right on {torch.cuda.get_device_name()}; first call {first_s:.1f} s, later {median_us:.1f} us",
        flush=True,
    )
