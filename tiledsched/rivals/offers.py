"""Which rivals are faster than our kernel, and which one is called for a problem in its place.

The evidence comes from a tune or a refresh: the ratio of each rival's time to ours, paired by round in one interleaved run, and
what a call of the rival costs the host. It is used when a plan is made, never in a call. A problem on which rivals were timed
goes by its own evidence. Any other problem goes by that of near problems, and by the loss that is expected of our own schedule,
which was tuned for none of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.core.config import log
from tiledsched.core.device import arch_spec
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.measure.runner import RivalTime
from tiledsched.rivals.forecast import OURS, Forecast
from tiledsched.store.manifest import published_figures
from tiledsched.store.records import Entry

ELSEWHERE = -2
"""In place of a device's index: no CUDA device and not the CPU, which is -1."""
SAME = 0.003
"""Share of the time by which a rival must be faster, beyond doubt: as in a race of schedules."""
HOST_ROOM = 4.0
"""Largest ratio of a rival's time on the host to its time on the GPU. A call is seldom more than a quarter of a model's step;
above this ratio calls in a row wait for the host, and the gain on the GPU is lost, unless our own kernel takes longer still. A
captured graph costs the host nothing, so that a rival above the ratio is served there, and only there."""
WORTH_US = 1.0
"""Smallest gain of a call, in microseconds, from a rival whose first call takes seconds: with less a process hardly earns them
back."""
PLANNED_WORTH_US = 1000.0
"""Smallest gain of a call, in microseconds, from a rival that plans each new problem for tens of milliseconds: the layers of one
model, which share a plan, earn it back."""
CAUTION = 2.0
"""Spreads by which the expected time of our untuned choice counts as longer, where a rival's counts as longer by one: our kernel
serves where it is surely about as fast."""
DISPATCH_US = 4.0
"""Microseconds that calling a rival through one of our functions adds to what the rival's own call takes the host."""
NEAR_MARGIN = 0.01
"""Smallest share of the time that a rival must gain where only other problems were measured."""
NEIGHBOURS = 4
"""Number of the nearest problems whose times of a rival are used."""
REACH = 3.0
"""Largest distance of a problem whose times are used. Its weight falls by a factor of e over a distance of 1."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A rival that may be called for a problem: how long it takes, and how that is known."""

    name: str
    """The kernel's name for the rival."""
    ratio: float
    """Its time over the time of our schedule; below 1."""
    capturable: bool = True
    """Whether a CUDA graph may hold it."""
    only_captured: bool = False
    """Whether it is served in captured graphs only, because its eager calls would wait for the host."""
    reason: str
    """One sentence for people."""

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {name: getattr(self, name) for name in ("name", "ratio", "capturable", "only_captured", "reason")}


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A rival that is served, ready to be called."""

    offer: Offer
    """Why it is served."""
    call: Callable[..., Any]
    """Computes the outputs of input tensors, in the order in which the kernel declares both."""

    @property
    def name(self) -> str:
        """The kernel's name for the rival."""
        return self.offer.name


def pays(time: RivalTime, kernel: KernelClass, *, captured: bool = False) -> bool:
    """Whether calling a rival pays: it was faster beyond noise, gains enough to be compiled, and its host keeps up with the GPU.

    Args:
        time: the rival's time, paired with ours.
        kernel: the kernel.
        captured: ask about calls in a CUDA graph, which must be able to hold the rival, and where the host does not matter.
    """
    if any(each.role == "inout" for each in kernel.array_fields.values()):
        return False  # it returns what our kernel writes in place
    faster = not time.failure and time.ratio_high is not None and time.ratio_high < 1 - SAME
    gain_us = (time.ours_us or 0.0) - (time.median_us or 0.0)
    return faster and _worth(time.name, gain_us, kernel) and (time.capturable if captured else _host_keeps_up(time))


def _worth(name: str, gain_us: float, kernel: KernelClass) -> bool:
    """Whether a call gains enough for what the first call of a rival takes."""
    return name not in kernel.compiled_rivals or gain_us >= WORTH_US


def _host_keeps_up(time: RivalTime) -> bool:
    """Whether the host queues eager calls of a rival as fast as the GPU runs them, or at least as fast as ours would run."""
    room = max(HOST_ROOM * (time.median_us or 0.0), time.ours_us or 0.0)
    return time.median_us is not None and time.host_us <= room


def _fastest_first(offers: Iterable[Offer]) -> tuple[Offer, ...]:
    return tuple(sorted(offers, key=lambda each: (each.ratio, each.name)))


