"""`tiledsched.remember()`: cuTile's own `exhaustive_search` with a memory, for code that cannot be edited.

The name is that of this package and of the function: the package can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiledsched.remember.replacing import remember


class _Callable(ModuleType):
    """A module that can be called: `import tiledsched.remember` leaves `tiledsched.remember()` what it is."""

    def __call__(self, *wrong: object, check: bool = False) -> remember:
        from tiledsched.remember.replacing import remember

        return remember(*wrong, check=check)

    def __enter__(self) -> None:
        from tiledsched.remember.replacing import remember

        type(remember).__enter__(remember)

    def __exit__(self, *error: object) -> None: ...


sys.modules[__name__].__class__ = _Callable
