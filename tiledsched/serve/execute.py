"""Running a plan: its launches on the device of the tensors and its current stream, or the rival that is served instead.

A CUDA graph that is being captured allows neither compilation nor loading of programs, so a plan's first launch notes which
programs it ran.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from cuda.tile import TileError
from torch.autograd import forward_ad

from tiledsched.core import config
from tiledsched.core.errors import LaunchError, ProblemError, RivalError
from tiledsched.rivals.offers import ELSEWHERE, Rival
from tiledsched.serve import process
from tiledsched.serve.background import Build
from tiledsched.serve.chain import Served
from tiledsched.serve.explain import Explanation, launched_fingerprint
from tiledsched.serve.plan import Plan, ScratchArray, next_choice
from tiledsched.serve.plan_cache import PlanCache
from tiledsched.serve.prebuilt import BuildingError, missed_builds, not_waiting

MAX_SHARED_BYTES, MAX_SHARED = 1 << 20, 64
"""The smallest scratch arrays of a launch, up to so many bytes together, are kept for the next launch, of so many launches:
making them costs the host more than everything else but the launch."""
RELAXED = 2
"""CUDA's mode of a thread whose calls do not end the captures of other threads."""
is_traced = torch.compiler.is_dynamo_compiling
"""Whether torch.compile is tracing the caller."""
_dispatch_modes = torch._C._len_torch_dispatch_stack
_autocast = torch.is_autocast_enabled
_transform_level = torch._C._functorch.maybe_current_level
_trace_state = torch._C._get_tracing_state


class NotLoadedError(LaunchError):
    """A program has not run in this process, and a CUDA graph is being captured."""


def is_plain_call(*cast: Any) -> bool:
    """Whether nothing stands between a call and the launch: no tracing, transform, mode or forward-mode derivative is active, and
    no autocast that changes the type of a tensor of `cast`."""
    return (
        not (_dispatch_modes() or _trace_state() or forward_ad._current_level >= 0)
        and _transform_level() is None
        and not (
            cast
            and _autocast(process.runtime.device_type)
            and any(each.dtype is not torch.get_autocast_dtype(process.runtime.device_type) for each in cast)
        )
    )


def is_transformed() -> bool:
    """Whether tensors may be more, or less, than what lies in memory: in a mode, in a transform such as `vmap`, or where they
    may carry forward-mode derivatives."""
    return bool(_dispatch_modes()) or _transform_level() is not None or forward_ad._current_level >= 0


def has_tangent(tensors: Iterable[Any]) -> bool:
    """Whether a tensor carries the tangent of a forward-mode derivative (`torch.func.jvp`, `jacfwd`, dual tensors), which no
    launch computes. Other things than tensors are skipped."""
    return forward_ad._current_level >= 0 and any(
        isinstance(each, torch.Tensor) and forward_ad.unpack_dual(each).tangent is not None for each in tensors
    )


