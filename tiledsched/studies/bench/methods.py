"""The methods compared: how each is called on the same arrays.

Nothing is imported before it is used: a method whose package is missing, or which refuses a problem, costs its own row only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.errors import ConfigError, UnsupportedError
from tiledsched.kernels.attention.reference import default_scale
from tiledsched.problem import Problem
from tiledsched.schedule import KnobValue, Schedule

OURS = "tiledsched"
MATMUL = "matmul"
MATMUL_SIZE = 8192
"""Rows and columns of the matrices whose product is the practical ceiling."""
MEMORY_SHARE = 0.5
"""Of the device's memory, what a method's score matrices may take."""
UNTUNED: dict[str, KnobValue] = {
    "tile_m": 64, "tile_n": 64, "occupancy": 0, "num_worker_warps": 0, "num_ctas": 0, "latency_k": 0, "latency_v": 0,
    "opt_level": 3, "accum_mode": "fp32", "loop_split": False, "block_order": "natural", "persistent": "no",
    "kv_direction": "forward", "q_subtiles": 1, "kv_subtiles": 1, "qk_ahead": False, "k_load": "order",
    "tma_loads": True, "tma_store": True, "check_bounds": True, "division": "approximate", "lazy_rescale": False,
}  # fmt: skip
"""The kernel as one would first write it: 64x64 tiles, every hint left to the compiler. Knobs not named: their defaults."""

Call = Callable[[], Any]
"""Starts one computation on the current stream; returns its `[batch, heads, seq_q, value_dim]` output."""


@dataclass(frozen=True, kw_only=True)
class Arrays:
    """One problem's inputs, as torch tensors on the GPU."""

    torch: Any
    """The torch module."""
    problem: Problem
    """What to compute."""
    q: Any
    """`[batch, heads, seq_q, head_dim]`, contiguous."""
    k: Any
    """`[batch, kv_heads, seq_k, head_dim]`, contiguous."""
    v: Any
    """`[batch, kv_heads, seq_k, value_dim]`, contiguous."""

    @property
    def causal(self) -> bool | str:
        """As `sdpa` takes it."""
        p = self.problem
        return p.causal if p.alignment == "top_left" else p.alignment


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to compute attention, or the matmul that bounds them all."""

    name: str
    """As `--methods` takes it and the rows give it."""
    about: str
    """One line for people."""
    make: Callable[[Arrays], Call]
    """The call on these arrays; raises UnsupportedError, or whatever its library raises, where it cannot be made."""
    package: str = ""
    """Python package it needs beside torch; where that is missing, the method is left out unless asked for by name."""
    score_bytes: int = 0
    """Device memory it takes for each element of the whole score matrix; 0 where it never holds that."""

    @property
    def installed(self) -> bool:
        """Whether its package is there; nothing is imported to find out."""
        return not self.package or importlib.util.find_spec(self.package) is not None

    @property
    def flops(self) -> float | None:
        """Of one call, where they are not the problem's."""
        return 2.0 * MATMUL_SIZE**3 if self.name == MATMUL else None

    def refusal(self, problem: Problem, memory_bytes: int) -> str:
        """Why it is not even tried on `problem`; empty where it is."""
        if not self.installed:
            return f"not installed: {self.package}"
        needed = self.score_bytes * problem.batch * problem.heads * problem.seq_q * problem.seq_k
        if needed > MEMORY_SHARE * memory_bytes:
            return f"skipped: its score matrices would take {needed / 2**30:.0f} GiB"
        return ""


def _ours(arrays: Arrays) -> Call:
    """`sdpa`, once it is clear that it would not hand the problem over to torch."""
    from tiledsched.attention.sdpa import plan_for, sdpa

    q, k, v, causal = arrays.q, arrays.k, arrays.v, arrays.causal
    plan_for(q, k, v, causal=causal)
    return lambda: sdpa(q, k, v, causal=causal)


_untuned_kernels: dict[tuple[str, Any], Any] = {}
"""cuTile compiles once for each kernel object and problem class: objects are used again."""


def untuned_schedule(arch: str) -> Schedule:
    """`UNTUNED` with the knobs it does not name at the defaults of the arch's space."""
    from tiledsched.space_files import space_for

    return space_for(arch).complete(Schedule(UNTUNED))


def _untuned(arrays: Arrays) -> Call:
    import cuda.tile as ct

    from tiledsched.kernel import kernel_named

    torch, problem, q = arrays.torch, arrays.problem, arrays.q
    properties = torch.cuda.get_device_properties(q.device)
    arch = f"sm_{properties.major}{properties.minor}"
    schedule, template = untuned_schedule(arch), kernel_named("attention")
    entry = template.entry(schedule, problem)
    kernel = _untuned_kernels.get((arch, entry)) or template.kernel({arch: schedule}, problem)
    _untuned_kernels[arch, entry] = kernel
    grid = template.grid(schedule, problem, properties.multi_processor_count)
    extra = [torch.zeros(array.shape, dtype=getattr(torch, array.dtype), device=q.device)
             for array in template.workspace(schedule, problem)]  # fmt: skip
    rest = (*extra, *template.scalars(problem), *template.constants(schedule, problem))
    shape = (*q.shape[:3], arrays.v.shape[3])

    def call() -> Any:
        out = q.new_empty(shape)
        ct.launch(torch.cuda.current_stream(), grid, kernel, (q, arrays.k, arrays.v, out, *rest))
        return out

    return call


