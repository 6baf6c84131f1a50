"""Epilogues of matrix products: what becomes of the float32 sums before they are rounded and stored.

    C = quantised(activation(A @ B + bias) + residual)                  without a gate
    C = quantised(activation(A @ gate) * (A @ B + bias) + residual)     with one

Each part may be missing. All is computed in float32 and rounded once, where torch rounds the product first, and then the result
of each further operation or fused group of them.

One table says what an epilogue may be. :data:`ACTIVATIONS` has the activations, as NumPy and torch have them; their tile code is
the function of the same name in :mod:`tiledsched.kernels.epilogue_tiles`. :class:`Epilogue` has the fields of problems and the
arrays; the declaration of a product with an epilogue derives from it and from the plain product. The reference, rivals, inputs
and FLOPs follow from these and from those of the plain product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy

import tiledsched.core.fields as ts
from tiledsched.core.arrays import LARGEST
from tiledsched.core.cases import call_reference
from tiledsched.core.cost import LAUNCH_US, Cost
from tiledsched.core.device import ArchSpec, ResourceFacts
from tiledsched.core.errors import ProblemError, did_you_mean
from tiledsched.core.rivals import Function, Variants
from tiledsched.core.schedule import Schedule
from tiledsched.core.similarity import Similarity
from tiledsched.kernels.product_schedules import ELEMENT_BYTES
from tiledsched.kernels.torch_rivals import compiled

E4M3 = "float8_e4m3fn"
LARGEST_E4M3 = LARGEST[E4M3]
"""The largest number of the type, to which larger ones are cut."""
PASS_BYTES_PER_US = 3.5e6
"""What an elementwise kernel moves on an H200, about."""
COMPILED_HOST_US = 25.0
"""By how much longer the host takes for a call of what torch.compile makes than for one of cuBLAS, about."""


def erfc(xp: Any, x: Any) -> Any:
    """The complementary error function. NumPy has none, and CuPy's is not NumPy's.

    It is the integral of exp(-t * t) / (t * t + z * z) by the trapezoidal rule, which converges exponentially, with a correction
    for the pole at t = iz: Hunter and Regan, A note on the evaluation of the complementary error function (1972). Nodes lie at
    multiples of the step or halfway between, whichever keep away from z.
    """
    step, z = 0.5, xp.abs(x)
    halfway = xp.abs(z / step - xp.round(z / step)) < 0.25
    total = xp.zeros_like(z)
    for n in range(14):
        node = step * xp.where(halfway, n + 0.5, n * 1.0)
        total += xp.where(halfway | (n > 0), 2.0, 1.0) * xp.exp(-node * node) / (node * node + z * z)
    pole = 2.0 / (1.0 + xp.where(halfway, 1.0, -1.0) * xp.exp(xp.minimum(2.0 * math.pi * z / step, 80.0)))
    found = step * z * xp.exp(-z * z) * total / math.pi + xp.where(z < math.pi / step, pole, 0.0)
    return xp.where(x < 0, 2.0 - found, found)


class Activation(NamedTuple):
    """An activation, in NumPy and in torch."""

    exact: Callable[[Any, Any], Any]
    """`exact(xp, x)`, in the precision of x."""
    torch: Callable[[Any, Any], Any]
    """`torch(F, x)`, where F is `torch.nn.functional`."""
    slope: Callable[[Any, Any, Any], Any]
    """`slope(aten, d, x)`: the gradient of x, where d is that of the result and aten is `torch.ops.aten`."""


def _share(xp: Any, x: Any) -> Any:
    """The logistic function of 2 * x."""
    return 0.5 * (1.0 + xp.tanh(x))


def _silu_slope(aten: Any, d: Any, x: Any) -> Any:
    """torch's own formula, or what torch can differentiate once more where that is asked for."""
    if not (d.requires_grad or x.requires_grad):
        return aten.silu_backward(d, x)
    wide = x.float()
    share = wide.sigmoid()
    return (d * (share * (1.0 + wide * (1.0 - share)))).to(d.dtype)


