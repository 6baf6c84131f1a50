"""One schedule on one problem in the interpreter, judged as the measuring process judges it on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tiledsched.checking.errors import OutputErrors, case_errors, worst_error, wrong_result
from tiledsched.checking.inputs import CHECK_KINDS, make_cases
from tiledsched.core.arrays import storage_type
from tiledsched.core.cases import Case, output_specs
from tiledsched.core.errors import DeclarationError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.interpreter.contraction import Arithmetic
from tiledsched.interpreter.launch import BlockOrder, SmallDevice, element_type, run_schedule
from tiledsched.interpreter.uses import TileUses
from tiledsched.interpreter.values import EndlessError, InterpreterError, ShapeError

FORWARD: BlockOrder = "forward"
IN_TURN: tuple[Arithmetic, ...] = ("fused", "flushed", "fused right", "rounded")
"""The arithmetic of one kind of inputs after another. Random inputs, the first, are also computed in `"rounded"`."""
RIGHT_WHERE_ROUNDED = "right where each operation is rounded"
MOST_CALLS = 3_000_000
"""Calls of `ct.*` functions in one run, after which a kernel is said not to end: about a minute."""


def check_schedule(
    kernel: KernelClass,
    p: Problem,
    s: Schedule,
    *,
    arch: str = "sm_90",
    seed: int = 0,
    kinds: Sequence[str] = CHECK_KINDS,
    device: SmallDevice | None = None,
    uses: TileUses | None = None,
    shapes_may_fail: bool = False,
    most_calls: int = MOST_CALLS,
) -> tuple[bool, float, str]:
    """Whether every output is right on every kind of inputs, the largest error of a tile, and what is wrong.

    Blocks run in another order, and numbers are computed in another arithmetic, for each kind of inputs.

    Args:
        kernel: what is run.
        p: the problem; small, for NumPy's sake.
        s: the schedule.
        arch: of the device that grids are made for.
        seed: of the inputs.
        kinds: of the inputs, in addition to random ones.
        device: that grids are made for, if not the interpreter's own.
        uses: notes the tiles taken, if given.
        shapes_may_fail: raise ShapeError where cuTile would not compile the kernel for such sizes.
        most_calls: of `ct.*` functions in one run, after which the kernel is said not to end.
    """
    worst = 0.0
    tolerance, tile = kernel.tolerance(p, s), kernel.check_tile(p, s)
    types = {spec.name: spec.dtype for spec in kernel.arrays(p)}
    device = device or SmallDevice(arch=arch)
    uses = TileUses() if uses is None else uses

    def errors_of(case: Case, order: BlockOrder, arithmetic: Arithmetic) -> list[OutputErrors]:
        inputs = {name: _viewed(value, element_type(types[name])) for name, value in case.inputs.items()}
        assert uses is not None
        counted = TileUses() if case.kinds == "random" and arithmetic != "rounded" else uses  # which it was before
        counted.most_calls = counted.calls + most_calls
        outputs = run_schedule(kernel, p, s, inputs, device=device, order=order, uses=counted, arithmetic=arithmetic)
        stored = {name: _viewed(value, storage_type(types[name])) for name, value in outputs.items()}
        return case_errors(np, output_specs(kernel, p), stored, case, tolerance, tile)

    cases = make_cases(kernel, np, np.random.default_rng(seed), p, kinds=kinds, undefined=True)
    for turn, arithmetic, case in _computed_in_turn(cases, once=shapes_may_fail):
        order = (FORWARD, "reversed")[turn] if turn < 2 else turn
        try:
            try:
                found = errors_of(case, order, arithmetic)
            except EndlessError:
                if order == FORWARD:
                    raise
                order = FORWARD  # blocks that wait for those before them, which run at the same time on a GPU
                found = errors_of(case, order, arithmetic)
            failure = wrong_result(found, case)
            worst = max([worst, *(worst_error(each) for each in found)])
            if failure is not None:
                if arithmetic != "rounded" and wrong_result(errors_of(case, order, "rounded"), case) is None:
                    return False, worst, f"{failure.message}; wrong in {arithmetic} arithmetic, {RIGHT_WHERE_ROUNDED}"
                alone = order != FORWARD and wrong_result(errors_of(case, FORWARD, arithmetic), case) is None
                return False, worst, failure.message + ("; right where blocks run in turn" if alone else "")
        except ShapeError as error:
            if shapes_may_fail:
                raise
            return False, math.inf, str(error)
        except (InterpreterError, DeclarationError) as error:
            return False, math.inf, str(error)
    return True, worst, ""


def _computed_in_turn(cases: Iterable[Case], *, once: bool) -> Iterator[tuple[int, Arithmetic, Case]]:
    """Each case with its place and the arithmetic it is computed in: the first in two, unless each is to be run `once`."""
    for turn, case in enumerate(cases):
        if turn == 0:
            yield turn, "rounded", case
        if turn or not once:
            yield turn, IN_TURN[turn % len(IN_TURN)], case


def _viewed(value: Any, dtype: Any) -> Any:
    """An array, or each of a list, with its bits as another type."""
    return [_viewed(each, dtype) for each in value] if isinstance(value, list) else value.view(dtype)
