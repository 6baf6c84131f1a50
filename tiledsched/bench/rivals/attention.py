"""Attention and every other implementation of it: how each is called, and what each is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from tiledsched.bench.case import details_of
from tiledsched.bench.errors import NOT_FINITE, Error, error_of
from tiledsched.bench.methods import LEFT_OUT, OURS, SERVED, Arrays, Call, Method
from tiledsched.bench.rivals.attention_accuracy import Pair, compared_pairs, reference_of_pair
from tiledsched.bench.rivals.attention_flex import flex_attention
from tiledsched.bench.rivals.attention_left_out import launched_plan, left_out_call, left_out_plan, plan_call
from tiledsched.bench.rivals.attention_placed import drawn, features_of, found_plan, keys_of, rows_of, served_placed
from tiledsched.core.errors import UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space_files import space_for
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.inputs import places
from tiledsched.kernels.attention.rivals import (
    FLASH_4,
    FLASH_4_MODULE,
    TORCH_VARLEN,
    flash_4_function,
    flash_attention_4,
    torch_varlen,
)
from tiledsched.kernels.attention.scales import DEFAULT_CAP, default_scale
from tiledsched.measure.rivals import call_on
from tiledsched.serve.plan_cache import PlanCache

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
"""The kernel as one would first write it: 64x64 tiles, and every hint left to the compiler. Knobs not named here have
their defaults.
"""


class AttentionArrays(Arrays):
    """Q, K and V, then the arrays of features that the problem has: sinks, sequence lengths, and where sequences and
    pages lie.

    Q, K and V are contiguous. Where sequences are packed or keys lie in pages, rows come before heads in memory.
    """

    @property
    def q(self) -> Any:
        """`[batch, heads, seq_q, head_dim]`."""
        return self.tensors[0]

    @property
    def k(self) -> Any:
        """`[batch, kv_heads, seq_k, head_dim]`, or pages."""
        return self.tensors[1]

    @property
    def v(self) -> Any:
        """`[batch, kv_heads, seq_k, value_dim]`, or pages."""
        return self.tensors[2]

    @property
    def causal(self) -> bool | str:
        """The argument `causal` of `sdpa`."""
        p = self.problem
        if p.window_right:
            if p.alignment == "top_left" and p.seq_q != p.seq_k:
                raise UnsupportedError("sdpa aligns a window of two sides at the bottom right")
            return False
        return bool(p.causal) if p.alignment == "top_left" else str(p.alignment)

    @property
    def feature_arrays(self) -> tuple[Any, ...]:
        """The arrays after q, k and v that the problem has."""
        return self.tensors[3:]

    @property
    def named(self) -> dict[str, Any]:
        """Features other than the mask, as keyword arguments of `sdpa`."""
        p = self.problem
        names = [
            name for name, given in (("sinks", p.sinks), ("key_starts", p.starts), ("key_lengths", p.lengths)) if given
        ]
        found: dict[str, Any] = dict(zip(names, self.feature_arrays, strict=True))
        if p.window or p.window_right:
            found["window"] = (p.window - 1, p.window_right) if p.window_right else p.window
        if p.softcap:
            found["softcap"] = DEFAULT_CAP
        return found

    @property
    def call(self) -> Any:
        """The call of the public functions, for which plans are made."""
        from tiledsched.ops.arguments import CAUSAL
        from tiledsched.ops.features import read_features
        from tiledsched.ops.plans import AttentionCall

        p = self.problem
        if p.is_varlen:
            alignment, features = p.alignment if p.causal else None, features_of(self)
        else:
            alignment, features = read_features(self.q, self.k, CAUSAL[self.causal], **self.named)
        return AttentionCall(self.q, self.k, self.v, alignment, None, False, features)


_own_plans: PlanCache[Any] = PlanCache(lambda *given: given)
"""Plans by problem and device: a bench asks for the call, and later for what it was."""


def _ours(arrays: AttentionArrays) -> Call:
    """Our kernel as `sdpa`, `sdpa_varlen` and `sdpa_paged` launch it, even where a rival is served."""
    return plan_call(*_own_plan(arrays))


def _own_plan(arrays: AttentionArrays) -> tuple[Any, Any]:
    """The plan of our own kernel, launched once and kept, and the call that it is of."""
    call = arrays.call
    return launched_plan(_own_plans, arrays, call, lambda: found_plan(arrays).own, lambda plan: plan.own), call


def _served(arrays: AttentionArrays) -> Call:
    """`sdpa`, whatever it runs, after making sure that it does not leave the problem to torch."""
    if arrays.problem.is_varlen:
        return served_placed(arrays)
    from tiledsched.ops.sdpa import sdpa

    q, k, v, causal, named = arrays.q, arrays.k, arrays.v, arrays.causal, arrays.named
    found_plan(arrays)
    return lambda: sdpa(q, k, v, causal=causal, **named)


def _refuse_features(problem: Problem, *, but: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedError where a problem has features that a method does not compute, except those in `but`."""
    if problem.is_varlen:
        raise UnsupportedError("it knows no packed sequences, and no pages")
    beyond = [
        name
        for name in ("window", "window_right", "softcap", "sinks", "starts", "lengths")
        if getattr(problem, name) and name not in but
    ]
    if beyond:
        raise UnsupportedError(f"it knows no {', '.join(beyond)}")


