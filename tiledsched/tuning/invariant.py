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
from statistics import geometric_mean

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.groups import grouped
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.similarity import batch_distance
from tiledsched.measure.runner import Failed, Measurement, RowRunner
from tiledsched.store.records import BATCH_INVARIANT
from tiledsched.tuning.prior import estimator, plain_schedules
from tiledsched.tuning.results import TuneResult
from tiledsched.tuning.search import LOOKS, ProblemSearch, TuneContext

PROBED = (1, 2, 3, 16, 17, 63, 64, 65, 128, 512, 2048)
"""Sizes of batch dims at which the bits of rows are compared, beside those that race."""
MOST_ORDERS, MOST_GROUPS, MOST_FINALISTS = 16, 4, 2
"""Orders whose bits are compared at least, where there are so many; groups that race; and groups that race again."""
BASES = 4
"""Schedules of each size, the most promising ones, from which others of other orders are made that differ in one knob."""
HOPELESS_RATIO = 3.0
"""What takes this many times as long as the fastest schedule is not raced: all schedules of a group may be slow at some sizes."""
Losses = dict[Problem, dict[Schedule, float]]
"""For each size and schedule of a group, how many times as long it takes as the fastest schedule of any group."""
Group = tuple[tuple[Problem, int], ...]
"""A group of schedules of equal bits: digests of rows, for each size that is proven. The empty one has no bits."""


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
        self.probes = {p: self.proven_with(p) for p in self.searches}
        self.groups: dict[Hashable, Group] = {}
        """The groups of the orders that schedules claim."""
        self.compiled = 0

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
        for group, losses in self.losses(times):
            if chosen := self.proven(group, losses):
                return [self.store(p, group, chosen, times[p], len(tried[p])) for p in self.searches]
        raise MeasureError(
            f"no group of schedules gives {next(iter(times))} and its other sizes equal bits; tune with --numerics any"
        )

    def candidates(self, search: ProblemSearch) -> list[Schedule]:
        """Schedules of one size that have an order, the most promising first: those like what is served, what differs from it or
        from the model's favourites in one knob, and what the model likes."""
        p, ordered = search.problem, self.kernel.ordered
        search.incumbents = search.find_incumbents(self.runner.device_name)
        by_time = plain_schedules(self.space, p, self.tuner.pinned, self.estimates[p], search.listed_s())
        bases = [*search.incumbents, *search.winners_elsewhere(), *by_time[:BASES]]
        near = {ordered(p, each): None for base in bases for each in self.one_knob_away(base, p)}
        like_served = [ordered(p, each) for each in search.incumbents]
        found = dict.fromkeys([*like_served, *self.by_time(p, near), *(ordered(p, each) for each in by_time)])
        order = self.kernel.reduction_order
        return [each for each in found if order(p, each) is not None and not self.space.unworkable(each, p)]

    def by_time(self, p: Problem, schedules: Iterable[Schedule]) -> list[Schedule]:
        """Schedules in the order of their modelled times."""
        return sorted(schedules, key=lambda each: (self.estimates[p](each, None), each.id))

    def one_knob_away(self, base: Schedule, p: Problem) -> Iterator[Schedule]:
        """The schedule most like one that has an order, and those that differ from it in one knob and claim another order."""
        yield (base := self.kernel.ordered(p, base))
        order = self.kernel.reduction_order
        alone = {"pdl": 0} if "pdl" in base else {}  # another order may have no second launch
        for name in self.space.knobs.keys() - self.tuner.pinned:
            others = (base.replace(**{**alone, name: value}) for value in self.space.knobs[name].choices)
            yield from (each for each in others if order(p, each) != order(p, base))

    def find_groups(self, tried: Mapping[Problem, Sequence[Schedule]]) -> None:
        """Find out which orders come to equal bits, by one schedule of each on as many rows as there are: a few rows of sums that
        differ may have the same bits when they are rounded."""
        likely: dict[Hashable, Schedule] = {}
        for row in itertools.zip_longest(*([(each, p) for each in listed] for p, listed in tried.items())):
            for each, p in filter(None, row if len(likely) < MOST_ORDERS else ()):
                likely.setdefault(self.kernel.reduction_order(p, each), each)
        probes = dict.fromkeys(itertools.chain(*self.probes.values()))
        proven = grouped((self.largest(each), each) for each in probes)
        self.compiled += self.builder.build_for_each(itertools.product(likely.values(), proven))
        for order, schedule in likely.items():
            seen = [(self.digests(schedule, most, sizes), sizes) for most, sizes in proven.items()]
            bits = [zip(sizes, found, strict=True) for found, sizes in seen if not isinstance(found, Failure)]
            self.groups[order] = tuple(itertools.chain(*bits)) if len(bits) == len(seen) else ()

    def largest(self, p: Problem) -> Problem:
        """The problem with as many rows as any that is tuned, whose first rows are those of `p`."""
        return p.replace(**{dim: max(each.values[dim] for each in self.searches) for dim in self.kernel.row_dims(p)})

    def digests(self, schedule: Schedule, p: Problem, sizes: Sequence[Problem]) -> list[int] | Failure:
        """Digests of the first rows that a schedule computes for `p`, as many as each of these sizes has."""
        self.compiled += self.builder.build([schedule], p)
        for found in self.builder.candidates(self.builder.programs([schedule], p, self.runner.device)):
            return self.runner.rows(found, p, self.largest(p), sizes)
        return Failure(kind=FailureKind.COMPILE_ERROR, message=f"{schedule.short()} does not build for {p}")

    def group(self, schedule: Schedule, p: Problem) -> Group:
        """The group that a schedule claims to be of; the empty one where it is of none."""
        return self.groups.get(self.kernel.reduction_order(p, schedule), ())

    def promising(self, tried: Mapping[Problem, Sequence[Schedule]]) -> dict[Problem, list[Schedule]]:
        """What races at each size: the free choice, and the first schedules of the most promising groups."""
        of_group: dict[Group, dict[Problem, list[Schedule]]] = defaultdict(lambda: defaultdict(list))
        for p, schedules in tried.items():
            for each in schedules:
                of_group[self.group(each, p)][p].append(each)
        whole = [of for group, of in of_group.items() if group and len(of) == len(tried)]
        whole.sort(key=lambda of: sum(math.log(self.estimates[p](some[0], None)) for p, some in of.items()))
        most = max(1, self.tuner.most_programs // max(1, len(whole[:MOST_GROUPS])))
        return {
            p: [*search.incumbents, search.default, *(each for of in whole[:MOST_GROUPS] for each in of[p][:most])]
            for p, search in self.searches.items()
        }

    def measure(self, racing: Mapping[Problem, Sequence[Schedule]]) -> dict[Problem, dict[Schedule, Measurement]]:
        """Race the programs of each size: what those take that compute right, by each schedule that builds to one."""
        wanted = [(each, p) for p, schedules in racing.items() for each in schedules]
        self.watcher.stage(wanted[0][1], "compiling", len(wanted))
        self.compiled += self.builder.build_for_each(wanted, progress=lambda done, _: self.watcher.step(done))
        rules = replace(LOOKS[self.tuner.regime], check_all=True, hopeless_ratio=HOPELESS_RATIO)
        times = {}
        for p, schedules in racing.items():
            programs = self.builder.programs(list(dict.fromkeys(schedules)), p, self.runner.device)
            self.watcher.stage(p, "measuring", len(programs))
            self.runner.begin(p)
            result = self.searches[p].race(programs, rules=rules, deadline_s=self.deadline_s)
            if result.disturbance:
                raise MeasureError(
                    f"nothing is decided for {p}: all was timed {result.disturbance}; run again when that ended"
                )
            taken = {each.schedule: each for each in result.outcomes if isinstance(each, Measurement) and each.accuracy}
            if not taken:
                raise self.searches[p].nothing_works(schedules)
            times[p] = {
                each: taken[one.schedule] for one in programs for each in one.schedules if one.schedule in taken
            }
        return times

    def losses(self, times: Mapping[Problem, Mapping[Schedule, Measurement]]) -> list[tuple[Group, Losses]]:
        """Each group that has a time at every size, the cheapest group first."""
        found: dict[Group, Losses] = defaultdict(lambda: defaultdict(dict))
        for p, taken in times.items():
            best_us = min(each.median_us for each in taken.values())
            for schedule, each in taken.items():
                found[self.group(schedule, p)][p][schedule] = each.median_us / best_us
        whole = [(group, of) for group, of in found.items() if group and len(of) == len(times)]
        return sorted(whole, key=lambda pair: geometric_mean(min(each.values()) for each in pair[1].values()))

    def nearby(self, times: Mapping[Problem, Mapping[Schedule, Measurement]]) -> dict[Problem, list[Schedule]]:
        """What races again at each size: the fastest schedule, the fastest of the cheapest groups, and what differs little from
        those, also where no other search looks."""
        racing = {p: [min(taken, key=lambda each: taken[each].median_us)] for p, taken in times.items()}
        for group, of in self.losses(times)[:MOST_FINALISTS]:
            for p, losses in of.items():
                best = sorted(losses, key=lambda each: (losses[each], each.id))[:BASES]
                others = {n: None for each in best for n in self.space.neighbours(each, p, pinned=self.tuner.pinned)}
                near = self.by_time(p, (each for each in others if self.group(each, p) == group))
                racing[p] += [*best, *near[: self.tuner.most_programs // MOST_FINALISTS]]
        return racing

    def proven_with(self, p: Problem) -> list[Problem]:
        """The sizes that the schedule of one that is tuned serves, and at which it is proven; itself first."""
        found = [p]
        for dim in self.kernel.row_dims(p):
            sizes = (p.replace(**{dim: size}) for size in PROBED if size <= getattr(self.largest(p), dim))
            found += [each for each in sizes if min(self.searches, key=partial(batch_distance, each)) == p != each]
        return found

    def proven(self, group: Group, losses: Losses) -> dict[Problem, tuple[float, Schedule]]:
        """The fastest schedule of each size that has the bits of the group, behind its loss; empty where some size has none."""
        chosen: dict[Problem, tuple[float, Schedule]] = {}
        for p, of in losses.items():
            for loss, schedule in sorted(
                ((loss, each) for each, loss in of.items()), key=lambda pair: (pair[0], pair[1].id)
            ):
                failure = self.contradiction(schedule, p, dict(group))
                if failure is None:
                    chosen[p] = loss, schedule
                    break
                fingerprint = self.builder.fingerprint(schedule, p) or ""
                self.searches[p].keep(Failed(schedule=schedule, fingerprint=fingerprint, failure=failure))
        return chosen if len(chosen) == len(losses) else {}

    def contradiction(self, schedule: Schedule, p: Problem, bits: Mapping[Problem, int]) -> Failure | None:
        """How a schedule breaks its claim to have these bits at a size that it would serve; None where it has them."""
        for each in self.probes[p]:
            seen = self.digests(schedule, each, [each])
            if isinstance(seen, Failure):
                return seen
            if seen != [bits[each]]:
                message = f"claims the order of a group, and computes other bits for {each}"
                return Failure(kind=FailureKind.OTHER_NUMBERS, message=message)
        return None

    def store(
        self,
        p: Problem,
        group: Group,
        chosen: Mapping[Problem, tuple[float, Schedule]],
        times: Mapping[Schedule, Measurement],
        tried: int,
    ) -> TuneResult:
        """The result of one size, which is stored."""
        search, (loss, schedule) = self.searches[p], chosen[p]
        spans = {dim: sorted({each.values[dim] for each in chosen}) for dim in self.kernel.batch_dims}
        sizes = ", ".join(f"{dim} = {span[0]}..{span[-1]}" for dim, span in spans.items() if len(span) > 1)
        price = geometric_mean(loss for loss, _ in chosen.values()) - 1
        numbers = (
            f"{BATCH_INVARIANT}{stable_id([bits for _, bits in group], 8)}: equal bits at {len(group)} sizes, {price:.1%} slower "
            f"over {sizes or 'one size'} than the fastest of any bits, {loss - 1:.1%} here"
        )
        taken, plain = times[schedule], times.get(search.default)
        entry = search.entry(
            schedule,
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
            over_default=plain.median_us / taken.median_us - 1 if plain else None,
            numbers=numbers,
        )
