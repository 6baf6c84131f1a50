"""What `explain` serves for the problems of a report, found by the same lookup, and what it would serve without tuning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from tiledsched.core.config import Settings
from tiledsched.core.errors import ConfigError, NoValidScheduleError, SpaceError
from tiledsched.core.problem import KernelClass, Problem
from tiledsched.serve.chain import Served
from tiledsched.serve.entries import load_table
from tiledsched.serve.lookup import LookupTable


class Serving:
    """The lookup of one kernel on one arch.

    Args:
        arch: e.g. sm_90.
        table_of: gives the lookup table for an accuracy class, fp32 or fp16.
    """

    def __init__(self, arch: str, table_of: Callable[[str], LookupTable]) -> None:
        self.arch = arch
        self._table = functools.cache(table_of)

    @classmethod
    def by_settings(cls, settings: Settings, kernel: KernelClass, arch: str) -> Serving:
        """The lookup that commands use: over the entries of every layer, with what settings request. Rivals are left out of it,
        because they decide which function is called, and not which schedule is served.
        """
        of_mode = functools.partial(replace, settings, rivals="off")
        return cls(arch, lambda mode: load_table(of_mode(accum_mode=mode), kernel=kernel, archs={arch}))

    def served(self, problem: Problem, device_name: str, accum_mode: str, *, tuned: bool = True) -> Served | None:
        """What `explain` serves on a device; an empty name stands for any of the arch. Without `tuned`, what it would serve if
        neither the problem nor another one that is the same work had ever been tuned. None where the lookup says what is wrong
        with the settings, or the arch has no search space.
        """
        table = self._table(accum_mode)
        try:
            left = table if tuned else table.without(problem, self.arch)
            return left.resolve(problem, self.arch, device_name)
        except (ConfigError, SpaceError, NoValidScheduleError):
            return None
