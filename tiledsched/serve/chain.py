"""The links of the chain that a problem walks until one of them knows which schedule to serve.

Each link is called with a :class:`Question`, and gives its answer or None. It says in a few words why its answer is served, and
what the links said is the reason that `explain` prints.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tiledsched.core.config import INVARIANT
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import HINT_KNOBS, KnobValue, Schedule, allowed_hints
from tiledsched.core.similarity import batch_distance
from tiledsched.core.space_files import space_for
from tiledsched.rivals.offers import (
    REACH,
    Offer,
    expected_offers,
    forecast_offers,
    measured_offers,
    published_offers,
    raced_near,
)
from tiledsched.serve.arch_table import MEASURED_PROVENANCES, ArchTable
from tiledsched.serve.transfer import (
    ALTERNATIVES,
    OTHER_KIND,
    ExpectedLoss,
    TransferParameters,
    distance_of,
    expected_loss,
    log_us,
    transfer,
)
from tiledsched.store.evidence import edited, leaders, throttled
from tiledsched.store.records import Entry
from tiledsched.store.spills import DOES_NOT_BUILD, classes_of

NEIGHBOURHOOD = 0.5
"""The distance up to which a measured problem serves others in place of what the model chose for them: half an octave. Farther
away, a transfer from one tuned problem is slower than the model's choice in 43 of 90 cases (docs/results/serving.md)."""
NEAR_ENOUGH = 0.2
"""The distance up to which a problem on which rivals raced our schedule says more than what was timed on many others: there an
untuned choice loses half a percent on average. Where what was timed on many others is another kernel, races within `REACH` say
more: of 24 products with epilogues, each without its own, the choice lost 1.4% by them, and 2.7% by times of plain products."""


@dataclass(frozen=True, kw_only=True)
class LinkStep:
    """A link that a problem came to."""

    link: str
    """The name of its class."""
    said: str = ""
    """Words of the reason that this link gives; empty where it had no answer, or did not change it."""
    leads: bool = False
    """Whether these words stand before those of earlier links."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The answer for one problem."""

    schedule: Schedule
    """What is launched."""
    provenance: str
    """measured, transferred, modelled, default, or forced (by settings)."""
    steps: tuple[LinkStep, ...]
    """The links that the problem came to, in their order."""
    entry: Entry | None = None
    """The evidence; None for the default."""
    is_own: bool = False
    """Whether the evidence was measured for this very problem, or for one of about its size that stands for it."""
    forced: Mapping[str, KnobValue] = field(default_factory=dict)
    """Knobs that settings changed."""
    stale: str = ""
    """Why its time may differ from the one measured; empty where it does not."""
    held_down: str = ""
    """How far below its clock the GPU was held when the evidence was measured; empty where it was not."""
    expected_loss: ExpectedLoss | None = None
    """How much slower than the best schedule choices like this one were where every schedule was measured; None where that is
    not known."""
    rivals: tuple[Offer, ...] = ()
    """Rivals that are faster, the fastest first: the first that is installed is called in place of the schedule."""
    gated: tuple[Problem, ...] = ()
    """The problems on which the accuracy gate passed this schedule on a GPU."""
    alternatives: tuple[Schedule, ...] = ()
    """The next choices, of a schedule that was not measured: each is served where the one before does not compile for the layouts
    of a call."""

    @property
    def reason(self) -> str:
        """Why it is served: what the links said, as one sentence for people."""
        reason = ""
        for step in self.steps:
            reason = step.said + reason if step.leads else reason + step.said
        return reason

    def then(self, step: LinkStep, **changes: Any) -> Served:
        """This answer as a later link leaves it."""
        return replace(self, steps=(*self.steps, step), **changes)


