"""How much a tune does, as levels of effort. docs/results/search.md says what to expect of each level."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Effort:
    """One level of effort."""

    programs: int
    """Distinct programs to measure per problem, at most; those measured before count. 0 for no search."""
    batch: int
    """Programs measured before the search uses what they showed."""
    builds: int
    """Schedules built for each program that is measured: their machine code shows which are worth measuring."""
    finalists: int
    """Programs in the deciding race."""
    both_regimes: bool
    """Whether programs nearly as fast as the burst winner race in the sustained regime, too."""
    least_gain: float
    """The search ends when no candidate is expected to be faster than the best by this part of its time."""
    modelled: int | None = None
    """Schedules built per problem where there is no GPU, the model's favourites first; None for all."""


EFFORTS: Mapping[str, Effort] = {
    "race": Effort(programs=0, batch=8, builds=2, finalists=2, both_regimes=False, least_gain=0.0, modelled=2),
    "quick": Effort(programs=16, batch=8, builds=2, finalists=8, both_regimes=False, least_gain=2e-3, modelled=16),
    "default": Effort(programs=64, batch=8, builds=2, finalists=16, both_regimes=True, least_gain=5e-4, modelled=64),
    "thorough": Effort(programs=192, batch=8, builds=2, finalists=24, both_regimes=True, least_gain=0.0, modelled=None),
}
"""The levels by name, the one that does least first. `race` searches nothing: what is served today races the default schedule,
and rivals are timed next to the winner."""