def measured_offers(entry: Entry, where: str) -> tuple[Offer, ...]:
    """The rivals that may be called for the problem of an entry, by its own times, the fastest first.

    Args:
        entry: the evidence.
        where: the name of the device, for the reason.
    """
    kernel = entry.problem.declaration
    return _fastest_first(
        Offer(
            name=each.name,
            ratio=float(each.ratio or 0),
            capturable=each.capturable,
            only_captured=not pays(each, kernel),
            reason=f"{_gain(each.ratio)} faster than our kernel on this problem, measured on {where} "
            f"({each.median_us:.1f} against {each.ours_us:.1f} us, {each.version})",
        )
        for each in entry.rivals or ()
        if pays(each, kernel) or pays(each, kernel, captured=True)
    )


def expected_offers(problem: Problem, entries: Iterable[Entry], loss: float) -> tuple[Offer, ...]:
    """The rivals that are expected to be faster on a problem on which they were not timed, the fastest first.

    The expected ratio is the mean, over the near problems on which a rival was timed, of its time over ours, with nearer problems
    weighing more; divided by 1 plus the expected loss of our own schedule.

    Args:
        problem: what is to be computed.
        entries: measured entries of the problem's kind.
        loss: the expected loss of our schedule; 0 where it is not known.
    """
    near = raced_near(problem, entries)
    names = dict.fromkeys(each.name for _, entry in near for each in entry.rivals or ())
    found = (_expected_offer(problem, name, near, loss) for name in names)
    return _fastest_first(each for each in found if each is not None)


def _expected_offer(problem: Problem, name: str, near: Sequence[tuple[float, Entry]], loss: float) -> Offer | None:
    """The offer of one rival by the nearest problems on which it was timed; None where it is not expected to be worth a call."""
    kernel = problem.declaration
    times = [(apart, entry, each) for apart, entry in near for each in entry.rivals or () if each.name == name]
    times = times[:NEIGHBOURS]
    failed = any(each.failure or each.ratio_high is None for _, _, each in times)  # on a problem like this one
    capturable, keeps_up = all(each.capturable for *_, each in times), all(_host_keeps_up(each) for *_, each in times)
    if name in kernel.planning_rivals or failed or not (keeps_up or capturable):
        return None
    weights = [math.exp(-apart) for apart, _, _ in times]
    # The far end of each interval: noise is no gain.
    mean = sum(weight * math.log(each.ratio_high or 1.0) for weight, (_, _, each) in zip(weights, times, strict=True))
    ratio = math.exp(mean / sum(weights)) / (1 + loss)
    if ratio >= 1 / (1 + NEAR_MARGIN) or not _worth(name, (1 - ratio) * (times[0][2].ours_us or 0.0), kernel):
        return None
    timed = "1 similar problem" if len(times) == 1 else f"{len(times)} similar problems"
    reason = f"expected to be {_gain(ratio)} faster, judging by its times on {timed} (nearest: {times[0][1].problem})"
    if loss:
        reason += f" and by the {loss:.1%} that our untuned choice is expected to lose"
    return Offer(name=name, ratio=ratio, capturable=capturable, only_captured=not keeps_up, reason=reason)


def forecast_offers(kernel: KernelClass, forecasts: Mapping[str, Forecast]) -> tuple[Offer, ...]:
    """The rivals that are expected to be faster than our untuned choice for a caller, the fastest first.

    Expected times count as longer by their spread, ours by :data:`CAUTION` spreads.
    A rival that plans each new problem for tens of milliseconds serves in captured graphs, which are made for one problem and
    replayed, and in eager calls only where one call gains enough.
    """
    ours = forecasts.get(OURS)
    if ours is None:
        return ()
    offers, own_cautious = [], math.exp(CAUTION * ours.spread)
    for name, each in forecasts.items():
        cautious, gain_us = math.exp(each.spread), ours.us - each.us
        ratio = each.us * cautious / (ours.us * own_cautious)
        if name == OURS or ratio >= 1 or not _worth(name, gain_us, kernel):
            continue
        eager = max(each.us, each.host_us + DISPATCH_US) * cautious < max(ours.us, ours.host_us) * own_cautious
        eager = eager and (name not in kernel.planning_rivals or gain_us >= PLANNED_WORTH_US)
        reason = (
            f"expected to take {each.us:.1f} us, and our untuned choice {ours.us:.1f} us (+-{ours.spread:.0%} beside it), "
            f"by times on {each.cases} problems (nearest: {each.nearest})"
        )
        offers.append(Offer(name=name, ratio=ratio, only_captured=not eager, reason=reason))
    return _fastest_first(offers)


