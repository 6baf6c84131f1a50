"""Schedules of a kernel, run on the CPU in the interpreter and compared with the kernel's reference."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiledsched.core.cases import CHECK_KINDS, replaced
from tiledsched.core.errors import TiledschedError
from tiledsched.core.fields import Choice, Dim, Flag, Sizes
from tiledsched.core.launch import steps
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import HINT_KNOBS, Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.core.space_files import load_space, space_for
from tiledsched.tuning.options import CheckOptions
from tiledsched.tuning.problems import Cases, kernel_of, problems_of

if TYPE_CHECKING:
    from tiledsched.interpreter.launch import SmallDevice
    from tiledsched.interpreter.uses import TileUses
    from tiledsched.tuning.check_sizes import SizeFinder

MAX_DRAWS = 3
"""Draws from the space for each schedule wanted: those that cover most are taken."""
MULTIPROCESSORS = 2
"""Of the device that grids are made for: so few that persistent blocks take several work tiles."""
KINDS_IN_TURN = 2
"""Kinds of inputs, beside random ones, of a schedule that is like one checked before; others have all kinds."""
MOST_KINDS = 6
"""Kinds of problems of the suites that are checked."""
WORK = 100_000
"""Work after which no more schedules are checked that only repeat what was covered; a unit is one call of a `ct.*` function on
a small tile, about 12 microseconds."""
SIZES = (1024, 4096, 128, 16, 2)
"""Values of the sizes of a kernel that names no problem: the first that it allows."""
LONG_KINDS = ("cancelling",)
"""Kinds of inputs, beside random ones, on sizes of many tiles: those whose sums are the larger the longer they are."""
CALL_ELEMENTS = 5000
"""Elements of tiles that cost as much as one call."""
CASE_ELEMENTS = 300
"""Elements of the arrays that cost one unit of work for each kind of inputs: they are drawn, computed and compared."""
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
    worst_error: float
    """Largest error of a tile; infinite where something was not written, NaN, or the kernel raised."""
    message: str
    """Why it did not pass; empty where it did."""
    tiles: dict[str, int] = field(default_factory=dict)
    """Size of the problem -> how many tiles of it were taken."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "problem": self.problem.to_json(),
            "schedule": self.schedule.to_json(),
            "passed": self.passed,
            "worst_error": self.worst_error,
            "message": self.message,
            "tiles": self.tiles,
        }


def check_problems(
    arch: str,
    kernel: KernelClass | str,
    problems: Cases | str | None,
    options: CheckOptions,
    progress: Callable[[str], None] | None = None,
) -> Iterator[CheckRow]:
    """A row for each schedule of each problem, as it is known; see :func:`tiledsched.check`.

    Without `problems`, and where the kernel names no small ones, sizes follow from the tiles that each schedule takes.
    """
    kernel = kernel_of(kernel)
    small = [kernel.as_problem(each) for each in kernel.small()] if kernel.small is not None else None
    given = problems_of(kernel, problems) if problems is not None else small
    space = load_space(options.space, kernel) if options.space else space_for(arch, kernel)
    check = _Check(kernel, space, arch, options, progress or (lambda text: None))
    yield from check.given(list(given)) if given is not None else check.found(_kinds(kernel))


