"""Processes that stay from one problem to the next: to start them takes longer than to tune many a problem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiledsched.build import pool as pools
from tiledsched.fleet.builds import Pool, SharedBuilds
from tiledsched.measure import rivals
from tiledsched.measure.gpu import GpuRunner
from tiledsched.measure.rivals import RivalRaces
from tiledsched.tuning import session as tuning


class KeptRunner(GpuRunner):
    """Measures one problem after another."""

    def close(self) -> None:
        """Nothing: the next problem is measured with it."""

    def end(self) -> None:
        """End the worker and give the GPU back."""
        super().close()


class KeptRaces(RivalRaces):
    """Times the rivals of one problem after another."""

    def close(self) -> None:
        """Nothing: the next problem's are timed with it."""

    def end(self) -> None:
        """End the process."""
        super().close()


class KeptBuilds(SharedBuilds):
    """Builds for one problem after another."""

    def close(self) -> None:
        """Nothing, unless something is still claimed: others may wait for it."""
        if self._ours:
            self.end()

    def end(self) -> None:
        """End the compile processes."""
        super().close()


class Kept:
    """What a child keeps: it stands in place of what jobs would start and end themselves.

    Args:
        make_pool: compiles what nobody has built, with so many processes.
        cache: the cache folder.
    """

    def __init__(self, make_pool: Callable[[int | None], Pool], cache: Path) -> None:
        self._make_pool, self._cache = make_pool, cache
        self._there: dict[Any, KeptRunner | KeptRaces | KeptBuilds] = {}

    def install(self) -> None:
        """Have this process open what is kept."""
        pools.opener = lambda jobs: self._kept(("builds", jobs), lambda: KeptBuilds(self._make_pool(jobs), self._cache))
        tuning.runner_opener = lambda kernel, **options: self._kept(
            ("runner", kernel, *sorted(options.items())), lambda: KeptRunner(kernel, **options)
        )
        rivals.opener = lambda kernel, runner, regime: self._kept(
            ("rivals", kernel, id(runner), regime), lambda: KeptRaces(kernel, runner, regime=regime)
        )

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._there:
            self._there[key] = make()
        return self._there[key]

    def end(self) -> None:
        """End all of it: after a problem that failed, nobody knows in what state it is. What is asked for next starts anew."""
        while self._there:
            _, each = self._there.popitem()
            each.end()
