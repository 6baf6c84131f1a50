"""What a search needs of the machine: a GPU, a compiler and a stopwatch. Tests hand in a machine of their own."""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct

from tiledsched.build.cubin import Artifact, read_artifact
from tiledsched.build.toolchain import Toolchain, compiler_at_hand, installed_toolchain
from tiledsched.core.device import ResourceFacts
from tiledsched.core.errors import MeasureError
from tiledsched.core.schedule import Schedule
from tiledsched.measure.driver_timeout import asked
from tiledsched.measure.nvml import ConditionsLog, current_device, labelled
from tiledsched.measure.runner import Device
from tiledsched.measure.timing import Log, Stopwatch, TorchStopwatch, flush_bytes
from tiledsched.remember.description import Grid, Request
from tiledsched.remember.identity import is_array

COMPILE_TIMEOUT_S = 120.0
"""For a program, where the caller sets no limit."""
PATIENCE = 1.1
"""Programs that compile side by side each take somewhat longer than alone: a limit that the caller set is multiplied by this."""


@dataclass(eq=False)
class CallProgram:
    """One configuration that is built and measured."""

    config: Any
    schedule: Schedule
    grid: Grid
    kernel: Any
    """The cuTile kernel with the configuration's hints."""
    artifact: Artifact | None = None
    """Its machine code; None until it is built, and where it does not build."""
    error: Exception | None = None
    """Why it does not build or run."""
    seconds: float = 0.0
    """How long the compile took."""
    numbers: tuple[Any, ...] = ()
    """Run-time numbers of its launch, which tell programs of equal machine code apart."""


class _CompileRequested(Exception):  # noqa: N818
    """Carries the arguments of what cuTile asks a kernel to compile out of the launch that asked: given by place, and by name."""


