"""Sizes for a check on the CPU: so many tiles of each size of a problem that loops, masks and offsets show their mistakes.

Nothing is read off names. A run on a small problem shows how long the tiles are that a kernel takes of each axis of its arrays,
and the declared shapes say how much longer an axis gets with each size of the problem.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tiledsched.core.cases import replaced, shrunk
from tiledsched.core.errors import TiledschedError
from tiledsched.core.fields import Dim, Sizes, total
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.interpreter.uses import TileUses

MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""A size is a multiple of the first of these for which the kernel allows it."""
MOST_ELEMENTS = 1 << 21
"""Elements of all arrays of a problem."""
FEW_CALLS = 5000
"""Calls of `ct.*` functions by which a run has shown how it cuts its arrays."""
FEW_ELEMENTS = 1 << 18
"""Elements of the problem with the smallest run-time sizes, beyond which compile-time sizes are made smaller, too."""
LONG = 4096
"""Times that a size is made longer to see which axes grow with it, however much the shape divides it."""
LIST_PARTS = (1.0, 0.1, 0.4, 0.7)
"""Sizes of a list, as shares of the longest; a fifth is like the first again."""


@dataclass(kw_only=True)
class SizeFinder:
    """Finds sizes for the schedules of one kind of problem."""

    kernel: KernelClass
    space: SearchSpace
    base: Problem
    """A problem as its author names it."""
    smallest: Problem | None = None
    """The smallest of its kind, where that is known."""
    stretch: dict[str, int] = field(default_factory=dict)
    """Size -> what to multiply it by, because an array is taken in parts, each of which is cut into tiles."""
    first: dict[str, int] = field(default_factory=dict)
    """Size -> the first of its candidates that the reference and the compiler take."""

    kept: set[str] = field(default_factory=set)
    """Sizes known when the kernel is compiled that its tiles are as long as, so that they never come to more tiles."""

    @cached_property
    def small(self) -> Problem:
        """The smallest problem of the kind."""
        return self.smallest or _smallest(self.kernel, self.base)

    def workable_for(self, s: Schedule) -> SizeFinder | None:
        """A finder for whose smallest problem a schedule can work: this one, or one that keeps sizes of the problem as its author
        names it, as few as possible; None where arrays would be too large."""
        if not self.space.unworkable(s, self.small):
            return self
        names = self.dims()
        for count in range(1, len(names) + 1):
            for some in itertools.combinations(names, count):
                p = replaced(self.kernel, self.small, {name: self.base.values[name] for name in some})
                if p is not None and not self.space.unworkable(s, p) and _size_of(self.kernel, p) <= MOST_ELEMENTS:
                    return replace(self, smallest=p)
        return None

    def dims(self) -> list[str]:
        """The sizes of the problem: those that are run-time numbers first."""
        fields = self.kernel.fields
        names = [name for name, each in fields.items() if isinstance(each, (Dim, Sizes))]
        return sorted(names, key=lambda name: bool(getattr(fields[name], "constant", False)))

    def sized(self, s: Schedule, uses: TileUses, *, whole: bool = False, long: str = "", tiles: int = 0) -> Problem:
        """The problem in which every size comes to two tiles or more and the rest of one.

        Args:
            s: the schedule.
            uses: the tiles that the schedule took of a problem of this kind.
            whole: whether every size comes to two tiles and no rest instead.
            long: the size that comes to more tiles.
            tiles: how many.
        """
        found, stuck = self.small, dict[str, list[int]]()
        for turn, name in enumerate(self.dims()):
            values = self.values(found, name, turn, s, uses, whole=whole, tiles=tiles if name == long else 0)
            for value in dict.fromkeys(values[0 if whole else self.first.get(name, 0) :]):
                made = self.allowed(found, name, value, s)
                if made is not None:
                    found = made
                    break
            if values and found.values[name] == self.small.values[name]:
                stuck[name] = values
        for equal in zip(*stuck.values(), strict=False) if len(stuck) > 1 else ():  # sizes that must be equal
            made = self._made(found, dict.fromkeys(stuck, max(equal)), s)
            if made is not None:
                return made
        return found

    def stretched(self, s: Schedule, uses: TileUses, name: str, tiles: int) -> Problem | None:
        """The smallest problem, but with one size of many tiles; None where that is not allowed or its arrays are too large."""
        for value in self.values(self.small, name, 0, s, uses, tiles=tiles):
            made = self.allowed(self.small, name, value, s)
            if made is not None:
                return made if _size_of(self.kernel, made) <= MOST_ELEMENTS // 2 else None
        return None

    def values(
        self, p: Problem, name: str, turn: int, s: Schedule, uses: TileUses, *, whole: bool = False, tiles: int = 0
    ) -> list[int]:
        """Values of one size, the best first. A value that is good for two reasons stands there twice."""
        axes = self.axes(p, name, s, uses)
        kept, base = _number(p.values[name]), _number(self.base.values[name])
        if not axes or name in self.kept:
            return []

        def size(times: float, rest: bool) -> int:
            return max(math.ceil(_elements(side, times, turn, rest) / per) for side, per in axes)

        one = size(1, False)
        wanted = size(tiles or 2 + turn % 2, not whole) * self.stretch.get(name, 1)
        found = [-(-wanted // each) * each for each in MULTIPLES]
        found.append(1 << (wanted - 1).bit_length())
        halves = [base >> shift for shift in range(base.bit_length()) if base % (1 << shift) == 0]
        found += [half for half in halves if half >= wanted][-1:]
        found += [size(1, not whole), *([base] if base > one else []), one + 1]
        if kept % one == 0 or kept < one // 2:  # else some of a tile is padding already
            found.append(one if whole else max(math.ceil((side - side // 4 - 1) / per) for side, per in axes))
        return [*(max(1, each) for each in found), kept]

    def axes(self, p: Problem, name: str, s: Schedule, uses: TileUses) -> list[tuple[int, float]]:
        """(elements of a tile, elements of the axis for each unit of the size) of the axes that grow with a size."""
        known = _number(self.base.values[name])
        one, two = (
            Problem(self.kernel, {**p.values, name: _listed(p.values[name], each)}) for each in (known, 2 * known)
        )
        grown = total(two.values[name]) - total(one.values[name])
        return [
            (uses.side(array, axis), (high - low) / grown)
            for (array, axis), low, high in self._lengths(one, two, s, uses)
            if high > low
        ]

    def crossed(self, p: Problem, s: Schedule, uses: TileUses) -> dict[str, int]:
        """Size -> how many tiles of it were taken."""
        found: dict[str, int] = {}
        for name in self.dims():
            doubled = _listed(p.values[name], LONG * _number(p.values[name]))
            other = Problem(self.kernel, {**p.values, name: doubled})
            lengths = self._lengths(p, other, s, uses)
            counts = [uses.count(array, axis) for (array, axis), low, high in lengths if high > low]
            if counts:
                found[name] = max(counts)
        return found

    def _lengths(
        self, one: Problem, two: Problem, s: Schedule, uses: TileUses
    ) -> list[tuple[tuple[str, int], int, int]]:
        """(array and axis, its length in one problem, its length in another one) of what was cut into tiles.

        The problems need not be allowed; where shapes cannot be told of them, there is nothing.
        """
        found = []
        for array, axis in uses.places:
            if array in self.kernel.array_fields:
                try:
                    shapes = [self.kernel.array_spec(array, each, s).shapes for each in (one, two)]
                except (TiledschedError, ArithmeticError):
                    continue
                low, high = (sum(shape[axis] for shape in some if axis < len(shape)) for some in shapes)
                found.append(((array, axis), low, high))
        return found

    def note_tiles_that_follow(self, before: Mapping[str, int], after: Mapping[str, int], p: Problem) -> None:
        """Keep the sizes that came to as many tiles `before`, in the smallest problem, as `after`, in the larger problem `p`."""
        for name, each in self.kernel.fields.items():
            constant = isinstance(each, Dim) and each.constant
            if constant and p.values[name] != self.small.values[name] and before.get(name) == after.get(name):
                self.kept.add(name)

    def blame(self, s: Schedule, uses: TileUses, works: Callable[[Problem], bool]) -> Problem:
        """The problem as :meth:`sized` makes it, with other values of the sizes for which it does not work.

        Args:
            s: the schedule.
            uses: the tiles taken so far.
            works: tells whether a problem works.
        """
        found = self.small
        for turn, name in enumerate(self.dims()):
            self.first.pop(name, None)
            tried = set()
            for place, value in enumerate(self.values(found, name, turn, s, uses)):
                made = None if value in tried else self.allowed(found, name, value, s)
                tried.add(value)
                if made is not None and works(made):
                    found, self.first[name] = made, place
                    break
        return found

    def allowed(self, p: Problem, name: str, value: int, s: Schedule) -> Problem | None:
        """The problem with another value of one size; None where that is not allowed, too large, or `s` cannot work for it."""
        return self._made(p, {name: _listed(p.values[name], value)}, s)

    def _made(self, p: Problem, values: Mapping[str, Any], s: Schedule) -> Problem | None:
        """The problem with other values of sizes; None where they are not allowed, too large, or `s` cannot work for them."""
        made = replaced(self.kernel, p, values)
        if made is None:
            return None
        large = _size_of(self.kernel, made) > max(MOST_ELEMENTS, _size_of(self.kernel, p))
        return None if large or self.space.unworkable(s, made) else made


def neighbours(kernel: KernelClass, space: SearchSpace, p: Problem, s: Schedule) -> list[Problem]:
    """Small problems of the kind of `p` at the borders of the tiles of a schedule: with sizes of 1, of one less than a tile and
    of one more, as far as the kernel allows them. How long tiles are, a run in the interpreter tells."""
    from tiledsched.checking.interpreted import check_schedule

    finder, uses = SizeFinder(kernel=kernel, space=space, base=p), TileUses()
    finder = finder.workable_for(s) or finder
    with suppress(Exception):  # what the interpreter lacks: then there are only sizes of 1
        check_schedule(kernel, finder.small, s, kinds=(), uses=uses, shapes_may_fail=True, most_calls=FEW_CALLS)
    found = []
    for more in (None, -1, 1):
        made = finder.small
        for name in finder.dims():
            axes = finder.axes(made, name, s, uses)
            cut = [(side, per) for side, per in axes if side < _number(p.values[name]) * per]
            value = 1 if more is None else max((math.ceil((side + more) / per) for side, per in cut), default=0)
            if cut and value > 0:
                made = finder.allowed(made, name, value, s) or made
        found.append(made)
    return [each for each in dict.fromkeys(found) if each != p and not space.unworkable(s, each)]


def _smallest(kernel: KernelClass, base: Problem) -> Problem:
    """The problem with the smallest sizes that the kernel allows; large ones known when it is compiled are halved."""
    found = shrunk(kernel, base)
    for name, each in kernel.fields.items():
        if isinstance(each, Sizes):
            found = replaced(kernel, found, {name: tuple(2 + i % 3 for i in range(len(found.values[name])))}) or found  # type: ignore[arg-type]
    constant = [name for name, each in kernel.fields.items() if isinstance(each, Dim) and each.constant]
    while _size_of(kernel, found) > FEW_ELEMENTS:
        for name in sorted(constant, key=lambda name: -int(found.values[name])):  # type: ignore[arg-type]
            halved = replaced(kernel, found, {name: int(found.values[name]) // 2})  # type: ignore[arg-type]
            if halved is not None and _size_of(kernel, halved) < _size_of(kernel, found):
                found = halved
                break
        else:
            break
    return found


def _elements(side: int, times: float, turn: int, rest: bool) -> int:
    """Elements of an axis of `times` tiles, with the rest of one more: another rest at each turn, so that no two sizes agree."""
    if side == 1:
        return int(times) + (1 + turn % 2 if rest else 0)
    return int(times) * side + (min(side // 2 + 1 + 2 * turn, side - 1) if rest else 0)


def _size_of(kernel: KernelClass, p: Problem) -> int:
    """Elements of all arrays of a problem."""
    return sum(math.prod(shape) for spec in kernel.arrays(p) for shape in spec.shapes)


def _number(value: Any) -> int:
    """A size as one number: of a list, the largest."""
    return max(value) if isinstance(value, tuple) else int(value)


def _listed(like: Any, value: int) -> Any:
    """A size; for a list of sizes as many, of which `value` is the largest."""
    if not isinstance(like, tuple):
        return value
    return tuple(max(1, int(value * part)) for part, _ in zip(itertools.cycle(LIST_PARTS), like, strict=False))
