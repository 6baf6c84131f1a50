"""Our own kernels as methods of a bench: our kernel whatever is served, what is served, and what would be served untuned.

torch is imported where a method is made, so that methods are chosen without it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tiledsched.core import config
from tiledsched.core.cases import output_specs
from tiledsched.core.device import arch_spec
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.fields import Flag
from tiledsched.core.launches import steps, tile_kernels
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.rivals import Arrays, Call, Method
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.backends import heads_first, longest, rows_first
from tiledsched.kernels.attention.rivals import refuse_features
from tiledsched.kernels.attention.scales import DEFAULT_CAP
from tiledsched.kernels.attention.suites import ALL_MODELS
from tiledsched.rivals.methods import DETERMINISTIC, LEFT_OUT, OURS, SERVED
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_entries, table_of
from tiledsched.store.records import Entry

UNTUNED: dict[str, KnobValue] = {
    "tile_m": 64,
    "tile_n": 64,
    "occupancy": 0,
    "num_worker_warps": 0,
    "num_ctas": 0,
    "latency_k": 0,
    "latency_v": 0,
    "opt_level": 3,
    "accum_mode": "fp32",
    "loop_split": False,
    "block_order": "natural",
    "persistent": "no",
    "kv_direction": "forward",
    "q_subtiles": 1,
    "kv_subtiles": 1,
    "qk_ahead": False,
    "tma_loads": True,
    "tma_store": True,
    "check_bounds": True,
    "division": "approximate",
    "lazy_rescale": False,
}
"""Attention's kernel as one would first write it: 64x64 tiles, and every hint left to the compiler. Knobs not named here have
their defaults.
"""
_tile_kernels: dict[tuple[Any, ...], Any] = {}
"""Kernel objects by kernel, schedule and function. cuTile compiles once for each kernel object and problem class, so they are
used again.
"""


def own_methods(kernel: KernelClass) -> list[Method]:
    """The methods of a kernel that launch our own code, or whatever is served."""
    if kernel is Attention:
        return ATTENTION_METHODS
    found = [
        Method(name=OURS, make=functools.partial(operator_method, own=True), explain=explain_operator),
        Method(name=SERVED, make=operator_method, explain=explain_operator, names_rivals=True),
    ]
    if DETERMINISTIC in kernel.fields:

        def in_fixed_order(arrays: Arrays) -> Arrays:
            return replace(arrays, problem=arrays.problem.replace(deterministic=True))

        found.append(
            Method(
                name=DETERMINISTIC,
                make=lambda arrays: operator_method(in_fixed_order(arrays), own=True),
                explain=lambda arrays, verify: explain_operator(in_fixed_order(arrays), verify),
                by_name=True,
            )
        )
    return found


# Any kernel, as an operator of torch


def operator_call(arrays: Arrays) -> tuple[Any, list[Any]]:
    """The torch operator of the problem's kernel and its arguments: tensors, sizes that the tensors do not show, scalars.

    Flags decide which arrays there are, so that each combination of them is an operator of its own.
    """
    from tiledsched.serve.op import op

    p, kernel = arrays.problem, arrays.problem.declaration
    flags = {name: p.values[name] for name, field in kernel.fields.items() if isinstance(field, Flag)}
    word = "_".join([kernel.name, *(name for name, value in flags.items() if value)])
    operator = op("tiledsched_bench::" + re.sub(r"\W", "_", word), kernel, **flags)
    tensors = arrays.by_name
    given = []
    for each in operator.schema.parameters:
        if each.kind in ("array", "list"):
            given.append(tensors.get(each.name))
        else:
            given.append(p.values[each.name] if each.kind == "field" else each.default)
    return operator, given


def operator_method(arrays: Arrays, *, own: bool = False) -> Call:
    """The operator, whatever it runs, or our own kernel as it launches that, even where a rival is served.

    It gets copies of the arrays that it changes, so that other methods see them unchanged.
    """
    kernel, p, copies = arrays.problem.declaration, arrays.problem, arrays.copies
    operator, given = operator_call(replace(arrays, tensors=copies))
    operator = operator.own if own else operator
    pairs = zip(arrays.specs, copies, strict=True)
    changed = {spec.name: tensor for spec, tensor in pairs if spec.role == "inout"}
    if not changed:
        return lambda: operator(*given)
    names = [spec.name for spec in output_specs(kernel, p)]

    def call() -> Any:
        out = operator(*given)
        made = iter(() if out is None else out if isinstance(out, tuple) else (out,))
        return tuple(changed[name] if name in changed else next(made) for name in names)

    return call


def own_outputs(problem: Problem, tensors: Sequence[Any]) -> Any:
    """What our own kernel computes of some tensors, whatever is served."""
    import torch

    return operator_method(Arrays(torch=torch, problem=problem, tensors=tuple(tensors)), own=True)()


def explain_operator(arrays: Arrays, verify: bool) -> Any:
    """What the operator launches, and why."""
    operator, given = operator_call(arrays)
    return operator.explain(*given, verify=verify)


# Attention, by the public functions


def attention_call(arrays: Arrays) -> Any:
    """The call of the public functions on the inputs of a problem. The longest packed sequence is read from the device."""
    from tiledsched.ops.features import NO_FEATURES, AttentionFeatures
    from tiledsched.ops.plans import AttentionCall

    p, given, (q, k, v) = arrays.problem, arrays.by_name, arrays.tensors[:3]
    features, scales = NO_FEATURES, {}
    if p.kv8:
        k, v = (each.view(arrays.torch.float8_e4m3fn) for each in (k, v))
        scales = {f"{n}_scale": given[f"{n.upper()}Scale"].view(*(-1, 1)[: 1 + (p.kv8 == "page")]) for n in "kv"}
    if p.has_features or p.is_varlen:
        features = AttentionFeatures(
            window=p.window,
            window_right=p.window_right,
            softcap=DEFAULT_CAP if p.softcap else 0.0,
            sinks=given.get("Sinks"),
            key_starts=given.get("Starts"),
            key_lengths=given.get("Lengths"),
            cu_seqlens_q=given.get("CuQ"),
            cu_seqlens_k=given.get("CuK"),
            block_table=given.get("Table"),
            **scales,
            **dict(zip(("max_seqlen_q", "max_seqlen_k"), longest(p, arrays.tensors), strict=False)),
        )
    return AttentionCall(q, k, v, p.alignment if p.causal else None, None, False, features)


def served_plan(arrays: Arrays) -> Any:
    """The plan that the public functions find for a problem.

    Raises:
        UnsupportedError: they leave the problem to torch.
    """
    return _plan(attention_call(arrays).find_plan())


def served_call(arrays: Arrays) -> Call:
    """`sdpa`, `sdpa_varlen` or `sdpa_paged`, whatever they run.

    Raises:
        UnsupportedError: they have no such problem, or leave it to torch.
    """
    from tiledsched.ops.sdpa import sdpa
    from tiledsched.ops.varlen import sdpa_paged, sdpa_varlen

    p = arrays.problem
    if p.window_right and p.alignment != "bottom_right" and (p.is_varlen or p.seq_q != p.seq_k):
        raise UnsupportedError("a window of two sides is aligned at each sequence's last key")
    served_plan(arrays)
    q, k, v, *_, features = attention_call(arrays)
    more: dict[str, Any] = {
        "causal": p.alignment if p.causal and not p.window_right else False,
        "sinks": features.sinks,
        "window": (p.window - 1, p.window_right) if p.window_right else p.window or None,
        "softcap": features.softcap or None,
        "k_scale": features.k_scale,
        "v_scale": features.v_scale,
    }
    if not p.is_varlen:
        more |= {"key_starts": features.key_starts, "key_lengths": features.key_lengths}
        more["q_scale"] = 1.0 if p.q8 else None  # the scales of keys hold it
        named = {name: value for name, value in more.items() if value is not None}
        return lambda: sdpa(q, k, v, **named)
    q, k, v = rows_first(p, q, k, v)
    if not p.packed:
        return lambda: heads_first(sdpa_paged(q, k, v, features.block_table, features.key_lengths, **more))
    if p.page:
        more |= {"block_table": features.block_table, "seqused_k": features.key_lengths}
    lies = (features.cu_seqlens_q, features.cu_seqlens_k, features.max_seqlen_q, features.max_seqlen_k)
    return lambda: heads_first(sdpa_varlen(q, k, v, *lies, **more))


def own_plan(arrays: Arrays) -> Any:
    """The plan of our own kernel, even where a rival is served; it has been launched once."""
    return launched_plan(OURS, arrays, lambda: served_plan(arrays).own, lambda plan: plan.own)


def left_out(problem: Problem) -> frozenset[Problem]:
    """The problem, and all problems of each suite that holds it: a new model is new as a whole."""
    names = set(Attention.suites) - {ALL_MODELS, "coverage", "unseen", "drawn"}
    return frozenset([problem]).union(*(suite for suite in map(Attention.suite, names) if problem in suite))


@functools.cache
def _entries(arch: str) -> list[Entry]:
    from tiledsched.serve import process

    return load_entries(process.settings(), {arch}, Attention.name)


config.watchers.append(_entries.cache_clear)


def left_out_plan(arrays: Arrays) -> Any:
    """The plan of what would be served if nobody had tuned the suites that hold the problem; it has been launched once.

    Raises:
        UnsupportedError: sequences are packed, or keys lie in pages.
    """
    from tiledsched.serve import process

    problem = arrays.problem
    if problem.is_varlen:
        raise UnsupportedError("it knows no packed sequences, and no pages")

    def make() -> Any:
        device, hidden = process.device_facts(arrays.tensors[0].get_device()), left_out(problem)
        entries = [entry for entry in _entries(device.arch) if entry.problem not in hidden]
        table = table_of(entries, process.settings(), kernel=Attention)
        return attention_call(arrays).make_plan(table.resolve(problem, device.arch, device.name))

    return launched_plan(LEFT_OUT, arrays, make)


def plan_call(arrays: Arrays, plan: Any) -> Call:
    """The launch of a plan on the arrays that it was made for."""
    call = attention_call(arrays)
    return lambda: call.launch(plan, keep_zeros=True)


@functools.cache
def _plans() -> Any:
    """Plans by method, problem and device: a bench asks for the call, and later for what it was."""
    from tiledsched.serve.plan_cache import PlanCache

    return PlanCache(lambda *given: given)


def launched_plan(
    name: str, arrays: Arrays, make: Callable[[], Any], part: Callable[[Any], Any] = lambda plan: plan
) -> Any:
    """The plan of a method on the inputs of a problem. The first time, it is made and launched.

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

    cache, key, call = _plans(), (name, arrays.problem, arrays.tensors[0].get_device()), attention_call(arrays)

    def next_plan(served: Served) -> Any:
        found = call.make_plan(served)
        return found if isinstance(found, str) else part(found)

    if key not in cache.ready:
        plan = _plan(cache.find(key, make))
        launch_first(cache, key, plan, lambda each: call.launch(each, first=True), next_plan)
    return cache.ready[key]