def launch_plan(
    plan: Plan,
    tensors: tuple[Any, ...],
    numbers: tuple[float, ...] | None = None,
    first: bool = False,
    keep_zeros: bool = False,
    rival_extras: tuple[Any, ...] | None = (),
) -> Any:
    """Queue the launches of a plan on the current stream, or call the rival that is served instead; returns the outputs.

    Args:
        plan: made for tensors like these.
        tensors: the inputs, in the plan's order, on its device.
        numbers: the plan's run-time numbers, in its order; its own unless given.
        first: whether the plan was never launched. Its programs may have to be compiled then, which no capture allows.
        keep_zeros: whether scratch arrays may be kept for the next launch on any stream. In code that torch compiled only those
            of the default stream are: on others torch may have lent the memory to one graph.
        rival_extras: what a rival takes after the tensors; None where no rival can serve this call.

    Raises:
        LaunchError: cuTile or the driver refused a launch; or `first`, and a CUDA graph is being captured.
        ProblemError: a tensor that is changed in place shares a part of its memory with another.
    """
    runtime, index = process.runtime, plan.launch_on
    if index != runtime.current_device():  # cuTile launches on the current device, whatever the tensors say
        if index == ELSEWHERE:
            if plan.direct is not None and not first and numbers is None and rival_extras == ():
                with suppress(Exception):  # whatever fails is tried again, and reported, by the long way
                    if plan.device == runtime.current_device():
                        out = plan.direct.call(*tensors)
                        _, strides, dtype = plan.outputs[0]
                        if plan.calls is not None:
                            next(plan.calls)
                        return out if out.stride() == strides and out.dtype == dtype else in_layout(plan, out)
            return _launch_elsewhere(plan, tensors, numbers, first, keep_zeros, rival_extras)
        with runtime.on_device(index):
            return launch_plan(plan, tensors, numbers, first=first, keep_zeros=keep_zeros)
    if plan.calls is not None:
        next(plan.calls)
    stream = runtime.current_stream(index)
    if plan.is_simple and numbers is None and not first:  # the common case: everything else would cost the host time
        out = torch.empty_like(tensors[0])
        arrays: tuple[Any, ...] = (*tensors, out)
        ((kernel, grid, _, launch),) = plan.steps
        try:
            launch(stream, grid, kernel, arrays + plan.tail)
        except Exception as error:
            raise LaunchError(_describe_failure(plan, error)) from error
        return out
    made = _outputs(plan, tensors[0])
    arrays = (*tensors, *made)
    if plan.scratch:
        arrays = (
            *arrays,
            *scratch_arrays(plan.scratch, tensors[0].device, stream if keep_zeros or not stream else None),
        )
    if first:
        program = (plan.program, index, *map(_traits, arrays))
        if runtime.is_capturing() and program not in runtime.loaded:
            raise NotLoadedError(
                f"{plan.problem} has not run in this process yet and a CUDA graph is being captured, in which its "
                f"program cannot be compiled and loaded; call {plan.name} once with these shapes and strides before "
                "the capture (`tiledsched warmup` makes that call short)"
            )
    for place in plan.changed:
        _refuse_overlap(plan, tensors, place)
        torch.autograd.graph.increment_version(tensors[place])
    row = arrays + (plan.tail if numbers is None else numbers + plan.constants)
    try:
        for kernel, grid, pick, launch in plan.steps:
            launch(stream, grid, kernel, row if pick is None else pick(row))
        if plan.sync and not runtime.is_capturing():
            runtime.synchronize(index)
    except Exception as error:
        raise LaunchError(_describe_failure(plan, error)) from error
    if first:
        runtime.loaded.add(program)
    return made[0] if plan.is_single else in_lists(made, plan.lists)


def launch_first(
    cache: PlanCache[Plan],
    key: tuple[Any, ...],
    plan: Plan,
    launch: Callable[[Plan], Any],
    make: Callable[[Served], Plan | str],
    stand_in: Callable[[Plan], Any] | None = None,
) -> Any:
    """Launch a plan for the first time and note in its cache that it was launched; returns the result of the launch.

    Tables hold schedules that compile for arrays as they are measured. Where one does not compile for the layouts of this call,
    or a rival refuses the call, the next choice is launched and kept. While the program is compiled by another process, the call
    goes to the rival that serves the plan, or else to `stand_in`, and so do later ones.

    Args:
        cache: holds the plan.
        key: of the plan in the cache.
        plan: never launched before.
        launch: launches a plan.
        make: makes a plan of another choice.
        stand_in: computes what a plan computes, by torch and without a wait for a compiler; None where nothing does, so that the
            call waits.

    Raises:
        LaunchError: every choice failed.
    """
    settings = process.settings()
    strict = settings.compile == "wait" or settings.fallback == "error" or settings.rivals == "off"
    strict = strict or process.is_invariant()  # nothing else has the bits of our schedule
    # What deterministic algorithms compute must not depend on what has been compiled by then.
    stand_in = None if strict or torch.are_deterministic_algorithms_enabled() else stand_in
    # On a stream other than the default one, torch has a capture warmed up, which is to hold our kernel.
    waits = stand_in is None or bool(process.runtime.current_stream(plan.device))
    building = cache.building.get(key, ())
    capturing, served = process.runtime.is_capturing(), plan.rival is not None
    if not (waits or capturing or served or all(each.is_done for each in building)):
        if plan.calls is not None:
            next(plan.calls)
        return _stand_in(plan, stand_in, launch)
    try:
        with not_waiting(waits) as missed:
            result = launch(plan)
    except LaunchError as error:
        if isinstance(error, NotLoadedError) and stand_in and _stand_in_key(plan) in process.runtime.loaded:
            config.warn_once(
                f"{plan.problem}: its program is still being compiled, and a CUDA graph is being captured, which holds torch's "
                "from now on; warm up on another stream than the default one, as torch.cuda.graph's documentation does, or run "
                "`tiledsched warmup` before, or set TILEDSCHED_COMPILE=wait"
            )
            return stand_in(plan)
        if isinstance(error.__cause__, BuildingError):
            if not building:
                config.log.info("%s: %s: compiling; torch serves until the program is built", plan.name, plan.problem)
            cache.building[key] = tuple(missed)
            return _stand_in(plan, stand_in, launch)
        refused, other = isinstance(error, RivalError), None
        if refused:
            other = plan.without_first_rival()
        elif isinstance(error.__cause__, TileError):
            other = next_choice(plan, make)
        if other is None:
            raise
        config.log.warning("%s; %s is served instead", error, "our own kernel" if refused else "the next choice")
        cache.exchange(key, plan, other)
        cache.building.pop(key, None)
        return launch_first(cache, key, other, launch, make, stand_in)
    if missed:  # the rival served
        cache.building[key] = tuple(missed)
    elif not capturing:  # what a capture does without is left to the next eager call
        if cache.building.pop(key, None):
            config.log.info("%s: %s: the program is built, and serves from now on", plan.name, plan.problem)
        cache.keep_ready(key, plan)
    return result