@dataclass(kw_only=True, eq=False)  # not frozen, because one is made for each plan
class Question:
    """What a problem asks the links of the chain: its schedule on one arch."""

    problem: Problem
    """What is to be computed."""
    table: ArchTable
    """What is known on the arch."""
    device_name: str = ""
    """The driver's name for the GPU; empty where only the arch is known."""
    shared: bool = False
    """Whether the problem stands for others of about its size, which share the answer."""

    def is_own(self, entry: Entry) -> bool:
        """Whether an entry is for the problem that a user named."""
        return entry.problem == self.problem and not self.shared

    @functools.cached_property
    def alike(self) -> Sequence[Entry]:
        """The entries that were measured for problems of the same kind; only the kernel's own where one of these is near."""
        found, kernel = self.table.alike(self.problem), self.table.kernel
        if not kernel.borrows():
            return found
        own = [entry for entry in found if entry.kernel == kernel.name]
        return own if self.nearest(own) <= NEIGHBOURHOOD else found

    @functools.cached_property
    def modelled(self) -> Sequence[Entry]:
        """The entries that the performance model chose for problems of the same kind, if they work here; the nearest first."""
        kind, space = self.problem.declaration.similarity.kind, self.table.space
        alike = [entry for entry in self.table.modelled if kind(entry.problem) == kind(self.problem)]
        usable = [entry for entry in alike if not space.unworkable(entry.schedule, self.problem)]
        return sorted(
            usable,
            key=lambda entry: (
                entry.problem != self.problem,
                self.distance(entry),
                entry.rank,
                entry.problem,
                entry.device_name,
            ),
        )

    @functools.cached_property
    def default(self) -> Schedule:
        """The kernel's default schedule."""
        return self.table.default(self.problem)

    def distance(self, entry: Entry) -> float:
        """How far away the problem of an entry is."""
        return distance_of(entry, self.problem)

    def origin(self, entry: Entry) -> str:
        """Words before what is said of an entry of another kernel; empty for the problem's own."""
        return f"from plain {entry.kernel}: " if entry.kernel != self.problem.kernel else ""

    def nearest(self, entries: Iterable[Entry]) -> float:
        """The distance of the nearest entry; infinite where there is no entry."""
        return min(map(self.distance, entries), default=math.inf)


class Link:
    """What the links have in common. Finders are called with a question; refiners also with the answer that was found, which they
    return as it was or changed."""

    def step(self, said: str = "", *, leads: bool = False) -> LinkStep:
        """The step to this link; see :class:`LinkStep`."""
        return LinkStep(link=type(self).__name__, said=said, leads=leads)


Finder = Callable[[Question], Served | None]
Refiner = Callable[[Question, Served], Served]


class Exact(Link):
    """What was measured for this very problem."""

    def __call__(self, question: Question) -> Served | None:
        """What was measured on this device; else on another of its arch, or of one whose machine code is the same."""
        table, name = question.table, question.device_name
        entry = table.measured_for(question.problem, name)
        if entry is None:
            return None
        here = entry.provenance == "measured" and name in ("", entry.device_name)
        said = f"this problem was measured on {'this device' if name and here else table.where(entry)}"
        # With 64-bit indices the same schedule is other machine code.
        if getattr(question.problem, "wide", False) and not entry.problem.wide:
            here, said = False, f"{said}, but not in its wide form: these tensors take 64-bit indices"
        return Served(
            schedule=entry.schedule,
            provenance="measured" if here else "transferred",
            steps=(self.step(said),),
            entry=entry,
            is_own=True,
            stale=table.stale(entry),
        )


class InOneOrder(Link):
    """What computes each row with the same bits, however many rows there are: of the schedules that were proven to do so, the one
    for the next larger batch."""

    def __call__(self, question: Question) -> Served | None:
        """The schedule of one group, which does not depend on the sizes of the batch dims."""
        table, p, name = question.table, question.problem, question.device_name
        stands_for = p.declaration.representative
        known = [each for each in table.invariant if stands_for(each.problem) == stands_for(p)]
        if not known:
            return None
        sizes = Counter(each.group for each in known)

        def preference(entry: Entry) -> tuple[Any, ...]:
            here = entry.device_name == name, entry.compiler == table.compiler
            return *here, sizes[entry.group], entry.run_id or 0, entry.group

        group = [each for each in known if each.group == max(known, key=preference).group]
        entry = min(group, key=lambda each: (each.regime != table.regime, batch_distance(p, each.problem)))
        measured = f"{'this problem' if entry.problem == p else entry.problem} was measured on {table.where(entry)}"
        return Served(
            schedule=table.space.complete(entry.schedule),
            provenance="measured" if entry.problem == p and name in ("", entry.device_name) else "transferred",
            steps=(self.step(f"{measured}; its bits are those of every batch, as digests on the GPU showed"),),
            entry=entry,
            is_own=entry.problem == p,
            stale=table.stale(entry),
            gated=tuple(each.problem for each in group if each.schedule == entry.schedule and each.measurement),
        )