class SearchMachine:
    """What a search needs: the current CUDA device of this process, cuTile's compiler, and the events of torch or, without torch,
    cuTile's own. A machine for tests overrides every public method.
    """

    compiler = staticmethod(functools.cache(compiler_at_hand))
    """The version of the compiler, e.g. 13.5.37; empty where there is none."""
    _flush: Any = None
    """Memory that is written before a timed launch, to empty the L2 cache."""

    @property
    def _torch(self) -> Any:
        """torch, where this process uses it on a GPU."""
        torch = sys.modules.get("torch")
        return torch if torch is not None and torch.cuda.is_available() else None

    def gpu(self) -> tuple[str, str] | None:
        """The arch and the name of the current GPU; None where there is none.

        The driver is not asked for more, which takes longer than the rest of a stored answer.
        """
        if self._torch is not None:
            found = self._torch.cuda.get_device_properties(self._torch.cuda.current_device())
            return f"sm_{found.major}{found.minor}", labelled(found.name)
        try:
            device = self.device()
        except Exception:
            return None
        return device.arch, device.name

    def device(self) -> Device:
        """All that is known of the current GPU."""
        return current_device()

    def toolchain(self) -> Toolchain:
        """All versions; raises CompilerError where there is no compiler."""
        return installed_toolchain()

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured, so that nothing may be measured."""
        torch = self._torch
        return torch is not None and torch.cuda.is_current_stream_capturing()

    @contextmanager
    def measuring(self, request: Request) -> Iterator[None]:
        """A context in which this process alone measures on the GPU, on the stream of the request."""
        from tiledsched.measure.lock import holding_current_gpu

        torch, stream = self._torch, request.stream
        with ExitStack() as stack:
            stack.enter_context(holding_current_gpu())
            if torch is not None:
                if not isinstance(stream, torch.cuda.Stream):
                    stream = torch.cuda.ExternalStream(
                        int(getattr(stream, "ptr", None) or getattr(stream, "cuda_stream", stream))
                    )
                torch.cuda.synchronize()  # what the caller queued on other streams
                stack.enter_context(torch.cuda.stream(stream))
            try:
                yield
            finally:
                self._flush = None

    def build(self, programs: Sequence[CallProgram], request: Request) -> None:
        """Give each program its artifact or its error.

        cuTile's frontend runs here, one kernel at a time; the compilers that it starts run at once.
        """
        from tiledsched.build.pool import default_jobs

        jobs: list[tuple[CallProgram, _CompileRequested]] = []
        for program in programs:
            try:
                wanted = self._signature(program, request)
            except Exception as error:
                program.error = error
                continue
            if wanted is None:  # this version compiled and launched it at once
                program.artifact = _unknown_program(program.schedule.id * 2)
            else:
                jobs.append((program, wanted))
        arch = (self.gpu() or ("", ""))[0]
        with _limit(), _side_by_side(), ThreadPoolExecutor(min(default_jobs(), max(1, len(jobs)))) as threads:
            list(threads.map(lambda job: _compile_requested(job[0], job[1], arch), jobs))

    def _signature(self, program: CallProgram, request: Request) -> _CompileRequested | None:
        """What cuTile would compile for a program's arguments: the launch that asks is stopped there. None if none asked."""

        def tell(*given: Any, **named: Any) -> Any:
            raise _CompileRequested(given, named)

        args = request.args_fn(program.config)
        program.numbers = run_time_numbers(program.kernel, args)
        program.kernel._compile = tell
        try:
            ct.launch(request.stream, program.grid, program.kernel, args)
        except _CompileRequested as wanted:
            return wanted
        finally:
            del program.kernel._compile
        return None

    def first_launch(self, program: CallProgram, request: Request) -> None:
        """Launch once, for at most `request.timeout_s` seconds where that is set. Errors are raised."""
        args = request.args_fn(program.config)
        if request.timeout_s is None:
            self.run(program, args, request)
            return
        from cuda.tile.tune._tune_utils import benchmark_with_timeout

        benchmark_with_timeout(request.stream, program.grid, program.kernel, args, request.timeout_s, request.flush_l2)

    def run(self, program: CallProgram, args: tuple[Any, ...], request: Request) -> None:
        """Launch a program on arguments and wait for it."""
        ct.launch(request.stream, program.grid, program.kernel, args)
        if self._torch is not None:
            self._torch.cuda.current_stream().synchronize()
        else:
            from cuda.tile._cext import _synchronize_context

            _synchronize_context()

    def stopwatch(self, programs: Sequence[CallProgram], request: Request) -> Stopwatch:
        """A stopwatch for launches of programs, each time with new arguments."""
        torch = self._torch
        if torch is None or os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":  # no launch can be queued behind another one
            return BenchmarkStopwatch(programs, request)
        if self._flush is None:
            most = flush_bytes(self.device().l2_bytes)
            self._flush = torch.empty(most if request.flush_l2 else 1, dtype=torch.uint8, device="cuda")
        return CallStopwatch(torch, programs, request, self._flush)

    def log(self) -> Log:
        """A reader of the GPU's state."""
        return ConditionsLog(ask=asked)

    def check_gpu(self, error: Exception) -> None:
        """Make sure that the GPU can still be used after an error; raises MeasureError where it cannot."""
        if self._torch is None:
            return
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as broken:
            raise MeasureError(
                f"a configuration broke the CUDA context of this process ({type(error).__name__}: {error}); take it out of the "
                "search space and run again"
            ) from broken


class CallStopwatch(TorchStopwatch):
    """Times launches between torch events. `args_fn` is called anew before each launch, and what it does is not timed."""

    def __init__(self, torch: Any, programs: Sequence[CallProgram], request: Request, flush: Any) -> None:
        super().__init__(torch, [_nothing] * len(programs), flush)
        self._programs, self._request = programs, request

    def prepare(self, index: int) -> None:
        """Ask for new arguments."""
        program, request = self._programs[index], self._request
        args = request.args_fn(program.config)
        self._calls[index] = functools.partial(ct.launch, request.stream, program.grid, program.kernel, args)

    def read(self, queued: tuple[int, Any, Any]) -> float:
        """The microseconds of a queued launch, whose arguments are freed."""
        self._calls[queued[0]] = _nothing
        return super().read(queued)


def _nothing() -> None:
    """What is timed between two launches."""