def _stand_in(plan: Plan, stand_in: Callable[[Plan], Any] | None, launch: Callable[[Plan], Any]) -> Any:
    """The result of a plan by its stand-in; where that fails, by the plan after all, whose program is waited for."""
    assert stand_in is not None
    try:
        result = stand_in(plan)
    except Exception as error:
        config.warn_once(
            f"{plan.problem}: torch was to compute it while its program is compiled, and failed: {type(error).__name__}: "
            f"{error}; the call waits for the program instead"
        )
        return launch(plan)
    process.runtime.loaded.add(_stand_in_key(plan))
    return result


def _stand_in_key(plan: Plan) -> tuple[Any, ...]:
    return "stand-in", plan.problem, plan.device


def in_layout(plan: Plan, made: Any) -> Any:
    """Outputs that something else computed, laid out like those of a plan."""
    found = made if isinstance(made, (tuple, list)) else (made,)
    outputs = []
    for each, (shape, strides, dtype) in zip(found, plan.outputs, strict=False):
        fits = each.dtype == dtype and each.stride() == strides
        outputs.append(
            each if fits else torch.empty_strided(shape, strides, dtype=dtype, device=each.device).copy_(each)
        )
    return outputs[0] if plan.is_single else in_lists(outputs, plan.lists)


def explain_plan(plan: Plan, tensors: tuple[Any, ...], *, verify: bool) -> Explanation:
    """What a plan launches and why.

    Args:
        plan: made for tensors like these.
        tensors: the inputs.
        verify: also compile what would be launched for these very tensors, and compare its machine code with the measured one.
    """
    facts, fingerprint = process.device_facts(plan.device), ""
    if verify:
        device = tensors[0].device
        row = (*tensors, *_outputs(plan, tensors[0]), *scratch_arrays(plan.scratch, device, None), *plan.tail)
        arguments = [row if pick is None else pick(row) for _, _, pick, _ in plan.steps]
        fingerprint = launched_fingerprint([kernel for kernel, *_ in plan.steps], arguments, facts.arch)
    return Explanation(
        problem=plan.problem,
        arch=facts.arch,
        device_name=facts.name,
        served=plan.served,
        rival=plan.rival.name if plan.rival else "",
        in_graphs=plan.in_graphs.name if plan.in_graphs else "",
        captured=plan.captured_served,
        launched_fingerprint=fingerprint,
        compiling=any(not each.is_done for kernel, *_ in plan.steps for each in getattr(kernel, "builds", ())),
        schedule_class=process.table(plan.problem.declaration).schedule_class,
        controls=process.settings().sources,
    )


