"""`flex`: attention with functions of the author's own that change scores and hide keys, on the schedule that the table names.

As for `sdpa`, the first call of a shape makes a plan, and later calls find it and launch. A call that makes no plan reads nothing of
the functions but which objects they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from tiledsched.core import config
from tiledsched.core.cases import call_reference
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.core.registry import kernel_named
from tiledsched.kernels.attention.scales import LOG2_E, default_scale, scales
from tiledsched.kernels.attention.similarity import FEW_ROWS
from tiledsched.ops.arguments import check_tensors, heads_grouped, odd_scale, read_scale, unserved
from tiledsched.ops.block_masks import (
    BlockMask,
    by_name,
    find_lists,
    fill_lists,
    read_arrays,
    shape_of_lists,
    types_of,
    variant_named,
)
from tiledsched.ops.operator import cast_for_autocast, empty_results, forward_flops, register
from tiledsched.ops.plans import AttentionCall, plan_of
from tiledsched.serve import process
from tiledsched.serve.chain import Served
from tiledsched.serve.execute import explain_plan, has_tangent, is_plain_call, is_transformed, launch_first, launch_plan
from tiledsched.serve.explain import Explanation
from tiledsched.serve.flops import inform_counters
from tiledsched.serve.op import on_host
from tiledsched.serve.plan import Plan, beyond_int32, choose
from tiledsched.serve.plan_cache import PlanCache, are_ordinary, call_key, lock

NO_GRADIENTS = (
    "gradients of flex are required, and there are none yet; detach its inputs, or call it under torch.no_grad(), or train with "
    "torch.nn.attention.flex_attention"
)
NO_TRANSFORMS = (
    "flex is not served under vmap, jvp, grad and other transforms of torch.func; give it a batch axis, and call it outside of them"
)
_traced = torch.compiler.is_dynamo_compiling


class Ready(NamedTuple):
    """What calls like one that was served before need."""

    plan: Plan
    """Their plan."""
    name: str
    """The kernel's name."""
    listed: bool
    """Whether it takes lists of blocks."""
    lists: Tensor | None
    """Those of calls without a block mask; None where each call makes its own, since the mask takes arrays."""
    held: tuple[Any, ...]
    """The functions, so that no other object takes their identity."""

    def find_lists(self, q: Tensor, k: Tensor, arrays: tuple[Tensor, ...]) -> Tensor:
        """The lists of a call without a block mask."""
        if self.lists is None or process.runtime.is_capturing():
            return fill_lists(q, k, arrays, self.name)
        return self.lists


