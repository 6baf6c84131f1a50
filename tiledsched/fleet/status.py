"""What a fleet is doing, read from the database alone: from any machine, whatever has died."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from tiledsched.fleet.calibration import Control, GpuSpread, spread_of
from tiledsched.fleet.campaign import Campaign, FailedProblem, Outcome
from tiledsched.fleet.leases import Leases
from tiledsched.store.db import TuningDB
from tiledsched.store.models import AttemptRow, ControlRow, LeaseRow, WorkerRow
from tiledsched.store.records import record_of

RATE_OVER_S = 600.0
"""The rate is of the last ten minutes, or of the whole campaign where that is younger."""
SILENT = 1.0
"""Leases' lengths after which a worker that says nothing is called silent."""


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One GPU, as long as one process worked with it."""

    id: str
    """The worker's."""
    hostname: str
    """Its host."""
    pid: int
    """Number of its process on that host."""
    gpu: str
    """UUID."""
    device_name: str
    """Marketing name; empty without a GPU."""
    arch: str
    """Arch of its GPU; empty without a GPU, which takes any."""
    state: str
    """working, idle, silent or ended."""
    doing: str
    """The problem, and the stage of it; or why it ended."""
    done: int
    """Problems it finished."""
    faults: int
    """Attempts that ended by its fault, or without a word of it."""
    sm_clock_mhz: int | None
    """SM clock when last heard of; None where the driver does not say."""
    temperature_c: int | None
    """GPU temperature when last heard of."""
    power_w: float | None
    """Board power when last heard of."""
    throttle_reasons: tuple[str, ...]
    """Why its clock is held down, if it is."""
    age_s: float
    """Seconds for which its GPU had not answered when it was last heard of: clock to throttle reasons are as old."""
    seen_s: float
    """Seconds since it was last heard of."""


@dataclass(frozen=True, kw_only=True)
class FleetStatus:
    """How far one campaign is."""

    campaign: Campaign
    """The campaign."""
    waiting: int
    """Problems that nobody has."""
    leased: int
    """Problems that somebody has."""
    done: int
    """Problems done."""
    failed: int
    """Problems that could not be done."""
    late: int
    """Results that came after another worker's, kept as evidence."""
    lost: int
    """Attempts that were taken away, hung or failed, and were made again."""
    rate_per_hour: float | None
    """Problems a hour, lately; None before the first."""
    left_s: float | None
    """Seconds until all is done at that rate; None where it is not known."""
    workers: Sequence[WorkerStatus]
    """The workers that take part, then those that ended."""
    spread: Sequence[GpuSpread]
    """The control program on every GPU."""
    failures: Sequence[FailedProblem]
    """What could not be done, and why."""

    @property
    def total(self) -> int:
        """Problems of the campaign."""
        return self.waiting + self.leased + self.done + self.failed

    @property
    def odd(self) -> list[GpuSpread]:
        """GPUs that differ from their like by more than noise."""
        return [each for each in self.spread if each.named]

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        numbers = ("total", "waiting", "leased", "done", "failed", "late", "lost", "rate_per_hour", "left_s")
        return {
            "campaign": self.campaign.id,
            "command": self.campaign.job,
            "kernel": self.campaign.kernel,
            "status": self.campaign.status,
            **{name: getattr(self, name) for name in numbers},
            "workers": [asdict(each) for each in self.workers],
            "spread": [asdict(each) for each in self.spread],
            "failures": [each.to_json() for each in self.failures],
        }


def controls_of(db: TuningDB, campaign_id: str) -> list[Control]:
    """Every timing of a campaign's control program."""
    query = sa.select(ControlRow, WorkerRow.hostname).join(WorkerRow, WorkerRow.id == ControlRow.worker_id)
    with db.reading() as session:
        rows = session.execute(query.where(ControlRow.campaign_id == campaign_id).order_by(ControlRow.id))
        return [record_of(Control, row, hostname=hostname) for row, hostname in rows]


def read_status(leases: Leases, campaign_id: str) -> FleetStatus:
    """How far a campaign is."""
    campaign, now = leases.campaign(campaign_id), leases.time()
    counts = leases.counts(campaign.id)
    with leases.db.reading() as session:
        ends = _ends(session, campaign)
        rate = _rate(session, campaign, now)
        workers = _workers(session, campaign, now, ends)
    left = counts["waiting"] + counts["leased"]
    return FleetStatus(
        campaign=campaign,
        **counts,
        late=sum(count for (_, outcome), count in ends.items() if outcome == Outcome.LATE),
        lost=sum(each.faults for each in workers),
        rate_per_hour=rate,
        left_s=left / rate * 3600 if rate and left and campaign.status == "running" else None,
        workers=workers,
        spread=spread_of(controls_of(leases.db, campaign.id)),
        failures=leases.failures(campaign.id),
    )


def _rate(session: Session, campaign: Campaign, now: datetime) -> float | None:
    """Problems a hour, lately: of a campaign that ended, while it ran."""
    until = campaign.finished_at or now
    first = session.scalar(
        sa.select(sa.func.min(AttemptRow.started_at))
        .join(LeaseRow, LeaseRow.id == AttemptRow.lease_id)
        .where(LeaseRow.campaign_id == campaign.id)
    )
    if first is None:
        return None
    since = max(first, until - timedelta(seconds=RATE_OVER_S))
    done = (
        session.scalar(
            sa.select(sa.func.count()).where(
                LeaseRow.campaign_id == campaign.id, LeaseRow.state == "done", LeaseRow.done_at > since
            )
        )
        or 0
    )
    seconds = (until - since).total_seconds()
    return done / seconds * 3600 if done and seconds > 0 else None


def _ends(session: Session, campaign: Campaign) -> Counter[tuple[str, str]]:
    """How many attempts ended how, by worker and outcome."""
    counted = (
        sa.select(AttemptRow.worker_id, AttemptRow.outcome, sa.func.count())
        .join(WorkerRow, WorkerRow.id == AttemptRow.worker_id)
        .where(WorkerRow.campaign_id == campaign.id)
        .group_by(AttemptRow.worker_id, AttemptRow.outcome)
    )
    return Counter({(worker, outcome): count for worker, outcome, count in session.execute(counted)})


def _workers(session: Session, campaign: Campaign, now: datetime, ends: Counter[tuple[str, str]]) -> list[WorkerStatus]:
    rows = session.scalars(sa.select(WorkerRow).where(WorkerRow.campaign_id == campaign.id))
    found = []
    for row in rows:
        conditions, seen_s = row.conditions or {}, (now - row.seen_at).total_seconds()
        state = row.state if row.state == "ended" or seen_s <= SILENT * campaign.lease_s else "silent"
        found.append(
            WorkerStatus(
                id=row.id,
                hostname=row.hostname,
                pid=row.pid,
                gpu=row.gpu,
                device_name=row.device_name,
                arch=row.arch,
                state=state,
                doing=row.note if state == "ended" else str(conditions.get("doing", "")),
                done=sum(ends[row.id, str(each)] for each in (Outcome.DONE, Outcome.LATE)),
                faults=sum(ends[row.id, str(each)] for each in (Outcome.ERROR, Outcome.HUNG, Outcome.EXPIRED)),
                sm_clock_mhz=conditions.get("sm_clock_mhz"),
                temperature_c=conditions.get("temperature_c"),
                power_w=conditions.get("power_w"),
                throttle_reasons=tuple(conditions.get("throttle_reasons", ())),
                age_s=conditions.get("age_s", 0.0),
                seen_s=round(seen_s, 1),
            )
        )
    return sorted(found, key=lambda each: (each.state == "ended", each.hostname, each.gpu))
