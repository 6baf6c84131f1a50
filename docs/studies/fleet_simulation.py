"""A fleet of any size, simulated: how long it takes, how busy the database is, and what breaks first.

`python -m docs.studies.fleet_simulation --gpus 1000 --problems 100000` prints it.

What is real: the leases. Problems are taken, renewed and finished by the code that workers run, in a real database that holds
all of them; only the clock is made up, so that leases run out and dead workers' problems are taken over as they would. After the
first so many problems the same rules go on in memory, each question costing what a real one of its kind did.

What else is modelled: how long a problem takes (drawn from recorded landscapes: what their samples took at the distance they were
launched at, and compiling), that workers die (a share of attempts, at a random moment), and a server of so many cores that
serves as many questions at once. A question keeps a core busy for the processor time of the server's processes, where they run
here (PostgreSQL), else for all it took, with the client's part; the worker waits for all of it. What a worker reads at the start
and sends home at the end is timed on this database a few times, then taken to be the same for all.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from docs.studies.modelled_leases import ModelledLeases
from tiledsched.build.cubin import Artifact
from tiledsched.core import data_files
from tiledsched.core.device import ResourceFacts
from tiledsched.core.errors import ConfigError
from tiledsched.core.problem import Problem, ProblemClass
from tiledsched.core.registry import problem_from_json
from tiledsched.fleet.campaign import Campaign, CampaignPlan, Lease, Outcome
from tiledsched.fleet.clock import Clock
from tiledsched.fleet.leases import Leases
from tiledsched.fleet.local_store import what_is_known
from tiledsched.store.db import TuningDB
from tiledsched.store.exchange import read_table
from tiledsched.store.records import BuildRecord, StoredMeasurement
from tiledsched.tuning.options import EFFORTS

T = TypeVar("T")
HOST_GPUS = 8
"""GPUs of a host, whose leases are renewed together."""
HOST_CPUS = 96
"""Its CPUs, which compile."""
COMPILE_S = 2.0
"""Seconds that compiling one program takes on one CPU."""
SETUP_S = 6.0
"""Seconds that a problem takes before its first measurement: opening the GPU, making inputs and reference."""
CHECK_S = 0.1
"""Seconds that loading and checking one program take."""
BACK_S = 120.0
"""Seconds until a worker that died is there again."""
TRIED = 20
"""Problems whose reading and sending home are really done, to be timed."""
LEAST_TOLD_S = 0.1
"""Of processor time: the system counts it in hundredths of a second."""
START = datetime(2026, 1, 1, tzinfo=timezone.utc)
ARCH = "sm_90"


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """What is simulated."""

    gpus: int = 1000
    """GPUs, eight to a host."""
    problems: int = 100_000
    """Problems of the campaign."""
    deaths: float = 0.001
    """Share of attempts whose worker dies."""
    cores: int = 8
    """CPU cores of the database server."""
    seed: int = 0
    """Seed of the random times and deaths."""
    real: int = 10_000
    """Problems that real leases serve."""
    lease_s: float = 120.0
    """How long a lease holds unless renewed."""


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What it came to."""

    options: SimulationOptions
    """What was simulated."""
    hours: float
    """From the first lease to the last result."""
    over_ideal: float
    """That over the work of all problems divided by the GPUs, less 1."""
    done: int
    """Problems done."""
    failed: int
    """Problems given up."""
    attempts: int
    """Attempts, those of dead workers included."""
    database_busy: float
    """Share of the server's cores."""
    by_processor: bool
    """Whether that is told by processor time of a server, or by what questions took, with the client's part."""
    waited_ms: float
    """What a question waited for a free core, at the 99th percentile."""
    questions_ms: dict[str, float]
    """What a question of each kind took, on average."""
    problem_s: float
    """What a problem took, on average."""
    questions: dict[str, int]
    """How many of each kind."""
    breaks_at_gpus: int
    """GPUs with which the server would have no core left."""
    first: str
    """The kind of question that takes most of it."""
    wall_s: float
    """What the simulation took."""

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        told = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "options"}
        return {**{name: getattr(self.options, name) for name in self.options.__dataclass_fields__}, **told}

    def __str__(self) -> str:
        given, client = self.options, "" if self.by_processor else " (with the client)"
        lines = [
            f"{given.problems} problems of {self.problem_s:.0f} s on {given.gpus} GPUs: {self.hours:.2f} h, "
            f"{self.over_ideal:+.1%} over ideal",
            f"{self.done} done, {self.failed} given up, {self.attempts} attempts",
            f"database: {self.database_busy:.1%} of {given.cores} cores busy{client}, "
            f"99% of questions wait less than {self.waited_ms:.1f} ms",
            *(f"  {kind}: {self.questions[kind]} times {ms:.2f} ms" for kind, ms in self.questions_ms.items()),
            f"first to break: the database, at {self.breaks_at_gpus} GPUs, by: {self.first}",
        ]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class RecordedTime:
    """One recorded problem, as a fleet would tune it."""

    seconds: float
    """What tuning it takes a GPU of a full host."""
    measurements: Sequence[StoredMeasurement]
    """What would be sent home."""

    @property
    def problem(self) -> Problem:
        """What was measured."""
        return self.measurements[0].measurement.problem


