"""Plans: everything one launch needs except q, k and v, made once for each kind of call and kept.

A plan depends on shapes, dtype, device and flags, not on strides: cuTile itself tells apart, at every launch, the
layouts that need other machine code. What the table says is looked up when a plan is made, never in a call.

Reading shapes, strides, dtypes and devices in Python costs most of a lookup. So the plans used last are tried first, each
with torch's own comparison of tensors, in C++; it is stricter than the key, and whatever it refuses is looked up by key.
"""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct  # half of what the first call would take, were it imported there
import torch

from tiledsched import config
from tiledsched.attention.arguments import CAUSAL, check_tensors, needs_gradients, unserved
from tiledsched.config import Settings, load_settings
from tiledsched.errors import ProblemError, UnsupportedError
from tiledsched.kernel import HINT_KNOBS, ArraySpec, kernel_named
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.problem import LARGEST_INT32
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule
from tiledsched.serve.entries import load_table
from tiledsched.serve.lookup import Served, Table
from tiledsched.serve.prebuilt import make_kernel

log = logging.getLogger("tiledsched")
KERNEL = "attention"
MAX_PLANS = 4096
"""Plans kept. A decoding model poses a new problem with every token, so all are forgotten when there are more."""
COMPARED = ((2, 11), (2, 13))
"""Releases of torch whose comparison of tensors was tried. It is torch's own business, made for the guards of compiled code;
under any other release every lookup is by key.
"""
MAX_RECENT = 2
"""Plans tried before the key is made: self- and cross-attention take turns."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything one launch needs except the arrays."""

    launch: Any
    """`cuda.tile.launch`."""
    kernel: Any
    """The cuTile kernel object, shared by every plan with the same entry and hints."""
    grid: tuple[int, int, int]
    """Blocks."""
    extra_arrays: tuple[ArraySpec, ...]
    """Arrays a launch takes after q, k, v and out."""
    scalars: tuple[float, ...]
    """Run-time arguments: the softmax scale times log2(e)."""
    constants: tuple[bool | int | float, ...]
    """Compile-time arguments."""
    tail: tuple[bool | int | float, ...]
    """Both, as they end the arguments of a launch."""
    device: int
    """Index of the CUDA device."""
    sync: bool
    """Whether each launch is waited for."""
    served: Served
    """Where the schedule comes from."""
    problem: Problem
    """What the plan computes."""

    @property
    def scale_log2(self) -> float:
        """Softmax scale times log2(e)."""
        return self.scalars[0]


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What a plan must know of a device."""

    arch: str
    """e.g. sm_90."""
    name: str
    """As the driver calls it."""
    sm_count: int
    """Multiprocessors."""


_lock = threading.RLock()
_plans: dict[tuple[Any, ...], Plan | str] = {}
ready: dict[tuple[Any, ...], Plan] = {}
"""Plans that have been launched, by `plan_key`: their programs are compiled and loaded."""
_recent: tuple[tuple[str | None, float | None, bool, Callable[..., bool], Plan], ...] = ()
"""Plans in `ready` and the calls they are for: causal, scale, lse, and torch's comparison of q, k and v with those of such
a call, in type, sizes, strides, dtype, device, layout, requires_grad and the state of torch's dispatcher.

