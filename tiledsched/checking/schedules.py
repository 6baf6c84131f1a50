"""Schedules of a kernel, run on the CPU in the interpreter and compared with the kernel's reference."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiledsched.checking.inputs import CHECK_KINDS
from tiledsched.core.cases import replaced
from tiledsched.core.errors import TiledschedError, describe
from tiledsched.core.fields import Choice, Dim, Flag, Sizes
from tiledsched.core.groups import grouped
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.problem_lists import problems_of
from tiledsched.core.schedule import HINT_KNOBS, Schedule
from tiledsched.core.space import SearchSpace

if TYPE_CHECKING:
    from tiledsched.checking.sizes import SizeFinder
    from tiledsched.interpreter.launch import SmallDevice
    from tiledsched.interpreter.uses import TileUses

MAX_DRAWS = 3
"""Draws from the space for each schedule wanted: those that cover most are taken."""
MULTIPROCESSORS = 2
"""Of the device that grids are made for: so few that persistent blocks take several work tiles."""
KINDS_IN_TURN = 2
"""Kinds of inputs, beside random ones, of a schedule that is like one checked before; others have all kinds."""
MOST_KINDS = 6
"""Kinds of problems of the suites that are checked."""
MOST_WALKED = 64
"""Schedules of the space that are looked at for each one wanted, before the space is said to have no more."""
MOST_VALUES = 256
"""Most values of a knob that are tried one by one."""
SIZES = (1024, 4096, 128, 16, 2)
"""Values of the sizes of a kernel that names no problem: the first that it allows."""
LONG_KINDS = ("cancelling",)
"""Kinds of inputs, beside random ones, on sizes of many tiles: those whose sums are the larger the longer they are."""
LONGEST_KINDS = ("offset",)
"""Those on sizes of very many tiles."""
STAGNANT = 520
"""Tiles after which a sum in bfloat16 no longer grows: one of equal terms stays at 256 of them, because half a step of it is as
large as a term."""
LONGEST_LOOP = 16
"""The most blocks that share a size for which it is made twice as many tiles long."""


@dataclass(frozen=True, kw_only=True)
class CheckRow:
    """What one schedule computed for one problem in the interpreter."""

    problem: Problem
    """The problem that was computed."""
    schedule: Schedule
    """The schedule it was computed with."""
    passed: bool
    """Whether every output is right on every kind of inputs."""
    worst_error: float = 0.0
    """Largest error of a tile; infinite where something was not written, NaN, or the kernel raised."""
    message: str = ""
    """What is wrong; empty where nothing is."""
    tiles: dict[str, int] = field(default_factory=dict)
    """Size of the problem -> how many tiles of it were taken."""
    skipped: str = ""
    """Why the schedule was not run on the problem, which then counts neither as right nor as wrong; empty where it was."""

    @property
    def verdict(self) -> str:
        """`right`, `wrong`, or `not run`."""
        return "not run" if self.skipped else "right" if self.passed else "wrong"

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "problem": self.problem.to_json(),
            "schedule": self.schedule.to_json(),
            "passed": self.passed,
            "worst_error": self.worst_error,
            "message": self.message,
            "tiles": self.tiles,
            "skipped": self.skipped,
        }


def check_problems(
    kernel: KernelClass,
    space: SearchSpace,
    given: Sequence[Problem] | None,
    *,
    grown: bool = False,
    arch: str,
    schedules: int,
    seed: int,
    progress: Callable[[str], None] | None = None,
) -> Iterator[CheckRow]:
    """A row for each schedule of each problem, as it is known; see :func:`tiledsched.check`.

    Args:
        kernel: what is checked.
        space: of its schedules.
        given: problems, whose sizes stay as they are; None for those of the suites, with sizes that follow from the tiles that
            each schedule takes.
        grown: whether schedules that take one tile of a size of these problems also run on larger ones of the kind.
        arch: of the device that grids are made for.
        schedules: how many of each problem, where the space has so many that compute in different ways.
        seed: of the inputs and of the choice of schedules.
        progress: is told what runs.
    """
    check = _Check(kernel, space, arch, schedules, seed, progress or (lambda text: None))
    yield from check.given(given, grown) if given is not None else check.found(_kinds(kernel))


class _Check:
    """One check of a kernel."""

    def __init__(
        self,
        kernel: KernelClass,
        space: SearchSpace,
        arch: str,
        schedules: int,
        seed: int,
        progress: Callable[[str], None],
    ) -> None:
        from tiledsched.interpreter.launch import SmallDevice

        self.kernel, self.space, self.count, self.seed, self.progress = kernel, space, schedules, seed, progress
        self.device: SmallDevice = SmallDevice(sm_count=MULTIPROCESSORS, arch=arch)
        self.turn = 0
        self.structures: set[Any] = set()
        self.done: set[tuple[Problem, Schedule]] = set()
        self.refused: list[CheckRow] = []
        """Problems that could not be computed, and were not told of yet: one for each reason."""
        self.reasons: set[str] = set()
        self.values: set[Any] = set()
        """Knobs with the values that schedules which ran have."""

    def given(self, problems: Sequence[Problem], grown: bool) -> Iterator[CheckRow]:
        """Problems of given sizes; with `grown`, also larger ones where a schedule unlike those before took one tile of a size,
        and sizes as in :meth:`found` for schedules with values of knobs that are not explored on the given problems.
        """
        for problem in problems:
            drawn, finder = self.drawn([problem], every_value=False), _finder(self.kernel, self.space, problem)
            for place, schedule in enumerate(drawn):
                self.progress(f"{problem}: schedule {place + 1} of {len(drawn)}")
                new = self.is_new(schedule)
                row, uses = self.row(problem, schedule, CHECK_KINDS if new or place == 0 else self.some_kinds(), finder)
                yield row
                if grown and new and row.passed and 1 in row.tiles.values():
                    yield from self.larger(finder, schedule, uses)
        for bases in _kinds(self.kernel) if grown and self.kernel.suites else ():
            for schedule in self.drawn(bases, every_value=True):
                workable = _finder(self.kernel, self.space, bases[0]).workable_for(schedule)
                if workable is None or _values(schedule) <= self.values or not self.fits(workable.small, schedule):
                    continue
                yield from self.larger(workable, schedule, self.row(workable.small, schedule, (), workable)[1])
        yield from self.refused

    def larger(self, finder: SizeFinder, s: Schedule, uses: TileUses) -> Iterator[CheckRow]:
        """One schedule on a problem of some tiles, unless it ran on that."""
        problem = self.fitting(finder, s, uses)
        if (problem, s) not in self.done:
            yield self.row(problem, s, self.some_kinds(), finder)[0]

    def found(self, kinds: Sequence[list[Problem]]) -> Iterator[CheckRow]:
        """Problems whose sizes follow from the tiles that schedules take of them."""
        plans = [(_finder(self.kernel, self.space, bases[0]), self.drawn(bases, every_value=True)) for bases in kinds]
        for place in range(max((len(drawn) for _, drawn in plans), default=0)):
            for finder, drawn in plans:
                if place < len(drawn):
                    self.progress(f"{finder.base}: schedule {place + 1} of {len(drawn)}: {drawn[place].short()}")
                    yield from self.schedule(finder, drawn[place], first=place == 0)
                    yield from self.refused
                    self.refused.clear()

    def schedule(self, finder: SizeFinder, s: Schedule, *, first: bool) -> Iterator[CheckRow]:
        """One schedule: on a problem smaller than its tiles, on some tiles, on many, and the first also on whole tiles."""
        new = self.is_new(s)
        workable = finder.workable_for(s)
        if workable is None:
            reason = f"no problem small enough: {self.space.unworkable(s, finder.small)[0]}"
            yield CheckRow(problem=finder.base, schedule=s, passed=False, skipped=reason)
            return
        finder = workable
        row, uses = self.row(finder.small, s, CHECK_KINDS if first else (), finder)
        if first or not row.passed:
            yield row
        if not row.passed:
            return
        alone = row.tiles
        kinds = CHECK_KINDS if new else self.some_kinds()
        problem = self.fitting(finder, s, uses)
        row, more = self.row(problem, s, kinds, finder)
        yield row
        if first:
            finder.note_tiles_that_follow(alone, row.tiles, problem)
        more = uses.filled(more)
        for name, count in row.tiles.items() if first and row.passed else ():
            if count < 3 and self.cut(finder, problem, name, s, more):
                finder.stretch[name] = 4
        if finder.stretch and first:
            problem = self.fitting(finder, s, more)
            row, _ = self.row(problem, s, kinds, finder)
            yield row
        if not row.passed:
            return
        others = [(finder.sized(s, more, whole=True), LONG_KINDS)] if first else []
        if new:
            others += [(self.long(finder, s, more, name), LONG_KINDS) for name in row.tiles]
        others += [
            (longest, LONGEST_KINDS)
            for name in (row.tiles if new else ())
            if self.shared(finder, s, more, name) and (longest := finder.stretched(s, more, name, STAGNANT))
        ]
        for other, kinds in others:
            if (other, s) not in self.done and self.fits(other, s):
                yield self.row(other, s, kinds, finder)[0]

    def long(self, finder: SizeFinder, s: Schedule, uses: TileUses, name: str) -> Problem:
        """The problem with one size so long that each of the blocks which share it has a loop of some steps.

        How many share it is a number among the knobs, or the number of blocks where that does not grow with the size.
        """
        sides = {side for some in uses.places.values() for side in some}
        shares = [value for knob, value in s.items() if type(value) is int and knob not in HINT_KNOBS]
        share = max((value for value in shares if value <= LONGEST_LOOP and value not in sides), default=1)
        share = max(share, self.shared(finder, s, uses, name))
        return finder.sized(s, uses, long=name, tiles=2 * min(max(share, 2), LONGEST_LOOP) + 1)

    def shared(self, finder: SizeFinder, s: Schedule, uses: TileUses, name: str) -> int:
        """How many blocks walk along a size in loops, because their number does not grow with it; else 0."""
        one, two = (finder.stretched(s, uses, name, tiles) for tiles in (4 * LONGEST_LOOP, 8 * LONGEST_LOOP))
        with suppress(TiledschedError):
            if one is not None and two is not None and one != two:
                blocks = [math.prod(self.kernel.grids(each, s, self.device)[0]) for each in (one, two)]
                return blocks[0] if blocks[0] == blocks[1] else 0
        return 0

    def cut(self, finder: SizeFinder, p: Problem, name: str, s: Schedule, uses: TileUses) -> bool:
        """Whether a size is long enough for three tiles, so that parts of it must have been cut."""
        return any(
            p.values[name] * per > 2 * side  # type: ignore[operator]
            for side, per in finder.axes(p, name, s, uses)
            if isinstance(p.values[name], int)
        )

    def fitting(self, finder: SizeFinder, s: Schedule, uses: TileUses) -> Problem:
        """The problem of some tiles, with sizes that the reference takes and for which cuTile would compile the kernel."""
        problem = finder.sized(s, uses)
        return problem if self.fits(problem, s) else finder.blame(s, uses, lambda p: self.fits(p, s))

    def fits(self, p: Problem, s: Schedule) -> bool:
        """Whether the reference takes a problem and cuTile would compile the kernel for it; else it is noted why not. A wrong
        result fits."""
        from tiledsched.checking.interpreted import check_schedule

        try:
            check_schedule(self.kernel, p, s, kinds=(), device=self.device, seed=self.seed, shapes_may_fail=True)
        except Exception as error:  # the author's reference or inputs may raise anything
            reason = str(error) if isinstance(error, TiledschedError) else describe(error)
            if (same := re.sub(r"\d+", "N", reason)) not in self.reasons:
                self.reasons.add(same)
                self.refused.append(CheckRow(problem=p, schedule=s, passed=False, skipped=reason))
            return False
        return True

    def row(self, p: Problem, s: Schedule, kinds: Sequence[str], finder: SizeFinder) -> tuple[CheckRow, TileUses]:
        """What one schedule computes for one problem, and the tiles it took."""
        from tiledsched.checking.interpreted import check_schedule
        from tiledsched.interpreter.uses import TileUses

        uses = TileUses()
        self.done.add((p, s))
        self.values |= _values(s)
        passed, worst, message = check_schedule(
            self.kernel, p, s, seed=self.seed, kinds=kinds, device=self.device, uses=uses
        )
        tiles = finder.crossed(p, s, uses)
        return CheckRow(problem=p, schedule=s, passed=passed, worst_error=worst, message=message, tiles=tiles), uses

    def some_kinds(self) -> tuple[str, ...]:
        """The next kinds of inputs in turn."""
        self.turn += KINDS_IN_TURN
        return tuple(CHECK_KINDS[(self.turn + place) % len(CHECK_KINDS)] for place in range(KINDS_IN_TURN))

    def is_new(self, s: Schedule) -> bool:
        """Whether no schedule before was the same code: the same words and flags, and numbers alike in being 0, 1 or more."""
        structure = tuple(
            (name, min(value, 2) if type(value) is int else value)
            for name, value in sorted(s.items())
            if name not in HINT_KNOBS
        )
        before = len(self.structures)
        self.structures.add(structure)
        return len(self.structures) > before

    def drawn(self, problems: Sequence[Problem], *, every_value: bool) -> list[Schedule]:
        """Schedules that compute in different ways, the default first: as many as are wanted, or all that the space has.

        Each is the one that adds most values of knobs, then most pairs of values, to those before it. Schedules that differ in
        hints for the compiler are one here.
        """
        rng, distinct = random.Random(self.seed), dict[Any, Schedule]()
        for schedule in itertools.chain([self.space.default(problems[0])], self.pool(problems, rng, every_value)):
            distinct.setdefault(self.launched(problems[0], schedule), schedule)
        for problem in problems:  # a small space is walked to its end
            for schedule in itertools.islice(self.space.schedules(problem, rng=rng), MOST_WALKED * self.count):
                if len(distinct) >= self.count:
                    break
                distinct.setdefault(self.launched(problems[0], schedule), schedule)
        left, chosen = list(distinct.values()), list[Schedule]()
        single, pair = set[Any](), set[Any]()
        while left and len(chosen) < self.count:
            gains = [(len(_values(each) - single), len(_pairs(each) - pair)) for each in left]
            best = max(range(len(left)), key=gains.__getitem__) if chosen else 0
            chosen.append(left.pop(best))
            single |= _values(chosen[-1])
            pair |= _pairs(chosen[-1])
        return chosen

    def pool(self, problems: Sequence[Problem], rng: random.Random, every_value: bool) -> Iterator[Schedule]:
        """Schedules drawn from the space, and with `every_value` one with each value of each knob."""
        for problem in problems:
            for _ in range(MAX_DRAWS * self.count):
                with suppress(TiledschedError):
                    yield self.space.sample(problem, rng)
            for name, knob in self.space.knobs.items() if every_value else ():
                some = rng.sample(knob.choices, MOST_VALUES) if len(knob.choices) > MOST_VALUES else knob.choices
                for each in some if name not in HINT_KNOBS else ():
                    yield from itertools.islice(self.space.schedules(problem, pinned={name: each}, rng=rng), 1)

    def launched(self, p: Problem, s: Schedule) -> Any:
        """What a schedule launches: two that launch the same compute the same."""
        from tiledsched.core.launches import steps  # imports cuTile, before which a session prepares its process

        try:
            return tuple(
                (step.function, step.grid, tuple((each.name, repr(each.value)) for each in step.arguments))
                for step in steps(self.kernel, p, s, self.device)
            ) + tuple(spec.shapes for spec in self._scratch(p, s))
        except TiledschedError:
            return s

    def _scratch(self, p: Problem, s: Schedule) -> Iterable[Any]:
        return (
            self.kernel.array_spec(name, p, s)
            for name, each in self.kernel.array_fields.items()
            if each.role == "workspace"
        )


def _finder(kernel: KernelClass, space: SearchSpace, base: Problem) -> SizeFinder:
    from tiledsched.checking.sizes import SizeFinder

    return SizeFinder(kernel=kernel, space=space, base=base)


def _values(s: Schedule) -> set[Any]:
    return {(name, value) for name, value in s.items() if name not in HINT_KNOBS}


def _pairs(s: Schedule) -> set[Any]:
    values = sorted(_values(s))
    return {(one, two) for place, one in enumerate(values) for two in values[place + 1 :]}


def _kinds(kernel: KernelClass) -> list[list[Problem]]:
    """The suites' problems by kind: those that agree in all that is known when a kernel is compiled. Of a kind the smallest and
    the largest are kept beside the first, since constraints may allow them other schedules.

    A type, word or flag that no suite has is tried on the first problem. A kernel without suites gets a problem.
    """
    listed = problems_of(kernel, None if kernel.suites else _without_suites(kernel))
    kinds = [
        list(dict.fromkeys([some[0], min(some, key=_min_bytes), max(some, key=_min_bytes)]))
        for some in grouped((kernel.problem_kind(each), each) for each in listed).values()
    ]
    kinds = kinds[:: max(1, math.ceil(len(kinds) / MOST_KINDS))]
    for name, declared in kernel.fields.items():
        words = declared.words if isinstance(declared, Choice) else (False, True) if isinstance(declared, Flag) else ()
        for word in words:
            if all(problem.values[name] != word for some in kinds for problem in some):
                made = replaced(kernel, kinds[0][0], {name: word})
                kinds += [[made]] if made is not None else []
    return kinds


def _without_suites(kernel: KernelClass) -> list[Problem]:
    """A problem of a kernel that names none; empty where it takes none of the sizes tried."""
    for size in SIZES:
        values: dict[str, Any] = {
            name: (size, size // 2) if isinstance(each, Sizes) else size
            for name, each in kernel.fields.items()
            if isinstance(each, (Dim, Sizes)) and each.default is None
        }
        with suppress(TiledschedError):
            return [found] if (found := replaced(kernel, kernel.problem(**values), {})) is not None else []
    return []


def _min_bytes(p: Problem) -> int:
    return p.min_bytes
