"""The same `tune`, `record`, `refresh` and `bench` on many GPUs and hosts.

The database says what is to be done, who has it until when, and what came of it; Ray, where it is used, only says where
workers run. Any process may die at any moment: what it had leased is taken by another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiledsched.fleet.campaign import Campaign, CampaignPlan, Lease, Outcome
    from tiledsched.fleet.leases import Leases
    from tiledsched.fleet.local import work
    from tiledsched.fleet.run import Limits, plan, run
    from tiledsched.fleet.status import FleetStatus, read_status

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
__all__ = [
    "Campaign",
    "CampaignPlan",
    "FleetStatus",
    "Lease",
    "Leases",
    "Limits",
    "Outcome",
    "plan",
    "read_status",
    "run",
    "work",
]


def __getattr__(name: str) -> Any:
    """Imported when asked for: the command line only needs to know the flags."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"tiledsched.fleet.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'tiledsched.fleet' has no attribute {name!r}")
