"""The stand on a real GPU: torch tensors, torch events, references in CuPy.

Everything runs in this process on the current CUDA device.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Sequence
from typing import Any

from tiledsched.errors import MeasureError, UnsupportedError
from tiledsched.measure.nvml import ConditionsLog, current_device
from tiledsched.measure.timing import GRAPH_BELOW_US, GRAPH_LAUNCHES
from tiledsched.problem import Problem
from tiledsched.studies.bench.accuracy import Error, Pair, compared_pairs, error_of, reference_of_pair
from tiledsched.studies.bench.methods import MATMUL, OURS, Arrays, Call, Method
from tiledsched.studies.bench.run import Prepared, Ready, first_line

SPIN_CYCLES = 600_000
"""About 0.3 ms at 1.98 GHz: the host queues what follows meanwhile, so that events never time it."""
MOST_DOUBLINGS = 5
"""Times that the spin of a slow-launching call is doubled."""
LOOKS = 3
PACKAGES = ("torch", "triton", "cuda-tile", "tilegym", "flash-attn")
"""Whose versions are noted, where installed."""


class TorchStand:
    """Runs methods on the current CUDA device.

    Args:
        verify: also compile what `sdpa` launches and compare its machine code with the measured artifact; about a second
            a problem.

    Raises:
        MeasureError: torch or CuPy is missing, or torch sees no CUDA device.
    """

    def __init__(self, *, verify: bool = False) -> None:
        try:
            import cupy
            import torch
        except ImportError as error:
            raise MeasureError(f"{error.name} is not installed; run: pip install 'tiledsched[gpu]'") from error
        if not torch.cuda.is_available():
            raise MeasureError("torch sees no CUDA device; run: tiledsched doctor")
        self._torch, self._cupy, self._verify = torch, cupy, verify
        device = current_device()
        self.device, self._memory_bytes = device.name, device.memory_bytes
        self.versions = versions(torch, device.driver)
        self._flush = torch.empty(max(2 * device.l2_bytes, 1 << 26), dtype=torch.uint8, device="cuda")

    def prepare(self, problem: Problem, methods: Sequence[Method], regime: str) -> Prepared:
        """See `tiledsched.studies.bench.run.Stand`."""
        torch = self._torch
        try:
            torch.cuda.empty_cache()
            arrays = self._arrays(problem)
            pairs = compared_pairs(problem)
            expected = self._references(arrays, pairs)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(torch, error):
                raise _lost(error) from error
            return Prepared(ready=(), failed={each.name: "out of memory: the inputs" for each in methods},
                            watch=TorchStopwatch(torch, [], self._flush), log=ConditionsLog())  # fmt: skip
        failed: dict[str, str] = {}
        found: list[tuple[Method, Call, Error | None, float]] = []
        for method in methods:
            outcome = self._try(method, arrays, pairs, expected)
            if isinstance(outcome, str):
                failed[method.name] = outcome
            else:
                found.append((method, *outcome))
        watch = TorchStopwatch(torch, [call for _, call, _, _ in found], self._flush)
        ready = []
        for index, (method, _, distance, look_us) in enumerate(found):
            launches = GRAPH_LAUNCHES if regime == "sustained" and look_us < GRAPH_BELOW_US else 0
            launches = launches if launches and watch.capture(index, launches) else 0
            ready.append(Ready(
                method=method, look_us=look_us * max(1, launches), launches=launches, error=distance,
                compared=f"{len(pairs)}/{problem.batch * problem.heads}" if distance else "",
                details=self._details(arrays) if method.name == OURS else {},
            ))  # fmt: skip
        return Prepared(ready=tuple(ready), failed=failed, watch=watch, log=ConditionsLog())

    def check(self) -> None:
        """See `tiledsched.studies.bench.run.Stand`."""
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as error:
            raise _lost(error) from error

    def _arrays(self, problem: Problem) -> Arrays:
        """Standard normal inputs, the same in every run of a problem."""
        torch = self._torch
        dtype = getattr(torch, problem.dtype)
        generator = torch.Generator(device="cuda").manual_seed(int(problem.id, 16) % 2**31)
        keys = (problem.batch, problem.kv_heads, problem.seq_k)
        shapes = ((problem.batch, problem.heads, problem.seq_q, problem.head_dim), (*keys, problem.head_dim),
                  (*keys, problem.value_columns))  # fmt: skip
        q, k, v = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
        return Arrays(torch=torch, problem=problem, q=q, k=k, v=v)

    def _references(self, arrays: Arrays, pairs: Sequence[Pair]) -> list[Any]:
        """Float64 outputs; CuPy has no bfloat16, so that it is given float32, which holds both types."""
        found = []
        for batch, head in pairs:
            kv_head = head // arrays.problem.group
            q, k, v = (self._cupy.from_dlpack(x[batch, h].float())
                       for x, h in ((arrays.q, head), (arrays.k, kv_head), (arrays.v, kv_head)))  # fmt: skip
            found.append(reference_of_pair(self._cupy, arrays.problem, q, k, v))
        self._torch.cuda.synchronize()
        return found

    def _try(self, method: Method, arrays: Arrays, pairs: Sequence[Pair],
             expected: Sequence[Any]) -> tuple[Call, Error | None, float] | str:  # fmt: skip
        """A method's call, its error and its time at first look, in microseconds; or why it takes no part."""
        torch = self._torch
        refusal = method.refusal(arrays.problem, self._memory_bytes)
        if refusal:
            return refusal
        try:
            with warnings.catch_warnings():  # torch warns why it refuses a backend; the status says that it did
                warnings.simplefilter("ignore")
                call = method.make(arrays)
                out = call()
                torch.cuda.synchronize()
                found = None if method.name == MATMUL else self._error(out, pairs, expected)
                del out
                watch = TorchStopwatch(torch, [call], self._flush)
                look_us = min(watch.read(watch.queue(0, paced=True)) for _ in range(LOOKS))
        except UnsupportedError as error:
            return f"not served: {error}"
        except Exception as error:
            self._check_context(method, error)
            return "out of memory" if _out_of_memory(torch, error) else first_line(error)
        return (found and found.verdict(arrays.problem.dtype)) or (call, found, look_us)

    def _error(self, out: Any, pairs: Sequence[Pair], expected: Sequence[Any]) -> Error:
        outputs = [self._cupy.from_dlpack(out[batch, head].float().contiguous()) for batch, head in pairs]
        return error_of(self._cupy, outputs, expected, finite=bool(self._torch.isfinite(out).all()))

    def _check_context(self, method: Method, error: Exception) -> None:
        """Whether the GPU can still be used after `error`: an illegal access breaks the context of this process for good.

        Raises:
            MeasureError: it cannot.
        """
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as broken:
            raise MeasureError(f"{method.name} broke the CUDA context ({first_line(error)}); run again with --resume, and "
                               "without that method with --methods") from broken  # fmt: skip
        self._torch.cuda.empty_cache()

    def _details(self, arrays: Arrays) -> dict[str, Any]:
        """What `sdpa` launched and why. That it could not be told is no reason to lose the times."""
        from tiledsched.serve.explain import explain

        try:
            found = explain(arrays.q, arrays.k, arrays.v, causal=arrays.causal, verify=self._verify)  # type: ignore[arg-type,unused-ignore]
        except Exception as error:
            return {"provenance": f"not known: {first_line(error)}"}
        return {"schedule": found.served.schedule.short(), "provenance": found.served.provenance,
                "measured_program": found.is_measured_program if self._verify else None}  # fmt: skip


