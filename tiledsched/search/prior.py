"""What is known before anything is measured: the static model's estimates, and the measurements of other problems."""

from __future__ import annotations

from tiledsched.build.cubin import REGISTERS_PER_SM, ResourceFacts, ctas_per_sm
from tiledsched.device import ArchSpec
from tiledsched.measure.runner import Measurement
from tiledsched.model.static import WARPS_PER_GROUP, estimate_us
from tiledsched.problem import Problem
from tiledsched.schedule import Schedule
from tiledsched.search.sampler import Estimate
from tiledsched.search.surrogate import Known, likeness
from tiledsched.space import SearchSpace
from tiledsched.store.db import TuningDB

MOST_PROBLEMS = 4
"""Problems learnt from, the most alike: more of them change nothing on the bench."""
MOST_PROGRAMS = 96
"""Programs of each: the fastest half of that, and others spread evenly over the rest."""
FEWEST_PROGRAMS = 8
"""Measured programs below which a problem teaches nothing."""
WARP_THREADS = 32
MOST_REGISTERS = 255


def estimator(problem: Problem, spec: ArchSpec) -> Estimate:
    """The static model for `problem` on the GPU that `spec` describes; schedules not built yet count with expected facts."""

    def estimate(schedule: Schedule, facts: ResourceFacts | None) -> float:
        return estimate_us(problem, schedule, facts or expected_facts(problem, schedule, spec), spec)

    return estimate


def expected_facts(problem: Problem, schedule: Schedule, spec: ArchSpec) -> ResourceFacts:
    """What the machine code will probably tell: no spills, the threads asked for, and registers that fit the occupancy."""
    warps = (schedule.number("num_worker_warps") or WARPS_PER_GROUP) + spec.producer_warps
    threads = warps * WARP_THREADS
    occupancy = max(1, schedule.number("occupancy"))
    registers = min(MOST_REGISTERS, REGISTERS_PER_SM // (threads * occupancy) // 8 * 8)
    rows = schedule.number("tile_m") * int(schedule.get("q_subtiles", 1))
    columns = schedule.number("tile_n") * int(schedule.get("kv_subtiles", 1))
    shared_bytes = (rows + 2 * columns) * problem.tile_d * problem.element_bytes
    return ResourceFacts(registers=registers, threads=threads, shared_bytes=shared_bytes, spill_bytes=0,
                         num_ctas=schedule.number("num_ctas"), code_bytes=0,
                         ctas_per_sm=ctas_per_sm(spec.arch, registers, threads, shared_bytes))  # fmt: skip


def known_elsewhere(problem: Problem, others: dict[Problem, list[tuple[Schedule, ResourceFacts | None, float]]],
                    spec: ArchSpec) -> list[Known]:  # fmt: skip
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
                       accum_mode: str) -> dict[Problem, list[tuple[Schedule, ResourceFacts | None, float]]]:  # fmt: skip
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
