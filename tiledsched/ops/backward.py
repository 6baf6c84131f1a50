"""The gradients of attention: how they become a plan of `attention_backward`, are launched, and join torch's autograd.

`tiledsched::sdpa_backward` is the operator that compiled graphs hold. It has no gradient of its own. What its kernel cannot
serve, and what waits for a compiler, is the gradient of torch's attention, whose forward pass is computed once more for it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from tiledsched.core.arrays import LARGEST_INT32, strides_of
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention.backends import empty_output
from tiledsched.kernels.attention.options import SCHEMA
from tiledsched.kernels.attention_backward import AttentionBackward
from tiledsched.kernels.attention_backward.backends import raced
from tiledsched.kernels.attention_backward.problem import gradient_scales
from tiledsched.ops.arguments import check_tensors, odd_scale, unserved
from tiledsched.ops.fallback import MOST_SCORES, attend_in_torch, computes_at_once, report
from tiledsched.ops.features import FEATURES, NO_FEATURES, NO_KEY, AttentionFeatures, read_given
from tiledsched.ops.plans import AttentionCall, longest_sequence
from tiledsched.serve import process
from tiledsched.serve.chain import Served
from tiledsched.serve.execute import has_tangent, in_layout, is_traced, is_transformed, launch_first, launch_plan
from tiledsched.serve.flops import inform_counters
from tiledsched.serve.op import define
from tiledsched.serve.plan import Plan, beyond_int32, choose, make_plan
from tiledsched.serve.plan_cache import PlanCache, are_ordinary, call_key
from tiledsched.serve.schema import Output

ARGUMENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, str? causal=None, float? scale=None, "
    f"{SCHEMA}, Tensor? dlse=None, bool? deterministic=None"
)
NO_SECOND = (
    "second derivatives of attention are asked for, which neither the kernel nor torch's flash attention has; call torch's "
    "scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for them"
)
Gradients = tuple[Any, Any, Any, Any]
"""Of q, k, v and sinks; the last is None where there are no sinks."""
cache: PlanCache[Plan] = PlanCache(call_key)


def undifferentiable(call: AttentionCall) -> str:
    """Why our kernels do not compute a call and its gradients; empty where they do, as far as it is known of tensors that are
    traced.

    Args:
        call: with log-sum-exp.

    Raises:
        ProblemError, ConfigError: as :meth:`AttentionCall.find_plan`.
    """
    q, k, v = call[:3]
    if torch._C._are_functorch_transforms_active():
        return "gradients are asked for by torch.func, which takes none of operators"
    reason = _unserved(call)
    if reason:
        return reason
    facts = process.device_facts(-1 if q.device.index is None else q.device.index)
    if not process.table(AttentionBackward).known_arch(facts.arch):
        return f"gradients are required and {AttentionBackward.name} has no search space for {facts.arch}"
    if is_transformed() or not are_ordinary((q, k, v)):
        return ""
    found = call.find_plan()
    return found if isinstance(found, str) else _refusal(tuple(call.fields().items()))


def _unserved(call: AttentionCall) -> str:
    """Why the kernel cannot serve the gradients of a call, as far as its tensors and options tell; empty where they do not."""
    q, k, v, _, scale, _, features = call
    if features.block_table is not None:
        return "gradients are required and keys lie in pages"
    if features.k_scale is not None:
        return "gradients are required and keys have 8 bits"
    reason = odd_scale(scale) or unserved(q, k, v, None, 0.0)
    if not reason and not is_transformed() and any(map(_spans_more, (q, k, v))):
        return "gradients are required and a tensor spans more than 2**31 elements; call .contiguous() on it"
    return reason


def _spans_more(tensor: Any) -> bool:
    """Whether a tensor has fewer elements than a 32-bit index reaches, but not its memory: so the kernel does not expect it."""
    return beyond_int32((tensor,)) and tensor.numel() <= LARGEST_INT32


@functools.lru_cache(1024)
def _refusal(fields: tuple[tuple[str, Any], ...]) -> str:
    """Why the kernel has no problem of these fields; empty where it has."""
    try:
        AttentionBackward.problem(**dict(fields))
    except ProblemError as error:
        return f"gradients are required: {error}"
    return ""


class BackwardCall(NamedTuple):
    """A call of attention whose gradients are wanted."""

    forward: AttentionCall
    """The call itself, with log-sum-exp."""
    out: Any
    """What it returned: `[batch, heads, rows, value columns]`, of q's order of axes in memory."""
    dout: Any
    """The gradient of `out`, of any strides."""
    lse: Any
    """The log-sum-exp that it returned: `[batch, heads, rows]`."""
    dlse: Any = None
    """The gradient of `lse`; None for none."""
    deterministic: bool = False
    """Whether the gradients must be the same, bit for bit, in every call."""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """What a launch takes, in the order in which the kernel declares it."""
        return _as_declared(*self.forward[:3], self.out, self.dout, self.lse, self.forward.features, self.dlse)

    def inputs(self) -> dict[str, Any]:
        """What a launch takes, by the names of the kernel's arrays."""
        names = (*"QKV", "Out", "dOut", "Lse", *self.forward.features.feature_arrays(self.forward.q), "dLse")
        return dict(zip(names, self.tensors, strict=False))

    @property
    def key(self) -> tuple[Any, ...]:
        """What a plan depends on."""
        _, _, _, causal, scale, _, features = self.forward
        return call_key(*self.tensors, causal, scale, features.key, self.dlse is not None, self.deterministic)

    def find_plan(self) -> Plan | str:
        """The plan of the call, or why the kernel cannot serve it.

        Raises:
            ProblemError: tensors that do not fit together.
            ConfigError: settings that contradict each other, such as a forced knob that makes the schedule invalid.
        """
        return cache.find(self.key, self.make_plan)

    def make_plan(self, served: Served | None = None) -> Plan | str:
        """A new plan of the call, or why the kernel cannot serve it.

        Args:
            served: what is served; the table's answer unless given.

        Raises:
            ProblemError, ConfigError: as :meth:`find_plan`.
        """
        q, k, v, _, scale, _, features = self.forward
        check_tensors(q, k, v)
        reason = _unserved(self.forward)
        if reason:
            return reason
        self._check_results()
        cap = features.softcap or None
        try:
            problem = self.problem()
            numbers = dict(zip(("scale_log2", "cap_scale", "scale"), gradient_scales(problem, scale, cap), strict=True))
        except ProblemError as error:
            return str(error)
        inputs = self.inputs()
        rivals = None if features.by_reference else lambda: raced(problem, scale, cap, late=True)
        decision = choose(f"{features.front}'s backward pass", problem, tuple(inputs.values()), rivals, served)
        if isinstance(decision, str):
            return decision
        outputs = {}
        for name, like in (("dQ", q), ("dK", k), ("dV", v)):
            strides = torch.empty_like(like, device="meta").stride()
            outputs[name] = Output(shapes=(tuple(like.shape),), strides=(strides,), dtype=problem.dtype)
        if features.sinks is not None:
            shape = tuple(features.sinks.shape)
            outputs["dSinks"] = Output(shapes=(shape,), strides=(strides_of(shape, False),), dtype="float32")
        return make_plan(decision, inputs, outputs, numbers)

    def problem(self, **changes: Any) -> Problem:
        """The problem that the tensors pose.

        Raises:
            ProblemError: the kernel has no such problem.
        """
        more = {"dlse": self.dlse is not None, "deterministic": self.deterministic, **changes}
        return self.forward.features.gradients_kernel.problem(**self.forward.fields() | more)

    def _check_results(self) -> None:
        """Raise where the tensors of the forward pass, or their gradients, are not those of q, k and v.

        Raises:
            ProblemError: they differ in shape, dtype or device.
        """
        q, v = self.forward.q, self.forward.v
        rows = q.shape[:3]
        for name, each, shape, dtype in (
            ("out", self.out, (*rows, v.shape[3]), q.dtype),
            ("dout", self.dout, (*rows, v.shape[3]), q.dtype),
            ("lse", self.lse, rows, torch.float32),
            ("dlse", self.dlse, rows, torch.float32),
        ):
            if each is not None and (tuple(each.shape), each.dtype, each.device) != (tuple(shape), dtype, q.device):
                raise ProblemError(
                    f"{name} must be {dtype} {tuple(shape)} on {q.device}, got {each.dtype} {tuple(each.shape)} on {each.device}"
                )

    def by_torch(self) -> Gradients:
        """The gradients of torch's attention, which is computed once more, laid out like our own."""
        q, k, v, causal, scale, _, features = self.forward
        if features.gradients_by_reference is not None and features.attn_mask is None:
            return _four(features.gradients_by_reference(self))
        # An operator is called with autograd left out.
        records = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
        with records, torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
            given = [each.detach().requires_grad_() for each in (q, k, v)]
            if features.sinks is not None:
                given.append(features.sinks.detach().float().requires_grad_())
                features = features._replace(sinks=given[3])
            both = self.dlse is not None
            made = attend_in_torch(given[0], given[1], given[2], None, 0.0, causal, scale, both, features)
            of = (self.dout, self.dlse) if both else (self.dout,)
            found = torch.autograd.grad(made, given, of)
        laid_out = [
            each if each.stride() == like.stride() else like.copy_(each)
            for each, like in zip(found, map(torch.empty_like, (q, k, v)), strict=False)
        ]
        return _four((*laid_out, *found[3:]))


