"""`flex`: attention with functions of the author's own that change scores and hide keys, on the schedule that the table names.

As for `sdpa`, the first call of a shape makes a plan, and later calls find it and launch. Later calls do not read the text of the
functions: they compare which objects they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from tiledsched.core.cases import call_reference
from tiledsched.core.errors import ProblemError, UnsupportedError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.registry import kernel_named
from tiledsched.kernels.attention.options import MAX_HEAD_DIM
from tiledsched.kernels.attention.scales import default_scale
from tiledsched.kernels.attention.similarity import FEW_ROWS
from tiledsched.kernels.attention_backward import masks
from tiledsched.kernels.attention_backward.variants import gradient_of
from tiledsched.ops.arguments import check_tensors, heads_grouped, odd_scale, read_scale
from tiledsched.ops.backward import backward_flops, differentiate, read_call, register as register_gradients
from tiledsched.ops.block_masks import (
    BlockMask,
    by_name,
    fill_lists,
    find_lists,
    read_arrays,
    read_mods,
    types_of,
    variant_named,
)
from tiledsched.ops.features import AttentionFeatures
from tiledsched.ops.operator import (
    DifferentiableAttention,
    attend,
    cast_for_autocast,
    empty_results,
    forward_flops,
    register,
)
from tiledsched.ops.plans import AttentionCall, cache, plan_key
from tiledsched.serve import process
from tiledsched.serve.execute import has_tangent, is_plain_call, is_traced, is_transformed, launch_plan
from tiledsched.serve.flops import inform_counters
from tiledsched.serve.op import on_host
from tiledsched.serve.plan import Plan, beyond_int32
from tiledsched.serve.plan_cache import PlanCache, are_ordinary, call_key, lock

NO_TRANSFORMS = (
    "flex is not served under vmap, jvp, grad and other transforms of torch.func; give it a batch axis, and call it outside "
    "of them"
)
FLEX_ARGUMENTS = frozenset({"score_mod", "mask_mod", "block_mask", "arrays", "scale", "score_grad"})
"""The arguments of :func:`flex` that make a call of `explain` one of `flex`."""


class KnownCall(NamedTuple):
    """What calls like one that was served before need. It holds none of their arrays."""

    plan: Plan
    """Their plan."""
    listed: str
    """Name of the kernel where it takes lists of blocks; else empty."""
    lists: Tensor | None
    """Those of all calls without a block mask, of a function without arrays; None for none."""
    held: tuple[Any, ...]
    """The functions, so that no other object takes their identity."""


hot: PlanCache[KnownCall] = PlanCache(call_key)
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
    score_grad: Callable[..., Any] | None = None,
) -> Any:
    """Attention with functions of your own: softmax(score_mod(scale * q @ k^T), where mask_mod) @ v, on the tuned schedule.

    .. code-block:: python

        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        def alibi(score, b, h, q_idx, kv_idx, slopes):
            return score + ct.gather(slopes, h) * (kv_idx - q_idx)

        out = tiledsched.flex(q, k, v, alibi, causal, arrays=(slopes,))

    The functions are code of cuTile, which is compiled into the kernel. They are called for whole tiles: `b` is the number of the
    sequence, an int32 scalar; `h` that of the query head, a scalar or `[rows, 1]`; `q_idx` and `kv_idx` are the numbers of rows
    and keys in their sequence, int32 `[rows, 1]` and `[1, keys]`. Both functions are given all arrays; one that reads none of
    them ends with `*arrays`. A function must have a name and stand in a file; or be returned by such a function, whose numbers,
    tuples and functions it may use; or be a frozen dataclass with `__call__`. What it reads from around it is read at its first
    call. New contents of arrays compile nothing.

    A function in the words of torch's FlexAttention is taken, too. The tensors that it reads by brackets become arrays of the
    call; it is read anew in each call, on the host. Under torch.compile it reads none but those in `arrays`.

    Args:
        q: `[batch, heads, seq_q, head_dim]` CUDA tensor, float16 or bfloat16; any strides; head_dim up to 256. Or
            `[heads, seq_q, head_dim]`, and k and v alike.
        k: `[batch, kv_heads, seq_k, head_dim]`, of q's dtype and device; heads a multiple of kv_heads.
        v: `[batch, kv_heads, seq_k, value_dim]`; value_dim up to 256.
        score_mod: `score_mod(score, b, h, q_idx, kv_idx, *arrays)`, the new scores. `score` is float32 `[rows, keys]`, scaled;
            what is returned broadcasts to its shape.
        mask_mod: `mask_mod(b, h, q_idx, kv_idx, *arrays)`, whether a row sees a key, of a shape that broadcasts to
            `[rows, keys]`; the block mask's function unless given. The mask is applied after `score_mod`.
        block_mask: the blocks of keys that `mask_mod` shows, as `tiledsched.block_mask` finds them. Unless given they are found
            once, or, if there are arrays, in each call.
        arrays: tensors on q's device that the functions read with `ct.gather`, in this order, of any strides. Integers of 64 bits
            are converted to 32 in each call.
        scale: positive softmax scale; 1 / sqrt(head_dim) unless given.
        return_lse: return the log-sum-exp of each row's changed, masked scores, too: natural, float32 `[batch, heads, seq_q]`.
        score_grad: `score_grad(score, b, h, q_idx, kv_idx, *arrays)`, the derivative of `score_mod` in the score. Gradients need
            it only where `score_mod` does more than arithmetic whose derivative is known by rule.

    Returns:
        `[batch, heads, seq_q, value_dim]`, of q's dtype and order of axes in memory; with `return_lse` a pair. Both are
        differentiable, once, in q, k and v. A row that sees no key is zeros, and its log-sum-exp is minus infinity. Under
        autocast q, k and v are cast first, as for `sdpa`. Tensors on the CPU, and others that the kernel does not take, are
        computed in float64 by the reference, slowly, with a warning.

    Raises:
        DeclarationError: a function cannot be compiled, or takes another number of arrays; or gradients are required and no rule
            knows the derivative of `score_mod`.
        ProblemError: arguments that do not fit together.
        UnsupportedError: gradients of an array or transforms of torch.func are asked for; or the kernel takes no such tensors and
            the setting `fallback` is `error`.
        LaunchError: the launch failed, or a CUDA graph is being captured and this program never ran before.
    """
    # The short way, as that of `sdpa`. Functions are told apart by identity; `KnownCall` holds them, so that it stays theirs.
    if (
        not is_traced()
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and type(arrays) is tuple
        and (scale is None or type(scale) is float)
        and (block_mask is None or type(block_mask) is BlockMask)
        and is_plain_call(q, k, v)
        and not (q.is_nested or k.is_nested or v.is_nested)
    ):
        for each in arrays:
            if type(each) is not Tensor or each.is_nested:
                break
        else:
            # Lists that are found here are those of a stream.
            of_mask: Any = block_mask.key if block_mask is not None else None if mask_mod is None else _stream_of(q)
            given = (q, k, v, *arrays)
            ready = hot.find_ready(given, (id(score_mod), id(mask_mod), of_mask, len(arrays), scale, return_lse))
            if ready is not None:
                if ready.listed:
                    lists = ready.lists if block_mask is None else block_mask.lists
                    if lists is None or (block_mask is None and process.runtime.is_capturing()):
                        lists = fill_lists(q, k, arrays, ready.listed)
                    given = (q, k, v, lists, *arrays)
                result = launch_plan(ready.plan, given, None, False, True)
                return (result[0], result[1].squeeze(-1)) if return_lse else result
    return _attend(q, k, v, score_mod, mask_mod, block_mask, arrays, scale, return_lse, score_grad)


def _stream_of(q: Tensor) -> int | None:
    """The stream that is current on q's device; None where no kernel runs."""
    runtime = process.runtime
    return runtime.current_stream(q.get_device()) if q.device.type == runtime.device_type else None