_untuned_kernels: dict[tuple[str, Any], Any] = {}
"""Kernel objects by arch and function. cuTile compiles once for each kernel object and problem class, so they are used
again.
"""


def untuned_schedule(arch: str) -> Schedule:
    """`UNTUNED`, with the knobs that it does not name at the defaults of the arch's space."""
    return space_for(arch, Attention).complete(Schedule(UNTUNED))


def _untuned(arrays: AttentionArrays) -> Call:
    import cuda.tile as ct

    from tiledsched.core.device import arch_spec
    from tiledsched.core.launch import steps, tile_kernels

    torch, problem, q = arrays.torch, arrays.problem, arrays.q
    _refuse_features(problem)
    properties = torch.cuda.get_device_properties(q.device)
    arch = f"sm_{properties.major}{properties.minor}"
    schedule, device = untuned_schedule(arch), arch_spec(arch)
    (step,) = steps(Attention, problem, schedule, device)
    kernel = (
        _untuned_kernels.get((arch, step.function)) or tile_kernels(Attention, {arch: schedule}, problem, device)[0]
    )
    _untuned_kernels[arch, step.function] = kernel
    shape = (*q.shape[:3], arrays.v.shape[3])

    def call() -> Any:
        out = q.new_empty(shape)
        ct.launch(torch.cuda.current_stream(), step.grid, kernel, (q, arrays.k, arrays.v, out, *step.tail))
        return out

    return call


def _torch_call(arrays: AttentionArrays) -> Call:
    """torch's attention, with whichever backend it takes. Windows and lengths become a mask of all scores, which is all
    it knows.
    """
    torch, problem = arrays.torch, arrays.problem
    _refuse_features(problem, but=("window", "window_right", "starts", "lengths"))
    more: dict[str, Any] = {"enable_gqa": True} if problem.group > 1 else {}
    if problem.has_features:
        from tiledsched.ops.fallback import visible_keys

        call = arrays.call
        more["attn_mask"] = visible_keys(arrays.q, arrays.k, call.causal, call.features)
    elif problem.causal and problem.alignment == "bottom_right":
        from torch.nn.attention.bias import causal_lower_right

        more["attn_mask"] = causal_lower_right(problem.seq_q, problem.seq_k)
    else:
        more["is_causal"] = problem.causal
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(arrays.q, arrays.k, arrays.v, **more)


def _torch_backend(backend: str) -> Callable[[AttentionArrays], Call]:
    """torch's attention, with only one backend allowed."""

    def make(arrays: AttentionArrays) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        allowed, attention = getattr(SDPBackend, backend), _torch_call(arrays)

        def call() -> Any:
            with sdpa_kernel(allowed):
                return attention()

        return call

    return make


