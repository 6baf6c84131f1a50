"""Attention's backward pass and every other implementation of it: the inputs, what is compared, and how each is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiledsched.bench.case import BenchCase
from tiledsched.bench.methods import DETERMINISTIC, OURS, SERVED, Arrays, Call, Method, kernel_call, operator_call
from tiledsched.bench.rivals.attention_case import (
    Pair,
    compared_pairs,
    drawn,
    drawn_array,
    drawn_features,
    generator_of,
    keys_of,
    rows_of,
)
from tiledsched.checking.errors import NOT_FINITE, Error
from tiledsched.core.cases import output_specs
from tiledsched.core.errors import MeasureError, UnsupportedError
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention import Attention
from tiledsched.kernels.attention.problem import mask_of
from tiledsched.kernels.attention.reference import attention_and_lse
from tiledsched.kernels.attention.rivals import (
    BACKENDS,
    FLASH_4,
    FLASH_4_MODULE,
    TORCH_VARLEN,
    check_torch_mask,
    torch_operator,
)
from tiledsched.kernels.attention_backward import rivals
from tiledsched.kernels.attention_backward.reference import attention_gradients
from tiledsched.measure.rivals import call_on

__all__ = ["METHODS", "make_case"]
FLASH_4_DETERMINISTIC = f"{FLASH_4}_{DETERMINISTIC}"
GRADIENTS = ("dQ", "dK", "dV")
MOST_SCORES = 1 << 28
"""Scores of the reference, at most: a quarter of those of the forward pass, which has two products instead of seven."""


@dataclass(frozen=True)
class GradientCase(BenchCase):
    """A case of which the gradients of some (sequence, key head) pairs are compared, with all query heads of each key head."""

    pairs: Sequence[Pair]
    """The pairs that are compared."""
    places: Mapping[str, Any]
    """Where sequences lie, as arrays on the host."""

    @property
    def compared(self) -> str:
        """How much of the gradients is compared, such as `4/64`."""
        return f"{len(self.pairs)}/{self.arrays.problem.sequences * self.arrays.problem.kv_heads}"

    def error(self, out: Any) -> Error:
        """How far a method's gradients are from float64; no element of them may be infinite or NaN.

        Raises:
            MeasureError: the method returns too few gradients.
        """
        torch, p = self.arrays.torch, self.arrays.problem
        if len(out) < len(output_specs(p.declaration, p)):
            raise MeasureError(f"it returns {len(out)} gradients")
        if not all(bool(torch.isfinite(each).all()) for each in out):
            return NOT_FINITE
        found = {}
        for index, (name, made) in enumerate(zip(GRADIENTS, out, strict=False)):
            parts = (_of_pair(p, name, made, self.places, *pair) for pair in self.pairs)
            rights = (each[index] for each in self.expected)
            found[name] = self.error_where_finite(
                (part[head], right[head])
                for part, right in zip(parts, rights, strict=True)
                for head in range(right.shape[0])
            )
        return Error.of_outputs(found)

    def explain(self, method: str, *, verify: bool) -> Any:
        """What the torch operator of the kernel launches, and why."""
        arrays = _deterministic(self.arrays) if method == DETERMINISTIC else self.arrays
        operator, given = operator_call(arrays)
        return operator.explain(*given, verify=verify)


def _of_pair(p: Problem, name: str, array: Any, places: Mapping[str, Any], sequence: int, kv_head: int) -> Any:
    """The heads of a pair, `[heads, rows, columns]`, of an array that lies like q (`dQ`) or like k and v."""
    if name == "dQ":
        return rows_of(array, places, sequence, slice(kv_head * p.group, (kv_head + 1) * p.group))
    return keys_of(array, places, sequence, slice(kv_head, kv_head + 1))


def make_case(torch: Any, cupy: Any, problem: Problem) -> GradientCase:
    """The case of a problem: standard normal inputs and output gradients, the same in every run, and what is compared."""
    generator = generator_of(torch, problem)
    q, k, v = drawn(torch, problem, generator)
    shape = (problem.batch, problem.heads, problem.seq_q, problem.value_columns)
    dout = drawn_array(torch, problem, generator, shape, bool(problem.packed))
    given, features = drawn_features(torch, problem, generator, q.device)
    out, lse = _forward(torch, problem, [q, k, v, *features])
    dlse = [torch.randn(lse.shape, generator=generator, device="cuda")] if problem.dlse else []
    arrays = Arrays(torch=torch, problem=problem, tensors=(q, k, v, out, dout, lse, *features, *dlse))
    pairs, expected = compared_pairs(problem, problem.kv_heads, MOST_SCORES), []
    for sequence, kv_head in pairs:
        heads = slice(kv_head * problem.group, (kv_head + 1) * problem.group)
        of = partial(_of_pair, problem, places=given, sequence=sequence, kv_head=kv_head)
        parts = (of("dQ", q), of("dK", k), of("dV", v), of("dQ", dout))
        # CuPy has no bfloat16: it is given float32, which holds both types.
        wide_q, wide_k, wide_v, wide_dout = (cupy.from_dlpack(each.float().contiguous())[None] for each in parts)
        own: dict[str, Any] = mask_of(problem)
        if not problem.packed:
            own |= {name.lower(): each[sequence : sequence + 1] for name, each in given.items()}
        if problem.sinks:
            own["sinks"] = cupy.from_dlpack(features[0][heads].double())
        exact = attention_and_lse(cupy, wide_q, wide_k, wide_v, **own)
        if dlse:
            own["dlse"] = cupy.from_dlpack(of("dQ", dlse[0][..., None])[None, ..., 0].contiguous())
        dq, dk, dv, _ = attention_gradients(cupy, wide_q, wide_k, wide_v, exact[0], wide_dout, exact[1], **own)
        expected.append((dq[0], dk[0], dv[0]))
    torch.cuda.synchronize()
    return GradientCase(arrays, expected, cupy, pairs, given)


def _forward(torch: Any, problem: Problem, tensors: list[Any]) -> tuple[Any, Any]:
    """The output and the log-sum-exp: torch's flash backend's where it has the mask, since that compiles nothing, else ours."""
    q, k, v = tensors[:3]
    try:
        check_torch_mask(problem, "torch_flash")
        if problem.value_dim or problem.head_dim % 8:
            raise UnsupportedError("torch's flash backend takes one head dimension, a multiple of 8")
        out, lse, *_ = torch_operator(BACKENDS["torch_flash"])(q, k, v, 0.0, problem.causal)
        return out.contiguous(), lse
    except UnsupportedError:
        values = {name: value for name, value in problem.values.items() if name in Attention.fields}
        forward = Arrays(torch=torch, problem=Attention.problem(**values, lse=True), tensors=tuple(tensors))
        out, lse = kernel_call(forward, own=True)()
        return out, lse[..., 0]


def _deterministic(arrays: Arrays) -> Arrays:
    return replace(arrays, problem=arrays.problem.replace(deterministic=True))


def _rows_first(arrays: Arrays) -> tuple[Any, ...]:
    """The tensors, with the rows before the heads in memory: the layout of torch's flash backend and of FlashAttention-4."""
    q, k, v, out, dout = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in arrays.tensors[:5])
    return q, k, v, out, dout, *arrays.tensors[5:]


