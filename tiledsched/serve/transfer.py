"""The schedule for a problem that was never measured, from what won on other problems of the same arch.

The winners, ties and runners-up of the problems at the six least distances are the candidates. Each of the four nearest
has an opinion on each: how much slower it was there than the winner, corrected by how the static model says that changes
from the neighbour's problem to this one (waves of blocks, the length of the loop). Where it was not measured there, the
model tells that, too. The candidate with the least mean loss is served; neighbours count less with distance. Pure
functions: no file but the expected losses, no GPU, no state but caches.

`python -m docs.studies.policy` compares this with other policies, `policy_timed` its numbers on a GPU; the expected losses
of `tuning_db/model/attention/transfer.json` come from `policy_losses`. docs/results/serving.md has the figures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tiledsched.core import data_files
from tiledsched.core.device import ArchSpec
from tiledsched.core.problem import Problem
from tiledsched.core.schedule import KnobValue, Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.store.records import Entry

MOST_NAMERS = 16
"""Entries that name candidates, nearest first."""
TWIN = 0.002
"""Log of how much slower a schedule is taken to be than one that it was the same program as: of equals that one is served."""
OTHERS = 2
"""Further choices of a transfer, in case the program of the first spills."""


@dataclass(frozen=True, kw_only=True)
class TransferParameters:
    """How much the parts of the opinion count."""

    neighbours: int = 4
    """Entries asked, nearest first."""
    distances: int = 6
    """The least distances, at which all entries name candidates: several that are as near as each other name much the same."""
    reach: float = 0.6
    """Distance over which an entry's weight falls by e."""
    unnamed: float = 0.05
    """Log of how much slower than its winner a schedule is taken to be, at least, that an entry does not name."""
    model: float = 1.0
    """Share of the model's correction that is believed."""


NEAR_KIND = TransferParameters()
"""Among problems of one kind."""
OTHER_KIND = TransferParameters(neighbours=6, distances=4, reach=1.0, unnamed=0.1, model=0.7)
"""Among problems of other kinds, who agree less with each other and with the model."""


@dataclass(frozen=True, kw_only=True)
class ExpectedLoss:
    """How much slower than the best a choice was on problems held out, where all was measured."""

    mean: float
    """Geometric mean of time over the best time, minus 1."""
    worst: float
    """The largest."""
    cases: int
    """Choices behind these two."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A choice made from other problems."""

    schedule: Schedule
    """What to launch; it obeys the constraints of the problem."""
    entry: Entry
    """The nearest entry that names it."""
    distance: float
    """Of the nearest entry asked."""
    asked: int
    """Entries that had a say."""
    others: tuple[Schedule, ...] = ()
    """What comes next, by mean expected loss."""


def transfer(
    problem: Problem,
    entries: Iterable[Entry],
    space: SearchSpace,
    spec: ArchSpec,
    parameters: TransferParameters = NEAR_KIND,
) -> Transfer | None:
    """The schedule with the least mean expected loss; None where no entry names a schedule that is valid here.

    Args:
        problem: what is to be computed.
        entries: measured entries of one arch, complete schedules; for best results of the problem's kind.
        space: of the arch; its constraints hold for what is returned.
        spec: of the arch.
        parameters: see there.
    """
    distance = problem.declaration.similarity.distance
    near = sorted(
        ((distance(entry.problem, problem), entry) for entry in entries),
        key=lambda pair: (pair[0], pair[1].problem, pair[1].device_name),
    )
    if not near:
        return None
    near = near[: max(MOST_NAMERS, parameters.neighbours)]
    closest = near[0][0]
    farthest = sorted({round(apart, 3) for apart, _ in near[:MOST_NAMERS]})[: parameters.distances][-1]
    told = [
        (entry, apart, candidate_losses(entry, problem, space))
        for place, (apart, entry) in enumerate(near)
        if place < parameters.neighbours or round(apart, 3) <= farthest
    ]
    names = [(entry, losses) for entry, each, losses in told if round(each, 3) <= farthest]
    opinions = [
        (math.exp((closest - each) / parameters.reach), entry, losses)
        for entry, each, losses in told[: parameters.neighbours]
    ]
    # Whoever weighs next to nothing is not asked: each opinion costs an estimate of every candidate.
    opinions = [opinion for opinion in opinions if opinion[0] > 0.02]

    def opinion(entry: Entry, losses: Mapping[Schedule, float], schedule: Schedule) -> float:
        there = log_us(entry.problem, schedule, spec)
        loss = losses.get(schedule)
        if loss is None:  # not named there: slower by something, or by as much as the model says
            winner = next(iter(losses), schedule)
            loss = max(parameters.unnamed, parameters.model * (there - log_us(entry.problem, winner, spec)))
        return loss + parameters.model * (log_us(problem, schedule, spec) - there)

    def mean_loss(schedule: Schedule) -> float:
        total = sum(weight * opinion(entry, losses, schedule) for weight, entry, losses in opinions)
        return round(total / sum(weight for weight, _, _ in opinions), 9)

    candidates = {schedule for _, losses in names for schedule in losses}
    if not candidates:
        return None
    best, *others = sorted(candidates, key=lambda schedule: (mean_loss(schedule), schedule.id))[: 1 + OTHERS]
    entry = next(entry for entry, losses in names if best in losses)
    return Transfer(schedule=best, entry=entry, distance=closest, asked=len(opinions), others=tuple(others))


