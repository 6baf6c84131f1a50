"""The schedule for a problem that was never measured, from schedules that won on other problems of the same arch.

1. The candidates are the winners, ties and runners-up of the problems at the six smallest distances.
2. Each of the four nearest problems predicts the loss of each candidate: how much slower it was there than the winner, corrected
   by how the performance model's estimate changes from that problem to this one. Where a candidate was not measured there, the
   model also gives that first part.
3. The candidate with the lowest mean predicted loss is served. Nearer problems weigh more in the mean.

The functions here read no file but the expected losses, and use no GPU.

`python -m docs.studies.policy` compares this with other policies, `policy_timed` its numbers on a GPU; the expected losses
of `tuning_db/model/attention/transfer.json` come from `policy_losses`. docs/results/serving.md has the figures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tiledsched.core.config import INVARIANT
from tiledsched.core.device import ArchSpec
from tiledsched.core.groups import firsts
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.store.manifest import model_file
from tiledsched.store.records import Entry

OTHER_KERNEL = 0.4
"""What a problem of the kernel whose search space this one has is farther away than one of its own: less than the neighbourhood,
so that what was measured there serves in place of what the model chose, and more than a near problem of its own. A guess."""
MAX_NAMERS = 16
"""The nearest entries, of which candidates are taken."""
EQUIVALENT_LOSS = 0.002
"""Predicted loss of a schedule that made the same program as a winner there, so that the winner itself is preferred."""
SHARE_LOSS = 0.05
"""Modelled loss from which the number of blocks that share a work tile is chosen anew. No measured winner with few query rows is
modelled to lose more than 3.6% by its own number (docs/results/serving.md)."""
ALTERNATIVES = 2
"""Further choices where nothing was measured, in case the program of the first spills registers."""


@dataclass(frozen=True, kw_only=True)
class TransferParameters:
    """The numbers of the transfer policy."""

    neighbours: int = 4
    """Number of the nearest entries that predict losses."""
    distances: int = 6
    """Number of different distances at which entries give candidates: entries at equal distances give much the same ones."""
    reach: float = 0.6
    """Distance over which an entry's weight falls by a factor of e."""
    unnamed: float = 0.05
    """Smallest predicted loss of a candidate that an entry does not name: the log of its time over that of the entry's winner."""
    model: float = 1.0
    """Share of the model's correction that is applied."""


NEAR_KIND = TransferParameters()
"""For transfers among problems of one kind."""
OTHER_KIND = TransferParameters(neighbours=6, distances=4, reach=1.0, unnamed=0.1, model=0.7)
"""For transfers from problems of other kinds, which agree less with each other and with the model."""


@dataclass(frozen=True, kw_only=True)
class ExpectedLoss:
    """How much slower than the best schedule choices were on held-out problems, where every schedule was measured."""

    mean: float
    """Geometric mean of the ratio to the best time, minus 1."""
    worst: float
    """The largest ratio to the best time, minus 1."""
    cases: int
    """Number of choices behind mean and worst."""
    kernel: str = ""
    """The kernel of those choices."""
    arch: str = ""
    """The arch on which they were measured."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A schedule chosen from those of other problems."""

    schedule: Schedule
    """The schedule; it obeys the constraints of the problem."""
    entry: Entry
    """The nearest entry that names the schedule."""
    distance: float
    """Distance of the nearest entry."""
    neighbours: int
    """Number of entries that predicted losses."""
    others: tuple[Schedule, ...] = ()
    """The next choices, by mean predicted loss."""


@dataclass(frozen=True, kw_only=True)
class Nearby:
    """What the entries near a problem say about schedules for it."""

    distance: float
    """Distance of the nearest entry."""
    neighbours: int
    """Number of entries that predict losses."""
    namers: Sequence[tuple[Entry, Mapping[Schedule, float]]]
    """The entries that give candidates, the nearest first, and what each candidate lost there."""
    mean_loss: Callable[[Schedule], float]
    """The predicted loss of any schedule that is valid for the problem: the log of its time over that of the best."""


def lent(entry: Entry, kernel: KernelClass) -> Entry | None:
    """The entry of another kernel as `kernel` is served by it; None where it is not of the kernel whose space that one has.

    Other code was measured, so that it counts as transferred. Its rivals compute something else, and are left out, and so are
    entries that were proven for one order of sums, which other code may not keep. Schedules are adapted to the kernel.
    """
    if entry.kernel != kernel.space or entry.accum_mode == INVARIANT or not entry.problem.known:
        return None
    first, *ties = dict.fromkeys(
        kernel.adapted(entry.problem, each, entry.arch) for each in (entry.schedule, *entry.ties)
    )
    following = entry.runner_up and kernel.adapted(entry.problem, entry.runner_up, entry.arch)
    provenance = "transferred" if entry.provenance == "measured" else entry.provenance
    return entry.replace(
        provenance=provenance,
        rivals=entry.rivals if entry.kernel == kernel.timed_with else None,
        schedule=first,
        ties=tuple(ties),
        runner_up=following if following != first else None,
    )


