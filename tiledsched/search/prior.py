"""What is known before anything is measured: the static model's estimates, and the measurements of other problems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tiledsched.build.cubin import ResourceFacts
from tiledsched.device import ArchSpec
from tiledsched.measure.runner import Measurement
from tiledsched.model.expected import expected_facts
from tiledsched.model.static import estimate_us
from tiledsched.problem import Problem
from tiledsched.schedule import KnobValue, Schedule
from tiledsched.search.sampler import Estimate
from tiledsched.search.surrogate import Known, likeness
from tiledsched.space import SearchSpace
from tiledsched.store.db import TuningDB

MeasuredPrograms = dict[Problem, list[tuple[Schedule, ResourceFacts | None, float]]]
"""The measured programs of each problem: schedule, facts, microseconds."""
MOST_PROBLEMS = 4
"""Problems learnt from, the most alike: more of them change nothing on the bench."""
MOST_PROGRAMS = 96
"""Programs of each: the fastest half of that, and others spread evenly over the rest."""
FEWEST_PROGRAMS = 8
"""Measured programs below which a problem teaches nothing."""
MOST_PLAIN = 256
"""Plain schedules, the most promising ones, around which the structural knobs are explored."""


def estimator(problem: Problem, spec: ArchSpec) -> Estimate:
    """The static model for `problem` on the GPU that `spec` describes; schedules not built yet count with expected facts."""

    def estimate(schedule: Schedule, facts: ResourceFacts | None) -> float:
        return estimate_us(problem, schedule, facts or expected_facts(problem, schedule, spec), spec)

    return estimate


def promising_part(space: SearchSpace, problem: Problem, pinned: Mapping[str, KnobValue], estimate: Estimate,
                   winners: Iterable[Schedule]) -> SearchSpace:  # fmt: skip
    """The part of a large space that is worth judging: tens of thousands of schedules would take longer than measuring.

    All plain schedules (knobs that only a measurement can judge at their defaults), and every variant of the most promising
    of them, by the static model, and of past winners.
    """
    if space.candidates:
        return space
    plain = list(space.schedules(problem, pinned={**pinned, **space.modelled_pins()}))
    plain.sort(key=lambda schedule: (estimate(schedule, None), schedule.id))
    fixed = [name for name, knob in space.knobs.items() if not knob.measured_only and name not in pinned]
    bases = dict.fromkeys(tuple(schedule[name] for name in fixed) for schedule in [*winners, *plain[:MOST_PLAIN]])
    found = dict.fromkeys(plain)
    for base in bases:
        held = {**pinned, **dict(zip(fixed, base, strict=True))}
        found |= dict.fromkeys(space.schedules(problem, pinned=held))
    return space.limited_to(found)


def known_elsewhere(problem: Problem, others: MeasuredPrograms, spec: ArchSpec) -> list[Known]:  # fmt: skip
    """What to learn from: the problems most alike, and of each a choice of programs that shows its best and its spread.

    Args:
        problem: what is to be tuned; it is not learnt from.
        others: for each problem its measured programs: schedule, facts, microseconds.
        spec: of the arch.
    """
    near = sorted((other for other in others if other != problem and len(others[other]) >= FEWEST_PROGRAMS),
                  key=lambda other: (-likeness(problem, other), other))  # fmt: skip
    found = []
    for other in near[:MOST_PROBLEMS]:
        programs = sorted(others[other], key=lambda program: (program[2], program[0].id))
        half = MOST_PROGRAMS // 2
        rest = programs[half:]
        programs = programs[:half] + rest[:: max(1, -(-len(rest) // half))]
        estimate = estimator(other, spec)
        found.append(Known(problem=other, schedules=tuple(program[0] for program in programs),
                           modelled_us=tuple(estimate(schedule, facts) for schedule, facts, _ in programs),
                           times_us=tuple(program[2] for program in programs)))  # fmt: skip
    return found


def measured_elsewhere(db: TuningDB, space: SearchSpace, device_name: str, regime: str,
                       accum_mode: str) -> MeasuredPrograms:  # fmt: skip
    """Every problem's measured programs on one device, for `known_elsewhere`. Of each program the newest measurement."""
    artifacts = db.artifacts(space.arch)
    found = {}
    for summary in db.landscapes():
        if (summary.device_name, summary.regime) != (device_name, regime):
            continue
        taken: list[Measurement] = [stored.measurement for stored in
                                    db.latest_measurements(summary.problem, device_name=device_name, regime=regime)]  # fmt: skip
        programs = []
        for one in taken:
            schedule, artifact = space.complete(one.schedule), artifacts.get((space.arch, one.fingerprint))
            if schedule.get("accum_mode", accum_mode) == accum_mode:
                programs.append((schedule, artifact.facts if artifact else None, one.median_us))
        found[summary.problem] = programs
    return found
