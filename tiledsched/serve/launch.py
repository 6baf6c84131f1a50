"""What every launch from torch has in common: device, stream, scratch arrays, and what a CUDA graph does not allow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from tiledsched.core.arrays import ArraySpec
from tiledsched.core.errors import LaunchError, RivalError
from tiledsched.core.problem import Problem
from tiledsched.core.storage import strides_of
from tiledsched.serve.lookup import Served
from tiledsched.serve.process import warn_once
from tiledsched.serve.rivals import Rival

DEVICE_TYPE = "cuda"
"""Where kernels run."""
# Torch's own fast ways to ask, as its compiled code uses them; a build of torch without CUDA has neither.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform_level = torch._C._functorch.maybe_current_level
_trace_state = torch._C._get_tracing_state
_zeros: dict[tuple[Any, ...], torch.Tensor] = {}
_kept: dict[tuple[Any, ...], list[torch.Tensor]] = {}
MOST_KEPT_BYTES, MOST_KEPT = 1 << 20, 64
"""Of the arrays of one launch, and how many such: making them costs the host more than all else but the launch."""
_launched: set[tuple[Any, ...]] = set()
_refused: set[tuple[Any, ...]] = set()
"""Rivals that failed to be made ready for a capture."""


def is_plain_call() -> bool:
    """Whether nothing stands between a call and the launch: no tracing, transform, mode or autocast is active."""
    return not (_dispatch_modes() or torch.is_autocast_enabled() or _trace_state()) and _transform_level() is None


def is_transformed() -> bool:
    """Whether tensors may be stand-ins without memory: in a mode, or in a transform such as `vmap`."""
    return bool(_dispatch_modes()) or _transform_level() is not None


def torch_type(dtype: str) -> Any:
    """torch's element type for cuTile's name of one."""
    return getattr(torch, dtype.rstrip("_"))


Scratch = tuple[tuple[int, ...], tuple[int, ...], Any, int | None]
"""Of an array that a launch takes beside those of its caller: shape, strides, type, and, where it must hold zeros, its place."""


def scratch_of(specs: Iterable[ArraySpec]) -> tuple[Scratch, ...]:
    """What :func:`scratch_arrays` makes at each launch."""
    return tuple(
        (each.shape, strides_of(each.shape, each.column), torch_type(each.dtype), place if each.zeroed else None)
        for place, each in enumerate(specs)
    )


def scratch_arrays(wanted: tuple[Scratch, ...], device: Any, stream: int | None) -> list[torch.Tensor]:
    """The arrays of a launch: those kept for `stream`, whose launches take turns, where they are small; else, or where it is
    None, new ones, but for zeros, which are kept for a stream in any case.
    """
    if stream is None or torch.cuda.is_current_stream_capturing():
        return _made(wanted, device, stream)
    key = (
        wanted,
        device,
        stream,
        threading.get_ident(),
    )  # several launches of one thread may lie between those of another
    found = _kept.get(key)
    if found is None:
        found = _made(wanted, device, stream)
        if sum(each.nbytes for each in found) <= MOST_KEPT_BYTES:
            if len(_kept) >= MOST_KEPT:
                _kept.clear()
            _kept[key] = found
    return found


def _made(wanted: tuple[Scratch, ...], device: Any, stream: int | None) -> list[torch.Tensor]:
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device=device)
        if place is None
        else _zeroed(shape, dtype, device, stream, place)
        for shape, strides, dtype, place in wanted
    ]


def _zeroed(shape: tuple[int, ...], dtype: Any, device: Any, stream: int | None, place: int) -> torch.Tensor:
    """Zeros, which the kernel leaves behind as it found them: launches on one stream share them, those of one place each.

    A captured graph gets its own, because it may be replayed on any stream.
    """
    if stream is None or torch.cuda.is_current_stream_capturing():
        return torch.zeros(shape, dtype=dtype, device=device)
    key = (device, stream, dtype, shape[1:], place)
    found = _zeros.get(key)
    if found is None or found.shape[0] < shape[0]:
        found = _zeros[key] = torch.zeros(shape, dtype=dtype, device=device)
    return found[: shape[0]]


def program_key(kernels: Any, constants: Any, device: int, arrays: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """All that decides which programs a call runs. It mirrors what cuTile infers from arguments, and says more apart."""
    return (kernels, constants, device, *map(_traits, arrays))


def _traits(array: Any) -> tuple[Any, ...]:
    item = array.element_size()
    shape, strides = array.shape, array.stride()
    return (
        array.dtype,
        shape[-1:],
        array.data_ptr() % 16 == 0,
        tuple((size == 1, size % 16 == 0) for size in shape),
        tuple((stride == 0, stride == 1, stride * item % 16 == 0) for stride in strides),
    )


def refuse_capture(key: tuple[Any, ...], name: str, problem: Problem) -> None:
    """Raise where a CUDA graph is being captured and the programs of `key` never ran.

    Raises:
        LaunchError: so it is.
    """
    if torch.cuda.is_current_stream_capturing() and key not in _launched:
        raise LaunchError(
            f"{problem} has not run in this process yet and a CUDA graph is being captured, in which its "
            f"program cannot be compiled and loaded; call {name} once with these shapes and strides before "
            "the capture (`tiledsched warmup` makes that call short)"
        )


def has_run(key: tuple[Any, ...]) -> None:
    """Remember that the programs of `key` are loaded."""
    _launched.add(key)


def concerns_rivals(plan: Any, first: bool) -> bool:
    """Whether a call of a plan with rivals may be one's: where they serve in graphs alone, only a plan's `first` call, one in a
    capture, and one that warms up for it.
    """
    return first or plan.rival is not None or torch.cuda.is_current_stream_capturing() or _warms_up(plan)


def serving_rival(plan: Any, given: Callable[[], Sequence[Any]], *, first: bool) -> Rival | None:
    """The rival that serves this call of a plan that has one; None for our own kernel.

    A capture allows no compilation, and some rivals are imported and compiled for seconds at their first call. So one that serves
    in graphs alone is called once where a call warms up for a capture, before our kernel, and its output is dropped: its memory
    is free again when ours is asked for. Only a rival that has been called serves in a capture.

    Args:
        plan: of attention or an operator.
        given: the tensors that rivals take.
        first: whether the plan was never launched.

    Raises:
        RivalError: that call failed, and is the first.
    """
    if torch.cuda.is_current_stream_capturing():
        rivals = (plan.in_graphs, plan.rival)
        return next(
            (
                each
                for each in rivals
                if each is not None and each.offer.capturable and _called_as(each, plan) in _launched
            ),
            None,
        )
    if _warms_up(plan):
        try:
            call_rival(plan.in_graphs, given(), plan, first=True)
        except RivalError as error:
            if first:
                raise
            _refused.add(_called_as(plan.in_graphs, plan))
            warn_once(f"{error}; graphs hold our own kernel instead")
    rival: Rival | None = plan.rival
    return rival


def _called_as(rival: Rival, plan: Any) -> tuple[Any, ...]:
    """What tells a rival's calls for a plan from others, in `_launched` and `_refused`."""
    return (rival.name, *plan.rival_key)


