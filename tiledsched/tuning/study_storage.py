"""Optuna studies of what a database holds, one for each problem, device and regime, for Optuna's tools to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiledsched.core.errors import ConfigError, Failure
from tiledsched.core.problem import Problem
from tiledsched.core.resources import ResourceFacts
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.measure.runner import Measurement
from tiledsched.store.db import TuningDB

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

Outcome = tuple[Schedule, "Measurement | Failure", datetime]
"""A schedule, its measurement or failure, and when that was taken."""


def new_storage(path: Path) -> BaseStorage:
    """An Optuna storage in a new file, in the place of any that is there.

    Raises:
        ConfigError: the file cannot be written.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        path.unlink(missing_ok=True)
        return JournalStorage(JournalFileBackend(str(path)))
    except OSError as error:
        raise ConfigError(f"cannot write studies to {path}: {error}; name a folder that can be written") from error


def write_studies(
    db: TuningDB, storage: BaseStorage, problems: Sequence[tuple[Problem, str, str]], space: SearchSpace
) -> list[Study]:
    """Studies of what the database holds.

    Args:
        problems: problem, device and regime of each.
        space: of their kernel and arch. Schedules of older spaces are completed.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    facts, studies = facts_by_fingerprint(db, space.arch), []
    for problem, device_name, regime in problems:
        known = known_outcomes(db, space, problem, device_name, regime)
        distributions = {
            name: optuna.distributions.CategoricalDistribution(
                tuple(dict.fromkeys([*knob.choices, *(schedule[name] for schedule, _, _ in known)]))
            )
            for name, knob in space.knobs.items()
        }
        study = optuna.create_study(
            study_name=f"{problem.kernel} {problem} on {device_name}, {regime}", storage=storage, direction="minimize"
        )
        where = {"arch": space.arch, "device": device_name, "regime": regime, "unit": "microseconds"}
        for key, value in {"kernel": problem.kernel, "problem": problem.to_json(), **where}.items():
            study.set_user_attr(key, value)
        study.add_trials([_trial(outcome, facts, distributions) for outcome in known])
        studies.append(study)
    return studies


def _trial(
    outcome: Outcome, facts: Mapping[str, ResourceFacts | None], distributions: Mapping[str, BaseDistribution]
) -> FrozenTrial:
    """The outcome of a schedule as a finished trial; what is known of it besides its time becomes attributes."""
    from optuna.trial import TrialState, create_trial

    schedule, what, when = outcome
    attributes: dict[str, Any] = {"schedule": schedule.short()}
    value = None
    if isinstance(what, Failure):
        attributes |= {"failure": str(what.kind), "message": what.message}
    else:
        value, resources = what.median_us, facts.get(what.fingerprint)
        attributes |= {
            "fingerprint": what.fingerprint,
            "ci_low_us": what.ci_low_us,
            "ci_high_us": what.ci_high_us,
            "samples": len(what.samples_us),
            "checked": what.accuracy is not None,
            **(resources.to_json() if resources else {}),
        }
    trial = create_trial(
        params=dict(schedule),
        distributions=dict(distributions),
        value=value,
        user_attrs=attributes,
        state=TrialState.FAIL if value is None else TrialState.COMPLETE,
    )
    trial.datetime_start = trial.datetime_complete = when.astimezone(timezone.utc).replace(tzinfo=None)
    return trial


def known_outcomes(db: TuningDB, space: SearchSpace, problem: Problem, device_name: str, regime: str) -> list[Outcome]:
    """What the database holds of a problem on a device in a regime, the oldest first: the newest measurement of each schedule,
    and what failed and never ran.
    """
    taken = db.latest_measurements(problem, space.arch, device_name, regime)
    failures = [each for each in db.failures(space.arch, problem) if each.device_name in ("", device_name)]
    outcomes: list[Outcome] = [(each.measurement.schedule, each.measurement, each.created_at) for each in taken]
    outcomes += [(each.schedule, each.failure, each.created_at) for each in failures]
    found: dict[Schedule, Outcome] = {}
    for schedule, what, when in outcomes:
        complete = space.complete(schedule)
        found.setdefault(complete, (complete, what, when))
    return sorted(found.values(), key=lambda outcome: (outcome[2], outcome[0].id))


def facts_by_fingerprint(db: TuningDB, arch: str) -> dict[str, ResourceFacts | None]:
    """The resources of all machine code of an arch."""
    return {fingerprint: artifact.facts for (_, fingerprint), artifact in db.artifacts(arch).items()}
