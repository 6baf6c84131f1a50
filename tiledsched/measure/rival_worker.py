"""The process that times rivals next to our winner, in one interleaved run; see `tiledsched.measure.rivals`.

It answers what the measuring process answers, and two requests more. It holds torch, which that one must not, and no compiler of
ours. CuPy and torch share the device's context, and all launches one stream of torch's. Its
arguments are those of the measuring process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tiledsched.checking.errors import case_errors, wrong_result
from tiledsched.core.blame import first_line
from tiledsched.core.cases import Case
from tiledsched.core.errors import Failure
from tiledsched.core.problem import Problem
from tiledsched.core.registry import load_kernel
from tiledsched.measure import timing
from tiledsched.measure.arrays import Launch, ProblemArrays
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
    """Answers requests about rivals.

    Args:
        torch: the module.
        cupy: the module, or what stands for it.
    """

    def __init__(self, torch: Any, cupy: Any) -> None:
        self._torch, self._cupy = torch, cupy

    def versions(self, state: Any, locator: str, problem: Problem) -> dict[str, str]:
        """Name -> version of every rival of a problem that is installed."""
        del state
        return {name: self._version(each) for name, each in load_kernel(locator).rivals(problem).items()}

    def race(
        self, state: Any, rounds: int, regime: str, seed: int, gap_ms: float, launch: Launch
    ) -> list[RivalSamples] | Failure:
        """Samples of every rival of the current problem whose result is right, with our winner's of the same rounds."""
        torch = self._torch
        named = state.arrays.kernel.rivals(state.arrays.problem)
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                flush = torch.from_dlpack(state.flush)
                found = [self._try(name, each, state.arrays, launch, flush) for name, each in named.items()]
                tried = [each for each in found if isinstance(each, Tried)]
                ours = self._ours(state, launch)
                timed = self._sample(state, ours, tried, flush, rounds, regime, seed, gap_ms) if tried else {}
                return [timed[each.name] if isinstance(each, Tried) else each for each in found]
            finally:
                with suppress(RuntimeError):  # of a context that is lost, which is told elsewhere
                    torch.cuda.empty_cache()

    def _try(
        self, name: str, function: Callable[..., Any], arrays: ProblemArrays, launch: Launch, flush: Any
    ) -> Tried | RivalSamples:
        """What some calls tell, or that it takes no part, and why. One that looks at values must be right on the odd ones, too.

        Raises:
            RuntimeError: it broke the context.
        """
        torch = self._torch
        try:
            call = call_on(function, self._inputs(arrays, arrays.cases[0]))
            for case in arrays.cases if hasattr(function, "bind") else arrays.cases[:1]:
                out = call() if case is arrays.cases[0] else call_on(function, self._inputs(arrays, case))()
                torch.cuda.synchronize()
                wrong = self._wrong(out, arrays, launch, case)
                del out
                if wrong:
                    return RivalSamples(name=name, failure=wrong)
            host_us = host_cost_us(torch, call)
            watch = TorchStopwatch(torch, [call], flush, host_us=host_us)
            watch.read(watch.queue(0, paced=True))
        except Exception as error:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return RivalSamples(name=name, failure=first_line(error)[:200])
        return Tried(name=name, call=call, host_us=host_us, version=self._version(function))

    def _inputs(self, arrays: ProblemArrays, case: Case) -> tuple[Any, ...]:
        """The inputs of a case as tensors; copies of those that the kernel changes, since a rival may change them, too."""
        changed = {spec.name for spec in arrays.changed}
        stored = {
            name: ([one.copy() for one in value] if isinstance(value, list) else value.copy())
            if name in changed
            else value
            for name, value in case.inputs.items()
        }
        return as_tensors(self._torch, arrays.problem, stored)

    def _version(self, function: Callable[..., Any]) -> str:
        return getattr(function, "version", "") or f"torch {self._torch.__version__}"

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
        torch, external = self._torch, self._cupy.cuda.ExternalStream
        state.arrays.clear(launch.scratch)
        arguments = state.arrays.arguments(launch, state.arrays.cases[0])
        torch.cuda.synchronize()  # what was written so far was on CuPy's stream

        def call() -> None:
            with external(torch.cuda.current_stream().cuda_stream):
                state.run(launch, arguments)

        return call

    def _sample(
        self, state: Any, ours: Call, tried: list[Tried], flush: Any, rounds: int, regime: str, seed: int, gap_ms: float
    ) -> dict[str, RivalSamples]:
        torch = self._torch
        ours()
        torch.cuda.synchronize()
        calls: list[Call] = [ours, *(each.call for each in tried)]
        watch = TorchStopwatch(torch, calls, flush, host_us=max(each.host_us for each in tried))
        if regime == "sustained":
            costs = [host_cost_us(torch, ours), *(each.host_us for each in tried)]
            # Back to back, what costs the host more would be timed with the host's part.
            for index, host_us in enumerate(costs):
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
        return {
            each.name: RivalSamples(
                name=each.name,
                failure=f"timed {disturbance}" if disturbance else "",
                samples_us=tuple(theirs),
                ours_us=tuple(samples[0]),
                host_us=each.host_us,
                capturable=TorchStopwatch(torch, [each.call], flush).capture(0, 1),
                version=each.version,
            )
            for each, theirs in zip(tried, samples[1:], strict=True)
        }


def main(descriptor: str, folder: str, parent: str) -> None:
    """Serve like the measuring process; torch is loaded first, so that modules of kernels find it."""
    import cupy
    import torch

    from tiledsched.measure import worker

    rivals = Rivals(torch, cupy)
    worker.main(descriptor, folder, parent, {**worker.REQUESTS, "versions": rivals.versions, "rivals": rivals.race})
