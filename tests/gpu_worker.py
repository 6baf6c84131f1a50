"""The measuring process of the GPU suite: as the one that measures, but outputs lie between bytes that no launch may change."""

from __future__ import annotations

from typing import Any

import cupy
import numpy

from tiledsched.core.errors import Failure, FailureKind
from tiledsched.measure import worker
from tiledsched.measure.arrays import each

GUARD_BYTES = 4096
PATTERN = 0xA5


def begin(state: Any, *problem: Any) -> None:
    """Inputs and references of a problem, and outputs between guards."""
    worker.begin(state, *problem)
    state.guards = {}
    for name, value in state.arrays.outputs.items():
        made = [guarded(state, f"{name}[{place}]", array) for place, array in enumerate(each(value))]
        state.arrays.outputs[name] = made if isinstance(value, list) else made[0]


def guarded(state: Any, name: str, array: Any) -> Any:
    """Memory for an array of the same shape and layout, between guards."""
    plain = array if array.flags.c_contiguous else array.swapaxes(-1, -2)
    around = cupy.full(plain.nbytes + 2 * GUARD_BYTES, PATTERN, dtype=numpy.uint8)
    state.guards[name] = around[:GUARD_BYTES], around[GUARD_BYTES + plain.nbytes :]
    inner = around[GUARD_BYTES : GUARD_BYTES + plain.nbytes].view(plain.dtype).reshape(plain.shape)
    inner[...] = plain
    return inner if plain is array else inner.swapaxes(-1, -2)


def check(state: Any, launch: Any) -> Any:
    """Whether the outputs of a launch are right on every case, and nothing was written around them."""
    found = worker.check(state, launch)
    for name, sides in state.guards.items():
        changed = [int((side != PATTERN).sum()) for side in sides]
        if any(changed):
            for side in sides:
                side.fill(PATTERN)
            words = f"{changed[0]} bytes before {name} were written, and {changed[1]} behind it"
            return Failure(kind=FailureKind.WRONG_RESULT, message=words)
    return found


def main(descriptor: str, folder: str, parent: str) -> None:
    """Answer requests; see `tiledsched.measure.worker.main`."""
    worker.main(descriptor, folder, parent, {**worker.REQUESTS, "begin": begin, "check": check})
