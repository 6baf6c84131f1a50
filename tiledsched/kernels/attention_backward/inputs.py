"""Inputs to check and time gradients on: outputs and log-sum-exps are those that attention gives for the other inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from tiledsched.core.cases import Case
from tiledsched.core.problem import Problem
from tiledsched.core.storage import to_float, to_storage
from tiledsched.kernels.attention.inputs import (
    KINDS,
    LARGEST_SINK,
    adversarial_heads,
    kinds_of_heads,
    places,
    unused_slots,
)
from tiledsched.kernels.attention.reference import attention_and_lse

SMALL_GRADIENT = 2.0**-16
"""Factor of output gradients where values are large, so that what is rounded to 16 bits stays within float16."""


def random_inputs(xp: Any, rng: Any, p: Problem) -> dict[str, Any]:
    """Random inputs by name, with what attention gives for them."""
    found = {
        name: rng.standard_normal(shape, dtype=numpy.float32)
        for name, shape in (
            ("Q", (p.batch, p.heads, p.seq_q, p.head_dim)),
            ("K", (p.batch, p.kv_heads, p.seq_k, p.head_dim)),
            ("V", (p.batch, p.kv_heads, p.seq_k, p.value_columns)),
            ("dOut", (p.batch, p.heads, p.seq_q, p.value_columns)),
        )
    }
    if p.sinks:
        found["Sinks"] = rng.standard_normal((p.heads,), dtype=numpy.float32)
    found |= {name: xp.asarray(array) for name, array in places(rng, p).items()}
    if p.dlse:
        found["dLse"] = rng.standard_normal((p.batch, p.heads, p.seq_q), dtype=numpy.float32)
    return found | outputs_of(xp, p, found)


def outputs_of(xp: Any, p: Problem, inputs: dict[str, Any]) -> dict[str, Any]:
    """Out and Lse for inputs as numbers, which are rounded to their type first."""
    from tiledsched.kernels.attention_backward.declaration import mask_of

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
    )
    return {"Out": out, "Lse": lse}


def adversarial_case(xp: Any, rng: Any, p: Problem, reference: Callable[[dict[str, Any]], tuple[Any, ...]]) -> Case:
    """The case in which the heads take the kinds of inputs of attention forward in turn."""
    kinds = kinds_of_heads(p)
    heads = xp.asarray(kinds)
    kv_heads = heads[:, :: p.group]
    given = places(rng, p, uneven=True)
    queries, keys, values = adversarial_heads(xp, rng, p, given)
    found = {"Q": queries[heads], "K": keys[kv_heads], "V": values[kv_heads]}
    found["dOut"] = rng.standard_normal((p.batch, p.heads, p.seq_q, p.value_columns), dtype=numpy.float32)
    found["dOut"] *= xp.where(heads == KINDS.index("large"), SMALL_GRADIENT, 1.0)[:, :, None, None].astype(
        numpy.float32
    )
    if p.dlse:
        found["dLse"] = rng.standard_normal((p.batch, p.heads, p.seq_q), dtype=numpy.float32)
    if p.sinks:  # of much weight and of little, in turn
        found["Sinks"] = xp.where(xp.arange(p.heads) % 2 == 0, LARGEST_SINK, -LARGEST_SINK).astype(numpy.float32)
    unused = unused_slots(xp, p, given)
    if unused is not None:
        found |= {name: xp.where(unused[:, None, :, None], xp.float32(xp.nan), found[name]) for name in "KV"}
    found |= {name: xp.asarray(array) for name, array in given.items()}
    found |= outputs_of(xp, p, found)
    types = {spec.name: spec.dtype for spec in p.declaration.arrays(p)}
    inputs = {name: xp.ascontiguousarray(to_storage(xp, array, types[name])) for name, array in found.items()}
    return Case([KINDS[kind] for kind in kinds.reshape(-1).tolist()], inputs, reference(inputs))
