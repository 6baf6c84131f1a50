"""Optuna's own samplers on a landscape, all under one rule for proposals that were not recorded.

A field holds a few hundred schedules of millions of combinations, and Optuna knows no constraints: nearly every proposal
lies outside. It is taken to the schedule that differs from it in the fewest knobs among those not yet measured, chance
deciding among equals. The sampler is told the schedule that was taken, not its own proposal, which is closed as failed:
so what it learns is true, and no proposal is counted that was not measured. One at a time, which is a sampler's best case.
"""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from tiledsched.errors import ConfigError
from tiledsched.studies.search.field import Field

if TYPE_CHECKING:
    import optuna

CATEGORICAL = ("tpe", "gp", "brute-force")
"""Samplers that take knobs as they are; the others only search numbers, and get each value's place among the choices."""
SAMPLERS = (*CATEGORICAL, "cma-es", "qmc")


def search(field: Field, name: str, seed: int, limit: int) -> list[int]:
    """The programs that Optuna's sampler `name` measures, in order, each once, at most `limit`.

    Raises:
        ConfigError: a package that the sampler needs is not installed.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # several of them are marked experimental
        study = optuna.create_study(sampler=_sampler(name, seed))
        return _search(study, field, name in CATEGORICAL, random.Random(seed), limit)


def _sampler(name: str, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    try:
        if name == "tpe":
            return optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True)
        if name == "gp":
            import torch

            torch.set_num_threads(1)
            return optuna.samplers.GPSampler(seed=seed)
        if name == "cma-es":
            import cmaes  # type: ignore[import-not-found]  # noqa: F401

            return optuna.samplers.CmaEsSampler(seed=seed)
    except ImportError as error:
        raise ConfigError(f"Optuna's {name} needs {error.name}; pip install {error.name}, or leave it out with "
                          "--samplers") from error  # fmt: skip
    if name == "qmc":
        return optuna.samplers.QMCSampler(seed=seed)
    return optuna.samplers.BruteForceSampler(seed=seed)


def _search(study: optuna.Study, field: Field, categorical: bool, rng: random.Random, limit: int) -> list[int]:
    import optuna

    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.CategoricalDistribution(choices) if categorical
        else optuna.distributions.IntDistribution(0, len(choices) - 1) for name, choices in field.knobs.items()
    }  # fmt: skip
    unseen = np.ones(len(field.schedules), dtype=bool)
    measured: list[int] = []
    while len(measured) < min(limit, len(field.schedules)) and not field.settled(measured):
        trial = study.ask(distributions)
        differences = (field.codes != _codes(field, trial.params, categorical)).sum(axis=1)
        index = int(rng.choice(np.flatnonzero(unseen & (differences == differences[unseen].min()))))
        unseen[index] = False
        measured.append(index)
        kept = (
            study.get_trials(deepcopy=False)[-1].system_attrs if not categorical else {}
        )  # CMA-ES finds its generation in them
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        study.add_trial(optuna.trial.create_trial(
            params=_params(field, index, categorical), distributions=distributions, value=float(field.times_us[index]),
            system_attrs=kept,
        ))  # fmt: skip
    return measured


def _codes(field: Field, params: dict[str, Any], categorical: bool) -> list[int]:
    if not categorical:
        return [params[name] for name in field.knobs]
    return [choices.index(params[name]) for name, choices in field.knobs.items()]


def _params(field: Field, index: int, categorical: bool) -> dict[str, Any]:
    if not categorical:
        return {name: int(code) for name, code in zip(field.knobs, field.codes[index], strict=True)}
    return {name: field.schedules[index][name] for name in field.knobs}