def in_lists(arrays: Sequence[Any], lists: Sequence[int | None]) -> Any:
    """Output arrays as an operator returns them: one output, or a tuple of several; None where it works in place.

    Args:
        arrays: of all outputs, one after the other.
        lists: for each output the number of arrays in its list; None where it is a single array.
    """
    rest = iter(arrays)
    found = (
        arrays
        if lists.count(None) == len(lists)
        else [next(rest) if count is None else [next(rest) for _ in range(count)] for count in lists]
    )
    return found[0] if len(found) == 1 else tuple(found) if found else None


# Rivals


def _launch_elsewhere(
    plan: Plan,
    tensors: tuple[Any, ...],
    numbers: tuple[float, ...] | None,
    first: bool,
    keep_zeros: bool,
    rival_extras: tuple[Any, ...] | None,
) -> Any:
    """A call of a plan that has rivals, or another schedule for captured graphs: the outputs of the rival that serves it, laid
    out like our own; where none does, or the rival fails after its first call, those of our own kernel.

    Raises:
        LaunchError: the rival failed in a capture, or our own kernel did; `RivalError` where the rival failed in its first call.
    """
    capturing = process.runtime.is_capturing()
    if plan.captured is not None and capturing and (plan.problem, plan.device) not in process.runtime.refused:
        return launch_plan(plan.captured, tensors, numbers, first, keep_zeros, rival_extras)
    if plan.captured is not None and first and not capturing:
        _load_captured(plan, plan.captured, tensors, numbers)
    if not (first or plan.rival is not None or capturing or _prepares_capture(plan)):
        return launch_plan(plan.own, tensors, numbers, keep_zeros=keep_zeros)  # the rival is for graphs alone
    usual = numbers is None or numbers == plan.tail[: len(numbers)]  # a rival is made for the numbers declared
    given = None if rival_extras is None or not usual else (*tensors, *rival_extras)
    rival = None if given is None else _serving_rival(plan, given, first, capturing)
    if rival is None or given is None:
        first = first or given is None  # the first call may have been the rival's
        return launch_plan(plan.own, tensors, numbers, first=first, keep_zeros=keep_zeros)
    if first and plan.in_graphs is None:  # so that a capture finds our own program loaded
        try:
            launch_plan(plan.own, tensors, first=True)
        except LaunchError as error:  # it may be compiled by and by
            if not isinstance(error.__cause__, BuildingError):
                raise
    if first and not capturing:
        _prepare_rival(rival, given, plan)
    try:
        out = _call_rival(rival, given, plan, first=first)
    except LaunchError as error:  # it may refuse tensors that are not like the first ones
        if first or capturing:
            raise
        config.warn_once(f"{error}; our own kernel is served instead")
        return launch_plan(plan.own, tensors, first=True)
    if plan.calls is not None and not (first and plan.in_graphs is None):
        next(plan.calls)
    return in_layout(plan, out)


def _load_captured(plan: Plan, captured: Plan, tensors: Sequence[Any], numbers: tuple[float, ...] | None) -> None:
    """Launch what a capture is to hold once, so that a capture finds it loaded. Where it is refused, graphs hold what eager calls
    run. It may be compiled by and by."""
    given = tuple(each.clone() if place in plan.changed else each for place, each in enumerate(tensors))
    try:
        launch_plan(captured.own, given, numbers, first=True)
    except LaunchError as error:
        if not isinstance(error.__cause__, BuildingError):
            process.runtime.refused.add((plan.problem, plan.device))
            config.warn_once(f"{error}; captured graphs hold the schedule of eager calls instead")


def _serving_rival(plan: Plan, given: Sequence[Any], first: bool, capturing: bool) -> Rival | None:
    """The rival that serves this call of a plan that has one; None for our own kernel.

    A capture allows no compilation, and some rivals are imported and compiled for seconds at their first call. So a rival that
    serves in graphs alone is called once where a call warms up for a capture, before our kernel, and its output is dropped: its
    memory is free again when ours is requested. Only a rival that has been called serves in a capture.

    Raises:
        RivalError: that call failed, and is the plan's first.
    """
    runtime = process.runtime
    if capturing:
        rivals = [each for each in (plan.in_graphs, plan.rival) if each is not None and each.offer.capturable]
        return next((each for each in rivals if _rival_key(each, plan) in runtime.loaded), None)
    if _prepares_capture(plan):
        assert plan.in_graphs is not None
        try:
            _call_rival(plan.in_graphs, given, plan, first=True)
        except RivalError as error:
            if first:
                raise
            runtime.refused.add(_rival_key(plan.in_graphs, plan))
            config.warn_once(f"{error}; graphs hold our own kernel instead")
    return plan.rival


