"""Studies in an Optuna storage, one for each problem, device and regime, for Optuna's tools to look at.

The database is the truth: a study is written anew from it, and what a tune measures is added as it is known. A storage is a file
(Optuna's journal, a few milliseconds a trial) or the URL of a database (SQLite takes some seventy).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    from optuna.storages import BaseStorage

log = logging.getLogger("tiledsched")
Outcome = tuple[Schedule, "Measurement | Failure", datetime]
"""A schedule, its measurement or failure, and when that was taken."""


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


class StoredStudy:
    """A study in a storage: what a database holds of a problem on a device in a regime, in place of any study of that name.

    Args:
        storage: where it is written.
        db: what is known; schedules of older spaces are completed.
        space: of the kernel and arch.
        problem: what was computed.
        device_name: the GPU.
        regime: burst or sustained.
        facts: resources of machine code, by fingerprint.
    """

    def __init__(
        self,
        storage: BaseStorage,
        db: TuningDB,
        space: SearchSpace,
        problem: Problem,
        device_name: str,
        regime: str,
        facts: Mapping[str, ResourceFacts | None],
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        known = known_outcomes(db, space, problem, device_name, regime)
        self._distributions = {
            name: optuna.distributions.CategoricalDistribution(
                tuple(dict.fromkeys([*knob.choices, *(schedule[name] for schedule, _, _ in known)]))
            )
            for name, knob in space.knobs.items()
        }
        name = study_name(problem, device_name, regime)
        if name in optuna.get_all_study_names(storage):
            optuna.delete_study(study_name=name, storage=storage)
        self.study: Study = optuna.create_study(study_name=name, storage=storage, direction="minimize")
        where = {"arch": space.arch, "device": device_name, "regime": regime, "unit": "microseconds"}
        for key, value in {"kernel": problem.kernel, "problem": problem.to_json(), **where}.items():
            self.study.set_user_attr(key, value)
        for schedule, what, when in known:
            self.add(schedule, what, facts.get(what.fingerprint) if isinstance(what, Measurement) else None, when)

    def add(self, schedule: Schedule, what: Measurement | Failure, facts: ResourceFacts | None, when: datetime) -> None:
        """Add the outcome of a schedule as a finished trial; what is known of it besides its time becomes attributes."""
        from optuna.trial import TrialState, create_trial

        attributes: dict[str, Any] = {"schedule": schedule.short()}
        value = None
        if isinstance(what, Failure):
            attributes |= {"failure": str(what.kind), "message": what.message}
        else:
            value = what.median_us
            attributes |= {
                "fingerprint": what.fingerprint,
                "ci_low_us": what.ci_low_us,
                "ci_high_us": what.ci_high_us,
                "samples": len(what.samples_us),
                "checked": what.accuracy is not None,
                **(facts.to_json() if facts else {}),
            }
        trial = create_trial(
            params=dict(schedule),
            distributions=dict(self._distributions),
            value=value,
            user_attrs=attributes,
            state=TrialState.FAIL if value is None else TrialState.COMPLETE,
        )
        trial.datetime_start = trial.datetime_complete = when.astimezone(timezone.utc).replace(tzinfo=None)
        self.study.add_trial(trial)


def study_name(problem: Problem, device_name: str, regime: str) -> str:
    """Name of the study of a problem on a device in a regime."""
    return f"{problem.kernel} {problem} on {device_name}, {regime}"


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


def write_studies(
    db: TuningDB, storage: BaseStorage, problems: Sequence[tuple[Problem, str, str]], space: SearchSpace
) -> list[Study]:
    """Studies of what the database holds.

    Args:
        problems: problem, device and regime of each.
        space: of their kernel and arch.
    """
    facts = facts_by_fingerprint(db, space.arch)
    return [StoredStudy(storage, db, space, *where, facts).study for where in problems]


class LiveStudy:
    """The study of the problem that is being tuned, kept in a storage. Where that fails, the tune goes on without it."""

    def __init__(
        self, db: TuningDB, storage: BaseStorage, space: SearchSpace, problem: Problem, device_name: str, regime: str
    ) -> None:
        self._name = study_name(problem, device_name, regime)
        self._stored: StoredStudy | None = None
        with self._given_up_on_errors():
            facts = facts_by_fingerprint(db, space.arch)
            self._stored = StoredStudy(storage, db, space, problem, device_name, regime, facts)

    def add(self, outcome: Measurement | Failed, facts: ResourceFacts | None) -> None:
        """Add the outcome of a schedule."""
        with self._given_up_on_errors():
            if self._stored is not None:
                what = outcome.failure if isinstance(outcome, Failed) else outcome
                self._stored.add(outcome.schedule, what, facts, datetime.now(timezone.utc))

    @contextmanager
    def _given_up_on_errors(self) -> Iterator[None]:
        """A storage is a copy: losing it loses nothing."""
        try:
            yield
        except Exception as error:
            log.warning(
                "the study %s is kept no longer, the database is: %s: %s", self._name, type(error).__name__, error
            )
            self._stored = None
