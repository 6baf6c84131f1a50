"""One schedule on one problem in the interpreter, judged as the measuring process judges it on a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tiledsched.core.cases import make_cases, output_specs
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.storage import storage_type
from tiledsched.interpreter.launch import SmallDevice, element_type, run_schedule
from tiledsched.interpreter.values import InterpreterError
from tiledsched.measure.accuracy import case_errors, worst_error, wrong_result


def check_schedule(
    kernel: KernelClass, p: Problem, s: Schedule, *, arch: str = "sm_90", seed: int = 0
) -> tuple[bool, float, str]:
    """Whether every output is right on every kind of inputs, the largest error of a tile, and what is wrong.

    Args:
        kernel: what is run.
        p: the problem; small, for NumPy's sake.
        s: the schedule.
        arch: of the device that grids are made for.
        seed: of the inputs.
    """
    worst = 0.0
    tolerance, tile = kernel.tolerance(p, s), kernel.check_tile(p, s)
    types = {spec.name: spec.dtype for spec in kernel.arrays(p)}
    for case in make_cases(kernel, np, np.random.default_rng(seed), p):
        inputs = {name: _as_elements(value, types[name]) for name, value in case.inputs.items()}
        try:
            outputs = run_schedule(kernel, p, s, inputs, device=SmallDevice(arch=arch))
        except InterpreterError as error:
            return False, math.inf, str(error)
        stored = {name: _as_stored(value, types[name]) for name, value in outputs.items()}
        found = case_errors(np, output_specs(kernel, p), stored, case, tolerance, tile)
        worst = max([worst, *(worst_error(each) for each in found)])
        failure = wrong_result(found, case)
        if failure is not None:
            return False, worst, failure.message
    return True, worst, ""


def _as_elements(value: Any, dtype: str) -> Any:
    return [_as_elements(each, dtype) for each in value] if isinstance(value, list) else value.view(element_type(dtype))


def _as_stored(value: Any, dtype: str) -> Any:
    return [_as_stored(each, dtype) for each in value] if isinstance(value, list) else value.view(storage_type(dtype))
