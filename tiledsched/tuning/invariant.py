"""The tune of `--numerics invariant`: one order of sums for all sizes of a kernel's batch dims, and what it costs.

Kernels claim which schedules sum in the same order. Digests of rows on the GPU show which claims hold, and which orders come to
the same bits: those are one group. Schedules of each group race at each size. The group is kept that loses least against the
fastest schedule of any group, by geometric mean over the sizes; its schedules are proven at sizes between those that raced, too.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tiledsched.core.errors import Failure, FailureKind, MeasureError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import Schedule
from tiledsched.core.similarity import octaves
from tiledsched.measure.runner import Failed, Measurement, RowRunner
from tiledsched.store.records import BATCH_INVARIANT
from tiledsched.tuning.prior import estimator, judged
from tiledsched.tuning.results import TuneResult
from tiledsched.tuning.search import LOOKS, ProblemSearch, TuneContext, commonest_message

PROBED = (1, 2, 3, 16, 17, 63, 64, 65, 128, 512, 2048)
"""Sizes of batch dims at which the bits of rows are compared, beside those that race."""
FIRST_ROWS = 16
"""Rows by which groups of equal bits are told apart first."""
MOST_ORDERS = 32
"""Orders whose bits are compared, the most promising ones by the performance model."""
MOST_GROUPS = 4
"""Groups that race, the most promising ones by the performance model."""
BASES = 4
"""Schedules of each size, the most promising ones, from which others of other orders are made that differ in one knob."""
HOPELESS_RATIO = 3.0
"""What takes this many times as long as the fastest schedule is not raced: all schedules of a group may be slow at some sizes."""
Group = str
"""Name of a group: the digest of its first rows."""
Losses = dict[Problem, dict[Schedule, float]]
"""For each size and schedule, how many times as long it takes as the fastest of any group."""


@dataclass(frozen=True, kw_only=True)
class OneOrder:
    """The group that serves all sizes, and what that costs."""

    group: Group
    """Its name."""
    sizes: str
    """The sizes that raced, in words."""
    probes: int
    """Sizes at which digests showed equal bits."""
    price: float
    """How much longer its schedules take than the fastest of any group, by geometric mean over the sizes."""
    here: float
    """The same at one size."""

    def __str__(self) -> str:
        """In words, as an entry's source has it."""
        return (
            f"{BATCH_INVARIANT}{self.group}: equal bits at {self.probes} sizes, {self.price:.1%} slower over {self.sizes} than "
            f"the fastest of any bits, {self.here:.1%} here"
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(vars(self))


class InvariantTune:
    """Tunes problems that differ in their batch dims alone; see :class:`TuneContext` for what they share with other tunes."""

    def __init__(
        self, tuner: TuneContext, runner: RowRunner, problems: Iterable[Problem], deadline_s: float = math.inf
    ) -> None:
        self.tuner, self.runner, self.deadline_s, self.started = tuner, runner, deadline_s, time.monotonic()
        self.builder, self.space, self.kernel = tuner.builder, tuner.space, tuner.builder.kernel
        self.searches = {each: ProblemSearch(tuner, runner, each, deadline_s) for each in sorted(problems)}
        self.compiled = 0
        self._groups: dict[Hashable, Group] = {}
        """By the order that schedules claim, the group that they belong to; empty for one that does not run."""
        self._bits: dict[Problem, Any] = {}
        """Digests of rows by the schedule that all others of the group are compared with."""

    def run(self) -> list[TuneResult]:
        """Race, prove, and store the group that loses least.

        Raises:
            NoValidScheduleError: nothing works at some size.
            MeasureError: the GPU is not alone, or no group gives equal bits at all sizes.
        """
        tried = {p: self.candidates(search) for p, search in self.searches.items()}
        self.find_groups(tried)
        racing = self.promising(tried)
        wanted = [(each, p) for p, listed in racing.items() for each in listed]
        self.tuner.watcher.stage(wanted[0][1], "compiling", len(wanted))
        self.compiled += self.builder.build_for_each(wanted, progress=lambda done, _: self.tuner.watcher.step(done))
        times = {p: self.race(p, listed) for p, listed in racing.items()}
        losses = self.losses(times)
        for group in sorted(losses, key=lambda each: self.price(losses[each])):
            chosen = self.proven(losses[group])
            if chosen:
                return [self.store(p, group, chosen, losses[group], times[p], tried[p]) for p in chosen]
        raise MeasureError(
            f"no group of schedules gives {next(iter(self.searches))} and its other sizes equal bits; tune with --numerics any"
        )

    def candidates(self, search: ProblemSearch) -> list[Schedule]:
        """Schedules of one size that have an order, the most promising first: those like what is served, what differs from it or
        from the model's favourites in one knob, and what the model likes."""
        p, pinned, estimate = search.problem, self.tuner.pinned, estimator(search.problem, search.spec)
        served = search.find_incumbents(self.runner.device_name)
        search.incumbents = served
        listed, _ = self.space.listed(p, pinned=pinned | self.space.modelled_pins(), deadline_s=search.listed_s())
        by_time = sorted(judged(listed, estimate, search.listed_s()), key=lambda each: (estimate(each, None), each.id))
        bases = [*served, *search.winners_elsewhere(), *by_time[:BASES]]
        near = [self.kernel.ordered(p, each) for base in bases for each in (base, *self.one_knob_away(base, p))]
        near.sort(key=lambda each: (estimate(each, None), each.id))
        found = dict.fromkeys([*near, *(self.kernel.ordered(p, each) for each in by_time)])
        return [each for each in found if self.order(each, p) is not None and not self.space.unworkable(each, p)]

    def one_knob_away(self, base: Schedule, p: Problem) -> Iterator[Schedule]:
        """Schedules that differ from one in a knob, sum in another order, and can work."""
        for name, knob in self.space.knobs.items():
            for value in knob.choices:
                other = base.replace(**{name: value})
                if name in self.tuner.pinned or self.order(other, p) == self.order(base, p):
                    continue
                if not self.space.unworkable(other, p):
                    yield other

    def order(self, schedule: Schedule, p: Problem) -> Hashable:
        """The order in which a schedule claims to sum; None for one whose bits depend on the batch."""
        found: Hashable = self.kernel.reduction_order(p, schedule)
        return found

    def largest(self, p: Problem) -> Problem:
        """The problem with as many rows as any that is tuned, whose first rows are those of `p`."""
        return p.replace(**{dim: max(each.values[dim] for each in self.searches) for dim in self.kernel.row_dims(p)})

    def digest(self, schedule: Schedule, p: Problem, first: Problem | None = None) -> Any:
        """The digest of the rows that a schedule computes for `p`, or of the first of them, those of a smaller problem; a failure
        where it does not run."""
        self.compiled += self.builder.build([schedule], p)
        found = self.builder.candidates(self.builder.programs([schedule], p, self.runner.device))
        if not found:
            return Failure(kind=FailureKind.COMPILE_ERROR, message=f"{schedule.short()} does not build for {p}")
        return self.runner.rows(found[0], p, self.largest(p), first or p)

    def find_groups(self, tried: Mapping[Problem, Sequence[Schedule]]) -> None:
        """Find out which orders come to equal bits, by one schedule of each on the same few rows."""
        base = max(self.searches)
        few = {dim: min(FIRST_ROWS, self.largest(base).values[dim]) for dim in self.kernel.row_dims(base)}
        base = base.replace(**few)
        claims: dict[Hashable, tuple[float, str, Schedule]] = {}
        for p, schedules in tried.items():
            estimate = estimator(p, self.searches[p].spec)
            least_us = min(estimate(each, None) for each in schedules)
            for each in schedules:
                if not self.space.unworkable(each, base):
                    claim = estimate(each, None) / least_us, each.id, each
                    claims[order] = min(claims.get(order := self.order(each, p), claim), claim)
        likely = sorted(claims, key=lambda each: claims[each][:2])[:MOST_ORDERS]
        self.compiled += self.builder.build([claims[each][2] for each in likely], base)
        for order in likely:
            seen = self.digest(claims[order][2], base)
            self._groups[order] = "" if isinstance(seen, Failure) else f"{seen:016x}"[:8]

    def group(self, schedule: Schedule, p: Problem) -> Group:
        """The group that a schedule claims to be of; empty where its order does not run."""
        return self._groups.get(self.order(schedule, p), "")

    def promising(self, tried: Mapping[Problem, Sequence[Schedule]]) -> dict[Problem, list[Schedule]]:
        """What races at each size: the free choice, and the first schedules of the most promising groups."""
        by_group: dict[Group, dict[Problem, list[Schedule]]] = defaultdict(dict)
        for p, schedules in tried.items():
            for each in schedules:
                by_group[self.group(each, p)].setdefault(p, []).append(each)
        everywhere = [group for group, of in by_group.items() if group and len(of) == len(tried)]
        estimates = {p: estimator(p, search.spec) for p, search in self.searches.items()}

        def expected(group: Group) -> float:
            return sum(math.log(min(estimates[p](each, None) for each in some)) for p, some in by_group[group].items())

        groups = sorted(everywhere, key=lambda each: (expected(each), each))[:MOST_GROUPS]
        most = max(1, self.tuner.most_programs // max(1, len(groups)))
        return {
            p: list(
                dict.fromkeys(
                    [*search.incumbents, search.default, *(each for one in groups for each in by_group[one][p][:most])]
                )
            )
            for p, search in self.searches.items()
        }

    def race(self, p: Problem, schedules: Sequence[Schedule]) -> dict[Schedule, Measurement]:
        """What the distinct programs of one size take, those that compute right; by each schedule that builds to one."""
        search = self.searches[p]
        programs = self.builder.programs(schedules, p, self.runner.device)
        if not programs:
            raise search.nothing_works(schedules)
        self.tuner.watcher.stage(p, "measuring", len(programs))
        self.runner.begin(p)
        rules = replace(LOOKS[self.tuner.regime], check_all=True, hopeless_ratio=HOPELESS_RATIO)
        result = search.race(programs, rules=rules, deadline_s=self.deadline_s)
        if result.disturbance:
            raise MeasureError(
                f"nothing is decided for {p}: all was timed {result.disturbance}; run again when it has ended"
            )
        taken = {each.schedule: each for each in result.outcomes if isinstance(each, Measurement)}
        return {each: taken[one.schedule] for one in programs for each in one.schedules if one.schedule in taken}

    def losses(self, times: Mapping[Problem, Mapping[Schedule, Measurement]]) -> dict[Group, Losses]:
        """Those of each group that has a time at every size."""
        found: dict[Group, Losses] = defaultdict(lambda: defaultdict(dict))
        for p, taken in times.items():
            best_us = min((each.median_us for each in taken.values()), default=math.inf)
            for schedule, each in taken.items():
                if each.accuracy is not None:  # what is hopeless was not checked
                    found[self.group(schedule, p)][p][schedule] = each.median_us / best_us
        return {group: of for group, of in found.items() if group and len(of) == len(times)}

    @staticmethod
    def price(losses: Mapping[Problem, Mapping[Schedule, float]]) -> float:
        """How much longer the fastest schedules of a group take, by geometric mean over the sizes."""
        return math.exp(sum(math.log(min(each.values())) for each in losses.values()) / len(losses)) - 1

    @cached_property
    def probes(self) -> dict[Problem, list[Problem]]:
        """For each problem that is tuned the sizes at which it serves and is proven, itself among them."""
        sizes = {
            p.replace(**{dim: size})
            for p in self.searches
            for dim in self.kernel.row_dims(p)
            for size in PROBED
            if size <= getattr(self.largest(p), dim)
        }
        found: dict[Problem, list[Problem]] = {p: [p] for p in self.searches}
        for each in sorted(sizes - set(found)):
            found[min(found, key=lambda p: (octaves(p, each, self.kernel.batch_dims), p))].append(each)
        return found

    def proven(self, losses: Losses) -> dict[Problem, Schedule]:
        """The fastest schedule of a group at each size whose bits are those of all others; empty where some size has none.
        A schedule that breaks its claim fails, and is taken out of `losses`."""
        chosen: dict[Problem, Schedule] = {}
        self._bits.clear()
        for p in sorted(losses, reverse=True):
            while losses[p]:
                schedule = min(losses[p], key=lambda each: (losses[p][each], each.id))
                failure = self.contradiction(schedule, p, chosen.get(max(losses), schedule))
                if failure is None:
                    chosen[p] = schedule
                    break
                del losses[p][schedule]
                fingerprint = self.builder.fingerprint(schedule, p) or ""
                self.searches[p].keep(Failed(schedule=schedule, fingerprint=fingerprint, failure=failure))
            else:
                return {}
        return dict(sorted(chosen.items()))

    def contradiction(self, schedule: Schedule, p: Problem, reference: Schedule) -> Failure | None:
        """How a schedule breaks its claim at a size at which it would serve; None where its bits are those of `reference`."""
        for each in self.probes[p]:
            if each not in self._bits:
                self._bits[each] = self.digest(reference, self.largest(each), each)
            seen, wanted = self.digest(schedule, each), self._bits[each]
            if isinstance(seen, Failure):
                return seen
            if seen != wanted:
                message = f"claims the order of {reference.short()}, and computes other bits for {each}"
                return Failure(kind=FailureKind.OTHER_NUMBERS, message=message)
        return None

    def store(
        self,
        p: Problem,
        group: Group,
        chosen: Mapping[Problem, Schedule],
        losses: Mapping[Problem, Mapping[Schedule, float]],
        times: Mapping[Schedule, Measurement],
        tried: Sequence[Schedule],
    ) -> TuneResult:
        """The result of one size, which is stored."""
        search, taken, dims = self.searches[p], times[chosen[p]], self.kernel.batch_dims
        spans = ((dim, sorted({each.values[dim] for each in chosen})) for dim in dims)
        numbers = OneOrder(
            group=group,
            sizes=", ".join(f"{dim} = {span[0]}..{span[-1]}" for dim, span in spans if len(span) > 1) or "one size",
            probes=sum(map(len, self.probes.values())),
            price=self.price(losses),
            here=losses[p][chosen[p]] - 1,
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
        plain = times.get(search.default)
        return TuneResult(
            entry=entry,
            stored=search.db.put_entry(entry),
            schedules=len(tried),
            programs=len(times),
            compiled=self.compiled if p == min(self.searches) else 0,
            measured=len(times),
            failed=search.failed,
            seconds=(time.monotonic() - self.started) / len(self.searches),
            over_default=plain.median_us / taken.median_us - 1 if plain else None,
            numbers=numbers,
            why_failed=commonest_message(search.build_failures(tried)),
        )
