"""The process that times rivals next to our winner, in one interleaved run; see `tiledsched.rivals.races`.

It answers what the measuring process answers, and two requests more. It holds torch, which that one must not, and no compiler of
ours. CuPy and torch share the device's context, and all launches one stream of torch's. Its
arguments are those of the measuring process.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

from tiledsched.checking.errors import case_errors, wrong_result
from tiledsched.core.cases import Case
from tiledsched.core.errors import Failure, MeasureError, first_line
from tiledsched.core.problem import Problem
from tiledsched.core.registry import load_kernel
from tiledsched.core.rivals import Call, Function, call_on
from tiledsched.measure import timing
from tiledsched.measure.arrays import Launch, ProblemArrays
from tiledsched.measure.nvml import ConditionsLog
from tiledsched.measure.runner import GRAPHS, RivalTime
from tiledsched.measure.timing import TorchStopwatch, launches_in_graph, sample_rounds
from tiledsched.rivals.methods import Trial, as_list, as_stored, as_tensors, capture_short, outputs_by_name, try_call
from tiledsched.rivals.races import rival_time

NOT_CAPTURED = "a CUDA graph cannot hold it"
LONGEST = 200
"""Most characters of an error's first line that are reported."""


class TimedRivals:
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
    ) -> list[RivalTime] | Failure:
        """What every rival of the current problem takes whose result is right, in the same rounds as our winner."""
        torch = self._torch
        named = state.arrays.kernel.rivals(state.arrays.problem)
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                flush = torch.from_dlpack(state.flush)
                found = {name: self._try(each, state.arrays, launch, flush) for name, each in named.items()}
                tried = {name: each for name, each in found.items() if isinstance(each, Trial)}
                timed = self._sample(state, launch, tried, flush, rounds, regime, seed, gap_ms) if tried else {}
                return [
                    rival_time(name, **timed[name], host_us=each.host_us, version=self._version(named[name]))
                    if isinstance(each, Trial)
                    else RivalTime(name=name, failure=each)
                    for name, each in found.items()
                ]
            finally:
                with suppress(RuntimeError):  # where the context is lost, another error says so
                    torch.cuda.empty_cache()

    def _try(self, function: Function, arrays: ProblemArrays, launch: Launch, flush: Any) -> Trial | str:
        """What some calls tell, or why it takes no part. One that looks at values must be right on the odd ones, too.

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
                    return wrong
            return try_call(torch, call, flush)
        except Exception as error:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            return str(error) if isinstance(error, MeasureError) else first_line(error)[:LONGEST]

    def _inputs(self, arrays: ProblemArrays, case: Case) -> tuple[Any, ...]:
        """The inputs of a case as tensors; copies of those that the kernel changes, since a rival may change them, too."""
        copied = {
            spec.name: [one.copy() for one in case.inputs[spec.name]] if spec.listed else case.inputs[spec.name].copy()
            for spec in arrays.changed
        }
        return as_tensors(self._torch, arrays.problem, {**case.inputs, **copied})

    def _version(self, function: Function) -> str:
        return getattr(function, "version", "") or f"torch {self._torch.__version__}"

    def _wrong(self, out: Any, arrays: ProblemArrays, launch: Launch, case: Case) -> str:
        """Why outputs are not what our own must be on the same inputs; empty where they are.

        Raises:
            MeasureError: there are too few of them, or they have other shapes.
        """
        specs, outputs = arrays.output_specs, outputs_by_name(arrays.problem, out)
        stored = {}
        for spec in specs:
            found = [as_stored(self._torch, self._cupy, each, spec) for each in as_list(spec, outputs[spec.name])]
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
        self,
        state: Any,
        launch: Launch,
        tried: dict[str, Trial],
        flush: Any,
        rounds: int,
        regime: str,
        seed: int,
        gap_ms: float,
    ) -> dict[str, dict[str, Any]]:
        """Name -> the samples of a rival that was timed and of our winner, and what else :func:`rival_time` takes of them."""
        torch, ours = self._torch, self._ours(state, launch)
        ours()
        torch.cuda.synchronize()
        trials = list(tried.values())
        calls = [ours, *(each.call for each in trials)]
        host_us, warm = max(each.host_us for each in trials), regime == "graph"
        watch, refused = TorchStopwatch(torch, calls, flush, host_us=host_us, warm=warm), set()
        if regime == "sustained":
            capture_short(watch, [try_call(torch, ours, flush), *trials])
        elif (
            regime in GRAPHS
        ):  # as our own are timed; what changes arrays in place is given them anew for one launch only
            count = launches_in_graph(try_call(torch, ours, flush).look_us, bool(state.arrays.changed)) if warm else 1
            refused = {name for index, name in enumerate(["", *tried]) if not watch.capture(index, count)}
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
            name: {
                "failure": f"timed {disturbance}" if disturbance else NOT_CAPTURED * (name in refused),
                "samples_us": theirs,
                "ours_us": samples[0],
                "capturable": TorchStopwatch(torch, [each.call], flush).capture(0, 1),
            }
            for (name, each), theirs in zip(tried.items(), samples[1:], strict=True)
        }


def main(descriptor: str, folder: str, parent: str) -> None:
    """Serve like the measuring process; torch is loaded first, so that modules of kernels find it."""
    import cupy
    import torch

    from tiledsched.measure import worker

    rivals = TimedRivals(torch, cupy)
    worker.main(descriptor, folder, parent, {**worker.REQUESTS, "versions": rivals.versions, "rivals": rivals.race})
