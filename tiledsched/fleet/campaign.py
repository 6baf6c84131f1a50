"""What a fleet is asked to do: a campaign, the leases on its problems, and how attempts end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from typing import Any

from tiledsched.core.canonical import stable_id
from tiledsched.core.problem import Problem

JOBS_VARIABLE = "TILEDSCHED_FLEET_JOBS"
"""Modules, with commas between them, whose functions a worker runs beside those of this package: a database names functions,
and whoever can write to it must not thereby choose code."""
LEASE_S = 120.0
"""How long a lease holds unless renewed: what a dead host costs its problem."""
MISSED = 0.5
"""Part of a lease (which is renewed four times as often as it runs out) without a word, after which a worker that has nothing
else to do takes the problem over. Where its worker lives after all, that costs what was idle anyway."""
DEADLINE_S = 3600.0
"""How long one attempt may take before its process is killed, as hung."""
MOST_ATTEMPTS = 3
"""Of one problem, those that were taken away included."""


class Outcome(str, Enum):
    """How an attempt ended."""

    RUNNING = "running"
    DONE = "done"
    LATE = "late"
    """Done after the lease had run out and another had it: kept as evidence."""
    FAILED = "failed"
    """By the problem's own fault, or once too often: not tried again."""
    ERROR = "error"
    """By the GPU's or the host's: tried again elsewhere."""
    HUNG = "hung"
    """Past its deadline, and killed."""
    EXPIRED = "expired"
    """The worker was not heard of."""
    RELEASED = "released"
    """Given back, because the worker was told to stop, or waits for room on its disk. Not counted."""
    FULL = "full"
    """A disk of the host was full: released while the worker waits for room, an error after that. Never stored."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class CampaignPlan:
    """A campaign that is to be opened. The same plan is the same campaign: opened again, it goes on."""

    job: str
    """tune, record, refresh or bench; or `module:function`, a job of your own."""
    kernel: str
    """Where the kernel is declared, as `KernelClass.locator()` tells."""
    problems: Mapping[str, Sequence[Problem]]
    """What is to be done for each arch."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the job: JSON."""
    compiler: str = ""
    """Version that every worker must have; empty for any."""
    source_hash: str = ""
    """Of the kernel, which every worker must have; empty for any."""
    lease_s: float = LEASE_S
    """How long a lease holds unless renewed."""
    deadline_s: float = DEADLINE_S
    """How long one attempt may take."""
    most_attempts: int = MOST_ATTEMPTS
    """Of one problem."""
    budget_s: float | None = None
    """Seconds after which nothing more is begun; None for no limit."""

    @property
    def id(self) -> str:
        """Of its contents; how patient it is, is no part of them."""
        problems = {arch: sorted(each.id for each in some) for arch, some in sorted(self.problems.items())}
        return stable_id([self.job, self.kernel, problems, dict(self.options), self.compiler, self.source_hash])


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """A campaign as the database has it."""

    id: str
    """Hash of its plan."""
    job: str
    """tune, record, refresh or bench; or `module:function`."""
    kernel: str
    """Where the kernel is declared."""
    options: Mapping[str, Any]
    """Keyword arguments of the job."""
    compiler: str
    """Version that every worker must have; empty for any."""
    source_hash: str
    """Of the kernel; empty for any."""
    lease_s: float
    """How long a lease holds unless renewed."""
    deadline_s: float
    """How long one attempt may take."""
    most_attempts: int
    """Of one problem."""
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
    """Of which campaign."""
    worker_id: str
    """Whose."""
    attempt: int
    """Which attempt at this problem, from 1."""
    arch: str
    """For which arch."""
    problem: Problem
    """What is to be done."""
    last: bool
    """Whether it is the last attempt that is allowed."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the process that does the problems is told first."""

    db: str
    """URL of the campaign's database, with its password."""
    campaign: Campaign
    """What is to be done."""
    jobs: int
    """Compile processes of this child."""
    builds_elsewhere: bool
    """Whether the worker has builds done for it, on other hosts."""


@dataclass(frozen=True, kw_only=True)
class FailedProblem:
    """A problem that could not be done."""

    problem: Problem
    """Which."""
    arch: str
    """For which arch."""
    attempts: int
    """How often it was tried."""
    message: str
    """Why not."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {"problem": self.problem.to_json(), "arch": self.arch, "attempts": self.attempts, "why": self.message}