class Bucket(Link):
    """What was measured for a problem of the same bucket: of about the same lengths, and equal in all else."""

    def __call__(self, question: Question) -> Served | None:
        """What was measured for the nearest of them."""
        table, bucketed = question.table, question.table.kernel.similarity.bucketed
        about = bucketed(question.problem)
        near = {entry.problem: entry for entry in question.alike if bucketed(entry.problem) == about}
        ordered = sorted(near, key=lambda problem: (question.distance(near[problem]), problem))
        found = (table.measured_for(problem, question.device_name) for problem in ordered)
        entry = next((each for each in found if each is not None), None)
        if entry is None:
            return None
        return Served(
            schedule=entry.schedule,
            provenance="transferred",
            steps=(self.step(f"{entry.problem}, which is of about this size, was measured on {table.where(entry)}"),),
            entry=entry,
            is_own=True,
            expected_loss=expected_loss(entry, question.distance(entry), about),
        )


class Neighbours(Link):
    """A schedule that won on measured problems of the same kind (see `tiledsched.serve.transfer`)."""

    def __call__(self, question: Question) -> Served | None:
        """The choice among the nearest, if one is in the neighbourhood or nearer than what the performance model chose for."""
        chosen = question.modelled[:1]
        if chosen and question.nearest(question.alike) > max(NEIGHBOURHOOD, question.nearest(chosen)):
            return None
        return self.transferred(question, question.alike, question.table.policy)

    def transferred(
        self, question: Question, entries: Sequence[Entry], policy: TransferParameters, what: str = ""
    ) -> Served | None:
        """A choice among the schedules that won on other problems; `what` describes these for the reason."""
        table, problem = question.table, question.problem
        found = transfer(problem, entries, table.space, table.spec, policy) if table.spec else None
        if found is None:
            return None
        judges = "it" if found.neighbours == 1 else f"{found.neighbours} similar problems"
        where = f"measured on {table.where(found.entry)}"
        near = f"{question.origin(found.entry)}the nearest problem{what} is {found.entry.problem}, {where}"
        if question.is_own(found.entry):
            near = f"this problem was {where}, and its winner is outside of today's search space"
        said = f"{near}; by the measurements of {judges} and the model, this schedule is expected to lose least"
        if question.origin(found.entry) and table.kernel.adapts:
            said = f"{near}; its tiles are adapted to this kernel"
        return Served(
            schedule=found.schedule,
            provenance="transferred",
            steps=(self.step(said),),
            entry=found.entry,
            alternatives=found.others,
            expected_loss=expected_loss(found.entry, found.distance, problem),
        )


class Modelled(Link):
    """What the performance model chose, which predicts a problem better than winners of another kind do."""

    def __call__(self, question: Question) -> Served | None:
        """The entry for this problem or the nearest one of its kind. The next choices are its runner-up, and what the model
        chose for the problems after it."""
        space, problem, usable = question.table.space, question.problem, question.modelled
        if not usable:
            return None
        entry = usable[0]
        choices = [entry.schedule]
        for each in map(space.complete, dict.fromkeys(schedule for one in usable for schedule in leaders(one))):
            if len(choices) > ALTERNATIVES:
                break
            if each not in choices and not space.unworkable(each, problem):
                choices.append(each)
        measured = "nothing near it" if question.alike else "nothing"
        what = "this problem" if question.is_own(entry) else f"the nearest problem ({entry.problem})"
        return Served(
            schedule=entry.schedule,
            provenance=entry.provenance,
            steps=(
                self.step(
                    f"{measured} was measured; {question.origin(entry)}the entry for {what} is the model's choice"
                ),
            ),
            entry=entry,
            alternatives=tuple(choices[1:]),
        )


class OtherKinds(Neighbours):
    """A schedule that won on measured problems of any kind."""

    def __call__(self, question: Question) -> Served | None:
        """The choice among all, unless the kernel says that problems of other kinds are useless."""
        if not question.alike and question.table.kernel.similarity.requires_same_kind(question.problem):
            return None
        return self.transferred(question, question.table.measured, OTHER_KIND, " of another kind")


class ColdStart(Link):
    """The kernel's own choice for problems of which nothing was measured."""

    def __call__(self, question: Question) -> Served | None:
        """The choice, where it is not the default schedule."""
        table, problem, default, spec = question.table, question.problem, question.default, question.table.spec
        if spec is None:
            return None
        choose = table.kernel.similarity.cold_start
        chosen = choose(problem, default, table.space, lambda schedule: log_us(problem, schedule, spec))
        if chosen in (None, default):
            return None
        said = "nothing like it was measured or tuned; a plain schedule, by rule and model"
        return Served(schedule=chosen, provenance="modelled", steps=(self.step(said),))


