"""Kernel Tuner's strategies, in its own simulation mode, on the landscape as its cache file.

Kernel Tuner is optional: ``pip install kernel-tuner``. What it needs to be told apart from its defaults: restrictions
are strings (functions make it go through every combination), results are counted once however often they are asked for
(its own `max_fevals` counts the same way), and its random numbers come from both `random` and NumPy.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from docs.studies.search.field import Field
from tiledsched.core.errors import ConfigError
from tiledsched.store.t4 import Recorded, kernel_tuner_cache

STRATEGIES = (
    "genetic_algorithm",
    "simulated_annealing",
    "mls",
    "greedy_mls",
    "pso",
    "firefly_algorithm",
    "dual_annealing",
    "basinhopping",
    "bayes_opt",
)
"""Those that run on these landscapes. Not greedy_ils, which walks from neighbour to neighbour and ends with an error where
a schedule has none among those recorded; nor diff_evo, which ends with an error where it draws too small a population.
random_sample is `random`."""


def search(field: Field, strategy: str, seed: int, limit: int) -> list[int]:
    """The programs that `strategy` measures, in order, each once, at most `limit`.

    Raises:
        ConfigError: Kernel Tuner is not installed.
    """
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from kernel_tuner import tune_kernel  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            "Kernel Tuner is not installed; pip install kernel-tuner, or leave its strategies out with --samplers"
        ) from error
    names = list(field.knobs)
    document = kernel_tuner_cache(Recorded(measurements=field.evidence, failures=(), compile_seconds={}))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "landscape.json"
        path.write_text(json.dumps(_only(document, names)), encoding="utf-8")
        random.seed(seed)
        np.random.seed(seed)
        results, _ = tune_kernel(
            document["kernel_name"],
            "__global__ void attention() {}",
            document["problem_size"],
            [],
            {name: list(document["tune_params"][name]) for name in names},
            restrictions=_restrictions(field, names),
            cache=str(path),
            simulation_mode=True,
            lang="CUDA",
            strategy=strategy,
            quiet=True,
            strategy_options={"max_fevals": limit},
        )
    found = {tuple(str(schedule[name]) for name in names): index for index, schedule in enumerate(field.schedules)}
    asked = [found[tuple(str(result[name]) for name in names)] for result in results]
    return list(dict.fromkeys(asked))[:limit]


def _only(document: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The cache without the knobs that have one value in this landscape."""
    rows = document["cache"].values()
    return {
        **document,
        "tune_params_keys": names,
        "tune_params": {name: document["tune_params"][name] for name in names},
        "cache": {",".join(str(row[name]) for name in names): row for row in rows},
    }


def _restrictions(field: Field, names: list[str]) -> list[str]:
    """Only what was recorded; one restriction for each prefix of the knobs keeps the enumeration short."""
    rows = [tuple(schedule[name] for name in names) for schedule in field.schedules]
    prefixes = [{row[:count] for row in rows} for count in range(2, len(names) + 1)]
    return [f"({', '.join(names[:count])}) in {allowed!r}" for count, allowed in enumerate(prefixes, start=2)]