def _eager(arrays: AttentionArrays) -> Call:
    """softmax(q @ k^T) @ v in torch operators, with softmax in float32 and key heads repeated, as models did it before
    SDPA.
    """
    torch, problem = arrays.torch, arrays.problem
    _refuse_features(problem)
    scale, group = default_scale(problem), problem.group
    hidden = None
    if problem.causal:
        offset = problem.seq_k - problem.seq_q if problem.alignment == "bottom_right" else 0
        ones = torch.ones(problem.seq_q, problem.seq_k, dtype=torch.bool, device=arrays.q.device)
        hidden = ones.triu(offset + 1)

    def call() -> Any:
        k, v = arrays.k, arrays.v
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.matmul(arrays.q, k.transpose(-1, -2)) * scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)

    return call


def _triton(arrays: AttentionArrays) -> Call:
    _refuse_features(arrays.problem)
    from tiledsched.bench.rivals.triton_attention import triton_attention

    bottom_right = arrays.problem.alignment == "bottom_right"
    return lambda: triton_attention(
        arrays.q, arrays.k, arrays.v, causal=arrays.problem.causal, bottom_right=bottom_right
    )


def _tilegym(arrays: AttentionArrays) -> Call:
    """NVIDIA's TileGym: `tilegym.ops.fmha`, which tunes itself on the first call of a shape."""
    problem = arrays.problem
    _refuse_features(problem)
    if problem.alignment != "top_left" or problem.value_dim:
        raise UnsupportedError("fmha aligns the mask at the top left and takes one head dimension")
    from tilegym.ops import fmha

    scale = default_scale(problem)
    return lambda: fmha(arrays.q, arrays.k, arrays.v, scaling=scale, is_causal=problem.causal, has_backward=False)


def _flash_attn(arrays: AttentionArrays) -> Call:
    """The flash-attn package, on arrays in its own layout, `[batch, rows, heads, head_dim]`."""
    problem = arrays.problem
    _refuse_features(problem)
    if problem.causal and problem.alignment == "top_left" and problem.seq_q != problem.seq_k:
        raise UnsupportedError("flash_attn_func aligns the mask at the bottom right")
    from flash_attn import flash_attn_func

    q, k, v = (array.transpose(1, 2).contiguous() for array in (arrays.q, arrays.k, arrays.v))
    return lambda: flash_attn_func(q, k, v, causal=problem.causal).transpose(1, 2)


def _flash_attention_4(arrays: AttentionArrays) -> Call:
    """FlashAttention-4, on arrays in its own layout, `[batch, rows, heads, head_dim]`."""
    if arrays.problem.is_varlen:
        return call_on(flash_attention_4(arrays.problem), arrays.tensors)
    attend, _ = flash_4_function(arrays.problem)
    q, k, v = (array.transpose(1, 2).contiguous() for array in (arrays.q, arrays.k, arrays.v))
    features = arrays.feature_arrays
    return lambda: attend(q, k, v, *features).transpose(1, 2)


def _torch_varlen(arrays: AttentionArrays) -> Call:
    return call_on(torch_varlen(arrays.problem), arrays.tensors)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(name=OURS, about="our kernel on the schedule that the table names", make=_ours),
        Method(
            name=SERVED,
            about="sdpa, sdpa_varlen or sdpa_paged, whatever they run: our kernel, or a rival measured faster",
            make=_served,
        ),
        Method(name=LEFT_OUT, about="the same, had nobody tuned the problem's suite", make=left_out_call, by_name=True),
        Method(name="untuned", about="the same kernel, 64x64 tiles, no hints", make=_untuned),
        Method(name="torch_flash", about="torch SDPA, flash backend", make=_torch_backend("FLASH_ATTENTION")),
        Method(name="torch_cudnn", about="torch SDPA, cuDNN backend", make=_torch_backend("CUDNN_ATTENTION")),
        Method(
            name="torch_efficient",
            about="torch SDPA, memory-efficient backend",
            make=_torch_backend("EFFICIENT_ATTENTION"),
        ),
        Method(name="torch_math", about="torch SDPA, math backend", make=_torch_backend("MATH"), score_bytes=16),
        Method(name="torch_auto", about="torch SDPA, whichever backend torch takes", make=_torch_call),
        Method(name=TORCH_VARLEN, about="torch's FlashAttention of packed sequences", make=_torch_varlen),
        Method(name="eager", about="softmax(QK^T)V in torch operators", make=_eager, score_bytes=12),
        Method(name="triton", about="a flash-attention forward in Triton, autotuned", make=_triton, package="triton"),
        Method(name="tilegym", about="TileGym's cuTile kernel, autotuned", make=_tilegym, package="tilegym"),
        Method(
            name="flash_attn",
            about="the flash-attn package",
            make=_flash_attn,
            package="flash_attn.flash_attn_interface",
        ),
        Method(
            name=FLASH_4,
            about="the flash-attn-4 package, FlashAttention-4",
            make=_flash_attention_4,
            package=FLASH_4_MODULE,
        ),
        Method(name="torch_flex", about="torch's flex attention, compiled", make=flex_attention, package="triton"),
    )
}
"""The methods by name, in the order of the rows."""


