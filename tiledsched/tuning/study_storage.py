"""Studies in an Optuna storage, one for each problem, device and regime, for Optuna's tools to look at.

The database is the truth: a study is written anew from it, and what a tune measures is added as it is known. A storage is a file
(Optuna's journal, a few milliseconds a trial) or the URL of a database (SQLite takes some seventy).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from tiledsched.core.errors import ConfigError, Failure
from tiledsched.core.problem import Problem
from tiledsched.core.resources import ResourceFacts
from tiledsched.core.schedule import Schedule
from tiledsched.core.space import SearchSpace
from tiledsched.measure.runner import Failed, Measurement
from tiledsched.store.db import TuningDB

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import CategoricalDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

log = logging.getLogger("tiledsched")
Outcome = tuple[Schedule, "Measurement | Failure", "datetime | None"]
"""A schedule, its measurement or failure, and when that was taken."""
Facts = Mapping[str, "ResourceFacts | None"]
"""Resources of machine code, by fingerprint."""


def open_storage(place: str) -> BaseStorage:
    """An Optuna storage: a file, or a database by URL.

    Raises:
        ConfigError: it cannot be opened.
    """
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    try:
        return RDBStorage(place) if "://" in place else JournalStorage(JournalFileBackend(place))
    except Exception as error:  # whatever the database's driver raises
        raise ConfigError(
            f"cannot open {place} for studies: {error}; give a file or the URL of a database, such as "
            "sqlite:///studies.db"
        ) from error


class Studies:
    """Writes studies to a storage.

    Args:
        storage: where.
        space: of the kernel and arch; what is stored of older ones is completed.
    """

    def __init__(self, storage: BaseStorage, space: SearchSpace) -> None:
        self._storage, self._space = storage, space

    def write(
        self, problem: Problem, device_name: str, regime: str, outcomes: Iterable[Outcome], facts: Facts
    ) -> Study:
        """A study of what is known, in place of any of that name."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        known = [(self._space.complete(schedule), what, when) for schedule, what, when in outcomes]
        self._choices = {
            name: tuple(dict.fromkeys([*knob.choices, *(each[name] for each, _, _ in known)]))
            for name, knob in self._space.knobs.items()
        }
        name = study_name(problem, device_name, regime)
        if name in {study.study_name for study in self._storage.get_all_studies()}:
            optuna.delete_study(study_name=name, storage=self._storage)
        study = optuna.create_study(study_name=name, storage=self._storage, direction="minimize")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a name for the values is experimental
            study.set_metric_names(["microseconds"])
        for key, value in {
            "kernel": problem.kernel,
            "problem": problem.to_json(),
            "arch": self._space.arch,
            "device": device_name,
            "regime": regime,
        }.items():
            study.set_user_attr(key, value)
        for schedule, what, when in known:
            self.add(study, schedule, what, facts, when)
        return study

    def add(
        self, study: Study, schedule: Schedule, what: Measurement | Failure, facts: Facts, when: datetime | None = None
    ) -> None:
        """One more trial."""
        study.add_trial(trial_of(schedule, what, self._distributions(), facts, when))

    def _distributions(self) -> dict[str, CategoricalDistribution]:
        from optuna.distributions import CategoricalDistribution

        return {name: CategoricalDistribution(each) for name, each in self._choices.items()}


def study_name(problem: Problem, device_name: str, regime: str) -> str:
    """Name of the study of a problem on a device in a regime."""
    return f"{problem.kernel} {problem} on {device_name}, {regime}"


def trial_of(
    schedule: Schedule,
    what: Measurement | Failure,
    distributions: Mapping[str, Any],
    facts: Facts,
    when: datetime | None = None,
) -> FrozenTrial:
    """A schedule's outcome as a finished trial; what is known of it besides its time becomes attributes."""
    from optuna.trial import TrialState, create_trial

    told: dict[str, Any] = {"schedule": schedule.short()}
    value = None
    if isinstance(what, Measurement):
        value = what.median_us
        told |= {
            "fingerprint": what.fingerprint,
            "ci_low_us": what.ci_low_us,
            "ci_high_us": what.ci_high_us,
            "samples": len(what.samples_us),
            "checked": what.accuracy is not None,
        }
        known = facts.get(what.fingerprint)
        if known is not None:
            told |= known.to_json()
    else:
        told |= {"failure": str(what.kind), "message": what.message}
    trial = create_trial(
        params=dict(schedule),
        distributions=dict(distributions),
        value=value,
        user_attrs=told,
        state=TrialState.FAIL if value is None else TrialState.COMPLETE,
    )
    if when is not None:
        trial.datetime_start = trial.datetime_complete = when.astimezone(timezone.utc).replace(tzinfo=None)
    return trial


def known_outcomes(db: TuningDB, space: SearchSpace, problem: Problem, device_name: str, regime: str) -> list[Outcome]:
    """What the database holds of a problem on a device in a regime, the oldest first: the newest measurement of each schedule,
    and what failed and never ran.
    """
    found: dict[Schedule, Outcome] = {}
    for stored in db.latest_measurements(problem, space.arch, device_name, regime):
        schedule = space.complete(stored.measurement.schedule)
        found.setdefault(schedule, (schedule, stored.measurement, stored.created_at))
    for failed in db.failures(space.arch, problem):
        if failed.device_name in ("", device_name):
            schedule = space.complete(failed.schedule)
            found.setdefault(schedule, (schedule, failed.failure, failed.created_at))
    start = datetime.fromtimestamp(0, timezone.utc)
    return sorted(found.values(), key=lambda outcome: (outcome[2] or start, outcome[0].id))


def write_studies(
    db: TuningDB, storage: BaseStorage, problems: Sequence[tuple[Problem, str, str]], space: SearchSpace
) -> list[Study]:
    """Studies of what the database holds.

    Args:
        problems: problem, device and regime of each.
        space: of their kernel and arch.
    """
    facts = {key[1]: artifact.facts for key, artifact in db.artifacts(space.arch).items()}
    studies = Studies(storage, space)
    return [
        studies.write(problem, device_name, regime, known_outcomes(db, space, problem, device_name, regime), facts)
        for problem, device_name, regime in problems
    ]


class LiveStudy:
    """The study of the problem that is being tuned, kept in a storage. Where that fails, the tune goes on without it."""

    def __init__(
        self, db: TuningDB, storage: BaseStorage, space: SearchSpace, problem: Problem, device_name: str, regime: str
    ) -> None:
        self._place = study_name(problem, device_name, regime)
        self._studies = Studies(storage, space)
        self._study: Study | None = None
        try:
            facts = {key[1]: artifact.facts for key, artifact in db.artifacts(space.arch).items()}
            outcomes = known_outcomes(db, space, problem, device_name, regime)
            self._study = self._studies.write(problem, device_name, regime, outcomes, facts)
        except Exception as error:
            self._give_up(error)

    def add(self, outcome: Measurement | Failed, facts: ResourceFacts | None) -> None:
        """Add the outcome of a schedule."""
        if self._study is None:
            return
        what = outcome.failure if isinstance(outcome, Failed) else outcome
        try:
            now = datetime.now(timezone.utc)
            self._studies.add(self._study, outcome.schedule, what, {outcome.fingerprint: facts}, now)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A storage is a copy: losing it loses nothing."""
        log.warning("the study %s is kept no longer, the database is: %s: %s", self._place, type(error).__name__, error)
        self._study = None
