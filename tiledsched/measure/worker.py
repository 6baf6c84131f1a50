"""The process that owns the GPU. It loads cubins with CuPy and holds neither torch nor a compiler.

Of a kernel it knows the declaration: inputs, reference and what is changed in place. It answers one request at a time over
a pipe and keeps no state that cannot be made again: whoever started it may kill it at any moment and start another. Its
arguments are DESCRIPTOR, FOLDER and PARENT: the inherited file descriptor of the pipe's end, a folder to write to and the
process to end with; `measure.gpu` starts it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import cupy
import numpy

from tiledsched.build.cubin import is_whole, parts, symbol_of
from tiledsched.build.host_code import check_host
from tiledsched.checking.errors import OutputErrors, case_errors, summary, wrong_result
from tiledsched.checking.inputs import make_cases
from tiledsched.core.arrays import Tolerance
from tiledsched.core.cases import Case, input_specs, output_specs, own_inputs, random_inputs
from tiledsched.core.errors import Failure, FailureKind, MeasureError, first_line
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.processes import end_with_parent
from tiledsched.core.registry import load_kernel
from tiledsched.measure import timing
from tiledsched.measure.arrays import Launch, Packed, ProblemArrays, first_rows, scratch_bytes
from tiledsched.measure.dependent import launch_dependent
from tiledsched.measure.nvml import ConditionsLog, current_device, current_gpu, current_processes, own_processes
from tiledsched.measure.runner import GIB, Batch, Checked, Device, GapTrial
from tiledsched.measure.timing import calibrate, flush_bytes, sample_rounds

RESERVE_BYTES = 1 << 28
"""Device memory that stays free beside what is taken and what a search may take: programs are loaded into it."""
SPIN_US = 300.0
ATTEMPTS = 4
"""At a sample that the host is not to slow: it is busy with other things now and then."""
ROWS, MOST_IN_A_ROW, ROW_US = 3, 10, 5000.0
"""Launches in quick succession that a check makes: how often, how many, and about how long they may take together."""
REHEARSED_TILE = (64, 256)
"""In the rehearsal; any does."""
IDLE_S = 1.0
"""Requests less far apart belong together: the samples of a race, and the looks and checks that led to it."""
FAST_FLOAT64 = ("sm_80", "sm_90", "sm_100")
MARKS = {
    FailureKind.OUT_OF_MEMORY: ("out of memory",),
    FailureKind.HANG: ("launch timed out",),
    FailureKind.DRIVER_MISMATCH: ("unsupported toolchain", "no kernel image", "driver version is insufficient"),
    FailureKind.GPU_LOST: ("uncorrectable", "devices are busy or unavailable", "no cuda-capable device", "gpu is lost"),
    FailureKind.ILLEGAL_ADDRESS: (
        "illegal memory access",
        "misaligned address",
        "illegal instruction",
        "unspecified launch failure",
        "invalid program counter",
        "device-side assert",
    ),
}
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

    folder: str
    """Where cubins to load are written to."""
    stream: Any = None
    functions: dict[str, list[Any]] = field(default_factory=dict)
    """Fingerprint -> the loaded functions of the artifact, in the order of its launches."""
    arrays: ProblemArrays | None = None
    """Inputs, outputs and references of the current problem."""
    inputs: str = ""
    """Digest of the inputs of all its cases."""
    taken: Any = None
    """Memory that a served model would hold; None where nothing is measured beside it."""
    memory_cap_bytes: int = 0
    """What arrays of this process may take; 0 for no limit."""
    memory_peak_bytes: int = 0
    """The most that they have taken for the current problem."""
    flush: Any = None
    spin: Any = None
    device: Any = None
    last_sustained_s: float = -math.inf
    """`time.perf_counter()` at the end of the last sustained run."""
    ours: frozenset[int] = frozenset()
    """What NVML calls this process and its parent."""
    since_s: float = 0.0
    """`time.time()` of the last report on who else runs on the GPU."""
    answered_s: float = 0.0
    """`time.time()` of the last answer."""

    def run(self, launch: Launch, arguments: Packed) -> None:
        """Queue every step of a launch."""
        for function, step, packed in zip(self.functions[launch.fingerprint], launch.steps, arguments, strict=True):
            if step.dependent:
                stream = cupy.cuda.get_current_stream()  # which is torch's where rivals are timed
                launch_dependent(function.kernel.ptr, step.grid, packed, stream.ptr)
            else:
                function(step.grid, (1, 1, 1), packed)

    def note_memory(self) -> int:
        """The most that arrays of this process took until now. CuPy's pool gives nothing back before it reaches its limit."""
        self.memory_peak_bytes = max(self.memory_peak_bytes, int(cupy.get_default_memory_pool().total_bytes()))
        return self.memory_peak_bytes


