"""Which schedule is served for a problem, and why.

The first of these that exists is served:

1. the schedule that was measured for this very problem on this device;
2. the one measured for it on another device of the same arch, or of one whose machine code is the same;
3. the one measured for a problem of its bucket: of about its lengths, and equal in all else;
4. a schedule that won on the nearest measured problems of the same kind (see `tiledsched.serve.transfer`), if one of them is in
   the neighbourhood or nearer than what the performance model chose for;
5. the entry that the performance model chose for this problem or the nearest one of its kind;
6. a schedule that won on problems of the same kind, however far, or else of other kinds;
7. the kernel's own choice where nothing was measured, else its default.

The kernel declares what a kind is. The model predicts a problem better than winners of another kind do.

An entry that was measured with another compiler is served and called stale: this compiler may make other machine code of the
schedule, which takes another time. Without a compiler it is stale where bundles hold programs, but not the one measured.

Of choices that were not measured the first is served whose program is not known to spill registers, nor to fail to build
(:mod:`tiledsched.store.spills`). Nothing that a launch finds changes a choice, so that all processes make the same one.

A problem that was not measured in the requested regime or accuracy class is served by its measurement in the other regime, or in
the exact class, and the reason says so. A less exact class never takes the place of the exact one.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tiledsched.build.toolchain import takes_hints
from tiledsched.core.device import ARCHS, SAME_CODE, arch_spec
from tiledsched.core.errors import ConfigError, SpaceError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import HINT_KNOBS, KnobValue, Schedule, allowed_hints
from tiledsched.core.space import SearchSpace, accuracy_class
from tiledsched.core.space_files import space_for
from tiledsched.rivals.forecast import Forecast, TimedProblems, timed_problems
from tiledsched.rivals.offers import Offer, expected_offers, forecast_offers, measured_offers, published_offers
from tiledsched.serve.transfer import (
    ALTERNATIVES,
    NEAR_KIND,
    OTHER_KIND,
    ExpectedLoss,
    Transfer,
    TransferParameters,
    expected_loss,
    log_us,
    transfer,
)
from tiledsched.store.evidence import clocks_of, edited, for_compiler, leaders, precedence, throttled
from tiledsched.store.records import Entry
from tiledsched.store.spills import DOES_NOT_BUILD, Spills, classes_of, joined

MEASURED_PROVENANCES = ("measured", "transferred")
"""Provenances of entries that were measured on some device."""
EXACT = "fp32"
"""The accuracy class that may be served for any other."""
NEIGHBOURHOOD = 0.5
"""The distance up to which a measured problem serves others in place of what the model chose for them: half an octave. Farther
away, a transfer from one tuned problem is slower than the model's choice in 43 of 90 cases (docs/results/serving.md)."""
NEAR_ENOUGH = 0.2
"""The distance up to which a problem on which rivals raced our schedule says more than what was timed on many others: there an
untuned choice loses half a percent on average."""
MAX_ANSWERS = 4096
"""Answers for problems that were not measured which a table remembers."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The answer for one problem."""

    schedule: Schedule
    """What is launched."""
    provenance: str
    """measured, transferred, modelled, default, or forced (by settings)."""
    reason: str
    """One sentence for people."""
    entry: Entry | None
    """The evidence; None for the default."""
    forced: Mapping[str, KnobValue]
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


