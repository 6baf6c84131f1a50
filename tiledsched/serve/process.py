"""What the operators of one process share: the CUDA runtime, settings, tables and kernel objects, each read or made once."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass, field, replace
from typing import Any

import cuda.tile as ct  # importing it here keeps half of its time out of the first call
import torch

from tiledsched.core import config
from tiledsched.core.config import Settings, load_settings, log
from tiledsched.core.launches import Step, annotated
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import HINT_KNOBS, Schedule
from tiledsched.measure.runner import Device
from tiledsched.rivals.offers import Rival
from tiledsched.serve.background import BUILDER, BackgroundBuilder, Build
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_table
from tiledsched.serve.lookup import LookupTable
from tiledsched.serve.plan_cache import PlanCache, lock
from tiledsched.serve.prebuilt import make_kernel

_kernels: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_get_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_get_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_invariant_blocks = 0
"""Blocks of :class:`batch_invariant` in which this process is."""
_retired: list[Any] = []
"""Kernel objects made before a reload. cuTile unloads the programs of a kernel object that is deleted, and a CUDA graph that was
captured earlier may still launch them."""


def read_device(index: int) -> Device:
    """What CUDA reports about device `index`."""
    properties = torch.cuda.get_device_properties(index)
    arch = f"sm_{properties.major}{properties.minor}"
    return Device(name=properties.name, arch=arch, sm_count=properties.multi_processor_count)


def _is_capturing() -> bool:
    """Whether a CUDA graph is being captured. Where CUDA is not used yet, or not there, torch may raise an error."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@dataclass(kw_only=True, eq=False, slots=True)  # slots are read fastest
class Runtime:
    """The functions of CUDA, torch and cuTile through which serving works, and what has been done with them in this process.

    Tests pass another one to :func:`use_runtime`, so that serving runs without a GPU.
    """

    device_type: str = "cuda"
    """Type of the devices whose tensors are served."""
    current_device: Callable[[], int] = _get_device
    """Index of the current device, by the fast function that torch's compiled code uses; None in a build without CUDA."""
    current_stream: Callable[[int], int] = _get_stream
    """The stream that is current on a device; None in a build without CUDA."""
    on_device: Callable[[int], AbstractContextManager[Any]] = torch.cuda.device
    """Makes a device the current one."""
    is_capturing: Callable[[], bool] = _is_capturing
    """Whether a CUDA graph is being captured."""
    synchronize: Callable[[int], None] = torch.cuda.synchronize
    """Waits for everything that was queued on a device."""
    empty: Callable[..., torch.Tensor] = torch._C._dynamo.guards._empty_strided_cuda
    """`empty(shape, strides, dtype)`: a new array on the current device, by the fast function that torch's compiled code uses."""
    launch: Callable[..., Any] = ct.launch
    """`launch(stream, grid, kernel, arguments)`."""
    read_device: Callable[[int], Device] = read_device
    """The properties of a device."""
    load_table: Callable[..., LookupTable] = load_table
    """Reads the tuned table of a kernel."""
    builder: BackgroundBuilder = BUILDER
    """Compiles programs for calls that do not wait for them."""
    loaded: set[tuple[Any, ...]] = field(default_factory=set)
    """Programs and rivals that have run, so that a CUDA graph may hold them."""
    preparing: dict[tuple[Any, ...], Build] = field(default_factory=dict)
    """Rivals that compile themselves in a thread, for calls that do not wait for them."""
    refused: set[tuple[Any, ...]] = field(default_factory=set)
    """Rivals that failed when they were prepared for a capture."""
    zeros: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)
    """Arrays of zeros that launches share, by device, stream, type and place."""
    scratch: dict[tuple[Any, ...], tuple[list[Any], list[int]]] = field(default_factory=dict)
    """Small scratch arrays that launches of one thread on one stream share, and the places of those that are made anew."""


runtime = Runtime()
"""What serving works with now. Read it from this module at each use: :func:`use_runtime` replaces it."""


def use_runtime(other: Runtime) -> Runtime:
    """Serve with another runtime from now on and forget every plan; returns the one used until now."""
    global runtime
    before, runtime = runtime, other
    device_facts.cache_clear()
    forget_kernels()
    return before