Plain tuples, which are read fastest; never changed, only replaced, for threads that read them."""
_found_last: Plan | None = None
"""By key."""
_kernels: dict[tuple[Any, ...], Any] = {}
_retired: list[Any] = []
"""Kernels of before a reload. cuTile unloads the programs of a kernel that is gone, and a CUDA graph may still launch them."""


def plan_key(q: Any, k: Any, v: Any, causal: str | None, scale: float | None, lse: bool) -> tuple[Any, ...]:
    """What a plan depends on.

    Strides matter in one case only: where an array is not contiguous it may span more than its elements, and more than
    a 32-bit index reaches.
    """
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, causal, scale, lse)
    if q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        return key
    return (*key, q.stride(), k.stride(), v.stride())


def find_ready(q: Any, k: Any, v: Any, causal: str | None, scale: float | None, lse: bool) -> Plan | None:
    """The plan for a call that needs nothing but a launch; None where there is none yet, or gradients are required.

    Args:
        q, k, v: plain tensors, not nested ones: torch's comparison would end the process.
        causal, scale, lse: as for :func:`find_plan`.
    """
    global _found_last
    for same_causal, same_scale, same_lse, alike, plan in _recent:
        if same_causal == causal and same_scale == scale and same_lse == lse and alike(q, k, v):
            return plan
    if needs_gradients(q, k, v):
        return None
    key = plan_key(q, k, v, causal, scale, lse)
    found = ready.get(key)
    if found is not None and found is _found_last:  # twice running: many kinds in turn change nothing
        _try_first(key, found, q, k, v, causal, scale, lse)
    _found_last = found
    return found


def keep_ready(key: tuple[Any, ...], plan: Plan) -> None:
    """Count `plan` as launched, unless it was forgotten meanwhile: it may be of other settings than the next call."""
    with _lock:
        if _plans.get(key) is plan:
            ready[key] = plan


def _try_first(key: tuple[Any, ...], plan: Plan, q: Any, k: Any, v: Any, causal: str | None, scale: float | None,
               lse: bool) -> None:  # fmt: skip
    """Try `plan` first from now on, where torch's comparison is of use."""
    global _recent
    compare = _comparison()
    if compare is None or q is k or q is v or k is v:  # it takes no tensor twice
        return
    if q.requires_grad or k.requires_grad or v.requires_grad:  # it would not see gradients being enabled
        return
    recent = (causal, scale, lse, compare(q, k, v).check, plan)
    with _lock:
        if ready.get(key) is plan:  # and not forgotten meanwhile
            _recent = (recent, *_recent[: MAX_RECENT - 1])


@functools.cache
def _comparison() -> Any:
    """What makes torch's comparison with given tensors; None where this torch has none, or none as we know it."""
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release not in COMPARED:
        return None
    try:
        guards = importlib.import_module("torch._C._dynamo.guards").TensorGuards
        compare = functools.partial(guards, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        one, other = (torch.empty(shape, device="cpu") for shape in ((2, 3), (3, 2)))
        check = compare(one, other).check
        return compare if check(one, other) is True and check(other, one) is False else None
    except (AttributeError, ImportError, RuntimeError, TypeError):
        return None


def _forget_ready() -> None:
    global _recent, _found_last
    ready.clear()
    _recent, _found_last = (), None


def find_plan(q: Any, k: Any, v: Any, causal: str | None, scale: float | None, lse: bool) -> Plan | str:
    """The plan for a call, or why the kernel cannot serve it.

    Args:
        q, k, v: `[batch, heads, rows, columns]` each.
        causal: top_left, bottom_right or None for no mask.
        scale: softmax scale; None for 1 / sqrt(head_dim).
        lse: whether the log-sum-exp is returned, too.

    Raises:
        ProblemError: shapes, dtypes or devices that do not fit together.
        ConfigError: settings that cannot be, such as a forced knob that makes the schedule invalid.
    """
    key = plan_key(q, k, v, causal, scale, lse)
    found = _plans.get(key)
    if found is None:
        with _lock:
            found = _make_plan(q, k, v, causal, scale, lse)
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
                _forget_ready()
            _plans[key] = found
    return found


def plan_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool | str = False,
             scale: float | None = None, return_lse: bool = False) -> Plan:  # fmt: skip
    """The plan `sdpa` uses for these tensors.

    Raises:
        UnsupportedError: the kernel cannot serve them.
        ProblemError: they do not fit together.
    """
    found = find_plan(q, k, v, CAUSAL[causal], scale, return_lse)
    if isinstance(found, str):
        raise UnsupportedError(f"{found}; sdpa leaves this call to torch's attention")
    return found


