"""Leases without a database: the rules of :mod:`tiledsched.fleet.leases` in memory, for what of a simulation is modelled."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from tiledsched.core.problem import Problem
from tiledsched.fleet.campaign import Campaign, Lease, Outcome
from tiledsched.fleet.leases import Leases
from tiledsched.store.models import LeaseRow


class ModelledLeases:
    """Goes on from where real leases are; a test holds both to the same answers.

    Args:
        real: whose state is taken over.
        campaign: of which campaign.
        problems: by id.
        clock: tells the time.
    """

    def __init__(
        self, real: Leases, campaign: Campaign, problems: Mapping[str, Problem], clock: Callable[[], datetime]
    ) -> None:
        self._campaign, self._problems, self._clock = campaign, problems, clock
        self._waiting: list[tuple[int, int, int]] = []
        self._held: dict[int, tuple[str, int, datetime]] = {}
        self._of: dict[str, int] = {}
        self._what: dict[int, tuple[int, str, str]] = {}
        self._ended = {"done": 0, "failed": 0}
        self._failed: set[int] = set()
        self._joined = 0
        with real.db.reading() as session:
            for row in session.scalars(sa.select(LeaseRow).where(LeaseRow.campaign_id == campaign.id)):
                self._what[row.id] = row.number, row.arch, row.problem_id
                if row.state == "waiting":
                    self._waiting.append((row.attempts, row.number, row.id))
                elif row.state == "leased" and row.worker_id is not None and row.until is not None:
                    self._held[row.id] = row.worker_id, row.attempts, row.until
                    self._of[row.worker_id] = row.id
                else:
                    self._ended[row.state] += 1
        heapq.heapify(self._waiting)

    def join(self, campaign_id: str, **_: Any) -> str:
        """A worker's id."""
        self._joined += 1
        return f"modelled{self._joined}"

    def take(self, campaign: Campaign, worker_id: str, archs: Collection[str]) -> Lease | None:
        """The next problem: one that waits, else one whose worker is silent."""
        now = self._clock()
        if self._waiting:
            attempts, _, number = heapq.heappop(self._waiting)
        else:
            late = [
                (attempts, self._what[number][0], number)
                for number, (_, attempts, until) in self._held.items()
                if until < campaign.silent_until(now) and attempts < campaign.most_attempts
            ]
            if not late:
                return None
            attempts, _, number = min(late)
            self._of.pop(self._held[number][0], None)
        self._held[number] = worker_id, attempts + 1, now + timedelta(seconds=campaign.lease_s)
        self._of[worker_id] = number
        _, arch, problem_id = self._what[number]
        return Lease(
            id=number,
            campaign_id=campaign.id,
            worker_id=worker_id,
            attempt=attempts + 1,
            arch=arch,
            problem=self._problems[problem_id],
            last=attempts + 1 >= campaign.most_attempts,
        )

    def finish(self, lease: Lease, outcome: Outcome, **_: Any) -> Outcome:
        """Done, if the worker still has it."""
        if lease.id in self._failed:
            self._failed.remove(lease.id)
            self._ended["failed"] -= 1
            self._ended["done"] += 1
            return outcome
        held = self._held.get(lease.id)
        if held is None or held[:2] != (lease.worker_id, lease.attempt):
            return Outcome.LATE
        del self._held[lease.id]
        self._of.pop(lease.worker_id, None)
        self._ended["done"] += 1
        return outcome

    def renew(self, campaign: Campaign, workers: Mapping[str, Any]) -> set[int]:
        """Prolong what these have."""
        until = self._clock() + timedelta(seconds=campaign.lease_s)
        mine = {self._of[worker] for worker in workers if worker in self._of}
        for number in mine:
            self._held[number] = *self._held[number][:2], until
        return mine

    def end(self, campaign_id: str) -> str:
        """done, where nothing is left."""
        now = self._clock()
        for number, (_, attempts, until) in list(self._held.items()):
            if until < now and attempts >= self._campaign.most_attempts:
                del self._held[number]
                self._failed.add(number)
                self._ended["failed"] += 1
        return "running" if self._waiting or self._held else "done"

    def counts(self, campaign_id: str) -> dict[str, int]:
        """How many problems are waiting, leased, done and failed."""
        return {"waiting": len(self._waiting), "leased": len(self._held), **self._ended}