def _prepares_capture(plan: Plan) -> bool:
    """Whether an eager call warms up for a capture that is to hold a rival of graphs alone, which was never called: torch warms
    up for a capture on a stream other than the default one, where models seldom run."""
    rival, runtime = plan.in_graphs, process.runtime
    if rival is None or rival is plan.rival or not runtime.current_stream(plan.device):
        return False
    key = _rival_key(rival, plan)
    return key not in runtime.loaded and key not in runtime.refused


def _prepare_rival(rival: Rival, given: Sequence[Any], plan: Plan) -> None:
    """Have a rival that compiles itself for seconds do so in a thread, on tensors like those of the call, unless the call waits.

    Raises:
        LaunchError: it is being compiled.
    """
    runtime, key, missed = process.runtime, _rival_key(rival, plan), missed_builds()
    if rival.name not in plan.problem.declaration.compiled_rivals or key in runtime.loaded or missed is None:
        return
    build = runtime.preparing.get(key)
    if build is None:
        build = runtime.preparing[key] = Build()
        like = [(each.shape, each.stride(), each.dtype) if isinstance(each, torch.Tensor) else each for each in given]
        thread = threading.Thread(
            target=_compile_rival, args=(rival, like, plan.device, build), name="tiledsched-rival"
        )
        thread.start()
    if not build.is_done:
        missed.append(build)
        text = f"{plan.problem}: {rival.name} is being compiled"
        raise LaunchError(text) from BuildingError(text)
    del runtime.preparing[key]


def _compile_rival(rival: Rival, like: Sequence[Any], device: int, build: Build) -> None:
    """Call a rival once, on a stream of its own. Whatever fails is left to the call to come."""
    place = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    try:
        with torch.cuda.stream(torch.cuda.Stream(place)) if device >= 0 else nullcontext(), torch.no_grad():
            if device >= 0:  # so that what it allocates and loads does not end a capture in another thread
                ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED)))
            rival.call(*[_blank(each, place) if isinstance(each, tuple) else each for each in like])
            if device >= 0:
                torch.cuda.current_stream(place).synchronize()
    except Exception as error:
        config.log.info("%s, compiled ahead: %s: %s", rival.name, type(error).__name__, error)
    finally:
        build.end("")


def _blank(like: tuple[Any, ...], place: torch.device) -> torch.Tensor:
    """A tensor of a shape, strides and type. Integers are zero: they tell where others lie."""
    shape, strides, dtype = like
    made = torch.empty_strided(shape, strides, dtype=dtype, device=place)
    return made if dtype.is_floating_point else made.zero_()


def _rival_key(rival: Rival, plan: Plan) -> tuple[Any, ...]:
    """What a rival may be compiled for."""
    return (rival.name, plan.problem, plan.device, *plan.numbers.values())


def _call_rival(rival: Rival, given: Sequence[Any], plan: Plan, *, first: bool) -> Any:
    """The outputs of a rival for these tensors, on their device.

    Raises:
        LaunchError: it failed; `RivalError` in its first call.
    """
    runtime, device, key = process.runtime, plan.device, _rival_key(rival, plan)
    first = first or key not in runtime.loaded
    try:
        with runtime.on_device(device) if device != runtime.current_device() else nullcontext():
            out = rival.call(*given)
        if plan.sync and not runtime.is_capturing():
            runtime.synchronize(device)
    except Exception as error:
        kind = RivalError if first else LaunchError
        raise kind(
            f"{plan.problem}: {rival.name}, which was measured to be faster, failed: {type(error).__name__}: {error}; "
            "TILEDSCHED_RIVALS=off serves our own kernel"
        ) from error
    if first:
        runtime.loaded.add(key)
    return out