class FlexFeatures(AttentionFeatures):
    """What a call of `flex` has in the place of the features of `sdpa`: its kernel, and what that takes beside q, k and v."""

    front, elsewhere = "flex", "its reference, in float64 on the CPU"
    masked = False
    """Whether the functions are those of a mask tensor of `sdpa`."""

    lists: Any
    """The lists of blocks; None where the problem has none."""
    arrays: Sequence[Any]
    """What the functions take."""

    def __new__(cls, kernel: str, lists: Any, arrays: Sequence[Any]) -> FlexFeatures:
        """A variant by the name of its kernel."""
        made = super().__new__(cls)
        made.kernel, made.lists, made.arrays = kernel_named(kernel), lists, arrays  # type: ignore[misc]
        if made.kernel.declared_in == masks.__name__:
            made.front, made.elsewhere, made.masked = "sdpa", AttentionFeatures.elsewhere, True  # type: ignore[misc]
        return made

    @property
    def attn_mask(self) -> Any:
        """The mask tensor of `sdpa` that the functions stand for; None where they are others."""
        if not self.masked:
            return None
        mask = self.arrays[0].view(torch.bool) if self.arrays[0].dtype == torch.uint8 else self.arrays[0]
        return mask if mask.ndim == 4 else mask[:, :, None]

    @property
    def gradients_kernel(self) -> KernelClass:  # type: ignore[override]
        """The kernel of the gradients.

        Raises:
            DeclarationError: no rule knows the derivative of the function of scores.
        """
        return gradient_of(self.kernel)  # type: ignore[arg-type]  # a class is hashable

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The lists, and what the functions take."""
        return (self.lists, *self.arrays)

    @property
    def key(self) -> tuple[Any, ...]:
        """What a plan depends on, apart from q, k and v."""
        return (*super().key, self.kernel.name, *call_key(*self.arrays))

    def feature_arrays(self, q: Any) -> dict[str, Any]:
        """The lists and the arrays, by the names of the kernel's arrays."""
        return ({} if self.lists is None else {"Blocks": self.lists}) | by_name(self.arrays)

    def by_reference(self, q: Any, k: Any, v: Any, scale: float | None) -> tuple[Any, Any]:
        """The output and the log-sum-exp, computed in float64 on the host; see :data:`elsewhere`."""
        out, lse = empty_results(q, v, True)
        if 0 in (*q.shape, k.shape[2], v.shape[3]):  # no row sees a key
            return out.zero_(), lse.fill_(-math.inf)
        fields = AttentionCall(q, k, v, None, scale, True).fields() | {
            "dtype": "float16"
        }  # of any the reference is the same
        inputs = {"Q": q, "K": k, "V": v} | by_name(self.arrays)
        found, _ = on_reference(self.kernel.problem(**fields, lse=True), inputs, scale)
        return out.copy_(torch.from_numpy(found[0])), lse.copy_(torch.from_numpy(found[1][..., 0]))

    def gradients_by_reference(self, call: Any) -> Any:
        """The gradients of q, k and v of a `BackwardCall`, computed in float64 on the host; see :data:`elsewhere`."""
        q, k, v = call.forward[:3]
        if 0 in (*q.shape, k.shape[2], v.shape[3]):
            return map(torch.zeros_like, (q, k, v))
        found, factor = on_reference(call.problem(dtype="float16"), call.inputs(), call.forward.scale)
        made = zip((q, k, v), (factor * found[0], *found[1:]), strict=True)
        return [torch.empty_like(like).copy_(torch.from_numpy(each)) for like, each in made]

    def with_tensors(self, tensors: Sequence[Any]) -> FlexFeatures:
        """The same kernel for other lists and arrays, in the order of :attr:`tensors`."""
        return FlexFeatures(self.kernel.name, tensors[0], tensors[1:])

    def forward_operator(self, q: Any, k: Any, v: Any, scale: float | None) -> Any:
        """The output and the log-sum-exp by the operator that compiled graphs hold."""
        return flex_lse_operator(q, k, v, self.lists, list(self.arrays), self.kernel.name, scale)

    def backward_operator(self, *given: Any) -> Any:
        """The gradients of q, k and v by the operator that compiled graphs hold."""
        *tensors, scale, deterministic = given
        return flex_backward_operator(*tensors, self.lists, list(self.arrays), self.kernel.name, scale, deterministic)


