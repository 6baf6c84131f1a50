"""How `bench` launches attention of ours: our own kernel, whatever is served, and what would be served had nobody tuned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tiledsched.bench.methods import LEFT_OUT, OURS, Call
from tiledsched.core import config
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.rivals import heads_first, rows_first
from tiledsched.kernels.attention.suites import ALL_MODELS
from tiledsched.serve import process
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_entries, table_of
from tiledsched.serve.plan_cache import PlanCache
from tiledsched.store.records import Entry

_plans: PlanCache[Any] = PlanCache(lambda *given: given)
"""Plans by method, problem and device: a bench asks for the call, and later for what it was."""


def served_plan(arrays: Any) -> Any:
    """The plan that the public functions find for an `AttentionArrays`.

    Raises:
        UnsupportedError: they leave the problem to torch.
    """
    return _plan(arrays.call.find_plan())


def served_call(arrays: Any) -> Call:
    """`sdpa`, `sdpa_varlen` or `sdpa_paged`, whatever they run.

    Raises:
        UnsupportedError: they have no such problem, or leave it to torch.
    """
    from tiledsched.ops.sdpa import sdpa
    from tiledsched.ops.varlen import sdpa_paged, sdpa_varlen

    p: Problem = arrays.problem
    if p.window_right and p.alignment != "bottom_right" and (p.is_varlen or p.seq_q != p.seq_k):
        raise UnsupportedError("a window of two sides is aligned at each sequence's last key")
    served_plan(arrays)
    q, k, v, features = arrays.q, arrays.k, arrays.v, arrays.features
    more: dict[str, Any] = {
        "causal": p.alignment if p.causal and not p.window_right else False,
        "sinks": features.sinks,
        "window": (p.window - 1, p.window_right) if p.window_right else p.window or None,
        "softcap": features.softcap or None,
    }
    if not p.is_varlen:
        more |= {"key_starts": features.key_starts, "key_lengths": features.key_lengths}
        named = {name: value for name, value in more.items() if value is not None}
        return lambda: sdpa(q, k, v, **named)
    q, k, v = rows_first(p, q, k, v)
    if not p.packed:
        return lambda: heads_first(sdpa_paged(q, k, v, features.block_table, features.key_lengths, **more))
    if p.page:
        more |= {"block_table": features.block_table, "seqused_k": features.key_lengths}
    lies = (features.cu_seqlens_q, features.cu_seqlens_k, features.max_seqlen_q, features.max_seqlen_k)
    return lambda: heads_first(sdpa_varlen(q, k, v, *lies, **more))


def own_plan(arrays: Any) -> Any:
    """The plan of our own kernel, even where a rival is served; it has been launched once."""
    return launched_plan(OURS, arrays, lambda: served_plan(arrays).own, lambda plan: plan.own)


def left_out(problem: Problem) -> frozenset[Problem]:
    """The problem, and all problems of each suite that holds it: a new model is new as a whole."""
    suites = (
        Attention.suite(name) for name in Attention.suites if name not in (ALL_MODELS, "coverage", "unseen", "drawn")
    )
    return frozenset([problem]).union(*(suite for suite in suites if problem in suite))


@functools.cache
def _entries(arch: str) -> list[Entry]:
    return load_entries(process.settings(), {arch}, Attention.name)


config.watchers.append(_entries.cache_clear)


def left_out_plan(arrays: Any) -> Any:
    """The plan of what would be served if nobody had tuned the suites that hold the problem; it has been launched once.

    Raises:
        UnsupportedError: sequences are packed, or keys lie in pages.
    """
    problem = arrays.problem
    if problem.is_varlen:
        raise UnsupportedError("it knows no packed sequences, and no pages")

    def make() -> Any:
        device, hidden = process.device_facts(arrays.q.get_device()), left_out(problem)
        entries = [entry for entry in _entries(device.arch) if entry.problem not in hidden]
        table = table_of(entries, process.settings(), kernel=Attention)
        return arrays.call.make_plan(table.resolve(problem, device.arch, device.name))

    return launched_plan(LEFT_OUT, arrays, make)


def plan_call(arrays: Any, plan: Any) -> Call:
    """The launch of a plan on the arrays that it was made for."""
    call = arrays.call
    return lambda: call.launch(plan, keep_zeros=True)


def launched_plan(
    name: str, arrays: Any, make: Callable[[], Any], part: Callable[[Any], Any] = lambda plan: plan
) -> Any:
    """The plan of a method on an `AttentionArrays`. The first time, it is made and launched.

    As in `sdpa`, a schedule that does not compile gives way to the next choice.

    Args:
        name: the method; each has its own plan of a problem.
        arrays: the problem and its inputs.
        make: the plan, or why there is none.
        part: what is launched of the next choice's plan.

    Raises:
        UnsupportedError: why there is no plan.
    """
    from tiledsched.serve.execute import launch_first

    key, call = (name, arrays.problem, arrays.q.get_device()), arrays.call

    def next_plan(served: Served) -> Any:
        found = call.make_plan(served)
        return found if isinstance(found, str) else part(found)

    if key not in _plans.ready:
        plan = _plan(_plans.find(key, make))
        launch_first(_plans, key, plan, lambda each: call.launch(each, first=True), next_plan)
    return _plans.ready[key]


def _plan(found: Any) -> Any:
    if isinstance(found, str):
        raise UnsupportedError(found)
    return found