def start(state: State) -> tuple[Device, tuple[str, str]]:
    """Open the GPU: its description, and its UUID and name."""
    before = current_processes()
    state.stream = cupy.cuda.Stream(non_blocking=True)
    state.ours = own_processes(before)
    state.device = current_device()
    state.flush = cupy.empty(flush_bytes(state.device.l2_bytes), dtype=numpy.uint8)
    state.spin = cupy.RawKernel(SPIN_SOURCE, "spin")
    return state.device, current_gpu()


def begin(state: State, locator: str, problem: Problem, seed: int, beside_gib: float | None = None) -> int | None:
    """Random inputs and adversarial ones, what is expected of them, and the outputs of a declared kernel.

    With `beside_gib`, so many GiB are taken first, and all else must fit into the rest: the bytes of workspaces that a candidate
    may take are returned.
    """
    state.arrays = None  # frees what the last problem took
    pool = cupy.get_default_memory_pool()
    _limit_memory(state, pool, beside_gib)
    kernel = _declared(locator)
    precision = "float64" if state.device.arch in FAST_FLOAT64 else "float32"
    cases = make_cases(kernel, cupy, cupy.random.default_rng(seed), problem, precision)
    state.arrays = ProblemArrays(kernel, cupy, problem, list(cases))
    state.inputs = _written([state.arrays.digest(case.inputs) for case in state.arrays.cases])
    _empty(state, pool)
    _rehearse(state, state.arrays)
    rehearsed = _empty(state, pool)
    return None if beside_gib is None else max(0, state.memory_cap_bytes - rehearsed)


def _limit_memory(state: State, pool: Any, beside_gib: float | None) -> None:
    """Take memory as a served model would, and limit what CuPy takes to what is left.

    Raises:
        MeasureError: not so much is free.
    """
    state.taken, state.memory_cap_bytes = None, 0
    pool.set_limit(size=0)  # none
    _empty(state, pool)
    state.memory_peak_bytes = 0
    if beside_gib is None:
        return
    free, total = cupy.cuda.runtime.memGetInfo()
    left = free + pool.total_bytes() - beside_gib * GIB - RESERVE_BYTES
    if left <= pool.total_bytes():
        raise MeasureError(
            f"out of memory: {beside_gib:g} GiB cannot be taken beside it: the GPU has {total / GIB:.1f} GiB, of which "
            f"{free / GIB:.1f} are free"
        )
    state.taken = cupy.cuda.Memory(round(beside_gib * GIB)) if beside_gib else None
    state.memory_cap_bytes = round(left)
    pool.set_limit(size=state.memory_cap_bytes)


def _empty(state: State, pool: Any) -> int:
    """Give back what arrays no longer take; what was taken before."""
    cupy.cuda.Device().synchronize()
    state.note_memory()
    held = int(pool.total_bytes())
    pool.free_all_blocks()
    return held


def _declared(locator: str) -> KernelClass:
    """The kernel that is declared there."""
    # Tile code imports cuTile, which imports torch for its dtypes. Nothing here needs them, and torch takes seconds.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: not to be imported
    return load_kernel(locator)