ACTIVATIONS = {
    "none": Activation(lambda xp, x: x, lambda F, x: x, lambda aten, d, x: d),
    "relu": Activation(
        lambda xp, x: xp.maximum(x, 0.0), lambda F, x: F.relu(x), lambda aten, d, x: aten.threshold_backward(d, x, 0)
    ),
    "squared_relu": Activation(
        lambda xp, x: xp.maximum(x, 0.0) ** 2, lambda F, x: F.relu(x) ** 2, lambda aten, d, x: d * 2.0 * x.clamp(min=0)
    ),
    "silu": Activation(lambda xp, x: x * _share(xp, 0.5 * x), lambda F, x: F.silu(x), _silu_slope),
    "gelu": Activation(
        lambda xp, x: 0.5 * x * erfc(xp, x / -math.sqrt(2.0)),
        lambda F, x: F.gelu(x),
        lambda aten, d, x: aten.gelu_backward(d, x),
    ),
    "gelu_tanh": Activation(
        lambda xp, x: x * _share(xp, math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)),
        lambda F, x: F.gelu(x, approximate="tanh"),
        lambda aten, d, x: aten.gelu_backward(d, x, approximate="tanh"),
    ),
}
"""Name -> what it computes; squared_relu is the square of relu, and gelu_tanh the approximation of gelu by tanh."""


ROW_SCALES = {
    f"out_scales == 'tensor' or out_dtype == '{E4M3}'": (
        f"only results of 8 bits are divided by scales; give out_dtype = {E4M3}, too, or leave out out_scales"
    )
}
"""What is required of the scales of results."""


class Epilogue:
    """The fields and arrays of a product with an epilogue; C `[m, n]` is of the type `out_dtype`."""

    activation = ts.choice(*ACTIVATIONS)
    bias = ts.flag()
    gate = ts.flag()
    residual = ts.flag()
    out_dtype = ts.dtype("bfloat16", "float16", E4M3)
    out_scales = ts.choice("tensor", "row", omit_default=True)

    C = ts.out("m n", dtype="out_dtype")
    Bias = ts.array("n", when="bias")
    Gate = ts.array("k n", layout="b_layout", when="gate")
    Residual = ts.array("m n", when="residual")
    Scale = ts.array(lambda p: (p.m, 1) if p.out_scales == "row" else (1,), dtype="float32", when="quantised")

    product: ClassVar[Any] = None
    """The kernel of the plain product."""
    epilogue: ClassVar[Callable[..., Any] | None] = None
    """An author's own function in the place of the activation."""
    own_arrays: ClassVar[tuple[str, ...]] = ()
    """The names of the arrays that it takes."""
    fusable: ClassVar[bool] = False
    """Whether torch has functions that let cuBLAS do some epilogues of the product."""
    requires: ClassVar[Mapping[str, str]] = ROW_SCALES | {
        f"out_dtype in (dtype, '{E4M3}')": "the result has the type of A and B, or is quantised to 8 bits"
    }
    compiled_rivals: ClassVar[tuple[str, ...]] = ("torch_compile",)

    @classmethod
    def flops(cls, p: Any) -> float:
        """Those of the products."""
        return float(cls.product.flops(p) * (1 + p.gate))

    @classmethod
    def inputs(cls, xp: Any, rng: Any, p: Any) -> Mapping[str, Any]:
        """Those of the plain product, A such that sums are of the size of 1, where activations are curved, and a scale with which
        few results are cut."""
        return {
            "Scale": (2.0 ** rng.integers(-7, -4, size=(p.m, 1) if p.out_scales == "row" else 1)).astype("float32"),
            "A": rng.standard_normal((p.m, p.k), dtype=numpy.float32) / math.sqrt(p.k),
            **cls.product.inputs(xp, rng, p),
        }

    @staticmethod
    def reference(xp: Any, p: Any, **arrays: Any) -> Any:
        """The finished sums, in their own precision."""
        kernel, found = p.declaration, dict(arrays)
        bare = {name: each for name, each in arrays.items() if name != "Bias"}  # which some plain products add
        for name in ("B", "Gate"):
            if name in arrays:
                factors = {"B": arrays[name], "ScaleB": arrays.get(f"Scale{name}")}
                (found[name],) = call_reference(kernel.product, xp, p, bare | factors)
        if "Bias" in arrays and "Offsets" in arrays:  # that of the group of each row
            group = xp.searchsorted(arrays["Offsets"], xp.arange(p.m), side="right").clip(0, p.experts - 1)
            found["Bias"] = arrays["Bias"][group] if p.experts else None
        activated = functools.partial(ACTIVATIONS[p.activation].exact, xp)
        if kernel.epilogue is not None:
            activated = functools.partial(kernel.apply_own, xp, arrays=arrays)
        sums = combined(activated, found["B"], *map(found.get, ("Gate", "Bias", "Residual")))
        return sums if "Scale" not in arrays else xp.clip(sums / arrays["Scale"], -LARGEST_E4M3, LARGEST_E4M3)

    @classmethod
    def rivals(cls, p: Any) -> Variants:
        """What a tune times, and what may serve: torch's product, followed by a kernel for each operation; what torch.compile
        makes of these; and cuBLAS with an epilogue of its own. None where torch does not have the product or a bias for each
        group, and for an author's own function.
        """
        product = next(iter(cls.product.rivals(plain(p)).values()), None)
        if product is None or cls.epilogue is not None or (p.bias and "experts" in p.values):
            return {}
        made = in_torch(p, product)
        found = {"torch": made, "torch_compile": compiled(made, "default", serves=True)}
        return found | ({"cublas_fused": fused(p)} if is_fused(p) else {})


