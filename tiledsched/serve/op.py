"""`op`: an operator of torch from a kernel's declaration.

Its parameters are the kernel's input arrays, then the fields of a problem that these do not determine, then its scalars; it
returns the outputs. An ordinary eager call finds its plan and launches; everything special (tracing, gradients, a first call)
goes through torch's dispatcher. Nothing is tuned inside a call.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn import Parameter as TorchParameter

from tiledsched.core import config
from tiledsched.core.arrays import PACKED, POWERS_OF_TWO, ArraySpec, to_float, to_storage
from tiledsched.core.cases import call_reference, output_specs
from tiledsched.core.errors import ConfigError, DeclarationError, LaunchError, ProblemError, UnsupportedError
from tiledsched.core.problem import Declaration, KernelClass, Problem
from tiledsched.core.registry import load_kernel
from tiledsched.rivals.offers import stand_in
from tiledsched.serve import process
from tiledsched.serve.chain import Served
from tiledsched.serve.execute import (
    explain_plan,
    has_tangent,
    in_layout,
    in_lists,
    is_plain_call,
    is_traced,
    is_transformed,
    launch_first,
    launch_plan,
)
from tiledsched.serve.explain import Explanation
from tiledsched.serve.flops import inform_counters, set_formula
from tiledsched.serve.gradients import join
from tiledsched.serve.plan import Plan, beyond_int32, choose, make_plan, overlaps_itself, torch_type
from tiledsched.serve.plan_cache import PlanCache, are_ordinary, call_key
from tiledsched.serve.schema import NO_DEFAULT, OpSchema

_NAME = re.compile(r"[A-Za-z_]\w*::[A-Za-z_]\w*")
_PLAIN = (Tensor, TorchParameter)
_operators: dict[str, Operator] = {}
_library_of = functools.cache(functools.partial(torch.library.Library, kind="FRAGMENT"))


def op(name: str, kernel: KernelClass | str, **pinned: Any) -> Operator:
    """A torch operator of a declared kernel, on the schedules that its tuned table names.

    It works under `torch.compile`, CUDA graphs and on any stream; autocast does not cast for it. Registering the same
    kernel once more under its name gives the same operator, with the declaration as it is now.

    Args:
        name: `namespace::name`, as torch has it: `torch.ops.namespace.name`.
        kernel: its declaration, or where it is declared.
        pinned: fields of its problems that are the same in every call. Flags that decide which outputs there are must
            be: they are at their defaults unless given here.

    Raises:
        ConfigError: a wrong name, one that is taken, or a kernel that no operator can be made of.
    """
    kernel = load_kernel(kernel)
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of an operator; write namespace::name, such as mylib::{kernel.__name__.lower()}"
        )
    schema = OpSchema(kernel, pinned)
    known = _operators.get(name)
    if known is None:
        made = _operators[name] = Operator(name, schema)
        return made
    if known.kernel.name != kernel.name or str(known.schema) != str(schema):
        raise ConfigError(
            f"{name} is an operator of {known.kernel.name}{known.schema} already, and torch keeps operators "
            "until the process ends; use another name"
        )
    known.use(schema)
    return known


class Operator:
    """What :func:`op` returns: call it with tensors."""

    def __init__(self, name: str, schema: OpSchema) -> None:
        self.name = name
        self._backward: Callable[..., Any] | None = None
        self._setup: Callable[..., Any] | None = None
        self._is_backward = False
        self.cache: PlanCache[Plan] = PlanCache(call_key)
        self.use(schema)
        self._overload = _register(self)

    def use(self, schema: OpSchema) -> None:
        """Serve the declaration of `schema` from now on."""
        self.schema, self.kernel = schema, schema.kernel
        self.__doc__ = f"{self.name}{schema}\n\n{schema.kernel.__doc__ or ''}"
        kinds = [each.kind for each in schema.parameters]
        self._arrays = len(schema.inputs)
        self._scalars = len(kinds) - kinds.count("scalar")
        # Rivals, and autograd functions of torch, take and return single arrays and change none.
        self._is_usual = not (
            schema.changed or "list" in kinds or any(self.kernel.array_fields[name].listed for name in schema.outputs)
        )
        defaults = tuple(each.default for each in schema.parameters)
        self._tails = {
            count: defaults[count:] for count in range(len(defaults) + 1) if NO_DEFAULT not in defaults[count:]
        }
        self._number_types = [
            (each.name, operator.index if each.type.startswith("SymInt") else float, each.default is None)
            for each in schema.parameters[self._scalars :]
        ]
        self._irregular = (
            "list" in kinds
            or any(map(schema.is_optional, schema.inputs))
            or any(each.type == "SymInt[]" for each in schema.parameters)
        )
        self.cache.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """By name: another process makes the operator anew, with its gradient, from the file or module of the kernel."""
        where = (self.name, self.kernel.name, self.kernel.locator(), self.schema.given)
        return _unpickled, (*where, self._backward, self._setup)

    def __copy__(self) -> Operator:
        return self  # as torch keeps one operator of a name

    def __deepcopy__(self, memo: Any) -> Operator:
        return self

    def __repr__(self) -> str:
        return f"<operator {self.name} of {self.kernel.name}>"

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Outputs of the kernel for these arrays: one tensor, or a tuple of several; None where it works in place.

        Raises:
            ProblemError: arrays that do not fit together or that the kernel does not take.
            UnsupportedError: they are not on a CUDA device, or the GPU's arch has no search space.
            LaunchError: a launch failed, or a CUDA graph is being captured and these programs never ran.
        """
        if is_traced():
            return self._overload(*given, **named)
        count, tail = len(given), None if named else self._tails.get(len(given))
        given = self._bind(given, named) if tail is None else given + tail
        if is_plain_call():
            if self._irregular:
                tensors, options = self._split(given)
            else:
                tensors, options = given[: self._arrays], given[self._arrays : self._scalars]
            for each in tensors:
                if type(each) not in _PLAIN or each.is_nested:  # a nested tensor would crash torch's comparison
                    break
            else:
                plan = self.cache.find_ready(tensors, options)
                if plan is not None:
                    usual = tail is not None and count <= self._scalars
                    return launch_plan(plan, tensors, None if usual else self._numbers(plan, given), keep_zeros=True)
                if self._is_usual and torch.is_grad_enabled():
                    plan = self.cache.find_ready(tensors, options, True)
                    if plan is not None:
                        return _call_differentiably(*given, self, plan)
        else:
            inform_counters()
        return self._overload(*given)

    def own(self, *given: Any, **named: Any) -> Any:
        """The outputs of our own kernel, also where a rival is served."""
        given = self._bind(given, named)
        tensors, plan = self._split(given)[0], self.plan_for(*given).own
        if is_transformed() or not are_ordinary(tensors):
            raise UnsupportedError(
                f"{self.name}.own launches on what lies in memory; give it ordinary tensors, outside transforms and modes"
            )
        return launch_plan(plan, tensors, self._numbers(plan, given))

    def plan_for(self, *given: Any, **named: Any) -> Plan:
        """The plan of a call with these arguments.

        Raises:
            ProblemError, UnsupportedError: as the call.
        """
        given = self._bind(given, named)
        tensors, options = self._split(given)
        return self._find(call_key(*tensors, *options), given, tensors)

    def explain(self, *given: Any, verify: bool = False, **named: Any) -> Explanation:
        """What a call with these arguments would launch, and why.

        Args:
            given, named: as for the call.
            verify: also compile, for these very tensors, what would be launched, and compare its machine code with the
                measured one. Takes about a second and needs the compiler.

        Raises:
            ProblemError, UnsupportedError: as the call.
        """
        given = self._bind(given, named)
        return explain_plan(self.plan_for(*given), self._split(given)[0], verify=verify)

    def register_autograd(
        self,
        backward: Operator | Callable[..., Any],
        *,
        setup_context: Callable[..., Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Give the operator a gradient: `norm.register_autograd(norm_backward)`.

        Args:
            backward: a second operator. Its inputs are inputs or outputs of this one, by their names, and gradients of outputs:
                `dOut` is that of `Out`. Its output `dX` is the gradient of the input `X`; inputs without one have none. Its
                other arguments are those that this operator was called with. Only what it reads is saved.
                Or a function: `backward(ctx, *gradients of the outputs)`, as for `torch.library.register_autograd`; the gradients
                it returns are those of the first inputs, and None for all others.
            setup_context: for a function: `setup_context(ctx, inputs, output)`; unless given, `ctx.saved_tensors` are the input
                arrays and `ctx.others` is a tuple of all other arguments.
            names: for an operator: what an input of it, or a gradient of this operator, is called at the other one, where that is
                something else. With `{"X": "Sum", "dR": "dX"}` its input X is this operator's Sum, and its output dX is the
                gradient of R, too.

        Raises:
            UnsupportedError: the operator works in place.
            ConfigError: an array of the second operator is called like none of this one.
        """
        if self.schema.changed:
            raise UnsupportedError(
                f"{self.name} changes {', '.join(self.schema.changed)} in place, and torch takes no gradient of "
                "that; declare outputs in their stead"
            )
        if isinstance(backward, Operator):
            joined = join(self.name, self.schema, backward, names or {})
            backward._is_backward = True
            backward, setup_context = joined, joined.save
        self._backward, self._setup = backward, setup_context

    def _flops(self, *given: Any, out_val: Any = None, **named: Any) -> int:
        """The floating-point operations that the kernel declares for a call."""
        given = self._bind(given, named)
        return int((self.schema.empty_problem(given) or self.schema.problem(given)).flops)

    def _bind(self, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Every argument in its place; a TypeError like torch's own where they do not fit."""
        rest = self.schema.parameters[len(given) :]
        known = {each.name for each in rest}
        missing = any(each.default is NO_DEFAULT and each.name not in named for each in rest)
        if len(given) > len(self.schema.parameters) or not named.keys() <= known or missing:
            raise TypeError(
                f"{self.name} takes {str(self.schema).rpartition(' -> ')[0]}; got {len(given)} arguments"
                + (f" and {', '.join(named)}" if named else "")
            )
        return given + tuple(named.get(each.name, each.default) for each in rest)

    def _split(self, given: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The tensors of a call, flat, and everything else that its plan depends on."""
        arrays, options = given[: self._arrays], given[self._arrays : self._scalars]
        if not self._irregular:
            return tuple(arrays), tuple(options)
        counts = tuple([len(each) if isinstance(each, (list, tuple)) else each is not None for each in arrays])
        flat = tuple([each for array in map(_listed, arrays) for each in array])
        return flat, (*[tuple(each) if isinstance(each, list) else each for each in options], counts)

    def _numbers(self, plan: Plan, given: Sequence[Any]) -> tuple[float, ...]:
        """The run-time numbers of a call, in the plan's order and of the declared types."""
        numbers = plan.numbers
        pairs = zip(self._number_types, given[self._scalars :], strict=True)
        return tuple(
            [
                numbers[name] if value is None and optional else kind(value)
                for (name, kind, optional), value in pairs
                if name in numbers
            ]
        )

    def _find(self, key: tuple[Any, ...], given: tuple[Any, ...], tensors: tuple[Any, ...]) -> Plan:
        found = self.cache.find(key, lambda: self._make_plan(given, tensors))
        if isinstance(found, str):
            raise UnsupportedError(f"{self.name}: {found}")
        return found

    def _make_plan(self, given: Sequence[Any], tensors: Sequence[Any], served: Served | None = None) -> Plan | str:
        """The plan of a call on what is `served`, by default the table's answer; or why the kernel cannot serve it."""
        device = self._device_of(tensors)
        self._refuse_overlaps(given)
        if device.type != process.runtime.device_type:
            return f"its tensors are on {device} and the kernel needs a CUDA device; move them there"
        schema = self.schema
        p = self._named_errors(schema.problem, given)
        results = schema.results(given)
        for name, each in zip(schema.inputs, given, strict=False):
            if beyond_int32(_listed(each)) and not self.kernel.array_spec(name, p).wide:
                return f"{name} is not contiguous and spans more than 2**31 elements; call .contiguous() on it"
        decision = choose(self.name, p, tensors, (lambda: self.kernel.rivals(p)) if self._is_usual else None, served)
        if isinstance(decision, str):
            return decision
        inputs = {name: each for name, each in zip(schema.inputs, given, strict=False) if each is not None}
        outputs = dict(zip(schema.outputs, results, strict=True))
        return make_plan(decision, inputs, outputs, self.kernel.scalar_values(p), schema.changed)

    def _refuse_overlaps(self, given: Sequence[Any]) -> None:
        for name, each in zip(self.schema.inputs, given, strict=False):
            if name in self.schema.changed and any(map(overlaps_itself, _listed(each))):
                raise ProblemError(
                    f"{self.name}: {name} is changed in place, and several of its elements lie in one place of memory; clone it"
                )

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

    # What torch's dispatcher calls

    def _dispatched(self, *given: Any) -> Any:
        """The implementation for tensors on a device."""
        given += self._tails[len(given)]  # torch's dispatcher leaves defaults out at the end
        tensors, options = self._split(given)
        key = call_key(*tensors, *options)

        def launch(plan: Plan, first: bool = True) -> Any:
            return launch_plan(plan, tensors, self._numbers(plan, given), first=first)

        ready = self.cache.ready.get(key)
        if ready is not None:
            return launch(ready, first=False)
        p = self._named_errors(self.schema.empty_problem, given)
        if p is not None:
            return self._compute_empty(p, given)
        if self._stays_on_host(tensors):
            return self._by_reference(self._named_errors(self.schema.problem, given), given, self._fake(*given))
        plan = self._find(key, given, tensors)
        numbers = dict(zip(plan.numbers, self._numbers(plan, given), strict=True))
        computes = stand_in(plan.problem, numbers) if self._is_usual else None
        return launch_first(
            self.cache,
            key,
            plan,
            launch,
            lambda served: self._make_plan(given, tensors, served),
            computes and (lambda plan: in_layout(plan, computes(*tensors))),
        )

    def _compute_empty(self, p: Problem, given: Sequence[Any]) -> Any:
        """The outputs of a call with a size of 0; where they have elements, those that the reference makes of the inputs.

        Raises:
            LaunchError: inputs have elements that had to be read, and a CUDA graph is being captured.
        """
        schema, made = self.schema, self._fake(*given)
        if not any(each.numel() for _, listed in self._outputs_of(p, given, made) for each in listed):
            return made
        if any(each.numel() for _, value in zip(schema.inputs, given, strict=False) for each in _listed(value)):
            if process.runtime.is_capturing():
                raise LaunchError(
                    f"{self.name}: an array is empty, so that the others are read on the host, which no CUDA graph holds; leave "
                    "the call out of the graph"
                )
            config.warn_once(f"{self.name}: an array is empty; such calls are computed on the host, by the reference")
        return self._by_reference(p, given, made)

    def _stays_on_host(self, tensors: Sequence[Any]) -> bool:
        """Whether a call is computed on the host by the reference: its tensors are there, and settings allow something else than
        our kernel."""
        on_host = process.runtime.device_type != "cpu" and self._device_of(tensors).type == "cpu"
        if not on_host or process.settings().fallback == "error":
            return False
        config.warn_once(
            f"{self.name}: its tensors are on the CPU, where the kernel's reference computes, slowly; move them to a CUDA device"
        )
        return True

    def _outputs_of(self, p: Problem, given: Sequence[Any], made: Any) -> list[tuple[ArraySpec, Sequence[Tensor]]]:
        """The tensors of each output: those that the call changes in place, and those that were `made` for it."""
        results = made if isinstance(made, tuple) else (made,)
        arrays = dict(
            zip((*self.schema.inputs, *self.schema.outputs), (*given[: self._arrays], *results), strict=False)
        )
        return [(spec, _listed(arrays.get(spec.name))) for spec in output_specs(self.kernel, p)]

    def _by_reference(self, p: Problem, given: Sequence[Any], made: Any) -> Any:
        """`made`, and what the call changes in place, filled with what the reference computes on the host.

        Raises:
            UnsupportedError: the reference raises, such as for the largest of no elements.
        """
        schema = self.schema
        read: dict[str, Any] = {}
        for name, value in zip((each.name for each in schema.parameters), given, strict=True):
            if name in schema.inputs and value is not None:
                each_read = [on_host(each, self.kernel.array_spec(name, p).dtype) for each in _listed(value)]
                read[name] = each_read if isinstance(value, (list, tuple)) else each_read[0]
            elif name in self.kernel.scalar_fields and value is not None:
                read[name] = value
        try:
            with numpy.errstate(all="ignore"):
                found = call_reference(self.kernel, numpy, p, read)
        except DeclarationError as error:
            raise UnsupportedError(f"{self.name}: {error}") from error
        for (spec, listed), values in zip(self._outputs_of(p, given, made), found, strict=False):
            for each, value in zip(listed, _listed(values), strict=True):
                if not numpy.any(value):  # NaN is something, too
                    each.zero_()  # which a CUDA graph may hold
                elif spec.dtype in (PACKED, POWERS_OF_TWO):
                    each.view(torch.uint8).copy_(torch.from_numpy(to_storage(numpy, numpy.asarray(value), spec.dtype)))
                else:
                    each.copy_(torch.from_numpy(numpy.asarray(value)))
        return made

    def _named_errors(self, read: Callable[..., Any], *given: Any) -> Any:
        """What `read` returns; its errors name the operator."""
        try:
            return read(*given)
        except ProblemError as error:
            raise ProblemError(f"{self.name}: {error}") from error

    def _fake(self, *given: Any) -> Any:
        """The implementation for tensors without contents."""
        given += self._tails[len(given)]  # torch's dispatcher leaves defaults out at the end
        device = self._device_of(self._split(given)[0])
        results = self._named_errors(self.schema.checked_results, given, guard_or_false)
        made = [
            torch.empty_strided(shape, strides, dtype=torch_type(each.dtype), device=device)
            for each in results
            for shape, strides in zip(each.shapes, each.strides, strict=True)
        ]
        return in_lists(made, [len(each.shapes) if each.listed else None for each in results])

    def _remember(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save what the backward needs."""
        if self._setup is not None:
            self._setup(ctx=ctx, inputs=inputs, output=output)
        elif self._backward is not None:
            ctx.save_for_backward(*self._split(inputs)[0])
            ctx.others = inputs[self._arrays :]

    def _differentiate(self, ctx: Any, *gradients: Any) -> Any:
        """The gradients of all inputs."""
        if self._backward is None:
            what, instead = ("gradients", "call it under torch.no_grad()")
            if self._is_backward:
                what, instead = "second derivatives", "detach the first ones"
            declare = "declare one and join them: op.register_autograd(backward)"
            if self.name.startswith("tiledsched::"):  # which is not the caller's
                declare = "compute it by functions of torch"
            raise UnsupportedError(f"{what} are required and {self.name} has no backward; {declare}, or {instead}")
        # torch's dispatcher leaves defaults out, and `DifferentiableCall` has two arguments more.
        count = len(self.schema.parameters)
        ctx.needs_input_grad = (*ctx.needs_input_grad, *(False,) * count)[:count]
        found = self._backward(ctx, *map(_spread, gradients))
        found = found if isinstance(found, tuple) else (found,)
        return (*found, *(None,) * (count - len(found)))

    def _refuse_transforms(self, kernel: Callable[..., Any], keys: Any, *given: Any) -> Any:
        """What torch calls under autograd: `kernel`, unless a forward-mode derivative is wanted, which launches drop, or a
        gradient by torch.func, which torch takes of no operator."""
        if has_tangent(each for argument in given for each in _listed(argument)):
            raise UnsupportedError(
                f"forward-mode derivatives are asked for and {self.name} has none; use reverse mode: tensors that require "
                "gradients, and backward()"
            )
        if torch._C._are_functorch_transforms_active() and self._needs_gradients(given):
            raise UnsupportedError(
                f"{self.name}: torch.func takes no gradients of operators; use tensors that require gradients, and backward()"
            )
        return kernel(keys, *given)

    def _needs_gradients(self, given: tuple[Any, ...]) -> bool:
        tensors = self._split(given + self._tails[len(given)])[0]
        return torch.is_grad_enabled() and any(each.requires_grad for each in tensors)

    def _refuse_gradients(self, keys: Any, *given: Any) -> Any:
        """The implementation under autograd of an operator that works in place: go on where nothing requires gradients."""
        if self._needs_gradients(given):
            raise UnsupportedError(
                f"gradients are required and {self.name} works in place; call it under torch.no_grad()"
            )
        # torch resolves pending negations and conjugates of what is read, and of what is written only where it is returned.
        resolved = [
            each.resolve_neg().resolve_conj() if name in self.schema.changed and isinstance(each, Tensor) else each
            for name, each in zip((parameter.name for parameter in self.schema.parameters), given, strict=False)
        ]
        pending = [(old, new) for old, new in zip(given, resolved, strict=True) if old is not new]
        if not pending:
            return self._overload.redispatch(keys & torch._C._after_autograd_keyset, *given)
        self._refuse_overlaps(given)
        self._overload(*resolved)
        for old, new in pending:
            old.copy_(new)
        return None


class DifferentiableCall(torch.autograd.Function):
    """A call of an operator whose gradients are required, by a plan that was launched before. torch's dispatcher does the same,
    and takes the host longer than all else of the call."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        """The operator's outputs, for its arguments, the operator and the plan."""
        *arguments, ctx._called, plan = given
        output = launch_plan(
            plan, ctx._called._split(arguments)[0], ctx._called._numbers(plan, arguments), keep_zeros=True
        )
        ctx._called._remember(ctx, tuple(arguments), output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradients of all inputs."""
        return (*ctx._called._differentiate(ctx, *gradients), None, None)


# `apply` without what torch does there for transforms: only calls outside of these come here.
_call_differentiably = super(torch.autograd.Function, DifferentiableCall).apply


def _unpickled(
    name: str,
    kernel: str,
    where: str,
    pinned: dict[str, Any],
    backward: Callable[..., Any] | None,
    setup: Callable[..., Any] | None,
) -> Operator:
    """The operator of this name: the one that this process has, if it is of that kernel."""
    known = _operators.get(name)
    if known is not None and known.kernel.name == kernel and known.schema.given == pinned:
        return known
    made = op(name, load_kernel(where), **pinned)
    made._backward, made._setup = backward, setup
    return made


def define(
    name: str,
    schema: str,
    launch: Callable[..., Any],
    fake: Callable[..., Any],
    flops: Callable[..., int] | None = None,
) -> tuple[torch.library.Library, Any]:
    """The library of an operator `namespace::word`, which takes further implementations, and the operator.

    `torch.library.Library` is used, and not `custom_op`, whose wrappers cost more than a launch.

    Args:
        name: of the operator.
        schema: its arguments and results, as torch writes them.
        launch: its implementation for tensors on a device.
        fake: for tensors without contents.
        flops: the number of floating-point operations; see :func:`tiledsched.serve.flops.set_formula`.

    Raises:
        ConfigError: torch has one of this name, or does not take the schema.
    """
    namespace, _, word = name.partition("::")
    library = _library_of(namespace)
    try:
        library.define(f"{word}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    except RuntimeError as error:
        raise ConfigError(f"torch does not take {name}{schema}: {error}; use another name") from error
    for key in ("CUDA", "CPU"):
        library.impl(word, launch, key)
    torch.library.register_fake(name, fake, lib=library)
    operator = getattr(getattr(torch.ops, namespace), word).default
    if flops is not None:
        set_formula(operator, flops)
    return library, operator


def _register(made: Operator) -> Any:
    """Define the operator with every implementation it has, and return what torch makes of it.

    Raises:
        ConfigError: as :func:`define`.
    """
    flops = None if made.kernel.flops is Declaration.flops else made._flops
    library, overload = define(made.name, str(made.schema), made._dispatched, made._fake, flops)

    def register_guarded(word: str, kernel: Callable[..., Any], key: str, *, with_keyset: bool) -> None:
        library.impl(word, functools.partial(made._refuse_transforms, kernel), key, with_keyset=with_keyset)

    if made.schema.changed:
        register_guarded(made.name.partition("::")[2], made._refuse_gradients, "Autograd", with_keyset=True)
    else:
        guarded: Any = SimpleNamespace(impl=register_guarded)
        torch.library.register_autograd(made.name, made._differentiate, setup_context=made._remember, lib=guarded)
    return overload


def _listed(each: Any) -> Sequence[Any]:
    """The tensors of one argument: of a list, of a single tensor, or none where it is missing."""
    return () if each is None else each if isinstance(each, (list, tuple)) else (each,)


def _spread(gradient: Any) -> Any:
    """A gradient whose elements each have a place in memory: of `sum` and the like torch makes one that is expanded, for which
    kernels would be compiled anew. Other things than tensors stay as they are."""
    if (
        isinstance(gradient, Tensor)
        and 0 in gradient.stride()
        and any(stride == 0 and size != 1 for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
    ):
        return gradient.contiguous()
    return gradient


def on_host(tensor: Tensor, dtype: str) -> Any:
    """The tensor as the reference takes it: a NumPy array, of float64 where it holds floating-point numbers."""
    tensor = tensor.detach().cpu()
    if dtype == PACKED:
        return to_float(numpy, tensor.view(torch.uint8).numpy(), dtype, "float64")
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()