def distance_of(entry: Entry, problem: Problem) -> float:
    """How far the problem of an entry is from another one, which may be of a kernel that has its kernel's search space."""
    own: float = problem.declaration.similarity.distance(entry.problem, problem)
    return own + OTHER_KERNEL * (entry.kernel != problem.kernel)


def nearby(
    problem: Problem,
    entries: Iterable[Entry],
    space: SearchSpace,
    spec: ArchSpec,
    parameters: TransferParameters = NEAR_KIND,
) -> Nearby | None:
    """What entries say about schedules for a problem; None where there is none. The arguments are those of :func:`transfer`."""
    entries = list(entries)
    if problem.declaration.similarity.own_first:
        entries = [entry for entry in entries if entry.kernel == problem.kernel] or entries
    near = sorted(
        ((distance_of(entry, problem), entry) for entry in entries),
        key=lambda pair: (pair[0], pair[1].problem, pair[1].device_name),
    )
    if not near:
        return None
    near = near[: max(MAX_NAMERS, parameters.neighbours)]
    closest = near[0][0]
    farthest = sorted({round(apart, 3) for apart, _ in near[:MAX_NAMERS]})[: parameters.distances][-1]
    named = [
        (entry, apart, candidate_losses(entry, problem, space))
        for place, (apart, entry) in enumerate(near)
        if place < parameters.neighbours or round(apart, 3) <= farthest
    ]
    namers = [(entry, losses) for entry, each, losses in named if round(each, 3) <= farthest]
    weighted = [
        (math.exp((closest - each) / parameters.reach), entry, losses)
        for entry, each, losses in named[: parameters.neighbours]
    ]
    # Entries whose weight is below 2% are skipped, because each one costs a model estimate per candidate.
    weighted = [each for each in weighted if each[0] > 0.02]

    def predicted_loss(entry: Entry, losses: Mapping[Schedule, float], schedule: Schedule) -> float:
        there = log_us(entry.problem, problem.declaration.similarity.carried(problem, entry.problem, schedule), spec)
        loss = losses.get(schedule)
        if loss is None:  # not named there: slower by a little, or by as much as the model says
            winner = next(iter(losses), schedule)
            loss = max(parameters.unnamed, parameters.model * (there - log_us(entry.problem, winner, spec)))
        return loss + parameters.model * (log_us(problem, schedule, spec) - there)

    def mean_loss(schedule: Schedule) -> float:
        total = sum(weight * predicted_loss(entry, losses, schedule) for weight, entry, losses in weighted)
        return round(total / sum(weight for weight, _, _ in weighted), 9)

    return Nearby(distance=closest, neighbours=len(weighted), namers=namers, mean_loss=mean_loss)


def transfer(
    problem: Problem,
    entries: Iterable[Entry],
    space: SearchSpace,
    spec: ArchSpec,
    parameters: TransferParameters = NEAR_KIND,
) -> Transfer | None:
    """The schedule with the lowest mean predicted loss; None where no entry names a schedule that is valid for the problem.

    Args:
        problem: what is to be computed.
        entries: measured entries of one arch with complete schedules; those of the problem's kind predict best.
        space: the search space of the arch, whose constraints the result obeys.
        spec: the arch.
        parameters: the numbers of the policy.
    """
    found = nearby(problem, entries, space, spec, parameters)
    candidates = {schedule for _, losses in found.namers for schedule in losses} if found else set()
    if found is None or not candidates:
        return None
    ranked = sorted(candidates, key=lambda schedule: (found.mean_loss(schedule), schedule.id))[: 1 + ALTERNATIVES]
    entry = next(entry for entry, losses in found.namers if ranked[0] in losses)
    best, *others = dict.fromkeys(_with_own_shares(schedule, problem, space, spec) for schedule in ranked)
    return Transfer(
        schedule=best, entry=entry, distance=found.distance, neighbours=found.neighbours, others=tuple(others)
    )


def _with_own_shares(schedule: Schedule, problem: Problem, space: SearchSpace, spec: ArchSpec) -> Schedule:
    """The schedule with as many blocks for a work tile as fill the GPU on this problem, by the model, where those of the problem
    on which it won are expected to cost more than :data:`SHARE_LOSS`."""
    knobs = [name for name in problem.declaration.similarity.share_knobs(problem) if name in space.knobs]
    choices = itertools.product(*(space.knobs[name].choices for name in knobs))
    alone = schedule.replace(pdl=0) if "pdl" in schedule else schedule  # other shares may have no second launch
    varied = (alone.replace(**dict(zip(knobs, values, strict=True))) for values in choices)
    valid = [each for each in varied if each == schedule or not space.unworkable(each, problem)]
    best = min(valid, key=lambda each: (log_us(problem, each, spec), each.id), default=schedule)
    gains = log_us(problem, schedule, spec) - log_us(problem, best, spec) > SHARE_LOSS
    return best if gains else schedule


