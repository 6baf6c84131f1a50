"""Other implementations of the same problems, which `bench` times: a module for each kernel that ships."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule

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
            times = {name: _look_us(variant, tensors) for name, variant in variants.items()}
            worked = {name: us for name, us in times.items() if isinstance(us, float)}
            if not worked:
                raise next(error for error in times.values() if isinstance(error, Exception))
            chosen.append(variants[min(worked, key=lambda name: worked[name])])
        return chosen[0](*tensors)

    return call


def _look_us(variant: Callable[..., Any], tensors: tuple[Any, ...]) -> float | Exception:
    import torch

    try:
        variant(*tensors)  # compiles, and tunes what tunes itself
        times = []
        for _ in range(LOOKS):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(4_000_000)  # two milliseconds: the host queues what follows meanwhile
            before.record()
            variant(*tensors)
            after.record()
            after.synchronize()
            times.append(float(before.elapsed_time(after)) * 1e3)
        return min(times)
    except Exception as error:
        return error
