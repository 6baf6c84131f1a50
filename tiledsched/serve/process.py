"""What the operators of a process share: settings, tables, devices and kernel objects, each read or made once."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tiledsched.core import config
from tiledsched.core.config import Settings, load_settings
from tiledsched.core.launch import Step, annotated, steps
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import HINT_KNOBS, Schedule
from tiledsched.serve.entries import load_table
from tiledsched.serve.lookup import Served, Table
from tiledsched.serve.plan_cache import PlanCache, lock
from tiledsched.serve.prebuilt import make_kernel
from tiledsched.serve.rivals import Rival

log = logging.getLogger("tiledsched")
_kernels: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_retired: list[Any] = []
"""Kernels of before a reload. cuTile unloads the programs of a kernel that is gone, and a CUDA graph may still launch them."""


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What a plan must know of a device."""

    arch: str
    """e.g. sm_90."""
    name: str
    """As the driver calls it."""
    sm_count: int
    """Multiprocessors."""


@functools.cache
def settings() -> Settings:
    """Settings of this process, read once."""
    found = load_settings()
    if found.log_level is not None:
        log.setLevel(found.log_level.upper())
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler(sys.stderr))
    return found


@functools.cache
def table(kernel: KernelClass) -> Table:
    """The tuned table of a kernel for the GPUs of this machine, read once."""
    archs = {device_facts(index).arch for index in range(torch.cuda.device_count())}
    return load_table(settings(), kernel=kernel, archs=archs or None)


@functools.cache
def device_facts(index: int) -> DeviceFacts:
    """What CUDA says of device `index`."""
    properties = torch.cuda.get_device_properties(index)
    return DeviceFacts(
        arch=f"sm_{properties.major}{properties.minor}", name=properties.name, sm_count=properties.multi_processor_count
    )


def tell(
    name: str,
    p: Problem,
    device: DeviceFacts,
    served: Served,
    rival: Rival | None = None,
    in_graphs: Rival | None = None,
) -> None:
    """Log what a new plan serves; that evidence is stale, as a warning, once for each kernel and reason."""
    if served.stale:
        warn_once(f"{name}: {served.stale}")
    if not log.isEnabledFor(logging.INFO):  # a model that decodes has a new plan with every token
        return
    told = f"; {rival.name} is served instead: {rival.offer.reason}" if rival else ""
    if in_graphs and in_graphs is not rival:
        told += f"; in a captured graph {in_graphs.name} is served: {in_graphs.offer.reason}"
    log.info("%s: %s on %s: %s (%s)%s", name, p, device.name, served.schedule.short(), served.provenance, told)


@functools.cache
def warn_once(text: str) -> None:
    """Log it as a warning, once in this process."""
    log.warning("%s", text)


def kernel_objects(
    kernel: KernelClass, p: Problem, s: Schedule, device: DeviceFacts, wanted: Sequence[Step] | None = None
) -> tuple[Any, ...]:
    """What is launched, one object for each step, `wanted` where they are at hand; plans with the same functions and hints
    share them.
    """
    functions = tuple(annotated(kernel, step, p, s) for step in wanted or steps(kernel, p, s, device))
    key = (kernel, functions, device.arch, *(s.get(knob) for knob in HINT_KNOBS))
    with lock:
        if key not in _kernels:
            _kernels[key] = tuple(make_kernel(kernel, {device.arch: s}, p, settings(), device))
        return _kernels[key]


def forget_plans() -> None:
    """Make every plan again, under the settings as they are then. Programs stay loaded."""
    with lock:
        for cache in PlanCache.every:
            cache.forget()
        settings.cache_clear()
        table.cache_clear()


def forget_kernels() -> None:
    """Make every kernel again, too: what a bundle or cuTile's cache holds is looked for once more."""
    with lock:
        forget_plans()
        _retired.extend(_kernels.values())
        _kernels.clear()


config.watchers.append(forget_plans)