class BenchmarkStopwatch:
    """Times launches with cuTile's own benchmark, for processes without torch; see `tiledsched.measure.timing.Stopwatch`."""

    def __init__(self, programs: Sequence[CallProgram], request: Request) -> None:
        self._programs, self._request = programs, request

    def queue(self, index: int, *, paced: bool) -> float:
        """The microseconds of one launch with new arguments."""
        from cuda.tile._cext import _benchmark

        program, request = self._programs[index], self._request
        args = request.args_fn(program.config)
        return float(_benchmark(request.stream, program.grid, program.kernel, args, request.flush_l2))

    def read(self, queued: float) -> float:
        """The microseconds that `queue` measured."""
        return queued


def run_time_numbers(kernel: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a launch that are neither arrays nor compile-time constants."""
    annotated = getattr(getattr(kernel, "_annotated_function", None), "parameter_annotations", ())
    constant = [bool(getattr(each, "constant", False)) for each in annotated] or [False] * len(args)
    numbers = [value for value, fixed in zip(args, constant, strict=False) if not fixed and not is_array(value)]
    return tuple(value if isinstance(value, (bool, int, float, str)) else repr(type(value)) for value in numbers)


def _compile_requested(program: CallProgram, wanted: _CompileRequested, arch: str) -> None:
    """Compile what cuTile asked for. The launch that asks again is given the same."""
    kernel, (given, named) = program.kernel, wanted.args
    original = type(kernel)._compile
    began = time.perf_counter()
    try:
        made = original(kernel, *given, **named)
        program.artifact = _read(made[0], arch)
    except Exception as error:
        program.error = error
        return
    finally:
        program.seconds = time.perf_counter() - began

    def compiled(*again: Any, **by_name: Any) -> Any:
        same = again[:1] == given[:1]  # the signature
        return made if same else original(kernel, *again, **by_name)

    kernel._compile = compiled


def _read(cubin: bytes, arch: str) -> Artifact:
    """The artifact of machine code; of several functions, or of a format that is not known here, one without facts."""
    try:
        return read_artifact(bytes(cubin), arch)
    except Exception:
        return _unknown_program(hashlib.sha256(bytes(cubin)).hexdigest()[:24])


def _unknown_program(fingerprint: str) -> Artifact:
    """An artifact of which nothing is known but what tells it from others."""
    none = dict.fromkeys(("registers", "spill_bytes", "threads", "shared_bytes", "code_bytes", "ctas_per_sm"), 0)
    return Artifact(arch="", fingerprint=fingerprint, facts=ResourceFacts(num_ctas=1, **none), cubin=b"")


@contextmanager
def _limit() -> Iterator[None]:
    """The time limit of each compile."""
    set_s = None
    with suppress(ImportError):
        from cuda.tile._cext import default_tile_context

        set_s = default_tile_context.config.compiler_timeout_sec
    with ct.compiler_timeout(PATIENCE * set_s if set_s else COMPILE_TIMEOUT_S):
        yield


_patching = threading.Lock()


@contextmanager
def _side_by_side() -> Iterator[None]:
    """Let several threads compile at once.

    cuTile holds one lock from a kernel's source to its machine code. Most of that time it waits for the process of the compiler,
    which needs no lock: here the lock is free while it waits. A cuTile that is built in another way compiles one by one.
    """
    from cuda.tile import _compile

    lock: Any = getattr(_compile, "_compiler_lock", None)
    wait = getattr(_compile, "compile_cubin", None)
    if not (hasattr(lock, "_release_save") and hasattr(lock, "_acquire_restore") and wait is not None):
        yield
        return

    @functools.wraps(wait)
    def without_lock(*given: Any, **named: Any) -> Any:
        if not lock._is_owned():
            return wait(*given, **named)
        state = lock._release_save()
        try:
            return wait(*given, **named)
        finally:
            lock._acquire_restore(state)

    with _patching:
        _compile.compile_cubin = without_lock
        try:
            yield
        finally:
            _compile.compile_cubin = wait


machine = SearchMachine()
"""What every search uses. Read it from this module at each use: tests replace it."""
