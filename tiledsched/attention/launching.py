"""One launch of a plan: on the tensors' device, on its current stream, with the arrays the kernel needs beside them."""

from __future__ import annotations

from typing import Any

import torch

from tiledsched.attention.plans import Plan
from tiledsched.errors import LaunchError

# Torch's own fast ways to ask, as its compiled code uses them; a build of torch without CUDA has neither.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_zeros: dict[tuple[Any, ...], torch.Tensor] = {}
_launched: set[tuple[Any, ...]] = set()


def launch_plan(plan: Plan, q: Any, k: Any, v: Any, *, first: bool = False, keep_zeros: bool = False) -> Any:
    """Queue the launch and return its output, or output and log-sum-exp.

    Args:
        plan: of q, k and v.
        q, k, v: CUDA tensors.
        first: whether the plan was never launched; its program may have to be compiled, which no capture allows.
        keep_zeros: whether zeros that the kernel leaves as it found them may be kept for the next launch. Not where torch
            may have lent the memory for one graph only, as in compiled code.

    Raises:
        LaunchError: cuTile or the driver refused it, or, with `first`, a CUDA graph is being captured.
    """
    index = plan.device
    if index != _current_device():  # cuTile launches on the current device, whatever the tensors say
        with torch.cuda.device(index):
            return launch_plan(plan, q, k, v, first=first, keep_zeros=keep_zeros)
    stream = _current_stream(index)
    out = empty_output(q, plan.problem.value_dim) if plan.problem.value_dim else torch.empty_like(q)
    arrays: tuple[Any, ...] = (q, k, v, out)
    if plan.extra_arrays:
        arrays += _extra_arrays(plan, q, stream if keep_zeros else None)
    if first:
        _refuse_capture(plan, arrays)
    try:
        plan.launch(stream, plan.grid, plan.kernel, arrays + plan.tail)
        if plan.sync and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(index)
    except Exception as error:
        raise LaunchError(_describe_failure(plan, error)) from error
    if first:
        _launched.add(_program_key(plan, arrays))
    return (out, arrays[4].squeeze(-1)) if plan.problem.lse else out


def launch_arguments(plan: Plan, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Everything a launch of `plan` takes."""
    out = empty_output(q, v.shape[3])
    return (q, k, v, out, *_extra_arrays(plan, q, None), *plan.tail)


def empty_output(q: Any, columns: int) -> Any:
    """An output for queries `q` with `columns` columns, in the order of axes that q has in memory."""
    if columns == q.shape[3]:
        return torch.empty_like(q)
    rows_outside_heads = q.stride(1) < q.stride(2)  # [batch, rows, heads, columns] in memory, as projections make it
    order = (0, 2, 1, 3) if rows_outside_heads else (0, 1, 2, 3)
    return torch.empty_permuted((*q.shape[:3], columns), order, dtype=q.dtype, device=q.device)


def _extra_arrays(plan: Plan, q: Any, stream: int | None) -> tuple[Any, ...]:
    """The arrays after q, k, v and out; zeros are those kept for `stream`, or new where it is None."""
    arrays = []
    for extra in plan.extra_arrays:
        dtype = getattr(torch, extra.dtype)
        if extra.zeroed:
            arrays.append(_zeroed(extra.shape, dtype, q.device, stream))
        else:
            arrays.append(torch.empty(extra.shape, dtype=dtype, device=q.device))
    return tuple(arrays)


def _zeroed(shape: tuple[int, ...], dtype: Any, device: Any, stream: int | None) -> Any:
    """Zeros, which the kernel leaves behind as it found them: launches on one stream share them.

    A captured graph gets its own, because it may be replayed on any stream.
    """
    if stream is None or torch.cuda.is_current_stream_capturing():
        return torch.zeros(shape, dtype=dtype, device=device)
    key = (device, stream, dtype, shape[1:])
    found = _zeros.get(key)
    if found is None or found.shape[0] < shape[0]:
        found = _zeros[key] = torch.zeros(shape, dtype=dtype, device=device)
    return found[: shape[0]]


def _refuse_capture(plan: Plan, arrays: tuple[Any, ...]) -> None:
    if torch.cuda.is_current_stream_capturing() and _program_key(plan, arrays) not in _launched:
        raise LaunchError(f"{plan.problem} has not run in this process yet and a CUDA graph is being captured, in which its "
                          "program cannot be compiled and loaded; call sdpa once with these shapes and strides before the "
                          "capture (`tiledsched warmup` makes that call short)")  # fmt: skip


def _program_key(plan: Plan, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that decides which program a launch runs. It mirrors what cuTile infers from arguments, and says more apart."""
    return (plan.kernel, plan.constants, arrays[0].get_device(), *map(_traits, arrays))


def _traits(array: Any) -> tuple[Any, ...]:
    item = array.element_size()
    shape, strides = array.shape, array.stride()
    return (array.dtype, shape[-1], array.data_ptr() % 16 == 0, tuple((size == 1, size % 16 == 0) for size in shape),
            tuple((stride == 0, stride == 1, stride * item % 16 == 0) for stride in strides))  # fmt: skip


def _describe_failure(plan: Plan, error: Exception) -> str:
    schedule = plan.served.schedule.short()
    advice = "run again with TILEDSCHED_SYNC=1 to see which call it was" if not plan.sync else "this very call failed"
    if torch.cuda.is_current_stream_capturing():
        advice = "a CUDA graph is being captured: call sdpa once with these tensors before the capture"
    return f"{plan.problem} on {schedule} ({plan.served.provenance}): {type(error).__name__}: {error}; {advice}"