def candidate_losses(entry: Entry, problem: Problem, space: SearchSpace) -> dict[Schedule, float]:
    """The loss of every schedule that an entry names: the log of its time over the winner's. Schedules that are not valid for
    `problem` are repaired, and left out where that fails."""
    named = [(space.complete(each), 0.0) for each in (entry.schedule, *entry.ties)]
    if entry.runner_up is not None:
        named.append((space.complete(entry.runner_up), math.log1p(max(0.0, entry.margin or 0.0))))
    similarity = problem.declaration.similarity
    named = [(similarity.carried(entry.problem, problem, each), loss) for each, loss in named]
    named += [
        (other, loss + EQUIVALENT_LOSS)
        for each, loss in named
        for other in similarity.equivalents(entry.problem, problem, each)
    ]
    losses = firsts((repaired(schedule, problem, space), loss) for schedule, loss in named)
    return {schedule: loss for schedule, loss in losses.items() if schedule is not None}


def repaired(schedule: Schedule, problem: Problem, space: SearchSpace) -> Schedule | None:
    """A schedule that obeys the constraints, with as few knobs as possible moved towards their defaults; None where that fails,
    or where it has a knob or a word for one that the space has not, such as those of an earlier version.

    A broken constraint is repaired by moving one of the knobs that it reads, structure before tiles, else all of them. A number
    moves no further than it must: 16 shares of the keys may become 8.
    """
    values = space.constraint_values(problem)
    for _ in space.knobs:
        chosen = values | dict(schedule)
        broken = next((each for each in space.needed if not each.holds(chosen)), None)
        if broken is None:
            words = {name: value for name, value in schedule.items() if isinstance(value, str)}
            known = all(value in space.knobs[name].choices for name, value in words.items() if name in space.knobs)
            return schedule if known and schedule.keys() == space.knobs.keys() else None
        changed = {
            name: knob.default
            for name, knob in reversed(list(space.knobs.items()))
            if name in broken.names and schedule[name] != knob.default
        }
        if not changed:
            return None
        single = (
            schedule.replace(**{name: value})
            for name, default in changed.items()
            for value in _towards(schedule[name], default, space.knobs[name].choices)
        )
        mended = next((each for each in single if broken.holds(values | dict(each))), None)
        schedule = mended or schedule.replace(**changed)
    return None


def _towards(value: KnobValue, default: KnobValue, choices: Sequence[KnobValue]) -> list[KnobValue]:
    """The choices between a number and its default, the nearest first, then the default."""
    if isinstance(value, bool) or not (isinstance(value, int) and isinstance(default, int)):
        return [default]
    low, high = sorted((value, default))
    between = [each for each in choices if isinstance(each, int) and low < each < high]
    return [*sorted(between, key=lambda each: abs(each - value)), default]


def expected_loss(entry: Entry, distance: float, problem: Problem) -> ExpectedLoss | None:
    """The loss to expect where a problem is served by the schedule of an entry, by the problem's group.

    Where it was not measured on the entry's arch, that of another arch, which the loss names; None where it was never measured on
    problems like this one.

    Args:
        entry: whose schedule serves.
        distance: of the nearest entry.
        problem: what is to be computed.
    """
    kernel = problem.declaration
    group = kernel.similarity.loss_group(problem)
    if not group:
        return None
    other = kernel.similarity.kind(entry.problem) != kernel.similarity.kind(problem)
    bands = [
        band
        for band in loss_bands(kernel.name)
        if band["other_kind"] == other and distance <= band["up_to"] and band["group"] in ("", group)
    ]
    found = min(bands, key=lambda band: band["arch"] != entry.arch, default=None)
    if found is None:
        return None
    return ExpectedLoss(
        mean=found["mean"], worst=found["worst"], cases=found["cases"], kernel=kernel.name, arch=found["arch"]
    )


@lru_cache(maxsize=16)
def loss_bands(kernel: str) -> Sequence[Mapping[str, Any]]:
    """The losses within ranges of distances, in rising order, as `tuning_db/model/KERNEL/transfer.json` has them; none where
    there is no such file, or it is damaged. `docs/studies/policy_losses.py` describes a band."""
    found = model_file(kernel, "transfer.json")
    return found["bands"] if found else ()


@lru_cache(maxsize=8192)
def log_us(problem: Problem, schedule: Schedule, spec: ArchSpec) -> float:
    """Log of the performance model's estimate. Facts of the machine code are assumed: errors in them cancel between problems."""
    kernel = problem.declaration
    return math.log(kernel.cost.model(problem, schedule, kernel.cost.expected(problem, schedule, spec), spec))
