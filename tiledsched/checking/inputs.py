"""Inputs to check a kernel on: random ones, and others that bring out what random ones hide.

The code runs with NumPy and with CuPy: the interpreter and the measuring process share it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tiledsched.core.arrays import LARGEST, MANTISSA_BITS, RELATIVE_ERRORS, Tolerance, is_float, to_float, to_storage
from tiledsched.core.cases import (
    Arrays,
    Case,
    expected_outputs,
    input_specs,
    laid_out,
    output_specs,
    own_inputs,
    random_inputs,
)
from tiledsched.core.integers import INTEGER_KINDS
from tiledsched.core.problem import KernelClass, Problem

KINDS = ("edges", "large", "offset")
"""Kinds of inputs, in addition to random ones, for a kernel that declares no `adversarial` cases of its own."""
CHECK_KINDS = (*INTEGER_KINDS, *KINDS, "negative", "tiny", "cancelling")
"""Those of a check on the CPU, which looks for mistakes in the kernel; a GPU is asked whether the machine code is right."""
BORDERS = (16, 32, 64, 128, 256)
EDGE_FACTOR = 4.0
LARGE_FACTORS = (96.0, 30.0, 16.0)
"""The first whose right outputs can be judged is taken. With 96 and 30, exponentials overflow in float32 (above e^88) and do not
in the float64 (e^709) of a reference."""
HALVES = ("float16", "float8_e4m3fn", "float8_e5m2")
"""Types whose products may be summed in float16, which is a mistake wherever sums leave its range."""
ROUNDING = RELATIVE_ERRORS | {"float32": 2.0**-21}
"""Type -> what rounding to it may cost, as a share of a value: the usual limit, and for float32 without its room for tf32."""
OFFSET = 1.0
SPREAD = 0.05
CANCELLING_SPREAD = 0.1
"""So wide that what is left of a sum is large beside what rounding its terms costs."""
TINY_FACTOR = 2.0**-8
"""Squares are then about 1e-5, as large as what is added to keep a divisor from being zero."""

Shape = Callable[[Any, Any], Any]
"""Makes other values from random ones, given numpy or cupy and the values."""


def make_cases(
    kernel: KernelClass,
    xp: Any,
    rng: Any,
    p: Problem,
    precision: str = "float64",
    *,
    kinds: Sequence[str] = (*INTEGER_KINDS, *KINDS),
    undefined: bool = False,
) -> Iterator[Case]:
    """Yield the random case, then the adversarial cases.

    Args:
        kernel: declares arrays, inputs and reference.
        xp: numpy or cupy.
        rng: a Generator of that module.
        p: the problem.
        precision: the type in which the reference computes; float32 where the GPU's float64 is slow.
        kinds: of the adversarial cases, for a kernel that declares none of its own.
        undefined: whether some of the reference's outputs may be infinite or NaN on adversarial inputs: the same is then right.
    """
    own = own_inputs(kernel, xp, rng, p)
    random = random_inputs(kernel, xp, rng, p, own)

    def right(inputs: Arrays) -> tuple[Any, ...]:
        return expected_outputs(kernel, xp, p, inputs, precision)

    yield Case("random", random, right(random))
    if kernel.adversarial is not None:
        yield from kernel.adversarial(xp, rng, p, right)
        return
    types = {spec.dtype for spec in input_specs(kernel, p) if spec.name not in own}
    for kind in kinds:
        inputs = _with_extremes(kernel, xp, p, random, kind, own) if kind in INTEGER_KINDS else None
        if inputs is not None:
            outputs = right(inputs)
            if _representable(kernel, xp, p, outputs, undefined=undefined):
                yield Case(kind, inputs, outputs)
    if "cancelling" in kinds and not types.isdisjoint(HALVES):
        largest = _with_extremes(kernel, xp, p, random, "largest", own) or random
        yield from _cancelling(kernel, xp, p, largest, own, right)
    for kind in kinds if any(map(is_float, types)) else ():
        for shape in SHAPES.get(kind, ()):
            inputs = _shaped(kernel, xp, p, random, shape, own)
            outputs = right(inputs)
            if _representable(kernel, xp, p, outputs, tame=shape is not SHAPES[kind][-1], undefined=undefined):
                yield Case(kind, inputs, outputs)
                break


def _with_extremes(
    kernel: KernelClass, xp: Any, p: Problem, random: Arrays, kind: str, own: Mapping[str, Any]
) -> Arrays | None:
    """The random inputs, but with every array of integers of which a range is declared at its limit; None where none changes."""
    found: Arrays = {}
    for spec in input_specs(kernel, p):
        if spec.integers is not None and spec.name not in own and not spec.listed:
            values = spec.integers.extreme(xp, kind, spec.shape)
            if values is not None:
                found[spec.name] = laid_out(xp, to_storage(xp, values, spec.dtype), spec)
    return random | found if found else None


def _shaped(kernel: KernelClass, xp: Any, p: Problem, random: Arrays, shape: Shape, own: Mapping[str, Any]) -> Arrays:
    """The random inputs changed by `shape`. Arrays of integers stay as they are."""
    found = dict(random)
    for spec in input_specs(kernel, p):
        if is_float(spec.dtype) and spec.name not in own:
            values = random[spec.name] if spec.listed else [random[spec.name]]
            shaped = [
                laid_out(xp, to_storage(xp, shape(xp, to_float(xp, each, spec.dtype)), spec.dtype), spec)
                for each in values
            ]
            found[spec.name] = shaped if spec.listed else shaped[0]
    return found


def _edges(xp: Any, values: Any) -> Any:
    """Elements on both sides of the borders between tiles, and at the end of every axis, are four times as large."""
    values = values.copy()  # which may be the random inputs themselves
    for axis, size in enumerate(values.shape):
        near = {border * times + side for border in BORDERS for times in (1, (size - 1) // border) for side in (-1, 0)}
        places = sorted({place for place in near if 0 <= place < size} | {size - 1})
        index = (slice(None),) * axis + (xp.asarray(places),)
        values[index] *= EDGE_FACTOR
    return values


def _large(factor: float, xp: Any, values: Any) -> Any:
    """Values `factor` times as large, so that sums and exponentials leave the type they are computed in."""
    return values * factor


def _offset(offset: float, xp: Any, values: Any) -> Any:
    """Values near one, so that sums grow and what a narrow accumulator loses does not cancel by chance. Values near minus one are
    all smaller than padding of zeros."""
    return values * SPREAD + offset


def _cancelling(
    kernel: KernelClass,
    xp: Any,
    p: Problem,
    random: Arrays,
    own: Mapping[str, Any],
    right: Callable[[Arrays], tuple[Any, ...]],
) -> Iterator[Case]:
    """Values near a number, and in the second half of the first input near its negative, so that sums leave the range of float16
    and come back to it. The halves are those of the axis for which the number may be larger."""
    first = next(spec for spec in input_specs(kernel, p) if is_float(spec.dtype) and spec.name not in own)
    best: tuple[float, Case] | None = None
    for axis in range(-min(2, len(first.shape)), 0):

        def made(factor: float, axis: int = axis) -> tuple[Arrays, tuple[Any, ...], float]:
            inputs = _shaped(
                kernel, xp, p, random, lambda xp, values: (values * CANCELLING_SPREAD + OFFSET) * factor, own
            )
            values = inputs[first.name] if first.listed else [inputs[first.name]]
            turned = [to_float(xp, each, first.dtype) for each in values]
            for each in turned:
                half = (..., slice(each.shape[axis] // 2, None), *(slice(None),) * (-axis - 1))
                each[half] *= -1
            stored = [laid_out(xp, to_storage(xp, each, first.dtype), first) for each in turned]
            inputs[first.name] = stored if first.listed else stored[0]
            outputs = right(inputs)
            sizes = [
                float(xp.abs(each).max()) / LARGEST.get(spec.dtype, math.inf)
                for spec, output in zip(output_specs(kernel, p), outputs, strict=True)
                for each in (output if spec.listed else [output])
                if each.size
            ]
            return inputs, outputs, max(sizes, default=0.0)

        factor = LARGE_FACTORS[0]
        inputs, outputs, share = made(factor)
        if share > 0.4:  # outputs grow by a power of the factor, which a second try tells
            power = math.log2(share / max(made(factor / 2)[2], 1e-30))
            factor *= (0.4 / share) ** (1 / max(power, 1.0)) if math.isfinite(share) else 0.0
            inputs, outputs, share = made(factor)
        if (best is None or factor > best[0]) and _representable(kernel, xp, p, outputs):
            best = factor, Case("cancelling", inputs, outputs)
    if best is not None:
        yield best[1]


SHAPES: Mapping[str, Sequence[Shape]] = {
    "edges": (_edges,),
    "large": [functools.partial(_large, factor) for factor in LARGE_FACTORS],
    "offset": (functools.partial(_offset, OFFSET),),
    "negative": (functools.partial(_offset, -OFFSET),),
    "tiny": (functools.partial(_large, TINY_FACTOR),),
}
"""Kind -> the changes of the random inputs that make it. The first whose right outputs can be judged is taken."""


def _representable(
    kernel: KernelClass, xp: Any, p: Problem, outputs: Sequence[Any], *, tame: bool = False, undefined: bool = False
) -> bool:
    """Whether the right outputs are finite in their types; with `undefined`, those that the reference gives as numbers.

    With `tame`, outputs that are judged by their difference must also be so small that rounding stays within the usual limit.
    """
    for spec, output in zip(output_specs(kernel, p), outputs, strict=True):
        for each in output if spec.listed else [output]:
            sizes = xp.abs(each)
            if undefined:
                sizes = sizes[xp.isfinite(sizes)]
                if each.size and not sizes.size:
                    return False
            largest = float(sizes.max()) if sizes.size else 0.0
            # What is made 8-bit floats is scaled to their largest, or saturates.
            room = 1 if spec.dtype in MANTISSA_BITS else 2
            if not math.isfinite(largest) or largest > LARGEST.get(spec.dtype, math.inf) / room:
                return False
            if tame and spec.absolute and largest * ROUNDING.get(spec.dtype, 0.0) > Tolerance.absolute:
                return False
    return True