@functools.cache
def settings() -> Settings:
    """The settings of this process, read once."""
    found = load_settings()
    if found.log_level is not None:
        log.setLevel(found.log_level.upper())
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler(sys.stderr))
    return found


def wait_for_programs() -> None:
    """Have calls of this process wait for their programs: what is timed is not to be torch, which serves meanwhile."""
    if settings().compile != "wait":
        config.configure(compile="wait")


class batch_invariant(ContextDecorator, metaclass=config.CalledFirst):  # noqa: N801
    """Within the block, or the decorated function, a row's bits do not depend on how many rows are computed with it.

    `with tiledsched.batch_invariant(): tiledsched.matmul(x, w)` is what the setting `numerics` = "invariant" does for a whole
    process. It holds for `sdpa` and every function and operator of a kernel that declares `batch_dims`, in eager calls, in calls
    of compiled functions, and for what a CUDA graph captures within the block; and for all threads, until the last block ends.
    Kernels that declare none, such as those of most gradients, compute as usual.
    """

    def __enter__(self) -> None:
        _enter(1)

    def __exit__(self, *error: object) -> None:
        _enter(-1)


def _enter(blocks: int) -> None:
    """Enter or leave a block of :class:`batch_invariant`. The first and last exchange the plans: calls read no flag."""
    global _invariant_blocks
    with lock:
        before, _invariant_blocks = _invariant_blocks, _invariant_blocks + blocks
        if 0 in (before, _invariant_blocks):
            for cache in PlanCache.every:
                cache.swap()


def is_invariant() -> bool:
    """Whether plans that are made now must compute bits that do not depend on the batch."""
    return _invariant_blocks > 0 or settings().numerics == config.INVARIANT


def table(kernel: KernelClass) -> LookupTable:
    """The tuned table of a kernel for the GPUs of this machine, under the numerics that hold now, read once for each of these."""
    return _table(kernel, config.INVARIANT if is_invariant() else "any")  # type: ignore[arg-type]  # a class is hashable


@functools.cache
def _table(kernel: Any, numerics: str) -> LookupTable:
    archs = {device_facts(index).arch for index in range(torch.cuda.device_count())}
    return runtime.load_table(replace(settings(), numerics=numerics), kernel=kernel, archs=archs or None)


@functools.cache
def device_facts(index: int) -> Device:
    """The properties of device `index`, read once."""
    return runtime.read_device(index)


def log_choice(
    name: str, p: Problem, device: Device, served: Served, rival: Rival | None, in_graphs: Rival | None
) -> None:
    """Log what a new plan serves; stale evidence is a warning, given once for each operator and reason."""
    if served.stale:
        config.warn_once(f"{name}: {served.stale}")
    if not log.isEnabledFor(logging.INFO):  # a model that decodes makes a plan with every token
        return
    more = f"; {rival.name} is served instead: {rival.offer.reason}" if rival else ""
    if in_graphs and in_graphs is not rival:
        more += f"; in a captured graph {in_graphs.name} is served: {in_graphs.offer.reason}"
    log.info("%s: %s on %s: %s (%s)%s", name, p, device.name, served.schedule.short(), served.provenance, more)


def kernel_objects(
    kernel: KernelClass, p: Problem, s: Schedule, device: Device, steps: Sequence[Step]
) -> tuple[Any, ...]:
    """The cuTile kernel object of each of a schedule's launches; plans with the same functions and hints share them."""
    functions = tuple(annotated(kernel, step, p, s) for step in steps)
    prepared = tuple(each.name for step in steps if step.prepares for each in step.arguments)
    key = (kernel, functions, prepared, device.arch, *(s.get(knob) for knob in HINT_KNOBS))
    with lock:
        if key not in _kernels:
            _kernels[key] = tuple(make_kernel(kernel, s, p, settings(), device, runtime.builder))
        return _kernels[key]


def forget_plans() -> None:
    """Have every plan made anew, under the settings that hold then. Programs stay loaded."""
    with lock:
        for cache in PlanCache.every:
            cache.forget()
        settings.cache_clear()
        _table.cache_clear()


def forget_kernels() -> None:
    """Have every plan and every kernel object made anew, so that bundles and cuTile's cache are searched once more."""
    with lock:
        forget_plans()
        _retired.extend(_kernels.values())
        _kernels.clear()


config.watchers.append(forget_plans)
