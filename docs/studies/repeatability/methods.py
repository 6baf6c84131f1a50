"""Ways to choose the fastest of some programs: our race, timing one after the other, and cuTile's exhaustive search.

All three launch the very same machine code. What is imported, opened or drawn before a choice is in `prepare`, which is
not timed; loading the programs is part of choosing, for each of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy

from tiledsched.build.cubin import parts
from tiledsched.core.arrays import ArraySpec
from tiledsched.core.cases import input_specs, output_specs, random_inputs
from tiledsched.core.errors import Failure, MeasureError
from tiledsched.core.extras import installing, package_version
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.gpu import CHECK_LAUNCHES
from tiledsched.measure.runner import Batch, Candidate, Checked, Measurement, Runner
from tiledsched.tuning.race import race

WARM_UP_LAUNCHES = 3
TIMED_LAUNCHES = 20
EXHAUSTIVE_WARM_UP_LAUNCHES = 3
"""Launches of each program that `cuda.tile.tune.exhaustive_search` does not count; it does not report them."""
LEAST_FLUSH_BYTES = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one method chose on one problem."""

    schedule: Schedule | None
    """The schedule chosen; None where every candidate failed."""
    estimate_us: float | None
    """The method's own estimate of its time."""
    ties: tuple[Schedule, ...] = ()
    """Other schedules that it could not tell apart from the chosen one. Only the race reports them."""
    launches: int
    """Launches of candidates, warm-up included."""
    kernel_seconds: float
    """GPU time in these launches. Launches that were not timed are assumed to take as long as the timed ones."""
    failures: int
    """Candidates that gave no time."""


class SelectionMethod(Protocol):
    """A way to choose. `prepare` is called before each `choose`."""

    name: str
    """Name in `--methods`."""

    def prepare(self, problem: Problem, candidates: Sequence[Candidate]) -> None:
        """Whatever need not be counted against the method."""
        ...

    def choose(self, problem: Problem, candidates: Sequence[Candidate]) -> Choice:
        """Find the fastest of `candidates`, of which the first is the default schedule."""
        ...