class Default(Link):
    """The default schedule, which there always is."""

    def __call__(self, question: Question) -> Served:
        """The default schedule of this problem."""
        said = f"nothing is known about {question.table.arch} for this kind of problem"
        return Served(schedule=question.default, provenance="default", steps=(self.step(said),))


class Sound(Link):
    """The first choice that is not known to spill registers or to fail to build."""

    def __call__(self, question: Question, served: Served) -> Served:
        """The first sound choice; where all are unsound, the one that spills least. Also where an accuracy gate passed it."""
        choices, known, arch = (served.schedule, *served.alternatives), question.table.spills, question.table.arch
        if served.alternatives and served.schedule.id in known:
            lost = []
            for each in choices:
                classes = known.get(each.id, {})
                found = classes_of(question.problem, each, arch) if classes else []
                lost.append(max((classes.get(one, 0) for one in found), default=0))
            place = lost.index(min(lost))
            if place:
                passed = "; ".join(
                    f"{each.short()} "
                    + ("does not build" if size == DOES_NOT_BUILD else f"spills {size} bytes of registers a thread")
                    for each, size in zip(choices[:place], lost, strict=False)
                )
                served = served.then(
                    self.step(f"; of its choices {passed}, so that the next one is served"),
                    schedule=choices[place],
                    alternatives=choices[place + 1 :],
                )
        return replace(served, gated=question.table.gated(served.schedule))


class Rivals(Link):
    """The rivals that are faster."""

    def __call__(self, question: Question, served: Served) -> Served:
        """By the times on this problem, else by those on near ones, else by what is forecast."""
        table, problem, entry = question.table, question.problem, served.entry
        if not table.rivals:
            return served
        if served.is_own and entry is not None:
            return replace(served, rivals=self._of_own(question, entry, served.provenance == "measured"))
        raced = min((apart for apart, _ in raced_near(problem, question.alike)), default=math.inf)
        enough = REACH if table.kernel.timed_with else NEAR_ENOUGH  # on its own problems
        if raced > enough and table.spec and table.timed:
            alike, default = table.kernel.cost.timed_as(problem), question.default
            if alike is not problem:
                default = space_for(table.arch, alike.declaration).default(alike)
            ours_us, default_us = table.modelled_us(problem, served.schedule), table.modelled_us(alike, default)
            forecasts = table.timed.forecast(problem, ours_us, default_us)
            if forecasts:
                return replace(served, rivals=forecast_offers(table.kernel, forecasts))
        known = served.expected_loss
        loss = known.mean if known and known.arch == table.arch else 0.0
        return replace(served, rivals=expected_offers(problem, question.alike, loss))

    @staticmethod
    def _of_own(question: Question, entry: Entry, here: bool) -> tuple[Offer, ...]:
        """By the times in the problem's own entry, measured on this device or not; of rivals that were not timed there, by those
        on similar problems."""
        where = "this device" if question.device_name else question.table.where(entry)
        known = measured_offers(entry, where) if here else expected_offers(entry.problem, [entry], 0.0)
        names = {each.name for each in entry.rivals or ()}
        near = expected_offers(entry.problem, question.table.alike(entry.problem), 0.0)
        offers = (*known, *(offer for offer in near if offer.name not in names))
        return tuple(sorted(offers, key=lambda offer: (offer.ratio, offer.name)))


class Published(Link):
    """The rivals that are faster by published times."""

    def __call__(self, question: Question, served: Served) -> Served:
        """Those rivals, on a GPU on which nothing like the problem was measured."""
        table = question.table
        if not table.rivals or served.rivals or served.provenance in MEASURED_PROVENANCES or not table.spec:
            return served
        return replace(
            served, rivals=published_offers(question.problem, served, question.alike, table.arch, question.device_name)
        )


