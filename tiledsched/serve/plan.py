"""Plans: everything that the launches of a call need except its tensors.

A plan depends on shapes, element types, the device and options of a call. What the tuned table says is looked up when a
plan is made, never in a call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tiledsched.core.arrays import LARGEST_INT32, ArraySpec, strides_of, tile_type
from tiledsched.core.launches import Step, scratch, steps
from tiledsched.core.problem import Problem, missing_on
from tiledsched.rivals.offers import ELSEWHERE, Rival, choose_rivals
from tiledsched.serve import capture, process
from tiledsched.serve.chain import Served
from tiledsched.serve.schema import Output

ScratchArray = tuple[tuple[int, ...], tuple[int, ...], Any, int | None]
"""Shape, strides and torch type of an array that launches need in addition to inputs and outputs; then its number among the
scratch arrays where it must hold zeros, else None."""
FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)
"""torch's type of two numbers of four bits in a byte; None where it has none."""
Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is served for a problem on a device, and the rivals that may be called in its place."""

    name: str
    """The operator's name, for messages."""
    problem: Problem
    """What is computed."""
    device: int
    """Index of the CUDA device."""
    served: Served
    """The schedule, where it comes from, and its evidence."""
    rival: Rival | None = None
    """The rival that eager calls run; None for our own kernel."""
    in_graphs: Rival | None = None
    """The rival that a CUDA graph captures; None for our own kernel."""
    captured_served: Served | None = None
    """What serves calls that a CUDA graph captures, by the times of replayed graphs; None where that is `served`."""
    calls: Iterator[int] | None = field(default=None, compare=False, repr=False)
    """Counts the calls of problems of about this size; None where calls are not captured."""


@dataclass(frozen=True, kw_only=True)
class Plan(Decision):
    """Everything that the launches of a call need except its tensors.

    A launch takes its arguments from one row: inputs, outputs, scratch arrays, numbers, constants.
    """

    steps: tuple[tuple[Any, tuple[int, int, int], Pick | None, Callable[..., Any]], ...]
    """For each launch its kernel object, its grid, what picks its arguments from the row, None where it takes the row, and what
    launches it."""
    outputs: tuple[tuple[Any, Any, Any], ...]
    """Shape, strides and torch type of each output array."""
    lists: tuple[int | None, ...]
    """For each declared output the number of arrays in its list; None where it is a single array."""
    is_single: bool
    """Whether there is one output array, and no list."""
    like_first: bool
    """Whether the first output array has the shape, strides and type of the first input: torch makes such an array faster."""
    scratch: tuple[ScratchArray, ...]
    """Arrays that launches need in addition to inputs and outputs."""
    is_simple: bool
    """Whether a launch has nothing to do but to make the output like the first input and to launch one kernel on the row."""
    numbers: Mapping[str, float]
    """Run-time numbers by name, used where a call gives none."""
    constants: tuple[Any, ...]
    """Sizes and compile-time arguments, the end of the row."""
    tail: tuple[Any, ...]
    """Numbers and constants: what follows the arrays in the row of a call that gives no numbers."""
    program: tuple[Any, ...]
    """The kernel objects and compile-time constants: with the traits of the arrays they decide what machine code runs."""
    changed: tuple[int, ...]
    """Positions of the input tensors that the kernel changes in place."""
    spans: tuple[tuple[str, int, tuple[int, ...]], ...]
    """Where something is changed in place, for each input tensor: its name, how many bytes of memory it fills without a gap, 0
    where it leaves gaps, and its strides."""
    launch_on: int
    """The device's index, or `ELSEWHERE` where a rival may be called, or a captured graph holds another schedule, so that other
    launches need not check for these. A plain field, as all that a call reads: whatever is computed late makes each of them
    slower to read."""
    sync: bool
    """Whether each call waits for the GPU."""
    direct: Rival | None
    """The rival that computes the one output of every call but the first, eager or captured; None where calls may differ."""
    captured: Plan | None = None
    """The plan that a CUDA graph captures, where another schedule serves there."""

    @functools.cached_property
    def own(self) -> Plan:
        """This plan, but with our own kernel in place of any rival."""
        return replace(self, launch_on=self.device, rival=None, in_graphs=None, direct=None)

    def without_first_rival(self) -> Plan:
        """The plan without the rival that is called first, which refused its first call. Where graphs have a rival of their own
        that is the one called first."""
        if self.in_graphs is None or self.in_graphs is self.rival or self.rival is None:
            return self.own
        return replace(self, in_graphs=self.rival if self.rival.offer.capturable else None)


