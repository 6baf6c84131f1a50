"""The real process of the rivals on the made-up GPU of `fake_worker`: torch is on the CPU, and its CUDA is replaced.

Both clocks are one: a launch of ours takes what its cubin says, a rival's call 80 microseconds. The spin is free, and so are
torch's operations but for its products. torch.compile compiles nothing.
"""

from __future__ import annotations

import contextlib
import sys
import types

import fake_worker
import numpy
import torch

CALL_US = 80.0
PRODUCTS_US = {"mm": CALL_US, "addmm": 60.0}
"""torch's functions of matrix products, and the microseconds of a call."""
gpu = fake_worker.gpu


class Event:
    def __init__(self, *, enable_timing) -> None: ...

    def record(self) -> None:
        self.at_us = gpu.now_us

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        gpu.alive()

    def elapsed_time(self, other) -> float:
        return (other.at_us - self.at_us) / 1e3


def operator(name):
    """A backend's operator, which knows the CPU."""

    def attend(q, k, v, *given, scale):
        if "cudnn" in name:
            raise RuntimeError("cuDNN is not here")
        gpu.now_us += CALL_US
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=given[-1], scale=scale, enable_gqa=True
        )
        return (out,)

    return attend


def product(name):
    """One of torch's products, which takes its time."""
    multiply = getattr(torch, name)

    def call(*given, **more):
        gpu.now_us += PRODUCTS_US[name]
        return multiply(*given, **more)

    return call


def main() -> None:
    cupy = fake_worker.fake_cupy("ready")
    cupy.cuda.ExternalStream = lambda pointer: contextlib.nullcontext()
    cupy.from_dlpack = numpy.from_dlpack
    sys.modules["cupy"] = cupy
    for name, value in {
        "Event": Event,
        "_sleep": lambda cycles: None,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "Stream": lambda: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda: types.SimpleNamespace(cuda_stream=0),
        "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),
        "graph": lambda graph: contextlib.nullcontext(),
    }.items():
        setattr(torch.cuda, name, value)
    from tiledsched.kernels.attention import backends
    from tiledsched.measure import worker
    from tiledsched.rivals import worker as rival_worker

    backends.torch_operator = operator
    for name in PRODUCTS_US:
        setattr(torch, name, product(name))
    torch.compile = lambda function, **how: function
    worker.is_whole, worker.symbol_of = lambda cubin: True, lambda cubin: "made_up"
    rival_worker.main(*sys.argv[1:4])


if __name__ == "__main__":
    main()
