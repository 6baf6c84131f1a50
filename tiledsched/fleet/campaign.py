"""What a fleet is to do: a campaign, the leases on its problems, and how attempts end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from tiledsched.core.canonical import stable_id
from tiledsched.core.problem import Problem

LEASE_S = 120.0
"""How long a lease holds unless renewed: what a dead host costs its problem."""
MISSED = 0.5
"""Part of a lease (which is renewed four times as often as it runs out) without a word, after which a worker that has nothing
else to do takes the problem over. Where its worker lives after all, that costs what was idle anyway."""
DEADLINE_S = 3600.0
"""How long one attempt may take before its process is killed, as hung."""
MOST_ATTEMPTS = 3
"""Attempts at one problem, at most, those that were taken away included."""


class Outcome(str, Enum):
    """How an attempt ended."""

    RUNNING = "running"
    DONE = "done"
    LATE = "late"
    """Done after the lease had run out and another had it: kept as evidence."""
    FAILED = "failed"
    """It failed because of the problem itself, or once too often, and is not tried again."""
    ERROR = "error"
    """It failed because of the GPU or the host, and is tried again elsewhere."""
    HUNG = "hung"
    """Past its deadline, and killed."""
    EXPIRED = "expired"
    """The worker did not renew the lease."""
    RELEASED = "released"
    """Given back, because the worker was told to stop, or waits for room on its disk. It does not count as an attempt."""
    FULL = "full"
    """A disk of the host was full: released while the worker waits for room, an error after that. Never stored."""

    def __str__(self) -> str:
        return self.value


Answer = tuple[Outcome, dict[str, Any] | None, str]
"""What became of a request to a child: how it ended, what it returned, and why not."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a campaign waits and how often it tries. The same work opened again with other limits is the same campaign."""

    lease_s: float = LEASE_S
    """How long a lease holds unless renewed: what a dead host costs."""
    deadline_s: float = DEADLINE_S
    """How long one attempt may take, before it is killed as hung."""
    most_attempts: int = MOST_ATTEMPTS
    """Attempts at one problem, at most."""


@dataclass(frozen=True, kw_only=True)
class Terms(Limits):
    """What is to be done for every problem of a campaign, and how long it may take."""

    job: str
    """tune, record, refresh or bench; or `module:function`, a job of your own."""
    kernel: str
    """Where the kernel is declared, as its `locator()` returns it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the job: JSON."""
    compiler: str = ""
    """Version that every worker must have; empty for any."""
    source_hash: str = ""
    """Hash of the kernel's source, which every worker must have; empty for any."""


@dataclass(frozen=True, kw_only=True)
class CampaignPlan(Terms):
    """A campaign that is to be opened. The same plan is the same campaign: opened again, it goes on."""

    problems: Mapping[str, Sequence[Problem]]
    """What is to be done for each arch."""
    budget_s: float | None = None
    """Seconds after which nothing more is begun; None for no limit."""

    @property
    def id(self) -> str:
        """Hash of job, kernel, problems, options, compiler and source; limits are no part of it."""
        problems = {arch: sorted(each.id for each in some) for arch, some in sorted(self.problems.items())}
        return stable_id([self.job, self.kernel, problems, dict(self.options), self.compiler, self.source_hash])


@dataclass(frozen=True, kw_only=True)
class Campaign(Terms):
    """A campaign as the database has it."""

    id: str
    """Hash of its plan."""
    status: str
    """running, done or stopped."""
    created_at: datetime
    """When it was opened first."""
    ends_at: datetime | None
    """When nothing more is begun; None for no limit."""
    finished_at: datetime | None
    """When it ended."""

    def silent_until(self, now: datetime) -> datetime:
        """Leases that hold until then, or less long, were not renewed for too long to wait for their workers."""
        return now + timedelta(seconds=(1.0 - MISSED) * self.lease_s)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """One problem, held by one worker until a time."""

    id: int
    """Number in the database."""
    campaign_id: str
    """Id of the campaign."""
    worker_id: str
    """Id of the worker that holds it."""
    attempt: int
    """Which attempt at this problem, from 1."""
    arch: str
    """The arch it is to be done for."""
    problem: Problem
    """What is to be done."""
    last: bool
    """Whether it is the last attempt that is allowed."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker sends first to the child that does the problems."""

    db: str
    """URL of the campaign's database, with its password."""
    campaign: Campaign
    """What is to be done."""
    jobs: int
    """Compile processes of this child."""
    allowed: tuple[str, ...] = ()
    """Code that the campaign may name, because the worker's user did; see :func:`tiledsched.core.registry.allow`."""


@dataclass(frozen=True, kw_only=True)
class FailedProblem:
    """A problem that could not be done."""

    problem: Problem
    """The problem."""
    arch: str
    """The arch it is to be done for."""
    attempts: int
    """How often it was tried."""
    message: str
    """Why not."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {"problem": self.problem.to_json(), "arch": self.arch, "attempts": self.attempts, "why": self.message}
