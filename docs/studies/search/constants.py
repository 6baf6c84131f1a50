"""How much the surrogate's constants matter: ``python -m docs.studies.search.constants``.

Fits them anew by marginal likelihood to one half of the landscapes and searches the other half with what was fitted,
both ways round; then searches all of them with each constant halved and doubled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from docs.studies.search import ours
from docs.studies.search.bench import shipped_landscapes
from docs.studies.search.field import Field, read_field
from docs.studies.search.scores import Run, score
from tiledsched.core.device import arch_spec
from tiledsched.kernels.attention import Attention
from tiledsched.tuning import surrogate
from tiledsched.tuning.effort import EFFORTS
from tiledsched.tuning.prior import estimator
from tiledsched.tuning.study import knob_weights

GROUPS = (1.0, 0.4, 5.0)
"""The weights that named knobs have now. Knobs of one weight are fitted together."""
NUMBERS = ("OTHER_WEIGHT", "SLOPE", "UNEVEN", "NOISE", "COARSENESS")
BOUNDS = (math.log(0.01), math.log(100.0))
"""How far from its value a constant may be fitted, as logarithms of the ratio."""


def constants(ratios: Sequence[float]) -> dict[str, Any]:
    """The constants, each multiplied by its ratio: first the `GROUPS` of attention's weights, then `NUMBERS`."""
    by_group = dict(zip(GROUPS, ratios, strict=False))
    weights = {name: weight * by_group[weight] for name, weight in Attention.weights.items()}
    numbers = {
        name: getattr(surrogate, name) * ratio for name, ratio in zip(NUMBERS, ratios[len(GROUPS) :], strict=True)
    }
    return {"weights": weights, **numbers}


@contextmanager
def changed(values: Mapping[str, Any]) -> Iterator[None]:
    """Give the surrogate other constants for a while."""
    owners = {name: Attention if name == "weights" else surrogate for name in values}
    before = {name: getattr(owner, name) for name, owner in owners.items()}
    for name, value in values.items():
        setattr(owners[name], name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owners[name], name, value)


def surprise(field: Field) -> float:
    """Minus the log marginal likelihood of a whole landscape under the constants as they are."""
    estimate = estimator(field.problem, arch_spec(field.space.arch))
    choices = {name: knob.choices for name, knob in field.space.knobs.items()}
    codes = surrogate.Encoder(choices, knob_weights(field.space))
    rows = codes.encode(field.schedules)
    modelled = surrogate.losses(
        [estimate(schedule, facts) for schedule, facts in zip(field.schedules, field.facts, strict=True)]
    )
    truth = surrogate.losses(field.times_us.tolist())
    shared = surrogate.UNEVEN * np.exp(rows @ rows.T - codes.total) + surrogate.SLOPE * np.outer(modelled, modelled)
    covariance = shared + surrogate.LEVEL + np.diag(surrogate.NOISE + surrogate.COARSENESS * truth**2)
    lower = np.linalg.cholesky(covariance)
    rest = np.linalg.solve(lower, truth - modelled)
    return float(0.5 * rest @ rest + np.log(np.diag(lower)).sum())


def fit(fields: Sequence[Field]) -> dict[str, Any]:
    """The constants under which the landscapes are most likely."""
    from scipy.optimize import minimize

    def total(logs: NDArray[np.float64]) -> float:
        with changed(constants(np.exp(logs).tolist())):
            return sum(surprise(field) for field in fields)

    start = np.zeros(len(GROUPS) + len(NUMBERS))
    found = minimize(total, start, method="L-BFGS-B", bounds=[BOUNDS] * len(start), options={"maxiter": 15})
    return constants(np.exp(found.x).tolist())


def searched(fields: Sequence[Field]) -> list[Run]:
    """A search of each field from nothing, at the default effort."""
    return [score("", field, 0, ours.search(field, EFFORTS["default"], 0)) for field in fields]


def line(name: str, runs: Sequence[Run]) -> str:
    """One row of the table."""
    to_1pct = [math.inf if run.measurements_to_1pct is None else run.measurements_to_1pct for run in runs]
    return (
        f"| {name} | {np.median(to_1pct):g} | {max(to_1pct):g} | {np.mean([run.regret_25 for run in runs]):.2%} "
        f"| {np.mean([run.regret_50 for run in runs]):.2%} | {max(run.regret_50 for run in runs):.1%} |"
    )


def main() -> None:
    """Print the table."""
    fields = [read_field(path) for path in shipped_landscapes()]
    print(
        "| constants | to 1%, median | largest | regret at 25 | at 50 | worst at 50 |\n|---|---:|---:|---:|---:|---:|"
    )
    print(line("as they are", searched(fields)))
    halves = fields[0::2], fields[1::2]
    runs: list[Run] = []
    for one, other in (halves, halves[::-1]):
        with changed(fit(one)):
            runs += searched(other)
    print(line("fitted to the other half", runs), flush=True)
    ones = [1.0] * (len(GROUPS) + len(NUMBERS))
    names = [*(f"weights of {weight:g}" for weight in GROUPS), *NUMBERS]
    for place, name in enumerate(names):
        for ratio in (0.5, 2.0):
            with changed(constants([*ones[:place], ratio, *ones[place + 1 :]])):
                print(line(f"{name} times {ratio:g}", searched(fields)), flush=True)


if __name__ == "__main__":
    main()
