"""The same `tune`, `record`, `refresh` and `bench` on many GPUs and hosts.

The database says what is to be done, who has it until when, and what came of it; Ray, where it is used, only says where
workers run. Any process may die at any moment: what it had leased is taken by another.
"""

from tiledsched.fleet.campaign import Campaign, CampaignPlan, Lease, Outcome
from tiledsched.fleet.leases import Leases
from tiledsched.fleet.local import work
from tiledsched.fleet.run import Patience, plan, run
from tiledsched.fleet.status import FleetStatus, read_status

__all__ = [
    "Campaign",
    "CampaignPlan",
    "FleetStatus",
    "Lease",
    "Leases",
    "Outcome",
    "Patience",
    "plan",
    "read_status",
    "run",
    "work",
]
