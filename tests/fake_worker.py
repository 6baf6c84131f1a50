"""The real measuring process on a made-up GPU: `cupy` is replaced, everything else is what runs on a real one.

A cubin of this GPU is JSON (see `cubin`): how long the kernel takes, and what it does when it is loaded, checked or
sampled. Its clock is its own, so that times are exact. Run as ``python fake_worker.py MODE DESCRIPTOR FOLDER``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import random
import signal
import sys
import time
import types
import weakref
from pathlib import Path

import numpy


def cubin(us: float = 100.0, *, noise: float = 0.0, **acts: str) -> bytes:
    """Machine code that takes `us` microseconds. `acts`: what happens on load, check or sample instead (see `act`)."""
    return json.dumps({"us": us, "noise": noise, **acts}).encode()


def artifact(code: bytes, fingerprint: str):
    """Machine code of this GPU as a build gives it."""
    from tiledsched.build.cubin import Artifact
    from tiledsched.core.device import ResourceFacts

    facts = ResourceFacts(
        registers=168, threads=128, shared_bytes=65536, spill_bytes=0, num_ctas=1, code_bytes=20480, ctas_per_sm=2
    )
    return Artifact(arch="sm_90", fingerprint=fingerprint, facts=facts, cubin=code)


class CUDARuntimeError(Exception):
    """Named as CuPy's."""


class OutOfMemoryError(Exception):
    """Named as CuPy's."""


ERRORS = {
    "illegal": "cudaErrorIllegalAddress: an illegal memory access was encountered",
    "assert": "cudaErrorSomethingNew: a failure this version has no word for",
    "ecc": "cudaErrorECCUncorrectable: uncorrectable ECC error encountered",
    "launch": "CUDA_ERROR_INVALID_VALUE: invalid argument",
    "corrupt": "CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid",
    "driver": "CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled with an unsupported toolchain.",
}
STICKY = ("illegal", "assert", "ecc")


class Gpu:
    """Its state."""

    def __init__(self) -> None:
        self.now_us = 0.0
        self.in_a_row = 0
        """Launches since it was waited for."""
        self.lost: str | None = None
        self.verb = ""
        self.kernel = self.problem = self.launch = None
        self.step = 0
        """Which of a launch's steps comes next..."""
        self.named: dict = {}
        """...and the arguments of those before it."""
        self.pristine: dict = {}
        """What arrays that are changed in place held at the first timed launch."""
        self.rng = random.Random(0)
        self.is_cold = False
        """Whether the cache was emptied since the last launch."""
        self.captured: list | None = None
        """Launches of the graph under capture."""

    def alive(self) -> None:
        """Raise the error that broke the context, again, as CUDA does."""
        if self.lost:
            raise CUDARuntimeError(self.lost)

    def act(self, what: str) -> None:
        """One way to fail."""
        if what == "hang":
            if "FAKE_WORKER_HANGS" in os.environ:
                Path(os.environ["FAKE_WORKER_HANGS"]).touch()
            time.sleep(600)
        elif what == "exit":
            os._exit(3)
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif what == "memory":
            raise OutOfMemoryError("Out of memory allocating 1,024 bytes")
        elif what in ERRORS:
            self.lost = ERRORS[what] if what in STICKY else None
            raise CUDARuntimeError(ERRORS[what])


gpu = Gpu()


class Stream:
    def __init__(self, non_blocking: bool = False) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...

    def begin_capture(self) -> None:
        gpu.captured = []

    def end_capture(self) -> Graph:
        graph, gpu.captured = Graph(gpu.captured), None
        return graph


class Graph:
    def __init__(self, calls) -> None:
        self.calls = calls

    def launch(self, stream: Stream) -> None:
        for call in self.calls:
            call()


class Event:
    done = False  # the spin is never over before all is queued

    def record(self, stream: Stream) -> None:
        self.at_us = gpu.now_us

    def synchronize(self) -> None:
        gpu.alive()


