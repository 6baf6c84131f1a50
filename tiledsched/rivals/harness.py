"""The harness on a real GPU: torch tensors, torch events, references in CuPy.

Everything runs in this process on the current CUDA device.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tiledsched.build.toolchain import compiler_at_hand
from tiledsched.core.blame import first_line
from tiledsched.core.errors import MeasureError, UnsupportedError
from tiledsched.core.extras import installing
from tiledsched.core.problem import Problem
from tiledsched.core.rivals import Arrays, Case, Method
from tiledsched.measure.driver_timeout import asked
from tiledsched.measure.nvml import ConditionsLog, current_device
from tiledsched.measure.timing import GRAPH_LAUNCHES
from tiledsched.measure.torch_timing import TorchStopwatch
from tiledsched.rivals.bench import PreparedCell, Ready
from tiledsched.rivals.cases import case_error, make_case, our_kernel_is_missing, output_dtype
from tiledsched.rivals.methods import MATMUL
from tiledsched.rivals.trials import capture_short, try_call

PACKAGES = ("torch", "triton", "cuda-tile", "tilegym", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl")
"""Packages whose versions are recorded, where they are installed."""


class TorchHarness:
    """Runs methods on the current CUDA device.

    Args:
        verify: also compile what our own method launches, where that can be told, and compare its machine code with the
            measured artifact; about a second a problem.
        own: computes a problem by our own kernel; see :func:`tiledsched.rivals.cases.make_case`.

    Raises:
        MeasureError: torch or CuPy is missing, or torch sees no CUDA device.
    """

    def __init__(self, *, verify: bool = False, own: Callable[..., Any] = our_kernel_is_missing) -> None:
        try:
            import cupy
            import torch
        except ImportError as error:
            raise MeasureError(f"{error.name} is not installed; run: {installing('gpu')}") from error
        if not torch.cuda.is_available():
            raise MeasureError("torch sees no CUDA device; run: tiledsched doctor")
        self._torch, self._cupy, self._verify, self._own = torch, cupy, verify, own
        device = current_device()
        self.device, self.arch, self._memory_bytes = device.name, device.arch, device.memory_bytes
        self.versions = versions(torch, device.driver)
        self._flush = torch.empty(max(2 * device.l2_bytes, 1 << 26), dtype=torch.uint8, device="cuda")

    def prepare(self, problem: Problem, methods: Sequence[Method], regime: str) -> PreparedCell:
        """See `tiledsched.rivals.bench.Harness`."""
        torch, failed = self._torch, {}
        found: list[Ready] = []
        try:
            torch.cuda.empty_cache()
            case = make_case(torch, self._cupy, problem, self._own)
            torch.cuda.synchronize()
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise _lost(error) from error
            failed, methods = {each.name: "out of memory: the inputs" for each in methods}, ()
        for method in methods:
            outcome = self._try(method, case)
            if isinstance(outcome, str):
                failed[method.name] = outcome
            else:
                found.append(outcome)
        trials = [each.trial for each in found]
        host_us = max((each.host_us for each in trials), default=0.0)
        watch = TorchStopwatch(torch, [each.call for each in trials], self._flush, host_us=host_us)
        launches = capture_short(watch, trials) if regime == "sustained" else [0] * len(trials)
        for index, (ready, count) in enumerate(zip(found, launches, strict=True)):
            if count:
                trial = replace(ready.trial, look_us=ready.trial.look_us * GRAPH_LAUNCHES)
                ready = replace(ready, trial=trial, launches=count)
            about = details(ready.method, case.arrays, verify=self._verify, captured=count > 0)
            found[index] = replace(ready, details=about)
        return PreparedCell(ready=tuple(found), failed=failed, watch=watch, log=ConditionsLog(ask=asked))

    def check(self) -> None:
        """See `tiledsched.rivals.bench.Harness`."""
        try:
            self._torch.cuda.synchronize()
        except RuntimeError as error:
            raise _lost(error) from error

    def _try(self, method: Method, case: Case) -> Ready | str:
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
                found = None if method.name == MATMUL else case_error(self._cupy, case, out)
                del out
                trial = try_call(torch, call, self._flush)
        except UnsupportedError as error:
            return f"not served: {error}"
        except Exception as error:
            self._check_context(method, error)
            return "out of memory" if _out_of_memory(error) else first_line(error)
        wrong = found.verdict(output_dtype(problem)) if found else ""
        return wrong or Ready(method=method, trial=trial, error=found, compared=case.compared if found else "")

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


def details(method: Method, arrays: Arrays, *, verify: bool, captured: bool) -> dict[str, Any]:
    """Fields of the row of one of our own methods: schedule, provenance and measured_program. If they cannot be found out, the
    row keeps its times and says so.

    Args:
        method: the method.
        arrays: its inputs.
        verify: also compile what is launched, to compare its machine code with the measured artifact.
        captured: whether the method was timed in a CUDA graph, where another rival may be served.
    """
    if method.explain is None:
        return {}
    try:
        found = method.explain(arrays, verify)
    except Exception as error:
        return {"provenance": f"not known: {first_line(error)}"}
    rival = found.in_graphs if captured else found.rival
    if method.names_rivals and rival:
        return {"schedule": rival, "provenance": "rival", "measured_program": None}
    return {
        "schedule": found.served.schedule.short(),
        "provenance": found.served.provenance,
        "measured_program": found.is_measured_program if verify else None,
    }


def _lost(error: Exception) -> MeasureError:
    return MeasureError(
        f"the GPU cannot be used any more ({first_line(error)}); run again, and with --methods "
        "leave out the one that broke it"
    )


def _out_of_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError"  # torch's or CuPy's


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
