"""`sdpa`: attention on the schedule that the tuned table names.

The first call of a shape resolves its schedule and makes a plan; later calls find the plan in a dictionary and launch.
Nothing is tuned inside a call.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tiledsched.config import Settings, load_settings
from tiledsched.errors import ProblemError, UnsupportedError
from tiledsched.kernels import template_for
from tiledsched.kernels.template import HINT_KNOBS
from tiledsched.problem import MAX_HEAD_DIM, Problem
from tiledsched.schedule import Schedule
from tiledsched.serve.entries import load_table
from tiledsched.serve.lookup import Served, Table

if TYPE_CHECKING:
    import torch

log = logging.getLogger("tiledsched")
KERNEL = "attention"
MAX_ELEMENTS = 2**31 - 1
"""Arrays are indexed with 32-bit integers."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything one launch needs except the arrays."""

    kernel: Any
    """The cuTile kernel object, shared by every plan with the same hints."""
    grid: tuple[int, int, int]
    """Blocks."""
    scale_log2: float
    """Default softmax scale times log2(e)."""
    constants: tuple[bool | int | float, ...]
    """Compile-time arguments."""
    served: Served
    """Where the schedule comes from."""
    problem: Problem
    """What the plan computes."""


_lock = threading.Lock()
_plans: dict[tuple[Any, ...], Plan | None] = {}
_kernels: dict[tuple[Any, ...], Any] = {}
_warned: set[str] = set()


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False,
         scale: float | None = None) -> torch.Tensor:  # fmt: skip
    """Scaled dot-product attention, softmax(scale * q @ k^T) @ v, on the tuned schedule.

    Args:
        q: `[batch, heads, seq_q, head_dim]` CUDA tensor, float16 or bfloat16; any strides; head_dim up to 256.
        k: `[batch, kv_heads, seq_k, head_dim]`, of q's dtype and device; heads a multiple of kv_heads.
        v: like k.
        causal: limit query row i to key columns 0..i (top-left alignment, as in PyTorch).
        scale: positive softmax scale; 1 / sqrt(head_dim) unless given.

    Returns:
        `[batch, heads, seq_q, head_dim]`, of q's dtype. What the kernel cannot serve (CPU tensors, float32, gradients,
        ...) goes to `torch.nn.functional.scaled_dot_product_attention` with one warning per reason.

    Raises:
        UnsupportedError: such an input, where the setting `fallback` is `error`.
        ProblemError: shapes that do not fit together.
    """
    import cuda.tile as ct
    import torch

    key = (q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device,
           k.device, v.device, causal)  # fmt: skip
    try:
        plan = _plans[key]
    except KeyError:
        plan = _plans[key] = _make_plan(q, k, v, causal)
    if plan is None or (scale is not None and not _servable(scale)) or _needs_grad(torch, q, k, v):
        return _fall_back(q, k, v, causal, scale)
    scale_log2 = plan.scale_log2 if scale is None else scale * (plan.scale_log2 / plan.problem.head_dim**-0.5)
    out = torch.empty_like(q)
    ct.launch(torch.cuda.current_stream(q.device), plan.grid, plan.kernel, (q, k, v, out, scale_log2, *plan.constants))
    return out


