"""The tune of `--numerics invariant`: one order of sums for all sizes of a kernel's batch dims, and what it costs.

Kernels claim which schedules sum in the same order. Digests of rows on the GPU show which claims hold, and which orders come to
the same bits: those are one group. Schedules of each group race at each size. The group is kept that loses least against the
fastest schedule of any group, by geometric mean over the sizes; its schedules are proven at sizes between those that raced, too.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.similarity import batch_distance
from tiledsched.measure.runner import Failed, Measurement, RowRunner
from tiledsched.store.records import BATCH_INVARIANT
from tiledsched.tuning.prior import estimator
from tiledsched.tuning.results import TuneResult
from tiledsched.tuning.search import LOOKS, ProblemSearch, TuneContext

PROBED = (1, 2, 3, 16, 17, 63, 64, 65, 128, 512, 2048)
"""Sizes of batch dims at which the bits of rows are compared, beside those that race."""
MOST_ORDERS, MOST_GROUPS, MOST_FINALISTS = 32, 4, 2
"""Orders whose bits are compared at least, where there are so many; groups that race; and groups that race again."""
BASES = 4
"""Schedules of each size, the most promising ones, from which others of other orders are made that differ in one knob."""
HOPELESS_RATIO = 3.0
"""What takes this many times as long as the fastest schedule is not raced: all schedules of a group may be slow at some sizes."""
Losses = dict[Problem, dict[Schedule, float]]
"""For each size and schedule of a group, how many times as long it takes as the fastest schedule of any group."""


class InvariantTune:
    """Tunes problems that differ in their batch dims alone; see :class:`TuneContext` for what they share with other tunes."""

    def __init__(self, tuner: TuneContext, runner: RowRunner, problems: Iterable[Problem], deadline_s: float) -> None:
        self.tuner, self.runner, self.deadline_s, self.started = tuner, runner, deadline_s, time.monotonic()
        self.builder, self.space, self.kernel, self.watcher = (
            tuner.builder,
            tuner.space,
            tuner.builder.kernel,
            tuner.watcher,
        )
        self.searches = {each: ProblemSearch(tuner, runner, each, deadline_s) for each in sorted(problems)}
        self.estimates = {p: estimator(p, search.spec) for p, search in self.searches.items()}
        self.compiled = 0
        self.groups: dict[Hashable, str] = {}
        """By the order that schedules claim, the name of their group, a digest; empty for one that does not run."""

    def run(self) -> list[TuneResult]:
        """Race, prove, and store the group that loses least.

        Raises:
            NoValidScheduleError: nothing works at some size.
            MeasureError: the GPU is not alone, or no group gives equal bits at all sizes.
        """
        tried = {p: self.candidates(search) for p, search in self.searches.items()}
        self.find_groups(tried)
        times = self.measure(self.promising(tried))
        if self.tuner.most_programs:
            times = self.measure(self.nearby(times))
        for of in self.losses(times):
            if chosen := self.proven(of):
                return [self.store(p, chosen, of, times[p], len(tried[p])) for p in self.searches]
        raise MeasureError(
            f"no group of schedules gives {next(iter(times))} and its other sizes equal bits; tune with --numerics any"
        )

    def measure(self, racing: Mapping[Problem, Iterable[Schedule]]) -> dict[Problem, dict[Schedule, Measurement]]:
        """Build what races at each size, and race it."""
        listed = {p: list(dict.fromkeys(schedules)) for p, schedules in racing.items()}
        wanted = [(each, p) for p, schedules in listed.items() for each in schedules]
        self.watcher.stage(wanted[0][1], "compiling", len(wanted))
        self.compiled += self.builder.build_for_each(wanted, progress=lambda done, _: self.watcher.step(done))
        return {p: self.race(p, schedules) for p, schedules in listed.items()}

    def losses(self, times: Mapping[Problem, Mapping[Schedule, Measurement]]) -> list[Losses]:
        """Those of each group that has a time at every size, the cheapest group first."""
        found: dict[str, Losses] = defaultdict(lambda: defaultdict(dict))
        for p, taken in times.items():
            best_us = min(each.median_us for each in taken.values())
            for schedule, each in taken.items():
                found[self.group(schedule, p)][p][schedule] = each.median_us / best_us
        return sorted((of for group, of in found.items() if group and len(of) == len(times)), key=_price)

    def nearby(self, times: Mapping[Problem, Mapping[Schedule, Measurement]]) -> dict[Problem, list[Schedule]]:
        """What races again at each size: the fastest schedule, the fastest of the cheapest groups, and what differs little from
        those, also where no other search looks."""
        racing = {p: [min(taken, key=lambda each: taken[each].median_us)] for p, taken in times.items()}
        for of in self.losses(times)[:MOST_FINALISTS]:
            for p, losses in of.items():
                best = sorted(losses, key=lambda each: (losses[each], each.id))[:BASES]
                others = {n: None for each in best for n in self.space.neighbours(each, p, pinned=self.tuner.pinned)}
                near = [each for each in others if self.group(each, p) == self.group(best[0], p)]
                racing[p] += [*best, *self.by_time(p, near)[: self.tuner.most_programs // MOST_FINALISTS]]
        return racing

    def candidates(self, search: ProblemSearch) -> list[Schedule]:
        """Schedules of one size that have an order, the most promising first: those like what is served, what differs from it or
        from the model's favourites in one knob, and what the model likes."""
        p, pinned, ordered = search.problem, self.tuner.pinned, self.kernel.ordered
        search.incumbents = search.find_incumbents(self.runner.device_name)
        listed, _ = self.space.listed(p, pinned=pinned | self.space.modelled_pins(), deadline_s=search.listed_s())
        by_time = self.by_time(p, listed)
        bases = [*search.incumbents, *search.winners_elsewhere(), *by_time[:BASES]]
        near = {ordered(p, each): None for base in bases for each in self.one_knob_away(base, p)}
        like_served = [ordered(p, each) for each in search.incumbents]
        found = dict.fromkeys([*like_served, *self.by_time(p, near), *(ordered(p, each) for each in by_time)])
        return [each for each in found if self.order(each, p) is not None and not self.space.unworkable(each, p)]

    def by_time(self, p: Problem, schedules: Iterable[Schedule]) -> list[Schedule]:
        """Schedules in the order of their modelled times."""
        estimate = self.estimates[p]
        return sorted(schedules, key=lambda each: (estimate(each, None), each.id))

    def order(self, schedule: Schedule, p: Problem) -> Hashable:
        """The order in which a schedule claims to sum; None where its bits depend on the batch."""
        found: Hashable = self.kernel.reduction_order(p, schedule)
        return found

    def one_knob_away(self, base: Schedule, p: Problem) -> Iterator[Schedule]:
        """The schedule most like one that has an order, and those that differ from it in one knob and claim another order."""
        base = self.kernel.ordered(p, base)
        yield base
        for name in self.space.knobs.keys() - self.tuner.pinned:
            others = (base.replace(**{name: value}) for value in self.space.knobs[name].choices)
            yield from (each for each in others if self.order(each, p) != self.order(base, p))

    def group(self, schedule: Schedule, p: Problem) -> str:
        """The name of the group that a schedule claims to be of; empty where it is of none."""
        return self.groups.get(self.order(schedule, p), "")

    def largest(self, p: Problem) -> Problem:
        """The problem with as many rows as any that is tuned, whose first rows are those of `p`."""
        return p.replace(**{dim: max(each.values[dim] for each in self.searches) for dim in self.kernel.row_dims(p)})

    def digest(self, schedule: Schedule, p: Problem, first: Problem) -> Any:
        """The digest of the first of the rows that a schedule computes for `p`, those of a smaller problem; a failure where it
        does not run."""
        self.compiled += self.builder.build([schedule], p)
        for found in self.builder.candidates(self.builder.programs([schedule], p, self.runner.device)):
            return self.runner.rows(found, p, self.largest(p), first)
        return Failure(kind=FailureKind.COMPILE_ERROR, message=f"{schedule.short()} does not build for {p}")

    def find_groups(self, tried: Mapping[Problem, Sequence[Schedule]]) -> None:
        """Find out which orders come to equal bits, by one schedule of each on as many rows as there are: a few rows of sums that
        differ may have the same bits when they are rounded."""
        base = self.largest(max(self.searches))
        likely: dict[Hashable, Schedule] = {}
        for row in itertools.zip_longest(*([(each, p) for each in listed] for p, listed in tried.items())):
            for each, p in filter(None, row if len(likely) < MOST_ORDERS else ()):
                likely.setdefault(self.order(each, p), each)
        self.compiled += self.builder.build(likely.values(), base)
        for order, schedule in likely.items():
            seen = self.digest(schedule, base, base)
            self.groups[order] = "" if isinstance(seen, Failure) else f"{seen:016x}"[:8]

    def promising(self, tried: Mapping[Problem, Sequence[Schedule]]) -> dict[Problem, list[Schedule]]:
        """What races at each size: the free choice, and the first schedules of the most promising groups."""
        of_group: dict[str, dict[Problem, list[Schedule]]] = defaultdict(lambda: defaultdict(list))
        for p, schedules in tried.items():
            for each in schedules:
                of_group[self.group(each, p)][p].append(each)

        def expected(group: str) -> float:
            return sum(math.log(self.estimates[p](some[0], None)) for p, some in of_group[group].items())

        whole = sorted((group for group, of in of_group.items() if group and len(of) == len(tried)), key=expected)
        most = max(1, self.tuner.most_programs // max(1, len(whole[:MOST_GROUPS])))
        return {
            p: [
                *search.incumbents,
                search.default,
                *(each for group in whole[:MOST_GROUPS] for each in of_group[group][p][:most]),
            ]
            for p, search in self.searches.items()
        }

    def race(self, p: Problem, schedules: Sequence[Schedule]) -> dict[Schedule, Measurement]:
        """What the programs of one size take that compute right, by each schedule that builds to one."""
        search, rules = self.searches[p], LOOKS[self.tuner.regime]
        programs = self.builder.programs(schedules, p, self.runner.device)
        self.watcher.stage(p, "measuring", len(programs))
        self.runner.begin(p)
        rules = replace(rules, check_all=True, hopeless_ratio=HOPELESS_RATIO)
        result = search.race(programs, rules=rules, deadline_s=self.deadline_s)
        if result.disturbance:
            raise MeasureError(
                f"nothing is decided for {p}: all was timed {result.disturbance}; run again when it has ended"
            )
        taken = {each.schedule: each for each in result.outcomes if isinstance(each, Measurement) and each.accuracy}
        if not taken:
            raise search.nothing_works(schedules)
        return {each: taken[one.schedule] for one in programs for each in one.schedules if one.schedule in taken}

    def probes(self, p: Problem) -> list[Problem]:
        """The sizes at which the schedule of one that is tuned serves, and at which it is proven; itself first."""
        found = [p]
        for dim in self.kernel.row_dims(p):
            sizes = (p.replace(**{dim: size}) for size in PROBED if size <= getattr(self.largest(p), dim))
            found += [each for each in sizes if min(self.searches, key=partial(batch_distance, each)) == p != each]
        return found

    def proven(self, losses: Losses) -> dict[Problem, Schedule]:
        """The fastest schedule of a group at each size whose bits are those of all others; empty where some size has none.
        A schedule that breaks its claim fails, and is taken out of `losses`."""
        chosen: dict[Problem, Schedule] = {}
        bits: dict[Problem, Any] = {}
        for p in sorted(losses, reverse=True):
            while losses[p] and p not in chosen:
                schedule = min(losses[p], key=lambda each: (losses[p][each], each.id))
                failure = self.contradiction(schedule, p, chosen.get(max(losses), schedule), bits)
                if failure is None:
                    chosen[p] = schedule
                    break
                del losses[p][schedule]
                fingerprint = self.builder.fingerprint(schedule, p) or ""
                self.searches[p].keep(Failed(schedule=schedule, fingerprint=fingerprint, failure=failure))
        return chosen if len(chosen) == len(losses) else {}

    def contradiction(
        self, schedule: Schedule, p: Problem, reference: Schedule, bits: dict[Problem, Any]
    ) -> Failure | None:
        """How a schedule breaks its claim at a size at which it would serve; None where its bits are those of `reference`, which
        `bits` remembers."""
        for each in self.probes(p):
            if each not in bits:
                bits[each] = self.digest(reference, self.largest(each), each)
            seen = self.digest(schedule, each, each)
            if isinstance(seen, Failure):
                return seen
            if seen != bits[each]:
                message = f"claims the order of {reference.short()}, and computes other bits for {each}"
                return Failure(kind=FailureKind.OTHER_NUMBERS, message=message)
        return None

    def store(
        self,
        p: Problem,
        chosen: Mapping[Problem, Schedule],
        losses: Losses,
        times: Mapping[Schedule, Measurement],
        tried: int,
    ) -> TuneResult:
        """The result of one size, which is stored."""
        search, taken, values = self.searches[p], times[chosen[p]], [each.values for each in chosen]
        spans = {dim: sorted({each[dim] for each in values}) for dim in self.kernel.batch_dims}
        sizes = ", ".join(f"{dim} = {span[0]}..{span[-1]}" for dim, span in spans.items() if len(span) > 1)
        probes, here = sum(len(self.probes(each)) for each in chosen), losses[p][chosen[p]] - 1
        numbers = (
            f"{BATCH_INVARIANT}{self.group(chosen[p], p)}: equal bits at {probes} sizes, {_price(losses):.1%} slower over "
            f"{sizes or 'one size'} than the fastest of any bits, {here:.1%} here"
        )
        entry = search.entry(
            chosen[p],
            taken.fingerprint,
            len(times),
            provenance="measured",
            device_name=self.runner.device.name,
            regime=self.tuner.regime,
            measurement_id=search.measurement_id(taken),
            numbers=numbers,
        )
        return TuneResult(
            entry=entry,
            stored=search.db.put_entry(entry),
            schedules=tried,
            programs=len(times),
            compiled=self.compiled if p == min(self.searches) else 0,
            measured=len(times),
            failed=search.failed,
            seconds=(time.monotonic() - self.started) / len(self.searches),
            over_default=times[search.default].median_us / taken.median_us - 1 if search.default in times else None,
            numbers=numbers,
        )


def _price(losses: Losses) -> float:
    """How much longer the fastest schedules of a group take, by geometric mean over the sizes."""
    return math.exp(sum(math.log(min(each.values())) for each in losses.values()) / len(losses)) - 1