def choose(
    name: str,
    problem: Problem,
    tensors: Sequence[Any],
    make_rivals: Callable[[], Mapping[str, Callable[..., Any]]] | None,
    served: Served | None = None,
) -> Decision | str:
    """What is served for a problem, or why the kernel cannot serve it.

    Args:
        name: the operator's, for the log.
        problem: what is computed.
        tensors: the inputs, of one device.
        make_rivals: makes the callable rivals of the problem; None where none can take these tensors.
        served: what is served; the table's answer unless given.
    """
    kernel, index = problem.declaration, tensors[0].get_device()
    facts, table = process.device_facts(index), process.table(kernel)
    if not table.known_arch(facts.arch):
        return f"{kernel.name} has no search space for {facts.arch}; add one, or run on another GPU"
    if missing := missing_on(facts.arch, problem):
        return missing
    captured = None if served else table.resolve_captured(problem, facts.arch, facts.name)
    served = served or table.resolve(problem, facts.arch, facts.name)
    rival, in_graphs = choose_rivals(served, make_rivals) if make_rivals else (None, None)
    if captured is not None and make_rivals:
        _, in_graphs = choose_rivals(captured, make_rivals)
        in_graphs = rival if in_graphs and rival and in_graphs.name == rival.name else in_graphs
    process.log_choice(name, problem, facts, served, rival, in_graphs)
    calls, settings = None, process.settings()
    if settings.capture:
        calls = capture.note(settings, problem, tensors, facts, served, rival.name if rival else "")
    return Decision(
        name=name,
        problem=problem,
        device=index,
        served=served,
        rival=rival,
        in_graphs=in_graphs,
        captured_served=captured,
        calls=calls,
    )


def make_plan(
    decision: Decision,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Output],
    numbers: Mapping[str, float],
    changed: Sequence[str] = (),
) -> Plan:
    """The plan of what was chosen.

    Args:
        decision: problem, schedule and rivals.
        inputs: tensors, or lists of tensors, by the name of their array, in the order of the call. Those of other names are
            given to no launch.
        outputs: by the name of their array.
        numbers: every run-time number that the kernel declares, by name.
        changed: names of the inputs that the kernel changes in place.
    """
    problem, schedule, kernel = decision.problem, decision.served.schedule, decision.problem.declaration
    captured = None
    if (in_capture := decision.captured_served) is not None and in_capture.schedule != schedule:
        captured = make_plan(
            replace(decision, served=in_capture, captured_served=None, rival=None, calls=None),
            inputs,
            outputs,
            numbers,
            changed,
        )
    facts = process.device_facts(decision.device)
    launches = steps(kernel, problem, schedule, facts)
    objects = process.kernel_objects(kernel, problem, schedule, facts, launches)
    extra = scratch(kernel, problem, schedule, launches)
    used = {each.name for step in launches for each in step.arguments}
    numbers = {name: value for name, value in numbers.items() if name in used}
    lists = tuple(len(each.shapes) if each.listed else None for each in outputs.values())
    counts = {name: len(each) if isinstance(each, (list, tuple)) else None for name, each in inputs.items()}
    counts |= dict(zip(outputs, lists, strict=True)) | dict.fromkeys((*(each.name for each in extra), *numbers))
    places, end = _places(counts)
    picks, constants = _picks(launches, places, end)
    changes: dict[int, Callable[[Any], Any]] = {}
    for name, each in inputs.items():
        place = places[name]
        if not isinstance(place, int) or name not in kernel.array_fields:
            continue
        spec = kernel.array_spec(name, problem)
        # torch gives the strides of an axis of one element any value, from which cuTile would infer another program.
        vector = spec.column and each.is_contiguous() and each.ndim > 1 and each.shape[-1] == 1
        strides, packed = strides_of(spec.shape, True) if vector else None, each.dtype is FLOAT4
        if vector or packed:
            changes[place] = functools.partial(_as_launched, strides=strides, packed=packed)
    if changes:
        picks = [_changing(pick, changes) for pick in picks]
    flat = [
        (*_layout(shape, strides), torch_type(each.dtype))
        for each in outputs.values()
        for shape, strides in zip(each.shapes, each.strides, strict=True)
    ]
    is_single = lists == (None,)
    first = next(iter(inputs.values()))
    like = [torch.empty_like(first, device="meta")] if isinstance(first, torch.Tensor) else []
    like_first = bool(like) and flat[:1] == [(tuple(each.shape), each.stride(), each.dtype) for each in like]
    sync = process.settings().sync
    dependent = functools.partial(process.runtime.launch, programmatic_dependent_launch=True)
    fixed = (each.value for step in launches for each in step.arguments if each.kind == "constant")
    return Plan(
        **vars(decision),
        steps=tuple(
            (made, step.grid, pick, dependent if place and schedule.get("pdl") else process.runtime.launch)
            for place, (made, step, pick) in enumerate(zip(objects, launches, picks, strict=True))
        ),
        outputs=tuple(flat),
        lists=lists,
        is_single=is_single,
        like_first=like_first,
        scratch=scratch_of(extra),
        is_simple=is_single and like_first and picks == [None] and not (extra or changed or sync),
        numbers=numbers,
        constants=constants,
        tail=(*numbers.values(), *constants),
        program=(objects, *fixed),
        changed=tuple(place for name in changed if isinstance(place := places[name], int)),
        spans=_spans(inputs) if changed else (),
        sync=sync,
        captured=captured if captured and captured.numbers.keys() == numbers.keys() else None,  # a call gives them once
        **rival_fields(decision, is_single, sync),
    )