cache: PlanCache[Plan] = PlanCache(call_key)
"""Plans by the tensors and options of the operators."""
hot: PlanCache[Ready] = PlanCache(call_key)
"""What later calls need, by the tensors and options of :func:`flex`."""


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_mask: BlockMask | None = None,
    arrays: tuple[Tensor, ...] = (),
    *,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention with functions of your own: softmax(score_mod(scale * q @ k^T), where mask_mod) @ v, on the tuned schedule.

    .. code-block:: python

        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        def alibi(score, b, h, q_idx, kv_idx, slopes):
            return score + ct.gather(slopes, h) * (kv_idx - q_idx)

        out = tiledsched.flex(q, k, v, alibi, causal, arrays=(slopes,))

    The functions are code of cuTile, compiled into the kernel, and are called for whole tiles: `b` is the number of the sequence, an
    int32 scalar; `h` that of the query head, a scalar or `[rows, 1]`; `q_idx` and `kv_idx` are the numbers of rows and keys in
    their sequence, int32 `[rows, 1]` and `[1, keys]`. Both functions take all arrays. They may be functions with a name in a
    file, functions that such functions return, with the numbers, tuples and functions that these captured, and frozen dataclasses with
    `__call__`; what they read from around them is read at their first call. New contents of arrays compile nothing.

    Args:
        q: `[batch, heads, seq_q, head_dim]` CUDA tensor, float16 or bfloat16; any strides; head_dim up to 256. Or
            `[heads, seq_q, head_dim]`, and k and v alike.
        k: `[batch, kv_heads, seq_k, head_dim]`, of q's dtype and device; heads a multiple of kv_heads.
        v: `[batch, kv_heads, seq_k, value_dim]`; value_dim up to 256.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx, *arrays)`, the new scores: `score` is float32 `[rows, keys]`, scaled, and
            what is returned broadcasts to its shape.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx, *arrays)`, whether a row sees a key, of a shape that broadcasts to `[rows, keys]`;
            the block mask's unless given. Masks are applied after `score_mod`.
        block_mask: the blocks of keys that `mask_mod` shows, as `tiledsched.block_mask` finds them. Unless given they are found in
            each call, and once where there are no arrays.
        arrays: tensors on q's device that the functions read with `ct.gather`, in this order, of any strides. Integers of 64 bits
            are converted to 32 in each call.
        scale: positive softmax scale; 1 / sqrt(head_dim) unless given.
        return_lse: return the log-sum-exp of each row's changed, masked scores, too: natural, float32 `[batch, heads, seq_q]`.

    Returns:
        `[batch, heads, seq_q, value_dim]`, of q's dtype and order of axes in memory; with `return_lse` a pair. Rows that see no key
        are zeros, and their log-sum-exp is minus infinity. Under autocast q, k and v are cast first, as for `sdpa`. Tensors on the
        CPU are computed in float64 by the reference, slowly, with a warning.

    Raises:
        DeclarationError: a function cannot be compiled, or takes another number of arrays.
        ProblemError: arguments that do not fit together.
        UnsupportedError: gradients or transforms of torch.func are asked for, or the kernel takes no such tensors.
        LaunchError: the launch failed, or a CUDA graph is being captured and this program never ran before.
    """
    # The short way, as that of `sdpa`. Functions are told apart by identity; `Ready` holds them, so that it stays theirs.
    if (
        not _traced()
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and type(arrays) is tuple
        and (scale is None or type(scale) is float)
        and (block_mask is None or type(block_mask) is BlockMask)
        and is_plain_call()
        and not (q.is_nested or k.is_nested or v.is_nested)
    ):
        for each in arrays:
            if type(each) is not Tensor or each.is_nested:
                break
        else:
            of_mask: Any = None
            if block_mask is not None:
                of_mask = block_mask.key
            elif mask_mod is not None:  # its lists are those of a stream
                of_mask = process.runtime.current_stream(q.get_device())
            given = (q, k, v, *arrays)
            ready = hot.find_ready(given, (id(score_mod), id(mask_mod), of_mask, len(arrays), scale, return_lse))
            if ready is not None:
                if ready.listed:
                    given = (q, k, v, ready.find_lists(q, k, arrays) if block_mask is None else block_mask.lists, *arrays)
                result = launch_plan(ready.plan, given, None, False, True)
                return (result[0], result[1].squeeze(-1)) if return_lse else result
    return _attend(q, k, v, score_mod, mask_mod, block_mask, arrays, scale, return_lse)


class FlexCall(NamedTuple):
    """A call of `flex` whose arguments have been read, as the operators take it."""

    q: Any
    """`[batch, heads, rows, columns]`; k and v with rows and columns of their own."""
    k: Any
    v: Any
    lists: Any
    """The lists of blocks; None where the problem has none."""
    arrays: tuple[Any, ...]
    """What the functions take."""
    kernel: str
    """Name of the kernel."""
    scale: float | None
    """The softmax scale; None for 1 / sqrt(head_dim)."""
    lse: bool
    """Whether the log-sum-exp is returned, too."""

    @property
    def tensors(self) -> tuple[Any, ...]:
        """What a launch takes."""
        lists = () if self.lists is None else (self.lists,)
        return (self.q, self.k, self.v, *lists, *self.arrays)

    @property
    def key(self) -> tuple[Any, ...]:
        """What a plan depends on."""
        return call_key(*self.tensors, self.kernel, self.scale, self.lse)

    def problem(self, **changes: Any) -> Problem:
        """The problem that the tensors pose.

        Raises:
            ProblemError: the kernel has no such problem.
        """
        fields = AttentionCall(self.q, self.k, self.v, None, self.scale, self.lse).fields()
        found = kernel_named(self.kernel).problem(**fields | changes, lse=self.lse)
        if beyond_int32(self.tensors):
            vars(found)["wide"] = True
        return found

    def find_plan(self) -> Plan | str:
        """The plan of the call, or why the kernel cannot serve it; see :meth:`make_plan`."""
        return cache.find(self.key, self.make_plan)

    def make_plan(self, served: Served | None = None) -> Plan | str:
        """A new plan of the call, or why the kernel cannot serve it.

        Args:
            served: what is served; the table's answer unless given.

        Raises:
            ProblemError: there is no such problem.
            ConfigError: settings that contradict each other.
        """
        if self.q.device.type != process.runtime.device_type:
            return f"q is on {self.q.device}"
        problem = self.problem()
        value, _ = scales(problem, self.scale)
        changes = problem.declaration.mods[0] is not None  # type: ignore[attr-defined]
        numbers = {"scale_log2": LOG2_E if changes else value, "cap_scale": value / LOG2_E if changes else 0.0}
        decision = choose("flex", problem, (self.q,), None, served)
        if isinstance(decision, str):
            return decision
        lists = {} if self.lists is None else {"Blocks": self.lists}
        inputs = {"Q": self.q, "K": self.k, "V": self.v} | lists | by_name(self.arrays)
        return plan_of(decision, inputs, self.lse, numbers)

    def launch(self, plan: Plan, first: bool = False) -> Any:
        """The output, or output and log-sum-exp."""
        result = launch_plan(plan, self.tensors, None, first)
        return (result[0], result[1].squeeze(-1)) if self.lse else result

    def by_reference(self, reason: str) -> Any:
        """What :meth:`launch` returns, computed in float64 on the host.

        Raises:
            UnsupportedError: the setting `fallback` is `error`, or bits must not depend on the batch.
        """
        if process.settings().fallback == "error" or process.is_invariant():
            raise UnsupportedError(f"flex: {reason}; move its tensors to a GPU that `tiledsched doctor` knows")
        config.warn_once(f"flex: {reason}; its reference computes there, slowly, in float64; on a GPU the kernel does")
        problem = self.problem(dtype="float16")  # of any dtype the reference is the same
        scale = default_scale(problem) if self.scale is None else self.scale
        q, k, v = (on_host(each, "").astype(numpy.float64) for each in (self.q, self.k, self.v))
        arrays = by_name(on_host(each, "") for each in self.arrays)
        given = {"Q": q * (scale / default_scale(problem)), "K": k, "V": v, **arrays}
        found = call_reference(problem.declaration, numpy, problem, given)
        out, sums = empty_results(self.q, self.v, True)
        out.copy_(torch.from_numpy(found[0]))
        return (out, sums.copy_(torch.from_numpy(found[1][..., 0]))) if self.lse else out


def attend(call: FlexCall) -> Any:
    """Launch the kernel; or compute a call on the host by the reference where there is none for its device.

    Raises:
        ProblemError, ConfigError: as :meth:`FlexCall.make_plan`.
        UnsupportedError: as :meth:`FlexCall.by_reference`.
        LaunchError: the launch failed, or a CUDA graph is being captured and the program never ran.
    """
    key = call.key
    plan = cache.ready.get(key)
    if plan is not None:
        return call.launch(plan)
    if 0 in (*call.q.shape, call.k.shape[2], call.v.shape[3]):  # no row sees a key
        out, sums = empty_results(call.q, call.v, True)
        return (out.zero_(), sums.fill_(-math.inf)) if call.lse else out.zero_()
    found = cache.find(key, call.make_plan)
    if isinstance(found, str):
        return call.by_reference(found)
    return launch_first(cache, key, found, lambda plan: call.launch(plan, first=True), call.make_plan)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: BlockMask | None = None,
    arrays: tuple[Tensor, ...] = (),
    *,
    scale: float | None = None,
    return_lse: bool = False,
    verify: bool = False,
) -> Explanation:
    """What `flex` would do with these tensors, and why; the arguments are those of :func:`flex`.

    Raises:
        UnsupportedError: the kernel cannot serve them.
        ProblemError, DeclarationError: as `flex`.
    """
    call = _read_call(q, k, v, score_mod, mask_mod, block_mask, arrays, scale, return_lse)
    found = call.find_plan()
    if isinstance(found, str):
        raise UnsupportedError(f"flex: {found}; the kernel needs a GPU that `tiledsched doctor` knows")
    return explain_plan(found, call.tensors, verify=verify)


def _read_call(
    q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, block_mask: Any, arrays: Any, scale: Any, return_lse: bool
) -> FlexCall:
    """The call of tensors of four axes, checked, with its lists made."""
    check_tensors(q, k, v)
    arrays, scale = read_arrays(arrays, q), read_scale(scale)
    if odd_scale(scale) or not q.shape[3]:
        raise ProblemError(odd_scale(scale) or "q has no columns; head_dim must be 1 at least")
    if not (q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0] and heads_grouped(q, k, v)):
        raise ProblemError(
            "flex takes tensors [batch, heads, rows, columns] of one batch, heads a multiple of kv_heads, or three axes of each; got "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}; expand what is to be broadcast"
        )
    is_here, is_empty = q.device.type == process.runtime.device_type, 0 in (*q.shape, k.shape[2], v.shape[3])
    reason = unserved(q, k, v, None, 0.0) if is_here and not is_empty else ""
    if reason:
        raise UnsupportedError(f"flex: {reason}")
    types = types_of(arrays)
    if block_mask is not None:
        mask_mod = _mask_of(block_mask, mask_mod, types)
    name = variant_named(score_mod, mask_mod, types)
    lists = None
    if block_mask is not None:
        _check_sizes(block_mask, name, q, k)
    if mask_mod is not None and is_here and q.shape[2] > FEW_ROWS:
        lists = find_lists(name, q, k, arrays) if block_mask is None else block_mask.lists
    return FlexCall(q, k, v, lists, arrays, name, scale, return_lse)


def _mask_of(block_mask: Any, mask_mod: Any, types: Any) -> Any:
    """The mask function of a call with a block mask.

    Raises:
        ProblemError: that is none of ours, or of another function than the one given.
    """
    if not isinstance(block_mask, BlockMask):
        raise ProblemError(
            f"block_mask must be what tiledsched.block_mask returns, got {type(block_mask).__module__}.{type(block_mask).__name__}"
        )
    own = block_mask.mask_mod
    if mask_mod not in (None, own) and variant_named(None, mask_mod, types) != variant_named(None, own, types):
        raise ProblemError("mask_mod is another function than that of block_mask; give one of them, or make block_mask of mask_mod")
    return own


def _check_sizes(block_mask: BlockMask, name: str, q: Any, k: Any) -> None:
    """Raise unless a block mask is for these tensors.

    Raises:
        ProblemError: it is for other sizes or another device.
    """
    lists, wanted = block_mask.lists, shape_of_lists(name, q, k)
    fits = lists.shape[0] in (1, wanted[0]) and lists.shape[1] in (1, wanted[1])
    if not fits or (block_mask.rows, block_mask.keys) != (q.shape[2], k.shape[2]) or lists.device != q.device:
        raise ProblemError(
            f"block_mask is for {block_mask.rows} rows and {block_mask.keys} keys on {lists.device}, with lists {tuple(lists.shape)}; "
            f"these tensors have {q.shape[2]} rows and {k.shape[2]} keys on {q.device}, and the mask function needs lists "
            f"{tuple(wanted)}, or 1 in place of the first two sizes; make one with tiledsched.block_mask(mask_mod, q, k, arrays)"
        )


def _attend(
    q: Any, k: Any, v: Any, score_mod: Any, mask_mod: Any, block_mask: Any, arrays: Any, scale: Any, return_lse: bool
) -> Any:
    """Every other call: check it, call the operator, and have later calls like it go the short way."""
    check_tensors(q, k, v)
    if not _traced():
        if torch._C._are_functorch_transforms_active() or has_tangent((q, k, v, *read_arrays(arrays, q))):
            raise UnsupportedError(NO_TRANSFORMS)
        inform_counters()
    again = q.ndim == k.ndim == v.ndim == 3
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = cast_for_autocast(q, k, v)
    read = read_arrays(arrays, q)
    if again or type(arrays) is not tuple or any(each is not given for each, given in zip(read, arrays, strict=True)):
        given = (q[None], k[None], v[None]) if again else (q, k, v)
        result = flex(*given, score_mod, mask_mod, block_mask, read, scale=scale, return_lse=return_lse)
        return result if not again else (result[0][0], result[1][0]) if return_lse else result[0]
    call = _read_call(q, k, v, score_mod, mask_mod, block_mask, arrays, scale, return_lse)
    operator = flex_lse_operator if return_lse else flex_operator
    result = operator(q, k, v, call.lists, list(arrays), call.kernel, call.scale)
    if not _traced() and is_plain_call() and are_ordinary(given := (q, k, v, *arrays)):
        of_mask = None if mask_mod is None else process.runtime.current_stream(q.get_device())
        of_mask = of_mask if block_mask is None else block_mask.key
        options = (id(score_mod), id(mask_mod), of_mask, len(arrays), scale, return_lse)
        _remember(call, call_key(*given, *options), block_mask is None, (score_mod, mask_mod, block_mask and block_mask.mask_mod))
    return result


def _remember(call: FlexCall, key: tuple[Any, ...], keeps_lists: bool, held: tuple[Any, ...]) -> None:
    """Have later calls of `flex` find the plan of a call, if it was launched."""
    with lock:
        plan = cache.ready.get(call.key)
        if plan is not None:
            lists = call.lists if keeps_lists and not call.arrays and not process.runtime.is_capturing() else None
            ready = Ready(plan, call.kernel, call.lists is not None, lists, held)
            hot.keep_ready(key, hot.find(key, lambda: ready))  # type: ignore[arg-type]


def _register(name: str, result: str, lse: bool) -> Any:
    """`tiledsched::flex`, or `flex_lse`."""

    def launch(q: Any, k: Any, v: Any, lists: Any, arrays: Any, kernel: str, scale: float | None) -> Any:
        return attend(FlexCall(q, k, v, lists, tuple(arrays), kernel, scale, lse))

    def autograd(operator: Any, q: Any, k: Any, v: Any, lists: Any, arrays: Any, *given: Any) -> Any:
        tensors = (q, k, v, *arrays)
        if has_tangent(tensors):
            raise UnsupportedError(NO_TRANSFORMS)
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            raise UnsupportedError(NO_GRADIENTS)
        if not is_transformed() and are_ordinary(tensors if lists is None else (*tensors, lists)):
            return launch(q, k, v, lists, arrays, *given)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(q, k, v, lists, arrays, *given)

    def fake(q: Any, k: Any, v: Any, *given: Any) -> Any:
        return empty_results(q, v, lse)

    def flops(q: Any, k: Any, v: Any, *given: Any, out_val: Any) -> int:
        return forward_flops(q, k, v, out_val=out_val)

    arguments = "Tensor q, Tensor k, Tensor v, Tensor? lists, Tensor[] arrays, str kernel, float? scale"
    return register(f"{name}({arguments}) -> {result}", launch, fake, autograd, flops)


flex_operator = _register("flex", "Tensor", lse=False)
flex_lse_operator = _register("flex_lse", "(Tensor, Tensor)", lse=True)
