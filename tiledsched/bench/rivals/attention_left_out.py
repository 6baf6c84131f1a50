"""What `sdpa` would run if nobody had tuned the suites that hold a problem: the serving policy on problems it does not
know.
"""

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
from tiledsched.measure.runner import Device
from tiledsched.serve import process
from tiledsched.serve.entries import load_entries, table_of
from tiledsched.serve.lookup import Served
from tiledsched.serve.plan_cache import PlanCache
from tiledsched.store.records import Entry


def left_out(problem: Problem) -> frozenset[Problem]:
    """The problem, and all problems of each suite that holds it: a new model is new as a whole."""
    suites = (
        Attention.suite(name) for name in Attention.suites if name not in (ALL_MODELS, "coverage", "unseen", "drawn")
    )
    return frozenset([problem]).union(*(suite for suite in suites if problem in suite))


def serve_left_out(problem: Problem, device: Device) -> Served:
    """What the table without these problems serves."""
    hidden = left_out(problem)
    entries = [entry for entry in _entries(device.arch) if entry.problem not in hidden]
    return table_of(entries, process.settings(), kernel=Attention).resolve(problem, device.arch, device.name)


@functools.cache
def _entries(arch: str) -> list[Entry]:
    return load_entries(process.settings(), {arch}, Attention.name)


config.watchers.append(_entries.cache_clear)
_plans: PlanCache[Any] = PlanCache(lambda *given: given)
"""Plans by problem and device: a bench asks for the call, and later for what it was."""


def left_out_call(arrays: Any) -> Call:
    """The call on an `AttentionArrays`: our kernel on the policy's choice, or the rival that is expected to be faster.

    Raises:
        UnsupportedError: sequences are packed, or keys lie in pages.
    """
    return plan_call(*left_out_plan(arrays))


def left_out_plan(arrays: Any) -> tuple[Any, Any]:
    """The plan of the policy's choice, launched once and cached, and the call that it was made for."""
    if arrays.problem.is_varlen:
        raise UnsupportedError("it knows no packed sequences, and no pages")
    return chosen_plan(
        _plans, arrays, lambda: serve_left_out(arrays.problem, process.device_facts(arrays.q.get_device()))
    )


def chosen_plan(plans: PlanCache[Any], arrays: Any, choose: Callable[[], Served]) -> tuple[Any, Any]:
    """The plan of the schedule that `choose` returns, launched once and cached in `plans`, and the call that it was
    made for.

    Raises:
        UnsupportedError: why there is no plan.
    """
    call = arrays.call
    return launched_plan(plans, arrays, call, lambda: call.make_plan(choose())), call


def plan_call(plan: Any, call: Any) -> Call:
    """The launch of a plan on the arrays that it was made for."""
    return lambda: call.launch(plan, keep_zeros=True)


def launched_plan(
    plans: PlanCache[Any],
    arrays: Any,
    call: Any,
    make: Callable[[], Any],
    part: Callable[[Any], Any] = lambda plan: plan,
) -> Any:
    """The plan that `plans` has for a problem. The first time, it is made and launched.

    As in `sdpa`, a schedule that was not measured and spills registers gives way to the next choice.

    Args:
        plans: by problem and device.
        arrays: an `AttentionArrays`.
        call: the call that plans are made for.
        make: the plan, or why there is none.
        part: what is launched of the next choice's plan.

    Raises:
        UnsupportedError: why there is no plan.
    """
    from tiledsched.serve.launch import launch_first

    key = (arrays.problem, arrays.q.get_device())

    def next_plan(served: Served) -> Any:
        found = call.make_plan(served)
        return found if isinstance(found, str) else part(found)

    if key not in plans.ready:
        plan = plans.find(key, make)
        if isinstance(plan, str):
            raise UnsupportedError(plan)
        launch_first(plans, key, plan, lambda each: call.launch(each, first=True), next_plan)
    return plans.ready[key]
