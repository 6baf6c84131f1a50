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

import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import Session

from tiledsched.core.canonical import stable_id
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import Problem
from tiledsched.core.registry import problem_from_json
from tiledsched.fleet.campaign import Campaign, CampaignPlan, FailedProblem, Lease, Outcome
from tiledsched.fleet.retry import RETRY_S, retry_while_unavailable
from tiledsched.store.db import TuningDB
from tiledsched.store.models import AttemptRow, CampaignRow, ControlRow, LeaseRow, ProblemRow, UtcDateTime, WorkerRow
from tiledsched.store.records import record_of
from tiledsched.store.writing import Parents, insert_missing

T = TypeVar("T")
Clock = Callable[[], datetime]
OPEN = ("waiting", "leased")
RETRIED = (Outcome.ERROR, Outcome.HUNG)
"""Ends of an attempt after which the problem waits for another one."""


class Leases:
    """Everything that a campaign's workers, and those who watch it, read from and write to the database.

    Args:
        db: where; shared by threads.
        clock: tells the time in place of the database: a simulator has its own.
        retry_s: how long the database may be away.
        stop: set, it ends the waiting for a database that is away.
    """

    def __init__(
        self, db: TuningDB, *, clock: Clock | None = None, retry_s: float = RETRY_S, stop: threading.Event | None = None
    ) -> None:
        self.db = db
        self._clock, self._retry_s, self._stop = clock, retry_s, stop

    # Campaigns

    def open(self, plan: CampaignPlan) -> Campaign:
        """Make the campaign of a plan; one that there is goes on: what failed waits again, what is done stays done.

        Raises:
            ConfigError: it names no problem.
        """
        if not any(plan.problems.values()):
            raise ConfigError("there is no problem to do; name some with --problem or --suite")
        identity, parents = plan.id, Parents()  # the id is a hash of all problems
        rows = [
            {
                "campaign_id": identity,
                "number": number,
                "arch": arch,
                "problem_id": parents.problem(problem),
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

        def make(session: Session) -> None:
            now = self._now(session)
            ends_at = None if plan.budget_s is None else now + timedelta(seconds=plan.budget_s)
            limits = {
                "lease_s": plan.lease_s,
                "deadline_s": plan.deadline_s,
                "most_attempts": plan.most_attempts,
                "status": "running",
                "ends_at": ends_at,
                "finished_at": None,
            }
            known = session.get(CampaignRow, identity)
            if known is None:
                session.add(
                    CampaignRow(
                        id=identity,
                        job=plan.job,
                        kernel=plan.kernel,
                        options=dict(plan.options),
                        compiler=plan.compiler,
                        source_hash=plan.source_hash,
                        created_at=now,
                        **limits,
                    )
                )
                session.flush()
                parents.insert(session)
                insert_missing(session, LeaseRow, rows)
                return
            failed = sa.update(LeaseRow).where(LeaseRow.campaign_id == identity, LeaseRow.state == "failed")
            session.execute(failed.values(state="waiting", attempts=0, message=""))
            left = session.scalar(
                sa.select(sa.exists().where(LeaseRow.campaign_id == identity, LeaseRow.state.in_(OPEN)))
            )
            if left:
                session.execute(sa.update(CampaignRow).where(CampaignRow.id == identity).values(**limits))

        self._write(make)
        return self.campaign(identity)

    def campaign(self, identity: str) -> Campaign:
        """A campaign by its id, or the first letters of it.

        Raises:
            ConfigError: there is none, or several begin like that.
        """
        found = [each for each in self.campaigns() if each.id.startswith(identity)]
        if len(found) != 1:
            raise ConfigError(f"{len(found)} campaigns begin with {identity!r}; `tiledsched fleet status` lists them")
        return found[0]

    def campaigns(self, *, running: bool = False) -> list[Campaign]:
        """Every campaign, newest first."""
        wanted = [CampaignRow.status == "running"] if running else []

        def read(session: Session) -> list[Campaign]:
            rows = session.scalars(
                sa.select(CampaignRow).where(*wanted).order_by(CampaignRow.created_at.desc(), CampaignRow.id)
            )
            return [record_of(Campaign, row) for row in rows]

        return self._read(read)

    def end(self, campaign_id: str, *, why: str = "", archs: Collection[str] | None = None) -> str:
        """End a campaign if nothing is left to do; with `why`, what nobody does (of some archs) fails so. What it is then."""

        def end(session: Session) -> str:
            mine = LeaseRow.campaign_id == campaign_id
            if why:
                self._give_up(session, campaign_id, why, archs)
            self._expire(session, campaign_id)
            campaign = session.execute(
                sa.select(CampaignRow.status, CampaignRow.ends_at).where(CampaignRow.id == campaign_id)
            ).one()
            if campaign.status == "running" and campaign.ends_at is not None and campaign.ends_at <= self._now(session):
                self._give_up(session, campaign_id, "the budget was spent before its turn", None)
            if campaign.status != "running":
                return str(campaign.status)
            if session.scalar(sa.select(sa.exists().where(mine, LeaseRow.state.in_(OPEN)))):
                return "running"
            session.execute(
                sa.update(CampaignRow)
                .where(CampaignRow.id == campaign_id, CampaignRow.status == "running")
                .values(status="done", finished_at=self._now(session))
            )
            return "done"

        return self._write(end)

    def stop(self, campaign_id: str) -> None:
        """Let nobody begin anything more; workers end when they have done what they hold."""
        stopped = sa.update(CampaignRow).where(CampaignRow.id == campaign_id, CampaignRow.status == "running")
        self._write(lambda session: session.execute(stopped.values(status="stopped", finished_at=self._now(session))))

    # Workers

    def join(self, campaign_id: str, *, hostname: str, pid: int, gpu: str, device_name: str, arch: str) -> str:
        """Note that a process works on a campaign with a GPU; the worker's id."""
        identity = stable_id([campaign_id, hostname, pid, gpu, threading.get_ident(), datetime.now().isoformat()])
        row = {
            "id": identity,
            "campaign_id": campaign_id,
            "hostname": hostname,
            "pid": pid,
            "gpu": gpu,
            "device_name": device_name,
            "arch": arch,
            "state": "idle",
            "note": "",
            "conditions": {},
        }

        def join(session: Session) -> None:
            now = self._now(session)
            insert_missing(session, WorkerRow, [{**row, "started_at": now, "seen_at": now}])

        self._write(join)
        return identity

    def leave(self, worker_id: str, note: str = "") -> None:
        """Note that a worker ended, and why. What it still has is taken from it at once."""

        def leave(session: Session) -> None:
            session.execute(
                sa.update(WorkerRow)
                .where(WorkerRow.id == worker_id)
                .values(state="ended", note=note, seen_at=self._now(session))
            )
            held = (
                sa.select(LeaseRow).where(LeaseRow.worker_id == worker_id, LeaseRow.state == "leased").with_for_update()
            )
            for row in session.scalars(held):
                self._take_back(session, row, "waiting", note or "its worker ended")

        self._write(leave)

    def renew(self, campaign: Campaign, workers: Mapping[str, Mapping[str, Any]]) -> set[int]:
        """Prolong what workers of this process hold, and note the state of their GPUs; the ids of leases they still have.

        One transaction for all of them: a host with eight GPUs asks once.
        """
        mine = LeaseRow.worker_id.in_(list(workers))

        def renew(session: Session) -> set[int]:
            now = self._now(session)
            prolonged = sa.update(LeaseRow).where(mine, LeaseRow.state == "leased")
            session.execute(
                prolonged.values(until=now + timedelta(seconds=campaign.lease_s)),
                execution_options={"synchronize_session": False},
            )
            for worker_id, conditions in sorted(workers.items()):
                said = {"conditions": dict(conditions)} if conditions else {}
                session.execute(sa.update(WorkerRow).where(WorkerRow.id == worker_id).values(seen_at=now, **said))
            return set(session.scalars(sa.select(LeaseRow.id).where(mine, LeaseRow.state == "leased")))

        return self._write(renew)

    # Leases

    def take(self, campaign: Campaign, worker_id: str, archs: Collection[str]) -> Lease | None:
        """The next problem for one of these archs, held from now on; None where there is none now, or the campaign has ended.

        What nobody tried comes first, then what failed elsewhere, then what a worker that is not heard of held.
        """
        tries = itertools.count()

        def take(session: Session) -> Lease | None:
            now = self._now(session)
            if next(tries) and (had := self._had(session, campaign, worker_id)) is not None:
                return had
            running = session.execute(
                sa.select(CampaignRow.status, CampaignRow.ends_at).where(CampaignRow.id == campaign.id)
            ).one()
            if running.status != "running" or (running.ends_at is not None and running.ends_at <= now):
                return None
            wanted = [
                LeaseRow.campaign_id == campaign.id,
                LeaseRow.arch.in_(list(archs)),
                LeaseRow.attempts < campaign.most_attempts,
            ]
            free = (
                sa.select(
                    LeaseRow.id,
                    LeaseRow.attempts,
                    LeaseRow.arch,
                    LeaseRow.problem_id,
                    LeaseRow.state,
                    LeaseRow.worker_id,
                )
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            order = LeaseRow.attempts, LeaseRow.number
            silent = LeaseRow.state == "leased", LeaseRow.until < campaign.silent_until(now)
            found = session.execute(free.where(*wanted, LeaseRow.state == "waiting").order_by(*order)).first()
            if found is None:
                found = session.execute(free.where(*wanted, *silent).order_by(*order)).first()
            if found is None:
                return None
            if found.state == "leased":
                self._end_attempt(session, found, Outcome.EXPIRED, "its worker was not heard of")
            number = found.attempts + 1
            session.execute(
                sa.update(LeaseRow)
                .where(LeaseRow.id == found.id)
                .values(
                    state="leased",
                    attempts=number,
                    worker_id=worker_id,
                    until=now + timedelta(seconds=campaign.lease_s),
                )
            )
            session.execute(
                sa.insert(AttemptRow).values(
                    lease_id=found.id,
                    number=number,
                    worker_id=worker_id,
                    started_at=now,
                    outcome=str(Outcome.RUNNING),
                    message="",
                )
            )
            session.execute(sa.update(WorkerRow).where(WorkerRow.id == worker_id).values(state="working", seen_at=now))
            return _lease(session, campaign, worker_id, found, number)

        return self._write(take)

    def _had(self, session: Session, campaign: Campaign, worker_id: str) -> Lease | None:
        """What a first try took where its answer was lost: it would be renewed, and done by nobody."""
        held = LeaseRow.worker_id == worker_id, LeaseRow.state == "leased", LeaseRow.campaign_id == campaign.id
        row = session.scalars(sa.select(LeaseRow).where(*held).limit(1)).first()
        return None if row is None else _lease(session, campaign, worker_id, row, row.attempts)

    def finish(
        self, lease: Lease, outcome: Outcome, *, result: Mapping[str, Any] | None = None, message: str = ""
    ) -> Outcome:
        """Note what came of a lease; `late` where another has or had the problem meanwhile and this is evidence only.

        A late result of a problem that nobody has, or that was given up, is as good as any.
        """
        mine = LeaseRow.worker_id == lease.worker_id, LeaseRow.attempts == lease.attempt, LeaseRow.state == "leased"
        kept = None if result is None else dict(result)

        def finish(session: Session) -> Outcome:
            now = self._now(session)
            if outcome is Outcome.DONE:
                values: dict[str, Any] = {"state": "done", "result": kept, "message": "", "done_at": now}
            elif outcome is Outcome.FAILED or (outcome in RETRIED and lease.last):
                values = {"state": "failed", "message": message, "done_at": now}
            else:
                uncounted = {"attempts": lease.attempt - 1} if outcome is Outcome.RELEASED else {}
                values = {"state": "waiting", "message": message, **uncounted}
            values |= {"worker_id": lease.worker_id if values["state"] == "done" else None, "until": None}
            ended = outcome
            if not _changed(session, sa.update(LeaseRow).where(LeaseRow.id == lease.id, *mine).values(**values)):
                nobodys = LeaseRow.state.in_(("waiting", "failed"))
                late = sa.update(LeaseRow).where(LeaseRow.id == lease.id, nobodys).values(**values)
                if outcome is not Outcome.DONE or not _changed(session, late):
                    ended = Outcome.LATE if outcome is Outcome.DONE else outcome
            elif outcome in RETRIED and lease.last:
                ended = Outcome.FAILED
            self._end_attempt(session, lease, ended, message, kept if ended is Outcome.LATE else None)
            session.execute(
                sa.update(WorkerRow).where(WorkerRow.id == lease.worker_id).values(state="idle", seen_at=now)
            )
            return ended

        return self._write(finish)

    def counts(self, campaign_id: str) -> dict[str, int]:
        """How many problems are waiting, leased, done and failed."""
        asked = sa.select(LeaseRow.state, sa.func.count()).where(LeaseRow.campaign_id == campaign_id)
        found = self._read(lambda session: {row[0]: row[1] for row in session.execute(asked.group_by(LeaseRow.state))})
        return {state: found.get(state, 0) for state in ("waiting", "leased", "done", "failed")}

    def open_archs(self, campaign_id: str) -> set[str]:
        """The archs for which something is left to do."""
        asked = sa.select(LeaseRow.arch).where(LeaseRow.campaign_id == campaign_id, LeaseRow.state.in_(OPEN)).distinct()
        return self._read(lambda session: set(session.scalars(asked)))

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

    def _ended(self, campaign_id: str, state: str) -> list[tuple[LeaseRow, Problem]]:
        asked = (
            sa.select(LeaseRow, ProblemRow)
            .join(ProblemRow, ProblemRow.id == LeaseRow.problem_id)
            .where(LeaseRow.campaign_id == campaign_id, LeaseRow.state == state)
            .order_by(LeaseRow.arch, LeaseRow.number)
        )
        return self._read(lambda session: [(row, _problem(of)) for row, of in session.execute(asked)])

    # Controls

    def time(self) -> datetime:
        """What the time is, for everybody."""
        return self._read(self._now)

    def control_problem(self, campaign_id: str, arch: str) -> Problem | None:
        """The problem whose default schedule is the control program: of middling work, and the same for every GPU of an arch."""
        mine = LeaseRow.campaign_id == campaign_id, LeaseRow.arch == arch

        def read(session: Session) -> Problem | None:
            count = session.scalar(sa.select(sa.func.count()).where(*mine)) or 0
            middle = sa.select(LeaseRow.problem_id).where(*mine, LeaseRow.number == count // 2).scalar_subquery()
            asked = sa.select(ProblemRow).where(ProblemRow.id == middle)  # their numbers begin at 0, without a gap
            row = session.scalars(asked).first()
            return _problem(row) if row is not None else None

        return self._read(read)

    def note_control(self, campaign_id: str, worker_id: str, gpu: str, arch: str, told: Mapping[str, Any]) -> None:
        """Store what a GPU took for the control program."""
        row = {
            "campaign_id": campaign_id,
            "worker_id": worker_id,
            "gpu": gpu,
            "arch": arch,
            **{name: told[name] for name in ("fingerprint", "median_us", "ci_low_us", "ci_high_us")},
            "conditions": dict(told.get("conditions") or {}),
        }
        self._write(lambda session: session.execute(sa.insert(ControlRow).values(**row, taken_at=self._now(session))))

    # How

    def _write(self, work: Callable[[Session], T]) -> T:
        return retry_while_unavailable(lambda: self.db.write(work), retry_s=self._retry_s, stop=self._stop)

    def _read(self, work: Callable[[Session], T]) -> T:
        def read() -> T:
            with self.db.reading() as session:
                return work(session)

        return retry_while_unavailable(read, retry_s=self._retry_s, stop=self._stop)

    def _now(self, session: Session) -> datetime:
        """The time: the database's, or of the host where that is the database's, too."""
        if self._clock is not None:
            return self._clock()
        if self.db.url.startswith("sqlite"):
            return datetime.now(timezone.utc)
        return session.scalars(sa.select(sa.func.clock_timestamp(type_=UtcDateTime()))).one()

    def _give_up(self, session: Session, campaign_id: str, why: str, archs: Collection[str] | None) -> None:
        """Fail what waits, and what a worker that is not heard of holds: nobody will take it."""
        wanted = [LeaseRow.campaign_id == campaign_id, *([] if archs is None else [LeaseRow.arch.in_(list(archs))])]
        for row in session.scalars(self._late(session, *wanted)):
            self._take_back(session, row, "waiting", "its worker was not heard of")
        session.flush()
        session.execute(
            sa.update(LeaseRow)
            .where(*wanted, LeaseRow.state == "waiting")
            .values(state="failed", message=why, done_at=self._now(session)),
            execution_options={"synchronize_session": False},
        )

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
        late = self._late(session, LeaseRow.campaign_id == campaign_id, LeaseRow.attempts >= most)
        for row in session.scalars(late):
            times = f", {row.attempts} times" if row.attempts > 1 else ""
            self._take_back(session, row, "failed", f"its worker was not heard of{times}")
        # What was waiting after its last attempt (its worker left) has had its tries.
        spent = sa.update(LeaseRow).where(
            LeaseRow.campaign_id == campaign_id, LeaseRow.state == "waiting", LeaseRow.attempts >= most
        )
        session.execute(
            spent.values(state="failed", done_at=self._now(session)), execution_options={"synchronize_session": False}
        )

    def _end_attempt(
        self, session: Session, lease: Any, outcome: Outcome, message: str, result: Mapping[str, Any] | None = None
    ) -> None:
        number = lease.attempt if isinstance(lease, Lease) else lease.attempts
        values = {"ended_at": self._now(session), "outcome": str(outcome), "message": message, "result": result}
        open_ended = AttemptRow.outcome.in_((str(Outcome.RUNNING), str(Outcome.EXPIRED)))
        session.execute(
            sa.update(AttemptRow)
            .where(
                AttemptRow.lease_id == lease.id,
                AttemptRow.number == number,
                AttemptRow.worker_id == lease.worker_id,
                open_ended,
            )
            .values(**values),
            execution_options={"synchronize_session": False},
        )


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
    return problem_from_json({"kernel": row.kernel, **row.dims})


def _changed(session: Session, statement: Any) -> bool:
    """Whether an update found its row."""
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
