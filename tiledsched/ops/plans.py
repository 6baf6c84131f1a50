"""Plans of attention: everything one launch needs except q, k and v.

A plan depends on shapes, dtype, device and flags, not on strides: cuTile itself tells apart, at every launch, the
layouts that need other machine code. What the table says is looked up when a plan is made, never in a call.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct  # half of what the first call would take, were it imported there
import torch

from tiledsched.core.arrays import LARGEST_INT32
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.core.launch import steps
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.rivals import late_rivals
from tiledsched.kernels.attention.scales import scales
from tiledsched.kernels.attention.similarity import FEW_ROWS
from tiledsched.ops.arguments import CAUSAL, check_tensors, unserved
from tiledsched.ops.features import NOTHING, AttentionFeatures, Window, read_beside
from tiledsched.serve import process
from tiledsched.serve.launch import Scratch, scratch_of, spans
from tiledsched.serve.lookup import Served
from tiledsched.serve.plan_cache import PlanCache
from tiledsched.serve.rivals import ELSEWHERE, Rival, choose_rivals, fewer_rivals


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One of several launches in a row."""

    kernel: Any
    """The cuTile kernel object."""
    grid: tuple[int, int, int]
    """Blocks."""
    places: tuple[int, ...]
    """Which of the plan's arrays it takes, in order: of q, k, v, out and the extra ones."""
    tail: tuple[bool | int | float, ...]
    """Its run-time and compile-time arguments."""

    @functools.cached_property
    def pick(self) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        """What takes its arrays from the plan's."""
        return operator.itemgetter(*self.places)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything one call needs except the arrays."""

    launch: Any
    """`cuda.tile.launch`."""
    kernel: Any
    """The cuTile kernel object, shared by every plan with the same entry and hints; of several launches, the first."""
    grid: tuple[int, int, int]
    """Blocks of its launch."""
    in_turn: tuple[Launch, ...]
    """All launches, where there are several; else none, and a single one takes all arrays and `tail`."""
    extra_arrays: tuple[Scratch, ...]
    """Arrays that launches take after q, k, v and out."""
    scale_log2: float
    """The run-time argument: the softmax scale times log2(e); of capped scores, their cap."""
    constants: tuple[bool | int | float, ...]
    """Compile-time arguments."""
    tail: tuple[bool | int | float, ...]
    """Run-time and compile-time arguments, as they end those of a launch."""
    asked: int
    """How many of `extra_arrays`, the last ones, stand for sinks, starts, lengths and so on."""
    launch_on: int
    """Index of the CUDA device; `ELSEWHERE` where a rival may be served, so that no launch of ours asks whether one is."""
    device: int
    """The same, in any case."""
    sync: bool
    """Whether each launch is waited for."""
    columns: int
    """Of the output, where q has others; else 0."""
    lse: bool
    """Whether the log-sum-exp is returned, too."""
    served: Served
    """Where the schedule comes from."""
    problem: Problem
    """What the plan computes."""
    rival: Rival | None = None
    """What is called instead of the launch."""
    in_graphs: Rival | None = None
    """What is while a CUDA graph is captured."""

    @functools.cached_property
    def own(self) -> Plan:
        """The same on our own kernel."""
        return replace(self, launch_on=self.device, rival=None, in_graphs=None)

    @property
    def rival_key(self) -> tuple[Any, ...]:
        """What a rival may be compiled for, and the device."""
        return (self.problem, self.device, self.tail)


def plan_key(
    q: Any, k: Any, v: Any, causal: str | None, scale: float | None, lse: bool, beside: AttentionFeatures = NOTHING
) -> tuple[Any, ...]:
    """What a plan depends on.

    Strides matter in one case only: where an array is not contiguous it may span more than its elements, and more than
    a 32-bit index reaches.
    """
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, causal, scale, lse)
    if beside is not NOTHING:
        key = (*key, beside.key)  # type: ignore[assignment]
    if q.is_contiguous() and k.is_contiguous() and v.is_contiguous():
        return key
    return (*key, q.stride(), k.stride(), v.stride())


cache: PlanCache[Plan] = PlanCache(plan_key)


def find_ready(q: Any, k: Any, v: Any, causal: str | None, scale: float | None, lse: bool) -> Plan | None:
    """The plan for a call that needs nothing but a launch; see :meth:`PlanCache.find_ready`, of which this is the shorter way.

    Args:
        q, k, v: plain tensors, not nested ones: torch's comparison would end the process.
        causal, scale, lse: as for :func:`find_plan`.
    """
    for (same_causal, same_scale, same_lse), alike, plan in cache.recent:
        if same_causal == causal and same_scale == scale and same_lse == lse and alike(q, k, v):
            return plan
    return cache.find_by_key((q, k, v), (causal, scale, lse))


def find_plan(
    q: Any, k: Any, v: Any, causal: str | None, scale: float | None, lse: bool, beside: AttentionFeatures = NOTHING
) -> Plan | str:
    """The plan for a call, or why the kernel cannot serve it.

    Args:
        q, k, v: `[batch, heads, rows, columns]` each.
        causal: top_left, bottom_right or None for no mask.
        scale: softmax scale; None for 1 / sqrt(head_dim).
        lse: whether the log-sum-exp is returned, too.
        beside: what is asked for beside.

    Raises:
        ProblemError: shapes, dtypes or devices that do not fit together.
        ConfigError: settings that cannot be, such as a forced knob that makes the schedule invalid.
    """
    key = plan_key(q, k, v, causal, scale, lse, beside)
    return cache.find(key, lambda: make_plan(q, k, v, causal, scale, lse, None, beside))


def plan_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    return_lse: bool = False,
    window: Window = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    key_starts: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
) -> Plan:
    """The plan `sdpa` uses for these tensors: `own` of it is our kernel's, where a rival is served.

    Raises:
        UnsupportedError: the kernel cannot serve them.
        ProblemError: they do not fit together.
    """
    alignment, beside = read_beside(q, k, CAUSAL[causal], window, softcap, sinks, key_starts, key_lengths)
    found = find_plan(q, k, v, alignment, scale, return_lse, beside)
    if isinstance(found, str):
        raise UnsupportedError(f"{found}; sdpa leaves this call to torch's attention")
    return found


def pose_problem(q: Any, k: Any, v: Any, causal: str | None, lse: bool, beside: AttentionFeatures = NOTHING) -> Problem:
    """The problem these tensors pose.

    Raises:
        ProblemError: no problem the kernel has.
    """
    batch, heads, seq_q, head_dim = q.shape
    page = 0 if beside.table is None else k.shape[2]
    seq_k = page * beside.table.shape[1] if page else k.shape[2]
    return Attention.problem(
        seq_q=seq_q,
        seq_k=seq_k,
        page=page,
        head_dim=head_dim,
        dtype=str(q.dtype).removeprefix("torch."),
        causal=causal is not None,
        alignment=causal or "top_left",
        batch=batch,
        heads=heads,
        kv_heads=k.shape[1],
        value_dim=v.shape[3],
        lse=lse,
        **beside.fields,
    )


def default_plan(
    plan: Plan,
    q: Any,
    k: Any,
    v: Any,
    causal: str | None,
    scale: float | None,
    lse: bool,
    beside: AttentionFeatures = NOTHING,
) -> Plan | None:
    """The plan without a rival that refuses these tensors; on the next choice in place of a schedule that does not compile for
    them, or spills; None where there is no other.
    """
    if plan.launch_on == ELSEWHERE:
        return fewer_rivals(plan)
    served = process.table(Attention).fallback_for(plan.served, plan.problem, process.device_facts(plan.device).arch)
    found = served and make_plan(q, k, v, causal, scale, lse, served, beside)
    return found if isinstance(found, Plan) else None


def make_plan(
    q: Any,
    k: Any,
    v: Any,
    causal: str | None,
    scale: float | None,
    lse: bool,
    served: Served | None = None,
    beside: AttentionFeatures = NOTHING,
) -> Plan | str:
    """As :func:`find_plan`, anew, and on what is `served`, which is what the table says unless given."""
    alike = (q, k, v) if beside.table is None else (q[:1], k[:1], v[:1])  # of pages there are any number
    check_tensors(*alike)
    reason = unserved(*alike, None, 0.0)
    if reason:
        return reason
    try:
        problem = pose_problem(q, k, v, causal, lse, beside)
    except ProblemError as error:
        if beside.placed:
            return str(error)
        raise
    if not problem.wide and spans((q, k, v)) > LARGEST_INT32:
        return "a tensor that is not contiguous spans more than 2**31 elements"
    facts, table = process.device_facts(q.get_device()), process.table(Attention)
    if not table.known_arch(facts.arch):
        return f"no search space for {facts.arch}"
    try:
        scaled, cap_scale = scales(problem, scale, beside.softcap or None)
    except ProblemError as error:
        return str(error)
    served = served or table.resolve(problem, facts.arch, facts.name)
    rival, in_graphs = choose_rivals(served, lambda: late_rivals(problem, scale, beside.softcap or None))
    process.tell(Attention.name, problem, facts, served, rival, in_graphs)
    kind, launched = None, None
    if q.shape[2] <= FEW_ROWS and beside is NOTHING and not (rival or in_graphs):
        # A model that decodes asks for another length with every token, whose launches are the same but for the arrays.
        kind = (served.schedule, scaled, causal, lse, q.dtype, q.device, q.shape, k.shape[:2], k.shape[3], v.shape[3])
        launched = (
            problem.wide,
            Attention.constants(problem, served.schedule),
            Attention.launches(problem, served.schedule, facts),
        )
        before, other = cache.alike.get(kind, (None, None))
        if before == launched and other is not None:
            return replace(other, served=served, problem=problem)
    wanted = steps(Attention, problem, served.schedule, facts)
    objects = process.kernel_objects(Attention, problem, served.schedule, facts, wanted)
    taken = [[each.name for each in step.arguments if each.kind == "array"] for step in wanted]
    every = dict.fromkeys(itertools.chain(*taken))
    arrays = list(dict.fromkeys([*(name for name in ("Q", "K", "V", "Out", "Lse") if name in every), *every]))
    numbers = {
        "scale_log2": scaled,
        "cap_scale": cap_scale,
        "window": problem.window,
        "window_right": problem.window_right,
    }
    tails = [
        tuple(
            numbers[each.name] if each.kind == "scalar" else each.value
            for each in step.arguments
            if each.kind != "array"
        )
        for step in wanted
    ]
    launches = [
        Launch(kernel=kernel, grid=step.grid, places=tuple(map(arrays.index, names)), tail=tail)
        for kernel, step, names, tail in zip(objects, wanted, taken, tails, strict=True)
    ]
    made = Plan(
        launch=ct.launch,
        kernel=objects[0],
        grid=wanted[0].grid,
        in_turn=tuple(launches) if len(launches) > 1 else (),
        extra_arrays=scratch_of(Attention.array_spec(name, problem, served.schedule) for name in arrays[4:]),
        scale_log2=scaled,
        constants=tuple(each.value for each in wanted[0].arguments if each.kind == "constant"),
        tail=tails[0],
        asked=6 if problem.is_varlen else 3 if problem.has_features else 0,
        launch_on=q.get_device() if rival is None and in_graphs is None else ELSEWHERE,
        device=q.get_device(),
        rival=rival,
        in_graphs=in_graphs,
        sync=process.settings().sync,
        columns=problem.value_dim,
        lse=problem.lse,
        served=served,
        problem=problem,
    )
    if kind is not None:
        cache.alike[kind] = (launched, made)
    return made