def recorded_times(effort: str = "default", count: int | None = None) -> list[RecordedTime]:
    """The burst landscapes that ship, or the first of them, each as a tune of so much effort would measure it.

    Raises:
        ConfigError: none ship.
    """
    found, most = [], EFFORTS[effort].programs
    for path in sorted((data_files.tuning_db() / "landscapes").glob("*/*_burst_*.json.xz"))[:count]:
        taken = sorted(read_table(path).measurements, key=lambda each: each.measurement.median_us)[:most]
        sampling_s = (
            sum(
                len(each.measurement.samples_us)
                * max(each.measurement.conditions.gap_ms, each.measurement.median_us / 1e3)
                for each in taken
            )
            / 1e3
        )
        compiling_s = len(taken) * COMPILE_S / (HOST_CPUS / HOST_GPUS)
        found.append(
            RecordedTime(seconds=SETUP_S + compiling_s + len(taken) * CHECK_S + sampling_s, measurements=taken)
        )
    if not found:
        raise ConfigError("no landscapes are here to take times from; install the package whole")
    return found


@dataclass
class _Server:
    """A database with so many cores: questions are served as they come, and wait while all are busy."""

    cores: int
    free: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    took_s: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    waited_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = [0.0] * self.cores

    def serve(self, kind: str, now_s: float, took_s: float) -> float:
        """When a question that is asked now is answered."""
        begins = max(now_s, heapq.heappop(self.free))
        heapq.heappush(self.free, begins + took_s)
        self.busy_s += took_s
        self.took_s[kind] += took_s  # type: ignore[assignment]
        self.asked[kind] += 1
        self.waited_s.append(begins - now_s)
        return begins + took_s


