"""The process that owns the GPU. It loads cubins with CuPy and holds neither torch nor a compiler.

It answers one request at a time over a pipe and keeps no state that cannot be made again: whoever started it may kill
it at any moment and start another. Run as ``python -m tiledsched.measure.worker DESCRIPTOR FOLDER PARENT``, with the
inherited file descriptor of the pipe's end, a folder to write to and the process to end with; `measure.gpu` does.
"""

from __future__ import annotations

import dataclasses
import math
import os
import random
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import cupy
import numpy

from tiledsched.build.cubin import is_whole
from tiledsched.errors import Failure, FailureKind
from tiledsched.kernel import ArraySpec
from tiledsched.kernels.attention.inputs import KINDS, adversarial_heads, kinds_of_heads
from tiledsched.kernels.attention.reference import attention_and_lse, default_scale
from tiledsched.measure import timing
from tiledsched.measure.accuracy import lse_errors, summary, tile_errors, wrong_result
from tiledsched.measure.launch import Launch
from tiledsched.measure.nvml import ConditionsLog, current_device
from tiledsched.measure.runner import Batch, Checked, GapTrial
from tiledsched.measure.timing import calibrate, sample_rounds
from tiledsched.problem import Problem

FLUSH_TIMES_L2 = 2
SPIN_US = 300.0
ATTEMPTS = 4
"""At a sample that the host is not to slow: it is busy with other things now and then."""
ROWS, MOST_IN_A_ROW, ROW_US = 3, 10, 5000.0
"""Launches in quick succession that a check makes: how often, how many, and about how long they may take together."""
REHEARSED_ROWS = 64
"""Rows of a tile in the rehearsal; any number does."""
FAST_FLOAT64 = ("sm_80", "sm_90", "sm_100")
MARKS = {
    FailureKind.OUT_OF_MEMORY: ("out of memory",),
    FailureKind.HANG: ("launch timed out",),
    FailureKind.DRIVER_MISMATCH: ("unsupported toolchain", "no kernel image", "driver version is insufficient"),
    FailureKind.GPU_LOST: ("uncorrectable", "devices are busy or unavailable", "no cuda-capable device", "gpu is lost"),
    FailureKind.ILLEGAL_ADDRESS: ("illegal memory access", "misaligned address", "illegal instruction",
                                  "unspecified launch failure", "invalid program counter", "device-side assert"),
}  # fmt: skip
"""What the driver's message holds, in lower case, for each kind of failure it can tell."""

SPIN_SOURCE = r"""
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < nanoseconds);
}
"""


@dataclass
class State:
    """What the worker holds between requests."""

    stream: Any = None
    folder: str = ""
    kernels: dict[str, Any] = field(default_factory=dict)
    problem: Problem | None = None
    scalars: tuple[float, ...] = ()
    arrays: list[Any] = field(default_factory=list)
    """q, k, v and out."""
    adversarial_arrays: list[Any] = field(default_factory=list)
    """The same output, other inputs."""
    reference: Any = None
    """The right output and log-sum-exp."""
    adversarial_reference: Any = None
    """`[kinds, seq_q, value_columns]` and `[kinds, seq_q]`: heads whose inputs are of one kind share them."""
    extras: dict[tuple[ArraySpec, ...], list[Any]] = field(default_factory=dict)
    """Arrays beside those, by what launches ask for. Launches follow one another, so that equal ones share them."""
    flush: Any = None
    spin: Any = None
    device: Any = None
    last_sustained_s: float = -math.inf
    """`time.perf_counter()` at the end of the last sustained run."""


def start(folder: str) -> State:
    """Open the GPU; cubins to load are written to `folder`."""
    state = State(stream=cupy.cuda.Stream(non_blocking=True), folder=folder)
    state.device = current_device()
    state.flush = cupy.empty(max(FLUSH_TIMES_L2 * state.device.l2_bytes, 1 << 26), dtype=numpy.uint8)
    state.spin = cupy.RawKernel(SPIN_SOURCE, "spin")
    return state


