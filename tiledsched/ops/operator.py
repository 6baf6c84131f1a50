"""`tiledsched::sdpa` and `tiledsched::sdpa_lse`: the kernel as operators of torch.

The operators work under `torch.compile`, `torch.export`, CUDA graphs and autocast. Where gradients are required both run
`sdpa_lse`, whose results are saved for `tiledsched::sdpa_backward`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tiledsched.core.errors import ProblemError
from tiledsched.kernels.attention.backends import empty_output
from tiledsched.kernels.attention.options import SCHEMA
from tiledsched.ops import sharding
from tiledsched.ops.arguments import EIGHT_BIT_DTYPE, needs_gradients, odd_scale, unserved
from tiledsched.ops.backward import gradients, undifferentiable
from tiledsched.ops.fallback import attend_in_torch, computes_at_once, report
from tiledsched.ops.features import FEATURES, NO_FEATURES, AttentionFeatures, read_given
from tiledsched.ops.plans import AttentionCall, cache, find_ready, launch_attention, plan_key
from tiledsched.serve.execute import has_tangent, is_plain_call, is_traced, is_transformed, launch_first
from tiledsched.serve.flops import inform_counters
from tiledsched.serve.op import define
from tiledsched.serve.plan import Plan
from tiledsched.serve.plan_cache import PlanCache, are_ordinary, lock

NO_TANGENT = "forward-mode derivatives are asked for and the kernel has none"
ARGUMENTS = f"Tensor q, Tensor k, Tensor v, str? causal=None, float? scale=None, {SCHEMA}, bool? deterministic=None"
trained: PlanCache[Plan] = PlanCache(plan_key)
"""The plans in `cache` whose calls were found to be differentiable."""


def attend(
    q: Any,
    k: Any,
    v: Any,
    causal: str | None,
    scale: float | None,
    lse: bool,
    features: AttentionFeatures,
    deterministic: bool | None = None,
) -> Any:
    """Launch the kernel, or have torch do what it cannot serve; strides of the output are the same either way.

    Where `deterministic` is true the first call waits for its program: torch's attention would give other bits.

    Raises:
        ProblemError, ConfigError: as :meth:`AttentionCall.find_plan`.
        UnsupportedError: it cannot be served, and the setting `fallback` is `error`.
        LaunchError: the launch failed, or a CUDA graph is being captured and the program never ran.
    """
    key = plan_key(q, k, v, causal, scale, lse, features)
    plan = cache.ready.get(key)
    if plan is not None:
        return launch_attention(plan, q, k, v, lse, features)
    call = AttentionCall(q, k, v, causal, scale, lse, features)
    found = cache.find(key, call.make_plan)

    def by_torch(_: Any = None) -> Any:
        result = attend_in_torch(q, k, v, None, 0.0, causal, scale, lse, features)
        out, made = empty_output(q, v.shape[3]), result[0] if lse else result
        out = made if made.dtype == out.dtype and made.stride() == out.stride() else out.copy_(made)
        return (out, result[1]) if lse else out

    if not isinstance(found, str):
        at_once = not deterministic and computes_at_once(q, k, causal, lse, features)
        launch = lambda plan: call.launch(plan, first=True)  # noqa: E731
        return launch_first(cache, key, found, launch, call.make_plan, by_torch if at_once else None)
    report(found, features)
    return by_torch()


def serve_checked(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any,
    dropout_p: float,
    causal: str | None,
    scale: Any,
    return_lse: bool,
    features: AttentionFeatures,
    deterministic: bool | None = None,
) -> Any:
    """Call the operator; or torch's attention, with one warning per reason, where the kernel cannot serve the call.

    The arguments are those of :func:`tiledsched.ops.fallback.attend_in_torch`, and have been checked; and whether gradients must
    be the same in every call, None for what torch's setting says when they are computed.

    Raises:
        ProblemError: dropout_p is no probability.
    """
    if type(q) is not torch.Tensor:
        sharding.register()
    sample = (q, k, v) if features.block_table is None else (q[:1], k[:1], v[:1])  # of pages there is any number
    reason = odd_scale(scale) or unserved(*sample, attn_mask, dropout_p)
    if dropout_p and not 0 <= dropout_p <= 1:
        raise ProblemError(f"dropout_p is a probability, from 0 to 1, got {dropout_p!r}")
    if reason:
        report(reason)
        return attend_in_torch(q, k, v, attn_mask, dropout_p, causal, scale, return_lse, features)
    if needs_gradients(q, k, v, features.sinks) and not is_traced() and is_plain_call():
        plan = trained.ready.get(plan_key(q, k, v, causal, scale, True, features))
        if plan is not None and are_ordinary(each for each in (q, k, v, *features.tensors) if each is not None):
            options = (causal, scale, features, deterministic)
            return differentiable_attention(q, k, v, features.sinks, options, return_lse, plan)
    if not is_traced():
        inform_counters()
    operator = sdpa_lse_operator if return_lse else sdpa_operator
    if deterministic is not None:
        return operator(q, k, v, causal, scale, *features, deterministic)
    return operator(q, k, v, causal, scale, *(() if features is NO_FEATURES else features))


def cast_for_autocast(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast, floating-point tensors cast to its dtype, but for float64, and keys and values in 8 bits; else all as they
    are, and so where one is no tensor."""
    if not (
        all(isinstance(each, torch.Tensor) and each.device.type in ("cuda", "cpu") for each in tensors)
        and torch.is_autocast_enabled(tensors[0].device.type)
    ):
        return tensors
    dtype, kept = torch.get_autocast_dtype(tensors[0].device.type), (torch.float64, EIGHT_BIT_DTYPE)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype not in kept else x for x in tensors)