def forget_plans() -> None:
    """Make every plan again, under the settings as they are then. Programs stay loaded."""
    with _lock:
        _plans.clear()
        _forget_ready()
        settings.cache_clear()
        table.cache_clear()


def forget_kernels() -> None:
    """Make every kernel again, too: what a bundle or cuTile's cache holds is looked for once more."""
    with _lock:
        forget_plans()
        _retired.extend(_kernels.values())
        _kernels.clear()


config.watchers.append(forget_plans)


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
def table() -> Table:
    """The tuned table of this process, for the GPUs of this machine, read once."""
    archs = {device_facts(index).arch for index in range(torch.cuda.device_count())}
    return load_table(settings(), kernel=KERNEL, archs=archs or None)


@functools.cache
def device_facts(index: int) -> DeviceFacts:
    """What CUDA says of device `index`."""
    properties = torch.cuda.get_device_properties(index)
    return DeviceFacts(arch=f"sm_{properties.major}{properties.minor}", name=properties.name,
                       sm_count=properties.multi_processor_count)  # fmt: skip


def pose_problem(q: Any, k: Any, v: Any, causal: str | None, lse: bool) -> Problem:
    """The problem these tensors pose.

    Raises:
        ProblemError: no problem the kernel has.
    """
    batch, heads, seq_q, head_dim = q.shape
    return Attention.problem(seq_q=seq_q, seq_k=k.shape[2], head_dim=head_dim, dtype=str(q.dtype).removeprefix("torch."),
                   causal=causal is not None, alignment=causal or "top_left", batch=batch, heads=heads,
                   kv_heads=k.shape[1], value_dim=v.shape[3], lse=lse)  # fmt: skip


def _make_plan(q: Any, k: Any, v: Any, causal: str | None, scale: float | None, lse: bool) -> Plan | str:
    check_tensors(q, k, v)
    reason = unserved(q, k, v, None, 0.0)
    if reason:
        return reason
    problem, template = pose_problem(q, k, v, causal, lse), kernel_named(KERNEL)
    if not problem.wide and any(_span(tensor) > LARGEST_INT32 for tensor in (q, k, v)):
        return "a tensor that is not contiguous spans more than 2**31 elements"
    facts = device_facts(q.get_device())
    if not table().known_arch(facts.arch):
        return f"no search space for {facts.arch}"
    try:
        scalars = template.scalars(problem, scale)
    except ProblemError as error:
        return str(error)
    served = table().resolve(problem, facts.arch, facts.name)
    constants = template.constants(served.schedule, problem)
    log.info("%s on %s: %s (%s)", problem, facts.name, served.schedule.short(), served.provenance)
    return Plan(
        launch=ct.launch,
        kernel=_kernel_object(problem, facts.arch, served.schedule),
        grid=template.grid(served.schedule, problem, facts.sm_count),
        extra_arrays=template.workspace(served.schedule, problem),
        scalars=scalars,
        constants=constants,
        tail=(*scalars, *constants),
        device=q.get_device(),
        sync=settings().sync,
        served=served,
        problem=problem,
    )


def _kernel_object(problem: Problem, arch: str, schedule: Schedule) -> Any:
    """One kernel object for every entry and set of hints; it carries the hints of other archs in the table, too."""
    template = kernel_named(KERNEL)
    entry = template.entry(schedule, problem)
    key = (entry, arch, *(schedule[knob] for knob in HINT_KNOBS))
    if key not in _kernels:
        schedules = {arch: schedule}
        for other in table().archs:
            theirs = table().resolve(problem, other).schedule
            if other != arch and template.entry(theirs, problem) is entry:
                schedules[other] = theirs
        _kernels[key] = make_kernel(template, schedules, problem, settings())
    return _kernels[key]


def _span(tensor: Any) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
