"""Whether the configurations of a call compute the same: all arrays that a launch changes, compared element by element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from tiledsched.checking.accuracy import Accuracy
from tiledsched.checking.errors import output_errors, worst_error
from tiledsched.core.arrays import RELATIVE_ERRORS, ArraySpec, Tolerance
from tiledsched.core.errors import Failure, FailureKind
from tiledsched.remember.description import Request
from tiledsched.remember.identity import address, is_array
from tiledsched.remember.machine import CallProgram, SearchMachine


class OutputComparison:
    """Compares the outputs of programs with those of the first one that runs.

    Arrays that the first launch changes are outputs. Before each other launch they are given the values that they had before
    the first one, so that a program that writes nothing is found.
    """

    def __init__(self, machine: SearchMachine, request: Request) -> None:
        self._machine, self._request = machine, request
        self._before: dict[str, Any] = {}
        self._right: dict[str, Any] = {}
        self._where: dict[str, int] = {}
        self._name = ""

    def take(self, program: CallProgram) -> None:
        """Run the program whose outputs are taken for right. Errors of the launch are raised."""
        args = self._request.args_fn(program.config)
        arrays = _arrays(args)
        before = {place: _copy(array) for place, array in arrays.items()}
        self._machine.run(program, args, self._request)
        changed = {place for place, copy in before.items() if not _equal(arrays[place], copy)} or set(before)
        self._before = {place: before[place] for place in changed}
        self._right = {place: _copy(arrays[place]) for place in changed}
        self._where = {place: address(arrays[place]) for place in changed}
        self._name = program.schedule.short() or "the first configuration"

    def compare(self, program: CallProgram) -> Accuracy | Failure:
        """The largest difference of a program's outputs from the right ones; a failure where it is larger than rounding."""
        if not self._right:
            self.take(program)
        args = self._request.args_fn(program.config)
        arrays = _arrays(args)
        for place, copy in self._before.items():
            if place in arrays and address(arrays[place]) == self._where[place]:
                arrays[place][...] = copy
        self._machine.run(program, args, self._request)
        worst, largest = 0.0, 0.0
        for place, right in self._right.items():
            found = arrays.get(place)
            if found is None or tuple(found.shape) != tuple(right.shape):
                words = f"argument {place} has another shape than with {self._name}"
                return Failure(kind=FailureKind.WRONG_RESULT, message=words)
            relative, absolute = difference(found, right)
            limit = 2.0 * RELATIVE_ERRORS.get(str(right.dtype).rpartition(".")[2], 0.0)
            if not relative <= limit:
                words = (
                    f"argument {place} differs from that of {self._name}: relative error {relative:.3g} above {limit:g}, "
                    f"largest difference {absolute:.3g}"
                )
                return Failure(kind=FailureKind.WRONG_RESULT, message=words)
            worst, largest = max(worst, relative), max(largest, absolute)
        return Accuracy(max_abs_error=largest, worst_tile_error=worst, worst_tile=(), repeatable=True)


def _arrays(args: Sequence[Any], above: str = "") -> dict[str, Any]:
    """The arrays among arguments, and in lists of these, by their places: `2`, or `2.0` for the first one in a list."""
    found: dict[str, Any] = {}
    for place, each in enumerate(args):
        if is_array(each):
            found[f"{above}{place}"] = each
        elif isinstance(each, (list, tuple)):
            found |= _arrays(each, f"{above}{place}.")
    return found


def _copy(array: Any) -> Any:
    return array.clone() if hasattr(array, "clone") else array.copy()


def _wide(array: Any) -> Any:
    """An array as float64."""
    return array.double() if hasattr(array, "double") else array.astype("float64")


def _equal(one: Any, other: Any) -> bool:
    """Whether two arrays hold the same numbers; NaN equals NaN."""
    one, other = _wide(one), _wide(other)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def difference(found: Any, right: Any) -> tuple[float, float]:
    """The largest relative error of any row (along the last axis), and the largest difference of any element.

    The error of a row is the norm of its difference over the norm of the right row, or over that of an average row where that is
    larger: a row of zeros would make any rounding infinite. Where both arrays are NaN, or infinite with one sign, they agree;
    where only one is, both numbers are infinite.
    """
    (xp, found), (_, right) = _rows(found), _rows(right)
    if not right.size:
        return 0.0, 0.0
    usual = float(xp.square(xp.where(xp.isfinite(right), right, 0.0)).mean()) ** 0.5
    spec = ArraySpec(name="", role="out", dtype="float64", shapes=(right.shape,))
    errors = output_errors(xp, spec, found, right, Tolerance(relative=0.0, floor=usual), (1, right.shape[1]))
    return worst_error(errors), errors.largest


def _rows(array: Any) -> tuple[Any, Any]:
    """(numpy or cupy, the array there as float64, its last axis as rows). Without CuPy, torch's arrays are copied to the host."""
    wide = _wide(array)
    wide, xp = wide.reshape(-1, wide.shape[-1] if len(wide.shape) else 1), numpy
    if getattr(wide, "is_cuda", False) or hasattr(wide, "__cuda_array_interface__"):
        try:
            import cupy
        except ImportError:
            wide = wide.cpu()
        else:
            wide, xp = cupy.from_dlpack(wide), cupy
    return xp, xp.asarray(wide)
