"""`tune`, `record`, `refresh` and `bench` on many GPUs and hosts.

The database says what is to be done, who has it until when, and what came of it; Ray, where it is used, only says where
workers run. Any process may die at any moment: what it had leased is taken by another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiledsched.fleet.campaign import Limits as Limits
    from tiledsched.fleet.running import plan as plan, run as run

__all__ = ["Limits", "plan", "run"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: the command line only needs to know the flags."""
    if name in __all__:
        from tiledsched.fleet import running

        return getattr(running, name)
    raise AttributeError(f"module 'tiledsched.fleet' has no attribute {name!r}")