def rival_fields(decision: Decision, is_single: bool, sync: bool) -> dict[str, Any]:
    """The fields of a plan that follow from its rivals, and from what captured graphs hold."""
    in_capture = decision.captured_served or decision.served
    alone = decision.rival is None and decision.in_graphs is None and in_capture.schedule == decision.served.schedule
    always = is_single and not sync and decision.rival is decision.in_graphs
    return {"launch_on": decision.device if alone else ELSEWHERE, "direct": decision.rival if always else None}


def next_choice(plan: Plan, make: Callable[[Served], Plan | str]) -> Plan | None:
    """The plan to run in place of one whose own program was refused: on the next schedule that the table has for the problem,
    without rivals where the plan has lost them; None where there is no other.

    Args:
        plan: the plan that failed.
        make: makes a plan of what is served.
    """
    arch = process.device_facts(plan.device).arch
    table = process.table(plan.problem.declaration)
    served = table.fallback_for(plan.served, plan.problem, arch)
    found = served and make(served)
    if not isinstance(found, Plan):
        return None
    return found if plan.launch_on == ELSEWHERE else found.own


def torch_type(dtype: str) -> Any:
    """torch's element type of an array, by cuTile's name of its type."""
    return getattr(torch, tile_type(dtype).rstrip("_"))


def scratch_of(specs: Iterable[ArraySpec]) -> tuple[ScratchArray, ...]:
    """Scratch arrays as the launch code makes them."""
    return tuple(
        (
            *_layout(each.shape, strides_of(each.shape, each.column)),
            torch_type(each.dtype),
            place if each.zeroed else None,
        )
        for place, each in enumerate(specs)
    )


def _layout(*numbers: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """Shape and strides in Python's integers, which alone :attr:`Runtime.empty` takes: an author's functions may give NumPy's."""
    return tuple(tuple(map(operator.index, each)) for each in numbers)


def beyond_int32(tensors: Iterable[Any]) -> bool:
    """Whether a 32-bit index does not reach from the first to the last element of a tensor in memory."""
    return any(
        sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True)) >= LARGEST_INT32
        for each in tensors
    )


def overlaps_itself(tensor: Any) -> bool:
    """Whether several elements of a tensor may lie in one place of memory, as `expand` and `unfold` lay them."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


def _spans(inputs: Mapping[str, Any]) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    found = []
    for name, given in inputs.items():
        for each in given if isinstance(given, (list, tuple)) else (given,):
            reach = 1 + sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            filled = reach == each.numel() and not overlaps_itself(each)
            found.append((name, each.nbytes if filled else 0, each.stride()))
    return tuple(found)


def _places(counts: Mapping[str, int | None]) -> tuple[dict[str, int | slice], int]:
    """Where each name stands in the row, and where the constants begin; a list of arrays takes as many places."""
    found: dict[str, int | slice] = {}
    end = 0
    for name, count in counts.items():
        found[name] = end if count is None else slice(end, end + count)
        end += 1 if count is None else count
    return found, end


def _picks(
    launches: Sequence[Step], places: Mapping[str, int | slice], end: int
) -> tuple[list[Pick | None], tuple[Any, ...]]:
    """What picks each launch's arguments from the row, and the constants, which begin at `end`."""
    constants: list[Any] = []
    wanted: list[list[int | slice]] = []
    for step in launches:
        wanted.append([])
        for each in step.arguments:
            if each.name not in places:
                wanted[-1].append(end + len(constants))
                constants.append(each.value)
            else:
                wanted[-1].append(places[each.name])
    whole = list(range(end + len(constants)))
    return [None if each == whole else _picker(each) for each in wanted], tuple(constants)


def _as_launched(array: Any, strides: tuple[int, ...] | None, packed: bool) -> Any:
    """An array with other strides, or as bytes: cuTile has no arrays of torch's type of two numbers in a byte."""
    seen = array.view(torch.uint8) if packed else array
    return seen if strides in (None, seen.stride()) else seen.as_strided(seen.shape, strides)


def _changing(pick: Pick | None, changes: Mapping[int, Callable[[Any], Any]]) -> Pick:
    """A pick of the same arguments from a row in which the arrays at some places are seen in another way."""

    def changed(row: tuple[Any, ...]) -> tuple[Any, ...]:
        arrays = list(row)
        for place, change in changes.items():
            arrays[place] = change(arrays[place])
        return tuple(arrays) if pick is None else pick(tuple(arrays))

    return changed


def _picker(places: Sequence[int | slice]) -> Pick:
    if len(places) == 1 or any(isinstance(each, slice) for each in places):
        return lambda row: tuple(list(row[each]) if isinstance(each, slice) else row[each] for each in places)
    return operator.itemgetter(*places)
