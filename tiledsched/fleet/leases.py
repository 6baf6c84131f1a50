"""Leases: the database says what is to be done, who has it until when, and what came of it.

- Every method is one short transaction. Of two workers that ask at once each gets another problem: PostgreSQL skips rows that
  another transaction holds (FOR UPDATE SKIP LOCKED), SQLite lets one write at a time.
- Time is the database's, never a host's: hosts' clocks differ, and a lease must not run out for one and hold for another.
  SQLite has one host, whose clock that is.
- A lease that ran out is anybody's, and so is, where nothing else is left, one that was not renewed twice. Whoever finishes it
  late finds it done, and what it found is kept as evidence.
- Every problem ends as done or failed: attempts are counted when they begin, so that what kills its worker ends, too.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import Session

from tiledsched.core import canonical, errors, registry
from tiledsched.core.problem import Problem
from tiledsched.fleet.campaign import Campaign, CampaignPlan, FailedProblem, Lease, Outcome
from tiledsched.fleet.clock import CLOCK, RETRY_S, Clock, retry_while_unavailable
from tiledsched.store import records, writing
from tiledsched.store.db import TuningDB
from tiledsched.store.models import AttemptRow, CampaignRow, ControlRow, LeaseRow, ProblemRow, UtcDateTime, WorkerRow

T = TypeVar("T")
P = ParamSpec("P")
OPEN = ("waiting", "leased")
RETRIED = (Outcome.ERROR, Outcome.HUNG)
"""Ends of an attempt after which the problem waits for another one."""


def writes(method: Callable[Concatenate[Leases, Session, P], T]) -> Callable[Concatenate[Leases, P], T]:
    """A method of Leases as one transaction that writes, which is made again while the database is away."""

    @functools.wraps(method)
    def made(self: Leases, *given: P.args, **more: P.kwargs) -> T:
        return self.retry(lambda: self.db.write(lambda session: method(self, session, *given, **more)))

    return made


def reads(method: Callable[Concatenate[Leases, Session, P], T]) -> Callable[Concatenate[Leases, P], T]:
    """A method of Leases as one transaction that reads, which is made again while the database is away."""

    @functools.wraps(method)
    def made(self: Leases, *given: P.args, **more: P.kwargs) -> T:
        def read() -> T:
            with self.db.reading() as session:
                return method(self, session, *given, **more)

        return self.retry(read)

    return made


class Leases:
    """Everything that a campaign's workers, and those who watch it, read from and write to the database.

    Args:
        db: where; shared by threads.
        clock: the clock, which may tell the time in place of the database.
        retry_s: how long the database may be away.
        stop: set, it ends the waiting for a database that is away.
    """

    def __init__(
        self, db: TuningDB, *, clock: Clock = CLOCK, retry_s: float = RETRY_S, stop: threading.Event | None = None
    ) -> None:
        self.db, self.clock = db, clock
        self._retry_s, self._stop = retry_s, stop

    def retry(self, ask: Callable[[], T]) -> T:
        """What `ask` returns; again and again while the database is away."""
        return retry_while_unavailable(ask, retry_s=self._retry_s, stop=self._stop, clock=self.clock)

    # Campaigns

    def open(self, plan: CampaignPlan) -> Campaign:
        """Make the campaign of a plan; one that there is goes on: what failed waits again, what is done stays done.

        Raises:
            ConfigError: it names no problem.
        """
        if not any(plan.problems.values()):
            raise errors.ConfigError("there is no problem to do; name some with --problem or --suite")
        identity = plan.id  # a hash of all problems
        self._open(plan, identity)
        return self.campaign(identity)

    @writes
    def _open(self, session: Session, plan: CampaignPlan, identity: str) -> None:
        now = self._now(session)
        limits = {
            "lease_s": plan.lease_s,
            "deadline_s": plan.deadline_s,
            "most_attempts": plan.most_attempts,
            "status": "running",
            "ends_at": None if plan.budget_s is None else now + timedelta(seconds=plan.budget_s),
            "finished_at": None,
        }
        mine = LeaseRow.campaign_id == identity
        if session.get(CampaignRow, identity) is not None:
            failed = sa.update(LeaseRow).where(mine, LeaseRow.state == "failed")
            session.execute(failed.values(state="waiting", attempts=0, message=""))
            if session.scalar(sa.select(sa.exists().where(mine, LeaseRow.state.in_(OPEN)))):
                session.execute(sa.update(CampaignRow).where(CampaignRow.id == identity).values(**limits))
            return
        made = {"job": plan.job, "kernel": plan.kernel, "options": dict(plan.options), "compiler": plan.compiler}
        session.add(CampaignRow(id=identity, source_hash=plan.source_hash, created_at=now, **made, **limits))
        session.flush()
        parents = writing.Parents()
        rows = [
            {
                "campaign_id": identity,
                "number": number,
                "arch": arch,
                "problem_id": parents.add(problem),
                "state": "waiting",
                "attempts": 0,
                "worker_id": None,
                "until": None,
                "result": None,
                "message": "",
                "done_at": None,
            }
            for arch, problems in sorted(plan.problems.items())
            for number, problem in enumerate(problems)
        ]
        parents.insert(session)
        writing.insert_missing(session, LeaseRow, rows)

    def campaign(self, identity: str) -> Campaign:
        """A campaign by its id, or the first letters of it.

        Raises:
            ConfigError: there is none, or several begin like that.
        """
        found = [each for each in self.campaigns() if each.id.startswith(identity)]
        if len(found) != 1:
            raise errors.ConfigError(
                f"{len(found)} campaigns begin with {identity!r}; `tiledsched fleet status` lists them"
            )
        return found[0]

    @reads
    def campaigns(self, session: Session, *, running: bool = False) -> list[Campaign]:
        """Every campaign, newest first."""
        wanted = [CampaignRow.status == "running"] if running else []
        newest_first = CampaignRow.created_at.desc(), CampaignRow.id
        rows = session.scalars(sa.select(CampaignRow).where(*wanted).order_by(*newest_first))
        return [records.record_of(Campaign, row) for row in rows]

    @writes
    def end(self, session: Session, campaign_id: str, *, why: str = "", archs: Collection[str] | None = None) -> str:
        """End a campaign if nothing is left to do; with `why`, what nobody does (of some archs) fails so. What it is then."""
        if why:
            self._give_up(session, campaign_id, why, archs)
        self._expire(session, campaign_id)
        now = self._now(session)
        status, ends_at = session.execute(
            sa.select(CampaignRow.status, CampaignRow.ends_at).where(CampaignRow.id == campaign_id)
        ).one()
        if status == "running" and ends_at is not None and ends_at <= now:
            self._give_up(session, campaign_id, "the budget was spent before its turn", None)
        left = sa.exists().where(LeaseRow.campaign_id == campaign_id, LeaseRow.state.in_(OPEN))
        if status != "running" or session.scalar(sa.select(left)):
            return str(status)
        self._finish(session, campaign_id, "done")
        return "done"

    @writes
    def stop(self, session: Session, campaign_id: str) -> None:
        """Let nobody begin anything more; workers end when they have done what they hold."""
        self._finish(session, campaign_id, "stopped")

    def _finish(self, session: Session, campaign_id: str, status: str) -> None:
        running = sa.update(CampaignRow).where(CampaignRow.id == campaign_id, CampaignRow.status == "running")
        session.execute(running.values(status=status, finished_at=self._now(session)))

    # Workers

    def join(self, campaign_id: str, *, hostname: str, pid: int, gpu: str, device_name: str, arch: str) -> str:
        """Note that a process works on a campaign with a GPU; the worker's id."""
        identity = canonical.stable_id(
            [campaign_id, hostname, pid, gpu, threading.get_ident(), datetime.now().isoformat()]
        )
        where = {"campaign_id": campaign_id, "hostname": hostname, "pid": pid}
        self._join({"id": identity, **where, "gpu": gpu, "device_name": device_name, "arch": arch})
        return identity

    @writes
    def _join(self, session: Session, row: Mapping[str, Any]) -> None:
        now = self._now(session)
        begins = {"state": "idle", "note": "", "conditions": {}, "started_at": now, "seen_at": now}
        writing.insert_missing(session, WorkerRow, [{**row, **begins}])

    @writes
    def leave(self, session: Session, worker_id: str, note: str = "") -> None:
        """Note that a worker ended, and why. What it still has is taken from it at once."""
        ended = {"state": "ended", "note": note, "seen_at": self._now(session)}
        session.execute(sa.update(WorkerRow).where(WorkerRow.id == worker_id).values(**ended))
        held = sa.select(LeaseRow).where(LeaseRow.worker_id == worker_id, LeaseRow.state == "leased")
        for row in session.scalars(held.with_for_update()):
            self._take_back(session, row, "waiting", note or "its worker ended")

    @writes
    def renew(self, session: Session, campaign: Campaign, workers: Mapping[str, Mapping[str, Any]]) -> set[int]:
        """Prolong what workers of this process hold, and note the state of their GPUs; the ids of leases they still have.

        One transaction for all of them: a host with eight GPUs asks once.
        """
        now = self._now(session)
        mine = LeaseRow.worker_id.in_(list(workers)), LeaseRow.state == "leased"
        _change(session, sa.update(LeaseRow).where(*mine).values(until=now + timedelta(seconds=campaign.lease_s)))
        for worker_id, conditions in sorted(workers.items()):
            state = {"conditions": dict(conditions)} if conditions else {}
            session.execute(sa.update(WorkerRow).where(WorkerRow.id == worker_id).values(seen_at=now, **state))
        return set(session.scalars(sa.select(LeaseRow.id).where(*mine)))

    # Leases

    def take(self, campaign: Campaign, worker_id: str, archs: Collection[str]) -> Lease | None:
        """The next problem for one of these archs, held from now on; None where there is none now, or the campaign has ended.

        What nobody tried comes first, then what failed elsewhere, then what a worker that is not heard of held.
        """
        tries = itertools.count()
        return self.retry(
            lambda: self.db.write(lambda session: self._take(session, campaign, worker_id, archs, next(tries)))
        )

    def _take(
        self, session: Session, campaign: Campaign, worker_id: str, archs: Collection[str], tries: int
    ) -> Lease | None:
        now = self._now(session)
        if tries and (had := self._had(session, campaign, worker_id)) is not None:
            return had
        status, ends_at = session.execute(
            sa.select(CampaignRow.status, CampaignRow.ends_at).where(CampaignRow.id == campaign.id)
        ).one()
        if status != "running" or (ends_at is not None and ends_at <= now):
            return None
        columns = LeaseRow.id, LeaseRow.attempts, LeaseRow.arch, LeaseRow.problem_id, LeaseRow.state, LeaseRow.worker_id
        free = (
            sa.select(*columns)
            .where(LeaseRow.campaign_id == campaign.id, LeaseRow.arch.in_(list(archs)))
            .where(LeaseRow.attempts < campaign.most_attempts)
            .order_by(LeaseRow.attempts, LeaseRow.number)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        silent = LeaseRow.state == "leased", LeaseRow.until < campaign.silent_until(now)
        found = session.execute(free.where(LeaseRow.state == "waiting")).first()
        found = found or session.execute(free.where(*silent)).first()
        if found is None:
            return None
        if found.state == "leased":
            self._end_attempt(session, found, Outcome.EXPIRED, "its worker was not heard of")
        number, until = found.attempts + 1, now + timedelta(seconds=campaign.lease_s)
        held = {"state": "leased", "attempts": number, "worker_id": worker_id, "until": until}
        session.execute(sa.update(LeaseRow).where(LeaseRow.id == found.id).values(**held))
        begun = {"started_at": now, "outcome": str(Outcome.RUNNING), "message": ""}
        session.execute(sa.insert(AttemptRow).values(lease_id=found.id, number=number, worker_id=worker_id, **begun))
        session.execute(sa.update(WorkerRow).where(WorkerRow.id == worker_id).values(state="working", seen_at=now))
        return _lease(session, campaign, worker_id, found, number)

    def _had(self, session: Session, campaign: Campaign, worker_id: str) -> Lease | None:
        """What a first try took where its answer was lost: it would be renewed, and done by nobody."""
        held = LeaseRow.worker_id == worker_id, LeaseRow.state == "leased", LeaseRow.campaign_id == campaign.id
        row = session.scalars(sa.select(LeaseRow).where(*held).limit(1)).first()
        return None if row is None else _lease(session, campaign, worker_id, row, row.attempts)

    @writes
    def finish(
        self,
        session: Session,
        lease: Lease,
        outcome: Outcome,
        *,
        result: Mapping[str, Any] | None = None,
        message: str = "",
    ) -> Outcome:
        """Note what came of a lease; `late` where another has or had the problem meanwhile and this is evidence only.

        A late result of a problem that nobody has, or that was given up, is as good as any.
        """
        now = self._now(session)
        values: dict[str, Any] = {"state": "waiting", "message": message}
        kept = None if result is None else dict(result)
        if outcome is Outcome.DONE:
            values = {"state": "done", "result": kept, "message": "", "done_at": now}
        elif outcome is Outcome.FAILED or (outcome in RETRIED and lease.last):
            values |= {"state": "failed", "done_at": now}
        elif outcome is Outcome.RELEASED:
            values["attempts"] = lease.attempt - 1
        values |= {"worker_id": lease.worker_id if outcome is Outcome.DONE else None, "until": None}
        its, ended = sa.update(LeaseRow).where(LeaseRow.id == lease.id).values(**values), outcome
        mine = LeaseRow.worker_id == lease.worker_id, LeaseRow.attempts == lease.attempt, LeaseRow.state == "leased"
        if _change(session, its.where(*mine)):
            ended = Outcome.FAILED if outcome in RETRIED and lease.last else outcome
        elif outcome is Outcome.DONE and not _change(session, its.where(LeaseRow.state.in_(("waiting", "failed")))):
            ended = Outcome.LATE
        self._end_attempt(session, lease, ended, message, kept if ended is Outcome.LATE else None)
        session.execute(sa.update(WorkerRow).where(WorkerRow.id == lease.worker_id).values(state="idle", seen_at=now))
        return ended

    @reads
    def counts(self, session: Session, campaign_id: str) -> dict[str, int]:
        """How many problems are waiting, leased, done and failed."""
        counted = sa.select(LeaseRow.state, sa.func.count()).where(LeaseRow.campaign_id == campaign_id)
        found = {row[0]: row[1] for row in session.execute(counted.group_by(LeaseRow.state))}
        return {state: found.get(state, 0) for state in ("waiting", "leased", "done", "failed")}

    @reads
    def open_archs(self, session: Session, campaign_id: str) -> set[str]:
        """The archs for which something is left to do."""
        left = sa.select(LeaseRow.arch).where(LeaseRow.campaign_id == campaign_id, LeaseRow.state.in_(OPEN))
        return set(session.scalars(left.distinct()))

    def failures(self, campaign_id: str) -> list[FailedProblem]:
        """What could not be done, and why."""
        return [
            FailedProblem(problem=problem, arch=row.arch, attempts=row.attempts, message=row.message)
            for row, problem in self._ended(campaign_id, "failed")
        ]

    def results(self, campaign_id: str) -> list[tuple[Problem, str, dict[str, Any], str]]:
        """What was done: problem, arch, what its job returned, and on which worker."""
        return [
            (problem, row.arch, row.result or {}, row.worker_id or "")
            for row, problem in self._ended(campaign_id, "done")
        ]

    @reads
    def _ended(self, session: Session, campaign_id: str, state: str) -> list[tuple[LeaseRow, Problem]]:
        ended = (
            sa.select(LeaseRow, ProblemRow)
            .join(ProblemRow, ProblemRow.id == LeaseRow.problem_id)
            .where(LeaseRow.campaign_id == campaign_id, LeaseRow.state == state)
            .order_by(LeaseRow.arch, LeaseRow.number)
        )
        return [(row, _problem(of)) for row, of in session.execute(ended)]

    @reads
    def holds(self, session: Session, lease: Lease) -> bool:
        """Whether a lease is still its worker's."""
        row, mine = session.get(LeaseRow, lease.id), (lease.worker_id, lease.attempt, "leased")
        return row is not None and (row.worker_id, row.attempts, row.state) == mine

    # Controls

    @reads
    def time(self, session: Session) -> datetime:
        """The time by which leases run out, which is the same for all hosts."""
        return self._now(session)

    @reads
    def control_problem(self, session: Session, campaign_id: str, arch: str) -> Problem | None:
        """The problem whose default schedule is the control program: of middling work, and the same for every GPU of an arch."""
        mine = LeaseRow.campaign_id == campaign_id, LeaseRow.arch == arch
        count = session.scalar(sa.select(sa.func.count()).where(*mine)) or 0
        middle = sa.select(LeaseRow.problem_id).where(
            *mine, LeaseRow.number == count // 2
        )  # numbers from 0, without a gap
        row = session.scalars(sa.select(ProblemRow).where(ProblemRow.id == middle.scalar_subquery())).first()
        return _problem(row) if row is not None else None

    @writes
    def note_control(
        self, session: Session, campaign_id: str, worker_id: str, gpu: str, arch: str, timed: Mapping[str, Any]
    ) -> None:
        """Store what a GPU took for the control program."""
        taken = {name: timed[name] for name in ("fingerprint", "median_us", "ci_low_us", "ci_high_us")}
        taken |= {"conditions": dict(timed.get("conditions") or {}), "taken_at": self._now(session)}
        row = {"campaign_id": campaign_id, "worker_id": worker_id, "gpu": gpu, "arch": arch, **taken}
        session.execute(sa.insert(ControlRow).values(**row))

    # How

    def _now(self, session: Session) -> datetime:
        """The time: the database's, or of the host where that is the database's, too."""
        if self.clock.now is not None:
            return self.clock.now()
        if self.db.url.startswith("sqlite"):
            return datetime.now(timezone.utc)
        return session.scalars(sa.select(sa.func.clock_timestamp(type_=UtcDateTime()))).one()

    def _give_up(self, session: Session, campaign_id: str, why: str, archs: Collection[str] | None) -> None:
        """Fail what waits, and what a worker that is not heard of holds: nobody will take it."""
        wanted = [LeaseRow.campaign_id == campaign_id, *([] if archs is None else [LeaseRow.arch.in_(list(archs))])]
        for row in session.scalars(self._late(session, *wanted)):
            self._take_back(session, row, "waiting", "its worker was not heard of")
        session.flush()
        failed = {"state": "failed", "message": why, "done_at": self._now(session)}
        _change(session, sa.update(LeaseRow).where(*wanted, LeaseRow.state == "waiting").values(**failed))

    def _late(self, session: Session, *wanted: Any) -> Any:
        """What is held by workers that are not heard of, locked."""
        late = LeaseRow.state == "leased", LeaseRow.until < self._now(session)
        return sa.select(LeaseRow).where(*wanted, *late).with_for_update()

    def _take_back(self, session: Session, row: LeaseRow, state: str, why: str) -> None:
        """Take a problem from the worker that holds it."""
        self._end_attempt(session, row, Outcome.EXPIRED, why)
        row.state, row.message, row.worker_id, row.until = state, why, None, None

    def _expire(self, session: Session, campaign_id: str) -> None:
        """Fail what ran out on its last attempt: nobody may take it again."""
        most = sa.select(CampaignRow.most_attempts).where(CampaignRow.id == campaign_id).scalar_subquery()
        spent = LeaseRow.campaign_id == campaign_id, LeaseRow.attempts >= most
        for row in session.scalars(self._late(session, *spent)):
            times = f", {row.attempts} times" if row.attempts > 1 else ""
            self._take_back(session, row, "failed", f"its worker was not heard of{times}")
        # What was waiting after its last attempt (its worker left) has had its tries.
        waiting = sa.update(LeaseRow).where(*spent, LeaseRow.state == "waiting")
        _change(session, waiting.values(state="failed", done_at=self._now(session)))

    def _end_attempt(
        self, session: Session, lease: Any, outcome: Outcome, message: str, result: Mapping[str, Any] | None = None
    ) -> None:
        number = lease.attempt if isinstance(lease, Lease) else lease.attempts
        values = {"ended_at": self._now(session), "outcome": str(outcome), "message": message, "result": result}
        its = AttemptRow.lease_id == lease.id, AttemptRow.number == number, AttemptRow.worker_id == lease.worker_id
        open_ended = AttemptRow.outcome.in_((str(Outcome.RUNNING), str(Outcome.EXPIRED)))
        _change(session, sa.update(AttemptRow).where(*its, open_ended).values(**values))


def _lease(session: Session, campaign: Campaign, worker_id: str, row: Any, attempt: int) -> Lease:
    problem = session.scalars(sa.select(ProblemRow).where(ProblemRow.id == row.problem_id)).one()
    return Lease(
        id=row.id,
        campaign_id=campaign.id,
        worker_id=worker_id,
        attempt=attempt,
        arch=row.arch,
        problem=_problem(problem),
        last=attempt >= campaign.most_attempts,
    )


def _problem(row: ProblemRow) -> Problem:
    return registry.problem_from_json({"kernel": row.kernel, **row.dims})


def _change(session: Session, statement: Any) -> bool:
    """Make an update, past what the session has read; whether it found one row."""
    done = session.execute(statement, execution_options={"synchronize_session": False})
    assert isinstance(done, CursorResult)
    return done.rowcount == 1


def expected(problems: Sequence[Problem]) -> list[Problem]:
    """In the order to begin them: those of most work first, so that none of them is what the others wait for in the end."""
    return (
        sorted(problems, key=lambda each: (-each.flops, -each.min_bytes, each))
        if all(each.known for each in problems)
        else list(problems)
    )