@dataclass(frozen=True)
class PairCase:
    """A case of which only some (sequence, head) pairs are compared, because comparing all of a long problem would take
    minutes.
    """

    arrays: AttentionArrays
    """The inputs that methods are called on."""
    pairs: Sequence[Pair]
    """The pairs that are compared."""
    expected: Sequence[Any]
    """The output of each pair in float64, `[seq_q, value_dim]`."""
    cupy: Any
    """CuPy; NumPy in tests."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Where sequences and pages lie, as arrays on the host."""

    @property
    def compared(self) -> str:
        """How much of the output is compared, such as `4/64`."""
        return f"{len(self.pairs)}/{self.arrays.problem.sequences * self.arrays.problem.heads}"

    def error(self, out: Any) -> Error:
        """How far a method's output is from float64."""
        out = out.detach()
        if not bool(self.arrays.torch.isfinite(out).all()):
            return NOT_FINITE
        parts = (rows_of(out, self.given, *pair).float().contiguous() for pair in self.pairs)
        wide = (self.cupy.from_dlpack(each).astype("float64") for each in parts)
        return error_of(self.cupy, zip(wide, self.expected, strict=True))

    def details(self, method: str, *, verify: bool, captured: bool = False) -> dict[str, Any]:
        """What our kernel launched and why, or the rival that is served in its place; see `BenchCase`."""
        from tiledsched.serve.launch import explain_plan

        arrays = self.arrays
        if method == LEFT_OUT:
            verify = False  # nothing was measured for it
            plan, _ = left_out_plan(arrays)
        elif method == OURS:
            plan, _ = _own_plan(arrays)
        else:
            plan = found_plan(arrays)
        found = explain_plan(plan, arrays.call.tensors, verify=verify)
        return details_of(found, method, verify=verify, captured=captured)


def make_case(torch: Any, cupy: Any, problem: Problem) -> PairCase:
    """The case of a problem: standard normal inputs, the same in every run, and the pairs that are compared.

    CuPy has no bfloat16: it is given float32, which holds both types.
    """
    dtype = getattr(torch, problem.dtype)
    generator = torch.Generator(device="cuda").manual_seed(int(problem.id, 16) % 2**31)
    q, k, v = drawn(torch, problem, generator)
    given = places(numpy.random.default_rng(int(problem.id, 16) % 2**31), problem)
    features = [torch.randn((problem.heads,), generator=generator, device="cuda").to(dtype)] if problem.sinks else []
    alike = {id(each): torch.as_tensor(each, dtype=torch.int32, device=q.device) for each in given.values()}
    features += [alike[id(each)] for each in given.values()]  # rows and keys that lie alike are told by one tensor
    pairs, expected = compared_pairs(problem), []
    arrays = AttentionArrays(torch=torch, problem=problem, tensors=(q, k, v, *features))
    for sequence, head in pairs:
        kv_head = head // problem.group
        parts = (rows_of(q, given, sequence, head), *(keys_of(each, given, sequence, kv_head) for each in (k, v)))
        wide = (cupy.from_dlpack(each.float()) for each in parts)
        own = {} if problem.is_varlen else {name.lower(): each[sequence : sequence + 1] for name, each in given.items()}
        if problem.sinks:
            own["sinks"] = features[0][head : head + 1].double().cpu().numpy()
        of_head, of_keys, of_values = wide
        expected.append(reference_of_pair(cupy, problem, of_head, of_keys, of_values, **own))
    torch.cuda.synchronize()
    return PairCase(arrays, pairs, expected, cupy, given)