def candidate_losses(entry: Entry, problem: Problem, space: SearchSpace) -> dict[Schedule, float]:
    """Log of time over the winner's, of every schedule that an entry names, as far as they can be made valid here."""
    named = [(space.complete(each), 0.0) for each in (entry.schedule, *entry.ties)]
    if entry.runner_up is not None:
        named.append((space.complete(entry.runner_up), math.log1p(max(0.0, entry.margin or 0.0))))
    equivalents = problem.declaration.similarity.equivalents
    named += [(twin, loss + TWIN) for each, loss in named for twin in equivalents(entry.problem, problem, each)]
    losses: dict[Schedule, float] = {}
    for schedule, loss in named:
        valid = repaired(schedule, problem, space)
        if valid is not None:
            losses.setdefault(valid, loss)
    return losses


def repaired(schedule: Schedule, problem: Problem, space: SearchSpace) -> Schedule | None:
    """`schedule` with as few knobs as possible moved to their defaults that it obeys the constraints; None if that fails.

    A broken constraint is mended by one of the knobs it reads, those of the structure before tiles, or by all of them; a number
    goes no further than it must: of sixteen shares of the keys eight may be left.
    """
    values = space.constraint_values(problem)
    for _ in space.knobs:
        held = values | dict(schedule)
        broken = next((each for each in space.needed if not each.holds(held)), None)
        if broken is None:
            return schedule
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
    """What lies between a number and its default, the nearest first, and the default."""
    if isinstance(value, bool) or not (isinstance(value, int) and isinstance(default, int)):
        return [default]
    low, high = sorted((value, default))
    between = [each for each in choices if isinstance(each, int) and low < each < high]
    return [*sorted(between, key=lambda each: abs(each - value)), default]


def expected_loss(found: Transfer, problem: Problem) -> ExpectedLoss | None:
    """What to expect of a transfer: by kind, and within one kind by the problem's group and distance.

    None where that was never measured on problems like this one.
    """
    kernel = problem.declaration
    group = kernel.similarity.loss_group(problem)
    if not group:
        return None
    other = kernel.similarity.kind(found.entry.problem) != kernel.similarity.kind(problem)
    bands = (
        band
        for band in loss_bands(kernel.name)
        if band.other_kind == other and found.distance <= band.up_to and band.group in ("", group)
    )
    return next((band.loss for band in bands), None)


@dataclass(frozen=True, kw_only=True)
class LossBand:
    """Expected loss within a range of distances."""

    group: str
    """Problems that it is of, as the kernel names them; empty for any."""
    other_kind: bool
    """Whether the neighbours are of another kind."""
    up_to: float
    """Distance of the nearest neighbour; bands are in rising order."""
    loss: ExpectedLoss
    """Measured there."""


@lru_cache(maxsize=16)
def loss_bands(kernel: str) -> tuple[LossBand, ...]:
    """The bands in `tuning_db/model/KERNEL/transfer.json`; none where there is no such file."""
    path = data_files.tuning_db() / "model" / kernel / "transfer.json"
    if not path.is_file():
        return ()
    rows: Sequence[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["bands"]
    return tuple(
        LossBand(
            group=row["group"],
            other_kind=bool(row["other_kind"]),
            up_to=row["up_to"],
            loss=ExpectedLoss(mean=row["mean"], worst=row["worst"], cases=int(row["cases"])),
        )
        for row in rows
    )


@lru_cache(maxsize=8192)
def log_us(problem: Problem, schedule: Schedule, spec: ArchSpec) -> float:
    """Log of the static estimate. The machine code need not be known: what is assumed of it cancels between problems."""
    kernel = problem.declaration
    return math.log(kernel.cost.model(problem, schedule, kernel.cost.expected(problem, schedule, spec), spec))
