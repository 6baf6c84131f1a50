"""The launches of a plan: on the tensors' device, on its current stream, with the arrays the kernel needs beside them."""

from __future__ import annotations

from typing import Any

import torch

from tiledsched.core.errors import LaunchError
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention.rivals import empty_output
from tiledsched.ops.features import NOTHING, AttentionFeatures
from tiledsched.ops.plans import Launch, Plan
from tiledsched.serve import launch as launching
from tiledsched.serve.launch import (
    call_rival,
    concerns_rivals,
    describe_failure,
    has_run,
    program_key,
    refuse_capture,
    scratch_arrays,
    serving_rival,
)
from tiledsched.serve.process import warn_once
from tiledsched.serve.rivals import ELSEWHERE


def launch_plan(
    plan: Plan,
    q: Any,
    k: Any,
    v: Any,
    *,
    first: bool = False,
    keep_zeros: bool = False,
    beside: AttentionFeatures = NOTHING,
) -> Any:
    """Queue the launch and return its output, or output and log-sum-exp.

    Args:
        plan: of q, k and v.
        q, k, v: CUDA tensors.
        first: whether the plan was never launched; its program may have to be compiled, which no capture allows.
        keep_zeros: whether zeros that the kernel leaves as it found them may be kept for the next launch. Not where torch
            may have lent the memory for one graph only, as in compiled code.
        beside: what is asked for beside, on the same device.

    Raises:
        LaunchError: cuTile or the driver refused it, or, with `first`, a CUDA graph is being captured.
    """
    index = plan.launch_on
    if index != launching.current_device():  # cuTile launches on the current device, whatever the tensors say
        if index == ELSEWHERE:
            if concerns_rivals(plan, first):
                return _launch_rival(plan, q, k, v, first, keep_zeros, beside)
            return launch_plan(plan.own, q, k, v, keep_zeros=keep_zeros, beside=beside)  # the rival is for graphs alone
        with torch.cuda.device(index):
            return launch_plan(plan, q, k, v, first=first, keep_zeros=keep_zeros, beside=beside)
    stream = launching.current_stream(index)
    out = empty_output(q, plan.columns) if plan.columns else torch.empty_like(q)
    arrays: tuple[Any, ...] = (q, k, v, out)
    if plan.extra_arrays:
        arrays = (*arrays, *scratch_arrays(plan.extra_arrays, q.device, stream if keep_zeros else None))
        if plan.asked:
            arrays = with_features(arrays, plan.asked, q, beside)
    if first:
        key = program_key(plan.kernel, plan.constants, index, arrays)
        refuse_capture(key, "sdpa", plan.problem)
    try:
        if plan.in_turn:
            for each in plan.in_turn:
                plan.launch(stream, each.grid, each.kernel, arguments_of(each, arrays))
        else:
            plan.launch(stream, plan.grid, plan.kernel, arrays + plan.tail)
        if plan.sync and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(index)
    except Exception as error:
        raise LaunchError(describe_failure("sdpa", plan.problem, plan.served, plan.sync, error)) from error
    if first:
        has_run(key)
    return (out, arrays[4].squeeze(-1)) if plan.lse else out


def _launch_rival(plan: Plan, q: Any, k: Any, v: Any, first: bool, keep_zeros: bool, beside: AttentionFeatures) -> Any:
    """What the rival that serves this call computes, in the layout of our own output; where none does, or it fails later, what
    our own kernel does.

    Raises:
        LaunchError: it failed in a capture, or, `RivalError`, in its first call; or of our own kernel.
    """
    lengths = longest(plan.problem, beside)

    def given() -> tuple[Any, ...]:
        return (q, k, v, *(each for each in beside.for_kernel(q) if each is not None), *(lengths or ()))

    rival = None if lengths is None else serving_rival(plan, given, first=first)
    if rival is None:
        first = first or lengths is None
        return launch_plan(plan.own, q, k, v, first=first, keep_zeros=keep_zeros, beside=beside)
    if first and plan.in_graphs is None:  # so that a capture finds our own program loaded
        launch_plan(plan.own, q, k, v, first=True, beside=beside)
    try:
        out = call_rival(rival, given(), plan, first=first)
    except LaunchError as error:  # of tensors unlike the first ones, say
        if first or torch.cuda.is_current_stream_capturing():
            raise
        warn_once(f"{error}; our own kernel is served instead")
        return launch_plan(plan.own, q, k, v, first=True, beside=beside)
    if plan.columns or out.stride() != q.stride():
        wanted = empty_output(q, v.shape[3])
        return out if out.stride() == wanted.stride() else wanted.copy_(out)
    return out


def longest(problem: Problem, beside: AttentionFeatures) -> tuple[int, ...] | None:
    """What a rival is told beside the tensors: rows and keys of the longest packed sequence, or nothing of those not packed.

    None where no rival can be called: nobody said how long they are, which only the device knows; or rows and keys are packed
    apart under a mask aligned at the top left, which rivals have for those that are packed alike.
    """
    if not problem.packed:
        return ()
    alike = beside.table is None and (beside.cu_k is beside.cu_q or beside.cu_k.data_ptr() == beside.cu_q.data_ptr())
    if problem.causal and problem.alignment == "top_left" and not alike:
        return None
    most_k = problem.seq_k if problem.page else beside.most_k or (beside.most_q if alike else 0)
    return (beside.most_q, most_k) if beside.most_q and most_k else None


def with_features(arrays: tuple[Any, ...], count: int, q: Any, beside: AttentionFeatures) -> tuple[Any, ...]:
    """The arrays of a launch with its sinks, starts, lengths and so on, the last `count`, where they are asked for."""
    given = beside.for_kernel(q)[:count]
    last = zip(given, arrays[-count:], strict=True)
    return (*arrays[:-count], *(scratch if own is None else own for own, scratch in last))


def arguments_of(launch: Launch, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """What one of several launches takes of the arrays of all, and its numbers."""
    return launch.pick(arrays) + launch.tail


def all_arguments(
    plan: Plan, q: Any, k: Any, v: Any, beside: AttentionFeatures = NOTHING
) -> list[tuple[Any, tuple[Any, ...]]]:
    """The kernel object of each launch of `plan`, and everything it takes."""
    arrays = (q, k, v, empty_output(q, v.shape[3]), *scratch_arrays(plan.extra_arrays, q.device, None))
    if plan.asked:
        arrays = with_features(arrays, plan.asked, q, beside)
    if plan.in_turn:
        return [(each.kernel, arguments_of(each, arrays)) for each in plan.in_turn]
    return [(plan.kernel, (*arrays, *plan.tail))]
