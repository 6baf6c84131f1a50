"""What `sdpa` would do had nobody tuned a problem's suite: the policy beside the table, on problems that it does not know."""

from __future__ import annotations

import functools
from typing import Any

from tiledsched import config
from tiledsched.errors import UnsupportedError
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.suites import ALL_MODELS
from tiledsched.problem import Problem
from tiledsched.serve import process
from tiledsched.serve.entries import load_entries, table_of
from tiledsched.serve.lookup import Served
from tiledsched.serve.plan_cache import PlanCache
from tiledsched.store.records import EntryRecord
from tiledsched.studies.bench.methods import Call


def left_out(problem: Problem) -> frozenset[Problem]:
    """The problem, and all of each suite that has it: a model is new as a whole."""
    suites = (
        Attention.suite(name) for name in Attention.suites if name not in (ALL_MODELS, "coverage", "unseen", "drawn")
    )
    return frozenset([problem]).union(*(suite for suite in suites if problem in suite))


def serve_left_out(problem: Problem, device: process.DeviceFacts) -> Served:
    """The answer of the table without `left_out` of the problem."""
    hidden = left_out(problem)
    entries = [entry for entry in _entries(device.arch) if entry.problem not in hidden]
    return table_of(entries, process.settings(), kernel=Attention).resolve(problem, device.arch, device.name)


@functools.cache
def _entries(arch: str) -> list[EntryRecord]:
    return load_entries(process.settings(), {arch}, Attention.name)


config.watchers.append(_entries.cache_clear)
_plans: PlanCache[Any] = PlanCache(lambda *given: given)
"""By problem and device: a bench asks for the call, and then for what it was."""


def left_out_call(arrays: Any) -> Call:
    """The call of an `AttentionArrays`: our kernel on the policy's choice, or the rival that is expected to be faster.

    Raises:
        UnsupportedError: sequences are packed, or keys lie in pages.
    """
    from tiledsched.attention.launching import launch_plan

    plan, beside = left_out_plan(arrays)
    return lambda: launch_plan(plan, arrays.q, arrays.k, arrays.v, keep_zeros=True, beside=beside)


def left_out_plan(arrays: Any) -> tuple[Any, Any]:
    """Its plan, launched once and kept, and what is asked for beside."""
    from tiledsched.attention.launching import launch_plan
    from tiledsched.attention.plans import default_plan, make_plan

    if arrays.problem.placed:
        raise UnsupportedError("it knows no packed sequences, and no pages")
    causal, beside = arrays.beside
    device, tensors = arrays.q.get_device(), (arrays.q, arrays.k, arrays.v)
    key = (arrays.problem, device)
    if key not in _plans.ready:
        plan = _plans.find(key, lambda: make_plan(
            *tensors, causal, None, False, serve_left_out(arrays.problem, process.device_facts(device)), beside))  # fmt: skip
        if isinstance(plan, str):
            raise UnsupportedError(plan)
        _plans.launch_first(key, plan, lambda each: launch_plan(each, *tensors, first=True, beside=beside),
                            lambda each: default_plan(each, *tensors, causal, None, False, beside))  # fmt: skip
    return _plans.ready[key], beside