def begin(state: State, problem: Problem, scalars: tuple[float, ...], seed: int) -> None:
    """Inputs drawn from a normal distribution and adversarial ones, their references, the kernel's argument lists."""
    state.arrays, state.adversarial_arrays, state.extras = [], [], {}  # frees what the last problem took
    state.reference = state.adversarial_reference = None
    rng = cupy.random.default_rng(seed)
    query = (problem.batch, problem.heads, problem.seq_q, problem.head_dim)
    key = (problem.batch, problem.kv_heads, problem.seq_k, problem.head_dim)
    drawn = (
        rng.standard_normal(shape, dtype=numpy.float32) for shape in (query, key, (*key[:3], problem.value_columns))
    )
    values = [_to_storage(array, problem.dtype) for array in drawn]
    out = cupy.empty((*query[:3], problem.value_columns), dtype=values[0].dtype)
    state.reference = _reference(state, problem, values)
    state.problem, state.scalars, state.arrays = problem, scalars, [*values, out]
    distinct = [_to_storage(array, problem.dtype) for array in adversarial_heads(cupy, rng, problem)]
    references = _reference(state, problem, [array[None] for array in distinct])
    state.adversarial_reference = tuple(reference[0] for reference in references)
    heads = cupy.asarray(kinds_of_heads(problem))
    kinds = (heads, heads[:, :: problem.group], heads[:, :: problem.group])
    inputs = [cupy.ascontiguousarray(array[kind]) for array, kind in zip(distinct, kinds, strict=True)]
    state.adversarial_arrays = [*inputs, out]
    _rehearse(state, problem, out)
    cupy.cuda.Device().synchronize()
    cupy.get_default_memory_pool().free_all_blocks()


def _rehearse(state: State, problem: Problem, out: Any) -> None:
    """Do once what every check and sample does: CuPy compiles a kernel at its first use, which takes seconds on a machine
    that never did, and candidates are still being built now.
    """  # fmt: skip
    out.view(numpy.uint16)[...] = 0x7FFF
    values = _to_float32(out, problem.dtype)
    tile_errors(cupy, values, state.reference[0], tile_m=REHEARSED_ROWS)
    tile_errors(cupy, values, state.adversarial_reference[0], tile_m=REHEARSED_ROWS,
                heads=kinds_of_heads(problem))  # fmt: skip
    _same_bits(out, out)
    with state.stream:
        state.flush.fill(0)
        state.spin((1,), (1,), (numpy.uint64(1),))


def _reference(state: State, problem: Problem, stored: list[Any]) -> tuple[Any, Any]:
    precision = "float64" if state.device.arch in FAST_FLOAT64 else "float32"
    q, k, v = (_to_float32(array, problem.dtype) for array in stored)
    return attention_and_lse(cupy, q, k, v, causal=problem.causal, scale=default_scale(problem), dtype=precision,
                             alignment=problem.alignment)  # fmt: skip


def _extra_arrays(state: State, extras: tuple[ArraySpec, ...]) -> list[Any]:
    """The arrays of a launch beside q, k, v and out. What must be zero is so from the start; kernels leave it so."""
    if extras not in state.extras:
        with state.stream:
            state.extras[extras] = [cupy.zeros(extra.shape, dtype=extra.dtype) for extra in extras]
    return state.extras[extras]