class _Check:
    """One check of a kernel."""

    def __init__(
        self, kernel: KernelClass, space: SearchSpace, arch: str, options: CheckOptions, progress: Callable[[str], None]
    ) -> None:
        from tiledsched.interpreter.launch import SmallDevice

        self.kernel, self.space, self.arch, self.options, self.progress = kernel, space, arch, options, progress
        self.device: SmallDevice = SmallDevice(sm_count=MULTIPROCESSORS, arch=arch)
        self.work = 0.0
        self.turn = 0
        self.structures: set[Any] = set()
        self.done: set[tuple[Problem, Schedule]] = set()

    def given(self, problems: Sequence[Problem]) -> Iterator[CheckRow]:
        """Problems of given sizes."""
        for problem in problems:
            drawn, _ = self.drawn([problem], every_value=False)
            for place, schedule in enumerate(drawn):
                self.progress(f"{problem}: schedule {place + 1} of {len(drawn)}")
                kinds = CHECK_KINDS if self.is_new(schedule) or place == 0 else self.some_kinds()
                yield self.row(problem, schedule, kinds, _finder(self.kernel, self.space, problem))[0]

    def found(self, kinds: Sequence[list[Problem]]) -> Iterator[CheckRow]:
        """Problems whose sizes follow from the tiles that schedules take of them."""
        plans = [(_finder(self.kernel, self.space, bases[0]), *self.drawn(bases, every_value=True)) for bases in kinds]
        for place in range(max((len(drawn) for _, drawn, _ in plans), default=0)):
            for finder, drawn, needed in plans:
                if place < len(drawn) and (place < needed or self.work < WORK):
                    self.progress(f"{finder.base}: schedule {place + 1} of {len(drawn)}: {drawn[place].short()}")
                    yield from self.schedule(finder, drawn[place], first=place == 0)

    def schedule(self, finder: SizeFinder, s: Schedule, *, first: bool) -> Iterator[CheckRow]:
        """One schedule: on a problem smaller than its tiles, on some tiles, on many, and the first also on whole tiles."""
        new = self.is_new(s)
        if self.space.unworkable(s, finder.small):
            return
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
        others = [finder.sized(s, more, whole=True)] if first else []
        if new:
            others += [self.long(finder, s, more, name) for name in row.tiles]
        for other in others:
            if (other, s) not in self.done and self.fits(other, s):
                yield self.row(other, s, LONG_KINDS, finder)[0]

    def long(self, finder: SizeFinder, s: Schedule, uses: TileUses, name: str) -> Problem:
        """The problem with one size so long that each of the blocks which share it has a loop of some steps.

        How many share it is a number among the knobs, or the number of blocks where that does not grow with the size.
        """
        sides = {side for some in uses.places.values() for side in some}
        shares = [value for knob, value in s.items() if type(value) is int and knob not in HINT_KNOBS]
        share = max((value for value in shares if value <= LONGEST_LOOP and value not in sides), default=1)
        one, two = (finder.sized(s, uses, long=name, tiles=tiles) for tiles in (4 * LONGEST_LOOP, 8 * LONGEST_LOOP))
        with suppress(TiledschedError):
            blocks = [math.prod(self.kernel.grids(each, s, self.device)[0]) for each in (one, two)]
            share = max(share, blocks[0] if one != two and blocks[0] == blocks[1] else 1)
        return finder.sized(s, uses, long=name, tiles=2 * min(max(share, 2), LONGEST_LOOP) + 1)

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
        """Whether the reference takes a problem and cuTile would compile the kernel for it. A wrong result fits."""
        from tiledsched.interpreter.checking import check_schedule

        try:
            check_schedule(
                self.kernel, p, s, kinds=(), device=self.device, seed=self.options.seed, shapes_may_fail=True
            )
        except Exception:  # the author's reference or inputs may raise anything
            return False
        return True

    def row(self, p: Problem, s: Schedule, kinds: Sequence[str], finder: SizeFinder) -> tuple[CheckRow, TileUses]:
        """What one schedule computes for one problem, and the tiles it took."""
        from tiledsched.interpreter.checking import check_schedule
        from tiledsched.interpreter.uses import TileUses

        uses = TileUses()
        self.done.add((p, s))
        passed, worst, message = check_schedule(
            self.kernel, p, s, seed=self.options.seed, kinds=kinds, device=self.device, uses=uses
        )
        elements = sum(math.prod(shape) for spec in self.kernel.arrays(p) for shape in spec.shapes)
        self.work += uses.calls + uses.elements / CALL_ELEMENTS + (1 + len(kinds)) * elements / CASE_ELEMENTS
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

    def drawn(self, problems: Sequence[Problem], *, every_value: bool) -> tuple[list[Schedule], int]:
        """Schedules that compute in different ways, the default first, and how many it takes to have every value of every knob.

        Each is the one that adds most values of knobs, then most pairs of values, to those before it. Schedules that differ in
        hints for the compiler are one here.
        """
        rng, count = random.Random(self.options.seed), self.options.schedules
        pool = [self.space.default(problems[0])]
        for problem in problems:
            for _ in range(MAX_DRAWS * count):
                with suppress(TiledschedError):
                    pool.append(self.space.sample(problem, rng))
            for name, knob in self.space.knobs.items() if every_value else ():
                missing = [choice for choice in knob.choices if all(each[name] != choice for each in pool)]
                found = (next(self.space.schedules(problem, pinned={name: each}, rng=rng), None) for each in missing)
                pool += filter(None, found if name not in HINT_KNOBS else ())
        distinct: dict[Any, Schedule] = {}
        for schedule in pool:
            distinct.setdefault(self.launched(problems[0], schedule), schedule)
        left, chosen, needed = list(distinct.values()), list[Schedule](), 0
        single, pair = set[Any](), set[Any]()
        while left and len(chosen) < count:
            gains = [(len(_values(each) - single), len(_pairs(each) - pair)) for each in left]
            best = max(range(len(left)), key=gains.__getitem__) if chosen else 0
            chosen.append(left.pop(best))
            if gains[best][0] or not needed:
                needed = len(chosen)
            single |= _values(chosen[-1])
            pair |= _pairs(chosen[-1])
        return chosen, needed

    def launched(self, p: Problem, s: Schedule) -> Any:
        """What a schedule launches: two that launch the same compute the same."""
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
    from tiledsched.tuning.check_sizes import SizeFinder

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
    by_kind: dict[Any, list[Problem]] = {}
    for each in problems_of(kernel, None if kernel.suites else _without_suites(kernel)):
        by_kind.setdefault(kernel.problem_kind(each), []).append(each)
    kinds = [
        list(dict.fromkeys([some[0], min(some, key=_min_bytes), max(some, key=_min_bytes)]))
        for some in by_kind.values()
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