class Counted:
    """A runner that passes everything on to another runner and adds up the launches."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.launches, self.kernel_us = 0, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def probe(self, candidate: Candidate) -> float | Failure:
        """Launch a candidate once, and count that launch."""
        looked = self._runner.probe(candidate)
        if isinstance(looked, float):
            self._count(1, looked)
        return looked

    def check(self, candidate: Candidate) -> Checked | Failure:
        """Check a candidate, and count its launches, each as long as the first look."""
        checked = self._runner.check(candidate)
        if isinstance(checked, Checked):
            self._count(CHECK_LAUNCHES, CHECK_LAUNCHES * checked.first_look_us)
        return checked

    def sample(self, candidates: Sequence[Candidate], *, rounds: int, regime: str) -> list[Batch | Failure]:
        """Take samples, and count a launch for each of them, or as many as its CUDA graph holds."""
        batches = self._runner.sample(candidates, rounds=rounds, regime=regime)
        for batch in batches:
            if isinstance(batch, Batch):
                each = max(1, batch.conditions.graph_launches)
                self._count(each * len(batch.samples_us), each * sum(batch.samples_us))
        return batches

    def _count(self, launches: int, microseconds: float) -> None:
        self.launches += launches
        self.kernel_us += microseconds


class RaceMethod:
    """Our race, with the rules of `tiledsched tune`.

    Its inputs and the reference that refuses wrong results are drawn and computed within the time of `choose`.
    """

    name = "race"

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._warm = False

    def prepare(self, problem: Problem, candidates: Sequence[Candidate]) -> None:
        """Once: go the whole way of one candidate, so that whatever CuPy compiles for itself is compiled."""
        if not self._warm:
            self._runner.begin(problem)
            self._runner.check(candidates[0])
            self._warm = True

    def choose(self, problem: Problem, candidates: Sequence[Candidate]) -> Choice:
        """Race them; the default is preferred within a tie."""
        counted = Counted(self._runner)
        counted.begin(problem)
        result = race(counted, problem, candidates, preference=(candidates[0].schedule,))
        failures = sum(not isinstance(outcome, Measurement) for outcome in result.outcomes)
        return Choice(
            schedule=result.winner.schedule if result.winner else None,
            estimate_us=result.winner.median_us if result.winner else None,
            ties=result.ties,
            launches=counted.launches,
            kernel_seconds=counted.kernel_us / 1e6,
            failures=failures,
        )


class TorchMethod:
    """What the methods that launch through torch and cuTile share: inputs, and kernels with given machine code."""

    def __init__(self, kernel: KernelClass) -> None:
        self._kernel = kernel
        self._arrays: dict[str, Any] = {}
        self._device: Any = None

    def prepare(self, problem: Problem, candidates: Sequence[Candidate]) -> None:
        """Inputs and outputs on the current CUDA device; one launch of the default, to start cuTile.

        Raises:
            MeasureError: no torch, or no CUDA device; a kernel of several launches, which cuTile's search cannot time.
        """
        try:
            import cuda.tile as ct
            import torch
        except ImportError as error:
            raise MeasureError(f"{error.name} is not installed; run: {installing('gpu')}") from error
        if not torch.cuda.is_available():
            raise MeasureError("torch sees no CUDA device; run: tiledsched doctor")
        from tiledsched.rivals.methods import as_tensors

        properties = torch.cuda.get_device_properties(0)
        self._device = DeviceFacts(f"sm_{properties.major}{properties.minor}", properties.multi_processor_count)
        stored = random_inputs(self._kernel, numpy, numpy.random.default_rng(0), problem)
        tensors = as_tensors(torch, problem, stored)
        inputs = (spec.name for spec in input_specs(self._kernel, problem))
        self._arrays = {name: _to_device(each) for name, each in zip(inputs, tensors, strict=True)}
        self._arrays |= {
            spec.name: self._scratch(spec) for spec in output_specs(self._kernel, problem) if spec.role == "out"
        }
        ct.launch(torch.cuda.current_stream(), *self._launch(candidates[0], problem))
        torch.cuda.synchronize()

    def _launch(self, candidate: Candidate, problem: Problem) -> tuple[Any, Any, tuple[Any, ...]]:
        """Grid, kernel and arguments: what `ct.launch` takes after the stream."""
        kernel = built_kernel(self._kernel, candidate, problem, self._device)
        return self._grid(candidate, problem), kernel, self._arguments(candidate, problem)

    def _grid(self, candidate: Candidate, problem: Problem) -> tuple[int, int, int]:
        return only_step(self._kernel, candidate, problem, self._device).grid

    def _arguments(self, candidate: Candidate, problem: Problem) -> tuple[Any, ...]:
        step, found = only_step(self._kernel, candidate, problem, self._device), []
        for each in step.arguments:
            if each.kind in ("scalar", "constant"):
                found.append(each.value)
            elif each.name in self._arrays:
                found.append(self._arrays[each.name])
            else:
                found.append(self._scratch(self._kernel.array_spec(each.name, problem, candidate.schedule)))
        return tuple(found)

    def _scratch(self, spec: ArraySpec) -> Any:
        import torch

        made = [
            torch.zeros(shape, device="cuda", dtype=torch.bool if spec.dtype == "bool_" else getattr(torch, spec.dtype))
            for shape in spec.shapes
        ]
        return made if spec.listed else made[0]


@dataclass(frozen=True)
class DeviceFacts:
    """The facts of a device that a grid may depend on."""

    arch: str
    """Arch, e.g. sm_90."""
    sm_count: int
    """Number of multiprocessors."""


def _to_device(value: Any) -> Any:
    return [each.cuda() for each in value] if isinstance(value, list) else value.cuda()


def only_step(kernel: KernelClass, candidate: Candidate, problem: Problem, device: Any) -> Any:
    """The only launch of a schedule.

    Raises:
        MeasureError: it has several.
    """
    from tiledsched.core.launches import steps

    found = steps(kernel, problem, candidate.schedule, device)
    if len(found) != 1:
        raise MeasureError(
            f"{candidate.schedule.short()} takes {len(found)} launches, and cuTile's search times one; leave "
            "those methods out with --methods race"
        )
    return found[0]


def built_kernel(kernel: KernelClass, candidate: Candidate, problem: Problem, device: Any) -> Any:
    """A cuTile kernel object that launches the candidate's machine code and never compiles.

    cuTile asks the kernel object for machine code when it is first launched (`kernel._compile`; not public, and pinned
    by a test). This one answers with the artifact, so nothing has to be compiled ahead of a launch, and every method
    measures the same bytes. `replace_hints` would make a kernel that compiles; here it changes nothing, because the
    hints are in the machine code already.
    """
    import cuda.tile as ct

    from tiledsched.core.launches import annotated, signature, symbol

    step = only_step(kernel, candidate, problem, device)
    expected = signature(kernel, problem, candidate.schedule, step).calling_convention.code

    class Built(ct.kernel):
        def _compile(self, signature: Any, *context: Any, **more: Any) -> tuple[bytes, str, None, tuple[()]]:
            asked = signature.calling_convention.code
            if asked != expected:
                raise MeasureError(
                    f"cuTile launches with calling convention {asked}, the programs were built for "
                    f"{expected}; install the cuda-tile they were built with"
                )
            return parts(candidate.artifact.cubin)[0], symbol(kernel), None, ()

        def replace_hints(self, **hints: Any) -> Built:
            return self

    return Built(annotated(kernel, step, problem, candidate.schedule))


class InTurn(TorchMethod):
    """Times one candidate after the other with a fixed number of launches back to back; the smallest mean wins.

    Three launches to warm up, then twenty, each behind an L2 flush and between events, queued without a pause: what
    most tuners do.
    """

    name = "in-turn"

    def choose(self, problem: Problem, candidates: Sequence[Candidate]) -> Choice:
        """Time each alone, in the order given."""
        import cuda.tile as ct
        import torch

        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        flush = torch.empty(max(2 * l2_bytes, LEAST_FLUSH_BYTES), dtype=torch.uint8, device="cuda")
        stream = torch.cuda.current_stream()
        means: list[tuple[float, Schedule]] = []
        for candidate in candidates:
            try:
                launch = self._launch(candidate, problem)
                mean_us = back_to_back(torch, lambda launch=launch: ct.launch(stream, *launch), flush)  # type: ignore[misc]
            except MeasureError:
                raise
            except Exception:  # a failed launch costs one candidate
                continue
            means.append((mean_us, candidate.schedule))
        best = min(means, key=lambda pair: pair[0], default=(None, None))
        each = WARM_UP_LAUNCHES + TIMED_LAUNCHES
        return Choice(
            schedule=best[1],
            estimate_us=best[0],
            launches=each * len(means),
            kernel_seconds=each * sum(us for us, _ in means) / 1e6,
            failures=len(candidates) - len(means),
        )


def back_to_back(torch: Any, call: Callable[[], Any], flush: Any) -> float:
    """Mean microseconds of `TIMED_LAUNCHES` calls after `WARM_UP_LAUNCHES`, all queued before the first is read."""
    for _ in range(WARM_UP_LAUNCHES):
        call()
    queued = []
    for _ in range(TIMED_LAUNCHES):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        before.record()
        call()
        after.record()
        queued.append((before, after))
    torch.cuda.synchronize()
    return statistics.fmean(before.elapsed_time(after) * 1e3 for before, after in queued)


class Exhaustive(TorchMethod):
    """`cuda.tile.tune.exhaustive_search`: batches of five until each mean is known to 1% or cannot be among the best."""

    name = "exhaustive"

    def choose(self, problem: Problem, candidates: Sequence[Candidate]) -> Choice:
        """Search all of them, with the defaults of cuTile."""
        import cuda.tile.tune as tune
        import torch

        try:
            found = tune.exhaustive_search(
                candidates,
                torch.cuda.current_stream(),
                lambda each: self._grid(each, problem),
                lambda each: self._kernel_object(each, problem),
                lambda each: self._arguments(each, problem),
                quiet=True,
            )
        except ValueError:  # its word for: no candidate works
            return Choice(schedule=None, estimate_us=None, launches=0, kernel_seconds=0.0, failures=len(candidates))
        launches = [EXHAUSTIVE_WARM_UP_LAUNCHES + one.num_samples for one in found.successes]
        spent_us = sum(count * one.mean_us for count, one in zip(launches, found.successes, strict=True))
        return Choice(
            schedule=found.best.config.schedule,
            estimate_us=found.best.mean_us,
            launches=sum(launches),
            kernel_seconds=spent_us / 1e6,
            failures=len(found.failures),
        )

    def _kernel_object(self, candidate: Candidate, problem: Problem) -> Any:
        return built_kernel(self._kernel, candidate, problem, self._device)


class ExhaustiveJit(Exhaustive):
    """The same search as users run it: cuTile compiles each kernel at its first launch.

    Programs were built on this machine before, so that cuTile finds their machine code in its disk cache and compiles
    none; what remains is its own work before the first launch of a kernel.
    """

    name = "exhaustive-jit"

    def _kernel_object(self, candidate: Candidate, problem: Problem) -> Any:
        from tiledsched.core.launches import tile_kernels

        return tile_kernels(self._kernel, {candidate.artifact.arch: candidate.schedule}, problem, self._device)[0]


def make_methods(names: Sequence[str], kernel: KernelClass, runner: Runner) -> list[SelectionMethod]:
    """The methods of these names, in this order."""
    makers: dict[str, Callable[[], SelectionMethod]] = {
        "race": lambda: RaceMethod(runner),
        "in-turn": lambda: InTurn(kernel),
        "exhaustive": lambda: Exhaustive(kernel),
        "exhaustive-jit": lambda: ExhaustiveJit(kernel),
    }
    return [makers[name]() for name in names]


def versions() -> str:
    """Versions of what decides the times besides the GPU: `cuda-tile 1.7.0, tileiras 13.4.92, torch 2.11.0, cupy
    14.2.0`.
    """
    packages = {
        "tiledsched": "tiledsched",
        "cuda-tile": "cuda-tile",
        "tileiras": "nvidia-cuda-tileiras",
        "torch": "torch",
        "cupy": "cupy-cuda13x",
    }
    found = ((name, package_version(package)) for name, package in packages.items())
    return ", ".join(f"{name} {version}" for name, version in found if version)