def on_reference(problem: Problem, inputs: Mapping[str, Any], scale: float | None) -> tuple[Any, float]:
    """What the reference, which knows the usual softmax scale, returns for tensors by the names of their arrays, in float64; and
    by how much the scale is larger than the usual one.

    Raises:
        UnsupportedError: probabilities are dropped, which it does not do.
    """
    if problem.declaration.weight_mod is not None:  # type: ignore[attr-defined]
        raise UnsupportedError("dropout is computed on the GPU alone; set masks = torch, and torch computes such calls")
    usual = default_scale(problem)
    factor = (usual if scale is None else scale) / usual
    read = {name: on_host(each, "") for name, each in inputs.items()}
    return call_reference(problem.declaration, numpy, problem, read | {"Q": read["Q"] * factor}), factor


def read_flex(q: Any, k: Any, v: Any, *, return_lse: bool = False, **given: Any) -> AttentionCall:
    """The call of tensors of four axes, checked, with its lists made; the arguments are those of :func:`flex`.

    Raises:
        DeclarationError, ProblemError: as `flex`.
    """
    kernel, lists, arrays, scale = _read(q, k, v, **given)
    return AttentionCall(q, k, v, None, scale, return_lse, FlexFeatures(kernel, lists, arrays))


def _read(
    q: Any,
    k: Any,
    v: Any,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    arrays: Any = (),
    scale: Any = None,
    score_grad: Any = None,
) -> tuple[str, Any, tuple[Any, ...], Any]:
    """The kernel's name, the lists of blocks, the arrays and the scale of a call, checked."""
    check_tensors(q, k, v)
    score_mod, mask_mod, block_mask, arrays = _in_tile_code(q, score_mod, mask_mod, block_mask, arrays)
    scale = read_scale(scale)
    if odd_scale(scale) or not 0 < q.shape[-1] <= MAX_HEAD_DIM or v.shape[-1] > MAX_HEAD_DIM:
        raise ProblemError(
            odd_scale(scale)
            or f"head_dim must be 1 to {MAX_HEAD_DIM}, and value_dim no more than that, got {q.shape[-1]} and {v.shape[-1]}; "
            "torch's FlexAttention takes others"
        )
    if not (q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0] and heads_grouped(q, k, v)):
        raise ProblemError(
            "flex takes tensors [batch, heads, rows, columns] of one batch, heads a multiple of kv_heads, or three axes of each; "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}; expand what is to be broadcast"
        )
    types = types_of(arrays)
    if block_mask is not None:
        mask_mod = _mask_of(block_mask, mask_mod, types)
        _check_sizes(block_mask, q, k)
    name, lists = variant_named(score_mod, mask_mod, types, score_grad), None
    if mask_mod is not None and q.shape[2] > FEW_ROWS and q.device.type == process.runtime.device_type:
        lists = find_lists(name, q, k, arrays) if block_mask is None else block_mask.lists
    return name, lists, arrays, scale


