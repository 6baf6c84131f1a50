"""The grouped product, as a function like torch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiledsched.ops.backward import register
from tiledsched.ops.front import Steps, differentiate, multiply, operator, takes_tensors


@takes_tensors
def grouped_matmul(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gate: str | Tensor | None = None,
    residual: Tensor | None = None,
    *,
    out_scale: Tensor | None = None,
    epilogue: Callable[..., Any] | None = None,
    arrays: tuple[Tensor, ...] = (),
) -> Tensor:
    """The rows of each group of `a` times that group's matrix, on the tuned schedule, as `torch._grouped_mm(a, b, offs=offsets)`.

    What follows the product is computed from the float32 sums in the same kernel, as in :func:`tiledsched.matmul`.

    No size of a group is read on the host, so that calls can be captured in CUDA graphs.

    Args:
        a: `[tokens, k]` CUDA tensor whose rows are sorted by group, float16 or bfloat16.
        b: `[groups, k, n]`, of the same type; each matrix is row- or column-major (`weight.transpose(1, 2)`).
        offsets: `[groups]`, int32: where each group ends. They never fall; a group may be empty.
        bias: `[groups, n]`, of the same type.
        activation, out_scale, epilogue, arrays: see :func:`tiledsched.matmul`; rows are those of `a`.
        gate: `[groups, k, n]`, or how `b`, `[groups, k, 2 * n]`, holds both; see :func:`tiledsched.matmul`.
        residual: `[tokens, n]`, of the same type.

    Returns:
        `[tokens, n]`, of the type of the inputs, or float8_e4m3fn. Rows from the last offset on are undefined. It is
        differentiable as :func:`tiledsched.matmul`. Rows of `a` from the last offset on get gradients of 0, and so do the weights
        and the bias of an empty group.

    Raises:
        ProblemError, UnsupportedError: shapes or types that do not go together, or no CUDA tensors.
    """
    if bias is activation is gate is residual is out_scale is epilogue is None and not arrays:
        out: Tensor = operator("grouped_matmul")(a, b, offsets)
        return out
    parts = bias, activation, gate, residual, out_scale
    return multiply("grouped_matmul", (a, b, offsets), epilogue, arrays, *parts)


def _groups_product(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """x[rows of g].t() @ y[rows of g] for each group g, `[groups, columns of x, columns of y]`; zeros for an empty group.

    On compute capabilities 9.x and 10.x torch's grouped product reads the groups' ends on the GPU. It takes bfloat16 and rows of
    whole groups of 16 bytes, to which others are filled up. Float16 and other GPUs take a product for each group, whose rows are
    counted on the host.
    """
    if not x.numel() or not y.numel():
        return x.new_zeros(offsets.shape[0], x.shape[1], y.shape[1])
    major = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else None
    if x.dtype == torch.bfloat16 and major in (None, 9, 10):
        made = torch._grouped_mm(_aligned(x).t(), _aligned(y), offs=offsets)
        if major != 9:
            # On sm_100 the matrices of empty groups may be what was in memory: github.com/pytorch/pytorch/issues/172439
            made.masked_fill_((offsets.diff(prepend=offsets.new_zeros(1)) == 0)[:, None, None], 0)
        return made[:, : x.shape[1], : y.shape[1]].contiguous()
    return torch.stack([x[i:j].t() @ y[i:j] for i, j in itertools.pairwise([0, *offsets.tolist()])])


def _aligned(x: Tensor) -> Tensor:
    """A matrix of 16-bit numbers, perhaps with columns of zeros behind it, whose rows start at multiples of 16 bytes."""
    fits = (
        x.stride(1) == 1
        and (x.shape[1] | x.stride(0)) % 8 == 0
        and x.data_ptr() % 16 == 0
        and x.stride(0) >= x.shape[1]
    )
    return x if fits else torch.nn.functional.pad(x.contiguous(), (0, -x.shape[1] % 8))


_groups_operator = register(
    "grouped_matmul_weights",
    "(Tensor x, Tensor y, Tensor offsets) -> Tensor",
    _groups_product,
    lambda x, y, offsets: x.new_empty((offsets.shape[0], x.shape[1], y.shape[1])),
    lambda x, y, offsets, out_val: 2 * x.numel() * y.shape[1],
    "second derivatives of grouped_matmul are asked for, which it does not have; detach the gradients of its weights and bias",
)


def _steps(given: dict[str, Tensor]) -> Steps:
    a, ends = given["A"], given["Offsets"]
    rows = torch.arange(a.shape[0], dtype=ends.dtype, device=a.device)
    return Steps(
        lambda x, b: operator("grouped_matmul")(x, b, ends),
        # It lies as B does, so that what accumulates gradients copies nothing.
        weights=lambda d, b: _groups_operator(d, a, ends).mT if b.stride(1) == 1 else _groups_operator(a, d, ends),
        bias=lambda d: _groups_operator(d.new_ones(d.shape[0], 1), d, ends)[:, 0],
        biased=lambda x, b: multiply("grouped_matmul", (x, b, ends), None, (), given["Bias"], None, None, None, None),
        # The product leaves rows from the last end on as they are in memory, NaNs among them.
        finished=lambda found: found.masked_fill_((rows >= ends[-1])[:, None], 0) if len(ends) else found.zero_(),
    )


differentiate(("grouped_matmul", "grouped_matmul_epilogue"), ("A", "B", "Offsets"), _steps)