class Device:
    pci_bus_id = "0000:00:00.0"

    def synchronize(self) -> None:
        gpu.alive()
        gpu.in_a_row = 0


class RawModule:
    def __init__(self, path: str) -> None:
        self.script = json.loads(Path(path).read_bytes())
        gpu.act(self.script.get("load", ""))

    def get_function(self, symbol: str):
        assert symbol == "made_up"
        return self.launch

    def launch(self, grid, block, arguments) -> None:
        """The kernel: right, unless the script says otherwise. Of several in a row the last one does the work."""
        if gpu.captured is not None:
            gpu.captured.append(lambda: self.launch(grid, block, arguments))
            return
        gpu.alive()
        what = self.script.get(gpu.verb, "")
        gpu.act(what)
        gpu.now_us += self.script["us"] * (1 + self.script["noise"] * gpu.rng.random())
        gpu.now_us += gpu.is_cold * self.script.get("cold_us", 0.0)
        gpu.is_cold = False
        if gpu.verb in ("probe", "sample"):
            change_in_place(arguments)
        if gpu.verb not in ("check", "rows"):
            return
        step = gpu.launch.steps[gpu.step]
        assert grid == step.grid
        gpu.step = (gpu.step + 1) % len(gpu.launch.steps)
        gpu.named |= named_arguments(step, arguments)
        if gpu.step == 0:
            gpu.in_a_row += 1
            compute(gpu.named, what)


def change_in_place(arguments) -> None:
    """What a timed kernel does to arrays that it changes; each launch must find them as they were."""
    for spec in gpu.kernel.arrays(gpu.problem):
        if spec.role == "inout":
            array = named_arguments(gpu.launch.steps[0], arguments)[spec.name]
            if not (gpu.pristine.setdefault(spec.name, array.copy()) == array).all():
                raise CUDARuntimeError(f"{spec.name} was not restored")
            array += 1


def named_arguments(step, arguments) -> dict:
    """Arrays, lists of arrays and numbers by name, read from a function's arguments as a kernel reads them."""
    found, rest = {}, list(arguments)
    for kind, name, value in step.arguments:
        first = rest.pop(0)
        if kind == "array":
            index = numpy.int64 if value else numpy.int32
            layout = [rest.pop(0) for _ in range(2 * first.ndim)]
            assert {type(number) for number in layout} == {index}
            assert tuple(layout[: first.ndim]) == first.shape
            found[name] = first
        elif kind == "list":
            spec = gpu.kernel.array_spec(name, gpu.problem)
            assert first.dtype == numpy.int64
            assert first.shape == (rest.pop(0), 1 + 2 * len(spec.shape))
            found[name] = [array_at(row, spec) for row in first.tolist()]
        else:
            assert first.dtype.name == name
            assert first == first.dtype.type(value)
    assert not rest
    return found


def array_at(words, spec):
    """The array whose address, sizes and strides are given."""
    from tiledsched.core.arrays import storage_type

    ndim = (len(words) - 1) // 2
    kind = numpy.dtype(storage_type(spec.dtype))
    count = 1 + sum((size - 1) * stride for size, stride in zip(words[1 : ndim + 1], words[ndim + 1 :], strict=True))
    memory = (ctypes.c_char * (count * kind.itemsize)).from_address(words[0])
    return numpy.ndarray(words[1 : ndim + 1], kind, memory, strides=[one * kind.itemsize for one in words[ndim + 1 :]])