def published_offers(
    problem: Problem, served: Any, alike: Iterable[Entry], arch: str, device_name: str
) -> tuple[Offer, ...]:
    """The rivals that are faster by published figures, on a GPU on which nothing like it was measured, the fastest first.

    A rival must be faster by the margin of the GPU's figures. One that plans each problem anew must also gain enough in a call.

    Args:
        problem: what is to be computed.
        served: the answer of the table, which nothing measured.
        alike: measured entries of the problem's kind: where rivals were timed on a near one, that decides.
        arch: of the GPU.
        device_name: the driver's name for the GPU; empty for the representative of the arch.
    """
    kernel, spec, schedule, entry = problem.declaration, arch_spec(arch, device_name), served.schedule, served.entry
    figures = published_figures(kernel.name)
    times = kernel.cost.published(problem, schedule, spec, device_name or spec.device, figures)
    if not times or raced_near(problem, alike):
        return ()
    built = 1.0  # how much more the estimate is that knew the machine code
    if entry is not None and entry.model_us and entry.schedule == schedule:
        plain, cost = arch_spec(arch), kernel.cost
        assumed = cost.expected(entry.problem, schedule, plain)
        log_us = math.log(cost.model(entry.problem, schedule, assumed, plain))
        built = entry.model_us / math.exp(log_us)  # rounded as where schedules are compared by logarithms
    offers = []
    for each in times:
        ours_us = each.ours_us * built
        least_us = PLANNED_WORTH_US if each.rival in kernel.planning_rivals else 0.0
        if each.us * (1 + each.margin) < ours_us and ours_us - each.us >= least_us:
            ratio = each.us / ours_us
            reason = (
                f"expected to be {_gain(ratio)} faster by published times ({each.us:.0f} us; ours is modelled at "
                f"{ours_us:.0f} us; {each.source})"
            )
            offers.append(Offer(name=each.rival, ratio=ratio, reason=reason))
    return _fastest_first(offers)


def raced_near(problem: Problem, entries: Iterable[Entry]) -> list[tuple[float, Entry]]:
    """The entries on which rivals were timed that say something about a problem, with their distances, the nearest first."""
    distance, kind = problem.declaration.similarity.distance, problem.declaration.similarity.rival_kind
    raced = [
        (distance(entry.problem, problem), entry)
        for entry in entries
        if entry.rivals and kind(entry.problem) == kind(problem)
    ]
    return sorted((pair for pair in raced if pair[0] <= REACH), key=lambda pair: (pair[0], pair[1].problem))


def _gain(ratio: float | None) -> str:
    return f"{1 / (ratio or 1.0):.2f}x"


def choose_rivals(
    served: Any, make: Callable[[], Mapping[str, Callable[..., Any]]]
) -> tuple[Rival | None, Rival | None]:
    """The fastest installed rival for eager calls, and the fastest for calls that a CUDA graph captures, which may be the same
    one; None for our own kernel.

    Args:
        served: the answer of the table.
        make: makes the kernel's rivals for the problem, by name; called only where one may be served.
    """
    if not served.rivals:
        return None, None
    try:
        found = make()
    except Exception as error:  # of a declaration: it costs the rival, not the call
        log.warning("no rival can be made, our own kernel is served: %s: %s", type(error).__name__, error)
        return None, None
    there = [Rival(offer=each, call=found[each.name]) for each in served.rivals if each.name in found]
    return (
        next((each for each in there if not each.offer.only_captured), None),
        next((each for each in there if each.offer.capturable), None),
    )


def stand_in(p: Problem, numbers: Mapping[str, float]) -> Callable[..., Any] | None:
    """What computes a problem while its program is compiled: what its kernel declares for that, or the first of its rivals that
    compiles nothing. None where nothing does.

    Args:
        p: the problem.
        numbers: the run-time numbers of the call. Rivals are made for those declared.
    """
    kernel = p.declaration
    found: Callable[..., Any] | None = None
    try:
        if kernel.stand_in is not None:
            found = kernel.stand_in(p, numbers)
        elif numbers.items() <= kernel.scalar_values(p).items():
            slow = (*kernel.compiled_rivals, *kernel.planning_rivals)
            ready = (call for name, call in kernel.rivals(p).items() if name not in slow and not hasattr(call, "bind"))
            found = next(ready, None)
    except Exception as error:  # of a declaration: it costs the wait for the program
        log.warning("nothing stands in for %s while it is compiled: %s: %s", kernel.name, type(error).__name__, error)
    return found
