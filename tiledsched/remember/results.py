"""The types of a result: those of cuTile where it has them, and the same fields where it is older."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@functools.cache
def result_types() -> tuple[Any, Any]:
    """The types `Measurement` and `TuningResult`."""
    try:
        from cuda.tile.tune import Measurement, TuningResult
    except ImportError:  # cuTile before 1.5, or another layout
        return OwnMeasurement, OwnTuningResult
    return Measurement, TuningResult


@dataclass(frozen=True, kw_only=True)
class OwnMeasurement:
    """A configuration and its time."""

    config: Any
    """The configuration."""
    mean_us: float
    """Its time in microseconds."""
    num_samples: int
    """Number of timed launches."""
    error_margin_us: float
    """Half the width of the 95% confidence interval."""


@dataclass(frozen=True, kw_only=True)
class OwnTuningResult:
    """What a search found."""

    best: OwnMeasurement
    """The fastest."""
    successes: Sequence[OwnMeasurement]
    """Every configuration that works."""
    failures: Sequence[tuple[Any, type[BaseException], str]]
    """`(config, type, message)` for every other one."""

    def summary(self, *, top_k: int = 10, bottom_k: int = 2) -> str:
        """The fastest `top_k` configurations and the slowest `bottom_k`, for people."""
        ranked = sorted(self.successes, key=lambda each: each.mean_us)
        shown = [*ranked[:top_k], *ranked[top_k:][-bottom_k:]]
        lines = [f"{'*' if each == self.best else ' '} {each.config}: {each.mean_us:.1f} us" for each in shown]
        lines += [f"  {config}: {kind.__name__}: {message.splitlines()[0]}" for config, kind, message in self.failures]
        return "\n".join([f"{len(self.successes)} succeeded, {len(self.failures)} failed", *lines])

    def __str__(self) -> str:
        return self.summary()