ARRAYS = tuple(name for name, each in vars(Epilogue).items() if isinstance(each, ts.ArrayField) and each.role == "in")
ARRAYS += ("ScaleGate",)
"""The names of the arrays that are read, in the order in which functions take them; the last one with 8-bit operands only."""


DERIVED: dict[str, Callable[[Any], bool]] = {
    "quantised": lambda p: bool(p.out_dtype == E4M3),
    "whole_rows": lambda p: p.n % 16 == 0,
}
"""Whether the result is divided by a scale and rounded to 8 bits, and whether the TMA unit may store it."""
CONSTRAINTS = {
    "not gate or 2 * TILE_M * TILE_N <= 4096 * num_worker_warps * num_ctas": "registers hold the sums of two products"
}
"""What every product with an epilogue asks of schedules."""
WAITS = "the compiler (13.5) waits for every single product in such loops over work tiles"


NARROWEST, WIDEST = 64, 256
"""Columns of the narrowest tile of every product, and of the widest one."""
OTHER_EPILOGUE = 0.1
"""The distance between two products that differ in one part of their epilogues."""
OTHER_PRODUCTS = 1.0
"""What one product is farther from two, whose schedules have one part and one share."""


@functools.lru_cache(maxsize=4096)
def plain(p: Any) -> Any:
    """The plain product that takes as long: with as many columns as both products of a gated one have together."""
    product = getattr(p.declaration, "product", p.declaration)  # which may be plain itself
    kept = {name: p.values[name] for name in product.fields}
    if kept.get("out_dtype") == E4M3:
        kept["out_dtype"] = "bfloat16"
    return product.problem(**kept | {"n": p.n * (1 + p.values.get("gate", False))})


class EpilogueCost(Cost):
    """The time of the product, or of both; the class that stands behind it in a declaration's is that of the plain product."""

    lender = "torch"
    """The method of the plain product whose times say what rivals take."""

    def model(self, p: Any, s: Schedule, facts: ResourceFacts, spec: ArchSpec) -> float:
        """That of the plain product."""
        return super().model(plain(p), s.replace(TILE_N=s.number("TILE_N") * (1 + p.gate)), facts, spec)

    def timed_as(self, p: Any) -> Any:
        """The plain product."""
        return plain(p)

    def lent_times(self, p: Any) -> Mapping[str, tuple[str, float, float]]:
        """cuBLAS alone takes as long as the plain product, and reads the residual; for other epilogues another kernel reads and
        writes all results once more."""
        pass_us = ELEMENT_BYTES * p.m * p.n * (p.residual + (0 if is_fused(p) else 2 + p.gate)) / PASS_BYTES_PER_US
        if is_fused(p):
            return {"cublas_fused": (self.lender, pass_us, 0.0)}
        own = p.declaration.epilogue is not None
        return {} if own else {"torch_compile": (self.lender, LAUNCH_US + pass_us, COMPILED_HOST_US)}


