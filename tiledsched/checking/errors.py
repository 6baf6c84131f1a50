"""How far outputs are from what they should be, tile by tile, and whether that is within what the kernel declares.

An output is looked at as `[outer, rows, columns]`: its last two axes and the others as one. docs/measuring.md says how the
limits come about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from tiledsched.checking.accuracy import Accuracy
from tiledsched.core.arrays import (
    LARGEST,
    RELATIVE_ERRORS,
    SMALLEST,
    ArraySpec,
    Tolerance,
    codes_of,
    decoded,
    is_float,
    unwritten,
)
from tiledsched.core.cases import Case
from tiledsched.core.errors import DeclarationError, Failure, FailureKind

ELEMENTS_AT_ONCE = 1 << 26
"""Elements of an output that are compared at a time, or one row of tiles if that is more: it bounds the memory needed."""
SUBNORMAL_UNITS = 256
"""Tiles whose elements are on average below this many of the type's smallest steps are judged as if they were that large."""
RELATIVE, ABSOLUTE, UNEQUAL = "relative error", "error", "unequal elements"
"""What is taken of a tile: |out - expected| / |expected| (Frobenius norms), the largest |out - expected|, or a count."""


@dataclass(frozen=True, kw_only=True)
class OutputErrors:
    """The errors of one output."""

    output: str
    """Name of the output; of a list of outputs, with the place in it."""
    measure: str
    """What is taken of a tile: `RELATIVE`, `ABSOLUTE` or `UNEQUAL`."""
    limit: float
    """The largest that passes."""
    outer: tuple[int, ...]
    """Sizes of the outer axes."""
    errors: numpy.ndarray
    """`[outer, row tiles, column tiles]`, on the host."""
    largest: float
    """The largest absolute difference of any element."""

    def place(self, flat: int) -> tuple[int, ...]:
        """Index of the outer axes, row tile and, where rows are longer than a tile, column tile of an error."""
        outer, row, column = numpy.unravel_index(flat, self.errors.shape)
        index = numpy.unravel_index(int(outer), self.outer) if self.outer else ()
        return (*map(int, index), int(row), *([int(column)] if self.errors.shape[2] > 1 else []))

    def words(self, flat: int) -> str:
        """That place in words, e.g. `Out[0, 3], row tile 2`."""
        place, axes = self.place(flat), len(self.outer)
        index = f"[{', '.join(map(str, place[:axes]))}]" if axes else ""
        column = f", column tile {place[axes + 1]}" if len(place) > axes + 1 else ""
        return f"{self.output}{index}, row tile {place[axes]}{column}"

    def kind(self, flat: int, case: Case) -> str:
        """What the inputs behind an error are like."""
        return case.kind_of(flat // (self.errors.shape[1] * self.errors.shape[2]))


def case_errors(
    xp: Any,
    specs: Sequence[ArraySpec],
    outputs: dict[str, Any],
    case: Case,
    tolerance: Tolerance,
    tile: tuple[int, int],
) -> list[OutputErrors]:
    """The errors of every output; those on kinds of inputs without a requirement are 0.

    Args:
        xp: numpy or cupy.
        specs: of the outputs, in the order of `case.expected`.
        outputs: arrays or lists of arrays by name, as they lie in memory.
        case: what should be in them.
        tolerance: what is asked.
        tile: rows and columns per tile.

    Raises:
        DeclarationError: the reference gave another shape.
    """
    found = []
    for spec, right in zip(specs, case.expected, strict=True):
        stored, expected = (value if spec.listed else [value] for value in (outputs[spec.name], right))
        for place, (one, wanted) in enumerate(zip(stored, expected, strict=True)):
            made = output_errors(xp, spec, one, xp.asarray(wanted), tolerance, tile)
            if tolerance.except_kinds:
                kinds = numpy.array([case.kinds] if isinstance(case.kinds, str) else case.kinds)
                made.errors[numpy.broadcast_to(numpy.isin(kinds, tolerance.except_kinds), len(made.errors))] = 0.0
            found.append(replace(made, output=f"{spec.name}[{place}]") if spec.listed else made)
    return found


def output_errors(
    xp: Any, spec: ArraySpec, stored: Any, expected: Any, tolerance: Tolerance, tile: tuple[int, int]
) -> OutputErrors:
    """Errors of one array. Where NaN or an infinity is expected, the same is right.

    Any other NaN makes a tile's error infinite, and so does an element that nothing wrote.

    Args:
        xp: numpy or cupy.
        spec: says how errors are judged.
        stored: the array as it lies in memory.
        expected: floating-point or integer, of the same shape.
        tolerance: what is asked.
        tile: rows and columns per tile; the last of either may have fewer.
    """
    stored = codes_of(xp, stored, spec.dtype)
    shape = tuple(stored.shape)
    if tuple(expected.shape) != shape:
        raise DeclarationError(
            f"the reference gives {spec.name} of shape {tuple(expected.shape)}, declared is {shape}; "
            "correct one of them"
        )
    rows, columns = (1, 1, *shape)[-2:]
    outer = shape[:-2]
    tile = min(tile[0], rows), min(tile[1], columns)
    out, right = (array.reshape((-1, rows, columns)) for array in (stored, expected))
    errors = numpy.empty((len(out), -(-rows // tile[0]), -(-columns // tile[1])))
    measure = UNEQUAL if not is_float(spec.dtype) else ABSOLUTE if spec.absolute else RELATIVE
    largest = 0.0
    for some, lines in _chunks(len(out), rows, columns, tile[0]):
        found, difference = _MEASURES[measure](
            xp, out[some, lines], right[some, lines], spec.dtype, tile, tolerance.floor
        )
        found = xp.where(xp.isfinite(found), found, xp.inf)
        tiles = slice(lines.start // tile[0], -(-lines.stop // tile[0]))
        errors[some, tiles] = found.get() if hasattr(found, "get") else found  # from the GPU, where it is there
        largest = max(largest, difference) if numpy.isfinite(difference) else float("inf")
    limit = {RELATIVE: tolerance.relative_of(spec.dtype), ABSOLUTE: tolerance.absolute, UNEQUAL: 0.0}[measure]
    return OutputErrors(output=spec.name, measure=measure, limit=limit, outer=outer, errors=errors, largest=largest)


def _chunks(outer: int, rows: int, columns: int, tile_rows: int) -> Iterator[tuple[slice, slice]]:
    lines = min(rows, max(1, ELEMENTS_AT_ONCE // columns // tile_rows) * tile_rows)
    some = max(1, ELEMENTS_AT_ONCE // (lines * columns))
    for first in range(0, outer, some):
        for line in range(0, rows, lines):
            yield slice(first, min(first + some, outer)), slice(line, min(line + lines, rows))


def _difference(xp: Any, stored: Any, expected: Any, dtype: str, precision: str) -> tuple[Any, Any]:
    """`stored - expected` and `expected`, both 0 where the right value is NaN or an infinity in this type, and was stored."""
    with numpy.errstate(invalid="ignore"):
        values = decoded(xp, stored, dtype, precision)
        difference = values - expected
        if bool(xp.isfinite(difference).all()):
            return difference, expected
        overflowed = xp.isinf(values) & (xp.abs(expected) > LARGEST[dtype]) & ((values > 0) == (expected > 0))
        right = overflowed | (xp.isnan(values) & xp.isnan(expected) & ~unwritten(stored, dtype))
        return xp.where(right, 0.0, difference), xp.where(right, 0.0, expected)


def _relative(
    xp: Any, stored: Any, expected: Any, dtype: str, tile: tuple[int, int], least: float
) -> tuple[Any, float]:
    expected = expected if expected.dtype.kind == "f" else expected.astype(numpy.float64)
    difference, expected = _difference(xp, stored, expected, dtype, str(expected.dtype))
    # What rounding makes of numbers too small for the type is no error, however small the tile.
    floor = tile[0] * tile[1] * max(SUBNORMAL_UNITS * SMALLEST.get(dtype, 0.0), least) ** 2
    norm = xp.maximum(_by_tile(xp, expected * expected, tile, "sum"), max(floor, 1e-30))
    with numpy.errstate(invalid="ignore"):
        error = xp.sqrt(_by_tile(xp, difference * difference, tile, "sum") / norm)
    return error, float(xp.abs(difference).max())


def _absolute(
    xp: Any, stored: Any, expected: Any, dtype: str, tile: tuple[int, int], least: float
) -> tuple[Any, float]:
    error = xp.abs(_difference(xp, stored, expected, dtype, "float64")[0])
    error = xp.where(xp.isnan(error), xp.inf, error)
    return _by_tile(xp, error, tile, "max"), float(error.max())


def _unequal(xp: Any, stored: Any, expected: Any, dtype: str, tile: tuple[int, int], least: float) -> tuple[Any, float]:
    unequal = (stored != expected).astype(numpy.float64)
    difference = xp.abs(stored.astype(numpy.float64) - expected.astype(numpy.float64)).max()
    return _by_tile(xp, unequal, tile, "sum"), float(difference)


_MEASURES = {RELATIVE: _relative, ABSOLUTE: _absolute, UNEQUAL: _unequal}


def _by_tile(xp: Any, values: Any, tile: tuple[int, int], how: str) -> Any:
    """Sum or maximum of each tile of `[outer, rows, columns]`, none of them negative: `[outer, row tiles, column tiles]`."""
    for axis, size in ((2, tile[1]), (1, tile[0])):
        shape = list(values.shape)
        tiles = -(-shape[axis] // size)
        if shape[axis] % size:
            padded = xp.zeros((*shape[:axis], tiles * size, *shape[axis + 1 :]), dtype=values.dtype)
            padded[(slice(None),) * axis + (slice(shape[axis]),)] = values
            values = padded
        values = getattr(values.reshape((*shape[:axis], tiles, size, *shape[axis + 1 :])), how)(axis=axis + 1)
    return values


def summary(found: Sequence[OutputErrors], *, repeatable: bool) -> Accuracy:
    """The errors of the random inputs in short: of outputs judged by relative error, where there are any."""
    judged = [each for each in found if each.measure == RELATIVE] or list(found)
    worst = max(judged, key=worst_error)
    return Accuracy(
        max_abs_error=max(each.largest for each in judged),
        worst_tile_error=worst_error(worst),
        worst_tile=worst.place(int(worst.errors.argmax())),
        repeatable=repeatable,
    )


def worst_error(errors: OutputErrors) -> float:
    """The largest of any tile."""
    return float(errors.errors.max())


def wrong_result(found: Sequence[OutputErrors], case: Case, when: str = "") -> Failure | None:
    """The failure of outputs with these errors, or None where every tile is within its limit.

    Args:
        found: of every output.
        case: whose inputs they are of.
        when: begins what is said of the error.
    """
    for each in found:
        wrong = numpy.flatnonzero(~(each.errors <= each.limit))
        if not wrong.size:
            continue
        errors, first, worst = each.errors.reshape(-1), int(wrong[0]), int(each.errors.argmax())
        message = (
            f"{each.kind(first, case)} inputs: {when}{each.measure} {errors[first]:.3g} above {each.limit:.3g} in "
            f"{each.words(first)}, the first of {wrong.size} wrong tiles of {errors.size}"
        )
        if worst != first:
            message += f"; the worst, {errors[worst]:.3g}, on {each.kind(worst, case)} inputs in {each.words(worst)}"
        return Failure(kind=FailureKind.WRONG_RESULT, message=message)
    return None


BEYOND = 2.5
"""An output is wrong, and not merely inaccurate, where its error is this many times what our own kernels may have."""


@dataclass(frozen=True, kw_only=True)
class Error:
    """One method's error, over the part of the output that is compared."""

    max_abs: float
    """Largest absolute difference; infinite where any element of the output is not finite."""
    relative: float
    """Frobenius norm of the difference over that of the reference; for several outputs, the largest."""
    by_output: str = ""
    """The relative error of each of several outputs, such as `dQ=0.0021 dK=0.0022`; empty for one output."""

    @classmethod
    def of_outputs(cls, found: Mapping[str, Error]) -> Error:
        """The error of all outputs of a kernel, given each one's by name."""
        apart = " ".join(f"{name}={each.relative:.3g}" for name, each in found.items())
        return cls(
            max_abs=max(each.max_abs for each in found.values()),
            relative=max(each.relative for each in found.values()),
            by_output=apart if len(found) > 1 else "",
        )

    def verdict(self, dtype: str) -> str:
        """Why an output of this type is wrong; empty where it is right."""
        if not math.isfinite(self.max_abs):
            return "wrong result: not every element is finite"
        if self.relative > BEYOND * RELATIVE_ERRORS.get(dtype, 0.0):
            return f"wrong result: relative error {self.relative:.2g}"
        return ""


NOT_FINITE = Error(max_abs=math.inf, relative=math.inf)
"""The error of an output with an element that is not finite."""


def error_of(xp: Any, arrays: Iterable[tuple[Any, Any]]) -> Error:
    """The error over several arrays together, which are taken for one tile.

    Args:
        xp: numpy or cupy.
        arrays: pairs of an output and its reference, both float64 and of one shape.
    """
    pairs = [tuple(each.reshape((1, -1)) for each in pair) for pair in arrays]
    # Of one pair, which whole outputs are, no copies are made.
    output, reference = pairs[0] if len(pairs) == 1 else (xp.concatenate(side, 1) for side in zip(*pairs, strict=True))
    if not reference.size:
        return Error(max_abs=0.0, relative=0.0)
    spec = ArraySpec(name="", role="out", dtype="float64", shapes=(reference.shape,))
    made = output_errors(xp, spec, output, reference, Tolerance(relative=0.0), reference.shape)
    return Error(max_abs=made.largest, relative=worst_error(made))