def _torch_call(arrays: Arrays) -> Call:
    """torch's attention, whichever backend it takes."""
    torch, problem = arrays.torch, arrays.problem
    more: dict[str, Any] = {"enable_gqa": True} if problem.group > 1 else {}
    if problem.causal and problem.alignment == "bottom_right":
        from torch.nn.attention.bias import causal_lower_right

        more["attn_mask"] = causal_lower_right(problem.seq_q, problem.seq_k)
    else:
        more["is_causal"] = problem.causal
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(arrays.q, arrays.k, arrays.v, **more)


def _torch_backend(backend: str) -> Callable[[Arrays], Call]:
    """torch's attention with one backend allowed."""

    def make(arrays: Arrays) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        allowed, attention = getattr(SDPBackend, backend), _torch_call(arrays)

        def call() -> Any:
            with sdpa_kernel(allowed):
                return attention()

        return call

    return make


def _eager(arrays: Arrays) -> Call:
    """softmax(q @ k^T) @ v in torch's operators, softmax in float32, key heads repeated: as models did it before SDPA."""
    torch, problem = arrays.torch, arrays.problem
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


def _triton(arrays: Arrays) -> Call:
    from tiledsched.studies.bench.triton_attention import triton_attention

    bottom_right = arrays.problem.alignment == "bottom_right"
    return lambda: triton_attention(arrays.q, arrays.k, arrays.v, causal=arrays.problem.causal,
                                    bottom_right=bottom_right)  # fmt: skip


def _tilegym(arrays: Arrays) -> Call:
    """NVIDIA's TileGym: `tilegym.ops.fmha`, which tunes itself on the first call of a shape."""
    problem = arrays.problem
    if problem.alignment != "top_left" or problem.value_dim:
        raise UnsupportedError("fmha aligns the mask at the top left and takes one head dimension")
    from tilegym.ops import fmha

    scale = default_scale(problem)
    return lambda: fmha(arrays.q, arrays.k, arrays.v, scaling=scale, is_causal=problem.causal, has_backward=False)


def _flash_attn(arrays: Arrays) -> Call:
    """The flash-attn package, on arrays in its own layout, `[batch, rows, heads, head_dim]`."""
    problem = arrays.problem
    if problem.causal and problem.alignment == "top_left" and problem.seq_q != problem.seq_k:
        raise UnsupportedError("flash_attn_func aligns the mask at the bottom right")
    from flash_attn import flash_attn_func

    q, k, v = (array.transpose(1, 2).contiguous() for array in (arrays.q, arrays.k, arrays.v))
    return lambda: flash_attn_func(q, k, v, causal=problem.causal).transpose(1, 2)


def _matmul(arrays: Arrays) -> Call:
    """What this GPU's tensor cores give in practice: one large matrix product through torch."""
    torch = arrays.torch
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=arrays.q.device).to(arrays.q.dtype) for _ in range(2))
    return lambda: torch.matmul(left, right)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(name=OURS, about="sdpa on the schedule the table names", make=_ours),
        Method(name="untuned", about="the same kernel, 64x64 tiles, no hints", make=_untuned),
        Method(name="torch_flash", about="torch SDPA, flash backend", make=_torch_backend("FLASH_ATTENTION")),
        Method(name="torch_cudnn", about="torch SDPA, cuDNN backend", make=_torch_backend("CUDNN_ATTENTION")),
        Method(name="torch_efficient", about="torch SDPA, memory-efficient backend",
               make=_torch_backend("EFFICIENT_ATTENTION")),
        Method(name="torch_math", about="torch SDPA, math backend", make=_torch_backend("MATH"), score_bytes=16),
        Method(name="torch_auto", about="torch SDPA, whichever backend torch takes", make=_torch_call),
        Method(name="eager", about="softmax(QK^T)V in torch operators", make=_eager, score_bytes=12),
        Method(name="triton", about="a flash-attention forward in Triton, autotuned", make=_triton, package="triton"),
        Method(name="tilegym", about="TileGym's cuTile kernel, autotuned", make=_tilegym, package="tilegym"),
        Method(name="flash_attn", about="the flash-attn package", make=_flash_attn, package="flash_attn"),
        Method(name=MATMUL, about="8192^3 matmul through torch, the ceiling", make=_matmul),
    )
}  # fmt: skip
"""By name, in the order of the rows."""
TORCH_METHODS = ("torch_flash", "torch_cudnn", "torch_efficient", "torch_math", "torch_auto")
"""Of which the best is what the summary compares with."""


def choose_methods(names: Sequence[str] | None, *, ceiling: bool = False) -> list[Method]:
    """The methods asked for, in their own order; None for every one installed.

    Args:
        names: of `METHODS`.
        ceiling: also the matmul, which no default includes.

    Raises:
        ConfigError: an unknown name.
    """
    unknown = sorted(set(names or ()) - set(METHODS))
    if unknown:
        raise ConfigError(f"unknown method {unknown[0]!r}; known are {', '.join(METHODS)}")
    wanted = set(names) if names else {name for name, method in METHODS.items() if method.installed} - {MATMUL}
    if ceiling:
        wanted.add(MATMUL)
    return [method for name, method in METHODS.items() if name in wanted]
