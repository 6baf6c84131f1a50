"""The process that times rivals next to our winner, in one interleaved run; see `tiledsched.measure.rivals`.

It answers what the measuring process answers, and two requests more. It holds torch, which that one must not, and no compiler of
ours. CuPy and torch share the device's context, and all launches one stream of torch's. Run as
``python -m tiledsched.measure.rival_worker DESCRIPTOR FOLDER PARENT``.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tiledsched.core.cases import Case, input_specs
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import load_kernel
from tiledsched.measure import timing
from tiledsched.measure.accuracy import case_errors, wrong_result
from tiledsched.measure.arrays import ProblemArrays
from tiledsched.measure.launch import Launch
from tiledsched.measure.nvml import ConditionsLog
from tiledsched.measure.rivals import RivalSamples, call_on
from tiledsched.measure.timing import GRAPH_BELOW_US, GRAPH_LAUNCHES, sample_rounds
from tiledsched.measure.torch_arrays import as_stored, as_tensors
from tiledsched.measure.torch_timing import SPIN_MARGIN, Call, TorchStopwatch, host_cost_us


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A rival that ran and was right."""

    name: str
    """Its name in the kernel's declaration."""
    call: Call
    """Computes the problem once."""
    host_us: float
    """Microseconds that a call takes the host."""
    version: str
    """Version of the package that computes."""