def _rehearse(state: State, arrays: ProblemArrays) -> None:
    """Do once what every check and sample does: CuPy compiles a kernel at its first use, which takes seconds on a machine
    that never did, and candidates are still being built now.
    """
    arrays.poison(())
    for case in arrays.cases:
        case_errors(cupy, arrays.output_specs, arrays.outputs, case, Tolerance(relative=0.0), REHEARSED_TILE)
    arrays.same_outputs(arrays.copy_outputs())
    with state.stream:
        arrays.restore(arrays.cases[0])
        state.flush.fill(0)
        state.spin((1,), (1,), (numpy.uint64(1),))


def load(state: State, fingerprint: str, cubin: bytes) -> None:
    """Load the functions of an artifact."""
    found = parts(cubin)
    if not found or not all(is_whole(part) for part in found):
        raise ValueError("the cubin is cut short or no cubin at all")
    functions = []
    for place, part in enumerate(found):
        check_host(part)
        path = os.path.join(state.folder, f"{fingerprint}.{place}.cubin")
        with open(path, "wb") as file:
            file.write(part)
        functions.append(cupy.RawModule(path=path).get_function(symbol_of(part)))
    state.functions[fingerprint] = functions


def probe(state: State, launch: Launch) -> float:
    """Microseconds of one launch, behind a spin kernel, so that the host's part of a first launch is not in it."""
    watch = CupyStopwatch(state, [launch])
    with state.stream:
        state.spin((1,), (1,), (numpy.uint64(SPIN_US * 1e3),))
    return watch.read(watch.queue(0, paced=False))


def check(state: State, launch: Launch) -> Checked | Failure:
    """Over poisoned outputs: two launches on the random inputs, right everywhere, and whether they give the same bits;
    the same after launches in a row; then one on each case of adversarial inputs.
    """
    arrays = state.arrays
    assert arrays is not None
    random, *adversarial = arrays.cases
    arrays.clear(launch.scratch)
    _poisoned_launch(state, launch, random)
    left = arrays.not_zero(launch.scratch)
    if left:
        words = f"{left[0]} must be left zero for the next launch, and is not"
        return Failure(kind=FailureKind.WRONG_RESULT, message=words)
    first = arrays.copy_outputs()
    elapsed_us = _poisoned_launch(state, launch, random)
    errors, failure = _compare(arrays, random, launch)
    if failure is not None:
        return failure
    repeatable = arrays.same_outputs(first)
    # A race may show only once the loads come as fast as they can, out of the L2 cache.
    in_a_row = max(1, min(MOST_IN_A_ROW, int(ROW_US / elapsed_us)))
    for _ in range(ROWS):
        _poisoned_launch(state, launch, random, in_a_row)
        if not arrays.same_outputs(first):
            _, failure = _compare(arrays, random, launch, "after launches in a row, ")
            if failure is not None:
                return failure
            repeatable = False
    if launch.tolerance.repeatable and not repeatable:
        words = "the outputs must be the same in every launch, and have other bits from launch to launch"
        return Failure(kind=FailureKind.WRONG_RESULT, message=words)
    accuracy = summary(errors, repeatable=repeatable)
    outputs = [arrays.digest(first)]
    for case in adversarial:
        _poisoned_launch(state, launch, case)
        outputs.append(arrays.digest(arrays.outputs))
        errors, failure = _compare(arrays, case, launch)
        if failure is not None:
            return failure
        largest = max(accuracy.adversarial_tile_error, summary(errors, repeatable=repeatable).worst_tile_error)
        accuracy = dataclasses.replace(accuracy, adversarial_tile_error=largest)
    accuracy = dataclasses.replace(accuracy, outputs=f"{state.inputs}.{_written(outputs)}")
    return Checked(accuracy=accuracy, first_look_us=elapsed_us)


