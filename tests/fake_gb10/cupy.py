"""CuPy of the made-up GB10, as far as the measuring process uses it; see `gb10`.

Arrays are NumPy's. A kernel takes a time that its machine code decides, on a clock of its own, which pauses move, too: a
tune takes no longer than its Python. Launched, it writes what the reference expects of the inputs it is given.
"""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import gb10
import numpy

__version__ = "14.2.0"


class Gpu:
    """Its state."""

    now_us = 0.0
    arrays = None
    """What the measuring process holds for the current problem."""
    launched = 0


gpu = Gpu()


def open_gpu() -> None:
    """What the driver knows once a process has a context; and in the measuring process, its clock and its arrays."""
    gb10.OPENED[:] = [os.getpid()]
    worker = sys.modules.get("tiledsched.measure.worker")
    if worker is None:
        return

    class Noted(worker.ProblemArrays):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            gpu.arrays = self

    def sleep(seconds: float) -> None:
        gpu.now_us += 1e6 * seconds

    worker.ProblemArrays = Noted
    worker.timing.time = types.SimpleNamespace(perf_counter=lambda: gpu.now_us / 1e6, sleep=sleep)


class Stream:
    def __init__(self, non_blocking: bool = False) -> None:
        open_gpu()

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...

    def begin_capture(self) -> None:
        gpu.captured_us = gpu.now_us

    def end_capture(self) -> types.SimpleNamespace:
        us, gpu.now_us = gpu.now_us - gpu.captured_us, gpu.captured_us
        return types.SimpleNamespace(launch=lambda stream: advance(us))


def advance(us: float) -> None:
    gpu.now_us += us


class Event:
    done = False  # the spin is never over before all is queued

    def record(self, stream: Stream) -> None:
        self.at_us = gpu.now_us

    def synchronize(self) -> None: ...


class Device:
    pci_bus_id = gb10.BUSES[0]

    def synchronize(self) -> None: ...


class RawModule:
    """Machine code, loaded. How near it comes to what the GPU could do is decided by its threads, and a little by the rest."""

    def __init__(self, path: str) -> None:
        from tiledsched.build.cubin import read_artifact

        artifact = read_artifact(Path(path).read_bytes(), "sm_{}{}".format(*gb10.ARCH))
        self.more = (1.75 if artifact.facts.threads <= 128 else 1.45) + 0.2 * int(artifact.fingerprint[:4], 16) / 2**16

    def get_function(self, symbol: str):
        return self.launch

    def launch(self, grid, block, arguments) -> None:
        arrays = gpu.arrays
        gpu.launched += 1  # a wave of half a percent, so that samples spread as on a GPU
        advance(self.more * least_us(arrays.problem) * gb10.SLOWER * (1 + 0.005 * (gpu.launched % 7 - 3) / 3))
        given = {id(argument) for argument in arguments}
        case = next(case for case in arrays.cases if given & {id(array) for array in case.inputs.values()})
        write_outputs(arrays, case)


def least_us(problem) -> float:
    """Microseconds in which the problem cannot be done faster on this GPU: by its tensor cores, or by its memory."""
    from tiledsched.core.device import arch_spec

    spec = arch_spec("sm_121")
    products = problem.flops / (spec.tensor_flops * spec.sm_count * spec.clock_ghz * 1e3)
    return max(products, problem.min_bytes / (spec.dram_gbps * 1e3), 2.0)


def write_outputs(arrays, case) -> None:
    """Give the outputs the values that the reference has for these inputs."""
    from tiledsched.core.arrays import to_storage

    for spec, expected in zip(arrays.output_specs, case.expected, strict=True):
        right = to_storage(numpy, numpy.asarray(expected), spec.dtype)
        if not (arrays.outputs[spec.name] == right).all():
            arrays.outputs[spec.name][...] = right


class RawKernel:
    def __init__(self, source: str, name: str) -> None: ...

    def __call__(self, grid, block, arguments) -> None:
        advance(300.0)


def empty(shape, dtype=float):
    """An array; of one so large that it can only be for flushing the cache, the beginning."""
    return numpy.empty(min(shape, 64) if isinstance(shape, int) else shape, dtype=dtype)


def get_default_memory_pool() -> types.SimpleNamespace:
    return types.SimpleNamespace(free_all_blocks=lambda: None, set_limit=lambda size: None, total_bytes=lambda: 0)


runtime = types.SimpleNamespace(
    getDevice=lambda: 0,
    getDeviceCount=lambda: gb10.COUNT,
    driverGetVersion=lambda: 13000,
    getDeviceProperties=lambda device: {
        "name": (gb10.INSTANCE if "mig" in gb10.WORDS else gb10.NAME).encode(),
        "major": gb10.ARCH[0],
        "minor": gb10.ARCH[1],
        "multiProcessorCount": 12 if "mig" in gb10.WORDS else gb10.SM_COUNT,
        "totalGlobalMem": gb10.MEMORY_BYTES,
        "l2CacheSize": gb10.L2_BYTES,
    },
)
cuda = types.SimpleNamespace(
    Stream=Stream,
    Event=Event,
    Device=Device,
    runtime=runtime,
    get_elapsed_time=lambda before, after: (after.at_us - before.at_us) / 1e3,
)


def __getattr__(name: str):
    return getattr(numpy, name)
