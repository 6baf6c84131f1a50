"""Other implementations of the same problems, which `bench` times: a module for each kernel that ships."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.measure.torch_timing import TorchStopwatch, host_cost_us

if TYPE_CHECKING:
    from tiledsched.core.space import SearchSpace

Rivals = Mapping[str, Callable[..., Any]]
"""Name -> function that takes the kernel's inputs as torch tensors and returns its outputs, both in the order declared."""
LOOKS = 5


def module_of(kernel: KernelClass) -> Any:
    """The module in this package that has the kernel's rivals; None where there is none."""
    name = f"{__name__}.{kernel.name}"
    if not kernel.name.isidentifier() or importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name)


def rivals_of(kernel: KernelClass, p: Problem) -> Rivals:
    """The rivals of a kernel on a problem: from the kernel's module here, or else from the kernel itself."""
    module = module_of(kernel)
    found: Rivals = module.rivals(p) if module is not None else kernel.rivals(p)
    return found


def untuned(space: SearchSpace, problem: Problem) -> Schedule:
    """The schedule of the kernel as one would first write it: from its module here, or else the space's default."""
    own = getattr(module_of(problem.declaration), "untuned_schedule", None)
    found: Schedule = own(space.arch) if own else space.default(problem)
    # No cluster is what the compiler takes where it is left to it; grids divide by the number.
    return found.replace(num_ctas=1) if found.get("num_ctas") == 0 else found


def compiled(function: Callable[..., Any], mode: str = "max-autotune-no-cudagraphs") -> Callable[..., Any]:
    """The function under `torch.compile`, for exactly the shapes of the first call. The default mode tries every
    autotuning choice.
    """
    made: list[Callable[..., Any]] = []

    def call(*tensors: Any) -> Any:
        if not made:
            import torch

            torch.compiler.reset()  # else it gives up on a function that it has compiled for eight problems
            made.append(torch.compile(function, dynamic=False, mode=mode))
        return made[0](*tensors)

    return call


def gradients_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What computes the gradients of a function's tensors, and nothing else, from those of its outputs.

    A call takes the latter in a tuple, then the tensors. The function itself runs only where these are others than before.
    """
    graph: list[Any] = []

    def call(gradients: tuple[Any, ...], *tensors: Any) -> Any:
        import torch
        from torch._functorch import config

        key = [(each.data_ptr(), each._version) for each in tensors]
        new = graph[:1] != [key]
        # Compiled code may otherwise use up what it saved, and then takes gradients once only.
        with config.patch(donated_buffer=False) if new else nullcontext():
            if new:
                with torch.enable_grad():
                    leaves = [each.detach().requires_grad_() for each in tensors]
                    made = function(*leaves)
                graph[:] = key, leaves, made if isinstance(made, tuple) else (made,)
            return torch.autograd.grad(graph[2], graph[1], gradients, retain_graph=True)

    return call


def into(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with an `out=` argument: every call writes into the same output."""
    outputs: list[Any] = []

    def call(*tensors: Any) -> Any:
        if not outputs:
            outputs.append(function(*tensors))
        return function(*tensors, out=outputs[0])

    return call


def fastest(variants: Rivals) -> Callable[..., Any]:
    """The variant that is fastest on the tensors of the first call. Variants that refuse those tensors are left out."""
    chosen: list[Callable[..., Any]] = []

    def call(*tensors: Any) -> Any:
        if not chosen:
            times: dict[str, float] = {}
            refusals: list[Exception] = []
            for name, variant in variants.items():
                try:
                    times[name] = _look_us(partial(variant, *tensors))
                except Exception as error:
                    refusals.append(error)
            if not times:
                raise refusals[0]
            chosen.append(variants[min(times, key=lambda name: times[name])])
        return chosen[0](*tensors)

    return call


def _look_us(call: Callable[[], Any]) -> float:
    """Rough GPU time of a call in microseconds."""
    import torch

    call()  # compiles, and tunes what tunes itself
    watch = TorchStopwatch(torch, [call], torch.empty(1, device="cuda"), host_us=host_cost_us(torch, call))
    return min(watch.read(watch.queue(0, paced=True)) for _ in range(LOOKS))


_tile_kernels: dict[tuple[Any, ...], Any] = {}
"""Kernel objects by kernel, schedule and function. cuTile compiles once for each kernel object and problem class, so they are
used again.
"""


def arch_of(torch: Any) -> str:
    """The arch of torch's current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"sm_{properties.major}{properties.minor}"


def schedule_launch(torch: Any, kernel: KernelClass, problem: Problem, schedule: Schedule) -> Callable[..., None]:
    """What launches a kernel of one tile function on a schedule, given its arrays; cuTile compiles it at the first launch."""
    import cuda.tile as ct

    from tiledsched.core.device import arch_spec
    from tiledsched.core.launches import steps, tile_kernels

    arch = arch_of(torch)
    device = arch_spec(arch)
    (step,) = steps(kernel, problem, schedule, device)
    key = (kernel, arch, schedule, step.function)
    if key not in _tile_kernels:
        (_tile_kernels[key],) = tile_kernels(kernel, {arch: schedule}, problem, device)
    tile_kernel = _tile_kernels[key]
    return lambda *arrays: ct.launch(torch.cuda.current_stream(), step.grid, tile_kernel, (*arrays, *step.tail))
