"""TileGym's kernels on schedules that tiledsched found, beside the same kernels as TileGym tunes them itself.

    python docs/examples/beside_tilegym.py --csv FILE      # on a GPU, with torch, CuPy and tilegym installed

Both searches begin with nothing: an empty database, an empty cache, a process that has called neither. Then both are timed
in turn, out of a cold cache, each queued behind a spin that outlasts the host. A search counts twice: its seconds, and the
seconds in which the driver saw the GPU at work (NVML's utilization, sampled, of which below a second little can be said).
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import threading
import time
from pathlib import Path

import pynvml
import torch
from tilegym import ops

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tilegym_matmul import Matmul
from tilegym_rope import Rope
from tilegym_softmax import Softmax

import tiledsched as ts

SPIN_CYCLES = 2_000_000
ROUNDS = 40


def tensors(kernel, p):
    """Inputs of a problem, standard normal."""
    dtype = getattr(torch, p.dtype)
    return [torch.randn(each.shape, device="cuda").to(dtype) for each in kernel.arrays(p) if each.role != "out"]


THEIRS = {
    Matmul: {
        "plain": lambda a, b: ops.matmul(a, b, static_persistent=False),
        "persistent": lambda a, b: ops.matmul(a, b, static_persistent=True),
    },
    Softmax: {
        "gather": ops.softmax,
        "tma": lambda x: ops.softmax(x, use_tma=True),
        "multi_wave": lambda x: ops.softmax(x, use_multi_wave=True),
    },
    Rope: {"rope": lambda q, k, cos, sin: ops.apply_rope_base(q, k, cos, sin)},
}
PROBLEMS = {
    Matmul: [{"m": n, "n": n, "k": n, "dtype": "bfloat16"} for n in (1024, 2048, 4096, 8192)],
    Rope: [
        {"batch": batch, "seq": seq, "q_heads": 32, "k_heads": 8} for batch, seq in ((1, 4096), (4, 4096), (1, 16384))
    ],
    Softmax: [{"rows": (1 << 26) // columns, "columns": columns} for columns in (1024, 4096, 8192)],
}


def timed(call, *given):
    """What a call returns, its seconds until the GPU is done, and those in which the GPU was at work."""
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    done, busy = threading.Event(), 0.0

    def watch():
        nonlocal busy
        last = time.perf_counter()
        while not done.wait(0.02):
            now = time.perf_counter()
            busy += (now - last) * pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
            last = now

    torch.cuda.synchronize()
    time.sleep(1.2)  # what was at work before is forgotten
    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    result = call(*given)
    torch.cuda.synchronize()
    took = time.perf_counter() - started
    time.sleep(0.2)
    done.set()
    watcher.join()
    return result, took, busy


def tuned(kernel, p, arch):
    """What a quick search comes to."""
    return ts.tune(kernel, [p], arch=arch, effort="quick", runner="gpu")


def race(calls, given):
    """Median microseconds of each call, in turn."""
    flush = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    samples = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            torch.cuda._sleep(SPIN_CYCLES)
            before.record()
            call(*given)
            after.record()
            assert not before.query(), f"{name} took the host longer than the spin"
            after.synchronize()
            samples[name].append(before.elapsed_time(after) * 1e3)
            time.sleep(0.003)
    return {name: statistics.median(each) for name, each in samples.items()}


def main():
    """A row for each problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", required=True)
    parser.add_argument("--arch", default="sm_90")
    arguments = parser.parse_args()
    with open(arguments.csv, "w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(
            (
                "kernel",
                "problem",
                "schedule",
                "tiledsched_us",
                "tilegym_us",
                "tilegym_variant",
                "ratio",
                "tiledsched_search_s",
                "tiledsched_gpu_s",
                "tilegym_search_s",
                "tilegym_gpu_s",
                "device",
                "torch",
            )
        )
        for kernel, problems in PROBLEMS.items():
            ours = ts.op(f"beside::{kernel.__name__.lower()}", kernel)
            for values in problems:
                p = kernel.problem(**values)
                given = tensors(kernel, p)
                report, *spent = timed(tuned, kernel, p, arguments.arch)
                ours(*given)
                searched = [timed(call, *given)[1:] for call in THEIRS[kernel].values()]
                spent += [sum(each) for each in zip(*searched, strict=True)]
                times = race({"tiledsched": ours, **THEIRS[kernel]}, given)
                mine = times.pop("tiledsched")
                best = min(times, key=times.get)
                line = (
                    kernel.__name__,
                    p,
                    report.entries[0].schedule.short(),
                    f"{mine:.2f}",
                    f"{times[best]:.2f}",
                    best,
                    f"{times[best] / mine:.3f}",
                    *(f"{each:.1f}" for each in spent),
                    torch.cuda.get_device_name(),
                    torch.__version__,
                )
                rows.writerow(line)
                file.flush()
                print(*line, flush=True)


if __name__ == "__main__":
    main()
