"""How much to do: effort levels as data. What to expect of each is in docs/results/search.md, with the command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Effort:
    """One level."""

    programs: int
    """Distinct programs to measure per problem, at most; those measured before count."""
    batch: int
    """Programs measured between two looks at what was learnt."""
    builds: int
    """Schedules built for each program measured, so that the ones worth measuring can be told by their machine code."""
    finalists: int
    """Programs in the deciding race."""
    both_regimes: bool
    """Whether those that are nearly as fast as the winner race in the sustained regime, too, where the burst one decides."""
    least_gain: float
    """The search ends when no candidate promises to gain this part of the best time."""
    modelled: int | None = None
    """Schedules built per problem where there is no GPU, the model's favourites first; None for all."""


EFFORTS: Mapping[str, Effort] = {
    "quick": Effort(programs=16, batch=8, builds=2, finalists=8, both_regimes=False, least_gain=2e-3, modelled=16),
    "default": Effort(programs=64, batch=8, builds=2, finalists=16, both_regimes=True, least_gain=5e-4, modelled=64),
    "thorough": Effort(programs=192, batch=8, builds=2, finalists=24, both_regimes=True, least_gain=0.0, modelled=None),
}
"""By name, least first."""