def _arguments(state: State, launch: Launch, arrays: list[Any]) -> tuple[Any, ...]:
    """As cuTile's calling convention wants them: each array's address, shape and strides, then the scalars."""
    assert state.problem is not None
    arguments: list[Any] = []
    for place, array in enumerate([*arrays, *_extra_arrays(state, launch.extras)]):
        index = numpy.int64 if state.problem.wide and place < len(arrays) else numpy.int32
        arguments.append(array)
        arguments.extend(index(size) for size in array.shape)
        arguments.extend(index(stride // array.itemsize) for stride in array.strides)
    return (*arguments, *(numpy.float32(scalar) for scalar in state.scalars))


def load(state: State, fingerprint: str, symbol: str, cubin: bytes) -> None:
    """Load a cubin's kernel."""
    if not is_whole(cubin):
        raise ValueError("the cubin is cut short or no cubin at all")
    path = os.path.join(state.folder, f"{fingerprint}.cubin")
    with open(path, "wb") as file:
        file.write(cubin)
    state.kernels[fingerprint] = cupy.RawModule(path=path).get_function(symbol)


def look(state: State, launch: Launch) -> float:
    """Microseconds of one launch, behind a spin kernel, so that the host's part of a first launch is not in it."""
    with state.stream:
        state.spin((1,), (1,), (numpy.uint64(SPIN_US * 1e3),))
    watch = Stopwatch(state, [launch])
    return watch.read(watch.queue(0, paced=False))


def check(state: State, launch: Launch) -> Checked | Failure:
    """Over poisoned outputs: two launches on the random inputs, right everywhere, and whether they give the same bits;
    the same after launches in a row; then one on the adversarial inputs.
    """  # fmt: skip
    assert state.problem is not None
    first, _ = _poisoned_launch(state, launch, state.arrays)
    first = first.copy()
    out, elapsed_us = _poisoned_launch(state, launch, state.arrays)
    limit = launch.tolerance
    heads = kinds_of_heads(state.problem)
    values = _to_float32(out, state.problem.dtype)
    relative, largest = tile_errors(cupy, values, state.reference[0], tile_m=launch.tile_m)
    names = numpy.full(heads.shape, "random")
    failure = wrong_result(relative, limit.largest_error, names) or _wrong_lse(state, launch, names, None)
    if failure is not None:
        return failure
    repeatable = _same_bits(first, out)
    # A race may show only once the loads come as fast as they can, out of the L2 cache.
    in_a_row = max(1, min(MOST_IN_A_ROW, int(ROW_US / elapsed_us)))
    for _ in range(ROWS):
        out, _ = _poisoned_launch(state, launch, state.arrays, in_a_row)
        if not _same_bits(first, out):
            hot, _ = tile_errors(cupy, _to_float32(out, state.problem.dtype), state.reference[0], tile_m=launch.tile_m)
            failure = wrong_result(hot, limit.largest_error, names, "after launches in a row, relative error")
            if failure is not None:
                return failure
            repeatable = False
    accuracy = summary(relative, largest, repeatable=repeatable)
    out, _ = _poisoned_launch(state, launch, state.adversarial_arrays)
    kinds = numpy.array(KINDS)[heads]
    values = _to_float32(out, state.problem.dtype)
    relative, _ = tile_errors(cupy, values, state.adversarial_reference[0], tile_m=launch.tile_m, heads=heads)
    relative[~numpy.isin(kinds, limit.kinds)] = 0.0
    failure = wrong_result(relative, limit.largest_error, kinds) or _wrong_lse(state, launch, kinds, heads)
    if failure is not None:
        return failure
    accuracy = dataclasses.replace(accuracy, adversarial_tile_error=float(relative.max()))
    return Checked(accuracy=accuracy, first_look_us=elapsed_us)


def _same_bits(one: Any, other: Any) -> bool:
    return bool((one.view(numpy.uint16) == other.view(numpy.uint16)).all())


def _wrong_lse(state: State, launch: Launch, kinds: numpy.ndarray, heads: numpy.ndarray | None) -> Failure | None:
    """What is wrong with the log-sum-exp that the last launch left, where the problem asks for it."""
    assert state.problem is not None
    if not state.problem.lse:
        return None
    lse = _extra_arrays(state, launch.extras)[[extra.name for extra in launch.extras].index("lse")][..., 0]
    reference = (state.reference if heads is None else state.adversarial_reference)[1]
    errors = lse_errors(cupy, lse, reference, tile_m=launch.tile_m, heads=heads)
    errors[~numpy.isin(kinds, (*launch.tolerance.kinds, "random"))] = 0.0
    return wrong_result(errors, launch.tolerance.largest_lse_error, kinds, "error of the log-sum-exp")


def _poisoned_launch(state: State, launch: Launch, arrays: list[Any], in_a_row: int = 1) -> tuple[Any, float]:
    """The output of the last of so many launches, NaN where nothing was written, and their microseconds."""
    out = arrays[-1]
    out.view(numpy.uint16)[...] = 0x7FFF  # NaN in float16 and bfloat16 alike
    for extra, array in zip(launch.extras, _extra_arrays(state, launch.extras), strict=True):
        if not extra.zeroed:
            array.fill(numpy.nan)
    arguments = _arguments(state, launch, arrays)
    with state.stream:
        before, after = cupy.cuda.Event(), cupy.cuda.Event()
        cupy.cuda.Device().synchronize()
        before.record(state.stream)
        for _ in range(in_a_row):
            state.kernels[launch.fingerprint](launch.grid, (1, 1, 1), arguments)
        after.record(state.stream)
    after.synchronize()
    return out, float(cupy.cuda.get_elapsed_time(before, after) * 1e3)


class Stopwatch:
    """Launches loaded kernels between CuPy events; see :class:`tiledsched.measure.timing.Stopwatch`.

    With `graph_launches`, a sample is so many launches replayed as one CUDA graph, divided by their number: back to back,
    the host cannot keep up with short kernels.
    """

    def __init__(self, state: State, launches: list[Launch], graph_launches: int = 0) -> None:
        self._state, self._launches, self._count = state, launches, max(1, graph_launches)
        self._arguments = [_arguments(state, launch, state.arrays) for launch in launches]
        self._graphs = [self._capture(index) for index in range(len(launches))] if graph_launches else []

    def _capture(self, index: int) -> Any:
        state, launch = self._state, self._launches[index]
        with state.stream:
            state.stream.begin_capture()
            for _ in range(self._count):
                state.kernels[launch.fingerprint](launch.grid, (1, 1, 1), self._arguments[index])
            return state.stream.end_capture()

    def queue(self, index: int, *, paced: bool) -> Any:
        """Events around one launch, or one graph. Where the spin was over before all was queued, they timed the host: again."""
        for attempt in range(ATTEMPTS):
            before, after = self._queue_once(index, paced)
            if not paced or attempt == ATTEMPTS - 1 or not before.done:
                break
            after.synchronize()
        return before, after

    def _queue_once(self, index: int, paced: bool) -> Any:
        state, launch = self._state, self._launches[index]
        before, after = cupy.cuda.Event(), cupy.cuda.Event()
        with state.stream:
            if paced:
                state.flush.fill(0)
                state.spin((1,), (1,), (numpy.uint64(SPIN_US * 1e3),))
            before.record(state.stream)
            if self._graphs:
                self._graphs[index].launch(state.stream)
            else:
                state.kernels[launch.fingerprint](launch.grid, (1, 1, 1), self._arguments[index])
            after.record(state.stream)
        return before, after

    def read(self, queued: Any) -> float:
        """Microseconds between them, per launch."""
        before, after = queued
        after.synchronize()
        return float(cupy.cuda.get_elapsed_time(before, after) * 1e3) / self._count


def sample(state: State, launches: list[Launch], rounds: int, regime: str, seed: int, gap_ms: float,
           graph_launches: int) -> list[Batch]:  # fmt: skip
    """Interleaved samples of every launch."""
    log = ConditionsLog()
    still_warm = time.perf_counter() - state.last_sustained_s < timing.STILL_WARM_S
    samples = sample_rounds(Stopwatch(state, launches, graph_launches), len(launches), rounds=rounds, regime=regime,
                            rng=random.Random(seed), log=log, gap_s=gap_ms / 1e3,
                            warmup_s=timing.SUSTAINED_REWARM_S if still_warm else timing.SUSTAINED_WARMUP_S)  # fmt: skip
    if regime == "sustained":
        state.last_sustained_s = time.perf_counter()
    conditions = dataclasses.replace(log.summary(), gap_ms=gap_ms if regime == "burst" else 0.0,
                                     graph_launches=graph_launches)  # fmt: skip
    return [Batch(samples_us=tuple(values), conditions=conditions) for values in samples]


def find_gap(state: State, launch: Launch) -> list[GapTrial]:
    """What pacing `launch` at several distances comes to."""
    return calibrate(Stopwatch(state, [launch]), log=ConditionsLog)


def _to_storage(values: Any, dtype: str) -> Any:
    """float32 -> float16, or the bit pattern of bfloat16 (round to nearest even) as uint16: CuPy has no bfloat16."""
    if dtype == "float16":
        return values.astype(numpy.float16)
    bits = values.view(numpy.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def _to_float32(stored: Any, dtype: str) -> Any:
    if dtype == "float16":
        return stored.astype(numpy.float32)
    return (stored.astype(numpy.uint32) << 16).view(numpy.float32)


def answer(state: State, request: tuple[Any, ...]) -> Any:
    """Carry out one request; what goes wrong with a candidate comes back as a Failure."""
    verb, arguments = request[0], request[1:]
    if verb == "begin":
        return begin(state, *arguments)
    if verb == "load":
        try:
            return load(state, *arguments)
        except Exception as error:
            return _failure(error, FailureKind.ARTIFACT_CORRUPT)
    if verb == "look":
        return look(state, *arguments)
    if verb == "check":
        return check(state, *arguments)
    if verb == "calibrate":
        return find_gap(state, *arguments)
    if verb == "sample":
        return sample(state, *arguments)
    raise ValueError(f"unknown request {verb!r}")


def _failure(error: Exception, kind: FailureKind) -> Failure:
    """What the driver's words in `error` stand for; `kind` where they are of no known kind."""
    text = f"{type(error).__name__}: {error}"
    words = text.lower()
    kind = next((known for known, marks in MARKS.items() if any(mark in words for mark in marks)), kind)
    return Failure(kind=kind, message=text.splitlines()[0][:500])


def _context_lost() -> bool:
    """Whether the CUDA context no longer works: after an illegal access, say, every later call fails like the first."""
    try:
        cupy.cuda.Device().synchronize()
    except Exception:
        return True
    return False


def _end_with_parent(folder: str, parent: int) -> None:
    """End this process when the one that started it is gone, even if a kernel hangs just then."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(descriptor: str, folder: str, parent: str) -> None:
    """Serve requests until the other side closes, or a failure makes the CUDA context useless.

    The first message is ("ready", Device) or ("fatal", why). Each request is answered by ("done", value), by ("failed",
    Failure), or by ("lost", Failure), after which this process ends: a new one gets a new context.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when we end
    _end_with_parent(folder, int(parent))
    with Connection(int(descriptor)) as connection:
        try:
            _serve(connection, folder)
        except (EOFError, ConnectionError):  # nobody is left to ask, or to be told
            shutil.rmtree(folder, ignore_errors=True)


def _serve(connection: Connection, folder: str) -> None:
    try:
        state = start(folder)
    except Exception as error:
        connection.send(("fatal", f"{type(error).__name__}: {error}"))
        return
    connection.send(("ready", state.device))
    while True:
        request = connection.recv()
        try:
            value = answer(state, request)
        except Exception as error:
            value = _failure(error, FailureKind.LAUNCH_FAILURE)
        if not isinstance(value, Failure):
            connection.send(("done", value))
        elif not _context_lost():
            connection.send(("failed", value))
        else:
            connection.send(("lost", value))
            os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