def _plan(found: Any) -> Any:
    if isinstance(found, str):
        raise UnsupportedError(found)
    return found


def _explained(plan: Callable[[Arrays], Any], may_verify: bool = True) -> Callable[[Arrays, bool], Any]:
    """What is launched by a plan, and why."""

    def explain(arrays: Arrays, verify: bool) -> Any:
        from tiledsched.serve.execute import explain_plan

        return explain_plan(plan(arrays), attention_call(arrays).tensors, verify=verify and may_verify)

    return explain


# Plain schedules


def schedule_launch(torch: Any, kernel: KernelClass, problem: Problem, schedule: Schedule) -> Callable[..., None]:
    """What launches a kernel of one tile function on a schedule, given its arrays; cuTile compiles it at the first launch."""
    import cuda.tile as ct

    arch = _arch_of(torch)
    device = arch_spec(arch)
    (step,) = steps(kernel, problem, schedule, device)
    key = (kernel, arch, schedule, step.function)
    if key not in _tile_kernels:
        (_tile_kernels[key],) = tile_kernels(kernel, {arch: schedule}, problem, device)
    tile_kernel = _tile_kernels[key]
    return lambda *arrays: ct.launch(torch.cuda.current_stream(), step.grid, tile_kernel, (*arrays, *step.tail))


