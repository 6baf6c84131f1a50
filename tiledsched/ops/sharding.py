"""How torch's distributed tensors (`DTensor`) are attended to: which axes may be split over the ranks of a mesh.

Ranks can share the batch or the heads: then each of them attends to its own part, and nothing is sent. Where another axis
is split, such as the sequence, torch first gathers it. The strategies are registered at the first call with a distributed
tensor, because importing `torch.distributed.tensor` takes longer than importing tiledsched.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

BATCH = dict.fromkeys(("q", "k", "v", "out", "lse", "dout", "dlse", "key_starts", "key_lengths", "block_table"), 0)
"""The axis of each array that is split where the batch is split. Arrays that are not named are needed whole, and so are pages,
which may belong to any sequence."""
HEADS = dict.fromkeys(("q", "k", "v", "out", "lse", "dout", "dlse"), 1) | {"sinks": 0}
"""The axis of each array that is split where the heads are split."""
OPERATORS = {"sdpa": ("out",), "sdpa_lse": ("out", "lse"), "sdpa_backward": ("q", "k", "v", "sinks")}
"""The outputs of each operator, by the array that each is split like; those of the backward are gradients."""


_registered: list[bool] = []
"""Not empty once torch knows the strategies."""


def register() -> None:
    """Tell `DTensor` how to split the arrays of attention's operators: once in a process, and only where it is imported."""
    if _registered or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    for name in OPERATORS:
        # All arguments belong to the key of torch's cache of strategies, because some tensors may be missing.
        DTensor._op_dispatcher.sharding_propagator.register_op_strategy(
            getattr(torch.ops.tiledsched, name).default, _strategies, RuntimeSchemaInfo(0)
        )
    _registered.append(True)


# Under torch.compile: called while tracing and not traced.
register._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _strategies(schema: Any) -> Any:
    """What torch asks for a call: every way to split its arrays, of which torch takes the one that sends least.

    Args:
        schema: torch's `OpSchema`, the operator and its arguments, with an `OpStrategy` in place of each tensor.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._op_schema import OpStrategy
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    names = [argument.name for argument in schema.op._schema.arguments]
    given = dict(zip(names, schema.args_schema, strict=False)) | schema.kwargs_schema
    arrays = [name for name, each in given.items() if isinstance(each, OpStrategy)]
    results = OPERATORS[schema.op._schema.name.partition("::")[2]]
    known = {*arrays, "out", "lse"}  # without sinks their gradient is empty, and every rank has it whole
    batch = {name: axis for name, axis in BATCH.items() if "block_table" not in arrays or name not in ("k", "v")}

    def split(axes: dict[str, int], sums: tuple[str, ...] = ()) -> list[Any]:
        """Placements of the results, then of the arrays; each rank has a part of the `sums`."""
        places = {name: Shard(axis) for name, axis in axes.items() if name in known}
        parts = places | {name: Partial() for name in sums if name in known}
        return [
            *(parts.get(name, Replicate()) for name in results),
            *(places.get(name, Replicate()) for name in arrays),
        ]

    def heads_stay_grouped(inputs: Any, _: Any) -> bool:
        keys = inputs[arrays.index("k")]
        ranks = math.prod(
            keys.mesh.size(axis) for axis, placement in enumerate(keys.placements) if placement == Shard(1)
        )
        return bool(given["k"].shape[1] % ranks == 0)

    return expand_to_full_mesh_op_strategy(
        schema.get_mesh_from_args(),
        schema,
        [split({}), split(batch, sums=("sinks",)), split(HEADS)],
        input_index=len(results),
        is_valid_strategy_cb=heads_stay_grouped,
    )
