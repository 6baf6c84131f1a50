"""An author's functions applied to scores on a GPU, in the precision of the scores: for references, which are made of them.

In NumPy :func:`tiledsched.interpreter.evaluate` does the same. Each tile is loaded, changed and stored; no schedule is searched.
"""

# Tile code is typed by cuTile, not by Python.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cuda.tile as ct
import numpy

from tiledsched.core.copies import Copier, codes_in
from tiledsched.core.sources import compiled
from tiledsched.kernels.attention.loads import DEFINITIONS

TILE = 64
OPTIONS = {"rounding_mode", "flush_to_zero"}
"""Options of cuTile's functions that float64 does not take where they ask for less than it has."""
SOURCE = """def apply_mods({arrays}Scores: ct.Array, b: int, h: int, first: int):
    apply_to_tile(SCORE, MASK, ({names}), Scores, b, h, first)
"""


def apply_to_tile(score, mask, arrays, Scores, b, h, first):
    """Change one tile of scores, and set those to minus infinity that the mask hides; either function may be None."""
    i, j = ct.bid(0), ct.bid(1)
    found = ct.load(Scores, (i, j), (TILE, TILE), padding_mode=ct.PaddingMode.ZERO)
    rows = first + i * TILE + ct.arange(TILE, dtype=ct.int32)[:, None]
    columns = j * TILE + ct.arange(TILE, dtype=ct.int32)[None, :]
    if score is not None:
        found = score(found, b, h, rows, columns, *arrays).astype(Scores.dtype)
    if mask is not None:
        visible = mask(b, h, rows, columns, *arrays)
        found = ct.where(visible, found, ct.full((TILE, TILE), -math.inf, dtype=Scores.dtype))
    ct.store(Scores, (i, j), found)


def _whole(plain: Any) -> Any:
    """A function of cuTile without these options."""

    def rounded_to_nearest(*numbers, rounding_mode=None, flush_to_zero=False):
        return plain(*numbers)

    return rounded_to_nearest


def exactly(function: Any) -> Any:
    """A copy of an author's function for references: it computes in full precision what the function asks the GPU to approximate,
    as float64 needs, and loads elements by their indices.
    """
    loads = {id(fast): slow for fast, slow in DEFINITIONS.items()}
    found: set[Any] = set()

    def code_of(of: FunctionType) -> CodeType:
        found.update(const for each in (of.__code__, *codes_in(of.__code__)) for const in each.co_consts)
        return of.__code__

    copy = Copier({}, {**loads}, code_of).copy(function)
    approximate = any(isinstance(const, tuple) and OPTIONS.intersection(const) for const in found)
    return Copier({}, {**loads, id(ct): NAMESPACE}).copy(function) if approximate else copy


def strictly(function: Any) -> Any:
    """A copy of an author's function that fails in the interpreter, for rows and keys from 0 on, where it loads by other numbers
    of rows and keys than it is given.
    """

    def strict(load: Any, name: str) -> Any:
        def checked(array: Any, *given: Any) -> Any:
            last = (given[0] if len(given) == 1 else given)[-2:]
            places = [getattr(each, "array", numpy.empty(0)) for each in last]
            wanted = [range(places[0].size), range(places[-1].size)]
            if [each.tolist() for each in places] != [[[i] for i in wanted[0]], [[*wanted[1]]]]:
                raise InterpreterError(
                    f"{name} takes q_idx and kv_idx as they are; load by other indices with ct.gather"
                )
            return load(array, *given)

        return checked

    from tiledsched.interpreter.values import InterpreterError

    return Copier({}, {id(fast): strict(slow, fast.__name__) for fast, slow in DEFINITIONS.items()}).copy(function)


NAMESPACE = ModuleType(ct.__name__, "The module `cuda.tile` with functions that round to nearest.")
vars(NAMESPACE).update(vars(ct))
vars(NAMESPACE).update(
    {name: _whole(getattr(ct, name)) for name in ("exp", "exp2", "sqrt", "rsqrt", "tanh", "truediv")}
)


@functools.lru_cache(maxsize=256)
def _entry_of(kernel: Any, scored: bool) -> Any:
    arrays, names = ("".join(form.format(each) for each in kernel.mod_arrays) for form in ("{}: ct.Array, ", "{}, "))
    found = {**globals(), "SCORE": exactly(kernel.mods[0]) if scored else None, "MASK": kernel.mods[1]}
    text = SOURCE.format(arrays=arrays, names=names)
    return ct.kernel(compiled(f"<{kernel.name}_applied_{scored}>", text, found, "apply_mods"))


def apply_on_gpu(
    xp: Any, kernel: Any, scores: Any, arrays: Sequence[Any], b: int, h: int, first: int, *, scored: bool
) -> Any:
    """Scores `[rows, seq_k]` of a head, from row `first` on, changed and hidden in place.

    Args:
        xp: cupy.
        kernel: a variant of attention.
        scores: float32 or float64, on the GPU.
        arrays: what the functions take, on the GPU.
        b, h: numbers of the sequence and of the query head.
        first: number of the first row.
        scored: whether scores are changed, or only hidden.
    """
    grid = tuple(-(-size // TILE) for size in scores.shape)
    ct.launch(xp.cuda.get_current_stream(), grid, _entry_of(kernel, scored), (*arrays, scores, b, h, first))
    return scores