class Evidence(Link):
    """What the evidence leaves open."""

    def __call__(self, question: Question, served: Served) -> Served:
        """Whether the kernel has changed since, or the evidence was taken under other conditions than requested."""
        entry, table = served.entry, question.table
        if entry is None:
            return served
        if not served.stale and edited(entry, table.kernel):
            stale = (
                f"the source of {table.kernel.name} has changed since the evidence was taken: its machine code may be another, "
                f"and its time, too; tune it again, or run: tiledsched refresh KERNEL --arch {entry.arch}"
            )
            served = replace(served, stale=stale)
        said, slowed = "", throttled(entry, table.seen_mhz)
        if entry.regime not in ("", table.regime):
            said += f", in the {entry.regime} regime; nothing was in the {table.regime} one"
        if slowed:
            said += "; the evidence was taken while the GPU's clock was held down"
        if entry.accum_mode not in (table.accum_mode, INVARIANT):
            said += f", with {entry.accum_mode} accumulators; nothing was with {table.accum_mode} ones"
        return served.then(self.step(said), held_down=slowed) if said else served


class Forced(Link):
    """The knobs that settings force, whatever was found."""

    def __call__(self, question: Question, served: Served) -> Served:
        """The answer with those knobs.

        Raises:
            ConfigError: a forced knob is unknown or has a value that cannot work.
        """
        forced, space, arch = question.table.forced, question.table.space, question.table.arch
        if not forced:
            return served
        for name, value in forced.items():
            if name not in space.knobs:
                raise ConfigError(f"forced knob {name!r} is not in {space.source}; known are {', '.join(space.knobs)}")
            choices, wrong = space.knobs[name].choices, ""
            # Numbers may leave the list: a researcher may try a tile nobody thought of. Words may not.
            known = value in choices if isinstance(value, str) else any(type(each) is type(value) for each in choices)
            if not known:
                wrong = f"; allowed on {arch}: {list(choices)}"
            elif name in HINT_KNOBS and value not in HINT_KNOBS[name]:
                wrong = f" is no such hint; compilers take {allowed_hints(name)}"
            elif "tile" in name.lower() and type(value) is int and 0 not in choices and value.bit_count() != 1:
                wrong = f"; sides of tiles are powers of two, such as {list(choices)}"
            if wrong:
                raise ConfigError(f"forced knob {name} = {value!r}{wrong}")
        # A researcher may leave the listed choices and the paths explored, but not what the constraints say cannot work.
        # Where the rest of what is served does not go with them, the rest of the default may.
        broken = ""
        for base, rest in ((served.schedule, ""), (question.default, ", and the rest is the default's")):
            schedule = base.replace(**forced)
            values = space.constraint_values(question.problem) | dict(schedule)
            unmet = "; ".join(f"{c.require} ({c.because})" for c in space.needed if not c.holds(values))
            if not unmet:
                step = self.step(f"settings force {forced}{rest}; without them: ", leads=True)
                steps, entry = (*served.steps, step), served.entry
                return Served(schedule=schedule, provenance="forced", steps=steps, entry=entry, forced=forced)
            broken = broken or unmet
        raise ConfigError(f"forced knobs {forced} cannot work for {question.problem} on {arch}: {broken}")


GUESSES: tuple[Finder, ...] = (Neighbours(), Modelled(), OtherKinds(), ColdStart(), Default())
"""The links that know a schedule for a problem that was not measured, one of which always does."""
EXACT: tuple[Finder, ...] = (Exact(),)
"""The link for a problem that was measured."""
SHARED: tuple[Finder, ...] = (Bucket(), *GUESSES)
"""The links for all problems of about one size that were not."""
FOUND: tuple[Refiner, ...] = (Sound(), Rivals())
"""The links after one that found a schedule."""
AT_LAST: tuple[Refiner, ...] = (Published(), Evidence(), Forced())
"""The links for each problem by itself, also where problems of about one size share what was found."""


INVARIANT_LAST: tuple[Refiner, ...] = (Evidence(), Forced())
"""The links after a choice whose bits must not depend on the batch: none that chooses by the batch, and no rivals."""


def find(links: Sequence[Finder], question: Question, passed: Sequence[LinkStep] = ()) -> Served | None:
    """What the first link that has an answer finds, as :data:`FOUND` leaves it; None where no link has one. `passed` are
    steps to links that had none before."""
    steps = [*passed]
    for link in links:
        served = link(question)
        if served is not None:
            return refined(FOUND, question, replace(served, steps=(*steps, *served.steps)))
        steps.append(LinkStep(link=type(link).__name__))
    return None


def refined(links: Sequence[Refiner], question: Question, served: Served) -> Served:
    """An answer as some links leave it."""
    for link in links:
        served = link(question, served)
    return served