def compute(named, what: str) -> None:
    """What the reference makes of the inputs, in float32, in the outputs; or something wrong."""
    from tiledsched.core.arrays import is_float, to_storage
    from tiledsched.core.cases import expected_outputs, input_specs, output_specs

    inputs = {spec.name: named[spec.name] for spec in input_specs(gpu.kernel, gpu.problem)}
    right = expected_outputs(gpu.kernel, numpy, gpu.problem, inputs, "float32")
    for spec, expected in zip(output_specs(gpu.kernel, gpu.problem), right, strict=True):
        values, out = (value[-1] if spec.listed else value for value in (expected, named[spec.name]))
        if spec.listed:
            for array, value in zip(named[spec.name][:-1], expected[:-1], strict=True):
                array[...] = to_storage(numpy, value, spec.dtype)
        values = numpy.array(values)
        last = (0, -1, -1)[-(values.ndim - 1) :] if values.ndim > 1 else (-1,)
        mine = what.removesuffix(f"-{spec.name.lower()}")
        if spec.absolute == (mine == what):  # an output that is judged by its absolute error has mistakes of its own
            mine = ""
        if mine == "wrong":
            values[last] += 1
        if mine == "wrong-in-a-row":  # a race: right where launches are apart
            values[last] += 1 if gpu.in_a_row > 1 else 0
        if mine == "wrong-head":
            values[0, -1] += 1
        if mine == "narrow":  # a kernel whose sums end early: right on the random inputs, not where values are large
            values[abs(values) > 1000.0] = numpy.inf
        stored = to_storage(numpy, values, spec.dtype)
        if mine == "unwritten":
            out[..., 1:] = stored[..., 1:]
        else:
            out[...] = stored
        if mine == "unrepeatable" and is_float(spec.dtype):
            out.view(numpy.uint16)[(0,) * out.ndim] ^= 1 if gpu.rng.random() < 0.5 else 0
            gpu.rng.random()
        if mine == "other-bits" and is_float(spec.dtype):  # right, and other than the rest are
            out.view(numpy.uint16)[(0,) * out.ndim] ^= 1
    if what == "unzeroed":
        for spec in gpu.launch.scratch:
            if spec.zeroed:
                named[spec.name][...] = 1


class RawKernel:
    def __init__(self, source: str, name: str) -> None: ...

    def __call__(self, grid, block, arguments) -> None:
        gpu.now_us += 300.0


class Flush(numpy.ndarray):
    """What is filled to empty the cache."""

    def fill(self, value: int) -> None:
        gpu.is_cold = True


class MemoryPool:
    """Counts what `cupy.zeros` gives: all that was in use at once since it was last emptied."""

    limit = live = held = 0

    def zeros(self, shape, dtype=float):
        array = numpy.zeros(shape, dtype)
        MemoryPool.live += array.nbytes
        if self.limit and self.live > self.limit:
            MemoryPool.live -= array.nbytes
            raise OutOfMemoryError(f"Out of memory allocating {array.nbytes:,} bytes (limit {self.limit:,})")
        weakref.finalize(array, self.free, array.nbytes)
        MemoryPool.held = max(self.held, self.live)
        return array

    def free(self, size: int) -> None:
        MemoryPool.live -= size

    def free_all_blocks(self) -> None:
        MemoryPool.held = self.live

    def set_limit(self, size: int) -> None:
        MemoryPool.limit = size

    def total_bytes(self) -> int:
        return self.held


class Memory:
    """Memory outside of the pool."""

    taken = 0

    def __init__(self, size: int) -> None:
        self.size = size
        Memory.taken += size

    def __del__(self) -> None:
        Memory.taken -= self.size


def fake_cupy(mode: str) -> types.ModuleType:
    """A module that passes for CuPy where the worker uses it; arrays are NumPy's."""

    def count_devices() -> int:
        if mode == "no-gpu":
            raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
        return 0

    cupy = types.ModuleType("cupy")
    cupy.__getattr__ = lambda name: getattr(numpy, name)  # type: ignore[method-assign]
    cupy.empty = lambda shape, dtype: numpy.empty(min(shape, 64) if isinstance(shape, int) else shape, dtype).view(
        Flush
    )
    cupy.zeros = MemoryPool().zeros
    cupy.RawModule, cupy.RawKernel = RawModule, RawKernel
    cupy.get_default_memory_pool = MemoryPool
    properties = {
        "name": b"Made-up GPU",
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 8,
        "totalGlobalMem": 1 << 30,
        "l2CacheSize": 1 << 20,
    }
    runtime = types.SimpleNamespace(
        getDevice=count_devices, getDeviceProperties=lambda device: properties, driverGetVersion=lambda: 13000
    )
    runtime.memGetInfo = lambda: ((1 << 30) - Memory.taken - MemoryPool.held, 1 << 30)
    cupy.cuda = types.SimpleNamespace(
        Stream=Stream,
        Event=Event,
        Device=Device,
        Memory=Memory,
        runtime=runtime,
        get_elapsed_time=lambda before, after: (after.at_us - before.at_us) / 1e3,
    )
    return cupy