def _in_tile_code(q: Any, score_mod: Any, mask_mod: Any, block_mask: Any, arrays: Any) -> tuple[Any, Any, Any, Any]:
    """The functions, block mask and arrays of a call, where the functions may be in torch's words, in cuTile's; see
    :func:`~tiledsched.ops.block_masks.read_mods`."""
    ours = isinstance(block_mask, BlockMask)
    own = block_mask.mask_mod if ours and mask_mod is None else mask_mod
    score_mod, mask, arrays = read_mods(score_mod, own, arrays, q)
    if mask is own:
        return score_mod, mask_mod, block_mask, arrays
    return score_mod, mask, replace(block_mask, mask_mod=mask) if ours else block_mask, arrays


def _mask_of(block_mask: Any, mask_mod: Any, types: Any) -> Any:
    """The mask function of a call with a block mask.

    Raises:
        ProblemError: that is none of ours, or of another function than the one given.
    """
    if not isinstance(block_mask, BlockMask):
        kind = f"{type(block_mask).__module__}.{type(block_mask).__name__}"
        raise ProblemError(f"block_mask must be what tiledsched.block_mask returns, got {kind}")
    own = block_mask.mask_mod
    if mask_mod not in (None, own) and variant_named(None, mask_mod, types) != variant_named(None, own, types):
        raise ProblemError(
            "mask_mod is another function than that of block_mask; give one of them, or make block_mask of mask_mod"
        )
    return own


