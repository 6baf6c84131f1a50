"""Every method by name: how it is run, and on how many seeds at most."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from docs.studies.search import kernel_tuner, ours
from docs.studies.search.field import Field
from docs.studies.search.scores import Trace
from tiledsched.tuning.options import EFFORTS, Effort

LIMIT = 200
"""Measurements after which a method of others is given up."""
Search = Callable[[Field, tuple[Field, ...], int], Trace]
"""From a field, all landscapes (of which others may be neighbours) and a seed, to what was done."""


@dataclass(frozen=True, kw_only=True)
class SearchMethod:
    """A way to search."""

    search: Search
    """Runs the search."""
    most_seeds: int = 50
    """Seeds beyond this number are not worth running, or take too long."""


def _each_compiled(order: Callable[[Field, int], list[int]]) -> Search:
    """A method that compiles each program when it measures it."""

    def search(field: Field, landscapes: tuple[Field, ...], seed: int) -> Trace:
        measured = order(field, seed)
        return Trace(measured=tuple(measured), compiled=tuple(range(1, len(measured) + 1)))

    return search


def _random(field: Field, seed: int) -> list[int]:
    return random.Random(seed).sample(range(len(field.schedules)), len(field.schedules))


def _grid(field: Field, seed: int) -> list[int]:
    return list(range(len(field.schedules)))


def _optuna(sampler: str, limit: int) -> Search:
    """Another Optuna sampler in the place of ours. It is asked for one schedule at a time, which is its best case."""
    effort = Effort(programs=limit, batch=1, builds=1, finalists=0, both_regimes=False, least_gain=0.0)
    return lambda field, landscapes, seed: ours.search(field, effort, seed, sampler=sampler)


def _kernel_tuner(strategy: str) -> Search:
    return _each_compiled(lambda field, seed: kernel_tuner.search(field, strategy, seed, LIMIT))


def _ours(effort: Effort, *, warm: bool = False, model: bool = True) -> Search:
    def search(field: Field, landscapes: tuple[Field, ...], seed: int) -> Trace:
        elsewhere = ours.neighbours(field, landscapes) if warm else ()
        return ours.search(field, effort, seed, elsewhere=elsewhere, model=model)

    return search


OPTUNA = {"tpe": "tpe", "gp": "gp", "cma-es": "cmaes", "qmc": "qmc"}
"""Optuna's samplers by method, as `tune --sampler` names them."""
OPTUNA_LIMITS = {"gp": 100}
"""Samplers that take seconds for one proposal: the measurements after which they are given up."""
FEWER_SEEDS = {
    "tiledsched-thorough": 10,
    "tiledsched-thorough-warm": 10,
    "optuna-gp": 10,
    "kernel-tuner-pso": 20,
    "grid": 1,
}
"""Number of repetitions, by the names of the methods that take long or leave nothing to chance."""

_SEARCHES: Mapping[str, Search] = {
    **{f"tiledsched-{name}": _ours(effort) for name, effort in EFFORTS.items()},
    **{f"tiledsched-{name}-warm": _ours(effort, warm=True) for name, effort in EFFORTS.items()},
    "tiledsched-no-model": _ours(EFFORTS["default"], model=False),
    "random": _each_compiled(_random),
    "grid": _each_compiled(_grid),
    **{f"optuna-{name}": _optuna(sampler, OPTUNA_LIMITS.get(name, LIMIT)) for name, sampler in OPTUNA.items()},
    **{f"kernel-tuner-{name.replace('_', '-')}": _kernel_tuner(name) for name in kernel_tuner.STRATEGIES},
}
METHODS: Mapping[str, SearchMethod] = {
    name: SearchMethod(search=search, most_seeds=FEWER_SEEDS.get(name, 50)) for name, search in _SEARCHES.items()
}
"""By name, as `python -m docs.studies.search --samplers` takes them."""
