"""Inputs to check and time gradients on: outputs and log-sum-exps are those that attention gives for the other inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy

from tiledsched.core.arrays import to_float, to_storage
from tiledsched.core.cases import Case, input_specs
from tiledsched.core.problem import Problem
from tiledsched.kernels.attention.inputs import (
    CODES,
    LARGEST_SINK,
    LARGEST_VALUE,
    border_keys,
    kinds_of_heads,
    peaked,
    places,
    sequences,
    uniform,
    unused_slots,
)
from tiledsched.kernels.attention.problem import mask_of
from tiledsched.kernels.attention.reference import attention_and_lse

EDGE_FACTOR = 4.0
QUERY_NORM = 64.0
LARGE_VALUES, SMALL_GRADIENTS = 2.0**14, 2.0**-6
SPREAD = 0.05


def random_inputs(
    xp: Any, rng: Any, p: Problem, given: Mapping[str, Any] = MappingProxyType({}), **change: Any
) -> dict[str, Any]:
    """Random inputs by name, with what attention gives for them.

    Args:
        given: arrays that are taken as they are, by name.
        change: as for :func:`outputs_of`.
    """
    found = {**normal_inputs(xp, rng, p), **given}
    found |= {name: xp.asarray(array) for name, array in places(rng, p).items()}
    return found | outputs_of(xp, p, found, **change)


def normal_inputs(xp: Any, rng: Any, p: Problem) -> dict[str, Any]:
    """Standard normal numbers by name, float32, for all inputs that do not follow from others or say where sequences are."""
    own = ("Out", "Lse", "Starts", "Lengths", "CuQ", "CuK", "Blocks", *getattr(p.declaration, "mod_arrays", ()))
    return {
        spec.name: rng.standard_normal(spec.shape, dtype=numpy.float32)
        for spec in input_specs(p.declaration, p)
        if spec.name not in own
    }


def outputs_of(xp: Any, p: Problem, inputs: dict[str, Any], **change: Any) -> dict[str, Any]:
    """Out and Lse for inputs as numbers, which are rounded to their type first.

    Args:
        change: further arguments of attention's reference, which change its scores.
    """
    rounded = {
        name: to_float(xp, to_storage(xp, inputs[name], p.dtype), p.dtype, "float32")
        for name in ("Q", "K", "V", "Sinks")
        if name in inputs
    }
    out, lse = attention_and_lse(
        xp,
        rounded["Q"],
        rounded["K"],
        rounded["V"],
        dtype="float32",
        sinks=rounded.get("Sinks"),
        starts=inputs.get("Starts"),
        lengths=inputs.get("Lengths"),
        cu_q=inputs.get("CuQ"),
        cu_k=inputs.get("CuK"),
        **mask_of(p),
        **change,
    )
    return {"Out": out, "Lse": lse}


def adversarial_case(
    xp: Any,
    rng: Any,
    p: Problem,
    reference: Callable[[dict[str, Any]], tuple[Any, ...]],
    own: Mapping[str, Any] = MappingProxyType({}),
    **change: Any,
) -> Case:
    """The case in which key/value heads, and the query heads of their groups, take the kinds of inputs in turn.

    Args:
        own: arrays that are taken as they are, by name.
        change: as for :func:`outputs_of`.
    """
    kinds = kinds_of_heads(p, len(KINDS))
    given = places(rng, p, uneven=True)
    found = {**normal_inputs(xp, rng, p), **own}
    signs = xp.where(rng.standard_normal((CODES, p.head_dim), dtype=numpy.float32) < 0, -1.0, 1.0).astype(numpy.float32)
    for batch, head in numpy.ndindex(p.batch, p.heads):
        for rows, columns in sequences(p, given):
            at, of_keys = (batch, head, rows), (batch, head // p.group, columns)
            first = head % p.group == 0  # the head that shapes the keys of its group
            k, v = (found[name][of_keys] if first else found[name][of_keys].copy() for name in "KV")
            _SHAPE[KINDS[kinds[batch, head]]](xp, found["Q"][at], k, v, found["dOut"][at], signs)
    if p.sinks:  # of much weight and of little, in turn
        found["Sinks"] = xp.where(xp.arange(p.heads) % 2 == 0, LARGEST_SINK, -LARGEST_SINK).astype(numpy.float32)
    unused = unused_slots(xp, p, given)
    if unused is not None:
        found |= {name: xp.where(unused[:, None, :, None], xp.float32(xp.nan), found[name]) for name in "KV"}
    found |= {name: xp.asarray(array) for name, array in given.items()}
    found |= outputs_of(xp, p, found, **change)
    types = {spec.name: spec.dtype for spec in p.declaration.arrays(p)}
    inputs = {name: xp.ascontiguousarray(to_storage(xp, array, types[name])) for name, array in found.items()}
    return Case([KINDS[kind] for kind in kinds.reshape(-1).tolist()], inputs, reference(inputs))


# Each function below is given one head's standard normal q, k, v and dOut, and changes them in place. `signs` is
# `[CODES, head_dim]`, each element 1 or -1.


def _borders(xp: Any, q: Any, k: Any, v: Any, gradient: Any, signs: Any) -> None:
    """Keys beside tile borders are looked for by every 61st row; output gradients of rows beside borders are large."""
    q += signs[xp.arange(len(q)) % CODES]  # to what they were: of rows all alike, the sum in dK may be small by chance
    score = 1.0 + numpy.log(len(k))  # so that such a key has about half of a row's weight
    for key in border_keys(len(k)):
        k[key] = score / q.shape[1] ** 0.5 * (signs[(key - 1) % CODES] + signs[key % CODES]) / 2**0.5
    for row in border_keys(len(q)):
        gradient[row] *= EDGE_FACTOR


def _offset_scores(score: float, xp: Any, q: Any, k: Any, v: Any, gradient: Any, signs: Any) -> None:
    """All scores are near a number. A quarter of the columns of the queries are large, so that keys are not all alike."""
    columns = max(1, q.shape[1] // 4)
    q[:, :columns] = (QUERY_NORM**2 / columns) ** 0.5 * signs[0, :columns]
    k[:, :columns] *= 0.02
    k[:, :columns] += score * q.shape[1] ** 0.5 / QUERY_NORM / columns**0.5 * signs[0, :columns]


def _cancelling(xp: Any, q: Any, k: Any, v: Any, gradient: Any, signs: Any) -> None:
    """Values and output gradients near one: the differences of dP from delta are small beside either."""
    for each in (v, gradient):
        each *= SPREAD
        each += 1.0


def _large(xp: Any, q: Any, k: Any, v: Any, gradient: Any, signs: Any) -> None:
    """Values up to 60000, where float16 ends at 65504, with output gradients to match."""
    v *= LARGE_VALUES
    xp.clip(v, -LARGEST_VALUE, LARGEST_VALUE, out=v)
    gradient *= SMALL_GRADIENTS


def _still(xp: Any, q: Any, k: Any, v: Any, gradient: Any, signs: Any) -> None:
    """Output gradients are zero, and so are all gradients."""
    gradient[...] = 0.0


_SHAPE: dict[str, Callable[..., None]] = {
    "borders": _borders,
    # The exponential of a score of padding, which is 0, minus the log-sum-exp overflows in float32.
    "low": partial(_offset_scores, -100.0),
    # The exponential of a score overflows unless the log-sum-exp is taken off first.
    "high": partial(_offset_scores, 100.0),
    "peaked": peaked,
    "cancelling": _cancelling,
    "large": _large,
    "uniform": uniform,
    "still": _still,
}
KINDS = tuple(_SHAPE)
"""In the order in which they are given to the heads; with few heads, the first are the ones that find most."""