def _lost(error: Exception) -> MeasureError:
    return MeasureError(f"the GPU cannot be used any more ({first_line(error)}); run again with --resume, and with --methods "
                        "leave out the one that broke it")  # fmt: skip


def _out_of_memory(torch: Any, error: BaseException) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or type(error).__name__ == "OutOfMemoryError"


def versions(torch: Any, driver: str) -> str:
    """Driver and libraries, in one line."""
    parts = [f"driver {driver}", f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
    for package in PACKAGES:
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return " ".join(parts)


class TorchStopwatch:
    """Times calls between torch events; see `tiledsched.measure.timing.Stopwatch`."""

    def __init__(self, torch: Any, calls: Sequence[Call], flush: Any) -> None:
        self._torch, self._calls, self._flush = torch, list(calls), flush
        self._launches = [1] * len(self._calls)
        self._spin_cycles = [SPIN_CYCLES] * len(self._calls)

    def capture(self, index: int, launches: int) -> bool:
        """From now on time call `index` as a CUDA graph of so many; False where it cannot be captured."""
        torch, call = self._torch, self._calls[index]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(launches):
                    call()
            graph.replay()
            torch.cuda.synchronize()
        except Exception:  # a library that must not be captured; it is timed call by call
            torch.cuda.synchronize()
            return False
        self._calls[index], self._launches[index] = graph.replay, launches
        return True

    def queue(self, index: int, *, paced: bool) -> tuple[int, Any, Any]:
        """Events around one call, or one graph; when paced, behind an L2 flush and a spin kernel.

        If the spin was over before all was queued, the events timed the host: they are dropped, and from now on this call
        is given twice the spin.
        """
        for doubling in range(MOST_DOUBLINGS + 1):
            before, after = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
            if paced:
                self._flush.zero_()
                self._torch.cuda._sleep(self._spin_cycles[index])
            before.record()
            self._calls[index]()
            after.record()
            if not paced or doubling == MOST_DOUBLINGS or not before.query():
                break
            after.synchronize()
            self._spin_cycles[index] *= 2
        return index, before, after

    def read(self, queued: tuple[int, Any, Any]) -> float:
        """Microseconds of one call."""
        index, before, after = queued
        after.synchronize()
        return float(before.elapsed_time(after) * 1e3) / self._launches[index]
