"""`tune`, `record`, `refresh` and `bench` on many GPUs and hosts.

The database says what is to be done, who has it until when, and what came of it; Ray, where it is used, only says where
workers run. Any process may die at any moment: what it had leased is taken by another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiledsched.fleet.campaign import Campaign as Campaign
    from tiledsched.fleet.campaign import CampaignPlan as CampaignPlan
    from tiledsched.fleet.campaign import Lease as Lease
    from tiledsched.fleet.campaign import Outcome as Outcome
    from tiledsched.fleet.leases import Leases as Leases
    from tiledsched.fleet.local import work as work
    from tiledsched.fleet.run import Limits as Limits
    from tiledsched.fleet.run import plan as plan
    from tiledsched.fleet.run import run as run
    from tiledsched.fleet.status import FleetStatus as FleetStatus
    from tiledsched.fleet.status import read_status as read_status

_HOMES = {
    "Campaign": "campaign",
    "CampaignPlan": "campaign",
    "FleetStatus": "status",
    "Lease": "campaign",
    "Leases": "leases",
    "Outcome": "campaign",
    "Limits": "run",
    "plan": "run",
    "read_status": "status",
    "run": "run",
    "work": "local",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: the command line only needs to know the flags."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'tiledsched.fleet' has no attribute {name!r}")
