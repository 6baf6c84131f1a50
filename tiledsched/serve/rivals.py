"""Which rivals are faster than our kernel, by what was measured, and whether one of them is handed a problem's calls.

Evidence is a tune's or a refresh's: each rival's time over ours, paired by round in one interleaved run, with what its call
costs the host. It decides when a plan is made, never in a call. A problem that was measured goes by its own evidence, of rivals
that were timed there. Any other goes by that of near problems, with what our own schedule is expected to lose there: it was
tuned for none of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiledsched.core.problem import KernelClass, Problem
from tiledsched.measure.runner import RivalTime
from tiledsched.store.records import Entry

log = logging.getLogger("tiledsched")
ELSEWHERE = -2
"""No index of a CUDA device, nor what stands for the CPU."""
SAME = 0.003
"""A part of the time that does not matter: a rival must be faster by more, beyond doubt. As in a race."""
HOST_ROOM = 4.0
"""How many times its own time on the GPU a rival's call may cost the host. Such a call is seldom more than a quarter of a model's
step: beyond that calls in a row wait for the host, and what the GPU gains is lost. A captured graph costs the host nothing, so
that a rival beyond it serves there, and there alone."""
WORTH_US = 1.0
"""What a call of a rival is to gain, at least, whose first call takes seconds: below it a process hardly earns them back."""
NEAR_MARGIN = 0.01
"""What a rival is to gain, at least, where only other problems were measured."""
NEIGHBOURS = 4
"""Problems that raced a rival whose evidence is asked, nearest first."""
REACH = 3.0
"""Distance beyond which nothing is known. What a problem says of another falls by e over 1."""


@dataclass(frozen=True, kw_only=True)
class RivalOffer:
    """A rival that may serve a problem."""

    name: str
    """As the kernel names it."""
    ratio: float
    """Its time over that of what we serve, measured or expected; below 1."""
    capturable: bool
    """Whether a CUDA graph may hold it."""
    only_captured: bool = False
    """Whether it serves in captured graphs alone, because its eager calls would wait for the host."""
    reason: str
    """One sentence for people."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A rival that serves, ready to be called."""

    offer: RivalOffer
    """Why."""
    call: Callable[..., Any]
    """Outputs of input tensors, in the order declared."""

    @property
    def name(self) -> str:
        """As the kernel names it."""
        return self.offer.name


def pays(time: RivalTime, kernel: KernelClass, *, captured: bool = False) -> bool:
    """Whether a rival of `kernel` was faster by more than noise, and by enough to be compiled, and its host can keep up; or, of
    `captured` calls, a graph can hold it.
    """
    faster = not time.failure and time.ratio_high is not None and time.ratio_high < 1 - SAME
    return faster and _worth(time, kernel) and (time.capturable if captured else _host_keeps_up(time))


def _worth(time: RivalTime, kernel: KernelClass) -> bool:
    gain_us = (time.ours_us or 0.0) - (time.median_us or 0.0)
    return time.name not in kernel.compiled_rivals or gain_us >= WORTH_US


def _host_keeps_up(time: RivalTime) -> bool:
    return time.median_us is not None and time.host_us <= HOST_ROOM * time.median_us


def measured_offers(entry: Entry, where: str) -> tuple[RivalOffer, ...]:
    """What may serve the very problem of an entry, the fastest first.

    Args:
        entry: the evidence.
        where: the device, for people.
    """
    kernel = entry.problem.declaration
    faster = [each for each in entry.rivals or () if pays(each, kernel) or pays(each, kernel, captured=True)]
    faster.sort(key=lambda each: (each.ratio, each.name))
    return tuple(
        RivalOffer(
            name=each.name,
            ratio=float(each.ratio or 0),
            capturable=each.capturable,
            only_captured=not pays(each, kernel),
            reason=f"{_gain(each.ratio)} faster than our kernel on this problem, measured on {where} "
            f"({each.median_us:.1f} against {each.ours_us:.1f} us, {each.version})",
        )
        for each in faster
    )


def expected_offers(problem: Problem, entries: Iterable[Entry], loss: float) -> tuple[RivalOffer, ...]:
    """What is expected to be faster on a problem that was not measured, the fastest first.

    The mean over the near problems that raced a rival of how its time compares with ours there, nearer ones counting for more,
    lessened by what our own schedule is expected to lose here.

    Args:
        problem: what is to be computed.
        entries: of its kind, measured.
        loss: of our schedule, expected; 0 where that is not known.
    """
    distance, kind = problem.declaration.similarity.distance, problem.declaration.similarity.rival_kind
    raced = [
        (distance(entry.problem, problem), entry)
        for entry in entries
        if entry.rivals and kind(entry.problem) == kind(problem)
    ]
    near = sorted((pair for pair in raced if pair[0] <= REACH), key=lambda pair: (pair[0], pair[1].problem))
    offers = []
    for name in dict.fromkeys(each.name for _, entry in near for each in entry.rivals or ()):
        if name in problem.declaration.planning_rivals:
            continue
        told = [(apart, entry, each) for apart, entry in near for each in entry.rivals or () if each.name == name]
        told = told[:NEIGHBOURS]
        if any(each.failure or each.ratio is None or each.ratio_high is None for _, _, each in told):
            continue  # where it could not compute a problem like this one
        capturable = all(each.capturable for _, _, each in told)
        keeps_up = all(_host_keeps_up(each) for _, _, each in told)
        if not (keeps_up or capturable):
            continue
        weights = [math.exp(-apart) for apart, _, _ in told]
        # The far end of each interval: noise is no gain.
        mean = sum(
            weight * math.log(each.ratio_high or 1.0) for weight, (_, _, each) in zip(weights, told, strict=True)
        )
        expected = math.exp(mean / sum(weights)) / (1 + loss)
        if name in problem.declaration.compiled_rivals and (1 - expected) * (told[0][2].ours_us or 0.0) < WORTH_US:
            continue
        if expected < 1 / (1 + NEAR_MARGIN):
            words = f", ours losing {loss:.1%} to a tuned one" if loss else ""
            offers.append(
                RivalOffer(
                    name=name,
                    ratio=expected,
                    capturable=capturable,
                    only_captured=not keeps_up,
                    reason=f"expected to be {_gain(expected)} faster, by {len(told)} near problems (nearest: {told[0][1].problem})"  # noqa: E501
                    f"{words}",
                )
            )
    return tuple(sorted(offers, key=lambda each: (each.ratio, each.name)))


def _gain(ratio: float | None) -> str:
    return f"{1 / (ratio or 1.0):.2f}x"


def choose_rivals(
    served: Any, make: Callable[[], Mapping[str, Callable[..., Any]]]
) -> tuple[Rival | None, Rival | None]:
    """The fastest of what may serve that is installed here, of eager calls and of those that a CUDA graph captures, which may be
    the same one; None for our own kernel.

    Args:
        served: the answer of the table.
        make: the kernel's rivals for the problem, asked only where one may serve.
    """
    offers: Sequence[RivalOffer] = served.rivals
    if not offers:
        return None, None
    try:
        found = make()
    except Exception as error:  # of a declaration: it costs the rival, not the call
        log.warning("no rival can be made, our own kernel is served: %s: %s", type(error).__name__, error)
        return None, None
    there = [Rival(offer=each, call=found[each.name]) for each in offers if each.name in found]
    return (
        next((each for each in there if not each.offer.only_captured), None),
        next((each for each in there if each.offer.capturable), None),
    )