class Rivals:
    """Answers requests about rivals of the current problem.

    Args:
        torch: the module.
        cupy: the module, or what stands for it.
        worker: the module of the measuring process, which answers everything else.
    """

    def __init__(self, torch: Any, cupy: Any, worker: Any) -> None:
        self._torch, self._cupy, self._worker = torch, cupy, worker
        self._kernel: KernelClass | None = None
        self._problem: Problem | None = None

    def answer(self, state: Any, request: tuple[Any, ...]) -> Any:
        """Carry out one request; what goes wrong with all rivals comes back as a Failure."""
        if request[0] == "begin":
            self._kernel, self._problem = load_kernel(request[1]), request[2]
        if request[0] == "named":
            return {name: self._version(each) for name, each in load_kernel(request[1]).rivals(request[2]).items()}
        if request[0] != "rivals":
            return self._worker.answer(state, request)
        with self._torch.cuda.stream(self._torch.cuda.Stream()):
            try:
                return self.race(state, *request[1:])
            finally:
                with suppress(RuntimeError):  # of a context that is lost, which is told elsewhere
                    self._torch.cuda.empty_cache()

    def race(
        self, state: Any, launch: Launch, rounds: int, regime: str, seed: int, gap_ms: float
    ) -> list[RivalSamples] | Failure:
        """Samples of every rival whose result is right, with our winner's of the same rounds."""
        torch, arrays, problem = self._torch, state.arrays, self._problem
        assert problem is not None
        assert self._kernel is not None
        if arrays.changed:
            return Failure(kind=FailureKind.LAUNCH_FAILURE, message="it changes arrays in place, which rivals do not")
        named = self._kernel.rivals(problem)
        flush = torch.from_dlpack(state.flush)
        told: list[RivalSamples] = []
        tried: list[Tried] = []
        for name, function in named.items():
            found = self._try(name, function, arrays, launch, flush)
            if isinstance(found, Tried):
                tried.append(found)
            else:
                told.append(RivalSamples(name=name, failure=found))
        if tried:
            told += self._sample(state, self._ours(state, launch), tried, flush, rounds, regime, seed, gap_ms)
        order = list(named)
        return sorted(told, key=lambda each: order.index(each.name))

    def _try(
        self, name: str, function: Callable[..., Any], arrays: ProblemArrays, launch: Launch, flush: Any
    ) -> Tried | str:
        """What some calls tell, or why it takes no part. One that looks at values must be right on the odd ones, too.

        Raises:
            RuntimeError: it broke the context.
        """
        torch = self._torch
        try:
            call = call_on(function, self._tensors(arrays.cases[0]))
            for case in arrays.cases if hasattr(function, "bind") else arrays.cases[:1]:
                out = (call if case is arrays.cases[0] else call_on(function, self._tensors(case)))()
                torch.cuda.synchronize()
                wrong = self._wrong(out, arrays, launch, case)
                del out
                if wrong:
                    return wrong
            host_us = host_cost_us(torch, call)
            watch = TorchStopwatch(torch, [call], flush, host_us=host_us)
            watch.read(watch.queue(0, paced=True))
        except Exception as error:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            text = str(error).strip() or type(error).__name__
            return f"{type(error).__name__}: {text.splitlines()[0]}"[:200]
        return Tried(name=name, call=call, host_us=host_us, version=self._version(function))

    def _version(self, function: Callable[..., Any]) -> str:
        return getattr(function, "version", "") or f"torch {self._torch.__version__}"

    def _tensors(self, case: Case) -> tuple[Any, ...]:
        """The inputs of a case, as torch has them."""
        kernel, problem = self._kernel, self._problem
        assert kernel is not None
        assert problem is not None
        inputs = {spec.name: case.inputs[spec.name] for spec in input_specs(kernel, problem)}
        return as_tensors(self._torch, problem, inputs)

    def _wrong(self, out: Any, arrays: ProblemArrays, launch: Launch, case: Case) -> str:
        """Why outputs are not what our own must be on the same inputs; empty where they are."""
        specs = arrays.output_specs
        outputs = list(out) if isinstance(out, (tuple, list)) else [out]
        if len(specs) == 1 and specs[0].listed:
            outputs = [outputs]
        if len(outputs) < len(specs):
            return f"it returns {len(outputs)} arrays of {len(specs)}"
        stored = {}
        for spec, value in zip(specs, outputs, strict=False):
            found = [as_stored(self._torch, self._cupy, each, spec) for each in (value if spec.listed else [value])]
            if [tuple(each.shape) for each in found] != [tuple(shape) for shape in spec.shapes]:
                return f"its {spec.name} has shape {tuple(found[0].shape)}"
            stored[spec.name] = found if spec.listed else found[0]
        failure = wrong_result(case_errors(self._cupy, specs, stored, case, launch.tolerance, launch.tile), case)
        return f"wrong result: {failure.message}" if failure else ""

    def _ours(self, state: Any, launch: Launch) -> Call:
        """Our winner, on torch's current stream."""
        torch, external, run = self._torch, self._cupy.cuda.ExternalStream, self._worker._run
        state.arrays.clear(launch.scratch)
        arguments = state.arrays.arguments(launch, state.arrays.cases[0])
        torch.cuda.synchronize()  # what was written so far was on CuPy's stream

        def call() -> None:
            with external(torch.cuda.current_stream().cuda_stream):
                run(state, launch, arguments)

        return call

    def _sample(
        self, state: Any, ours: Call, tried: list[Tried], flush: Any, rounds: int, regime: str, seed: int, gap_ms: float
    ) -> list[RivalSamples]:
        torch = self._torch
        ours()
        torch.cuda.synchronize()
        calls: list[Call] = [ours, *(each.call for each in tried)]
        watch = TorchStopwatch(torch, calls, flush, host_us=max(each.host_us for each in tried))
        if regime == "sustained":
            costs = [host_cost_us(torch, ours), *(each.host_us for each in tried)]
            for index, host_us in enumerate(
                costs
            ):  # back to back, what costs the host more would be timed with the host's part
                if watch.read(watch.queue(index, paced=True)) < max(GRAPH_BELOW_US, SPIN_MARGIN * host_us):
                    watch.capture(index, GRAPH_LAUNCHES)
        log = ConditionsLog(state.ours, time.time())
        samples = sample_rounds(
            watch,
            len(calls),
            rounds=rounds,
            regime=regime,
            rng=random.Random(seed),
            log=log,
            gap_s=gap_ms / 1e3,
            warmup_s=timing.SUSTAINED_WARMUP_S,
        )
        disturbance = log.summary().disturbance
        # Last: a capture that fails may leave a library in a state of its own.
        return [
            RivalSamples(
                name=each.name,
                failure=f"timed {disturbance}" if disturbance else "",
                samples_us=tuple(theirs),
                ours_us=tuple(samples[0]),
                host_us=each.host_us,
                capturable=TorchStopwatch(torch, [each.call], flush).capture(0, 1),
                version=each.version,
            )
            for each, theirs in zip(tried, samples[1:], strict=True)
        ]


def main(descriptor: str, folder: str, parent: str) -> None:
    """Serve like the measuring process; torch is loaded first, so that modules of kernels find it."""
    import cupy
    import torch

    from tiledsched.measure import worker

    worker.main(descriptor, folder, parent, Rivals(torch, cupy, worker).answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
