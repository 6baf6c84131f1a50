"""What `sdpa` would do had nobody tuned a problem's suite: the policy beside the table, on problems that it does not know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tiledsched.bench.methods import Call
from tiledsched.core import config
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.suites import ALL_MODELS
from tiledsched.serve import process
from tiledsched.serve.entries import load_entries, table_of
from tiledsched.serve.lookup import Served
from tiledsched.serve.plan_cache import PlanCache
from tiledsched.store.records import Entry


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
def _entries(arch: str) -> list[Entry]:
    return load_entries(process.settings(), {arch}, Attention.name)


config.watchers.append(_entries.cache_clear)
_plans: PlanCache[Any] = PlanCache(lambda *given: given)
"""By problem and device: a bench asks for the call, and then for what it was."""


def left_out_call(arrays: Any) -> Call:
    """The call of an `AttentionArrays`: our kernel on the policy's choice, or the rival that is expected to be faster.

    Raises:
        UnsupportedError: sequences are packed, or keys lie in pages.
    """
    return plan_call(arrays, *left_out_plan(arrays))


def left_out_plan(arrays: Any) -> tuple[Any, Any]:
    """Its plan, launched once and kept, and what is asked for beside."""
    if arrays.problem.is_varlen:
        raise UnsupportedError("it knows no packed sequences, and no pages")
    return chosen_plan(
        _plans, arrays, lambda: serve_left_out(arrays.problem, process.device_facts(arrays.q.get_device()))
    )


def chosen_plan(plans: PlanCache[Any], arrays: Any, choose: Callable[[], Served]) -> tuple[Any, Any]:
    """The plan of what `choose` answers, launched once and kept in `plans`, and what is asked for beside.

    Raises:
        UnsupportedError: why there is no plan.
    """
    from tiledsched.ops.plans import make_plan

    causal, beside = arrays.beside

    def make() -> Any:
        return make_plan(arrays.q, arrays.k, arrays.v, causal, None, False, choose(), beside)

    return launched_plan(plans, arrays, make, causal, beside), beside


def plan_call(arrays: Any, plan: Any, beside: Any) -> Call:
    """The launch of a plan on the arrays it was made for."""
    from tiledsched.ops.launching import launch_plan

    return lambda: launch_plan(plan, arrays.q, arrays.k, arrays.v, keep_zeros=True, beside=beside)


def launched_plan(
    plans: PlanCache[Any],
    arrays: Any,
    make: Callable[[], Any],
    causal: str | None,
    beside: Any,
    part: Callable[[Any], Any] = lambda plan: plan,
) -> Any:
    """The plan that `plans` keep for a problem, made and launched the first time: as in `sdpa`, what was not measured and spills
    gives way to the next choice.

    Args:
        plans: by problem and device.
        arrays: an `AttentionArrays`.
        make: the plan, or why there is none.
        causal: as plans are told.
        beside: what is asked for beside q, k and v.
        part: what is launched of the next choice's plan.

    Raises:
        UnsupportedError: why there is no plan.
    """
    from tiledsched.ops.launching import launch_plan
    from tiledsched.ops.plans import default_plan

    tensors = (arrays.q, arrays.k, arrays.v)
    key = (arrays.problem, arrays.q.get_device())

    def instead(plan: Any) -> Any:
        found = default_plan(plan, *tensors, causal, None, False, beside)
        return found and part(found)

    if key not in plans.ready:
        plan = plans.find(key, make)
        if isinstance(plan, str):
            raise UnsupportedError(plan)
        plans.launch_first(key, plan, lambda each: launch_plan(each, *tensors, first=True, beside=beside), instead)
    return plans.ready[key]