def rows(
    state: State, locator: str, problem: Problem, largest: Problem, sizes: Sequence[Problem], launch: Launch
) -> list[int]:
    """Digests of the first rows of the outputs, as many as each of `sizes` has. Inputs are drawn for `largest`, from one seed;
    `problem` has their first rows, so that each row of the inputs is the same in problems of all sizes.
    """
    kernel, rng = _declared(locator), cupy.random.default_rng(0)
    drawn, own = random_inputs(kernel, cupy, rng, largest), own_inputs(kernel, cupy, rng, problem)
    case = Case("rows", first_rows(cupy, drawn, input_specs(kernel, problem), own), ())
    kept, arrays = state.arrays, ProblemArrays(kernel, cupy, problem, [case])
    state.arrays = arrays
    try:
        arrays.clear(launch.scratch)
        _poisoned_launch(state, launch, arrays.cases[0])
        return [arrays.digest(first_rows(cupy, arrays.outputs, output_specs(kernel, each))) for each in sizes]
    finally:
        state.arrays = kept


def _written(digests: Sequence[int]) -> str:
    """One digest of several, in hexadecimal digits."""
    return hashlib.blake2b(repr(list(digests)).encode(), digest_size=8).hexdigest()


def _compare(
    arrays: ProblemArrays, case: Case, launch: Launch, when: str = ""
) -> tuple[list[OutputErrors], Failure | None]:
    """The errors of the outputs, and what is wrong with them; None where they are right. The message begins with `when`."""
    errors = case_errors(cupy, arrays.output_specs, arrays.outputs, case, launch.tolerance, launch.tile)
    return errors, wrong_result(errors, case, when)


def _poisoned_launch(state: State, launch: Launch, case: Case, in_a_row: int = 1) -> float:
    """Launch `in_a_row` times over outputs filled with NaN; microseconds of all launches together."""
    arrays = state.arrays
    assert arrays is not None
    arrays.poison(launch.scratch)
    arrays.restore(case)
    arguments = arrays.arguments(launch, case)
    with state.stream:
        before, after = cupy.cuda.Event(), cupy.cuda.Event()
        cupy.cuda.Device().synchronize()
        before.record(state.stream)
        for again in range(in_a_row):
            if again:
                arrays.restore(case)
            state.run(launch, arguments)
        after.record(state.stream)
    after.synchronize()
    return float(cupy.cuda.get_elapsed_time(before, after) * 1e3)


class CupyStopwatch:
    """Launches loaded kernels between CuPy events; see :class:`tiledsched.measure.timing.Stopwatch`.

    With `graph_launches`, a sample is that many launches replayed as one CUDA graph, divided by their number: back to back,
    the host cannot keep up with short kernels. With `warm`, a paced replay follows another one of the same graph, and no flush.
    """

    def __init__(
        self, state: State, launches: Sequence[Launch], graph_launches: int = 0, *, warm: bool = False
    ) -> None:
        assert state.arrays is not None
        self._state, self._launches, self._count, self._warm = state, launches, max(1, graph_launches), warm
        self._arrays, self._case = state.arrays, state.arrays.cases[0]
        for launch in sorted(launches, key=lambda launch: -scratch_bytes(launch.scratch)):  # they share the largest
            self._arrays.clear(launch.scratch)
        self._arguments = [self._arrays.arguments(launch, self._case) for launch in launches]
        cupy.cuda.Device().synchronize()
        self._graphs = [self._capture(index) for index in range(len(launches))] if graph_launches else []

    def _capture(self, index: int) -> Any:
        state, launch = self._state, self._launches[index]
        with state.stream:
            state.stream.begin_capture()
            for _ in range(self._count):
                state.run(launch, self._arguments[index])
            graph = state.stream.end_capture()
            self._arrays.restore(self._case)
            graph.launch(state.stream)  # what the first replay takes is no sample
            return graph

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
            self._arrays.restore(self._case)
            if paced:
                if self._warm:
                    self._graphs[index].launch(state.stream)
                    self._arrays.restore(self._case)
                else:
                    state.flush.fill(0)
                state.spin((1,), (1,), (numpy.uint64(SPIN_US * 1e3),))
            before.record(state.stream)
            if self._graphs:
                self._graphs[index].launch(state.stream)
            else:
                state.run(launch, self._arguments[index])
            after.record(state.stream)
        return before, after

    def read(self, queued: Any) -> float:
        """Microseconds between them, per launch."""
        before, after = queued
        after.synchronize()
        return float(cupy.cuda.get_elapsed_time(before, after) * 1e3) / self._count