def _keep_trained(key: tuple[Any, ...]) -> None:
    """Have `trained` find the plan of `key`, if it was launched."""
    with lock:
        plan = cache.ready.get(key)
        if plan is not None:
            trained.keep_ready(key, trained.find(key, lambda: plan))  # type: ignore[arg-type]


class DifferentiableAttention(torch.autograd.Function):
    """Attention that saves what its gradients need: q, k, v, the output, one number for each of its rows, and no scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        sinks: Any,
        options: tuple[str | None, float | None, AttentionFeatures, bool | None],
        lse: bool,
        plan: Plan | None = None,
    ) -> Any:
        """The output; with `lse` also the log-sum-exp.

        Args:
            options: causal, scale, the features, and whether gradients must be the same in every call.
            plan: one that was launched before.
        """
        ctx.set_materialize_grads(False)
        causal, scale, features, deterministic = options
        arrays = () if features is NO_FEATURES else features.tensors
        if plan is not None or (
            not is_transformed() and are_ordinary(each for each in (q, k, v, *arrays) if each is not None)
        ):
            if plan is not None:
                out, sums = launch_attention(plan, q, k, v, True, features, keep_zeros=True)
            else:
                out, sums = attend(q, k, v, causal, scale, True, features, deterministic)
                _keep_trained(plan_key(q, k, v, causal, scale, True, features))
            sums = sums.data  # no view: among several results torch allows no change of one in place
        else:
            with torch._C._AutoDispatchBelowAutograd():
                if features.forward_operator is not None:
                    out, sums = features.forward_operator(q, k, v, scale)
                else:
                    out, sums = sdpa_lse_operator(q, k, v, causal, scale, *features, deterministic)
        ctx.save_for_backward(q, k, v, out, sums, *arrays)
        if arrays:
            options = causal, scale, features.with_tensors((None,) * len(arrays)), deterministic
        ctx.options = options
        return (out, sums) if lse else out

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any = None) -> Any:
        """The gradients of all inputs, of which those of q, k, v and sinks may be something."""
        if dout is None and dlse is None:
            return (None,) * 7
        saved, (causal, scale, features, deterministic) = ctx.saved_tensors, ctx.options
        features = features if features is NO_FEATURES else features.with_tensors(saved[5:])
        found = gradients(dout, dlse, saved[:5], causal, scale, features, deterministic)
        wanted = [each if needed else None for each, needed in zip(found, ctx.needs_input_grad, strict=False)]
        if wanted[3] is not None:
            wanted[3] = wanted[3].to(features.sinks.dtype)
        return (*wanted, None, None, None)


differentiable_attention: Any = super(torch.autograd.Function, DifferentiableAttention).apply
"""`DifferentiableAttention.apply` for ordinary tensors outside of transforms, without what torch does there for others."""


def forward_flops(q: Any, k: Any, v: Any, causal: Any = None, scale: Any = None, *given: Any, out_val: Any) -> int:
    """The floating-point operations of attention as torch counts those of its own: two products of all pairs of rows and keys."""
    pairs = AttentionFeatures(*given[:FEATURES]).pairs(q, k)
    return 2 * pairs * int(q.shape[1]) * int(q.shape[3] + v.shape[3])


def empty_results(q: Any, v: Any, lse: bool) -> Any:
    """The output, or the output and the log-sum-exp, that nothing was written to."""
    out = empty_output(q, v.shape[3])
    return (out, q.new_empty(q.shape[:3], dtype=torch.float32)) if lse else out


def register(name: str, arguments: str, lse: bool, launch: Any, autograd: Any, formula: Any) -> Any:
    """Define an operator of attention, whose first arguments are q, k and v, with every implementation it has; returns it.

    Args:
        arguments: the part of the schema that is in brackets.
        lse: whether it also returns the log-sum-exp.
        autograd: where gradients may be required; it is given the operator, and then the arguments.
        name, launch, formula: as for :func:`tiledsched.serve.op.define`.
    """

    def fake(q: Any, k: Any, v: Any, *given: Any) -> Any:
        return empty_results(q, v, lse)

    schema = f"({arguments}) -> {'(Tensor, Tensor)' if lse else 'Tensor'}"
    library, operator = define(f"tiledsched::{name}", schema, launch, fake, formula)

    def autocast(q: Any, k: Any, v: Any, *given: Any) -> Any:
        given = (*cast_for_autocast(q, k, v), *given)
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
        with torch._C._ExcludeDispatchKeyGuard(keys | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return operator(*given)

    for key in ("CUDA", "CPU"):
        library.impl(name, autocast, f"Autocast{key}")
    library.impl(name, functools.partial(autograd, operator), "Autograd")
    return operator


def _register(name: str, lse: bool) -> Any:
    """`tiledsched::sdpa`, or `sdpa_lse`."""

    def launch(q: Any, k: Any, v: Any, causal: str | None = None, scale: float | None = None, *given: Any) -> Any:
        return attend(q, k, v, causal, scale, lse, *read_given(given, 1))

    def autograd(
        operator: Any, q: Any, k: Any, v: Any, causal: str | None = None, scale: float | None = None, *given: Any
    ) -> Any:
        transformed = is_transformed()
        # The short way, of what compiled code calls. Nested tensors have no sizes that find_ready could compare.
        if not (given or transformed or q.is_nested or k.is_nested or v.is_nested):
            plan = find_ready(q, k, v, causal, scale, lse)
            if plan is not None:
                return launch_attention(plan, q, k, v, lse)
        features, deterministic = read_given(given, 1)
        tensors = (q, k, v, *(each for each in features.tensors if each is not None))
        plain = not transformed and are_ordinary(tensors)  # autocast has cast before
        differentiable, plan = needs_gradients(q, k, v, features.sinks), None
        reason = NO_TANGENT if has_tangent(tensors) else ""
        if differentiable and not reason:
            plan = trained.ready.get(plan_key(q, k, v, causal, scale, True, features)) if plain else None
            reason = "" if plan else undifferentiable(AttentionCall(q, k, v, causal, scale, True, features))
        if reason:
            report(reason)
            return attend_in_torch(q, k, v, None, 0.0, causal, scale, lse, features)
        if differentiable:
            options = (causal, scale, features, deterministic)
            return DifferentiableAttention.apply(q, k, v, features.sinks, options, lse, plan)
        if plain:
            return attend(q, k, v, causal, scale, lse, features, deterministic)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(q, k, v, causal, scale, *given)

    return register(name, ARGUMENTS, lse, launch, autograd, forward_flops)


sdpa_operator = _register("sdpa", lse=False)
sdpa_lse_operator = _register("sdpa_lse", lse=True)