def _rival(make: Callable[[Problem], Any], arrays: Arrays, *, rows_first: bool = True) -> Call:
    tensors = _rows_first(arrays) if rows_first else arrays.tensors
    return call_on(make(arrays.problem), tensors)


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(
            name=OURS,
            about="our kernel on the schedule that the table names",
            make=lambda arrays: kernel_call(arrays, own=True),
        ),
        Method(
            name=SERVED,
            about="the operator, whatever it runs: our kernel, or a rival measured to be faster",
            make=lambda arrays: kernel_call(arrays, own=False),
        ),
        Method(
            name=DETERMINISTIC,
            about="our kernel with a fixed order of sums",
            make=lambda arrays: kernel_call(_deterministic(arrays), own=True),
            by_name=True,
        ),
        Method(name=rivals.TORCH_FLASH, about="torch, flash backend", make=partial(_rival, rivals.torch_flash)),
        Method(
            name=rivals.TORCH_CUDNN,
            about="torch, cuDNN backend",
            make=partial(_rival, rivals.torch_cudnn, rows_first=False),
        ),
        Method(
            name=TORCH_VARLEN,
            about="torch's FlashAttention of packed sequences",
            make=partial(_rival, rivals.torch_varlen, rows_first=False),
        ),
        Method(
            name=FLASH_4,
            about="the flash-attn-4 package, FlashAttention-4",
            make=partial(_rival, rivals.flash_attention_4),
            package=FLASH_4_MODULE,
        ),
        Method(
            name=FLASH_4_DETERMINISTIC,
            about="the same with a fixed order of sums",
            make=lambda arrays: _rival(rivals.flash_attention_4, _deterministic(arrays)),
            package=FLASH_4_MODULE,
            by_name=True,
        ),
    )
}
"""The methods by name, in the order of the rows."""