def _check_sizes(block_mask: BlockMask, q: Any, k: Any) -> None:
    """Raise unless a block mask is for these tensors.

    Raises:
        ProblemError: it is for other sizes or another device.
    """
    lists, sizes = block_mask.lists, (block_mask.rows, block_mask.keys)
    fits = lists.device == q.device and all(
        made == size or (made == 1 and of is None)
        for made, of, size in zip(lists.shape, block_mask.of, q.shape, strict=False)
    )
    if not fits or sizes != (q.shape[2], k.shape[2]):
        raise ProblemError(
            f"block_mask is for {sizes[0]} rows and {sizes[1]} keys, with lists {tuple(lists.shape)} on {lists.device}; these "
            f"tensors have batch {q.shape[0]}, {q.shape[1]} heads, {q.shape[2]} rows and {k.shape[2]} keys on {q.device}; "
            "make one with tiledsched.block_mask(mask_mod, q, k, arrays)"
        )


def _attend(
    q: Any,
    k: Any,
    v: Any,
    score_mod: Any,
    mask_mod: Any,
    block_mask: Any,
    arrays: Any,
    scale: Any,
    return_lse: bool,
    score_grad: Any,
) -> Any:
    """Every other call: check it, call the operator, and have later calls like it go the short way."""
    if any(isinstance(each, Tensor) and each.is_nested for each in (q, k, v)):
        raise UnsupportedError(
            "flex takes no nested tensors; pack the sequences, and have mask_mod hide each from the others"
        )
    check_tensors(q, k, v)
    if not is_traced():
        if torch._C._are_functorch_transforms_active() or has_tangent((q, k, v, *read_arrays(arrays, q))):
            raise UnsupportedError(NO_TRANSFORMS)
        inform_counters()
    again = q.ndim == k.ndim == v.ndim == 3
    q, k, v = cast_for_autocast(q, k, v)
    score, mask, blocks, read = _in_tile_code(q, score_mod, mask_mod, block_mask, arrays)
    both = zip((score_mod, mask_mod, block_mask, *arrays), (score, mask, blocks, *read), strict=False)
    if again or type(arrays) is not tuple or any(one is not other for one, other in both):
        given = (q[None], k[None], v[None]) if again else (q, k, v)
        more = {"scale": scale, "return_lse": return_lse, "score_grad": score_grad}
        result = flex(*given, score, mask, blocks, read, **more)
        return result if not again else (result[0][0], result[1][0]) if return_lse else result[0]
    kernel, lists, _, scale_read = _read(q, k, v, score_mod, mask_mod, block_mask, arrays, scale, score_grad)
    operator = flex_lse_operator if return_lse else flex_operator
    result = operator(q, k, v, lists, list(arrays), kernel, scale_read)
    if not is_traced() and is_plain_call() and are_ordinary(given := (q, k, v, *arrays)):
        of_mask = block_mask.key if block_mask is not None else None if mask_mod is None else _stream_of(q)
        key = call_key(*given, id(score_mod), id(mask_mod), of_mask, len(arrays), scale, return_lse)
        listed, held = "" if lists is None else kernel, (score_mod, mask_mod, block_mask and block_mask.mask_mod)
        with lock:
            plan = cache.ready.get(plan_key(q, k, v, None, scale_read, return_lse, FlexFeatures(kernel, lists, arrays)))
            if plan is not None:
                is_own = block_mask is None and not arrays and not process.runtime.is_capturing()
                ready = KnownCall(plan, listed, lists if is_own else None, held)
                hot.keep_ready(key, hot.find(key, lambda: ready))  # type: ignore[arg-type]
    return result


