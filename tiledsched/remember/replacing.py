"""Puts `exhaustive_search` of this package in the place of cuTile's."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from tiledsched.core.config import CalledFirst
from tiledsched.core.errors import ConfigError
from tiledsched.core.extras import required
from tiledsched.remember.search import exhaustive_search


class remember(metaclass=CalledFirst):  # noqa: N801
    """Have `cuda.tile.tune.exhaustive_search` remember, from now on, also where modules imported it before.

    `tiledsched.remember()` stays until `undo()`; `with tiledsched.remember(): ...` is undone at the end of the block.

    Args:
        check: whether the arrays that configurations change are compared; see :func:`tiledsched.exhaustive_search`.
    """

    def __init__(self, *wrong: object, check: bool = False) -> None:
        if wrong:
            raise ConfigError(
                f"remember takes no {wrong[0]!r:.80}: tiledsched.remember() holds for the whole program; a script that cannot be "
                "edited is run as: python -m tiledsched.remember SCRIPT"
            )
        with required():
            from cuda.tile import tune
        self._before: Callable[..., Any] = tune.exhaustive_search
        self._ours = functools.wraps(self._before)(functools.partial(exhaustive_search, check=check))
        _replace(self._before, self._ours)

    def undo(self) -> None:
        """Put back what was there before. Safe to call twice."""
        _replace(self._ours, self._before)

    def __enter__(self) -> remember:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def _replace(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    """Put `other` wherever a module holds `one` under any name, and as an attribute of the classes of these modules."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] == "tiledsched":
            continue
        for name, value in list(vars(module).items()):
            if value is one:
                setattr(module, name, other)
            elif type(value) is type and value.__module__ == module.__name__:
                for inner, attribute in list(vars(value).items()):
                    if attribute is one or (isinstance(attribute, staticmethod) and attribute.__func__ is one):
                        setattr(value, inner, staticmethod(other))