def sample(
    state: State, rounds: int, regime: str, seed: int, gap_ms: float, graph_launches: int, *launches: Launch
) -> list[Batch]:
    """Interleaved samples of every launch."""
    log = ConditionsLog(state.ours, state.since_s)
    still_warm = time.perf_counter() - state.last_sustained_s < timing.STILL_WARM_S
    samples = sample_rounds(
        CupyStopwatch(state, launches, graph_launches, warm=regime == "graph"),
        len(launches),
        rounds=rounds,
        regime=regime,
        rng=random.Random(seed),
        log=log,
        gap_s=gap_ms / 1e3,
        warmup_s=timing.SUSTAINED_REWARM_S if still_warm else timing.SUSTAINED_WARMUP_S,
    )
    if regime == "sustained":
        state.last_sustained_s = time.perf_counter()
    conditions = dataclasses.replace(
        log.summary(),
        gap_ms=0.0 if regime == "sustained" else gap_ms,
        graph_launches=graph_launches,
        memory_cap_bytes=state.memory_cap_bytes,
        memory_peak_bytes=state.note_memory() if state.memory_cap_bytes else 0,
    )
    state.since_s = time.time()
    return [Batch(samples_us=tuple(values), conditions=conditions) for values in samples]


def find_gap(state: State, launch: Launch) -> list[GapTrial]:
    """What pacing `launch` at several distances comes to."""
    return calibrate(CupyStopwatch(state, [launch]), log=ConditionsLog)


def meet(state: State, others: frozenset[int]) -> frozenset[int]:
    """What NVML calls this process; `others` are of the same run, and what they do is no disturbance from now on."""
    mine = state.ours
    state.ours |= others
    return mine


def _failure(error: Exception, kind: FailureKind) -> Failure:
    """What the driver's words in `error` stand for; `kind` where they are of no known kind."""
    words = f"{type(error).__name__}: {error}".lower()
    kind = next((known for known, marks in MARKS.items() if any(mark in words for mark in marks)), kind)
    return Failure(kind=kind, message=str(error) if isinstance(error, MeasureError) else first_line(error))


def _context_lost() -> bool:
    """Whether the CUDA context no longer works: after an illegal access, say, every later call fails like the first."""
    try:
        cupy.cuda.Device().synchronize()
    except Exception:
        return True
    return False


Requests = Mapping[str, Callable[..., Any]]
"""What each verb does, given the state and the request's arguments."""
REQUESTS: Requests = {
    "start": start,
    "begin": begin,
    "load": load,
    "probe": probe,
    "check": check,
    "rows": rows,
    "calibrate": find_gap,
    "sample": sample,
    "meet": meet,
}


def main(descriptor: str, folder: str, parent: str, requests: Requests = REQUESTS) -> None:
    """Answer "start", and then every request, until the other side closes or a failure makes the CUDA context useless.

    An answer is a value, which is a Failure where something went wrong, and whether there is no context, or it is lost. If so,
    this process ends: a new one gets a new context.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides when we end
    end_with_parent(int(parent), folder)
    with Connection(int(descriptor)) as connection:
        try:
            _serve(connection, State(folder), requests)
        except (EOFError, ConnectionError):  # nobody is left to ask, or to be told
            shutil.rmtree(folder, ignore_errors=True)


def _serve(connection: Connection, state: State, requests: Requests) -> None:
    request: tuple[Any, ...] = ("start",)
    while True:
        verb, *arguments = request
        if time.time() - state.answered_s > IDLE_S:
            state.since_s = time.time()
        try:
            value = requests[verb](state, *arguments)
        except Exception as error:
            value = _failure(error, FailureKind.ARTIFACT_CORRUPT if verb == "load" else FailureKind.LAUNCH_FAILURE)
        state.answered_s = time.time()
        lost = isinstance(value, Failure) and (verb == "start" or _context_lost())
        connection.send((value, lost))
        if lost:
            os._exit(1)
        request = connection.recv()
