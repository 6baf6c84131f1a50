"""`op`: an operator of torch from a kernel's declaration.

Its parameters are the kernel's input arrays, then what these do not show of a problem, then its scalars; it returns the
outputs. An ordinary eager call finds its plan and launches; whatever is special (tracing, gradients, a first call) goes
through torch's dispatcher. Nothing is tuned inside a call.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor
from torch.nn import Parameter as TorchParameter

from tiledsched.core.arrays import LARGEST_INT32, ArraySpec
from tiledsched.core.errors import ConfigError, LaunchError, ProblemError, UnsupportedError
from tiledsched.core.launch import Step, scratch, steps
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.serve import launch as launching
from tiledsched.serve import process
from tiledsched.serve.explain import Explanation, launched_fingerprint
from tiledsched.serve.launch import (
    Scratch,
    describe_failure,
    has_run,
    is_plain_call,
    program_key,
    refuse_capture,
    spans,
)
from tiledsched.serve.lookup import Served
from tiledsched.serve.plan_cache import PlanCache
from tiledsched.serve.rivals import ELSEWHERE, Rival, choose_rivals, fewer_rivals
from tiledsched.serve.schema import NO_DEFAULT, Form, Output

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
_PLAIN = (Tensor, TorchParameter)
_traced = torch.compiler.is_dynamo_compiling
_operators: dict[str, Operator] = {}
_libraries: dict[str, Any] = {}


def op(name: str, kernel: KernelClass, **pinned: Any) -> Operator:
    """A torch operator of a declared kernel, on the schedules that its tuned table names.

    It works under `torch.compile`, CUDA graphs and on any stream; autocast does not cast for it. Registering the same
    kernel once more under its name gives the same operator, with the declaration as it is now.

    Args:
        name: `namespace::name`, as torch has it: `torch.ops.namespace.name`.
        kernel: its declaration.
        pinned: fields of its problems that are the same in every call. Flags that decide which outputs there are must
            be: they are at their defaults unless given here.

    Raises:
        ConfigError: a wrong name, one that is taken, or a kernel that no operator can be made of.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of an operator; write namespace::name, such as mylib::{kernel.__name__.lower()}"
        )
    form = Form(kernel, pinned)
    known = _operators.get(name)
    if known is None:
        made = _operators[name] = Operator(name, form)
        return made
    if known.kernel.name != kernel.name or known.form.schema() != form.schema():
        raise ConfigError(
            f"{name} is an operator of {known.kernel.name}{known.form.schema()} already, and torch keeps operators "
            "until the process ends; use another name"
        )
    known.use(form)
    return known


@dataclass(frozen=True, kw_only=True)
class OpPlan:
    """Everything the launches of a call need except its arrays and scalars."""

    launch: Any
    """`cuda.tile.launch`."""
    steps: tuple[tuple[Any, tuple[int, int, int], Callable[[list[Any]], tuple[Any, ...]]], ...]
    """Of each launch: its kernel object, its grid, and what picks its arguments from inputs, outputs, scratch arrays, scalars
    and `constants`, in this order."""
    outputs: tuple[tuple[Any, Any, Any], ...]
    """Shape, strides and type of each array of each output."""
    scratch: tuple[Scratch, ...]
    """Arrays beside inputs and outputs."""
    scalars: tuple[float | int, ...]
    """Run-time numbers where a call gives none."""
    constants: tuple[Any, ...]
    """Sizes and compile-time arguments."""
    counts: tuple[int | None, ...]
    """Of each output: how many arrays its list has; None where it is no list."""
    single: bool
    """Whether there is one output, and no list."""
    changed: tuple[int, ...]
    """Which of the tensors are changed in place."""
    launch_on: int
    """Index of the CUDA device; `ELSEWHERE` where a rival may be served, so that no launch of ours asks whether one is."""
    device: int
    """The same, in any case."""
    sync: bool
    """Whether each call is waited for."""
    served: Served
    """Where the schedule comes from."""
    problem: Problem
    """What is computed."""
    rival: Rival | None = None
    """What is called instead of the launches."""
    in_graphs: Rival | None = None
    """What is while a CUDA graph is captured."""

    @functools.cached_property
    def own(self) -> OpPlan:
        """The same on our own kernel."""
        return replace(self, launch_on=self.device, rival=None, in_graphs=None)

    @property
    def rival_key(self) -> tuple[Any, ...]:
        """What a rival may be compiled for, and the device."""
        return (self.problem, self.device)


