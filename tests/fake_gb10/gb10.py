"""A GB10 (the GPU of a DGX Spark) that is not there: what `pynvml` and `cupy` beside this file tell of it.

With this folder on PYTHONPATH, the command line and its measuring process run as they do on a machine with that GPU:

    PYTHONPATH=tests/fake_gb10 FAKE_GB10=throttled tiledsched tune ...

FAKE_GB10 holds words with commas between them:

    throttled   hot, at 513 MHz: kernels take so much longer
    desktop     Xorg and gnome-shell have the GPU open, and NVML does not say what they do with it
    training    a training of somebody else has it open, too, and does not say what it does
    silent      NVML answers "Not Supported" to everything that it may
    no-uuid     NVML does not tell the UUID
    no-arch     NVML does not tell the compute capability
    mig         CUDA opens an instance, a part of the GPU, which has a name of its own
    two         there is a second one

What comes from public reports of GB10s: memory, memory clock and the share of each process are "Not Supported".
"""

from __future__ import annotations

import os

WORDS = frozenset(filter(None, os.environ.get("FAKE_GB10", "").split(",")))
NAME, ARCH, DRIVER = "NVIDIA GB10", (12, 1), "580.126.09"
UUIDS = ["GPU-2dee1e25-b3b5-007e-2b55-79f2d0f2ebe5", "GPU-7b1d9c02-55aa-4a0f-9f0e-0d6f3c1e8a44"]
COUNT = 2 if "two" in WORDS else 1
BUSES = ("000F:01:00.0", "000F:02:00.0")
INSTANCE = f"{NAME} MIG 1g.32gb"
SM_COUNT, L2_BYTES, MEMORY_BYTES = 48, 24 << 20, 130_662_936_576
CLOCK_MHZ = 513 if "throttled" in WORDS else 2418
SLOWER = 2418 / CLOCK_MHZ
REASONS = 0x60 if "throttled" in WORDS else 0
XORG, SHELL, TRAINING = 2101, 2299, 4711
OPENED: list[int] = []
"""The process that opened the GPU: this one, once CuPy did."""
