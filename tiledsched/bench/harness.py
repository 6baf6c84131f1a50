"""The harness on a real GPU: torch tensors, torch events, references in CuPy.

Everything runs in this process on the current CUDA device.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tiledsched.bench.case import BenchCase, make_case, output_dtype
from tiledsched.bench.methods import DETERMINISTIC, LEFT_OUT, MATMUL, OURS, SERVED, Method
from tiledsched.bench.run import PreparedCell, Ready, first_line
from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core.errors import MeasureError, UnsupportedError
from tiledsched.core.extras import installing
from tiledsched.core.problem import Problem
from tiledsched.measure.driver_timeout import asked
from tiledsched.measure.nvml import ConditionsLog, current_device
from tiledsched.measure.timing import GRAPH_BELOW_US, GRAPH_LAUNCHES
from tiledsched.measure.torch_timing import LOOKS, SPIN_MARGIN, TorchStopwatch, host_cost_us

PACKAGES = ("torch", "triton", "cuda-tile", "tilegym", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl")
"""Packages whose versions are recorded, where they are installed."""


class TorchHarness:
    """Runs methods on the current CUDA device.

    Args:
        verify: also compile what our own method launches, where that can be told, and compare its machine code with the
            measured artifact; about a second a problem.

    Raises:
        MeasureError: torch or CuPy is missing, or torch sees no CUDA device.
    """

    def __init__(self, *, verify: bool = False) -> None:
        try:
            import cupy
            import torch
        except ImportError as error:
            raise MeasureError(f"{error.name} is not installed; run: {installing('gpu')}") from error
        if not torch.cuda.is_available():
            raise MeasureError("torch sees no CUDA device; run: tiledsched doctor")
        self._torch, self._cupy, self._verify = torch, cupy, verify
        device = current_device()
        self.device, self.arch, self._memory_bytes = device.name, device.arch, device.memory_bytes
        self.versions = versions(torch, device.driver)
        self._flush = torch.empty(max(2 * device.l2_bytes, 1 << 26), dtype=torch.uint8, device="cuda")

    def prepare(self, problem: Problem, methods: Sequence[Method], regime: str) -> PreparedCell:
        """See `tiledsched.bench.run.Harness`."""
        torch = self._torch
        try:
            torch.cuda.empty_cache()
            case = make_case(torch, self._cupy, problem)
            torch.cuda.synchronize()
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(torch, error):
                raise _lost(error) from error
            return PreparedCell(
                ready=(),
                failed={each.name: "out of memory: the inputs" for each in methods},
                watch=TorchStopwatch(torch, [], self._flush),
                log=ConditionsLog(ask=asked),
            )
        failed: dict[str, str] = {}
        found: list[Ready] = []
        for method in methods:
            outcome = self._try(method, case)
            if isinstance(outcome, str):
                failed[method.name] = outcome
            else:
                found.append(outcome)
        host_us = max((tried.host_us for tried in found), default=0.0)
        watch = TorchStopwatch(torch, [tried.call for tried in found], self._flush, host_us=host_us)
        ready = []
        for index, tried in enumerate(found):
            # Back to back, what costs the host more than the GPU would be timed with the host's part.
            short = regime == "sustained" and tried.look_us < max(GRAPH_BELOW_US, SPIN_MARGIN * tried.host_us)
            if short and watch.capture(index, GRAPH_LAUNCHES):
                tried = replace(tried, look_us=tried.look_us * GRAPH_LAUNCHES, launches=GRAPH_LAUNCHES)
            if tried.method.name in (OURS, SERVED, LEFT_OUT, DETERMINISTIC):
                tried = replace(tried, details=self._details(case, tried))
            ready.append(tried)
        return PreparedCell(ready=tuple(ready), failed=failed, watch=watch, log=ConditionsLog(ask=asked))

    def check(self) -> None:
        """See `tiledsched.bench.run.Harness`."""
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as error:
            raise _lost(error) from error

    def _try(self, method: Method, case: BenchCase) -> Ready | str:
        """Call a method a few times: what was learnt, or why the method takes no part."""
        torch, problem = self._torch, case.arrays.problem
        refusal = method.refusal(problem, self._memory_bytes)
        if refusal:
            return refusal
        try:
            with warnings.catch_warnings():  # torch warns why it refuses a backend; the status says that it did
                warnings.simplefilter("ignore")
                call = method.make(case.arrays)
                out = call()
                torch.cuda.synchronize()
                found = None if method.name == MATMUL else case.error(out)
                del out
                host_us = host_cost_us(torch, call)
                watch = TorchStopwatch(torch, [call], self._flush, host_us=host_us)
                look_us = min(watch.read(watch.queue(0, paced=True)) for _ in range(LOOKS))
        except UnsupportedError as error:
            return f"not served: {error}"
        except Exception as error:
            self._check_context(method, error)
            return "out of memory" if _out_of_memory(torch, error) else first_line(error)
        wrong = found.verdict(output_dtype(problem)) if found else ""
        compared = case.compared if found else ""
        return wrong or Ready(
            method=method, call=call, look_us=look_us, host_us=host_us, error=found, compared=compared
        )

    def _check_context(self, method: Method, error: Exception) -> None:
        """Make sure that the GPU can still be used after `error`. An illegal access breaks the CUDA context of this
        process for good.

        Raises:
            MeasureError: it cannot.
        """
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as broken:
            raise MeasureError(
                f"{method.name} broke the CUDA context ({first_line(error)}); run again, and "
                "without that method with --methods"
            ) from broken
        self._torch.cuda.empty_cache()

    def _details(self, case: BenchCase, ready: Ready) -> dict[str, Any]:
        """What our own methods launched, and why. If that cannot be found out, the row keeps its times and says so."""
        try:
            return case.details(ready.method.name, verify=self._verify, captured=ready.launches > 0)
        except Exception as error:
            return {"provenance": f"not known: {first_line(error)}"}


def _lost(error: Exception) -> MeasureError:
    return MeasureError(
        f"the GPU cannot be used any more ({first_line(error)}); run again, and with --methods "
        "leave out the one that broke it"
    )


def _out_of_memory(torch: Any, error: BaseException) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or type(error).__name__ == "OutOfMemoryError"


def versions(torch: Any, driver: str) -> str:
    """Versions of the driver and the libraries, in one line."""
    parts = [f"driver {driver}", f"CUDA {torch.version.cuda}", f"cuDNN {torch.backends.cudnn.version()}"]
    for package in PACKAGES:
        try:
            parts.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    compiler = compiler_at_hand()
    return " ".join([*parts, *([f"tileiras {compiler}"] if compiler else [])])