class EpilogueSimilarity(Similarity):
    """How products with epilogues compare, with one another and with plain products, whose schedules they take."""

    def kind(self, p: Any) -> tuple[Any, ...]:
        """That of the plain product."""
        return super().kind(plain(p))

    def carried(self, p: Any, q: Any, s: Schedule) -> Schedule:
        """The schedule whose tiles hold as many columns of both products together: half of each where `q` has a gate and `p` has
        none. Where no tile is twice as wide, one with twice as many rows."""
        if bool(p.values.get("gate")) == bool(q.values.get("gate")):
            return s
        columns, rows = s.number("TILE_N"), s.number("TILE_M")
        if q.values.get("gate"):
            return s.replace(TILE_N=max(columns // 2, NARROWEST))
        return s.replace(TILE_N=2 * columns) if columns < WIDEST else s.replace(TILE_M=min(2 * rows, WIDEST))

    def equivalents(self, p: Any, q: Any, s: Schedule) -> Sequence[Schedule]:
        """Where `q` has a gate and `p` has none, also the schedule with as many columns of each product as the one had there."""
        gained = bool(q.values.get("gate")) and not p.values.get("gate")
        return [s.replace(TILE_N=2 * s.number("TILE_N"))] if gained and s.number("TILE_N") < WIDEST else []

    def rival_kind(self, p: Any) -> tuple[Any, ...]:
        """That of the plain product, and of others whether cuBLAS has their epilogue."""
        return (*super().rival_kind(plain(p)), *([is_fused(p)] if "gate" in p.values else []))

    def timing_features(self, p: Any) -> tuple[float, ...]:
        """Those of the plain product."""
        return super().timing_features(plain(p))

    def distance(self, p: Any, q: Any) -> float:
        """That of the plain products; more where epilogues differ, most where one product is compared with two."""
        differing = [x for x in vars(Epilogue) if x in p.values and x in q.values and p.values[x] != q.values[x]]
        other = OTHER_EPILOGUE * len(differing) + OTHER_PRODUCTS * ("gate" in differing)
        return super().distance(plain(p), plain(q)) + other


def arrays_of(p: Any) -> tuple[str, ...]:
    """The names of the epilogue's arrays that a problem has, an author's own among them."""
    kernel, names = p.declaration, (*ARRAYS, *p.declaration.own_arrays)
    return tuple(name for name in names if name in kernel.array_fields and kernel.present(name, p))


def in_torch(p: Any, product: Function) -> Function:
    """The function of a problem's inputs as torch has it: every operation rounds, unless torch.compile fuses it with others.
    `product` computes the plain product, of A, B and what else it takes; the arrays of the epilogue follow these.
    """
    import torch

    def call(A: Any, B: Any, *tensors: Any) -> Any:
        names = arrays_of(p)
        place = len(tensors) - len(names)
        more, given = tensors[:place], dict(zip(names, tensors[place:], strict=True))
        others = (*more[:-1], given["ScaleGate"]) if "ScaleGate" in given else more
        gate, scale = product(A, given["Gate"], *others) if p.gate else None, given.get("Scale")
        activated = functools.partial(ACTIVATIONS[p.activation].torch, torch.nn.functional)
        out = combined(activated, product(A, B, *more), gate, given.get("Bias"), given.get("Residual"))
        if scale is None:
            return out
        return (out.float() / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)

    return call


FUSED = {"none": "addmm", "relu": "_addmm_activation", "gelu_tanh": "_addmm_activation"}
"""Activation -> the function of torch that lets cuBLAS add the bias and apply it."""


def is_fused(p: Any) -> bool:
    """Whether torch lets cuBLAS do the epilogue: a bias, with relu or gelu by tanh behind it, or a residual."""
    more = p.gate or p.quantised or p.declaration.epilogue is not None
    return (
        p.declaration.fusable
        and not more
        and p.bias + p.residual == 1
        and p.activation in (FUSED if p.bias else ("none",))
    )


def fused(p: Any) -> Function:
    """cuBLAS with an epilogue of its own."""
    import torch

    function, more = getattr(torch, FUSED[p.activation]), {"use_gelu": True} if p.activation == "gelu_tanh" else {}
    return lambda A, B, added: function(added, A, B, **more)


def combined(activated: Callable[[Any], Any], sums: Any, gate: Any, bias: Any, residual: Any) -> Any:
    """What stands in parentheses at the top of this file, of arrays of any library."""
    sums = sums if bias is None else sums + bias
    sums = activated(sums) if gate is None else activated(gate) * sums
    return sums if residual is None else sums + residual


def read_call(
    input: Any,
    other: Any,
    epilogue: Any,
    arrays: Sequence[Any],
    bias: Any,
    activation: str | None,
    gate: Any,
    residual: Any,
    out_scale: Any,
) -> tuple[dict[str, Any], Any, list[Any]]:
    """The fields of a call's problems, its second operand, and the bias, gate, residual and scale that its operator takes behind
    the operands.

    The arguments are those of `tiledsched.matmul`.

    Raises:
        ProblemError: a word is not known, or arguments exclude each other.
    """
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        near = did_you_mean(str(activation), ACTIVATIONS)
        raise ProblemError(f"activation = {activation!r}; known are {', '.join(ACTIVATIONS)}{near}")
    if epilogue is not None and activation is not None:
        raise ProblemError("epilogue stands in the place of the activation; give one of them")
    if arrays and epilogue is None:
        raise ProblemError("arrays are what an epilogue of yours reads, and there is none; give epilogue, too")
    if isinstance(gate, str):
        gate, other = columns_of_both(other, gate)
    fields = {
        "activation": activation or "none",
        "bias": bias is not None,
        "gate": gate is not None,
        "residual": residual is not None,
        "out_dtype": str(input.dtype).removeprefix("torch.") if out_scale is None else E4M3,
    }
    scale = None if out_scale is None else scale_of(out_scale, input.shape[:-1])
    fields["out_scales"] = "row" if scale is not None and scale.ndim == 2 else "tensor"
    return fields, other, [*(each for each in (bias, gate, residual) if each is not None), scale]


def scale_of(scale: Any, rows: Sequence[int]) -> Any:
    """The scale of a result as kernels take it: one number `[1]`, or one for each row, `[m, 1]`.

    Raises:
        ProblemError: it has another shape.
    """
    if scale.numel() == 1:
        return scale.reshape(1)
    if not has_shape(scale, tuple(rows), (*rows, 1)):
        raise ProblemError(
            f"out_scale must hold one number, or one for each row of the result, {(*rows, 1)}; got shape {tuple(scale.shape)}. "
            "Reshape it; columns and blocks have no scales of their own"
        )
    return scale.reshape(-1, 1)


def has_shape(x: Any, *shapes: Sequence[Any]) -> bool:
    """Whether an array has one of these shapes. Where torch.compile traces sizes that it does not know, `in` takes 2 * n and the
    number that it comes to for different sizes."""
    return any(x.shape == each for each in shapes)


def columns_of_both(other: Any, order: str) -> tuple[Any, Any]:
    """The gate's columns, and the others, of a tensor `[..., k, 2 * n]` that holds both.

    Raises:
        ProblemError: the order is not known, or the tensor does not lie so.
    """
    if order not in ("halves", "interleaved"):
        raise ProblemError(f"gate = {order!r}; it is a tensor, 'halves' or 'interleaved'")
    columns = other.shape[-1] if other.ndim > 1 else 1
    if columns % 2:
        raise ProblemError(
            f"with gate = {order!r} other is [k, 2 * n], with an even number of columns; got shape {tuple(other.shape)}"
        )
    if order == "halves":
        return other[..., : columns // 2], other[..., columns // 2 :]
    if other.stride(-2) != 1 and other.shape[-2] > 1:
        raise ProblemError(
            "interleaved columns are those of a column-major matrix, such as weight.t(); lay other out anew, or give its "
            "columns in halves"
        )
    return other[..., ::2], other[..., 1::2]