def _as_declared(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, features: Any, dlse: Any) -> tuple[Any, ...]:
    """What a launch takes, in the order in which the kernel declares it."""
    found = (q, k, v, out, dout, lse)
    if features is not NO_FEATURES:
        found = (*found, *features.feature_arrays(q).values())
    return found if dlse is None else (*found, dlse)


def _launch(
    plan: Plan, tensors: tuple[Any, ...], features: AttentionFeatures, first: bool = False, keep_zeros: bool = False
) -> Gradients:
    """The gradients, by the launches of a plan or its rival; see :func:`tiledsched.serve.execute.launch_plan`."""
    extras = () if features.cu_seqlens_q is None else longest_sequence(plan.problem, features)
    return _four(launch_plan(plan, tensors, None, first, keep_zeros, extras))


def _four(found: Any) -> Gradients:
    dq, dk, dv, *sinks = found
    return dq, dk, dv, sinks[0] if sinks else None


def with_empty_results(forward: AttentionCall, deterministic: bool | None) -> BackwardCall:
    """The gradients of a call, with results of the forward pass that nothing was written to.

    Args:
        forward: the call.
        deterministic: as for `sdpa`.
    """
    q, v = forward.q, forward.v
    out, lse = empty_output(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    return BackwardCall(forward, out, out, lse, None, _is_deterministic(deterministic))


def _is_deterministic(given: bool | None) -> bool:
    """What was given, or else what torch's setting says now: of a graph that was traced, when it runs."""
    return torch.are_deterministic_algorithms_enabled() if given is None else given


def differentiate(call: BackwardCall, *, keep_zeros: bool = False) -> Gradients:
    """The gradients of a call on our kernel, or of torch's attention where the kernel cannot serve it.

    Args:
        call: of which `dout` may be expanded and of any strides.
        keep_zeros: as for :func:`tiledsched.serve.execute.launch_plan`.

    Raises:
        ProblemError, ConfigError: as :meth:`BackwardCall.find_plan`.
        UnsupportedError: it cannot be served, and the setting `fallback` is `error`.
        LaunchError: the launch failed, or a CUDA graph is being captured and the program never ran.
    """
    tensors, features, key = call.tensors, call.forward.features, call.key
    plan = cache.ready.get(key)
    if plan is not None:
        return _launch(plan, tensors, features, keep_zeros=keep_zeros)
    found = cache.find(key, call.make_plan)
    if isinstance(found, str):
        report(found, features)
        return call.by_torch()
    q, k, _, causal, *_ = call.forward
    # torch's gradients are others in their last bits; its attention in full keeps several arrays of the scores' size.
    at_once = computes_at_once(q, k, causal, call.dlse is not None, features, MOST_SCORES // 4)
    stand_in = (lambda plan: in_layout(plan, call.by_torch()[: len(plan.outputs)])) if at_once else None
    launch = lambda plan: _launch(plan, tensors, features, first=True)  # noqa: E731
    return _four(launch_first(cache, key, found, launch, call.make_plan, None if call.deterministic else stand_in))


def as_launched(dout: Any, out: Any) -> Any:
    """A gradient of `out` that a launch can read: itself, or a copy laid out like `out` where the elements of a row do not lie
    side by side, or several are one, as in the gradient of a sum, or some lie beyond the reach of a 32-bit index."""
    if dout.is_contiguous() or (dout.stride(-1) == 1 and 0 not in dout.stride() and not _spans_more(dout)):
        return dout
    return torch.empty_like(out).copy_(dout)


def gradients(
    dout: Any,
    dlse: Any,
    saved: tuple[Any, ...],
    causal: str | None,
    scale: float | None,
    features: AttentionFeatures,
    deterministic: bool | None,
) -> Gradients:
    """The gradients of q, k, v and sinks, as autograd asks for them.

    Args:
        dout, dlse: gradients of the output and of the log-sum-exp; None for none, but not both.
        saved: q, k, v, the output and the log-sum-exp.
        causal, scale, features, deterministic: of the call.
    """
    q, k, v, out, lse = saved
    dout = torch.zeros_like(out) if dout is None else dout
    if not (is_traced() or torch.is_grad_enabled() or is_transformed()):
        found = _launch_ready(dout, q, k, v, out, lse, causal, scale, features, dlse, deterministic, keep_zeros=True)
        if found is not None:
            return found
        if are_ordinary(each for each in (dout, q, k, v, out, lse, dlse, *features.tensors) if each is not None):
            call = read_call(dout, q, k, v, out, lse, causal, scale, features, dlse, deterministic)
            return differentiate(call, keep_zeros=True)
    if not is_traced():
        inform_counters()
    if features.backward_operator is not None:
        return _four(features.backward_operator(dout, q, k, v, out, lse, dlse, scale, deterministic))
    found = sdpa_backward_operator(dout, q, k, v, out, lse, causal, scale, *features, dlse, deterministic)
    return found if features.sinks is not None else (*found[:3], None)


def _launch_ready(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    causal: str | None,
    scale: float | None,
    features: AttentionFeatures,
    dlse: Any,
    deterministic: bool | None,
    keep_zeros: bool = False,
) -> Gradients | None:
    """The gradients of a call that needs nothing but launches; None for others. What `as_launched` would copy has no plan."""
    tensors = _as_declared(q, k, v, out, dout, lse, features, dlse)
    key = NO_KEY if features is NO_FEATURES else features.key
    options = (causal, scale, key, dlse is not None, _is_deterministic(deterministic))
    nested = True in [each.is_nested for each in tensors]  # they have no sizes that find_ready could compare
    plan = None if nested else cache.find_ready(tensors, options)
    return None if plan is None else _launch(plan, tensors, features, keep_zeros=keep_zeros)


def read_call(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    causal: str | None,
    scale: float | None,
    features: AttentionFeatures,
    dlse: Any,
    deterministic: bool | None,
) -> BackwardCall:
    """The call whose gradients autograd asks for; the arguments are those of :func:`gradients`, with `saved` one by one."""
    forward = AttentionCall(q, k, v, causal, scale, True, features)
    dlse = None if dlse is None else dlse.contiguous()
    return BackwardCall(forward, out, as_launched(dout, out), lse.contiguous(), dlse, _is_deterministic(deterministic))


class _OnceDifferentiable(torch.autograd.Function):
    """An operator where its own inputs require gradients, as under `create_graph`: it raises where these are computed."""

    @staticmethod
    def forward(ctx: Any, refusal: str, operator: Any, *given: Any) -> Any:
        ctx.refusal = refusal
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*given)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise UnsupportedError(ctx.refusal)


def _of_operator(
    compute: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    causal: str | None = None,
    scale: float | None = None,
    *given: Any,
) -> Any:
    """What `compute` makes of the arguments of :func:`read_call`, from those of the operator, as the operator returns it."""
    found = compute(dout, q, k, v, out, lse, causal, scale, *read_given(given, 2))
    return found if found is None or found[3] is not None else (*found[:3], _no_sinks(q))


def _no_sinks(q: Any) -> Any:
    return q.new_empty(0, dtype=torch.float32)


def _fake(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *given: Any) -> Any:
    sinks = given[4] if len(given) > 4 else None
    of_sinks = _no_sinks(q) if sinks is None else torch.empty_like(sinks, dtype=torch.float32)
    return (*map(torch.empty_like, (q, k, v)), of_sinks)


def backward_flops(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *given: Any, out_val: Any) -> int:
    """The floating-point operations of the gradients as torch counts those of its own: of five products, all pairs of rows and
    keys."""
    pairs = AttentionFeatures(*given[2 : 2 + FEATURES]).pairs(q, k)
    return 2 * pairs * int(q.shape[1]) * int(3 * q.shape[3] + 2 * v.shape[3])


def register(
    name: str,
    schema: str,
    launch: Any,
    fake: Any,
    formula: Any,
    refusal: str = NO_SECOND,
    ready: Any = lambda *given: None,
) -> Any:
    """Define an operator of gradients, which has none of its own, and return it.

    Args:
        name, schema, launch, fake, formula: as for :func:`tiledsched.serve.op.define`.
        refusal: what the error says where its own gradients are required.
        ready: the results for tensors that need nothing but launches, without the dispatcher; None for others.
    """
    library, operator = define(f"tiledsched::{name}", schema, launch, fake, formula)

    def autograd(*given: Any) -> Any:
        if not (torch.is_grad_enabled() or is_transformed()):
            found = ready(*given)
            if found is not None:
                return found
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        if has_tangent(tensors):
            raise UnsupportedError(refusal)
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            return _OnceDifferentiable.apply(refusal, operator, *given)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*given)

    library.impl(name, autograd, "Autograd")
    return operator


sdpa_backward_operator = register(
    "sdpa_backward",
    f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
    functools.partial(_of_operator, lambda *call: differentiate(read_call(*call))),
    _fake,
    backward_flops,
    ready=functools.partial(_of_operator, _launch_ready),
)