class _Simulation:
    def __init__(
        self, options: SimulationOptions, times: Sequence[RecordedTime], db: TuningDB, say: Callable[[str], None]
    ) -> None:
        self.options, self.times, self.db, self.say = options, times, db, say
        self.rng, self.now_s = random.Random(options.seed), 0.0
        self.server = _Server(options.cores)
        self.leases: Leases | ModelledLeases = Leases(db, clock=Clock(now=self.time))
        self.real = True
        self.costs_s: dict[str, list[float]] = defaultdict(list)
        """What real questions took, by kind."""
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.attempts = self.done = 0
        self.last_s = 0.0
        self.over = False
        self.server_s: dict[str, float] = {}
        """Processor time of the server for a question that is modelled, by kind, where it is told."""
        self.share = 1.0
        """Of what a real question takes, the part that is the server's processor time."""

    def time(self) -> datetime:
        """The date and time in the simulated fleet."""
        return START + timedelta(seconds=self.now_s)

    def run(self) -> Simulated:
        began, options = time.perf_counter(), self.options
        problems = [problem_from_json({"kernel": "simulated", "number": number}) for number in range(options.problems)]
        drawn = [self.rng.choice(self.times) for _ in problems]
        drawn.sort(key=lambda each: -each.problem.flops)  # as a plan has them, which does not know their times
        self.seconds = {problem: each.seconds for problem, each in zip(problems, drawn, strict=True)}
        plan = CampaignPlan(job="tune", kernel="simulated", problems={ARCH: problems}, lease_s=options.lease_s)
        assert isinstance(self.leases, Leases)
        self.campaign: Campaign = self.leases.open(plan)
        self.say(f"{options.problems} problems are in the database")
        self.reads_s, self.sends_s = self._time_evidence()
        self.say(f"a problem is read in {self.reads_s * 1e3:.1f} ms and sent home in {self.sends_s * 1e3:.1f} ms")
        before, began_s = _server_s(self.db), time.perf_counter()
        self.workers = {gpu: self._join(gpu) for gpu in range(options.gpus)}
        after, took_s = _server_s(self.db), time.perf_counter() - began_s
        if before is not None and after is not None and after - before > LEAST_TOLD_S:
            self.share = (after - before) / took_s
        for gpu in range(options.gpus):
            self._at(self.rng.uniform(0, 5.0), lambda gpu=gpu: self._take(gpu, 0.2))  # type: ignore[misc]
        for host in range(0, options.gpus, HOST_GPUS):
            gpus = range(host, min(host + HOST_GPUS, options.gpus))
            self._at(self.rng.uniform(0, options.lease_s / 4), lambda gpus=gpus: self._renew(gpus))  # type: ignore[misc]
        while self.events:
            if self.real and self.done >= options.real:
                known = {problem.id: problem for problem in problems}
                self.leases, self.real = ModelledLeases(self.leases, self.campaign, known, self.time), False  # type: ignore[arg-type]
            self.now_s, _, event = heapq.heappop(self.events)
            event()
        counts = self.leases.counts(self.campaign.id)
        return self._summary(counts, time.perf_counter() - began)

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (seconds, next(self.order), event))

    def _really(self, kind: str, ask: Callable[[], T]) -> tuple[T, float]:
        """What the database answers, or would, and when, in the fleet's time."""
        began = time.perf_counter()
        answer = ask()
        took_s = time.perf_counter() - began
        if self.real:
            self.costs_s[kind].append(took_s)
        elif self.costs_s[kind]:
            took_s = self.rng.choice(self.costs_s[kind])
        busy_s = self.share * took_s
        return answer, self.server.serve(kind, self.now_s, busy_s) + took_s - busy_s

    def _modelled(self, kind: str, now_s: float, took_s: float) -> float:
        """When a question of a modelled kind is answered."""
        busy_s = self.server_s.get(kind, took_s)
        return self.server.serve(kind, now_s, busy_s) + max(0.0, took_s - busy_s)

    def _time_evidence(self) -> tuple[float, float]:
        """What reading about a problem and sending home what was found take, on this database."""
        reads, sends = [], []
        used_s = [_server_s(self.db)]
        for _ in range(TRIED):
            problem = self.rng.choice(self.times).problem
            began = time.perf_counter()
            what_is_known(self.db, problem, ARCH)
            reads.append(time.perf_counter() - began)
        used_s.append(_server_s(self.db))
        for number in range(TRIED):
            taken = self.rng.choice(self.times).measurements
            mine = [replace(each, uid=f"{number:08x}{place:016x}") for place, each in enumerate(taken)]
            builds = [_build_of(each, number) for each in mine]
            began = time.perf_counter()
            self.db.merge(mine, [])
            self.db.record_builds(builds)
            sends.append(time.perf_counter() - began)
        used_s.append(_server_s(self.db))
        before, between, after = used_s
        if before is not None and between is not None and after is not None:
            self.server_s = {"read": (between - before) / TRIED, "send home": (after - between) / TRIED}
        return statistics.median(reads), statistics.median(sends)

    def _join(self, gpu: int) -> str:
        host = gpu // HOST_GPUS
        return self.leases.join(
            self.campaign.id, hostname=f"host{host}", pid=gpu, gpu=f"GPU-{gpu}", device_name="simulated", arch=ARCH
        )

    def _take(self, gpu: int, idle_s: float) -> None:
        if self.over:
            return
        lease, told_s = self._really("take", lambda: self.leases.take(self.campaign, self.workers[gpu], [ARCH]))
        if lease is None:
            left, told_s = self._really("end", lambda: self.leases.end(self.campaign.id))
            self.over = left != "running"
            if not self.over:
                self._at(told_s + idle_s, lambda: self._take(gpu, min(2 * idle_s, 10.0)))
            return
        self.attempts += 1
        begins = self._modelled("read", told_s, self.reads_s)
        seconds = self.seconds[lease.problem]
        if self.rng.random() < self.options.deaths:
            self._at(begins + self.rng.uniform(0, seconds), lambda: self._die(gpu))
        else:
            self._at(begins + seconds, lambda: self._send(gpu, lease))

    def _send(self, gpu: int, lease: Lease) -> None:
        self._at(self._modelled("send home", self.now_s, self.sends_s), lambda: self._finish(gpu, lease))

    def _finish(self, gpu: int, lease: Lease) -> None:
        outcome, told_s = self._really(
            "finish", lambda: self.leases.finish(lease, Outcome.DONE, result={"median_us": 1.0})
        )
        if outcome is Outcome.DONE:
            self.done += 1
            self.last_s = told_s
            if self.done % max(1, self.options.problems // 10) == 0:
                self.say(f"{self.done} done after {self.now_s / 3600:.2f} h")
        self._at(told_s, lambda: self._take(gpu, 0.2))

    def _die(self, gpu: int) -> None:
        """Without a word: its lease runs out. Another worker takes its GPU after a while."""
        self.workers[gpu] = ""

        def back() -> None:
            if not self.over:
                self.workers[gpu] = self._join(gpu)
                self._take(gpu, 0.2)

        self._at(self.now_s + BACK_S, back)

    def _renew(self, gpus: range) -> None:
        if self.over:
            return
        alive = {self.workers[gpu]: {"doing": "simulated"} for gpu in gpus if self.workers[gpu]}
        if alive:
            self._really("renew", lambda: self.leases.renew(self.campaign, alive))
        self._at(self.now_s + self.campaign.lease_s / 4, lambda: self._renew(gpus))

    def _summary(self, counts: dict[str, int], wall_s: float) -> Simulated:
        options, server = self.options, self.server
        work_s = sum(self.seconds.values())
        per_problem_s = server.busy_s / max(1, self.done)
        mean_s = work_s / len(self.seconds)
        waited = sorted(server.waited_s)
        kinds = sorted(server.took_s, key=lambda kind: -server.took_s[kind])
        return Simulated(
            options=options,
            hours=self.last_s / 3600,
            over_ideal=self.last_s / (work_s / options.gpus) - 1,
            done=counts["done"],
            failed=counts["failed"],
            attempts=self.attempts,
            database_busy=server.busy_s / (self.last_s * options.cores),
            by_processor=bool(self.server_s),
            waited_ms=waited[int(0.99 * len(waited))] * 1e3,
            problem_s=mean_s,
            questions_ms={kind: server.took_s[kind] / server.asked[kind] * 1e3 for kind in kinds},
            questions={kind: server.asked[kind] for kind in kinds},
            breaks_at_gpus=int(options.cores * mean_s / per_problem_s),
            first=kinds[0],
            wall_s=wall_s,
        )


def _server_s(db: TuningDB) -> float | None:
    """Processor time so far of the server's processes that serve this one; None where they are not here to be seen."""
    if db.url.startswith("sqlite"):
        return None
    asked = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND usename = current_user"
    with db.reading() as session:
        pids = list(session.scalars(sa.text(asked)))
    try:
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    except OSError:
        return None
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")


def _build_of(stored: StoredMeasurement, number: int) -> BuildRecord:
    """The build behind a measurement, as of another class of problems each time: it is new to the database."""
    taken = stored.measurement
    facts = ResourceFacts(
        registers=168, threads=128, shared_bytes=65536, spill_bytes=0, num_ctas=1, code_bytes=20480, ctas_per_sm=2
    )
    made = Artifact(arch=ARCH, fingerprint=taken.fingerprint, facts=facts, cubin=b"")
    return BuildRecord.of(
        made,
        kernel=stored.kernel,
        source_hash=stored.source_hash,
        toolchain=stored.toolchain,
        arch=ARCH,
        schedule=taken.schedule,
        problem_class=ProblemClass({"simulated": number}),
        seconds=1.0,
    )


def simulate_fleet(
    options: SimulationOptions,
    times: Sequence[RecordedTime],
    *,
    db: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Simulated:
    """Simulate a campaign to its end.

    Args:
        options: what is simulated.
        times: of problems, drawn at random.
        db: an empty database for the leases; None for SQLite in a temporary folder.
        say: told how far it is.

    Raises:
        ConfigError: the database is not empty.
    """
    with _database(db) as opened:
        if Leases(opened).campaigns() or opened.entries():
            raise ConfigError("the database of a simulation is filled with made-up problems; name one that is empty")
        return _Simulation(options, times, opened, say).run()


@contextmanager
def _database(db: str | None) -> Iterator[TuningDB]:
    if db is not None:
        with TuningDB.open(db) as opened:
            yield opened
        return
    with tempfile.TemporaryDirectory() as folder, TuningDB.open(Path(folder) / "simulated.db") as opened:
        yield opened


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate a fleet, and print what came of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    usual = SimulationOptions()
    parser.add_argument("--gpus", type=int, default=usual.gpus, help="GPUs")
    parser.add_argument("--problems", type=int, default=usual.problems, help="problems")
    parser.add_argument("--deaths", type=float, default=usual.deaths, help="share of attempts whose worker dies")
    parser.add_argument("--cores", type=int, default=usual.cores, help="cores of the database's server")
    parser.add_argument("--real", type=int, default=usual.real, help="problems that real leases serve")
    parser.add_argument("--seed", type=int, default=usual.seed, help="seed of times and deaths")
    parser.add_argument("--db", help="an empty database (default: SQLite in a temporary folder)")
    given = vars(parser.parse_args(arguments))
    db = given.pop("db")
    print(
        simulate_fleet(
            SimulationOptions(**given), recorded_times(), db=db, say=lambda line: print(line, file=sys.stderr)
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