def _warms_up(plan: Any) -> bool:
    """Whether an eager call warms up for a capture that is to hold a rival of graphs alone, which was never called: torch has a
    capture's warm-up run on a stream beside the default one, where models seldom run.
    """
    rival = plan.in_graphs
    if rival is None or rival is plan.rival or not current_stream(plan.device):
        return False
    key = _called_as(rival, plan)
    return key not in _launched and key not in _refused


def call_rival(rival: Rival, given: Sequence[Any], plan: Any, *, first: bool) -> Any:
    """What a rival of a plan makes of tensors, on their device.

    Raises:
        LaunchError: it failed; `RivalError` in its first call.
    """
    device, key = plan.device, _called_as(rival, plan)
    first = first or key not in _launched
    try:
        with torch.cuda.device(device) if device != current_device() else nullcontext():
            out = rival.call(*given)
        if plan.sync and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(device)
    except Exception as error:
        kind = RivalError if first else LaunchError
        raise kind(
            f"{plan.problem}: {rival.name}, which was measured to be faster, failed: {type(error).__name__}: {error}; "
            "TILEDSCHED_RIVALS=off serves our own kernel"
        ) from error
    if first:
        has_run(key)
    return out


def describe_failure(name: str, problem: Problem, served: Served, sync: bool, error: Exception) -> str:
    """What failed, on which schedule, and what to do."""
    advice = "this very call failed" if sync else "run again with TILEDSCHED_SYNC=1 to see which call it was"
    if torch.cuda.is_current_stream_capturing():
        advice = f"a CUDA graph is being captured: call {name} once with these tensors before the capture"
    said = str(error).replace("\nUnknown location", "")  # cuTile's line of where, with nothing in it
    return f"{problem} on {served.schedule.short()} ({served.provenance}): {type(error).__name__}: {said}; {advice}"


def spans(tensors: Sequence[Any]) -> int:
    """Elements from the first to the last in memory of the tensor that reaches furthest."""
    return max(
        (
            1 + sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            for each in tensors
        ),
        default=0,
    )