@dataclass(kw_only=True)
class _Index:
    """The entries of one arch, as they are looked for."""

    modelled: list[Entry] = field(default_factory=list)
    """Entries that no device measured."""
    measured: list[Entry] = field(default_factory=list)
    """All other entries."""
    by_problem: dict[Problem, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    """Measured entries, by their problem."""
    by_kind: dict[tuple[Any, ...], list[Entry]] = field(default_factory=lambda: defaultdict(list))
    """Measured entries, by the kind of their problem."""
    gated: dict[Schedule, list[Problem]] = field(default_factory=lambda: defaultdict(list))
    """The problems of measured entries whose outputs were checked, by their schedule."""

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        if entry.provenance not in MEASURED_PROVENANCES:
            self.modelled.append(entry)
            return
        self.measured.append(entry)
        self.by_problem[entry.problem].append(entry)
        self.by_kind[entry.problem.declaration.similarity.kind(entry.problem)].append(entry)
        if entry.measurement is not None and entry.measurement.accuracy is not None:
            for schedule in dict.fromkeys((entry.schedule, *entry.ties)):
                self.gated[schedule].append(entry.problem)


class LookupTable:
    """The entries of one kernel, ready for lookup. A table never changes: load a new one to see new entries.

    Args:
        entries: every entry that may be served; those of other kernels are ignored.
        kernel: the kernel.
        regime: the requested regime, burst or sustained.
        accum_mode: the requested accuracy class.
        forced: values of knobs that settings force.
        spaces: search spaces to use in place of the kernel's own.
        rivals: whether faster rivals may be served.
        compiler: version of the installed compiler; empty where none is installed.
        at_hand: gives the fingerprints of machine code that needs no compiler; called for entries of another compiler, or where
            none is installed.
        spills: gives what is known, for an arch, of programs that spill registers or do not build.
        policy: how problems that were not measured are served from others of their kind.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        kernel: KernelClass,
        *,
        regime: str = "burst",
        accum_mode: str = "fp32",
        forced: Mapping[str, KnobValue] | None = None,
        spaces: Sequence[SearchSpace] = (),
        rivals: bool = False,
        compiler: str = "",
        at_hand: Callable[[], Collection[str]] = frozenset,
        spills: Callable[[str], Spills] = lambda arch: {},
        policy: TransferParameters = NEAR_KIND,
    ) -> None:
        self.kernel, self.regime, self.accum_mode = kernel, regime, accum_mode
        self._policy = policy
        self.compiler, self._at_hand, self._rivals = compiler, at_hand, rivals
        self.forced = dict(forced or {})
        self._spills = functools.cache(spills)
        self._by_arch: dict[str, list[Entry]] = {}
        entries = list(entries)
        self._seen_mhz = clocks_of(entries)
        mine = [
            entry
            for entry in for_compiler(entries, compiler)
            if entry.kernel == kernel.name and entry.accum_mode in (accum_mode, EXACT)
        ]
        mine.sort(key=self._mismatch)
        covered = set()
        for entry in mine:
            place, measured = (entry.arch, entry.problem, entry.device_name), entry.provenance in MEASURED_PROVENANCES
            if not self._mismatch(entry) or (measured and place not in covered):
                self._by_arch.setdefault(entry.arch, []).append(entry)
                if measured:
                    covered.add(place)
        self._spaces = {space.arch: space for space in spaces}
        self._indexes: dict[str, _Index] = {}
        self._answers: dict[tuple[Problem, str, str], Served] = {}
        self._timed: dict[str, TimedProblems | None] = {}

    def device_names(self, arch: str) -> list[str]:
        """The GPUs of an arch on which something was measured."""
        return sorted({entry.device_name for entry in self._by_arch.get(arch, ()) if entry.device_name})

    def _mismatch(self, entry: Entry) -> int:
        """0 for an entry of the requested regime and accuracy class, and more the worse it is in place of such an entry."""
        return (entry.regime not in ("", self.regime)) + 2 * (entry.accum_mode != self.accum_mode)

    def _note(self, entry: Entry | None, slowed: str) -> str:
        """A remark for people where the evidence is of another regime or accuracy class, or was taken at too low a clock."""
        note = ""
        if entry is not None and entry.regime not in ("", self.regime):
            note += f", in the {entry.regime} regime; nothing was in the {self.regime} one"
        if slowed:
            note += "; the evidence was taken while the GPU's clock was held down"
        if entry is not None and entry.accum_mode != self.accum_mode:
            note += f", with {entry.accum_mode} accumulators; nothing was with {self.accum_mode} ones"
        return note

    def resolve(self, problem: Problem, arch: str, device_name: str = "") -> Served:
        """What is served for a problem.

        Args:
            problem: what is to be computed.
            arch: of the device.
            device_name: the driver's name for the device; empty where only the arch is known.

        Raises:
            SpaceError: the arch has no search space.
            ConfigError: a forced knob makes the schedule invalid.
        """
        space = self._space(arch)
        served = (
            self._exact(problem, device_name, space)
            or self._shared(problem, device_name, space)
            or self._from_others(problem, space)
        )
        if self._rivals and not served.rivals and served.provenance not in MEASURED_PROVENANCES and arch in ARCHS:
            alike = self._alike(problem, space)
            served = replace(served, rivals=published_offers(problem, served, alike, arch, device_name))
        if served.entry is not None and not served.stale and edited(served.entry, self.kernel):
            served = replace(
                served,
                stale=f"the source of {self.kernel.name} has changed since the evidence was taken: its machine code may be "
                f"another, and its time, too; tune it again, or run: tiledsched refresh KERNEL --arch {served.entry.arch}",
            )
        slowed = throttled(served.entry, self._seen_mhz) if served.entry else ""
        note = self._note(served.entry, slowed)
        if note:
            served = replace(served, reason=served.reason + note, held_down=slowed)
        return self._with_forced(served, problem, space) if self.forced else served

    def knowing(self, arch: str, spills: Spills) -> LookupTable:
        """This table, with more known of programs of an arch that spill registers or do not build."""
        before, other = self._spills, copy.copy(self)
        other._spills = functools.cache(lambda each: joined(before(each), spills) if each == arch else before(each))
        other._answers = {}
        return other

    def spills(self, arch: str) -> Spills:
        """What is known of programs of an arch that spill registers or do not build."""
        return self._spills(arch)

    def fallback_for(self, served: Served, problem: Problem, arch: str) -> Served | None:
        """What is served in place of a schedule that does not compile for the layouts of a call: its next alternative, and after
        the last one the default. None where the default failed, or the schedule is forced.
        """
        if served.alternatives:
            following, *rest = served.alternatives
            return replace(
                served,
                schedule=following,
                alternatives=tuple(rest),
                reason=f"{served.schedule.short()} does not compile for arrays laid out like these; the next choice: "
                + served.reason.rpartition("the next choice: ")[2],
            )
        default = self._default(self._space(arch), problem)
        if served.forced or served.schedule == default:
            return None
        reason = f"{served.schedule.short()} ({served.provenance}) does not compile for arrays laid out like these"
        return Served(schedule=default, provenance="default", entry=None, forced={}, reason=reason)

    def _exact(self, problem: Problem, device_name: str, space: SearchSpace) -> Served | None:
        """The schedule measured for this very problem, on this device if possible; None where it was not measured."""
        entries = self._index(space).by_problem.get(problem, ())
        same = [entry for entry in entries if not space.unworkable(entry.schedule, entry.problem)]
        if not same:
            return None
        entry = min(
            same,
            key=lambda entry: (entry.device_name != device_name, *precedence(entry, self._seen_mhz), entry.device_name),
        )
        here = entry.provenance == "measured" and device_name in ("", entry.device_name)
        where = "this device" if device_name and here else _measured_on(entry, space)
        form = ""
        if _is_wide(problem) and not _is_wide(entry.problem):  # other machine code of the same schedule
            here, form = False, ", but not in its wide form: these tensors take 64-bit indices"
        offers = self._offers(entry, space, where if here else "") if self._rivals else ()
        return Served(
            schedule=entry.schedule,
            provenance="measured" if here else "transferred",
            entry=entry,
            forced={},
            reason=f"this problem was measured on {where}{form}",
            stale=self._stale(entry),
            rivals=offers,
            gated=tuple(self._index(space).gated.get(entry.schedule, ())),
        )

    def _offers(self, entry: Entry, space: SearchSpace, where: str) -> tuple[Offer, ...]:
        """The rivals that may serve the problem of an entry, by the entry's own times of rivals; for those that were not timed
        there, by the times on similar problems.

        Args:
            entry: the evidence.
            space: of its arch.
            where: this device, where the entry was measured on it; else empty.
        """
        known = measured_offers(entry, where) if where else expected_offers(entry.problem, [entry], 0.0)
        names = {each.name for each in entry.rivals or ()}
        near = (
            offer
            for offer in expected_offers(entry.problem, self._alike(entry.problem, space), 0.0)
            if offer.name not in names
        )
        return tuple(sorted((*known, *near), key=lambda offer: (offer.ratio, offer.name)))

    def _stale(self, entry: Entry) -> str:
        if entry.provenance != "measured" or not entry.compiler or self.compiler == entry.compiler:
            return ""
        at_hand = self._at_hand()
        if entry.fingerprint in at_hand:
            return ""
        if not self.compiler:
            if not entry.fingerprint or not at_hand:  # unknown, or nothing runs, and a call says so
                return ""
            return (
                "no bundle here holds the machine code that was measured, and there is no compiler: another program of this "
                "schedule may be served, which takes another time; make the bundle again: tiledsched warmup -o FILE"
            )
        return (
            f"tileiras {entry.compiler} built what was measured, and here is {self.compiler}: its machine code may be "
            f"another, and its time, too; run: tiledsched refresh {self.kernel.name} --arch {entry.arch}"
        )

    def _index(self, space: SearchSpace) -> _Index:
        """The entries of an arch that the installed compiler can build, their schedules completed with the space's defaults; and
        what was measured on an arch whose machine code is the same.
        """
        if space.arch not in self._indexes:
            found = self._indexes[space.arch] = _Index()
            twins = self._by_arch.get(SAME_CODE.get(space.arch, ""), [])
            alike = [e.replace(provenance="transferred") for e in twins if e.provenance in MEASURED_PROVENANCES]
            for entry in [*self._by_arch.get(space.arch, []), *alike]:
                if takes_hints(self.compiler, entry.schedule):
                    second = entry.runner_up
                    usable = second if second is not None and takes_hints(self.compiler, second) else None
                    found.add(entry.replace(schedule=space.complete(entry.schedule), runner_up=usable))
        return self._indexes[space.arch]

    def _alike(self, problem: Problem, space: SearchSpace) -> Sequence[Entry]:
        """The entries that were measured for problems of the same kind."""
        return self._index(space).by_kind.get(self.kernel.similarity.kind(problem), ())

    def _shared(self, problem: Problem, device_name: str, space: SearchSpace) -> Served | None:
        """The answer that all problems of about this size share; None where its schedule is not valid for this one."""
        about = self.kernel.similarity.bucketed(problem)
        key = (about, space.arch, device_name)
        if key not in self._answers:
            if len(self._answers) >= MAX_ANSWERS:
                self._answers.clear()
            self._answers[key] = self._of_bucket(about, device_name, space) or self._from_others(about, space)
        served = self._answers[key]
        return None if space.unworkable(served.schedule, problem) else served

    def _of_bucket(self, about: Problem, device_name: str, space: SearchSpace) -> Served | None:
        """The schedule measured for the problem that stands for a bucket, or for the nearest other one in it; None where none of
        them was measured."""
        similarity = self.kernel.similarity
        near = sorted(
            {entry.problem for entry in self._alike(about, space) if similarity.bucketed(entry.problem) == about},
            key=lambda problem: (similarity.distance(problem, about), problem),
        )
        found = next((each for problem in near if (each := self._exact(problem, device_name, space))), None)
        if found is None or found.entry is None:
            return None
        entry = found.entry
        apart = Transfer(
            schedule=found.schedule, entry=entry, distance=similarity.distance(entry.problem, about), neighbours=1
        )
        return replace(
            found,
            provenance="transferred",
            reason=f"{entry.problem}, which is of about this size, was measured on {_measured_on(entry, space)}",
            stale="",
            expected_loss=expected_loss(apart, about),
            rivals=self._offers(entry, space, "") if self._rivals else (),
        )

    def _from_others(self, problem: Problem, space: SearchSpace) -> Served:
        """What is served for a problem that was not measured."""
        index, alike = self._index(space), self._alike(problem, space)
        modelled = _modelled(index.modelled, problem, space, "nothing near it" if alike else "nothing")
        chosen_for = [modelled.entry] if modelled and modelled.entry else []
        far = chosen_for and _apart(alike, problem) > max(NEIGHBOURHOOD, _apart(chosen_for, problem))
        found = (
            (None if far else self._transferred(alike, problem, space))
            or modelled
            or self._transferred(index.measured, problem, space, " of another kind")
            or self._unmeasured(problem, space)
        )
        found = self._sound(found, problem, space)
        found = replace(found, gated=tuple(index.gated.get(found.schedule, ())))
        if not self._rivals:
            return found
        raced = _apart([each for each in alike if each.rivals], problem)
        forecasts = {} if raced <= NEAR_ENOUGH else self._forecasts(problem, found.schedule, space)
        if forecasts:
            return replace(found, rivals=forecast_offers(self.kernel, forecasts))
        known = found.expected_loss
        loss = known.mean if known and known.arch == space.arch else 0.0
        return replace(found, rivals=expected_offers(problem, alike, loss))

    def _sound(self, served: Served, problem: Problem, space: SearchSpace) -> Served:
        """What is served where nothing was measured: the first choice that is not known to spill registers or to fail to build.
        Where all are, the one that spills least."""
        choices, known = (served.schedule, *served.alternatives), self.spills(space.arch)
        if len(choices) == 1 or served.schedule.id not in known:
            return served

        def spilled(schedule: Schedule) -> int:
            classes = known.get(schedule.id)
            found = classes_of(problem, schedule, space.arch) if classes else []
            return max((classes.get(each, 0) for each in found), default=0) if classes else 0

        lost = [spilled(each) for each in choices]
        place = lost.index(min(lost))
        if not place:
            return served
        passed = "; ".join(
            f"{each.short()} {_lost_text(size)}" for each, size in zip(choices[:place], lost, strict=False)
        )
        return replace(
            served,
            schedule=choices[place],
            alternatives=choices[place + 1 :],
            reason=f"{served.reason}; of its choices {passed}, so that the next one is served",
        )

    def _forecasts(self, problem: Problem, schedule: Schedule, space: SearchSpace) -> Mapping[str, Forecast]:
        """What rivals and our choice are expected to take, by name; nothing where no times like these ship."""
        if space.arch not in ARCHS:
            return {}
        spec = arch_spec(space.arch)

        def default_us(p: Problem) -> float:
            return math.exp(log_us(p, self._default(space, p), spec))

        if space.arch not in self._timed:
            measured = self._index(space).measured
            self._timed[space.arch] = timed_problems(self.kernel, space.arch, measured, default_us)
        timed = self._timed[space.arch]
        return timed.forecast(problem, math.exp(log_us(problem, schedule, spec)), default_us(problem)) if timed else {}

    def _default(self, space: SearchSpace, problem: Problem) -> Schedule:
        """The default schedule, in the requested accuracy class where the problem has it (bfloat16 has no fp16 accumulators)."""
        try:
            return space.default(problem, pinned=accuracy_class(space, self.accum_mode))
        except SpaceError:
            return space.default(problem)

    def _transferred(
        self, entries: Sequence[Entry], problem: Problem, space: SearchSpace, what: str = ""
    ) -> Served | None:
        """A choice among the schedules that won on other problems; `what` describes these for the reason."""
        alone = self.kernel.similarity.requires_same_kind(problem) and not self._alike(problem, space)
        if space.arch not in ARCHS or alone:
            return None
        found = transfer(problem, entries, space, arch_spec(space.arch), OTHER_KIND if what else self._policy)
        if found is None:
            return None
        where = _measured_on(found.entry, space)
        judges = "it" if found.neighbours == 1 else f"{found.neighbours} similar problems"
        reason = (
            f"the nearest problem{what} is {found.entry.problem}, measured on {where}; by the measurements of {judges}, "
            "this schedule is expected to lose least"
        )
        return Served(
            schedule=found.schedule,
            provenance="transferred",
            entry=found.entry,
            forced={},
            reason=reason,
            alternatives=found.others,
            expected_loss=expected_loss(found, problem),
        )

    def _unmeasured(self, problem: Problem, space: SearchSpace) -> Served:
        """The kernel's own choice for problems of which nothing was measured, or the default."""
        default = self._default(space, problem)
        if space.arch in ARCHS:
            spec, choose = arch_spec(space.arch), self.kernel.similarity.cold_start
            chosen = choose(problem, default, space, lambda schedule: log_us(problem, schedule, spec))
            if chosen not in (None, default):
                return Served(
                    schedule=chosen,
                    provenance="modelled",
                    entry=None,
                    forced={},
                    reason="nothing like it was measured or tuned; a plain schedule, by rule and model",
                )
        return Served(
            schedule=default,
            provenance="default",
            entry=None,
            forced={},
            reason=f"nothing is known about {space.arch} for this kind of problem",
        )

    def _with_forced(self, served: Served, problem: Problem, space: SearchSpace) -> Served:
        """What is served, with the knobs that settings force.

        Raises:
            ConfigError: a forced knob is unknown or has a value that cannot work.
        """
        for name, value in self.forced.items():
            if name not in space.knobs:
                raise ConfigError(f"forced knob {name!r} is not in {space.source}; known are {', '.join(space.knobs)}")
            choices = space.knobs[name].choices
            # Numbers may leave the list: a researcher may try a tile nobody thought of. Words may not.
            known = value in choices if isinstance(value, str) else any(type(each) is type(value) for each in choices)
            if not known:
                raise ConfigError(f"forced knob {name} = {value!r}; allowed on {space.arch}: {list(choices)}")
            if name in HINT_KNOBS and value not in HINT_KNOBS[name]:
                raise ConfigError(
                    f"forced knob {name} = {value!r} is no such hint; compilers take {allowed_hints(name)}"
                )
            if "tile" in name.lower() and type(value) is int and 0 not in choices and value.bit_count() != 1:
                raise ConfigError(
                    f"forced knob {name} = {value!r}; sides of tiles are powers of two, such as {list(choices)}"
                )
        # A researcher may leave the listed choices and the paths explored, but not what the constraints say cannot work.
        # Where the rest of what is served does not go with them, the rest of the default may.
        reason = f"settings force {self.forced}; without them: {served.reason}"
        broken: list[str] = []
        for base in (served.schedule, self._default(space, problem)):
            schedule = base.replace(**self.forced)
            values = space.constraint_values(problem) | dict(schedule)
            unmet = [f"{c.require} ({c.because})" for c in space.needed if not c.holds(values)]
            if not unmet:
                return Served(
                    schedule=schedule, provenance="forced", entry=served.entry, forced=self.forced, reason=reason
                )
            broken = broken or unmet
            reason = f"settings force {self.forced}, and the rest is the default's; without them: {served.reason}"
        raise ConfigError(f"forced knobs {self.forced} cannot work for {problem} on {space.arch}: {'; '.join(broken)}")

    def _space(self, arch: str) -> SearchSpace:
        if arch not in self._spaces:
            self._spaces[arch] = space_for(arch, self.kernel)
        return self._spaces[arch]

    def known_arch(self, arch: str) -> bool:
        """Whether the kernel has a search space for `arch`."""
        try:
            self._space(arch)
        except SpaceError:
            return False
        return True


def _lost_text(spilled: int) -> str:
    """Why a program is not served, in words."""
    return "does not build" if spilled == DOES_NOT_BUILD else f"spills {spilled} bytes of registers a thread"


def _is_wide(problem: Problem) -> bool:
    """Whether the kernel works on a problem with 64-bit indices. A call whose tensors need them says so of its problem."""
    return bool(getattr(problem, "wide", False))


def _measured_on(entry: Entry, space: SearchSpace) -> str:
    """Where an entry was measured, in words."""
    where = entry.device_name or entry.arch
    return where if entry.arch == space.arch else f"{where} ({entry.arch}, whose machine code is the same)"


def _apart(entries: Iterable[Entry], problem: Problem) -> float:
    """The distance of the nearest entry's problem; infinite where there is no entry."""
    distance = problem.declaration.similarity.distance
    return min((distance(entry.problem, problem) for entry in entries), default=math.inf)


def _modelled(
    modelled: Sequence[Entry], problem: Problem, space: SearchSpace, measured: str = "nothing"
) -> Served | None:
    """The entry that the performance model chose for the nearest problem of the same kind; None where there is none. `measured`
    says for the reason what was measured.
    The next choices are its runner-up, and what the model chose for the problems after it.
    """
    kind, distance = problem.declaration.similarity.kind, problem.declaration.similarity.distance
    alike = [entry for entry in modelled if kind(entry.problem) == kind(problem)]
    usable = [entry for entry in alike if not space.unworkable(entry.schedule, problem)]
    if not usable:
        return None
    usable.sort(key=lambda entry: (distance(entry.problem, problem), entry.rank, entry.problem, entry.device_name))
    entry = usable[0]
    choices = [entry.schedule]
    for each in map(space.complete, dict.fromkeys(schedule for one in usable for schedule in leaders(one))):
        if len(choices) > ALTERNATIVES:
            break
        if each not in choices and not space.unworkable(each, problem):
            choices.append(each)
    what = "this problem" if entry.problem == problem else f"the nearest problem ({entry.problem})"
    return Served(
        schedule=entry.schedule,
        provenance=entry.provenance,
        entry=entry,
        forced={},
        reason=f"{measured} was measured; the entry for {what} is the model's choice",
        alternatives=tuple(choices[1:]),
    )