class Operator:
    """What :func:`op` returns: call it with tensors."""

    def __init__(self, name: str, form: Form) -> None:
        self.name = name
        self._backward: Callable[..., Any] | None = None
        self._setup: Callable[..., Any] | None = None
        self.cache: PlanCache[OpPlan] = PlanCache(_plan_key)
        self.use(form)
        self._overload = _register(self)

    def use(self, form: Form) -> None:
        """Serve what `form` declares from now on."""
        self.form, self.kernel = form, form.kernel
        self.__doc__ = f"{self.name}{form.schema()}\n\n{form.kernel.__doc__ or ''}"
        kinds = [each.kind for each in form.parameters]
        self._arrays = len(form.inputs)
        self._scalars = len(kinds) - kinds.count("scalar")
        defaults = tuple(each.default for each in form.parameters)
        self._tails = {
            count: defaults[count:] for count in range(len(defaults) + 1) if NO_DEFAULT not in defaults[count:]
        }
        self._lists = "list" in kinds
        self._irregular = (
            self._lists
            or any(map(form.is_optional, form.inputs))
            or any(each.schema == "SymInt[]" for each in form.parameters)
        )
        self._numbers = tuple(
            int if each.schema.startswith("SymInt") else float for each in form.parameters[self._scalars :]
        )
        self.cache.forget()

    def __repr__(self) -> str:
        return f"<operator {self.name} of {self.kernel.name}>"

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Outputs of the kernel for these arrays: one tensor, or a tuple of several; none where it works in place.

        Raises:
            ProblemError: arrays that do not fit together or that the kernel does not take.
            UnsupportedError: they are not on a CUDA device, or the GPU's arch has no search space.
            LaunchError: a launch failed, or a CUDA graph is being captured and these programs never ran.
        """
        if _traced():
            return self._overload(*given, **named)
        count, tail = len(given), None if named else self._tails.get(len(given))
        given = self._bind(given, named) if tail is None else given + tail
        scalars = None if tail is not None and count <= self._scalars else given[self._scalars :]
        if is_plain_call():
            if self._irregular:
                tensors, options = self._split(given)
            else:
                tensors, options = given[: self._arrays], given[self._arrays : self._scalars]
            for each in tensors:
                if type(each) not in _PLAIN or each.is_nested:  # which torch's comparison does not survive
                    break
            else:
                plan = self.cache.find_ready(tensors, options)
                if plan is not None:
                    return self._launch(plan, tensors, scalars, keep_zeros=True)
        return self._overload(*given)

    def own(self, *given: Any, **named: Any) -> Any:
        """What a call gives on our own kernel, also where a rival is served."""
        given = self._bind(given, named)
        return self._launch(self.plan_for(*given).own, self._split(given)[0], given[self._scalars :])

    def _bind(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Every argument in its place; torch's own error where they do not fit."""
        rest = self.form.parameters[len(given) :]
        known = {each.name for each in rest}
        missing = any(each.default is NO_DEFAULT and each.name not in named for each in rest)
        if len(given) > len(self.form.parameters) or not named.keys() <= known or missing:
            raise TypeError(
                f"{self.name} takes {self.form.schema().rpartition(' -> ')[0]}; got {len(given)} arguments"
                + (f" and {', '.join(named)}" if named else "")
            )
        return given + tuple(named.get(each.name, each.default) for each in rest)

    def _split(self, given: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The tensors of a call, flat, and all else that its plan depends on."""
        arrays, options = given[: self._arrays], given[self._arrays : self._scalars]
        if not self._irregular:
            return tuple(arrays), tuple(options)
        counts = tuple([len(each) if isinstance(each, (list, tuple)) else each is not None for each in arrays])
        flat = [each for each in arrays if each is not None]
        if self._lists:
            flat = [each for array in flat for each in (array if isinstance(array, (list, tuple)) else (array,))]
        return tuple(flat), (*[tuple(each) if isinstance(each, list) else each for each in options], counts)

    def _dispatched(self, *given: Any) -> Any:
        """What torch's dispatcher calls for tensors on a device."""
        given = self._complete(given)
        tensors, options = self._split(given)
        key = _plan_key(*tensors, *options)
        plan = self.cache.ready.get(key)
        if plan is not None:
            return self._launch(plan, tensors, given[self._scalars :])
        found = self.cache.find(key, lambda: self._make_plan(given, tensors))
        if isinstance(found, str):
            raise UnsupportedError(f"{self.name}: {found}")
        return self.cache.launch_first(
            key,
            found,
            lambda plan: self._launch(plan, tensors, given[self._scalars :], first=True),
            lambda plan: self._default_plan(plan, given, tensors),
        )

    def _fake(self, *given: Any) -> Any:
        """Outputs without contents."""
        given = self._complete(given)
        first = self._device_of(self._split(given)[0])
        try:
            results = self.form.results(given)
        except ProblemError as error:
            raise ProblemError(f"{self.name}: {error}") from error
        made = [
            torch.empty_strided(shape, strides, dtype=launching.torch_type(each.dtype), device=first)
            for each in results
            for shape, strides in zip(each.shapes, each.strides, strict=True)
        ]
        return _returned(made, _counts(results))

    def _complete(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """With the arguments at their defaults that torch's dispatcher leaves out at the end."""
        return given + tuple(each.default for each in self.form.parameters[len(given) :])

    def _device_of(self, tensors: Sequence[Any]) -> Any:
        """The one device of all tensors.

        Raises:
            ProblemError: there are several.
        """
        devices = {each.device for each in tensors}
        if len(devices) > 1:
            raise ProblemError(
                f"{self.name}: its tensors must be on one device, got {', '.join(sorted(map(str, devices)))}"
            )
        return tensors[0].device

    def _default_plan(self, plan: OpPlan, given: Sequence[Any], tensors: Sequence[Any]) -> OpPlan | None:
        """Without a rival that refuses these tensors; on the next choice, in place of a schedule that does not compile for them,
        or spills; None where there is no other.
        """
        if plan.launch_on == ELSEWHERE:
            return fewer_rivals(plan)
        arch = process.device_facts(plan.device).arch
        served = process.table(self.kernel).fallback_for(plan.served, plan.problem, arch)  # type: ignore[arg-type]
        found = served and self._make_plan(given, tensors, served)
        return found if isinstance(found, OpPlan) else None

    def _make_plan(self, given: Sequence[Any], tensors: Sequence[Any], served: Served | None = None) -> OpPlan | str:
        device, index = self._device_of(tensors), tensors[0].get_device()
        if device.type != launching.DEVICE_TYPE:
            return f"its tensors are on {device} and the kernel needs a CUDA device; move them there"
        try:
            p = self.form.problem(given)
            results = self.form.results(given)
        except ProblemError as error:
            raise ProblemError(f"{self.name}: {error}") from error
        facts = process.device_facts(index)
        table = process.table(self.kernel)  # type: ignore[arg-type]  # a class is hashable
        if not table.known_arch(facts.arch):
            return f"{self.kernel.name} has no search space for {facts.arch}; add one, or run on another GPU"
        if not any(each.wide for each in self.kernel.arrays(p)) and spans(tensors) > LARGEST_INT32:
            return "a tensor that is not contiguous spans more than 2**31 elements; call .contiguous() on it"
        served = served or table.resolve(p, facts.arch, facts.name)
        plain = not self.form.changed and not self._lists and not any(each.listed for each in results)
        rival, in_graphs = choose_rivals(served, lambda: self.kernel.rivals(p)) if plain else (None, None)
        process.tell(self.name, p, facts, served, rival, in_graphs)
        wanted = steps(self.kernel, p, served.schedule, facts)
        extra = scratch(self.kernel, p, served.schedule, wanted)
        where = self._where(given, results, extra)
        places, constants = _places(wanted, where)
        changed = tuple(place for name in self.form.changed if isinstance(place := where[name], int))
        objects = process.kernel_objects(self.kernel, p, served.schedule, facts, wanted)
        outputs = [
            (shape, strides, launching.torch_type(each.dtype))
            for each in results
            for shape, strides in zip(each.shapes, each.strides, strict=True)
        ]
        return OpPlan(
            launch=ct.launch,
            steps=tuple(
                (made, step.grid, _picker(where)) for made, step, where in zip(objects, wanted, places, strict=True)
            ),
            outputs=tuple(outputs),
            scratch=launching.scratch_of(extra),
            scalars=tuple(self.kernel.scalar_values(p).values()),
            constants=constants,
            counts=_counts(results),
            single=_counts(results) == (None,),
            changed=changed,
            launch_on=index if rival is None and in_graphs is None else ELSEWHERE,
            device=index,
            rival=rival,
            in_graphs=in_graphs,
            sync=process.settings().sync,
            served=served,
            problem=p,
        )

    def _where(
        self, given: Sequence[Any], results: Sequence[Output], extra: Sequence[ArraySpec]
    ) -> dict[str, int | slice]:
        """Where inputs, outputs, scratch arrays and scalars stand in the row that :class:`OpPlan` tells."""
        inputs = [
            (name, len(value) if isinstance(value, (list, tuple)) else None)
            for name, value in zip(self.form.inputs, given, strict=False)
            if value is not None
        ]
        outputs = zip(self.form.outputs, _counts(results), strict=True)
        others = [(name, None) for name in (*(spec.name for spec in extra), *self.kernel.scalar_fields)]
        found: dict[str, int | slice] = {}
        end = 0
        for name, count in (*inputs, *outputs, *others):
            found[name] = end if count is None else slice(end, end + count)
            end += 1 if count is None else count
        found[""] = end  # where the constants begin
        return found

    def _launch(
        self,
        plan: OpPlan,
        tensors: tuple[Any, ...],
        scalars: Sequence[Any] | None,
        *,
        first: bool = False,
        keep_zeros: bool = False,
    ) -> Any:
        """Queue every launch of a call on the current stream and return the outputs."""
        index = plan.launch_on
        if index != launching.current_device():  # cuTile launches on the current device, whatever the tensors say
            if index == ELSEWHERE:
                if launching.concerns_rivals(plan, first):
                    return self._launch_rival(plan, tensors, scalars, first, keep_zeros)
                return self._launch(plan.own, tensors, scalars, keep_zeros=keep_zeros)  # the rival is for graphs alone
            with torch.cuda.device(index):
                return self._launch(plan, tensors, scalars, first=first, keep_zeros=keep_zeros)
        stream, device = launching.current_stream(index), tensors[0].device
        made = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in plan.outputs
        ]
        row = [*tensors, *made]
        if plan.scratch:
            row += launching.scratch_arrays(plan.scratch, device, stream if keep_zeros else None)
        if first:
            key = program_key(tuple(each[0] for each in plan.steps), plan.constants, index, row)
            refuse_capture(key, self.name, plan.problem)
        if scalars is None:
            row += plan.scalars
        else:
            for number, value, default in zip(self._numbers, scalars, plan.scalars, strict=True):
                row.append(default if value is None else number(value))
        row += plan.constants
        try:
            for kernel, grid, pick in plan.steps:
                plan.launch(stream, grid, kernel, pick(row))
            if plan.sync and not torch.cuda.is_current_stream_capturing():
                torch.cuda.synchronize(index)
        except Exception as error:
            raise LaunchError(describe_failure(self.name, plan.problem, plan.served, plan.sync, error)) from error
        if first:
            has_run(key)
        for place in plan.changed:
            torch.autograd.graph.increment_version(tensors[place])
        return made[0] if plan.single else _returned(made, plan.counts)

    def _launch_rival(
        self, plan: OpPlan, tensors: tuple[Any, ...], scalars: Sequence[Any] | None, first: bool, keep_zeros: bool
    ) -> Any:
        """What the rival that serves this call computes, in the layout of our own outputs; where none does, or it fails later,
        what our own kernel does.

        Raises:
            LaunchError: it failed in a capture, or, `RivalError`, in its first call; or of our own kernel.
        """
        rival = launching.serving_rival(plan, lambda: tensors, first=first)
        usual = scalars is None or all(
            value in (None, default) for value, default in zip(scalars, plan.scalars, strict=True)
        )
        if rival is None or not usual:  # a rival is made for the numbers declared
            return self._launch(plan.own, tensors, scalars, first=first, keep_zeros=keep_zeros)
        if first and plan.in_graphs is None:  # so that a capture finds our own programs loaded
            self._launch(plan.own, tensors, None, first=True)
        try:
            out = launching.call_rival(rival, tensors, plan, first=first)
        except LaunchError as error:  # of tensors unlike the first ones, say
            if first or torch.cuda.is_current_stream_capturing():
                raise
            process.warn_once(f"{error}; our own kernel is served instead")
            return self._launch(plan.own, tensors, None, first=True)
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        made = []
        for each, (shape, strides, dtype) in zip(outputs, plan.outputs, strict=False):
            fits = each.dtype == dtype and each.stride() == tuple(strides)
            made.append(
                each if fits else torch.empty_strided(shape, strides, dtype=dtype, device=each.device).copy_(each)
            )
        return made[0] if plan.single else _returned(made, plan.counts)

    def plan_for(self, *given: Any, **named: Any) -> OpPlan:
        """The plan of a call with these arguments.

        Raises:
            ProblemError, UnsupportedError: as the call.
        """
        given = self._bind(given, named)
        tensors, options = self._split(given)
        found = self.cache.find(_plan_key(*tensors, *options), lambda: self._make_plan(given, tensors))
        if isinstance(found, str):
            raise UnsupportedError(f"{self.name}: {found}")
        return found

    def explain(self, *given: Any, verify: bool = False, **named: Any) -> Explanation:
        """What a call with these arguments would launch, and why.

        Args:
            given, named: as for the call.
            verify: also compile, for these very tensors, what would be launched, and compare its machine code with the
                measured one. Takes about a second and needs the compiler.

        Raises:
            ProblemError, UnsupportedError: as the call.
        """
        plan = self.plan_for(*given, **named)
        facts, fingerprint = process.device_facts(plan.device), ""
        if verify:
            tensors, _ = self._split(self._bind(given, named))
            made = [
                torch.empty_strided(shape, strides, dtype=dtype, device=tensors[0].device)
                for shape, strides, dtype in plan.outputs
            ]
            row = [
                *tensors,
                *made,
                *launching.scratch_arrays(plan.scratch, tensors[0].device, None),
                *plan.scalars,
                *plan.constants,
            ]
            arguments = [pick(row) for _, _, pick in plan.steps]
            fingerprint = launched_fingerprint([kernel for kernel, _, _ in plan.steps], arguments, facts.arch)
        return Explanation(
            problem=plan.problem,
            arch=facts.arch,
            device_name=facts.name,
            served=plan.served,
            rival=plan.rival.name if plan.rival else "",
            in_graphs=plan.in_graphs.name if plan.in_graphs else "",
            launched_fingerprint=fingerprint,
            controls=process.settings().sources,
        )

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """Give the operator a gradient: `norm.register_autograd(lambda ctx, dy: norm_backward(dy, *ctx.saved_tensors))`.

        Args:
            backward: `backward(ctx, *gradients of the outputs)`, as for `torch.library.register_autograd`; the gradients it
                returns are those of the first inputs, and None for all others.
            setup_context: `setup_context(ctx, inputs, output)`; unless given, `ctx.saved_tensors` are the input arrays and
                `ctx.others` is a tuple of all other arguments.

        Raises:
            UnsupportedError: the operator works in place.
        """
        if self.form.changed:
            raise UnsupportedError(
                f"{self.name} changes {', '.join(self.form.changed)} in place, and torch takes no gradient of "
                "that; declare outputs in their stead"
            )
        self._backward, self._setup = backward, setup_context

    def _remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """What the backward needs."""
        if self._setup is not None:
            self._setup(ctx=ctx, inputs=inputs, output=output)
        elif self._backward is not None:
            ctx.save_for_backward(*self._split(inputs)[0])
            ctx.others = inputs[self._arrays :]

    def _differentiate(self, ctx: Any, *gradients: Any) -> Any:
        if self._backward is None:
            raise UnsupportedError(
                f"gradients are required and {self.name} has no backward; declare one and join them: "
                "op.register_autograd(backward), or call it under torch.no_grad()"
            )
        found = self._backward(ctx, *gradients)
        found = found if isinstance(found, tuple) else (found,)
        return (*found, *(None,) * (len(self.form.parameters) - len(found)))

    def _refuse_gradients(self, keys: Any, *given: Any) -> Any:
        """Of an operator that works in place: go on where nothing requires gradients."""
        if torch.is_grad_enabled() and any(each.requires_grad for each in self._split(self._complete(given))[0]):
            raise UnsupportedError(
                f"gradients are required and {self.name} works in place; call it under torch.no_grad()"
            )
        return self._overload.redispatch(keys & torch._C._after_autograd_keyset, *given)


def _register(made: Operator) -> Any:
    """Define the operator with every implementation it has, and return what torch makes of it.

    Raises:
        ConfigError: torch has one of this name, or does not take the schema.
    """
    namespace, _, word = made.name.partition("::")
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    library = _libraries[namespace]
    try:
        library.define(word + made.form.schema(), tags=(torch.Tag.pt2_compliant_tag,))
    except RuntimeError as error:
        raise ConfigError(f"torch does not take {made.name}{made.form.schema()}: {error}; use another name") from error
    overload = getattr(getattr(torch.ops, namespace), word).default
    for key in ("CUDA", "CPU"):
        library.impl(word, made._dispatched, key)
    torch.library.register_fake(made.name, made._fake, lib=library)
    if made.form.changed:
        library.impl(word, made._refuse_gradients, "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(made.name, made._differentiate, setup_context=made._remember, lib=library)
    return overload


def _plan_key(*call: Any) -> tuple[Any, ...]:
    """What a plan depends on: of tensors that are not contiguous, the strides too, which say layouts and reach."""
    return tuple(
        [
            each
            if not isinstance(each, Tensor)
            else (each.shape, each.dtype, each.device)
            if each.is_contiguous()
            else (each.shape, each.dtype, each.device, each.stride())
            for each in call
        ]
    )


def _places(wanted: Sequence[Step], where: dict[str, int | slice]) -> tuple[list[list[int | slice]], tuple[Any, ...]]:
    """Of each step, where its arguments stand in the row, and the constants at the end of the row."""
    begin = where[""]
    assert isinstance(begin, int)
    constants: list[Any] = []
    places = []
    for step in wanted:
        places.append([where.get(argument.name, -1) for argument in step.arguments])
        for place, argument in enumerate(step.arguments):
            if argument.name not in where:
                places[-1][place] = begin + len(constants)
                constants.append(argument.value)
    return places, tuple(constants)


def _picker(places: Sequence[int | slice]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """What picks the things at `places` from a row, as a tuple."""
    if len(places) == 1:
        return lambda row: (row[places[0]],)
    return operator.itemgetter(*places)


def _counts(results: Sequence[Output]) -> tuple[int | None, ...]:
    return tuple(len(each.shapes) if each.listed else None for each in results)


def _returned(arrays: list[Any], counts: Sequence[int | None]) -> Any:
    """Arrays as the operator returns them: one output, or a tuple of several; none where it works in place."""
    found: list[Any] = []
    rest = iter(arrays)
    for count in counts:
        found.append(next(rest) if count is None else [next(rest) for _ in range(count)])
    return found[0] if len(found) == 1 else tuple(found) if found else None
