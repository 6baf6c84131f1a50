"""The search space: knobs, their choices and the constraints between them.

A constraint is an expression over knob names, the problem's fields and the arch's limits; the same list decides what is
enumerated, what is sampled and what is accepted from a user. `tiledsched.core.space_files` reads spaces.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

from tiledsched.core.canonical import stable_id
from tiledsched.core.config import EXACT, INVARIANT
from tiledsched.core.errors import NoValidScheduleError, SpaceError
from tiledsched.core.fields import Knob
from tiledsched.core.groups import nested
from tiledsched.core.problem import Problem, missing_on
from tiledsched.core.registry import kernel_named
from tiledsched.core.schedule import KnobValue, Schedule

FEW_COMBINATIONS = 1 << 12
"""A constraint whose knobs have at most this many combinations is used to remove impossible values of single knobs."""
MOST_COMBINATIONS = 1 << 20
"""Constraints are worked out beforehand as long as their knobs have no more combinations than this in all. The others are only
checked after all of their knobs have values.
"""
MOST_LISTED, MOST_CELLS = 1 << 17, 1 << 26
"""Most schedules that are listed, and most schedules times choices of all knobs: of a larger space some are drawn at random."""
DRAWN = 1 << 11
"""Schedules that are drawn from a space that is too large to be listed."""
MOST_STEPS = 1 << 20
"""Steps without a valid schedule after which a walk over a space is given up: a value that is tried, or a constraint that is
checked late.
"""
MOST_NAMED = 32
"""Most choices of a knob that a message names."""
TRY_STEPS = 128
"""Steps that beginning another walk counts for."""
RACED, NOT_REACHED = "raced", "not reached within the limits of trials, time and expected gain"
"""Outcomes of a listed candidate: it took part, or its turn never came."""
LISTED_BEFORE, UNKNOWN = "listed before", "it names none of the knobs"
"""Why a row of a file is no candidate."""
_Tree: TypeAlias = "dict[KnobValue, _Tree]"


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A condition that every schedule must meet."""

    require: str
    """A Python-like expression over knobs, problem fields and limits."""
    because: str
    """The reason, for people whose schedule was refused."""
    exploring: bool
    """Whether the constraint only keeps the search small: a schedule that breaks it works, and may be forced."""
    names: frozenset[str]
    """The names that the expression reads."""

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the condition is met. `values` must have a value for every name that the expression reads."""
        names = tuple(self.names)
        try:
            return bool(function_of(self.require, names)(*[values[name] for name in names]))
        except (ArithmeticError, TypeError) as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> SpaceError:
        """The error for a constraint that cannot be evaluated: it divides by 0, or compares text with numbers."""
        return SpaceError(
            f"the constraint {self.require!r} cannot be evaluated: {error}; put a condition before it, as in "
            "k > 0 and m % k == 0"
        )


class WalkEndedError(SpaceError):
    """A walk over a space was given up before it was known whether there is another valid schedule."""


@dataclass
class Walk:
    """How long walks over a space may take before they find a schedule."""

    deadline_s: float = math.inf
    """The `time.monotonic()` at which they end."""
    left: int = MOST_STEPS
    """Steps that are left."""

    def step(self, count: int = 1) -> None:
        """Take some steps.

        Raises:
            WalkEndedError: there are none left, or no time.
        """
        self.left -= count
        if self.left < 0 or (self.left % 1024 < count and time.monotonic() > self.deadline_s):
            raise WalkEndedError(
                "no valid schedule was found in the time there is, or among as many combinations of its knobs as are tried; "
                "give knobs fewer choices, or write constraints that read fewer knobs each"
            )


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The knobs and constraints of one kernel on one arch."""

    kernel: str
    """Name of the kernel."""
    arch: str
    """The arch that the limits describe, e.g. sm_90."""
    knobs: Mapping[str, Knob]
    """The knobs by name, in the order written."""
    constraints: tuple[Constraint, ...]
    """The constraints. A schedule is valid if all of them hold."""
    limits: Mapping[str, int]
    """Numbers of the arch that constraints read, e.g. shared_memory_bytes."""
    source: str = ""
    """The file that the space was read from."""
    candidates: tuple[Schedule, ...] = ()
    """If there are candidates, only they and the default are searched. The rest of the space is still valid."""

    listed_in: str = ""
    """Where the candidates come from, for people."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Why other rows of that file are no candidates: each reason with the number of rows."""

    def limited_to(
        self,
        candidates: Iterable[Mapping[str, KnobValue]],
        listed_in: str = "",
        left_out: Mapping[str, int] | None = None,
    ) -> SearchSpace:
        """The space of which only `candidates` and the default are searched.

        Knobs that a candidate does not name are at their defaults. A candidate that cannot work for a problem is skipped there.
        Constraints on what is explored do not exclude candidates.

        Raises:
            SpaceError: a candidate has an unknown knob.
        """
        listed = []
        for each in candidates:
            unknown = sorted(set(each) - set(self.knobs))
            if unknown:
                raise SpaceError(f"candidate {dict(each)} has unknown knobs {unknown}; known are {list(self.knobs)}")
            listed.append(Schedule({name: each.get(name, knob.default) for name, knob in self.knobs.items()}))
        once = tuple(dict.fromkeys(listed))
        others = Counter(left_out or {}) + Counter({LISTED_BEFORE: len(listed) - len(once)})
        return replace(self, candidates=once, listed_in=listed_in, left_out=others)

    def count_candidates(
        self, problem: Problem, pinned: Mapping[str, KnobValue], tried: Mapping[Schedule, str]
    ) -> dict[str, int]:
        """What became of each row of the file of candidates: the number of rows with each outcome, :data:`RACED` or why not.

        Args:
            problem: what was tuned.
            pinned: knobs that had a fixed value.
            tried: what became of the schedules that were reached: :data:`RACED`, or how they failed.
        """
        found = Counter(self.left_out)
        for each in self.candidates:
            reasons = self.unworkable(each, problem) or [
                f"{name} = {each[name]!r}, where this run keeps {value!r}"
                for name, value in pinned.items()
                if each[name] != value
            ]
            found[reasons[0] if reasons and each not in tried else tried.get(each, NOT_REACHED)] += 1
        return dict(found)

    def including(self, schedules: Iterable[Schedule]) -> SearchSpace:
        """The space with `schedules` among its candidates, if it is limited to candidates."""
        if not self.candidates:
            return self
        return replace(self, candidates=tuple(dict.fromkeys([*self.candidates, *schedules])))

    @property
    def id(self) -> str:
        """Stable id of what the space allows. The name of its file is not part of it."""
        return stable_id(
            {
                "kernel": self.kernel,
                "arch": self.arch,
                "limits": dict(self.limits),
                "knobs": {name: [list(knob.choices), knob.default] for name, knob in self.knobs.items()},
                "constraints": sorted(constraint.require for constraint in self.constraints),
            }
        )

    @cached_property
    def needed(self) -> tuple[Constraint, ...]:
        """The constraints that exclude schedules that cannot work. The others only bound what is explored."""
        return tuple(each for each in self.constraints if not each.exploring)

    def constraint_values(self, problem: Problem) -> dict[str, Any]:
        """What constraints may read apart from knobs: the problem's fields, what is derived from them, and the arch's limits.

        Raises:
            NoValidScheduleError: cuTile compiles no kernel of the problem for the arch.
        """
        if missing := missing_on(self.arch, problem):
            raise NoValidScheduleError(f"no schedule works for {problem}: {missing}")
        return problem.names | dict(self.limits)

    def unworkable(self, schedule: Schedule, problem: Problem) -> list[str]:
        """Every reason why `schedule` cannot work for `problem`. A schedule that is only not explored works."""
        if self._allows(schedule) and self._works(self.constraint_values(problem) | dict(schedule.items())):
            return []
        return self.violations(schedule, problem, needed=True)

    @cached_property
    def _choices(self) -> dict[str, frozenset[tuple[type, KnobValue]]]:
        """Knob -> its values, each with its type, which tells True from 1."""
        return {name: frozenset((type(each), each) for each in knob.choices) for name, knob in self.knobs.items()}

    def _allows(self, schedule: Schedule) -> bool:
        """Whether the schedule has exactly the knobs of the space, each at one of its values."""
        choices = self._choices
        return len(schedule) == len(choices) and all(
            name in choices and (type(value), value) in choices[name] for name, value in schedule.items()
        )

    @cached_property
    def _works(self) -> Callable[[Mapping[str, Any]], bool]:
        """One function that tells whether all of :attr:`needed` hold. A constraint that cannot be evaluated does not hold."""
        names = tuple(sorted(frozenset().union(*(each.names for each in self.needed))))
        joined = function_of(" and ".join(f"({each.require}\n)" for each in self.needed) or "True", names)

        def works(values: Mapping[str, Any]) -> bool:
            try:
                return bool(joined(*[values[name] for name in names]))
            except (ArithmeticError, TypeError):
                return False

        return works

    @cached_property
    def _verdicts(self) -> Callable[[Mapping[str, Any]], tuple[bool, ...]]:
        """One function that tells of each constraint whether it holds, ten times as fast as asking them one by one."""
        names = tuple(sorted(frozenset().union(*(each.names for each in self.constraints))))
        joined = function_of("(" + "".join(f"({each.require}\n), " for each in self.constraints) + ")", names)
        return lambda values: joined(*[values[name] for name in names])

    def violations(self, schedule: Schedule, problem: Problem, *, needed: bool = False) -> list[str]:
        """Every reason why `schedule` is not in this space for `problem`; empty for a valid schedule. With `needed`, only the
        reasons why it cannot work.
        """
        reasons = []
        for name, knob in self.knobs.items():
            if name not in schedule:
                reasons.append(f"knob {name!r} is missing; allowed values are {some_of(knob.choices)}")
            elif (type(schedule[name]), schedule[name]) not in self._choices[name]:
                reasons.append(f"{name} = {schedule[name]!r} is not one of {some_of(knob.choices)}")
        unknown = sorted(set(schedule) - set(self.knobs))
        if unknown:
            reasons.append(f"unknown knobs {unknown}; known are {list(self.knobs)}")
        if reasons:
            return reasons
        values = self.constraint_values(problem) | dict(schedule.items())
        try:
            held: Iterable[bool] = self._verdicts(values)
        except (ArithmeticError, TypeError):  # of one that cannot be evaluated; which one, only they tell
            held = ((needed and each.exploring) or each.holds(values) for each in self.constraints)
        return [
            f"{each.require}: {each.because}"
            for each, holds in zip(self.constraints, held, strict=True)
            if not (holds or (needed and each.exploring))
        ]

    @property
    def most_listed(self) -> int:
        """Most of its schedules that are listed, and searched."""
        return min(MOST_LISTED, MOST_CELLS // sum(len(knob.choices) for knob in self.knobs.values()))

    def listed(
        self, problem: Problem, *, pinned: Mapping[str, KnobValue] | None = None, deadline_s: float = math.inf
    ) -> tuple[list[Schedule], bool]:
        """Every valid schedule in the order of :meth:`schedules`, and whether they are all. Of a space that holds more than
        :attr:`most_listed`, or that takes too long to list, they are some, most of them drawn at random, and the same ones each
        time there is time enough.

        Args:
            problem: the problem, which constraints may read.
            pinned: knobs that have a fixed value.
            deadline_s: the `time.monotonic()` at which listing ends.
        """
        now = time.monotonic()
        most, found, half_s = self.most_listed, list[Schedule](), now + (deadline_s - now) / 2
        with suppress(WalkEndedError):
            for each in self.schedules(problem, pinned=pinned, walk=Walk(half_s)):
                found.append(each)
                if len(found) > most or time.monotonic() > half_s:
                    break
            else:
                return found, True
        rng, drawn, walk = random.Random(0), dict[Schedule, None](), Walk(deadline_s)
        with suppress(WalkEndedError):
            for _ in range(2 * DRAWN):
                if len(drawn) >= min(most, DRAWN) or time.monotonic() > deadline_s:
                    break
                drawn |= dict.fromkeys(itertools.islice(self.schedules(problem, pinned=pinned, rng=rng, walk=walk), 1))
        return list(dict.fromkeys([*drawn, *found]))[: min(most, DRAWN)], False

    def schedules(
        self,
        problem: Problem,
        *,
        pinned: Mapping[str, KnobValue] | None = None,
        rng: random.Random | None = None,
        walk: Walk | None = None,
    ) -> Iterator[Schedule]:
        """Yield every valid schedule in a fixed order: knobs vary in the order written, the last one fastest.

        Args:
            problem: the problem, which constraints may read.
            pinned: knobs that have a fixed value.
            rng: draws the order of each knob's values instead, anew at each turn.
            walk: how long to look for the next schedule.

        Raises:
            WalkEndedError: no other schedule was found in that time, and there may be more.
        """
        pinned, walk = dict(Schedule(pinned or {})), walk or Walk()
        values = self.constraint_values(problem)
        if self.candidates:
            listed = dict.fromkeys([self.default(problem, pinned=pinned), *self.candidates])
            yield from (
                each
                for each in listed
                if all(each[name] == value for name, value in pinned.items()) and not self.unworkable(each, problem)
            )
            return
        possible = self._possible(
            {name: (pinned[name],) if name in pinned else knob.choices for name, knob in self.knobs.items()}, values
        )
        values |= {name: each[0] for name, each in possible.items() if len(each) == 1}
        choices = {name: each for name, each in possible.items() if len(each) != 1}
        names = list(choices)
        # walked[i]: for each constraint that reads knob i, where the knobs before have led in its tree, and how many it reads.
        walked: list[list[tuple[list[_Tree], int]]] = [[] for _ in names]
        late: list[list[Constraint]] = [[] for _ in names]
        combinations = 0
        for constraint in self.constraints:
            read = tuple(name for name in names if name in constraint.names)
            more = math.prod(len(choices[name]) for name in read)
            if not read:
                if not constraint.holds(values):
                    return
            elif combinations + more <= MOST_COMBINATIONS and time.monotonic() <= walk.deadline_s:
                combinations += more
                tree = _tree(*_bound(constraint, choices, values))
                if tree is not None:
                    choices[read[0]] = tuple(each for each in choices[read[0]] if each in tree)
                    path = [tree] * (len(read) + 1)
                    for count, name in enumerate(read):
                        walked[names.index(name)].append((path, count))
            else:
                late[names.index(read[-1])].append(constraint)

        if not names:
            yield Schedule({name: values[name] for name in self.knobs})
        in_order = sorted(self.knobs)

        def values_of(index: int) -> Iterator[KnobValue]:
            listed = choices[names[index]]
            return iter(listed if rng is None else rng.sample(listed, len(listed)))

        untried = [values_of(0)] if names else []
        while untried:
            index = len(untried) - 1
            for choice in untried[-1]:
                walk.step(1 + len(late[index]))
                for path, count in walked[index]:
                    branch = path[count].get(choice)
                    if branch is None:
                        break
                    path[count + 1] = branch
                else:
                    values[names[index]] = choice
                    if late[index] and not all(constraint.holds(values) for constraint in late[index]):
                        continue
                    if index + 1 < len(names):
                        untried.append(values_of(index + 1))
                        break
                    walk.left = MOST_STEPS
                    yield Schedule.of_checked({name: values[name] for name in in_order})
            else:
                untried.pop()

    def neighbours(
        self, schedule: Schedule, problem: Problem, *, pinned: Container[str] = (), changes: int = 2
    ) -> Iterator[Schedule]:
        """Yield every schedule that can work for `problem` and differs from `schedule` in at most `changes` knobs, fewest first.

        Schedules that are not explored are included. Knobs in `pinned` are not changed, and `pdl` is changed alone: how launches
        overlap says little of what else is fast.
        """
        others = {
            name: [choice for choice in knob.choices if choice != schedule[name]]
            for name, knob in self.knobs.items()
            if name not in pinned
        }
        for count in range(1, changes + 1):
            names = (name for name in others if count == 1 or name != "pdl")
            for changed in itertools.combinations(names, count):
                for choices in itertools.product(*(others[name] for name in changed)):
                    found = schedule.replace(**dict(zip(changed, choices, strict=True)))
                    if not self.unworkable(found, problem):
                        yield found

    def _possible(
        self, choices: Mapping[str, tuple[KnobValue, ...]], values: Mapping[str, Any]
    ) -> dict[str, tuple[KnobValue, ...]]:
        """The choices of each knob without the values that a constraint excludes whatever the other knobs are.

        Knobs made for other problems often have one value left, so that enumerating and sampling try no others.
        """
        left = dict(choices)
        before = 0
        while before != (before := sum(map(len, left.values()))):
            for constraint in self.constraints:
                read = tuple((name, left[name]) for name in left if name in constraint.names)
                if read and math.prod(len(each) for _, each in read) <= FEW_COMBINATIONS:
                    others = tuple((name, value) for name, value in values.items() if name in constraint.names)
                    left.update(_left_by(constraint, read, others))
        return left

    def sample(self, problem: Problem, rng: random.Random) -> Schedule:
        """A valid schedule drawn at random. Every schedule may be drawn, not all with the same probability.

        One knob's value is drawn first, so that values which few schedules have are drawn, too. The others follow in order.

        Raises:
            SpaceError: there is no valid schedule.
        """
        if self.candidates:
            return rng.choice(list(self.schedules(problem)))
        values = [(name, choice) for name, knob in self.knobs.items() for choice in knob.choices]
        walk = Walk()
        for name, choice in rng.sample(values, len(values)):
            walk.step(TRY_STEPS)
            found = next(self.schedules(problem, pinned={name: choice}, rng=rng, walk=walk), None)
            if found is not None:
                return found
        raise self._nothing_valid(problem)

    def _nothing_valid(self, problem: Problem) -> SpaceError:
        left = MOST_COMBINATIONS
        for each in self.constraints:  # one that alone excludes everything is to blame
            read = {name: knob.choices for name, knob in self.knobs.items() if name in each.names}
            left -= math.prod(map(len, read.values()))
            few = left >= 0
            if few and not _allowed(*_bound(each, read, self.constraint_values(problem))):
                return SpaceError(
                    f"{self.source or self.arch} holds no valid schedule for {problem}: no choice of "
                    f"{' and '.join(read) or 'any knob'} meets {each.require!r} ({each.because}); relax its constraints"
                )
        return SpaceError(f"{self.source or self.arch} holds no valid schedule for {problem}; relax its constraints")

    def modelled_pins(self) -> dict[str, KnobValue]:
        """The knobs whose effect only a measurement shows, at their defaults. They stay there where nothing is measured."""
        return {name: knob.default for name, knob in self.knobs.items() if knob.measured_only}

    def complete(self, schedule: Schedule) -> Schedule:
        """A schedule of an earlier version as this version writes it, so that it still says which program was measured.

        Knobs that it lacks are at their defaults, which is what the kernel did before it had them. Values that were renamed have
        today's names, and knobs that are gone are left out where they made no difference.
        """
        found = self._completed.get(schedule)
        if found is None:
            found = self._completed[schedule] = self._complete(schedule)
        return found

    @cached_property
    def _completed(self) -> dict[Schedule, Schedule]:
        """Schedules and what :meth:`complete` makes of them: a table holds the same few hundred many times."""
        return {}

    def _complete(self, schedule: Schedule) -> Schedule:
        kernel = kernel_named(self.kernel)
        values, gone = kernel.former_values, kernel.former_knobs
        if schedule.keys() == self.knobs.keys() and not any(
            name in schedule and type(schedule[name]) is bool for name, _ in values
        ):
            return schedule
        known = {
            name: values.get((name, value), value) if type(value) is bool else value
            for name, value in schedule.items()
            if value not in gone.get(name, ())
        }
        return Schedule({name: knob.default for name, knob in self.knobs.items()} | known)

    def default(self, problem: Problem, *, pinned: Mapping[str, KnobValue] | None = None) -> Schedule:
        """The default schedule for `problem`: every knob at its default, or the nearest valid schedule.

        Defaults are written for common problems. If they break a constraint (a tile may be too large for a wide head), the
        default is the valid schedule with the fewest changed knobs, the first one in the order of enumeration; where that takes
        more than :data:`MOST_STEPS`, the first one of all. Knobs in `pinned` have the given value instead of their default.

        Raises:
            SpaceError: the space holds no valid schedule for this problem, or none was found among as many combinations as are
                tried.
        """
        if self.candidates:
            return replace(self, candidates=()).default(problem, pinned=pinned)
        pinned = dict(pinned or {})
        wanted = Schedule({name: knob.default for name, knob in self.knobs.items()} | pinned)
        if not self.violations(wanted, problem):
            return wanted
        free = [name for name in self.knobs if name not in pinned]
        walk = Walk()
        possible = next(self.schedules(problem, pinned=pinned, walk=walk), None)
        if possible is None:
            raise self._nothing_valid(problem)
        with suppress(WalkEndedError):
            for changed in itertools.chain.from_iterable(
                itertools.combinations(free, changes) for changes in range(1, len(free) + 1)
            ):
                walk.step(TRY_STEPS)
                rest = {name: wanted[name] for name in self.knobs if name not in changed}
                found = next(self.schedules(problem, pinned=rest, walk=walk), None)
                if found is not None:
                    return found
        return possible


@lru_cache(maxsize=4096)
def function_of(expression: str, names: tuple[str, ...]) -> Callable[..., Any]:
    """An expression that was checked when it was read, as a function of the names it reads. It may end with a comment."""
    return eval(f"lambda {', '.join(names)}: ({expression}\n)", {"__builtins__": {}})


@lru_cache(maxsize=4096)
def _lister(
    expression: str, names: tuple[str, ...], others: tuple[str, ...]
) -> Callable[..., list[tuple[KnobValue, ...]]]:
    """A function that lists the combinations of the choices of `names` for which an expression holds.

    Its arguments are the choices of each of `names` and the values of `others`, which the expression also reads.

    It is one comprehension: a function call for each of a million combinations takes twice as long.
    """
    loops = " ".join(f"for {name} in {name}_choices" for name in names)
    parameters = ", ".join([*(f"{name}_choices" for name in names), *others])
    return eval(f"lambda {parameters}: [({', '.join(names)},) {loops} if ({expression}\n)]", {"__builtins__": {}})


def _bound(
    constraint: Constraint, choices: Mapping[str, tuple[KnobValue, ...]], values: Mapping[str, Any]
) -> tuple[Constraint, tuple[tuple[str, tuple[KnobValue, ...]], ...], tuple[tuple[str, Any], ...]]:
    """The arguments of the cached functions below: a constraint, and what it reads of `choices` and of `values`.

    Most constraints read little of a problem, so that the answer for one problem serves for others.
    """
    return (
        constraint,
        tuple((name, values) for name, values in choices.items() if name in constraint.names),
        tuple((name, value) for name, value in values.items() if name in constraint.names),
    )


@lru_cache(maxsize=128)
def _allowed(
    constraint: Constraint, choices: tuple[tuple[str, tuple[KnobValue, ...]], ...], others: tuple[tuple[str, Any], ...]
) -> list[tuple[KnobValue, ...]]:
    """The combinations of `choices` for which `constraint` holds; `others` are the other values that it reads."""
    list_them = _lister(constraint.require, tuple(name for name, _ in choices), tuple(name for name, _ in others))
    try:
        return list_them(*(each for _, each in choices), *(value for _, value in others))
    except (ArithmeticError, TypeError) as error:
        raise constraint.failed(error) from error


@lru_cache(maxsize=1024)
def _tree(
    constraint: Constraint, choices: tuple[tuple[str, tuple[KnobValue, ...]], ...], others: tuple[tuple[str, Any], ...]
) -> _Tree | None:
    """The values that the knobs of a constraint may have, as a tree: each value of a knob leads to those of the next.

    None if the constraint allows every combination. Equal branches are one object, so that a tree of many combinations is small.
    """
    combinations = _allowed(constraint, choices, others)
    if len(combinations) == math.prod(len(each) for _, each in choices):
        return None
    known: dict[tuple[tuple[KnobValue, int], ...], _Tree] = {}
    leaf: _Tree = {}
    branches = dict.fromkeys(combinations, leaf)
    for count in range(len(choices) - 1, -1, -1):
        joined = nested((combination[:count], combination[count], branch) for combination, branch in branches.items())
        branches = {
            combination: known.setdefault(tuple((choice, id(after)) for choice, after in branch.items()), branch)
            for combination, branch in joined.items()
        }
    return branches.get((), {})


@lru_cache(maxsize=4096)
def _left_by(
    constraint: Constraint, choices: tuple[tuple[str, tuple[KnobValue, ...]], ...], others: tuple[tuple[str, Any], ...]
) -> dict[str, tuple[KnobValue, ...]]:
    """The choices of the knobs that `constraint` reads, without the values for which it never holds."""
    found = [set(column) for column in zip(*_allowed(constraint, choices, others), strict=True)] or [
        set() for _ in choices
    ]
    return {
        name: tuple(choice for choice in each if choice in seen)
        for (name, each), seen in zip(choices, found, strict=True)
    }


def some_of(choices: Sequence[KnobValue]) -> str:
    """Choices as a list for people; of many, the first, and how many there are."""
    more = f" and {len(choices) - MOST_NAMED:,} more" if len(choices) > MOST_NAMED else ""
    return f"{list(choices[:MOST_NAMED])}{more}"


def contains(choices: Sequence[KnobValue], value: object) -> bool:
    """Whether `value` is one of `choices`, where True is not 1."""
    return any(type(choice) is type(value) and choice == value for choice in choices)


def accuracy_class(space: SearchSpace, accum_mode: str) -> dict[str, KnobValue]:
    """The knobs that an accuracy class fixes; none if the kernel has only one class."""
    return {"accum_mode": EXACT if accum_mode == INVARIANT else accum_mode} if "accum_mode" in space.knobs else {}