def plan_for(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> Plan:
    """The plan `sdpa` uses for these tensors.

    Raises:
        UnsupportedError: the kernel cannot serve them.
    """
    reason = _unsupported(q, k, v, None)
    if reason:
        raise UnsupportedError(reason)
    plan = _make_plan(q, k, v, causal)
    assert plan is not None
    return plan


def reload() -> None:
    """Forget the table, the settings and every plan: the next call reads them again."""
    with _lock:
        _plans.clear()
        _warned.clear()
        settings.cache_clear()
        table.cache_clear()


@functools.cache
def settings() -> Settings:
    """Settings of this process, read once."""
    return load_settings()


@functools.cache
def table() -> Table:
    """The tuned table of this process, read once."""
    return load_table(settings(), kernel=KERNEL)


def _needs_grad(torch: Any, *tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _servable(scale: float) -> bool:
    return 1e-37 < scale < 1e37


def _make_plan(q: Any, k: Any, v: Any, causal: bool) -> Plan | None:
    """A plan, or None where torch must do it."""
    if _unsupported(q, k, v, None):
        return None
    import torch

    problem = _problem(q, k, v, causal)
    properties = torch.cuda.get_device_properties(q.device)
    arch = f"sm_{properties.major}{properties.minor}"
    with _lock:
        served = table().resolve(problem, arch, properties.name)
        template = template_for(KERNEL)
        kernel = _kernel_object(problem, arch, served.schedule)
    log.info("%s on %s: %s (%s)", problem, properties.name, served.schedule.short(), served.provenance)
    return Plan(kernel=kernel, grid=template.grid(served.schedule, problem, properties.multi_processor_count),
                scale_log2=template.scalars(problem)[0], constants=template.constants(served.schedule, problem),
                served=served, problem=problem)  # fmt: skip


def _kernel_object(problem: Problem, arch: str, schedule: Schedule) -> Any:
    """One kernel object for every set of hints: it carries the hints of every arch in the table."""
    schedules: dict[str, Schedule] = {arch: schedule}
    for other in table().archs:
        if other != arch:
            schedules[other] = table().resolve(problem, other).schedule
    key = tuple(sorted((name, *(s[knob] for knob in HINT_KNOBS)) for name, s in schedules.items()))
    if key not in _kernels:
        _kernels[key] = template_for(KERNEL).kernel(schedules)
    return _kernels[key]


def _problem(q: Any, k: Any, v: Any, causal: bool) -> Problem:
    """The problem these tensors pose.

    Raises:
        ProblemError: the shapes do not fit together.
    """
    batch, heads, seq_q, head_dim = q.shape
    if k.shape != v.shape:
        raise ProblemError(f"k and v must have one shape, got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ProblemError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in batch (axis 0) and head_dim (axis 3)"
        )
    return Problem(seq_q=seq_q, seq_k=k.shape[2], head_dim=head_dim, dtype=str(q.dtype).removeprefix("torch."),
                   causal=bool(causal), batch=batch, heads=heads, kv_heads=k.shape[1])  # fmt: skip


def _unsupported(q: Any, k: Any, v: Any, scale: float | None) -> str:
    """Why the kernel cannot serve these tensors; empty where it can."""
    import torch

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise ProblemError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.ndim != 4:
            raise ProblemError(f"{name} must be [batch, heads, rows, head_dim], got {tensor.ndim} axes")
    if not q.is_cuda:
        return f"q is on {q.device}; the kernel needs a CUDA device"
    if k.device != q.device or v.device != q.device:
        raise ProblemError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {q.dtype} is not served; use torch.float16 or torch.bfloat16"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise ProblemError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[3] > MAX_HEAD_DIM:
        return f"head_dim {q.shape[3]} is above {MAX_HEAD_DIM}"
    if 0 in q.shape or 0 in k.shape:
        return "a tensor is empty"
    if any(_span(tensor) > MAX_ELEMENTS for tensor in (q, k, v)):
        return "a tensor spans more than 2**31 elements"
    if scale is not None and not _servable(scale):
        return f"scale must be positive and a normal float32 for the kernel, got {scale}"
    major, minor = torch.cuda.get_device_capability(q.device)
    if not table().known_arch(f"sm_{major}{minor}"):
        return f"no search space for sm_{major}{minor}"
    return ""


def _span(tensor: Any) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _fall_back(q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> Any:
    """torch's attention, with one warning per reason, or an error where so configured."""
    import torch

    reason = _unsupported(q, k, v, scale) or "gradients are required and the kernel is forward only"
    if settings().fallback == "error":
        raise UnsupportedError(f"{reason} (setting fallback = error; set it to torch to use torch's attention)")
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"tiledsched.sdpa uses torch's attention: {reason}", stacklevel=3)
    more: Mapping[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, **more)