def _register(name: str, lse: bool) -> Any:
    """`tiledsched::flex`, or `flex_lse`."""

    def launch(q: Any, k: Any, v: Any, lists: Any, arrays: Any, kernel: str, scale: float | None) -> Any:
        return attend(q, k, v, None, scale, lse, FlexFeatures(kernel, lists, arrays))

    def autograd(operator: Any, q: Any, k: Any, v: Any, lists: Any, arrays: Any, *given: Any) -> Any:
        tensors = (q, k, v, *arrays)
        if has_tangent(tensors):
            raise UnsupportedError(NO_TRANSFORMS)
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            _check_differentiable(arrays)
            gradient_of(kernel_named(given[0]))  # type: ignore[arg-type]  # refuses functions without a known derivative
            features = FlexFeatures(given[0], lists, arrays)
            return DifferentiableAttention.apply(q, k, v, None, (None, given[1], features, None), lse)
        if not is_transformed() and are_ordinary(tensors if lists is None else (*tensors, lists)):
            return launch(q, k, v, lists, arrays, *given)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(q, k, v, lists, arrays, *given)

    def flops(q: Any, k: Any, v: Any, *given: Any, out_val: Any) -> int:
        return forward_flops(q, k, v, out_val=out_val)

    arguments = "Tensor q, Tensor k, Tensor v, Tensor? lists, Tensor[] arrays, str kernel, float? scale"
    return register(name, arguments, lse, launch, autograd, flops)


flex_operator = _register("flex", lse=False)
flex_lse_operator = _register("flex_lse", lse=True)


def _check_differentiable(arrays: Sequence[Any]) -> None:
    """Raise where gradients of a call with such arrays are not computed.

    Raises:
        UnsupportedError: one requires a gradient itself, or is beyond the reach of a 32-bit index.
    """
    for place, each in enumerate(arrays):
        if each.requires_grad:
            raise UnsupportedError(
                f"arrays[{place}] requires a gradient, and flex computes those of q, k and v alone; give "
                f"arrays[{place}].detach(), or learn it with torch.nn.attention.flex_attention"
            )
        if beyond_int32((each,)):
            raise UnsupportedError(
                f"arrays[{place}] has more than 2**31 - 1 elements, with which flex computes no gradients; give a part of it"
            )


def _launch_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, *given: Any) -> Any:
    lists, arrays, kernel, scale, deterministic = given
    variant = FlexFeatures(kernel, lists, arrays)
    return differentiate(read_call(dout, q, k, v, out, lse, None, scale, variant, dlse, deterministic))[:3]


flex_backward_operator = register_gradients(
    "flex_backward",
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor? lists, Tensor[] arrays, "
    "str kernel, float? scale, bool? deterministic) -> (Tensor, Tensor, Tensor)",
    _launch_backward,
    lambda dout, q, k, v, *given: tuple(map(torch.empty_like, (q, k, v))),
    lambda *given, out_val: backward_flops(*given[:6], out_val=out_val),
)
