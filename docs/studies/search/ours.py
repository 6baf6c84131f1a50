"""The package's own search on a landscape, with any sampler, from nothing or with neighbours tuned before."""

from __future__ import annotations

from docs.studies.landscapes import shape_of
from docs.studies.search.field import Field
from docs.studies.search.scores import Trace
from tiledsched.core.device import arch_spec
from tiledsched.tuning.options import EFFORTS, Effort
from tiledsched.tuning.prior import estimator, known_elsewhere
from tiledsched.tuning.samplers import OURS
from tiledsched.tuning.study import ScheduleStudy
from tiledsched.tuning.surrogate import Known


def search(
    field: Field,
    effort: Effort,
    seed: int,
    *,
    sampler: str = OURS,
    model: bool = True,
    elsewhere: tuple[Known, ...] = (),
) -> Trace:
    """What `tune` would build and measure, in order, if the field were the whole search space.

    Every schedule built counts as a compile, whether it is measured or not. What is measured is the recorded median. With
    `model` false the static model is not asked.
    """
    spec = arch_spec(field.space.arch)
    proposer = ScheduleStudy(
        field.space,
        field.problem,
        pinned={},
        sampler=sampler,
        seed=seed,
        elsewhere=elsewhere,
        first=[field.space.default(field.problem)],
        estimate=estimator(field.problem, spec) if model else None,
    )
    builds = effort.builds if sampler == OURS else 1
    measured: list[int] = []
    compiled: list[int] = []
    built = 0
    while len(measured) < effort.programs and proposer.expected_gain() >= effort.least_gain:
        if sampler != OURS and field.settled(measured):
            break
        for schedule in proposer.ask(effort.batch * builds):
            built += 1
            facts = field.facts[field.index[schedule]]
            assert facts is not None, "landscapes hold facts"
            proposer.built(schedule, facts)
        chosen = proposer.choose(min(effort.batch, effort.programs - len(measured)))
        if not chosen:
            break
        for schedule in chosen:
            index = field.index[schedule]
            proposer.tell(schedule, float(field.times_us[index]))
            measured.append(index)
            compiled.append(built)
    return Trace(measured=tuple(measured), compiled=tuple(compiled))


def siblings(one: Field, other: Field) -> bool:
    """Whether one problem reveals the other's winner: they differ only in element type, batch or heads."""
    return shape_of(one.problem) == shape_of(other.problem)


def neighbours(field: Field, landscapes: tuple[Field, ...]) -> tuple[Known, ...]:
    """What a database knows in which every other problem was tuned before, from nothing and at the default effort.

    The problem itself and its siblings are left out.
    """
    others = {}
    for other in landscapes:
        if not siblings(field, other):
            measured = _tuned(other)
            others[other.problem] = [
                (other.schedules[index], other.facts[index], float(other.times_us[index])) for index in measured
            ]
    return tuple(known_elsewhere(field.problem, others, arch_spec(field.space.arch)))


_measured_cold: dict[str, tuple[int, ...]] = {}


def _tuned(field: Field) -> tuple[int, ...]:
    if field.name not in _measured_cold:
        _measured_cold[field.name] = search(field, EFFORTS["default"], 0).measured
    return _measured_cold[field.name]