def _describe_failure(plan: Plan, error: Exception) -> str:
    """What failed, on which schedule, and what to do."""
    advice = "this very call failed" if plan.sync else "run again with TILEDSCHED_SYNC=1 to see which call it was"
    if process.runtime.is_capturing():
        advice = f"a CUDA graph is being captured: call {plan.name} once with these tensors before the capture"
    reason = str(error).replace("\nUnknown location", "")  # cuTile's line for the place, with nothing in it
    served = plan.served
    schedule = f"{served.schedule.short()} ({served.provenance})"
    return f"{plan.problem} on {schedule}: {type(error).__name__}: {reason}; {advice}"


# Arrays


def _refuse_overlap(plan: Plan, tensors: Sequence[Any], place: int) -> None:
    """Make sure that no other tensor lies in a part of the memory of one that is changed in place. As in torch, all of its memory
    may be another argument's, and tensors that leave gaps in memory are not compared.
    """
    name, size, strides = plan.spans[place]
    start = tensors[place].data_ptr()
    for (other, its_size, its_strides), each in zip(plan.spans, tensors, strict=True):
        gap = each.data_ptr() - start
        if -its_size < gap < size and (gap or size != its_size or strides != its_strides) and size and its_size:
            raise ProblemError(
                f"{plan.name}: {name} is changed in place and shares a part of its memory with {other}; clone one of them"
            )


def _outputs(plan: Plan, first: Any) -> list[torch.Tensor]:
    """New output arrays of a plan for tensors of which `first` is the first, on the current device."""
    made = [torch.empty_like(first)] if plan.like_first else []
    for each in plan.outputs[len(made) :]:
        made.append(process.runtime.empty(*each))
    return made


def scratch_arrays(wanted: tuple[ScratchArray, ...], device: Any, stream: int | None) -> list[torch.Tensor]:
    """The scratch arrays of a launch.

    Small ones are shared by the launches of one thread on `stream`, which take turns. Where `stream` is None, or in a capture,
    they are new.
    """
    runtime = process.runtime
    if stream is None or runtime.is_capturing():
        return _new_scratch(wanted, device, None)
    key = (wanted, device, stream, threading.get_ident())  # other threads' launches may lie between those of one call
    found = runtime.scratch.get(key)
    if found is None:
        arrays, missing, room = _new_scratch(wanted, device, stream), [], MAX_SHARED_BYTES
        for place, each in sorted(enumerate(arrays), key=lambda one: one[1].nbytes):
            room -= each.nbytes
            if room < 0:
                missing.append(place)
        if len(missing) < len(arrays):
            if len(runtime.scratch) >= MAX_SHARED:
                runtime.scratch.clear()
            runtime.scratch[key] = [None if place in missing else each for place, each in enumerate(arrays)], missing
        return arrays
    arrays, missing = found
    if missing:
        arrays = arrays.copy()
        for place in missing:
            (arrays[place],) = _new_scratch(wanted[place : place + 1], device, stream)
    return arrays


def _new_scratch(wanted: tuple[ScratchArray, ...], device: Any, stream: int | None) -> list[torch.Tensor]:
    return [
        process.runtime.empty(shape, strides, dtype) if place is None else _zeros(shape, dtype, device, stream, place)
        for shape, strides, dtype, place in wanted
    ]


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any, stream: int | None, place: int) -> torch.Tensor:
    """Zeros, which the kernel leaves as it found them. Launches on one stream share them, each place for itself. A captured graph
    gets its own, because it may be replayed on any stream.
    """
    if stream is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    shared, key = process.runtime.zeros, (device, stream, dtype, shape[1:], place)
    found = shared.get(key)
    if found is None or found.shape[0] < shape[0]:
        found = shared[key] = torch.zeros(shape, dtype=dtype, device=device)
    return found[: shape[0]]


def _traits(array: Any) -> tuple[Any, ...]:
    """What cuTile may infer from an array, and more: it decides which program runs."""
    item = array.element_size()
    shape, strides = array.shape, array.stride()
    return (
        array.dtype,
        shape[-1:],
        array.data_ptr() % 16 == 0,
        tuple((size == 1, size % 16 == 0) for size in shape),
        tuple((stride == 0, stride == 1, stride * item % 16 == 0) for stride in strides),
    )