def untuned_schedule(arch: str) -> Schedule:
    """`UNTUNED`, with the knobs that it does not name at the defaults of the arch's space."""
    return space_for(arch, Attention).complete(Schedule(UNTUNED))


def untuned(space: SearchSpace, problem: Problem) -> Schedule:
    """The schedule of the kernel as one would first write it: attention's `UNTUNED`, or else the space's default."""
    own = problem.declaration is Attention
    found = untuned_schedule(space.arch) if own else space.default(problem)
    # No cluster is what the compiler takes where it is left to it; grids divide by the number.
    return found.replace(num_ctas=1) if found.get("num_ctas") == 0 else found


def untuned_call(arrays: Arrays) -> Call:
    """Attention's kernel on its plainest schedule."""
    problem, torch = arrays.problem, arrays.torch
    refuse_features(problem)
    q, k, v = arrays.tensors
    launch = schedule_launch(torch, Attention, problem, untuned_schedule(_arch_of(torch)))
    shape = (*q.shape[:3], v.shape[3])

    def call() -> Any:
        out = q.new_empty(shape)
        launch(q, k, v, out)
        return out

    return call


def _arch_of(torch: Any) -> str:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"sm_{properties.major}{properties.minor}"


ATTENTION_METHODS = [
    Method(name=OURS, make=lambda arrays: plan_call(arrays, own_plan(arrays)), explain=_explained(own_plan)),
    Method(name=SERVED, make=served_call, explain=_explained(served_plan), names_rivals=True),
    Method(
        name=LEFT_OUT,
        make=lambda arrays: plan_call(arrays, left_out_plan(arrays)),
        explain=_explained(left_out_plan, may_verify=False),
        names_rivals=True,
        by_name=True,
    ),
    Method(name="untuned", make=untuned_call),
]
