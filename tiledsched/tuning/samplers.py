"""What proposes schedules in a search: samplers of Optuna by name, ours among them, and any other by `module:Class`.

Optuna is imported when one is made; names are known without it.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tiledsched.core.errors import ConfigError, did_you_mean
from tiledsched.core.registry import check_allowed

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

OURS = "surrogate"
"""The default: a Gaussian process over schedules, see `tiledsched.tuning.surrogate`."""
IN_ORDER = ("random", "exhaustive")
"""All valid schedules one after the other: shuffled, or as the space lists them."""
OPTUNA_MODULE = "optuna.samplers"
OPTUNAS: Mapping[str, str] = {"tpe": "TPESampler", "gp": "GPSampler", "cmaes": "CmaEsSampler", "qmc": "QMCSampler"}
"""Samplers of Optuna by their usual names, and their classes."""
SAMPLERS = (OURS, *OPTUNAS, *IN_ORDER)
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "TPESampler": {"multivariate": True, "constant_liar": True},
    "CmaEsSampler": {"warn_independent_sampling": False},
    "QMCSampler": {"warn_independent_sampling": False, "warn_asynchronous_seeding": False},
}
"""Arguments with which each class is made: knobs depend on each other, and several schedules are tried at a time."""
NEEDS: Mapping[str, str] = {"GPSampler": "torch", "CmaEsSampler": "cmaes"}
"""Packages that a sampler of Optuna needs when it first proposes."""
NUMBERS_ONLY = ("CmaEsSampler", "QMCSampler")
"""Samplers that search numbers: each value is given to them as its place among its knob's choices."""


def check_sampler(name: object, what: str) -> None:
    """Make sure that a sampler that data names is one of Optuna's or ours, or one that the user allowed. `what` names it.

    Raises:
        ConfigError: the user did not allow it.
    """
    if name is not None and name not in SAMPLERS and str(name).rpartition(":")[0] != OPTUNA_MODULE:
        check_allowed(str(name), what)


def make_sampler(name: str, seed: int) -> BaseSampler | None:
    """A sampler of Optuna's, or of the module that `name` names; None for a name of ours, whose sampler needs a search space.

    Raises:
        ConfigError: there is none of this name, it is no sampler, or a package that it needs is not installed.
    """
    if name in (OURS, *IN_ORDER):
        return None
    if name not in OPTUNAS and ":" not in name:
        raise ConfigError(
            f"unknown sampler {name!r}; known are {', '.join(SAMPLERS)}, and module:Class{did_you_mean(name, SAMPLERS)}"
        )
    module_name, _, word = name.rpartition(":") if ":" in name else (OPTUNA_MODULE, "", OPTUNAS[name])
    try:
        if word in NEEDS:
            importlib.import_module(NEEDS[word])
        made = getattr(importlib.import_module(module_name), word, None)
    except ImportError as error:
        raise ConfigError(
            f"sampler {name} needs {error.name}; install it (pip install {error.name}), or take another "
            f"--sampler: {', '.join(SAMPLERS)}"
        ) from error
    from optuna.samplers import BaseSampler

    if not (inspect.isclass(made) and issubclass(made, BaseSampler)):
        raise ConfigError(f"{name} is no sampler; name a class that extends optuna.samplers.BaseSampler")
    options = dict(OPTIONS.get(word, {}))
    if "seed" in inspect.signature(made).parameters:
        options["seed"] = seed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some releases mark some of them, or of their options, as experimental
            return made(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"sampler {name} cannot be made without more arguments ({error}); derive one that can"
        ) from error