def others_log(log, beside):
    """A log that sees another process, and whose number of others is how many milliseconds it looked back."""

    class OthersLog(log):
        def summary(self):
            return dataclasses.replace(
                super().summary(), others=(round((time.time() - self._since_s) * 1e3),), concurrent_pids=beside
            )

    return OthersLog


def made_up_rivals(seen):
    """Answers of a process that times rivals: one is faster; of an odd problem all fail. Its version tells what it was asked."""
    from tiledsched.core.errors import Failure, FailureKind
    from tiledsched.measure.runner import RivalTime

    def race(state, *arguments):
        if state.arrays.problem.seq_q % 2:
            return Failure(kind=FailureKind.LAUNCH_FAILURE, message="no such rival")
        return [RivalTime(name="one", ratio=0.9)]

    def versions(state, locator, problem):
        if problem.seq_q % 2:
            raise ModuleNotFoundError("No module named 'one'")
        return {"one": " ".join(seen)}

    return {"rivals": race, "versions": versions}


def main(mode: str, descriptor: str, folder: str, parent: str) -> None:
    """Start as `mode` says; `ready:PATH` starts once, and finds no GPU as soon as PATH is there."""
    mode, _, marker = mode.partition(":")
    if marker:
        mode = "no-gpu" if Path(marker).exists() else "ready"
        Path(marker).touch()
    if mode == "silent":
        time.sleep(600)
    if mode == "crash":
        raise ModuleNotFoundError("No module named 'cupy'")
    sys.modules["cupy"] = fake_cupy(mode)
    from tiledsched.core.registry import load_kernel
    from tiledsched.measure import timing, worker
    from tiledsched.measure.arrays import Launch

    def watched(verb, act):
        def acting(state, *arguments):
            gpu.verb = verb
            seen.append(verb)
            if verb == "begin":
                gpu.kernel, gpu.problem = load_kernel(arguments[0]), arguments[1]
                if gpu.problem.values.get("head_dim") == 250:  # the one this GPU cannot hold
                    gpu.act("memory")
                gpu.pristine = {}
            if verb == "rows":
                gpu.kernel, gpu.problem = load_kernel(arguments[0]), arguments[1]
            if verb in ("probe", "check", "sample", "rows"):
                gpu.launch, gpu.step = next(each for each in arguments if isinstance(each, Launch)), 0
            return act(state, *arguments)

        return acting

    timing.GAPS_S, timing.TRIAL_S = (0.0,), 0.0
    timing.SUSTAINED_WARMUP_S, timing.SUSTAINED_REWARM_S = 0.01, 0.0
    worker.is_whole = lambda cubin: True  # its cubins are JSON
    worker.symbol_of = lambda cubin: "made_up"
    if mode == "named":  # with a UUID, by which it is locked
        worker.current_gpu = lambda: ("GPU-made-up", "Made-up GPU")
    requests, seen = {**worker.REQUESTS}, []
    if mode == "rivals":
        requests |= made_up_rivals(seen)
    if mode in ("crowded", "doubtful"):
        worker.ConditionsLog = others_log(worker.ConditionsLog, None if mode == "doubtful" else (4711,))
    worker.main(descriptor, folder, parent, {verb: watched(verb, act) for verb, act in requests.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
